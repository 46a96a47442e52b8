"""How a kernel is measured here, once for all benchmarks of kernels: what is wrong gets no times.

Right first. Families of kernels are checked in processes of their own (`check_apart`), each with a time limit: a fault
spoils the CUDA context of its process, and a kernel that waits for ever holds its process, so neither may be ours.

Then times (`medians_us`). A measurement is one captured graph of many calls (`capture`): launched one by one from
Python, small kernels would wait for their launches. What is compared takes turns in one process, in an order that is
reversed every round, so that clocks and heat fall on all alike; medians, because a round that something disturbed is
far off. The first two rounds are not counted. Every call of a graph has weights or states of its own, together more
bytes than the L2 holds (`ROTATED_BYTES`, `rotations`): in a step, everything else has passed through it since they
were last read. Floors are at `BANDWIDTH`, not at what this run reads (`read_bandwidth`, said beside it), so that
fractions of two runs can be compared; `sampling` alone has its floors at what this run reads.

What needs a GPU is asked of this file or of `torch.cuda`, and the device is `gpu()`: tests/test_benchmarks.py puts a
CPU in its place and runs every benchmark. The bench of a step measures its products itself
(`stepfloor.tools.bench.linears`): it may not import from here, and takes ratios round by round.
"""

import faulthandler
import json
import math
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from stepfloor.kernels._jit import compile_cuda, device_arch

DEVICE = torch.device("cuda", 0)
BANDWIDTH = 4.65e12  # bytes a second that one H200 reads
ROTATED_BYTES = 250e6  # four times the L2
READ_VALUES = 2**30  # 4 GiB
CACHE_DIR = Path(tempfile.gettempdir()) / "stepfloor-kernels"

# ---------------------------------------------------------------------- what is said


def say(text: str) -> None:
    """Print at once: a hang shows where."""
    print(text, flush=True)


def stopwatch() -> Callable[[str], None]:
    """Says a text with the seconds since this call before it."""
    begin = time.perf_counter()
    return lambda text: say(f"[{time.perf_counter() - begin:5.1f} s] {text}")


def gpu() -> torch.device:
    """The device that is measured: the first that this process sees."""
    return DEVICE


def multiprocessors(device: torch.device) -> int:
    """Of the device; plans depend on it."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def describe(device: torch.device, commit: str | None = None) -> str:
    """What the numbers belong to."""
    return (
        f"{torch.cuda.get_device_properties(device).name}, {multiprocessors(device)} multiprocessors, "
        f"torch {torch.__version__}, CUDA {torch.version.cuda}, commit {commit or current_commit()}"
    )


def current_commit() -> str:
    """The checkout's commit, or `unknown` where there is no git or no repository."""
    try:
        asked = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    except OSError:
        return "unknown"
    return asked.stdout.strip() or "unknown"


def beside_floor(us: float, floor_us: float) -> dict[str, object]:
    """How a time stands in a table."""
    return {"us": round(us, 2), "floor_us": round(floor_us, 2), "fraction": round(floor_us / us, 3)}


def write_json(path: Path | None, line: object) -> None:
    """Keep the figures where `--json` says."""
    if path is not None:
        path.write_text(json.dumps(line, indent=1))


def give_up_after(seconds: float) -> None:
    """End the process with a traceback then: what hangs on a GPU hangs for ever."""
    faulthandler.dump_traceback_later(seconds, exit=True)


# ---------------------------------------------------------------------- kernels compiled beforehand


@dataclass(frozen=True, slots=True)
class Kernel:
    """A source of stepfloor.kernels with its macros; label: the plan it belongs to, for messages."""

    label: str
    source: str
    macros: Mapping[str, int | str]


def compile_all(kernels: Iterable[Kernel], cache_dir: Path, device: torch.device) -> None:
    """Fill the cache from several processes; what does not compile is named and left out by its check."""
    distinct = {(kernel.source, *kernel.macros.items()): kernel for kernel in kernels}
    arch = device_arch(device)
    jobs = [(kernel, arch, cache_dir) for kernel in sorted(distinct.values(), key=str)]
    spawn = multiprocessing.get_context("spawn")  # a forked child would share the CUDA context
    with ProcessPoolExecutor(min(14, multiprocessing.cpu_count()), mp_context=spawn) as pool:
        failures = [failure for failure in pool.map(_build, jobs, chunksize=2) if failure is not None]
    say(f"{len(jobs)} kernels, {len(failures)} do not compile")
    for failure in failures[:3]:
        say(failure[:1500])


def _build(job: tuple[Kernel, str, Path]) -> str | None:
    """Compile one kernel into the cache; what went wrong, if anything."""
    kernel, arch, cache_dir = job
    try:
        compile_cuda(kernel.source, kernel.macros, arch, cache_dir)
    except RuntimeError as error:
        return f"{kernel.label}: {error}"
    return None


# ---------------------------------------------------------------------- processes of their own


def start(module: str, *arguments: str) -> subprocess.Popen[str]:
    """`python3 -m module arguments`; what it prints and what it complains about come in one stream."""
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def output_of(process: subprocess.Popen[str], limit_s: float) -> str:
    """What a process printed; one that hangs is ended, and the last line says so."""
    try:
        return process.communicate(timeout=limit_s)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        return f"{process.communicate()[0].rstrip()}\nHANGS, no end in {limit_s:g} s".lstrip()


