"""A linear layer of any stored format: y = x Wᵀ, several matrices that share an input side by side.

Source: torch.nn.Linear without bias; formats in formats.table. Activations are never quantized.

On a GPU a matrix is repacked once, at load, into the order in which `linear.cu` streams it (`linear_repack`); its bytes
stay as many. How a value is summed depends on N, K and the format alone, never on the number of rows: K is cut into
`split * slices` equal slices, summed in 32-column steps, and the slices are added in order. Codes are exact in bf16;
float32 scales multiply sums, so up to MAX_ROWS rows differ from the reference by the order of sums only. More rows
(prefill) go through the library with each weight rounded once to bf16.

Matrices of two formats that share an input, as an FP8 release has them, are one launch too (`linear_join`).
"""

import logging
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from stepfloor.formats.codec import PackedWeight, quantize, stack_rows
from stepfloor.kernels._jit import Launch, compile_cuda, default_cache_dir, device_arch, missing_for_cuda, runs_triton
from stepfloor.kernels._product import packed_product
from stepfloor.kernels._stream import (
    CODINGS,
    SHARED_LIMIT,
    SHARED_LIMIT_OF_TWO,
    STEP_COLUMNS,
    WARPS,
    StreamPlan,
    dense_launch,
    dense_matrix,
    largest_divisor,
    outer_scales,
    pack_tape,
    say_once,
    shared_limit,
    unpack_tape,
    why_not_streamed,
)
from stepfloor.kernels._torch import product

logger = logging.getLogger(__name__)

MAX_ROWS = 80  # rows of one streamed product; more go through the library
KEEP_STEPS = 10  # steps of x a warp can hold in registers: 2560 columns over 8 warps
# Whether small matrices have the share kernel at 9 to 80 rows. It is right on the host, and its parts were on an H200,
# bit for bit and faster (benchmarks/linear-h200.md); as a whole it has not run on a GPU. Until then, spread and ring.
SHARE = False


@dataclass(frozen=True, slots=True)
class Variant:
    """A kernel for a range of row counts; all variants of a plan give a row the same bits.

    tiles        tiles of x rows; tall  whether a tile has 16 rows or 8
    stage_steps  steps of a stage of the group, spread and share kernels, 0 for the ring
    stages       of them in shared memory, of the share kernel in registers
    together     passes that a warp of the spread kernel takes at a time, 0 for the others; buffers  of its sums
    clusters     of the spread and share kernels, 0 for as many as the plan's multiprocessors hold
    warpgroups   of the share kernel, 64 weight rows of a cluster each; 0 for the others
    """

    tiles: int
    tall: bool
    stage_steps: int = 0
    stages: int = 0
    together: int = 0
    buffers: int = 1
    clusters: int = 0
    warpgroups: int = 0

    @property
    def form(self) -> int:
        """The FORM of `linear.cu`: 0 ring, 1 group, 2 spread, 3 share."""
        return 3 if self.warpgroups else 2 if self.together else int(self.stage_steps > 0)

    @property
    def across_blocks(self) -> bool:
        """Whether the slices of a value lie in the eight blocks of a cluster: spread and share."""
        return self.form >= 2

    @property
    def max_rows(self) -> int:
        """Rows one launch takes."""
        return self.tiles * (16 if self.tall else 8)


