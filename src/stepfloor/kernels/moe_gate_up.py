"""First half of the routed experts: h[t, j] = silu(x G_eᵀ) * (x U_eᵀ) for each chosen expert e = ids[t, j].

Source: transformers 5.24, Qwen4ExpTextExperts.forward.

On a GPU NVFP4 and FP8 experts are repacked once, at load, into the order in which `moe_gate_up.cu` streams them; it
finds the distinct experts from the ids itself. It keeps gate and up in float32 and rounds once, where the reference
rounds gate, up, silu and the product: in bf16 the two may differ by 4 * 2**-8 of the value and what gate's rounding
does to silu.

Other formats, other sizes and older GPUs have a Triton kernel, with the reference's roundings. So have prompt chunks;
for those, tiled experts are decoded to bf16, some at a time.
"""

import logging
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from stepfloor.formats.codec import PackedWeight, quantize
from stepfloor.kernels._experts import (
    FORMATS,
    MAX_ROWS,
    SHARED_LIMIT_OF_TWO,
    TiledExperts,
    capacities_up_to,
    capacity_for,
    contiguous_rows,
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
    runs_grouped,
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
    start_in_turn,
    tl,
    triton,
)
from stepfloor.kernels._torch import expert_product, expert_tiles, silu

logger = logging.getLogger(__name__)

WARPS = 8  # that share the columns of a tile
THREADS = WARPS * 32 + 32  # of a block, and a warp that asks for weights
# One H200, bf16: 19.5 us at 1 row of 10 experts, 62.9 at 4 of 37; half as many rows of the matrix took 23.1 and 65.1.
DECODE = Tiles(16, 64, 128, 4, 3)
PREFILL = Tiles(64, 128, 64, 8, 3)
# Tiled experts of more rows are decoded to bf16, which moves 11 GB a layer; launches for 80 rows each read what they
# need of 1.4 GB. Counted, not measured: the two meet at four or five launches.
STREAMED_ROWS = 4 * MAX_ROWS


