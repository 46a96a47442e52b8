"""Stored results of two arms: what may be compared, and what is refused with the reason."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stepfloor.errors import UserError
from stepfloor.tools.bench.ab_command import compare_stored
from stepfloor.tools.bench.compare import compare, read_arm
from stepfloor.tools.bench.result import Device, Flag, Item, Metric, Result, Target, Telemetry
from stepfloor.tools.bench.verdict import Asked, Margin

LOAD = {"concurrency": 4, "seed": 1, "bodies_sha256": "x"}


def result(rate: float = 100.0, k: str = "0", gpu: str | None = None, **changes: Any) -> Result:
    metrics = {
        "output_throughput": Metric("tokens/s", {"value": rate}),
        "steps_per_s": Metric("steps/s", {"value": rate / 2}),
        "ttft_ms": Metric("ms", {"mean": 1000 / rate, "p99": 2000 / rate}),
    }
    target = Target("http://x", "m", "stepfloor", "0.1", {"--spec-tokens": k, "--port": "1"})
    telemetry = Telemetry("nvml", devices=(Device(gpu),)) if gpu else None
    return replace(Result("serve", target, LOAD, metrics, telemetry=telemetry), **changes)


def arms(n: int, gain: float, **more: Any) -> tuple[list[Result], list[Result]]:
    make = np.random.default_rng(0)
    base = [result(make.normal(100, 1), load={**LOAD, "seed": i}, **more) for i in range(n)]
    return base, [result(make.normal(100 + gain, 1), "3", load={**LOAD, "seed": i}, **more) for i in range(n)]


def words(base: Sequence[Result], arm: Sequence[Result], **more: Any) -> dict[str, str]:
    found = compare(base, arm, variable=["--spec-tokens"], **more)
    return {c.series.metric: c.verdict.word for c in found.comparisons}


def test_pairs_of_stored_results() -> None:
    base, arm = arms(6, 10.0)
    found = compare(base, arm, variable=["--spec-tokens"], names=("k0", "k3"))
    assert found.differences == ("--spec-tokens (k0: 0, k3: 3)",)
    assert [c.series.metric for c in found.comparisons] == ["output_throughput", "steps_per_s", "ttft_ms"]
    assert {c.verdict.word for c in found.comparisons} == {"effect"}
    assert all(c.verdict.better for c in found.comparisons)
    # three metrics share the error rate: the smallest p is held against a third
    assert min(c.level or 1.0 for c in found.comparisons) == pytest.approx(0.05 / 3)


def test_one_result_of_each_shows_no_rate() -> None:
    """Thousands of requests inside one run say nothing of the next run on that machine."""
    base, arm = arms(1, 30.0)
    assert set(words(base, arm).values()) == {"unresolved"}


def test_no_effect_needs_a_margin() -> None:
    base, arm = arms(10, 0.0)
    asked = [Asked("output_throughput", True, Margin(5.0, True)), Asked("ttft_ms.p99", False)]
    assert words(base, arm, asked=asked) == {"output_throughput": "no effect", "ttft_ms.p99": "unresolved"}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"load": {**LOAD, "concurrency": 8}}, r"two loads: concurrency \(A: 4, B: 8\)"),
        ({"load": {**LOAD, "seed": 9}}, r"two loads: seed \(A: 1, B: 9\)"),
        ({"load": {}}, "does not say with what load"),
        ({"target": Target("http://x", "m")}, "a result of B does not say how its server was started"),
        ({"kind": "imported"}, "of two kinds, serve and imported"),
        ({"target": Target("u", "m", "vllm", "0.1", {"--spec-tokens": "3", "--port": "1"})}, "server "),
        ({"target": Target("u", "m", "stepfloor", "0.1", {"--spec-tokens": "3", "--port": "2"})}, "differ in --port"),
    ],
)
def test_what_does_not_match_is_refused(change: dict[str, Any], sentence: str) -> None:
    """The usual way to a wrong claim: another load, another seed, another flag beside the one that is meant."""
    with pytest.raises(UserError, match=sentence):
        compare([result()], [result(k="3", **change)], variable=["--spec-tokens"])


def test_the_variable_must_be_named() -> None:
    base, arm = arms(4, 10.0)
    with pytest.raises(
        UserError, match=r"differ in --spec-tokens \(A: 0, B: 3\); name what is compared with --variable"
    ):
        compare(base, arm)
    with pytest.raises(UserError, match="got 4 and 3"):
        compare(base, arm[:3], variable=["--spec-tokens"])
    with pytest.raises(UserError, match="results of B are of different servers"):
        compare(base, [*arm[:3], replace(base[3], target=base[3].target)], variable=["--spec-tokens"])


def test_rates_do_not_cross_machines() -> None:
    """164 tokens/s on one board and 43 on another compare the boards."""
    base, _ = arms(4, 0.0, gpu="GB10")
    _, arm = arms(4, 50.0, gpu="RTX PRO 6000")
    found = compare(base, arm, variable=["--spec-tokens"])
    assert [c.series.metric for c in found.comparisons] == ["steps_per_s"]
    assert found.set_aside[0].startswith("output_throughput, ttft_ms: measured on GB10 and on RTX PRO 6000")


def test_an_invalid_result_takes_its_pair_along() -> None:
    base, arm = arms(5, 10.0)
    arm[2] = replace(arm[2], flags=(Flag("underfilled", "1 of 4 in flight"),))
    found = compare(base, arm, variable=["--spec-tokens"])
    assert found.pairs == 4
    assert found.comparisons[0].series.rounds == (0, 1, 3, 4)
    assert found.set_aside == ("pair 3 does not count: B: 1 of 4 in flight",)


def accuracy(right: Sequence[bool]) -> Result:
    items = tuple(Item(f"q{i}", ok) for i, ok in enumerate(right))
    metrics = {"accuracy": Metric("share", {"value": sum(right) / len(right)})}
    return Result("accuracy", Target("http://x", "m"), {"set_sha256": "s"}, metrics, items=items)


def test_items_are_pairs_by_themselves() -> None:
    """256 questions, 249 and 245 right: within noise. 249 and 220 is not."""
    base = accuracy([i >= 7 for i in range(256)])
    close, far = accuracy([i < 245 for i in range(256)]), accuracy([i < 220 for i in range(256)])
    (one,) = compare([base], [close]).items
    assert (one.counts.base_correct, one.counts.arm_correct, one.differ) == (249, 245, False)
    assert one.base_share[0] < 249 / 256 < one.base_share[1]
    (other,) = compare([base], [far]).items
    assert other.differ
    # the same questions twice: each pair by itself, and one error rate over both
    assert [found.level for found in compare([base, base], [far, close]).items] == [0.025, 0.05]
    with pytest.raises(UserError, match="answered different items"):
        compare([base], [replace(close, items=close.items[1:])])


def test_files_directories_and_lists(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, arm = arms(4, 10.0)
    for i, (a, b) in enumerate(zip(base, arm, strict=True)):
        a.write(tmp_path / "k0" / f"{i}.json")
        b.write(tmp_path / "k3" / f"{i}.json")
    assert read_arm(str(tmp_path / "k0")) == base
    listed = ",".join(str(tmp_path / "k3" / f"{i}.json") for i in range(4))
    assert read_arm(listed) == arm
    compare_stored(str(tmp_path / "k0"), str(tmp_path / "k3"), ["output_throughput=2%"], ["--spec-tokens"], 0.05)
    out = capsys.readouterr().out
    assert "k3 against k0, 4 pairs" in out
    assert "output_throughput: effect, " in out
    with pytest.raises(UserError, match="there is no result in"):
        read_arm(str(tmp_path))
