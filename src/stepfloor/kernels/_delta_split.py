"""The decode step of many sequences in two kernels: their plan and their launch.

The first, `gdn_rows.cu`, makes the operands of every row once; the second runs the recurrence. It has two forms with
the same bits: `gdn_state.cu`, two blocks a multiprocessor, and `gdn_state_ring.cu`, one block to which states are on
their way.
Source: gdn_decode.py, which has the operator and its reference; `include/delta_split.cuh` has what both kernels share.
"""

import struct
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from stepfloor.kernels._delta import DeltaConstants
from stepfloor.kernels._delta_fused import MOST_ROWS, MOST_SHARED, DeltaPlan
from stepfloor.kernels._jit import Launch, compile_cuda, device_arch

ROW_WARPS = 4  # of a block of gdn_rows.cu
MOST_THREADS = 256  # of a block of gdn_state.cu, of which two have 128 registers a thread
MOST_RING_THREADS = 512  # of a block of gdn_state_ring.cu
# Sequences from which two kernels take over. Between its neighbours, settled, H200: 7.3 us against 8.8 at 2 sequences,
# 11.1 against 13.5 at 4, 31.5 against 50.3 at 16, 45 against 66 at 16 with four rows each.
SPLIT_FROM = 2
# The ring's form serves 2 sequences, and one row of so many; the other one what lies between, and several rows. In a
# step the latter took 10.35 ms for 10.46 at 4 sequences of 4 rows, 5.06 for 5.13 at 4 of one, 22.41 for 22.47 at 16 of
# 4, but 9.44 for 9.37 at 16 of one (H200).
RING_FROM = 8
RINGS = (3, 2, 1)  # the first that fits
WHOLE_WIDTHS = (32, 64, 128, 256)  # heads of which a lane of gdn_rows.cu loads its channels at once


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """A specialisation of both kernels, for many sequences; same bits as the fused kernel's.

    base     sizes, rows, activation and columns of a warp
    settled  whether the call is: kept rows and states are then read before the kernel before has ended
    ring     states in the shared memory of a block of `gdn_state_ring.cu`; 0 for `gdn_state.cu`
    halves   what a quad of a state's rows leaves `gdn_state.cu` in: 1, or 2 parts where shared memory is short
    """

    base: DeltaPlan
    settled: bool
    ring: int = 0
    halves: int = 1

    @property
    def threads(self) -> int:
        """Threads of a block of the second kernel: a ring has one warp more, that asks for states."""
        return (self.base.value_dim // self.base.cols + (self.ring > 0)) * 32

    @property
    def gates(self) -> int:
        """Rows for which a head's decays and betas have room: bulk copies take multiples of 16 bytes."""
        every = self.base.rows + self.base.kept
        return every + -every % 4

    @property
    def state_bytes(self) -> int:
        """Dynamic shared memory of a block of the second kernel, as it lays it out."""
        p = self.base
        every = p.rows + p.kept
        operands = (p.rows + every) * p.key_dim + 2 * self.gates + every * p.value_dim
        results = p.rows * (p.value_dim + p.value_dim // p.cols)
        one = 4 * (operands + results)
        state, sets = 4 * p.key_dim * p.value_dim, 2 * (one + -one % 16) + 32
        if self.ring:
            return self.ring * (state + 16) + sets
        return state + 512 * 4 * p.value_dim // (p.cols * self.halves) + sets  # and a part of one, as it leaves

    def row_blocks(self, sequences: int) -> int:
        """Blocks of `gdn_rows.cu`."""
        return -(-sequences * (2 * self.base.key_heads + self.base.heads) // ROW_WARPS)

    def state_blocks(self, sequences: int, multiprocessors: int, shared_memory: int) -> int:
        """Blocks of the second kernel: as many as run at once and have work, on multiprocessors with so many bytes."""
        two = not self.ring and 2 * (self.state_bytes + 1024) <= shared_memory  # 1 KB of every block is the system's
        return min(sequences * self.base.heads, multiprocessors * (1 + two))

    def scratch(self, sequences: int) -> tuple[int, int]:
        """Floats that the first kernel hands to the second: queries and keys; decays, betas and values."""
        p = self.base
        every = p.rows + p.kept
        keys = p.key_heads * (p.rows + every) * p.key_dim
        return sequences * keys, sequences * p.heads * (2 * self.gates + every * p.value_dim)

    def fits(self, shared_limit: int = MOST_SHARED) -> bool:
        """Whether the kernels can be built for these sizes; shared_limit: bytes of shared memory a block can have."""
        p = self.base
        deep = 4 * 32 // (p.cols // 4)
        return (
            p.heads % p.key_heads == 0
            and p.key_dim in WHOLE_WIDTHS
            and p.value_dim in WHOLE_WIDTHS
            and p.value_dim % p.cols == 0
            and p.key_dim % deep == 0
            and p.rows + p.kept <= MOST_ROWS
            and self.threads <= (MOST_RING_THREADS if self.ring else MOST_THREADS)
            and self.state_bytes <= shared_limit
        )

    def macros(self) -> dict[str, int]:
        """The macros that specialise both kernels."""
        names = ("KEY_HEADS", "HEADS", "K", "V", "ROWS", "KEPT", "SILU", "COLS")
        every = self.base.macros()
        return {name: every[name] for name in names} | {
            "SETTLED": int(self.settled),
            "RING": self.ring,
            "HALVES": self.halves,
        }


def choose_split(plan: DeltaPlan, sequences: int, settled: bool, shared_limit: int) -> SplitPlan | None:
    """The plan of the two kernels for many sequences; None where the fused one is faster or they cannot be built.

    shared_limit  bytes of shared memory a block can have
    """
    if sequences < SPLIT_FROM:
        return None
    rings = [SplitPlan(plan, settled, ring) for ring in RINGS]
    pairs = [SplitPlan(plan, settled, halves=halves) for halves in (1, 2)]
    ringed = sequences == 2 or (plan.rows == 1 and sequences >= RING_FROM)
    splits = rings + pairs if ringed else pairs + rings
    return next((split for split in splits if split.fits(shared_limit)), None)


@cache
def split_launches_for(
    plan: SplitPlan, sequences: int, device: torch.device, cache_dir: Path, dependent: bool = True
) -> tuple[Launch, Launch]:
    """The two compiled kernels in their order; the second always waits for the first itself. See `launch_for`."""
    arch = device_arch(device)
    rows = compile_cuda("gdn_rows.cu", plan.macros(), arch, cache_dir)
    stem = "gdn_state_ring" if plan.ring else "gdn_state"
    state = compile_cuda(f"{stem}.cu", plan.macros(), arch, cache_dir)
    properties = torch.cuda.get_device_properties(device)
    blocks = plan.state_blocks(sequences, properties.multi_processor_count, properties.shared_memory_per_multiprocessor)
    return (
        Launch(rows, "gdn_rows_kernel", device, plan.row_blocks(sequences), ROW_WARPS * 32, 0, dependent=dependent),
        Launch(state, f"{stem}_kernel", device, blocks, plan.threads, plan.state_bytes),
    )


def pack_split_arguments(
    plan: SplitPlan,
    projected: Tensor,
    state: Tensor,
    raw_rows: Tensor,
    gate_rows: Tensor,
    slots: Tensor,
    pending: Tensor,
    constants: DeltaConstants,
    out: Tensor,
    scratch: Tensor,
) -> bytes:
    """struct Arguments of `include/delta_split.cuh`; scratch [sum(plan.scratch(B))] float32."""
    c = constants
    pointers = (projected, state, raw_rows, gate_rows, slots, pending, c.conv_weight, c.a_log, c.dt_bias, c.norm_weight)
    addresses = [tensor.data_ptr() for tensor in (*pointers, out)]
    at = scratch.data_ptr()
    for floats in plan.scratch(projected.shape[0]):
        addresses.append(at)
        at += 4 * floats
    return struct.pack(f"{len(addresses)}Pqif", *addresses, projected.stride(1), projected.shape[0], c.eps)
