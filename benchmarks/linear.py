"""Streamed bf16 products on one GPU: right first, then timed beside cuBLAS; the best plan of each shape is printed.

    PYTHONPATH=src python3 -m benchmarks.linear [--shapes head,gdn_in] [--rows 1,4] [--json FILE]

1. Every kernel family is checked in a process of its own (float64, NaN around inputs and outputs, row bits for every M,
   graph replay). A family that is wrong, crashes or hangs is named and gets no times.
2. CUDA-graph replays, weights rotated past the L2, rounds in alternating order, medians. Both sides run the same chain
   of calls. Fractions are of `--bandwidth`, what one H200 reads; the read rate of this run is printed beside it.
3. The dense chain of a step: 48 layers, 384 products, 7.3 GB.
"""

import argparse
import faulthandler
import json
import math
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from stepfloor.kernels._jit import compile_cuda, device_arch
from stepfloor.kernels._stream import SHARED_LIMIT, StreamPlan, pack_tape
from stepfloor.kernels.linear import (
    MAX_ROWS,
    StreamedWeight,
    Variant,
    choose_variant,
    kernel_macros,
    launch_for,
    pack_arguments,
    panel_stage_steps,
    plan_stream,
    shared_bytes,
    stream_product,
)

SHAPES = {
    "head": (248320, 2560),
    "gdn_in": (16480, 2560),
    "qsa_in": (13952, 2560),
    "out": (2560, 6144),
    "router_gate_up": (1808, 2560),
    "shared_gate_up": (1280, 2560),
    "shared_down": (2560, 640),
    "router": (512, 2560),
    "hc_down": (336, 10240),
    "hc_up": (10240, 320),
    "gdn_ab": (96, 2560),
}
ODD_SHAPES = [(16, 16), (37, 48), (251, 64), (33, 640), (385, 256), (1000, 1040), (5301, 4096)]
CHECKED_ROWS = (1, 2, 3, 4, 8, 16, 17, 33, 64, 80)
TARGETS = {"head": 0.85, "gdn_in": 0.85, "qsa_in": 0.85, "out": 0.75}
ROTATED_BYTES = 250e6  # four times the L2
FAMILIES = ("ring", "passes", "cluster", "panel", "wide")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan, the kernel for a row count and whether it starts before its predecessor ends."""

    name: str
    family: str
    plan: StreamPlan
    variant: Variant
    dependent: bool = True


def main() -> int:
    """Run all three parts; 1 if a family or a target fails."""
    options = parse()
    device = torch.device("cuda", 0)
    if options.check is not None:
        return check_family(options.check, options.cache_dir, device)
    faulthandler.dump_traceback_later(options.limit_s, exit=True)
    begin = time.perf_counter()
    say(describe(device, options.commit))
    shapes = {name: SHAPES[name] for name in options.shapes}
    compile_all(shapes, options, device)
    say(f"[{time.perf_counter() - begin:5.1f} s] kernels compiled")
    passed = check_all(options.cache_dir)
    say(f"[{time.perf_counter() - begin:5.1f} s] checks done; timed: {', '.join(sorted(passed)) or 'nothing'}")
    reads = read_bandwidth(device)
    say(f"read bandwidth of this run {reads / 1e12:.2f} TB/s; fractions below are of {options.bandwidth / 1e12:.2f}")
    table: list[dict[str, object]] = []
    for name, (n, k) in shapes.items():
        table += time_shape(name, n, k, passed, options, device)
        say(f"[{time.perf_counter() - begin:5.1f} s] {name} done")
    best = best_plans(table)
    chain = time_chain(best, passed, options, device) if options.chain else {}
    report(table, best)
    line = {
        "gpu": torch.cuda.get_device_name(device),
        "commit": options.commit or current_commit(),
        "torch": torch.__version__,
        "read_bytes_per_s": reads,
    }
    line |= {"passed": sorted(passed), "failed": sorted(set(FAMILIES) - passed), "best": best, "chain": chain}
    if options.json is not None:
        options.json.write_text(json.dumps(line | {"rows": table}, indent=1))
    us = {f"{r['shape']}/{r['rows']}/{r['kernel']}": r["us"] for r in table if r["kernel"] in ("cuBLAS", "default")}
    say(json.dumps(line | {"us": us}, separators=(",", ":")))
    return int(len(passed) < len(FAMILIES))


def parse() -> argparse.Namespace:
    """Arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=lambda s: s.split(","), default=list(SHAPES))
    parser.add_argument("--rows", type=lambda s: [int(v) for v in s.split(",")], default=[1, 4, 8, 16, 64])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--bandwidth", type=float, default=4.65e12)
    parser.add_argument("--cache-dir", type=Path, default=Path(tempfile.gettempdir()) / "stepfloor-kernels")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit", help="what was checked out, where git cannot say")
    parser.add_argument("--no-chain", dest="chain", action="store_false")
    parser.add_argument("--limit-s", type=int, default=240, help="give up with a traceback after this long")
    parser.add_argument("--check", choices=FAMILIES, help="check one family only, here")
    return parser.parse_args()


