"""`gdn_decode.cu`, the decode step of the gated delta net in one kernel: its plan and its launch.

The state is read once and written once. All plans give a value the same bits; which one a call has depends on the
number of sequences and on whether it is settled. Source: gdn_decode.py, which has the operator and its reference.
"""

import struct
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from stepfloor.kernels._delta import DeltaConstants
from stepfloor.kernels._jit import Launch, compile_cuda, device_arch

TAPS = 4
MOST_ROWS = 32  # pending and new ones of a sequence
MOST_SHARED = 227 * 1024


@dataclass(frozen=True, slots=True)
class Choice:
    """Fields of a DeltaPlan from so many sequences on."""

    sequences: int
    parts: int
    early: int = 1


# All give a value the same bits. Between its neighbours in a layer, one row, H200: 8.1 us with two blocks of a head
# against 8.7 with one at 1 sequence, 15.5 against 14.5 at 4 (16 columns a warp, early 1).
PLANS = (Choice(1, parts=2), Choice(2, parts=1))
# For calls that are settled; between its neighbours, one row and four: 5.8 and 9.1 us against 8.1 and 12.7 (early 1) at
# 1 sequence, 14.7 and 19.8 at 4.
SETTLED_PLANS = (Choice(1, parts=2, early=3), Choice(2, parts=1, early=2))


@dataclass(frozen=True, slots=True)
class DeltaPlan:
    """A specialisation of `gdn_decode.cu`, whose macros have these names. `cols` alone decides the bits of a value.

    rows    new rows; kept  rows that can be pending
    silu    whether silu, not sigmoid, gates the norm
    cols    columns of a warp; parts  blocks of a head
    joined  whether a cluster holds all blocks that read a key head, as rewriting rows in place demands
    early   what may precede the end of the kernel before: 0 nothing, 1 calling the state into the L2, 2 reading it, 3
            replaying the pending rows too and writing the state; 2 and 3 for calls that are `settled`
    passing whether a written state leaves the L2 before other lines
    """

    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    rows: int
    kept: int
    silu: bool
    cols: int = 16
    parts: int = 2
    joined: bool = True
    early: int = 1
    passing: bool = True

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.value_dim // (self.parts * self.cols) * 32

    @property
    def cluster(self) -> int:
        """Blocks of a cluster."""
        return self.parts * (self.heads // self.key_heads if self.joined else 1)

    def blocks(self, sequences: int) -> int:
        """Blocks of the grid."""
        return sequences * (self.key_heads if self.joined else self.heads) * self.cluster

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block, as `gdn_decode.cu` lays it out."""
        width, every = self.value_dim // self.parts, self.rows + self.kept
        rows = (TAPS - 1 + every) * (2 * self.key_dim + width) * 2 + self.rows * width * 2
        operands = self.rows * self.key_dim + every * (self.key_dim + width)
        results = self.rows * (width + self.value_dim // self.cols) + 2 * every
        return rows + 4 * (operands + results)

    @property
    def per_multiprocessor(self) -> int:
        """Blocks that registers allow: 80 a thread with 8 columns, of which 32 hold state, or 128 with 16 and 64."""
        return max(1, 65536 // (self.threads * (80 if self.cols == 8 else 128 if self.cols == 16 else 200)))

    def fits(self) -> bool:
        """Whether the kernel can be built for these sizes."""
        deep = 4 * 32 // (self.cols // 4)
        width = self.value_dim // self.parts
        return (
            self.heads % self.key_heads == 0
            and self.value_dim % (self.cols * self.parts) == 0
            and width % 8 == 0
            and self.key_dim % max(32, deep) == 0
            and self.rows + self.kept <= MOST_ROWS
            and self.cluster <= 16
            and self.threads <= 1024
            and self.shared_bytes <= MOST_SHARED
        )

    def macros(self) -> dict[str, int]:
        """The macros that specialise `gdn_decode.cu`."""
        return {
            "KEY_HEADS": self.key_heads,
            "HEADS": self.heads,
            "K": self.key_dim,
            "V": self.value_dim,
            "ROWS": self.rows,
            "KEPT": self.kept,
            "SILU": int(self.silu),
            "COLS": self.cols,
            "PARTS": self.parts,
            "JOINED": int(self.joined),
            "EARLY": self.early,
            "PASSING": int(self.passing),
            "PER_SM": self.per_multiprocessor,
        }


def plan_for(constants: DeltaConstants, rows: int, kept: int) -> DeltaPlan:
    """The plan of a layer for windows of `rows` rows, with room for `kept` pending ones."""
    c = constants
    return DeltaPlan(c.key_heads, c.heads, c.key_dim, c.value_dim, rows, kept, c.activation == "silu")


def choose_plan(plan: DeltaPlan, sequences: int, settled: bool = False) -> DeltaPlan:
    """The plan for a number of sequences."""
    choice = [c for c in (SETTLED_PLANS if settled else PLANS) if sequences >= c.sequences][-1]
    return replace(plan, parts=choice.parts, early=choice.early)


@cache
def launch_for(
    plan: DeltaPlan, sequences: int, device: torch.device, cache_dir: Path, dependent: bool = True
) -> Launch:
    """The compiled kernel, once a process. The first call loads it, which no graph capture may do."""
    cubin = compile_cuda("gdn_decode.cu", plan.macros(), device_arch(device), cache_dir)
    return Launch(
        cubin,
        "gdn_decode_kernel",
        device,
        plan.blocks(sequences),
        plan.threads,
        plan.shared_bytes,
        cluster=plan.cluster,
        dependent=dependent,
    )


def pack_arguments(
    projected: Tensor,
    state: Tensor,
    raw_rows: Tensor,
    gate_rows: Tensor,
    slots: Tensor,
    pending: Tensor,
    constants: DeltaConstants,
    out: Tensor,
    raw_to: Tensor,
    gates_to: Tensor,
) -> bytes:
    """struct Arguments of `gdn_decode.cu`; rows may be written to other tensors than they are read from."""
    pointers = (
        projected,
        state,
        raw_rows,
        raw_to,
        gate_rows,
        gates_to,
        slots,
        pending,
        constants.conv_weight,
        constants.a_log,
        constants.dt_bias,
        constants.norm_weight,
        out,
    )
    addresses = [tensor.data_ptr() for tensor in pointers]
    sizes = (projected.stride(1), state.shape[0], projected.shape[0])
    return struct.pack(f"{len(addresses)}Pqqif", *addresses, *sizes, constants.eps)