@dataclass(frozen=True, slots=True, eq=False)
class StreamedWeight:
    """A matrix [N, K] in the order `linear.cu` reads it. Make it with `linear_repack`.

    scales  float32, those that multiply sums, as `_stream.outer_scales` gives them; None where the format has none
    """

    plan: StreamPlan
    tape: Tensor
    cache_dir: Path
    scales: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Logical (N, K)."""
        return self.plan.n, self.plan.k

    @property
    def num_bytes(self) -> int:
        """Bytes on the device."""
        return self.tape.numel() + (0 if self.scales is None else 4 * self.scales.numel())

    def unpack(self) -> PackedWeight:
        """The matrix as it was stored, copied; scales of 16-bit floats come back as float32."""
        return unpack_tape(self.tape, self.plan, self.scales)

    def dense(self) -> Tensor:
        """bf16 [N, K], each weight rounded once: a temporary for the library."""
        if self.tape.is_cuda:
            return dense_matrix(self.tape, self.plan, self.scales, self.cache_dir)
        return self.unpack().dequantize().to(torch.bfloat16)


@dataclass(frozen=True, slots=True, eq=False)
class StreamedPair:
    """Two matrices of different formats that share an input, for `linear_pair.cu`. Make it with `linear_join`.

    first   its columns of the output lie together; before  rows of `second` whose columns precede them
    """

    first: StreamedWeight
    second: StreamedWeight
    before: int

    @property
    def shape(self) -> tuple[int, int]:
        """Logical (N, K) of both."""
        return self.first.shape[0] + self.second.shape[0], self.first.shape[1]

    @property
    def num_bytes(self) -> int:
        """Bytes on the device."""
        return self.first.num_bytes + self.second.num_bytes

    @property
    def plans(self) -> "PairPlan":
        """How both are cut."""
        return PairPlan(self.first.plan, self.second.plan, self.before)


@dataclass(frozen=True, slots=True)
class PairPlan:
    """What `linear_pair.cu` is specialised for."""

    first: StreamPlan
    second: StreamPlan
    before: int

    @property
    def blocks(self) -> int:
        """Blocks of the grid."""
        return self.first.blocks + self.second.blocks


def linear_reference(x: Tensor, weights: Sequence[PackedWeight]) -> Tensor:
    """float32 products of the dequantized weights, rounded once to the dtype of x."""
    return product(x, weights)


def linear(x: Tensor, weights: Sequence[PackedWeight | StreamedWeight | StreamedPair]) -> Tensor:
    """Project rows through one or more matrices that share their input.

    x        [T, K]
    weights  matrices [N_i, K], each in its own format; streamed ones on the device of x
    Returns [T, sum of N_i] in the dtype of x. Raises ValueError if a K disagrees.
    """
    if any(w.shape[1] != x.shape[-1] for w in weights):
        raise ValueError(
            f"linear wants x [T, K] and weights [N, K]; got {tuple(x.shape)}, {[w.shape for w in weights]}"
        )
    plain = packed_product if runs_triton(x) else linear_reference
    stored = [w for w in weights if isinstance(w, PackedWeight)]
    if len(stored) == len(weights):
        return plain(x, stored)
    rows = x.reshape(-1, x.shape[-1])
    out = x.new_empty((rows.shape[0], sum(w.shape[0] for w in weights)))
    for w, columns in zip(weights, out.split([w.shape[0] for w in weights], 1), strict=True):
        if isinstance(w, PackedWeight):
            columns.copy_(plain(rows, (w,)))
        elif isinstance(w, StreamedWeight):
            _multiply(rows, w, columns)
        else:
            _multiply_pair(rows, w, columns)
    return out.reshape(*x.shape[:-1], out.shape[1])


def _multiply(rows: Tensor, weight: StreamedWeight, out: Tensor) -> None:
    if rows.dtype != torch.bfloat16 or not rows.is_cuda:
        out.copy_(linear_reference(rows, (weight.unpack(),)))
    elif rows.shape[0] > MAX_ROWS:
        # prefill: the library multiplies, the copy of the matrix is a small part of so many rows
        torch.mm(rows, weight.dense().T, out=out)
    elif rows.shape[0] > 0:
        stream_product(rows, weight, out)


def _multiply_pair(rows: Tensor, pair: StreamedPair, out: Tensor) -> None:
    before, end = pair.before, pair.before + pair.first.shape[0]
    streamed = rows.dtype == torch.bfloat16 and rows.is_cuda and 0 < rows.shape[0] <= MAX_ROWS
    if streamed and (before or pair_variant(pair.plans, rows.shape[0]).max_rows >= rows.shape[0]):
        pair_product(rows, pair, out)
        return
    # many rows of a large matrix have forms that the pair has not
    _multiply(rows, pair.first, out[:, before:end])
    if before == 0:
        _multiply(rows, pair.second, out[:, end:])
    else:
        apart = rows.new_empty((rows.shape[0], pair.second.shape[0]))
        _multiply(rows, pair.second, apart)
        out[:, :before].copy_(apart[:, :before])
        out[:, end:].copy_(apart[:, before:])


def linear_repack(
    weight: PackedWeight, device: str | torch.device, cache_dir: Path | None = None, max_rows: int = 16
) -> PackedWeight | StreamedWeight:
    """Move a matrix to a device in the form `linear` is fastest with there; once, at load.

    cache_dir  where compiled kernels are kept; the user's cache directory where None
    max_rows   kernels for up to this many rows are loaded now; others at their first call, which no graph may be
    Returns a StreamedWeight, its decode kernels compiled, or the weight unchanged on the device; why is logged once
    for all weights with the same reason.
    """
    target = _indexed(device)
    weight = weight.to(target)
    reason = _why_not_streamed(weight, target)
    if reason is not None:
        say_once(logger, f"linear in {weight.format} stays with torch: {reason}")
        return weight
    count = torch.cuda.get_device_properties(target).multi_processor_count
    plan = plan_stream(*weight.shape, count, format_name=weight.format)
    streamed = _streamed(weight, plan, cache_dir or default_cache_dir())
    _load_kernels(streamed, max_rows)
    # kernels request weights before they wait for their predecessor, which the repacking must not be
    torch.cuda.synchronize(target)
    return streamed


def linear_join(
    weights: Sequence[PackedWeight], device: str | torch.device, cache_dir: Path | None = None, max_rows: int = 16
) -> tuple[PackedWeight | StreamedWeight | StreamedPair, ...]:
    """The same for matrices that share an input: two formats become one launch where `linear_pair.cu` takes them.

    weights  in the order of their columns; what can be stacked with its neighbour is (see `linear_repack`)
    """
    target = _indexed(device)
    if 1 < len(weights) <= 3 and target.type == "cuda":
        held = [w.to(target) for w in weights]
        pair = _pair_of(held, target, cache_dir or default_cache_dir())
        if pair is not None:
            for rows in (8, *range(16, min(max_rows, MAX_ROWS) + 16, 16)):
                pair_launch(pair.plans, pair_variant(pair.plans, rows), target, pair.first.cache_dir)
            for streamed in (pair.first, pair.second):
                _load_kernels(streamed, max_rows)
            torch.cuda.synchronize(target)
            return (pair,)
    return tuple(linear_repack(w, target, cache_dir, max_rows) for w in weights)


def _indexed(device: str | torch.device) -> torch.device:
    target = torch.device(device)
    if target.type == "cuda" and target.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return target


def _streamed(weight: PackedWeight, plan: StreamPlan, cache_dir: Path) -> StreamedWeight:
    return StreamedWeight(plan, pack_tape(weight, plan), cache_dir, outer_scales(weight))


def _load_kernels(weight: StreamedWeight, max_rows: int) -> None:
    plan, device = weight.plan, weight.tape.device
    dense_launch(plan, (1, plan.n, plan.n), device, weight.cache_dir)
    for rows in (8, *range(16, min(max_rows, MAX_ROWS) + 16, 16)):
        variant = choose_variant(plan, rows, has_warpgroups(device))
        launch_for(plan, fit_variant(plan, variant, device, weight.cache_dir), device, weight.cache_dir)


def _pair_of(weights: Sequence[PackedWeight], device: torch.device, cache_dir: Path) -> StreamedPair | None:
    """The matrices as a pair on their device, or None where they cannot be one."""
    if any(_why_not_streamed(w, device) is not None for w in weights):
        return None
    found = pair_parts(weights)
    if found is None:
        return None
    first, second, before = found
    count = torch.cuda.get_device_properties(device).multi_processor_count
    (n, k), rest = first.shape, second.shape[0]
    plans = plan_pair(n, rest, k, before, count, first.format, second.format)
    if plans is None:
        return None
    if max(pair_bytes(plans, pair_variant(plans, rows)) for rows in (8, 16, MAX_ROWS)) > shared_limit(device):
        return None
    return StreamedPair(_streamed(first, plans.first, cache_dir), _streamed(second, plans.second, cache_dir), before)


def pair_parts(weights: Sequence[PackedWeight]) -> tuple[PackedWeight, PackedWeight, int] | None:
    """What lies together, the rest, and how many rows of the rest come before; None where that is not two matrices."""
    if len(weights) == 2:
        first, second = weights
        small = first.num_bytes < second.num_bytes
        return (second, first, first.shape[0]) if small else (first, second, 0)
    try:
        above, middle, below = weights
        return middle, stack_rows((above, below)), above.shape[0]
    except ValueError:
        return None


@cache
def plan_pair(
    n: int, rest: int, k: int, before: int, multiprocessors: int, format_name: str, format_of_rest: str
) -> PairPlan | None:
    """The plans of matrices [n, k] and [rest, k]: one wave of blocks, the largest share as small as it can be.

    The second has all its rows in the accumulators of few blocks. None where one has to be split over a cluster.
    """
    best: PairPlan | None = None
    for blocks in range(1, multiprocessors):
        second = plan_stream(rest, k, blocks, format_name=format_of_rest)
        first = plan_stream(n, k, multiprocessors - second.blocks, format_name=format_name)
        if first.split > 1 or second.split > 1 or second.passes > 1:
            continue
        plans = PairPlan(first, second, before)
        if best is None or _share(plans) < _share(best):
            best = plans
    return best


def _share(plans: PairPlan) -> float:
    return max(plan.tape_bytes / plan.blocks for plan in (plans.first, plans.second))


def plan_stream(
    n: int, k: int, multiprocessors: int, split: int | None = None, format_name: str = "bf16"
) -> StreamPlan:
    """The plan of a matrix [N, K]: one wave of blocks, every warp with the same columns.

    split  blocks that share the columns; None for what measured best at this K
    The order of sums depends on K, slices, split, steps and the format: on the matrix alone.
    """
    if split is None:
        split = 4 if k >= 8192 else 1
    unit = CODINGS[format_name].unit
    total = -(-k // (STEP_COLUMNS * unit))  # units

    def suits(slices: int) -> bool:
        # a slice of fewer than 5 steps is mostly latency: then warps share rows instead. With two steps a unit, equal
        # slices may need padding: a twentieth at most.
        shares = slices * split
        return total * unit >= 5 * shares and (unit == 1 or total % shares == 0 or total >= 20 * shares)

    slices = next((s for s in (8, 4, 2) if suits(s)), 1)
    stacks = WARPS // slices
    steps = -(-total // (slices * split)) * unit
    if steps > KEEP_STEPS and largest_divisor(steps, KEEP_STEPS, unit) < 3:
        steps += -steps % 4
    rows = -(-n // (max(1, multiprocessors // split) * stacks))
    plan = StreamPlan(n, k, split, slices, stacks, rows, rows, steps, steps, 1, format_name)
    row_bytes = plan.unit_bytes(rows) / (rows * unit)  # of a step
    if rows <= 40:
        pass_rows = rows
        chunk_steps = largest_divisor(steps, max(1, int(6656 / (rows * row_bytes))), plan.grain)
    elif steps <= KEEP_STEPS:
        # some 5 KB a copy, 8 rows of 320 columns in bf16; x stays in registers
        wide = 1 if format_name == "bf16" else max(1, min(4, int(5800 / (8 * steps * row_bytes))))
        pass_rows, chunk_steps = 8 * wide, steps
    else:
        pass_rows = 32
        chunk_steps = largest_divisor(steps, max(1, int(6144 / (32 * row_bytes))), plan.grain)
    plan = replace(plan, pass_rows=pass_rows, chunk_steps=chunk_steps)
    # What streams for longer than a launch takes has a multiprocessor to itself: 120 KB on the way, all registers. One
    # H200, M=1 and 16, against two slots and room for the next kernel: gdn_in 20.8 us for 21.6 and 23.0 for 23.3, out
    # 8.2 for 8.9 and 11.0 for 13.4. Small products fit in two slots and keep the room.
    fit = 128 * 1024 // (WARPS * plan.piece_bytes)
    return replace(plan, slots=min(plan.passes * plan.chunks, max(2, fit)))


def choose_variant(plan: StreamPlan, rows: int, warpgroups: bool = True) -> Variant:
    """The kernel for this many rows of x; warpgroups: whether the GPU has what group and share need."""
    if rows <= 8:
        return Variant(1, False)
    tiles = min(-(-rows // 16), MAX_ROWS // 16)
    if warpgroups and tiles > 1 and (group := group_variant(plan, tiles)) is not None:
        return group
    if SHARE and warpgroups and (share := share_variant(plan, tiles)) is not None:
        return share
    if tiles == 1:
        return Variant(1, True)
    spread = spread_variant(plan, tiles)
    if spread is not None:
        return spread
    # scaled sums of several tiles would not fit in registers beside the others
    return Variant(tiles, True) if plan.passes == 1 and plan.format != "fp8_block" else Variant(1, True)


def pair_variant(plans: PairPlan, rows: int) -> Variant:
    """The kernel of a pair for this many rows; where it takes fewer at once, they go in turns."""
    if rows <= 8:
        return Variant(1, False)
    tiles = min(-(-rows // 16), MAX_ROWS // 16)
    whole = all(p.passes == 1 and p.format != "fp8_block" for p in (plans.first, plans.second))
    return Variant(tiles if whole else 1, True)


def has_warpgroups(device: torch.device) -> bool:
    """Whether `wgmma` exists there: compute capability 9.0 alone."""
    return torch.cuda.get_device_capability(device)[0] == 9


def group_variant(plan: StreamPlan, tiles: int) -> Variant | None:
    """The group kernel for this many tiles of x rows, or None where a block has too few weight rows for it."""
    cut = plan.split == plan.stacks == 1 and plan.pass_rows % 8 == 0 and plan.pass_rows <= 64
    if not cut or plan.rows < 64 or plan.format == "fp8_block":
        return None
    stage_steps = 2 if plan.chunk_steps % 2 == 0 else plan.coding.unit
    if plan.chunk_steps % stage_steps:
        return None
    empty = group_bytes(plan, Variant(tiles, True, stage_steps))
    stage = group_bytes(plan, Variant(tiles, True, stage_steps, 1)) - empty
    stages = min(8, (SHARED_LIMIT - empty) // stage)
    # a copying warp waits for one reading of its slot at most: it must not be two ahead
    return Variant(tiles, True, stage_steps, stages) if stages >= copying_warps(tiles) else None


def group_bytes(plan: StreamPlan, variant: Variant) -> int:
    """Shared memory of a block of the group kernel."""
    slot = variant.stage_steps // plan.coding.unit * plan.unit_bytes(plan.pass_rows)
    stage = variant.stage_steps * variant.max_rows * 64 + 128 // plan.pass_rows * slot
    return variant.stages * (stage + 16)


def spread_variant(plan: StreamPlan, tiles: int) -> Variant | None:
    """The spread kernel for this many tiles of x rows, or None where the plan does not suit it.

    Sums take up to 160 registers; shared memory holds the rows of x, the sums to exchange, and weights on the way.
    """
    widths = -(-plan.pass_rows // 8)
    if plan.split > 1 or plan.slices < WARPS or plan.format == "fp8_block" or widths * tiles > 20:
        return None
    passes = -(-plan.groups * plan.passes // spread_clusters(plan, Variant(tiles, True)))
    together = max(1, min(4 // widths, -(-passes // WARPS)))
    unit = plan.coding.unit
    for stage_steps in (2, 1) if unit == 1 and plan.chunk_steps % 2 == 0 else (unit,):
        stage_bytes = WARPS * together * stage_steps // unit * plan.unit_bytes(plan.pass_rows)
        for buffers in (2, 1) if passes > WARPS * together else (1,):
            room = SHARED_LIMIT - spread_bytes(plan, Variant(tiles, True, stage_steps, 0, together, buffers))
            if room >= max(3 * stage_bytes, 65536 if buffers == 2 else 0):
                return Variant(tiles, True, stage_steps, min(8, room // stage_bytes), together, buffers)
    return None


def share_variant(plan: StreamPlan, tiles: int, clusters: int = 0) -> Variant | None:
    """The share kernel for this many tiles of x rows, or None where a cluster has too many weight rows for it.

    clusters  0 for one fewer than the plan's multiprocessors hold: an H200 runs no more at once
    """
    if plan.split > 1 or plan.slices < WARPS or plan.format == "fp8_block":
        return None
    variant = Variant(tiles, True, clusters=clusters or max(1, plan.blocks // WARPS - 1))
    warpgroups = -(-share_rows(plan, variant) // 64)
    if warpgroups > 3:
        return None
    unit = plan.coding.unit
    stage_steps = largest_divisor(plan.steps, 2 * unit, unit)
    # registers of a lane for its two weight rows in a stage; those left beside sums, addresses and decoded weights
    taken = stage_steps * {"bf16": 8, "mxfp8": 6, "nvfp4": 3}.get(plan.format, 4)
    room = min(255, 65536 // (warpgroups * 128) // 8 * 8) - 16 * tiles - (40 if plan.format == "bf16" else 48)
    # six at most: requests wait for each other, and only behind them a block waits for its predecessor. One H200, out
    # in FP8 at 16 rows: 7.9 us, with twelve 8.7
    stages = max(1, min(6, plan.steps // stage_steps, room // taken))
    variant = replace(variant, stage_steps=stage_steps, stages=stages, warpgroups=warpgroups)
    return variant if share_bytes(plan, variant) <= SHARED_LIMIT else None


def share_rows(plan: StreamPlan, variant: Variant) -> int:
    """Weight rows of a cluster of the share kernel."""
    return -(-plan.n // spread_clusters(plan, variant))


def share_bytes(plan: StreamPlan, variant: Variant) -> int:
    """Shared memory of a block of the share kernel: x, the sums that the blocks of the cluster send, a barrier."""
    return variant.max_rows * (plan.steps * 64 + variant.warpgroups * 256) + 8


def spread_clusters(plan: StreamPlan, variant: Variant) -> int:
    """Clusters of the spread and share kernels, a block for each slice."""
    return variant.clusters or max(1, plan.blocks // WARPS)


@cache
def fit_variant(plan: StreamPlan, variant: Variant, device: torch.device, cache_dir: Path) -> Variant:
    """The variant with no more clusters than the device runs at once: a second wave takes as long as the first.

    132 multiprocessors hold 16 clusters of 8 blocks, but an H200 runs 15: those of a cluster lie in one part of it.
    """
    if not variant.across_blocks:
        return variant
    at_once = launch_for(plan, variant, device, cache_dir).clusters_at_once
    if at_once >= spread_clusters(plan, variant):
        return variant
    return with_clusters(plan, variant, max(1, at_once))


def with_clusters(plan: StreamPlan, variant: Variant, clusters: int) -> Variant:
    """The spread or share kernel with so many clusters; spread or ring where those are too few for share."""
    if variant.form == 2:
        return replace(variant, clusters=clusters)
    larger = share_variant(plan, variant.tiles, clusters)
    if larger is not None:
        return larger
    spread = spread_variant(plan, variant.tiles) if variant.tiles > 1 else None
    return Variant(1, True) if spread is None else replace(spread, clusters=clusters)


def spread_bytes(plan: StreamPlan, variant: Variant) -> int:
    """Shared memory of a block of the spread kernel."""
    unit_bytes, unit = plan.unit_bytes(plan.pass_rows), plan.coding.unit
    x = variant.tiles * 16 * plan.steps * 64
    ring = WARPS * variant.stages * variant.together * (variant.stage_steps // unit) * unit_bytes
    pitch = WARPS * variant.together * -(-plan.pass_rows // 8) * 8 + 8
    return x + ring + variant.buffers * variant.tiles * 16 * pitch * 4


def _aligned(x: Tensor) -> Tensor:
    """x itself or a copy: rows are read 16 bytes at a time."""
    return x.contiguous() if x.stride(-1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16 else x


def stream_product(x: Tensor, weight: StreamedWeight, out: Tensor, variant: Variant | None = None) -> None:
    """Queue x [T, K] times a streamed matrix into out [T, N], both bf16 on the weight's device, rows contiguous."""
    plan = weight.plan
    x = _aligned(x)
    if variant is None:
        variant = choose_variant(plan, x.shape[0], has_warpgroups(x.device))
    chosen = fit_variant(plan, variant, x.device, weight.cache_dir)
    launch = launch_for(plan, chosen, x.device, weight.cache_dir)
    for first in range(0, x.shape[0], chosen.max_rows):
        part, to = x[first : first + chosen.max_rows], out[first:]
        launch(pack_arguments(weight.tape, part, to, weight.scales))


