"""What streamed kernels share: how a bf16 matrix is cut into the pieces that warps copy, and the bytes in that order.

A kernel reads its weights front to back from a tape written once, at load; `include/stream.cuh` has the device's side.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

WARPS = 8
STEP_COLUMNS = 32
STEP_BYTES = 64  # of one weight row, bf16
SHARED_LIMIT = 227 * 1024
# two blocks of successive kernels fit on a multiprocessor together, so that the later one can request its weights early
SHARED_LIMIT_OF_TWO = 113 * 1024


ROW_CAPACITIES = (1, 2, 4, 8, 16)  # rows for which kernels that stage their input are compiled


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """How one matrix [N, K] is cut. See the macros of `linear.cu`, which have these names.

    split   blocks of a cluster that share the columns; slices, stacks  warps of a block that share columns, rows
    rows    weight rows of a warp; pass_rows  of them in the accumulators at once
    steps   32-column steps of a warp; chunk_steps  of them in one piece; slots  pieces a warp keeps on the way
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
    def chunks(self) -> int:
        """Pieces of a pass."""
        return self.steps // self.chunk_steps

    @property
    def padded_k(self) -> int:
        """Columns stored."""
        return self.split * self.slices * self.steps * STEP_COLUMNS

    @property
    def piece_bytes(self) -> int:
        """Bytes of a full piece of one warp."""
        return self.pass_rows * self.chunk_steps * STEP_BYTES

    @property
    def tape_bytes(self) -> int:
        """Bytes of the streamed matrix: those of [N, K] bf16, plus the dead rows of the last block."""
        return self.blocks * WARPS * self.rows * self.steps * STEP_BYTES


def pack_tape(w: Tensor, plan: StreamPlan) -> Tensor:
    """bf16 [N, K] to the bytes of a plan: [pass][chunk][block][warp][step][row][64 bytes]."""
    p = plan
    padded = F.pad(w, (0, p.padded_k - p.k, 0, p.groups * p.rows * p.stacks - p.n))
    cut = padded.reshape(p.groups, p.stacks, p.rows, p.split, p.slices, p.steps, STEP_COLUMNS)
    cut = cut.permute(0, 3, 1, 4, 5, 2, 6).reshape(p.blocks * WARPS, p.steps, p.rows, STEP_COLUMNS)
    tape = torch.empty(p.tape_bytes // 2, dtype=w.dtype, device=w.device)
    at = 0
    for row in range(0, p.rows, p.pass_rows):
        for step in range(0, p.steps, p.chunk_steps):
            piece = cut[:, step : step + p.chunk_steps, row : row + p.pass_rows]
            tape[at : at + piece.numel()].view(piece.shape).copy_(piece)
            at += piece.numel()
    return tape.view(torch.uint8)


def unpack_tape(tape: Tensor, plan: StreamPlan) -> Tensor:
    """The inverse of pack_tape."""
    p = plan
    values = tape.view(torch.bfloat16)
    cut = torch.empty((p.blocks * WARPS, p.steps, p.rows, STEP_COLUMNS), dtype=values.dtype, device=tape.device)
    at = 0
    for row in range(0, p.rows, p.pass_rows):
        for step in range(0, p.steps, p.chunk_steps):
            piece = cut[:, step : step + p.chunk_steps, row : row + p.pass_rows]
            piece.copy_(values[at : at + piece.numel()].view(piece.shape))
            at += piece.numel()
    cut = cut.reshape(p.groups, p.split, p.stacks, p.slices, p.steps, p.rows, STEP_COLUMNS)
    return cut.permute(0, 2, 5, 1, 3, 4, 6).reshape(p.groups * p.stacks * p.rows, p.padded_k)[: p.n, : p.k].contiguous()


def largest_divisor(value: int, limit: int) -> int:
    """The largest divisor of value that is at most limit."""
    return next(d for d in range(min(value, limit), 0, -1) if value % d == 0)


def readable(t: Tensor) -> Tensor:
    """t itself where a kernel can read it 16 bytes at a time from its start, else a copy."""
    return t.contiguous() if t.data_ptr() % 16 == 0 else t.clone(memory_format=torch.contiguous_format)


def row_capacity(rows: int) -> int:
    """The smallest kernel for this many rows; beyond the largest, rows go in turns."""
    return next((c for c in ROW_CAPACITIES if c >= rows), ROW_CAPACITIES[-1])
