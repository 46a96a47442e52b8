"""Paired statistics of measurements that a person will act on.

The t interval decides; the bootstrap stands beside it for readers who doubt the normal distribution. It is the
studentised one, because a bench has 6 to 20 pairs: of 800 simulated intervals of eight differences 94 % held the mean
(93 % where the noise was lognormal), of BCa's 86 % (84 %), whose tails end where the sample ends.

Source: Student (1908); B. Efron and R. Tibshirani, An Introduction to the Bootstrap (1993), section 12.5 (bootstrap-t);
D. Schuirmann (1987), two one-sided tests; S. Holm (1979), step-down correction. Distributions are scipy.special's.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from stepfloor.errors import UserError

try:
    from scipy import special as special
except ImportError:
    raise UserError(
        "comparing measurements needs scipy, which is not installed; run `pip install 'stepfloor[bench]'`"
    ) from None

BOOTSTRAP_PAIRS = 6  # with fewer, resamples are too few to have tails
BOOTSTRAP_RESAMPLES = 4999


@dataclass(frozen=True, slots=True)
class PairedT:
    """A paired t test of differences; sd, se and mean in their unit.

    p  two-sided, of no difference; positive  differences above zero
    """

    n: int
    mean: float
    sd: float
    se: float
    t: float
    df: int
    p: float
    positive: int

    def interval(self, level: float = 0.95) -> tuple[float, float]:
        """The interval of the mean difference."""
        half = float(special.stdtrit(self.df, (1 + level) / 2)) * self.se if self.se else 0.0
        return self.mean - half, self.mean + half

    def equivalence_p(self, margin: float) -> float:
        """The larger p of two one-sided tests that the mean lies beyond -margin or margin."""
        nearer = margin - abs(self.mean)
        if not self.se:
            return 0.0 if nearer > 0 else 1.0
        return float(special.stdtr(self.df, -nearer / self.se))


def paired_t(differences: Sequence[float], distances: Sequence[float] = ()) -> PairedT:
    """The paired t test, of what is left of the differences once a drift of the machine is taken out of them.

    distances  runs between the two of each pair, negative where the order was turned: a machine that drifts adds its
               slope times this to the difference, which is no noise and costs one degree of freedom to remove; without
               distances this is the ordinary test
    Raises ValueError for fewer than two differences, which have no spread, or three with distances.
    """
    n, lost = len(differences), 2 if _vary(distances) else 1
    if n <= lost:
        raise ValueError(f"paired_t wants at least {lost + 1} differences; got {n}")
    values = np.asarray(without_drift(differences, distances), dtype=float)
    mean = float(values.mean())
    sd = math.sqrt(float(((values - mean) ** 2).sum()) / (n - lost))
    # what is left of equal values after rounding is no spread
    if sd <= 1e-12 * float(np.abs(differences).max()):
        sd = 0.0
    se = sd / math.sqrt(n)
    if lost == 2:  # zero on average in whole squares of orders; elsewhere the slope's error is the mean's as well
        d = np.asarray(distances, dtype=float)
        se *= math.sqrt(1 + n * float(d.mean()) ** 2 / float(((d - d.mean()) ** 2).sum()))
    t = mean / se if se else math.copysign(math.inf, mean) if mean else 0.0
    p = 2 * float(special.stdtr(n - lost, -abs(t))) if math.isfinite(t) else 0.0
    return PairedT(n, mean, sd, se, t, n - lost, p, sum(one > 0 for one in differences))


def without_drift(differences: Sequence[float], distances: Sequence[float]) -> tuple[float, ...]:
    """Differences less the part that grows with the distance of their runs, by least squares."""
    if not _vary(distances):
        return tuple(differences)
    d, values = np.asarray(distances, dtype=float), np.asarray(differences, dtype=float)
    slope = float((d - d.mean()) @ values) / float(((d - d.mean()) ** 2).sum())
    return tuple(values - slope * d)


def _vary(distances: Sequence[float]) -> bool:
    return len(set(distances)) > 1


def bootstrap_t(
    differences: Sequence[float], level: float = 0.95, seed: int = 0, resamples: int = BOOTSTRAP_RESAMPLES
) -> tuple[float, float] | None:
    """The studentised bootstrap interval of the mean; None below BOOTSTRAP_PAIRS differences, or without resamples."""
    n = len(differences)
    if n < BOOTSTRAP_PAIRS or not resamples:
        return None
    values = np.asarray(differences, dtype=float)
    mean, se = values.mean(), values.std(ddof=1) / math.sqrt(n)
    drawn = values[np.random.default_rng(seed).integers(0, n, (resamples, n))]  # [resamples, n]
    spread = drawn.std(axis=1, ddof=1) / math.sqrt(n)
    # one value drawn n times has no t of its own: once in n**(n - 1) resamples
    usable = spread > 0
    if not usable.any():
        return float(mean), float(mean)
    t = (drawn.mean(axis=1)[usable] - mean) / spread[usable]
    below, above = np.quantile(t, [(1 - level) / 2, (1 + level) / 2])
    return float(mean - above * se), float(mean - below * se)


def power(n: int, effect: float, sd: float, alpha: float = 0.05, lost: int = 1) -> float:
    """How often n pairs, whose differences spread by sd, show an effect of this size at level alpha.

    lost  degrees of freedom that the test gives up: 2 where drift is taken out
    """
    if not sd:
        return 1.0 if effect else alpha
    shift, critical = abs(effect) / sd * math.sqrt(n), float(special.stdtrit(n - lost, 1 - alpha / 2))
    spread, weights = _spreads(n - lost)
    return float((special.ndtr(shift - critical * spread) + special.ndtr(-shift - critical * spread)) @ weights)


@cache
def _spreads(df: int) -> tuple[np.ndarray, np.ndarray]:
    """Sample over true standard deviation at df degrees of freedom, and the weight of each in a mean.

    The noncentral t distribution, integrated over the spread: scipy's own has no value in the far tails of few degrees
    of freedom, where the first looks are.
    """
    nodes, weights = np.polynomial.legendre.leggauss(200)
    return np.sqrt(special.gammaincinv(df / 2, (nodes + 1) / 2) * 2 / df), weights / 2


def detectable(n: int, sd: float, alpha: float = 0.05, wanted: float = 0.8, lost: int = 1) -> float:
    """The least effect that n pairs show with the power that is wanted; infinite where no degree of freedom is left."""
    if n <= lost:
        return math.inf
    if not sd:
        return 0.0
    low, high = 0.0, sd
    while power(n, high, sd, alpha, lost) < wanted:
        low, high = high, 2 * high
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if power(n, middle, sd, alpha, lost) < wanted else (low, middle)
    return high


def holm(p_values: Sequence[float], level: Callable[[int], float]) -> list[tuple[bool, float]]:
    """Holm's correction: (rejected, level it was held against) for each p.

    level(m) is the level of one test where m hypotheses still stand: alpha / m at a fixed number of rounds. What comes
    after the first that stands is held against the same level as that one, so a p is below its level if and only if it
    was rejected, and an interval of 1 - level agrees with the verdict.
    """
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    outcome = [(False, 0.0)] * len(p_values)
    standing, held = len(p_values), False
    for i in order:
        held = held or p_values[i] > level(standing)
        outcome[i] = not held, level(standing)
        standing -= not held
    return outcome


def autocorrelation(differences: Sequence[float]) -> tuple[float, float] | None:
    """(lag-1 autocorrelation, what chance alone keeps it within 95 times of 100), or None for fewer than four."""
    if len(differences) < 4:
        return None
    centred = np.asarray(differences, dtype=float) - np.mean(differences)
    total = float((centred**2).sum())
    if not total:
        return 0.0, 1.0
    return float((centred[:-1] * centred[1:]).sum()) / total, 1.96 / math.sqrt(len(differences))


@dataclass(frozen=True, slots=True)
class Slope:
    """Change from one run to the next, in the metric's unit, with its 95 % interval."""

    per_run: float
    low: float
    high: float

    @property
    def beyond_chance(self) -> bool:
        """Whether the interval leaves zero out."""
        return not self.low <= 0 <= self.high


