"""Hyper-connection up projection and mix: the one vector a sub-layer reads from the residual streams.

    gate = sigmoid(low upᵀ);   x = mean over streams of gate[s] * n[s]     (normalised streams, not raw)

Source: transformers 5.24, Qwen4ExpTextGatedResidual.forward.

On a GPU the matrix is repacked once, at load (`hc_mix_repack`), so that one block of `hc_mix.cu` holds the rows of
the same channels of every stream and finishes them. Its sums depend on the shape alone, never on the number of rows.
More rows than a decode step has, and matrices that are not repacked, go through a product and one kernel for the rest.

Why it is cut so, at the model's sizes on an H200 (`benchmarks/hyper-connection-h200.md`):

- A block brings `low` to shared memory once. Read by each of its warps, the few lines of `low` are asked for a thousand
  times at once at 1 row: the first block had its sums 1.1 us after the wait, the last 2.5.
- Weights wait in registers: reading them out of shared memory, 0.2 us or more, would follow the wait for `low`.
- Blocks of 32 channels (80 of them), not of 20 (128): whole fragments of weights, whole sectors of n, fewer readers of
  `low`: 2.6 us for 2.9 at 1 row, and 64 rows in one turn (a pair 14.4 us for 14.9).
"""

import logging
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
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
    STEP_COLUMNS,
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
from stepfloor.kernels._torch import product, sigmoid

logger = logging.getLogger(__name__)

MAX_ROWS = 80  # more rows are prefill: the library multiplies
TURN_ROWS = 64
BLOCK_CHANNELS = 1024
FORMATS = ("bf16", "fp8_channel", "fp8_tensor", "mxfp8")  # that `hc_mix.cu` reads


