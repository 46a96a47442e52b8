"""What an A/B comparison leaves behind, and what follows from it.

One JSON file with the plan, the arms, and every run in the order it ran, broken ones too. The verdict is computed from
the runs whenever the file is read; the copy inside is for other readers.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import stepfloor
from stepfloor.errors import UserError
from stepfloor.tools.bench.arms import Difference
from stepfloor.tools.bench.plan import LookLevel, Plan
from stepfloor.tools.bench.proportions import mcnemar
from stepfloor.tools.bench.result import Result
from stepfloor.tools.bench.verdict import Comparison, Series, judge

FORMAT = "stepfloor.bench.ab/1"
INTERRUPTED = "the bench was interrupted"
LOOPED = "repetition_loop"
MOST_LOOPS = 0.5  # of all answers; with more, the comparison is one of loops, whoever makes them


@dataclass(frozen=True, slots=True)
class Run:
    """One arm measured once.

    at        place in the order of all runs of this comparison
    attempt   tries of whole rounds, counted from 0 through the comparison; the prompts' seed depends on it
    session   0, or more where the bench was interrupted and went on
    broken    why the run does not count; then its whole round does not
    """

    at: int
    round: int
    attempt: int
    arm: str
    seed: int
    started: str
    session: int = 0
    identity: Mapping[str, str] = field(default_factory=dict)
    result: Result | None = None
    broken: str | None = None


@dataclass(frozen=True, slots=True)
class Look:
    """A look at the pairs before the planned end: the level of one test, and the first metric's word for each arm."""

    rounds: int
    level: float
    words: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Gate:
    """Whether an arm may win at all. What could not be found out is not passed."""

    name: str
    arm: str
    passed: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """What follows from a report.

    final        whether the comparison ran to its end; otherwise all this is an interim look
    missing      metrics that were asked for and are not in all results
    headline     the result in one sentence for each arm
    floor_percent  of a null run: the half width of the first metric's interval, which real effects have to pass
    """

    final: bool
    comparisons: tuple[Comparison, ...]
    gates: tuple[Gate, ...]
    winners: tuple[str, ...]
    missing: tuple[str, ...]
    headline: tuple[str, ...]
    floor_percent: float | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """An A/B comparison as far as it has come.

    differences  what the arms differ in, which is the plan's variable
    environment  inherited variables that decide how a server runs
    ended        why the comparison is over, or None
    """

    plan: Plan
    differences: tuple[Difference, ...]
    environment: Mapping[str, str]
    created: str
    stated: str
    runs: tuple[Run, ...] = ()
    looks: tuple[Look, ...] = ()
    accuracy: Mapping[str, Result] = field(default_factory=dict)
    ended: str | None = None
    version: str = stepfloor.__version__

    @property
    def attempts(self) -> dict[int, tuple[Run, ...]]:
        """Runs of each try of a round."""
        found: dict[int, list[Run]] = {}
        for run in self.runs:
            found.setdefault(run.attempt, []).append(run)
        return {attempt: tuple(runs) for attempt, runs in found.items()}

    @property
    def whole(self) -> tuple[tuple[Run, ...], ...]:
        """Rounds in which every arm was measured, in order."""
        return tuple(
            runs
            for runs in self.attempts.values()
            if len(runs) == len(self.plan.arms) and all(run.broken is None for run in runs)
        )

    @property
    def broken(self) -> tuple[tuple[Run, ...], ...]:
        """Quarantined rounds, less those that only an interruption broke."""
        return tuple(
            runs
            for runs in self.attempts.values()
            if any(run.broken is not None and run.broken != INTERRUPTED for run in runs)
        )

    @property
    def too_many_broken(self) -> bool:
        """Whether so many rounds broke that those which did not are a selection."""
        return len(self.broken) > self.plan.most_broken * self.plan.most

    def write(self, path: Path) -> None:
        """Write the file, whole or not at all."""
        raw = {"format": FORMAT, **asdict(self), "outcome": asdict(conclude(self)) if self.runs else None}
        partial = path.with_name(path.name + ".partial")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps(finite(raw), allow_nan=False) + "\n", encoding="utf-8")
            partial.replace(path)
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}; pass a path in a directory of yours") from None


