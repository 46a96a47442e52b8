"""hc_down and hc_mix on one GPU: right first, then 96 dependent pairs with rotated weights; the best forms are named.

    PYTHONPATH=src python3 -m benchmarks.hyper_connection [--rows 1,4] [--json FILE] [--commit ID]

1. Every form is checked in a process of its own against the reference (NaN past outputs, row bits for every row count,
   a chain of dependent calls with and without early start, graph replay). What is wrong, crashes or hangs is named and
   gets no times.
2. CUDA-graph replays of 96 calls, weights rotated (1.3 GB), rounds in alternating order, medians. `down` and `mix` are
   chains of one operator, each call reading the one before: a pipelined rate, as in the targets. `pair` alternates the
   two, as the model does.
"""

import argparse
import faulthandler
import json
import math
import multiprocessing
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.linear import capture, current_commit, describe, medians_us, read_bandwidth, say
from stepfloor.formats.codec import quantize
from stepfloor.kernels import hc_down, hc_mix
from stepfloor.kernels._jit import compile_cuda, device_arch
from stepfloor.kernels._stream import ROW_CAPACITIES, outer_scales, pack_tape
from stepfloor.kernels._torch import rms_norm, sigmoid, silu
from stepfloor.kernels.hc_down import DownPlan, StreamedDown, hc_down_inputs, hc_down_reference, plan_down, queue_down
from stepfloor.kernels.hc_mix import StreamedMix, hc_mix_inputs, hc_mix_reference, pack_mix, plan_mix, queue_mix
from tests.kernels.streamed import down_faults, mix_faults

WIDTH, STREAMS, RANK, D = 10240, 4, 320, 2560
PAIRS = 96
EPS = 1e-6
CHECKED_ROWS = (1, 2, 3, 4, 5, 8, 9, 16, 17, 40)
# us at 1 and 4 rows: what the bare products cost in the prototypes, kernels.md section 5
TARGETS = {("down", 1): 3.5, ("down", 4): 4.2, ("mix", 1): 3.4, ("mix", 4): 4.2}
DOWN_FORMS = {
    "stream, norm first": (1, True, "bf16"),
    "stream, norm last": (1, False, "bf16"),
    "half stream, norm first": (2, True, "bf16"),
    "half stream, norm last": (2, False, "bf16"),
    "half stream, norm first, fp8": (2, True, "fp8_channel"),
}
MIX_FORMS = {"2 slices": (2, "bf16"), "1 slice": (1, "bf16"), "2 slices, fp8": (2, "fp8_channel")}
DEFAULT_DOWN, DEFAULT_MIX = "half stream, norm first", "2 slices"
FAMILIES = [*(f"down: {name}" for name in DOWN_FORMS), *(f"mix: {name}" for name in MIX_FORMS)]


@dataclass(frozen=True, slots=True)
class Buffers:
    """Everything one chain writes: two of what a call reads from the call before."""

    residual: tuple[Tensor, Tensor]
    y: tuple[Tensor, Tensor]
    weights: tuple[Tensor, Tensor]
    normed: Tensor
    low: Tensor


def main() -> int:
    """Check and time; 1 if a form fails its check."""
    options = parse()
    device = torch.device("cuda", 0)
    if options.check is not None:
        return check_family(options.check, options.cache_dir, device)
    faulthandler.dump_traceback_later(options.limit_s, exit=True)
    begin = time.perf_counter()
    say(describe(device, options.commit))
    failures = compile_all(options.cache_dir, device)
    say(f"[{time.perf_counter() - begin:5.1f} s] kernels compiled, {len(failures)} failures")
    for failure in failures[:3]:
        say(failure[:1500])
    passed = check_all(options.cache_dir)
    say(f"[{time.perf_counter() - begin:5.1f} s] checks done")
    reads = read_bandwidth(device)
    say(f"read bandwidth of this run {reads / 1e12:.2f} TB/s; floors are at {options.bandwidth / 1e12:.2f}")
    times = {rows: time_rows(rows, passed, options, device) for rows in options.rows}
    say(f"[{time.perf_counter() - begin:5.1f} s] times done")
    best = report(times, options.bandwidth)
    line = {"gpu": torch.cuda.get_device_name(device), "commit": options.commit or current_commit()}
    line |= {"torch": torch.__version__, "read_bytes_per_s": reads, "passed": sorted(passed)}
    line |= {"failed": sorted(set(FAMILIES) - passed), "best": best, "us": times}
    if options.json is not None:
        options.json.write_text(json.dumps(line, indent=1))
    say(json.dumps(line, separators=(",", ":")))
    return int(len(passed) < len(FAMILIES))


