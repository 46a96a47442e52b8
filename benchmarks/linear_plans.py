"""Streamed products: the matrices that are measured, plans that compete for each, and the family of a kernel.

Part of `benchmarks.linear`. A family is what one check stands for: the forms of the kernel (`PATHS`) for bf16, and for
each other format its own.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks.harness import multiprocessors
from stepfloor.formats.codec import PackedWeight, quantize
from stepfloor.kernels._choose_form import (
    choose_variant,
    group_variant,
    plan_stream,
    share_variant,
    spread_variant,
    team_variant,
)
from stepfloor.kernels._forms import Variant, shared_bytes
from stepfloor.kernels._stream import (
    CODINGS,
    SHARED_LIMIT,
    StreamPlan,
    outer_scales,
    pack_tape,
)
from stepfloor.kernels._stream_product import StreamedWeight

SHAPES = {
    "head": (248320, 2560),
    "gdn_in": (16480, 2560),
    "qsa_in": (13952, 2560),
    "out": (2560, 6144),
    "router_shared": (1793, 2560),
    "shared_gate_up": (1280, 2560),
    "shared_down": (2560, 640),
    "router": (512, 2560),
    "hc_down": (336, 10240),
    "hc_up": (10240, 320),
    "gdn_ab": (96, 2560),
}
ODD_SHAPES = [(16, 16), (37, 48), (251, 64), (33, 640), (385, 256), (1000, 1040), (5301, 4096)]
QUICK_SHAPES = ("head", "gdn_in", "qsa_in", "out", "router_shared", "hc_down", "hc_up")
FORMATS = tuple(name for name in CODINGS if name != "fp8_tensor")  # which runs as fp8_channel does
PATHS = ("ring", "passes", "cluster", "wide", "spread", "share", "team", "group")
FAMILIES = (
    *PATHS,
    *(f"{name}{kind}" for name in FORMATS if name != "bf16" for kind in ("", " spread", " share", " team", " group")),
)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan, the kernel for a row count and whether it starts before its predecessor ends."""

    name: str
    family: str
    plan: StreamPlan
    variant: Variant
    dependent: bool = True


def plans(n: int, k: int, device: torch.device, format_name: str, quick: bool) -> dict[str, StreamPlan]:
    """The default plan of a shape in a format and what it competes with."""
    count = multiprocessors(device)
    base = plan_stream(n, k, count, format_name=format_name)
    found = {"default": base}
    bf16 = format_name == "bf16"
    if base.passes > 1 and base.chunks == 1:
        if bf16:
            found["2 slots"] = replace(base, slots=2)
            found["16 rows x 2"] = replace(base, pass_rows=16, slots=2)
        else:
            # rows of a piece, pieces on the way
            for rows, slots in (
                ((16, 4), (16, 2), (8, 5), (32, 2))
                if format_name != "nvfp4"
                else (
                    (16, 5),
                    (32, 3),
                    (16, 4),
                    (16, 3),
                )
            ):
                found[f"{rows} rows x {slots}"] = replace(base, pass_rows=rows, slots=slots)
    elif k == 6144:
        sizes = ((4, 2), (3, 3), (2, 4), (6, 2), (12, 1)) if bf16 else ((8, 2), (12, 2), (24, 1), (4, 4), (6, 3))
        for chunk_steps, slots in sizes:
            if chunk_steps % base.grain == 0:
                found[f"chunk {chunk_steps} x {slots}"] = replace(base, chunk_steps=chunk_steps, slots=slots)
        found["split 2"] = plan_stream(n, k, count, split=2, format_name=format_name)
    elif k == 10240:
        found |= {
            f"split {split}": plan_stream(n, k, count, split=split, format_name=format_name) for split in (2, 5, 1)
        }
    elif (n, k) in ((1280, 2560), (1793, 2560)):
        found["split 2"] = plan_stream(n, k, count, split=2, format_name=format_name)
        if bf16:
            found["whole"] = replace(base, chunk_steps=10, slots=1)
    found = {name: plan for name, plan in found.items() if name == "default" or plan != base}
    swept = format_name != "fp8_block" and (n, k) in (SHAPES["head"], SHAPES["gdn_in"], SHAPES["out"])
    return dict(list(found.items())[: 3 if swept else 1]) if quick else found


