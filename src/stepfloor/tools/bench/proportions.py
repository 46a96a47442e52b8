"""Shares of right answers: an interval for one, and whether two runs over the same items differ.

Source: E. B. Wilson, Probable inference, the law of succession, and statistical inference (1927); Q. McNemar, Note on
the sampling error of the difference between correlated proportions (1947), in its exact, binomial form.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb, sqrt
from statistics import NormalDist


def wilson(successes: int, n: int, level: float = 0.95) -> tuple[float, float]:
    """The interval of a share, which stays inside 0 and 1 and is right for few items too."""
    if not 0 <= successes <= n or n == 0:
        raise ValueError(f"wilson wants 0 <= successes <= n and n > 0; got {successes} of {n}")
    z = NormalDist().inv_cdf((1 + level) / 2)
    share = successes / n
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    # at 0 and at n the ends are 0 and 1 exactly, and rounding must not move them
    return (0.0 if successes == 0 else middle - half), (1.0 if successes == n else middle + half)


@dataclass(frozen=True, slots=True)
class McNemar:
    """Two runs over the same items. Only the items that one answered right and the other wrong tell them apart.

    base_only, arm_only  items that one of the two answered right; p  two-sided, exact
    """

    n: int
    base_correct: int
    arm_correct: int
    base_only: int
    arm_only: int
    p: float


def mcnemar(base: Sequence[bool], arm: Sequence[bool]) -> McNemar:
    """The exact test on two runs over the same items, in the same order. Raises ValueError for other lengths."""
    if len(base) != len(arm):
        raise ValueError(f"mcnemar wants the same items in both runs; got {len(base)} and {len(arm)}")
    base_only = sum(b and not a for b, a in zip(base, arm, strict=True))
    arm_only = sum(a and not b for b, a in zip(base, arm, strict=True))
    return McNemar(len(base), sum(base), sum(arm), base_only, arm_only, _two_sided(base_only, base_only + arm_only))


def _two_sided(successes: int, n: int) -> float:
    """How probable a split at least as uneven is where both sides are equally likely. Integers until the division."""
    fewer = min(successes, n - successes)
    return min(1.0, 2 * sum(comb(n, i) for i in range(fewer + 1)) / 2**n)
