"""Paired statistics against scipy, published tables, and simulation."""

import math
import statistics as stdlib

import numpy as np
import pytest
from scipy import stats

from stepfloor.tools.bench.proportions import mcnemar, wilson
from stepfloor.tools.bench.sequential import look_level, spent
from stepfloor.tools.bench.statistics import (
    autocorrelation,
    bootstrap_t,
    detectable,
    drift,
    first_run,
    holm,
    paired_t,
    power,
)
from tests.tools.bench.seeds import CAPTURE_4, CAPTURE_11, ROW_CACHE_DECODE, ROW_CACHE_GSM8K


@pytest.mark.parametrize(
    ("differences", "mean", "t", "low", "high", "positive"),
    [(CAPTURE_4, 0.93, 2.07, -0.50, 2.35, 4), (CAPTURE_11, 0.28, 1.13, -0.27, 0.84, 8)],
)
def test_published_t(
    differences: tuple[float, ...], mean: float, t: float, low: float, high: float, positive: int
) -> None:
    """Guards the degrees of freedom: with n in place of n - 1, or 1.96 in place of t, the ends differ by 0.1."""
    found = paired_t(differences)
    assert (round(found.mean, 2), round(found.t, 2), found.positive, found.df) == (
        mean, t, positive, len(differences) - 1,
    )  # fmt: skip
    assert tuple(round(end, 2) for end in found.interval()) == (low, high)


def test_recomputed_t() -> None:
    """The source says t = 14.3 for the GSM8K pairs; from its pairs it is 15.1 (and 2.36 for decode)."""
    assert paired_t(ROW_CACHE_GSM8K).t == pytest.approx(15.1, abs=0.05)
    assert paired_t(ROW_CACHE_DECODE).t == pytest.approx(2.36, abs=0.005)


@pytest.mark.parametrize("n", [2, 3, 7, 40])
def test_t_is_scipys(n: int) -> None:
    base, arm = np.random.default_rng(n).normal(100, 2, (2, n))
    ours, theirs = paired_t(arm - base), stats.ttest_rel(arm, base)
    assert (ours.t, ours.p) == pytest.approx((theirs.statistic, theirs.pvalue))
    for level in (0.9, 0.95, 0.999):
        assert ours.interval(level) == pytest.approx(tuple(theirs.confidence_interval(level)))
    margin = 1.5
    lower = stats.ttest_1samp(arm - base, -margin, alternative="greater").pvalue
    upper = stats.ttest_1samp(arm - base, margin, alternative="less").pvalue
    assert ours.equivalence_p(margin) == pytest.approx(max(lower, upper))


def test_equal_differences_have_no_spread() -> None:
    """A metric without noise, like acceptance under greedy decoding, must not divide by zero or by rounding."""
    same, shifted = paired_t([0.0] * 5), paired_t([0.1 + 0.2, 0.3, 0.3, 0.3])
    assert (same.t, same.p, same.interval()) == (0.0, 1.0, (0.0, 0.0))
    assert (shifted.t, shifted.p) == (math.inf, 0.0)
    assert shifted.interval() == pytest.approx((0.3, 0.3))
    assert (shifted.equivalence_p(0.2), shifted.equivalence_p(0.4)) == (1.0, 0.0)
    with pytest.raises(ValueError, match="at least 2 differences; got 1"):
        paired_t([1.0])


def test_drift_is_taken_out_of_the_differences() -> None:
    """In turned pairs drift adds and subtracts by turns: as noise it would hide an effect of its own size.

    The estimate, its error and its degrees of freedom are those of a regression on the distance, at distance zero.
    """
    make = np.random.default_rng(7)
    distances = [1, -1] * 6 + [1]  # one pair too many: the plain mean would keep a thirteenth of the drift
    noise = make.normal(0, 0.5, 13)
    differences = [2.0 - 3.0 * d + e for d, e in zip(distances, noise, strict=True)]
    found, plain = paired_t(differences, distances), paired_t(differences)
    assert found.p < 1e-6
    assert plain.p > 0.05
    theirs = stats.linregress(distances, differences)
    assert (found.mean, found.se, found.df) == pytest.approx((theirs.intercept, theirs.intercept_stderr, 11))
    balanced = paired_t(differences[:12], distances[:12])
    assert balanced.mean == pytest.approx(np.mean(differences[:12]))
    with pytest.raises(ValueError, match="at least 3 differences; got 2"):
        paired_t([1.0, 2.0], [1, -1])


def test_power_is_the_share_that_is_found() -> None:
    """1,000 simulated comparisons: a share strays by at most 3 * sqrt(p (1 - p) / 1000) = 0.035 in 997 of 1,000."""
    n, sd, effect = 9, 2.8, 3.0
    drawn = np.random.default_rng(1).normal(effect, sd, (1000, n))
    found = np.mean([paired_t(one).p <= 0.05 for one in drawn])
    assert found == pytest.approx(power(n, effect, sd), abs=3 * math.sqrt(0.8 * 0.2 / 1000))


@pytest.mark.parametrize(("n", "effect", "alpha"), [(3, 4.0, 0.05), (9, 3.0, 0.05), (20, 1.0, 0.001), (12, 0.0, 0.05)])
def test_power_is_scipys(n: int, effect: float, alpha: float) -> None:
    critical, shift = stats.t.ppf(1 - alpha / 2, n - 1), effect / 2.0 * math.sqrt(n)
    theirs = stats.nct.sf(critical, n - 1, shift) + stats.nct.cdf(-critical, n - 1, shift)
    assert power(n, effect, 2.0, alpha) == pytest.approx(theirs, abs=1e-5)