def follow(process: subprocess.Popen[str]) -> str:
    """Say what a process prints line by line, but for the last line, which is returned when it has ended."""
    last: str | None = None
    with process:
        for line in process.stdout or ():
            if last is not None:
                say(last)
            last = line.rstrip()
    return last or ""


def run_apart(
    module: str, jobs: Mapping[str, Sequence[str]], limit_s: float, at_once: int | None = None
) -> Iterator[tuple[str, bool, str]]:
    """Each job's name, whether its process ended well, and what it printed, in the order of the jobs.

    jobs      arguments of the module
    at_once   processes at the same time, all of them if None
    """

    def run(name: str) -> tuple[str, bool, str]:
        process = start(module, *jobs[name])
        text = output_of(process, limit_s)
        return name, process.returncode == 0, text

    with ThreadPoolExecutor(at_once or max(1, len(jobs))) as pool:
        yield from pool.map(run, jobs)


def check_apart(module: str, families: Iterable[str], arguments: Sequence[str], limit_s: float) -> set[str]:
    """Check families side by side, each in a process of its own with `--check`: the ones that pass.

    A fault or a hang of one leaves the others alone.
    """
    passed: set[str] = set()
    jobs = {family: [*arguments, "--check", family] for family in families}
    for family, right, text in run_apart(module, jobs, limit_s):
        if right:
            passed.add(family)
        lines = text.strip().splitlines()[-12:]
        say("\n".join(lines))
        if not right and not any(line.startswith(f"check {family}:") for line in lines):
            say(f"check {family}: FAILED, see above")
    return passed


def verdict(family: str, errors: Sequence[str], details: str) -> int:
    """Say what a check in its process found; its exit status."""
    for error in errors[:8]:
        say(f"  {error}")
    say(f"check {family}: {'ok' if not errors else f'WRONG ({len(errors)} findings)'}, {details}")
    return int(bool(errors))


def parting_runs(
    run: Callable[[], object], outputs: Sequence[Tensor], wanted: Sequence[Tensor], held: Sequence[Tensor] = ()
) -> list[str]:
    """Of "eager" and "graph" the ways to run that do not give the wanted bits five times out of five.

    Outputs, and what else is held between the calls of run, are NaN before: a kernel that starts early and reads what
    is not written yet shows.
    """
    found: list[str] = []
    for name in ("eager", "graph"):
        go = run if name == "eager" else capture(run).replay
        for _ in range(5):
            for tensor in (*outputs, *held):
                tensor.fill_(math.nan)
            go()
            torch.cuda.synchronize()
            if not all(torch.equal(ours, theirs) for ours, theirs in zip(outputs, wanted, strict=True)):
                found.append(name)
                break
    return found


# ---------------------------------------------------------------------- times


def rotations(nbytes: float) -> int:
    """Calls of a graph, each with weights of so many bytes of its own."""
    return min(256, max(2, math.ceil(ROTATED_BYTES / nbytes)))


def capture(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A graph of what run queues; its kernels have been loaded before."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def load_and_capture(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """The same after a run, which compiles and loads kernels, and lets libraries choose and allocate."""
    run()
    torch.cuda.synchronize()
    return capture(run)


def medians_us(graphs: Mapping[str, torch.cuda.CUDAGraph], calls: int, rounds: int) -> dict[str, float]:
    """Time of one call in each graph: medians over rounds whose order alternates."""
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for turn in range(rounds + 2):
        order = list(graphs) if turn % 2 else list(reversed(list(graphs)))
        events = [(name, *_timed(graphs[name].replay)) for name in order]
        torch.cuda.synchronize()
        if turn >= 2:
            for name, begin, end in events:
                times[name].append(begin.elapsed_time(end) * 1e3 / calls)
    return {name: statistics.median(values) for name, values in times.items()}


def elapsed_us(run: Callable[[], object]) -> float:
    """Time on the device from the first launch to the last end, the device being idle before."""
    begin, end = _timed(run)
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e3


def ratio_of(before: torch.cuda.CUDAGraph, after: torch.cuda.CUDAGraph, rounds: int) -> str:
    """Time of the second as a part of the first's, from pairs in alternating order: median and middle half."""
    ratios: list[float] = []
    for turn in range(rounds):
        order = (before, after) if turn % 2 else (after, before)
        times = {graph: elapsed_us(graph.replay) for graph in order}
        ratios.append(times[after] / times[before])
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def read_bandwidth(device: torch.device) -> float:
    """Bytes per second of the best of torch's own reductions over 4 GiB.

    Not `stepfloor.step.bandwidth`, which reads with a kernel of ours: the records beside these benchmarks have torch's.
    """
    data = torch.ones(READ_VALUES, dtype=torch.float32, device=device)
    graphs = {"sum": capture(lambda: data.sum()), "max": capture(lambda: data.max())}
    return data.numel() * 4 / (min(medians_us(graphs, 1, 5).values()) * 1e-6)


def _timed(run: Callable[[], object]) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    run()
    end.record()
    return begin, end
