"""What streamed kernels share: how a matrix is cut into the pieces that warps copy, and the bytes in that order.

A kernel reads its weights front to back from a tape written once, at load, in the width they are stored in.
`include/stream.cuh` and `include/formats.cuh` have the device's side. Source: formats.codec for the formats.
"""

import logging
import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from stepfloor.formats.codec import PackedWeight, stack_rows
from stepfloor.kernels._experts import fp4_codes, fp4_words, fp8_lanes, fp8_values, scale_bytes, scale_values
from stepfloor.kernels._jit import Launch, compile_cuda, device_arch

WARPS = 8
STEP_COLUMNS = 32
SHARED_LIMIT = 227 * 1024
# two blocks of successive kernels fit on a multiprocessor together, so that the later one can request its weights early
SHARED_LIMIT_OF_TWO = 113 * 1024
ROW_CAPACITIES = (1, 2, 4, 8, 16, 32, 48, 64, 80)  # rows for which hc_down and hc_mix are compiled

MX_BIAS = 120  # what decoding an E4M3 code by moving bits is short of, as a power of two
# Stored exponents of MXFP8 whose products with every code are normal bf16 numbers: scales of 2**-117 to 2**7.
_MX_RANGE = (10, 134)
_FP4_REST = 128.0  # SCALE_REST of include/experts.cuh
_PART = 1 << 24  # weights recoded at a time: FP4 takes 16 bytes for each while it is


@dataclass(frozen=True, slots=True)
class Coding:
    """How kernels read a format; include/formats.cuh has the same numbers.

    number  its FORMAT macro
    unit    32-column steps stored together: `codes` bytes of each weight row, then `scales` bytes of each
    """

    number: int
    unit: int
    codes: int
    scales: int = 0


