"""The command line: one subcommand per tool, and the only reader of the environment."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stepfloor.errors import UserError

if TYPE_CHECKING:
    from stepfloor.weights.checkpoint import Checkpoint

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
convert = typer.Typer(no_args_is_help=True, help="Make checkpoints.")
app.add_typer(convert, name="convert")

Model = Annotated[str, typer.Argument(help="A checkpoint directory or a Hugging Face id (owner/name).")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or snapshot of a Hugging Face id.")]
Download = Annotated[bool, typer.Option("--download", help="Fetch the id even if the cache has another owner's.")]


@app.callback()
def stepfloor() -> None:
    """Serve Qwen3.8-Flash-Next close to the memory-bandwidth floor, and say how close."""


@app.command()
def inspect(
    model: Model,
    revision: Revision = None,
    download: Download = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show what a checkpoint holds: bytes by category and format, table geometry, contradictions."""
    from stepfloor.tools.inspect import show

    show(_open(model, revision, download), as_json=json)


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


def _open(model: str, revision: str | None = None, download: bool = False) -> "Checkpoint":
    """Resolve a model with the Hugging Face variables of the environment, and open it."""
    from stepfloor.weights.checkpoint import open_checkpoint
    from stepfloor.weights.sources import Hub, hub_cache, resolve_source

    env = os.environ
    hub = Hub(
        cache=hub_cache(env.get("HF_HOME"), env.get("HF_HUB_CACHE"), env.get("XDG_CACHE_HOME")),
        offline=env.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"),
        token=env.get("HF_TOKEN"),
    )
    return open_checkpoint(resolve_source(model, hub, revision=revision, download=download))


def main() -> None:
    """Entry point: a UserError is one line on standard error and its exit code."""
    try:
        app()
    except UserError as error:
        print(f"stepfloor: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
