"""The streamed product: its layout and lane addresses on the CPU, its cubins without a GPU, its results on one."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from stepfloor.formats.codec import PackedWeight, quantize
from stepfloor.kernels._choose_form import choose_variant, plan_stream, with_clusters
from stepfloor.kernels._forms import MAX_ROWS, Variant, grid, kernel_macros, shared_bytes, spread_clusters
from stepfloor.kernels._jit import compile_cuda, missing_for_cuda
from stepfloor.kernels._pair import (
    StreamedPair,
    pair_bytes,
    pair_macros,
    pair_parts,
    pair_product,
    pair_variant,
    plan_pair,
)
from stepfloor.kernels._stream import (
    CODINGS,
    SHARED_LIMIT,
    WARPS,
    StreamPlan,
    dense_macros,
    outer_scales,
    pack_tape,
    say_once,
    unpack_tape,
    why_not_streamed,
)
from stepfloor.kernels._stream_product import StreamedWeight, stream_product
from stepfloor.kernels.linear import linear, linear_inputs, linear_join, linear_repack
from tests.kernels.streamed import odd_weight, product_bound

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
FORMAT_SHAPES = [
    (16480, 2560),
    (2560, 6144),
    (1793, 2560),
    (2560, 640),
    (324, 10240),
    (10240, 320),
    (37, 64),
    (251, 96),
    (385, 256),
    (5301, 4096),
]
ODD_SHAPES = [(16, 16), (37, 48), (251, 64), (33, 640), (385, 256), (5281, 2560), (5301, 4096)]
ROWS = (1, 2, 3, 4, 5, 8, 15, 16, 17, 33, 64, 80)
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


@pytest.fixture(scope="session")
def cubins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Kernels that tests share."""
    return tmp_path_factory.mktemp("cubins")


@pytest.mark.parametrize("name", list(CODINGS))
@pytest.mark.parametrize(("n", "k", "count"), [(301, 320, 4), (96, 640, 4), (70, 96, 1), (600, 4096, 4), (139, 512, 2)])
def test_tape_loses_nothing(n: int, k: int, count: int, name: str) -> None:
    weight, plan = odd_weight(n, k, name), plan_stream(n, k, count, format_name=name)
    tape = pack_tape(weight, plan)
    assert tape.numel() == plan.tape_bytes
    assert torch.equal(unpack_tape(tape, plan, outer_scales(weight)).dequantize(), weight.dequantize())


def changed(name: str, **tensors: Tensor) -> PackedWeight:
    """A matrix with its first code or scale replaced."""
    weight = quantize(torch.randn(32, 128), name)
    for field, value in tensors.items():
        held = getattr(weight, field)
        held.view(torch.uint8)[0, 0] = value.view(torch.uint8)
    return weight


@pytest.mark.parametrize(
    ("weight", "reason"),
    [
        (quantize(torch.zeros(4, 32), "fp32"), "read matrices in bf16"),
        (changed("fp8_channel", data=torch.tensor([0xFF], dtype=torch.uint8)), "code is not a number"),
        (changed("mxfp8", scale=torch.tensor([200], dtype=torch.uint8)), "MXFP8 scale"),
        (changed("mxfp8", scale=torch.tensor([3], dtype=torch.uint8)), "MXFP8 scale"),
        (changed("nvfp4", scale=torch.tensor([0xC0], dtype=torch.uint8)), "negative or not a number"),
        (changed("nvfp4", scale=torch.tensor([0x7F], dtype=torch.uint8)), "negative or not a number"),
    ],
)
def test_what_moving_bits_would_spoil_is_refused(weight: PackedWeight, reason: str) -> None:
    assert reason in (why_not_streamed(weight) or "")


