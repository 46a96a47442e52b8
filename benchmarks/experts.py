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
import faulthandler
import itertools
import json
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.grouped_experts import PARTS, pair_products, run_part
from benchmarks.linear import capture, describe, medians_us, read_bandwidth, say
from stepfloor.formats.codec import PackedWeight
from stepfloor.kernels._down_few import DownPlan, cluster_launch, plan_down
from stepfloor.kernels._down_many import SLICES, ManyDownPlan, plan_many
from stepfloor.kernels._experts import (
    CAPACITIES,
    MAX_ROWS,
    SHARED_LIMIT_OF_TWO,
    TiledExperts,
    capacity_for,
    pack_experts,
    piece_bytes,
)
from stepfloor.kernels._jit import compile_cuda, device_arch
from stepfloor.kernels._shared_expert import TiledShared, pack_shared
from stepfloor.kernels._stream_product import StreamedWeight, stream_product
from stepfloor.kernels.linear import linear, linear_repack
from stepfloor.kernels.moe_down import FEW_ROWS, down_arguments, down_launch, down_rows, down_scratch
from stepfloor.kernels.moe_gate_up import (
    WARPS,
    GateUpPlan,
    gate_up_arguments,
    gate_up_launch,
    gate_up_rows,
    plan_gate_up,
)
from stepfloor.kernels.moe_route import moe_route, moe_route_reference, route_arguments, route_launch

EXPERTS, TOPK, D, WIDTH = 512, 10, 2560, 640
GATE_UP_BYTES, DOWN_BYTES = 2 * WIDTH * D * 9 // 16, D * WIDTH * 9 // 16
CHECKED_ROWS = (1, 2, 4, 8, 16, 64, 80)
# rows, distinct experts: uniform choices, and the overlap reported of real routing
CASES = ((1, 10), (4, 33), (4, 39), (8, 74), (16, 138), (64, 367))
FAMILIES = ("gate_up", "gather", "down", "spill", "chain", "route")
QUICK_FAMILIES = ("chain", "route")
CHAIN_ROWS = (1, 4, 8, 16, 64)
CHAIN_PLANS = (
    ("lean x 2", "54x4/8/1/2/1"),
    ("held x 2", "30x8/8/1/2/1"),
    ("held x 1", "28x8/6/1/2/2"),
    ("gather 2 x 2", "30x8/8/1/2/1"),
    ("gather 2 x 3", "54x4/8/1/2/1"),
)
LAYERS = 12
PART_LIMIT_S = 60


def main() -> int:
    """Run both parts; 1 if a family fails."""
    options = parse()
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    if options.check is not None:
        return check_family(options.check, options.cache_dir, device)
    if options.layer:
        return compare_layers(options, device)
    if options.part is not None:
        return run_part(options.part, options.rounds, options.bandwidth, options.cache_dir, device)
    families = QUICK_FAMILIES if options.quick else FAMILIES
    faulthandler.dump_traceback_later(options.limit_s, exit=True)
    begin = time.perf_counter()
    say(describe(device, None))
    # fills Triton's cache meanwhile
    warming = [] if options.decode_only else [start_part(part, options, rounds=1) for part in PARTS]
    compile_all(options, device)
    say(f"[{time.perf_counter() - begin:5.1f} s] kernels compiled")
    passed = check_all(options.cache_dir, families)
    say(f"[{time.perf_counter() - begin:5.1f} s] checks done; passed: {', '.join(sorted(passed)) or 'nothing'}")
    for process in warming:
        output_of(process)
    reads = read_bandwidth(device)
    say(f"read bandwidth of this run {reads / 1e12:.2f} TB/s; fractions below are of {options.bandwidth / 1e12:.2f}")
    torch.cuda.empty_cache()
    grouped, failed_parts = ([], set[str]()) if options.decode_only else run_parts(options)
    table: list[dict[str, object]] = []
    best: dict[str, dict[str, object]] = {}
    for experts in () if options.quick else (128, EXPERTS):
        weights = Layers(experts, LAYERS if experts == 128 else 3, device, options.cache_dir)
        for rows, distinct in CASES:
            if rows in options.rows and (experts == 128) == (distinct <= 128):
                timed = time_case(rows, distinct, weights, passed, options, device)
                say(f"[{time.perf_counter() - begin:5.1f} s] {rows} rows, {distinct} experts done")
                best |= report(timed)
                table += timed
        del weights
        torch.cuda.empty_cache()
    if "route" in passed:
        say(f"route (experts, weights, shared gate and SwiGLU from the products), us: {time_route(options, device)}")
    failed = sorted((set(families) - passed) | failed_parts)
    line = {"gpu": torch.cuda.get_device_name(device), "torch": torch.__version__, "read_bytes_per_s": reads}
    line |= {"passed": sorted(passed), "failed": failed, "best": best, "grouped": grouped}
    if options.json is not None:
        options.json.write_text(json.dumps(line | {"rows": table}, indent=1))
    say(json.dumps(line, separators=(",", ":")))
    return int(bool(failed))


