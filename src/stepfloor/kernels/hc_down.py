"""Hyper-connection write, norm and down projection, the seam between two sub-layers.

    R      <- R[s] + w[s] * y                 the sub-layer before writes its output to every stream
    n       = norm of each stream of R
    low     = silu((n downᵀ) / S)
    w_next  = 2 sigmoid((n injectᵀ) / S)      how this sub-layer's output will be written

Source: transformers 5.24, Qwen4ExpTextGatedResidual.forward and the write in Qwen4ExpTextDecoderLayer.forward.
The source rounds every step to the model's dtype; so does the reference.

On a GPU the matrix is repacked once, at load (`hc_down_repack`), and two kernels of `hc_down.cu` do all of it: the
norms write R and n, the product follows. Its sums depend on the shape alone, never on the number of rows. It rounds
where the source does; its n and its sums come in another order, so it may differ from the reference by one bf16 step of
n and what that moves in the product. More rows than a decode step has, and matrices that are not repacked, go through
three: write and norms, a product, and what follows it.

Why it is cut so, at the model's sizes on an H200 (`benchmarks/hyper-connection-h200.md`):

- Two kernels. One that does everything takes 4.1 us for 3.7 at 1 row and 5.1 for 4.0 at 4, though every block makes the
  n it needs without a barrier of the cluster.
- 14 clusters of 8 with 24 weight rows, not 16 with 21: the chip has room for 15 at one block a multiprocessor, and one
  that shares its multiprocessors keeps all waiting. 64 rows take 6.8 us for 10.1 (15 clusters: 10.0, why is unknown).
- Sums are sent to the block that ends them, which waits for their bytes: with the norms 4.0 us at 4 rows and 8.6 at 64.
  With a barrier of the cluster, after which that block fetches them, 5.0 and 9.5.
- From HALVED_ROWS rows on a cluster has 16 blocks and two groups of weight rows. A block of 8 reads 1280 columns of n,
  164 KB at 64 rows, one of 16 half of that: 8.2 us for 8.6 with the norms.
- The product lets the next kernel in when it has its sums: 1 and 4 rows take 2 to 9 % less than if it did at its start
  where a linear layer follows, as in the model, and 1 to 3 % more in a chain of hyper-connections alone.
"""

import logging
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from stepfloor.formats.codec import PackedWeight, quantize
from stepfloor.kernels._jit import (
    Launch,
    compile_cuda,
    default_cache_dir,
    dependent_launch,
    device_arch,
    missing_for_cuda,
    runs_triton,
    start,
    tl,
    triton,
)
from stepfloor.kernels._product import dense_product, packed_product
from stepfloor.kernels._stream import (
    ROW_CAPACITIES,
    WARPS,
    StreamPlan,
    Turns,
    dense_launch,
    dense_matrix,
    outer_scales,
    pack_tape,
    readable,
    row_capacity,
    say_once,
    shared_limit,
    stack_all,
    turns_for,
    unpack_tape,
    why_not_streamed,
)
from stepfloor.kernels._torch import product, rms_norm, sigmoid, silu

logger = logging.getLogger(__name__)

MAX_ROWS = 80  # more rows are prefill: the library multiplies
UNIT_COLUMNS = 256  # a warp reads 8 columns a lane at a time
NORMS, PRODUCT = range(2)  # FORM of `hc_down.cu`
HALVED_ROWS = 32  # rows from which a cluster is twice as large, where the chip runs all of those at once
FORMATS = ("bf16", "fp8_channel", "fp8_tensor", "mxfp8")  # that `hc_down.cu` reads


