"""Files that vllm bench serve, AIPerf and llm-inference-bench wrote: read, worked out again, written, read again."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from stepfloor.errors import UserError
from stepfloor.tools.bench import metrics
from stepfloor.tools.bench.exchange import aiperf, vllm
from stepfloor.tools.bench.exchange.files import AGREEMENT, TOOLS, export_results, import_file, summary
from stepfloor.tools.bench.load import Load
from stepfloor.tools.bench.metrics import measure
from stepfloor.tools.bench.result import Metric, Result, read_results, write_results
from stepfloor.tools.bench.serve import run
from tests.tools.bench.stub_server import Script, stub

DATA = Path(__file__).with_name("data")
CLOSED = ("vllm-closed.json", "aiperf-closed")
ALL = (*CLOSED, "vllm-open.json", "aiperf-retokenized", "llm-inference-bench.json")
COMMON = ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms", "request_throughput", "output_throughput", "total_throughput")


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Intervals are not what is looked at here, and they take most of the time."""
    monkeypatch.setattr(metrics, "RESAMPLES", 1)


def only(name: str) -> Result:
    (result,) = import_file(DATA / name)
    return result


def as_written(name: str) -> Result:
    """A file without what import works out from its requests."""
    path = DATA / name
    if path.is_dir():
        raw = json.loads((path / aiperf.SUMMARY).read_text())
        return aiperf.read(raw, path / aiperf.SUMMARY, aiperf.load_records(path / aiperf.RECORDS))
    return vllm.read(json.loads(path.read_text()), path)


@pytest.mark.parametrize("name", ["vllm-closed.json", "vllm-open.json", "aiperf-closed"])
def test_our_figures_from_their_requests_are_theirs(name: str) -> None:
    """The same definitions, shown on their own records: within 1 %, and the window is theirs."""
    given = as_written(name)
    own = measure(given.requests, given.window_s or 0.0)
    compared = 0
    for metric in (*COMMON, "ttft_from_sent_ms"):
        for statistic in ("value", "mean", "p50", "p90", "p95", "p99", "std"):
            if metric in given.metrics and metric in own and statistic in given.metrics[metric].stats:
                theirs, ours = given.metrics[metric].stats[statistic], own[metric].stats[statistic]
                assert ours == pytest.approx(theirs, rel=AGREEMENT), (metric, statistic)
                compared += 1
    assert compared >= 21


@pytest.mark.parametrize("name", CLOSED)
def test_a_measurement_of_ours_on_the_same_server_agrees(name: str) -> None:
    """Both tools and ours measured one script: 50 ms, then 9 gaps of 30 ms, 3 tokens in each of 10 chunks.

    A client adds to the first byte what its own stack takes, up to 3 ms seen in the tools' files; the rest is 1 %.
    """
    with stub(Script(first_ms=50, gap_ms=30, tokens_per_chunk=3)) as server:
        load = Load(input_len="8", output_len="30", num_prompts=4, concurrency=2, num_warmups=2, sampling="greedy")
        ours = run(server.url, load)
    late = ours.metrics["client_late_ms"].stats["max"]
    if late > 3:
        pytest.skip(f"this machine is too busy to tell 30 ms from 31: a timer was {late:.0f} ms late")
    theirs = only(name)
    for metric in ("itl_ms", "tpot_ms", "per_user_rate"):
        assert ours.metrics[metric].stats["mean"] == pytest.approx(theirs.metrics[metric].stats["mean"], rel=0.01)
    for metric in ("ttft_ms", "e2e_ms"):
        assert abs(ours.metrics[metric].stats["p50"] - theirs.metrics[metric].stats["p50"]) < 3.2
    assert ours.metrics["tpot_ms"].stats["p50"] == pytest.approx(270 / 29, rel=0.01)


def test_latencies_that_count_from_sending_are_named_apart() -> None:
    """vLLM's e2el leaves out the wait for a free place: 365 ms where a user waited 576."""
    result = only("vllm-open.json")
    assert result.metrics["e2e_from_sent_ms"].stats["mean"] == pytest.approx(364.8, abs=0.1)
    assert result.metrics["e2e_ms"].stats["mean"] == pytest.approx(576.2, abs=0.1)
    # not in the file: worked out from planned times
    assert result.metrics["ttft_ms"].stats["mean"] == pytest.approx(52.6 + 211.5, abs=0.2)
    assert "ttft_ms" in (result.origin or {})["worked_out"]


