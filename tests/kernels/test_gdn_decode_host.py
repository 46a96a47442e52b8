"""The delta net's CUDA kernels run on the CPU: a C++ compiler builds them against `host/delta.cuh`, a thread a lane.

Guards against wrong addresses, alignment, sizes of shared memory, lanes that meet the wrong rows of the state, sums
whose order depends on the batch, the rows or the blocks of a head, and bits that tell the two kernels for many
sequences from the fused one. Races it does not show.
"""

import ctypes
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stepfloor.kernels._delta_fused import DeltaPlan, pack_arguments
from stepfloor.kernels._delta_split import SplitPlan, pack_split_arguments
from stepfloor.kernels.gdn_decode import gdn_decode_inputs, gdn_decode_reference
from tests.kernels.compare import assert_rounded_alike, assert_same, assert_within, copied
from tests.kernels.delta_net import rule_bound
from tests.kernels.lanes import build, needs_compiler

pytestmark = needs_compiler

ENTRY = """
extern "C" int run(const Arguments* a, const u64* ranges, int count, int blocks, u64 shared_bytes) {
  readable.clear();
  for (int i = 0; i < count; i++) readable.push_back({(const u8*)ranges[2 * i], ranges[2 * i + 1]});
  return run_grid(blocks, %s, THREADS, shared_bytes, [=] { %s_kernel(*a); });
}
"""
# two value heads a key head, fewer rows than can be pending
WIDE = DeltaPlan(1, 2, 64, 16, 2, 3, False, cols=8, parts=1, early=0)
NARROW = DeltaPlan(2, 2, 32, 32, 3, 3, True, cols=16, parts=2, early=1)
GROUPED = DeltaPlan(1, 2, 64, 32, 2, 4, False, cols=8, parts=2)
CASES: dict[str, list[DeltaPlan | SplitPlan]] = {
    "a block a head": [
        WIDE,
        replace(WIDE, parts=2, early=2),
        replace(WIDE, parts=2, joined=False),
        replace(WIDE, early=3),
    ],
    "16 columns a warp": [
        NARROW,
        replace(NARROW, early=3),
        replace(NARROW, parts=1),
        SplitPlan(NARROW, settled=True),
        SplitPlan(NARROW, settled=True, halves=2),
        SplitPlan(NARROW, settled=True, ring=1),
        SplitPlan(NARROW, settled=True, ring=3),
    ],
    "two value heads a key head": [
        GROUPED,
        SplitPlan(GROUPED, settled=False),
        SplitPlan(GROUPED, settled=False, ring=2),
    ],
}


@pytest.mark.parametrize("case", CASES)
def test_kernel_on_the_host(case: str, tmp_path: Path) -> None:
    """Close to the reference; the same bits from every plan, for each sequence alone, and for fewer rows."""
    plans = CASES[case]
    plan = plans[0]
    assert isinstance(plan, DeltaPlan)
    inputs = inputs_for(plan, 2)
    wanted = copied(inputs)
    reference = gdn_decode_reference(**wanted)
    first: dict[str, Any] = {}
    for candidate in plans:
        ours = copied(inputs)
        output = run(candidate, ours, tmp_path)
        compare(output, ours, reference, wanted, plan)
        if first:
            assert_same(output, first["output"])
            assert_same(ours["state"], first["state"])
        first = ours | {"output": output}
        alone = copied(inputs)
        for name in ("projected", "slots", "pending"):
            alone[name] = inputs[name][1:]
        assert_same(run(candidate, alone, tmp_path)[0], output[1])
        assert_same(alone["state"][2], ours["state"][2])
    shorter = replace(plan, rows=1)
    few = copied(inputs) | {"projected": inputs["projected"][:, :1].contiguous()}
    assert_same(run(shorter, few, tmp_path), first["output"][:, :1])
    # what those rows left behind, replayed: the state of plain decoding
    again = copied(few) | {"pending": torch.ones_like(inputs["pending"])}
    again["projected"] = inputs["projected"][:, 1:2].contiguous()
    assert_same(run(shorter, again, tmp_path), first["output"][:, 1:2])


