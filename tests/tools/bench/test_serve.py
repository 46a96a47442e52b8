"""bench serve against a server whose timings are known: figures, and every reason not to believe them.

The machine that runs the tests has other work. So the flags that depend on times are asked for by name where they are
the point and left out elsewhere, and times are looked at where the bench itself says that it was in time (`calm`);
arithmetic on times that are given is in test_metrics.py.
"""

import csv
import json
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stepfloor.errors import UserError
from stepfloor.tools.bench import serve
from stepfloor.tools.bench.load import Load
from stepfloor.tools.bench.result import Result, read_results
from stepfloor.tools.bench.serve import run
from tests.tools.bench.stub_server import Script, StubServer, stub

QUICK = Script(first_ms=10, gap_ms=2, tokens_per_chunk=3)
LOAD = Load(num_prompts=8, concurrency=2, input_len="20", output_len="12", num_warmups=2)
ALWAYS = {"warm_up", "config_missing", "short"}
BY_TIME = {"client_overloaded", "ramp", "underfilled", "first_runs_differ"}
ROOT = Path(__file__).parents[3]


def codes(result: Result) -> set[str]:
    return codes_of(result) - ALWAYS - BY_TIME


def codes_of(result: Result) -> set[str]:
    return {flag.code for flag in result.flags}


def text(result: Result, code: str) -> str:
    """What the flag says; "" if it is not there."""
    return next((flag.text for flag in result.flags if flag.code == code), "")


def calm(result: Result) -> bool:
    """Whether this process was in time for what arrived."""
    return not text(result, "client_overloaded")


def measured(server: StubServer, result: Result) -> list[Any]:
    """What the stub noted of the measured requests, in their order; warm-up came before."""
    by_prompt = {json.dumps(served.body["prompt"]): served for served in server.served}
    assert len(by_prompt) == len(server.served)
    return server.served[len(server.served) - len(result.requests) :]


def test_chunks_of_three_tokens() -> None:
    """C-B-01 end to end: 30 ms between chunks, 9.31 ms a token, 50 ms to the first."""
    with stub(Script(first_ms=50, gap_ms=30, tokens_per_chunk=3), drafts=3) as server:
        result = run(server.url, replace(LOAD, concurrency=1, num_prompts=4, output_len="30"))
        served = measured(server, result)
    metrics = result.metrics
    assert codes(result) == set()
    assert [r.output_tokens for r in result.requests] == [30] * 4
    assert [r.chunks for r in result.requests] == [10] * 4
    if calm(result):
        itl = [b - a for s in served for a, b in pairwise(s.written)]
        tpot = [(s.written[-1] - s.written[0]) / 29 for s in served]
        ttft = [s.written[0] - s.received for s in served]
        # the stub keeps its schedule; a piece is late by what the scheduler adds, 1 ms in the median of gaps
        assert metrics["itl_ms"].stats["p50"] == pytest.approx(30, abs=1.0)
        assert metrics["itl_ms"].value == pytest.approx(1000 * np.mean(itl), abs=0.5)
        assert metrics["tpot_ms"].value == pytest.approx(1000 * np.mean(tpot), abs=0.5)
        assert metrics["ttft_ms"].value == pytest.approx(1000 * np.mean(ttft), abs=5)
    assert metrics["output_throughput"].value == pytest.approx(120 / (result.window_s or 0))
    assert metrics["total_throughput"].value == pytest.approx(200 / (result.window_s or 0))
    assert metrics["acceptance_length"].value == 3
    assert dict(metrics["acceptance_per_position"].stats) == {"0": 1.0, "1": 1.0, "2": 0.0}
    steps = metrics["steps_per_s"].value
    assert metrics["steps_per_s"].count == 40
    assert metrics["ms_per_step"].value == pytest.approx(1000 / steps)
    assert metrics["output_throughput"].value == pytest.approx(3 * steps)