def drift(values: Sequence[float], positions: Sequence[int], arms: Sequence[str]) -> Slope | None:
    """The slope of all runs against their place in the order, with a level of its own for each arm.

    None where no degree of freedom is left.
    """
    names = sorted(set(arms))
    df = len(values) - len(names) - 1
    if df < 1:
        return None
    design = np.column_stack([positions, *([arm == name for arm in arms] for name in names)]).astype(float)
    target = np.asarray(values, dtype=float)
    solution, *_ = np.linalg.lstsq(design, target, rcond=None)
    left = target - design @ solution
    variance = float(left @ left) / df * float(np.linalg.pinv(design.T @ design)[0, 0])
    half = float(special.stdtrit(df, 0.975)) * math.sqrt(max(variance, 0.0))
    return Slope(float(solution[0]), float(solution[0]) - half, float(solution[0]) + half)


def first_run(values: Sequence[float]) -> tuple[float, float] | None:
    """(first value less the mean of the rest, p of such a distance by chance), or None for fewer than four values."""
    if len(values) < 4:
        return None
    first, rest = values[0], np.asarray(values[1:], dtype=float)
    distance, spread = first - float(rest.mean()), float(rest.std(ddof=1)) * math.sqrt(1 + 1 / len(rest))
    if not spread:
        return distance, 0.0 if distance else 1.0
    return distance, 2 * float(special.stdtr(len(rest) - 1, -abs(distance) / spread))