@pytest.mark.parametrize("n", [2, 3, 4, 12, 50])
def test_detectable_inverts_power(n: int) -> None:
    """At the level of a first look too: two degrees of freedom and one in a million."""
    for alpha in (0.05, 1e-4, 1e-6):
        assert power(n, detectable(n, 2.0, alpha, 0.9), 2.0, alpha) == pytest.approx(0.9, abs=1e-6)


def test_bootstrap_keeps_its_level_where_bca_does_not() -> None:
    """Eight differences with normal noise, the reason for the studentised bootstrap.

    400 intervals that hold the mean in 95 % stray from it by 3 * sqrt(0.95 * 0.05 / 400) = 0.033.
    """
    make = np.random.default_rng(2)
    held = {"studentised": 0, "bca": 0}
    for trial in range(400):
        drawn = make.normal(1.0, 1.0, 8)
        low, high = bootstrap_t(tuple(drawn), seed=trial) or (0.0, 0.0)
        held["studentised"] += low <= 1.0 <= high
        bca = stats.bootstrap((drawn,), np.mean, n_resamples=999, rng=np.random.default_rng(trial))
        held["bca"] += bca.confidence_interval.low <= 1.0 <= bca.confidence_interval.high
    assert held["studentised"] / 400 >= 0.95 - 0.033 > held["bca"] / 400


def test_bootstrap_is_repeatable_and_needs_pairs() -> None:
    assert bootstrap_t(CAPTURE_11, seed=3) == bootstrap_t(CAPTURE_11, seed=3)
    assert bootstrap_t(CAPTURE_4) is None
    assert bootstrap_t([0.5] * 8) == (0.5, 0.5)


def test_holm() -> None:
    """Holm's own example of order: a p that passes its level after one that failed must not be rejected."""
    outcome = holm([0.04, 0.011, 0.3, 0.026], lambda standing: 0.05 / standing)
    assert [rejected for rejected, _ in outcome] == [False, True, False, False]
    # 0.026 > 0.05 / 3 stops it, and all that stand are held against that level
    assert [level for _, level in outcome] == pytest.approx([0.05 / 3, 0.05 / 4, 0.05 / 3, 0.05 / 3])
    assert all(rejected for rejected, _ in holm([0.01, 0.02], lambda standing: 0.05 / standing))


def test_spending_is_the_published_table() -> None:
    """Five equal looks at 5 %: 4.8769, 3.3569, 2.6803, 2.2898, 2.0310 (the tables of Lan and DeMets' program)."""
    bounds = [-stats.norm.ppf(look_level(range(1, k + 1), 5, 0.05) / 2) for k in range(1, 6)]
    assert bounds == pytest.approx([4.8769, 3.3569, 2.6803, 2.2898, 2.0310], abs=2e-4)
    assert spent(1.0, 0.05) == pytest.approx(0.05)


def test_one_look_is_an_ordinary_test() -> None:
    assert look_level([12], 12, 0.05) == pytest.approx(0.05)
    with pytest.raises(ValueError, match="rising looks"):
        look_level([4, 4], 12, 0.05)


def test_diagnostics() -> None:
    """Drift is found in spite of a difference between the arms; a slow first run is, and noise is not."""
    order = range(12)
    arms = ["a", "b", "b", "a"] * 3
    noise = np.random.default_rng(4).normal(0, 0.3, 12)
    values = [100 - 0.5 * i + 20 * (arm == "b") + e for i, arm, e in zip(order, arms, noise, strict=True)]
    slope = drift(values, order, arms)
    assert slope is not None
    assert slope.low < -0.5 < slope.high < 0
    flat = drift(noise, order, arms)
    assert flat is not None
    assert not flat.beyond_chance
    assert drift([1, 2, 3], [0, 1, 2], ["a", "b", "a"]) is None

    regression = stats.linregress(order, noise)
    alone = drift(noise, order, ["a"] * 12)
    assert alone is not None
    assert alone.per_run == pytest.approx(regression.slope)
    assert alone.high - alone.per_run == pytest.approx(regression.stderr * stats.t.ppf(0.975, 10))

    assert (autocorrelation([1, -1] * 6) or (0, 0))[0] == pytest.approx(-11 / 12)
    assert autocorrelation([1.0, 2.0]) is None
    slow = first_run([46.0, 167.0, 166.0, 168.0, 167.5])
    assert slow is not None
    assert slow[0] == pytest.approx(46 - stdlib.mean([167.0, 166.0, 168.0, 167.5]))
    assert slow[1] < 1e-4
    usual = first_run([166.0, 167.0, 166.0, 168.0])
    assert usual is not None
    assert usual[1] > 0.3


def test_mcnemar_is_exact() -> None:
    base, arm = [True] * 9 + [False] * 2 + [True] * 5, [False] * 9 + [True] * 2 + [True] * 5
    found = mcnemar(base, arm)
    assert (found.n, found.base_correct, found.arm_correct, found.base_only, found.arm_only) == (16, 14, 7, 9, 2)
    assert found.p == pytest.approx(stats.binomtest(2, 11).pvalue)
    assert mcnemar([True, False], [True, False]).p == 1.0
    # far in the tail, where floating point products would have lost it
    assert mcnemar([True] * 2000, [False] * 2000).p == pytest.approx(2.0 * 2.0**-2000)
    with pytest.raises(ValueError, match="same items"):
        mcnemar([True], [])


@pytest.mark.parametrize(("successes", "n"), [(0, 20), (20, 20), (249, 256), (1, 3)])
def test_wilson_is_scipys(successes: int, n: int) -> None:
    theirs = stats.binomtest(successes, n).proportion_ci(0.95, method="wilson")
    assert wilson(successes, n) == pytest.approx((theirs.low, theirs.high))
