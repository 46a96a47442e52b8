"""generate and serve: from the words of the command line to an engine that runs."""

import sys
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from stepfloor.cli.environment import open_model, server_key, shipped
from stepfloor.cli.options import (
    MOST_SEQUENCES,
    Acceptance,
    Device,
    Download,
    HfOverrides,
    KvCacheDtype,
    NgramTable,
    NumGpuBlocks,
    Revision,
    SpecTokens,
    bounded,
    filled,
    overrides_of,
    readable_text,
)
from stepfloor.errors import UserError


def generate(
    model: Annotated[
        str | None, typer.Argument(callback=filled, help="As for inspect; without one, the small model that ships.")
    ] = None,
    prompt: Annotated[
        str | None, typer.Option(callback=readable_text, help="Text to continue; without it, standard input.")
    ] = None,
    token_ids: Annotated[str | None, typer.Option(help="The prompt as ids: 1,2,3.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Send the prompt as a user's turn.")] = False,
    thinking: Annotated[bool, typer.Option("--thinking", help="Let a chat turn begin with reasoning.")] = False,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate at most.")] = 128,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy; without it, the checkpoint's own.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Without it, the checkpoint's own.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Without it, the checkpoint's own.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the noise; one seed gives one text.")] = None,
    spec_tokens: SpecTokens = None,
    acceptance: Acceptance = "standard",
    max_model_len: Annotated[
        int | None, typer.Option(help="Prompt and output together, in tokens; the model's context, at most 4096.")
    ] = None,
    device: Device = "cpu",
    kv_cache_dtype: KvCacheDtype = "auto",
    ngram_table: NgramTable = "device",
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past the end of a turn.")] = False,
    json: Annotated[bool, typer.Option("--json", help="End with one JSON object in place of the line.")] = False,
    hf_overrides: HfOverrides = None,
    revision: Revision = None,
    download: Download = False,
) -> None:
    """Continue one prompt, and say how far the steps were from the memory-bandwidth floor."""
    ids = None
    if token_ids is not None:
        from stepfloor.tools.generate import parse_token_ids

        ids = parse_token_ids(token_ids)
    elif prompt is None:
        try:
            prompt = "" if sys.stdin.isatty() else sys.stdin.read()
            prompt.encode()  # some locales read what is no UTF-8 as surrogates
        except UnicodeError as error:
            raise UserError(f"standard input wants text in UTF-8 ({error}); convert it first") from None
        if not prompt:
            raise UserError("wanted a prompt; pass --prompt TEXT, --token-ids 1,2,3 or text on standard input")
    checkpoint = open_model(shipped() if model is None else model, revision, download, overrides_of(hf_overrides))
    from stepfloor.config import EngineConfig
    from stepfloor.tools.generate import Prompt, sampling_from
    from stepfloor.tools.generate import generate as run

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


def serve(
    context: typer.Context,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            callback=filled, metavar="[MODEL]", help="As for inspect; without one, the small model that ships."
        ),
    ] = None,
    model_flag: Annotated[
        str | None, typer.Option("--model", callback=filled, help="The same as the argument.")
    ] = None,
    host: Annotated[str, typer.Option(callback=filled, help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(callback=bounded(0, 65535), help="Port to listen on; 0 takes one that is free.")
    ] = 8000,
    uds: Annotated[
        str | None, typer.Option(callback=filled, help="A Unix socket to listen on, in place of host and port.")
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(callback=filled, help="Key that requests must bring; may be given more than once."),
    ] = None,
    served_model_name: Annotated[
        list[str] | None, typer.Option(callback=filled, help="Name the model answers to; may be given more than once.")
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
    max_num_seqs: Annotated[
        int, typer.Option(callback=bounded(high=MOST_SEQUENCES), help="Sequences that decode together.")
    ] = 16,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Longest prompt chunk; one runs before a step.")] = 512,
    long_prefill_token_threshold: Annotated[int, typer.Option(help="Longest chunk of a longer prompt; 0: none.")] = 0,
    max_num_queued_reqs: Annotated[
        int | None, typer.Option(help="Requests that may wait; more are answered with 503. Without it, any number.")
    ] = None,
    block_size: Annotated[int, typer.Option(help="Tokens per page of the key/value cache.")] = 64,
    num_gpu_blocks_override: NumGpuBlocks = None,
    kv_cache_dtype: KvCacheDtype = "auto",
    ngram_table: NgramTable = "device",
    enforce_eager: Annotated[
        bool, typer.Option("--enforce-eager", help="Decode kernel by kernel, not as captured graphs.")
    ] = False,
    spec_tokens: SpecTokens = None,
    speculative_config: Annotated[
        str | None,
        typer.Option(
            help='JSON: {"num_speculative_tokens": 3, "num_speculative_tokens_per_batch_size": [[1,4,3], [5,16,1]]}.'
        ),
    ] = None,
    acceptance: Acceptance = "standard",
    device: Device = "cpu",
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
        float | None, typer.Option(callback=bounded(0), help="Seconds a request may take if it brings no deadline_s.")
    ] = None,
    stall_timeout: Annotated[
        float, typer.Option(callback=bounded(0), help="Seconds without a step after which /health is 503.")
    ] = 60.0,
    shutdown_timeout: Annotated[
        int, typer.Option(callback=bounded(0), help="Seconds that running requests get after SIGTERM.")
    ] = 30,
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
    hf_overrides: HfOverrides = None,
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
    name = model or model_flag or shipped()
    overrides = overrides_of(hf_overrides)
    checkpoint = open_model(name, revision, download, overrides)

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
        num_gpu_blocks_override=num_gpu_blocks_override,
    )
    config.check(checkpoint.config)
    keys = [*(api_key or ()), *([key] if (key := server_key()) and not api_key else [])]
    own_name = "stepfloor-small" if name == shipped() else name
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
