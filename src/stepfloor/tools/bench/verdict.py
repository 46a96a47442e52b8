"""From pairs to one of three words: effect, no effect, unresolved.

A difference is an effect if its interval leaves zero out; there is no effect if the equivalence test puts the
difference inside the margin that was named beforehand, even if it is not zero; whatever shows neither is unresolved.
Several metrics, or several arms, share the error rate (Holm).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from stepfloor.errors import UserError
from stepfloor.tools.bench.statistics import (
    BOOTSTRAP_RESAMPLES,
    PairedT,
    Slope,
    autocorrelation,
    bootstrap_t,
    detectable,
    drift,
    first_run,
    holm,
    paired_t,
    without_drift,
)

Word = Literal["effect", "no effect", "unresolved"]

LEAST_PAIRS = 3  # two have a spread, and no sign of what it is worth: t at one degree of freedom is 12.7
FIRST_RUN_P = 0.01
POWER = 0.8


@dataclass(frozen=True, slots=True)
class Margin:
    """Differences that nobody would act on: a share of the base arm's mean in percent, or the metric's own unit."""

    size: float
    percent: bool

    @classmethod
    def parse(cls, text: object) -> "Margin":
        """Read "2 %", "0.5" or a number. Raises UserError for anything else, and for what is not above zero."""
        words = str(text).strip()
        try:
            size = float(words.removesuffix("%"))
        except ValueError:
            size = math.nan
        if not 0 < size < math.inf:
            raise UserError(
                f'a margin is a size above zero, like "2 %" of the base arm or 0.5 in the unit; got {text!r}'
            )
        return cls(size, words.endswith("%"))

    def of(self, base: float) -> float:
        """The margin in the metric's unit."""
        return self.size / 100 * abs(base) if self.percent else self.size

    def __str__(self) -> str:
        return f"{self.size:g} %" if self.percent else f"{self.size:g}"


@dataclass(frozen=True, slots=True)
class Asked:
    """A metric to compare, what is good about it, and what would not matter: without a margin, no "no effect"."""

    metric: str
    higher_is_better: bool
    margin: Margin | None = None


@dataclass(frozen=True, slots=True)
class Series:
    """Values of one metric, pair by pair.

    rounds           number of each pair's round
    base_at, arm_at  place of each run in the order of all runs, where it is known
    """

    metric: str
    unit: str
    base_name: str
    arm_name: str
    rounds: tuple[int, ...]
    base: tuple[float, ...]
    arm: tuple[float, ...]
    base_at: tuple[int, ...] = ()
    arm_at: tuple[int, ...] = ()

    @property
    def differences(self) -> tuple[float, ...]:
        """Arm less base."""
        return tuple(b - a for a, b in zip(self.base, self.arm, strict=True))

    @property
    def distances(self) -> tuple[float, ...]:
        """Runs from the base arm's to the arm's, of each pair; empty where the order is not known."""
        return tuple(float(b - a) for a, b in zip(self.base_at, self.arm_at, strict=True))


@dataclass(frozen=True, slots=True)
class Verdict:
    """The word, why, and for an effect whether it is the better or the worse."""

    word: Word
    reason: str
    better: bool | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """One metric of one arm beside the base arm's, in pairs. Differences are arm less base, in the metric's unit.

    level             two-sided level that p was held against, after looks and correction
    interval          of the mean difference, at 1 - level
    bootstrap         the same from the studentised bootstrap; None for few pairs
    margin            in the metric's unit
    equivalence_p     of two one-sided tests, held against equivalence_level
    detectable        the least effect that so many pairs with this spread show in 8 of 10 comparisons
    autocorrelation   of successive differences, and what chance alone keeps it within
    drift             change from one run to the next over all runs
    notes             what a reader should know before believing the verdict
    """

    series: Series
    higher_is_better: bool
    verdict: Verdict
    base_mean: float
    arm_mean: float
    paired: PairedT | None = None
    level: float | None = None
    interval: tuple[float, float] | None = None
    bootstrap: tuple[float, float] | None = None
    margin: float | None = None
    equivalence_p: float | None = None
    equivalence_level: float | None = None
    detectable: float | None = None
    autocorrelation: tuple[float, float] | None = None
    drift: Slope | None = None
    notes: tuple[str, ...] = ()

    def percent(self, difference: float) -> float | None:
        """A difference as a share of the base arm's mean; None where that is zero."""
        return 100 * difference / abs(self.base_mean) if self.base_mean else None

    def show(self, difference: float) -> str:
        """A difference in words: in percent, or in the unit where the base is zero."""
        share = self.percent(difference)
        return f"{difference:+.4g} {self.series.unit}".rstrip() if share is None else f"{share:+.2f} %"


Level = Callable[[int, float], float]


def fixed_level(standing: int, alpha: float) -> float:
    """The level of one of `standing` tests, where the number of rounds was fixed beforehand."""
    return alpha / standing


