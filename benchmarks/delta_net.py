"""The gated delta net's kernels on one GPU: right first, then timed; the best decode plan for each shape is printed.

    PYTHONPATH=src python3 -m benchmarks.delta_net [--json FILE] [--only decode prefill portable]

Decode, the CUDA kernel:
1. Every family of plans is checked in a process of its own, at the model's sizes: against the float32 reference, NaN
   around outputs and kept rows, row bits for several batch and row counts, windows of random accepted counts against
   plain decoding bit for bit and against float64, repeated steps in place. What fails or hangs gets no times.
2. CUDA-graph replays of one call a layer, states rotated past the L2, rounds in alternating order, medians.
3. Its cost between the layer's own products: the chain in-projection, delta net, out-projection, less the same chain
   without it. The recommended plan is the cheapest here.
Prefill: the state beside float64, then times of whole calls by number of rows, for several plans, and by kernel.
Portable: the Triton decode kernels beside the reference, then times. A part that fails leaves the others running.
"""

import argparse
import json
import math
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.delta_net_checks import (
    CHECKED_ROWS,
    FAMILIES,
    SIZES,
    check_family,
    checked,
    copied,
    name_of,
    own_copies,
    packed_step,
)
from benchmarks.delta_net_prefill import time_prefill
from benchmarks.harness import (
    BANDWIDTH,
    CACHE_DIR,
    ROTATED_BYTES,
    Kernel,
    beside_floor,
    capture,
    compile_all,
    describe,
    give_up_after,
    gpu,
    load_and_capture,
    medians_us,
    run_apart,
    say,
    stopwatch,
    write_json,
)
from stepfloor.formats.codec import PackedWeight
from stepfloor.kernels._delta_fused import DeltaPlan, launch_for
from stepfloor.kernels._stream_product import StreamedWeight, stream_product
from stepfloor.kernels.gdn_decode import gdn_decode_inputs, gdn_decode_reference, gdn_decode_triton
from stepfloor.kernels.linear import linear_repack
from stepfloor.roofline import bytes as roofline_bytes

# sequences, new rows, pending rows
TIMED = [(1, 1, 1), (4, 1, 1), (16, 1, 1), (1, 4, 3), (4, 4, 3), (16, 4, 3)]


def main() -> int:
    """Run the parts; 1 if one fails."""
    options = parse()
    device = gpu()
    if options.check is not None:
        return check_family(options.check, options.cache_dir, device)
    give_up_after(options.limit_s)
    stamp = stopwatch()
    say(describe(device))
    parts = {"decode": time_decode, "prefill": time_prefill, "portable": time_portable}
    line: dict[str, Any] = {"gpu": torch.cuda.get_device_name(device), "torch": torch.__version__, "failed": []}
    for name in options.only:
        try:
            line[name], failed = parts[name](options, device)
            line["failed"] += failed
        except Exception:
            line["failed"].append(name)
            say(f"FAILED {name}\n{traceback.format_exc()[-1500:]}")
        stamp(f"{name} done\n")
    write_json(options.json, line)
    say(json.dumps(line, separators=(",", ":")))
    return int(bool(line["failed"]))


def time_decode(options: argparse.Namespace, device: torch.device) -> tuple[dict[str, Any], list[str]]:
    """Checks and times of the CUDA kernel; and the families that failed."""
    compile_all(kernels(), options.cache_dir, device)
    passed = check_all(options.cache_dir)
    say(f"checks done; timed: {', '.join(passed) or 'nothing'}")
    table = [row for shape in TIMED for row in time_shape(*shape, passed, options, device)]
    chain, failed = time_chain(passed, options, device)
    best = report(table, chain)
    failed += [family for family in FAMILIES if family not in passed]
    return {"best": best, "chain": chain, "rows": table}, failed


def time_portable(options: argparse.Namespace, device: torch.device) -> tuple[dict[str, Any], list[str]]:
    """The Triton decode kernels at the model's sizes and the small model's: beside the reference, then us a call."""
    failed: list[str] = []
    found: dict[str, float] = {}
    for sizes in (SIZES, (2, 4, 64, 64)):
        for sequences, rows, pending in ((1, 1, 1), (4, 4, 3), (16, 1, 1)):
            inputs: dict[str, Any] = gdn_decode_inputs(sequences, rows, *sizes, torch.bfloat16, str(device))
            inputs["pending"] = torch.full((sequences,), pending, device=device)
            wanted, ours = copied(inputs), copied(inputs)
            reference, output = gdn_decode_reference(**wanted), gdn_decode_triton(**ours)
            share = float((output != reference).float().mean())
            off = float((ours["state"] - wanted["state"]).abs().max() / wanted["state"].abs().max())
            name = f"{sizes[1]} heads of {sizes[3]}, {sequences} x {rows}"
            if share > 0.05 or not off <= 3 * 2.0**-7 or not torch.equal(ours["raw_rows"], wanted["raw_rows"]):
                failed.append(f"portable {name}")
            graph = capture(lambda inputs=inputs: gdn_decode_triton(**inputs))
            found[name] = round(medians_us({"call": graph}, 1, options.rounds)["call"], 1)
            say(f"portable, {name}: {found[name]:.1f} us; {share:.2%} of outputs differ, state off {off:.2g}")
    return found, failed


