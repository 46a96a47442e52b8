"""`moe_down.cu` for many rows: the kernels of `moe_down_many.cu`, their plan and their launch.

Source: moe_down.py, which has the operator and its reference.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch

from stepfloor.kernels._experts import (
    FORMATS,
    SHARED_LIMIT_OF_TWO,
    TiledExperts,
    capacity_for,
    list_bytes,
    piece_bytes,
)
from stepfloor.kernels._jit import Launch, compile_cuda, device_arch

SLICES = 2  # parts of K that are summed apart
WARPS = 8  # that multiply


@dataclass(frozen=True, slots=True)
class ManyDownPlan:
    """What `moe_down_many.cu` is specialised for; see its macros. A row has the bits that DownPlan's kernel gives it.

    group  most pairs of an entry of the list
    slots  units of four tiles of a block on the way
    shared  SHARED_FORMAT, SCALE_ROWS and SCALE_COLUMNS of the kernels; format  of the experts
    """

    n: int
    k: int
    shared_k: int
    experts: int
    topk: int
    rows: int
    group: int
    slots: int
    shared: tuple[int, int, int] = (0, 1, 64)
    format: str = "nvfp4"

    @property
    def steps(self) -> int:
        """64-column steps of a slice."""
        return -(-self.k // (64 * SLICES))

    @property
    def threads(self) -> int:
        """Threads of a block of products: those that multiply, that ask for weights, and for the shared expert."""
        return 256 + 32 + (32 if self.shared_k else 0)

    @property
    def lines(self) -> int:
        """Sums kept apart for an output value."""
        return SLICES * self.rows * self.topk + (self.rows if self.shared_k else 0)

    @property
    def sum_blocks(self) -> int:
        """Blocks of the kernel that sums."""
        return -(-self.rows * self.n // (4 if self.rows > 16 else 1) // 256)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block of products, as the kernel lays it out."""
        ring = self.slots * (8 * piece_bytes(self.format, self.steps) + 16) + 8
        return ring + list_bytes(self.experts, self.topk, self.rows, self.group)

    @property
    def per_multiprocessor(self) -> int:
        """Blocks of a multiprocessor."""
        return 2 if self.shared_bytes <= SHARED_LIMIT_OF_TWO else 1

    @property
    def macros(self) -> dict[str, int]:
        """The macros that specialise the kernels."""
        return {
            "N": self.n,
            "K": self.k,
            "SHARED_K": self.shared_k,
            **dict(zip(("SHARED_FORMAT", "SCALE_ROWS", "SCALE_COLUMNS"), self.shared, strict=True)),
            "EXPERT_FORMAT": FORMATS[self.format],
            "EXPERTS": self.experts,
            "TOPK": self.topk,
            "STEPS": self.steps,
            "ROWS": self.rows,
            "GROUP": self.group,
            "SLOTS": self.slots,
            "PER_SM": self.per_multiprocessor,
            "LIST_BYTES": list_bytes(self.experts, self.topk, self.rows, self.group),
        }


def plan_many(
    down: TiledExperts, shared_k: int, topk: int, rows: int, shared: tuple[int, int, int] = (0, 1, 64)
) -> ManyDownPlan:
    """The kernel of many rows, two blocks a multiprocessor: of 512 experts hardly one has more than 4 of 64 rows."""
    n, k = down.shape
    capacity = capacity_for(rows)
    plan = ManyDownPlan(n, k, shared_k, down.tape.shape[0], topk, capacity, min(capacity, 4), 4, shared, down.format)
    fitting = (replace(plan, slots=slots) for slots in (4, 3, 2))
    return next((p for p in fitting if p.per_multiprocessor == 2), replace(plan, slots=2))


@cache
def many_launch(
    plan: ManyDownPlan, device: torch.device, cache_dir: Path, dependent: bool = True
) -> Callable[[bytes], None]:
    """The two compiled kernels, once a process; they take the arguments of `moe_down.cu`."""
    cubin = compile_cuda("moe_down_many.cu", plan.macros, device_arch(device), cache_dir)
    blocks = torch.cuda.get_device_properties(device).multi_processor_count * plan.per_multiprocessor
    name = "moe_down_products_kernel"
    products = Launch(cubin, name, device, blocks, plan.threads, plan.shared_bytes, dependent=dependent)
    sums = Launch(cubin, "moe_down_sum_kernel", device, plan.sum_blocks, 256, 0, dependent=dependent)

    def launch(arguments: bytes) -> None:
        products(arguments)
        sums(arguments)

    return launch
