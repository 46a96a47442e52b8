"""Read result files of other tools as results of ours, and write ours as theirs.

The tool is told from what the file holds. Every figure keeps its definition: one that another tool defines otherwise
gets a name of its own, and what has no place is named in the flag `unmapped` (vllm.py, aiperf.py and lil.py say which).
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from stepfloor.errors import UserError
from stepfloor.tools.bench.exchange import aiperf, lil, vllm
from stepfloor.tools.bench.metrics import measure
from stepfloor.tools.bench.plot import short
from stepfloor.tools.bench.result import Flag, Metric, Result

AGREEMENT = 0.01
COMPARED = ("value", "mean", "p50", "p90", "p95", "p99")
TOOLS = ("vllm", "aiperf", "llm-inference-bench")


def import_file(path: Path) -> tuple[Result, ...]:
    """Every result of a file, or of AIPerf's artifact directory.

    Where the file holds its requests, figures are worked out from them as well: those that the tool gives and that
    differ by more than AGREEMENT are named in a flag, those that it does not give are added, intervals as well.

    Raises UserError for what is no result file of vllm bench serve, AIPerf or llm-inference-bench.
    """
    path = path / aiperf.SUMMARY if path.is_dir() else path
    try:
        return tuple(_worked_out(result) for result in _results(path))
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        what = f"{type(error).__name__}: {error}"
        raise UserError(f"{path} is not as its tool writes it ({what}); pass the file that the tool wrote") from error


def _results(path: Path) -> list[Result]:
    if path.suffix == ".csv":
        results = [aiperf.read(aiperf.read_table(_text(path)), path)]
    elif path.name == aiperf.RECORDS:
        results = [aiperf.read_records_alone(path)]
    else:
        results = [result for raw in _objects(path) for result in _read(raw, path)]
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


def summary(result: Result) -> Iterator[str]:
    """An imported result in lines for people."""
    origin = result.origin or {}
    requests = f"{len(result.requests)} requests on record" if result.requests else "no requests on record"
    yield f"{result.target.model or 'model unknown'}, {origin.get('tool')} ({origin.get('file')}), {requests}"
    for name, metric in result.metrics.items():
        if metric.headline in ("value", "mean"):
            numbers = "  ".join(f"{k} {short(metric.stats[k])}" for k in COMPARED if k in metric.stats)
        else:
            numbers = "  ".join(map(short, metric.stats.values()))
        yield f"  {name:36} {numbers}  {metric.unit}"
    for flag in result.flags:
        yield f"{'INVALID' if flag.invalidates else 'note'}: {flag.code}: {flag.text}"


def _worked_out(result: Result) -> Result:
    if not result.requests or not result.window_s:
        return result
    own = measure(result.requests, result.window_s)
    metrics = dict(result.metrics)
    disagreements: list[str] = []
    for name, metric in own.items():
        given = result.metrics.get(name)
        apart = [] if given is None else list(_apart(name, given, metric))
        disagreements += apart
        if given is None:
            metrics[name] = metric
        elif not apart:  # the tool's figures, with the intervals that it does not give
            metrics[name] = replace(given, intervals={k: v for k, v in metric.intervals.items() if k in given.stats})
    flags = result.flags
    if disagreements:
        flags = (Flag("records_disagree", "; ".join(disagreements)), *flags)
    origin = {**(result.origin or {}), "worked_out": sorted(own.keys() - result.metrics.keys())}
    return replace(result, metrics=metrics, flags=flags, origin=origin)


def _apart(name: str, given: Metric, own: Metric) -> Iterator[str]:
    for statistic in COMPARED:
        if statistic in given.stats and statistic in own.stats:
            theirs, ours = given.stats[statistic], own.stats[statistic]
            if abs(theirs - ours) > AGREEMENT * max(abs(theirs), abs(ours)):
                yield f"{name} {statistic} is {short(theirs)}, its requests give {short(ours)}"


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
    text = _text(path)
    try:
        return [json.loads(text)]
    except json.JSONDecodeError:
        pass
    try:
        return [json.loads(line) for line in text.split("\n") if line.strip()]
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is not JSON ({error}); pass a result file of {', '.join(TOOLS)}") from None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path} ({error}); pass a result file") from None


def _put(path: Path, text: str) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; pass a path in a directory that is yours") from None
    return path