def start_part(part: str, options: argparse.Namespace, rounds: int) -> subprocess.Popen[str]:
    """A part of grouped_experts in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.experts", "--cache-dir", str(options.cache_dir), "--part", part]
    command += ["--rounds", str(rounds), "--bandwidth", str(options.bandwidth)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def output_of(process: subprocess.Popen[str]) -> str:
    """What a part printed; one that hangs is ended."""
    try:
        return process.communicate(timeout=PART_LIMIT_S)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        return process.communicate()[0] + f"HANGS, no end in {PART_LIMIT_S} s"


def run_parts(options: argparse.Namespace) -> tuple[list[dict[str, object]], set[str]]:
    """The parts of grouped_experts, one after the other: their rows, and the parts in which something failed."""
    table: list[dict[str, object]] = []
    failed: set[str] = set()
    for part in PARTS:
        process = start_part(part, options, options.rounds)
        lines = output_of(process).strip().splitlines() or ["no output"]
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
    parser.add_argument("--bandwidth", type=float, default=4.65e12)
    parser.add_argument("--cache-dir", type=Path, default=Path(tempfile.gettempdir()) / "stepfloor-kernels")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--limit-s", type=int, default=240, help="give up with a traceback after this long")
    parser.add_argument("--quick", action="store_true", help="no table of plans for NVFP4 decode; under 90 s")
    parser.add_argument("--layer", action="store_true", help="the sub-layer of up to 4 rows only")
    parser.add_argument("--check", choices=FAMILIES, help="check one family only, here")
    parser.add_argument("--part", choices=PARTS, help="run one part of grouped_experts only, here")
    return parser.parse_args()


# ---------------------------------------------------------------------- candidates


def gate_up_plans(rows: int) -> dict[str, GateUpPlan]:
    """The kernels that can serve this many rows; `gather 2 x 3`: groups of 2 pairs, 3 tiles of a block on the way."""
    capacity = capacity_for(rows)
    base = GateUpPlan(D, WIDTH, EXPERTS, TOPK, capacity, capacity > 8, 2, group=min(2, capacity))
    found: dict[str, GateUpPlan] = {}
    for group in groups_for(rows):
        for slots in (2, 3, 4):
            found[f"gather {group} x {slots}"] = replace(base, gather=True, slots=slots, group=group)
    if capacity <= 8:
        found |= {f"held x {slots}": replace(base, slots=slots) for slots in (1, 2, 3, 4)}
        found |= {f"lean x {slots}": replace(base, slots=slots, lean=True) for slots in (1, 2, 3)}
    return {name: plan for name, plan in found.items() if plan.per_multiprocessor == 2}


def groups_for(rows: int) -> tuple[int, ...]:
    """Most pairs of an entry worth trying: what few experts exceed, so that few are read twice."""
    return (1,) if rows == 1 else (2, 4) if rows <= 16 else (2, 3, 4)


def down_plans(rows: int, multiprocessors: int) -> dict[str, DownPlan | ManyDownPlan]:
    """The kernels that can serve this many rows: clusters x blocks of one, warps, slots of a warp, pairs, sharers."""
    stand_in = stand_ins()[1]
    found: dict[str, DownPlan | ManyDownPlan] = {}
    default = plan_down(stand_in, WIDTH, TOPK, rows, multiprocessors)
    shapes = ((4, 8), (8, 8), (8, 6), *(((1, 8), (1, 6)) if rows <= 4 else ()))
    for (cluster, warps), slots, sharers in itertools.product(shapes, (1, 2, 3), (1, 2)):
        for group in groups_for(rows):
            plan = replace(default, cluster=cluster, warps=warps, slots=slots, group=group, sharers=sharers)
            if plan.shared_bytes > SHARED_LIMIT_OF_TWO:
                continue
            # a chip may run fewer clusters at once than its multiprocessors have room for
            counts = {1: (160,), 4: (54, 64, 60, 40), 8: (28, 32, 30, 27, 24)}[cluster]
            usual = (slots, sharers, group) == (default.slots, default.sharers, default.group)
            for count in counts if usual else counts[:2]:
                found[f"{count}x{cluster}/{warps}/{slots}/{group}/{sharers}"] = replace(plan, clusters=count)
    if rows > 8:
        many = plan_many(stand_in, WIDTH, TOPK, rows)
        found |= {
            f"many {group} x {slots}": replace(many, group=group, slots=slots) for group, slots in ((4, 2), (4, 3))
        }
    return found


def stand_ins() -> tuple[TiledExperts, TiledExperts]:
    """Gate/up and down of the model without their bytes: enough to plan for."""
    tape = torch.empty((EXPERTS, 0), dtype=torch.uint8)
    return (
        TiledExperts((2 * WIDTH, D), True, WARPS, 5, tape, tape, Path()),
        TiledExperts((D, WIDTH), False, SLICES, 5, tape, tape, Path()),
    )


def chain_plans(rows: int, multiprocessors: int) -> dict[str, tuple[GateUpPlan, DownPlan | ManyDownPlan]]:
    """Pairs of kernels whose early starts are checked: the defaults, and plans that overlap in other ways."""
    gate_up, down = stand_ins()
    few = plan_down(down, WIDTH, TOPK, rows, multiprocessors)
    many = plan_many(down, WIDTH, TOPK, rows) if rows > FEW_ROWS else few
    pairs: dict[str, tuple[GateUpPlan, DownPlan | ManyDownPlan]] = {
        "default": (plan_gate_up(gate_up, TOPK, rows), many)
    }
    first, second = gate_up_plans(rows), down_plans(rows, multiprocessors)
    return pairs | {f"{a} + {b}": (first[a], second[b]) for a, b in CHAIN_PLANS if a in first and b in second}


def compile_all(options: argparse.Namespace, device: torch.device) -> None:
    """Fill the cache from several processes; what does not compile is named and left out by its check."""
    count = torch.cuda.get_device_properties(device).multi_processor_count
    wanted: set[GateUpPlan | DownPlan | ManyDownPlan] = set()
    for rows in CHAIN_ROWS:
        wanted |= {plan for pair in chain_plans(rows, count).values() for plan in pair}
    for rows in () if options.quick else CAPACITIES:
        wanted |= {*gate_up_plans(rows).values(), *down_plans(rows, count).values()}
    arch = device_arch(device)
    jobs = [(plan, arch, options.cache_dir) for plan in sorted(wanted, key=str)]
    spawn = multiprocessing.get_context("spawn")  # a forked child would share the CUDA context
    with ProcessPoolExecutor(min(14, multiprocessing.cpu_count()), mp_context=spawn) as pool:
        failures = [f for f in pool.map(build, jobs, chunksize=2) if f is not None]
    say(f"{len(wanted)} kernels, {len(failures)} do not compile")
    for failure in failures[:3]:
        say(failure[:1500])


def build(job: tuple[GateUpPlan | DownPlan | ManyDownPlan, str, Path]) -> str | None:
    """Compile one kernel into the cache; what went wrong, if anything."""
    plan, arch, cache_dir = job
    try:
        name = {DownPlan: "moe_down.cu", ManyDownPlan: "moe_down_many.cu"}.get(type(plan), "moe_gate_up.cu")
        compile_cuda(name, plan.macros, arch, cache_dir)
    except RuntimeError as error:
        return f"{plan}: {error}"
    return None


# ---------------------------------------------------------------------- checks


def check_all(cache_dir: Path, families: tuple[str, ...]) -> set[str]:
    """Check the families side by side, each in its own process: a fault or a hang of one leaves the others alone."""
    command = [sys.executable, "-m", "benchmarks.experts", "--cache-dir", str(cache_dir), "--check"]
    running = {
        family: subprocess.Popen([*command, family], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for family in families
    }
    passed: set[str] = set()
    deadline = time.monotonic() + 60
    for family, process in running.items():
        try:
            output, _ = process.communicate(timeout=max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
            output += f"check {family}: HANGS, no answer in 60 s"
        if process.returncode == 0:
            passed.add(family)
        say("\n".join(output.strip().splitlines()[-10:]))
    return passed


def check_family(family: str, cache_dir: Path, device: torch.device) -> int:
    """Exit status 0 if every kernel of the family is right."""
    begin = time.perf_counter()
    checks = {"gate_up": check_gate_up, "gather": check_gate_up, "down": check_down, "spill": check_down}
    try:
        if family in ("chain", "route"):
            worst, count = 0.0, 1
            errors = check_chain(cache_dir, device) if family == "chain" else check_route(device)
        else:
            worst, count, errors = checks[family](family, cache_dir, device)
        torch.cuda.synchronize(device)
    except RuntimeError as exception:
        say(f"check {family}: CRASHED: {exception}")
        return 1
    for error in errors[:8]:
        say(f"  {error}")
    verdict = "ok" if not errors else f"WRONG ({len(errors)} findings)"
    took = time.perf_counter() - begin
    say(f"check {family}: {verdict}, {count} kernels, largest error {worst:.2f} of its bound, {took:.1f} s")
    return int(bool(errors))


def random_experts(count: int, n: int, k: int, device: torch.device) -> PackedWeight:
    """Any codes; block scales from zero and subnormal ones to 4; tensor scales that differ."""
    make = torch.Generator(device).manual_seed(n)
    data = torch.randint(0, 256, (count, n, k // 2), generator=make, dtype=torch.uint8, device=device)
    scale = torch.randint(0, 0x49, (count, n, k // 16), generator=make, dtype=torch.uint8, device=device)
    scale_2 = (0.5 + torch.rand(count, generator=make, device=device)) / k**0.5 / 4
    return PackedWeight("nvfp4", (n, k), data, scale.view(torch.float8_e4m3fn), scale_2)


def random_choices(rows: int, device: torch.device) -> Tensor:
    """Distinct experts of each row; expert 1 is everybody's, so that it has more rows than a tile."""
    make = torch.Generator(device).manual_seed(5)
    ids = torch.rand(rows, EXPERTS, generator=make, device=device)
    ids[:, 1] = 2
    order = ids.argsort(-1, descending=True)[:, :TOPK]
    return order[:, torch.randperm(TOPK, generator=torch.Generator().manual_seed(1)).to(device)].contiguous()