def read_report(path: Path) -> Report:
    """Read the file of a comparison. Raises UserError that says what is wrong with it."""
    from pydantic import TypeAdapter, ValidationError

    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path} ({error}); pass a file that `stepfloor bench ab` wrote") from None
    if not isinstance(raw, dict) or raw.pop("format", None) != FORMAT:
        raise UserError(f"{path} is not a report that this version reads ({FORMAT}); was it made by `bench ab`?")
    raw.pop("outcome", None)
    try:
        return TypeAdapter(Report).validate_json(json.dumps(raw), strict=True, extra="forbid")
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"{path} is damaged at {'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def is_report(path: Path) -> bool:
    """Whether a file says that it is the report of a comparison."""
    try:
        with path.open(encoding="utf-8") as file:
            return f'"{FORMAT}"' in file.read(64)
    except (OSError, UnicodeDecodeError):
        return False


def finite(raw: Any) -> Any:
    """The same with None for numbers that JSON does not have."""
    if isinstance(raw, float):
        return raw if math.isfinite(raw) else None
    if isinstance(raw, Mapping):
        return {str(name): finite(value) for name, value in raw.items()}
    if isinstance(raw, Sequence) and not isinstance(raw, str):
        return [finite(value) for value in raw]
    return raw


def metric_of(result: Result, name: str) -> tuple[float, str] | None:
    """(value, unit) of a metric: ttft_ms stands for its headline, ttft_ms.p99 is another; None if it is not there."""
    metric, _, statistic = name.partition(".")
    found = result.metrics.get(metric)
    if found is None or (statistic and statistic not in found.stats):
        return None
    return (found.stats[statistic] if statistic else found.value), found.unit


def series_of(report: Report) -> tuple[list[Series], list[str]]:
    """(pairs of every metric and arm with the base, metrics that are missing in some run)."""
    base, *others = report.plan.names
    series: list[Series] = []
    missing: list[str] = []
    for asked in report.plan.metrics:
        for arm in others:
            rows = [_pair(runs, base, arm, asked.metric) for runs in report.whole]
            pairs = [row for row in rows if row is not None]
            if rows and len(pairs) < len(rows):
                missing.append(f"{asked.metric} ({arm})")
                continue
            series.append(
                Series(
                    metric=asked.metric,
                    unit=pairs[0][4] if pairs else "",
                    base_name=base,
                    arm_name=arm,
                    rounds=tuple(runs[0].round for runs in report.whole),
                    base=tuple(row[0] for row in pairs),
                    arm=tuple(row[1] for row in pairs),
                    base_at=tuple(row[2] for row in pairs),
                    arm_at=tuple(row[3] for row in pairs),
                )
            )
    return series, missing


def _pair(runs: Sequence[Run], base: str, arm: str, metric: str) -> tuple[float, float, int, int, str] | None:
    by_arm = {run.arm: run for run in runs}
    found = [metric_of(run.result, metric) for run in (by_arm[base], by_arm[arm]) if run.result is not None]
    if len(found) != 2 or found[0] is None or found[1] is None:
        return None
    return found[0][0], found[1][0], by_arm[base].at, by_arm[arm].at, found[0][1]


def conclude(report: Report) -> Outcome:
    """Verdicts, gates and winners."""
    plan = report.plan
    n = len(report.whole)
    looks = (*(look.rounds for look in report.looks if look.rounds < n), *([n] if n else []))
    level = LookLevel(looks, max(plan.most, n)) if n else LookLevel((1,), 1)
    series, missing = series_of(report)
    comparisons = judge(
        series,
        {one.metric: one for one in plan.metrics},
        alpha=plan.alpha,
        level=level,
        floor_percent=plan.floor_percent,
        doubt=_doubt(report),
        seed=plan.seed,
    )
    gates = (*text_gates(report), *accuracy_gates(report))
    headline: list[str] = []
    winners: list[str] = []
    floor: float | None = None
    for c in comparisons:
        if c.series.metric != plan.metrics[0].metric:
            continue
        refused = [gate for gate in gates if gate.arm == c.series.arm_name and not gate.passed]
        wins = c.verdict.word == "effect" and bool(c.verdict.better) and not refused and not plan.null
        winners += [c.series.arm_name] if wins else []
        headline.append(_headline(c, refused, plan.null))
        if plan.null and c.paired is not None:
            floor = max(map(abs, (c.percent(end) or 0.0 for end in c.paired.interval())))
    return Outcome(
        final=report.ended is not None,
        comparisons=comparisons,
        gates=gates,
        winners=tuple(winners),
        missing=tuple(missing),
        headline=tuple(headline),
        floor_percent=floor,
    )


