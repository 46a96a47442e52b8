"""Second half of the experts: y = Σ_j w_j (h_j D_eᵀ) + shared gate * (shared hidden D_sᵀ).

Source: transformers 5.24, Qwen4ExpTextExperts and Qwen4ExpTextSparseMoeBlock. The source adds the experts in
ascending order into a bf16 sum; here each weighted product is rounded as there, but the sum runs in float32 in
order of falling weight and is rounded once, which is closer to the exact sum by up to one bf16 step an add.

On a GPU NVFP4 and FP8 experts and the shared expert's bf16 or FP8 matrix are repacked once, at load, into the order in
which `moe_down.cu` streams them. It keeps everything in float32, sums in the same order and rounds once.

Other formats, other sizes and older GPUs have two Triton kernels, with the reference's roundings: the products of pairs
and of the shared expert, then their sum. So have prompt chunks; for those, tiled experts are decoded to bf16, some at a
time. A shared expert that `moe_down.cu` cannot take has its product from the first of the two.
"""

import logging
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from stepfloor.formats.codec import PackedWeight, quantize
from stepfloor.kernels._down_few import DownPlan, cluster_launch, fit_down, plan_for
from stepfloor.kernels._down_many import SLICES, ManyDownPlan, many_launch, plan_many
from stepfloor.kernels._experts import (
    MAX_ROWS,
    TiledExperts,
    capacities_up_to,
    contiguous_rows,
    pack_experts,
    pack_pointers,
    why_not_tiled,
)
from stepfloor.kernels._grouped import runs_grouped, why_not_grouped
from stepfloor.kernels._grouped_down import down_grouped, multiply_shared
from stepfloor.kernels._jit import default_cache_dir, runs_triton
from stepfloor.kernels._shared_expert import TiledShared, pack_shared, shared_macros, why_not_fused
from stepfloor.kernels._stream import say_once
from stepfloor.kernels._torch import expert_product, expert_tiles, product, sigmoid

logger = logging.getLogger(__name__)

FEW_ROWS = 8  # that moe_down.cu serves, and moe_down_many.cu more
STREAMED_ROWS = 4 * MAX_ROWS  # as for moe_gate_up: beyond, tiled experts are decoded to bf16


def moe_down_reference(
    hidden: Tensor,
    ids: Tensor,
    weights: Tensor,
    down: PackedWeight,
    shared_hidden: Tensor,
    shared_gate: Tensor,
    shared_down: Sequence[PackedWeight],
) -> Tensor:
    """Pairs sorted by expert, one product per tile of 8, the sum in the order of the choices."""
    count, topk, width = hidden.shape
    tiles = expert_tiles(ids, count * topk, per_pair=True)
    out = expert_product(hidden.reshape(-1, width), tiles, down)[tiles.place]  # [T, topk, D]
    weighted = (out * weights.unsqueeze(-1)).float()
    total = weighted[:, 0]
    for j in range(1, topk):
        total = total + weighted[:, j]
    return total.to(hidden.dtype) + shared_gate * product(shared_hidden, shared_down)