def test_scale_of_a_block_of_zeros_does_not_matter() -> None:
    """Encoders store 2**-127 there, which no bf16 product could hold."""
    weight = quantize(torch.randn(8, 64), "mxfp8")
    weight.data.view(torch.uint8)[2, :32] = 0x80
    weight.scale[2, 0] = 0
    assert why_not_streamed(weight) is None
    plan = plan_stream(8, 64, 1, format_name="mxfp8")
    assert torch.equal(unpack_tape(pack_tape(weight, plan), plan).dequantize(), weight.dequantize())


@pytest.mark.parametrize("plan", small_plans(), ids=str)
def test_tape_is_a_permutation(plan: StreamPlan) -> None:
    w = torch.randn(plan.n, plan.k).to(torch.bfloat16)
    tape = pack_tape(PackedWeight("bf16", (plan.n, plan.k), w), plan)
    assert tape.numel() == plan.tape_bytes
    assert torch.equal(unpack_tape(tape, plan).data, w)


@pytest.mark.parametrize("plan", small_plans(), ids=str)
def test_lanes_meet_the_right_columns(plan: StreamPlan) -> None:
    """The addresses of the ring kernel, lane by lane: a wrong one multiplies a weight by another column of x."""
    x = torch.randint(-4, 5, (8, plan.k)).double()
    w = torch.randint(-4, 5, (plan.n, plan.k))
    tape = pack_tape(PackedWeight("bf16", (plan.n, plan.k), w.to(torch.bfloat16)), plan)
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


@pytest.mark.parametrize("name", list(CODINGS))
@pytest.mark.parametrize(("n", "k"), MODEL_SHAPES)
def test_plans_of_the_model(n: int, k: int, name: str) -> None:
    """No wasted bytes, no second wave, no kernel that a multiprocessor cannot hold, no sum that depends on the GPU."""
    plan = plan_stream(n, k, 132, format_name=name)
    assert plan.padded_k == k
    coding = plan.coding
    row_bytes = (coding.codes + coding.scales) * k // (32 * coding.unit)
    # all warps have as many rows, and scales of a unit's rows are padded to 16 bytes
    units = plan.blocks * WARPS * plan.passes * plan.steps // coding.unit
    assert plan.tape_bytes <= 1.025 * n * row_bytes + (15 * units if coding.scales else 0)
    assert plan.blocks <= 132
    assert max(shared_bytes(plan, choose_variant(plan, rows)) for rows in ROWS) <= SHARED_LIMIT
    order = (plan.split, plan.slices, plan.steps, plan.grain)
    for multiprocessors in (48, 114, 188):
        other = plan_stream(n, k, multiprocessors, format_name=name)
        assert (other.split, other.slices, other.steps, other.grain) == order


def test_many_rows_are_one_reading_of_the_weights() -> None:
    """17 to 80 rows through tiles of 16 would read the weights once for each."""
    for name in ("bf16", "fp8_channel", "mxfp8", "nvfp4"):
        for n, k in ((248320, 2560), (16480, 2560), (2560, 6144), (1793, 2560)):
            plan = plan_stream(n, k, 132, format_name=name)
            for rows in (16, 17, 33, 64, 80):
                big = choose_variant(plan, rows)
                assert big.form == ((4 if k > 2560 else 0) if rows <= 16 else 3 if n < 10_000 else 1)
                elsewhere = choose_variant(plan, rows, warpgroups=False)
                assert elsewhere.form in (0, 2)
                for variant in (big, elsewhere):
                    assert variant.max_rows >= rows
                    assert shared_bytes(plan, variant) <= SHARED_LIMIT
                    assert grid(plan, variant)[0] <= 132


def test_fewer_clusters_keep_their_kernel_or_spread() -> None:
    """A device that runs few clusters at once must not get more rows than warpgroups hold, nor too much memory."""
    plan = plan_stream(2560, 6144, 132)
    chosen = choose_variant(plan, 64)
    for clusters in range(1, 16):
        variant = with_clusters(plan, chosen, clusters)
        assert variant.form == (3 if clusters * 192 >= 2560 else 2)
        assert spread_clusters(plan, variant) == clusters
        assert shared_bytes(plan, variant) <= SHARED_LIMIT


