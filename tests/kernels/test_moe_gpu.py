"""The streamed experts: their plans and cubins without a GPU, their results on one through the public functions."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stepfloor.formats.codec import PackedWeight
from stepfloor.kernels._experts import SHARED_LIMIT, TiledExperts, decode_experts, decode_macros, pack_experts
from stepfloor.kernels._jit import compile_cuda, missing_for_cuda
from stepfloor.kernels.moe_down import (
    SLICES,
    DownPlan,
    TiledShared,
    moe_down,
    moe_down_inputs,
    moe_down_repack,
    pack_shared,
    plan_down,
)
from stepfloor.kernels.moe_gate_up import (
    WARPS,
    GateUpPlan,
    moe_gate_up,
    moe_gate_up_inputs,
    moe_gate_up_repack,
    plan_gate_up,
)
from stepfloor.kernels.moe_route import moe_route, moe_route_reference, route_macros
from tests.kernels import test_moe_down

ROWS = (1, 2, 4, 8, 16, 64, 80)
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
NO_NVRTC = missing_for_cuda()


def plans(rows: int) -> tuple[GateUpPlan, DownPlan]:
    """The kernels of the model's own experts on a GPU of 132 multiprocessors."""
    tape = torch.empty((512, 0), dtype=torch.uint8)
    gate_up = TiledExperts((1280, 2560), True, WARPS, 5, tape, tape, Path())
    down = TiledExperts((2560, 640), False, SLICES, 5, tape, tape, Path())
    return plan_gate_up(gate_up, 10, rows), plan_down(down, 640, 10, rows, 132)


@pytest.mark.parametrize("rows", ROWS)
def test_plans_of_the_model(rows: int) -> None:
    """No second wave, no kernel that a multiprocessor cannot hold, no padded columns."""
    gate_up, down = plans(rows)
    assert max(gate_up.shared_bytes, down.shared_bytes) <= SHARED_LIMIT
    assert gate_up.steps * WARPS * 64 == 2560
    assert down.steps * SLICES * 64 == 640
    assert down.blocks <= 132


@pytest.mark.skipif(NO_NVRTC is not None, reason=NO_NVRTC or "")
@pytest.mark.parametrize("arch", ["sm_90a", "sm_120a"])
@pytest.mark.parametrize("rows", [4, 16, 80])
def test_compiles(rows: int, arch: str, tmp_path: Path) -> None:
    gate_up, down = plans(rows)
    assert compile_cuda("moe_gate_up.cu", gate_up.macros, arch, tmp_path).startswith(b"\x7fELF")
    assert compile_cuda("moe_down.cu", down.macros, arch, tmp_path).startswith(b"\x7fELF")


@pytest.mark.skipif(NO_NVRTC is not None, reason=NO_NVRTC or "")
@pytest.mark.parametrize("arch", ["sm_90a", "sm_120a"])
def test_route_compiles(arch: str, tmp_path: Path) -> None:
    cubin = compile_cuda("moe_route.cu", route_macros(512, 10, 640, True), arch, tmp_path)
    assert cubin.startswith(b"\x7fELF")


