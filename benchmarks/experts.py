"""Routed experts on one GPU: right first, then timed; the best plan for each number of rows is printed.

    PYTHONPATH=src python3 -m benchmarks.experts [--quick | --layer] [--rows 4,16 --decode-only] [--json FILE]

1. Every family is checked in a process of its own: float64, NaN around the rows, a row's bits for every M and plan,
   beside other rows and alone; and chains in which kernels start early. What is wrong gets no times.
2. CUDA-graph replays over 12 layers of weights of their own, rounds in alternating order, medians. Each candidate
   alone, then pairs of gate/up and down. Fractions are of `--bandwidth`, what one H200 reads.
3. Experts in bf16 and FP8, and prompt chunks: `grouped_experts`, a process for decode and one for prefill.

`--layer` times the sub-layer of few rows as a step runs it, from the product of the router's matrix on; under 25 s.
`--quick` is part 3, and of part 1 what no other part covers: `chain` and `route`.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.experts_checks import FAMILIES, check_family
from benchmarks.experts_layer import compare_layers
from benchmarks.experts_plans import (
    CHAIN_ROWS,
    DOWN_BYTES,
    EXPERTS,
    GATE_UP_BYTES,
    TOPK,
    WIDTH,
    D,
    Layers,
    chain_plans,
    down_plans,
    gate_up_plans,
)
from benchmarks.grouped_experts import PARTS, run_part
from benchmarks.harness import (
    BANDWIDTH,
    CACHE_DIR,
    Kernel,
    beside_floor,
    check_apart,
    compile_all,
    describe,
    give_up_after,
    gpu,
    load_and_capture,
    medians_us,
    multiprocessors,
    output_of,
    read_bandwidth,
    say,
    start,
    stopwatch,
    write_json,
)
from stepfloor.kernels._down_few import DownPlan, cluster_launch, plan_down
from stepfloor.kernels._down_many import ManyDownPlan
from stepfloor.kernels._experts import (
    CAPACITIES,
)
from stepfloor.kernels.moe_down import down_arguments, down_launch, down_scratch
from stepfloor.kernels.moe_gate_up import (
    GateUpPlan,
    gate_up_arguments,
    gate_up_launch,
)
from stepfloor.kernels.moe_route import moe_route

# rows, distinct experts: uniform choices, and the overlap reported of real routing
CASES = ((1, 10), (4, 33), (4, 39), (8, 74), (16, 138), (64, 367))
QUICK_FAMILIES = ("chain", "route")
LAYERS = 12
CHECK_LIMIT_S = PART_LIMIT_S = 60


def main() -> int:
    """Run both parts; 1 if a family fails."""
    options = parse()
    device = gpu()
    torch.cuda.set_device(device)
    if options.check is not None:
        return check_family(options.check, options.cache_dir, device)
    if options.layer:
        return compare_layers(options, device)
    if options.part is not None:
        return run_part(options.part, options.rounds, options.bandwidth, options.cache_dir, device)
    families = QUICK_FAMILIES if options.quick else FAMILIES
    give_up_after(options.limit_s)
    stamp = stopwatch()
    say(describe(device))
    # fills Triton's cache meanwhile
    warming = [] if options.decode_only else [start_part(part, options, rounds=1) for part in PARTS]
    compile_all(kernels(options, device), options.cache_dir, device)
    stamp("kernels compiled")
    passed = check_apart("benchmarks.experts", families, ["--cache-dir", str(options.cache_dir)], CHECK_LIMIT_S)
    stamp(f"checks done; passed: {', '.join(sorted(passed)) or 'nothing'}")
    for process in warming:
        output_of(process, PART_LIMIT_S)
    reads = read_bandwidth(device)
    say(f"read bandwidth of this run {reads / 1e12:.2f} TB/s; fractions below are of {options.bandwidth / 1e12:.2f}")
    torch.cuda.empty_cache()
    grouped, failed_parts = run_parts(() if options.decode_only else PARTS, options)
    table: list[dict[str, object]] = []
    best: dict[str, dict[str, object]] = {}
    for experts in () if options.quick else (128, EXPERTS):
        weights = Layers(experts, LAYERS if experts == 128 else 3, device, options.cache_dir)
        for rows, distinct in CASES:
            if rows in options.rows and (experts == 128) == (distinct <= 128):
                timed = time_case(rows, distinct, weights, passed, options, device)
                stamp(f"{rows} rows, {distinct} experts done")
                best |= report(timed)
                table += timed
        del weights
        torch.cuda.empty_cache()
    if "route" in passed:
        say(f"route (experts, weights, shared gate and SwiGLU from the products), us: {time_route(options, device)}")
    failed = sorted((set(families) - passed) | failed_parts)
    line = {"gpu": torch.cuda.get_device_name(device), "torch": torch.__version__, "read_bytes_per_s": reads}
    line |= {"passed": sorted(passed), "failed": failed, "best": best, "grouped": grouped}
    write_json(options.json, line | {"rows": table})
    say(json.dumps(line, separators=(",", ":")))
    return int(bool(failed))


def start_part(part: str, options: argparse.Namespace, rounds: int) -> subprocess.Popen[str]:
    """A part of grouped_experts in a process of its own."""
    arguments = ["--cache-dir", str(options.cache_dir), "--part", part, "--rounds", str(rounds)]
    return start("benchmarks.experts", *arguments, "--bandwidth", str(options.bandwidth))


def run_parts(parts: Sequence[str], options: argparse.Namespace) -> tuple[list[dict[str, object]], set[str]]:
    """The parts of grouped_experts, one after the other: their rows, and the parts in which something failed."""
    table: list[dict[str, object]] = []
    failed: set[str] = set()
    for part in parts:
        process = start_part(part, options, options.rounds)
        lines = output_of(process, PART_LIMIT_S).strip().splitlines() or ["no output"]
        if process.returncode:
            failed.add(part)
        if lines[-1].startswith("["):
            table += json.loads(lines.pop())
        say("\n".join(lines))
    return table, failed


def parse() -> argparse.Namespace:
    """Arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--rows", type=lambda s: [int(v) for v in s.split(",")], default=[rows for rows, _ in CASES])
    parser.add_argument("--decode-only", action="store_true", help="part 3 is left out")
    parser.add_argument("--bandwidth", type=float, default=BANDWIDTH)
    parser.add_argument("--cache-dir", type=Path, default=CACHE_DIR)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--limit-s", type=int, default=240, help="give up with a traceback after this long")
    parser.add_argument("--quick", action="store_true", help="no table of plans for NVFP4 decode; under 90 s")
    parser.add_argument("--layer", action="store_true", help="the sub-layer of up to 4 rows only")
    parser.add_argument("--check", choices=FAMILIES, help="check one family only, here")
    parser.add_argument("--part", choices=PARTS, help="run one part of grouped_experts only, here")
    return parser.parse_args()


