"""Routed experts: the model's sizes, weights of several layers, and the plans that compete for each number of rows.

Part of `benchmarks.experts`.
"""

import itertools
from dataclasses import replace
from pathlib import Path

import torch

from stepfloor.formats.codec import PackedWeight
from stepfloor.kernels._down_few import DownPlan, plan_down
from stepfloor.kernels._down_many import SLICES, ManyDownPlan, plan_many
from stepfloor.kernels._experts import (
    SHARED_LIMIT_OF_TWO,
    TiledExperts,
    capacity_for,
    piece_bytes,
)
from stepfloor.kernels._shared_expert import TiledShared, pack_shared
from stepfloor.kernels.moe_down import FEW_ROWS
from stepfloor.kernels.moe_gate_up import (
    WARPS,
    GateUpPlan,
    plan_gate_up,
)

EXPERTS, TOPK, D, WIDTH = 512, 10, 2560, 640
GATE_UP_BYTES, DOWN_BYTES = 2 * WIDTH * D * 9 // 16, D * WIDTH * 9 // 16
CHAIN_ROWS = (1, 4, 8, 16, 64)
CHAIN_PLANS = (
    ("lean x 2", "54x4/8/1/2/1"),
    ("held x 2", "30x8/8/1/2/1"),
    ("held x 1", "28x8/6/1/2/2"),
    ("gather 2 x 2", "30x8/8/1/2/1"),
    ("gather 2 x 3", "54x4/8/1/2/1"),
)


def gate_up_plans(rows: int) -> dict[str, GateUpPlan]:
    """The kernels that can serve this many rows; `gather 2 x 3`: groups of 2 pairs, 3 tiles of a block on the way."""
    capacity = capacity_for(rows)
    base = GateUpPlan(D, WIDTH, EXPERTS, TOPK, capacity, capacity > 8, 2, group=min(2, capacity))
    found: dict[str, GateUpPlan] = {}
    for group in groups_for(rows):
        for slots in (2, 3, 4):
            found[f"gather {group} x {slots}"] = replace(base, gather=True, slots=slots, group=group)
    if capacity <= 8:
        found |= {f"held x {slots}": replace(base, slots=slots) for slots in (1, 2, 3, 4)}
        found |= {f"lean x {slots}": replace(base, slots=slots, lean=True) for slots in (1, 2, 3)}
    return {name: plan for name, plan in found.items() if plan.per_multiprocessor == 2}


def groups_for(rows: int) -> tuple[int, ...]:
    """Most pairs of an entry worth trying: what few experts exceed, so that few are read twice."""
    return (1,) if rows == 1 else (2, 4) if rows <= 16 else (2, 3, 4)


def down_plans(rows: int, multiprocessors: int) -> dict[str, DownPlan | ManyDownPlan]:
    """The kernels that can serve this many rows: clusters x blocks of one, warps, slots of a warp, pairs, sharers."""
    stand_in = stand_ins()[1]
    found: dict[str, DownPlan | ManyDownPlan] = {}
    default = plan_down(stand_in, WIDTH, TOPK, rows, multiprocessors)
    shapes = ((4, 8), (8, 8), (8, 6), *(((1, 8), (1, 6)) if rows <= 4 else ()))
    for (cluster, warps), slots, sharers in itertools.product(shapes, (1, 2, 3), (1, 2)):
        for group in groups_for(rows):
            plan = replace(default, cluster=cluster, warps=warps, slots=slots, group=group, sharers=sharers)
            if plan.shared_bytes > SHARED_LIMIT_OF_TWO:
                continue
            # a chip may run fewer clusters at once than its multiprocessors have room for
            counts = {1: (160,), 4: (54, 64, 60, 40), 8: (28, 32, 30, 27, 24)}[cluster]
            usual = (slots, sharers, group) == (default.slots, default.sharers, default.group)
            for count in counts if usual else counts[:2]:
                found[f"{count}x{cluster}/{warps}/{slots}/{group}/{sharers}"] = replace(plan, clusters=count)
    if rows > 8:
        many = plan_many(stand_in, WIDTH, TOPK, rows)
        found |= {f"many 4 x {slots}": replace(many, group=4, slots=slots) for slots in (2, 3, 4)}
    return found


def stand_ins() -> tuple[TiledExperts, TiledExperts]:
    """Gate/up and down of the model without their bytes: enough to plan for."""
    tape = torch.empty((EXPERTS, 0), dtype=torch.uint8)
    return (
        TiledExperts((2 * WIDTH, D), True, WARPS, 5, tape, tape, Path()),
        TiledExperts((D, WIDTH), False, SLICES, 5, tape, tape, Path()),
    )


def chain_plans(rows: int, multiprocessors: int) -> dict[str, tuple[GateUpPlan, DownPlan | ManyDownPlan]]:
    """Pairs of kernels whose early starts are checked: the defaults, and plans that overlap in other ways."""
    gate_up, down = stand_ins()
    few = plan_down(down, WIDTH, TOPK, rows, multiprocessors)
    many = plan_many(down, WIDTH, TOPK, rows) if rows > FEW_ROWS else few
    pairs: dict[str, tuple[GateUpPlan, DownPlan | ManyDownPlan]] = {
        "default": (plan_gate_up(gate_up, TOPK, rows), many)
    }
    first, second = gate_up_plans(rows), down_plans(rows, multiprocessors)
    return pairs | {f"{a} + {b}": (first[a], second[b]) for a, b in CHAIN_PLANS if a in first and b in second}


class Layers:
    """Weights of several layers, random bytes with sane scales."""

    def __init__(self, experts: int, count: int, device: torch.device, cache_dir: Path) -> None:
        """Fill the tapes."""
        self.experts, self.count = experts, count
        scale = torch.full((EXPERTS,), 1e-2, device=device)
        self.gate_up: list[TiledExperts] = []
        self.down: list[TiledExperts] = []
        self.shared: list[TiledShared] = []
        for _ in range(count):
            for n, k, slices, to in ((2 * WIDTH, D, WARPS, self.gate_up), (D, WIDTH, SLICES, self.down)):
                steps = k // 64 // slices
                shape = (experts, n // 16, slices, piece_bytes("nvfp4", steps))
                tape = torch.randint(0, 256, shape, dtype=torch.uint8, device=device)
                tape[..., steps * 512 :] = torch.randint(64, 96, (1,), dtype=torch.uint8, device=device)
                to.append(TiledExperts((n, k), slices == WARPS, slices, steps, tape, scale, cache_dir))
            matrix = torch.randn(D, WIDTH, device=device).to(torch.bfloat16) / WIDTH**0.5
            self.shared.append(pack_shared(PackedWeight("bf16", (D, WIDTH), matrix)))
