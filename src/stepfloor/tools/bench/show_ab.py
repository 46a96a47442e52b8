"""Show comparisons on a terminal: runs in their order, differences with their intervals, verdicts with their reasons."""

from collections.abc import Sequence
from statistics import fmean

from rich.console import Console
from rich.table import Table

from stepfloor.tools.bench.compare import Stored
from stepfloor.tools.bench.report import Outcome, Report, Run, metric_of
from stepfloor.tools.bench.result import Telemetry
from stepfloor.tools.bench.verdict import Comparison

# beside any rate: how fast the engine steps, and how many tokens a step brings
_BESIDE = ("output_throughput", "steps_per_s", "acceptance_length")


def show_report(report: Report, outcome: Outcome, console: Console) -> None:
    """Print a comparison: interim if it has not ended."""
    plan = report.plan
    title = f"{plan.name}{': an arm against itself' if plan.null else ''}"
    console.print(title if outcome.final else f"{title} (INTERIM, {len(report.whole)} of {plan.most} rounds)")
    for difference in report.differences:
        console.print(f"variable {difference}")
    console.print(report.stated)
    console.print(_runs(report))
    console.print(_means(report))
    console.print(_comparisons(outcome.comparisons))
    for c in outcome.comparisons:
        _notes(c, console)
    for i, look in enumerate(report.looks[:-1], 1):
        said = ", ".join(f"{arm}: {word}" for arm, word in look.words.items())
        console.print(f"interim look {i} after {look.rounds} rounds, level {look.level:.2g}: {said}")
    for gate in outcome.gates:
        console.print(f"gate {gate.name}, {gate.arm}: {'passed' if gate.passed else 'FAILED'}, {gate.reason}")
    for name in outcome.missing:
        console.print(f"not compared: {name} is not in every run")
    if outcome.floor_percent is not None:
        console.print(
            f"noise floor of {plan.most} rounds here: {outcome.floor_percent:.2f} %; pass this report as --null-report"
        )
    for line in outcome.headline:
        console.print(line, style="bold")


def show_stored(stored: Stored, console: Console) -> None:
    """Print a comparison of stored results."""
    console.print(f"{stored.arm_name} against {stored.base_name}, {stored.pairs} pairs")
    for difference in stored.differences:
        console.print(f"variable {difference}")
    if stored.comparisons:
        console.print(_comparisons(stored.comparisons))
    for c in stored.comparisons:
        console.print(f"{c.series.metric}: {c.verdict.word}, {c.verdict.reason}", style="bold")
        _notes(c, console)
    for one in stored.items:
        (low, high), (arm_low, arm_high), c = one.base_share, one.arm_share, one.counts
        console.print(
            f"items, pair {one.pair}: {stored.base_name} {c.base_correct} of {c.n} ({low:.1%} to {high:.1%}), "
            f"{stored.arm_name} {c.arm_correct} ({arm_low:.1%} to {arm_high:.1%}); right in one only: {c.base_only} "
            f"and {c.arm_only}, exact McNemar p = {c.p:.3g}: {'they differ' if one.differ else 'unresolved'}",
            style="bold",
        )
    for reason in stored.set_aside:
        console.print(f"set aside: {reason}")


def _runs(report: Report) -> Table:
    first = report.plan.metrics[0].metric
    table = Table("run", "round", "arm", first, "clock", "temperature", "", title="in the order they ran")
    for run in report.runs:
        found = None if run.result is None else metric_of(run.result, first)
        value = "" if found is None else f"{found[0]:.5g} {found[1]}"
        clock, temperature = _climate(None if run.result is None else run.result.telemetry)
        why = "" if run.broken is None else f"does not count: {run.broken}"
        table.add_row(str(run.at + 1), str(run.round + 1), run.arm, value, clock, temperature, why)
    return table


def _climate(telemetry: Telemetry | None) -> tuple[str, str]:
    """(mean SM clock, highest temperature) over the devices, or "-" where nothing was seen."""

    def seen(column: str) -> list[float]:
        devices = () if telemetry is None else telemetry.devices
        return [value for device in devices for value in device.columns.get(column, ()) if value is not None]

    clocks, temperatures = seen("sm_clock_mhz"), seen("temperature_c")
    return (f"{fmean(clocks):.0f} MHz" if clocks else "-"), (f"{max(temperatures):.0f} C" if temperatures else "-")


def _means(report: Report) -> Table:
    """Rates never alone: what the engine does a second, and what a step of it brings."""
    table = Table("arm", *_BESIDE, "ms_per_step", title="means of the rounds that count")
    for arm in report.plan.names:
        runs = [run for runs in report.whole for run in runs if run.arm == arm]
        cells = [_mean(runs, name) for name in _BESIDE]
        steps = cells[_BESIDE.index("steps_per_s")]
        shown = ["-" if value is None else f"{value:.5g}" for value in (*cells, 1000 / steps if steps else None)]
        table.add_row(arm, *shown)
    return table


def _mean(runs: Sequence[Run], name: str) -> float | None:
    found = [metric_of(run.result, name) for run in runs if run.result is not None]
    values = [one[0] for one in found if one is not None]
    return fmean(values) if values and len(values) == len(runs) else None


def _comparisons(comparisons: Sequence[Comparison]) -> Table:
    table = Table("metric", "base", "arm", "difference", "interval", "bootstrap", "p", "level", "pairs", "verdict")
    for c in comparisons:
        row = [c.series.metric, f"{c.base_mean:.5g}", f"{c.series.arm_name} {c.arm_mean:.5g}"]
        if c.paired is None or c.interval is None or c.level is None:
            row += [""] * 5
        else:
            spans = [
                "-" if span is None else f"{c.show(span[0])} to {c.show(span[1])}" for span in (c.interval, c.bootstrap)
            ]
            row += [c.show(c.paired.mean), *spans, f"{c.paired.p:.2g}", f"{c.level:.2g}"]
        table.add_row(*row, str(len(c.series.rounds)), c.verdict.word)
    return table


def _notes(c: Comparison, console: Console) -> None:
    if c.paired is not None and c.detectable is not None:
        lag = "" if c.autocorrelation is None else f"; lag-1 autocorrelation {c.autocorrelation[0]:+.2f}"
        trend = "" if c.drift is None else f"; drift {c.show(c.drift.per_run)} a run"
        console.print(
            f"{c.series.metric}: t = {c.paired.t:.2f}, {c.paired.df} degrees of freedom, {c.paired.positive} of "
            f"{c.paired.n} positive; with this noise {c.show(c.detectable).removeprefix('+')} would be found 8 times "
            f"of 10{lag}{trend}"
        )
    for note in c.notes:
        console.print(f"{c.series.metric}: {note}", style="yellow")
