"""The set-up script's decisions; the set-up itself is what continuous integration runs."""

import urllib.request
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import pytest

import run


def refuse(*args: object, **kwargs: object) -> NoReturn:
    raise OSError("unreachable")


class Version(NamedTuple):
    major: int
    minor: int
    micro: int


class Answer:
    def __enter__(self) -> "Answer":
        return self

    def __exit__(self, *args: object) -> None:
        pass


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "has_nvidia_gpu", lambda: False)
    monkeypatch.setattr(run.sys, "platform", "linux")


@pytest.mark.usefixtures("no_gpu")
def test_no_gpu_takes_a_cpu_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU the plain index would bring 3 GB of CUDA libraries."""
    monkeypatch.setattr(urllib.request, "urlopen", lambda *args, **kwargs: Answer())
    assert run.torch_requirement() == ("--no-deps", "--index-url", run.TORCH_CPU_INDEX, run.TORCH)


@pytest.mark.usefixtures("no_gpu")
def test_no_gpu_and_no_cpu_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(urllib.request, "urlopen", refuse)
    assert run.torch_requirement() == ("--no-deps", run.TORCH)


def test_a_gpu_takes_the_plain_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "has_nvidia_gpu", lambda: True)
    assert run.torch_requirement() == (run.TORCH_FOR_GPU,)


def test_an_unsupported_python_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run.sys, "version_info", Version(3, 9, 2))
    monkeypatch.setattr(run.shutil, "which", lambda name: None)
    assert run.main(["test"]) == 2
    assert capsys.readouterr().err == (
        "run.py: stepfloor needs Python 3.11 or 3.12; this is 3.9.2; install one of them and run it again\n"
    )


def test_tests_asked_for_by_name_skip_the_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def record(command: list[str], **options: Any) -> Any:
        commands.append(command)
        return run.subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(run.subprocess, "run", record)
    assert run.run_tests(["-k", "name"]) == 0
    assert [command[1:] for command in commands] == [["-m", "pytest", "-n", "2", "-m", "not slow", "-k", "name"]]


def test_a_failed_check_fails_the_command_after_the_tests(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_one(command: list[str], **options: Any) -> Any:
        status = int(Path(command[0]).name == "typos")
        return run.subprocess.CompletedProcess(command, status, stdout=b"")

    monkeypatch.setattr(run.subprocess, "run", run_one)
    assert run.run_tests([]) == 1
    assert "failed before the tests: typos" in capsys.readouterr().err