def test_tokens_that_a_client_counted_are_named_apart() -> None:
    """AIPerf's tokenizer made 2,070 tokens of the server's 360, and 1,086 tokens/s of 203."""
    result = only("aiperf-retokenized")
    assert result.metrics["output_throughput_by_client_tokens"].value == pytest.approx(1085.9, abs=0.1)
    assert result.metrics["output_throughput"].value == pytest.approx(360 / (result.window_s or 0), rel=1e-9)
    assert result.metrics["tpot_ms"].stats["mean"] == pytest.approx(270 / 29, rel=0.01)
    assert "output_throughput" not in as_written("aiperf-retokenized").metrics


def test_per_chunk_usage_divides_otherwise_and_is_named_apart() -> None:
    raw = json.loads((DATA / "aiperf-closed" / aiperf.SUMMARY).read_text())
    raw["input_config"]["endpoint"]["per_chunk_usage"] = True
    result = aiperf.read(raw, Path("x"))
    assert "tpot_ms" not in result.metrics
    assert "tpot_after_first_chunk_ms" in result.metrics


def test_llm_inference_bench_is_converted_and_named_apart() -> None:
    """Seconds become milliseconds; 385 steps/s of 8 sequences are 48 of the engine and must not pass for 385."""
    result = only("llm-inference-bench.json")
    assert result.metrics["ttft_ms"].stats["p50"] == pytest.approx(147.698, abs=1e-3)
    assert result.metrics["tpot_ms"].stats["mean"] == pytest.approx(8.7156, abs=1e-4)
    assert result.metrics["sequence_steps_per_s"].value == pytest.approx(385.36, abs=0.01)
    assert result.metrics["sustained_throughput"].value == pytest.approx(905.44, abs=0.01)
    assert not {"steps_per_s", "output_throughput", "itl_ms", "e2e_ms"} & result.metrics.keys()
    assert result.metrics["acceptance_per_position"].stats == {"0": 0.6674, "1": 0.4224, "2": 0.2598}
    assert result.load["concurrency"] == 8


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"underfilled": True, "effective_concurrency": 5.1}, "underfilled"),
        ({"loop_detected": True, "aggregate_tps": -3.0}, "repetition_loop"),
        ({"num_errors": 2}, "errors"),
        ({"failure_reason": "stream died"}, "errors"),
        ({"aggregate_tps": -2}, "no_requests"),
    ],
)
def test_cells_that_do_not_count_say_so(tmp_path: Path, change: dict[str, object], code: str) -> None:
    raw = json.loads((DATA / "llm-inference-bench.json").read_text())
    raw["results"][0] |= change
    (tmp_path / "x.json").write_text(json.dumps(raw))
    (result,) = import_file(tmp_path / "x.json")
    assert code in {flag.code for flag in result.flags}
    assert not result.valid
    if "aggregate_tps" in change:
        assert "sustained_throughput" not in result.metrics


@pytest.mark.parametrize("name", ALL)
def test_what_has_no_place_is_named(name: str) -> None:
    """Nothing of a file vanishes without a word."""
    (flag,) = (f for f in only(name).flags if f.code == "unmapped")
    wanted = {"vllm": "generated_texts", "aipe": "credit_to_start_latency", "llm-": "request_samples"}[name[:4]]
    assert wanted in flag.text
    assert "duration" not in flag.text.split(", ")


@pytest.mark.parametrize("name", ALL)
def test_an_imported_result_is_a_result(name: str, tmp_path: Path) -> None:
    """Written and read back it is the same, so every reader of ours takes it."""
    result = only(name)
    result.write(tmp_path / "ours.json")
    assert Result.read(tmp_path / "ours.json") == result
    assert result.valid
    assert any("note: unmapped" in line for line in summary(result))


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("name", ALL)
def test_a_round_trip_keeps_the_common_figures(name: str, tool: str, tmp_path: Path) -> None:
    """What both files have a place for comes back with every digit; seconds and milliseconds differ by one rounding."""
    result = only(name)
    if any(metric.endswith("_by_client_tokens") for metric in result.metrics):
        result = replace(result, metrics={k: v for k, v in result.metrics.items() if not k.endswith("_tokens")})
    written = export_results([result], tool, tmp_path / "out")
    (again,) = import_file(written[0])
    assert again.valid == result.valid
    worked_out = (again.origin or {}).get("worked_out", ())
    kept = (result.metrics.keys() & again.metrics.keys()) - set(worked_out)
    exact = tool != "llm-inference-bench"
    assert len(kept) >= (3 if "llm" in (tool + name) else 7)
    for metric in kept:
        for statistic, value in again.metrics[metric].stats.items():
            if statistic in result.metrics[metric].stats:
                held = result.metrics[metric].stats[statistic]
                assert value == (held if exact else pytest.approx(held, rel=4e-16)), (metric, statistic)


