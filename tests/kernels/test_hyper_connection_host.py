"""`hc_down.cu` and `hc_mix.cu` run on the CPU, built against `host/stream.cuh` with a thread for every lane.

Guards against wrong addresses, sizes of shared memory, fragments and rounding, and against sums that depend on the
number of rows. Races and what the copy engine may do late are for the GPU tests.
"""

import ctypes
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from stepfloor.formats.codec import PackedWeight
from stepfloor.kernels import hc_down as hc_down_module
from stepfloor.kernels import hc_mix as hc_mix_module
from stepfloor.kernels._stream import outer_scales, pack_tape
from stepfloor.kernels.hc_down import hc_down_inputs, hc_down_reference, plan_down
from stepfloor.kernels.hc_mix import hc_mix_inputs, hc_mix_reference, pack_mix, plan_mix, unpack_mix
from tests.kernels.lanes import build, needs_compiler
from tests.kernels.streamed import down_faults, mix_faults

ENTRY = """
extern "C" int run(const Arguments* a, const u64* ranges, int count, u64 shared_bytes, int blocks, int of_cluster) {
  readable.clear();
  for (int i = 0; i < count; i++) readable.push_back({(const u8*)ranges[2 * i], ranges[2 * i + 1]});
  return run_grid(blocks, of_cluster, THREADS, shared_bytes, [=] { %s(*a); });
}
"""
# turn_rows of a plan, rows: tiles and turns that are full and not
DOWN_TURNS = ((16, 1), (4, 3), (16, 19), (48, 35))
MIX_TURNS = ((16, 1), (16, 3), (16, 19), (48, 35))


@needs_compiler
@pytest.mark.parametrize(
    ("parts", "name"),
    [
        (2, "bf16"),
        (1, "fp8_channel"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, "bf16"), (1, "mxfp8"), (2, "mxfp8"))),
    ],
)
def test_down_on_the_host(parts: int, name: str, tmp_path: Path) -> None:
    inputs = hc_down_inputs(35, 512, 24, name, torch.bfloat16, "cpu")
    weight = inputs["down"][0]
    plan = plan_down(28, 24, 4, 512, 18 if parts == 2 else 14, parts, name, halves=2)
    assert plan.stream.groups == (2 if parts == 2 else 3)  # of three, a cluster of two has a dead one
    tape, scales = pack_tape(weight, plan.stream), outer_scales(weight)
    reference = hc_down_reference(**inputs)
    outputs = []
    # what a format changes shows in the first and the last
    for turn_rows, count in DOWN_TURNS if name == "bf16" else DOWN_TURNS[::3]:
        rows = {name: inputs[name][:count].clone() for name in ("residual", "y", "y_weights")}
        out = [torch.full((count + 1, width), torch.nan, dtype=torch.bfloat16) for width in (2048, 2048, 24, 4)]
        packed = hc_down_module.pack_arguments(tape, inputs["norm_scale"], *rows.values(), *out, inputs["eps"], scales)
        given = [tape, inputs["norm_scale"], *rows.values(), *([] if scales is None else [scales])]
        run_down(replace(plan, turn_rows=turn_rows), count, True, packed, given, out[1], tmp_path)
        assert all(bool(t[count:].isnan().all()) for t in out)
        out = [t[:count] for t in out]
        assert down_faults(out, [t[:count] for t in reference], weight) == []
        outputs.append(out)
    most = max(outputs, key=lambda out: out[0].shape[0])
    for fewer in outputs:
        assert all(torch.equal(a, b[: a.shape[0]]) for a, b in zip(fewer, most, strict=True))


