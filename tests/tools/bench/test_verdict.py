"""The three words, on pairs whose final verdict is known, and on simulated comparisons whose truth is known."""

import math
from collections.abc import Sequence

import numpy as np
import pytest

from stepfloor.errors import UserError
from stepfloor.tools.bench.verdict import Asked, Comparison, Margin, Series, judge
from tests.tools.bench.seeds import (
    BASE,
    CAPTURE_4,
    CAPTURE_11,
    DECODE_BASE,
    DISK,
    DISK_SPREAD,
    GSM8K_BASE,
    RAM,
    ROW_CACHE_DECODE,
    ROW_CACHE_GSM8K,
)

RATE = Asked("output_throughput", True, Margin(2.0, True))


def series(differences: Sequence[float], base: float, name: str = "output_throughput") -> Series:
    n = len(differences)
    arm = tuple(base + d for d in differences)
    return Series(name, "tokens/s", "base", "arm", tuple(range(1, n + 1)), (base,) * n, arm)


def verdict(differences: Sequence[float], base: float, asked: Asked = RATE, **more: float) -> Comparison:
    return judge([series(differences, base)], {asked.metric: asked}, **more)[0]  # type: ignore[arg-type]


def test_logit_capture_had_no_effect() -> None:
    """Four of four pairs were positive and the word was nearly "effect"; at eleven the difference was inside 2 %."""
    early, late = verdict(CAPTURE_4, BASE), verdict(CAPTURE_11, BASE)
    assert early.verdict.word == "unresolved"
    assert "4 pairs, 4 positive" in early.verdict.reason
    assert late.verdict.word == "no effect"
    assert "inside the margin of 2.00 %" in late.verdict.reason
    # without a margin named beforehand there is nothing to be inside of
    assert verdict(CAPTURE_11, BASE, Asked("output_throughput", True)).verdict.word == "unresolved"


def test_one_cell_is_unresolved() -> None:
    """One cell of 45 s showed the row cache 6 % slower; the sweep turned the sign around."""
    one = verdict([-0.06 * DECODE_BASE], DECODE_BASE)
    assert one.verdict.word == "unresolved"
    assert one.paired is None
    # three cells, all faster: t = 2.36, and the interval still holds zero
    three = verdict(ROW_CACHE_DECODE, DECODE_BASE)
    assert three.verdict.word == "unresolved"
    assert three.interval is not None
    assert three.interval[0] < 0


def test_row_cache_on_gsm8k_is_an_effect() -> None:
    found = verdict(ROW_CACHE_GSM8K, GSM8K_BASE)
    assert (found.verdict.word, found.verdict.better) == ("effect", True)


def test_table_in_ram_is_an_effect_only_where_replicated() -> None:
    """14.4 % from a single boot is unresolved; four boots like it, spread as the published ones, are an effect."""
    assert verdict([RAM - DISK], DISK).verdict.word == "unresolved"
    again = np.random.default_rng(0).normal(RAM - DISK, math.sqrt(2) * DISK_SPREAD, 4)
    replicated = verdict(tuple(again), DISK)
    assert (replicated.verdict.word, replicated.verdict.better) == ("effect", True)
    # under the correction for several metrics too
    two = [series(again, DISK), series([2.0, -1.0, 0.5, -0.2], DISK, "steps_per_s")]
    words = [c.verdict.word for c in judge(two, {"output_throughput": RATE, "steps_per_s": Asked("steps_per_s", True)})]
    assert words == ["effect", "unresolved"]


def test_lower_may_be_better() -> None:
    slower = verdict([3.0, 3.2, 2.9, 3.1], 50.0, Asked("output_throughput", higher_is_better=False))
    assert (slower.verdict.word, slower.verdict.better) == ("effect", False)


def test_a_small_real_difference_is_no_effect() -> None:
    """0.5 % with almost no noise is real, and nobody would act on it."""
    found = verdict([0.50, 0.52, 0.49, 0.51], 100.0)
    assert found.verdict.word == "no effect"
    assert "not zero, but" in found.verdict.reason


def test_below_the_noise_floor() -> None:
    """A/A runs showed 5 %: a consistent 4 % is not evidence on that machine."""
    differences = [4.0, 4.2, 3.9, 4.1]
    assert verdict(differences, 100.0).verdict.word == "effect"
    below = verdict(differences, 100.0, floor_percent=5.0)
    assert below.verdict.word == "unresolved"
    assert "noise floor of 5.00 %" in below.verdict.reason


def test_several_metrics_share_the_error_rate() -> None:
    """p = 0.03 alone is an effect; among four metrics it is not, and its interval then holds zero."""
    make = np.random.default_rng(5)
    drawn = make.standard_normal(8)
    lone = tuple((drawn - drawn.mean()) / drawn.std(ddof=1) + 2.715 / math.sqrt(8))
    (alone,) = judge([series(lone, 100.0)], {"output_throughput": Asked("output_throughput", True)})
    assert alone.paired is not None
    assert alone.paired.p == pytest.approx(0.03, abs=1e-4)
    assert alone.verdict.word == "effect"
    others = [series(tuple(make.standard_normal(8)), 100.0, name) for name in ("a", "b", "c")]
    asked = {name: Asked(name, True) for name in ("output_throughput", "a", "b", "c")}
    among = judge([series(lone, 100.0), *others], asked)[0]
    assert among.verdict.word == "unresolved"
    assert among.interval is not None
    assert among.interval[0] < 0


def test_doubt_outweighs_numbers() -> None:
    found = judge([series([9, 9.1, 8.9, 9.2], 50.0)], {"output_throughput": RATE}, doubt="3 of 8 pairs are broken")[0]
    assert (found.verdict.word, found.verdict.reason) == ("unresolved", "3 of 8 pairs are broken")


def test_notes_say_what_spoils_a_verdict() -> None:
    """A trend in the differences, and a first pair that is not like the others."""
    trend = verdict([float(i) for i in range(12)], 100.0)
    assert any("autocorrelation" in note for note in trend.notes)
    cold = verdict([30.0, 1.0, 1.2, 0.8, 1.1, 0.9], 100.0)
    assert any("first pair stands apart" in note for note in cold.notes)


@pytest.mark.parametrize("text", ["0", "-1 %", "two", "nan", "inf", ""])
def test_a_margin_is_a_size(text: str) -> None:
    with pytest.raises(UserError, match="a margin is a size above zero"):
        Margin.parse(text)


def test_margins_in_percent_and_in_the_unit() -> None:
    assert Margin.parse("2 %").of(50.0) == 1.0
    assert Margin.parse(0.5).of(50.0) == 0.5
    assert (str(Margin.parse("2%")), str(Margin.parse("0.50"))) == ("2 %", "0.5")
