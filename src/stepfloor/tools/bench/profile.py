"""What the GPU did in a few steady steps: kernels by name, gaps, launches, and calls that would make the host wait.

Kernels of a chain overlap where a launch is dependent, so their durations add up to more than the step. Each is
credited with the time by which it moved the end of the work forward; credits and idle time add up to the step.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from stepfloor.engine import Engine

FIRST_KERNEL = "begin_rows"
SYNCHRONISING = (
    "cudaDeviceSynchronize",
    "cudaStreamSynchronize",
    "cudaEventSynchronize",
    "cudaMemcpy",
    "cudaFree",
    "cudaHostAlloc",
    "cuCtxSynchronize",
)
LAUNCHES = ("cudaGraphLaunch", "cuGraphLaunch")


@dataclass(frozen=True, slots=True)
class Operator:
    """One kernel name: its credit and calls a step."""

    name: str
    us: float
    calls: float


@dataclass(frozen=True, slots=True)
class Profile:
    """Means of a step over the profiled ones.

    kernels, copies   on the device; graph_launches  by the host
    synchronising     calls that wait for the device; pageable_copies  copies from or to pageable memory; both in all
    gap_us            idle between the last kernel of a step and the first of the next; idle_us  inside a step
    """

    steps: int
    kernels: float
    copies: float
    graph_launches: float
    synchronising: tuple[tuple[str, int], ...]
    pageable_copies: int
    gap_us: float
    idle_us: float
    operators: tuple[Operator, ...]


def profile_steps(engine: Engine, run: Callable[[Engine], Iterator[float]]) -> Profile:
    """Profile the steps that `run` times; it yields once before the first of them and once after each."""
    profiler = torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    )
    steps = run(engine)
    next(steps)
    profiler.start()
    for _ in steps:
        pass
    profiler.stop()
    return summarise(_events(profiler))


@dataclass(frozen=True, slots=True)
class Event:
    """One interval of the trace, in nanoseconds."""

    name: str
    on_device: bool
    start: int
    end: int


def _events(profiler: Any) -> list[Event]:
    found = profiler.profiler.kineto_results.events()
    device = torch.autograd.DeviceType.CUDA
    return [Event(e.name(), e.device_type() == device, e.start_ns(), e.start_ns() + e.duration_ns()) for e in found]


def summarise(events: list[Event]) -> Profile:
    """Take the whole steps out of a trace and count what they did. Raises ValueError without two whole steps."""
    work = sorted((e for e in events if e.on_device), key=lambda e: e.end)
    starts = sorted(e.start for e in work if FIRST_KERNEL in e.name)
    if len(starts) < 3:
        raise ValueError(f"the trace has {len(starts)} steps; at least 3 are wanted")
    # whole steps only: from the first kernel of one to the first kernel of another
    begin, end = starts[0], starts[-1]
    steps = len(starts) - 1
    inside = [e for e in work if begin <= e.start < end]
    credits: dict[str, list[float]] = {}
    gap = idle = 0
    front = begin
    for event in inside:
        wait = max(0, event.start - front)
        if FIRST_KERNEL in event.name:
            gap += wait
        else:
            idle += wait
        moved = max(0, event.end - max(front, event.start))
        front = max(front, event.end)
        held = credits.setdefault(event.name, [0.0, 0.0])
        held[0] += moved / 1e3
        held[1] += 1
    gap += max(0, end - front)
    copies = [e for e in inside if e.name.startswith(("Memcpy", "Memset"))]
    host = [e for e in events if not e.on_device and begin <= e.start < end]
    waits = {name: sum(e.name == name for e in host) for name in SYNCHRONISING}
    operators = [Operator(name, us / steps, calls / steps) for name, (us, calls) in credits.items()]
    return Profile(
        steps,
        (len(inside) - len(copies)) / steps,
        len(copies) / steps,
        sum(e.name in LAUNCHES for e in host) / steps,
        tuple((name, count) for name, count in waits.items() if count),
        sum("Pageable" in e.name for e in inside),
        gap / 1e3 / steps,
        idle / 1e3 / steps,
        tuple(sorted(operators, key=lambda o: -o.us)),
    )