@needs_compiler
def test_down_without_a_write_and_without_inject_rows(tmp_path: Path) -> None:
    inputs = hc_down_inputs(3, 256, 20, "bf16", torch.bfloat16, "cpu", write=False)
    weight = PackedWeight("bf16", (20, 1024), inputs["down"][0].data[:20].contiguous())
    plan = plan_down(20, 20, 4, 256, 8, 1)
    tape = pack_tape(weight, plan.stream)
    residual = inputs["residual"]
    normed, low = torch.empty_like(residual), torch.empty((3, 20), dtype=torch.bfloat16)
    nothing = residual.new_empty((3, 0))
    packed = hc_down_module.pack_arguments(
        tape, inputs["norm_scale"], residual, None, None, residual, normed, low, nothing, inputs["eps"]
    )
    run_down(plan, 3, False, packed, [tape, inputs["norm_scale"], residual], normed, tmp_path)
    reference = hc_down_reference(**{**inputs, "down": (weight,)})
    assert down_faults([residual, normed, low, nothing], reference, weight) == []


@needs_compiler
@pytest.mark.parametrize(
    ("slices", "name"),
    [
        (2, "bf16"),
        (2, "fp8_channel"),
        *(pytest.param(1, name, marks=pytest.mark.slow) for name in ("bf16", "mxfp8")),
    ],
)
def test_mix_on_the_host(slices: int, name: str, tmp_path: Path) -> None:
    inputs = hc_mix_inputs(35, 46, 64, name, torch.bfloat16, "cpu")
    weight = inputs["up"][0]
    plan = plan_mix(46, 4, 64, 3, slices, name)  # the last block has a dead channel or two
    tape, scales = pack_mix(weight, plan)
    assert torch.equal(unpack_mix(tape, plan, scales).dequantize(), weight.dequantize())
    reference = hc_mix_reference(**inputs)
    outputs = []
    for turn_rows, count in MIX_TURNS if name == "bf16" else MIX_TURNS[::3]:
        turns = replace(plan, turn_rows=turn_rows).turns(count)
        library = build("hc_mix", ENTRY % "hc_mix_kernel", hc_mix_module.kernel_macros(plan, turns.rows), tmp_path)
        low, normed = inputs["low"][:count].clone(), inputs["normed"][:count].clone()
        out = torch.full((count + 1, 46), torch.nan, dtype=torch.bfloat16)
        packed = hc_mix_module.pack_arguments(tape, low, normed, out, scales)
        reads = [tape, low, normed, *([] if scales is None else [scales])]
        shared = hc_mix_module.shared_bytes(plan, turns.rows)
        assert run(library, packed, reads, shared, turns.count * plan.blocks, 1) == 0
        assert bool(out[count:].isnan().all())
        assert mix_faults(out[:count], reference[:count], low, normed, weight) == []
        outputs.append(out[:count])
    for fewer in outputs:
        assert torch.equal(fewer, outputs[-1][: fewer.shape[0]])


def run_down(
    plan: hc_down_module.DownPlan,
    count: int,
    write: bool,
    packed: bytes,
    reads: list[Tensor],
    normed: Tensor,
    directory: Path,
) -> None:
    """Both kernels, one after the other; the second may read n too."""
    turns = plan.turns(count)
    norms = build("hc_down", ENTRY % "hc_down_norms_kernel", hc_down_module.norms_macros(plan, write), directory)
    squares = plan.d // hc_down_module.UNIT_COLUMNS * 4
    assert run(norms, packed, reads, squares, turns.count * turns.rows * plan.streams, 1) == 0
    macros, shared = hc_down_module.product_macros(plan, turns.rows), hc_down_module.shared_bytes(plan, turns.rows)
    product = build("hc_down", ENTRY % "hc_down_product_kernel", macros, directory)
    blocks, cluster = turns.count * plan.blocks(turns.rows), plan.cluster(turns.rows)
    assert run(product, packed, [*reads, normed], shared, blocks, cluster) == 0


def run(
    library: ctypes.CDLL, packed: bytes, reads: list[Tensor], shared_bytes: int, blocks: int, of_cluster: int
) -> int:
    """Run a kernel that may read these tensors only; the number of faults."""
    ranges = [value for t in reads for value in (t.data_ptr(), t.numel() * t.element_size())]
    table = (ctypes.c_uint64 * len(ranges))(*ranges)
    library.run.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64, ctypes.c_int, ctypes.c_int]
    arguments = ctypes.create_string_buffer(packed)
    return int(library.run(arguments, table, len(reads), shared_bytes, blocks, of_cluster))
