"""`moe_down.cu`, the kernel of few rows: its plan, fitted to the clusters that a device runs at once, and its launch.

Source: moe_down.py, which has the operator and its reference.
"""

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch

from stepfloor.kernels._down_many import SLICES
from stepfloor.kernels._experts import FORMATS, SHARED_LIMIT_OF_TWO, TiledExperts, capacity_for, list_bytes, piece_bytes
from stepfloor.kernels._jit import Launch, compile_cuda, device_arch
from stepfloor.kernels._shared_expert import TiledShared, shared_macros


@dataclass(frozen=True, slots=True)
class DownPlan:
    """What `moe_down.cu` is specialised for; see its macros. All plans of a weight give a row the same bits.

    clusters  of the grid; they share the tiles of 16 rows as evenly as they can
    group    most pairs of an entry of the list; their rows have a place beside every piece of weights
    sharers  warps that share a tile: 1, or 2 with a slice of the columns each
    shared_format  of the shared expert's matrix; format  of the experts'
    """

    n: int
    k: int
    shared_k: int
    experts: int
    topk: int
    rows: int
    cluster: int
    clusters: int
    warps: int
    slots: int
    group: int
    sharers: int = 1
    shared_format: str = "bf16"
    format: str = "nvfp4"

    @property
    def steps(self) -> int:
        """64-column steps of a slice."""
        return -(-self.k // (64 * SLICES))

    @property
    def blocks(self) -> int:
        """Blocks of the grid."""
        return self.clusters * self.cluster

    @property
    def tiles(self) -> int:
        """Tiles of a cluster at most."""
        return -(-self.n // (16 * self.clusters))

    @property
    def spill(self) -> bool:
        """Whether what pairs get lies in global memory: for more rows shared memory cannot hold it."""
        return self.rows > 16

    @property
    def lines(self) -> int:
        """Sums kept apart for an output value."""
        return self.sharers * self.rows * self.topk + -(-self.shared_k // 64) * self.rows

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block, as the kernel lays it out."""
        halves = SLICES // self.sharers
        rows = self.group * (halves * self.steps * 128 + 64)
        slot = halves * piece_bytes(self.format, self.steps) + rows + 8
        sums = 0 if self.spill else -(-self.tiles // self.cluster) * self.lines * 64
        factors = -(-self.rows * self.topk // 4) * 16
        experts = list_bytes(self.experts, self.topk, self.rows, self.group)
        return self.warps * self.slots * slot + sums + factors + experts

    @property
    def per_multiprocessor(self) -> int:
        """Blocks of a multiprocessor."""
        return 2 if self.shared_bytes <= SHARED_LIMIT_OF_TWO and self.warps <= 8 else 1

    @property
    def macros(self) -> dict[str, int]:
        """The macros that specialise the kernel."""
        number, scale_rows, scale_columns = shared_macros(self.shared_format, self.shared_k)
        return {
            "N": self.n,
            "K": self.k,
            "SHARED_K": self.shared_k,
            "SHARED_FORMAT": number,
            "SCALE_ROWS": scale_rows,
            "SCALE_COLUMNS": scale_columns,
            "EXPERTS": self.experts,
            "TOPK": self.topk,
            "EXPERT_FORMAT": FORMATS[self.format],
            "STEPS": self.steps,
            "SHARERS": self.sharers,
            "CLUSTER": self.cluster,
            "CLUSTERS": self.clusters,
            "WARPS": self.warps,
            "SLOTS": self.slots,
            "ROWS": self.rows,
            "GROUP": self.group,
            "SPILL": int(self.spill),
            "PER_SM": self.per_multiprocessor,
            "LIST_BYTES": list_bytes(self.experts, self.topk, self.rows, self.group),
        }


def plan_for(down: TiledExperts, shared: TiledShared | None, topk: int, rows: int, multiprocessors: int) -> DownPlan:
    """plan_down beside a shared expert's matrix, or none."""
    if shared is None:
        return plan_down(down, 0, topk, rows, multiprocessors)
    return replace(plan_down(down, shared.shape[1], topk, rows, multiprocessors), shared_format=shared.format)


def plan_down(
    down: TiledExperts,
    shared_k: int,
    topk: int,
    rows: int,
    multiprocessors: int,
    cluster: int | None = None,
    warps: int | None = None,
) -> DownPlan:
    """The kernel for this many rows: one wave of clusters with as many tiles each, two blocks a multiprocessor.

    cluster  blocks of one; warps  of a block. None: as suits the number of rows
    A warp takes both slices of a tile, which halves its copies, list lookups and sums. Entries of the list are short
    (see plan_gate_up). On an H200 15.1 us at 4 rows and 39 experts, 42.7 at 16 and 138; 32 clusters of 8 took 17.4 and
    56.4, since it runs 30 at once.
    Up to 2 rows a block has a tile to itself. With 6 warps of two pieces, at one row, it lies beside two blocks of
    gate/up and has its weights when they end; 8 warps find no registers there. From the product of the router's matrix
    on 21.3 us for 23.0 at one row, 30.9 for 32.3 at two, but 44.6 for 43.8 at four (H200).
    FP8 has pieces of nearly twice the size: a warp takes one slice, which is as large as both in NVFP4, and at one row
    8.2 us with one piece for 9.0 with two.
    """
    n, k = down.shape
    capacity = capacity_for(rows)
    wide = down.format != "nvfp4"
    cluster = cluster or (1 if capacity <= 2 and not wide else 4)
    warps = warps or (6 if capacity == 1 and not wide else 8)
    total = n // 16
    clusters = -(-total // -(-total // max(1, 2 * multiprocessors // cluster)))
    experts = down.tape.shape[0]
    slots, sharers = (1, 2) if wide else (2, 1) if capacity == 1 else (1, 1)
    group = min(capacity, 4) if capacity <= 8 else 2 if capacity <= 16 else 3
    plan = DownPlan(n, k, shared_k, experts, topk, capacity, cluster, clusters, warps, slots, group, sharers)
    return replace(plan, format=down.format)


@cache
def fit_down(plan: DownPlan, device: torch.device, cache_dir: Path) -> DownPlan:
    """The plan with no more clusters than the device runs at once: a second wave takes as long as the first.

    The blocks of a cluster lie in one part of the chip, and the parts differ in their number of multiprocessors.
    """
    at_once = cluster_launch(plan, device, cache_dir).clusters_at_once
    return plan if at_once >= plan.clusters else replace(plan, clusters=max(1, at_once))


@cache
def cluster_launch(plan: DownPlan, device: torch.device, cache_dir: Path, dependent: bool = True) -> Launch:
    """The compiled kernel of few rows, once a process."""
    cubin = compile_cuda("moe_down.cu", plan.macros, device_arch(device), cache_dir)
    name, threads = "moe_down_kernel", plan.warps * 32
    return Launch(
        cubin, name, device, plan.blocks, threads, plan.shared_bytes, cluster=plan.cluster, dependent=dependent
    )
