"""All that is to be seen on a GPU, in one go: every command of COMMANDS, on as many GPUs as there are.

    PYTHONPATH=src python3 -m benchmarks.evidence DIRECTORY [--only step,engine] [--gpus 0,1] [--seconds 1800]

A GPU that is free takes the next command of the list, which has a process and a time limit of its own; its output goes
to DIRECTORY/NAME.log as it comes, its figures to DIRECTORY/NAME.json. What the time left has no room for is left
out and named at the end, beside what passed and what failed. `--list` prints the table of docs/evidence.md.

Commands on other GPUs share the host with the one that is timed, so a figure for a record is taken with `--gpus 0`
where the host matters: loading, and the time to ready.
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Command:
    """One command, and what it shows.

    arguments  of Python; {json} is a file for its figures, {commit} what --commit says
    seconds    most that it may take; about what it takes on an H200 with an empty kernel cache
    """

    name: str
    arguments: str
    seconds: int
    shows: str


COMMANDS = (
    Command(
        "step",
        "-m stepfloor bench step --sequences 16,4,1 --spec-tokens 3,0 --prefill 8192 --commit {commit} --output {json}",
        240,
        "the step itself: a row as soon as a cell is measured ([step-h200.md](../benchmarks/step-h200.md))",
    ),
    Command(
        "step-long",
        "-m stepfloor bench step --sequences 16,4,1 --spec-tokens 3,0 --max-model-len 32768 --no-count-experts "
        "--commit {commit} --output {json}",
        200,
        "the same steps by an engine with room for 32,768 tokens a sequence, as a server has",
    ),
    Command(
        "engine",
        "-m pytest tests/test_engine_gpu.py tests/step/test_memory_gpu.py tests/model/test_pinned.py -m gpu -q -s",
        180,
        "ids of the GPU and the CPU, near-ties printed first; sampled, coupled, eager and joined ids; k = 0 to 4 and 1 "
        "to 16 sequences; all graphs there at the start; the plan is a limit of the process; pinned memory",
    ),
    Command(
        "kernels",
        "-m pytest tests/kernels -m gpu -q -n 6",
        300,
        "every operator against its reference at real and odd shapes",
    ),
    Command(
        "linears",
        "-m stepfloor bench step --linears --commit {commit} --output {json}",
        200,
        "every matrix product in every format beside cuBLAS or `_scaled_mm`, with the marks asked for",
    ),
    Command(
        "experts",
        "-m benchmarks.experts --decode-only --rounds 3 --rows 1,4,16,64 --json {json}",
        120,
        "the routed experts of a sub-layer: checks of every plan, and each kernel beside its bytes",
    ),
    Command(
        "hyper",
        "-m benchmarks.hyper_connection --commit {commit} --json {json}",
        120,
        "a hyper-connection: checks, and a chain of them",
    ),
    Command("delta", "-m benchmarks.delta_many --json {json}", 90, "delta nets of several sequences, bits and times"),
    Command(
        "linear",
        "-m benchmarks.linear --quick --no-chain --rows 1,16,64 --formats bf16 --commit {commit} --json {json}",
        200,
        "forms of the streamed product: checks, and each beside the others",
    ),
    Command(
        "step-c",
        "-m stepfloor bench step --format c --commit {commit} --output {json}",
        240,
        "the step in FP8 with an MXFP8 head and FP8 draft experts",
    ),
    Command(
        "step-b",
        "-m stepfloor bench step --format b' --commit {commit} --output {json}",
        240,
        "the step with FP8 dense matrices and head",
    ),
    Command(
        "step-fp8",
        "-m stepfloor bench step --format fp8 --ngram-table pinned --sequences 1 --commit {commit} --output {json}",
        200,
        "the step of the FP8 release, its table in pinned memory",
    ),
    Command(
        "contexts",
        "-m benchmarks.contexts --commit {commit} --json {json}",
        240,
        "contexts to 262,144 with keys and values in bf16 and fp8; the memory plan as torch's own limit; the n-gram "
        "table in pinned memory",
    ),
    Command(
        "yarn",
        "-m benchmarks.contexts --yarn 4 --contexts 1000000 --kv auto --no-pinned --limit-s 390 --commit {commit} "
        "--json {json}",
        400,
        "a context of 1,000,000 tokens with YaRN, every token of it prefilled",
    ),
    Command(
        "soak",
        "-m benchmarks.soak --tokens 20000 --commit {commit} --json {json}",
        150,
        "a generation of 20,000 tokens with drafts and without: nothing infinite, the recurrent state within a derived "
        "bound of float64",
    ),
    Command(
        "soak-full",
        "-m benchmarks.soak --tokens 4000 --model full --commit {commit} --json {json}",
        90,
        "the same for delta nets of full width",
    ),
    Command(
        "sanitizer",
        "-m benchmarks.sanitizer --jobs 4 --commit {commit} --json {json}",
        480,
        "memcheck, racecheck and synccheck over every operator and eager steps",
    ),
    Command(
        "start",
        "-m benchmarks.loading --parts start --commit {commit} --json {json}",
        150,
        "from the start of a process to its first timed row, weights drawn on the device, second run below 60 s",
    ),
    Command(
        "disk",
        "-m benchmarks.loading --parts disk --commit {commit} --json {json}",
        200,
        "loading 20 GB, cold, beside the disk's own rate; the progress bar; memory of the host",
    ),
    Command("pairs", "-m benchmarks.pairs", 60, "products of two formats in one launch"),
    Command("edges", "-m benchmarks.edges --commit {commit} --json {json}", 120, "the small operators of a step"),
    Command(
        "attention",
        "-m benchmarks.sparse_attention --limit-s 230 --json {json}",
        240,
        "sparse attention: checks and times",
    ),
    Command("sampling", "-m benchmarks.sampling --json {json}", 90, "what a draw costs, and 200,000 of them"),
)


@dataclass(frozen=True)
class Result:
    """How a command ended: its exit code, or None where it was cut or left out."""

    command: Command
    code: int | None
    seconds: float
    why: str = ""

    def line(self) -> str:
        """One row of the last table."""
        ended = "passed" if self.code == 0 else self.why or f"FAILED with {self.code}"
        return f"{self.command.name:>10} {self.seconds:7.1f} s  {ended}"


def main() -> int:
    """0 if every command ran and passed."""
    options = parse()
    if options.list:
        print(table())
        return 0
    names = options.only or [command.name for command in COMMANDS]
    chosen = [command for name in names for command in COMMANDS if command.name == name]
    if unknown := set(names) - {command.name for command in chosen}:
        print(f"--only: no command is called {', '.join(sorted(unknown))}; `--list` has the names", file=sys.stderr)
        return 2
    options.directory.mkdir(parents=True, exist_ok=True)
    results = run_all(chosen, options.gpus, options.directory, options.commit, options.seconds)
    for result in results:
        print(result.line())
    return int(any(result.code != 0 for result in results))


def parse() -> argparse.Namespace:
    """Arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, nargs="?", default=Path("evidence"))
    parser.add_argument("--only", type=lambda text: text.split(","), help="names, in the order to run")
    parser.add_argument("--gpus", type=lambda text: text.split(","), default=["0"])
    parser.add_argument("--seconds", type=float, default=3600.0, help="that all may take together")
    parser.add_argument("--commit", default="")
    parser.add_argument("--list", action="store_true", help="print the commands as a table and run none")
    return parser.parse_args()


