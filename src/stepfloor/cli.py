"""The command line: one subcommand per tool, and the only reader of the environment."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from stepfloor.errors import UserError

if TYPE_CHECKING:
    from stepfloor.weights.checkpoint import Checkpoint
    from stepfloor.weights.sources import Hub

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
convert = typer.Typer(no_args_is_help=True, help="Make checkpoints.")
app.add_typer(convert, name="convert")
bench = typer.Typer(no_args_is_help=True, help="Measure, with the floor beside every figure.")
app.add_typer(bench, name="bench")

Model = Annotated[str, typer.Argument(help="A checkpoint directory or a Hugging Face id (owner/name).")]
AnyModel = Annotated[
    str,
    typer.Argument(help="A directory, a Hugging Face id (only headers are fetched), or qwen3.8-flash-next:FORMAT."),
]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or snapshot of a Hugging Face id.")]
KvCacheDtype = Annotated[str, typer.Option(help="Of keys and values: auto, the model's type, or fp8.")]
NgramTable = Annotated[str, typer.Option(help="Where the n-gram table lies: device, or pinned memory of the host.")]
Download = Annotated[bool, typer.Option("--download", help="Fetch the id even if the cache has another owner's.")]


@app.callback()
def stepfloor() -> None:
    """Serve Qwen3.8-Flash-Next close to the memory-bandwidth floor, and say how close."""


@app.command()
def inspect(
    model: AnyModel,
    revision: Revision = None,
    download: Download = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show what a checkpoint holds: bytes by category and format, table geometry, contradictions."""
    from stepfloor.tools.inspect import show

    show(_open_headers(model, revision, download), as_json=json)


@app.command()
def floor(
    model: Annotated[
        str | None, typer.Argument(help="As for inspect; without one, the NVFP4 release's layout.")
    ] = None,
    device: Annotated[str, typer.Option(help="GB10, 5090, pro-6000, H200, ...; list shows the table.")] = "GB10",
    bandwidth: Annotated[float | None, typer.Option(help="Measured GB/s; wins over the table.")] = None,
    tensor_parallel_size: Annotated[int, typer.Option(help="Devices that share each layer.")] = 1,
    enable_expert_parallel: Annotated[
        bool, typer.Option("--enable-expert-parallel", help="Whole experts on each device.")
    ] = False,
    spec_tokens: Annotated[int | None, typer.Option(help="Drafts a step; 3 where there is a drafter.")] = None,
    sequences: Annotated[int, typer.Option(help="Sequences that decode together.")] = 1,
    context: Annotated[int, typer.Option(help="Tokens each sequence holds.")] = 0,
    acceptance_length: Annotated[float | None, typer.Option(help="Mean tokens a step delivers, if known.")] = None,
    acceptance: Annotated[
        str | None, typer.Option(help="Share of steps that accept each draft: 0.8,0.6,0.4. Finds the best k.")
    ] = None,
    what_if: Annotated[
        str, typer.Option(help="dense=fp8,head=mxfp8,draft_head=nvfp4,mtp_experts=fp8,draft_vocab=32768, ...")
    ] = "",
    distinct_experts: Annotated[
        str | None, typer.Option(help="Measured overlap, TOKENS=EXPERTS a layer: 4=32.5. Without it, uniform.")
    ] = None,
    kv_cache_dtype: Annotated[str, typer.Option(help="auto (bf16) or fp8.")] = "auto",
    link: Annotated[str | None, typer.Option(help="roce, pcie or nvlink, between devices.")] = None,
    collective_us: Annotated[float | None, typer.Option(help="Measured latency of one small exchange.")] = None,
    memory: Annotated[bool, typer.Option("--memory", help="Plan the memory as well.")] = False,
    max_num_seqs: Annotated[int | None, typer.Option(help="For --memory; as many as --sequences.")] = None,
    max_model_len: Annotated[int, typer.Option(help="For --memory: tokens of the longest sequence.")] = 32_768,
    max_num_batched_tokens: Annotated[int, typer.Option(help="For --memory: longest prompt chunk.")] = 2048,
    block_size: Annotated[int, typer.Option(help="For --memory: tokens of a page.")] = 64,
    ngram_table: Annotated[str, typer.Option(help="For --memory: device, pinned, mmap or direct.")] = "device",
    state_copies: Annotated[int, typer.Option(help="For --memory: states kept for prefix reuse.")] = 0,
    available_gib: Annotated[float | None, typer.Option(help="For --memory: what the device really has free.")] = None,
    host_gib: Annotated[float, typer.Option(help="For --memory: the host's available memory.")] = 64.0,
    shapes: Annotated[bool, typer.Option("--shapes", help="List the matrix products and the floor of each.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw the bytes into this SVG file.")] = None,
    revision: Revision = None,
) -> None:
    """Say what a decode step must read and the least time it takes, what would lessen it, and what fits."""
    from stepfloor.tools.floor.report import ask
    from stepfloor.tools.floor.report import memory as plan
    from stepfloor.tools.floor.show import show, show_devices

    if device == "list":
        show_devices(as_json=json)
        return
    checkpoint = _open_headers(model or "qwen3.8-flash-next:nvfp4", revision)
    question = ask(
        checkpoint.config,
        device,
        bandwidth=bandwidth,
        tensor_parallel_size=tensor_parallel_size,
        expert_parallel=enable_expert_parallel,
        spec_tokens=spec_tokens,
        sequences=sequences,
        context=context,
        acceptance=acceptance,
        acceptance_length=acceptance_length,
        what_if=what_if,
        distinct_experts=distinct_experts,
        kv_cache_dtype=kv_cache_dtype,
        link=link,
        collective_us=collective_us,
    )
    planned = None
    if memory:
        planned = plan(
            checkpoint,
            question,
            max_num_seqs=max_num_seqs or sequences,
            max_model_len=max_model_len,
            max_num_batched_tokens=max_num_batched_tokens,
            block_size=block_size,
            table=ngram_table,
            available_gib=available_gib,
            host_gib=host_gib,
            state_copies=state_copies,
        )
    show(checkpoint, question, planned, as_json=json, plot=plot, shapes=shapes)