def judge(
    series: Sequence[Series],
    asked: Mapping[str, Asked],
    *,
    alpha: float = 0.05,
    level: Level = fixed_level,
    floor_percent: float = 0.0,
    doubt: str | None = None,
    seed: int = 0,
    resamples: int = BOOTSTRAP_RESAMPLES,
) -> tuple[Comparison, ...]:
    """A verdict for each series.

    level          gives the level of one test from how many hypotheses still stand and the error rate of them all
    floor_percent  noise floor, from a comparison of an arm with itself: what is smaller is not called an effect
    doubt          why nothing can be concluded at all, if that is so: every word becomes "unresolved"
    resamples      of the bootstrap, which no verdict depends on; 0 leaves it out
    """
    tests = [paired_t(one.differences, one.distances) if len(one.rounds) >= LEAST_PAIRS else None for one in series]
    margins = [_margin(asked[one.metric], one) for one in series]
    differs = holm([t.p if t else 1.0 for t in tests], lambda standing: level(standing, alpha))
    # one-sided tests: half of a two-sided level of twice the error rate
    equal = holm(
        [t.equivalence_p(m) if t and m else 1.0 for t, m in zip(tests, margins, strict=True)],
        lambda standing: level(standing, 2 * alpha) / 2,
    )
    return tuple(
        _compare(one, asked[one.metric], test, margin, effect, same, floor_percent, doubt, seed, resamples)
        for one, test, margin, effect, same in zip(series, tests, margins, differs, equal, strict=True)
    )


def _margin(asked: Asked, series: Series) -> float | None:
    if asked.margin is None or not series.rounds:
        return None
    return asked.margin.of(sum(series.base) / len(series.base)) or None


def _compare(
    series: Series,
    asked: Asked,
    test: PairedT | None,
    margin: float | None,
    effect: tuple[bool, float],
    same: tuple[bool, float],
    floor_percent: float,
    doubt: str | None,
    seed: int,
    resamples: int,
) -> Comparison:
    n = len(series.rounds)
    base, arm = (sum(values) / n if n else math.nan for values in (series.base, series.arm))
    if test is None:
        reason = doubt or f"{n} of the {LEAST_PAIRS} pairs that are the least with a spread to judge by; measure more"
        return Comparison(series, asked.higher_is_better, Verdict("unresolved", reason), base, arm)
    (different, level), (equivalent, equivalence_level) = effect, same
    values = without_drift(series.differences, series.distances)
    comparison = Comparison(
        series=series,
        higher_is_better=asked.higher_is_better,
        verdict=Verdict("unresolved", ""),
        base_mean=base,
        arm_mean=arm,
        paired=test,
        level=level,
        interval=test.interval(1 - level),
        bootstrap=bootstrap_t(values, 1 - level, seed, resamples),
        margin=margin,
        equivalence_p=None if margin is None else test.equivalence_p(margin),
        equivalence_level=None if margin is None else equivalence_level,
        detectable=detectable(test.n, test.sd, level, POWER, test.n - test.df),
        autocorrelation=autocorrelation(values),
        drift=_drift(series),
    )
    verdict = _verdict(comparison, different, equivalent, floor_percent, doubt)
    return replace(comparison, verdict=verdict, notes=tuple(_notes(comparison)))


def _verdict(c: Comparison, different: bool, equivalent: bool, floor_percent: float, doubt: str | None) -> Verdict:
    if c.paired is None or c.interval is None or c.detectable is None:
        raise RuntimeError(f"a verdict on {c.series.metric} was asked for without a test")
    span = f"{c.show(c.interval[0])} to {c.show(c.interval[1])}"
    found = f"{c.show(c.paired.mean)} ({span}; {c.paired.n} pairs, {c.paired.positive} positive)"
    if doubt is not None:
        return Verdict("unresolved", doubt)
    if equivalent and c.margin is not None:
        small = "not zero, but " if different else ""
        return Verdict("no effect", f"{found} is {small}inside the margin of {_plain(c, c.margin)}")
    if not different:
        beyond = f" and leaves the margin of {_plain(c, c.margin)}" if c.margin is not None else ""
        least = _plain(c, c.detectable)
        return Verdict("unresolved", f"{found} holds zero{beyond}; effects of {least} or more would show")
    share = c.percent(c.paired.mean)
    if share is not None and abs(share) < floor_percent:
        return Verdict("unresolved", f"{found} is below the noise floor of {floor_percent:.2f} %")
    return Verdict("effect", f"{found} leaves zero out", better=(c.paired.mean > 0) == c.higher_is_better)


def _notes(c: Comparison) -> list[str]:
    notes = []
    if c.bootstrap is not None and c.interval is not None:
        by_t, by_bootstrap = (not low <= 0 <= high for low, high in (c.interval, c.bootstrap))
        if by_t != by_bootstrap:
            notes.append(
                f"the bootstrap interval, {c.show(c.bootstrap[0])} to {c.show(c.bootstrap[1])}, disagrees about zero"
            )
    if c.autocorrelation is not None and c.autocorrelation[0] > c.autocorrelation[1]:
        notes.append(
            f"successive differences resemble each other (lag-1 autocorrelation {c.autocorrelation[0]:+.2f}, by chance "
            f"at most {c.autocorrelation[1]:.2f}): there is less evidence than {len(c.series.rounds)} pairs suggest"
        )
    if c.drift is not None and c.drift.beyond_chance:
        notes.append(f"the machine drifts by {c.show(c.drift.per_run)} a run, which is taken out of the differences")
    first = first_run(without_drift(c.series.differences, c.series.distances))
    if first is not None and first[1] < FIRST_RUN_P:
        notes.append(f"the first pair stands apart, by {c.show(first[0])} (p = {first[1]:.2g}); look at the warm-up")
    return notes


def _drift(series: Series) -> Slope | None:
    if not series.base_at or not series.arm_at:
        return None
    n = len(series.rounds)
    return drift(
        (*series.base, *series.arm), (*series.base_at, *series.arm_at), [series.base_name] * n + [series.arm_name] * n
    )


def _plain(c: Comparison, size: float) -> str:
    return c.show(size).removeprefix("+")
