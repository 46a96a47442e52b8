"""The server's own account: metrics pages, and what nvidia-smi says."""

import pytest

from stepfloor.server.metrics import Metrics
from stepfloor.tools.bench.result import Telemetry
from stepfloor.tools.bench.scrape import COUNTERS, RUNNING, growth, parse_page, server_metrics
from stepfloor.tools.bench.telemetry import Recorder, parse_lines, throttled

VLLM = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} %d
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} %d
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} %d
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} %d
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} %d
vllm:iteration_tokens_total_bucket{engine="0",le="+Inf",model_name="m"} 1e+06
vllm:iteration_tokens_total_count{engine="0",model_name="m"} %d
vllm:generation_tokens_total{engine="0",model_name="m"} 1.5e+03
vllm:cache_config_info{block_size="64",engine="0"} 1.0
"""


def test_counters_are_differences_over_the_window() -> None:
    """Guards against: acceptance since the server's start, engines that are not added up, buckets taken for counts."""
    before = parse_page(VLLM % (100, 10, 150, 90, 60, 1000), 1.0)
    after = parse_page(VLLM % (180, 30, 300, 180, 120, 1050), 3.0)
    grown = growth(before, after)
    assert grown["seconds"] == 2.0
    assert grown["drafts"] == 100
    metrics = server_metrics(grown, 2.0)
    assert metrics["acceptance_length"].value == 2.5
    assert dict(metrics["acceptance_per_position"].stats) == {"0": 0.9, "1": 0.6}
    assert (metrics["steps_per_s"].value, metrics["ms_per_step"].value) == (25.0, 40.0)
    assert after.info["block_size"] == "64"


def test_what_a_server_does_not_count_is_not_there() -> None:
    """Guards against: an acceptance of 1 or 0 steps invented for a server that says nothing of it."""
    sglang = parse_page('sglang:generation_tokens_total{m="x"} 10\nsglang:spec_accept_length{m="x"} 2.4\n', 0.0)
    assert server_metrics(growth(sglang, sglang), 1.0)["acceptance_length"].value == 2.4
    llamacpp = parse_page("llamacpp:tokens_predicted_total 10\n", 0.0)
    assert server_metrics(growth(llamacpp, llamacpp), 1.0) == {}


def test_our_own_page_has_what_a_bench_wants() -> None:
    """Guards against: a counter of our server renamed under the bench."""
    ours = Metrics("m", 1024, {"block_size": 64, "pages": 8, "step_bytes": 1.0})
    page = parse_page(ours.text().decode(), 0.0)
    assert [name for name, names in COUNTERS.items() if page.get(names) is None] == []
    assert page.get(RUNNING) == 0
    assert server_metrics(growth(page, page), 1.0)["acceptance_length"].value == 1.0


def test_telemetry_is_what_was_seen() -> None:
    """Guards against: a value that a board does not have recorded as zero (B19), a throttled GPU passed over."""
    line = "2026/11/29 12:00:0{}.000, 0, NVIDIA GB10, {}, [N/A], 61, 40.25, 96, [N/A], {}"
    lines = [line.format(0, 2400, "0x0000000000000000"), line.format(1, 1100, "0x0000000000000020"), "no line"]
    (device,) = parse_lines(lines, 0.0)
    assert device.name == "GPU 0: NVIDIA GB10"
    assert device.at_s[1] - device.at_s[0] == pytest.approx(1.0)
    assert device.columns["sm_clock_mhz"] == (2400.0, 1100.0)
    assert device.columns["memory_clock_mhz"] == (None, None)
    assert throttled(Telemetry("nvidia-smi", None, (device,))) is not None
    assert throttled(Telemetry("nvidia-smi", None, parse_lines(lines[:1], 0.0))) is None
    far = Recorder("10.0.0.7")
    far.start()
    seen = far.stop(0.0)
    assert seen.devices == ()
    assert "10.0.0.7" in (seen.unavailable or "")
