"""A server's ends: told to stop, its engine killed or standing still, its port taken."""

import asyncio
import json
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx2
import pytest

from stepfloor.tools.bench.client import Client
from stepfloor.tools.bench.target import find_target
from tests.server.live import ROOT, serving

BODY = {"prompt": "def main", "temperature": 0, "ignore_eos": True}
FLAGS = ("--max-num-seqs", "2", "--max-model-len", "512")


def test_it_drains_on_sigterm(tmp_path: Path) -> None:
    """Who runs and who waits gets the whole answer; the process then ends by itself, with status 0.

    Before that, a client that compares servers learns how this one was started, and no path of its machine.
    """
    answers: list[Any] = []
    with serving(tmp_path / "log", *FLAGS) as live:
        told = asyncio.run(find_target(Client(live.url), None)).target.config
        assert (told["engine"]["max_num_seqs"], told["engine"]["spec_tokens"], told["checkpoint"]) == (2, 3, "shipped")
        assert str(ROOT) not in json.dumps(told)
        alone = httpx2.post(f"{live.url}/v1/completions", json={**BODY, "max_tokens": 16}, timeout=120).json()

        def ask() -> None:
            answers.append(httpx2.post(f"{live.url}/v1/completions", json={**BODY, "max_tokens": 16}, timeout=120))

        threads = [threading.Thread(target=ask) for _ in range(4)]  # two of them wait for a slot
        for thread in threads:
            thread.start()
        while live.metric("vllm:num_requests_waiting") < 2:
            pass
        live.process.send_signal(signal.SIGTERM)
        live.wait_for("no more requests are taken; 4 are open")
        for thread in threads:
            thread.join()
        with pytest.raises(httpx2.TransportError):
            httpx2.get(f"{live.url}/health", timeout=10)
    assert [a.json()["choices"][0]["text"] for a in answers] == [alone["choices"][0]["text"]] * 4


def test_an_engine_that_stands_still_or_dies_is_told(tmp_path: Path) -> None:
    with serving(tmp_path / "log", *FLAGS, "--stall-timeout", "2") as live:
        answers: list[Any] = []

        def ask() -> None:
            answers.append(httpx2.post(f"{live.url}/v1/completions", json={**BODY, "max_tokens": 400}, timeout=120))

        asking = threading.Thread(target=ask)
        asking.start()
        while not live.metric("vllm:generation_tokens_total"):
            pass
        assert httpx2.get(f"{live.url}/health", timeout=10).status_code == 200
        subprocess.run(["kill", "-STOP", str(live.engine_pid)], check=True)
        line = live.wait_for("no step has ended for")
        assert "step " in line
        assert "req-" in line
        health = httpx2.get(f"{live.url}/health", timeout=10)
        assert health.status_code == 503
        assert "silent" in health.text
        subprocess.run(["kill", "-CONT", str(live.engine_pid)], check=True)
        live.wait_for("the engine goes on")
        assert httpx2.get(f"{live.url}/health", timeout=10).status_code == 200
        subprocess.run(["kill", "-KILL", str(live.engine_pid)], check=True)
        asking.join()
        assert answers[0].status_code in (200, 500)  # 200 only if it was done before the end
        live.wait_for("has ended (exit code -9)")
        assert httpx2.get(f"{live.url}/health", timeout=10).status_code == 503
        refused = httpx2.post(f"{live.url}/v1/completions", json=BODY, timeout=10)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "engine_gone"


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "stepfloor", "serve", *flags]
    env = {"PYTHONPATH": "src", "PATH": "/usr/bin:/bin"}
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, env=env, check=False)


def test_a_port_that_is_taken_is_found_before_loading() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        done = run("--port", str(other.getsockname()[1]))
    assert done.returncode == 2
    assert "cannot be listened on" in done.stderr
    assert "layer" not in done.stderr


def test_other_commands_do_not_import_the_server() -> None:
    code = "import sys, stepfloor.cli; assert not {'fastapi', 'uvicorn', 'pydantic', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env={"PYTHONPATH": "src"}, check=True)


@pytest.mark.slow
def test_two_hundred_clients_that_leave(tmp_path: Path) -> None:
    """C-API-12 over the network: one slot, long requests whose client goes; the next one is served at once."""
    with serving(tmp_path / "log", "--max-num-seqs", "1", "--max-model-len", "4096") as live:
        short = {**BODY, "max_tokens": 2}
        url = f"{live.url}/v1/completions"
        expected = httpx2.post(url, json=short, timeout=60).json()["choices"][0]["text"]
        for round_number in range(200):
            with httpx2.Client(timeout=60) as http:
                body = {**BODY, "max_tokens": 50_000, "stream": True}
                if round_number % 2:
                    with http.stream("POST", url, json=body) as response:
                        next(response.iter_lines())
                else:
                    with pytest.raises(httpx2.ReadTimeout):
                        http.post(url, json={**body, "stream": False}, timeout=0.2)
            assert httpx2.post(url, json=short, timeout=30).json()["choices"][0]["text"] == expected
        live.until_idle(20)
        assert live.metric("stepfloor:requests_cancelled_total") == 200
        # an answer that ends by itself is no cancellation
        assert sum("cancelled by client" in line for line in live.lines()) == 200
