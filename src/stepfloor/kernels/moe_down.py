"""Second half of the experts: y = Σ_j w_j (h_j D_eᵀ) + shared gate * (shared hidden D_sᵀ).

Source: transformers 5.24, Qwen4ExpTextExperts and Qwen4ExpTextSparseMoeBlock. The source adds the experts in
ascending order into a bf16 sum; here each weighted product is rounded as there, but the sum runs in float32 in
order of falling weight and is rounded once, which is closer to the exact sum by up to one bf16 step an add.

On a GPU NVFP4 experts and the shared expert's bf16 matrix are repacked once, at load, into the order in which
`moe_down.cu` streams them. It keeps everything in float32, sums in the same order and rounds once.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from stepfloor.formats.codec import PackedWeight, quantize
from stepfloor.kernels._experts import (
    MAX_ROWS,
    SHARED_LIMIT_OF_TWO,
    STEP_BYTES,
    TiledExperts,
    capacities_up_to,
    capacity_for,
    contiguous_rows,
    list_bytes,
    pack_experts,
    pack_pointers,
    why_not_tiled,
)
from stepfloor.kernels._jit import Launch, compile_cuda, default_cache_dir, device_arch
from stepfloor.kernels._torch import expert_product, expert_tiles, product, sigmoid

logger = logging.getLogger(__name__)

SLICES = 2  # parts of K that are summed apart


@dataclass(frozen=True, slots=True)
class DownPlan:
    """What `moe_down.cu` is specialised for; see its macros. All plans of a weight give a row the same bits."""

    n: int
    k: int
    shared_k: int
    experts: int
    topk: int
    rows: int
    cluster: int
    tiles: int
    warps: int
    slots: int

    @property
    def steps(self) -> int:
        """64-column steps of a slice."""
        return -(-self.k // (64 * SLICES))

    @property
    def blocks(self) -> int:
        """Blocks of the grid."""
        return self.n // (16 * self.tiles) * self.cluster

    @property
    def spill(self) -> bool:
        """Whether what pairs get lies in global memory: for more rows shared memory cannot hold it."""
        return self.rows > 16

    @property
    def lines(self) -> int:
        """Sums kept apart for an output value."""
        return SLICES * self.rows * self.topk + -(-self.shared_k // 64) * self.rows

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block, as the kernel lays it out."""
        slot = self.steps * STEP_BYTES + min(self.rows, 8) * (self.steps * 128 + 64) + 8
        sums = 0 if self.spill else -(-self.tiles // self.cluster) * self.lines * 64
        factors = -(-self.rows * self.topk // 4) * 16
        return self.warps * self.slots * slot + sums + factors + list_bytes(self.experts, self.topk, self.rows)

    @property
    def per_multiprocessor(self) -> int:
        """Blocks of a multiprocessor."""
        return 2 if self.shared_bytes <= SHARED_LIMIT_OF_TWO and self.warps <= 8 else 1

    @property
    def macros(self) -> dict[str, int]:
        """The macros that specialise the kernel."""
        return {
            "N": self.n,
            "K": self.k,
            "SHARED_K": self.shared_k,
            "EXPERTS": self.experts,
            "TOPK": self.topk,
            "STEPS": self.steps,
            "CLUSTER": self.cluster,
            "TILES": self.tiles,
            "WARPS": self.warps,
            "SLOTS": self.slots,
            "ROWS": self.rows,
            "SPILL": int(self.spill),
            "PER_SM": self.per_multiprocessor,
            "LIST_BYTES": list_bytes(self.experts, self.topk, self.rows),
        }


@dataclass(frozen=True, slots=True, eq=False)
class TiledShared:
    """The shared expert's bf16 matrix [N, K] as `moe_down.cu` reads it: [tile of 16 rows][64 columns][2 KB]."""

    shape: tuple[int, int]
    tape: Tensor

    def unpack(self) -> PackedWeight:
        """The matrix as it was stored, copied."""
        n, k = self.shape
        cut = self.tape.reshape(n // 16, -1, 2, 2, 8, 4, 8).permute(0, 2, 4, 1, 3, 5, 6)
        return PackedWeight("bf16", self.shape, cut.reshape(n, -1)[:, :k].contiguous())


def pack_shared(weight: PackedWeight) -> TiledShared:
    """Reorder the shared expert's matrix: a lane's 8 columns are 16 bytes, and a warp's 512 bytes lie together."""
    n, k = weight.shape
    padded = F.pad(weight.data, (0, -k % 64)).reshape(n // 16, 2, 8, -1, 2, 4, 8)  # tile, half, g, step, sub, t, 8
    return TiledShared(weight.shape, padded.permute(0, 3, 1, 4, 2, 5, 6).contiguous())


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
    Returns [T, D] in the dtype of hidden. Raises ValueError if the shapes disagree.
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
    fused = _fused(shared_down)
    if isinstance(down, TiledExperts) and hidden.is_cuda and hidden.dtype == torch.bfloat16:
        if fused is not None:
            return down_rows(hidden, ids, weights, down, (shared_hidden, shared_gate, fused))
        return down_rows(hidden, ids, weights, down, None) + shared_gate * product(shared_hidden, _stored(shared_down))
    stored = down.unpack() if isinstance(down, TiledExperts) else down
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
        logger.info("experts [%d, %d] %s stay with torch: %s", *down.shape, down.format, reason)
        return down.to(target), tuple(w.to(target) for w in shared_down)
    if target.index is None:
        target = torch.device(target.type, torch.cuda.current_device())
    tiled = pack_experts(down.to(target), SLICES, False, cache_dir or default_cache_dir())
    shared: tuple[PackedWeight | TiledShared, ...] = tuple(w.to(target) for w in shared_down)
    if len(shared_down) == 1 and shared_down[0].format == "bf16" and shared_down[0].shape[1] % 16 == 0:
        shared = (pack_shared(shared_down[0].to(target)),)
    fused = _fused(shared)
    shared_k = 0 if fused is None else fused.shape[1]
    count = torch.cuda.get_device_properties(target).multi_processor_count
    for rows in capacities_up_to(max_rows):
        down_launch(plan_down(tiled, shared_k, topk, rows, count), target, tiled.cache_dir)
    torch.cuda.synchronize(target)
    return tiled, shared


def plan_down(
    down: TiledExperts, shared_k: int, topk: int, rows: int, multiprocessors: int, cluster: int = 4, warps: int = 8
) -> DownPlan:
    """The kernel for this many rows: one wave of clusters, every cluster with the same tiles."""
    n, k = down.shape
    capacity = capacity_for(rows)
    total = n // 16
    blocks = multiprocessors * (2 if cluster == 8 else 1)
    tiles = next(d for d in range(-(-total // max(1, blocks // cluster)), total + 1) if total % d == 0)
    return DownPlan(
        n, k, shared_k, down.tape.shape[0], topk, capacity, cluster, tiles, warps, 3 if capacity <= 4 else 2
    )


def down_rows(
    hidden: Tensor,
    ids: Tensor,
    weights: Tensor,
    down: TiledExperts,
    shared: tuple[Tensor, Tensor, TiledShared] | None,
    plan: DownPlan | None = None,
) -> Tensor:
    """Queue the kernel for hidden [T, topk, I] bf16; shared is the shared expert's hidden rows, gate and matrix."""
    count, topk = ids.shape
    hidden, ids, weights = hidden.contiguous(), ids.contiguous(), weights.contiguous()
    if shared is not None:
        shared = contiguous_rows(shared[0]), shared[1].contiguous(), shared[2]
    out = hidden.new_empty((count, down.shape[0]))
    if plan is None:
        multiprocessors = torch.cuda.get_device_properties(hidden.device).multi_processor_count
        shared_k = 0 if shared is None else shared[2].shape[1]
        plan = plan_down(down, shared_k, topk, min(count, MAX_ROWS), multiprocessors)
    launch = down_launch(plan, hidden.device, down.cache_dir)
    spilled = down_scratch(plan, hidden.device)
    for first in range(0, count, plan.rows):
        part = slice(first, first + plan.rows)
        few = None if shared is None else (shared[0][part], shared[1][part], shared[2])
        launch(down_arguments(hidden[part], ids[part], weights[part], down, few, spilled, out[part]))
    return out


def down_scratch(plan: DownPlan, device: torch.device) -> Tensor | None:
    """Room for sums that shared memory cannot hold, or None."""
    return torch.empty((plan.lines, plan.n), device=device) if plan.spill else None


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
    rows, gate, tape = (None, None, None) if shared is None else (shared[0], shared[1], shared[2].tape)
    tensors = (down.tape, hidden, ids, weights, down.scale, tape, rows, gate, spilled, out)
    return pack_pointers(tensors, (0 if rows is None else rows.stride(0), out.stride(0)), hidden.shape[0])


@cache
def down_launch(plan: DownPlan, device: torch.device, cache_dir: Path, dependent: bool = True) -> Launch:
    """The compiled kernel, once a process."""
    cubin = compile_cuda("moe_down.cu", plan.macros, device_arch(device), cache_dir)
    name, threads = "moe_down_kernel", plan.warps * 32
    return Launch(
        cubin, name, device, plan.blocks, threads, plan.shared_bytes, cluster=plan.cluster, dependent=dependent
    )


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
