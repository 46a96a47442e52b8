"""What is wrong with the routed experts' kernels for NVFP4: float64, bits of a row, chains of early starts, choices.

Part of `benchmarks.experts`, which runs `check_family` in a process for each.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.experts_plans import CHAIN_ROWS, EXPERTS, TOPK, WIDTH, D, chain_plans, down_plans, gate_up_plans
from benchmarks.grouped_experts import pair_products
from benchmarks.harness import multiprocessors, parting_runs, say, verdict
from stepfloor.formats.codec import PackedWeight
from stepfloor.kernels._down_few import DownPlan
from stepfloor.kernels._down_many import SLICES, ManyDownPlan
from stepfloor.kernels._experts import (
    MAX_ROWS,
    TiledExperts,
    pack_experts,
)
from stepfloor.kernels._shared_expert import TiledShared, pack_shared
from stepfloor.kernels._stream_product import StreamedWeight, stream_product
from stepfloor.kernels.linear import linear_repack
from stepfloor.kernels.moe_down import down_arguments, down_launch, down_rows, down_scratch
from stepfloor.kernels.moe_gate_up import (
    WARPS,
    GateUpPlan,
    gate_up_arguments,
    gate_up_launch,
    gate_up_rows,
)
from stepfloor.kernels.moe_route import moe_route, moe_route_reference

CHECKED_ROWS = (1, 2, 4, 8, 16, 64, 80)
FAMILIES = ("gate_up", "gather", "down", "spill", "chain", "route")


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
    took = time.perf_counter() - begin
    return verdict(family, errors, f"{count} kernels, largest error {worst:.2f} of its bound, {took:.1f} s")


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
    count = multiprocessors(device)

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
    count = multiprocessors(device)
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
    parting = parting_runs(lambda: run(True), outs, wanted, hidden)
    return [f"{rows} rows: a chain with PDL ({name}) differs from without" for name in parting]
