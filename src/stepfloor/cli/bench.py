"""bench: measure, with the floor beside every figure."""

from pathlib import Path
from typing import Annotated

import typer

from stepfloor.cli.environment import open_model, package_file, variables
from stepfloor.cli.options import (
    AsJson,
    HfOverrides,
    KvCacheDtype,
    NgramTable,
    bounded,
    filled,
    new_file,
    overrides_of,
    writable,
)
from stepfloor.errors import UserError

app = typer.Typer(no_args_is_help=True, help="Measure, with the floor beside every figure.")

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
ApiKey = Annotated[str | None, typer.Option(callback=filled, help="Sent as Authorization: Bearer KEY.")]
Header = Annotated[list[str] | None, typer.Option(help="'name: value' of every request; may be given more than once.")]
ServerConfig = Annotated[
    str | None, typer.Option(help="JSON, or a file of it: how the server was started. Comparisons want it.")
]
Csv = Annotated[Path | None, typer.Option(callback=writable, help="Write a row for each statistic here.")]
Html = Annotated[Path | None, typer.Option(callback=writable, help="Write a page with charts here.")]


@app.command("accuracy")
def ask_questions(
    url: Url,
    profile: Annotated[str, typer.Option(help="stdlib (ships, for the small model), gsm8k or mmlu-pro.")] = "stdlib",
    file: Annotated[
        Path | None, typer.Option(help="The test file of gsm8k (JSON lines) or mmlu-pro (JSON lines or Parquet).")
    ] = None,
    items: Annotated[
        int | None, typer.Option(help="So many questions, the same in every run; all, or 64 at most with --throughput.")
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(callback=bounded(1), help="Requests at once; 4, or 1 with --throughput.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(callback=bounded(1), help="Most tokens of an answer; 256 with --throughput.")
    ] = None,
    thinking: Annotated[
        bool | None, typer.Option("--thinking/--no-thinking", help="enable_thinking for the chat template.")
    ] = None,
    throughput: Annotated[
        bool, typer.Option("--throughput", help="Measure the speed on the items, all answers of one length.")
    ] = False,
    model: Served = None,
    api_key: ApiKey = None,
    output: Annotated[
        Path | None, typer.Option(callback=new_file, help="Write the result here, every item in it.")
    ] = None,
    html: Html = None,
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


@app.command("import")
def import_file(
    path: Annotated[
        Path, typer.Argument(help="A file of vllm bench serve, AIPerf (or its directory) or llm-inference-bench.")
    ],
    output: Annotated[Path | None, typer.Option(callback=new_file, help="Write stepfloor's own file here.")] = None,
    html: Html = None,
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


@app.command("export")
def export(
    result: Annotated[Path, typer.Argument(help="A file that a bench of stepfloor wrote.")],
    tool: Annotated[str, typer.Argument(help="vllm, aiperf or llm-inference-bench.")],
    output: Annotated[Path, typer.Argument(help="File to write; for aiperf a directory.")],
) -> None:
    """Write a result as another tool's readers take it."""
    from stepfloor.tools.bench.exchange.files import export_results
    from stepfloor.tools.bench.result import read_results

    for written in export_results(read_results(result), tool, output):
        print(written)


@app.command("page")
def page(
    results: Annotated[list[Path], typer.Argument(help="Files that a bench of stepfloor wrote.")],
    output: Annotated[Path, typer.Option(callback=writable, help="The page to write.")],
) -> None:
    """Draw a page with charts of stored results."""
    from stepfloor.tools.bench.page import write_page
    from stepfloor.tools.bench.result import read_results

    write_page([result for path in results for result in read_results(path)], output)


@app.command("step")
def step(
    model: Annotated[
        str | None,
        typer.Argument(callback=filled, help="A checkpoint to load; without one, random weights at full size."),
    ] = None,
    mix: Annotated[str, typer.Option("--format", help="Formats of random weights: a, b, b', c, c' or fp8.")] = "a",
    config: Annotated[Path | None, typer.Option(help="config.json of the random model; without it, full size.")] = None,
    sequences: Annotated[str, typer.Option(help="Decoding together; a list is 1,4,16.")] = "1,4,16",
    spec_tokens: Annotated[str, typer.Option(help="Drafts a step; a list is 0,3.")] = "0,3",
    context: Annotated[str, typer.Option(help="Tokens a sequence holds in the middle of the run; a list.")] = "700",
    acceptance_length: Annotated[
        int,
        typer.Option(
            callback=bounded(0), help="Tokens each sequence is made to take a step; 0 for what the target accepts."
        ),
    ] = 3,
    steps: Annotated[int, typer.Option(min=4, help="Timed steps of a cell.")] = 200,
    prefill: Annotated[
        int,
        typer.Option(
            callback=bounded(0, 1 << 20), help="Time the prefill of a prompt of so many tokens too; 0 does not."
        ),
    ] = 0,
    max_model_len: Annotated[
        int | None,
        typer.Option(callback=bounded(2), help="Room of a sequence, as a server has it; as much as is needed without."),
    ] = None,
    kv_cache_dtype: KvCacheDtype = "auto",
    ngram_table: NgramTable = "device",
    hf_overrides: HfOverrides = None,
    device: Annotated[str, typer.Option(help="cuda, cuda:1, or cpu with a small model.")] = "cuda",
    count_experts: Annotated[bool, typer.Option(help="Count distinct experts in a second run of each cell.")] = True,
    profile: Annotated[bool, typer.Option(help="Profile a few steps of each cell.")] = True,
    linears: Annotated[
        bool, typer.Option("--linears", help="Time each matrix product beside torch's, in every format, not steps.")
    ] = False,
    commit: Annotated[str, typer.Option(help="What was checked out, for the record.")] = "",
    output: Annotated[
        Path | None, typer.Option(callback=new_file, help="Write the JSON line here too, as far as it is.")
    ] = None,
) -> None:
    """Time decode steps offline, beside the bytes they must read."""
    from stepfloor.config import ModelConfig
    from stepfloor.engine import find_device, open_device
    from stepfloor.tools.bench.linears import run_and_report_linears
    from stepfloor.tools.bench.step import MIXES, Plan, random_checkpoint, run_and_report

    if model is not None and config is not None:
        raise UserError(f"{model} and --config {config} are two models; pass one of them")
    if mix not in MIXES:
        raise UserError(f"--format must be one of {', '.join(MIXES)}; got {mix!r}")
    find_device(device)
    if model is None:
        source = package_file("full_config.json") if config is None else config
        checkpoint = random_checkpoint(ModelConfig.read(source, overrides_of(hf_overrides)), MIXES[mix])
    else:
        checkpoint = open_model(model, overrides=overrides_of(hf_overrides))
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
        max_model_len,
    )
    run_and_report(checkpoint, plan, model is None, commit, output)


@app.command("serve")
def serve_load(
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
    output: Annotated[Path | None, typer.Option(callback=new_file, help="Write the result here, as JSON.")] = None,
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


@app.command("matrix")
def matrix(
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
        Path | None, typer.Option(callback=new_file, help="Write a result a line here, and go on with what is here.")
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


@app.command("ab")
def ab(
    plan: Annotated[Path, typer.Argument(help="A plan in TOML: arms, the variable, metrics, rounds, load, gates.")],
    output: Annotated[
        Path | None, typer.Option(callback=new_file, help="The report; PLAN.report.json without it. Goes on if begun.")
    ] = None,
    null: Annotated[bool, typer.Option("--null", help="The first arm against itself: the noise floor.")] = False,
    null_report: Annotated[Path | None, typer.Option(help="Take noise and floor from a report of --null.")] = None,
    html: Html = None,
    json: Annotated[bool, typer.Option("--json", help="Print the outcome as one JSON object.")] = False,
) -> None:
    """Compare two arms or more in interleaved rounds: effect, no effect, or unresolved."""
    from stepfloor.tools.bench.ab_command import run_ab

    run_ab(plan, variables(), output=output, null=null, null_report=null_report, html=html, as_json=json)


@app.command("compare")
def compare(
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
    html: Html = None,
    json: AsJson = False,
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
