"""A linear layer of any stored format: y = x Wᵀ, several matrices that share an input side by side.

Source: torch.nn.Linear without bias; formats in formats.table. Activations are never quantized.

On a GPU a bf16 matrix is repacked once, at load, into the order in which `linear.cu` streams it (`linear_repack`);
its bytes stay as many. How a value is summed depends on N and K alone, never on the number of rows: K is cut into
`split * slices` equal slices, summed in 32-column steps, and the slices are added in order.
"""

import logging
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from stepfloor.formats.codec import PackedWeight, quantize
from stepfloor.kernels._jit import Launch, compile_cuda, default_cache_dir, device_arch, missing_for_cuda, runs_triton
from stepfloor.kernels._product import packed_product
from stepfloor.kernels._stream import (
    SHARED_LIMIT_OF_TWO,
    STEP_BYTES,
    STEP_COLUMNS,
    WARPS,
    StreamPlan,
    largest_divisor,
    pack_tape,
    unpack_tape,
)
from stepfloor.kernels._torch import product

logger = logging.getLogger(__name__)

MAX_ROWS = 80  # rows of one streamed product; more go through the library
KEEP_STEPS = 10  # steps of x a warp can hold in registers: 2560 columns over 8 warps


@dataclass(frozen=True, slots=True)
class Variant:
    """A kernel for a range of row counts; all variants of a plan give a row the same bits.

    tiles        tiles of x rows; tall  whether a tile has 16 rows or 8
    stage_steps  steps of a stage of the panel kernel, 0 for the ring kernel; stages  stages in shared memory
    """

    tiles: int
    tall: bool
    stage_steps: int = 0
    stages: int = 0

    @property
    def max_rows(self) -> int:
        """Rows one launch takes."""
        return self.tiles * (16 if self.tall else 8)


@dataclass(frozen=True, slots=True, eq=False)
class StreamedWeight:
    """A bf16 matrix [N, K] in the order `linear.cu` reads it. Make it with `linear_repack`."""

    plan: StreamPlan
    tape: Tensor
    cache_dir: Path

    @property
    def shape(self) -> tuple[int, int]:
        """Logical (N, K)."""
        return self.plan.n, self.plan.k

    @property
    def num_bytes(self) -> int:
        """Bytes on the device."""
        return self.tape.numel()

    def unpack(self) -> PackedWeight:
        """The matrix as it was stored, copied."""
        return PackedWeight("bf16", self.shape, unpack_tape(self.tape, self.plan))


def linear_reference(x: Tensor, weights: Sequence[PackedWeight]) -> Tensor:
    """float32 products of the dequantized weights, rounded once to the dtype of x."""
    return product(x, weights)


def linear(x: Tensor, weights: Sequence[PackedWeight | StreamedWeight]) -> Tensor:
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
    if not any(isinstance(w, StreamedWeight) for w in weights):
        return plain(x, [w for w in weights if isinstance(w, PackedWeight)])
    rows = x.reshape(-1, x.shape[-1])
    out = x.new_empty((rows.shape[0], sum(w.shape[0] for w in weights)))
    at = 0
    for w in weights:
        columns = out[:, at : at + w.shape[0]]
        at += w.shape[0]
        if not isinstance(w, StreamedWeight):
            columns.copy_(plain(rows, (w,)))
        elif x.dtype != torch.bfloat16 or not x.is_cuda:
            columns.copy_(linear_reference(rows, (w.unpack(),)))
        elif rows.shape[0] > MAX_ROWS:
            # prefill: the library multiplies, the copy of the matrix is a small part of so many rows
            columns.copy_(F.linear(rows, w.unpack().data))
        else:
            stream_product(rows, w, columns)
    return out.reshape(*x.shape[:-1], out.shape[1])


def linear_repack(
    weight: PackedWeight, device: str | torch.device, cache_dir: Path | None = None, max_rows: int = 16
) -> PackedWeight | StreamedWeight:
    """Move a matrix to a device in the form `linear` is fastest with there; once, at load.

    cache_dir  where compiled kernels are kept; the user's cache directory where None
    max_rows   kernels for up to this many rows are loaded now; others at their first call, which no graph may be
    Returns a StreamedWeight, its decode kernels compiled, or the weight unchanged on the device with one log line
    saying why.
    """
    target = torch.device(device)
    reason = _why_not_streamed(weight, target)
    if reason is not None:
        logger.info("linear [%d, %d] %s stays with torch: %s", *weight.shape, weight.format, reason)
        return weight.to(target)
    if target.index is None:
        target = torch.device(target.type, torch.cuda.current_device())
    plan = plan_stream(*weight.shape, torch.cuda.get_device_properties(target).multi_processor_count)
    streamed = StreamedWeight(plan, pack_tape(weight.data.to(target), plan), cache_dir or default_cache_dir())
    for rows in (8, *range(16, min(max_rows, MAX_ROWS) + 16, 16)):
        launch_for(plan, choose_variant(plan, rows), target, streamed.cache_dir)
    # kernels request weights before they wait for their predecessor, which the repacking must not be
    torch.cuda.synchronize(target)
    return streamed


