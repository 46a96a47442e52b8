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
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness import (
    BANDWIDTH,
    CACHE_DIR,
    Kernel,
    beside_floor,
    capture,
    check_apart,
    compile_all,
    current_commit,
    describe,
    give_up_after,
    gpu,
    load_and_capture,
    medians_us,
    read_bandwidth,
    rotations,
    say,
    stopwatch,
    write_json,
)
from benchmarks.linear_checks import check_family, checked_plans
from benchmarks.linear_plans import (
    FAMILIES,
    FORMATS,
    QUICK_SHAPES,
    SHAPES,
    candidates,
    dense_plan,
    family_of,
    plans,
    random_matrix,
    streamed,
)
from stepfloor.formats.table import stored_bytes
from stepfloor.kernels._choose_form import choose_variant
from stepfloor.kernels._forms import Variant, kernel_macros, shared_bytes
from stepfloor.kernels._stream import (
    SHARED_LIMIT,
    StreamPlan,
    dense_arguments,
    dense_launch,
    dense_macros,
    outer_scales,
    pack_tape,
)
from stepfloor.kernels._stream_product import fit_variant, launch_for, pack_arguments

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


def main() -> int:
    """Run all parts; 1 if a family or a part fails."""
    options = parse()
    device = gpu()
    if options.check is not None:
        return check_family(options.check, options, device)
    give_up_after(options.limit_s)
    stamp = stopwatch()
    say(describe(device, options.commit))
    shapes = {name: SHAPES[name] for name in options.shapes}
    compile_all(kernels(shapes, options, device), options.cache_dir, device)
    stamp("kernels compiled")
    arguments = ["--cache-dir", str(options.cache_dir), *(["--quick"] if options.quick else [])]
    passed = check_apart("benchmarks.linear", options.families, arguments, 45 if options.quick else 150)
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
    write_json(options.json, line | {"rows": table})
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
    parser.add_argument("--bandwidth", type=float, default=BANDWIDTH)
    parser.add_argument("--cache-dir", type=Path, default=CACHE_DIR)
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


def kernels(shapes: dict[str, tuple[int, int]], options: argparse.Namespace, device: torch.device) -> list[Kernel]:
    """All that is checked and timed, and the dense one of each format."""
    wanted: set[tuple[StreamPlan, Variant]] = set()
    for n, k in shapes.values():
        for format_name in options.formats:
            if format_name in ("mxfp8", "nvfp4") and k % 32:
                continue
            for rows in options.rows:
                wanted |= {(c.plan, c.variant) for c in candidates(n, k, rows, device, format_name, options.quick)}
    for family in options.families:
        wanted |= {(p, v) for p, variants in checked_plans(family, options.quick, device) for v in variants}
    found = [
        Kernel(f"{variant} of {plan}", "linear.cu", kernel_macros(plan, variant))
        for plan, variant in wanted
        if shared_bytes(plan, variant) <= SHARED_LIMIT
    ]
    for plan in (dense_plan(format_name, device) for format_name in options.formats):
        found.append(Kernel(f"dense {plan}", "stream_dense.cu", dense_macros(plan, (1, plan.n, plan.n))))
    return found


def time_library(n: int, k: int, options: argparse.Namespace, device: torch.device) -> dict[int, float]:
    """us of cuBLAS on the bf16 matrix for each row count."""
    calls = rotations(2 * n * k)
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
    calls = rotations(weight_bytes)
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

            graphs[candidate.name] = load_and_capture(run_ours)
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
                    **beside_floor(us, floor_us),
                }
            )
    return table


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
    labels = {name: best.get(f"{name} {format_name} up to 16 rows", "=").split(" (")[0] for name in used}
    chosen["best"] = {name: found.get(labels[name], found["default"]) for name, found in used.items()}
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

            graphs["cuBLAS"] = load_and_capture(run_library)
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

                    graphs[f"{label}{'' if dependent else ', no PDL'}"] = load_and_capture(run_ours)
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


if __name__ == "__main__":
    sys.exit(main())