def kernels(options: argparse.Namespace, device: torch.device) -> list[Kernel]:
    """All that is checked and timed of what nvcc would compile; Triton compiles the rest when it runs."""
    count = multiprocessors(device)
    wanted: set[GateUpPlan | DownPlan | ManyDownPlan] = set()
    for rows in CHAIN_ROWS:
        wanted |= {plan for pair in chain_plans(rows, count).values() for plan in pair}
    for rows in () if options.quick else CAPACITIES:
        wanted |= {*gate_up_plans(rows).values(), *down_plans(rows, count).values()}
    sources = {GateUpPlan: "moe_gate_up.cu", DownPlan: "moe_down.cu", ManyDownPlan: "moe_down_many.cu"}
    return [Kernel(str(plan), sources[type(plan)], plan.macros) for plan in wanted]


def chosen_experts(rows: int, distinct: int, experts: int, layer: int) -> Tensor:
    """ids [rows, TOPK] in which about so many different experts appear, some of them for many rows.

    Rows draw from a pool of the size for which so many are expected: how often an expert has more pairs than an entry
    of the list holds is what decides between plans.
    """
    make = torch.Generator().manual_seed(layer)
    sizes = range(TOPK, experts)
    size = next((n for n in sizes if n * (1 - (1 - TOPK / n) ** rows) >= distinct), experts)
    pool = torch.randperm(experts, generator=make)[:size]
    return torch.stack([pool[torch.randperm(size, generator=make)[:TOPK]] for _ in range(rows)])