def pack_arguments(tape: Tensor, x: Tensor, out: Tensor, scales: Tensor | None = None) -> bytes:
    """struct Arguments of `linear.cu`."""
    addresses = (tape.data_ptr(), 0 if scales is None else scales.data_ptr(), x.data_ptr(), out.data_ptr())
    return struct.pack("4Pqqi4x", *addresses, x.stride(0), out.stride(0), x.shape[0])


def pair_product(x: Tensor, pair: StreamedPair, out: Tensor, variant: Variant | None = None) -> None:
    """Queue x [T, K] times both matrices into out [T, N], as stream_product does for one."""
    x = _aligned(x)
    chosen = variant or pair_variant(pair.plans, x.shape[0])
    launch = pair_launch(pair.plans, chosen, x.device, pair.first.cache_dir)
    for first in range(0, x.shape[0], chosen.max_rows):
        launch(pair_arguments(pair, x[first : first + chosen.max_rows], out[first:]))


def pair_arguments(pair: StreamedPair, x: Tensor, out: Tensor) -> bytes:
    """struct Arguments of `linear_pair.cu`."""
    first, second = pair.first, pair.second
    return pack_arguments(first.tape, x, out[:, pair.before :], first.scales) + pack_arguments(
        second.tape, x, out, second.scales
    )


