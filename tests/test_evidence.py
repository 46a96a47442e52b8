"""The commands that collect evidence on a GPU: they cover what they say, and read correctly what tools print."""

import json
import re
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
import typer

import stepfloor
from benchmarks import contexts, evidence, loading, sanitizer
from stepfloor import cli
from stepfloor.config import ModelConfig
from stepfloor.tools.bench.step import MIXES, random_checkpoint
from stepfloor.weights.checkpoint import open_checkpoint

SMALL = Path(stepfloor.__file__).parent / "shipped" / "config.json"
ROOT = Path(__file__).parents[1]
KERNELS = Path(stepfloor.__file__).parent / "kernels"


def test_the_sanitizer_runs_every_operator() -> None:
    named = {
        case.split()[0]
        for work in ("dense", "experts", "attention", "edges")
        for case, _ in sanitizer.WORK[work]("cpu")
    }
    assert named == {path.stem for path in KERNELS.glob("[a-z]*.py")}


@pytest.mark.parametrize("work", ["turns", "attention", "step-c"])
def test_its_work_runs(work: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert sanitizer.run_work(work, "cpu") == 0
    assert capsys.readouterr().out.endswith("done\n")


MEMCHECK = """========= COMPUTE-SANITIZER
case: embed 1
case: moe_down bf16 5
========= Invalid __global__ read of size 2 bytes
=========     at moe_down_kernel+0x120
=========     by thread (0,0,0) in block (1,0,0)
case: moe_down bf16 19
done
========= ERROR SUMMARY: 3 errors
"""


@pytest.mark.parametrize(
    ("tool", "output", "returned", "clean", "says"),
    [
        ("memcheck", MEMCHECK, 77, False, "3 errors"),
        ("memcheck", "case: a\ndone\n========= ERROR SUMMARY: 0 errors", 0, True, "clean"),
        ("memcheck", "case: a\nTraceback\n========= ERROR SUMMARY: 0 errors", 1, False, "the work failed"),
        ("memcheck", "case: a\n========= ERROR SUMMARY: 0 errors", -signal.SIGKILL, False, "stopped at its limit"),
        ("memcheck", "no such tool", 1, False, "no verdict"),
        (
            "racecheck",
            "case: a\ndone\n========= RACECHECK SUMMARY: 2 hazards displayed (0 errors, 2 warnings)",
            0,
            True,
            "0 errors, 2 warnings",
        ),
        (
            "racecheck",
            "case: a\ndone\n========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)",
            77,
            False,
            "1 errors",
        ),
    ],
)
def test_verdicts(tool: str, output: str, returned: int, clean: bool, says: str) -> None:
    verdict = sanitizer.read_verdict(tool, "edges", output, returned, 1.0, 140)
    assert verdict.clean is clean
    assert says in verdict.verdict
    if output is MEMCHECK:
        assert verdict.cases == 3
        assert "in case: moe_down bf16 5" in verdict.first
        assert "moe_down_kernel+0x120" in verdict.first


def test_contexts_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "out.json"
    arguments = ["--config", str(SMALL), "--device", "cpu", "--contexts", "40,4096", "--steps", "4"]
    monkeypatch.setattr(sys, "argv", ["contexts", *arguments, "--json", str(output)])
    monkeypatch.setattr(contexts.faulthandler, "dump_traceback_later", lambda *given, **named: None)
    monkeypatch.setattr(contexts, "run", lambda *given: contexts.Times(0.0, 40, [1.0, 1.5, 2.0], 0))
    assert contexts.main() == 0
    cells = json.loads(output.read_text())["cells"]
    assert [(c["context"], c["kv"], c["table"]) for c in cells] == [
        (40, "bf16", "device"),
        (40, "fp8", "device"),
        (4096, "bf16", "device"),
        (4096, "fp8", "device"),
    ]
    assert all(c["step_ms"] == pytest.approx(500) for c in cells)
    assert "plan GiB" in capsys.readouterr().out


def test_the_table_is_put_where_contexts_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["contexts", "--config", str(SMALL), "--device", "cpu", "--contexts", "40"])
    options = contexts.parse()
    checkpoint = random_checkpoint(ModelConfig.read(SMALL), MIXES["a"])
    model, source = contexts.load(checkpoint, options, lambda _: None)
    pinned, facts = contexts.with_pinned_table(model, checkpoint, source, options, lambda _: None)
    before, after = (m.layers[checkpoint.config.ple_layer].ngram for m in (model, pinned))
    assert all(torch.equal(a.data, b.data) for a, b in zip(before.shards, after.shards, strict=True))
    assert 0 < facts["pinned_table_gib"] < 0.001