def describe(device: torch.device, commit: str | None) -> str:
    """What the numbers belong to."""
    p = torch.cuda.get_device_properties(device)
    return (
        f"{p.name}, {p.multi_processor_count} multiprocessors, torch {torch.__version__}, CUDA {torch.version.cuda}, "
        f"commit {commit or current_commit()}"
    )


def current_commit() -> str:
    """The checkout's commit, or `unknown` where there is no git or no repository."""
    try:
        asked = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    except OSError:
        return "unknown"
    return asked.stdout.strip() or "unknown"


# ---------------------------------------------------------------------- what is compared


def plans(n: int, k: int, device: torch.device) -> dict[str, StreamPlan]:
    """The default plan of a shape and what it competes with."""
    count = torch.cuda.get_device_properties(device).multi_processor_count
    base = plan_stream(n, k, count)
    found = {"default": base}
    if base.passes > 1:
        found["2 slots"] = replace(base, slots=2)
        found["16 rows"] = replace(base, pass_rows=16, slots=2)
    elif k == 6144:
        for chunk_steps, slots in ((4, 2), (3, 3), (2, 4), (6, 2), (12, 1)):
            found[f"chunk {chunk_steps} x {slots}"] = replace(base, chunk_steps=chunk_steps, slots=slots)
        found["split 2"] = plan_stream(n, k, count, split=2)
    elif k == 10240:
        found |= {f"split {split}": plan_stream(n, k, count, split=split) for split in (1, 2, 5)}
    elif (n, k) in ((1280, 2560), (1808, 2560)):
        found["split 2"] = plan_stream(n, k, count, split=2)
        found["chunk 5"] = replace(base, chunk_steps=5, slots=2)
    return {name: plan for name, plan in found.items() if name == "default" or plan != base}


