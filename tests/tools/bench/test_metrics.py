"""Figures from requests whose times are known: every metric equals its arithmetic."""

import numpy as np
import pytest

from stepfloor.errors import UserError
from stepfloor.tools.bench import metrics as metrics_module
from stepfloor.tools.bench.metrics import (
    distribution,
    in_flight,
    leading_outliers,
    looped,
    mean_in_flight,
    measure,
    parse_slo,
    tokens_between,
)
from stepfloor.tools.bench.result import Request


def request(index: int, planned: float, sent: float, chunks: list[float], tokens: int, **more: object) -> Request:
    """A request that ended with its last chunk."""
    given = {"prompt_tokens": 100, "chunk_s": tuple(chunks), **more}
    return Request(
        index, planned, sent, chunks[0], chunks[-1], chunks[-1], chunks=len(chunks), output_tokens=tokens, **given
    )


def test_chunks_of_several_tokens() -> None:
    """C-B-01: ten chunks of three tokens every 30 ms. Guards against: chunks counted as tokens."""
    first = request(0, 0.0, 0.0, [0.03 * i for i in range(10)], 30)
    metrics = measure([first], 0.27)
    assert metrics["itl_ms"].value == pytest.approx(30.0)
    assert metrics["itl_ms"].count == 9
    assert metrics["tpot_ms"].value == pytest.approx(270 / 29)
    assert round(metrics["tpot_ms"].value, 2) == 9.31
    assert metrics["per_user_rate"].value == pytest.approx(29 / 0.27)
    assert metrics["output_throughput"].value == pytest.approx(30 / 0.27)
    assert metrics["total_throughput"].value == pytest.approx(130 / 0.27)


def test_latencies_count_from_the_plan() -> None:
    """Guards against: an open loop whose late requests look fast because their wait is left out."""
    late = request(0, 1.0, 1.5, [1.6, 1.8, 2.0], 5)
    metrics = measure([late], 2.0)
    assert metrics["ttft_ms"].value == pytest.approx(600)
    assert metrics["e2e_ms"].value == pytest.approx(1000)
    assert metrics["ttft_from_sent_ms"].value == pytest.approx(100)
    assert metrics["send_delay_ms"].value == pytest.approx(500)
    assert metrics["tpot_ms"].value == pytest.approx(100)


def test_what_failed_or_was_cut_is_left_out_where_it_has_to_be() -> None:
    """Guards against: a failed request's tokens in a rate, a cut one among whole latencies."""
    whole = request(0, 0.0, 0.0, [0.1, 0.2], 2, cached_tokens=50)
    cut = request(1, 0.0, 0.0, [0.1, 0.2, 0.3], 3, cut=True, chunk_tokens=(1, 2, 3))
    failed = Request(2, 0.0, 0.0, 0.1, 0.2, 0.2, output_tokens=90, error="dropped")
    metrics = measure([whole, cut, failed], 1.0)
    assert metrics["output_throughput"].value == 5
    assert metrics["request_throughput"].value == 1
    assert metrics["e2e_ms"].count == 1
    assert metrics["ttft_ms"].count == 2
    assert metrics["cache_hit_rate"].value == 0.25


def test_goodput_counts_requests_that_meet_every_limit() -> None:
    """Guards against: one limit met standing for all."""
    good = request(0, 0.0, 0.0, [0.1, 0.2], 3)
    slow_first = request(1, 0.0, 0.0, [0.6, 0.7], 3)
    slow_tokens = request(2, 0.0, 0.0, [0.1, 0.9], 3)
    metrics = measure([good, slow_first, slow_tokens], 2.0, parse_slo("ttft:500 tpot:50"))
    assert metrics["goodput"].value == 0.5
    assert metrics["goodput_share"].value == pytest.approx(1 / 3)
    with pytest.raises(UserError, match="'ttfb:3'"):
        parse_slo("ttfb:3")


def test_concurrency_is_a_mean_over_time() -> None:
    """Guards against: a run that drains for half its time and is called full."""
    requests = [request(0, 0.0, 0.0, [0.5, 1.0], 2), request(1, 0.0, 0.0, [0.5, 2.0], 2)]
    assert in_flight(requests) == [(0.0, 0), (0.0, 1), (0.0, 2), (1.0, 1), (2.0, 0)]
    assert mean_in_flight(requests, 0.0, 2.0) == pytest.approx(1.5)
    assert mean_in_flight(requests, 0.0, 1.0) == pytest.approx(2.0)


def test_tokens_of_a_window_are_the_servers_count() -> None:
    """Guards against: tokens of a window guessed from chunks."""
    counted = request(0, 0.0, 0.0, [1.0, 2.0, 3.0, 4.0], 10, chunk_tokens=(1, 4, 8, 10))
    assert tokens_between(counted, 1.0, 3.0) == 7
    assert tokens_between(counted, 0.0, 9.0) == 10
    assert tokens_between(request(0, 0.0, 0.0, [1.0, 2.0], 2), 0.0, 9.0) is None


def test_an_interval_covers_the_truth_as_often_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 100 intervals of the mean, 95 % should hold it; at least 87 do with probability 0.999 (binomial).

    Guards against: gaps of one answer drawn one by one, which makes intervals too narrow.
    """
    monkeypatch.setattr(metrics_module, "RESAMPLES", 200)
    random = np.random.default_rng(0)
    held = 0
    for seed in range(100):
        # 40 answers, each with a level of its own: gaps within one are alike
        groups = [level + 0.1 * random.standard_normal(5) for level in random.normal(10, 1, 40)]
        metric = distribution("ms", groups, seed)
        assert metric is not None
        assert metric.low is not None
        assert metric.high is not None
        held += metric.low <= 10 <= metric.high
    assert 87 <= held < 100


@pytest.mark.parametrize(
    ("text", "loops"),
    [
        (" the cat" * 40, True),
        ("A beginning that is fine. " + "and so on, " * 30 + "and so", True),
        ("x" * 200, True),
        ("no no no no no no", False),
        (" ".join(f"line {i}: {i * 7919 % 1000}" for i in range(300)), False),
        ("def f(x):\n    return x\n" * 3, False),
        ("a long piece that comes twice " * 2 + "and then ends otherwise, as texts do" * 1, False),
    ],
)
def test_a_loop_is_one(text: str, loops: bool) -> None:
    """Guards against: a repetition loop winning, and ordinary text called one."""
    assert looped(text) is loops


@pytest.mark.parametrize(
    ("values", "count"),
    [
        ([46, 167, 167, 167, 167], 1),  # C-B-03
        ([20, 30, 100, 101, 99], 2),
        ([100, 101, 99, 102, 98], 0),
        ([100, 40, 100, 100, 100], 0),
        ([90, 130, 70, 110, 140, 60], 0),
        ([5], 0),
    ],
)
def test_first_runs_that_differ_are_counted(values: list[float], count: int) -> None:
    """Guards against: a cold first run averaged with warm ones, and noise called cold."""
    assert leading_outliers(values) == count