def test_repeats_of_a_prompt_that_a_cache_remembers() -> None:
    """C-B-03: slow first runs are flagged and not averaged; warm-up takes other prompts and is not counted."""

    def script(number: int, body: Mapping[str, Any]) -> Script:
        return Script(first_ms=5, gap_ms=12.0 if number < 2 else 3.0)

    load = replace(LOAD, concurrency=1, num_prompts=6, output_len="30")
    with stub(script) as server:
        cold = run(server.url, replace(load, num_warmups=0))
    assert not cold.valid
    assert "the first 2 of 6" in text(cold, "first_runs_differ")
    with stub(script) as server:
        warm = run(server.url, replace(load, num_warmups=2))
        assert len(server.served) == 8
    if calm(warm):
        assert text(warm, "first_runs_differ") == ""
    assert len(warm.requests) == 6


def test_a_prompt_that_was_measured_before_is_seen() -> None:
    """Guards against: the second run of one seed, three times as fast out of the prefix cache."""
    with stub(replace(QUICK, cached_tokens=16)) as server:
        result = run(server.url, LOAD)
        shared = run(server.url, replace(LOAD, prefix_share=0.8, seed=1))
        template = run(server.url, replace(LOAD, route="chat"))
    assert codes(result) == {"cached_prompts"}
    assert not result.valid
    assert "128 of 160 prompt tokens" in text(result, "cached_prompts")
    assert result.metrics["cache_hit_rate"].value == pytest.approx(0.8)
    assert codes(shared) == codes(template) == {"caches_seen"}


@pytest.mark.parametrize("kind", ["reasoning", "tool", "text"])
def test_the_first_token_may_be_of_any_kind(kind: str) -> None:
    """Guards against: an opening chunk without text taken for the first token, or reasoning not taken for one."""
    with stub(replace(QUICK, gap_ms=40, kinds=("empty", kind, "text"), usage=True)) as server:
        load = replace(LOAD, route="chat", concurrency=1, num_prompts=2, num_warmups=0, plain=True)
        result = run(server.url, load)
    assert result.requests[0].chunks == 3
    assert result.metrics["ttft_ms"].value > 45


@pytest.mark.parametrize(
    ("change", "load", "code"),
    [
        ({"usage": False}, {}, "usage_missing"),
        ({"chunks": 2}, {}, "early_stop"),
        ({"words": ("so", "on")}, {"output_len": "90"}, "repetition_loop"),
        ({"fail_at": 2}, {}, "no_requests"),
    ],
)
def test_degenerate_answers_are_invalid(change: dict[str, Any], load: dict[str, Any], code: str) -> None:
    """Guards against: an answer that is short, looping or uncounted in a fast average."""
    with stub(replace(QUICK, **change)) as server:
        result = run(server.url, replace(LOAD, num_warmups=0, **load))
    assert codes(result) == {code}
    assert not result.valid


def test_failures_are_invalid_and_named() -> None:
    """Guards against: failed requests left out without a word."""
    with stub(lambda number, body: replace(QUICK, status=503 if number == 4 else 200)) as server:
        result = run(server.url, LOAD)
    assert codes(result) == {"errors"}
    assert "1 of 8 requests failed" in text(result, "errors")
    assert sum(r.error is not None for r in result.requests) == 1