@pytest.mark.skipif(NO_NVRTC is not None, reason=NO_NVRTC or "")
@pytest.mark.parametrize("arch", ["sm_90a", "sm_120a"])
@pytest.mark.parametrize(("n", "k"), [(16480, 2560), (336, 10240), (10240, 320), (5301, 4096), (2560, 6144)])
def test_compiles(n: int, k: int, arch: str, tmp_path: Path) -> None:
    plan = plan_stream(n, k, 132)
    variants = {choose_variant(plan, rows, arch == "sm_90a") for rows in (8, 16, 80)}
    for variant in variants:
        cubin = compile_cuda("linear.cu", kernel_macros(plan, variant), arch, tmp_path)
        assert cubin.startswith(b"\x7fELF")
        assert compile_cuda("linear.cu", kernel_macros(plan, variant), arch, tmp_path) == cubin
    assert len(list(tmp_path.iterdir())) == len(variants)


@pytest.mark.skipif(NO_NVRTC is not None, reason=NO_NVRTC or "")
@pytest.mark.parametrize("arch", ["sm_90a", "sm_120a"])
@pytest.mark.parametrize("name", ["fp8_channel", "fp8_block", "mxfp8", "nvfp4"])
@pytest.mark.parametrize(("n", "k"), [(16480, 2560), (1793, 2560)])
def test_formats_compile(n: int, k: int, name: str, arch: str, tmp_path: Path) -> None:
    plan = plan_stream(n, k, 132, format_name=name)
    for rows in (8, 64):
        macros = kernel_macros(plan, choose_variant(plan, rows, arch == "sm_90a"))
        assert compile_cuda("linear.cu", macros, arch, tmp_path).startswith(b"\x7fELF")
    macros = dense_macros(plan, (1, plan.n, plan.n))
    assert compile_cuda("stream_dense.cu", macros, arch, tmp_path).startswith(b"\x7fELF")


@pytest.mark.parametrize("name", ["fp8_channel", "fp8_block", "mxfp8"])
@pytest.mark.parametrize(("n", "rest", "before"), [(16384, 96, 0), (13312, 640, 0), (1280, 513, 512)])
def test_pairs_of_the_model(n: int, rest: int, before: int, name: str) -> None:
    """One wave, no block with much more than its share, and the sums' order of each matrix alone."""
    plans = plan_pair(n, rest, 2560, before, 132, name, "bf16")
    assert plans is not None
    assert plans.blocks <= 132
    sizes = [plan.tape_bytes / plan.blocks for plan in (plans.first, plans.second)]
    assert max(sizes) <= 1.06 * sum(plan.tape_bytes for plan in (plans.first, plans.second)) / 132
    for rows in ROWS:
        assert pair_bytes(plans, pair_variant(plans, rows)) <= SHARED_LIMIT
    for plan, format_name in ((plans.first, name), (plans.second, "bf16")):
        alone = plan_stream(plan.n, plan.k, 132, format_name=format_name)
        assert (plan.split, plan.slices, plan.steps) == (alone.split, alone.slices, alone.steps)


def test_what_is_a_pair() -> None:
    """Two formats, of which one may lie on both sides of the other."""
    small, large, more = (quantize(torch.randn(n, 64), name) for n, name in ((8, "bf16"), (64, "mxfp8"), (64, "bf16")))
    assert pair_parts((large, small)) == (large, small, 0)
    assert pair_parts((small, large)) == (large, small, 8)
    middle, rest, before = pair_parts((more, large, small)) or (None, None, 0)
    assert middle is large
    assert rest is not None
    assert (rest.shape, before) == ((72, 64), 64)
    assert pair_parts((large, small, quantize(torch.randn(8, 64), "fp8_channel"))) is None
    # a matrix of 8192 columns and more is split over clusters, which a pair has none of
    assert plan_pair(64, 8, 10240, 0, 132, "fp8_channel", "bf16") is None