@cache
def pair_launch(plans: PairPlan, variant: Variant, device: torch.device, cache_dir: Path) -> Launch:
    """The compiled kernel, once a process."""
    cubin = compile_cuda("linear_pair.cu", pair_macros(plans, variant), device_arch(device), cache_dir)
    shared = pair_bytes(plans, variant)
    return Launch(cubin, "linear_pair_kernel", device, plans.blocks, WARPS * 32, shared)


def pair_macros(plans: PairPlan, variant: Variant) -> dict[str, int | str]:
    """The macros that specialise `linear_pair.cu`: those of `linear.cu`, one for each matrix."""
    first, second = (
        kernel_macros(plan, variant) | {"FIRST_BLOCK": block, "GAP_AT": at, "GAP": gap}
        for plan, block, at, gap in (
            (plans.first, 0, 0, 0),
            (plans.second, plans.first.blocks, plans.before, plans.first.n),
        )
    )
    macros: dict[str, int | str] = {name: f"PICK({value},{second[name]})" for name, value in first.items()}
    return macros | {"PER_SM": min(first["PER_SM"], second["PER_SM"])}


def pair_bytes(plans: PairPlan, variant: Variant) -> int:
    """Dynamic shared memory of a block of `linear_pair.cu`."""
    return max(shared_bytes(plans.first, variant), shared_bytes(plans.second, variant))


