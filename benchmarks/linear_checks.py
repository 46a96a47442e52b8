"""What is wrong with the streamed products: values, bits of a row, memory around them, graphs, early starts.

Part of `benchmarks.linear`, which runs `check_family` in a process for each.
"""

import argparse
import math
import time
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.harness import (
    capture,
    multiprocessors,
    parting_runs,
    say,
    verdict,
)
from benchmarks.linear_plans import (
    ODD_SHAPES,
    QUICK_SHAPES,
    SHAPES,
    other_variants,
    plans,
    random_matrix,
    streamed,
)
from stepfloor.kernels._choose_form import group_variant, plan_stream, share_variant, spread_variant, team_variant
from stepfloor.kernels._forms import MAX_ROWS, Variant, shared_bytes
from stepfloor.kernels._stream import (
    CODINGS,
    SHARED_LIMIT,
    StreamPlan,
)
from stepfloor.kernels._stream_product import StreamedWeight, launch_for, pack_arguments, stream_product

CHECKED_ROWS = (1, 2, 3, 4, 5, 8, 15, 16, 17, 33, 64, 80)


def checked_plans(family: str, quick: bool, device: torch.device) -> list[tuple[StreamPlan, list[Variant]]]:
    """Plans that put a family to the test, each with the kernels that must agree bit for bit."""
    count = multiprocessors(device)
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
    if family.endswith("team"):
        teams = {p: [team_variant(p, team) for team in (2, 4)] for p in [*every, *odd]}
        return [
            (p, [short, tall, *(v for v in variants if v is not None)])
            for p, variants in teams.items()
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
    took = time.perf_counter() - begin
    return verdict(family, errors, f"{count} kernels, worst relative error {worst:.5f}, {took:.1f} s")


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
    worst = 0.0
    errors: list[str] = []
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
    parting = parting_runs(lambda: run(early), [out[:, : plan.n] for out in outs], wanted, outs)
    return [
        f"{variant} of {plan}: a chain of dependent products with PDL ({name}) differs from without" for name in parting
    ]
