#!/usr/bin/env python3
"""Set up and run stepfloor from a fresh checkout, with nothing but Python 3.11 or 3.12.

    python3 run.py generate --prompt "def main"    this or any other stepfloor command
    python3 run.py test [PYTEST ARGUMENTS]         linters, types and contract, then every test not marked slow

Both make `.venv` beside this file and install the versions pinned in constraints.txt, then run inside it. A stamp
in `.venv` records what was installed, so that later runs start at once. `test` with arguments skips the checks and
hands the arguments to pytest. Standard library only: this file runs before anything is installed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
BIN = VENV / ("Scripts" if os.name == "nt" else "bin")
PYTHON = BIN / ("python.exe" if os.name == "nt" else "python")
SUPPORTED = ((3, 11), (3, 12))
TORCH = "torch==2.13.0"
TORCH_FOR_GPU = "torch>=2.11"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
CHECKS = (
    ("ruff", "check", "."),
    ("ruff", "format", "--check", "."),
    ("lint-imports",),
    ("pyrefly", "check"),
    ("typos",),
)


class SetupError(Exception):
    """What stopped the set-up and what to do about it, in one sentence."""


def main(arguments: list[str]) -> int:
    """Set up what the command needs and run it; returns its exit status."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__)
        return 0
    try:
        require_supported_python()
        if arguments[0] == "test":
            set_up("test", "lint")
            return run_tests(arguments[1:])
        set_up(*(("serve",) if arguments[0] == "serve" else ()))
        return become([str(PYTHON), "-m", "stepfloor", *arguments])
    except SetupError as error:
        print(f"run.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("run.py: interrupted; the next run continues the set-up where it stopped", file=sys.stderr)
        return 130


def require_supported_python() -> None:
    """Go on under this Python if it is supported, else under one found on PATH; raises SetupError if none is."""
    if sys.version_info[:2] in SUPPORTED:
        return
    for major, minor in reversed(SUPPORTED):
        other = shutil.which(f"python{major}.{minor}")
        # a version manager may leave a launcher on PATH for a Python that it does not offer
        if other and subprocess.run([other, "-c", ""], capture_output=True, check=False).returncode == 0:
            print(f"run.py: going on with {other}", flush=True)
            raise SystemExit(become([other, *sys.argv]))
    found = ".".join(map(str, sys.version_info[:3]))
    raise SetupError(f"stepfloor needs Python 3.11 or 3.12; this is {found}; install one of them and run it again")


def set_up(*groups: str) -> None:
    """Make `.venv` hold the package and these dependency groups, unless a stamp says that it does already."""
    import tomllib  # Python 3.11; this file must still compile on an older one to say what it needs

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    constraints = ROOT / "constraints.txt"
    wanted = [project["build-system"], project["project"], project["dependency-groups"], TORCH, TORCH_FOR_GPU]
    key = hashlib.sha256(
        json.dumps([wanted, constraints.read_text(encoding="utf-8"), str(ROOT), sys.version, has_nvidia_gpu()]).encode()
    ).hexdigest()
    base, full = VENV / "stepfloor-base.stamp", VENV / "stepfloor-full.stamp"
    stamp = base if not groups else full if "test" in groups else VENV / f"stepfloor-{groups[0]}.stamp"
    if stamp_holds(full, key) or stamp_holds(stamp, key):
        return
    begin = time.monotonic()
    if not stamp_holds(base, key):
        say(f"set-up 1/3: virtual environment in {VENV.name}")
        make_venv()
        say("set-up 2/3: PyTorch")
        pip_install(*torch_requirement())
        base.unlink(missing_ok=True)
    requirements = [r for group in groups for r in project["dependency-groups"][group]]
    say(f"set-up 3/3: stepfloor and its dependencies{', test tools' if 'test' in groups else ''}")
    pip_install("--constraint", str(constraints), "--editable", str(ROOT), *requirements)
    stamp.write_text(key, encoding="utf-8")
    say(f"set-up finished in {time.monotonic() - begin:.0f} s")


def stamp_holds(stamp: Path, key: str) -> bool:
    """Whether the stamp was written for exactly this set-up."""
    return PYTHON.exists() and stamp.is_file() and stamp.read_text(encoding="utf-8") == key


def make_venv() -> None:
    """A virtual environment of this Python, at this place, with pip in it; an interrupted one is made anew."""
    mark, made_here = VENV / "stepfloor-venv.stamp", f"{ROOT} {sys.version}"
    if stamp_holds(mark, made_here):
        return
    if VENV.exists() and not mark.exists():
        raise SetupError(f"{VENV} was not made by this script; move it away or delete it, then run this command again")
    try:
        import ensurepip  # noqa: F401
    except ModuleNotFoundError:
        version = f"{sys.version_info[0]}.{sys.version_info[1]}"
        raise SetupError(
            "this Python cannot make virtual environments; Debian and Ubuntu keep that part in a package of its "
            f"own: run `sudo apt install python{version}-venv`, then this command again"
        ) from None
    try:
        if VENV.exists():
            shutil.rmtree(VENV)
        VENV.mkdir()
        mark.write_text("being made", encoding="utf-8")
        venv.EnvBuilder(with_pip=True, symlinks=os.name != "nt").create(VENV)
    except (OSError, subprocess.CalledProcessError) as error:
        raise SetupError(f"no virtual environment could be made in {VENV}: {error}") from None
    mark.write_text(made_here, encoding="utf-8")


def torch_requirement() -> tuple[str, ...]:
    """pip arguments for the PyTorch of this machine: a CPU build where there is no NVIDIA GPU and one can be had."""
    if has_nvidia_gpu():
        say("    an NVIDIA GPU is present: the CUDA build, about 3 GB with its libraries")
        return (TORCH_FOR_GPU,)
    if not sys.platform.startswith("linux"):
        return (TORCH,)
    try:
        with urllib.request.urlopen(f"{TORCH_CPU_INDEX}/torch/", timeout=3):
            pass
    except (OSError, urllib.error.URLError):
        say("    PyTorch's own index of CPU builds does not answer; taking the build that pip is set up to find")
        return ("--no-deps", TORCH)
    say("    no NVIDIA GPU: the CPU build, about 200 MB")
    # its dependencies come with the package's, from pip's usual index: this one holds old versions of them
    return ("--no-deps", "--index-url", TORCH_CPU_INDEX, TORCH)


def has_nvidia_gpu() -> bool:
    """Whether this machine has NVIDIA's driver, judged without loading anything."""
    return shutil.which("nvidia-smi") is not None or Path("/proc/driver/nvidia").exists()


def pip_install(*arguments: str) -> None:
    """pip install inside `.venv`, its output in view; raises SetupError where pip fails."""
    command = [str(PYTHON), "-m", "pip", "install", "--disable-pip-version-check", "--no-input", *arguments]
    begin = time.monotonic()
    with subprocess.Popen(command, cwd=ROOT, env=clean_environment()) as pip:
        # pip says nothing while it unpacks, a minute for PyTorch on a slow disk
        while (status := wait(pip, seconds=15)) is None:
            say(f"    pip at work for {time.monotonic() - begin:.0f} s")
    if status:
        raise SetupError(
            f"pip ended with status {status}, for the reason it printed above; if that is a connection or a name that "
            "does not resolve, check the network or HTTPS_PROXY and run this command again, it goes on from here"
        )


def wait(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    """Exit status of the process, None if it is still running after this time."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None


def run_tests(arguments: list[str]) -> int:
    """The checks (when no test is asked for by name), then pytest; its closing line is the last one printed."""
    failed = [] if arguments else [" ".join(check) for check in CHECKS if not passes(check)]
    if failed:
        print(f"run.py: failed before the tests: {', '.join(failed)}", file=sys.stderr, flush=True)
    # one thread a worker: two workers share two cores
    environment = {"OMP_NUM_THREADS": "1", **clean_environment()}
    command = [str(PYTHON), "-m", "pytest", "-n", "2", "-m", "not slow", *arguments]
    status = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
    return status or int(bool(failed))


def passes(check: tuple[str, ...]) -> bool:
    """Run one check; its output is shown when it fails."""
    say(f"{' '.join(check):24}", end="")
    begin = time.monotonic()
    command = [str(BIN / check[0]), *check[1:]]
    done = subprocess.run(
        command, cwd=ROOT, env=clean_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    say(f"{'failed' if done.returncode else 'ok':6} {time.monotonic() - begin:5.1f} s")
    if done.returncode:
        sys.stdout.buffer.write(done.stdout)
        sys.stdout.flush()
    return done.returncode == 0


def clean_environment() -> dict[str, str]:
    """The caller's environment less what would mix another Python's packages into `.venv`."""
    return {k: v for k, v in os.environ.items() if k not in ("PYTHONHOME", "PYTHONPATH", "PIP_USER", "PIP_TARGET")}


def become(command: list[str]) -> int:
    """Replace this process by the command, so that signals reach it; Windows runs it as a child."""
    sys.stdout.flush()
    if os.name == "nt":
        return subprocess.run(command, env=clean_environment(), check=False).returncode
    os.execve(command[0], command, clean_environment())


def say(text: str, end: str = "\n") -> None:
    print(text, end=end, flush=True)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
