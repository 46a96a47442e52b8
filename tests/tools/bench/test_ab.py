"""The loop of an A/B comparison: real processes that start, die and are ended, and runs whose numbers are scripted."""

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stepfloor.errors import UserError
from stepfloor.tools.bench import launch
from stepfloor.tools.bench.ab import Measure, noise_from, run_plan
from stepfloor.tools.bench.launch import BrokenArm, start
from stepfloor.tools.bench.plan import AccuracyGate, ArmPlan, HealthGate, Plan, order_of
from stepfloor.tools.bench.report import INTERRUPTED, Report, conclude, is_report, read_report
from stepfloor.tools.bench.result import Flag, Item, Metric, Request, Result, Target
from stepfloor.tools.bench.verdict import Asked, Margin
from tests.tools.bench.stub_server import Script, stub

ROOT = Path(__file__).parents[3]
STUB = ("{python}", "-m", "tests.tools.bench.stub_server", "--port", "{port}")
ENVIRONMENT = {"PATH": os.defpath, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
QUICK = HealthGate(start_s=20.0, stop_s=5.0)
RATE = Asked("output_throughput", True, Margin(2.0, True))


def result(rate: float, **changes: Any) -> Result:
    metrics = {"output_throughput": Metric("tokens/s", {"value": rate})}
    request = Request(0, 0.0, output_tokens=8)
    return replace(Result("serve", Target("http://x", "stub"), {}, metrics, requests=(request,)), **changes)


def url_plan(url: str, **changes: Any) -> Plan:
    arms = tuple(ArmPlan(name, url=url, config={"x": name}) for name in ("a", "b"))
    return replace(Plan("test", ("config:x",), arms, (RATE,), {"n": 1}, 8, 8, health=QUICK), **changes)


class Scripted:
    """Measures nothing: the i-th run gives values[i], a Result or a rate, or raises."""

    def __init__(self, values: Sequence[Any], correct: Sequence[Sequence[bool]] = ()) -> None:
        self.values, self.correct = list(values), list(correct)
        self.asked: list[tuple[str, int]] = []

    def load(self, url: str, load: Mapping[str, Any], seed: int, config: Mapping[str, str]) -> Result:
        self.asked.append((url, seed))
        value = self.values[len(self.asked) - 1]
        if isinstance(value, BaseException):
            raise value
        return value if isinstance(value, Result) else result(value)

    def accuracy(self, url: str, gate: AccuracyGate, seed: int) -> Result:
        items = tuple(Item(str(i), right) for i, right in enumerate(self.correct.pop(0)))
        return result(1.0, kind="accuracy", items=items)

    @property
    def measure(self) -> Measure:
        return Measure(self.load, self.accuracy)


def run(plan: Plan, path: Path, script: Scripted, say: Callable[[str], None] = lambda _: None) -> Report:
    return run_plan(plan, path, ROOT, ENVIRONMENT, script.measure, say)


def rates(a: Callable[[int], float], b: Callable[[int], float], rounds: int) -> list[float]:
    """Values of runs in the order they will be asked for: a and b get the place in the order of all runs."""
    order = [arm for round_ in range(rounds) for arm in order_of(round_, 2)]
    return [(a, b)[arm](i) for i, arm in enumerate(order)]


def test_drift_is_no_difference(tmp_path: Path) -> None:
    """Identical arms that get slower, run by run: equal means, the drift in the report, and the order beside it."""
    script = Scripted(rates(lambda i: 100.0 - i, lambda i: 100.0 - i, 8))
    with stub(Script()) as server:
        report = run(url_plan(server.url), tmp_path / "r.json", script)
    (found,) = conclude(report).comparisons
    assert (found.base_mean, found.arm_mean) == (92.5, 92.5)
    assert found.verdict.word == "no effect"
    assert found.drift is not None
    assert found.drift.per_run == pytest.approx(-1.0)
    assert [r.arm for r in report.runs] == list("abba" * 4)
    assert any("drifts by" in note for note in found.notes)


def test_an_effect_is_written_and_read_again(tmp_path: Path) -> None:
    make = np.random.default_rng(0)
    script = Scripted(rates(lambda _: make.normal(100, 1), lambda _: make.normal(110, 1), 8))
    with stub(Script()) as server:
        report = run(url_plan(server.url), tmp_path / "r.json", script)
        # a finished comparison is not run again
        assert run(url_plan(server.url), tmp_path / "r.json", Scripted([])) == report
        with pytest.raises(UserError, match="is the report of another plan"):
            run(url_plan(server.url, seed=9), tmp_path / "r.json", Scripted([]))
    assert is_report(tmp_path / "r.json")
    assert read_report(tmp_path / "r.json") == report
    outcome = conclude(report)
    assert outcome.winners == ("b",)
    assert outcome.headline[0].startswith("output_throughput of b against a: effect, ")
    assert report.ended == "8 rounds, as planned"
    # one server behind both urls would remember prompts, so no two runs share a seed; a round's arms would otherwise
    seeds = [seed for _, seed in script.asked]
    assert len(set(seeds)) == len(seeds)


def test_sequential_stops_when_it_knows(tmp_path: Path) -> None:
    """A large effect ends at the second look; looks before the end are called interim."""
    make = np.random.default_rng(0)
    script = Scripted(rates(lambda _: make.normal(100, 1), lambda _: make.normal(110, 1), 20))
    said: list[str] = []
    with stub(Script()) as server:
        report = run(url_plan(server.url, least=4, most=20), tmp_path / "r.json", script, said.append)
    assert report.ended is not None
    assert report.ended.startswith("resolved at")
    assert len(report.whole) in (6, 8)
    assert [look.words["b"] for look in report.looks][-2:] == ["unresolved", "effect"]
    assert report.looks[0].level < 1e-4
    assert any(line.startswith("interim look 1 of at most 9, after 4 rounds, no verdict yet") for line in said)
    assert said[0] == report.stated
    assert conclude(report).winners == ("b",)


def test_a_broken_pair_is_kept_and_does_not_count(tmp_path: Path) -> None:
    """The second run fails: its round is quarantined, and repeated in the same order with new prompts."""
    errors = result(500.0, flags=(Flag("errors", "3 of 8 requests failed"),))
    script = Scripted([100.0, errors, *rates(lambda i: 100.0 + i % 2, lambda i: 100.0 + i % 2, 8)])
    with stub(Script()) as server:
        report = run(url_plan(server.url), tmp_path / "r.json", script)
    assert [r.broken for r in report.runs[:2]] == [None, "b: 3 of 8 requests failed"]
    assert [r.arm for r in report.runs[:4]] == ["a", "b", "a", "b"]
    assert (len(report.broken), len(report.whole)) == (1, 8)
    (found,) = conclude(report).comparisons
    assert max(found.series.arm) < 500.0
    assert report.runs[0].seed != report.runs[2].seed


def test_an_arm_that_dies_while_it_is_measured(tmp_path: Path) -> None:
    """The client's complaint is not the reason: the arm's end is. The round is repeated with a new process."""

    class Killing(Scripted):
        def load(self, url: str, load: Mapping[str, Any], seed: int, config: Mapping[str, str]) -> Result:
            found = super().load(url, load, seed, config)
            if len(self.asked) == 2:
                (pid,) = (p for p in _children() if url.rpartition(":")[2] in Path(f"/proc/{p}/cmdline").read_text())
                os.kill(pid, 9)
                time.sleep(0.2)
                raise UserError("no answer from the server")
            return found

    arms = (launched("--gap-ms", "5"), launched("--gap-ms", "6", name="b"))
    plan = Plan("test", ("--gap-ms",), arms, (RATE,), {}, 4, 4, health=QUICK, together=True, most_broken=0.5)
    report = run(plan, tmp_path / "r.json", Killing([100.0] * 10))
    assert report.runs[1].broken is not None
    assert report.runs[1].broken.startswith("b ended with exit code -9")
    assert len(report.whole) == 4


def test_too_many_broken_pairs_are_unresolved(tmp_path: Path) -> None:
    """What survives is a selection: three broken of eight, and a clear difference is not believed."""
    errors = result(1.0, flags=(Flag("underfilled", "1.2 of 4 in flight"),))
    script = Scripted([100.0, 120.0, 121.0, 101.0, *[errors] * 9])
    with stub(Script()) as server:
        report = run(url_plan(server.url), tmp_path / "r.json", script)
    assert report.ended == "3 broken rounds are too many"
    (found,) = conclude(report).comparisons
    assert found.verdict.word == "unresolved"
    assert "3 rounds are broken" in found.verdict.reason
    assert "1.2 of 4 in flight" in found.verdict.reason
    assert conclude(report).winners == ()


@pytest.mark.parametrize("interruption", [KeyboardInterrupt(), result(9.0, flags=(Flag("partial", "by hand"),))])
def test_an_interrupted_comparison_goes_on(tmp_path: Path, interruption: object) -> None:
    """Ctrl-C in the third round: what is there is interim, and the same command ends where one run would have."""
    plan_rates = rates(lambda i: 100.0 + i % 3, lambda i: 110.0 + i % 3, 8)
    with stub(Script()) as server:
        plan = url_plan(server.url)
        with pytest.raises(KeyboardInterrupt):
            run(plan, tmp_path / "r.json", Scripted([*plan_rates[:5], interruption]))
        halfway = conclude(read_report(tmp_path / "r.json"))
        assert not halfway.final
        assert halfway.comparisons[0].verdict.reason.startswith("interim: 2 of 8 rounds")
        report = run(plan, tmp_path / "r.json", Scripted(plan_rates[4:]))
    assert [r.broken for r in report.runs].count(INTERRUPTED) == 1
    assert (len(report.whole), len(report.broken), report.runs[-1].session) == (8, 0, 1)
    assert [r.arm for r in report.runs if r.broken is None] == list("abba" * 4)


@pytest.mark.parametrize(
    ("looping_arms", "counts"),
    [("b", "32 of 32 answers of b loop, 0 of a"), ("ab", "32 of 32 answers of b loop, 32 of a")],
)
def test_faster_and_degenerate_is_no_win(tmp_path: Path, looping_arms: str, counts: str) -> None:
    """The fastest arm of all repeats itself. Its speed is an effect, and it does not win; nor where both do."""

    def looping(rate: float) -> Result:
        requests = tuple(Request(i, 0.0, output_tokens=8, looped=True) for i in range(4))
        return result(rate, requests=requests, flags=(Flag("repetition_loop", "4 of 4 answers loop"),))

    def sound(rate: float) -> Result:
        return result(rate, requests=tuple(Request(i, 0.0, output_tokens=8) for i in range(4)))

    values = rates(lambda i: i, lambda i: i, 8)
    order = [arm for round_ in range(8) for arm in order_of(round_, 2)]
    script = Scripted(
        [
            (looping if "ab"[arm] in looping_arms else sound)((100, 150)[arm] + i % 2)
            for i, arm in zip(values, order, strict=True)
        ]
    )
    with stub(Script()) as server:
        report = run(url_plan(server.url), tmp_path / "r.json", script)
    outcome = conclude(report)
    assert outcome.comparisons[0].verdict.word == "effect"
    assert outcome.winners == ()
    assert f"that is no win: {counts}" in outcome.headline[0]


@pytest.mark.parametrize(
    ("right", "wins", "reason"),
    [((63, 63), True, "63 of 64"), ((63, 61), False, "61 of 64 items right with b, 63 with a"), ((50, 64), True, "64")],
)
def test_faster_and_wrong_is_no_win(tmp_path: Path, right: tuple[int, int], wins: bool, reason: str) -> None:
    """Two items of 64 are more than the 2 % that may be lost; an arm that gains items passes."""
    correct = [[i < n for i in range(64)] for n in right]
    make = np.random.default_rng(0)
    script = Scripted(rates(lambda _: make.normal(100, 1), lambda _: make.normal(110, 1), 8), correct)
    with stub(Script()) as server:
        plan = url_plan(server.url, accuracy=AccuracyGate("small"))
        report = run(plan, tmp_path / "r.json", script)
    outcome = conclude(report)
    assert (outcome.winners == ("b",)) is wins
    gate = next(gate for gate in outcome.gates if gate.name == "accuracy")
    assert reason in gate.reason
    assert gate.passed is wins


def test_null_mode_gives_the_noise_floor(tmp_path: Path) -> None:
    """A against A: no winner whatever comes, and its interval is what another comparison has to pass."""
    make = np.random.default_rng(1)
    with stub(Script()) as server:
        plan = url_plan(server.url)
        null = run(plan.against_itself(), tmp_path / "n.json", Scripted([make.normal(100, 2) for _ in range(16)]))
        outcome = conclude(null)
        assert null.plan.names == ("a", "a again")
        assert outcome.winners == ()
        assert outcome.floor_percent is not None
        assert 0.5 < outcome.floor_percent < 4.0
        informed = noise_from(plan, null)
        assert informed.floor_percent == outcome.floor_percent
        assert 1.0 < informed.noise_percent < 3.0
        with pytest.raises(UserError, match="finished report of `bench ab --null`"):
            noise_from(plan, run(plan, tmp_path / "r.json", Scripted([100.0] * 16)))


def test_a_biased_null_is_said(tmp_path: Path) -> None:
    with stub(Script()) as server:
        plan = url_plan(server.url).against_itself()
        report = run(plan, tmp_path / "n.json", Scripted(rates(lambda i: 100 + i % 3, lambda i: 120 + i % 3, 8)))
    assert "an arm differs from itself" in conclude(report).headline[0]


def test_a_metric_that_is_missing_is_named(tmp_path: Path) -> None:
    with stub(Script()) as server:
        plan = url_plan(server.url, metrics=(RATE, Asked("acceptance_length", True)))
        report = run(plan, tmp_path / "r.json", Scripted([100.0 + i % 3 for i in range(16)]))
    outcome = conclude(report)
    assert outcome.missing == ("acceptance_length (b)",)
    assert [c.series.metric for c in outcome.comparisons] == ["output_throughput"]


def launched(*more: str, name: str = "a", **changes: Any) -> ArmPlan:
    return ArmPlan(name, (*STUB, *more), **changes)


def test_launched_arms_are_started_and_ended(tmp_path: Path) -> None:
    """One at a time, each in its own process, and none is left."""
    arms = (launched("--gap-ms", "5"), launched("--gap-ms", "6", name="b"))
    plan = Plan("test", ("--gap-ms",), arms, (RATE,), {}, 4, 4, health=QUICK)
    script = Scripted([100.0] * 8)
    report = run(plan, tmp_path / "r.json", script)
    assert report.ended is not None
    assert len({url for url, _ in script.asked}) > 1
    assert report.runs[0].identity == {"models": "stub", "version": "1.0-stub"}
    # arms that are two servers get the same prompts in a round
    assert [r.seed for r in report.runs] == [0, 0, 2, 2, 4, 4, 6, 6]
    assert len(list((tmp_path / "r.logs").iterdir())) == 8
    assert not any(_answers(url) for url, _ in script.asked)


def test_arms_together(tmp_path: Path) -> None:
    """Side by side: two servers in all, ended at the end."""
    arms = (launched("--gap-ms", "5"), launched("--gap-ms", "6", name="b"))
    plan = Plan("test", ("--gap-ms",), arms, (RATE,), {}, 4, 4, health=QUICK, together=True)
    script = Scripted([100.0] * 8)
    run(plan, tmp_path / "r.json", script)
    assert len({url for url, _ in script.asked}) == 2
    assert len(list((tmp_path / "r.logs").iterdir())) == 2
    assert not any(_answers(url) for url, _ in script.asked)


def test_an_arm_that_dies_breaks_its_pairs(tmp_path: Path) -> None:
    """b ends before it is ready, always: three broken rounds, its last words kept, and nothing resolved."""
    plan = Plan("test", ("--no-such-flag",), (launched(), launched("--no-such-flag", name="b")), (RATE,), {}, 8, 8)
    plan = replace(plan, health=QUICK, together=True)
    report = run(plan, tmp_path / "r.json", Scripted([100.0] * 9))
    assert report.broken[0][-1].broken == (
        "b ended with exit code 2; its last words: stub_server.py: error: unrecognized arguments: --no-such-flag"
    )
    assert report.ended == "3 broken rounds are too many"
    assert not conclude(report).winners


def test_a_taken_port_is_one_sentence(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        with pytest.raises(UserError, match=f"wants port {port}, where something listens already"):
            start(launched(port=port), ROOT, tmp_path / "log", ENVIRONMENT, QUICK)


@pytest.mark.parametrize(
    ("arm", "health", "reason"),
    [
        (launched(), HealthGate("/nowhere", 1.0, 5.0), "not ready after 1 s: status 404 at /nowhere"),
        (launched(), HealthGate(start_s=20.0, stop_s=5.0, model="other"), "serves stub, and other is wanted"),
        (
            ArmPlan("a", ("{python}", "-c", "import time; time.sleep(60)", "{port}")),
            HealthGate(start_s=0.5),
            "no answer",
        ),
    ],
)
def test_health_gates(tmp_path: Path, arm: ArmPlan, health: HealthGate, reason: str) -> None:
    """A server that is up and not the one that is meant is not measured; it is ended."""
    with pytest.raises(BrokenArm, match=reason):
        start(arm, ROOT, tmp_path / "log", ENVIRONMENT, health)


def test_a_server_that_ignores_the_signal_is_killed_with_its_children(tmp_path: Path) -> None:
    """An engine that outlives its server keeps the GPU's memory, and the next arm does not fit."""
    child = tmp_path / "child"
    code = (
        "import os, pathlib, signal, subprocess, sys\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time, signal;"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(300)'])\n"
        f"pathlib.Path({str(child)!r}).write_text(str(child.pid))\n"
        "from tests.tools.bench.stub_server import main\n"
        "sys.argv = ['stub', '--port', sys.argv[1]]\n"
        "main()\n"
    )
    arm = ArmPlan("a", ("{python}", "-c", code, "{port}"))
    server = start(arm, ROOT, tmp_path / "log", ENVIRONMENT, QUICK)
    assert server.process is not None
    begun = time.monotonic()
    server.stop(0.5)
    assert time.monotonic() - begun < 5.0
    assert server.process.poll() is not None
    end = time.monotonic() + 5.0
    while _lives(int(child.read_text())) and time.monotonic() < end:
        time.sleep(0.05)
    assert not _lives(int(child.read_text()))


def _children() -> list[int]:
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


def _lives(pid: int) -> bool:
    """Whether a process runs: one that ended and that nobody has asked about yet does not."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def _answers(url: str) -> bool:
    return launch._status(f"{url}/health") is not None