@app.command()
def generate(
    model: Annotated[
        str | None, typer.Argument(help="As for inspect; without one, the small model that ships.")
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="Text to continue; without it, standard input.")] = None,
    token_ids: Annotated[str | None, typer.Option(help="The prompt as ids: 1,2,3.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Send the prompt as a user's turn.")] = False,
    thinking: Annotated[bool, typer.Option("--thinking", help="Let a chat turn begin with reasoning.")] = False,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate at most.")] = 128,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy; without it, the checkpoint's own.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Without it, the checkpoint's own.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Without it, the checkpoint's own.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the noise; one seed gives one text.")] = None,
    spec_tokens: Annotated[int | None, typer.Option(help="Drafts a step, 0 to 7; 3 where there is a drafter.")] = None,
    acceptance: Annotated[str, typer.Option(help="standard, or coupled: text the same for every --spec-tokens.")] = (
        "standard"
    ),
    max_model_len: Annotated[
        int | None, typer.Option(help="Prompt and output together, in tokens; the model's context, at most 4096.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, or a CUDA device.")] = "cpu",
    kv_cache_dtype: KvCacheDtype = "auto",
    ngram_table: NgramTable = "device",
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past the end of a turn.")] = False,
    json: Annotated[bool, typer.Option("--json", help="End with one JSON object in place of the line.")] = False,
    hf_overrides: Annotated[str | None, typer.Option(help="JSON that replaces keys of the text config.")] = None,
    revision: Revision = None,
    download: Download = False,
) -> None:
    """Continue one prompt, and say how far the steps were from the memory-bandwidth floor."""
    ids = None
    if token_ids is not None:
        from stepfloor.tools.generate import parse_token_ids

        ids = parse_token_ids(token_ids)
    elif prompt is None:
        prompt = "" if sys.stdin.isatty() else sys.stdin.read()
        if not prompt:
            raise UserError("wanted a prompt; pass --prompt TEXT, --token-ids 1,2,3 or text on standard input")
    checkpoint = _open(_shipped() if model is None else model, revision, download, _overrides(hf_overrides))
    from stepfloor.config import EngineConfig
    from stepfloor.tools.generate import Prompt, sampling_from
    from stepfloor.tools.generate import generate as run

    if acceptance not in ("standard", "coupled"):
        raise UserError(f"--acceptance must be standard or coupled; got {acceptance!r}")
    config = EngineConfig(
        spec_tokens=(3 if checkpoint.has_drafter else 0) if spec_tokens is None else spec_tokens,
        acceptance="coupled" if acceptance == "coupled" else "standard",
        max_model_len=min(4096, checkpoint.config.max_position_embeddings) if max_model_len is None else max_model_len,
        device=device,
        kv_cache_dtype=cast(Any, kv_cache_dtype),  # check refuses what is no choice
        ngram_table=cast(Any, ngram_table),
    )
    run(
        checkpoint,
        config,
        Prompt(prompt, ids, chat, thinking),
        sampling_from(checkpoint, temperature, top_p, top_k, seed),
        max_tokens,
        ignore_eos,
        as_json=json,
    )


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def serve(
    context: typer.Context,
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[MODEL]", help="As for inspect; without one, the small model that ships."),
    ] = None,
    model_flag: Annotated[str | None, typer.Option("--model", help="The same as the argument.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes one that is free.")] = 8000,
    uds: Annotated[str | None, typer.Option(help="A Unix socket to listen on, in place of host and port.")] = None,
    api_key: Annotated[
        list[str] | None, typer.Option(help="Key that requests must bring; may be given more than once.")
    ] = None,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="Name the model answers to; may be given more than once.")
    ] = None,
    ssl_keyfile: Annotated[str | None, typer.Option(help="Key of the certificate.")] = None,
    ssl_certfile: Annotated[str | None, typer.Option(help="Certificate, which turns TLS on.")] = None,
    allowed_origins: Annotated[str, typer.Option(help="JSON list of origins for CORS.")] = '["*"]',
    allowed_methods: Annotated[str, typer.Option(help="JSON list of methods for CORS.")] = '["*"]',
    allowed_headers: Annotated[str, typer.Option(help="JSON list of headers for CORS.")] = '["*"]',
    allow_credentials: Annotated[bool, typer.Option("--allow-credentials", help="CORS with credentials.")] = False,
    root_path: Annotated[str, typer.Option(help="Path prefix that a proxy strips.")] = "",
    max_model_len: Annotated[
        int | None, typer.Option(help="Prompt and output together, in tokens; without it, the model's context.")
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(help="Sequences that decode together.")] = 16,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Longest prompt chunk; one runs before a step.")] = 512,
    long_prefill_token_threshold: Annotated[int, typer.Option(help="Longest chunk of a longer prompt; 0: none.")] = 0,
    max_num_queued_reqs: Annotated[
        int | None, typer.Option(help="Requests that may wait; more are answered with 503. Without it, any number.")
    ] = None,
    block_size: Annotated[int, typer.Option(help="Tokens per page of the key/value cache.")] = 64,
    kv_cache_dtype: KvCacheDtype = "auto",
    ngram_table: NgramTable = "device",
    enforce_eager: Annotated[
        bool, typer.Option("--enforce-eager", help="Decode kernel by kernel, not as captured graphs.")
    ] = False,
    spec_tokens: Annotated[int | None, typer.Option(help="Drafts a step, 0 to 7; 3 where there is a drafter.")] = None,
    speculative_config: Annotated[
        str | None,
        typer.Option(
            help='JSON: {"num_speculative_tokens": 3, "num_speculative_tokens_per_batch_size": [[1,4,3], [5,16,1]]}.'
        ),
    ] = None,
    acceptance: Annotated[str, typer.Option(help="standard, or coupled: text the same for every --spec-tokens.")] = (
        "standard"
    ),
    device: Annotated[str, typer.Option(help="cpu, or a CUDA device.")] = "cpu",
    chat_template: Annotated[Path | None, typer.Option(help="A template in place of the checkpoint's.")] = None,
    default_chat_template_kwargs: Annotated[
        str | None, typer.Option(help='JSON: template variables, {"enable_thinking": false}.')
    ] = None,
    generation_config: Annotated[str, typer.Option(help="auto: the checkpoint's sampling values; vllm: none.")] = (
        "auto"
    ),
    override_generation_config: Annotated[str | None, typer.Option(help="JSON: sampling values to use.")] = None,
    max_logprobs: Annotated[int, typer.Option(min=0, help="Most log-probabilities a token may be asked for.")] = 20,
    request_deadline: Annotated[
        float | None, typer.Option(help="Seconds a request may take if it brings no deadline_s.")
    ] = None,
    stall_timeout: Annotated[float, typer.Option(help="Seconds without a step after which /health is 503.")] = 60.0,
    shutdown_timeout: Annotated[int, typer.Option(help="Seconds that running requests get after SIGTERM.")] = 30,
    profiler_config: Annotated[str | None, typer.Option(help='JSON: {"torch_profiler_dir": DIR}.')] = None,
    enable_force_include_usage: Annotated[
        bool, typer.Option("--enable-force-include-usage", help="Every stream ends with its usage.")
    ] = False,
    enable_log_requests: Annotated[
        bool, typer.Option("--enable-log-requests", help="Log a line for every request.")
    ] = False,
    disable_uvicorn_access_log: Annotated[
        bool, typer.Option("--disable-uvicorn-access-log", help="No line for every connection.")
    ] = False,
    uvicorn_log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
    hf_overrides: Annotated[str | None, typer.Option(help="JSON that replaces keys of the text config.")] = None,
    revision: Revision = None,
    download: Download = False,
) -> None:
    """Serve an OpenAI-compatible API; flags have vLLM's names where the meaning is the same."""
    import logging

    from stepfloor.server.flags import model_among

    known = [option for parameter in context.command.params for option in parameter.opts]
    model = model_among([*(words or ()), *context.args], known)
    if model is not None and model_flag is not None and model != model_flag:
        raise UserError(f"the model is given twice, as {model!r} and as --model {model_flag!r}; pass one")
    if uvicorn_log_level not in ("debug", "info", "warning", "error"):
        raise UserError(f"--uvicorn-log-level must be debug, info, warning or error; got {uvicorn_log_level!r}")
    if (ssl_keyfile is None) != (ssl_certfile is None):
        raise UserError("--ssl-keyfile and --ssl-certfile belong together; one of them is missing")
    if acceptance not in ("standard", "coupled"):
        raise UserError(f"--acceptance must be standard or coupled; got {acceptance!r}")
    name = model or model_flag or _shipped()
    overrides = _overrides(hf_overrides)
    checkpoint = _open(name, revision, download, overrides)

    from stepfloor.config import EngineConfig
    from stepfloor.server import options as flags
    from stepfloor.server.app import AppOptions
    from stepfloor.server.serve import ListenOptions, ServeOptions
    from stepfloor.server.serve import serve as run
    from stepfloor.server.service import ServiceConfig
    from stepfloor.server.wire import EngineSpec

    logging.basicConfig(level=uvicorn_log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
    most_drafts, fewer_drafts = flags.speculation(spec_tokens, speculative_config, checkpoint.has_drafter)
    config = EngineConfig(
        spec_tokens=most_drafts,
        spec_tokens_per_batch_size=fewer_drafts,
        acceptance="coupled" if acceptance == "coupled" else "standard",
        max_num_seqs=max_num_seqs,
        max_model_len=checkpoint.config.max_position_embeddings if max_model_len is None else max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        block_size=block_size,
        device=device,
        kv_cache_dtype=cast(Any, kv_cache_dtype),  # check refuses what is no choice
        ngram_table=cast(Any, ngram_table),
        enforce_eager=enforce_eager,
        long_prefill_token_threshold=long_prefill_token_threshold,
        max_num_queued_reqs=max_num_queued_reqs,
    )
    config.check(checkpoint.config)
    keys = [*(api_key or ()), *([key] if (key := os.environ.get("VLLM_API_KEY")) and not api_key else [])]
    own_name = "stepfloor-small" if name == _shipped() else name
    run(
        ServeOptions(
            spec=EngineSpec(checkpoint.directory, config, overrides, logging.getLogger().level),
            service=ServiceConfig(
                names=tuple(served_model_name or [own_name]),
                max_model_len=config.max_model_len,
                vocab_size=checkpoint.config.vocab_size,
                stop_token_ids=checkpoint.stop_token_ids,
                sampling=flags.sampling_defaults(checkpoint, generation_config, override_generation_config),
                max_logprobs=max_logprobs,
                template_kwargs=flags.json_object("--default-chat-template-kwargs", default_chat_template_kwargs),
                deadline_s=request_deadline,
                force_usage=enable_force_include_usage,
            ),
            app=AppOptions(
                api_keys=tuple(keys),
                allowed_origins=flags.json_strings("--allowed-origins", allowed_origins),
                allowed_methods=flags.json_strings("--allowed-methods", allowed_methods),
                allowed_headers=flags.json_strings("--allowed-headers", allowed_headers),
                allow_credentials=allow_credentials,
                root_path=root_path,
                stall_s=stall_timeout,
                profile_dir=flags.profile_directory(profiler_config),
                log_requests=enable_log_requests,
            ),
            listen=ListenOptions(
                host=host,
                port=port,
                uds=uds,
                ssl_keyfile=ssl_keyfile,
                ssl_certfile=ssl_certfile,
                shutdown_s=shutdown_timeout,
                log_level=uvicorn_log_level,
                access_log=not disable_uvicorn_access_log,
            ),
            chat_template=chat_template,
            formats=flags.formats_of(checkpoint),
        )
    )


@convert.command("random")
def convert_random(
    dst: Annotated[Path, typer.Argument(help="An empty or new directory.")],
    like: Annotated[str, typer.Option(help="full, small, or the path of a config.json.")] = "small",
    release: Annotated[
        str, typer.Option("--format", help="bf16, fp8, nvfp4, nvidia-nvfp4, mxfp8-nvfp4, fp8dense or fp8dense-mtp.")
    ] = "bf16",
    table: Annotated[str | None, typer.Option(help="bf16, fp8 or nvfp4; without it the format's own.")] = None,
    layers: Annotated[int | None, typer.Option(help="Keep the first layers only.")] = None,
    experts: Annotated[int | None, typer.Option(help="Keep this many experts a layer.")] = None,
    table_rows: Annotated[int | None, typer.Option(help="Rows of the n-gram table, about.")] = None,
    seed: Annotated[int, typer.Option(help="One seed gives one model in every format.")] = 0,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32, of what is not quantized.")] = "bfloat16",
    jobs: Annotated[int, typer.Option(min=1, help="Tensors drawn at once.")] = 1,
) -> None:
    """Write random weights in the exact layout of a release."""
    from stepfloor.tools.convert import plan_random, write_with_progress

    plan = plan_random(like, release, table=table, layers=layers, experts=experts, table_rows=table_rows, dtype=dtype)
    write_with_progress(plan, dst, seed=seed, jobs=jobs)


@bench.command("accuracy")
def bench_accuracy(
    url: Annotated[str, typer.Argument(help="A server that speaks OpenAI's API.")],
    profile: Annotated[str, typer.Option(help="stdlib (ships, for the small model), gsm8k or mmlu-pro.")] = "stdlib",
    file: Annotated[
        Path | None, typer.Option(help="The test file of gsm8k (JSON lines) or mmlu-pro (JSON lines or Parquet).")
    ] = None,
    items: Annotated[
        int | None, typer.Option(help="So many questions, the same in every run; all, or 64 at most with --throughput.")
    ] = None,
    concurrency: Annotated[int | None, typer.Option(help="Requests at once; 4, or 1 with --throughput.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens of an answer; 256 with --throughput.")] = None,
    thinking: Annotated[
        bool | None, typer.Option("--thinking/--no-thinking", help="enable_thinking for the chat template.")
    ] = None,
    throughput: Annotated[
        bool, typer.Option("--throughput", help="Measure the speed on the items, all answers of one length.")
    ] = False,
    model: Annotated[str | None, typer.Option(help="Name of the model; the first that the server lists.")] = None,
    api_key: Annotated[str | None, typer.Option(help="Key that the server wants.")] = None,
    output: Annotated[Path | None, typer.Option(help="Write the result here, every item in it.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with charts here.")] = None,
) -> None:
    """Ask a pinned set of questions greedily: share of right answers with its interval, or the speed on them."""
    from stepfloor.tools.bench.accuracy import Plan, run_with_bar, summary
    from stepfloor.tools.bench.page import write_page
    from stepfloor.tools.bench.questions import load_profile
    from stepfloor.tools.bench.show import Bar, show
    from stepfloor.tools.bench.speed import TOKENS, run_speed

    headers = {"authorization": f"Bearer {api_key}"} if api_key else None
    if throughput:
        with Bar() as bar:
            result = run_speed(
                url,
                load_profile(profile, file),
                items,
                tokens=max_tokens or TOKENS,
                concurrency=concurrency or 1,
                model=model,
                headers=headers,
                progress=bar,
            )
        show(result)
    else:
        plan = Plan(concurrency or 4, max_tokens, thinking)
        result = run_with_bar(url, load_profile(profile, file, items), plan, model, headers)
        print("\n".join(summary(result)))
    if output is not None:
        result.write(output)
    if html is not None:
        write_page([result], html)
    if not result.valid:
        raise typer.Exit(1)


@bench.command("import")
def bench_import(
    path: Annotated[
        Path, typer.Argument(help="A file of vllm bench serve, AIPerf (or its directory) or llm-inference-bench.")
    ],
    output: Annotated[Path | None, typer.Option(help="Write stepfloor's own file here.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with charts here.")] = None,
) -> None:
    """Read another tool's result file; what it defines otherwise is named apart, what has no place is listed."""
    from stepfloor.tools.bench.exchange.files import import_file, summary
    from stepfloor.tools.bench.page import write_page
    from stepfloor.tools.bench.result import write_results

    results = import_file(path)
    for result in results:
        print("\n".join(summary(result)))
    if output is not None:
        write_results(output, results)
    if html is not None:
        write_page(results, html)


@bench.command("export")
def bench_export(
    result: Annotated[Path, typer.Argument(help="A file that a bench of stepfloor wrote.")],
    tool: Annotated[str, typer.Argument(help="vllm, aiperf or llm-inference-bench.")],
    output: Annotated[Path, typer.Argument(help="File to write; for aiperf a directory.")],
) -> None:
    """Write a result as another tool's readers take it."""
    from stepfloor.tools.bench.exchange.files import export_results
    from stepfloor.tools.bench.result import read_results

    for written in export_results(read_results(result), tool, output):
        print(written)


@bench.command("page")
def bench_page(
    results: Annotated[list[Path], typer.Argument(help="Files that a bench of stepfloor wrote.")],
    output: Annotated[Path, typer.Option(help="The page to write.")],
) -> None:
    """Draw a page with charts of stored results."""
    from stepfloor.tools.bench.page import write_page
    from stepfloor.tools.bench.result import read_results

    write_page([result for path in results for result in read_results(path)], output)


@bench.command("step")
def bench_step(
    model: Annotated[
        str | None, typer.Argument(help="A checkpoint to load; without one, random weights at full size.")
    ] = None,
    mix: Annotated[str, typer.Option("--format", help="Formats of random weights: a, b, b', c, c' or fp8.")] = "a",
    config: Annotated[Path | None, typer.Option(help="config.json of the random model; without it, full size.")] = None,
    sequences: Annotated[str, typer.Option(help="Decoding together; a list is 1,4,16.")] = "1,4,16",
    spec_tokens: Annotated[str, typer.Option(help="Drafts a step; a list is 0,3.")] = "0,3",
    context: Annotated[str, typer.Option(help="Tokens a sequence holds in the middle of the run; a list.")] = "700",
    acceptance_length: Annotated[
        int, typer.Option(help="Tokens each sequence is made to take a step; 0 for what the target accepts.")
    ] = 3,
    steps: Annotated[int, typer.Option(min=4, help="Timed steps of a cell.")] = 200,
    prefill: Annotated[int, typer.Option(help="Time the prefill of a prompt of so many tokens too; 0 does not.")] = 0,
    kv_cache_dtype: KvCacheDtype = "auto",
    ngram_table: NgramTable = "device",
    device: Annotated[str, typer.Option(help="cuda, cuda:1, or cpu with a small model.")] = "cuda",
    count_experts: Annotated[bool, typer.Option(help="Count distinct experts in a second run of each cell.")] = True,
    profile: Annotated[bool, typer.Option(help="Profile a few steps of each cell.")] = True,
    linears: Annotated[
        bool, typer.Option("--linears", help="Time each matrix product beside torch's, in every format, not steps.")
    ] = False,
    commit: Annotated[str, typer.Option(help="What was checked out, for the record.")] = "",
    output: Annotated[Path | None, typer.Option(help="Write the JSON line here too, as far as it is.")] = None,
) -> None:
    """Time decode steps offline, beside the bytes they must read."""
    from stepfloor.config import ModelConfig
    from stepfloor.engine import open_device
    from stepfloor.tools.bench.linears import run_and_report_linears
    from stepfloor.tools.bench.step import MIXES, Plan, random_checkpoint, run_and_report

    if mix not in MIXES:
        raise UserError(f"--format must be one of {', '.join(MIXES)}; got {mix!r}")
    if model is None:
        source = _package_file("full_config.json") if config is None else config
        checkpoint = random_checkpoint(ModelConfig.read(source), MIXES[mix])
    else:
        checkpoint = _open(model)
    if linears:
        open_device(device)
        run_and_report_linears(checkpoint.config, device, commit, output)
        return
    plan = Plan(
        mix if model is None else Path(model).name,
        _integers(sequences, "--sequences", 1),
        _integers(spec_tokens, "--spec-tokens", 0),
        _integers(context, "--context", 1),
        acceptance_length or None,
        steps,
        device,
        prefill,
        kv_cache_dtype,
        ngram_table,
        count_experts,
        profile,
    )
    run_and_report(checkpoint, plan, model is None, commit, output)


Url = Annotated[str, typer.Argument(help="Any OpenAI-compatible server: http://127.0.0.1:8000.")]
Route = Annotated[str, typer.Option(help="completions or chat.")]
Dataset = Annotated[str, typer.Option(help="random, unique (no n-gram twice), code, sharegpt or jsonl.")]
PrefixShare = Annotated[float, typer.Option(help="Share of each prompt that is the same in all, 0 to 1.")]
Warmups = Annotated[
    int | None, typer.Option(help="Requests before the window, with other prompts; one for each at once, at least 2.")
]
Seed = Annotated[int, typer.Option(help="Of prompts, arrivals and sampling; the same one sends the same bytes.")]
Sampling = Annotated[
    str, typer.Option(help="model (temperature 1, top-p 0.95, top-k 20), greedy, server (nothing sent) or JSON.")
]
ExtraBody = Annotated[str | None, typer.Option(help="JSON: more fields of every request.")]
Served = Annotated[str | None, typer.Option("--model", help="Of those that the server lists; the first without it.")]
TokenizerFile = Annotated[str | None, typer.Option(help="tokenizer.json for exact lengths; the server's without it.")]
VocabSize = Annotated[int | None, typer.Option(help="Random ids below this, where there is no tokenizer.")]
Timeout = Annotated[float, typer.Option(help="Seconds that a request may take.")]
ApiKey = Annotated[str | None, typer.Option(help="Sent as Authorization: Bearer KEY.")]
Header = Annotated[list[str] | None, typer.Option(help="'name: value' of every request; may be given more than once.")]
ServerConfig = Annotated[
    str | None, typer.Option(help="JSON, or a file of it: how the server was started. Comparisons want it.")
]
Csv = Annotated[Path | None, typer.Option(help="Write a row for each statistic here.")]
Html = Annotated[Path | None, typer.Option(help="Write a page with charts here.")]


@bench.command("serve")
def bench_serve(
    url: Url,
    route: Route = "completions",
    dataset_name: Dataset = "random",
    dataset_path: Annotated[str | None, typer.Option(help="File of sharegpt or jsonl.")] = None,
    input_len: Annotated[str, typer.Option(help="Tokens of a prompt: 512, uniform:128:1k, lognormal:512:0.5:4k.")] = (
        "512"
    ),
    output_len: Annotated[
        str | None, typer.Option(help="Tokens of an answer, likewise; 128, or what the file says.")
    ] = None,
    prefix_share: PrefixShare = 0.0,
    num_prompts: Annotated[
        int | None, typer.Option(help="Measured requests; 8 for each at once, at least 16, or the whole trace.")
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(help="Requests at once; with --arrivals, the most that may be at once.")
    ] = None,
    duration: Annotated[float | None, typer.Option(help="Seconds of a closed loop, in place of --num-prompts.")] = None,
    arrivals: Annotated[
        str, typer.Option(help="closed: the next request when one ends; poisson, constant or trace: when it is due.")
    ] = "closed",
    request_rate: Annotated[float | None, typer.Option(help="Requests a second of poisson and constant.")] = None,
    burstiness: Annotated[float, typer.Option(help="Below 1: poisson arrivals come in bursts.")] = 1.0,
    trace_file: Annotated[str | None, typer.Option(help="Arrivals: seconds a line, or Mooncake's JSON lines.")] = None,
    num_warmups: Warmups = None,
    seed: Seed = 0,
    sampling: Sampling = "model",
    ignore_eos: Annotated[bool, typer.Option(help="Make answers as long as asked.")] = True,
    plain: Annotated[bool, typer.Option("--plain", help="Send only fields that OpenAI knows.")] = False,
    extra_body: ExtraBody = None,
    goodput: Annotated[str, typer.Option(help="Limits in ms: 'ttft:500 tpot:50 e2el:9000'.")] = "",
    model: Served = None,
    tokenizer: TokenizerFile = None,
    vocab_size: VocabSize = None,
    timeout: Timeout = 600.0,
    api_key: ApiKey = None,
    header: Header = None,
    server_config: ServerConfig = None,
    output: Annotated[Path | None, typer.Option(help="Write the result here, as JSON.")] = None,
    csv: Csv = None,
    html: Html = None,
) -> None:
    """Measure any OpenAI-compatible server: latencies, rates, steps, acceptance. Exit code 1 for an invalid result."""
    from stepfloor.tools.bench.command import Where, json_object, serve
    from stepfloor.tools.bench.load import Load

    if output_len is None and dataset_name not in ("sharegpt", "jsonl"):
        output_len = "128"
    load = Load(
        route=route,
        dataset_name=dataset_name,
        dataset_path=dataset_path,
        input_len=input_len,
        output_len=output_len,
        prefix_share=prefix_share,
        num_prompts=num_prompts,
        concurrency=concurrency,
        duration_s=duration,
        arrivals=arrivals,
        request_rate=request_rate,
        burstiness=burstiness,
        trace_file=trace_file,
        num_warmups=num_warmups,
        seed=seed,
        sampling=sampling,
        ignore_eos=ignore_eos,
        plain=plain,
        extra_body=json_object(extra_body, "--extra-body"),
        goodput=goodput,
        model=model,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        timeout_s=timeout,
    )
    if not serve(Where(url, api_key, tuple(header or ()), server_config, output, csv, html), load):
        raise typer.Exit(1)


@bench.command("matrix")
def bench_matrix(
    url: Url,
    concurrency: Annotated[str, typer.Option(help="Requests at once; a list.")] = "1,4,8,16",
    context: Annotated[str, typer.Option(help="Tokens of the prompts; a list like 0,16k,64k.")] = "0",
    seconds: Annotated[float, typer.Option(help="Of decode in each cell.")] = 30.0,
    measure: Annotated[
        str, typer.Option(help="decode: when all have their first token; whole: as bench serve does.")
    ] = "decode",
    output_len: Annotated[str, typer.Option(help="Tokens an answer may grow to in a cell; a cell ends with it.")] = (
        "8k"
    ),
    again: Annotated[bool, typer.Option("--again", help="Measure invalid cells of the output once more.")] = False,
    route: Route = "completions",
    dataset_name: Dataset = "random",
    prefix_share: PrefixShare = 0.0,
    num_warmups: Warmups = None,
    seed: Seed = 0,
    sampling: Sampling = "model",
    extra_body: ExtraBody = None,
    model: Served = None,
    tokenizer: TokenizerFile = None,
    vocab_size: VocabSize = None,
    timeout: Timeout = 600.0,
    api_key: ApiKey = None,
    header: Header = None,
    server_config: ServerConfig = None,
    output: Annotated[
        Path | None, typer.Option(help="Write a result a line here, and go on with what is here.")
    ] = None,
    csv: Csv = None,
    html: Html = None,
) -> None:
    """Measure decode at several concurrencies and contexts. Exit code 1 if a cell is missing or invalid."""
    from stepfloor.tools.bench.command import Where, counts, json_object, measure_matrix
    from stepfloor.tools.bench.load import Load
    from stepfloor.tools.bench.matrix import Grid

    load = Load(
        route=route,
        dataset_name=dataset_name,
        output_len=output_len,
        prefix_share=prefix_share,
        num_warmups=num_warmups,
        seed=seed,
        sampling=sampling,
        extra_body=json_object(extra_body, "--extra-body"),
        model=model,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        timeout_s=timeout,
    )
    grid = Grid(counts(concurrency, "--concurrency", 1), counts(context, "--context", 0), seconds, measure, load)
    if not measure_matrix(Where(url, api_key, tuple(header or ()), server_config, output, csv, html), grid, again):
        raise typer.Exit(1)


@bench.command("ab")
def bench_ab(
    plan: Annotated[Path, typer.Argument(help="A plan in TOML: arms, the variable, metrics, rounds, load, gates.")],
    output: Annotated[
        Path | None, typer.Option(help="The report; PLAN.report.json without it. Goes on if begun.")
    ] = None,
    null: Annotated[bool, typer.Option("--null", help="The first arm against itself: the noise floor.")] = False,
    null_report: Annotated[Path | None, typer.Option(help="Take noise and floor from a report of --null.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with charts here too.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the outcome as one JSON object.")] = False,
) -> None:
    """Compare two arms or more in interleaved rounds: effect, no effect, or unresolved."""
    from stepfloor.tools.bench.ab_command import run_ab

    run_ab(plan, dict(os.environ), output=output, null=null, null_report=null_report, html=html, as_json=json)


@bench.command("compare")
def bench_compare(
    base: Annotated[
        str, typer.Argument(metavar="A", help="Results of one arm: a file, files with commas, a directory.")
    ],
    arm: Annotated[str, typer.Argument(metavar="B", help="Results of the other, in the order of their pairs.")],
    metric: Annotated[
        list[str] | None, typer.Option(help="NAME, or NAME=MARGIN as in ttft_ms.p99=5%; may be given more than once.")
    ] = None,
    variable: Annotated[
        list[str] | None, typer.Option(help="What the servers may differ in; may be given more than once.")
    ] = None,
    alpha: Annotated[float, typer.Option(min=0.0001, max=0.4, help="Error rate of all metrics together.")] = 0.05,
    html: Annotated[Path | None, typer.Option(help="Write a page with charts here too.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare stored results in pairs; items of accuracy runs one by one."""
    from stepfloor.tools.bench.ab_command import compare_stored

    compare_stored(base, arm, metric or (), variable or (), alpha, html=html, as_json=json)


def _integers(text: str, option: str, least: int) -> tuple[int, ...]:
    """The integers of a comma-separated list."""
    try:
        values = tuple(int(part) for part in text.split(","))
    except ValueError:
        values = ()
    if not values or min(values) < least:
        raise UserError(f"{option} wants integers of at least {least} with commas between, like 1,4,16; got {text!r}")
    return values


Source = Annotated[str, typer.Argument(help="A checkpoint directory, or an id that is in the Hugging Face cache.")]
Result = Annotated[
    str, typer.Argument(help="owner/name for the Hugging Face cache, or a path that begins with ./ or /.")
]
Leave = Annotated[str, typer.Option(help="Groups that stay as they are: gdn,qsa,hc,shared,head,experts,input.")]
StockVllm = Annotated[
    bool,
    typer.Option("--stock-vllm", help="Leave hc, head and qsa, which stock vLLM 0.33 reads as bf16 only."),
]
Jobs = Annotated[int | None, typer.Option(min=1, help="Threads; all cores without it, at most 16.")]


@convert.command("fp8-dense")
def convert_fp8_dense(
    src: Source,
    dst: Result,
    leave: Leave = "",
    stock_vllm: StockVllm = False,
    jobs: Jobs = None,
    revision: Revision = None,
) -> None:
    """Dense matrices and the head in FP8, one scale an output row: a step of three drafts reads 6.1 GB less."""
    _convert("fp8-dense", src, dst, leave, stock_vllm, jobs, revision)


@convert.command("mtp-fp8")
def convert_mtp_fp8(
    src: Source,
    dst: Result,
    leave: Leave = "",
    stock_vllm: StockVllm = False,
    jobs: Jobs = None,
    revision: Revision = None,
) -> None:
    """The drafter in FP8: experts in blocks of 128, dense matrices one scale a row. The text stays what it is."""
    _convert("mtp-fp8", src, dst, leave, stock_vllm, jobs, revision)


@convert.command("head-mxfp8")
def convert_head_mxfp8(src: Source, dst: Result, jobs: Jobs = None, revision: Revision = None) -> None:
    """The head in MXFP8, which target and drafter read once a pass."""
    _convert("head-mxfp8", src, dst, "", False, jobs, revision)


@convert.command("draft-head-nvfp4")
def convert_draft_head_nvfp4(src: Source, dst: Result, jobs: Jobs = None, revision: Revision = None) -> None:
    """A head in NVFP4 for the drafter alone (mtp.lm_head); the text stays what it is."""
    _convert("draft-head-nvfp4", src, dst, "", False, jobs, revision)


@convert.command("ple-nvfp4")
def convert_ple_nvfp4(src: Source, dst: Result, jobs: Jobs = None, revision: Revision = None) -> None:
    """The n-gram table in NVFP4 rows of 90 bytes: 26.8 GiB in place of 47.7."""
    _convert("ple-nvfp4", src, dst, "", False, jobs, revision)


@convert.command("verify")
def convert_verify(
    dst: Annotated[str, typer.Argument(help="A converted checkpoint: a directory, or an id in the cache.")],
    source: Annotated[
        str | None, typer.Option(help="What it was made from; without it, looked for in the Hugging Face cache.")
    ] = None,
    jobs: Jobs = None,
    revision: Revision = None,
) -> None:
    """Compare a converted checkpoint with its source byte by byte, and measure its errors; 1 on any finding."""
    from stepfloor.tools.requantize.verify import source_in_cache, verify_with_progress
    from stepfloor.weights.checkpoint import open_checkpoint

    directory = _local(dst, revision)
    origin = _local(source, None) if source is not None else source_in_cache(directory, _hub().cache)
    if not verify_with_progress(directory, None if origin is None else open_checkpoint(origin), jobs):
        raise typer.Exit(1)


def _convert(
    kind: str, src: str, dst: str, leave: str, stock_vllm: bool, jobs: int | None, revision: str | None
) -> None:
    """Plan a conversion of what is on this disk, carry it out, and say what a reader may stumble over."""
    from stepfloor.weights.checkpoint import open_checkpoint
    from stepfloor.weights.conversions import STOCK_VLLM_LEAVES, plan_conversion

    groups = [group for group in leave.split(",") if group]
    if stock_vllm:
        groups += [group for group in STOCK_VLLM_LEAVES if group not in groups]
    plan = plan_conversion(open_checkpoint(_local(src, revision)), kind, groups)
    # only now torch: what the census of 10**5 tensors took is free again
    from stepfloor.tools.requantize.convert import convert_with_progress, destination

    convert_with_progress(plan, destination(dst, _hub().cache, plan), jobs)
    for note in plan.notes:
        print(f"note: {note}")


def _local(model: str, revision: str | None) -> Path:
    """The directory of a model that is on this disk. Raises UserError for one that would have to be fetched."""
    from stepfloor.weights.sources import find_local

    hub = _hub()
    directory = find_local(model, hub, revision=revision)
    if directory is None:
        raise UserError(f"{model} is not whole in {hub.cache}; fetch it first (`hf download {model}`), or pass a path")
    return directory


def _shipped() -> str:
    """The small model inside the package."""
    return str(_package_file(""))


def _package_file(name: str) -> Path:
    """A file that ships beside the small model."""
    return Path(__file__).parent / "shipped" / name


def _overrides(text: str | None) -> dict[str, Any]:
    """The keys of --hf-overrides, written for the text config or, as vLLM takes them, inside text_config."""
    import json

    try:
        raw: Any = json.loads(text or "{}")
    except json.JSONDecodeError as error:
        raise UserError(f"--hf-overrides wants a JSON object; got {text!r} ({error})") from None
    if not isinstance(raw, dict):
        raise UserError(f"--hf-overrides wants a JSON object; got {text!r}")
    inner = raw.get("text_config", raw)
    if not isinstance(inner, dict):
        raise UserError(f"--hf-overrides: text_config must be an object; got {inner!r}")
    return inner


def _open_headers(model: str, revision: str | None, download: bool = False) -> "Checkpoint":
    """What a model consists of, by headers alone: a layout, what is here already, or ranges of the hub's files."""
    from stepfloor.weights.releases import is_layout, open_layout
    from stepfloor.weights.sources import find_local

    if is_layout(model):
        return open_layout(model)
    hub = _hub()
    if download or hub.offline or find_local(model, hub, revision=revision) is not None:
        return _open(model, revision, download)
    from stepfloor.weights.remote import open_remote

    return open_remote(model, hub, revision=revision)


def _hub() -> "Hub":
    """The hub as the Hugging Face variables of the environment describe it."""
    from stepfloor.weights.sources import Hub, hub_cache

    env = os.environ
    return Hub(
        cache=hub_cache(env.get("HF_HOME"), env.get("HF_HUB_CACHE"), env.get("XDG_CACHE_HOME")),
        offline=env.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"),
        token=env.get("HF_TOKEN"),
        endpoint=env.get("HF_ENDPOINT"),
    )


def _open(
    model: str, revision: str | None = None, download: bool = False, overrides: dict[str, Any] | None = None
) -> "Checkpoint":
    """Resolve a model with the Hugging Face variables of the environment, and open it."""
    from stepfloor.weights.checkpoint import open_checkpoint
    from stepfloor.weights.sources import resolve_source

    directory = resolve_source(model, _hub(), revision=revision, download=download)
    return open_checkpoint(directory, hf_overrides=overrides)


def main() -> None:
    """Entry point: a UserError is one line on standard error and its exit code."""
    try:
        app()
    except UserError as error:
        print(f"stepfloor: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
