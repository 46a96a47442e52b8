"""How often whole comparisons are wrong, by simulation: drift of 1 % a run, noise of 2 %, the truth known.

6.5 % is the bound that 1,000 comparisons with a true rate of 5 % stay below in 98 of 100 cases.
"""

import math

import pytest

from stepfloor.tools.bench.statistics import power
from tests.tools.bench.simulate import FIXED, SEQUENTIAL, Machine, simulate


def test_identical_arms_are_rarely_called_different() -> None:
    words, _ = simulate(1000, Machine(), FIXED)
    assert words["effect"] <= 65


def test_looks_do_not_add_up() -> None:
    """Nine looks at 5 % each would call 18 % of these different. 200 with a true 5 % stay below 9.5 % in 99 of 100."""
    words, _ = simulate(200, Machine(), SEQUENTIAL)
    assert words["effect"] <= 19


def test_true_effects_are_found_as_often_as_stated() -> None:
    """3 % at 12 rounds, of a level that is 11.5 lower on average. The drift is taken out, for a degree of freedom.

    400 comparisons stray by 3 * sqrt(p (1 - p) / 400) = 0.055.
    """
    level = 1 - 0.115
    stated = power(12, 3.0 * level, math.sqrt(2) * 2.0 * level, lost=2)
    words, _ = simulate(400, Machine(effect=3.0), FIXED)
    assert stated > 0.85
    assert words["effect"] / 400 == pytest.approx(stated, abs=0.055)


@pytest.mark.slow
@pytest.mark.parametrize("drift", [0.0, -1.0, -3.0])
def test_error_rate_of_the_sequential_rule(drift: float) -> None:
    words, _ = simulate(1000, Machine(drift=drift), SEQUENTIAL, seed=1)
    assert words["effect"] <= 65


@pytest.mark.slow
def test_several_metrics_share_one_error_rate() -> None:
    words, _ = simulate(1000, Machine(), SEQUENTIAL, seed=2, metrics=3)
    assert words["effect"] <= 65


@pytest.mark.slow
def test_equivalence_is_rarely_wrong() -> None:
    """A true difference of the size of the margin is called "no effect" at most as often as alpha allows."""
    words, _ = simulate(1000, Machine(drift=0.0, effect=2.0), SEQUENTIAL, seed=3)
    assert words["no effect"] <= 65


@pytest.mark.slow
def test_sequential_finds_true_effects_sooner() -> None:
    """Against 20 fixed rounds: as many are found to within a few, in fewer rounds."""
    words, rounds = simulate(1000, Machine(effect=3.0), SEQUENTIAL, seed=4)
    fixed, _ = simulate(1000, Machine(effect=3.0), (20,), seed=4)
    assert words["effect"] >= fixed["effect"] - 40
    assert rounds < 16