@cache
def launch_for(
    plan: StreamPlan, variant: Variant, device: torch.device, cache_dir: Path, dependent: bool = True
) -> Launch:
    """The compiled kernel, once a process: plans are few and modules are not unloaded."""
    cubin = compile_cuda("linear.cu", kernel_macros(plan, variant), device_arch(device), cache_dir)
    return Launch(
        cubin,
        "linear_kernel",
        device,
        spread_clusters(plan, variant) * WARPS if variant.across_blocks else plan.blocks,
        block_threads(variant),
        shared_bytes(plan, variant),
        cluster=WARPS if variant.across_blocks else plan.split,
        dependent=dependent,
    )


def kernel_macros(plan: StreamPlan, variant: Variant) -> dict[str, int]:
    """The macros that specialise `linear.cu`."""
    return plan.macros | {
        "SLOTS": plan.slots,
        "TILES": variant.tiles,
        "TALL": int(variant.tall),
        "BATCH": batch_steps(plan, variant),
        "FLUSH": plan.grain,
        "FORM": variant.form,
        "STAGE_STEPS": max(1, variant.stage_steps),
        "STAGES": variant.stages,
        "TOGETHER": max(1, variant.together),
        "CLUSTERS": spread_clusters(plan, variant),
        "BUFFERS": variant.buffers,
        "WARPGROUPS": variant.warpgroups,
        "PER_SM": blocks_per_multiprocessor(plan, variant),
    }


