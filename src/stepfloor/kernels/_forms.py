"""The forms of `linear.cu`: ring, group, spread, share and team, and what each is compiled and launched with.

A Variant names one kernel: its form, and how many rows of x it takes. For the plan of a matrix it fixes the macros, the
threads of a block and the layout of its shared memory, which the kernel repeats. All of it is arithmetic: no GPU is
asked. Which variant serves a number of rows is `_choose_form.py`'s business.
"""

from dataclasses import dataclass

from stepfloor.kernels._stream import SHARED_LIMIT_OF_TWO, WARPS, StreamPlan, largest_divisor

MAX_ROWS = 80  # rows of one streamed product; more go through the library
KEEP_STEPS = 10  # steps of x a warp can hold in registers: 2560 columns over 8 warps


@dataclass(frozen=True, slots=True)
class Variant:
    """A kernel for a range of row counts; all variants of a plan give a row the same bits.

    tiles        tiles of x rows; tall  whether a tile has 16 rows or 8
    stage_steps  steps of a stage of the group, spread and share kernels, 0 for the ring
    stages       of them in shared memory, of the share kernel in registers
    together     passes that a warp of the spread kernel takes at a time, 0 for the others; buffers  of its sums
    clusters     of the spread and share kernels, 0 for as many as the plan's multiprocessors hold
    warpgroups   of the share kernel, 64 weight rows of a cluster each; 0 for the others
    team         blocks of a cluster of the team kernel, 0 for the others
    """

    tiles: int
    tall: bool
    stage_steps: int = 0
    stages: int = 0
    together: int = 0
    buffers: int = 1
    clusters: int = 0
    warpgroups: int = 0
    team: int = 0

    @property
    def form(self) -> int:
        """The FORM of `linear.cu`: 0 ring, 1 group, 2 spread, 3 share, 4 team."""
        if self.team:
            return 4
        return 3 if self.warpgroups else 2 if self.together else int(self.stage_steps > 0)

    @property
    def max_rows(self) -> int:
        """Rows one launch takes."""
        return self.tiles * (16 if self.tall else 8)


def grid(plan: StreamPlan, variant: Variant) -> tuple[int, int]:
    """Blocks of the grid and of a cluster: one for each slice in spread and share."""
    if variant.form in (2, 3):
        return spread_clusters(plan, variant) * WARPS, WARPS
    if variant.team:
        return plan.groups + -plan.groups % variant.team, variant.team
    return plan.blocks, plan.split


def kernel_macros(plan: StreamPlan, variant: Variant) -> dict[str, int]:
    """The macros that specialise `linear.cu`."""
    return plan.macros | {
        "SLOTS": plan.slots,
        "TILES": variant.tiles,
        "TALL": int(variant.tall),
        "BATCH": batch_steps(plan, variant),
        "FLUSH": plan.grain,
        "FORM": variant.form,
        "STAGE_STEPS": max(1, variant.stage_steps),
        "STAGES": variant.stages,
        "TOGETHER": max(1, variant.together),
        "CLUSTERS": spread_clusters(plan, variant),
        "BUFFERS": variant.buffers,
        "WARPGROUPS": variant.warpgroups,
        "TEAM": max(1, variant.team),
        "PER_SM": blocks_per_multiprocessor(plan, variant),
    }


def block_threads(variant: Variant) -> int:
    """Threads of a block: the group kernel has more warps, that copy."""
    if variant.form == 3:
        return variant.warpgroups * 128
    return (WARPS + (copying_warps(variant.tiles) if variant.form == 1 else 0)) * 32


def copying_warps(tiles: int) -> int:
    """Warps of the group kernel that copy; sums of five tiles take more registers than 16 warps have."""
    return 8 if tiles <= 4 else 4