def test_a_server_that_lets_requests_wait_is_underfilled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against: the speed of 2 at once published as that of 4."""
    monkeypatch.setattr(serve, "LOOK_EVERY_S", 0.1)
    with stub(Script(first_ms=10, gap_ms=10), slots=2) as server:
        result = run(server.url, replace(LOAD, concurrency=4, num_prompts=12, num_warmups=0, output_len="20"))
    assert "the server ran at most 2 of 4" in text(result, "underfilled")


def test_a_run_that_mostly_drains_is_underfilled() -> None:
    """Guards against: five requests at four at once, where one runs alone for half the time."""
    with stub(QUICK) as server:
        result = run(server.url, replace(LOAD, concurrency=4, num_prompts=5))
    assert "were in flight on average" in text(result, "underfilled")
    assert result.metrics["effective_concurrency"].value < 3.8


def test_other_clients_are_noticed() -> None:
    """Guards against: a server that was busy with somebody else."""
    with stub(QUICK) as server:

        def script(number: int, body: Mapping[str, Any]) -> Script:
            server.extra_generated += 10
            return QUICK

        server.script_of = script
        result = run(server.url, LOAD)
    assert codes(result) == {"other_clients"}


def test_an_open_loop_counts_from_the_plan() -> None:
    """Guards against: coordinated omission. One slot, 100 ms an answer, a request every 50 ms: the last waits long."""
    with stub(Script(first_ms=100, chunks=1, tokens_per_chunk=12), slots=1) as server:
        load = replace(LOAD, arrivals="constant", request_rate=20.0, concurrency=1, num_warmups=0)
        result = run(server.url, load)
    assert codes(result) == {"late_arrivals"}
    ttft = [1000 * (r.first_s - r.planned_s) for r in result.requests if r.first_s is not None]
    if calm(result):  # request i is planned at 50 i and answered at 100 (i + 1)
        assert ttft == pytest.approx([100 + 50 * i for i in range(8)], abs=40)
        assert result.metrics["ttft_from_sent_ms"].value == pytest.approx(100, abs=15)
    assert result.metrics["ttft_ms"].value > result.metrics["ttft_from_sent_ms"].value + 100
    assert [r.planned_s for r in result.requests] == pytest.approx([i / 20 for i in range(8)])


def test_a_duration_cuts_what_is_in_flight() -> None:
    """Guards against: tokens of a cut answer lost from the rate, or counted beyond the window."""
    with stub(replace(QUICK, gap_ms=10)) as server:
        load = replace(LOAD, num_prompts=None, duration_s=0.6, output_len="600", num_warmups=0)
        result = run(server.url, load)
    assert codes(result) == set()
    assert result.window_s == 0.6
    assert all(r.cut for r in result.requests)
    if calm(result):  # 3 tokens each 10 ms from 10 ms on, two at once; two chunks more or less at the cut
        assert result.metrics["output_throughput"].value == pytest.approx(2 * 3 * 60 / 0.6, abs=4 * 3 / 0.6)
    with stub(replace(QUICK, gap_ms=10, usage=False)) as server:
        assert "usage_missing" in codes(run(server.url, load))


def test_one_seed_sends_the_same_bytes() -> None:
    """Guards against: two runs that were not asked the same."""
    bodies, results = [], []
    for seed in (0, 0, 1):
        with stub(QUICK) as server:
            results.append(run(server.url, replace(LOAD, seed=seed, dataset_name="code", concurrency=1)))
            bodies.append([served.body for served in server.served])
    assert bodies[0] == bodies[1] != bodies[2]
    digests = [result.load["bodies_sha256"] for result in results]
    assert digests[0] == digests[1] != digests[2]
    assert len({json.dumps(body["prompt"]) for body in bodies[0]}) == 10
    assert {body["temperature"] for body in bodies[0]} == {1.0}


@pytest.mark.parametrize("dialect", ["vllm", "stepfloor", "sglang", "llamacpp", None])
def test_every_dialect_is_read(dialect: str | None) -> None:
    """Guards against: steps and acceptance missing where the server counts them, invented where it does not."""
    with stub(QUICK, dialect=dialect, drafts=3) as server:
        result = run(server.url, LOAD)
    metrics = result.metrics
    assert codes(result) == ({"server_metrics_missing"} if dialect is None else set())
    assert ("steps_per_s" in metrics) is (dialect in ("vllm", "stepfloor", "llamacpp"))
    if dialect in ("vllm", "stepfloor", "sglang"):
        assert metrics["acceptance_length"].value == pytest.approx(3)
    else:
        assert "acceptance_length" not in metrics


def test_bad_loads_are_refused_in_a_sentence() -> None:
    """Guards against: a wish that is quietly another one."""
    for change, sentence in (
        ({"arrivals": "poisson"}, "wants --request-rate"),
        ({"request_rate": 3.0}, "goes with --arrivals"),
        ({"duration_s": 3.0, "arrivals": "trace", "trace_file": "x"}, "closed loop"),
        ({"sampling": "hot"}, "model, greedy, server or a JSON"),
        ({"dataset_name": "wiki"}, "random, unique, code"),
        ({"concurrency": 0}, "--concurrency must be more than 0"),
    ):
        with pytest.raises(UserError, match=sentence):
            replace(LOAD, **change).resolve()
    with pytest.raises(UserError, match="did you mean 'request_rate'"):
        Load.of({"requestrate": 1})
    with stub(QUICK) as server:
        with pytest.raises(UserError, match="serves stub; got --model other"):
            run(server.url, replace(LOAD, model="other"))
        with pytest.raises(UserError, match="takes 131072"):
            run(server.url, replace(LOAD, input_len="128k"))


def start_command(*words: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "stepfloor", "bench", *words],
        cwd=ROOT,
        env={"PYTHONPATH": "src", "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # a shell's background job, as a whole test run may be, ignores SIGINT, and so would its children
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def test_an_interruption_keeps_what_was_measured(tmp_path: Path) -> None:
    """Guards against: a lost hour, and a part that passes for the whole."""
    path = tmp_path / "r.json"
    with stub(replace(QUICK, gap_ms=20)) as server:
        command = start_command(
            *("serve", server.url, "--num-prompts", "500", "--input-len", "20", "--output-len", "12"),
            *("--output", str(path)),
        )
        end = time.monotonic() + 30
        while len(server.served) < 6:
            assert time.monotonic() < end, command.communicate()
            time.sleep(0.02)
        command.send_signal(signal.SIGINT)
        out, _ = command.communicate(timeout=30)
    assert command.returncode == 1, out
    assert "INVALID: partial" in out
    result = Result.read(path)
    assert next(flag.code for flag in result.flags if flag.invalidates) == "partial"
    assert 1 <= len(result.requests) < 500


def test_a_server_that_dies_is_an_error_and_no_traceback() -> None:
    """Guards against: a lost server that takes the measured part with it."""

    def script(number: int, body: Mapping[str, Any]) -> Script:
        return replace(QUICK, drop_at=1) if number >= 4 else QUICK

    with stub(script) as server:
        result = run(server.url, LOAD)
    assert "errors" in codes_of(result)
    assert sum(r.error is None for r in result.requests) == 2
    with pytest.raises(UserError, match="no answer from"):
        run(server.url, LOAD)


def test_the_command_writes_what_it_shows(tmp_path: Path) -> None:
    """Guards against: a table, a page and a file that disagree; exit code 0 for a matrix with an invalid cell."""
    path, table, page = tmp_path / "m.jsonl", tmp_path / "m.csv", tmp_path / "m.html"
    with stub(QUICK, drafts=3) as server:
        command = start_command(
            *("matrix", server.url, "--concurrency", "1,2", "--context", "40,128k", "--measure", "whole"),
            *("--output-len", "12", "--output", str(path), "--csv", str(table), "--html", str(page)),
        )
        out, errors = command.communicate(timeout=120)
    assert command.returncode == 1, errors
    assert "INVALID 1 at 131072: does_not_fit" in out
    results = read_results(path)
    assert [codes(r) for r in results] == [set(), set(), {"does_not_fit"}, {"does_not_fit"}]
    with table.open() as rows:
        found = [row for row in csv.DictReader(rows) if row["metric"] == "output_throughput"]
    assert [float(row["value"]) for row in found] == [r.metrics["output_throughput"].value for r in results[:2]]
    assert f"{results[0].metrics['output_throughput'].value:.4g}" in out
    assert "131072" in page.read_text()


def test_the_command_starts_without_torch() -> None:
    """Guards against: a client that needs a second and a gigabyte before it sends its first request."""
    code = (
        "import sys, stepfloor.tools.bench.command, stepfloor.tools.bench.page; "
        "assert not {'torch', 'fastapi', 'triton'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env={"PYTHONPATH": "src"}, check=True)