def parse() -> argparse.Namespace:
    """Arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=lambda s: [int(v) for v in s.split(",")], default=[1, 2, 4, 8, 16])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--bandwidth", type=float, default=4.65e12)
    parser.add_argument("--cache-dir", type=Path, default=Path(tempfile.gettempdir()) / "stepfloor-kernels")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit", help="what was checked out, where git cannot say")
    parser.add_argument("--limit-s", type=int, default=150, help="give up with a traceback after this long")
    parser.add_argument("--check", choices=FAMILIES, help="check one form only, here")
    return parser.parse_args()


def down_plan(name: str, device: torch.device) -> DownPlan:
    """The plan of a form."""
    count = torch.cuda.get_device_properties(device).multi_processor_count
    return plan_down(RANK + STREAMS, RANK, STREAMS, D, count, *DOWN_FORMS[name])


def mix_plan(name: str, device: torch.device) -> hc_mix.MixPlan:
    """The plan of a form."""
    count = torch.cuda.get_device_properties(device).multi_processor_count
    return plan_mix(D, STREAMS, RANK, count, *MIX_FORMS[name])


def compile_all(cache_dir: Path, device: torch.device) -> list[str]:
    """Fill the cache from several processes; what does not compile is left out by its check."""
    arch = device_arch(device)
    jobs: list[tuple[str, dict[str, int], str, Path]] = []
    for capacity in ROW_CAPACITIES:
        for name in DOWN_FORMS:
            macros = hc_down.kernel_macros(down_plan(name, device), capacity, True)
            jobs += [("hc_down.cu", macros | {"WRITE": write}, arch, cache_dir) for write in (1, 0)]
        jobs += [
            ("hc_mix.cu", hc_mix.kernel_macros(mix_plan(name, device), capacity), arch, cache_dir) for name in MIX_FORMS
        ]
    spawn = multiprocessing.get_context("spawn")  # a forked child would share the CUDA context
    with ProcessPoolExecutor(min(14, multiprocessing.cpu_count()), mp_context=spawn) as pool:
        return [failure for failure in pool.map(build, jobs, chunksize=2) if failure is not None]


def build(job: tuple[str, dict[str, int], str, Path]) -> str | None:
    """Compile one kernel into the cache; what went wrong, if anything."""
    try:
        compile_cuda(*job)
    except RuntimeError as error:
        return str(error)
    return None


# ---------------------------------------------------------------------- checks


def check_all(cache_dir: Path) -> set[str]:
    """Check the forms side by side, each in its own process: a fault or a hang of one leaves the others alone."""
    command = [sys.executable, "-m", "benchmarks.hyper_connection", "--cache-dir", str(cache_dir), "--check"]
    running = {
        family: subprocess.Popen([*command, family], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for family in FAMILIES
    }
    passed: set[str] = set()
    deadline = time.monotonic() + 40
    for family, process in running.items():
        try:
            output, _ = process.communicate(timeout=max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
            output += f"\ncheck {family}: HANGS, no answer in 40 s"
        if process.returncode == 0:
            passed.add(family)
        say("\n".join(output.strip().splitlines()[-12:]))
    return passed


def check_family(family: str, cache_dir: Path, device: torch.device) -> int:
    """Exit status 0 if the form is right for every row count."""
    begin = time.perf_counter()
    kind, _, name = family.partition(": ")
    try:
        errors = check_down(name, cache_dir, device) if kind == "down" else check_mix(name, cache_dir, device)
    except RuntimeError as exception:
        errors = [f"CRASHED: {exception}"]
    for error in errors[:8]:
        say(f"  {error}")
    verdict = "ok" if not errors else f"WRONG ({len(errors)} findings)"
    say(f"check {family}: {verdict}, {time.perf_counter() - begin:.1f} s")
    return int(bool(errors))


def check_down(name: str, cache_dir: Path, device: torch.device) -> list[str]:
    """What is wrong with one form of hc_down."""
    plan = down_plan(name, device)
    found: list[str] = []
    for write in (True, False):
        inputs = hc_down_inputs(40, D, RANK, plan.format, torch.bfloat16, "cuda", write)
        weight = inputs["down"][0]
        down = StreamedDown(plan, pack_tape(weight, plan.stream), cache_dir, outer_scales(weight))
        torch.cuda.synchronize()
        wanted = hc_down_reference(**inputs)
        full: list[Tensor] = []
        for rows in reversed(CHECKED_ROWS):
            outputs = [nan((rows + 2, width), device) for width in (WIDTH, WIDTH, RANK, STREAMS)]
            given = tuple(None if inputs[key] is None else inputs[key][:rows] for key in ("residual", "y", "y_weights"))
            queue_down(down, inputs["norm_scale"], given, tuple(t[:rows] for t in outputs), EPS)
            label = f"{rows} rows, {'with' if write else 'without'} a write:"
            if not all(bool(t[rows:].isnan().all()) for t in outputs):
                found.append(f"{label} writes past the rows")
            ours = [t[:rows] for t in outputs]
            if not write:
                if not bool(ours[0].isnan().all()):
                    found.append(f"{label} writes the residual")
                ours[0] = given[0]
            found += [f"{label} {f}" for f in down_faults(ours, [t[:rows] for t in wanted], weight, plan.norm_first)]
            full = full or ours
            if not all(torch.equal(a, b[:rows]) for a, b in zip(ours, full, strict=True)):
                found.append(f"{label} other bits than with more rows")
        if write:
            for rows in (4, 16):
                found += check_chain(partial(down_chain, down, inputs, rows, device))
    return found


def check_mix(name: str, cache_dir: Path, device: torch.device) -> list[str]:
    """What is wrong with one form of hc_mix."""
    plan = mix_plan(name, device)
    inputs = hc_mix_inputs(40, D, RANK, plan.format, torch.bfloat16, "cuda")
    weight = inputs["up"][0]
    tape, tape_scales = pack_mix(weight, plan)
    up = StreamedMix(plan, tape, cache_dir, tape_scales)
    torch.cuda.synchronize()
    wanted = hc_mix_reference(**inputs)
    found: list[str] = []
    full: Tensor | None = None
    for rows in reversed(CHECKED_ROWS):
        out = nan((rows + 2, D), device)
        low, normed = inputs["low"][:rows], inputs["normed"][:rows]
        queue_mix(up, low, normed, out[:rows])
        if not bool(out[rows:].isnan().all()):
            found.append(f"{rows} rows: writes past the rows")
        found += [f"{rows} rows: {f}" for f in mix_faults(out[:rows], wanted[:rows], low, normed, weight)]
        full = out[:rows] if full is None else full
        if not torch.equal(out[:rows], full[:rows]):
            found.append(f"{rows} rows: other bits than with more rows")
    for rows in (4, 16):
        found += check_chain(partial(mix_chain, up, inputs, rows, device))
    return found


def nan(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """bf16, all NaN."""
    return torch.full(shape, math.nan, dtype=torch.bfloat16, device=device)


def down_chain(
    down: StreamedDown, inputs: dict[str, object], rows: int, device: torch.device, early: bool
) -> tuple[Callable[[], None], list[Tensor]]:
    """Twelve calls, each reading three results of the one before."""
    start = tuple(inputs[key][:rows] for key in ("residual", "y", "y_weights"))
    outputs = [tuple(nan((rows, width), device) for width in (WIDTH, WIDTH, RANK, STREAMS)) for _ in range(12)]

    def run() -> None:
        given = start
        for out in outputs:
            queue_down(down, inputs["norm_scale"], given, out, EPS, early)
            given = (out[0], out[1].view(-1)[: rows * D].view(rows, D), out[3])

    return run, [t for out in outputs for t in out]


def mix_chain(
    up: StreamedMix, inputs: dict[str, object], rows: int, device: torch.device, early: bool
) -> tuple[Callable[[], None], list[Tensor]]:
    """Twelve calls, each reading the result of the one before."""
    outputs = [nan((rows, D), device) for _ in range(12)]

    def run() -> None:
        low = inputs["low"][:rows]
        for out in outputs:
            queue_mix(up, low, inputs["normed"][:rows], out, early)
            low = out.view(-1)[: rows * RANK].view(rows, RANK)

    return run, outputs


def check_chain(make: Callable[[bool], tuple[Callable[[], None], list[Tensor]]]) -> list[str]:
    """A kernel that reads before the one before has finished gives other values than one that starts after it."""
    late, wanted = make(False)
    late()
    torch.cuda.synchronize()
    early, outputs = make(True)
    early()
    graph = capture(early)
    found: list[str] = []
    for name, go in (("eager", early), ("graph", graph.replay)):
        for _ in range(5):
            for out in outputs:
                out.fill_(math.nan)
            go()
            torch.cuda.synchronize()
            if not all(torch.equal(a, b) for a, b in zip(outputs, wanted, strict=True)):
                found.append(f"a dependent chain with early start ({name}) differs from one without")
                break
    return found


# ---------------------------------------------------------------------- times


def time_rows(rows: int, passed: set[str], options: argparse.Namespace, device: torch.device) -> dict[str, float]:
    """us of one call (`down`, `mix`) or of both (`pair`) for everything that passed."""
    downs = {n: down_plan(n, device) for n in DOWN_FORMS if f"down: {n}" in passed}
    mixes = {n: mix_plan(n, device) for n in MIX_FORMS if f"mix: {n}" in passed}
    down_store = torch.empty((PAIRS, RANK + STREAMS, WIDTH), dtype=torch.bfloat16, device=device).normal_(std=0.01)
    up_store = torch.empty((PAIRS, WIDTH, RANK), dtype=torch.bfloat16, device=device).normal_(std=0.05)
    streamed_downs: dict[DownPlan, list[StreamedDown]] = {}
    for plan in downs.values():
        weight = quantize(down_store[0], plan.format)
        tapes = pack_tape(weight, plan.stream).repeat(PAIRS, 1)
        streamed_downs[plan] = [StreamedDown(plan, t, options.cache_dir, outer_scales(weight)) for t in tapes]
    streamed_ups: dict[hc_mix.MixPlan, list[StreamedMix]] = {}
    for plan in mixes.values():
        tape, tape_scales = pack_mix(quantize(up_store[0], plan.format), plan)
        streamed_ups[plan] = [StreamedMix(plan, t, options.cache_dir, tape_scales) for t in tape.repeat(PAIRS, 1)]
    scales = 1 + 0.1 * torch.randn(PAIRS, WIDTH, device=device)
    buffers = make_buffers(rows, device)
    torch.cuda.synchronize()

    def queue(i: int, down: DownPlan | None, mix: hc_mix.MixPlan | None, early: bool) -> None:
        now, after = i % 2, 1 - i % 2
        b = buffers
        if down is not None:
            given = (b.residual[now], b.y[now], b.weights[now])
            outputs = (b.residual[after], b.normed, b.low, b.weights[after])
            queue_down(streamed_downs[down][i], scales[i], given, outputs, EPS, early)
        if mix is not None:
            # alone, a call reads the one before; the low of a pair comes from its hc_down
            low = b.low if down is not None else b.y[now].view(-1)[: rows * RANK].view(rows, RANK)
            queue_mix(streamed_ups[mix][i], low, b.normed, b.y[after], early)

    def chain(down: DownPlan | None, mix: hc_mix.MixPlan | None, early: bool = True) -> torch.cuda.CUDAGraph:
        queue(0, down, mix, early)  # loads the kernel outside of the capture
        torch.cuda.synchronize()
        return capture(lambda: [queue(i, down, mix, early) for i in range(PAIRS)])

    def library() -> None:
        for i in range(PAIRS):
            library_pair(i, buffers, down_store, up_store, scales)

    library()  # the library chooses and allocates outside of the capture
    torch.cuda.synchronize()
    graphs = {"pair torch": capture(library)}
    for name, plan in downs.items():
        graphs[f"down {name}"] = chain(plan, None)
    for name, plan in mixes.items():
        graphs[f"mix {name}"] = chain(None, plan)
    for name, plan in downs.items():
        for mix_name, mix in mixes.items():
            if mix.format == plan.format:
                graphs[f"pair {name} + {mix_name}"] = chain(plan, mix)
    if DEFAULT_DOWN in downs and DEFAULT_MIX in mixes:
        graphs["down default, no PDL"] = chain(downs[DEFAULT_DOWN], None, False)
        graphs["mix default, no PDL"] = chain(None, mixes[DEFAULT_MIX], False)
        graphs["pair default, no PDL"] = chain(downs[DEFAULT_DOWN], mixes[DEFAULT_MIX], False)
        graphs["pair default, again"] = chain(downs[DEFAULT_DOWN], mixes[DEFAULT_MIX])
    return {name: round(us, 2) for name, us in medians_us(graphs, PAIRS, options.rounds).items()}


def make_buffers(rows: int, device: torch.device) -> Buffers:
    """Random inputs of the first call, room for the others."""

    def two(width: int) -> tuple[Tensor, Tensor]:
        a, b = torch.randn(2, rows, width, device=device).to(torch.bfloat16)
        return a, b

    weights = two(STREAMS)
    normed, low = two(WIDTH)[0], two(RANK)[0]
    return Buffers(two(WIDTH), two(D), (weights[0].sigmoid(), weights[1].sigmoid()), normed, low)


def library_pair(i: int, b: Buffers, down_store: Tensor, up_store: Tensor, scales: Tensor) -> None:
    """The same operators from torch and cuBLAS."""
    now, after = i % 2, 1 - i % 2
    down, up = down_store[i], up_store[i]
    torch.add(
        b.residual[now], (b.y[now].unsqueeze(-2) * b.weights[now].unsqueeze(-1)).flatten(-2), out=b.residual[after]
    )
    normed = rms_norm(b.residual[after], scales[i], EPS, STREAMS)
    projected = F.linear(normed, down) / STREAMS
    low = silu(projected[:, :RANK])
    torch.mul(sigmoid(projected[:, RANK:]), 2, out=b.weights[after])
    gate = sigmoid(F.linear(low, up))
    b.y[after].copy_((gate * normed).unflatten(-1, (STREAMS, -1)).mean(-2))


def report(times: dict[int, dict[str, float]], bandwidth: float) -> dict[str, str]:
    """The table a person reads; returns each operator's bf16 form with the best geometric mean over row counts."""
    down_bytes, up_bytes = 2 * (RANK + STREAMS) * WIDTH + 4 * WIDTH, 2 * RANK * WIDTH
    weight_bytes = {"down": down_bytes, "mix": up_bytes, "pair": down_bytes + up_bytes}
    floors = {kind: count / bandwidth * 1e6 for kind, count in weight_bytes.items()}
    rows_seen = list(times)
    say(f"\nus a call; floors of bf16 weights: {', '.join(f'{k} {v:.2f}' for k, v in floors.items())}")
    say(f"{'':52} " + " ".join(f"M={rows:<6d}" for rows in rows_seen))
    names = list(dict.fromkeys(name for found in times.values() for name in found))
    for name in sorted(names, key=lambda n: list(floors).index(n.split()[0])):
        say(f"{name:52} " + " ".join(f"{times[rows].get(name, math.nan):8.2f}" for rows in rows_seen))
    best: dict[str, str] = {}
    for kind, floor in floors.items():
        scores = {
            name: sum(math.log(times[rows][name]) for rows in rows_seen)
            for name in names
            if name.startswith(kind) and not any(word in name for word in ("torch", "default", "fp8"))
        }
        if not scores:
            say(f"{kind}: no form passed")
            continue
        best[kind] = min(scores, key=lambda name: scores[name])
        cells = ", ".join(
            f"M={r} {times[r][best[kind]]:.2f} us ({floor / times[r][best[kind]]:.0%})" for r in rows_seen
        )
        say(f"best {kind}: {best[kind].removeprefix(kind + ' ')}: {cells}")
    for (kind, rows), target in TARGETS.items():
        if kind in best and rows in times:
            us = times[rows][best[kind]]
            say(f"target {kind} M={rows}: {target} us, measured {us:.2f}: {'met' if us <= target else 'MISSED'}")
    return best


if __name__ == "__main__":
    sys.exit(main())
