"""Attention of a decode step, its CUDA kernel, on the CPU: C++ built against `host/stream.cuh`, a thread a lane.

Guards against wrong addresses, alignment and sizes of shared memory, lanes that meet the wrong positions or
dimensions, positions that nobody keeps, and bits that depend on the other rows, sequences or clusters. Races it does
not show.
"""

import ctypes
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stepfloor.kernels._attend import AttendPlan, choose_attend, pack_attend
from stepfloor.kernels._jit import compile_cuda
from stepfloor.kernels.qsa_attend import qsa_attend_inputs
from tests.kernels.compare import assert_same
from tests.kernels.lanes import build, needs_compiler
from tests.kernels.sparse_layer import assert_attended

ENTRY = """
extern "C" int run(const Arguments* a, const u64* ranges, int count, int blocks, u64 shared_bytes) {
  readable.clear();
  for (int i = 0; i < count; i++) readable.push_back({(const u8*)ranges[2 * i], ranges[2 * i + 1]});
  return run_grid(blocks, CLUSTER, THREADS, shared_bytes, [=] { qsa_attend_kernel(*a); });
}
"""
LEFT = 1000.0  # far from any result
# rows up to position 242 keep everything: four pieces of two blocks
SMALL = AttendPlan(heads=6, kv_heads=2, dim=64, ratio=4, topk=60, page=16, fp8=False, tile=4, cluster=2)
MANY = AttendPlan(heads=12, kv_heads=1, dim=64, ratio=4, topk=40, page=16, fp8=False, tile=4, cluster=3)
WIDE = AttendPlan(heads=4, kv_heads=1, dim=64, ratio=4, topk=40, page=16, fp8=False, tile=2, cluster=3)


FP8 = replace(SMALL, fp8=True)


