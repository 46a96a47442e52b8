"""A result for people: a table on standard output, a bar on standard error; rows for a spreadsheet."""

import csv
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from stepfloor.errors import UserError
from stepfloor.tools.bench.drive import Visit
from stepfloor.tools.bench.matrix import knee
from stepfloor.tools.bench.result import Metric, Result

# always shown together: a rate of tokens alone does not compare machines
RATES = ("output_throughput", "steps_per_s", "ms_per_step", "acceptance_length")
DISTRIBUTIONS = ("ttft_ms", "ttft_from_sent_ms", "itl_ms", "tpot_ms", "e2e_ms", "per_user_rate", "send_delay_ms")
CSV_HEAD = ("created", "kind", "url", "model", "concurrency", "input_len", "valid", "flags")
CSV_METRIC = ("metric", "statistic", "value", "low", "high", "unit", "count")
FILE_WIDTH = 140
COLUMNS = ("mean", "p50", "p90", "p95", "p99", "max")


class Bar:
    """A progress bar on standard error; a context."""

    def __init__(self) -> None:
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
            console=Console(stderr=True),
            transient=True,
            refresh_per_second=2,
            disable=not sys.stderr.isatty(),
        )
        self._task = self._bar.add_task("", total=None, note="")
        self._prefix = ""
        self._failed = 0

    def __enter__(self) -> "Bar":
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bar.stop()

    def name(self, prefix: str) -> None:
        """What all following phases belong to."""
        self._prefix = prefix

    def phase(self, name: str, total: int | None) -> None:
        """A new part of the run."""
        self._failed = 0
        self._bar.reset(self._task, description=f"{self._prefix}{name}", total=total, completed=0, note="")

    def ended(self, visit: Visit) -> None:
        """A request ended."""
        self._failed += visit.error is not None
        self._bar.update(self._task, advance=1, note=f"{self._failed} failed" if self._failed else "")


def show(result: Result, console: Console | None = None) -> None:
    """Print a result."""
    console = console or _console()
    target, load = result.target, result.load
    who = " ".join(part for part in (target.server, target.server_version) if part)
    console.print(f"{target.model} at {target.url}" + (f" ({who})" if who else ""), markup=False)
    console.print(_load_line(result), markup=False)
    rates = Table(box=None, pad_edge=False)
    for name in RATES:
        rates.add_column(name, justify="right")
    rates.add_row(*(_plain(result.metrics.get(name)) for name in RATES))
    console.print(rates)
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for column in (*COLUMNS, "mean, 95 % interval", "n"):
        table.add_column(column, justify="right")
    for name in DISTRIBUTIONS:
        metric = result.metrics.get(name)
        if metric is not None:
            interval = "" if metric.low is None else f"{metric.low:.2f} to {metric.high:.2f}"
            numbers = (f"{metric.stats[c]:.2f}" if c in metric.stats else "" for c in COLUMNS)
            table.add_row(name, *numbers, interval, str(metric.count))
    console.print(table)
    rest = [n for n in result.metrics if n not in (*RATES, *DISTRIBUTIONS)]
    console.print("   ".join(f"{name} {_plain(result.metrics[name])}" for name in rest), markup=False)
    for flag in result.flags:
        console.print(f"{'INVALID' if flag.invalidates else 'note'}: {flag.code}: {flag.text}", markup=False)
    if not result.valid:
        console.print("These numbers do not mean what their names say.", markup=False)
    if load.get("sampling") and result.telemetry is not None and result.telemetry.unavailable:
        console.print(f"GPU: unavailable ({result.telemetry.unavailable})", markup=False)


def show_matrix(results: Sequence[Result], console: Console | None = None) -> None:
    """Print cells, one a row, and where each context's curve bends. Invalid cells are marked, and no part of it."""
    console = console or _console()
    if not results:
        console.print("no cell was measured")
        return
    console.print(f"{results[0].target.model} at {results[0].target.url}", markup=False)
    table = Table(box=None, pad_edge=False)
    for name in ("context", "at once", "tokens/s", "per user", "steps/s", "ms/step", "acceptance", "ttft p50 ms", ""):
        table.add_column(name, justify="right")
    reasons: list[str] = []
    for result in results:
        metrics, load = result.metrics, result.load
        names = ("output_throughput", "per_user_rate", "steps_per_s", "ms_per_step", "acceptance_length")
        numbers = [f"{metrics[n].value:.4g}" if n in metrics else "-" for n in names]
        ttft = f"{metrics['ttft_ms'].stats['p50']:.0f}" if "ttft_ms" in metrics else "-"
        table.add_row(str(load["context"]), str(load["concurrency"]), *numbers, ttft, "" if result.valid else "INVALID")
        reasons += [
            f"{load['concurrency']} at {load['context']}: {flag.code}: {flag.text}"
            for flag in result.flags
            if flag.invalidates
        ]
    console.print(table)
    for reason in reasons:
        console.print(f"INVALID {reason}", markup=False)
    for context in dict.fromkeys(result.load["context"] for result in results):
        points = [
            (r.load["concurrency"], r.metrics["output_throughput"].value)
            for r in results
            if r.valid and r.load["context"] == context
        ]
        found, why = knee(points)
        console.print(f"context {context}: " + (f"knee at {found}, {why}" if found is not None else why), markup=False)


def write_csv(results: Sequence[Result], path: Path) -> None:
    """A row for each statistic of each metric. Raises UserError if it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", newline="", encoding="utf-8") as out:
            rows = csv.writer(out)
            rows.writerow((*CSV_HEAD, *CSV_METRIC))
            for result in results:
                load = result.load
                codes = " ".join(flag.code for flag in result.flags)
                head = (result.created, result.kind, result.target.url, result.target.model)
                head += (load.get("concurrency"), load.get("input_len"), result.valid, codes)
                for name, metric in result.metrics.items():
                    for statistic, value in metric.stats.items():
                        low, high = metric.intervals.get(statistic, (None, None))
                        rows.writerow((*head, name, statistic, value, low, high, metric.unit, metric.count))
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; pass a path in a directory that is yours") from None


def _console() -> Console:
    """Standard output, and as wide as the tables where it is a file."""
    console = Console(highlight=False, soft_wrap=True)
    return console if console.is_terminal else Console(highlight=False, soft_wrap=True, width=FILE_WIDTH)


def _load_line(result: Result) -> str:
    load = result.load
    if load.get("arrivals", "closed") == "closed":
        how = f"{load.get('concurrency')} at once"
    else:
        how = f"{load['arrivals']} arrivals" + (
            f", {load['request_rate']:g} a second" if load.get("request_rate") else ""
        )
    measured = f"{len(result.requests)} requests in {result.window_s or 0:.1f} s"
    lengths = f"{load.get('dataset_name')} prompts of {load.get('input_len')}, answers of {load.get('output_len')}"
    return f"{measured}, {how}; {lengths} tokens; seed {load.get('seed')}"


def _plain(metric: Metric | None) -> str:
    if metric is None:
        return "unavailable"
    if metric.headline not in ("value", "mean"):
        return " ".join(f"{value:.3g}" for value in metric.stats.values())
    return f"{metric.value:.4g}" + (f" {metric.unit}" if metric.unit not in ("ratio", "tokens") else "")