def test_a_round_trip_through_their_own_file_changes_no_figure(tmp_path: Path) -> None:
    """Imported and exported again, vLLM's own keys hold vLLM's own numbers."""
    for name in ("vllm-closed.json", "vllm-open.json"):
        before = json.loads((DATA / name).read_text())
        (path,) = export_results([as_written(name)], "vllm", tmp_path / name)
        after = json.loads(path.read_text())
        for key, value in before.items():
            figures = key.endswith("_ms") and "client_queue_time" not in key
            if figures or key.startswith(("total_", "request_", "output_t", "spec_decode_", "duration", "completed")):
                assert after.get(key) == (pytest.approx(value) if key == "spec_decode_acceptance_rate" else value), key
        assert after["ttfts"] == pytest.approx(before["ttfts"], abs=1e-12)
        assert [len(gaps) for gaps in after["itls"]] == [len(gaps) for gaps in before["itls"]]


def test_an_open_loop_stays_one_through_every_tool(tmp_path: Path) -> None:
    """An export that lost the plan would turn a latency from sending into one from the plan."""
    result = only("vllm-open.json")
    for tool in ("vllm", "aiperf"):
        (again,) = import_file(export_results([result], tool, tmp_path / tool)[0])
        for metric in ("ttft_from_sent_ms", "e2e_from_sent_ms"):
            assert again.metrics[metric].stats["mean"] == result.metrics[metric].stats["mean"]
        assert again.metrics["ttft_ms"].stats["mean"] == pytest.approx(
            result.metrics["ttft_ms"].stats["mean"], rel=1e-6
        )


def test_our_own_open_loop_is_exported_from_sending(tmp_path: Path) -> None:
    with stub(Script(first_ms=20, gap_ms=2)) as server:
        load = Load(
            input_len="8", output_len="4", num_prompts=6, concurrency=1, num_warmups=1, arrivals="constant",
            request_rate=100.0,
        )  # fmt: skip
        result = run(server.url, load)
    (path,) = export_results([result], "vllm", tmp_path / "open.json")
    raw = json.loads(path.read_text())
    assert raw["mean_ttft_ms"] == pytest.approx(20, abs=4)
    assert raw["mean_e2el_including_client_queue_ms"] == result.metrics["e2e_ms"].stats["mean"]
    assert raw["mean_e2el_including_client_queue_ms"] > 1.5 * raw["mean_e2el_ms"]


def test_figures_that_the_requests_contradict_are_named(tmp_path: Path) -> None:
    """A file whose numbers were touched up, or whose tool counts otherwise than it says."""
    raw = json.loads((DATA / "vllm-closed.json").read_text())
    raw["output_throughput"] *= 1.05
    (tmp_path / "x.json").write_text(json.dumps(raw))
    (result,) = import_file(tmp_path / "x.json")
    (flag,) = (f for f in result.flags if f.code == "records_disagree")
    assert flag.text == "output_throughput value is 195, its requests give 186"


def test_failed_requests_of_vllm_are_errors(tmp_path: Path) -> None:
    """vLLM writes zeros for a failed request; a TTFT of 0 ms must not count."""
    raw = json.loads((DATA / "vllm-closed.json").read_text())
    raw |= {"completed": 11, "failed": 1}
    for key, value in (("ttfts", 0.0), ("itls", []), ("output_lens", 0), ("latencies", 0.0), ("errors", "Bad Gateway")):
        raw[key][3] = value
    (tmp_path / "x.json").write_text(json.dumps(raw))
    (result,) = import_file(tmp_path / "x.json")
    assert not result.valid
    assert [r.index for r in result.requests if r.error] == [3]
    assert result.requests[3].first_s is None