def block_threads(variant: Variant) -> int:
    """Threads of a block: the group kernel has more warps, that copy."""
    if variant.form == 3:
        return variant.warpgroups * 128
    return (WARPS + (copying_warps(variant.tiles) if variant.form == 1 else 0)) * 32


def copying_warps(tiles: int) -> int:
    """Warps of the group kernel that copy; sums of five tiles take more registers than 16 warps have."""
    return 8 if tiles <= 4 else 4


def batch_steps(plan: StreamPlan, variant: Variant) -> int:
    """Steps of x requested at once: as many as two batches and the sums leave registers for."""
    if plan.passes > 1 and plan.chunks == 1 and plan.steps <= KEEP_STEPS:
        return plan.chunk_steps
    sums = variant.tiles * -(-plan.pass_rows // 8) * (12 if plan.format == "fp8_block" else 8)
    room = (108 if blocks_per_multiprocessor(plan, variant) == 2 else 208) - sums
    registers = 8 if variant.tall else 4
    whole = variant.tiles == plan.chunks == 1
    if whole and plan.steps <= KEEP_STEPS and plan.steps * registers <= room:
        return plan.steps
    return largest_divisor(plan.chunk_steps, max(1, min(KEEP_STEPS, room // (2 * registers))), plan.grain)


def blocks_per_multiprocessor(plan: StreamPlan, variant: Variant) -> int:
    """2 where the next kernel's block fits beside this one: 128 registers a thread and half of the shared memory."""
    # NVFP4 in several passes: 128 registers spill
    narrow = variant.tiles == 1 and variant.form != 3 and not (plan.format == "nvfp4" and plan.passes > 1)
    return 2 if narrow and shared_bytes(plan, variant) <= SHARED_LIMIT_OF_TWO else 1


def shared_bytes(plan: StreamPlan, variant: Variant) -> int:
    """Dynamic shared memory of a block, as `linear.cu` lays it out."""
    if variant.form > 0:
        return (group_bytes, spread_bytes, share_bytes)[variant.form - 1](plan, variant)
    tile_rows = 16 if variant.tall else 8
    reduce_passes = 1 if plan.passes == 1 else max(1, (16 if variant.tall else 32) // plan.pass_rows)
    widths = reduce_passes * -(-plan.pass_rows // 8)
    pitch = (widths + (widths % 2 == 0)) * 8
    buffers = 2 if plan.passes > reduce_passes or variant.tiles > 1 else 1
    ring = WARPS * plan.slots * plan.piece_bytes
    sums = buffers * WARPS * tile_rows * pitch * 4
    partial = variant.tiles * tile_rows * plan.rows * plan.stacks * 4 if plan.split > 1 else 0
    table = _table_floats(plan)
    return ring + sums + partial + (table + table % 2) * 4 + WARPS * plan.slots * 8


def _table_floats(plan: StreamPlan) -> int:
    """Scales that a block of the ring kernel keeps."""
    rows = plan.rows * plan.stacks
    if plan.format == "fp8_block":
        return ((rows + 126) // 128 + 1) * -(-plan.k // 128)
    return rows if plan.format in ("fp8_channel", "fp8_tensor", "nvfp4") else 0


def _why_not_streamed(weight: PackedWeight, device: torch.device) -> str | None:
    n, k = weight.shape
    if device.type != "cuda":
        return f"{device} is no CUDA device"
    if k % 16:
        return f"K {k} is not a multiple of 16"
    missing = missing_for_cuda()
    if missing is not None:
        return missing
    if torch.cuda.get_device_capability(device)[0] < 9:
        return "the kernel needs compute capability 9.0 (bulk copies)"
    reason = why_not_streamed(weight)
    if reason is not None:
        return reason
    properties = torch.cuda.get_device_properties(device)
    plan = plan_stream(n, k, properties.multi_processor_count, format_name=weight.format)
    variants = [choose_variant(plan, rows, has_warpgroups(device)) for rows in (8, 16, 32, 48, 64, MAX_ROWS)]
    wanted = max(shared_bytes(plan, variant) for variant in variants)
    if wanted > properties.shared_memory_per_multiprocessor - 1024:  # 1 KB of every block is the system's
        return f"its kernels want {wanted} bytes of shared memory, more than {properties.name} has"
    return None


def linear_inputs(t: int, n: int, k: int, format_name: str, dtype: torch.dtype, device: str) -> dict[str, object]:
    """Inputs that the test, the tuner and the bench share."""
    make = torch.Generator(device).manual_seed(0)
    x = torch.randn(t, k, generator=make, device=device).to(dtype)
    w = torch.randn(n, k, generator=make, device=device) / k**0.5
    return {"x": x, "weights": (quantize(w, format_name),)}
