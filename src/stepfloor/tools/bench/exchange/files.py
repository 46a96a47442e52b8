"""Read result files of other tools as results of ours, and write ours as theirs.

The tool is told from what the file holds. Every figure keeps its definition: one that another tool defines otherwise
gets a name of its own, and what has no place is named in the flag `unmapped` (vllm.py, aiperf.py and lil.py say which).
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stepfloor.errors import UserError
from stepfloor.tools.bench.exchange import aiperf, lil, vllm
from stepfloor.tools.bench.result import Result

TOOLS = ("vllm", "aiperf", "llm-inference-bench")


def import_file(path: Path) -> tuple[Result, ...]:
    """Every result of a file, or of AIPerf's artifact directory.

    Raises UserError for what is no result file of vllm bench serve, AIPerf or llm-inference-bench.
    """
    path = path / aiperf.SUMMARY if path.is_dir() else path
    if path.suffix == ".csv":
        return (aiperf.read(aiperf.read_table(path), path),)
    results = tuple(result for raw in _objects(path) for result in _read(raw, path))
    if not results:
        raise UserError(f"{path} holds no result; pass a file of {', '.join(TOOLS)}")
    return results


def export_results(results: Sequence[Result], tool: str, path: Path) -> tuple[Path, ...]:
    """Write results as another tool's files; the paths that were written.

    vllm                 one JSON object a result: alone in the file, or one a line as --append-result does
    aiperf               a directory with the summary and, where the requests are known, a line for each
    llm-inference-bench  one file with a cell for each result

    Raises UserError for another tool, for more results than its file holds, and for a path that cannot be written.
    """
    if tool == "vllm":
        return (_put(path, "\n".join(json.dumps(vllm.write(result)) for result in results)),)
    if tool == "llm-inference-bench":
        return (_put(path, json.dumps(lil.write(results), indent=2)),)
    if tool != "aiperf":
        raise UserError(f"there is no export for {tool!r}; there are {', '.join(TOOLS)}")
    if len(results) != 1:
        raise UserError(
            f"a directory of AIPerf holds one result, and {len(results)} were given; export them one by one"
        )
    (result,) = results
    written = [_put(path / aiperf.SUMMARY, json.dumps(aiperf.write(result), indent=2))]
    if result.requests:
        lines = "\n".join(json.dumps(record) for record in aiperf.write_records(result))
        written.append(_put(path / aiperf.RECORDS, lines))
    return tuple(written)


def _read(raw: Any, path: Path) -> tuple[Result, ...]:
    found = "it holds no JSON object"
    if isinstance(raw, dict):
        if vllm.recognises(raw):
            return (vllm.read(raw, path),)
        if aiperf.recognises(raw):
            beside = path.with_name(aiperf.RECORDS)
            return (aiperf.read(raw, path, aiperf.load_records(beside) if beside.exists() else ()),)
        if lil.recognises(raw):
            return tuple(lil.read(raw, path))
        found = f"its keys begin with {', '.join(list(raw)[:6])}"
    raise UserError(f"{path} is no result file of {', '.join(TOOLS)}: {found}")


def _objects(path: Path) -> list[Any]:
    """The JSON value of a file, or one a line."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path} ({error}); pass a result file") from None
    try:
        return [json.loads(text)]
    except json.JSONDecodeError:
        pass
    try:
        return [json.loads(line) for line in text.split("\n") if line.strip()]
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is not JSON ({error}); pass a result file of {', '.join(TOOLS)}") from None


def _put(path: Path, text: str) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; pass a path in a directory that is yours") from None
    return path