def batch_steps(plan: StreamPlan, variant: Variant) -> int:
    """Steps of x requested at once: as many as two batches and the sums leave registers for."""
    if plan.passes > 1 and plan.chunks == 1 and plan.steps <= KEEP_STEPS:
        return plan.chunk_steps
    sums = variant.tiles * -(-plan.pass_rows // 8) * (12 if plan.format == "fp8_block" else 8)
    room = (108 if blocks_per_multiprocessor(plan, variant) == 2 else 208) - sums
    registers = 8 if variant.tall else 4
    whole = variant.tiles == plan.chunks == 1
    if whole and plan.steps <= KEEP_STEPS and plan.steps * registers <= room:
        return plan.steps
    return largest_divisor(plan.chunk_steps, max(1, min(KEEP_STEPS, room // (2 * registers))), plan.grain)


def blocks_per_multiprocessor(plan: StreamPlan, variant: Variant) -> int:
    """2 where the next kernel's block fits beside this one: 128 registers a thread and half of the shared memory."""
    # NVFP4 in several passes: 128 registers spill
    narrow = variant.tiles == 1 and variant.form != 3 and not (plan.format == "nvfp4" and plan.passes > 1)
    return 2 if narrow and shared_bytes(plan, variant) <= SHARED_LIMIT_OF_TWO else 1


def shared_bytes(plan: StreamPlan, variant: Variant) -> int:
    """Dynamic shared memory of a block, as `linear.cu` lays it out."""
    if variant.form > 0:
        return (group_bytes, spread_bytes, share_bytes, team_bytes)[variant.form - 1](plan, variant)
    tile_rows = 16 if variant.tall else 8
    reduce_passes = 1 if plan.passes == 1 else max(1, (16 if variant.tall else 32) // plan.pass_rows)
    widths = reduce_passes * -(-plan.pass_rows // 8)
    pitch = (widths + (widths % 2 == 0)) * 8
    buffers = 2 if plan.passes > reduce_passes or variant.tiles > 1 else 1
    ring = WARPS * plan.slots * plan.piece_bytes
    sums = buffers * WARPS * tile_rows * pitch * 4
    partial = variant.tiles * tile_rows * plan.rows * plan.stacks * 4 if plan.split > 1 else 0
    table = _table_floats(plan)
    return ring + sums + partial + (table + table % 2) * 4 + WARPS * plan.slots * 8


def _table_floats(plan: StreamPlan) -> int:
    """Scales that a block of the ring kernel keeps."""
    rows = plan.rows * plan.stacks
    if plan.format == "fp8_block":
        return ((rows + 126) // 128 + 1) * -(-plan.k // 128)
    return rows if plan.format in ("fp8_channel", "fp8_tensor", "nvfp4") else 0


def group_bytes(plan: StreamPlan, variant: Variant) -> int:
    """Shared memory of a block of the group kernel."""
    slot = variant.stage_steps // plan.coding.unit * plan.unit_bytes(plan.pass_rows)
    stage = variant.stage_steps * variant.max_rows * 64 + 128 // plan.pass_rows * slot
    return variant.stages * (stage + 16)


def spread_bytes(plan: StreamPlan, variant: Variant) -> int:
    """Shared memory of a block of the spread kernel."""
    unit_bytes, unit = plan.unit_bytes(plan.pass_rows), plan.coding.unit
    x = variant.tiles * 16 * plan.steps * 64
    ring = WARPS * variant.stages * variant.together * (variant.stage_steps // unit) * unit_bytes
    pitch = WARPS * variant.together * -(-plan.pass_rows // 8) * 8 + 8
    return x + ring + variant.buffers * variant.tiles * 16 * pitch * 4


def spread_clusters(plan: StreamPlan, variant: Variant) -> int:
    """Clusters of the spread and share kernels, a block for each slice."""
    return variant.clusters or max(1, plan.blocks // WARPS)


def share_bytes(plan: StreamPlan, variant: Variant) -> int:
    """Shared memory of a block of the share kernel: x, the sums that the blocks of the cluster send, a barrier."""
    return variant.max_rows * (plan.steps * 64 + variant.warpgroups * 256) + 8


def share_rows(plan: StreamPlan, variant: Variant) -> int:
    """Weight rows of a cluster of the share kernel."""
    return -(-plan.n // spread_clusters(plan, variant))


def team_bytes(plan: StreamPlan, variant: Variant) -> int:
    """Shared memory of a block of the team kernel: the ring, its part of x, sums of all slices, scales, barriers."""
    rows = plan.rows + plan.rows % 2
    scales = rows if plan.format in ("fp8_channel", "fp8_tensor", "nvfp4") else 0
    sums = WARPS * variant.max_rows * rows
    ring = WARPS * plan.slots * (plan.piece_bytes + 8)
    return ring + WARPS // variant.team * plan.steps * 1024 + (sums + scales) * 4 + 8
