"""convert: make checkpoints, at random or from what is on this disk."""

from pathlib import Path
from typing import Annotated

import typer

from stepfloor.cli.environment import hub, local
from stepfloor.cli.options import Revision, filled

app = typer.Typer(no_args_is_help=True, help="Make checkpoints.")

Source = Annotated[
    str, typer.Argument(callback=filled, help="A checkpoint directory, or an id that is in the Hugging Face cache.")
]
Result = Annotated[
    str,
    typer.Argument(callback=filled, help="owner/name for the Hugging Face cache, or a path that begins with ./ or /."),
]
Leave = Annotated[str, typer.Option(help="Groups that stay as they are: gdn,qsa,hc,shared,head,experts,input.")]
StockVllm = Annotated[
    bool,
    typer.Option("--stock-vllm", help="Leave hc, head and qsa, which stock vLLM 0.33 reads as bf16 only."),
]
Jobs = Annotated[int | None, typer.Option(min=1, help="Threads; all cores without it, at most 16.")]


@app.command("random")
def random_weights(
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


@app.command("fp8-dense")
def fp8_dense(
    src: Source,
    dst: Result,
    leave: Leave = "",
    stock_vllm: StockVllm = False,
    jobs: Jobs = None,
    revision: Revision = None,
) -> None:
    """Dense matrices and the head in FP8, one scale an output row: a step of three drafts reads 6.1 GB less."""
    _convert("fp8-dense", src, dst, leave, stock_vllm, jobs, revision)


@app.command("mtp-fp8")
def mtp_fp8(
    src: Source,
    dst: Result,
    leave: Leave = "",
    stock_vllm: StockVllm = False,
    jobs: Jobs = None,
    revision: Revision = None,
) -> None:
    """The drafter in FP8: experts in blocks of 128, dense matrices one scale a row. The text stays what it is."""
    _convert("mtp-fp8", src, dst, leave, stock_vllm, jobs, revision)


@app.command("head-mxfp8")
def head_mxfp8(src: Source, dst: Result, jobs: Jobs = None, revision: Revision = None) -> None:
    """The head in MXFP8, which target and drafter read once a pass."""
    _convert("head-mxfp8", src, dst, "", False, jobs, revision)


@app.command("draft-head-nvfp4")
def draft_head_nvfp4(src: Source, dst: Result, jobs: Jobs = None, revision: Revision = None) -> None:
    """A head in NVFP4 for the drafter alone (mtp.lm_head); the text stays what it is."""
    _convert("draft-head-nvfp4", src, dst, "", False, jobs, revision)


@app.command("ple-nvfp4")
def ple_nvfp4(src: Source, dst: Result, jobs: Jobs = None, revision: Revision = None) -> None:
    """The n-gram table in NVFP4 rows of 90 bytes: 26.8 GiB in place of 47.7."""
    _convert("ple-nvfp4", src, dst, "", False, jobs, revision)


@app.command("verify")
def verify(
    dst: Annotated[
        str, typer.Argument(callback=filled, help="A converted checkpoint: a directory, or an id in the cache.")
    ],
    source: Annotated[
        str | None, typer.Option(help="What it was made from; without it, looked for in the Hugging Face cache.")
    ] = None,
    jobs: Jobs = None,
    revision: Revision = None,
) -> None:
    """Compare a converted checkpoint with its source byte by byte, and measure its errors; 1 on any finding."""
    from stepfloor.tools.requantize.verify import source_in_cache, verify_with_progress
    from stepfloor.weights.checkpoint import open_checkpoint

    directory = local(dst, revision)
    origin = local(source, None) if source is not None else source_in_cache(directory, hub().cache)
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
    plan = plan_conversion(open_checkpoint(local(src, revision)), kind, groups)
    # only now torch: what the census of 10**5 tensors took is free again
    from stepfloor.tools.requantize.convert import convert_with_progress, destination

    convert_with_progress(plan, destination(dst, hub().cache, plan), jobs)
    for note in plan.notes:
        print(f"note: {note}")
