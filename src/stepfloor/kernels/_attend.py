"""`qsa_attend.cu`, attention of a decode step's rows that keep all their positions: its plan and its launch.

Source: qsa_attend.py, which has the operator and its reference.
"""

import math
import struct
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from stepfloor.kernels._jit import Launch, compile_cuda, device_arch
from stepfloor.kernels._stream import SHARED_LIMIT_OF_TWO

PIECE = 64  # positions
# Blocks. 16 sequences want 32 clusters, and with two blocks a multiprocessor an H200 runs 30 of eight at a time.
CLUSTER = 7
TILES = (4, 2, 1)


@dataclass(frozen=True, slots=True)
class AttendPlan:
    """A specialisation of `qsa_attend.cu`, whose macros have these names. `cluster` alone decides the bits of a row.

    dim    values of a head; page  positions of a page
    ratio, topk  positions of a block, blocks that a row may keep without selecting
    fp8    whether keys and values are E4M3
    tile   most rows of a sequence that share what they read
    over   whether what blocks send each other lies over the pieces: less memory, and a wait for each other more
    """

    heads: int
    kv_heads: int
    dim: int
    ratio: int
    topk: int
    page: int
    fp8: bool
    tile: int
    cluster: int = CLUSTER
    over: bool = False

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.dim

    @property
    def queries(self) -> int:
        """Query heads of a unit."""
        return self.tile * self.heads // self.kv_heads

    @property
    def received_bytes(self) -> int:
        """What the blocks of a cluster send to one of them."""
        return self.cluster * -(-(-(-self.queries // 8) * self.dim // 32) // self.cluster) * 1024

    @property
    def piece_bytes(self) -> int:
        """Room for keys and values."""
        width = self.dim * (1 if self.fp8 else 2)
        return PIECE * (width + (32 if self.fp8 else 64)) + PIECE * (width + 16)

    @property
    def least_bytes(self) -> int:
        """All but what is received."""
        floats = (2 * PIECE // 8 + 2 * self.cluster) * self.queries
        return self.piece_bytes + -(-self.queries // 16) * 32 * (self.dim + PIECE) + 16 + -(-floats // 4) * 16

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block, as the kernel lays it out."""
        return self.least_bytes + (0 if self.over else self.received_bytes)

    @property
    def per_multiprocessor(self) -> int:
        """Blocks of a multiprocessor."""
        return 2 if self.shared_bytes <= SHARED_LIMIT_OF_TWO else 1

    def fits(self, shared_limit: int) -> bool:
        """Whether the kernel can be built for these sizes; shared_limit is what a block can have."""
        group = self.heads // self.kv_heads
        return (
            self.heads % self.kv_heads == 0
            and self.dim in (64, 128, 256)
            and self.tile * group <= self.threads
            and (not self.over or self.received_bytes <= self.piece_bytes)
            and self.shared_bytes <= shared_limit
        )

    def macros(self) -> dict[str, int]:
        """The macros that specialise the kernel."""
        return {
            "HEADS": self.heads,
            "KV_HEADS": self.kv_heads,
            "DIM": self.dim,
            "RATIO": self.ratio,
            "TOPK": self.topk,
            "PAGE": self.page,
            "FP8": int(self.fp8),
            "TILE": self.tile,
            "CLUSTER": self.cluster,
            "PER_SM": self.per_multiprocessor,
            "OVER": int(self.over),
            "SHARED_BYTES": self.shared_bytes,
        }


def choose_attend(q: Tensor, keys: Tensor, ratio: int, topk: int, shared_limit: int) -> AttendPlan | None:
    """The plan for q [B, R, H, head_dim] and keys [pages, P, KV heads, head_dim]; None where none can be built."""
    heads, dim = q.shape[2:]
    page, kv_heads = keys.shape[1:3]
    fp8 = keys.dtype == torch.float8_e4m3fn
    for tile in TILES:
        if tile > 1 and tile >= 2 * q.shape[1]:
            continue
        apart = AttendPlan(heads, kv_heads, dim, ratio, topk, page, fp8, tile)
        # two blocks on a multiprocessor if one of both has room
        plans = sorted((apart, replace(apart, over=True)), key=lambda plan: -plan.per_multiprocessor)
        if (plan := next((p for p in plans if p.fits(shared_limit)), None)) is not None:
            return plan
    return None


@cache
def attend_launch(
    plan: AttendPlan, units: int, device: torch.device, cache_dir: Path, dependent: bool = True
) -> Launch:
    """The compiled kernel, once a process; units  that there are. The first call loads it."""
    cubin = compile_cuda("qsa_attend.cu", plan.macros(), device_arch(device), cache_dir)

    def launch(clusters: int) -> Launch:
        blocks, shared = clusters * plan.cluster, plan.shared_bytes
        return Launch(
            cubin,
            "qsa_attend_kernel",
            device,
            blocks,
            plan.threads,
            shared,
            cluster=plan.cluster,
            dependent=dependent,
        )

    return launch(min(units, max(1, launch(1).clusters_at_once)))


def pack_attend(
    q: Tensor,
    gate: Tensor,
    slots: Tensor,
    first: Tensor,
    keys: Tensor,
    values: Tensor,
    page_table: Tensor,
    out: Tensor,
) -> bytes:
    """struct Arguments of `qsa_attend.cu`."""
    tensors = (q, gate, slots, first, keys, values, page_table, out)
    sizes = (q.shape[0], q.shape[1], page_table.shape[1])
    return struct.pack(
        "8P3if", *(tensor.data_ptr() for tensor in tensors), *sizes, math.log2(math.e) * q.shape[3] ** -0.5
    )