CODINGS = {
    "bf16": Coding(0, 1, 64),
    "fp8_channel": Coding(1, 1, 32),
    "fp8_tensor": Coding(1, 1, 32),
    "fp8_block": Coding(2, 1, 32),
    "mxfp8": Coding(3, 1, 32, 1),
    "nvfp4": Coding(4, 2, 32, 4),
}


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """How one matrix [N, K] is cut. See the macros of `linear.cu`, which have these names.

    split   blocks of a cluster that share the columns; slices, stacks  warps of a block that share columns, rows
    rows    weight rows of a warp; pass_rows  of them in the accumulators at once
    steps   32-column steps of a warp; chunk_steps  of them in one piece; slots  pieces a warp keeps on the way
    format  of the weights as stored, in CODINGS
    """

    n: int
    k: int
    split: int
    slices: int
    stacks: int
    rows: int
    pass_rows: int
    steps: int
    chunk_steps: int
    slots: int
    format: str = "bf16"

    @property
    def coding(self) -> Coding:
        """How its weights are read."""
        return CODINGS[self.format]

    @property
    def groups(self) -> int:
        """Blocks, or clusters of blocks, that share the rows."""
        return -(-self.n // (self.rows * self.stacks))

    @property
    def blocks(self) -> int:
        """Blocks of the grid."""
        return self.groups * self.split

    @property
    def passes(self) -> int:
        """How often the accumulators of a warp are filled."""
        return -(-self.rows // self.pass_rows)

    @property
    def last_rows(self) -> int:
        """Weight rows of the last pass."""
        return self.rows - (self.passes - 1) * self.pass_rows

    @property
    def chunks(self) -> int:
        """Pieces of a pass."""
        return self.steps // self.chunk_steps

    @property
    def padded_k(self) -> int:
        """Columns stored."""
        return self.split * self.slices * self.steps * STEP_COLUMNS

    @property
    def grain(self) -> int:
        """Steps that no piece and no batch may cut: a unit, or the steps whose sums meet one block scale together."""
        return math.gcd(self.steps, 4) if self.format == "fp8_block" else self.coding.unit

    def unit_bytes(self, rows: int) -> int:
        """Bytes of a unit of so many weight rows."""
        return rows * self.coding.codes + -(-rows * self.coding.scales // 16) * 16

    def bytes_of_piece(self, rows: int) -> int:
        """Bytes of a piece of so many weight rows."""
        return self.chunk_steps // self.coding.unit * self.unit_bytes(rows)

    @property
    def piece_bytes(self) -> int:
        """Bytes of a full piece of one warp."""
        return self.bytes_of_piece(self.pass_rows)

    @property
    def tape_bytes(self) -> int:
        """Bytes of the streamed matrix: codes and block scales of [N, K], plus the dead rows of the last block."""
        a_chunk = (self.passes - 1) * self.piece_bytes + self.bytes_of_piece(self.last_rows)
        return self.blocks * WARPS * self.chunks * a_chunk

    @property
    def macros(self) -> dict[str, int]:
        """The macros that describe the layout."""
        return {
            "N": self.n,
            "K": self.k,
            "SPLIT": self.split,
            "SLICES": self.slices,
            "STACKS": self.stacks,
            "ROWS": self.rows,
            "PASS_ROWS": self.pass_rows,
            "STEPS": self.steps,
            "CHUNK_STEPS": self.chunk_steps,
            "FORMAT": self.coding.number,
        }


# ---------------------------------------------------------------------- writing and reading tapes


def pack_tape(weight: PackedWeight, plan: StreamPlan, order: Tensor | None = None) -> Tensor:
    """A matrix in its plan's format to the bytes of the plan: [pass][chunk][block][warp][unit][codes, then scales].

    order  [plan.n] row of the matrix that lies in each row of the tape, or its number of rows for a dead one
    """
    codes, scales = _recode(weight, plan)
    if order is not None:
        codes = F.pad(codes, (0, 0, 0, 0, 0, 1))[order]
        scales = None if scales is None else F.pad(scales, (0, 0, 0, 0, 0, 1))[order]
    tape = torch.zeros(plan.tape_bytes, dtype=torch.uint8, device=codes.device)
    codes = _cut(codes.view(torch.int64), plan)  # elementwise copies of bytes would be eight times as many
    scales = None if scales is None else _cut(scales, plan)
    for piece, code_place, scale_place in _pieces(tape, plan):
        code_place.copy_(codes[piece])
        if scales is not None:
            scale_place.copy_(scales[piece])
    return tape


def unpack_tape(tape: Tensor, plan: StreamPlan, scales: Tensor | None = None) -> PackedWeight:
    """The inverse of pack_tape without an order. scales: what `outer_scales` said of the matrix."""
    p, coding = plan, plan.coding
    shape = (p.blocks * WARPS, p.steps // coding.unit, p.rows)
    codes = torch.empty((*shape, coding.codes // 8), dtype=torch.int64, device=tape.device)
    inner = torch.empty((*shape, coding.scales), dtype=torch.uint8, device=tape.device)
    for piece, code_place, scale_place in _pieces(tape, p):
        codes[piece] = code_place
        inner[piece] = scale_place
    return _as_stored(_joined(codes, p).view(torch.uint8), _joined(inner, p), p, scales)


def outer_scales(weight: PackedWeight) -> Tensor | None:
    """The float32 scales that kernels apply to sums, not to codes, or None.

    [N] for a scale of each row, of the whole matrix and NVFP4; [ceil(N / 128), ceil(K / 128)] for blocks of 128.
    """
    n = weight.shape[0]
    if weight.format in ("fp8_channel", "fp8_block") and weight.scale is not None:
        return weight.scale.float().contiguous()
    if weight.format == "fp8_tensor" and weight.scale is not None:
        return weight.scale.float().reshape(1).expand(n).contiguous()
    if weight.format == "nvfp4" and weight.scale_2 is not None:
        return (_FP4_REST * weight.scale_2.float()).reshape(1).expand(n).contiguous()
    return None


def why_not_streamed(weight: PackedWeight) -> str | None:
    """What in a matrix keeps it from the kernels, as the end of a sentence. Waits for the device: for load time."""
    if weight.format not in CODINGS or weight.data.ndim != 2:
        return f"the kernels read matrices in {', '.join(CODINGS)}"
    if weight.format in ("fp8_channel", "fp8_tensor", "fp8_block", "mxfp8"):
        parts = weight.data.view(torch.uint8).split(max(1, _PART // weight.shape[1]))
        if any(bool((part & 127 == 127).any()) for part in parts):
            return "an FP8 code is not a number"
    if weight.format == "mxfp8":
        low, high = (int(bound) for bound in torch.aminmax(mx_exponents(weight)))
        if low < _MX_RANGE[0] or high > _MX_RANGE[1]:
            return f"an MXFP8 scale is not within 2**{_MX_RANGE[0] - 127} to 2**{_MX_RANGE[1] - 127}"
    if weight.format == "nvfp4" and weight.scale is not None and not bool((weight.scale.float() >= 0).all()):
        return "a block scale is negative or not a number"
    return None


def stack_all(weights: Sequence[PackedWeight]) -> PackedWeight | str:
    """Matrices that share their columns as one, or why they cannot be, as the end of a sentence."""
    if len(weights) == 1:
        return weights[0]
    try:
        return stack_rows(weights)
    except ValueError:
        return f"{' and '.join(w.format for w in weights)} matrices cannot be stacked"


def _pieces(tape: Tensor, plan: StreamPlan) -> Iterator[tuple[tuple[slice, ...], Tensor, Tensor]]:
    """Each piece of all warps: which units and rows it has, its codes (int64) and its scales on the tape."""
    p, coding = plan, plan.coding
    at, chunk = 0, p.chunk_steps // coding.unit
    for row in range(0, p.rows, p.pass_rows):
        live = min(p.pass_rows, p.rows - row)
        size, code_bytes = p.unit_bytes(live), live * coding.codes
        for unit in range(0, p.steps // coding.unit, chunk):
            units = tape[at : at + p.blocks * WARPS * chunk * size].view(p.blocks * WARPS, chunk, size)
            at += units.numel()
            codes = units.view(torch.int64)[..., : code_bytes // 8].unflatten(-1, (live, -1))
            scales = units[..., code_bytes : code_bytes + live * coding.scales].unflatten(-1, (live, coding.scales))
            yield (slice(None), slice(unit, unit + chunk), slice(row, row + live)), codes, scales


def _cut(t: Tensor, plan: StreamPlan) -> Tensor:
    """[N, units of all columns, C] to [warps of the grid, units of a warp, rows of a warp, C], dead rows zero."""
    p = plan
    t = F.pad(t, (0, 0, 0, 0, 0, p.groups * p.rows * p.stacks - p.n))
    t = t.reshape(p.groups, p.stacks, p.rows, p.split, p.slices, p.steps // p.coding.unit, -1)
    return t.permute(0, 3, 1, 4, 5, 2, 6).reshape(p.blocks * WARPS, p.steps // p.coding.unit, p.rows, -1)


def _joined(cut: Tensor, plan: StreamPlan) -> Tensor:
    """The inverse of _cut."""
    p = plan
    cut = cut.reshape(p.groups, p.split, p.stacks, p.slices, *cut.shape[1:])
    units = p.split * p.slices * (p.steps // p.coding.unit)
    rows = p.groups * p.stacks * p.rows
    return cut.permute(0, 2, 5, 1, 3, 4, 6).reshape(rows, units, cut.shape[-1])[: p.n].contiguous()


def _recode(weight: PackedWeight, plan: StreamPlan) -> tuple[Tensor, Tensor | None]:
    """uint8 [N, units, codes] and [N, units, scales] in the order lanes read them; columns past K are zero."""
    p, coding = plan, plan.coding
    (n, k), units = weight.shape, p.padded_k // (STEP_COLUMNS * coding.unit)
    data = weight.data
    if weight.format == "bf16":
        return F.pad(data.contiguous().view(torch.uint8), (0, 2 * (p.padded_k - k))).view(n, units, -1), None
    codes = torch.empty((n, units, coding.codes), dtype=torch.uint8, device=data.device)
    scales = torch.empty((n, units, coding.scales), dtype=torch.uint8, device=data.device)
    step = max(1, _PART // k)
    for first in range(0, n, step):
        rows = slice(first, first + step)
        if weight.format == "nvfp4" and weight.scale is not None:
            held = weight.scale[rows].float()
            values = torch.stack((data[rows] & 15, data[rows] >> 4), -1).flatten(-2)
            values = values.masked_fill((held == 0).repeat_interleave(16, -1), 0)
            codes[rows] = _fp4_lanes(F.pad(values, (0, p.padded_k - k))).view(-1, units, coding.codes)
            scales[rows] = F.pad(scale_bytes(held), (0, (p.padded_k - k) // 16)).view(-1, units, coding.scales)
        else:
            values = F.pad(data[rows].view(torch.uint8), (0, p.padded_k - k))
            codes[rows] = fp8_lanes(values).view(-1, units, coding.codes)
    if weight.format == "mxfp8":
        stored = (mx_exponents(weight) + MX_BIAS).to(torch.uint8)
        scales = F.pad(stored, (0, units - stored.shape[1])).unsqueeze(-1)
    return codes, scales if coding.scales else None


def _as_stored(codes: Tensor, inner: Tensor, plan: StreamPlan, scales: Tensor | None) -> PackedWeight:
    """The inverse of _recode. Scales come back as float32 where a kernel reads them so."""
    (n, k), name = (plan.n, plan.k), plan.format
    codes = codes.flatten(1)
    if name == "bf16":
        return PackedWeight(name, (n, k), codes.view(torch.bfloat16)[:, :k].contiguous())
    if name == "nvfp4":
        values = _fp4_values(codes)[:, :k]
        held = inner.flatten(1)[:, : k // 16].to(torch.int32)
        scale_2 = None if scales is None else scales[0] / _FP4_REST
        data = values[:, 0::2] | values[:, 1::2] << 4
        return PackedWeight(name, (n, k), data, scale_values(held).to(torch.float8_e4m3fn), scale_2)
    data = fp8_values(codes)[:, :k].contiguous().view(torch.float8_e4m3fn)
    if name == "mxfp8":
        return PackedWeight(name, (n, k), data, inner.flatten(1)[:, : k // 32] - MX_BIAS)
    return PackedWeight(name, (n, k), data, scales[:1] if name == "fp8_tensor" and scales is not None else scales)


def mx_exponents(weight: PackedWeight) -> Tensor:
    """Stored exponents [N, K / 32], int32; 127, a scale of one, where all codes of the 32 are zero."""
    if weight.scale is None:
        raise ValueError("an mxfp8 matrix without scales")
    codes = weight.data.view(torch.uint8)
    parts = codes.split(max(1, _PART // codes.shape[1]))
    dead = torch.cat([(part & 127).unflatten(-1, (-1, 32)).amax(-1) == 0 for part in parts])
    return weight.scale.to(torch.int32).masked_fill(dead, 127)


def _fp4_lanes(codes: Tensor) -> Tensor:
    """FP4 codes [N, C] to the words of decode_eight, each lane's two steps side by side: uint8 [N, C / 2]."""
    cut = codes.to(torch.int32).unflatten(-1, (-1, 2, 4, 8))  # [N, unit, step, t, 8]
    return fp4_words(cut.transpose(2, 3).flatten(-2)).flatten(1).view(torch.uint8)


def _fp4_values(lanes: Tensor) -> Tensor:
    """The inverse of _fp4_lanes, uint8 [N, C]."""
    codes = fp4_codes(lanes.view(torch.int32).unflatten(-1, (-1, 4, 2)))  # [N, unit, t, 16]
    return codes.unflatten(-1, (2, 8)).transpose(2, 3).flatten(1).to(torch.uint8)


# ---------------------------------------------------------------------- the matrix for the library


def dense_matrix(
    tape: Tensor, plan: StreamPlan, scales: Tensor | None, cache_dir: Path, order: tuple[int, int, int] | None = None
) -> Tensor:
    """bf16 [N, K] from a tape on a GPU, each weight rounded once: one read of the tape, one write of the matrix.

    scales  as `outer_scales` gave them
    order   (streams, channels, columns) where the rows of the tape are [block][stream][columns of a block], as in
            `hc_mix.cu`; the matrix is then [streams * channels, K]
    """
    streams, channels, columns = (1, plan.n, plan.n) if order is None else order
    out = torch.empty((streams * channels, plan.k), dtype=torch.bfloat16, device=tape.device)
    launch = dense_launch(plan, (streams, channels, columns), tape.device, cache_dir)
    launch(dense_arguments(tape, scales, out))
    return out


def dense_arguments(tape: Tensor, scales: Tensor | None, out: Tensor) -> bytes:
    """struct Arguments of `stream_dense.cu`."""
    return struct.pack("3P", tape.data_ptr(), 0 if scales is None else scales.data_ptr(), out.data_ptr())


@cache
def dense_launch(plan: StreamPlan, order: tuple[int, int, int], device: torch.device, cache_dir: Path) -> Launch:
    """The compiled kernel, once a process."""
    cubin = compile_cuda("stream_dense.cu", dense_macros(plan, order), device_arch(device), cache_dir)
    # no early start: the library's kernels before and after it do not wait
    return Launch(cubin, "dense_kernel", device, dense_blocks(plan, order), WARPS * 32, 0, dependent=False)


def dense_macros(plan: StreamPlan, order: tuple[int, int, int]) -> dict[str, int]:
    """The macros that specialise `stream_dense.cu`."""
    return plan.macros | dict(zip(("STREAMS", "CHANNELS", "COLUMNS"), order, strict=True))


def dense_blocks(plan: StreamPlan, order: tuple[int, int, int]) -> int:
    """Blocks of its grid: a thread for four lanes' share of every unit of a row."""
    units = plan.padded_k // (STEP_COLUMNS * plan.coding.unit)
    return -(-order[0] * order[1] * units * 4 // (WARPS * 32))


# ---------------------------------------------------------------------- small things


def largest_divisor(value: int, limit: int, grain: int = 1) -> int:
    """The largest divisor of value that is a multiple of grain and at most limit; grain, a divisor, where none is."""
    return next((d for d in range(min(value, limit), grain, -1) if value % d == 0 and d % grain == 0), grain)


def shared_limit(device: torch.device) -> int:
    """Bytes of shared memory a block can have: 1 KB of every block is the system's."""
    return min(SHARED_LIMIT, torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor - 1024)


def readable(t: Tensor) -> Tensor:
    """t itself where a kernel can read it 16 bytes at a time from its start, else a copy."""
    return t.contiguous() if t.data_ptr() % 16 == 0 else t.clone(memory_format=torch.contiguous_format)


def row_capacity(rows: int, most: int = ROW_CAPACITIES[-1]) -> int:
    """The smallest kernel for this many rows, or the largest of at most `most`: then rows go in turns."""
    return next((c for c in ROW_CAPACITIES if rows <= c <= most), max(c for c in ROW_CAPACITIES if c <= most))


@dataclass(frozen=True, slots=True)
class Turns:
    """How one launch takes some number of rows, which moves no bit of theirs: `count` turns of `rows` each."""

    rows: int
    count: int


def turns_for(rows: int, most: int) -> Turns:
    """Turns of `most` rows at most."""
    capacity = row_capacity(rows, most)
    return Turns(capacity, -(-rows // capacity))


@cache
def say_once(logger: logging.Logger, text: str) -> None:
    """Log a line at its first occasion: there are hundreds of matrices and few reasons."""
    logger.info(text)
