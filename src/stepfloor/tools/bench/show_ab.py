"""Comparisons on a terminal: runs in their order, differences with intervals, verdicts with reasons."""

from collections.abc import Sequence
from statistics import fmean

from rich.console import Console
from rich.table import Table

from stepfloor.tools.bench.compare import Stored
from stepfloor.tools.bench.report import Outcome, Report, Run, metric_of
from stepfloor.tools.bench.result import Telemetry
from stepfloor.tools.bench.show import RATES
from stepfloor.tools.bench.verdict import Comparison


def show_report(report: Report, outcome: Outcome, console: Console) -> None:
    """Print a comparison: interim if it has not ended."""
    plan = report.plan
    title = f"{plan.name}{': an arm against itself' if plan.null else ''}"
    console.print(title if outcome.final else f"{title} (INTERIM, {len(report.whole)} of {plan.most} rounds)")
    for difference in report.differences:
        console.print(f"variable {difference}")
    console.print(report.stated)
    for table in (_runs(report), _means(report), _comparisons(outcome.comparisons)):
        console.print()
        console.print(table)
    console.print()
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
    table = _table("run", "round", "arm", first, "clock", "temperature", "")
    for run in report.runs:
        found = None if run.result is None else metric_of(run.result, first)
        value = "-" if found is None else f"{found[0]:.5g} {found[1]}"
        clock, temperature = _climate(None if run.result is None else run.result.telemetry)
        why = "" if run.broken is None else f"does not count: {run.broken}"
        table.add_row(str(run.at + 1), str(run.round + 1), run.arm, value, clock, temperature, why)
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in columns:
        # names and words are looked for as they are; long reasons may break
        table.add_column(column, overflow="fold", no_wrap=column not in ("", "interval"))
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
    table = _table("means", *RATES)
    for arm in report.plan.names:
        runs = [run for runs in report.whole for run in runs if run.arm == arm]
        means = (_mean(runs, name) for name in RATES)
        table.add_row(arm, *("-" if mean is None else f"{mean:.5g}" for mean in means))
    return table


def _mean(runs: Sequence[Run], name: str) -> float | None:
    found = [metric_of(run.result, name) for run in runs if run.result is not None]
    values = [one[0] for one in found if one is not None]
    return fmean(values) if values and len(values) == len(runs) else None


def _comparisons(comparisons: Sequence[Comparison]) -> Table:
    table = _table("metric", "base", "arm", "difference", "interval", "p", "verdict")
    for c in comparisons:
        row = [c.series.metric, f"{c.base_mean:.5g}", f"{c.series.arm_name} {c.arm_mean:.5g}"]
        if c.paired is None or c.interval is None:
            row += [""] * 3
        else:
            span = f"{c.show(c.interval[0])} to {c.show(c.interval[1])}"
            row += [c.show(c.paired.mean), span, f"{c.paired.p:.2g}"]
        table.add_row(*row, c.verdict.word)
    return table


def _notes(c: Comparison, console: Console) -> None:
    if c.paired is None or c.detectable is None or c.level is None:
        return
    parts = [
        f"t = {c.paired.t:.2f}, {c.paired.df} degrees of freedom, {c.paired.positive} of {c.paired.n} positive",
        f"p is held against {c.level:.3g}, the interval's level is {1 - c.level:.2%}",
        f"with this noise {c.show(c.detectable).removeprefix('+')} would be found 8 times of 10",
    ]
    if c.bootstrap is not None:
        parts.append(f"bootstrap {c.show(c.bootstrap[0])} to {c.show(c.bootstrap[1])}")
    if c.autocorrelation is not None:
        parts.append(f"lag-1 autocorrelation {c.autocorrelation[0]:+.2f}")
    if c.drift is not None:
        parts.append(f"drift {c.show(c.drift.per_run)} a run ({c.show(c.drift.low)} to {c.show(c.drift.high)})")
    console.print(f"{c.series.metric}: {'; '.join(parts)}")
    for note in c.notes:
        console.print(f"{c.series.metric}: {note}", style="yellow")
