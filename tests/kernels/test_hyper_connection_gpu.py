"""The streamed hyper-connection kernels: layout on the CPU, cubins without a GPU, results on one."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from stepfloor.formats.codec import PackedWeight, quantize
from stepfloor.kernels import hc_down as hc_down_module
from stepfloor.kernels import hc_mix as hc_mix_module
from stepfloor.kernels._jit import compile_cuda, missing_for_cuda
from stepfloor.kernels._stream import SHARED_LIMIT, outer_scales, pack_tape, say_once
from stepfloor.kernels.hc_down import (
    DownPlan,
    StreamedDown,
    hc_down,
    hc_down_inputs,
    hc_down_reference,
    hc_down_repack,
    plan_down,
)
from stepfloor.kernels.hc_mix import (
    StreamedMix,
    hc_mix,
    hc_mix_inputs,
    hc_mix_reference,
    hc_mix_repack,
    pack_mix,
    plan_mix,
    unpack_mix,
)
from tests.kernels.streamed import down_faults, mix_faults

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
NO_NVRTC = missing_for_cuda()
ROWS = (1, 2, 3, 4, 5, 8, 9, 16, 17, 40, 64, 65, 80)
QUANTIZED = ("fp8_channel", "mxfp8")


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("multiprocessors", [48, 114, 132, 188])
def test_plans_of_the_model(parts: int, multiprocessors: int) -> None:
    """No wasted bytes, no second wave, no kernel a multiprocessor cannot hold, no sum that depends on the GPU."""
    plan = plan_down(324, 320, 4, 2560, multiprocessors, parts, halves=2)
    assert max(plan.blocks(1), plan.blocks(64)) <= multiprocessors
    assert (plan.stream.split, plan.stream.steps) == (4 * parts, 10 // parts)
    mix = plan_mix(2560, 4, 320, multiprocessors)
    assert mix.blocks <= multiprocessors
    assert (mix.stream.slices, mix.stream.steps) == (2, 5)
    if multiprocessors == 132:
        assert plan.stream.tape_bytes <= 1.04 * 2 * 324 * 10240
        assert mix.stream.tape_bytes == 2 * 320 * 10240
        assert hc_down_module.fit_plan(plan, SHARED_LIMIT) == plan
        assert hc_mix_module.fit_plan(mix, SHARED_LIMIT) == mix
        # up to 32 rows a block of hc_mix fits beside one of the product
        assert hc_down_module.shared_bytes(plan, 32) + hc_mix_module.shared_bytes(mix, 32) + 2048 <= 228 * 1024


def test_turns_take_every_row_once() -> None:
    """A row that no turn takes, or a turn without rows, whose clamped addresses would point before the input."""
    down, mix = plan_down(324, 320, 4, 2560, 132, 2), plan_mix(2560, 4, 320, 132)
    for turn_rows in (16, 32, 48, 64, 80):
        for rows in range(1, 81):
            for plan in (down, mix):
                turns = replace(plan, turn_rows=turn_rows).turns(rows)
                assert turns.rows <= turn_rows
                assert turns.rows * (turns.count - 1) < rows <= turns.rows * turns.count


def test_turns_shrink_to_the_shared_memory() -> None:
    """A chip with 99 KB a block takes fewer rows at a time and still all of them."""
    down = hc_down_module.fit_plan(plan_down(324, 320, 4, 2560, 132, 2), 99 * 1024)
    mix = hc_mix_module.fit_plan(plan_mix(2560, 4, 320, 84), 99 * 1024)
    assert (down.turn_rows, mix.turn_rows) == (32, 16)
    assert (down.turns(64).count, mix.turns(64).count) == (2, 4)


@pytest.mark.parametrize(("d", "multiprocessors", "slices"), [(46, 3, 2), (46, 3, 1), (2560, 132, 2), (7, 16, 1)])
def test_mix_tape_is_a_permutation(d: int, multiprocessors: int, slices: int) -> None:
    for name in ("bf16", *QUANTIZED, "fp8_tensor"):
        up = quantize(torch.randn(4 * d, 64), name)
        plan = plan_mix(d, 4, 64, multiprocessors, slices, name)
        tape, scales = pack_mix(up, plan)
        assert tape.numel() == plan.stream.tape_bytes
        assert torch.equal(unpack_mix(tape, plan, scales).dequantize(), up.dequantize())


@pytest.mark.skipif(NO_NVRTC is not None, reason=NO_NVRTC or "")
@pytest.mark.parametrize("arch", ["sm_90a", "sm_120a"])
@pytest.mark.parametrize(
    ("capacity", "name"), [(1, "bf16"), (16, "bf16"), (32, "bf16"), (1, "mxfp8"), (16, "fp8_channel")]
)
def test_compiles(capacity: int, name: str, arch: str, tmp_path: Path) -> None:
    plan, mix = plan_down(324, 320, 4, 2560, 132, 2, name), plan_mix(2560, 4, 320, 132, format_name=name)
    for source, macros in (
        ("hc_down.cu", hc_down_module.product_macros(plan, capacity)),
        ("hc_mix.cu", hc_mix_module.kernel_macros(mix, capacity)),
    ):
        assert compile_cuda(source, macros, arch, tmp_path).startswith(b"\x7fELF")


@pytest.mark.skipif(NO_NVRTC is not None, reason=NO_NVRTC or "")
@pytest.mark.parametrize("arch", ["sm_90a", "sm_120a"])
def test_norms_and_the_largest_product_compile(arch: str, tmp_path: Path) -> None:
    plan = plan_down(324, 320, 4, 2560, 132, 2, halves=2 if arch == "sm_90a" else 1)
    found = [hc_down_module.norms_macros(plan, write) for write in (True, False)]
    for macros in (*found, hc_down_module.product_macros(plan, 64), hc_down_module.product_macros(plan, 80)):
        assert compile_cuda("hc_down.cu", macros, arch, tmp_path).startswith(b"\x7fELF")


def test_repack_stays_with_torch_where_it_must(caplog: pytest.LogCaptureFixture) -> None:
    down = hc_down_inputs(1, 16, 8, "bf16", torch.bfloat16, "cpu")["down"]
    up = hc_mix_inputs(1, 16, 8, "bf16", torch.bfloat16, "cpu")["up"]
    say_once.cache_clear()
    with caplog.at_level("INFO"):
        assert hc_down_repack(down, 8, 4, "cpu")[0].data is down[0].data
        assert hc_mix_repack(up, 4, "cpu")[0].data is up[0].data
    assert caplog.text.count("is not repacked") == 2


@pytest.mark.parametrize("name", ["bf16", *QUANTIZED])
def test_streamed_weights_on_the_cpu_are_the_reference(name: str) -> None:
    inputs = hc_down_inputs(3, 256, 20, name, torch.bfloat16, "cpu")
    plan, weight = plan_down(24, 20, 4, 256, 8, 1, format_name=name), inputs["down"][0]
    streamed = StreamedDown(plan, pack_tape(weight, plan.stream), Path(), outer_scales(weight))
    for ours, wanted in zip(hc_down(**{**inputs, "down": (streamed,)}), hc_down_reference(**inputs), strict=True):
        assert torch.equal(ours, wanted)
    mixed = hc_mix_inputs(3, 46, 64, name, torch.bfloat16, "cpu")
    mix = plan_mix(46, 4, 64, 3, format_name=name)
    tape, scales = pack_mix(mixed["up"][0], mix)
    up = StreamedMix(mix, tape, Path(), scales)
    assert torch.equal(hc_mix(**{**mixed, "up": (up,)}), hc_mix_reference(**mixed))


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("name", ["bf16", *QUANTIZED])
@pytest.mark.parametrize("write", [True, False])
@pytest.mark.parametrize("inject", [True, False])
def test_down_against_the_reference(write: bool, inject: bool, name: str, tmp_path: Path) -> None:
    inputs = hc_down_inputs(96, 2560, 320, name, torch.bfloat16, "cuda", write)
    weight = inputs["down"][0]
    if not inject:
        scale = None if weight.scale is None else weight.scale[:320].contiguous()
        weight = PackedWeight(name, (320, 10240), weight.data[:320].contiguous(), scale)
    down = hc_down_repack((weight,), 320, 4, "cuda", tmp_path)
    assert isinstance(down[0], StreamedDown)
    wanted = hc_down_reference(**{**inputs, "down": (weight,)})
    full: tuple[Tensor, ...] | None = None
    for rows in reversed(ROWS):
        part = {name: t[:rows] for name in ("residual", "y", "y_weights") if (t := inputs[name]) is not None}
        ours = hc_down(**{**inputs, **part, "down": down})
        assert down_faults(ours, [t[:rows] for t in wanted], weight) == []
        full = ours if full is None else full
        assert all(torch.equal(a, b[:rows]) for a, b in zip(ours, full, strict=True))
    library = hc_down(**{**inputs, "down": down})
    if name != "fp8_channel":  # whose weights the library gets rounded to bf16
        assert down_faults(library, wanted, weight) == []
    else:
        rounded = PackedWeight("bf16", weight.shape, weight.dequantize().to(torch.bfloat16))
        assert down_faults(library, hc_down_reference(**{**inputs, "down": (rounded,)}), rounded) == []


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("plan", [plan_down(324, 320, 4, 2560, 132, p, halves=p) for p in (1, 2)], ids=str)
def test_every_plan_of_down(plan: DownPlan, tmp_path: Path) -> None:
    inputs = hc_down_inputs(40, 2560, 320, "bf16", torch.bfloat16, "cuda")
    weight = inputs["down"][0]
    down = StreamedDown(plan, pack_tape(weight, plan.stream), tmp_path)
    torch.cuda.synchronize()
    ours = hc_down(**{**inputs, "down": (down,)})
    assert down_faults(ours, hc_down_reference(**inputs), weight) == []


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("name", ["bf16", *QUANTIZED])
def test_mix_against_the_reference(name: str, tmp_path: Path) -> None:
    inputs = hc_mix_inputs(96, 2560, 320, name, torch.bfloat16, "cuda")
    up = hc_mix_repack(inputs["up"], 4, "cuda", tmp_path)
    assert isinstance(up[0], StreamedMix)
    wanted = hc_mix_reference(**inputs)
    full = hc_mix(inputs["low"][:80], inputs["normed"][:80], up, 4)
    for rows in ROWS:
        low, normed = inputs["low"][:rows], inputs["normed"][:rows]
        ours = hc_mix(low, normed, up, 4)
        assert mix_faults(ours, wanted[:rows], low, normed, inputs["up"][0]) == []
        assert torch.equal(ours, full[:rows])
    rounded = PackedWeight("bf16", (10240, 320), inputs["up"][0].dequantize().to(torch.bfloat16))
    wanted = hc_mix_reference(**{**inputs, "up": (rounded,)})  # what the library gets
    assert mix_faults(hc_mix(**{**inputs, "up": up}), wanted, inputs["low"], inputs["normed"], rounded) == []


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("name", ["bf16", *QUANTIZED])
def test_all_turns_give_a_row_the_bits_it_has_alone(name: str, tmp_path: Path) -> None:
    """Guards against an order of sums, or a rounding of n, that depends on the rows beside it or on the turns."""
    inputs = hc_down_inputs(80, 2560, 320, name, torch.bfloat16, "cuda")
    mixed = hc_mix_inputs(80, 2560, 320, name, torch.bfloat16, "cuda")
    plan, mix = plan_down(324, 320, 4, 2560, 132, 2, name), plan_mix(2560, 4, 320, 132, format_name=name)
    weight = inputs["down"][0]
    down = StreamedDown(plan, pack_tape(weight, plan.stream), tmp_path, outer_scales(weight))
    tape, scales = pack_mix(mixed["up"][0], mix)
    up = StreamedMix(mix, tape, tmp_path, scales)
    torch.cuda.synchronize()

    def both(first: int, rows: int, turn_rows: int, halves: int = 1) -> tuple[Tensor, ...]:
        part = slice(first, first + rows)
        given = {key: inputs[key][part] for key in ("residual", "y", "y_weights")}
        form = replace(down, plan=replace(plan, turn_rows=turn_rows, halves=halves))
        mix_form = replace(up, plan=replace(mix, turn_rows=turn_rows))
        normed = mixed["normed"][part]
        return (*hc_down(**{**inputs, **given, "down": (form,)}), hc_mix(mixed["low"][part], normed, (mix_form,), 4))

    alone = {row: both(row, 1, 80) for row in (0, 7, 8, 15, 16, 33, 47, 63, 64, 79)}
    for turn_rows, halves in ((8, 1), (16, 1), (32, 1), (32, 2), (48, 2), (64, 1), (64, 2), (80, 2)):
        for rows in (1, 9, 16, 17, 40, 64, 80):
            together = both(0, rows, turn_rows, halves)
            for row, wanted in alone.items():
                if row < rows:
                    same = [torch.equal(a[row], b[0]) for a, b in zip(together, wanted, strict=True)]
                    assert all(same), (turn_rows, halves, rows, row, same)


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("rows", [4, 64])
def test_graph_replay_of_dependent_pairs_equals_eager(rows: int, tmp_path: Path) -> None:
    """A kernel that starts early must still wait for its input."""
    inputs = hc_down_inputs(rows, 2560, 320, "bf16", torch.bfloat16, "cuda")
    mixed = hc_mix_inputs(rows, 2560, 320, "bf16", torch.bfloat16, "cuda")
    down = hc_down_repack(inputs["down"], 320, 4, "cuda", tmp_path, max_rows=rows)
    up = hc_mix_repack(mixed["up"], 4, "cuda", tmp_path, max_rows=rows)

    def chain() -> tuple[Tensor, ...]:
        residual, y, weights = inputs["residual"], inputs["y"], inputs["y_weights"]
        for _ in range(6):
            given = {"residual": residual, "y": y, "y_weights": weights, "down": down}
            residual, normed, low, weights = hc_down(**{**inputs, **given})
            y = hc_mix(low, normed, up, 4)
        return residual, y, weights

    eager = chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain()
    for _ in range(3):
        for t in captured:
            t.fill_(float("nan"))
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(captured, eager, strict=True))