@dataclass(frozen=True, slots=True)
class MixPlan:
    """How the matrix [S * D, rank] is cut; the macros of `hc_mix.cu` have these names.

    columns    channels of a block, even; slices  warps that share the columns of a weight row
    format     of the matrix as stored
    turn_rows  rows of a block at most; more go in turns, in one launch. Moves no bit
    """

    d: int
    streams: int
    rank: int
    columns: int
    slices: int
    format: str = "bf16"
    turn_rows: int = TURN_ROWS

    def turns(self, rows: int) -> Turns:
        """How one launch takes this many rows."""
        return turns_for(rows, self.turn_rows)

    @property
    def blocks(self) -> int:
        """Blocks of a turn."""
        return -(-self.d // self.columns)

    @property
    def stream(self) -> StreamPlan:
        """The layout of the weights, their rows in the order [block][stream][channel]."""
        stacks = WARPS // self.slices
        rows = self.columns * self.streams // stacks
        steps = self.rank // (STEP_COLUMNS * self.slices)
        n = self.blocks * self.columns * self.streams
        return StreamPlan(n, self.rank, 1, self.slices, stacks, rows, rows, steps, steps, 1, self.format)

    @property
    def order(self) -> tuple[int, int, int]:
        """How the rows of the tape are ordered, for `_stream.dense_matrix`."""
        return self.streams, self.d, self.columns


@dataclass(frozen=True, slots=True, eq=False)
class StreamedMix:
    """The up matrix in the order `hc_mix.cu` reads it. Make it with `hc_mix_repack`.

    scales  float32, one for each row of the tape, where the format has them
    """

    plan: MixPlan
    tape: Tensor
    cache_dir: Path
    scales: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Logical (N, K)."""
        return self.plan.streams * self.plan.d, self.plan.rank

    @property
    def num_bytes(self) -> int:
        """Bytes on the device."""
        return self.tape.numel() + (0 if self.scales is None else 4 * self.scales.numel())

    def unpack(self) -> PackedWeight:
        """The matrix as it was stored, copied; scales come back as float32."""
        return unpack_mix(self.tape, self.plan, self.scales)


def hc_mix_reference(low: Tensor, normed: Tensor, up: Sequence[PackedWeight], streams: int) -> Tensor:
    """The source's equations with the source's rounding."""
    gate = sigmoid(product(low, up))
    return (gate * normed).unflatten(-1, (streams, -1)).mean(-2)


def hc_mix(low: Tensor, normed: Tensor, up: Sequence[PackedWeight | StreamedMix], streams: int) -> Tensor:
    """Mix the normalised streams into a sub-layer's input.

    low     [T, rank]
    normed  [T, S * D] stream-major
    up      matrices [S * D, rank], or the one of them repacked, on the device of low
    Returns [T, D]. Raises ValueError if the shapes disagree.
    """
    if (
        low.shape[0] != normed.shape[0]
        or sum(w.shape[0] for w in up) != normed.shape[1]
        or any(w.shape[1] != low.shape[1] for w in up)
        or normed.shape[1] % streams
    ):
        raise ValueError(
            f"hc_mix wants low [T, rank], normed [T, S * D], up [S * D, rank]; got low {tuple(low.shape)}, "
            f"normed {tuple(normed.shape)}, up {[w.shape for w in up]}, {streams} streams"
        )
    streamable = low.is_cuda and low.dtype == torch.bfloat16 and 0 < low.shape[0] <= MAX_ROWS
    if streamable and len(up) == 1 and isinstance(up[0], StreamedMix):
        return stream_mix(low, normed, up[0])
    if len(up) == 1 and isinstance(up[0], StreamedMix) and runs_triton(low) and low.dtype == torch.bfloat16:
        plan = up[0].plan
        matrix = dense_matrix(up[0].tape, plan.stream, up[0].scales, up[0].cache_dir, plan.order)
        return launch_gates(dense_product(low, matrix), normed, streams)
    plain = [w.unpack() if isinstance(w, StreamedMix) else w for w in up]
    if runs_triton(low):
        return launch_gates(packed_product(low, plain), normed, streams)
    return hc_mix_reference(low, normed, plain, streams)


def hc_mix_repack(
    up: Sequence[PackedWeight],
    streams: int,
    device: str | torch.device,
    cache_dir: Path | None = None,
    max_rows: int = 16,
) -> tuple[PackedWeight | StreamedMix, ...]:
    """Move the up matrix to a device in the form `hc_mix` is fastest with there; once, at load.

    cache_dir  where compiled kernels are kept; the user's cache directory where None
    max_rows   kernels for up to this many rows are loaded now; others at their first call, which no graph may be
    Returns one StreamedMix, its kernels compiled, or the weights unchanged on the device; why is logged once for all
    weights with the same reason.
    """
    target = torch.device(device)
    if target.type == "cuda" and target.index is None:
        target = torch.device("cuda", torch.cuda.current_device())
    up = tuple(w.to(target) for w in up)
    joined = stack_all(up)
    reason = joined if isinstance(joined, str) else _why_not_streamed(joined, streams, target)
    if isinstance(joined, str) or reason is not None:
        say_once(logger, f"hc_mix is not repacked: {reason}")
        return up
    count = torch.cuda.get_device_properties(target).multi_processor_count
    plan = plan_mix(joined.shape[0] // streams, streams, joined.shape[1], count, format_name=joined.format)
    plan = fit_plan(plan, shared_limit(target))
    tape, scales = pack_mix(joined, plan)
    streamed = StreamedMix(plan, tape, cache_dir or default_cache_dir(), scales)
    dense_launch(plan.stream, plan.order, target, streamed.cache_dir)
    for rows in (c for c in ROW_CAPACITIES if c <= row_capacity(max_rows)):
        launch_for(plan, plan.turns(rows), target, streamed.cache_dir)
    # kernels request weights before they wait for their predecessor, which the repacking must not be
    torch.cuda.synchronize(target)
    return (streamed,)


def plan_mix(
    d: int, streams: int, rank: int, multiprocessors: int, slices: int = 2, format_name: str = "bf16"
) -> MixPlan:
    """One wave of blocks, of a multiple of 16 channels unless they are few. The order of sums: rank and slices."""
    columns = -(-d // multiprocessors)
    columns += -columns % (16 if columns > 8 else 2)
    return MixPlan(d, streams, rank, columns, slices, format_name)


def fit_plan(plan: MixPlan, limit: int) -> MixPlan:
    """The plan with turns that fit in so many bytes of shared memory of a block."""
    fitting = [c for c in ROW_CAPACITIES if c <= plan.turn_rows and shared_bytes(plan, c) <= limit]
    return replace(plan, turn_rows=max(fitting, default=1))


def pack_mix(up: PackedWeight, plan: MixPlan) -> tuple[Tensor, Tensor | None]:
    """A matrix [S * D, rank] to the bytes of a plan, and its rows' scales in the same order."""
    order = _rows_of_the_tape(plan, up.data.device)
    scales = outer_scales(up)
    if scales is not None:
        scales = F.pad(scales, (0, 1))[order]
    return pack_tape(up, plan.stream, order), scales


def unpack_mix(tape: Tensor, plan: MixPlan, scales: Tensor | None = None) -> PackedWeight:
    """The inverse of pack_mix."""
    whole = unpack_tape(tape, plan.stream, scales)
    order = _rows_of_the_tape(plan, tape.device)
    places = order.argsort()[: plan.streams * plan.d]  # dead rows come last
    kept = None if whole.scale is None else whole.scale if whole.format == "fp8_tensor" else whole.scale[places]
    # an index of float8 is not everywhere
    data = whole.data.view(torch.uint8)[places].view(whole.data.dtype)
    return PackedWeight(whole.format, (plan.streams * plan.d, plan.rank), data, kept)


def _rows_of_the_tape(plan: MixPlan, device: torch.device) -> Tensor:
    """Row of the matrix that lies in each row of the tape; for a dead one, the number of rows."""
    channels = torch.arange(plan.blocks * plan.columns, device=device)
    rows = torch.arange(plan.streams, device=device)[:, None] * plan.d + channels
    rows = rows.masked_fill(channels >= plan.d, plan.streams * plan.d)
    return rows.view(plan.streams, plan.blocks, plan.columns).transpose(0, 1).flatten()


def stream_mix(low: Tensor, normed: Tensor, up: StreamedMix) -> Tensor:
    """Queue the kernel on rows [T, rank] and [T, S * D], bf16, of the weight's device."""
    out = low.new_empty((low.shape[0], up.plan.d))
    queue_mix(up, readable(low), readable(normed), out)
    return out


def queue_mix(up: StreamedMix, low: Tensor, normed: Tensor, out: Tensor, dependent: bool = True) -> None:
    """Queue the kernel; all tensors contiguous bf16. dependent: programmatic dependent launch."""
    launch = launch_for(up.plan, up.plan.turns(low.shape[0]), low.device, up.cache_dir, dependent)
    launch(pack_arguments(up.tape, low, normed, out, up.scales))


def pack_arguments(tape: Tensor, low: Tensor, normed: Tensor, out: Tensor, scales: Tensor | None = None) -> bytes:
    """struct Arguments of `hc_mix.cu`."""
    addresses = (0 if t is None else t.data_ptr() for t in (tape, scales, low, normed, out))
    return struct.pack("5Pi4x", *addresses, low.shape[0])


def launch_gates(logits: Tensor, normed: Tensor, streams: int) -> Tensor:
    """Queue what follows the product: logits and normed [T, S * D], dtype of the model, to x [T, D]."""
    count, width = normed.shape
    d = width // streams
    out = normed.new_empty((count, d))
    _gates_kernel[count, -(-d // BLOCK_CHANNELS)](
        logits.contiguous(),
        normed.contiguous(),
        out,
        d,
        STREAMS=streams,
        BLOCK=BLOCK_CHANNELS,
        **dependent_launch(normed),
    )
    return out


@triton.jit
def _gates_kernel(logits_ptr, normed_ptr, out_ptr, d, STREAMS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    # One program: BLOCK channels of one row.
    start(PDL)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = channel < d
    total = tl.full((BLOCK,), 0.0, tl.float32)
    for stream in tl.static_range(STREAMS):
        at = (row * STREAMS + stream) * d + channel
        logit = tl.load(logits_ptr + at, mask=live, other=0).to(tl.float32)
        gate = (1.0 / (1.0 + tl.exp(-logit))).to(dtype).to(tl.float32)
        total += (gate * tl.load(normed_ptr + at, mask=live, other=0).to(tl.float32)).to(dtype).to(tl.float32)
    tl.store(out_ptr + row * d + channel, (total / STREAMS).to(dtype), mask=live)


@cache
def launch_for(plan: MixPlan, turns: Turns, device: torch.device, cache_dir: Path, dependent: bool = True) -> Launch:
    """The compiled kernel, once a process."""
    cubin = compile_cuda("hc_mix.cu", kernel_macros(plan, turns.rows), device_arch(device), cache_dir)
    blocks, shared = turns.count * plan.blocks, shared_bytes(plan, turns.rows)
    return Launch(cubin, "hc_mix_kernel", device, blocks, WARPS * 32, shared, dependent=dependent)


def kernel_macros(plan: MixPlan, capacity: int) -> dict[str, int]:
    """The macros that specialise `hc_mix.cu` for so many rows of a turn."""
    return {
        "D": plan.d,
        "STREAMS": plan.streams,
        "RANK": plan.rank,
        "COLUMNS": plan.columns,
        "SLICES": plan.slices,
        "FORMAT": plan.stream.coding.number,
        "X_ROWS": capacity,
        # 2: 128 registers a thread, so that the next kernel's block fits beside this one; more would spill with them
        "PER_SM": 2 if capacity <= 8 or (capacity <= 16 and plan.stream.rows <= 24) else 1,
    }


def shared_bytes(plan: MixPlan, capacity: int) -> int:
    """Dynamic shared memory of a block, as `hc_mix.cu` lays it out."""
    stream = plan.stream
    widths = -(-stream.rows // 8)
    pitch = (widths + (widths % 2 == 0)) * 8
    scales = plan.streams * plan.columns * 4 if plan.format in ("fp8_channel", "fp8_tensor") else 0
    of_warps = WARPS * max(stream.piece_bytes, capacity * pitch * 4) + 512
    low = capacity * (plan.rank * 2 + 64)
    return -(-(of_warps + low + scales) // 8) * 8 + WARPS * 8


def _why_not_streamed(up: PackedWeight, streams: int, device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"{device} is no CUDA device"
    if up.format not in FORMATS:
        return f"the kernel reads matrices in {', '.join(FORMATS)}, not {up.format}"
    width, rank = up.shape
    if streams != 4 or rank % 64 or width // streams % 2:
        return (
            f"the kernel wants 4 streams of an even width and a rank that is a multiple of 64, not {streams} in "
            f"{width} and {rank}"
        )
    missing = missing_for_cuda()
    if missing is not None:
        return missing
    if torch.cuda.get_device_capability(device)[0] < 9:
        return "the kernel needs compute capability 9.0 (bulk copies)"
    reason = why_not_streamed(up)
    if reason is not None:
        return reason
    properties = torch.cuda.get_device_properties(device)
    plan = plan_mix(width // streams, streams, rank, properties.multi_processor_count, format_name=up.format)
    wanted = shared_bytes(plan, 16)
    if wanted > shared_limit(device):
        return f"its kernel wants {wanted} bytes of shared memory, more than {properties.name} has"
    return None


def hc_mix_inputs(t: int, d: int, rank: int, format_name: str, dtype: torch.dtype, device: str) -> dict[str, object]:
    """Inputs that the test, the tuner and the bench share; four streams."""
    make = torch.Generator(device).manual_seed(0)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=make, device=device)

    return {
        "low": rand(t, rank).to(dtype),
        "normed": rand(t, 4 * d).to(dtype),
        "up": (quantize(rand(4 * d, rank) / rank**0.5, format_name),),
        "streams": 4,
    }