def time_case(
    rows: int,
    distinct: int,
    weights: Layers,
    passed: set[str],
    options: argparse.Namespace,
    device: torch.device,
) -> list[dict[str, object]]:
    """Table rows: each kernel alone, then pairs."""
    cache, layers = options.cache_dir, range(weights.count)
    ids = [chosen_experts(rows, distinct, weights.experts, i).to(device) for i in layers]
    x = [torch.randn(rows, D, device=device).to(torch.bfloat16) for _ in range(weights.count + 1)]
    hidden = [torch.randn(rows, TOPK, WIDTH, device=device).to(torch.bfloat16) for _ in layers]
    choice = torch.rand(rows, TOPK, device=device).softmax(-1).to(torch.bfloat16)
    shared_rows = torch.randn(rows, WIDTH, device=device).to(torch.bfloat16)
    gate = torch.rand(rows, 1, device=device).to(torch.bfloat16)
    count = multiprocessors(device)
    firsts = {
        name: plan
        for name, plan in gate_up_plans(rows).items()
        if ("gather" if "gather" in name else "gate_up") in passed
    }
    right = ("down" if rows <= 16 else "spill") in passed
    seconds = {name: plan for name, plan in down_plans(rows, count).items() if right}
    default = plan_down(weights.down[0], WIDTH, TOPK, rows, count)
    at_once = cluster_launch(default, device, cache).clusters_at_once
    say(f"moe_down wants {default.clusters} clusters of {default.cluster} blocks; the device runs {at_once} at once")
    first_arguments = [gate_up_arguments(x[i], ids[i], weights.gate_up[i], hidden[i]) for i in layers]
    # plans differ in how many sums they keep apart
    spilling = [plan for plan in seconds.values() if isinstance(plan, ManyDownPlan) or plan.spill]
    scratch = down_scratch(max(spilling, key=lambda plan: plan.lines), device) if spilling else None

    def second_arguments() -> list[bytes]:
        return [
            down_arguments(
                hidden[i],
                ids[i],
                choice,
                weights.down[i],
                (shared_rows, gate, weights.shared[i]),
                scratch,
                x[i + 1],
            )
            for i in layers
        ]

    def graph_of(
        first: GateUpPlan | None, second: DownPlan | ManyDownPlan | None, dependent: bool = True
    ) -> torch.cuda.CUDAGraph:
        one = None if first is None else gate_up_launch(first, device, cache, dependent)
        two = None if second is None else down_launch(second, device, cache, dependent)
        tails = [] if second is None else second_arguments()

        def run() -> None:
            for i in layers:
                if one is not None:
                    one(first_arguments[i])
                if two is not None:
                    two(tails[i])

        return load_and_capture(run)

    found = sum(i.unique().numel() for i in ids) / len(ids)
    floors = {
        "gate_up": found * GATE_UP_BYTES,
        "down": found * DOWN_BYTES + 2 * D * WIDTH,
    }
    table: list[dict[str, object]] = []

    def add(part: str, times: dict[str, float], read: float) -> None:
        floor = read / options.bandwidth * 1e6
        for name, us in times.items():
            row: dict[str, object] = {"rows": rows, "experts": distinct, "part": part, "kernel": name}
            table.append(row | beside_floor(us, floor))

    graphs = {name: graph_of(plan, None) for name, plan in firsts.items()}
    alone = medians_us(graphs, weights.count, options.rounds) if graphs else {}
    add("gate_up", alone, floors["gate_up"])
    graphs = {name: graph_of(None, plan) for name, plan in seconds.items()}
    second = medians_us(graphs, weights.count, options.rounds) if graphs else {}
    add("down", second, floors["down"])
    lead = sorted(alone, key=lambda name: alone[name])[:4]
    lead += [name for name in alone if "lean" in name and name not in lead][:2]
    follow = sorted(second, key=lambda name: second[name])[:4]
    graphs = {f"{a} + {b}": graph_of(firsts[a], seconds[b]) for a in lead for b in follow}
    times = medians_us(graphs, weights.count, options.rounds) if graphs else {}
    read = floors["gate_up"] + floors["down"]
    add("pair", times, read)
    if times:
        a, b = min(times, key=lambda name: times[name]).split(" + ")
        late = {f"{a} + {b}, no PDL": graph_of(firsts[a], seconds[b], False)}
        add("pair late", medians_us(late, weights.count, options.rounds), read)
    return table


def time_route(options: argparse.Namespace, device: torch.device) -> dict[int, float]:
    """A chain of dependent routes by rows."""
    found: dict[int, float] = {}
    for rows in (1, 4, 16, 64):
        products = torch.randn(rows, EXPERTS + 2 * WIDTH + 1, device=device).to(torch.bfloat16)

        def run(products: Tensor = products) -> None:
            for _ in range(48):
                moe_route(products, EXPERTS, TOPK, True)

        found[rows] = round(medians_us({"": load_and_capture(run)}, 48, options.rounds)[""], 2)
    return found


def report(table: list[dict[str, object]]) -> dict[str, dict[str, object]]:
    """Print the six best of everything; returns the best of each part."""
    best: dict[str, dict[str, object]] = {}
    say(f"{'rows':>4} {'experts':>7}  {'part':<15} {'kernel':<34} {'us':>7} {'floor':>7} {'share':>6}")
    for rows, distinct in CASES:
        for part in ("gate_up", "down", "pair", "pair late"):
            found = [r for r in table if (r["rows"], r["experts"], r["part"]) == (rows, distinct, part)]
            found.sort(key=lambda r: float(str(r["us"])))
            for r in found[:6]:
                say(
                    f"{rows:4} {distinct:7}  {part:<15} {r['kernel']!s:<34} {r['us']!s:>7} {r['floor_us']!s:>7} "
                    f"{r['fraction']!s:>6}"
                )
            if found:
                best[f"{rows}/{distinct}/{part}"] = {key: found[0][key] for key in ("kernel", "us", "fraction")}
    return best


if __name__ == "__main__":
    sys.exit(main())