def check_outputs(
    label: str, outputs: dict[str, Callable[[Tensor], Tensor]], exact: Tensor, bound: Tensor
) -> tuple[float, list[str]]:
    """Right values and equal bits of kernels that each compute the given rows of one problem."""
    errors: list[str] = []
    worst = 0.0
    reference: Tensor | None = None
    every = torch.arange(exact.shape[0], device=exact.device)
    for name, output in outputs.items():
        capacity = int(name.split()[0])
        for rows in [r for r in CHECKED_ROWS if r <= capacity]:
            for turn, some in enumerate((every[:rows], every.flip(0)[:rows], every[rows // 2 : rows // 2 + rows])):
                y = output(some)
                share = ((y.double() - exact[some]).abs() / bound[some]).max().item()
                worst = max(worst, share) if share == share else float("inf")
                if not share <= 1:
                    bad = int((~((y.double() - exact[some]).abs() <= bound[some])).sum())
                    errors.append(f"{label} {name}, {rows} rows: {bad} of {y.numel()} outside the bound ({share:.3g})")
                if reference is None:
                    reference = torch.full_like(exact, torch.nan, dtype=y.dtype)
                known = ~reference[some].flatten(1).isnan().any(1)
                if not torch.equal(y[known], reference[some][known]):
                    errors.append(f"{label} {name}, {rows} rows, turn {turn}: a row's bits depend on rows or kernel")
                reference[some] = y
    return worst, errors


def check_gate_up(family: str, cache_dir: Path, device: torch.device) -> tuple[float, int, list[str]]:
    """Gate/up kernels with x in registers, or with rows copied beside the weights."""
    weight = random_experts(EXPERTS, 2 * WIDTH, D, device)
    tiled = pack_experts(weight, WARPS, True, cache_dir)
    errors = []
    few = replace(tiled, tape=tiled.tape[:9], scale=tiled.scale[:9]).unpack().dequantize()
    if not all(torch.equal(few[i], weight.expert(i).dequantize()) for i in range(9)):
        errors.append("the repacked weight differs")
    ids = random_choices(MAX_ROWS, device)
    x = torch.randn(MAX_ROWS, D, generator=torch.Generator(device).manual_seed(1), device=device).to(torch.bfloat16)
    both, size = pair_products(x[:, None].expand(-1, TOPK, -1), ids, weight)
    gate, up = both.chunk(2, -1)
    exact = F.silu(gate) * up
    # float32 sums are off by K 2**-24 of the sum of magnitudes at most, silu's slope is below 1.1; one rounding to
    # bf16; the fast exponential and division 2**-20 of the value
    off, up_off = (size * D * 2.0**-24).chunk(2, -1)
    bound = exact.abs() * (2**-8 + 2**-19) + 1.1 * off * (up.abs() + up_off) + F.silu(gate).abs() * up_off + 1e-30
    held = torch.full((MAX_ROWS + 8, D + 8), torch.nan, dtype=torch.bfloat16, device=device)

    def output(plan: GateUpPlan) -> Callable[[Tensor], Tensor]:
        def go(some: Tensor) -> Tensor:
            held.fill_(torch.nan)
            held[: len(some), :D] = x[some]
            return gate_up_rows(held[: len(some), :D], ids[some], tiled, plan)

        return go

    plans = {
        f"{capacity} {name}": plan
        for capacity in (80, 16, 8, 4, 2, 1)
        for name, plan in gate_up_plans(capacity).items()
        if ("gather" in name) == (family == "gather") or name == "gather 2 x 2"
    }
    worst, found = check_outputs("gate_up", {name: output(plan) for name, plan in plans.items()}, exact, bound)
    return worst, len(plans), errors + found


def check_down(family: str, cache_dir: Path, device: torch.device) -> tuple[float, int, list[str]]:
    """Down kernels, those of up to 16 rows or the one that keeps its sums in global memory."""
    weight = random_experts(EXPERTS, D, WIDTH, device)
    tiled = pack_experts(weight, SLICES, False, cache_dir)
    make = torch.Generator(device).manual_seed(2)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=make, device=device).to(torch.bfloat16)

    ids, hidden, weights = random_choices(MAX_ROWS, device), rand(MAX_ROWS, TOPK, WIDTH), rand(MAX_ROWS, TOPK).abs()
    rows, gate = rand(MAX_ROWS, WIDTH), rand(MAX_ROWS, 1).sigmoid()
    matrix = PackedWeight("bf16", (D, WIDTH), (rand(D, WIDTH) / WIDTH**0.5))
    shared = pack_shared(matrix)
    out, size = pair_products(hidden, ids, weight)
    exact = (out * weights.double()[..., None]).sum(1) + gate.double() * (rows.double() @ matrix.data.double().T)
    sizes = (size * weights.double()[..., None]).sum(1)
    sizes += gate.double() * (rows.double().abs() @ matrix.data.double().abs().T)
    terms = (WIDTH + TOPK + 14) * 2.0**-24  # float32 sums of so many terms
    count = torch.cuda.get_device_properties(device).multi_processor_count

    def output(plan: DownPlan | ManyDownPlan) -> Callable[[Tensor], Tensor]:
        def go(some: Tensor) -> Tensor:
            few = (rows[some], gate[some], shared)
            return down_rows(hidden[some], ids[some], weights[some], tiled, few, plan)

        return go

    plans = {
        f"{capacity} {name}": plan
        for capacity in ((80, 16, 1) if family == "spill" else (16, 8, 4, 2, 1))
        for name, plan in down_plans(capacity, count).items()
        if family == "down" or capacity == 80 or name == "54x4/8/1/2/1" or "many" in name
    }
    bound = exact.abs() * 2**-8 + sizes * terms
    worst, errors = check_outputs("down", {n: output(p) for n, p in plans.items()}, exact, bound)
    return worst, len(plans), errors


def check_chain(cache_dir: Path, device: torch.device) -> list[str]:
    """Products, gate/up and down that each read the one before: early starts must not change a bit."""
    make = torch.Generator(device).manual_seed(3)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=make, device=device).to(torch.bfloat16)

    gate_up = pack_experts(random_experts(EXPERTS, 2 * WIDTH, D, device), WARPS, True, cache_dir)
    down = pack_experts(random_experts(EXPERTS, D, WIDTH, device), SLICES, False, cache_dir)
    matrix = pack_shared(PackedWeight("bf16", (D, WIDTH), rand(D, WIDTH) / WIDTH**0.5))
    dense = linear_repack(PackedWeight("bf16", (D, D), rand(D, D) / D**0.5), device, cache_dir)
    if isinstance(dense, PackedWeight):
        return ["the dense matrix was not repacked"]
    errors: list[str] = []
    count = torch.cuda.get_device_properties(device).multi_processor_count
    for rows in CHAIN_ROWS:
        shared = rand(rows, WIDTH), rand(rows, 1).sigmoid(), matrix
        x, weights = rand(rows, D), rand(rows, TOPK).softmax(-1)
        pairs = chain_plans(rows, count)
        for name, plans in pairs.items():
            errors += [f"{name}, {e}" for e in check_chain_of(x, weights, shared, gate_up, down, dense, plans)]
    return errors


def check_route(device: torch.device) -> list[str]:
    """Choices, weights and the shared expert's first half against the reference, which runs on the CPU."""
    products = torch.randn(MAX_ROWS, EXPERTS + 2 * WIDTH + 1, device=device).to(torch.bfloat16)
    products[3, :EXPERTS] = 0.25
    products[4, :EXPERTS] = products[4, :EXPERTS].round()
    wanted = moe_route_reference(products.cpu(), EXPERTS, TOPK, True)
    errors: list[str] = []
    for rows in CHECKED_ROWS:
        found = [t.cpu() for t in moe_route(products[:rows], EXPERTS, TOPK, True)]
        if not torch.equal(found[0], wanted[0][:rows]):
            errors.append(f"{rows} rows: other experts")
        for name, ours, whole in zip(("weights", "hidden", "gate"), found[1:], wanted[1:], strict=True):
            theirs = whole[:rows].float()  # one bf16 step where two exponentials differ
            if not bool(((ours.float() - theirs).abs() <= theirs.abs() * 2**-7).all()):
                errors.append(f"{rows} rows: {name} differ")
    return errors


def check_chain_of(
    x: Tensor,
    weights: Tensor,
    shared: tuple[Tensor, Tensor, TiledShared],
    gate_up: TiledExperts,
    down: TiledExperts,
    dense: StreamedWeight,
    plans: tuple[GateUpPlan, DownPlan | ManyDownPlan],
) -> list[str]:
    """Eager and replayed with early starts against eager without."""
    rows, device = x.shape[0], x.device
    ids = [random_choices(rows + layer, device)[layer:] for layer in range(6)]
    held = torch.empty_like(ids[0])
    plan, other = plans
    outs = [torch.empty_like(x) for _ in range(24)]
    hidden = [torch.empty((rows, TOPK, WIDTH), dtype=x.dtype, device=device) for _ in range(6)]
    spilled = down_scratch(other, device)

    def run(dependent: bool) -> None:
        first = gate_up_launch(plan, device, gate_up.cache_dir, dependent)
        second = down_launch(other, device, down.cache_dir, dependent)
        y = x
        for i in range(6):
            a, b, c, d = outs[4 * i : 4 * i + 4]
            torch.mul(ids[i], 1, out=held)  # changes shortly before it is read
            a.copy_(F.rms_norm(y, (D,)))
            stream_product(a, dense, b)  # lets gate/up start early
            first(gate_up_arguments(b, held, gate_up, hidden[i]))
            second(down_arguments(hidden[i], held, weights, down, shared, spilled, c))
            stream_product(c, dense, d)
            y = d

    run(False)
    torch.cuda.synchronize()
    wanted = [t.clone() for t in outs]
    if not all(bool(t.isfinite().all()) for t in wanted):
        return [f"{rows} rows: the chain's values are not finite"]
    run(True)  # loads the kernels that start early: inside a capture it would spoil the graph
    graph = capture(lambda: run(True))
    errors: list[str] = []
    for name, go in (("eager", lambda: run(True)), ("graph", graph.replay)):
        for _ in range(4):
            for t in (*outs, *hidden):
                t.fill_(torch.nan)
            go()
            torch.cuda.synchronize()
            if not all(torch.equal(a, b) for a, b in zip(outs, wanted, strict=True)):
                errors.append(f"{rows} rows: a chain with PDL ({name}) differs from without")
                break
    return errors


# ---------------------------------------------------------------------- times


class Layers:
    """Weights of several layers, random bytes with sane scales."""

    def __init__(self, experts: int, count: int, device: torch.device, cache_dir: Path) -> None:
        """Fill the tapes."""
        self.experts, self.count = experts, count
        scale = torch.full((EXPERTS,), 1e-2, device=device)
        self.gate_up: list[TiledExperts] = []
        self.down: list[TiledExperts] = []
        self.shared: list[TiledShared] = []
        for _ in range(count):
            for n, k, slices, to in ((2 * WIDTH, D, WARPS, self.gate_up), (D, WIDTH, SLICES, self.down)):
                steps = k // 64 // slices
                shape = (experts, n // 16, slices, piece_bytes("nvfp4", steps))
                tape = torch.randint(0, 256, shape, dtype=torch.uint8, device=device)
                tape[..., steps * 512 :] = torch.randint(64, 96, (1,), dtype=torch.uint8, device=device)
                to.append(TiledExperts((n, k), slices == WARPS, slices, steps, tape, scale, cache_dir))
            matrix = torch.randn(D, WIDTH, device=device).to(torch.bfloat16) / WIDTH**0.5
            self.shared.append(pack_shared(PackedWeight("bf16", (D, WIDTH), matrix)))


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
    count = torch.cuda.get_device_properties(device).multi_processor_count
    small = rows <= 16
    firsts = {
        name: plan
        for name, plan in gate_up_plans(rows).items()
        if ("gather" if "gather" in name else "gate_up") in passed
    }
    seconds = down_plans(rows, count)
    if ("down" if small else "spill") not in passed:
        seconds = {}
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

        run()
        return capture(run)

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
            table.append(row | {"us": round(us, 2), "floor_us": round(floor, 2), "fraction": round(floor / us, 3)})

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

        run()
        found[rows] = round(medians_us({"": capture(run)}, 48, options.rounds)[""], 2)
    return found


# ---------------------------------------------------------------------- the sub-layer of few rows


def layer_plans(rows: int, multiprocessors: int) -> dict[str, tuple[GateUpPlan, DownPlan]]:
    """The kernels in use, and what they replaced: clusters of four blocks in moe_down, too large to start early."""
    gate_up, down = stand_ins()
    now = plan_gate_up(gate_up, TOPK, rows), plan_down(down, WIDTH, TOPK, rows, multiprocessors)
    before = plan_down(down, WIDTH, TOPK, rows, multiprocessors, cluster=4, warps=8)
    if rows == 1:
        return {"before": (replace(now[0], slots=3), replace(before, slots=3, sharers=2)), "now": now}
    return {"before": (now[0], before), "now": now}


def compare_layers(options: argparse.Namespace, device: torch.device) -> int:
    """Product of the router's matrix, choices, gate/up and down of 6 layers in a graph; 1 if plans differ in a bit."""
    begin = time.perf_counter()
    say(describe(device, None))
    count = torch.cuda.get_device_properties(device).multi_processor_count
    weights = Layers(EXPERTS, 6, device, options.cache_dir)
    routers = []
    for _ in range(weights.count):
        matrix = (torch.randn(EXPERTS + 2 * WIDTH + 1, D, device=device) / D**0.5).to(torch.bfloat16)
        routers.append(linear_repack(PackedWeight("bf16", (*matrix.shape,), matrix), device, options.cache_dir))
    errors = check_route(device)
    for rows in [rows for rows in dict.fromkeys(options.rows) if rows <= 4]:
        errors += time_layer(rows, layer_plans(rows, count), weights, routers, options, device)
        say(f"[{time.perf_counter() - begin:5.1f} s] {rows} rows done")
    say(f"WRONG: {errors}" if errors else "choices are right; bits are the same")
    return int(bool(errors))


def time_layer(
    rows: int,
    plans: dict[str, tuple[GateUpPlan, DownPlan]],
    weights: Layers,
    routers: list[PackedWeight | StreamedWeight],
    options: argparse.Namespace,
    device: torch.device,
) -> list[str]:
    """Prints times of the whole and of its first parts; returns what is wrong."""
    layers, cache = range(weights.count), options.cache_dir
    bf16 = weights.shared[0].tape.new_empty
    x = [torch.randn(rows, D, device=device).to(torch.bfloat16) for _ in layers]
    hidden, out = [bf16((rows, TOPK, WIDTH)) for _ in layers], [bf16((rows, D)) for _ in layers]
    ids = torch.empty((rows, TOPK), dtype=torch.int64, device=device)
    choice, begun, gate = bf16((rows, TOPK)), bf16((rows, WIDTH)), bf16((rows, 1))
    route = route_launch(EXPERTS, TOPK, WIDTH, True, rows, device, cache)

    def graph_of(pair: tuple[GateUpPlan, DownPlan], kernels: int = 4) -> torch.cuda.CUDAGraph:
        first, second = gate_up_launch(pair[0], device, cache), down_launch(pair[1], device, cache)

        def run() -> None:
            for i in layers:
                products = linear(x[i], (routers[i],))
                shared = begun, gate, weights.shared[i]
                if kernels > 1:
                    route(route_arguments(products, ids, choice, begun, gate))
                if kernels > 2:
                    first(gate_up_arguments(x[i], ids, weights.gate_up[i], hidden[i]))
                if kernels > 3:
                    second(down_arguments(hidden[i], ids, choice, weights.down[i], shared, None, out[i]))

        run()
        return capture(run)

    graphs = {name: graph_of(pair) for name, pair in plans.items()}
    right: list[Tensor] = []
    errors = []
    for name, graph in graphs.items():
        for t in (*hidden, *out):
            t.fill_(torch.nan)
        graph.replay()
        graph.replay()
        torch.cuda.synchronize()
        right = right or [t.clone() for t in (*hidden, *out)]
        if not all(torch.equal(a, b) and bool(a.isfinite().all()) for a, b in zip((*hidden, *out), right, strict=True)):
            errors.append(f"{rows} rows, {name}: other bits, or not finite")
    parts = {"product": 1, "+ route": 2, "+ gate_up": 3}
    graphs |= {name: graph_of(plans["now"], kernels) for name, kernels in parts.items()}
    times = medians_us(graphs, weights.count, options.rounds)
    say(f"{rows} rows, us a layer: " + ", ".join(f"{name} {us:.2f}" for name, us in times.items()))
    say(f"{rows} rows, now / before: {ratio_of(graphs['before'], graphs['now'], 4 * options.rounds)}")
    return errors


def ratio_of(before: torch.cuda.CUDAGraph, after: torch.cuda.CUDAGraph, rounds: int) -> str:
    """Time of the second as a part of the first's, from pairs in alternating order: median and middle half."""
    ratios = []
    for turn in range(rounds):
        times: dict[torch.cuda.CUDAGraph, float] = {}
        for graph in (before, after) if turn % 2 else (after, before):
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            stop.record()
            torch.cuda.synchronize()
            times[graph] = start.elapsed_time(stop)
        ratios.append(times[after] / times[before])
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


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