def parse() -> argparse.Namespace:
    """Arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--bandwidth", type=float, default=BANDWIDTH)
    parser.add_argument("--cache-dir", type=Path, default=CACHE_DIR)
    parser.add_argument("--json", type=Path)
    parts = ["decode", "prefill", "portable"]
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    parser.add_argument("--limit-s", type=int, default=240, help="give up with a traceback after this long")
    parser.add_argument("--check", choices=FAMILIES, help="check one family only, here")
    return parser.parse_args()


def kernels() -> list[Kernel]:
    """All that is checked and timed."""
    every = [plan for family in FAMILIES.values() for plan in family]
    wanted = {replace(plan, rows=rows, kept=rows) for plan in every for _, rows, _ in TIMED}
    wanted |= {checked(plan, rows) for plan in every for rows in CHECKED_ROWS}
    return [Kernel(str(plan), "gdn_decode.cu", plan.macros()) for plan in wanted]


# ---------------------------------------------------------------------- is it right


def check_all(cache_dir: Path) -> list[str]:
    """The families that pass. Bits must also agree between families with equally many columns a warp."""
    passed: list[str] = []
    bits: dict[str, str] = {}
    jobs = {family: ["--check", family, "--cache-dir", str(cache_dir)] for family in FAMILIES}
    for family, right, text in run_apart("benchmarks.delta_net", jobs, 70, at_once=3):
        lines = text.splitlines()
        found = dict(line.split()[1:3] for line in lines if line.startswith("bits "))
        strange = [cols for cols, digest in found.items() if bits.setdefault(cols, digest) != digest]
        say(f"{'ok    ' if right and not strange else 'FAILED'} {family}")
        for line in lines:
            if not line.startswith("bits "):
                say(f"       {line}")
        if strange:
            say(f"       other bits than an earlier family with {', '.join(strange)} columns")
        if right and not strange:
            passed.append(family)
    return passed


# ---------------------------------------------------------------------- times


def time_shape(
    sequences: int, rows: int, pending: int, passed: list[str], options: argparse.Namespace, device: torch.device
) -> list[dict[str, object]]:
    """One table row for each plan."""
    state_bytes = sequences * SIZES[1] * SIZES[2] * SIZES[3] * 4
    layers = max(6, math.ceil(ROTATED_BYTES / state_bytes))
    inputs: dict[str, Any] = gdn_decode_inputs(sequences, rows, *SIZES, torch.bfloat16, str(device))
    inputs["pending"] = torch.full((sequences,), pending, device=device)
    per_layer = [own_copies(inputs) for _ in range(layers)]
    out = inputs["projected"].new_empty((sequences, rows, SIZES[1] * SIZES[3]))
    states = [layer["state"] for layer in per_layer]

    def copy() -> None:
        for state in states:
            state[1:].mul_(1.0)

    graphs = {"state alone, by torch": load_and_capture(copy)}
    packed = [packed_step(layer, out) for layer in per_layer]
    for plan in usable(passed):
        launch = launch_for(replace(plan, rows=rows, kept=rows), sequences, device, options.cache_dir)

        def run(launch: Callable[[bytes], None] = launch) -> None:
            for arguments in packed:
                launch(arguments)

        graphs[name_of(plan)] = load_and_capture(run)
    floor_us = roofline_bytes.gdn_decode(sequences, rows, *SIZES, 4) / options.bandwidth * 1e6
    times = medians_us(graphs, layers, options.rounds)
    torch.cuda.empty_cache()
    return [
        {
            "sequences": sequences,
            "rows": rows,
            "pending": pending,
            "kernel": name,
            **beside_floor(us, floor_us),
        }
        for name, us in times.items()
    ]


def usable(passed: list[str]) -> list[DeltaPlan]:
    """What passed."""
    return [plan for family in passed for plan in FAMILIES[family]]


def streamed(n: int, k: int, device: torch.device, cache_dir: Path) -> StreamedWeight:
    """A product of the layer."""
    data = torch.randn(n, k, device=device).mul_(k**-0.5).to(torch.bfloat16)
    weight = linear_repack(PackedWeight("bf16", (n, k), data), device, cache_dir)
    if not isinstance(weight, StreamedWeight):
        raise RuntimeError(f"the product [{n}, {k}] is not streamed")
    return weight


def time_chain(
    passed: list[str], options: argparse.Namespace, device: torch.device
) -> tuple[dict[str, dict[str, float]], list[str]]:
    """Us a layer that the delta net adds to its two products, by sequences x rows and candidate; 10 layers.

    Also the candidates that, run once in there from equal inputs, leave other bits than the first with their columns.
    """
    failed: list[str] = []
    layers, columns, width = 10, 16480, SIZES[1] * SIZES[3]

    into = [streamed(columns, 2560, device, options.cache_dir) for _ in range(layers)]
    back = [streamed(2560, width, device, options.cache_dir) for _ in range(layers)]
    found: dict[str, dict[str, float]] = {}
    for sequences, rows, pending in TIMED:
        inputs: dict[str, Any] = gdn_decode_inputs(sequences, rows, *SIZES, torch.bfloat16, str(device))
        inputs["pending"] = torch.full((sequences,), pending, device=device)
        per_layer = [own_copies(inputs) for _ in range(layers)]
        x = torch.randn(sequences * rows, 2560, device=device).to(torch.bfloat16)
        projected = inputs["projected"].view(-1, columns)
        mixed = x.new_empty((sequences * rows, width))

        def run(
            candidate: DeltaPlan | None,
            x: Tensor = x,
            projected: Tensor = projected,
            mixed: Tensor = mixed,
            per_layer: list[dict[str, Any]] = per_layer,
            sequences: int = sequences,
            rows: int = rows,
        ) -> None:
            for i in range(layers):
                stream_product(x, into[i], projected)
                if candidate is None:
                    stream_product(projected[:, :width], back[i], x)
                    continue
                layer = per_layer[i]
                plan = replace(candidate, rows=rows, kept=rows)
                launch = launch_for(plan, sequences, device, options.cache_dir)
                launch(packed_step(layer, mixed))
                stream_product(mixed, back[i], x)

        graphs: dict[str, torch.cuda.CUDAGraph] = {}
        work = [x, *(layer[name] for layer in per_layer for name in ("state", "raw_rows", "gate_rows"))]
        initial = [tensor.clone() for tensor in work]
        results: dict[int, list[Tensor]] = {}
        for candidate in (None, *usable(passed)):
            name = "without" if candidate is None else name_of(candidate)
            graphs[name] = load_and_capture(lambda candidate=candidate, run=run: run(candidate))
            if candidate is None:
                continue
            for tensor, first in zip(work, initial, strict=True):
                tensor.copy_(first)
            graphs[name].replay()
            result = [tensor.clone() for tensor in work]
            wanted = results.setdefault(candidate.cols, result)
            if not all(torch.equal(ours, first) for ours, first in zip(result, wanted, strict=True)):
                failed.append(f"{sequences}x{rows} between products: {name}")
                say(f"FAILED {failed[-1]}: other bits than the first plan of {candidate.cols} columns")
                del graphs[name]
        times = medians_us(graphs, layers, options.rounds)
        without = times.pop("without")
        found[f"{sequences}x{rows}"] = {"without": round(without, 2)} | {
            n: round(t - without, 2) for n, t in times.items()
        }
    return found, failed


def report(table: list[dict[str, object]], chain: dict[str, dict[str, float]]) -> dict[str, str]:
    """The table a person reads, and the candidate to use for each shape: the cheapest between a layer's products."""
    shapes = list(dict.fromkeys(f"{r['sequences']}x{r['rows']}" for r in table))
    us = {(f"{r['sequences']}x{r['rows']}", str(r["kernel"])): float(str(r["us"])) for r in table}
    floors = {f"{r['sequences']}x{r['rows']}": float(str(r["floor_us"])) for r in table}
    kernels = list(dict.fromkeys(str(r["kernel"]) for r in table))
    heading = f"{'sequences x rows':50}" + "".join(f"{shape:>9}" for shape in shapes)
    floor = f"{'floor':50}" + "".join(f"{floors[shape]:9.2f}" for shape in shapes)
    say(f"us a call in a row of calls\n{heading}\n{floor}")
    for kernel in kernels:
        say(f"{kernel:50}" + "".join(f"{us[s, kernel]:9.2f}" if (s, kernel) in us else " " * 9 for s in shapes))
    if chain:
        say(f"\nus a layer more between the in-projection and the out-projection\n{heading}\n{floor}")
        for kernel in ("without", *kernels):
            if any(kernel in times for times in chain.values()):
                say(
                    f"{kernel:50}"
                    + "".join(f"{chain[s][kernel]:9.2f}" if kernel in chain[s] else " " * 9 for s in shapes)
                )
    best: dict[str, str] = {}
    say("\nRECOMMENDED, by time between the products; columns must be one number for all shapes: it decides the bits")
    for shape in shapes:
        times = chain.get(shape) or {kernel: t for (s, kernel), t in us.items() if s == shape}
        times = {kernel: t for kernel, t in times.items() if "columns" in kernel}
        if not times:
            continue
        for settled in (True, False):
            allowed = {k: t for k, t in times.items() if settled or "early 1" in k}
            for columns in ("16 columns", "any"):
                named = {k: t for k, t in allowed.items() if columns == "any" or k.startswith(columns)}
                if named:
                    name = min(named, key=lambda k, named=named: named[k])
                    best[f"{shape} {'settled' if settled else 'not settled'} {columns}"] = name
                    kind = "settled    " if settled else "not settled"
                    say(f"  {shape:6} {kind} {columns:10} {name:46} {named[name]:7.2f} us, floor {floors[shape]:.2f}")
    return best


if __name__ == "__main__":
    sys.exit(main())