def moe_down(
    hidden: Tensor,
    ids: Tensor,
    weights: Tensor,
    down: PackedWeight | TiledExperts,
    shared_hidden: Tensor,
    shared_gate: Tensor,
    shared_down: Sequence[PackedWeight | TiledShared],
) -> Tensor:
    """Project the experts' hidden rows down, weigh and sum them, and add the shared expert.

    hidden         [T, topk, I]
    ids, weights   [T, topk] int64, those of a row all different, and the dtype of hidden
    down           E matrices [D, I]; tiled ones on the device of hidden
    shared_hidden  [T, Is]; shared_gate [T, 1]; shared_down  matrices [D, Is]
    With tiled matrices the kernel queued just before must be moe_gate_up's, or one that never lets its successor start
    early: all but hidden is read before that kernel has ended.
    Returns [T, D] in the dtype of hidden. A row's bits do not depend on the rows beside it, nor on their number up to
    80 (tiled experts: up to 320). Raises ValueError if the shapes disagree.
    """
    if ids.shape != hidden.shape[:2] or weights.shape != ids.shape or down.shape[1] != hidden.shape[2]:
        raise ValueError(
            f"moe_down wants hidden [T, topk, I], ids and weights [T, topk], matrices [D, I]; got "
            f"{tuple(hidden.shape)}, {tuple(ids.shape)}, {tuple(weights.shape)}, {down.shape}"
        )
    if (
        shared_hidden.shape[0] != hidden.shape[0]
        or shared_gate.shape != (hidden.shape[0], 1)
        or any(w.shape[1] != shared_hidden.shape[1] for w in shared_down)
        or sum(w.shape[0] for w in shared_down) != down.shape[0]
    ):
        raise ValueError(
            f"moe_down wants shared hidden [{hidden.shape[0]}, Is], shared gate [{hidden.shape[0]}, 1], matrices "
            f"[{down.shape[0]}, Is]; got {tuple(shared_hidden.shape)}, {tuple(shared_gate.shape)}, "
            f"{[w.shape for w in shared_down]}"
        )
    on_gpu, has_triton = hidden.is_cuda, runs_triton(hidden)
    if isinstance(down, TiledExperts) and on_gpu and hidden.dtype == torch.bfloat16:
        if hidden.shape[0] <= STREAMED_ROWS or not has_triton:
            fused = _fused(shared_down)
            if fused is not None:
                return down_rows(hidden, ids, weights, down, (shared_hidden, shared_gate, fused))
            # the kernel reads early what it may only read after moe_gate_up: it must come before the shared product
            routed = down_rows(hidden, ids, weights, down, None)
            return routed + shared_gate * multiply_shared(shared_hidden, _stored(shared_down))
        return down_grouped(hidden, ids, weights, down, shared_hidden, shared_gate, _stored(shared_down))
    stored = down.unpack() if isinstance(down, TiledExperts) else down
    if on_gpu and runs_grouped("moe_down", has_triton, why_not_grouped(stored)):
        return down_grouped(hidden, ids, weights, stored, shared_hidden, shared_gate, _stored(shared_down))
    return moe_down_reference(hidden, ids, weights, stored, shared_hidden, shared_gate, _stored(shared_down))


def moe_down_repack(
    down: PackedWeight,
    shared_down: Sequence[PackedWeight],
    topk: int,
    device: str | torch.device,
    cache_dir: Path | None = None,
    max_rows: int = 16,
) -> tuple[PackedWeight | TiledExperts, tuple[PackedWeight | TiledShared, ...]]:
    """Move the down projections to a device in the form `moe_down` is fastest with there; once, at load.

    topk       choices of a row
    cache_dir  where compiled kernels are kept; the user's cache directory where None
    max_rows   kernels for up to this many rows are loaded now; others at their first call, which no graph may be
    Returns both arguments of `moe_down`, each unchanged on the device, with one log line saying why, where it must be.
    """
    target = torch.device(device)
    reason = why_not_tiled(down, target)
    if reason is not None:
        logger.info("experts [%d, %d] %s are not tiled: %s", *down.shape, down.format, reason)
        return down.to(target), tuple(w.to(target) for w in shared_down)
    if target.index is None:
        target = torch.device(target.type, torch.cuda.current_device())
    tiled = pack_experts(down.to(target), SLICES, False, cache_dir or default_cache_dir())
    shared: tuple[PackedWeight | TiledShared, ...] = tuple(w.to(target) for w in shared_down)
    apart = why_not_fused(shared_down)
    if apart is None:
        shared = (pack_shared(shared_down[0].to(target)),)
    else:
        say_once(logger, f"the shared expert's product is a kernel of its own: {apart}")
    fused = _fused(shared)
    for rows in capacities_up_to(max_rows):
        down_launch(choose_down(tiled, fused, topk, rows, target), target, tiled.cache_dir)
    torch.cuda.synchronize(target)
    return tiled, shared


def choose_down(
    down: TiledExperts, shared: TiledShared | None, topk: int, rows: int, device: torch.device
) -> DownPlan | ManyDownPlan:
    """The kernel for this many rows of a device."""
    if rows > FEW_ROWS:
        if shared is None:
            return plan_many(down, 0, topk, rows)
        return plan_many(down, shared.shape[1], topk, rows, shared_macros(shared.format, shared.shape[1]))
    count = torch.cuda.get_device_properties(device).multi_processor_count
    return fit_down(plan_for(down, shared, topk, rows, count), device, down.cache_dir)


