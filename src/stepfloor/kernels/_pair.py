"""Two matrices of different formats that share an input, in one launch: the plan and the launch of `linear_pair.cu`.

Each has blocks of its own, and a value has the bits that its matrix alone would give it: it is the code of `linear.cu`
with the same plan. Source: linear.py, which has the operator and its reference.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from stepfloor.formats.codec import PackedWeight, stack_rows
from stepfloor.kernels._choose_form import plan_stream
from stepfloor.kernels._experts import contiguous_rows
from stepfloor.kernels._forms import MAX_ROWS, Variant, kernel_macros, shared_bytes
from stepfloor.kernels._jit import Launch, compile_cuda, device_arch
from stepfloor.kernels._stream import WARPS, StreamPlan
from stepfloor.kernels._stream_product import StreamedWeight, pack_arguments


@dataclass(frozen=True, slots=True, eq=False)
class StreamedPair:
    """Two matrices of different formats that share an input, for `linear_pair.cu`. Make it with `linear_join`.

    first   its columns of the output lie together; before  rows of `second` whose columns precede them
    """

    first: StreamedWeight
    second: StreamedWeight
    before: int

    @property
    def shape(self) -> tuple[int, int]:
        """Logical (N, K) of both."""
        return self.first.shape[0] + self.second.shape[0], self.first.shape[1]

    @property
    def num_bytes(self) -> int:
        """Bytes on the device."""
        return self.first.num_bytes + self.second.num_bytes

    @property
    def plans(self) -> "PairPlan":
        """How both are cut."""
        return PairPlan(self.first.plan, self.second.plan, self.before)


@dataclass(frozen=True, slots=True)
class PairPlan:
    """What `linear_pair.cu` is specialised for."""

    first: StreamPlan
    second: StreamPlan
    before: int

    @property
    def blocks(self) -> int:
        """Blocks of the grid."""
        return self.first.blocks + self.second.blocks


def pair_parts(weights: Sequence[PackedWeight]) -> tuple[PackedWeight, PackedWeight, int] | None:
    """What lies together, the rest, and how many rows of the rest come before; None where that is not two matrices."""
    if len(weights) == 2:
        first, second = weights
        small = first.num_bytes < second.num_bytes
        return (second, first, first.shape[0]) if small else (first, second, 0)
    try:
        above, middle, below = weights
        return middle, stack_rows((above, below)), above.shape[0]
    except ValueError:
        return None


@cache
def plan_pair(
    n: int, rest: int, k: int, before: int, multiprocessors: int, format_name: str, format_of_rest: str
) -> PairPlan | None:
    """The plans of matrices [n, k] and [rest, k]: one wave of blocks, the largest share as small as it can be.

    The second has all its rows in the accumulators of few blocks. None where one has to be split over a cluster.
    """
    best: PairPlan | None = None
    for blocks in range(1, multiprocessors):
        second = plan_stream(rest, k, blocks, format_name=format_of_rest)
        first = plan_stream(n, k, multiprocessors - second.blocks, format_name=format_name)
        if first.split > 1 or second.split > 1 or second.passes > 1:
            continue
        plans = PairPlan(first, second, before)
        if best is None or _share(plans) < _share(best):
            best = plans
    return best


def _share(plans: PairPlan) -> float:
    return max(plan.tape_bytes / plan.blocks for plan in (plans.first, plans.second))


def pair_variant(plans: PairPlan, rows: int) -> Variant:
    """The kernel of a pair for this many rows; where it takes fewer at once, they go in turns."""
    if rows <= 8:
        return Variant(1, False)
    tiles = min(-(-rows // 16), MAX_ROWS // 16)
    whole = all(p.passes == 1 and p.format != "fp8_block" for p in (plans.first, plans.second))
    return Variant(tiles if whole else 1, True)


def pair_product(x: Tensor, pair: StreamedPair, out: Tensor, variant: Variant | None = None) -> None:
    """Queue x [T, K] times both matrices into out [T, N], as stream_product does for one."""
    x = contiguous_rows(x)
    chosen = variant or pair_variant(pair.plans, x.shape[0])
    launch = pair_launch(pair.plans, chosen, x.device, pair.first.cache_dir)
    for first in range(0, x.shape[0], chosen.max_rows):
        launch(pair_arguments(pair, x[first : first + chosen.max_rows], out[first:]))


def pair_arguments(pair: StreamedPair, x: Tensor, out: Tensor) -> bytes:
    """struct Arguments of `linear_pair.cu`."""
    first, second = pair.first, pair.second
    return pack_arguments(first.tape, x, out[:, pair.before :], first.scales) + pack_arguments(
        second.tape, x, out, second.scales
    )


@cache
def pair_launch(plans: PairPlan, variant: Variant, device: torch.device, cache_dir: Path) -> Launch:
    """The compiled kernel, once a process."""
    cubin = compile_cuda("linear_pair.cu", pair_macros(plans, variant), device_arch(device), cache_dir)
    shared = pair_bytes(plans, variant)
    return Launch(cubin, "linear_pair_kernel", device, plans.blocks, WARPS * 32, shared)


def pair_macros(plans: PairPlan, variant: Variant) -> dict[str, int | str]:
    """The macros that specialise `linear_pair.cu`: those of `linear.cu`, one for each matrix."""
    first, second = (
        kernel_macros(plan, variant) | {"FIRST_BLOCK": block, "GAP_AT": at, "GAP": gap}
        for plan, block, at, gap in (
            (plans.first, 0, 0, 0),
            (plans.second, plans.first.blocks, plans.before, plans.first.n),
        )
    )
    macros: dict[str, int | str] = {name: f"PICK({value},{second[name]})" for name, value in first.items()}
    return macros | {"PER_SM": min(first["PER_SM"], second["PER_SM"])}


def pair_bytes(plans: PairPlan, variant: Variant) -> int:
    """Dynamic shared memory of a block of `linear_pair.cu`."""
    return max(shared_bytes(plans.first, variant), shared_bytes(plans.second, variant))