def test_appended_results_are_read_one_by_one(tmp_path: Path) -> None:
    text = (DATA / "vllm-closed.json").read_text().strip()
    (tmp_path / "x.json").write_text(f"{text}\n{text}")
    assert len(import_file(tmp_path / "x.json")) == 2
    results = [only("vllm-closed.json"), only("vllm-open.json")]
    assert len(import_file(export_results(results, "vllm", tmp_path / "y.json")[0])) == 2


def test_a_summary_or_the_records_of_aiperf_alone(tmp_path: Path) -> None:
    """The CSV is rounded to 0.01; records alone give every figure of ours."""
    whole = only("aiperf-closed")
    for name in (aiperf.SUMMARY, aiperf.TABLE, aiperf.RECORDS):
        (tmp_path / name).mkdir()
        shutil.copy(DATA / "aiperf-closed" / name, tmp_path / name / name)
        (result,) = import_file(tmp_path / name / name)
        for metric in COMMON:
            assert result.metrics[metric].value == pytest.approx(whole.metrics[metric].value, rel=0.005, abs=0.006), (
                name
            )
        assert bool(result.requests) == (name == aiperf.RECORDS)
        # neither tells whether the loop was open, so neither may say that its latencies are from the plan
        assert ("plan_unknown" in {f.code for f in result.flags}) == (name != aiperf.SUMMARY)


def test_a_matrix_becomes_one_file_of_cells(tmp_path: Path) -> None:
    cell = only("llm-inference-bench.json")
    cells = [replace(cell, load={**cell.load, "concurrency": c}) for c in (1, 8)]
    (path,) = export_results(cells, "llm-inference-bench", tmp_path / "x.json")
    raw = json.loads(path.read_text())
    assert raw["summary_table"] == {"0": {"1": cell.metrics["sustained_throughput"].value} | {"8": 905.4403107351478}}
    assert [r.load["concurrency"] for r in import_file(path)] == [1, 8]


def test_what_is_no_result_file_is_refused(tmp_path: Path) -> None:
    for text, sentence in (
        ("", "holds no result"),
        ("{", "is not JSON"),
        ("[1]", "it holds no JSON object"),
        ('{"a": 1, "b": 2}', "its keys begin with a, b"),
    ):
        (tmp_path / "x.json").write_text(text)
        with pytest.raises(UserError, match=sentence):
            import_file(tmp_path / "x.json")
    with pytest.raises(UserError, match="cannot read"):
        import_file(tmp_path / "none.json")
    (tmp_path / "x.csv").write_text("Metric,avg\nTime to First Token (ms),fast\n")
    with pytest.raises(UserError, match=r"not as its tool writes it .*'fast'"):
        import_file(tmp_path / "x.csv")
    (tmp_path / aiperf.RECORDS).write_text('{"metadata": {}}')
    with pytest.raises(UserError, match="tell no request_start_ns"):
        import_file(tmp_path / aiperf.RECORDS)
    raw = json.loads((DATA / "vllm-closed.json").read_text())
    (tmp_path / "x.json").write_text(json.dumps({**raw, "queue_times": [0.0], "request_rate": 2.0}))
    with pytest.raises(UserError, match="not as its tool writes it"):
        import_file(tmp_path / "x.json")
    (tmp_path / "x.json").write_text(json.dumps({**raw, "mean_ttft_ms": "fast"}))
    with pytest.raises(UserError, match="mean_ttft_ms should be a number; got 'fast'"):
        import_file(tmp_path / "x.json")


def test_exports_that_cannot_be_are_refused(tmp_path: Path) -> None:
    result = only("vllm-closed.json")
    with pytest.raises(UserError, match="no export for 'guidellm'"):
        export_results([result], "guidellm", tmp_path / "x")
    with pytest.raises(UserError, match="holds one result, and 2 were given"):
        export_results([result, result], "aiperf", tmp_path / "x")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        export_results([result], "vllm", tmp_path / "file" / "x.json")


def test_numbers_that_are_not_finite_are_absent(tmp_path: Path) -> None:
    """vLLM's JSON may hold NaN where nothing was measured; a result of ours may not."""
    raw = json.loads((DATA / "vllm-closed.json").read_text())
    (tmp_path / "x.json").write_text(json.dumps({**raw, "mean_itl_ms": float("nan")}))
    results = import_file(tmp_path / "x.json")
    assert "mean" not in results[0].metrics["itl_ms"].stats
    write_results(tmp_path / "ours.json", results)
    assert isinstance(read_results(tmp_path / "ours.json")[0].metrics["itl_ms"], Metric)
