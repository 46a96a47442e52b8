"""The result file: what is written is what is read, and what cannot be read says why."""

import json
from pathlib import Path
from typing import Any

import pytest

from stepfloor.errors import UserError
from stepfloor.tools.bench.result import (
    Device,
    Flag,
    Item,
    Metric,
    Request,
    Result,
    Target,
    Telemetry,
    read_results,
    write_results,
)

FULL = Result(
    "serve",
    Target("http://127.0.0.1:8000", "small", "stepfloor", "0.1.0", {"spec_tokens": 3}),
    {"concurrency": 4, "seed": 0},
    {
        "ttft_ms": Metric("ms", {"mean": 12.5, "p50": 0.1 + 0.2}, {"mean": (11.0, 14.0)}, 8),
        "output_throughput": Metric("tokens/s", {"value": 100.0}),
    },
    (Flag("warm_up", "2 requests before the window"),),
    (Request(0, 0.0, 0.001, 0.0135, 0.4, 0.41, chunk_s=(0.0135, 0.4), output_tokens=2), Request(1, 0.5, error="503")),
    (Item("a", True, "4"),),
    Telemetry("nvidia-smi", None, (Device("GPU 0", (0.0, 1.0), {"power_w": (100.0, None)}),)),
)


def test_a_result_comes_back_as_it_was_written(tmp_path: Path) -> None:
    """Guards against: floats, tuples or absent values that change on the way."""
    FULL.write(tmp_path / "r.json")
    assert Result.read(tmp_path / "r.json") == FULL
    write_results(tmp_path / "two.json", [FULL, FULL])
    assert read_results(tmp_path / "two.json") == (FULL, FULL)
    with pytest.raises(UserError, match="holds 2 results"):
        Result.read(tmp_path / "two.json")


def test_a_metric_has_one_headline() -> None:
    """Guards against: a comparison that takes p50 of one file and the mean of another."""
    ttft = FULL.metrics["ttft_ms"]
    assert (ttft.headline, ttft.value, ttft.low, ttft.high) == ("mean", 12.5, 11.0, 14.0)
    rate = FULL.metrics["output_throughput"]
    assert (rate.headline, rate.value, rate.low) == ("value", 100.0, None)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"format": "stepfloor.bench/2"}, "'stepfloor.bench/2'.*update stepfloor"),
        ({"format": "vllm"}, "bench import"),
        ({"format": None}, "names no format"),
        ({"new_field": 1}, r"holds new_field, which this version .* update stepfloor"),
        ({"requests": [{"index": 0, "planned_s": 0.0, "wait_s": 1.0}]}, r"holds requests\.0\.wait_s"),
        ({"window_s": "long"}, "damaged at window_s"),
        ({"flags": [{"code": "cosmic_rays", "text": ""}]}, "damaged at flags.0.*cosmic_rays"),
        ({"valid": False}, "it was edited"),
    ],
)
def test_what_cannot_be_read_says_why(tmp_path: Path, change: dict[str, Any], sentence: str) -> None:
    """Guards against: a newer, damaged or edited file that is read as if it were whole."""
    path = tmp_path / "r.json"
    path.write_text(json.dumps({**json.loads(FULL.json()), **change}))
    with pytest.raises(UserError, match=sentence):
        read_results(path)


def test_a_flag_has_a_known_code() -> None:
    """Guards against: a misspelt code, which would leave an invalid result valid."""
    with pytest.raises(ValueError, match="underfiled"):
        Flag("underfiled", "")
    assert Flag("underfilled", "").invalidates
    assert not Flag("warm_up", "").invalidates
