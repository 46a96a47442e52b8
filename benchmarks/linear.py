"""Streamed products on one GPU: right first, then timed beside cuBLAS; the best plan of each shape and format is named.

    PYTHONPATH=src python3 -m benchmarks.linear --quick
    PYTHONPATH=src python3 -m benchmarks.linear [--shapes head,gdn_in] [--formats bf16,nvfp4] [--rows 1,4] [--json FILE]

1. Every kernel family is checked in a process of its own (float64, NaN around inputs and outputs, row bits for every M,
   graph replay). A family that is wrong, crashes or hangs is named and gets no times.
2. CUDA-graph replays, weights rotated past the L2, rounds in alternating order, medians. cuBLAS multiplies the bf16
   matrix, whatever the format beside it. Fractions are of `--bandwidth`, what one H200 reads; the read rate of this run
   is printed beside it. A part that fails is named, and the others go on.
3. What a matrix costs to become bf16 again for prefill.
4. The dense chain of a step: 48 layers, 384 products, 7.3 GB in bf16; without --quick.
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

from stepfloor.formats.codec import PackedWeight, quantize
from stepfloor.formats.table import stored_bytes
from stepfloor.kernels._choose_form import choose_variant, group_variant, plan_stream, share_variant, spread_variant
from stepfloor.kernels._forms import MAX_ROWS, Variant, kernel_macros, shared_bytes
from stepfloor.kernels._jit import compile_cuda, device_arch
from stepfloor.kernels._stream import (
    CODINGS,
    SHARED_LIMIT,
    StreamPlan,
    dense_arguments,
    dense_launch,
    dense_macros,
    outer_scales,
    pack_tape,
)
from stepfloor.kernels._stream_product import StreamedWeight, fit_variant, launch_for, pack_arguments, stream_product

SHAPES = {
    "head": (248320, 2560),
    "gdn_in": (16480, 2560),
    "qsa_in": (13952, 2560),
    "out": (2560, 6144),
    "router_shared": (1793, 2560),
    "shared_gate_up": (1280, 2560),
    "shared_down": (2560, 640),
    "router": (512, 2560),
    "hc_down": (336, 10240),
    "hc_up": (10240, 320),
    "gdn_ab": (96, 2560),
}
ODD_SHAPES = [(16, 16), (37, 48), (251, 64), (33, 640), (385, 256), (1000, 1040), (5301, 4096)]
QUICK_SHAPES = ("head", "gdn_in", "qsa_in", "out", "router_shared", "hc_down", "hc_up")
FORMATS = tuple(name for name in CODINGS if name != "fp8_tensor")  # which runs as fp8_channel does
CHECKED_ROWS = (1, 2, 3, 4, 5, 8, 15, 16, 17, 33, 64, 80)
# least share of the floor at M=1 and 4
TARGETS = {
    ("bf16", "head"): 0.85,
    ("bf16", "gdn_in"): 0.85,
    ("bf16", "qsa_in"): 0.85,
    ("bf16", "out"): 0.75,
    ("fp8_channel", "head"): 0.85,
    ("mxfp8", "head"): 0.85,
    ("nvfp4", "head"): 0.75,
    ("fp8_channel", "gdn_in"): 0.6,
    ("fp8_channel", "out"): 0.6,
}
MANY_ROWS_TARGET = 1 / 1.3  # of the floor at M=64
ROTATED_BYTES = 250e6  # four times the L2
PATHS = ("ring", "passes", "cluster", "wide", "spread", "share", "group")
FAMILIES = (
    *PATHS,
    *(f"{name}{kind}" for name in FORMATS if name != "bf16" for kind in ("", " spread", " share", " group")),
)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan, the kernel for a row count and whether it starts before its predecessor ends."""

    name: str
    family: str
    plan: StreamPlan
    variant: Variant
    dependent: bool = True


