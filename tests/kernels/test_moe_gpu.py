"""The streamed experts: their plans and cubins without a GPU, their results on one through the public functions."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stepfloor.formats.codec import PackedWeight, quantize
from stepfloor.kernels._down_few import DownPlan, fit_down, plan_down
from stepfloor.kernels._down_many import SLICES
from stepfloor.kernels._experts import FORMATS, SHARED_LIMIT, TiledExperts, decode_experts, decode_macros, pack_experts
from stepfloor.kernels._jit import compile_cuda, missing_for_cuda
from stepfloor.kernels._shared_expert import TiledShared, pack_shared
from stepfloor.kernels.moe_down import moe_down, moe_down_inputs, moe_down_reference, moe_down_repack
from stepfloor.kernels.moe_gate_up import (
    WARPS,
    GateUpPlan,
    moe_gate_up,
    moe_gate_up_inputs,
    moe_gate_up_reference,
    moe_gate_up_repack,
    plan_gate_up,
)
from stepfloor.kernels.moe_route import moe_route, moe_route_reference, route_macros
from tests.kernels import test_moe_down, test_moe_gate_up
from tests.kernels.compare import assert_within
from tests.kernels.grouped import poison_new_tensors
from tests.kernels.streamed import odd_weight

ROWS = (1, 2, 4, 8, 16, 64, 80)
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
NO_NVRTC = missing_for_cuda()


def plans(rows: int, name: str = "nvfp4") -> tuple[GateUpPlan, DownPlan]:
    """The kernels of the model's own experts on a GPU of 132 multiprocessors."""
    tape = torch.empty((512, 0), dtype=torch.uint8)
    gate_up = TiledExperts((1280, 2560), True, WARPS, 5, tape, tape, Path(), name)
    down = TiledExperts((2560, 640), False, SLICES, 5, tape, tape, Path(), name)
    return plan_gate_up(gate_up, 10, rows), plan_down(down, 640, 10, rows, 132)


@pytest.mark.parametrize("name", list(FORMATS))
@pytest.mark.parametrize("rows", ROWS)
def test_plans_of_the_model(rows: int, name: str) -> None:
    """No second wave, no kernel that a multiprocessor cannot hold, no padded columns."""
    gate_up, down = plans(rows, name)
    assert down.per_multiprocessor == 2
    assert gate_up.per_multiprocessor == 2 or (name != "nvfp4" and rows > 4)
    assert max(gate_up.shared_bytes, down.shared_bytes) <= SHARED_LIMIT
    assert gate_up.steps * WARPS * 64 == 2560
    assert down.steps * SLICES * 64 == 640
    assert down.blocks <= 132 * down.per_multiprocessor


@pytest.mark.gpu
@GPU
def test_blocks_without_clusters_all_fit(tmp_path: Path) -> None:
    """Asked about kernels without clusters, the driver says that it runs none at once: a plan was cut to one block."""
    device = torch.device("cuda", torch.cuda.current_device())
    count = torch.cuda.get_device_properties(device).multi_processor_count
    plan = plans(1)[1]
    assert plan.cluster == 1
    assert fit_down(plan, device, tmp_path).clusters == min(plan.clusters, count * plan.per_multiprocessor)


def test_one_row_leaves_room_for_down() -> None:
    """A third tile of gate/up, or two more warps, would keep down's blocks from starting before gate/up ends."""
    gate_up, down = plans(1)
    reserved = 3 * 1024  # by the chip, a block each
    assert 2 * gate_up.shared_bytes + down.shared_bytes + reserved <= 228 * 1024
    assert gate_up.lean
    assert down.warps <= 6


@pytest.mark.skipif(NO_NVRTC is not None, reason=NO_NVRTC or "")
@pytest.mark.parametrize("arch", ["sm_90a", "sm_120a"])
@pytest.mark.parametrize("rows", [1, 4, 16, 80])
def test_compiles(rows: int, arch: str, tmp_path: Path) -> None:
    for name in ("fp8_channel", "fp8_block") if rows == 16 else ():
        first, second = plans(rows, name)
        assert compile_cuda("moe_gate_up.cu", first.macros, arch, tmp_path).startswith(b"\x7fELF")
        assert compile_cuda("moe_down.cu", second.macros, arch, tmp_path).startswith(b"\x7fELF")
    gate_up, down = plans(rows)
    assert compile_cuda("moe_gate_up.cu", gate_up.macros, arch, tmp_path).startswith(b"\x7fELF")
    for shared_format in ("bf16", "fp8_channel", "fp8_block", "mxfp8") if rows == 16 else ("bf16",):
        macros = replace(down, shared_format=shared_format).macros
        assert compile_cuda("moe_down.cu", macros, arch, tmp_path).startswith(b"\x7fELF")


