"""A server in processes of its own, on the shipped model, for clients that are real."""

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2

ROOT = Path(__file__).parents[2]
START_S = 180.0


@dataclass
class Live:
    """A running server; log is where its lines go."""

    process: subprocess.Popen[bytes]
    log: Path
    url: str
    engine_pid: int

    def lines(self) -> list[str]:
        return self.log.read_text(encoding="utf-8").splitlines()

    def wait_for(self, text: str, seconds: float = 30.0) -> str:
        """The first log line that holds the text."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for line in self.lines():
                if text in line:
                    return line
            time.sleep(0.05)
        raise AssertionError(f"{text!r} is not in the log:\n" + "\n".join(self.lines()[-20:]))

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric over the series that have these labels."""
        total = 0.0
        for line in httpx2.get(f"{self.url}/metrics", timeout=60).text.splitlines():
            if line.startswith((f"{name}{{", f"{name} ")) and all(f'{k}="{v}"' in line for k, v in labels.items()):
                total += float(line.rsplit(" ", 1)[1])
        return total

    def until_idle(self, seconds: float = 60.0) -> None:
        """Wait until nothing runs or waits, and every page is free."""
        end = time.monotonic() + seconds
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
        while any(self.metric(name) for name in names):
            assert time.monotonic() < end, {name: self.metric(name) for name in names}
            time.sleep(0.05)


@contextmanager
def serving(log: Path, *flags: str) -> Iterator[Live]:
    """`stepfloor serve` with these flags, on a free port, until the block ends; it must stop by itself then."""
    command = [sys.executable, "-m", "stepfloor", "serve", "--port", "0", *flags]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={"PYTHONPATH": "src", "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"},
        )
    live = Live(process, log, "", 0)
    try:
        end = time.monotonic() + START_S
        while not any("ready after" in line for line in live.lines()):
            assert process.poll() is None, log.read_text(encoding="utf-8")
            assert time.monotonic() < end, log.read_text(encoding="utf-8")
            time.sleep(0.1)
        found = re.search(r"engine pid (\d+): (https?://[\d.:]+)/v1", log.read_text(encoding="utf-8"))
        assert found is not None
        live.engine_pid, live.url = int(found[1]), found[2]
        yield live
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, log.read_text(encoding="utf-8")
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