def main() -> int:
    """Run all parts; 1 if a family or a part fails."""
    options = parse()
    device = torch.device("cuda", 0)
    if options.check is not None:
        return check_family(options.check, options, device)
    faulthandler.dump_traceback_later(options.limit_s, exit=True)
    begin = time.perf_counter()

    def stamp(text: str) -> None:
        say(f"[{time.perf_counter() - begin:5.1f} s] {text}")

    say(describe(device, options.commit))
    shapes = {name: SHAPES[name] for name in options.shapes}
    compile_all(shapes, options, device)
    stamp("kernels compiled")
    passed = check_all(options)
    stamp(f"checks done; timed: {', '.join(sorted(passed)) or 'nothing'}")
    reads = read_bandwidth(device)
    say(f"read bandwidth of this run {reads / 1e12:.2f} TB/s; fractions below are of {options.bandwidth / 1e12:.2f}")
    table: list[dict[str, object]] = []
    broken: list[str] = []
    for name, (n, k) in shapes.items():
        library: dict[int, float] = {}
        for format_name in ("cuBLAS", *options.formats):
            if format_name in ("mxfp8", "nvfp4") and k % 32:
                continue
            try:
                if format_name == "cuBLAS":
                    library = time_library(n, k, options, device)
                    continue
                rows = time_shape(name, n, k, format_name, library, passed, options, device)
                table += rows
                report(rows)
            except RuntimeError as error:
                broken.append(f"{name} {format_name}")
                say(f"{name} {format_name} FAILED: {str(error).splitlines()[0]}")
            torch.cuda.empty_cache()
        stamp(f"{name} done")
    dense: dict[str, float] = {}
    chain: dict[str, dict[str, float]] = {}
    best = best_plans(table)
    parts: list[tuple[str, Callable[[], None]]] = [("dense", lambda: dense.update(time_dense(options, device)))]
    if options.chain:
        for format_name in options.formats:
            if format_name in ("bf16", "fp8_channel"):
                parts.append(
                    (
                        f"chain {format_name}",
                        lambda f=format_name: chain.update(time_chain(best, f, passed, options, device)),
                    )
                )
    for name, part in parts:
        try:
            part()
        except RuntimeError as error:
            broken.append(name)
            say(f"{name} FAILED: {str(error).splitlines()[0]}")
        stamp(f"{name} done")
    for key, name in best.items():
        say(f"best plan {key}: {name}")
    line = {
        "gpu": torch.cuda.get_device_name(device),
        "commit": options.commit or current_commit(),
        "torch": torch.__version__,
        "read_bytes_per_s": reads,
    }
    line |= {"passed": sorted(passed), "failed": sorted(set(options.families) - passed), "broken": broken}
    line |= {"best": best, "dense_bytes_per_s": dense, "chain": chain}
    if options.json is not None:
        options.json.write_text(json.dumps(line | {"rows": table}, indent=1))
    kept = ("cuBLAS", "default")
    us = {f"{r['shape']}/{r['format']}/{r['rows']}/{r['kernel']}": r["us"] for r in table if r["kernel"] in kept}
    say(json.dumps(line | {"us": us}, separators=(",", ":")))
    return int(len(passed) < len(options.families) or bool(broken))