def down_rows(
    hidden: Tensor,
    ids: Tensor,
    weights: Tensor,
    down: TiledExperts,
    shared: tuple[Tensor, Tensor, TiledShared] | None,
    plan: DownPlan | ManyDownPlan | None = None,
) -> Tensor:
    """Queue the kernel for hidden [T, topk, I] bf16; shared is the shared expert's hidden rows, gate and matrix."""
    count, topk = ids.shape
    hidden, ids, weights = hidden.contiguous(), ids.contiguous(), weights.contiguous()
    if shared is not None:
        shared = contiguous_rows(shared[0]), shared[1].contiguous(), shared[2]
    out = hidden.new_empty((count, down.shape[0]))
    if plan is None:
        matrix = None if shared is None else shared[2]
        plan = choose_down(down, matrix, topk, min(count, MAX_ROWS), hidden.device)
    launch = down_launch(plan, hidden.device, down.cache_dir)
    spilled = down_scratch(plan, hidden.device)
    for first in range(0, count, plan.rows):
        part = slice(first, first + plan.rows)
        few = None if shared is None else (shared[0][part], shared[1][part], shared[2])
        launch(down_arguments(hidden[part], ids[part], weights[part], down, few, spilled, out[part]))
    return out


def down_scratch(plan: DownPlan | ManyDownPlan, device: torch.device) -> Tensor | None:
    """Room for sums that shared memory cannot hold, or None."""
    spills = isinstance(plan, ManyDownPlan) or plan.spill
    return torch.empty((plan.lines, plan.n), device=device) if spills else None


def down_arguments(
    hidden: Tensor,
    ids: Tensor,
    weights: Tensor,
    down: TiledExperts,
    shared: tuple[Tensor, Tensor, TiledShared] | None,
    spilled: Tensor | None,
    out: Tensor,
) -> bytes:
    """struct Arguments of `moe_down.cu`."""
    rows, gate, tape, scale = (
        (None, None, None, None) if shared is None else (shared[0], shared[1], shared[2].tape, shared[2].scale)
    )
    tensors = (down.tape, hidden, ids, weights, down.scale, tape, scale, rows, gate, spilled, out)
    return pack_pointers(tensors, (0 if rows is None else rows.stride(0), out.stride(0)), hidden.shape[0])


@cache
def down_launch(
    plan: DownPlan | ManyDownPlan, device: torch.device, cache_dir: Path, dependent: bool = True
) -> Callable[[bytes], None]:
    """The compiled kernel, or the two of many rows, once a process."""
    if isinstance(plan, DownPlan):
        return cluster_launch(plan, device, cache_dir, dependent)
    return many_launch(plan, device, cache_dir, dependent)


def _fused(shared_down: Sequence[PackedWeight | TiledShared]) -> TiledShared | None:
    """The matrix that the kernel multiplies itself, if it is one."""
    first = shared_down[0] if len(shared_down) == 1 else None
    return first if isinstance(first, TiledShared) else None


def _stored(shared_down: Sequence[PackedWeight | TiledShared]) -> list[PackedWeight]:
    return [w.unpack() if isinstance(w, TiledShared) else w for w in shared_down]


def moe_down_inputs(
    t: int, d: int, width: int, shared: int, experts: int, topk: int, format_name: str, dtype: torch.dtype, device: str
) -> dict[str, object]:
    """Inputs that the test, the tuner and the bench share."""
    make = torch.Generator(device).manual_seed(0)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=make, device=device)

    return {
        "hidden": rand(t, topk, width).to(dtype),
        "ids": torch.rand(t, experts, generator=make, device=device).argsort(-1)[:, :topk],
        "weights": rand(t, topk).softmax(-1).to(dtype),
        "down": quantize(rand(experts, d, width) / width**0.5, format_name),
        "shared_hidden": rand(t, shared).to(dtype),
        "shared_gate": sigmoid(rand(t, 1)).to(dtype),
        "shared_down": (quantize(rand(d, shared) / shared**0.5, "bf16"),),
    }
