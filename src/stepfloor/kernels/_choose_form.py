"""How a matrix is cut for a GPU, and which form of `linear.cu` serves a number of rows: what measured best.

The cut decides the order of sums and is made once for a matrix; the choice of a form moves no bit. Each form has limits
of its own (weight rows of a block, registers, shared memory) and says None where a plan is beyond them.
"""

from dataclasses import replace

import torch

from stepfloor.kernels._forms import (
    KEEP_STEPS,
    MAX_ROWS,
    Variant,
    copying_warps,
    group_bytes,
    share_bytes,
    share_rows,
    spread_bytes,
    spread_clusters,
    team_bytes,
)
from stepfloor.kernels._stream import CODINGS, SHARED_LIMIT, STEP_COLUMNS, WARPS, StreamPlan, largest_divisor


def plan_stream(
    n: int, k: int, multiprocessors: int, split: int | None = None, format_name: str = "bf16"
) -> StreamPlan:
    """The plan of a matrix [N, K]: one wave of blocks, every warp with the same columns.

    split  blocks that share the columns; None for what measured best at this K
    The order of sums depends on K, slices, split, steps and the format: on the matrix alone.
    """
    if split is None:
        split = 4 if k >= 8192 else 1
    unit = CODINGS[format_name].unit
    total = -(-k // (STEP_COLUMNS * unit))  # units

    def suits(slices: int) -> bool:
        # a slice of fewer than 5 steps is mostly latency: then warps share rows instead. With two steps a unit, equal
        # slices may need padding: a twentieth at most.
        shares = slices * split
        return total * unit >= 5 * shares and (unit == 1 or total % shares == 0 or total >= 20 * shares)

    slices = next((s for s in (8, 4, 2) if suits(s)), 1)
    stacks = WARPS // slices
    steps = -(-total // (slices * split)) * unit
    if steps > KEEP_STEPS and largest_divisor(steps, KEEP_STEPS, unit) < 3:
        steps += -steps % 4
    # Where x is too long for a warp's registers, teams of four blocks share it: an H200 of 132 multiprocessors runs 30
    # clusters of four at once.
    fewer = multiprocessors - multiprocessors // 11
    if split == stacks == 1 and steps > KEEP_STEPS and n <= 40 * fewer:
        multiprocessors = fewer
    rows = -(-n // (max(1, multiprocessors // split) * stacks))
    plan = StreamPlan(n, k, split, slices, stacks, rows, rows, steps, steps, 1, format_name)
    row_bytes = plan.unit_bytes(rows) / (rows * unit)  # of a step
    if rows <= 40:
        pass_rows = rows
        chunk_steps = largest_divisor(steps, max(1, int(6656 / (rows * row_bytes))), plan.grain)
    elif steps <= KEEP_STEPS:
        # some 5 KB a copy, 8 rows of 320 columns in bf16; x stays in registers
        wide = 1 if format_name == "bf16" else max(1, min(4, int(5800 / (8 * steps * row_bytes))))
        pass_rows, chunk_steps = 8 * wide, steps
    else:
        pass_rows = 32
        chunk_steps = largest_divisor(steps, max(1, int(6144 / (32 * row_bytes))), plan.grain)
    plan = replace(plan, pass_rows=pass_rows, chunk_steps=chunk_steps)
    # What streams for longer than a launch takes has a multiprocessor to itself: 120 KB on the way, all registers. One
    # H200, M=1 and 16, against two slots and room for the next kernel: gdn_in 20.8 us for 21.6 and 23.0 for 23.3, out
    # 8.2 for 8.9 and 11.0 for 13.4. Small products fit in two slots and keep the room.
    fit = 136 * 1024 // (WARPS * plan.piece_bytes)
    return replace(plan, slots=min(plan.passes * plan.chunks, max(2, fit)))


def choose_variant(plan: StreamPlan, rows: int, warpgroups: bool = True) -> Variant:
    """The kernel for this many rows of x; warpgroups: whether the GPU has what group, share and team need.

    That is `wgmma` for the first two, and shared memory of Hopper's size for the last.
    """
    if rows <= 8:
        return Variant(1, False)
    tiles = min(-(-rows // 16), MAX_ROWS // 16)
    if tiles == 1:  # share is faster alone, and slower in a step: 10.72 ms for 10.64 with 4 sequences of 4 rows (H200)
        return (team_variant(plan) if warpgroups else None) or Variant(1, True)
    if warpgroups and (group := group_variant(plan, tiles)) is not None:
        return group
    if warpgroups and (share := share_variant(plan, tiles)) is not None:
        return share
    spread = spread_variant(plan, tiles)
    if spread is not None:
        return spread
    # scaled sums of several tiles would not fit in registers beside the others
    return Variant(tiles, True) if plan.passes == 1 and plan.format != "fp8_block" else Variant(1, True)


def has_warpgroups(device: torch.device) -> bool:
    """Whether `wgmma` exists there: compute capability 9.0 alone."""
    return torch.cuda.get_device_capability(device)[0] == 9


def group_variant(plan: StreamPlan, tiles: int) -> Variant | None:
    """The group kernel for this many tiles of x rows, or None where a block has too few weight rows for it."""
    cut = plan.split == plan.stacks == 1 and plan.pass_rows % 8 == 0 and plan.pass_rows <= 64
    if not cut or plan.rows < 64 or plan.format == "fp8_block":
        return None
    stage_steps = 2 if plan.chunk_steps % 2 == 0 else plan.coding.unit
    if plan.chunk_steps % stage_steps:
        return None
    empty = group_bytes(plan, Variant(tiles, True, stage_steps))
    stage = group_bytes(plan, Variant(tiles, True, stage_steps, 1)) - empty
    stages = min(8, (SHARED_LIMIT - empty) // stage)
    # a copying warp waits for one reading of its slot at most: it must not be two ahead
    return Variant(tiles, True, stage_steps, stages) if stages >= copying_warps(tiles) else None


def team_variant(plan: StreamPlan, team: int = 4) -> Variant | None:
    """The team kernel for 9 to 16 rows, or None where it does not suit the plan.

    One H200, us at 16 rows: out 9.9 for 11.4 in bf16, 8.5 for 9.9 in FP8; router_shared, whose x a warp's registers
    hold, 5.7 for 5.8.
    """
    cut = plan.slices == WARPS and plan.split == plan.passes == 1 and plan.groups >= team
    if not cut or plan.steps <= KEEP_STEPS or plan.format == "fp8_block":
        return None
    variant = Variant(1, True, team=team)
    return variant if team_bytes(plan, variant) <= SHARED_LIMIT else None


def spread_variant(plan: StreamPlan, tiles: int) -> Variant | None:
    """The spread kernel for this many tiles of x rows, or None where the plan does not suit it.

    Sums take up to 160 registers; shared memory holds the rows of x, the sums to exchange, and weights on the way.
    """
    widths = -(-plan.pass_rows // 8)
    if plan.split > 1 or plan.slices < WARPS or plan.format == "fp8_block" or widths * tiles > 20:
        return None
    passes = -(-plan.groups * plan.passes // spread_clusters(plan, Variant(tiles, True)))
    together = max(1, min(4 // widths, -(-passes // WARPS)))
    unit = plan.coding.unit
    for stage_steps in (2, 1) if unit == 1 and plan.chunk_steps % 2 == 0 else (unit,):
        stage_bytes = WARPS * together * stage_steps // unit * plan.unit_bytes(plan.pass_rows)
        for buffers in (2, 1) if passes > WARPS * together else (1,):
            room = SHARED_LIMIT - spread_bytes(plan, Variant(tiles, True, stage_steps, 0, together, buffers))
            if room >= max(3 * stage_bytes, 65536 if buffers == 2 else 0):
                return Variant(tiles, True, stage_steps, min(8, room // stage_bytes), together, buffers)
    return None


def share_variant(plan: StreamPlan, tiles: int, clusters: int = 0) -> Variant | None:
    """The share kernel for this many tiles of x rows, or None where a cluster has too many weight rows for it.

    clusters  0 for as many as have a block of the plan for each of theirs, 15 at most: an H200 runs no more at once
    """
    if plan.split > 1 or plan.slices < WARPS or plan.format == "fp8_block":
        return None
    variant = Variant(tiles, True, clusters=clusters or min(15, -(-plan.blocks // WARPS)))
    warpgroups = -(-share_rows(plan, variant) // 64)
    if warpgroups > 3:
        return None
    unit = plan.coding.unit
    stage_steps = largest_divisor(plan.steps, 2 * unit, unit)
    # registers of a lane for its two weight rows in a stage; those left beside sums, addresses and decoded weights
    taken = stage_steps * {"bf16": 8, "mxfp8": 6, "nvfp4": 3}.get(plan.format, 4)
    room = min(255, 65536 // (warpgroups * 128) // 8 * 8) - 16 * tiles - (40 if plan.format == "bf16" else 48)
    # six at most: requests wait for each other, and only behind them a block waits for its predecessor. One H200, out
    # in FP8 at 16 rows: 7.9 us, with twelve 8.7
    stages = max(1, min(6, plan.steps // stage_steps, room // taken))
    variant = replace(variant, stage_steps=stage_steps, stages=stages, warpgroups=warpgroups)
    return variant if share_bytes(plan, variant) <= SHARED_LIMIT else None


def with_clusters(plan: StreamPlan, variant: Variant, clusters: int) -> Variant:
    """The kernel with so many clusters; spread or ring where those are too few for share, ring in place of team."""
    if variant.team:
        return Variant(1, True)
    if variant.form == 2:
        return replace(variant, clusters=clusters)
    larger = share_variant(plan, variant.tiles, clusters)
    if larger is not None:
        return larger
    spread = spread_variant(plan, variant.tiles) if variant.tiles > 1 else None
    return Variant(1, True) if spread is None else replace(spread, clusters=clusters)