def inputs_for(plan: DeltaPlan, sequences: int) -> dict[str, Any]:
    """Both ends of what can be pending, slots not in order, NaN where no row has been kept."""
    shape = (plan.key_heads, plan.heads, plan.key_dim, plan.value_dim)
    inputs: dict[str, Any] = gdn_decode_inputs(sequences, plan.kept, *shape, torch.bfloat16, "cpu")
    inputs["projected"] = inputs["projected"][:, : plan.rows].contiguous()
    inputs["constants"] = replace(inputs["constants"], activation="silu" if plan.silu else "sigmoid")
    inputs["pending"] = torch.tensor([0, plan.rows])
    inputs["slots"] = torch.tensor([1, 2])
    inputs["raw_rows"][1, 3:] = inputs["raw_rows"][2, 3 + plan.rows :] = torch.nan
    inputs["gate_rows"][1] = inputs["gate_rows"][2, plan.rows :] = torch.nan
    return inputs


def compare(output: Tensor, ours: dict[str, Any], reference: Tensor, wanted: dict[str, Any], plan: DeltaPlan) -> None:
    """Rows and kept rows bit for bit; states and outputs within the rule's rounding and a step of bf16."""
    assert torch.equal(ours["raw_rows"].view(torch.int16), wanted["raw_rows"].view(torch.int16))
    assert torch.equal(ours["gate_rows"].view(torch.int16), wanted["gate_rows"].view(torch.int16))
    rows = plan.rows + plan.kept
    # the exponentials of two libraries may put a value, a key or a query on the other side of a bf16 boundary
    moved = 3 * 2.0**-7
    assert_within(ours["state"], wanted["state"], rule_bound(rows, plan.key_dim, 10.0) + moved)
    assert ((ours["state"] - wanted["state"]).abs() > rule_bound(rows, plan.key_dim, 10.0)).float().mean() < 0.05
    # four roundings to bf16, each a step aside, on top
    assert_within(output, reference, (4 * 2.0**-7 + moved) * float(reference.abs().max()))
    assert_rounded_alike(output, reference)


def run(plan: DeltaPlan | SplitPlan, inputs: dict[str, Any], directory: Path) -> Tensor:
    """The kernel's output; rows go to copies where the plan cannot write in place, and come back."""
    assert plan.fits()
    base = plan.base if isinstance(plan, SplitPlan) else plan
    sequences, rows, columns = inputs["projected"].shape
    # rows begin at multiples of 16 bytes, as the model's do
    held = torch.full((sequences, rows, -(-columns // 8) * 8), torch.nan, dtype=torch.bfloat16)
    held[..., :columns] = inputs["projected"]
    operands = inputs | {"projected": held}
    out = torch.full((sequences, base.rows, base.heads * base.value_dim), torch.nan, dtype=torch.bfloat16)
    c = inputs["constants"]
    tensors = [value for value in operands.values() if isinstance(value, Tensor)]
    tensors += [c.conv_weight, c.a_log, c.dt_bias, c.norm_weight]
    kept = [inputs["raw_rows"], inputs["gate_rows"]]
    if isinstance(plan, SplitPlan):
        scratch = torch.full((sum(plan.scratch(sequences)),), torch.nan)
        packed = pack_split_arguments(plan, **operands, out=out, scratch=scratch)
        call("gdn_rows", plan.macros(), "1", packed, [*tensors, scratch], plan.row_blocks(sequences), 0, directory)
        # one block has all units in turn
        call(
            "gdn_state_ring" if plan.ring else "gdn_state",
            plan.macros(),
            "1",
            packed,
            [*tensors, scratch],
            1,
            plan.state_bytes,
            directory,
        )
        return out
    to = kept if plan.joined else [tensor.clone() for tensor in kept]
    packed = pack_arguments(**operands, out=out, raw_to=to[0], gates_to=to[1])
    blocks = plan.blocks(sequences)
    call("gdn_decode", plan.macros(), "CLUSTER", packed, [*tensors, *to], blocks, plan.shared_bytes, directory)
    for tensor, written in zip(kept, to, strict=True):
        tensor.copy_(written)
    return out


def call(
    stem: str,
    macros: dict[str, int],
    cluster: str,
    packed: bytes,
    tensors: list[Tensor],
    blocks: int,
    shared_bytes: int,
    directory: Path,
) -> None:
    """One launch; what it reads must lie in `tensors`."""
    ranges = [(t.data_ptr(), t.numel() * t.element_size()) for t in tensors]
    flat = (ctypes.c_uint64 * (2 * len(ranges)))(*[number for pair in ranges for number in pair])
    library = build(stem, ENTRY % (cluster, stem), macros, directory, ("-ffp-contract=off",))
    library.run.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_uint64]
    assert library.run(ctypes.create_string_buffer(packed, len(packed)), flat, len(ranges), blocks, shared_bytes) == 0