def run_all(
    commands: Sequence[Command], gpus: Sequence[str], directory: Path, commit: str, seconds: float
) -> list[Result]:
    """Run them, one at a time on each GPU; results in the order of the commands."""
    begin = time.monotonic()
    waiting, results, lock = list(commands), dict[str, Result](), threading.Lock()

    def say(gpu: str, text: str) -> None:
        print(f"[{time.monotonic() - begin:6.1f} s] GPU {gpu}: {text}", flush=True)

    def next_command() -> Command | None:
        with lock:
            left = seconds - (time.monotonic() - begin)
            at = next((i for i, command in enumerate(waiting) if command.seconds <= left), None)
            return None if at is None else waiting.pop(at)

    def lane(gpu: str) -> None:
        while (command := next_command()) is not None:
            print(
                f"[{time.monotonic() - begin:6.1f} s] GPU {gpu}: {command.name}, at most {command.seconds} s",
                flush=True,
            )
            results[command.name] = result = run_one(command, gpu, directory, commit)
            say(gpu, result.line().strip())

    lanes = [threading.Thread(target=lane, args=(gpu,)) for gpu in gpus]
    for thread in lanes:
        thread.start()
    for thread in lanes:
        thread.join()
    left_out = "left out: no time"
    return [results.get(command.name, Result(command, None, 0.0, left_out)) for command in commands]


def run_one(command: Command, gpu: str, directory: Path, commit: str) -> Result:
    """Run one command on one GPU; when its time is up, it and all that it started are ended."""
    words = command.arguments.split()
    arguments = [word.format(json=directory / f"{command.name}.json", commit=commit) for word in words]
    begin = time.monotonic()
    with (directory / f"{command.name}.log").open("wb") as log:
        process = subprocess.Popen(
            ["env", f"CUDA_VISIBLE_DEVICES={gpu}", "PYTHONUNBUFFERED=1", sys.executable, *arguments],
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(command.seconds)
        except subprocess.TimeoutExpired:
            return Result(command, None, time.monotonic() - begin, f"CUT after {command.seconds} s")
        finally:
            end(process)
    return Result(command, code, time.monotonic() - begin)


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process and its children; those of one that is over too."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def table() -> str:
    """COMMANDS as a table in Markdown."""
    rows = ["| name | `python3` ... | shows | s |", "|---|---|---|---|"]
    for command in COMMANDS:
        words = [word for word in command.arguments.split() if word not in ("--json", "--output", "--commit")]
        arguments = " ".join(word for word in words if not word.startswith("{"))
        rows.append(f"| {command.name} | `{arguments}` | {command.shows} | {command.seconds} |")
    return "\n".join(rows)


if __name__ == "__main__":
    sys.exit(main())
