"""Looking more than once without fooling oneself: group-sequential levels by alpha spending.

Whoever tests at 5 % after each round of twenty calls a difference in one of four comparisons of a thing with itself.
Here each look has a smaller level, so that all looks together err as often as one test would. The spending function is
Lan and DeMets' in the shape of O'Brien and Fleming: early looks need overwhelming evidence, and the last one costs
little power. It needs no fixed times of looks, so a broken pair spoils nothing. A confidence sequence would allow
looks without an end; at the ten to twenty rounds of a bench its interval is about half as wide again.

The boundaries are those of the normal distribution, carried to t by their p (the significance level approach); that is
an approximation at few pairs, so a simulation in the tests holds the whole procedure to its error rate.

Source: K. K. G. Lan and D. L. DeMets, Discrete sequential boundaries for clinical trials, Biometrika 70 (1983);
P. Armitage, C. K. McPherson and B. C. Rowe (1969), the recursion; C. Jennison and B. W. Turnbull, Group Sequential
Methods (2000), chapters 4, 7 and 9 (repeated confidence intervals); W. Maurer and F. Bretz (2013), Holm with looks.
"""

import math
from collections.abc import Sequence
from functools import cache

import numpy as np

from stepfloor.tools.bench.statistics import special

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(256)


def spent(fraction: float, alpha: float) -> float:
    """How much of the two-sided alpha may be spent once this fraction of rounds is known, half on each side."""
    return 4 * float(special.ndtr(special.ndtri(alpha / 4) / math.sqrt(fraction)))


def look_level(looks: Sequence[int], planned: int, alpha: float) -> float:
    """The two-sided level of one test at the last of these looks.

    looks    pairs known at each look so far, rising; the last one is now
    planned  pairs at the last look of all
    alpha    two-sided error of all looks together
    """
    if not looks or sorted(set(looks)) != list(looks) or looks[0] < 1 or looks[-1] > planned:
        raise ValueError(f"look_level wants rising looks of at most {planned} pairs; got {list(looks)}")
    return _levels(tuple(looks), planned, alpha)[-1]


@cache
def _levels(looks: tuple[int, ...], planned: int, alpha: float) -> tuple[float, ...]:
    """The level at every look. A Brownian motion that has not left its bounds is carried from look to look."""
    levels: list[float] = []
    at = density = np.zeros(0)  # places between the bounds, and what is still there, times quadrature weights
    before = already = 0.0
    for pairs in looks:
        fraction = pairs / planned
        may_spend = spent(fraction, alpha) - already
        sigma = math.sqrt(fraction - before)
        if not levels:
            bound = -float(special.ndtri(may_spend / 2)) * sigma
        else:
            bound = _bound(at, density, sigma, may_spend)
        places, widths = _NODES * bound, _WEIGHTS * bound
        if levels:
            steps = (places[:, None] - at[None, :]) / sigma
            arrived = (np.exp(-0.5 * steps**2) @ density) / (sigma * math.sqrt(2 * math.pi))
        else:
            arrived = np.exp(-0.5 * (places / sigma) ** 2) / (sigma * math.sqrt(2 * math.pi))
        at, density = places, arrived * widths
        levels.append(2 * float(special.ndtr(-bound / math.sqrt(fraction))))
        before, already = fraction, spent(fraction, alpha)
    return tuple(levels)


def _bound(at: np.ndarray, density: np.ndarray, sigma: float, wanted: float) -> float:
    """The bound that a step of sigma passes with the probability that is wanted, by bisection."""
    low, high = 0.0, float(at.max()) + 40 * sigma
    for _ in range(80):
        middle = (low + high) / 2
        beyond = special.ndtr((at - middle) / sigma) + special.ndtr((-at - middle) / sigma)
        low, high = (middle, high) if float(beyond @ density) > wanted else (low, middle)
    return high
