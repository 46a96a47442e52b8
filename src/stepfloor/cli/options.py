"""Options that several commands share: one name, one help text, one check, one sentence for what is wrong.

A check runs while the command line is read, so what is wrong is told before anything is loaded, measured or written.
"""

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from stepfloor.errors import UserError

MOST_SEQUENCES = 1 << 16  # what is planned for each number of sequences is counted one by one


def choice(*values: str) -> Callable[[str, typer.CallbackParam], str]:
    """A check of an option that has a few values."""

    def check(value: str, param: typer.CallbackParam) -> str:
        if value not in values:
            raise UserError(f"{_name(param)} must be {' or '.join(values)}; got {value!r}")
        return value

    return check


def bounded(
    low: float = -math.inf, high: float = math.inf
) -> Callable[[float | None, typer.CallbackParam], float | None]:
    """A check of a number that may be absent: finite, and within both bounds. NaN is refused too."""
    wanted = f"{low} to {high}" if math.isfinite(low) and math.isfinite(high) else f"at least {low}"
    if not math.isfinite(low):
        wanted = f"at most {high}"

    def check(value: float | None, param: typer.CallbackParam) -> float | None:
        if value is not None and not (low <= value <= high and abs(value) < math.inf):
            raise UserError(f"{_name(param)} must be {wanted}; got {value}")
        return value

    return check


def filled(value: Any, param: typer.CallbackParam) -> Any:
    """Refuse an empty string, or a list with one: a variable of a script that was not set, never a wish."""
    if value == "" or (isinstance(value, list) and "" in value):
        raise UserError(f"{_name(param)} is empty; pass a value" + ("" if param.required else ", or leave it out"))
    return value


def readable_text(value: str | None, param: typer.CallbackParam) -> str | None:
    """Refuse bytes that are no UTF-8, which Python hands over as surrogates."""
    try:
        (value or "").encode()
    except UnicodeEncodeError:
        raise UserError(f"{_name(param)} wants text in UTF-8; got {value!r}; convert it first") from None
    return value


def writable(path: Path | None, param: typer.CallbackParam) -> Path | None:
    """Refuse a file that could not be written when the work is done."""
    if path is None:
        return None
    if path.is_dir():
        raise UserError(f"{_name(param)} wants a file to write; {path} is a directory; pass a file in it")
    near = path if path.exists() else next(parent for parent in path.absolute().parents if parent.exists())
    if not os.access(near, os.W_OK) or (near != path and not near.is_dir()):
        why = "cannot be written to" if near == path or near.is_dir() else "is no directory"
        raise UserError(f"cannot write {path}: {near} {why}; pass {_name(param)} a path in a directory of yours")
    return path


def new_file(path: Path | None, param: typer.CallbackParam) -> Path | None:
    """A writable file that is put in place whole; a device such as /dev/null would be replaced by it."""
    if path is not None and path.exists() and not path.is_dir() and not path.is_file():
        raise UserError(f"{_name(param)} wants a file to write; {path} is a device or a pipe; pass another path")
    return writable(path, param)


def overrides_of(text: str | None) -> dict[str, Any]:
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


def _name(param: typer.CallbackParam) -> str:
    """An option as the user writes it."""
    name = param.opts[-1]
    return name if name.startswith("-") else (param.metavar or name.upper()).strip("[]")


AnyModel = Annotated[
    str,
    typer.Argument(
        callback=filled,
        help="A directory, a Hugging Face id (only headers are fetched), or qwen3.8-flash-next:FORMAT.",
    ),
]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or snapshot of a Hugging Face id.")]
Download = Annotated[bool, typer.Option("--download", help="Fetch the id even if the cache has another owner's.")]
NumGpuBlocks = Annotated[
    int | None,
    typer.Option(
        callback=bounded(1, 1 << 32),
        help="Pages of the cache; without it, the longest sequence in every slot. With fewer, a request waits until "
        "the pages of its prompt and max_tokens are free.",
    ),
]
HfOverrides = Annotated[str | None, typer.Option(help="JSON that replaces keys of the text config.")]
KvCacheDtype = Annotated[
    str, typer.Option(callback=choice("auto", "fp8"), help="Of keys and values: auto, the model's type, or fp8.")
]
# whether pinned memory can be had depends on the device: EngineConfig.check knows
NgramTable = Annotated[str, typer.Option(help="Where the n-gram table lies: device, or pinned memory of the host.")]
SpecTokens = Annotated[int | None, typer.Option(help="Drafts a step, 0 to 7; 3 where there is a drafter.")]
Acceptance = Annotated[
    str,
    typer.Option(
        callback=choice("standard", "coupled"),
        help="standard, or coupled: text the same for every --spec-tokens.",
    ),
]
Device = Annotated[str, typer.Option(help="cpu, or a CUDA device.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