@pytest.mark.skipif(NO_NVRTC is not None, reason=NO_NVRTC or "")
@pytest.mark.parametrize("arch", ["sm_90a", "sm_120a"])
def test_decoding_compiles(arch: str, tmp_path: Path) -> None:
    for macros in (decode_macros((1280, 2560), WARPS, 5, True), decode_macros((2560, 640), SLICES, 5, False)):
        assert compile_cuda("_experts.cu", macros, arch, tmp_path).startswith(b"\x7fELF")


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize(("n", "k", "slices", "paired"), [(1280, 2560, WARPS, True), (2560, 640, SLICES, False)])
def test_decoding_is_exact(n: int, k: int, slices: int, paired: bool, tmp_path: Path) -> None:
    weight = moe_gate_up_inputs(1, k, n // 2, 12, 1, "nvfp4", torch.bfloat16, "cuda")["gate_up"]
    assert isinstance(weight, PackedWeight)
    weight = replace(weight, scale_2=torch.full((12,), 0.5, device="cuda"))  # whose products are exact
    tiled = pack_experts(weight, slices, paired, tmp_path)
    out = torch.full((6, n, k), torch.nan, dtype=torch.bfloat16, device="cuda")
    factor = decode_experts(tiled, 7, out[:5])
    assert torch.equal(out[:5].float() * factor[:, None, None], weight.dequantize()[7:])
    assert bool(out[5].isnan().all())


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize(("experts", "topk", "channels"), [(512, 10, 640), (8, 2, 64), (37, 32, 5)])
def test_route_is_the_reference(experts: int, topk: int, channels: int) -> None:
    """Choices equal, ties to the lower id; values at most one bf16 step apart, where two exponentials differ."""
    products = torch.randn(80, experts + 2 * channels + 1, device="cuda").to(torch.bfloat16)
    products[3, :experts] = 0.25
    found = moe_route(products, experts, topk, True)
    # on the CPU: equal logits then have equal probabilities to the last bit here as there
    wanted = moe_route_reference(products.cpu(), experts, topk, True)
    assert torch.equal(found[0].cpu(), wanted[0])
    for ours, theirs in zip(found[1:], wanted[1:], strict=True):
        assert bool(((ours.cpu().float() - theirs.float()).abs() <= theirs.float().abs() * 2**-7).all())


def test_repack_stays_with_torch_where_it_must(caplog: pytest.LogCaptureFixture) -> None:
    inputs: dict[str, Any] = moe_down_inputs(2, 16, 16, 16, 4, 2, "nvfp4", torch.bfloat16, "cpu")
    with caplog.at_level("INFO"):
        down, shared = moe_down_repack(inputs["down"], inputs["shared_down"], 2, "cpu")
    assert isinstance(down, PackedWeight)
    assert isinstance(shared[0], PackedWeight)
    assert "are not tiled" in caplog.text


def test_tiled_weights_on_the_cpu_are_the_reference(tmp_path: Path) -> None:
    inputs: dict[str, Any] = moe_gate_up_inputs(3, 64, 16, 4, 2, "nvfp4", torch.bfloat16, "cpu")
    tiled = pack_experts(inputs["gate_up"], WARPS, True, tmp_path)
    assert torch.equal(moe_gate_up(**inputs), moe_gate_up(**{**inputs, "gate_up": tiled}))
    inputs = moe_down_inputs(3, 32, 48, 80, 4, 2, "nvfp4", torch.bfloat16, "cpu")
    swapped = {"down": pack_experts(inputs["down"], SLICES, False, tmp_path)}
    assert torch.equal(moe_down(**inputs), moe_down(**{**inputs, **swapped}))
    shared = {"shared_down": (pack_shared(inputs["shared_down"][0]),)}
    assert torch.equal(moe_down(**inputs), moe_down(**{**inputs, **swapped, **shared}))


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize(("d", "width", "experts", "topk"), [(2560, 640, 512, 10), (256, 48, 8, 2), (1040, 16, 33, 3)])
def test_gate_up_against_float64(d: int, width: int, experts: int, topk: int, tmp_path: Path) -> None:
    """Right values, and a row's bits independent of the other rows."""
    inputs: dict[str, Any] = moe_gate_up_inputs(85, d, width, experts, topk, "nvfp4", torch.bfloat16, "cuda")
    x, ids, weight = inputs["x"], inputs["ids"], inputs["gate_up"]
    tiled = moe_gate_up_repack(weight, topk, "cuda", tmp_path)
    assert isinstance(tiled, TiledExperts)
    both, size = (torch.empty((85, topk, 2 * width), dtype=torch.float64, device="cuda") for _ in range(2))
    for expert in range(experts):
        t, j = (ids == expert).nonzero(as_tuple=True)
        matrix = weight.expert(expert).dequantize().double()
        both[t, j], size[t, j] = x[t].double() @ matrix.T, x[t].double().abs() @ matrix.abs().T
    gate, up = both.chunk(2, -1)
    silu = torch.nn.functional.silu(gate)
    # one rounding to bf16, a fast exponential and division; float32 sums of K terms; silu's slope is below 1.1
    off, up_off = (size * d * 2.0**-24).chunk(2, -1)
    bound = (silu * up).abs() * (2**-8 + 2**-19) + 1.1 * off * (up.abs() + up_off) + silu.abs() * up_off + 1e-30
    full = moe_gate_up(x, ids, tiled)
    assert bool(((full.double() - silu * up).abs() <= bound).all())
    for rows in ROWS:
        assert torch.equal(moe_gate_up(x[:rows], ids[:rows], tiled), full[:rows])
        assert torch.equal(moe_gate_up(x[-rows:], ids[-rows:], tiled), full[-rows:])


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize(
    ("d", "width", "shared", "experts", "topk"), [(2560, 640, 640, 64, 10), (256, 48, 64, 8, 2), (96, 640, 208, 33, 3)]
)
@pytest.mark.parametrize("fused", [True, False])
def test_down_against_float64(
    d: int, width: int, shared: int, experts: int, topk: int, fused: bool, tmp_path: Path
) -> None:
    """Right values, with the shared expert inside of the kernel or not, and a row's bits its own."""
    inputs: dict[str, Any] = moe_down_inputs(85, d, width, shared, experts, topk, "nvfp4", torch.bfloat16, "cuda")
    down, matrices = moe_down_repack(inputs["down"], inputs["shared_down"], topk, "cuda", tmp_path)
    assert isinstance(down, TiledExperts)
    assert isinstance(matrices[0], TiledShared)
    exact, sizes = test_moe_down.exact(inputs), test_moe_down.exact(inputs, magnitudes=True)
    swapped = {**inputs, "down": down, "shared_down": matrices if fused else inputs["shared_down"]}

    def some(rows: slice) -> Tensor:
        return moe_down(**{**swapped, **{key: inputs[key][rows] for key in test_moe_down.PER_ROW}})

    full = some(slice(None))
    # as many roundings as the reference at most; alone the kernel rounds once
    roundings = 1 if fused else 5
    terms = max(width, shared) + topk + shared // 64 + 4
    bound = exact.abs() * 2**-8 + sizes * (terms * 2.0**-24 + (roundings - 1) * 2**-8)
    assert bool(((full.double() - exact).abs() <= bound).all())
    for rows in ROWS if fused else ():
        assert torch.equal(some(slice(rows)), full[:rows])
        assert torch.equal(some(slice(85 - rows, 85)), full[-rows:])


@pytest.mark.gpu
@GPU
def test_graph_replay_equals_eager(tmp_path: Path) -> None:
    """Two layers, captured: down starts early, and reads what it must not read before gate/up has ended."""
    first: dict[str, Any] = moe_gate_up_inputs(4, 2560, 640, 32, 10, "nvfp4", torch.bfloat16, "cuda")
    second: dict[str, Any] = moe_down_inputs(4, 2560, 640, 640, 32, 10, "nvfp4", torch.bfloat16, "cuda")
    gate_up = moe_gate_up_repack(first["gate_up"], 10, "cuda", tmp_path)
    down, shared = moe_down_repack(second["down"], second["shared_down"], 10, "cuda", tmp_path)
    ids = first["ids"]

    def chain(y: Tensor) -> Tensor:
        for _ in range(4):
            hidden = moe_gate_up(y, ids, gate_up)
            y = moe_down(hidden, ids, second["weights"], down, second["shared_hidden"], second["shared_gate"], shared)
        return y

    eager = chain(first["x"])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain(first["x"])
    for _ in range(3):
        captured.fill_(torch.nan)
        graph.replay()
        assert torch.equal(captured, eager)