def plan_stream(n: int, k: int, multiprocessors: int, split: int | None = None) -> StreamPlan:
    """The plan of a matrix [N, K]: one wave of blocks, every warp with the same columns.

    split  blocks that share the columns; None for what measured best at this K
    The order of sums depends on K, slices, split and steps: on the shape alone.
    """
    if split is None:
        split = 4 if k >= 8192 else 1
    total = -(-k // STEP_COLUMNS)
    # a slice of fewer than 5 steps is mostly latency: then warps share rows instead
    slices = next(s for s in (8, 4, 2, 1) if total >= 5 * s * split or s == 1)
    stacks = WARPS // slices
    steps = -(-total // (slices * split))
    if steps > KEEP_STEPS and largest_divisor(steps, KEEP_STEPS) < 3:
        steps += -steps % 4
    rows = -(-n // (max(1, multiprocessors // split) * stacks))
    if rows <= 40:
        pass_rows = rows
        chunk_steps = largest_divisor(steps, max(1, 6656 // (rows * STEP_BYTES)))
    elif steps <= KEEP_STEPS:
        # 8 rows of 320 columns: 5 KB a copy, x stays in registers
        pass_rows, chunk_steps = 8, steps
    else:
        pass_rows = 32
        chunk_steps = largest_divisor(steps, 3)
    pieces = -(-rows // pass_rows) * (steps // chunk_steps)
    # What streams for longer than a launch takes has a multiprocessor to itself: 120 KB on the way, all registers. One
    # H200, M=1 and 16, against two slots and room for the next kernel: gdn_in 20.8 us for 21.6 and 23.0 for 23.3, out
    # 8.2 for 8.9 and 11.0 for 13.4. Small products fit in two slots and keep the room.
    fit = 128 * 1024 // (WARPS * pass_rows * chunk_steps * STEP_BYTES)
    slots = min(pieces, max(2, fit))
    return StreamPlan(n, k, split, slices, stacks, rows, pass_rows, steps, chunk_steps, slots)


def choose_variant(plan: StreamPlan, rows: int) -> Variant:
    """The kernel for this many rows of x."""
    if rows <= 8:
        return Variant(1, False)
    if rows <= 16:
        return Variant(1, True)
    tiles = -(-rows // 16)
    if plan.passes == 1:
        return Variant(tiles, True)
    stage_steps = panel_stage_steps(plan)
    return Variant(tiles, True, stage_steps, 3) if stage_steps else Variant(1, True)


def panel_stage_steps(plan: StreamPlan) -> int:
    """Steps of a stage of the panel kernel, 0 where the plan does not suit it."""
    suits = plan.split == plan.stacks == plan.chunks == 1 and plan.pass_rows == 8 and plan.padded_k == plan.k
    if not suits:
        return 0
    return next((s for s in (5, 3, 1) if plan.steps % s == 0), 0)


def stream_product(x: Tensor, weight: StreamedWeight, out: Tensor, variant: Variant | None = None) -> None:
    """Queue x [T, K] times a streamed matrix into out [T, N], both bf16 on the weight's device, rows contiguous."""
    plan = weight.plan
    if x.stride(-1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
        x = x.contiguous()  # rows are read 16 bytes at a time
    chosen = choose_variant(plan, x.shape[0]) if variant is None else variant
    launch = launch_for(plan, chosen, x.device, weight.cache_dir)
    for first in range(0, x.shape[0], chosen.max_rows):
        part, to = x[first : first + chosen.max_rows], out[first:]
        launch(pack_arguments(weight.tape, part, to))


def pack_arguments(tape: Tensor, x: Tensor, out: Tensor) -> bytes:
    """struct Arguments of `linear.cu`."""
    return struct.pack(
        "PPPqqi4x", tape.data_ptr(), x.data_ptr(), out.data_ptr(), x.stride(0), out.stride(0), x.shape[0]
    )


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
        plan.blocks,
        WARPS * 32,
        shared_bytes(plan, variant),
        cluster=plan.split,
        dependent=dependent,
    )


def kernel_macros(plan: StreamPlan, variant: Variant) -> dict[str, int]:
    """The macros that specialise `linear.cu`."""
    return {
        "N": plan.n,
        "K": plan.k,
        "SPLIT": plan.split,
        "SLICES": plan.slices,
        "STACKS": plan.stacks,
        "ROWS": plan.rows,
        "PASS_ROWS": plan.pass_rows,
        "STEPS": plan.steps,
        "CHUNK_STEPS": plan.chunk_steps,
        "SLOTS": plan.slots,
        "TILES": variant.tiles,
        "TALL": int(variant.tall),
        "BATCH": batch_steps(plan, variant),
        "PANEL": int(variant.stage_steps > 0),
        "STAGE_STEPS": max(1, variant.stage_steps),
        "STAGES": variant.stages,
        "PER_SM": blocks_per_multiprocessor(plan, variant),
    }


def batch_steps(plan: StreamPlan, variant: Variant) -> int:
    """Steps of x requested at once: as many as two batches and the sums leave registers for."""
    if plan.passes > 1 and plan.chunks == 1 and plan.steps <= KEEP_STEPS:
        return plan.chunk_steps
    sums = variant.tiles * -(-plan.pass_rows // 8) * 8
    room = (108 if blocks_per_multiprocessor(plan, variant) == 2 else 208) - sums
    registers = 8 if variant.tall else 4
    whole = variant.tiles == plan.chunks == 1
    if whole and plan.steps <= KEEP_STEPS and plan.steps * registers <= room:
        return plan.steps
    return largest_divisor(plan.chunk_steps, max(1, min(KEEP_STEPS, room // (2 * registers))))


def blocks_per_multiprocessor(plan: StreamPlan, variant: Variant) -> int:
    """2 where the next kernel's block fits beside this one: 128 registers a thread and half of the shared memory."""
    fits = variant.tiles == 1 and shared_bytes(plan, variant) <= SHARED_LIMIT_OF_TWO
    return 2 if fits else 1


def shared_bytes(plan: StreamPlan, variant: Variant) -> int:
    """Dynamic shared memory of a block, as `linear.cu` lays it out."""
    if variant.stage_steps:
        return variant.stages * variant.stage_steps * (2 * WARPS * 512 + variant.tiles * 16 * STEP_BYTES)
    tile_rows = 16 if variant.tall else 8
    reduce_passes = 1 if plan.passes == 1 or plan.pass_rows > 8 else 2 if variant.tall else 4
    widths = reduce_passes * -(-plan.pass_rows // 8)
    pitch = (widths + (widths % 2 == 0)) * 8
    buffers = 2 if plan.passes > reduce_passes or variant.tiles > 1 else 1
    ring = WARPS * plan.slots * plan.piece_bytes + 512
    sums = buffers * WARPS * tile_rows * pitch * 4
    partial = variant.tiles * tile_rows * plan.rows * plan.stacks * 4 if plan.split > 1 else 0
    return ring + sums + partial + WARPS * plan.slots * 8


def _why_not_streamed(weight: PackedWeight, device: torch.device) -> str | None:
    n, k = weight.shape
    if device.type != "cuda":
        return f"{device} is no CUDA device"
    if weight.format != "bf16" or weight.data.ndim != 2:
        return "the kernel reads bf16 matrices"
    if k % 16:
        return f"K {k} is not a multiple of 16"
    missing = missing_for_cuda()
    if missing is not None:
        return missing
    if torch.cuda.get_device_capability(device)[0] < 9:
        return "the kernel needs compute capability 9.0 (bulk copies)"
    properties = torch.cuda.get_device_properties(device)
    plan = plan_stream(n, k, properties.multi_processor_count)
    wanted = max(shared_bytes(plan, choose_variant(plan, rows)) for rows in (8, 16, MAX_ROWS))
    if wanted > properties.shared_memory_per_multiprocessor - 1024:  # 1 KB of every block is the system's
        return f"its kernels want {wanted} bytes of shared memory, more than {properties.name} has"
    return None


def linear_inputs(t: int, n: int, k: int, format_name: str, dtype: torch.dtype, device: str) -> dict[str, object]:
    """Inputs that the test, the tuner and the bench share."""
    make = torch.Generator(device).manual_seed(0)
    x = torch.randn(t, k, generator=make, device=device).to(dtype)
    w = torch.randn(n, k, generator=make, device=device) / k**0.5
    return {"x": x, "weights": (quantize(w, format_name),)}