def parse() -> argparse.Namespace:
    """Arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the shapes of a step, fewer plans and rounds, no chain")
    parser.add_argument("--shapes", type=lambda s: s.split(","))
    parser.add_argument("--formats", type=lambda s: s.split(","), default=list(FORMATS))
    parser.add_argument("--rows", type=lambda s: [int(v) for v in s.split(",")], default=[1, 4, 8, 16, 64])
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--bandwidth", type=float, default=4.65e12)
    parser.add_argument("--cache-dir", type=Path, default=Path(tempfile.gettempdir()) / "stepfloor-kernels")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit", help="what was checked out, where git cannot say")
    parser.add_argument("--no-chain", dest="chain", action="store_false")
    parser.add_argument("--limit-s", type=int, default=420, help="give up with a traceback after this long")
    parser.add_argument("--families", type=lambda s: s.split(","), default=list(FAMILIES), help="check and time these")
    parser.add_argument("--check", choices=FAMILIES, help="check one family only, here")
    options = parser.parse_args()
    options.shapes = options.shapes or list(QUICK_SHAPES if options.quick else SHAPES)
    options.rounds = options.rounds or (5 if options.quick else 9)
    options.chain = options.chain and not options.quick
    return options


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


def plans(n: int, k: int, device: torch.device, format_name: str, quick: bool) -> dict[str, StreamPlan]:
    """The default plan of a shape in a format and what it competes with."""
    count = torch.cuda.get_device_properties(device).multi_processor_count
    base = plan_stream(n, k, count, format_name=format_name)
    found = {"default": base}
    bf16 = format_name == "bf16"
    if base.passes > 1 and base.chunks == 1:
        if bf16:
            found["2 slots"] = replace(base, slots=2)
            found["16 rows x 2"] = replace(base, pass_rows=16, slots=2)
        else:
            # rows of a piece, pieces on the way
            for rows, slots in (
                ((16, 4), (16, 2), (8, 5), (32, 2))
                if format_name != "nvfp4"
                else (
                    (16, 5),
                    (32, 3),
                    (16, 4),
                    (16, 3),
                )
            ):
                found[f"{rows} rows x {slots}"] = replace(base, pass_rows=rows, slots=slots)
    elif k == 6144:
        sizes = ((4, 2), (3, 3), (2, 4), (6, 2), (12, 1)) if bf16 else ((8, 2), (12, 2), (24, 1), (4, 4), (6, 3))
        for chunk_steps, slots in sizes:
            if chunk_steps % base.grain == 0:
                found[f"chunk {chunk_steps} x {slots}"] = replace(base, chunk_steps=chunk_steps, slots=slots)
        found["split 2"] = plan_stream(n, k, count, split=2, format_name=format_name)
    elif k == 10240:
        found |= {
            f"split {split}": plan_stream(n, k, count, split=split, format_name=format_name) for split in (2, 5, 1)
        }
    elif (n, k) in ((1280, 2560), (1793, 2560)):
        found["split 2"] = plan_stream(n, k, count, split=2, format_name=format_name)
        if bf16:
            found["whole"] = replace(base, chunk_steps=10, slots=1)
    found = {name: plan for name, plan in found.items() if name == "default" or plan != base}
    swept = format_name != "fp8_block" and (n, k) in (SHAPES["head"], SHAPES["gdn_in"], SHAPES["out"])
    return dict(list(found.items())[: 3 if swept else 1]) if quick else found


def candidates(n: int, k: int, rows: int, device: torch.device, format_name: str, quick: bool) -> list[Candidate]:
    """Everything that can compute this product here."""
    found: list[Candidate] = []
    for name, plan in plans(n, k, device, format_name, quick).items():
        variant = choose_variant(plan, rows)
        if rows <= 16 or not quick or name == "default":
            found.append(Candidate(name, family_of(plan, variant), plan, variant))
        if name != "default":
            continue
        if not quick:
            found.append(replace(found[-1], name="default, no PDL", dependent=False))
        for label, other in other_variants(plan, rows, variant, quick).items():
            found.append(Candidate(label, family_of(plan, other), plan, other))
    return [c for c in found if shared_bytes(c.plan, c.variant) <= SHARED_LIMIT]


def other_variants(plan: StreamPlan, rows: int, chosen: Variant, quick: bool) -> dict[str, Variant]:
    """Kernels that could take the place of the default plan's at this row count: a row's bits stay the same."""
    if rows <= 8:
        return {}
    tiles = -(-rows // 16)
    spread = spread_variant(plan, tiles)
    found: dict[str, Variant] = {}
    if spread is not None:
        found["spread"] = spread
    if spread is not None and (rows > 16 or not quick):
        unit = plan.coding.unit
        found["spread, short stages"] = replace(spread, stage_steps=unit, stages=min(8, 2 * spread.stages))
        found["spread, few rows"] = replace(spread, together=max(1, spread.together // 2))
        if rows > 16:
            found["spread, 2 buffers"] = replace(spread, buffers=2, stages=max(2, spread.stages // 2))
            found["spread, 1 buffer"] = replace(spread, buffers=1)
    share = share_variant(plan, tiles)
    if share is not None:
        found["ring" if rows <= 16 else "tiles of 16"] = Variant(1, True)
        found["share"] = share
        found["share, half the stages"] = replace(share, stages=max(1, share.stages // 2))
    if rows > 16:
        found["tiles of 16"] = Variant(1, True)
        if plan.passes == 1 and plan.format != "fp8_block":
            found["tiles"] = Variant(tiles, True)
    group = group_variant(plan, tiles) if rows > 16 else None
    if group is not None:
        found["group"] = group
        found["group, 12 stages"] = replace(group, stages=12)
    kept: dict[str, Variant] = {}
    for name, variant in found.items():
        fits = shared_bytes(plan, variant) <= SHARED_LIMIT
        if fits and variant != chosen and variant not in kept.values():
            kept[name] = variant
    return kept


def family_of(plan: StreamPlan, variant: Variant) -> str:
    """Which check stands for a kernel."""
    form = ("", "group", "spread", "share")[variant.form]
    if plan.format != "bf16":
        return f"{plan.format} {form}".strip()
    if form:
        return form
    if variant.tiles > 1:
        return "wide"
    if plan.split > 1:
        return "cluster"
    return "passes" if plan.passes > 1 else "ring"


def checked_plans(family: str, quick: bool, device: torch.device) -> list[tuple[StreamPlan, list[Variant]]]:
    """Plans that put a family to the test, each with the kernels that must agree bit for bit."""
    count = torch.cuda.get_device_properties(device).multi_processor_count
    short, tall = Variant(1, False), Variant(1, True)
    format_name = family.split()[0] if family.split()[0] in CODINGS else "bf16"
    grain = 32 if format_name in ("mxfp8", "nvfp4") else 16
    own = {name: SHAPES[name] for name in QUICK_SHAPES if name != "head"} if quick else SHAPES
    shapes = [(n, k) for n, k in [*own.values(), *(ODD_SHAPES[1::2] if quick else ODD_SHAPES)] if k % grain == 0]
    every = [p for n, k in shapes for p in plans(n, k, device, format_name, quick).values()]
    odd = [plan_stream(n, k, count, format_name=format_name) for n, k in ((16483, 2560), (5301, 4096))]
    single = [p for p in every if p.passes == 1 and p.split == 1]
    # other plans differ in what the kernels of clusters do not look at, but for the size of their pieces
    defaults = [plan_stream(n, k, count, format_name=format_name) for n, k in shapes]
    if family.endswith("spread"):
        found: list[tuple[StreamPlan, list[Variant]]] = []
        for p in [*(defaults if quick else every), odd[0]]:
            wide = [spread_variant(p, tiles) for tiles in (1, 2, 4, 5)]
            others = [v for v in other_variants(p, 64, tall, quick).values() if v.form == 2]
            variants = [v for v in [*wide, *others] if v is not None]
            if variants:
                found.append((p, [tall, *dict.fromkeys(variants)]))
        return found
    if family.endswith("share"):
        # fewer clusters too: which rows of the plan's blocks a cluster has depends on it
        shared = {
            p: [share_variant(p, tiles, clusters) for tiles in (1, 2, 3, 4, 5) for clusters in (0, 14)]
            + [v for rows in (16, 64) for v in other_variants(p, rows, tall, quick).values() if v.form == 3]
            for p in (defaults if quick else every)
        }
        return [
            (p, [tall, *dict.fromkeys(v for v in variants if v is not None)])
            for p, variants in shared.items()
            if any(variants)
        ]
    if family.endswith("group"):
        grouped = {p: [group_variant(p, tiles) for tiles in (2, 3, 4, 5)] for p in [*every, *odd]}
        return [
            (p, [tall, *(v for v in variants if v is not None)]) for p, variants in grouped.items() if any(variants)
        ]
    if family in CODINGS:
        tiles = [Variant(tiles, True) for tiles in (2, 5)]
        return [(p, [short, tall, *(tiles if p.passes == 1 and family != "fp8_block" else [])]) for p in [*every, *odd]]
    if family == "ring":
        return [(p, [short, tall]) for p in single]
    if family == "passes":
        return [(p, [short, tall]) for p in [*(p for p in every if p.passes > 1), *odd]]
    if family == "cluster":
        return [(p, [short, tall]) for p in every if p.split > 1]
    wide_plans = [*single, plan_stream(336, 10240, count)]
    return [(p, [tall, *(Variant(tiles, True) for tiles in (2, 4, 5))]) for p in dict.fromkeys(wide_plans)]


def compile_all(shapes: dict[str, tuple[int, int]], options: argparse.Namespace, device: torch.device) -> None:
    """Fill the cache from several processes; what does not compile is named and left out by its check."""
    wanted: set[tuple[StreamPlan, Variant | None]] = set()
    for n, k in shapes.values():
        for format_name in options.formats:
            if format_name in ("mxfp8", "nvfp4") and k % 32:
                continue
            for rows in options.rows:
                found = candidates(n, k, rows, device, format_name, options.quick)
                wanted |= {(c.plan, c.variant) for c in found}
    for family in options.families:
        wanted |= {(p, v) for p, variants in checked_plans(family, options.quick, device) for v in variants}
    for format_name in options.formats:
        wanted.add((dense_plan(format_name, device), None))
    arch = device_arch(device)
    jobs = [(plan, variant, arch, options.cache_dir) for plan, variant in sorted(wanted, key=str)]
    spawn = multiprocessing.get_context("spawn")  # a forked child would share the CUDA context
    with ProcessPoolExecutor(min(14, multiprocessing.cpu_count()), mp_context=spawn) as pool:
        failures = [f for f in pool.map(build, jobs, chunksize=4) if f is not None]
    say(f"{len(wanted)} kernels, {len(failures)} do not compile")
    for failure in failures[:3]:
        say(failure[:1500])


def build(job: tuple[StreamPlan, Variant | None, str, Path]) -> str | None:
    """Compile one kernel into the cache, the dense one without a variant; what went wrong, if anything."""
    plan, variant, arch, cache_dir = job
    try:
        if variant is None:
            compile_cuda("stream_dense.cu", dense_macros(plan, (1, plan.n, plan.n)), arch, cache_dir)
        elif shared_bytes(plan, variant) <= SHARED_LIMIT:
            compile_cuda("linear.cu", kernel_macros(plan, variant), arch, cache_dir)
    except RuntimeError as error:
        return f"{variant} of {plan}: {error}"
    return None


# ---------------------------------------------------------------------- checks


def check_all(options: argparse.Namespace) -> set[str]:
    """Check the families side by side, each in its own process: a fault or a hang of one leaves the others alone."""
    command = [sys.executable, "-m", "benchmarks.linear", "--cache-dir", str(options.cache_dir)]
    command += [*(["--quick"] if options.quick else []), "--check"]
    running = {
        family: subprocess.Popen([*command, family], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for family in options.families
    }
    passed: set[str] = set()
    allowed = 45 if options.quick else 150
    deadline = time.monotonic() + allowed
    for family, process in running.items():
        try:
            output, _ = process.communicate(timeout=max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
            output += f"\ncheck {family}: HANGS, no answer in {allowed} s"
        if process.returncode == 0:
            passed.add(family)
        say("\n".join(output.strip().splitlines()[-12:]))
    return passed


def check_family(family: str, options: argparse.Namespace, device: torch.device) -> int:
    """Exit status 0 if every kernel of the family is right."""
    begin = time.perf_counter()
    errors: list[str] = []
    worst, count = 0.0, 0
    for plan, variants in checked_plans(family, options.quick, device):
        fitting = [v for v in variants if shared_bytes(plan, v) <= SHARED_LIMIT]
        try:
            error, found = check_plan(plan, fitting, options, device)
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


def check_plan(
    plan: StreamPlan, variants: list[Variant], options: argparse.Namespace, device: torch.device
) -> tuple[float, list[str]]:
    """Largest relative error of a plan's kernels and what is wrong with them, in words."""
    n, k = plan.n, plan.k
    make = torch.Generator(device).manual_seed(n + k)
    x = torch.randn(MAX_ROWS, k, generator=make, device=device).to(torch.bfloat16)
    stored = random_matrix(n, k, plan.format, device)
    weight = streamed(stored, plan, options.cache_dir)
    exact = torch.cat([x.double() @ part.double().T for part in stored.dequantize().split(32768)], 1)
    torch.cuda.synchronize()
    # bf16 rounds by at most 2**-8 of the value; float32 sums and two scalings add (K + 4) 2**-24 of the sum of
    # magnitudes, below sqrt(K) here
    bound = exact.abs() * 2**-8 + (k + 4) * k**0.5 * 2**-24
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


