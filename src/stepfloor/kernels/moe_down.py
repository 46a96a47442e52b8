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
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from stepfloor.formats.codec import PackedWeight, quantize
from stepfloor.kernels._down_many import SLICES, ManyDownPlan, many_launch, plan_many
from stepfloor.kernels._experts import (
    FORMATS,
    MAX_ROWS,
    SHARED_LIMIT_OF_TWO,
    TiledExperts,
    capacities_up_to,
    capacity_for,
    contiguous_rows,
    fp8_lanes,
    fp8_values,
    list_bytes,
    pack_experts,
    pack_pointers,
    piece_bytes,
    why_not_tiled,
)
from stepfloor.kernels._grouped import (
    DECODE_ROWS,
    WIDE,
    Groups,
    Stack,
    Tiles,
    chunk_of,
    expert_of,
    expert_products,
    group_pairs,
    most_tiles,
    pairs_before,
    pairs_led,
    pairs_of_tile,
    stack_of,
    stacks,
    why_not_grouped,
)
from stepfloor.kernels._jit import (
    Launch,
    compile_cuda,
    default_cache_dir,
    dependent_launch,
    device_arch,
    runs_triton,
    start,
    tl,
    triton,
)
from stepfloor.kernels._stream import MX_BIAS, mx_exponents, outer_scales, say_once, why_not_streamed
from stepfloor.kernels._torch import expert_product, expert_tiles, product, sigmoid

logger = logging.getLogger(__name__)

FEW_ROWS = 8  # that moe_down.cu serves, and moe_down_many.cu more
# One H200, bf16: 13.8 us at 1 row of 10 experts, 38.3 at 4 of 37; with 128 columns of K a step 15.2 and 44.1.
DECODE = Tiles(16, 128, 64, 4, 4)
PREFILL = Tiles(128, 128, 64, 8, 3)
# SHARED_FORMAT of `moe_down.cu`; rows and columns that share a float32 scale, 0 for all columns
SHARED_FORMATS = {
    "bf16": (0, 1, 0),
    "fp8_channel": (1, 1, 0),
    "fp8_tensor": (1, 1, 0),
    "fp8_block": (1, 128, 128),
    "mxfp8": (2, 1, 0),
}
STREAMED_ROWS = 4 * MAX_ROWS  # as for moe_gate_up: beyond, tiled experts are decoded to bf16


def shared_macros(format_name: str, k: int) -> tuple[int, int, int]:
    """SHARED_FORMAT, SCALE_ROWS and SCALE_COLUMNS for a shared expert's matrix of k columns."""
    number, rows, columns = SHARED_FORMATS[format_name]
    return number, rows, columns or max(1, k)