@dataclass(frozen=True, slots=True)
class DownPlan:
    """How the matrix [N, S * D] is cut; the macros of `hc_down.cu` have these names.

    parts      blocks of a cluster for each stream
    rows       weight rows of a group, which a cluster owns
    format     of the matrix as stored
    turn_rows  rows of a block of the product at most; more go in turns, in one launch. Moves no bit
    halves     2 where, from HALVED_ROWS rows on, two blocks share a part and a cluster owns two groups. Moves no bit
    """

    n: int
    rank: int
    streams: int
    d: int
    parts: int
    rows: int
    format: str = "bf16"
    turn_rows: int = MAX_ROWS
    halves: int = 1

    def turns(self, rows: int) -> Turns:
        """How the product takes this many rows."""
        return turns_for(rows, self.turn_rows)

    def halves_of(self, capacity: int) -> int:
        """Blocks of a part, and groups of a cluster, in the kernel for so many rows of a turn."""
        return self.halves if capacity >= HALVED_ROWS else 1

    def cluster(self, capacity: int) -> int:
        """Blocks of a cluster."""
        return self.streams * self.parts * self.halves_of(capacity)

    def blocks(self, capacity: int) -> int:
        """Blocks of a turn."""
        return -(-self.stream.groups // self.halves_of(capacity)) * self.cluster(capacity)

    @property
    def stream(self) -> StreamPlan:
        """The layout of the weights."""
        columns = self.d // self.parts
        steps = columns // UNIT_COLUMNS
        split = self.streams * self.parts
        width, rows = self.streams * self.d, self.rows
        return StreamPlan(self.n, width, split, WARPS, 1, rows, rows, steps, steps, 1, self.format)


@dataclass(frozen=True, slots=True, eq=False)
class StreamedDown:
    """The down and inject rows in the order `hc_down.cu` reads them. Make it with `hc_down_repack`.

    scales  float32 [N], one for each row, where the format has them
    """

    plan: DownPlan
    tape: Tensor
    cache_dir: Path
    scales: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Logical (N, K)."""
        return self.plan.n, self.plan.streams * self.plan.d

    @property
    def num_bytes(self) -> int:
        """Bytes on the device."""
        return self.tape.numel() + (0 if self.scales is None else 4 * self.scales.numel())

    def unpack(self) -> PackedWeight:
        """The rows as they were stored, copied; scales come back as float32."""
        return unpack_tape(self.tape, self.plan.stream, self.scales)


def hc_down_reference(
    residual: Tensor,
    y: Tensor | None,
    y_weights: Tensor | None,
    norm_scale: Tensor,
    down: Sequence[PackedWeight],
    rank: int,
    streams: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The source's equations with the source's rounding."""
    if y is not None and y_weights is not None:
        residual = residual + (y.unsqueeze(-2) * y_weights.unsqueeze(-1)).flatten(-2)
    normed = rms_norm(residual, norm_scale, eps, streams)
    projected = product(normed, down) / streams
    low = silu(projected[:, :rank])
    next_weights = 2 * sigmoid(projected[:, rank:])
    return residual, normed, low, next_weights


def hc_down(
    residual: Tensor,
    y: Tensor | None,
    y_weights: Tensor | None,
    norm_scale: Tensor,
    down: Sequence[PackedWeight | StreamedDown],
    rank: int,
    streams: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Finish the write of one sub-layer and begin the read of the next.

    residual    [T, S * D] stream-major
    y           [T, D] output of the sub-layer before, or None when nothing waits to be written
    y_weights   [T, S] its write weights, None together with y
    norm_scale  [S * D] float32, 1 already added
    down        matrices [rank (+ S), S * D]: the down rows, then the inject rows (a mixer has none); or all of them
                repacked, on the device of residual
    Returns residual [T, S * D], normed [T, S * D], low [T, rank], next write weights [T, S] or [T, 0].
    Raises ValueError if the shapes disagree.
    """
    count, width = residual.shape
    rows = sum(w.shape[0] for w in down)
    written = (None if y is None else tuple(y.shape), None if y_weights is None else tuple(y_weights.shape))
    if (
        written not in ((None, None), ((count, width // streams), (count, streams)))
        or width % streams
        or norm_scale.shape != (width,)
        or rows not in (rank, rank + streams)
        or any(w.shape[1] != width for w in down)
    ):
        raise ValueError(
            f"hc_down wants residual [T, {streams} * D], y [T, D] and weights [T, {streams}] or neither, norm_scale "
            f"[{streams} * D], {rank} or {rank + streams} down rows of {streams} * D; got residual "
            f"{tuple(residual.shape)}, y {written[0]}, weights {written[1]}, norm_scale {tuple(norm_scale.shape)}, "
            f"down {[w.shape for w in down]}"
        )
    streamable = residual.is_cuda and residual.dtype == torch.bfloat16 and 0 < count <= MAX_ROWS
    if streamable and len(down) == 1 and isinstance(down[0], StreamedDown):
        return stream_down(residual, y, y_weights, norm_scale, down[0], eps)
    if runs_triton(residual):
        written, normed = launch_norms(residual, y, y_weights, norm_scale, streams, eps)
        if len(down) == 1 and isinstance(down[0], StreamedDown) and residual.dtype == torch.bfloat16:
            matrix = dense_matrix(down[0].tape, down[0].plan.stream, down[0].scales, down[0].cache_dir)
            projected = dense_product(normed, matrix)
        else:
            projected = packed_product(normed, _stored(down))
        return written, normed, *launch_activations(projected, rank, streams)
    plain = _stored(down)
    return hc_down_reference(residual, y, y_weights, norm_scale, plain, rank, streams, eps)


def _stored(down: Sequence[PackedWeight | StreamedDown]) -> list[PackedWeight]:
    return [w.unpack() if isinstance(w, StreamedDown) else w for w in down]


def hc_down_repack(
    down: Sequence[PackedWeight],
    rank: int,
    streams: int,
    device: str | torch.device,
    cache_dir: Path | None = None,
    max_rows: int = 16,
) -> tuple[PackedWeight | StreamedDown, ...]:
    """Move the down and inject rows to a device in the form `hc_down` is fastest with there; once, at load.

    cache_dir  where compiled kernels are kept; the user's cache directory where None
    max_rows   kernels for up to this many rows are loaded now; others at their first call, which no graph may be
    Returns one StreamedDown, its kernels compiled, or the weights unchanged on the device; why is logged once for all
    weights with the same reason.
    """
    target = torch.device(device)
    if target.type == "cuda" and target.index is None:
        target = torch.device("cuda", torch.cuda.current_device())
    down = tuple(w.to(target) for w in down)
    joined = stack_all(down)
    reason = joined if isinstance(joined, str) else _why_not_streamed(joined, streams, target)
    if isinstance(joined, str) or reason is not None:
        say_once(logger, f"hc_down is not repacked: {reason}")
        return down
    count = torch.cuda.get_device_properties(target).multi_processor_count
    d = joined.shape[1] // streams
    plan = plan_down(joined.shape[0], rank, streams, d, count, blocks_of_a_stream(d), joined.format, halves=2)
    plan = fit_plan(plan, shared_limit(target))
    cache_dir = cache_dir or default_cache_dir()
    if not _halves_fit(plan, target, cache_dir):
        plan = replace(plan, halves=1)
    tape = pack_tape(joined, plan.stream)
    streamed = StreamedDown(plan, tape, cache_dir, outer_scales(joined))
    dense_launch(plan.stream, (1, plan.n, plan.n), target, streamed.cache_dir)
    for turns in (plan.turns(c) for c in ROW_CAPACITIES if c <= row_capacity(max_rows)):
        for write in (True, False):
            load_norms(plan, turns, write, target, streamed.cache_dir)
        load_product(plan, turns, target, streamed.cache_dir)
    # kernels request weights before they wait for their predecessor, which the repacking must not be
    torch.cuda.synchronize(target)
    return (streamed,)


def _halves_fit(plan: DownPlan, device: torch.device, cache_dir: Path) -> bool:
    """Whether the device runs all clusters of the larger kind at once: a second wave takes as long as the first."""
    turns = plan.turns(MAX_ROWS)
    cluster = plan.cluster(turns.rows)
    if cluster > (16 if torch.cuda.get_device_capability(device)[0] == 9 else 8):
        return False
    clusters = load_product(plan, turns, device, cache_dir).clusters_at_once
    return clusters * cluster >= plan.blocks(turns.rows)


def blocks_of_a_stream(d: int) -> int:
    """Two where a stream divides so: a cluster then has twice the weight rows, and half as many read all of n."""
    return 2 if d % (2 * UNIT_COLUMNS) == 0 else 1


def plan_down(
    n: int,
    rank: int,
    streams: int,
    d: int,
    multiprocessors: int,
    parts: int,
    format_name: str = "bf16",
    halves: int = 1,
) -> DownPlan:
    """One wave of clusters. The order of sums depends on the shape and parts.

    Blocks of a cluster lie in one part of the chip, of 18 multiprocessors at most: a ninth cannot be reckoned with.
    """
    rows = -(-n // max(1, multiprocessors * 8 // (9 * streams * parts)))
    return DownPlan(n, rank, streams, d, parts, rows, format_name, halves=halves)


def fit_plan(plan: DownPlan, limit: int) -> DownPlan:
    """The plan with turns that fit in so many bytes of shared memory of a block."""
    fitting = [c for c in ROW_CAPACITIES if c <= plan.turn_rows and shared_bytes(plan, c) <= limit]
    return replace(plan, turn_rows=max(fitting, default=1))


def stream_down(
    residual: Tensor, y: Tensor | None, y_weights: Tensor | None, norm_scale: Tensor, down: StreamedDown, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queue both kernels on rows [T, S * D] bf16 of the weight's device."""
    plan = down.plan
    residual = readable(residual)
    count = residual.shape[0]
    write = y is not None and y_weights is not None
    written = torch.empty_like(residual) if write else residual
    normed = torch.empty_like(residual)
    low = residual.new_empty((count, plan.rank))
    weights = residual.new_empty((count, plan.n - plan.rank))
    inputs = (residual, None if y is None else readable(y), None if y_weights is None else readable(y_weights))
    queue_down(down, norm_scale, inputs, (written, normed, low, weights), eps)
    return written, normed, low, weights


def queue_down(
    down: StreamedDown,
    norm_scale: Tensor,
    inputs: tuple[Tensor, Tensor | None, Tensor | None],
    outputs: tuple[Tensor, Tensor, Tensor, Tensor],
    eps: float,
    dependent: bool = True,
) -> None:
    """Queue both kernels; all tensors contiguous bf16.

    norm_scale  float32, finished before the kernel before this one began: it is read before the wait
    inputs      residual, y, y_weights; outputs  as hc_down returns them; without y the first is left alone
    dependent   programmatic dependent launch
    """
    residual, y, _ = inputs
    turns = down.plan.turns(residual.shape[0])
    packed = pack_arguments(down.tape, norm_scale, *inputs, *outputs, eps, down.scales)
    load_norms(down.plan, turns, y is not None, residual.device, down.cache_dir, dependent)(packed)
    load_product(down.plan, turns, residual.device, down.cache_dir, dependent)(packed)


def pack_arguments(
    tape: Tensor,
    norm_scale: Tensor,
    residual: Tensor,
    y: Tensor | None,
    y_weights: Tensor | None,
    new_residual: Tensor,
    normed: Tensor,
    low: Tensor,
    new_weights: Tensor,
    eps: float,
    scales: Tensor | None = None,
) -> bytes:
    """struct Arguments of `hc_down.cu`."""
    tensors = (tape, scales, norm_scale, residual, y, y_weights, new_residual, normed, low, new_weights)
    return struct.pack("10Pif", *(0 if t is None else t.data_ptr() for t in tensors), residual.shape[0], eps)


@cache
def load_norms(
    plan: DownPlan, turns: Turns, write: bool, device: torch.device, cache_dir: Path, dependent: bool = True
) -> Launch:
    """The compiled norms, once a process: a block for each stream of every row that the turns have room for."""
    cubin = compile_cuda("hc_down.cu", norms_macros(plan, write), device_arch(device), cache_dir)
    blocks, warps = turns.count * turns.rows * plan.streams, plan.d // UNIT_COLUMNS
    return Launch(cubin, "hc_down_norms_kernel", device, blocks, warps * 32, warps * 4, dependent=dependent)


@cache
def load_product(plan: DownPlan, turns: Turns, device: torch.device, cache_dir: Path, dependent: bool = True) -> Launch:
    """The compiled product, once a process."""
    cubin = compile_cuda("hc_down.cu", product_macros(plan, turns.rows), device_arch(device), cache_dir)
    blocks, cluster, shared = plan.blocks(turns.rows), plan.cluster(turns.rows), shared_bytes(plan, turns.rows)
    return Launch(
        cubin,
        "hc_down_product_kernel",
        device,
        turns.count * blocks,
        WARPS * 32,
        shared,
        cluster=cluster,
        dependent=dependent,
    )


def norms_macros(plan: DownPlan, write: bool) -> dict[str, int]:
    """The macros that specialise the norms of `hc_down.cu`."""
    return {"FORM": NORMS, "STREAMS": plan.streams, "D": plan.d, "WRITE": int(write)}


def product_macros(plan: DownPlan, capacity: int) -> dict[str, int]:
    """The macros that specialise the product of `hc_down.cu` for so many rows of a turn."""
    return {
        "FORM": PRODUCT,
        "N": plan.n,
        "RANK": plan.rank,
        "STREAMS": plan.streams,
        "D": plan.d,
        "PARTS": plan.parts,
        "HALVES": plan.halves_of(capacity),
        "ROWS": plan.rows,
        "X_ROWS": capacity,
        "FORMAT": plan.stream.coding.number,
        # 2 where its sums leave room for the next kernel's block beside this one: 128 registers a thread
        "PER_SM": 2 if plan.halves_of(capacity) * plan.rows <= 48 else 1,
    }


def shared_bytes(plan: DownPlan, capacity: int) -> int:
    """Dynamic shared memory of a block of the product, as `hc_down.cu` lays it out."""
    widths = -(-plan.rows // 8)
    pitch = (widths + (widths % 2 == 0)) * 8
    cluster, row_values = plan.cluster(capacity), plan.halves_of(capacity) * plan.rows
    sums = -(-(WARPS * (plan.stream.piece_bytes + capacity * pitch * 4) + 448) // 16) * 16
    inbox = cluster * -(-capacity // cluster) * row_values * 4
    scales = row_values * 4 if plan.format in ("fp8_channel", "fp8_tensor") else 0
    return -(-(sums + inbox + scales) // 8) * 8 + (WARPS + 1) * 8


def launch_norms(
    residual: Tensor, y: Tensor | None, y_weights: Tensor | None, norm_scale: Tensor, streams: int, eps: float
) -> tuple[Tensor, Tensor]:
    """Queue the write and the norms: residual and n [T, S * D]. Without y the residual is the one given."""
    count, width = residual.shape
    d = width // streams
    write = y is not None and y_weights is not None
    residual = residual.contiguous()
    written = torch.empty_like(residual) if write else residual
    normed = torch.empty_like(residual)
    _norms_kernel[count, streams](
        residual,
        y.contiguous() if y is not None and write else None,
        y_weights.contiguous() if y_weights is not None and write else None,
        norm_scale,
        written,
        normed,
        d,
        eps,
        STREAMS=streams,
        BLOCK=triton.next_power_of_2(d),
        WRITE=write,
        **dependent_launch(residual),
    )
    return written, normed


def launch_activations(projected: Tensor, rank: int, streams: int) -> tuple[Tensor, Tensor]:
    """Queue what follows the product: projected [T, rank (+ S)] to low [T, rank] and the next write weights."""
    count, columns = projected.shape
    low, weights = projected.new_empty((count, rank)), projected.new_empty((count, columns - rank))
    block = 256
    _activations_kernel[count, -(-columns // block)](
        projected.contiguous(), low, weights, rank, columns, STREAMS=streams, BLOCK=block, **dependent_launch(projected)
    )
    return low, weights


@triton.jit
def _norms_kernel(
    residual_ptr,
    y_ptr,
    y_weights_ptr,
    scale_ptr,
    written_ptr,
    normed_ptr,
    d,
    eps,
    STREAMS: tl.constexpr,
    BLOCK: tl.constexpr,
    WRITE: tl.constexpr,
    PDL: tl.constexpr,
):
    # One program: one stream of one row.
    start(PDL)
    dtype: tl.constexpr = normed_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    stream = tl.program_id(1)
    channel = tl.arange(0, BLOCK)
    live = channel < d
    at = (row * STREAMS + stream) * d + channel
    residual = tl.load(residual_ptr + at, mask=live, other=0).to(tl.float32)
    if WRITE:
        y = tl.load(y_ptr + row * d + channel, mask=live, other=0).to(tl.float32)
        weight = tl.load(y_weights_ptr + row * STREAMS + stream).to(tl.float32)
        residual = (residual + (y * weight).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
        tl.store(written_ptr + at, residual.to(dtype), mask=live)
    rms = tl.rsqrt(tl.sum(residual * residual, 0) / d + eps)
    scale = tl.load(scale_ptr + stream * d + channel, mask=live, other=0)
    tl.store(normed_ptr + at, (residual * rms * scale).to(dtype), mask=live)


@triton.jit
def _activations_kernel(
    projected_ptr,
    low_ptr,
    weights_ptr,
    rank,
    columns,
    STREAMS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    # One program: BLOCK columns of one row.
    start(PDL)
    dtype: tl.constexpr = projected_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(projected_ptr + row * columns + column, mask=column < columns, other=0).to(tl.float32)
    value = (value / STREAMS).to(dtype).to(tl.float32)
    grown = 1.0 + tl.exp(-value)
    tl.store(low_ptr + row * rank + column, (value / grown).to(dtype), mask=column < rank)
    weight = 2.0 * (1.0 / grown).to(dtype).to(tl.float32)
    to_ptr = weights_ptr + row * (columns - rank) + column - rank
    tl.store(to_ptr, weight.to(dtype), mask=(column >= rank) & (column < columns))


def _why_not_streamed(down: PackedWeight, streams: int, device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"{device} is no CUDA device"
    if down.format not in FORMATS:
        return f"the kernel reads matrices in {', '.join(FORMATS)}, not {down.format}"
    n, width = down.shape
    if width % (streams * UNIT_COLUMNS) or streams != 4 or width > streams * 32 * UNIT_COLUMNS:  # 1024 threads a stream
        return (
            f"the kernel wants 4 streams of a multiple of {UNIT_COLUMNS} columns, {32 * UNIT_COLUMNS} at most, not "
            f"{streams} in {width}"
        )
    missing = missing_for_cuda()
    if missing is not None:
        return missing
    if torch.cuda.get_device_capability(device)[0] < 9:
        return "the kernel needs compute capability 9.0 (bulk copies, clusters)"
    reason = why_not_streamed(down)
    if reason is not None:
        return reason
    properties = torch.cuda.get_device_properties(device)
    d, count = width // streams, properties.multi_processor_count
    plan = plan_down(n, n, streams, d, count, blocks_of_a_stream(d), format_name=down.format)
    wanted = shared_bytes(plan, 16)
    if wanted > shared_limit(device):
        return f"its kernel wants {wanted} bytes of shared memory, more than {properties.name} has"
    return None


def hc_down_inputs(
    t: int, d: int, rank: int, format_name: str, dtype: torch.dtype, device: str, write: bool = True
) -> dict[str, object]:
    """Inputs that the test, the tuner and the bench share; four streams."""
    make = torch.Generator(device).manual_seed(0)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=make, device=device)

    return {
        "residual": rand(t, 4 * d).to(dtype),
        "y": rand(t, d).to(dtype) if write else None,
        "y_weights": (2 * sigmoid(rand(t, 4))).to(dtype) if write else None,
        "norm_scale": 1 + 0.1 * rand(4 * d),
        "down": (quantize(rand(rank + 4, 4 * d) / (4 * d) ** 0.5, format_name),),
        "rank": rank,
        "streams": 4,
        "eps": 1e-6,
    }