@pytest.mark.parametrize("rows", [3, 100])
def test_pair_on_the_cpu_is_the_reference(rows: int) -> None:
    """The gap of the second matrix: columns on both sides of the first's."""
    weights = [quantize(torch.randn(n, 640) / 25, name) for n, name in ((20, "bf16"), (64, "mxfp8"), (3, "bf16"))]
    first, second, before = pair_parts(weights) or (weights[1], weights[0], 0)
    plans = plan_pair(64, 23, 640, before, 4, "mxfp8", "bf16")
    assert plans is not None
    pair = StreamedPair(
        *(
            StreamedWeight(plan, pack_tape(w, plan), Path(), outer_scales(w))
            for w, plan in ((first, plans.first), (second, plans.second))
        ),
        before,
    )
    x = torch.randn(rows, 640).to(torch.bfloat16)
    assert pair.shape == (87, 640)
    assert torch.equal(linear(x, (pair,)), linear(x, weights))


@pytest.mark.skipif(NO_NVRTC is not None, reason=NO_NVRTC or "")
@pytest.mark.parametrize("arch", ["sm_90a", "sm_120a"])
@pytest.mark.parametrize(("n", "rest", "before"), [(16384, 96, 0), (1280, 513, 512)])
def test_pairs_compile(n: int, rest: int, before: int, arch: str, tmp_path: Path) -> None:
    for name, rows in (("fp8_block", 8), ("mxfp8", 64)):
        plans = plan_pair(n, rest, 2560, before, 132, name, "bf16")
        assert plans is not None
        macros = pair_macros(plans, pair_variant(plans, rows))
        assert compile_cuda("linear_pair.cu", macros, arch, tmp_path).startswith(b"\x7fELF")


@pytest.mark.skipif(NO_NVRTC is not None, reason=NO_NVRTC or "")
def test_compile_error_carries_the_log(tmp_path: Path) -> None:
    macros = kernel_macros(plan_stream(64, 64, 4), Variant(1, False)) | {"SLICES": 3}
    with pytest.raises(RuntimeError, match="static assertion"):
        compile_cuda("linear.cu", macros, "sm_90a", tmp_path)


def test_repack_stays_with_torch_where_it_must(caplog: pytest.LogCaptureFixture) -> None:
    """One line for all matrices with the same reason: a model has hundreds."""
    say_once.cache_clear()
    weight = quantize(torch.randn(8, 16), "bf16")
    with caplog.at_level("INFO"):
        for _ in range(3):
            assert linear_repack(weight, "cpu").data is weight.data
    assert caplog.text.count("stays with torch") == 1