def random_matrix(n: int, k: int, format_name: str, device: torch.device) -> PackedWeight:
    """Weights of a layer's size."""
    make = torch.Generator(device).manual_seed(n + k)
    return quantize(torch.randn(n, k, generator=make, device=device) / k**0.5, format_name)


def streamed(stored: PackedWeight, plan: StreamPlan, cache_dir: Path) -> StreamedWeight:
    """The matrix in the order of a plan."""
    return StreamedWeight(plan, pack_tape(stored, plan), cache_dir, outer_scales(stored))


def check_graph(weight: StreamedWeight, variant: Variant, x: Tensor, device: torch.device) -> list[str]:
    """Eager without early start, eager with it and replayed graph agree while the input changes just before."""
    plan, rows = weight.plan, min(4, variant.max_rows)
    late = launch_for(plan, variant, device, weight.cache_dir, False)
    buffer = torch.empty((rows, plan.k), dtype=torch.bfloat16, device=device)
    outs = [torch.empty((rows, plan.n), dtype=torch.bfloat16, device=device) for _ in range(6)]
    wanted: list[Tensor] = []
    for i in range(6):
        out = torch.empty_like(outs[0])
        late(pack_arguments(weight.tape, x[4 * i : 4 * i + rows], out, weight.scales))
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
            launch(pack_arguments(weight.tape, y, out, weight.scales))
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


