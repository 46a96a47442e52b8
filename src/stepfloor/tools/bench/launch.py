"""Servers of the arms: started in a process group of their own, ready by their own word, ended by their number.

An arm that does not become ready, serves another model or dies is a BrokenArm, which breaks a pair and not the bench.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepfloor.errors import UserError
from stepfloor.tools.bench.plan import ArmPlan, HealthGate

_POLL_S = 0.1
_ANSWER_S = 10.0
# a proxy has no business between this process and its own servers
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class BrokenArm(Exception):
    """Why an arm cannot be measured now."""


@dataclass(slots=True)
class Server:
    """A server that answers; process and log are None where it was running already."""

    arm: ArmPlan
    url: str
    process: subprocess.Popen[bytes] | None = None
    log: Path | None = None
    identity: Mapping[str, str] | None = None
    stopped: bool = False

    @property
    def ended(self) -> bool:
        """Whether the process is gone, though nobody asked it to be."""
        return self.process is not None and self.process.poll() is not None

    def check(self) -> None:
        """Raises BrokenArm if the process has ended."""
        if self.process is not None and self.ended:
            raise BrokenArm(f"{self.arm.name} ended with exit code {self.process.returncode}{self._last_words()}")

    def stop(self, seconds: float) -> None:
        """End the whole process group: asked first, and killed where it is still there after this time."""
        if self.process is None or self.stopped:
            return
        self.stopped = True  # once only: later its number may be another's
        end = time.monotonic() + seconds
        self._signal(signal.SIGTERM)
        while self._group_lives() and time.monotonic() < end:
            time.sleep(_POLL_S)
        self._signal(signal.SIGKILL)
        self.process.wait()

    def _group_lives(self) -> bool:
        if self.process is None or self.process.poll() is None:
            return self.process is not None
        try:
            os.killpg(self.process.pid, 0)
        except (ProcessLookupError, PermissionError):
            return False
        return True

    def _signal(self, number: signal.Signals) -> None:
        # the group's number is that of its first process, which began a session
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, number)

    def _last_words(self) -> str:
        if self.log is None:
            return ""
        lines = [line for line in self.log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
        return f"; its last words: {lines[-1].strip()[:300]}" if lines else "; it said nothing"


def start(arm: ArmPlan, directory: Path, log: Path, environment: Mapping[str, str], health: HealthGate) -> Server:
    """Start an arm, or meet one that runs already, and wait until it is ready.

    directory  of the plan, which relative directories begin at. Raises UserError where its port is taken, and BrokenArm
    where the arm itself fails; nothing is left running then.
    """
    if arm.url is not None:
        server = Server(arm, arm.url)
        _wait_ready(server, HealthGate(health.route, _ANSWER_S, health.stop_s, health.model))
        return server
    port = _free_port() if arm.port is None else arm.port
    if arm.port is not None and _is_taken(port):
        raise UserError(f"arm {arm.name} wants port {port}, where something listens already; end it or name another")
    words = [word.replace("{python}", sys.executable).replace("{port}", str(port)) for word in arm.command]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as out:
        try:
            process = subprocess.Popen(
                words,
                cwd=directory / (arm.cwd or "."),
                env={**environment, **arm.env},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise BrokenArm(f"{arm.name} cannot be started: {error}") from None
    server = Server(arm, f"http://127.0.0.1:{port}", process, log)
    try:
        _wait_ready(server, health)
    except BaseException:
        server.stop(health.stop_s)
        raise
    return server


def _wait_ready(server: Server, health: HealthGate) -> None:
    end = time.monotonic() + health.start_s
    while (status := _status(server.url + health.route)) != 200:
        server.check()
        if time.monotonic() > end:
            told = "no answer" if status is None else f"status {status}"
            raise BrokenArm(f"{server.arm.name} was not ready after {health.start_s:g} s: {told} at {health.route}")
        time.sleep(_POLL_S)
    served = [str(one.get("id")) for one in (_json(f"{server.url}/v1/models") or {}).get("data", [])]
    if health.model is not None and health.model not in served:
        raise BrokenArm(f"{server.arm.name} serves {', '.join(served) or 'nothing'}, and {health.model} is wanted")
    version = (_json(f"{server.url}/version") or {}).get("version")
    server.identity = {"models": ", ".join(served), **({"version": str(version)} if version else {})}
    # it may have answered for another that holds the port, while it died of that
    server.check()


def _status(url: str) -> int | None:
    try:
        with _opener.open(url, timeout=_ANSWER_S) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except (OSError, ValueError):
        return None


def _json(url: str) -> Any:
    try:
        with _opener.open(url, timeout=_ANSWER_S) as answer:
            found = json.load(answer)
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _is_taken(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0