@pytest.mark.parametrize("name", list(CODINGS))
def test_streamed_weight_on_the_cpu_is_the_reference(name: str) -> None:
    inputs = linear_inputs(3, 96, 640, name, torch.bfloat16, "cpu")
    x, (weight,) = inputs["x"], inputs["weights"]
    plan = plan_stream(96, 640, 4, format_name=name)
    streamed = StreamedWeight(plan, pack_tape(weight, plan), Path(), outer_scales(weight))
    assert torch.equal(linear(x, (streamed,)), linear(x, (weight,)))
    assert torch.equal(linear(x, (streamed, weight)), linear(x, (weight, weight)))
    assert torch.equal(streamed.dense(), weight.dequantize().to(torch.bfloat16))


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize(
    ("n", "k", "name"),
    [
        *((n, k, "bf16") for n, k in MODEL_SHAPES[1:] + ODD_SHAPES),
        *((n, k, name) for n, k in FORMAT_SHAPES for name in CODINGS if name != "bf16"),
    ],
)
def test_against_float64(n: int, k: int, name: str, cubins: Path) -> None:
    """Right values, nothing written beside them, nothing read past the rows, and a row's bits independent of M."""
    make = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(80, k, generator=make, device="cuda").to(torch.bfloat16)
    weight = odd_weight(n, k, name, "cuda")
    streamed = linear_repack(weight, "cuda", cubins)
    assert isinstance(streamed, StreamedWeight)
    assert torch.equal(streamed.dense(), weight.dequantize().to(torch.bfloat16))
    held = torch.full((96, k + 8), float("nan"), dtype=torch.bfloat16, device="cuda")
    out = torch.full((96, n + 3), float("nan"), dtype=torch.bfloat16, device="cuda")
    exact, bound = x.double() @ weight.dequantize().double().T, product_bound(x, weight)
    full = linear(x, (streamed,))
    for rows in ROWS:
        held.fill_(float("nan"))
        held[:rows, :k] = x[:rows]
        out.fill_(float("nan"))
        stream_product(held[:rows, :k], streamed, out[:rows, :n])
        y = out[:rows, :n]
        assert bool(((y.double() - exact[:rows]).abs() <= bound[:rows]).all())
        assert torch.equal(y, full[:rows])
        assert bool(out[rows:].isnan().all())
        assert bool(out[:, n:].isnan().all())
    # row 5 alone, from another place in memory
    assert torch.equal(linear(x[5:6].clone(), (streamed,)), full[5:6])


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("name", ["fp8_channel", "fp8_block", "mxfp8"])
@pytest.mark.parametrize(("middle", "rest"), [(16384, (0, 96)), (13312, (0, 640)), (1280, (512, 1)), (1000, (96, 37))])
def test_formats_side_by_side(middle: int, rest: tuple[int, int], name: str, cubins: Path) -> None:
    """FP8 and bf16 rows share an input, as in an FP8 release: one launch, and every value has the bits it has alone."""
    weights = [odd_weight(rows, 2560, "bf16", "cuda") for rows in rest if rows]
    weights.insert(1 if rest[0] else 0, odd_weight(middle, 2560, name, "cuda"))
    (pair,) = linear_join(weights, "cuda", cubins, MAX_ROWS)
    assert isinstance(pair, StreamedPair)
    x = torch.randn(100, 2560, device="cuda").to(torch.bfloat16)
    before, end = rest[0], rest[0] + middle
    exact = torch.cat([x.double() @ w.dequantize().double().T for w in weights], 1)
    bound = torch.cat([product_bound(x, w) for w in weights], 1)
    held = torch.full((96, end + rest[1] + 3), float("nan"), dtype=torch.bfloat16, device="cuda")
    full: Tensor | None = None
    for rows in (80, 1, 5, 16, 40):
        second = linear(x[:rows], (pair.second,))
        alone = torch.cat((second[:, :before], linear(x[:rows], (pair.first,)), second[:, before:]), 1)
        y = linear(x[:rows], (pair,))
        full = y if full is None else full
        assert torch.equal(y, alone)
        assert torch.equal(y, full[:rows])
        assert bool(((y.double() - exact[:rows]).abs() <= bound[:rows]).all())
        held.fill_(float("nan"))
        pair_product(x[:rows], pair, held[:rows, :-3])
        assert torch.equal(held[:rows, :-3], y)
        assert bool(held[rows:].isnan().all())
        assert bool(held[:, -3:].isnan().all())
    rounded = torch.cat([x.double() @ w.dequantize().to(torch.bfloat16).double().T for w in weights], 1)
    assert bool(((linear(x, (pair,)).double() - rounded).abs() <= bound * 1.01).all())


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("name", list(CODINGS))
def test_prefill_rounds_weights_once(name: str, cubins: Path) -> None:
    x = torch.randn(200, 2560, device="cuda").to(torch.bfloat16)
    weight = odd_weight(531, 2560, name, "cuda")
    y = linear(x, (linear_repack(weight, "cuda", cubins),))
    rounded = weight.dequantize().to(torch.bfloat16)
    assert bool(((y.double() - x.double() @ rounded.double().T).abs() <= product_bound(x, weight) * 1.01).all())


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