def time_library(n: int, k: int, options: argparse.Namespace, device: torch.device) -> dict[int, float]:
    """us of cuBLAS on the bf16 matrix for each row count."""
    calls = min(256, max(2, math.ceil(ROTATED_BYTES / (2 * n * k))))
    store = torch.empty((calls, n, k), dtype=torch.bfloat16, device=device)
    for part in store:
        part.normal_(std=k**-0.5)
    found: dict[int, float] = {}
    for rows in options.rows:
        x = torch.randn(rows, k, device=device).to(torch.bfloat16)
        out = torch.empty((rows, n), dtype=torch.bfloat16, device=device)
        torch.mm(x, store[0].T, out=out)
        torch.cuda.synchronize()

        def run(x: Tensor = x, out: Tensor = out) -> None:
            for w in store:
                torch.mm(x, w.T, out=out)

        found[rows] = medians_us({"cuBLAS": capture(run)}, calls, options.rounds)["cuBLAS"]
    return found


def time_shape(
    name: str,
    n: int,
    k: int,
    format_name: str,
    library: dict[int, float],
    passed: set[str],
    options: argparse.Namespace,
    device: torch.device,
) -> list[dict[str, object]]:
    """One table row for each row count and kernel."""
    weight_bytes = stored_bytes(format_name, n, k)
    calls = min(256, max(2, math.ceil(ROTATED_BYTES / weight_bytes)))
    stored = random_matrix(n, k, format_name, device)
    scales = outer_scales(stored)
    stores: dict[StreamPlan, Tensor] = {}
    for plan in plans(n, k, device, format_name, options.quick).values():
        stores[plan] = pack_tape(stored, plan).repeat(calls, 1)
    del stored
    floor_us = weight_bytes / options.bandwidth * 1e6
    table: list[dict[str, object]] = []
    for rows in options.rows:
        x = torch.randn(rows, k, device=device).to(torch.bfloat16)
        out = torch.empty((rows, n), dtype=torch.bfloat16, device=device)
        graphs: dict[str, torch.cuda.CUDAGraph] = {}
        for candidate in candidates(n, k, rows, device, format_name, options.quick):
            if candidate.family not in passed:
                continue
            variant = fit_variant(candidate.plan, candidate.variant, device, options.cache_dir)
            launch = launch_for(candidate.plan, variant, device, options.cache_dir, candidate.dependent)
            step = candidate.variant.max_rows
            arguments = [
                pack_arguments(part, x[first : first + step], out[first : first + step], scales)
                for part in stores[candidate.plan]
                for first in range(0, rows, step)
            ]

            def run_ours(launch: Callable[[bytes], None] = launch, arguments: list[bytes] = arguments) -> None:
                for packed in arguments:
                    launch(packed)

            run_ours()
            torch.cuda.synchronize()
            graphs[candidate.name] = capture(run_ours)
        times = medians_us(graphs, calls, options.rounds) if graphs else {}
        if rows in library:
            times["cuBLAS"] = library[rows]
        for key, us in times.items():
            table.append(
                {
                    "shape": name,
                    "format": format_name,
                    "n": n,
                    "k": k,
                    "rows": rows,
                    "kernel": key,
                    "us": round(us, 2),
                    "floor_us": round(floor_us, 2),
                    "fraction": round(floor_us / us, 3),
                }
            )
    return table