@dataclass(frozen=True, slots=True)
class DownPlan:
    """What `moe_down.cu` is specialised for; see its macros. All plans of a weight give a row the same bits.

    clusters  of the grid; they share the tiles of 16 rows as evenly as they can
    group    most pairs of an entry of the list; their rows have a place beside every piece of weights
    sharers  warps that share a tile: 1, or 2 with a slice of the columns each
    shared_format  of the shared expert's matrix; format  of the experts'
    """

    n: int
    k: int
    shared_k: int
    experts: int
    topk: int
    rows: int
    cluster: int
    clusters: int
    warps: int
    slots: int
    group: int
    sharers: int = 1
    shared_format: str = "bf16"
    format: str = "nvfp4"

    @property
    def steps(self) -> int:
        """64-column steps of a slice."""
        return -(-self.k // (64 * SLICES))

    @property
    def blocks(self) -> int:
        """Blocks of the grid."""
        return self.clusters * self.cluster

    @property
    def tiles(self) -> int:
        """Tiles of a cluster at most."""
        return -(-self.n // (16 * self.clusters))

    @property
    def spill(self) -> bool:
        """Whether what pairs get lies in global memory: for more rows shared memory cannot hold it."""
        return self.rows > 16

    @property
    def lines(self) -> int:
        """Sums kept apart for an output value."""
        return self.sharers * self.rows * self.topk + -(-self.shared_k // 64) * self.rows

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block, as the kernel lays it out."""
        halves = SLICES // self.sharers
        rows = self.group * (halves * self.steps * 128 + 64)
        slot = halves * piece_bytes(self.format, self.steps) + rows + 8
        sums = 0 if self.spill else -(-self.tiles // self.cluster) * self.lines * 64
        factors = -(-self.rows * self.topk // 4) * 16
        experts = list_bytes(self.experts, self.topk, self.rows, self.group)
        return self.warps * self.slots * slot + sums + factors + experts

    @property
    def per_multiprocessor(self) -> int:
        """Blocks of a multiprocessor."""
        return 2 if self.shared_bytes <= SHARED_LIMIT_OF_TWO and self.warps <= 8 else 1

    @property
    def macros(self) -> dict[str, int]:
        """The macros that specialise the kernel."""
        number, scale_rows, scale_columns = shared_macros(self.shared_format, self.shared_k)
        return {
            "N": self.n,
            "K": self.k,
            "SHARED_K": self.shared_k,
            "SHARED_FORMAT": number,
            "SCALE_ROWS": scale_rows,
            "SCALE_COLUMNS": scale_columns,
            "EXPERTS": self.experts,
            "TOPK": self.topk,
            "EXPERT_FORMAT": FORMATS[self.format],
            "STEPS": self.steps,
            "SHARERS": self.sharers,
            "CLUSTER": self.cluster,
            "CLUSTERS": self.clusters,
            "WARPS": self.warps,
            "SLOTS": self.slots,
            "ROWS": self.rows,
            "GROUP": self.group,
            "SPILL": int(self.spill),
            "PER_SM": self.per_multiprocessor,
            "LIST_BYTES": list_bytes(self.experts, self.topk, self.rows, self.group),
        }


@dataclass(frozen=True, slots=True, eq=False)
class TiledShared:
    """The shared expert's matrix [N, K] as `moe_down.cu` reads it: [tile of 16 rows][64 columns][codes, then scales].

    tape   codes are 2 KB in bf16, 1 KB in FP8; MXFP8 has 32 bytes of powers behind them
    scale  float32 scales that multiply sums, as `_stream.outer_scales` gives them; None where the format has none
    """

    shape: tuple[int, int]
    tape: Tensor
    format: str = "bf16"
    scale: Tensor | None = None

    def unpack(self) -> PackedWeight:
        """The matrix as it was stored, copied; scales of 16-bit floats come back as float32."""
        n, k = self.shape
        if self.format == "bf16":
            cut = self.tape.reshape(n // 16, -1, 2, 2, 8, 4, 8).permute(0, 2, 4, 1, 3, 5, 6)
            return PackedWeight("bf16", self.shape, cut.reshape(n, -1)[:, :k].contiguous())
        cut = self.tape[..., :1024].reshape(n // 16, -1, 2, 8, 4, 2, 8).permute(0, 2, 3, 1, 5, 4, 6)
        data = fp8_values(cut.reshape(n, -1))[:, :k].contiguous().view(torch.float8_e4m3fn)
        scale = self.scale
        if self.format == "mxfp8":
            powers = self.tape[..., 1024:].reshape(n // 16, -1, 8, 2, 2).permute(0, 3, 2, 1, 4)
            scale = powers.reshape(n, -1)[:, : k // 32] - MX_BIAS
        elif self.format == "fp8_tensor" and scale is not None:
            scale = scale[:1]
        return PackedWeight(self.format, self.shape, data, scale)


def pack_shared(weight: PackedWeight) -> TiledShared:
    """Reorder the shared expert's matrix: a lane's 8 columns lie together, and so do a warp's 512 bytes."""
    n, k = weight.shape
    if weight.format == "bf16":
        padded = F.pad(weight.data, (0, -k % 64)).reshape(n // 16, 2, 8, -1, 2, 4, 8)  # tile, half, g, step, sub, t, 8
        return TiledShared(weight.shape, padded.permute(0, 3, 1, 4, 2, 5, 6).contiguous())
    lanes = fp8_lanes(F.pad(weight.data.view(torch.uint8), (0, -k % 64))).reshape(n // 16, 2, 8, -1, 2, 4, 8)
    tape = lanes.permute(0, 3, 1, 2, 5, 4, 6).reshape(n // 16, -1, 1024)
    if weight.format == "mxfp8":
        powers = F.pad((mx_exponents(weight) + MX_BIAS).to(torch.uint8), (0, -(k // 32) % 2))
        powers = powers.reshape(n // 16, 2, 8, -1, 2).permute(0, 3, 2, 1, 4)  # tile, step, g, half, sub
        tape = torch.cat((tape, powers.reshape(n // 16, -1, 32)), -1)
    return TiledShared(weight.shape, tape.contiguous(), weight.format, outer_scales(weight))


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
            return routed + shared_gate * _shared_products(shared_hidden, _stored(shared_down))
        return down_grouped(hidden, ids, weights, down, shared_hidden, shared_gate, _stored(shared_down))
    stored = down.unpack() if isinstance(down, TiledExperts) else down
    if on_gpu and _why_the_reference(has_triton, why_not_grouped(stored)) is None:
        return down_grouped(hidden, ids, weights, stored, shared_hidden, shared_gate, _stored(shared_down))
    return moe_down_reference(hidden, ids, weights, stored, shared_hidden, shared_gate, _stored(shared_down))


@cache
def _why_the_reference(has_triton: bool, reason: str | None) -> str | None:
    """Why a GPU runs the reference, said once."""
    reason = reason if has_triton else "Triton is not installed"
    if reason is not None:
        logger.info("moe_down runs its reference: %s", reason)
    return reason


def down_grouped(
    hidden: Tensor,
    ids: Tensor,
    weights: Tensor,
    down: PackedWeight | TiledExperts,
    shared_hidden: Tensor,
    shared_gate: Tensor,
    shared_down: Sequence[PackedWeight],
    tiles: Tiles | None = None,
    ordered: bool | None = None,
) -> Tensor:
    """Queue the Triton kernels: products of pairs and of the shared expert, then their sum.

    tiles    how the first is cut; ordered  whether pairs are sorted first. None: as suits the number of rows
    """
    count, topk, width = hidden.shape
    x = hidden.reshape(count * topk, width)
    x = x if x.stride(-1) == 1 else x.contiguous()
    ids = ids.contiguous()
    if ordered is None:
        ordered = count > DECODE_ROWS or isinstance(down, TiledExperts)
    experts = down.data.shape[0] if isinstance(down, PackedWeight) else down.tape.shape[0]
    products = hidden.new_empty((count * topk, down.shape[0]))
    shared: _Shared | None = None
    if len(shared_down) == 1 and why_not_grouped(shared_down[0]) is None:
        shared = _Shared(shared_hidden, stack_of(shared_down[0]), hidden.new_empty((count, down.shape[0])))
    shared_products = _shared_products(shared_hidden, shared_down) if shared is None else shared.out
    groups: Groups | None = None
    for first, stack in stacks(down):
        wide = stack.wide(x) or (shared is not None and shared.stack.wide(x))
        cut = (tiles or (WIDE if wide else PREFILL if ordered else DECODE)).fit(*stack.shape)
        if ordered and groups is None:
            groups = group_pairs(ids, experts, cut.rows)
        _queue_products(x, ids, first, experts, stack, groups, cut, products, shared if first == 0 else None)
    return _queue_sum(products, weights, shared_gate, shared_products)


def _shared_products(x: Tensor, matrices: Sequence[PackedWeight]) -> Tensor:
    """Rows of the shared expert times its matrices, side by side."""
    reasons = [why_not_grouped(w) for w in matrices]
    if not runs_triton(x) or any(reasons):
        return product(x, matrices)
    columns = []
    for w in matrices:
        shared = _Shared(x, stack_of(w), x.new_empty((x.shape[0], w.shape[0])))
        cut = PREFILL if x.shape[0] > DECODE_ROWS else DECODE
        cut = (WIDE if shared.stack.wide(x) else cut).fit(*w.shape)
        # no pairs: the shared expert's programs alone
        _queue_products(x, x.new_empty((0, 1), dtype=torch.int64), 0, 1, shared.stack, None, cut, shared.out, shared)
        columns.append(shared.out)
    return columns[0] if len(columns) == 1 else torch.cat(columns, -1)


@dataclass(frozen=True, slots=True, eq=False)
class _Shared:
    """The shared expert's rows, matrix and products."""

    x: Tensor
    stack: Stack
    out: Tensor


def _queue_products(
    x: Tensor,
    ids: Tensor,
    first: int,
    experts: int,
    stack: Stack,
    groups: Groups | None,
    cut: Tiles,
    out: Tensor,
    shared: _Shared | None,
) -> None:
    pairs = ids.numel()
    number = pairs if groups is None else most_tiles(pairs, stack.count, cut.rows)
    order, pair_starts, tile_starts, tile_experts = (
        (None, None, None, None)
        if groups is None
        else (groups.order, groups.pair_starts, groups.tile_starts, groups.tile_experts)
    )
    last = None if shared is None else shared.stack
    rows = 0 if shared is None else shared.x.shape[0]
    constants = stack.constants(x)
    _products_kernel[(triton.cdiv(stack.shape[0], cut.columns), number + triton.cdiv(rows, cut.rows))](
        x,
        x.stride(0),
        out,
        ids,
        order,
        pair_starts,
        tile_starts,
        tile_experts,
        stack.data,
        stack.scale,
        stack.factor,
        None if shared is None else shared.x,
        0 if shared is None else shared.x.stride(0),
        None if shared is None else shared.out,
        None if last is None else last.data,
        None if last is None else last.scale,
        None if last is None else last.factor,
        pairs,
        first,
        number,
        rows,
        EXPERTS=experts,
        HELD=stack.count,
        ORDERED=groups is not None,
        **constants,
        SHARED_K=0 if last is None else last.shape[1],
        SHARED_CODES="plain" if last is None else last.codes,
        SHARED_SCALING="none" if last is None else last.scaling,
        SHARED_WIDE=constants["WIDE"] if last is None else last.wide(x),
        BLOCK_M=cut.rows,
        BLOCK_N=cut.columns,
        BLOCK_K=cut.depth,
        CHUNK=chunk_of(pairs),
        num_warps=cut.warps,
        num_stages=cut.stages,
        **dependent_launch(x),
    )


@triton.jit(do_not_specialize=["pairs", "first", "groups", "shared_rows"])
def _products_kernel(
    x_ptr,
    x_stride,
    out_ptr,
    ids_ptr,
    order_ptr,
    pair_starts_ptr,
    tile_starts_ptr,
    tile_experts_ptr,
    data_ptr,
    scale_ptr,
    factor_ptr,
    shared_x_ptr,
    shared_x_stride,
    shared_out_ptr,
    shared_data_ptr,
    shared_scale_ptr,
    shared_factor_ptr,
    pairs,
    first,
    groups,
    shared_rows,
    EXPERTS: tl.constexpr,
    HELD: tl.constexpr,
    ORDERED: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    CODES: tl.constexpr,
    SCALING: tl.constexpr,
    WIDE: tl.constexpr,
    NATIVE: tl.constexpr,
    SHARED_K: tl.constexpr,
    SHARED_CODES: tl.constexpr,
    SHARED_SCALING: tl.constexpr,
    SHARED_WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    start(PDL)
    group = tl.program_id(1)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    if SHARED_K > 0:  # noqa: SIM102 - the first is the compiler's, the second the program's
        if group >= groups:
            row = (group - groups) * BLOCK_M + tl.arange(0, BLOCK_M)
            sums, _ = expert_products(
                shared_x_ptr,
                shared_x_stride,
                row,
                row < shared_rows,
                shared_data_ptr,
                shared_scale_ptr,
                shared_factor_ptr,
                tl.full((), 0, tl.int32),
                n,
                N,
                SHARED_K,
                SHARED_CODES,
                SHARED_SCALING,
                SHARED_WIDE,
                NATIVE,
                BLOCK_M,
                BLOCK_N,
                BLOCK_K,
                False,
            )
            at = row.to(tl.int64)[None, :] * N + n[:, None]
            live = (row < shared_rows)[None, :] & (n[:, None] < N)
            tl.store(shared_out_ptr + at, sums.to(shared_out_ptr.dtype.element_ty), mask=live)
            return
    if ORDERED:
        tile = tl.load(tile_starts_ptr + first) + group
        if tile >= tl.load(tile_starts_ptr + first + HELD):
            return
        expert = tl.load(tile_experts_ptr + tile)
        pair, live = pairs_of_tile(order_ptr, pair_starts_ptr, tile_starts_ptr, expert, tile, BLOCK_M)
    else:
        expert = expert_of(ids_ptr, group, EXPERTS)
        if pairs_before(ids_ptr, group, expert, EXPERTS, CHUNK) % BLOCK_M != 0:
            return
        pair, live = pairs_led(ids_ptr, group, pairs, expert, EXPERTS, BLOCK_M, CHUNK)
    sums, _ = expert_products(
        x_ptr,
        x_stride,
        pair,
        live,
        data_ptr,
        scale_ptr,
        factor_ptr,
        expert - first,
        n,
        N,
        K,
        CODES,
        SCALING,
        WIDE,
        NATIVE,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
        False,
    )
    at = pair.to(tl.int64)[None, :] * N + n[:, None]
    tl.store(out_ptr + at, sums.to(out_ptr.dtype.element_ty), mask=live[None, :] & (n[:, None] < N))


def _queue_sum(products: Tensor, weights: Tensor, shared_gate: Tensor, shared_products: Tensor) -> Tensor:
    count, n = shared_products.shape
    weights, shared_gate = weights.contiguous(), shared_gate.contiguous()
    out = torch.empty_like(shared_products)
    block = max(16, min(1024, triton.next_power_of_2(n)))
    _sum_kernel[(count, triton.cdiv(n, block))](
        products,
        weights,
        shared_gate,
        shared_products,
        out,
        N=n,
        TOPK=weights.shape[1],
        BLOCK_N=block,
        **dependent_launch(products),
    )
    return out


@triton.jit
def _sum_kernel(
    products_ptr,
    weights_ptr,
    gate_ptr,
    shared_ptr,
    out_ptr,
    N: tl.constexpr,
    TOPK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    start(PDL)
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    live = n < N
    dtype = out_ptr.dtype.element_ty
    total = tl.zeros((BLOCK_N,), tl.float32)
    for j in range(TOPK):
        value = tl.load(products_ptr + (row * TOPK + j) * N + n, mask=live, other=0.0).to(tl.float32)
        weighted = value * tl.load(weights_ptr + row * TOPK + j).to(tl.float32)
        total += weighted.to(dtype).to(tl.float32)
    shared = tl.load(shared_ptr + row * N + n, mask=live, other=0.0).to(tl.float32)
    gated = (tl.load(gate_ptr + row).to(tl.float32) * shared).to(dtype).to(tl.float32)
    tl.store(out_ptr + row * N + n, (total.to(dtype).to(tl.float32) + gated).to(dtype), mask=live)


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
    apart = _why_not_fused(shared_down)
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


def plan_for(down: TiledExperts, shared: TiledShared | None, topk: int, rows: int, multiprocessors: int) -> DownPlan:
    """plan_down beside a shared expert's matrix, or none."""
    if shared is None:
        return plan_down(down, 0, topk, rows, multiprocessors)
    return replace(plan_down(down, shared.shape[1], topk, rows, multiprocessors), shared_format=shared.format)


def plan_down(
    down: TiledExperts,
    shared_k: int,
    topk: int,
    rows: int,
    multiprocessors: int,
    cluster: int | None = None,
    warps: int | None = None,
) -> DownPlan:
    """The kernel for this many rows: one wave of clusters with as many tiles each, two blocks a multiprocessor.

    cluster  blocks of one; warps  of a block. None: as suits the number of rows
    A warp takes both slices of a tile, which halves its copies, list lookups and sums. Entries of the list are short
    (see plan_gate_up). On an H200 15.1 us at 4 rows and 39 experts, 42.7 at 16 and 138; 32 clusters of 8 took 17.4 and
    56.4, since it runs 30 at once.
    Up to 2 rows a block has a tile to itself. With 6 warps of two pieces, at one row, it lies beside two blocks of
    gate/up and has its weights when they end; 8 warps find no registers there. From the product of the router's matrix
    on 21.3 us for 23.0 at one row, 30.9 for 32.3 at two, but 44.6 for 43.8 at four (H200).
    FP8 has pieces of nearly twice the size: a warp takes one slice, which is as large as both in NVFP4, and at one row
    8.2 us with one piece for 9.0 with two.
    """
    n, k = down.shape
    capacity = capacity_for(rows)
    wide = down.format != "nvfp4"
    cluster = cluster or (1 if capacity <= 2 and not wide else 4)
    warps = warps or (6 if capacity == 1 and not wide else 8)
    total = n // 16
    clusters = -(-total // -(-total // max(1, 2 * multiprocessors // cluster)))
    experts = down.tape.shape[0]
    slots, sharers = (1, 2) if wide else (2, 1) if capacity == 1 else (1, 1)
    group = min(capacity, 4) if capacity <= 8 else 2 if capacity <= 16 else 3
    plan = DownPlan(n, k, shared_k, experts, topk, capacity, cluster, clusters, warps, slots, group, sharers)
    return replace(plan, format=down.format)


@cache
def fit_down(plan: DownPlan, device: torch.device, cache_dir: Path) -> DownPlan:
    """The plan with no more clusters than the device runs at once: a second wave takes as long as the first.

    The blocks of a cluster lie in one part of the chip, and the parts differ in their number of multiprocessors.
    """
    at_once = cluster_launch(plan, device, cache_dir).clusters_at_once
    return plan if at_once >= plan.clusters else replace(plan, clusters=max(1, at_once))


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


@cache
def cluster_launch(plan: DownPlan, device: torch.device, cache_dir: Path, dependent: bool = True) -> Launch:
    """The compiled kernel of few rows, once a process."""
    cubin = compile_cuda("moe_down.cu", plan.macros, device_arch(device), cache_dir)
    name, threads = "moe_down_kernel", plan.warps * 32
    return Launch(
        cubin, name, device, plan.blocks, threads, plan.shared_bytes, cluster=plan.cluster, dependent=dependent
    )


def _fused(shared_down: Sequence[PackedWeight | TiledShared]) -> TiledShared | None:
    """The matrix that the kernel multiplies itself, if it is one."""
    first = shared_down[0] if len(shared_down) == 1 else None
    return first if isinstance(first, TiledShared) else None


def _why_not_fused(shared_down: Sequence[PackedWeight]) -> str | None:
    """What keeps the shared expert out of the kernel, as the end of a sentence; None if nothing does."""
    if len(shared_down) != 1:
        return f"the kernel takes one matrix, not {len(shared_down)}"
    if shared_down[0].format not in SHARED_FORMATS:
        return f"the kernel reads {', '.join(SHARED_FORMATS)}, not {shared_down[0].format}"
    if shared_down[0].shape[1] % 16:
        return f"its {shared_down[0].shape[1]} columns are not a multiple of 16"
    return why_not_streamed(shared_down[0])


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