def candidates(n: int, k: int, rows: int, device: torch.device) -> list[Candidate]:
    """Everything that can compute this product here."""
    found: list[Candidate] = []
    for name, plan in plans(n, k, device).items():
        variant = choose_variant(plan, rows)
        found.append(Candidate(name, family_of(plan, variant), plan, variant))
        if name == "default":
            found.append(replace(found[-1], name="default, no PDL", dependent=False))
        stage_steps = panel_stage_steps(plan)
        if stage_steps and name == "default":
            tiles = -(-rows // 16)
            for stages in (2, 3):
                panel = Variant(tiles, True, stage_steps, stages)
                if rows >= 8 and panel != variant:
                    found.append(Candidate(f"panel, {stages} stages", "panel", plan, panel))
    return [c for c in found if shared_bytes(c.plan, c.variant) <= SHARED_LIMIT]


def family_of(plan: StreamPlan, variant: Variant) -> str:
    """Which code path a kernel takes."""
    if variant.stage_steps:
        return "panel"
    if variant.tiles > 1:
        return "wide"
    if plan.split > 1:
        return "cluster"
    return "passes" if plan.passes > 1 else "ring"


def checked_plans(family: str, device: torch.device) -> list[tuple[StreamPlan, list[Variant]]]:
    """Plans that put a family to the test, each with the kernels that must agree bit for bit."""
    count = torch.cuda.get_device_properties(device).multi_processor_count
    short, tall = Variant(1, False), Variant(1, True)
    shapes = [*SHAPES.values(), *ODD_SHAPES]
    every = [p for n, k in shapes for p in plans(n, k, device).values()]
    single = [p for p in every if p.passes == 1 and p.split == 1]
    if family == "ring":
        return [(p, [short, tall]) for p in single]
    if family == "passes":
        odd = [plan_stream(16483, 2560, count), plan_stream(5301, 4096, count)]
        return [(p, [short, tall]) for p in [*(p for p in every if p.passes > 1), *odd]]
    if family == "cluster":
        return [(p, [short, tall]) for p in every if p.split > 1]
    if family == "panel":
        panels = [p for p in [*every, plan_stream(16483, 2560, count)] if panel_stage_steps(p) and p.slots == 3]
        return [
            (
                p,
                [
                    tall,
                    *(Variant(tiles, True, panel_stage_steps(p), s) for tiles, s in ((1, 2), (1, 3), (4, 3), (5, 3))),
                ],
            )
            for p in panels
        ]
    wide = [*single, plan_stream(336, 10240, count)]
    return [(p, [tall, *(Variant(tiles, True) for tiles in (2, 4, 5))]) for p in dict.fromkeys(wide)]


def compile_all(shapes: dict[str, tuple[int, int]], options: argparse.Namespace, device: torch.device) -> None:
    """Fill the cache from several processes; what does not compile is named and left out by its check."""
    wanted = {
        (c.plan, c.variant) for n, k in shapes.values() for rows in options.rows for c in candidates(n, k, rows, device)
    }
    for family in FAMILIES:
        wanted |= {(plan, variant) for plan, variants in checked_plans(family, device) for variant in variants}
    arch = device_arch(device)
    jobs = [(plan, variant, arch, options.cache_dir) for plan, variant in sorted(wanted, key=str)]
    spawn = multiprocessing.get_context("spawn")  # a forked child would share the CUDA context
    with ProcessPoolExecutor(min(14, multiprocessing.cpu_count()), mp_context=spawn) as pool:
        failures = [f for f in pool.map(build, jobs, chunksize=4) if f is not None]
    say(f"{len(wanted)} kernels, {len(failures)} do not compile")
    for failure in failures[:3]:
        say(failure[:1500])


def build(job: tuple[StreamPlan, Variant, str, Path]) -> str | None:
    """Compile one kernel into the cache; what went wrong, if anything."""
    plan, variant, arch, cache_dir = job
    if shared_bytes(plan, variant) > SHARED_LIMIT:
        return None
    try:
        compile_cuda("linear.cu", kernel_macros(plan, variant), arch, cache_dir)
    except RuntimeError as error:
        return f"{variant} of {plan}: {error}"
    return None


# ---------------------------------------------------------------------- checks


def check_all(cache_dir: Path) -> set[str]:
    """Check the families side by side, each in its own process: a fault or a hang of one leaves the others alone."""
    command = [sys.executable, "-m", "benchmarks.linear", "--cache-dir", str(cache_dir), "--check"]
    running = {
        family: subprocess.Popen([*command, family], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for family in FAMILIES
    }
    passed: set[str] = set()
    deadline = time.monotonic() + 90
    for family, process in running.items():
        try:
            output, _ = process.communicate(timeout=max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
            output += "HANGS: no answer in 90 s"
        if process.returncode == 0:
            passed.add(family)
        say("\n".join(output.strip().splitlines()[-12:]))
    return passed


def check_family(family: str, cache_dir: Path, device: torch.device) -> int:
    """Exit status 0 if every kernel of the family is right."""
    begin = time.perf_counter()
    errors: list[str] = []
    worst, count = 0.0, 0
    for plan, variants in checked_plans(family, device):
        fitting = [v for v in variants if shared_bytes(plan, v) <= SHARED_LIMIT]
        try:
            error, found = check_plan(plan, fitting, cache_dir, device)
        except RuntimeError as exception:
            say(f"check {family}: CRASHED at {plan}: {exception}")
            return 1
        worst, count = max(worst, error), count + len(fitting)
        errors += found
    for error in errors[:8]:
        say(f"  {error}")
    took = time.perf_counter() - begin
    verdict = "ok" if not errors else f"WRONG ({len(errors)} findings)"
    say(f"check {family}: {verdict}, {count} kernels, worst relative error {worst:.5f}, {took:.1f} s")
    return int(bool(errors))


def check_plan(plan: StreamPlan, variants: list[Variant], cache: Path, device: torch.device) -> tuple[float, list[str]]:
    """Largest relative error of a plan's kernels and what is wrong with them, in words."""
    n, k = plan.n, plan.k
    make = torch.Generator(device).manual_seed(n + k)
    w = (torch.randn(n, k, generator=make, device=device) / k**0.5).to(torch.bfloat16)
    x = torch.randn(MAX_ROWS, k, generator=make, device=device).to(torch.bfloat16)
    weight = StreamedWeight(plan, pack_tape(w, plan), cache)
    exact = torch.cat([x.double() @ part.double().T for part in w.split(32768)], 1)
    torch.cuda.synchronize()
    # bf16 rounds by at most 2**-8 of the value; float32 sums add K 2**-24 of the sum of magnitudes, below sqrt(K) here
    bound = exact.abs() * 2**-8 + k**1.5 * 2**-24
    held = torch.empty((96, k + 8), dtype=torch.bfloat16, device=device)  # rows and columns past the input
    out = torch.empty((96, n + 3), dtype=torch.bfloat16, device=device)
    reference: Tensor | None = None
    worst, errors = 0.0, []
    for variant in variants:
        for rows in CHECKED_ROWS:
            if -(-rows // variant.max_rows) > 2 and n > 20000:
                continue
            label = f"{variant} of {plan}, {rows} rows:"
            held.fill_(float("nan"))
            held[:rows, :k] = x[:rows]
            out.fill_(float("nan"))
            stream_product(held[:rows, :k], weight, out[:rows, :n], variant)
            y = out[:rows, :n].double()
            error = float((y - exact[:rows]).norm() / exact[:rows].norm())
            worst = max(worst, error if math.isfinite(error) else math.inf)
            if not bool(((y - exact[:rows]).abs() <= bound[:rows]).all()):
                bad = int((~((y - exact[:rows]).abs() <= bound[:rows])).sum())
                errors.append(f"{label} {bad} of {y.numel()} values outside the bound, relative error {error:.3g}")
                break
            if not bool(out[rows:].isnan().all()) or not bool(out[:, n:].isnan().all()):
                errors.append(f"{label} writes outside its rows or columns")
            bits = out[:rows, :n].clone()
            if rows == max(r for r in CHECKED_ROWS) or reference is None or reference.shape[0] < rows:
                if reference is not None and not torch.equal(bits[: reference.shape[0]], reference):
                    errors.append(f"{label} other bits than with fewer rows or another kernel")
                reference = bits if reference is None or reference.shape[0] < rows else reference
            elif not torch.equal(bits, reference[:rows]):
                errors.append(f"{label} other bits than with more rows or another kernel")
        order = torch.randperm(8, generator=torch.Generator().manual_seed(1)).to(device)
        moved = torch.empty((8, n), dtype=torch.bfloat16, device=device)
        stream_product(x[:8][order].contiguous(), weight, moved, variant)
        if reference is not None and not torch.equal(moved, reference[:8][order]):
            errors.append(f"{variant} of {plan}: a row's bits depend on its place")
        errors += check_graph(weight, variant, x, device)
    return worst, errors


def check_graph(weight: StreamedWeight, variant: Variant, x: Tensor, device: torch.device) -> list[str]:
    """Eager without early start, eager with it and replayed graph agree while the input changes just before."""
    plan, rows = weight.plan, min(4, variant.max_rows)
    late = launch_for(plan, variant, device, weight.cache_dir, False)
    buffer = torch.empty((rows, plan.k), dtype=torch.bfloat16, device=device)
    outs = [torch.empty((rows, plan.n), dtype=torch.bfloat16, device=device) for _ in range(6)]
    wanted: list[Tensor] = []
    for i in range(6):
        out = torch.empty_like(outs[0])
        late(pack_arguments(weight.tape, x[4 * i : 4 * i + rows], out))
        wanted.append(out)

    def run() -> None:
        for i, out in enumerate(outs):
            torch.mul(x[4 * i : 4 * i + rows], 1, out=buffer)  # a kernel: a copy would be another kind of graph node
            stream_product(buffer, weight, out, variant)
            stream_product(buffer, weight, out, variant)

    run()
    torch.cuda.synchronize()
    eager = all(torch.equal(a, b) for a, b in zip(outs, wanted, strict=True))
    graph = capture(run)
    for out in outs:
        out.fill_(float("nan"))
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    replayed = all(torch.equal(a, b) for a, b in zip(outs, wanted, strict=True))
    found = [] if eager else [f"{variant} of {plan}: eager with PDL differs from without"]
    if not replayed:
        found.append(f"{variant} of {plan}: graph replay differs from eager")
    return found if plan.n < plan.k else found + check_chain(weight, variant, x[:rows], device)


def check_chain(weight: StreamedWeight, variant: Variant, x: Tensor, device: torch.device) -> list[str]:
    """Products that each read the one before: one that reads before it is finished gives other values."""
    plan, rows = weight.plan, x.shape[0]
    early, late = (launch_for(plan, variant, device, weight.cache_dir, dependent) for dependent in (True, False))
    stride = plan.n + -plan.n % 8
    outs = [torch.empty((rows, stride), dtype=torch.bfloat16, device=device) for _ in range(12)]

    def run(launch: Callable[[bytes], None]) -> None:
        y = x
        for out in outs:
            launch(pack_arguments(weight.tape, y, out))
            y = out[:, : plan.k]

    run(late)
    wanted = [out[:, : plan.n].clone() for out in outs]
    graph = capture(lambda: run(early))
    found: list[str] = []
    for name, go in (("eager", lambda: run(early)), ("graph", graph.replay)):
        for _ in range(5):
            for out in outs:
                out.fill_(float("nan"))
            go()
            torch.cuda.synchronize()
            if not all(torch.equal(out[:, : plan.n], w) for out, w in zip(outs, wanted, strict=True)):
                found.append(
                    f"{variant} of {plan}: a chain of dependent products with PDL ({name}) differs from without"
                )
                break
    return found


# ---------------------------------------------------------------------- times


def capture(run: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """A graph of what run queues."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def medians_us(graphs: dict[str, torch.cuda.CUDAGraph], calls: int, rounds: int) -> dict[str, float]:
    """Time of one call in each graph: medians over rounds whose order alternates."""
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for turn in range(rounds + 2):
        order = list(graphs) if turn % 2 else list(reversed(graphs))
        events = []
        for name in order:
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graphs[name].replay()
            stop.record()
            events.append((name, start, stop))
        torch.cuda.synchronize()
        if turn >= 2:
            for name, start, stop in events:
                times[name].append(start.elapsed_time(stop) * 1e3 / calls)
    return {name: statistics.median(values) for name, values in times.items()}


def read_bandwidth(device: torch.device) -> float:
    """Bytes per second of the best of torch's own reductions over 4 GiB."""
    data = torch.ones(2**30, dtype=torch.float32, device=device)
    graphs = {"sum": capture(lambda: data.sum()), "max": capture(lambda: data.max())}
    return data.numel() * 4 / (min(medians_us(graphs, 1, 5).values()) * 1e-6)


def time_shape(
    name: str, n: int, k: int, passed: set[str], options: argparse.Namespace, device: torch.device
) -> list[dict[str, object]]:
    """One table row for each row count and kernel."""
    weight_bytes = 2 * n * k
    calls = min(256, max(2, math.ceil(ROTATED_BYTES / weight_bytes)))
    most = max(p.tape_bytes for p in plans(n, k, device).values())
    store = torch.empty((calls, most // 2), dtype=torch.bfloat16, device=device)
    for part in store:
        part.normal_(std=k**-0.5)
    library = [part[: n * k].view(n, k) for part in store]
    floor_us = weight_bytes / options.bandwidth * 1e6
    table: list[dict[str, object]] = []
    for rows in options.rows:
        x = torch.randn(rows, k, device=device).to(torch.bfloat16)
        out = torch.empty((rows, n), dtype=torch.bfloat16, device=device)
        torch.mm(x, library[0].T, out=out)
        torch.cuda.synchronize()

        def run_library(x: Tensor = x, out: Tensor = out) -> None:
            for w in library:
                torch.mm(x, w.T, out=out)

        graphs = {"cuBLAS": capture(run_library)}
        chosen = [c for c in candidates(n, k, rows, device) if c.family in passed]
        for candidate in chosen:
            launch = launch_for(candidate.plan, candidate.variant, device, options.cache_dir, candidate.dependent)
            step = candidate.variant.max_rows
            arguments = [
                pack_arguments(part, x[first : first + step], out[first : first + step])
                for part in store
                for first in range(0, rows, step)
            ]

            def run_ours(launch: Callable[[bytes], None] = launch, arguments: list[bytes] = arguments) -> None:
                for packed in arguments:
                    launch(packed)

            run_ours()
            graphs[candidate.name] = capture(run_ours)
        times = medians_us(graphs, calls, options.rounds)
        for key, us in times.items():
            table.append(
                {
                    "shape": name,
                    "n": n,
                    "k": k,
                    "rows": rows,
                    "kernel": key,
                    "us": round(us, 2),
                    "floor_us": round(floor_us, 2),
                    "fraction": round(floor_us / us, 3),
                    "over_cublas": round(times["cuBLAS"] / us, 3),
                }
            )
    del store
    torch.cuda.empty_cache()
    return table


def best_plans(table: list[dict[str, object]]) -> dict[str, str]:
    """The plan of each shape with the best geometric mean over up to 16 rows: one plan must serve every row count."""
    best: dict[str, str] = {}
    for shape in dict.fromkeys(str(r["shape"]) for r in table):
        scores: dict[str, list[float]] = {}
        for r in table:
            if r["shape"] == shape and int(str(r["rows"])) <= 16 and r["kernel"] not in ("cuBLAS", "default, no PDL"):
                scores.setdefault(str(r["kernel"]), []).append(math.log(float(str(r["us"]))))
        whole = {name: sum(v) / len(v) for name, v in scores.items() if not name.startswith("panel")}
        if whole:
            best[shape] = min(whole, key=lambda name: whole[name])
    return best


def time_chain(
    best: dict[str, str], passed: set[str], options: argparse.Namespace, device: torch.device
) -> dict[str, dict[str, float]]:
    """The dense chain of a step, each product reading the one before: ms by row count, default and best plans."""
    layer = ["hc_down", "hc_up", "gdn_in", "out", "hc_down", "hc_up", "router_gate_up", "shared_down"]
    names = [("qsa_in" if i % 4 == 3 and name == "gdn_in" else name) for i in range(48) for name in layer]
    used = {name: plans(*SHAPES[name], device) for name in dict.fromkeys(names)}
    sizes = {name: max(p.tape_bytes for p in found.values()) // 2 for name, found in used.items()}
    store = torch.empty(sum(sizes[name] for name in names), dtype=torch.bfloat16, device=device).normal_(std=0.02)
    parts = store.split([sizes[name] for name in names])
    floor_ms = sum(2 * math.prod(SHAPES[name]) for name in names) / options.bandwidth * 1e3
    wide = max(n for name, (n, _) in SHAPES.items() if name in used)
    found: dict[str, dict[str, float]] = {"floor_ms": {"": round(floor_ms, 3)}}
    say(f"dense chain of 48 layers, {len(names)} products, floor {floor_ms:.3f} ms")
    for rows in [r for r in options.rows if r <= 16]:
        buffers = [torch.randn(rows, wide, device=device).to(torch.bfloat16) for _ in range(2)]

        def run_library(buffers: list[Tensor] = buffers, rows: int = rows) -> None:
            for i, (name, part) in enumerate(zip(names, parts, strict=True)):
                n, k = SHAPES[name]
                y = F.linear(buffers[i % 2][:, :k], part[: n * k].view(n, k))
                if i == len(names) - 1:
                    buffers[1 - i % 2][:, :n].copy_(y)

        graphs = {"cuBLAS": capture(run_library)}
        for label, chosen in (("default", dict.fromkeys(used, "default")), ("best", best)):
            for dependent in (True, False):
                calls: list[tuple[Callable[[bytes], None], bytes]] = []
                for i, (name, part) in enumerate(zip(names, parts, strict=True)):
                    n, k = SHAPES[name]
                    plan = used[name].get(chosen.get(name, "default"), used[name]["default"])
                    variant = choose_variant(plan, rows)
                    if family_of(plan, variant) not in passed:
                        break
                    launch = launch_for(plan, variant, device, options.cache_dir, dependent)
                    calls.append((launch, pack_arguments(part, buffers[i % 2][:, :k], buffers[1 - i % 2][:, :n])))

                def run_ours(calls: list[tuple[Callable[[bytes], None], bytes]] = calls) -> None:
                    for launch, packed in calls:
                        launch(packed)

                if len(calls) == len(names):
                    graphs[f"{label}{'' if dependent else ', no PDL'}"] = capture(run_ours)
        times = {name: us / 1e3 for name, us in medians_us(graphs, 1, options.rounds).items()}
        found[str(rows)] = {name: round(ms, 3) for name, ms in times.items()}
        say(f"  {rows:2d} rows: " + ", ".join(f"{k} {v:.3f} ms ({floor_ms / v:.0%})" for k, v in times.items()))
    return found


def report(table: list[dict[str, object]], best: dict[str, str]) -> None:
    """The table a person reads: for each shape and row count cuBLAS, the default and the fastest kernel."""
    say("\nall kernels, us")
    for shape in dict.fromkeys(str(r["shape"]) for r in table):
        rows_seen = list(dict.fromkeys(int(str(r["rows"])) for r in table if r["shape"] == shape))
        for kernel in dict.fromkeys(str(r["kernel"]) for r in table if r["shape"] == shape):
            cells = {r["rows"]: float(str(r["us"])) for r in table if r["shape"] == shape and r["kernel"] == kernel}
            text = " ".join(f"{rows}:{cells[rows]:8.2f}" if rows in cells else f"{rows}:{'-':>8}" for rows in rows_seen)
            say(f"  {shape:15} {kernel:18} {text}")
    say(f"\n{'shape':15} {'M':>3} {'floor':>7} {'cuBLAS':>7} {'default':>8} {'of floor':>8} {'x cuBLAS':>8}   fastest")
    for shape in dict.fromkeys(str(r["shape"]) for r in table):
        for rows in dict.fromkeys(int(str(r["rows"])) for r in table if r["shape"] == shape):
            here = {str(r["kernel"]): float(str(r["us"])) for r in table if r["shape"] == shape and r["rows"] == rows}
            floor = next(float(str(r["floor_us"])) for r in table if r["shape"] == shape)
            ours = here.get("default")
            rivals = {name: us for name, us in here.items() if name != "cuBLAS"}
            fastest = min(rivals, key=lambda name: rivals[name]) if rivals else "none"
            if ours is None:
                say(f"{shape:15} {rows:3d} {floor:7.2f} {here['cuBLAS']:7.2f}        -")
                continue
            notes = [] if rows > 16 or ours <= here["cuBLAS"] else ["SLOWER THAN cuBLAS"]
            if rows <= 4 and floor / ours < TARGETS.get(shape, 0):
                notes.append(f"BELOW TARGET {TARGETS[shape]:.0%}")
            say(
                f"{shape:15} {rows:3d} {floor:7.2f} {here['cuBLAS']:7.2f} {ours:8.2f} {floor / ours:8.0%} "
                f"{here['cuBLAS'] / ours:8.2f}   {fastest} {rivals[fastest]:.2f}  {' '.join(notes)}"
            )
    for shape, name in best.items():
        say(f"best plan {shape}: {name}")


def say(text: str) -> None:
    """Print at once: a hang shows where."""
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