def dense_plan(format_name: str, device: torch.device) -> StreamPlan:
    """The plan whose way back to bf16 is timed."""
    count = torch.cuda.get_device_properties(device).multi_processor_count
    return plan_stream(*SHAPES["gdn_in"], count, format_name=format_name)


def time_dense(options: argparse.Namespace, device: torch.device) -> dict[str, float]:
    """Bytes read and written a second while gdn_in becomes bf16 again, by format."""
    found: dict[str, float] = {}
    n, k = SHAPES["gdn_in"]
    for format_name in options.formats:
        plan, stored = dense_plan(format_name, device), random_matrix(n, k, format_name, device)
        weight = streamed(stored, plan, options.cache_dir)
        wanted = stored.dequantize().to(torch.bfloat16)
        if not torch.equal(weight.dense(), wanted):
            raise RuntimeError(f"dense {format_name} differs from the decoded matrix")
        launch = dense_launch(plan, (1, n, n), device, options.cache_dir)
        tapes = weight.tape.repeat(8, 1)
        outs = torch.empty((len(tapes), n, k), dtype=torch.bfloat16, device=device)
        arguments = [dense_arguments(t, weight.scales, out) for t, out in zip(tapes, outs, strict=True)]

        def run(launch: Callable[[bytes], None] = launch, arguments: list[bytes] = arguments) -> None:
            for packed in arguments:
                launch(packed)

        us = medians_us({"dense": capture(run)}, len(tapes), options.rounds)["dense"]
        found[format_name] = (plan.tape_bytes + 2 * n * k) / us * 1e6
        say(f"dense gdn_in {format_name:12} {us:8.2f} us, {found[format_name] / 1e12:.2f} TB/s read and written")
    return found


