"""bench ab as a user runs it: real servers, the real load, files and exit codes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stepfloor.errors import UserError
from stepfloor.tools.bench.ab_command import run_ab
from stepfloor.tools.bench.report import Report, conclude, read_report

ROOT = Path(__file__).parents[3]
ENVIRONMENT = {"PATH": os.defpath, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
PLAN = """
name = "two gaps"
variable = "--gap-ms"
rounds = 4
most_broken = 1.0
together = true
[base]
command = ["{{python}}", "-m", "tests.tools.bench.stub_server", "--port", "{{port}}", "--first-ms", "{first}"]
cwd = "{root}"
[arms.base]
switches = {{ "--gap-ms" = {base} }}
[arms.other]
switches = {{ "--gap-ms" = {other} }}
[health]
start_s = 60
stop_s = 5
[[metrics]]
name = "output_throughput"
margin = "2 %"
[load]
concurrency = 2
num_prompts = {prompts}
input_len = "16"
output_len = "24"
{more}
"""


def write(
    directory: Path, base: float = 8, other: float = 4, prompts: int = 6, more: str = "", first: str = "5"
) -> Path:
    path, known = directory / "plan.toml", {"root": ROOT, "first": first}
    path.write_text(PLAN.format(**known, base=base, other=other, prompts=prompts, more=more), encoding="utf-8")
    return path


def finished(path: Path) -> Report:
    """The report, unless this machine was too busy for the client's clock; then pairs break, as they should."""
    report = read_report(path)
    if report.too_many_broken and all("timers were" in str(runs[-1].broken) for runs in report.broken):
        pytest.skip(f"this machine is too busy to measure on: {report.broken[-1][-1].broken}")
    return report


def test_two_servers_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Gaps of 8 and 4 ms: 24 tokens take 5 + 23 * 8 and 5 + 23 * 4 ms, so the second is 1.95 times as fast.

    A busy machine makes gaps longer, never shorter, and short ones by more: the ratio is at most what was scripted.
    """
    plan = write(tmp_path)
    run_ab(plan, ENVIRONMENT, output=tmp_path / "r.json", html=tmp_path / "r.html")
    report = finished(tmp_path / "r.json")
    out, err = capsys.readouterr()
    assert "4 rounds of base and other; with noise of 2 % a run" in err
    assert "variable --gap-ms (base: 8, other: 4)" in out
    assert "output_throughput of other against base: effect" in out
    (found,) = conclude(report).comparisons
    assert found.verdict.better
    assert 1.3 < found.arm_mean / found.base_mean < 1.05 * (5 + 23 * 8) / (5 + 23 * 4)
    results = [run.result for run in report.runs]
    assert all(result is not None and result.target.config["--gap-ms"] in ("8", "4") for result in results)
    assert "<svg" in (tmp_path / "r.html").read_text()


def test_the_outcome_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Null mode, and a second call that only shows what is there."""
    for _ in range(2):
        run_ab(write(tmp_path, other=8), ENVIRONMENT, null=True, as_json=True)
        finished(tmp_path / "plan.null.json")
        outcome = json.loads(capsys.readouterr().out)
        assert outcome["winners"] == []
        assert outcome["floor_percent"] > 0


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ("concurrent = 2", "did you mean 'concurrency'"),
        ("seed = 1", "seed stands at the top of the plan"),
        ("[accuracy]\nprofile = 'nonsense'", "unknown profile 'nonsense'"),
        ("[accuracy]\nprofile = 'stdlib'\noptions = { item = 3 }", "has no 'item'"),
    ],
)
def test_mistakes_are_found_before_the_first_launch(tmp_path: Path, more: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        run_ab(write(tmp_path, more=more), ENVIRONMENT)
    assert not list(tmp_path.glob("*.logs"))


def test_a_terminated_bench_leaves_no_server_behind(tmp_path: Path) -> None:
    """SIGTERM in the middle of a run: the servers end, and the report says that the same command goes on."""
    first = f"5.00{os.getpid()}"  # by which the servers are known
    plan = write(tmp_path, prompts=4000, first=first)
    environment = {**ENVIRONMENT, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "stepfloor", "bench", "ab", str(plan), "--output", str(tmp_path / "r.json")]
    process = subprocess.Popen(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        end = time.monotonic() + 60
        while not list(tmp_path.glob("r.logs/*")) and time.monotonic() < end:
            time.sleep(0.1)
        time.sleep(1.5)
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert b"interrupted; " in out
    assert process.returncode == 2
    assert not [pid for pid in os.listdir("/proc") if pid.isdigit() and first.encode() in _command_line(pid)]


def _command_line(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def test_without_scipy_there_is_one_sentence() -> None:
    """It is an extra: who installed stepfloor to serve has not got it."""
    code = (
        "import sys; sys.modules['scipy'] = None; sys.argv = ['stepfloor', 'bench', 'compare', 'a', 'b'];"
        "from stepfloor.cli import main; main()"
    )
    ended = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 2
    assert ended.stderr.startswith("stepfloor: comparing measurements needs scipy")
    assert len(ended.stderr.splitlines()) == 1
