"""The streamed product: its layout and lane addresses on the CPU, its cubins without a GPU, its results on one."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from stepfloor.formats.codec import quantize
from stepfloor.kernels._jit import compile_cuda, missing_for_cuda
from stepfloor.kernels._stream import SHARED_LIMIT, WARPS, StreamPlan, pack_tape, unpack_tape
from stepfloor.kernels.linear import (
    StreamedWeight,
    Variant,
    choose_variant,
    kernel_macros,
    linear,
    linear_inputs,
    linear_repack,
    panel_stage_steps,
    plan_stream,
    shared_bytes,
)

# the model's own products, then shapes with odd rows, padded columns and several passes over many columns
MODEL_SHAPES = [
    (248320, 2560),
    (16480, 2560),
    (13952, 2560),
    (2560, 6144),
    (1280, 2560),
    (2560, 640),
    (512, 2560),
    (336, 10240),
    (10240, 320),
    (96, 2560),
]
ODD_SHAPES = [(16, 16), (37, 48), (251, 64), (33, 640), (385, 256), (5281, 2560), (5301, 4096)]
ROWS = (1, 2, 3, 4, 8, 16, 17, 64, 80)
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
NO_NVRTC = missing_for_cuda()


def small_plans() -> list[StreamPlan]:
    """Plans of every kind that numpy-sized matrices can have."""
    return [
        plan_stream(301, 320, 4),  # several passes, x kept
        plan_stream(96, 640, 4),  # warps share rows
        plan_stream(40, 2560, 4, split=2),
        replace(plan_stream(41, 2560, 4), chunk_steps=5, slots=2),
        plan_stream(70, 96, 1),  # padded columns and rows
        plan_stream(600, 4096, 4),  # several passes, several pieces
    ]


@pytest.mark.parametrize("plan", small_plans(), ids=str)
def test_tape_is_a_permutation(plan: StreamPlan) -> None:
    w = torch.randn(plan.n, plan.k).to(torch.bfloat16)
    tape = pack_tape(w, plan)
    assert tape.numel() == plan.tape_bytes
    assert torch.equal(unpack_tape(tape, plan), w)


@pytest.mark.parametrize("plan", small_plans(), ids=str)
def test_lanes_meet_the_right_columns(plan: StreamPlan) -> None:
    """The addresses of the ring kernel, lane by lane: a wrong one multiplies a weight by another column of x."""
    x = torch.randint(-4, 5, (8, plan.k)).double()
    w = torch.randint(-4, 5, (plan.n, plan.k))
    tape = pack_tape(w.to(torch.bfloat16), plan)
    assert torch.equal(walk(x, tape, plan), x @ w.double().T)


def walk(x: Tensor, tape: Tensor, plan: StreamPlan) -> Tensor:
    """What `linear.cu` computes for 8 rows, following its address arithmetic."""
    p = plan
    values = tape.view(torch.bfloat16).double()
    tapes = p.blocks * WARPS
    last_rows = p.rows - (p.passes - 1) * p.pass_rows
    out = torch.zeros(8, p.groups * p.rows * p.stacks, dtype=torch.float64)
    lane = torch.arange(32)
    g, t = lane // 4, lane % 4
    for block in range(p.blocks):
        for warp in range(WARPS):
            group, part, stack, share = block // p.split, block % p.split, warp // p.slices, warp % p.slices
            column = (part * p.slices + share) * p.steps * 32
            for index in range(p.passes):
                rows = last_rows if index == p.passes - 1 else p.pass_rows
                for step in range(p.steps):
                    chunk, inside = divmod(step, p.chunk_steps)
                    piece = rows * p.chunk_steps * 64
                    base = index * tapes * p.pass_rows * p.steps * 64 + (chunk * tapes + block * WARPS + warp) * piece
                    for first in range(0, rows, 8):
                        live = g + first < rows
                        at = base + inside * rows * 64 + (first + g) * 64 + t * 16  # bytes, one lane each
                        held = values[(at[live, None] // 2 + torch.arange(8))]  # [lanes, 8]
                        columns = column + step * 32 + t[live, None] * 8 + torch.arange(8)
                        inputs = torch.where(columns < p.k, x[:, columns.clamp(max=p.k - 1)], 0.0)  # [8, lanes, 8]
                        row = (group * p.stacks + stack) * p.rows + index * p.pass_rows + first + g[live]
                        out.index_add_(1, row, (inputs * held).sum(-1))
    return out[:, : p.n]


@pytest.mark.parametrize(("n", "k"), MODEL_SHAPES)
def test_plans_of_the_model(n: int, k: int) -> None:
    """No wasted bytes, no second wave, no kernel that a multiprocessor cannot hold, no sum that depends on the GPU."""
    plan = plan_stream(n, k, 132)
    assert plan.padded_k == k
    assert plan.tape_bytes <= 1.02 * 2 * n * k
    assert plan.blocks <= 132
    assert max(shared_bytes(plan, choose_variant(plan, rows)) for rows in ROWS) <= SHARED_LIMIT
    for multiprocessors in (48, 114, 188):
        other = plan_stream(n, k, multiprocessors)
        assert (other.split, other.slices, other.steps) == (plan.split, plan.slices, plan.steps)


@pytest.mark.skipif(NO_NVRTC is not None, reason=NO_NVRTC or "")
@pytest.mark.parametrize("arch", ["sm_90a", "sm_120a"])
@pytest.mark.parametrize(("n", "k"), [(16480, 2560), (336, 10240), (10240, 320), (5301, 4096)])
def test_compiles(n: int, k: int, arch: str, tmp_path: Path) -> None:
    plan = plan_stream(n, k, 132)
    variants = {choose_variant(plan, rows) for rows in (8, 16, 80)}
    for variant in variants:
        cubin = compile_cuda("linear.cu", kernel_macros(plan, variant), arch, tmp_path)
        assert cubin.startswith(b"\x7fELF")
        assert compile_cuda("linear.cu", kernel_macros(plan, variant), arch, tmp_path) == cubin
    assert len(list(tmp_path.iterdir())) == len(variants)


@pytest.mark.skipif(NO_NVRTC is not None, reason=NO_NVRTC or "")
def test_compile_error_carries_the_log(tmp_path: Path) -> None:
    macros = kernel_macros(plan_stream(64, 64, 4), Variant(1, False)) | {"SLICES": 3}
    with pytest.raises(RuntimeError, match="static assertion"):
        compile_cuda("linear.cu", macros, "sm_90a", tmp_path)


def test_repack_stays_with_torch_where_it_must(caplog: pytest.LogCaptureFixture) -> None:
    weight = quantize(torch.randn(8, 16), "bf16")
    with caplog.at_level("INFO"):
        assert linear_repack(weight, "cpu").data is weight.data
    assert "stays with torch" in caplog.text


def test_streamed_weight_on_the_cpu_is_the_reference() -> None:
    inputs = linear_inputs(3, 96, 640, "bf16", torch.bfloat16, "cpu")
    x, (weight,) = inputs["x"], inputs["weights"]
    plan = plan_stream(96, 640, 4)
    streamed = StreamedWeight(plan, pack_tape(weight.data, plan), Path())
    assert torch.equal(linear(x, (streamed,)), linear(x, (weight,)))
    assert torch.equal(linear(x, (streamed, weight)), linear(x, (weight, weight)))


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize(("n", "k"), MODEL_SHAPES[1:] + ODD_SHAPES)
def test_against_float64(n: int, k: int, tmp_path: Path) -> None:
    """Right values, nothing written beside them, nothing read past the rows, and a row's bits independent of M."""
    inputs = linear_inputs(80, n, k, "bf16", torch.bfloat16, "cuda")
    weight = inputs["weights"][0]
    streamed = linear_repack(weight, "cuda", tmp_path)
    assert isinstance(streamed, StreamedWeight)
    held = torch.full((96, k + 8), float("nan"), dtype=torch.bfloat16, device="cuda")
    exact = inputs["x"].double() @ weight.data.double().T
    full = linear(inputs["x"], (streamed,))
    # one rounding to bf16 is at most 2**-8 of the value (half a unit of 2**-7); float32 sums add K * 2**-24 of the
    # sum of magnitudes, which is below sqrt(K) for these inputs
    bound = exact.abs() * 2**-8 + k**1.5 * 2**-24
    for rows in ROWS:
        held.fill_(float("nan"))
        held[:rows, :k] = inputs["x"][:rows]
        y = linear(held[:rows, :k], (streamed,))
        assert bool(((y.double() - exact[:rows]).abs() <= bound[:rows]).all())
        assert torch.equal(y, full[:rows])


@pytest.mark.gpu
@GPU
def test_graph_replay_equals_eager(tmp_path: Path) -> None:
    """Two dependent products: a kernel that starts early must still wait for its input."""
    first = linear_repack(quantize(torch.randn(6144, 2560, device="cuda") / 50, "bf16"), "cuda", tmp_path)
    second = linear_repack(quantize(torch.randn(2560, 6144, device="cuda") / 78, "bf16"), "cuda", tmp_path)
    x = torch.randn(4, 2560, device="cuda").to(torch.bfloat16)
    held = x.clone()

    def chain(y: Tensor) -> Tensor:
        for _ in range(4):
            y = linear(linear(y, (first,)), (second,))
        return y

    eager = chain(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain(held)
    for _ in range(3):
        captured.fill_(float("nan"))
        graph.replay()
        assert torch.equal(captured, eager)


def test_panel_kernel_serves_the_big_products() -> None:
    assert panel_stage_steps(plan_stream(16480, 2560, 132)) == 5
    assert panel_stage_steps(plan_stream(2560, 6144, 132)) == 0