def best_plans(table: list[dict[str, object]]) -> dict[str, str]:
    """Of each shape and format: the plan with the best geometric mean over up to 16 rows, since one plan must serve
    every row count, and the fastest kernel above; "=" where that is the default or within 2 % of it.
    """
    best: dict[str, str] = {}
    for shape, form in dict.fromkeys((str(r["shape"]), str(r["format"])) for r in table):
        mine = [r for r in table if (r["shape"], r["format"]) == (shape, form) and r["kernel"] != "cuBLAS"]
        rows_seen = sorted({int(str(r["rows"])) for r in mine})
        few = [rows for rows in rows_seen if rows <= 16]
        for label, counts in [("up to 16 rows", few), *((f"{rows} rows", [rows]) for rows in rows_seen if rows > 8)]:
            scores: dict[str, list[float]] = {}
            for r in mine:
                if r["rows"] in counts and r["kernel"] != "default, no PDL":
                    scores.setdefault(str(r["kernel"]), []).append(math.log(float(str(r["us"]))))
            whole = {name: sum(v) / len(v) for name, v in scores.items() if len(v) == len(counts)}
            if not counts or not whole:
                continue
            first = min(whole, key=lambda name: whole[name])
            gain = math.exp(whole.get("default", whole[first]) - whole[first])
            best[f"{shape} {form} {label}"] = "=" if gain < 1.02 else f"{first} ({gain:.2f}x the default's speed)"
    return best