@pytest.mark.skipif(NO_NVRTC is not None, reason=NO_NVRTC or "")
@pytest.mark.parametrize("arch", ["sm_90a", "sm_120a"])
def test_route_compiles(arch: str, tmp_path: Path) -> None:
    cubin = compile_cuda("moe_route.cu", route_macros(512, 10, 640, True), arch, tmp_path)
    assert cubin.startswith(b"\x7fELF")


@pytest.mark.skipif(NO_NVRTC is not None, reason=NO_NVRTC or "")
@pytest.mark.parametrize("arch", ["sm_90a", "sm_120a"])
def test_decoding_compiles(arch: str, tmp_path: Path) -> None:
    for macros in (decode_macros((1280, 2560), WARPS, 5, True), decode_macros((2560, 640), SLICES, 5, False)):
        for number in FORMATS.values():
            cubin = compile_cuda("_experts.cu", macros | {"EXPERT_FORMAT": number}, arch, tmp_path)
            assert cubin.startswith(b"\x7fELF")


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


@pytest.mark.parametrize("name", list(FORMATS))
def test_tiled_weights_on_the_cpu_are_the_reference(name: str, tmp_path: Path) -> None:
    inputs: dict[str, Any] = moe_gate_up_inputs(3, 64, 16, 4, 2, name, torch.bfloat16, "cpu")
    tiled = pack_experts(inputs["gate_up"], WARPS, True, tmp_path)
    assert torch.equal(moe_gate_up(**inputs), moe_gate_up(**{**inputs, "gate_up": tiled}))
    inputs = moe_down_inputs(3, 32, 48, 80, 4, 2, name, torch.bfloat16, "cpu")
    swapped = {"down": pack_experts(inputs["down"], SLICES, False, tmp_path)}
    assert torch.equal(moe_down(**inputs), moe_down(**{**inputs, **swapped}))
    shared = {"shared_down": (pack_shared(inputs["shared_down"][0]),)}
    assert torch.equal(moe_down(**inputs), moe_down(**{**inputs, **swapped, **shared}))


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("name", list(FORMATS))
@pytest.mark.parametrize(
    ("d", "width", "experts", "topk"), [(2560, 640, 512, 10), (2560, 640, 24, 10), (256, 48, 8, 2), (1040, 16, 33, 3)]
)
def test_gate_up_against_float64(d: int, width: int, experts: int, topk: int, name: str, tmp_path: Path) -> None:
    """Right values, and a row's bits independent of the other rows."""
    experts = min(experts, 512 if name == "nvfp4" else 64)  # the inputs are made from float32 matrices
    inputs: dict[str, Any] = moe_gate_up_inputs(85, d, width, experts, topk, name, torch.bfloat16, "cuda")
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
@pytest.mark.parametrize(
    ("name", "fused", "shared_format"),
    [
        ("nvfp4", True, "bf16"),
        ("nvfp4", False, "bf16"),
        ("nvfp4", True, "fp8_channel"),
        ("nvfp4", True, "fp8_block"),
        ("nvfp4", True, "mxfp8"),
        ("fp8_block", True, "bf16"),
        ("fp8_block", True, "fp8_block"),
        ("fp8_channel", True, "fp8_channel"),
    ],
)
def test_down_against_float64(
    d: int, width: int, shared: int, experts: int, topk: int, name: str, fused: bool, shared_format: str, tmp_path: Path
) -> None:
    """Right values, with the shared expert inside of the kernel or not, and a row's bits its own."""
    shared -= shared % 32 if shared_format == "mxfp8" else 0
    inputs: dict[str, Any] = moe_down_inputs(85, d, width, shared, experts, topk, name, torch.bfloat16, "cuda")
    if shared_format != "bf16":
        inputs["shared_down"] = (odd_weight(d, shared, shared_format, "cuda"),)
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
@pytest.mark.parametrize("name", ["bf16", "fp8_channel", "fp8_block", "mxfp8", "nvfp4"])
def test_other_formats_at_the_releases_sizes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right values, a row's bits its own, and a captured graph that reads ids and rows when it runs."""
    first: dict[str, Any] = moe_gate_up_inputs(80, 2560, 640, 48, 10, name, torch.bfloat16, "cuda")
    second: dict[str, Any] = moe_down_inputs(80, 2560, 640, 640, 48, 10, name, torch.bfloat16, "cuda")
    first["ids"][:, 0], first["ids"][:, 1:] = 47, first["ids"][:, 1:] % 47  # 80 rows on one expert
    second |= {"hidden": moe_gate_up_reference(**first), "ids": first["ids"]}
    poison_new_tensors(monkeypatch)
    hidden, y = moe_gate_up(**first), moe_down(**second)
    matrices = first["gate_up"].dequantize()
    for start in range(0, 80, 8):
        part = slice(start, start + 8)
        wanted = test_moe_gate_up.bound(first["x"][part], first["ids"][part], matrices, 2.0**-22, torch.bfloat16)
        assert_within(hidden[part], second["hidden"][part], wanted)
        few = {**second, **{key: second[key][part] for key in test_moe_down.PER_ROW}}
        bound = 2 * test_moe_down.roundings_bound(few, torch.bfloat16)
        assert_within(y[part], moe_down_reference(**few), bound)
    for rows in (1, 4, 16, 64):
        some = {**second, **{key: second[key][-rows:] for key in test_moe_down.PER_ROW}}
        assert torch.equal(moe_gate_up(first["x"][-rows:], first["ids"][-rows:], first["gate_up"]), hidden[-rows:])
        assert torch.equal(moe_down(**some), y[-rows:])
    held = {key: first[key][:4].clone() for key in ("x", "ids")}
    moe_gate_up(**held, gate_up=first["gate_up"])  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = moe_gate_up(**held, gate_up=first["gate_up"])
    for start in (0, 40):
        for key, value in held.items():
            value.copy_(first[key][start : start + 4])
        graph.replay()
        assert torch.equal(captured, hidden[start : start + 4])


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("name", ["bf16", "fp8_block", "nvfp4"])
@pytest.mark.parametrize("tiled", [True, False])
def test_a_prompt_chunk(name: str, tiled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sorted pairs, tiled experts decoded in slices: as the decode kernels to a few roundings, rows on their own."""
    if tiled and name != "nvfp4":
        pytest.skip("only nvfp4 experts are tiled")
    first: dict[str, Any] = moe_gate_up_inputs(700, 2560, 640, 200, 10, name, torch.bfloat16, "cuda")
    second: dict[str, Any] = moe_down_inputs(700, 2560, 640, 640, 200, 10, name, torch.bfloat16, "cuda")
    second["ids"] = first["ids"]
    few = slice(0, 8)
    hidden_wanted = moe_gate_up_reference(first["x"][few], first["ids"][few], first["gate_up"])
    part = {**second, **{key: second[key][few] for key in test_moe_down.PER_ROW}}
    y_wanted, y_bound = moe_down_reference(**part), 2 * test_moe_down.roundings_bound(part, torch.bfloat16)
    matrices = first["gate_up"].dequantize()
    bound = test_moe_gate_up.bound(first["x"][few], first["ids"][few], matrices, 2.0**-22, torch.bfloat16)
    if tiled:
        first["gate_up"] = moe_gate_up_repack(first["gate_up"], 10, "cuda", tmp_path)
        down, shared = moe_down_repack(second["down"], second["shared_down"], 10, "cuda", tmp_path)
        second |= {"down": down, "shared_down": shared}
    poison_new_tensors(monkeypatch)
    hidden, y = moe_gate_up(**first), moe_down(**second)
    assert bool(hidden.isfinite().all())
    assert bool(y.isfinite().all())
    assert_within(hidden[few], hidden_wanted, bound)
    assert_within(y[few], y_wanted, y_bound)
    fewer = {**second, **{key: second[key][-400:] for key in test_moe_down.PER_ROW}}
    assert torch.equal(moe_gate_up(first["x"][-400:], first["ids"][-400:], first["gate_up"]), hidden[-400:])
    assert torch.equal(moe_down(**fewer), y[-400:])


@pytest.mark.gpu
@GPU
def test_formats_may_be_mixed(tmp_path: Path) -> None:
    """bf16 gate/up before the streamed down kernel, which reads ids early; a shared expert that it cannot take."""
    first: dict[str, Any] = moe_gate_up_inputs(4, 2560, 640, 32, 10, "bf16", torch.bfloat16, "cuda")
    second: dict[str, Any] = moe_down_inputs(4, 2560, 640, 640, 32, 10, "nvfp4", torch.bfloat16, "cuda")
    second["shared_down"] = (quantize(second["shared_down"][0].dequantize(), "nvfp4"),)
    down, shared = moe_down_repack(second["down"], second["shared_down"], 10, "cuda", tmp_path)
    assert isinstance(down, TiledExperts)
    assert isinstance(shared[0], PackedWeight)

    def chain(y: Tensor) -> Tensor:
        for i in range(6):
            ids = (first["ids"] + i) % 32  # written shortly before it is read
            hidden = moe_gate_up(y, ids, first["gate_up"])
            y = moe_down(hidden, ids, second["weights"], down, second["shared_hidden"], second["shared_gate"], shared)
        return y

    y = first["x"]
    hidden = moe_gate_up(y, first["ids"], first["gate_up"])
    alone = {**second, "hidden": hidden, "ids": first["ids"]}
    bound = 2 * test_moe_down.roundings_bound(alone, torch.bfloat16)
    assert_within(moe_down(**{**alone, "down": down, "shared_down": shared}), moe_down_reference(**alone), bound)
    eager = chain(y)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain(y)
    for _ in range(3):
        captured.fill_(torch.nan)
        graph.replay()
        assert torch.equal(captured, eager)


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