def candidates(n: int, k: int, rows: int, device: torch.device, format_name: str, quick: bool) -> list[Candidate]:
    """Everything that can compute this product here."""
    found: list[Candidate] = []
    for name, plan in plans(n, k, device, format_name, quick).items():
        variant = choose_variant(plan, rows)
        if rows <= 16 or not quick or name == "default":
            found.append(Candidate(name, family_of(plan, variant), plan, variant))
        if name != "default":
            continue
        if not quick:
            found.append(replace(found[-1], name="default, no PDL", dependent=False))
        for label, other in other_variants(plan, rows, variant, quick).items():
            found.append(Candidate(label, family_of(plan, other), plan, other))
    return [c for c in found if shared_bytes(c.plan, c.variant) <= SHARED_LIMIT]


def other_variants(plan: StreamPlan, rows: int, chosen: Variant, quick: bool) -> dict[str, Variant]:
    """Kernels that could take the place of the default plan's at this row count: a row's bits stay the same."""
    found: dict[str, Variant] = {}
    for team in (2, 4) if rows <= 16 else ():
        if (one := team_variant(plan, team)) is not None:
            found[f"team of {team}"] = one
    if rows <= 8:
        return found
    tiles = -(-rows // 16)
    spread = spread_variant(plan, tiles)
    if spread is not None:
        found["spread"] = spread
    if spread is not None and (rows > 16 or not quick):
        unit = plan.coding.unit
        found["spread, short stages"] = replace(spread, stage_steps=unit, stages=min(8, 2 * spread.stages))
        found["spread, few rows"] = replace(spread, together=max(1, spread.together // 2))
        if rows > 16:
            found["spread, 2 buffers"] = replace(spread, buffers=2, stages=max(2, spread.stages // 2))
            found["spread, 1 buffer"] = replace(spread, buffers=1)
    if found:
        found["ring"] = Variant(1, True)
    share = share_variant(plan, tiles)
    if share is not None:
        found["ring" if rows <= 16 else "tiles of 16"] = Variant(1, True)
        found["share"] = share
        found["share, half the stages"] = replace(share, stages=max(1, share.stages // 2))
    if rows > 16:
        found["tiles of 16"] = Variant(1, True)
        if plan.passes == 1 and plan.format != "fp8_block":
            found["tiles"] = Variant(tiles, True)
    group = group_variant(plan, tiles) if rows > 16 else None
    if group is not None:
        found["group"] = group
        found["group, 12 stages"] = replace(group, stages=12)
    kept: dict[str, Variant] = {}
    for name, variant in found.items():
        fits = shared_bytes(plan, variant) <= SHARED_LIMIT
        if fits and variant != chosen and variant not in kept.values():
            kept[name] = variant
    return kept


def family_of(plan: StreamPlan, variant: Variant) -> str:
    """Which check stands for a kernel."""
    form = ("", "group", "spread", "share", "team")[variant.form]
    if plan.format != "bf16":
        return f"{plan.format} {form}".strip()
    if form:
        return form
    if variant.tiles > 1:
        return "wide"
    if plan.split > 1:
        return "cluster"
    return "passes" if plan.passes > 1 else "ring"


def random_matrix(n: int, k: int, format_name: str, device: torch.device) -> PackedWeight:
    """Weights of a layer's size."""
    make = torch.Generator(device).manual_seed(n + k)
    return quantize(torch.randn(n, k, generator=make, device=device) / k**0.5, format_name)


def streamed(stored: PackedWeight, plan: StreamPlan, cache_dir: Path) -> StreamedWeight:
    """The matrix in the order of a plan."""
    return StreamedWeight(plan, pack_tape(stored, plan), cache_dir, outer_scales(stored))


def dense_plan(format_name: str, device: torch.device) -> StreamPlan:
    """The plan whose way back to bf16 is timed."""
    count = multiprocessors(device)
    return plan_stream(*SHAPES["gdn_in"], count, format_name=format_name)