@needs_compiler
@pytest.mark.parametrize(
    ("plan", "rows", "context"),
    [
        (SMALL, 4, 0),  # first rows of a text
        (FP8, 3, 63),  # a row opens the second piece
        (SMALL, 4, 241),  # two rows of one sequence keep everything, all of the other
        (SMALL, 5, 170),  # rows of two tiles
        (SMALL, 2, 300),  # nobody keeps everything
        (WIDE, 2, 150),
        (replace(WIDE, fp8=True), 1, 155),
        (MANY, 4, 140),  # more query heads than two tiles of the matrix unit
    ],
    ids=str,
)
def test_kernel_on_the_host(plan: AttendPlan, rows: int, context: int, tmp_path: Path) -> None:
    """At the exact result; the same bits from every plan and number of clusters, and for each row alone."""
    inputs = inputs_for(plan, 2, rows, context)
    ours = run(plan, inputs, tmp_path, clusters=3)
    for b in range(2):
        keeping = [r for r in range(rows) if (int(inputs["first"][b]) + r + 1) // plan.ratio <= plan.topk]
        assert_attended(ours[b : b + 1], one(inputs, b, slice(rows)) | {"ratio": plan.ratio}, keeping)
        assert bool((ours[b, len(keeping) :] == LEFT).all())
    assert_same(run(replace(plan, tile=2), inputs, tmp_path, clusters=1), ours)
    for b, r in ((0, 0), (1, rows - 1)):
        alone = one(inputs, b, slice(r, r + 1))
        alone["first"] = alone["first"] + r
        assert_same(run(replace(plan, tile=1), alone, tmp_path, clusters=2)[0, 0], ours[b, r])


@needs_compiler
def test_what_is_received_may_lie_over_the_pieces(tmp_path: Path) -> None:
    """The same bits, over several units of a cluster."""
    inputs = inputs_for(SMALL, 2, 4, 150)
    wanted = run(SMALL, inputs, tmp_path, clusters=1)
    over = replace(SMALL, over=True)
    assert_same(run(over, inputs, tmp_path, clusters=1), wanted)
    assert_same(run(over, inputs, tmp_path, clusters=3), wanted)


@needs_compiler
def test_only_kept_positions_are_read(tmp_path: Path) -> None:
    """NaN in other positions, other pages and page 0 reaches no result: zero times NaN is NaN."""
    inputs = inputs_for(SMALL, 1, 2, 130)
    wanted = run(SMALL, inputs, tmp_path, clusters=2)
    page, table = inputs["keys"].shape[1], inputs["page_table"][1]
    keep = torch.arange(132)
    for name in ("keys", "values"):
        poisoned = torch.full_like(inputs[name], torch.nan)
        poisoned[table[keep // page], keep % page] = inputs[name][table[keep // page], keep % page]
        inputs[name] = poisoned
    assert_same(run(SMALL, inputs, tmp_path, clusters=4), wanted)


@needs_compiler
def test_a_padding_row_disturbs_nobody(tmp_path: Path) -> None:
    """One at the scratch slot, whose page holds NaN."""
    inputs = inputs_for(SMALL, 2, 2, 21)
    wanted = run(SMALL, inputs, tmp_path, clusters=2)
    inputs["slots"] = torch.tensor([1, 0])
    inputs["first"][1] = 0
    inputs["keys"][0] = inputs["values"][0] = torch.nan
    assert_same(run(SMALL, inputs, tmp_path, clusters=2)[0], wanted[0])


@pytest.mark.parametrize(("arch", "kilobytes", "tiles"), [("sm_90a", 227, [1, 2, 4, 4]), ("sm_120a", 99, [1, 2, 2, 2])])
def test_compiles(arch: str, kilobytes: int, tiles: list[int], tmp_path: Path) -> None:
    """The model's plans for 1, 2, 3 and 5 rows; on a workstation card a block has 99 KB of shared memory."""
    for kv in (torch.bfloat16, torch.float8_e4m3fn):
        keys = torch.empty(1, 64, 2, 256, dtype=kv)
        plans = [choose_attend(torch.empty(1, r, 24, 256), keys, 4, 512, kilobytes * 1024) for r in (1, 2, 3, 5)]
        for plan, tile in zip(plans, tiles, strict=True):
            assert plan is not None
            assert plan.tile == tile or kv != torch.bfloat16
            compile_cuda("qsa_attend.cu", plan.macros(), arch, tmp_path)


def inputs_for(plan: AttendPlan, sequences: int, rows: int, context: int) -> dict[str, Any]:
    """Sequences of two lengths in slots out of order, selected blocks ascending, the cache in shuffled pages."""
    inputs: dict[str, Any] = qsa_attend_inputs(
        sequences, rows, context, plan.heads, plan.kv_heads, plan.dim, plan.ratio, plan.topk, torch.bfloat16, "cpu"
    )
    if plan.fp8:
        for name in ("keys", "values"):
            inputs[name] = inputs[name].to(torch.float8_e4m3fn)
    if sequences == 2:
        shorter = max(context - 7, 0)
        inputs["first"][1] = shorter
        again: dict[str, Any] = qsa_attend_inputs(
            1, rows, shorter, plan.heads, plan.kv_heads, plan.dim, plan.ratio, plan.topk, torch.bfloat16, "cpu"
        )
        inputs["selected"][1] = again["selected"][0]
    del inputs["ratio"]
    return inputs


def one(inputs: dict[str, Any], b: int, rows: slice) -> dict[str, Any]:
    """Some rows of one sequence."""
    part = {name: inputs[name][b : b + 1, rows].contiguous() for name in ("q", "gate", "selected")}
    return {**inputs, **part, "slots": inputs["slots"][b : b + 1], "first": inputs["first"][b : b + 1]}


def run(plan: AttendPlan, inputs: dict[str, Any], directory: Path, clusters: int) -> Tensor:
    """The kernel's output, LEFT where it writes nothing."""
    assert plan.fits(227 * 1024)
    out = torch.full_like(inputs["gate"], LEFT)
    read = {name: tensor for name, tensor in inputs.items() if name != "selected"}
    packed = pack_attend(**read, out=out)
    tensors = list(read.values())
    ranges = [number for t in tensors for number in (t.data_ptr(), t.numel() * t.element_size())]
    flat = (ctypes.c_uint64 * len(ranges))(*ranges)
    library = build("qsa_attend", ENTRY, plan.macros(), directory, ("-ffp-contract=off",))
    library.run.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_uint64]
    arguments = ctypes.create_string_buffer(packed, len(packed))
    assert library.run(arguments, flat, len(tensors), clusters * plan.cluster, plan.shared_bytes) == 0
    return out