def test_a_context_at_the_models_limit_ends_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine refuses a longer one, so the timed steps have to end before it."""
    monkeypatch.setattr(sys, "argv", ["contexts", "--config", str(SMALL), "--device", "cpu", "--steps", "30"])
    options, model = contexts.parse(), open_checkpoint(SMALL.parent).config
    for context in (700, model.max_position_embeddings):
        config = contexts.cell_config(options, context, "fp8", "device", model)
        config.check(model)
        middle = contexts.reached(options, context, model)
        assert middle == context or context > 700
        assert middle + options.steps < config.max_model_len


def test_what_loading_writes_is_a_checkpoint(tmp_path: Path) -> None:
    plan = loading.choose_plan(str(SMALL), 40_000_000)
    assert 38_000_000 <= plan.nbytes <= 40_100_000
    loading.write(plan, tmp_path / "model", "cpu", lambda _: None)
    checkpoint = open_checkpoint(tmp_path / "model")
    assert checkpoint.num_bytes == plan.nbytes
    assert len(loading.runs(checkpoint, "cpu")) == 8
    files = sorted((tmp_path / "model").glob("*.safetensors"))
    assert 0 <= loading.drop(files) <= 1
    assert loading.plain_read(files, pinned=False) > 0
    assert torch.isfinite(torch.tensor(loading.load(checkpoint, "cpu", lambda _: None))).all()


def test_the_page_of_evidence_has_every_command() -> None:
    page = (ROOT / "docs" / "evidence.md").read_text()
    assert evidence.table() in page


@pytest.mark.parametrize("command", evidence.COMMANDS, ids=lambda command: command.name)
def test_the_commands_have_these_options(command: evidence.Command) -> None:
    """A mistyped option is seen here and not where time on a GPU is lost."""
    words = command.arguments.split()
    if words[1] == "pytest":
        assert all((ROOT / word).exists() for word in words if word.startswith("tests/"))
        return
    if words[1] == "stepfloor":
        bench = typer.main.get_command(cli.app).commands["bench"].commands["step"]
        known = {option for parameter in bench.params for option in parameter.opts + parameter.secondary_opts}
    else:
        known = set(
            re.findall(r'add_argument\(\s*"(--[a-z-]+)"', (ROOT / f"{words[1].replace('.', '/')}.py").read_text())
        )
    assert {word for word in words if word.startswith("--")} <= known


def test_commands_are_run_cut_and_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What a command started ends with it; what time has no room for is named, not missing in silence."""
    orphan = "import subprocess, sys; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); p.wait()"
    commands = (
        evidence.Command("good", "-c print(7)", 60, ""),
        evidence.Command("long", "-m timeit", 200, ""),
        evidence.Command("bad", "-c raise(SystemExit(3))", 60, ""),
        evidence.Command("cut", f"-c exec(bytes({list(orphan.encode())}).decode())".replace(", ", ","), 3, ""),
    )
    results = evidence.run_all(commands, ["0", "1"], tmp_path, "abc", 100)
    assert [result.code for result in results] == [0, None, 3, None]
    assert [result.why for result in results] == ["", "left out: no time", "", "CUT after 3 s"]
    assert (tmp_path / "good.log").read_text() == "7\n"
    state = Path(f"/proc/{(tmp_path / 'cut.log').read_text().strip()}/stat")
    for _ in range(500):  # killed, but on a busy machine not gone yet; it would sleep for a minute
        if not state.exists() or state.read_text().split()[2] == "Z":
            break
        time.sleep(0.01)
    else:
        pytest.fail("what the command had started outlived it")
    assert "GPU 1: " in capsys.readouterr().out