@dataclass(frozen=True, slots=True)
class GateUpPlan:
    """What `moe_gate_up.cu` is specialised for; see its macros. All plans of a weight give a row the same bits.

    slots  tiles of a block on the way
    lean   so few registers that 6 warps of moe_down fit beside two blocks and can request their weights early
    gather  whether a block holds the rows of an entry of the list, not all
    group  most pairs of an entry of the list
    format  of the experts
    """

    k: int
    channels: int
    experts: int
    topk: int
    rows: int
    gather: bool
    slots: int
    lean: bool = False
    group: int = 8
    format: str = "nvfp4"

    @property
    def steps(self) -> int:
        """64-column steps of a warp."""
        return -(-self.k // (64 * WARPS))

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block, as the kernel lays it out."""
        columns = self.group if self.gather else self.rows
        slot = WARPS * piece_bytes(self.format, self.steps)
        sums = WARPS * WARPS * 16 * (1 if columns == 1 else columns + columns % 2) * 4
        ring = self.slots * (slot + 16) + 8 + 8 * WARPS
        return ring + sums + list_bytes(self.experts, self.topk, self.rows, self.group)

    @property
    def per_multiprocessor(self) -> int:
        """Blocks of a multiprocessor."""
        return 2 if self.shared_bytes <= SHARED_LIMIT_OF_TWO else 1

    @property
    def macros(self) -> dict[str, int]:
        """The macros that specialise the kernel."""
        return {
            "K": self.k,
            "CHANNELS": self.channels,
            "EXPERTS": self.experts,
            "TOPK": self.topk,
            "EXPERT_FORMAT": FORMATS[self.format],
            "STEPS": self.steps,
            "ROWS": self.rows,
            "GROUP": self.group,
            "GATHER": int(self.gather),
            "SLOTS": self.slots,
            "PER_SM": self.per_multiprocessor,
            "BESIDE": 192 if self.lean else 0,
            "LIST_BYTES": list_bytes(self.experts, self.topk, self.rows, self.group),
        }


def moe_gate_up_reference(x: Tensor, ids: Tensor, gate_up: PackedWeight) -> Tensor:
    """Pairs sorted by expert, one product per tile of 8."""
    tiles = expert_tiles(ids, x.shape[0], per_pair=False)
    gate, up = expert_product(x, tiles, gate_up).chunk(2, -1)
    return (silu(gate) * up)[tiles.place]


def moe_gate_up(x: Tensor, ids: Tensor, gate_up: PackedWeight | TiledExperts) -> Tensor:
    """Run each row through the gate and up projections of its experts.

    x        [T, D]
    ids      [T, topk] int64, those of a row all different
    gate_up  E matrices [2 * I, D], gate rows first; tiled ones on the device of x
    Returns [T, topk, I] in the dtype of x. A row's bits do not depend on the rows beside it, nor on their number up to
    80 (tiled experts: up to 320). Raises ValueError if the shapes disagree.
    """
    if ids.shape[0] != x.shape[0] or gate_up.shape[1] != x.shape[1]:
        raise ValueError(
            f"moe_gate_up wants x [T, D], ids [T, topk], matrices [2I, D]; got "
            f"{tuple(x.shape)}, {tuple(ids.shape)}, {gate_up.shape}"
        )
    if isinstance(gate_up, TiledExperts) and x.is_cuda and x.dtype == torch.bfloat16:
        if x.shape[0] <= STREAMED_ROWS or not runs_triton(x):
            return gate_up_rows(x, ids, gate_up)
        return gate_up_grouped(x, ids, gate_up)
    stored = gate_up.unpack() if isinstance(gate_up, TiledExperts) else gate_up
    if x.is_cuda and runs_grouped("moe_gate_up", runs_triton(x), why_not_grouped(stored)):
        return gate_up_grouped(x, ids, stored)
    return moe_gate_up_reference(x, ids, stored)


def gate_up_grouped(
    x: Tensor,
    ids: Tensor,
    gate_up: PackedWeight | TiledExperts,
    tiles: Tiles | None = None,
    ordered: bool | None = None,
) -> Tensor:
    """Queue the Triton kernel, for all experts or for some after the other.

    tiles    how it is cut; ordered  whether pairs are sorted first. None: as suits the number of rows
    """
    x = x if x.stride(-1) == 1 else x.contiguous()
    ids = ids.contiguous()
    if ordered is None:
        ordered = x.shape[0] > DECODE_ROWS or isinstance(gate_up, TiledExperts)
    out = x.new_empty((*ids.shape, gate_up.shape[0] // 2))
    experts = gate_up.data.shape[0] if isinstance(gate_up, PackedWeight) else gate_up.tape.shape[0]
    groups: Groups | None = None
    for first, stack in stacks(gate_up):
        cut = tiles or (WIDE if stack.wide(x) else PREFILL if ordered else DECODE)
        cut = cut.fit(stack.shape[0] // 2, stack.shape[1])
        if ordered and groups is None:
            groups = group_pairs(ids, experts, cut.rows)
        _queue(x, ids, first, experts, stack, groups, cut, out)
    return out


def _queue(
    x: Tensor, ids: Tensor, first: int, experts: int, stack: Stack, groups: Groups | None, cut: Tiles, out: Tensor
) -> None:
    pairs, channels = ids.numel(), stack.shape[0] // 2
    number = pairs if groups is None else most_tiles(pairs, stack.count, cut.rows)
    order, pair_starts, tile_starts, tile_experts = (
        (None, None, None, None)
        if groups is None
        else (groups.order, groups.pair_starts, groups.tile_starts, groups.tile_experts)
    )
    _gate_up_kernel[(triton.cdiv(channels, cut.columns), number)](
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
        pairs,
        first,
        EXPERTS=experts,
        HELD=stack.count,
        TOPK=ids.shape[1],
        ORDERED=groups is not None,
        **stack.constants(x),
        BLOCK_M=cut.rows,
        BLOCK_N=cut.columns,
        BLOCK_K=cut.depth,
        CHUNK=chunk_of(pairs),
        num_warps=cut.warps,
        num_stages=cut.stages,
        **dependent_launch(x),
    )


@triton.jit(do_not_specialize=["pairs", "first"])
def _gate_up_kernel(
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
    pairs,
    first,
    EXPERTS: tl.constexpr,
    HELD: tl.constexpr,
    TOPK: tl.constexpr,
    ORDERED: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    CODES: tl.constexpr,
    SCALING: tl.constexpr,
    WIDE: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    # moe_down.cu may follow, and reads ids and weights before this kernel has ended
    start_in_turn(PDL)
    if ORDERED:
        tile = tl.load(tile_starts_ptr + first) + tl.program_id(1)
        if tile >= tl.load(tile_starts_ptr + first + HELD):
            return
        expert = tl.load(tile_experts_ptr + tile)
        pair, live = pairs_of_tile(order_ptr, pair_starts_ptr, tile_starts_ptr, expert, tile, BLOCK_M)
    else:
        leader = tl.program_id(1)
        expert = expert_of(ids_ptr, leader, EXPERTS)
        if pairs_before(ids_ptr, leader, expert, EXPERTS, CHUNK) % BLOCK_M != 0:
            return
        pair, live = pairs_led(ids_ptr, leader, pairs, expert, EXPERTS, BLOCK_M, CHUNK)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    gate, up = expert_products(
        x_ptr,
        x_stride,
        pair // TOPK,
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
        True,
    )
    dtype = out_ptr.dtype.element_ty
    gate = gate.to(dtype).to(tl.float32)
    half = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    hidden = half * up.to(dtype).to(tl.float32)
    at = pair.to(tl.int64)[None, :] * (N // 2) + n[:, None]
    tl.store(out_ptr + at, hidden.to(dtype), mask=live[None, :] & (n[:, None] < N // 2))


def moe_gate_up_repack(
    weight: PackedWeight, topk: int, device: str | torch.device, cache_dir: Path | None = None, max_rows: int = 16
) -> PackedWeight | TiledExperts:
    """Move gate and up projections to a device in the form `moe_gate_up` is fastest with there; once, at load.

    topk       choices of a row
    cache_dir  where compiled kernels are kept; the user's cache directory where None
    max_rows   kernels for up to this many rows are loaded now; others at their first call, which no graph may be
    Returns TiledExperts, or the weight unchanged on the device with one log line saying why.
    """
    target = torch.device(device)
    reason = why_not_tiled(weight, target)
    if reason is not None:
        logger.info("experts [%d, %d] %s are not tiled: %s", *weight.shape, weight.format, reason)
        return weight.to(target)
    if target.index is None:
        target = torch.device(target.type, torch.cuda.current_device())
    tiled = pack_experts(weight.to(target), WARPS, True, cache_dir or default_cache_dir())
    for rows in capacities_up_to(max_rows):
        gate_up_launch(plan_gate_up(tiled, topk, rows), target, tiled.cache_dir)
    torch.cuda.synchronize(target)
    return tiled


def plan_gate_up(gate_up: TiledExperts, topk: int, rows: int) -> GateUpPlan:
    """The kernel for this many rows.

    Up to 4 rows two blocks leave registers for 6 warps of moe_down, which at one row are a block; a third tile on the
    way would take the shared memory it needs. Beyond 8, of 512 experts hardly one has more than 4 of 64 rows and is
    read twice. Alone on an H200, 16 rows and 102 experts: 48.6 us with 2 tiles on the way, 50.1 with 3, 52.0 with 4,
    54.2 with entries of 2 pairs; 64 rows and 374 experts: 165.4, 169.2 with 3, 194. FP8's tiles are twice
    as large.
    """
    n, k = gate_up.shape
    capacity = capacity_for(rows)
    group, slots = {1: (1, 2), 16: (4, 2), MAX_ROWS: (4, 2)}.get(capacity, (2, 2))
    experts = gate_up.tape.shape[0]
    if gate_up.format != "nvfp4":
        group, slots = {1: (1, 2), 16: (4, 2)}.get(capacity, (2, 2))
        return GateUpPlan(k, n // 2, experts, topk, capacity, capacity > 4, slots, False, group, gate_up.format)
    return GateUpPlan(k, n // 2, experts, topk, capacity, capacity > 8, slots, capacity <= 4, group)


def gate_up_rows(x: Tensor, ids: Tensor, gate_up: TiledExperts, plan: GateUpPlan | None = None) -> Tensor:
    """Queue the kernel for x [T, D] bf16 and ids [T, topk] int64 on the weight's device."""
    x, ids = contiguous_rows(x), ids.contiguous()
    out = torch.empty((*ids.shape, gate_up.shape[0] // 2), dtype=x.dtype, device=x.device)
    chosen = plan or plan_gate_up(gate_up, ids.shape[1], min(x.shape[0], MAX_ROWS))
    launch = gate_up_launch(chosen, x.device, gate_up.cache_dir)
    for first in range(0, x.shape[0], chosen.rows):
        part = slice(first, first + chosen.rows)
        launch(gate_up_arguments(x[part], ids[part], gate_up, out[part]))
    return out


def gate_up_arguments(x: Tensor, ids: Tensor, gate_up: TiledExperts, out: Tensor) -> bytes:
    """struct Arguments of `moe_gate_up.cu`."""
    return pack_pointers((gate_up.tape, x, ids, gate_up.scale, out), (x.stride(0),), x.shape[0])


@cache
def gate_up_launch(plan: GateUpPlan, device: torch.device, cache_dir: Path, dependent: bool = True) -> Launch:
    """The compiled kernel, once a process."""
    cubin = compile_cuda("moe_gate_up.cu", plan.macros, device_arch(device), cache_dir)
    blocks = torch.cuda.get_device_properties(device).multi_processor_count * plan.per_multiprocessor
    return Launch(cubin, "moe_gate_up_kernel", device, blocks, THREADS, plan.shared_bytes, dependent=dependent)


def moe_gate_up_inputs(
    t: int, d: int, width: int, experts: int, topk: int, format_name: str, dtype: torch.dtype, device: str
) -> dict[str, object]:
    """Inputs that the test, the tuner and the bench share."""
    make = torch.Generator(device).manual_seed(0)
    scores = torch.rand(t, experts, generator=make, device=device)
    w = torch.randn(experts, 2 * width, d, generator=make, device=device) / d**0.5
    return {
        "x": torch.randn(t, d, generator=make, device=device).to(dtype),
        "ids": scores.argsort(-1)[:, :topk],
        "gate_up": quantize(w, format_name),
    }