def _doubt(report: Report) -> str | None:
    if report.too_many_broken:
        reasons = [next(run.broken for run in runs if run.broken is not None) for runs in report.broken]
        return f"{len(report.broken)} rounds are broken, so the others are a selection; the last: {reasons[-1]}"
    if report.ended is None:
        return f"interim: {len(report.whole)} of {report.plan.most} rounds, and nothing to conclude from yet"
    return None


def _headline(c: Comparison, refused: Sequence[Gate], null: bool) -> str:
    name = f"{c.series.metric} of {c.series.arm_name} against {c.series.base_name}"
    sentence = f"{name}: {c.verdict.word}, {c.verdict.reason}"
    if null and c.verdict.word == "effect" and c.level:
        return f"{sentence}; an arm differs from itself: by chance once in {1 / c.level:.0f}, or this bench is biased"
    if c.verdict.word != "effect":
        return sentence
    if not c.verdict.better:
        return f"{sentence}; it is worse"
    if refused:
        return f"{sentence}; it is better, and that is no win: {'; '.join(gate.reason for gate in refused)}"
    return f"{sentence}; it is better"


def text_gates(report: Report) -> tuple[Gate, ...]:
    """Whether an arm's answers loop more often than the base arm's, or mostly: loops are the fastest text."""
    base, *others = report.plan.names
    gates = []
    for arm in others:
        ours, theirs = (_loops(report, name) for name in (arm, base))
        common = [key for key in theirs if key in ours]
        if not common:
            gates.append(Gate("text", arm, False, "no answers to look at"))
            continue
        found = mcnemar([not theirs[key] for key in common], [not ours[key] for key in common])
        loops, base_loops = found.n - found.arm_correct, found.n - found.base_correct
        failed = loops > MOST_LOOPS * found.n or (loops > base_loops and found.p <= report.plan.alpha)
        counts = f"{loops} of {found.n} answers of {arm} loop, {base_loops} of {base}"
        gates.append(Gate("text", arm, not failed, f"{counts} (exact McNemar p = {found.p:.2g})"))
    return tuple(gates)


def _loops(report: Report, arm: str) -> dict[tuple[int, int], bool]:
    """Whether each answer of an arm loops, by round and request: arms get the same requests in a round."""
    return {
        (run.attempt, request.index): request.looped
        for runs in report.whole
        for run in runs
        if run.arm == arm and run.result is not None
        for request in run.result.requests
        if request.error is None
    }


def accuracy_gates(report: Report) -> tuple[Gate, ...]:
    """Whether an arm answers fewer items right than the base arm: beyond chance, or beyond what the plan allows."""
    gate = report.plan.accuracy
    if gate is None:
        return ()
    base, *others = report.plan.names
    gates = []
    for arm in others:
        if base not in report.accuracy or arm not in report.accuracy:
            gates.append(Gate("accuracy", arm, False, "accuracy was not measured"))
            continue
        ours, theirs = ({item.id: item.correct for item in report.accuracy[name].items} for name in (arm, base))
        if not theirs or ours.keys() != theirs.keys():
            gates.append(Gate("accuracy", arm, False, "the two arms did not answer the same items"))
            continue
        found = mcnemar([theirs[key] for key in theirs], [ours[key] for key in theirs])
        lost = found.base_correct - found.arm_correct
        failed = lost > 0 and (found.p <= report.plan.alpha or lost > gate.most_lost * found.n)
        counts = f"{found.arm_correct} of {found.n} items right with {arm}, {found.base_correct} with {base}"
        gates.append(Gate("accuracy", arm, not failed, f"{counts} (exact McNemar p = {found.p:.2g})"))
    return tuple(gates)