def time_chain(
    best: dict[str, str], format_name: str, passed: set[str], options: argparse.Namespace, device: torch.device
) -> dict[str, dict[str, float]]:
    """The dense chain of a step in one format, each product reading the one before: ms by row count."""
    layer = ["hc_down", "hc_up", "gdn_in", "out", "hc_down", "hc_up", "router_shared", "shared_down"]
    names = [("qsa_in" if i % 4 == 3 and name == "gdn_in" else name) for i in range(48) for name in layer]
    used = {name: plans(*SHAPES[name], device, format_name, options.quick) for name in dict.fromkeys(names)}
    chosen: dict[str, dict[str, StreamPlan]] = {"default": {name: found["default"] for name, found in used.items()}}
    chosen["best"] = {}
    for name, found in used.items():
        label = best.get(f"{name} {format_name} up to 16 rows", "=").split(" (")[0]
        chosen["best"][name] = found.get(label, found["default"])
    sizes = {name: max(p.tape_bytes for p in found.values()) for name, found in used.items()}
    store = torch.empty(sum(sizes[name] for name in names), dtype=torch.uint8, device=device)
    parts = store.split([sizes[name] for name in names])
    scales: dict[str, Tensor | None] = {}
    for name in used:  # finite values everywhere: the same matrix in all layers, in memory of their own
        stored = random_matrix(*SHAPES[name], format_name, device)
        scales[name] = outer_scales(stored)
        tape = pack_tape(stored, chosen["default"][name])
        for other, part in zip(names, parts, strict=True):
            if other == name:
                part[: tape.numel()].copy_(tape)
    floor_ms = sum(stored_bytes(format_name, *SHAPES[name]) for name in names) / options.bandwidth * 1e3
    wide = max(n for name, (n, _) in SHAPES.items() if name in used)
    result: dict[str, dict[str, float]] = {f"{format_name} floor_ms": {"": round(floor_ms, 3)}}
    say(f"dense chain of 48 layers in {format_name}, {len(names)} products, floor {floor_ms:.3f} ms")
    for rows in options.rows:
        buffers = [torch.randn(rows, wide, device=device).to(torch.bfloat16) for _ in range(2)]
        graphs: dict[str, torch.cuda.CUDAGraph] = {}
        if format_name == "bf16":

            def run_library(buffers: list[Tensor] = buffers) -> None:
                for i, (name, part) in enumerate(zip(names, parts, strict=True)):
                    n, k = SHAPES[name]
                    y = F.linear(buffers[i % 2][:, :k], part[: 2 * n * k].view(torch.bfloat16).view(n, k))
                    if i == len(names) - 1:
                        buffers[1 - i % 2][:, :n].copy_(y)

            run_library()
            torch.cuda.synchronize()
            graphs["cuBLAS"] = capture(run_library)
        for label, plans_of in chosen.items():
            for dependent in (True, False):
                calls: list[tuple[Callable[[bytes], None], bytes]] = []
                for i, (name, part) in enumerate(zip(names, parts, strict=True)):
                    n, k = SHAPES[name]
                    plan = plans_of[name]
                    variant = fit_variant(plan, choose_variant(plan, rows), device, options.cache_dir)
                    if family_of(plan, variant) not in passed:
                        break
                    launch = launch_for(plan, variant, device, options.cache_dir, dependent)
                    x, out = buffers[i % 2][:, :k], buffers[1 - i % 2][:, :n]
                    for first in range(0, rows, variant.max_rows):
                        few = slice(first, first + variant.max_rows)
                        calls.append((launch, pack_arguments(part, x[few], out[few], scales[name])))
                else:

                    def run_ours(calls: list[tuple[Callable[[bytes], None], bytes]] = calls) -> None:
                        for launch, packed in calls:
                            launch(packed)

                    run_ours()
                    torch.cuda.synchronize()
                    graphs[f"{label}{'' if dependent else ', no PDL'}"] = capture(run_ours)
        times = {name: us / 1e3 for name, us in medians_us(graphs, 1, options.rounds).items()}
        result[f"{format_name} {rows}"] = {name: round(ms, 3) for name, ms in times.items()}
        say(f"  {rows:2d} rows: " + ", ".join(f"{k} {v:.3f} ms ({floor_ms / v:.0%})" for k, v in times.items()))
    return result


def report(table: list[dict[str, object]]) -> None:
    """The rows of one shape in one format: all kernels, then the default beside the floor and cuBLAS."""
    if not table:
        return
    shape, form, floor = str(table[0]["shape"]), str(table[0]["format"]), float(str(table[0]["floor_us"]))
    rows_seen = list(dict.fromkeys(int(str(r["rows"])) for r in table))
    us = {(str(r["kernel"]), int(str(r["rows"]))): float(str(r["us"])) for r in table}
    say(f"\n{shape} {form} {table[0]['n']} x {table[0]['k']}, floor {floor:.2f} us")
    for kernel in dict.fromkeys(kernel for kernel, _ in us):
        cells = (f"{us[kernel, rows]:9.2f}" if (kernel, rows) in us else f"{'-':>9}" for rows in rows_seen)
        say(f"  {kernel:22}" + "".join(f" M={rows}{cell}" for rows, cell in zip(rows_seen, cells, strict=True)))
    shares: list[str] = []
    for rows in rows_seen:
        ours = us.get(("default", rows))
        if ours is None:
            shares.append(f"M={rows} not timed")
            continue
        target = MANY_ROWS_TARGET if rows > 16 else TARGETS.get((form, shape), 0.0) if rows <= 4 else 0.0
        beside = f", {us['cuBLAS', rows] / ours:.2f}x cuBLAS" if ("cuBLAS", rows) in us else ""
        missed = f" BELOW {target:.0%}" if floor / ours < target else ""
        shares.append(f"M={rows} {floor / ours:.0%}{beside}{missed}")
    say("  default: " + "; ".join(shares))


def say(text: str) -> None:
    """Print at once: a hang shows where."""
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
