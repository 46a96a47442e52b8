"""`linear.cu` and `stream_dense.cu` run on the CPU: g++ builds them against `host/stream.cuh`, a thread for each lane.

Guards against what a GPU would answer with a fault, a hang or a wrong value: addresses, alignment, sizes of shared
memory, slot phases, the place of every fragment, how codes are decoded and scaled, and the order of sums, which must
not depend on the row count.
"""

import ctypes
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from stepfloor.formats.codec import PackedWeight
from stepfloor.kernels._choose_form import plan_stream
from stepfloor.kernels._forms import Variant, block_threads, grid, kernel_macros, shared_bytes
from stepfloor.kernels._pair import PairPlan, StreamedPair, pair_arguments, pair_bytes, pair_macros, pair_variant
from stepfloor.kernels._stream import (
    CODINGS,
    WARPS,
    StreamPlan,
    dense_arguments,
    dense_blocks,
    dense_macros,
    outer_scales,
    pack_tape,
)
from stepfloor.kernels._stream_product import StreamedWeight, pack_arguments
from tests.kernels.lanes import build, needs_compiler
from tests.kernels.streamed import odd_weight, product_bound

pytestmark = needs_compiler

LINEAR = """
extern "C" int run(const Arguments* a, u64 tape, u64 scales, u64 x, int blocks, int of, int threads, u64 shared_bytes) {
  readable = {{a->tape, tape}, {(const u8*)a->scales, scales}, {(const u8*)a->x, x}};
  return run_grid(blocks, of, threads, shared_bytes, [=] { linear_kernel(*a); });
}
"""
PAIR = """
extern "C" int run(const Arguments* a, const u64* sizes, int blocks, int threads, u64 shared_bytes) {
  readable = {{a->first.tape, sizes[0]}, {(const u8*)a->first.scales, sizes[1]}, {a->second.tape, sizes[2]},
              {(const u8*)a->second.scales, sizes[3]}, {(const u8*)a->first.x, sizes[4]}};
  return run_grid(blocks, 1, threads, shared_bytes, [=] { linear_pair_kernel(*a); });
}
"""
DENSE = """
extern "C" int run(const Arguments* a, u64 tape_bytes, u64 scale_bytes, int blocks) {
  readable = {{a->tape, tape_bytes}, {(const u8*)a->scales, scale_bytes}};
  return run_grid(blocks, 1, THREADS, 0, [=] { dense_kernel(*a); });
}
"""
SHORT, TALL, TWO = Variant(1, False), Variant(1, True), Variant(2, True)
TWO_BUFFERS = Variant(2, True, 1, 3, 1, 2)
QUANTIZED = [name for name in CODINGS if name not in ("bf16", "fp8_tensor")]
CASES = {
    "warps share rows": (plan_stream(40, 640, 4), [SHORT, TALL, TWO]),
    "several passes": (plan_stream(151, 2560, 2), [SHORT, TALL]),
    "panels": (StreamPlan(150, 512, 1, 8, 1, 150, 24, 2, 2, 2), [TALL, Variant(2, True, 2, 8), Variant(5, True, 1, 4)]),
    "cluster": (plan_stream(13, 1280, 4, split=4), [SHORT, TALL, TWO]),
    "ring goes round": (replace(plan_stream(20, 6144, 1), chunk_steps=4, slots=2), [SHORT, TALL, TWO]),
    "padded columns": (plan_stream(37, 48, 4), [SHORT, TALL, TWO]),
    "passes of several pieces": (plan_stream(70, 4096, 1), [SHORT, TALL]),
}
# a block's rows and its slices' columns cross blocks of 128, the last pass is short, the last block has dead rows
PASSES = StreamPlan(139, 512, 1, 8, 1, 70, 16, 2, 2, 2)
CLUSTER = StreamPlan(13, 992, 2, 8, 1, 13, 13, 2, 2, 1)  # the last slice has padded columns
SHARED = StreamPlan(43, 224, 1, 2, 4, 6, 6, 4, 4, 1)  # warps share rows
PIECES = StreamPlan(20, 1024, 1, 8, 1, 5, 5, 4, 2, 2)  # two pieces
# nine blocks of the plan, two passes each, for one cluster: more than its warps take at once
SPREAD = StreamPlan(87, 512, 1, 8, 1, 10, 8, 2, 2, 2)


def in_format(name: str, plan: StreamPlan, kind: str, variants: list[Variant], quick: str = "") -> object:
    """One plan in one format; slow where its path is also taken by a quick one."""
    marks = [] if name in quick.split() else [pytest.mark.slow]
    return pytest.param(replace(plan, format=name), variants, id=f"{name}-{kind}", marks=marks)


FORMAT_CASES = [
    in_format("fp8_block", PASSES, "passes", [SHORT, TALL], "fp8_block"),
    *(
        in_format(name, PASSES, "passes", [SHORT, TALL, Variant(2, True, 2, 8)], "fp8_channel mxfp8 nvfp4")
        for name in QUANTIZED
        if name != "fp8_block"
    ),
    *(in_format(name, CLUSTER, "cluster", [SHORT, TALL, TWO], "nvfp4") for name in QUANTIZED),
    *(in_format(name, SHARED, "shared", [SHORT, TALL], "fp8_block") for name in QUANTIZED),
]
SPREAD_CASES = [
    *(
        in_format(name, SPREAD, "spread", [TALL, Variant(2, True, 2, 2, together, 1)], "bf16 nvfp4")
        for name, together in (("bf16", 4), ("fp8_channel", 2), ("mxfp8", 2), ("nvfp4", 1))
    ),
    in_format("mxfp8", PIECES, "pieces", [TALL, Variant(2, True, 1, 3, 1, 1)], "mxfp8"),
    in_format("bf16", replace(SPREAD, k=496), "two buffers", [TALL, TWO_BUFFERS, replace(TWO_BUFFERS, tiles=3)]),
    in_format(
        "bf16", replace(SPREAD, n=174), "three clusters", [TALL, Variant(2, True, 2, 2, 2, 1, clusters=3)], "bf16"
    ),
]

SHARE_CASES = [
    # all weights in registers at once, in two passes; a cluster's rows that begin inside of a block of the plan
    *(
        in_format(
            name,
            SPREAD,
            "share",
            [TALL, Variant(1, True, 2, 1, warpgroups=2), Variant(2, True, 2, 1, clusters=2, warpgroups=1)],
            "bf16 nvfp4",
        )
        for name in ("bf16", "fp8_channel", "mxfp8", "nvfp4")
    ),
    # registers are used again; the last of three clusters has fewer rows
    in_format("mxfp8", PIECES, "few stages", [TALL, Variant(2, True, 1, 3, clusters=3, warpgroups=1)], "mxfp8"),
    # padded columns in the last slice, a cluster without rows
    in_format(
        "bf16",
        replace(SPREAD, n=9, rows=3, pass_rows=3, k=496),
        "padded",
        [TALL, *(Variant(tiles, True, 1, 2, clusters=5, warpgroups=1) for tiles in (2, 3))],
        "bf16",
    ),
    # x takes two rounds of reads
    in_format(
        "bf16", StreamPlan(9, 1792, 1, 8, 1, 5, 5, 7, 7, 1), "wide x", [TALL, Variant(5, True, 1, 3, warpgroups=1)]
    ),
]

TEAMS = [Variant(1, True, team=team) for team in (2, 4)]
TEAM_CASES = [
    # blocks with an odd number of weight rows, one that only helps, the ring goes round, scales of rows
    *(
        in_format(name, StreamPlan(35, 1024, 1, 8, 1, 7, 7, 4, 2, 1), "team", [TALL, *TEAMS], "bf16 nvfp4")
        for name in ("bf16", "fp8_channel", "mxfp8", "nvfp4")
    ),
    # an odd number of steps in a piece; padded columns
    in_format("bf16", StreamPlan(23, 1488, 1, 8, 1, 12, 12, 6, 3, 1), "odd pieces", [TALL, *TEAMS], "bf16"),
]


@pytest.mark.parametrize("case", CASES)
def test_kernel_on_the_host(case: str, tmp_path: Path) -> None:
    plan, variants = CASES[case]
    check(plan, variants, tmp_path)


@pytest.mark.parametrize(("plan", "variants"), FORMAT_CASES)
def test_formats_on_the_host(plan: StreamPlan, variants: list[Variant], tmp_path: Path) -> None:
    check(plan, variants, tmp_path)


@pytest.mark.parametrize(("plan", "variants"), SPREAD_CASES)
def test_slices_spread_over_a_cluster(plan: StreamPlan, variants: list[Variant], tmp_path: Path) -> None:
    """The same bits as the ring kernel gives, whose sums meet in one block."""
    check(plan, variants, tmp_path)


@pytest.mark.parametrize(("plan", "variants"), SHARE_CASES)
def test_warpgroups_share_a_cluster(plan: StreamPlan, variants: list[Variant], tmp_path: Path) -> None:
    """The same bits as the ring kernel gives, from sums that lie the other way round."""
    check(plan, variants, tmp_path)


@pytest.mark.parametrize(("plan", "variants"), TEAM_CASES)
def test_blocks_share_a_reading_of_x(plan: StreamPlan, variants: list[Variant], tmp_path: Path) -> None:
    """The same bits as the ring kernel gives, from sums that cross blocks."""
    check(plan, variants, tmp_path)


def check(plan: StreamPlan, variants: list[Variant], directory: Path) -> None:
    """Right values, the same bits from every variant and for every number of rows, no fault."""
    make = torch.Generator().manual_seed(0)
    weight = odd_weight(plan.n, plan.k, plan.format)
    x = torch.randn(20, plan.k, generator=make).to(torch.bfloat16)
    tape, scales = pack_tape(weight, plan), outer_scales(weight)
    exact = x.double() @ weight.dequantize().double().T
    bound = product_bound(x, weight)
    longest = x.new_empty((0, plan.n))
    for variant in variants:
        library = build("linear", LINEAR, kernel_macros(plan, variant), directory)
        for rows in (min(20, variant.max_rows),) if variant.form in (2, 3) else (3, min(20, variant.max_rows)):
            y = run(library, plan, variant, tape, scales, x[:rows])
            assert bool(((y.double() - exact[:rows]).abs() <= bound[:rows]).all())
            shared_rows = min(rows, longest.shape[0])
            assert torch.equal(y[:shared_rows], longest[:shared_rows])
            longest = y if rows > longest.shape[0] else longest


@pytest.mark.parametrize(
    ("first", "second", "before"),
    [
        # the second's rows lie on both sides of the first's; warps share columns; one pass
        (StreamPlan(70, 512, 1, 8, 1, 18, 18, 2, 2, 1, "fp8_channel"), StreamPlan(33, 512, 1, 8, 1, 9, 9, 2, 2, 1), 32),
        # several passes, blocks of scales, nothing before
        (replace(PASSES, format="fp8_block"), StreamPlan(26, 512, 1, 8, 1, 16, 16, 2, 1, 1), 0),
        # warps share rows too, in each matrix in another way
        pytest.param(
            StreamPlan(43, 224, 1, 2, 4, 6, 6, 4, 4, 1, "mxfp8"),
            StreamPlan(9, 224, 1, 1, 8, 1, 1, 7, 7, 1),
            8,
            marks=pytest.mark.slow,
        ),
    ],
    ids=["around", "blocks", "stacks"],
)
def test_two_matrices_in_one_grid(first: StreamPlan, second: StreamPlan, before: int, tmp_path: Path) -> None:
    """A pair could take another's columns, scales, blocks or shared memory; each value has the bits it has alone."""
    plans = PairPlan(first, second, before)
    weights = odd_weight(first.n, first.k, first.format), odd_weight(second.n, second.k, second.format)
    pair = StreamedPair(*(streamed(w, p) for w, p in zip(weights, (first, second), strict=True)), before)
    x = torch.randn(20, first.k, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    alone = [
        run(
            build("linear", LINEAR, kernel_macros(w.plan, TALL), tmp_path / str(i)),
            w.plan,
            TALL,
            w.tape,
            w.scales,
            x[:16],
        )
        for i, w in enumerate((pair.first, pair.second))
    ]
    wanted = torch.cat((alone[1][:, :before], alone[0], alone[1][:, before:]), 1)
    for rows in (3, 20):
        variant = pair_variant(plans, rows)
        some = x[: min(rows, variant.max_rows)]
        library = build("linear_pair", PAIR, pair_macros(plans, variant), tmp_path)
        y = run_pair(library, pair, variant, some)
        assert torch.equal(y[:16], wanted[: y.shape[0]])
        bound = torch.cat([product_bound(some, w) for w in weights], 1)
        exact = torch.cat([some.double() @ w.dequantize().double().T for w in weights], 1)
        whole = torch.cat((y[:, before : before + first.n], y[:, :before], y[:, before + first.n :]), 1)
        assert bool(((whole.double() - exact).abs() <= bound).all())


def streamed(weight: PackedWeight, plan: StreamPlan) -> StreamedWeight:
    """A matrix on its tape."""
    return StreamedWeight(plan, pack_tape(weight, plan), Path(), outer_scales(weight))


def run_pair(library: ctypes.CDLL, pair: StreamedPair, variant: Variant, x: Tensor) -> Tensor:
    """What the pair's kernel writes, with NaN around input and output."""
    (n, k), rows = pair.shape, x.shape[0]
    held = torch.full((rows, k + 8), torch.nan, dtype=torch.bfloat16)
    held[:, :k] = x
    out = torch.full((rows + 2, n + 3), torch.nan, dtype=torch.bfloat16)
    parts = (pair.first.tape, pair.first.scales, pair.second.tape, pair.second.scales, held)
    sizes = (ctypes.c_uint64 * len(parts))(*(size(t) for t in parts))
    library.run.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_uint64]
    arguments = pair_arguments(pair, held[:, :k], out[:rows])
    assert library.run(arguments, sizes, pair.plans.blocks, WARPS * 32, pair_bytes(pair.plans, variant)) == 0
    assert bool(out[rows:].isnan().all())
    assert bool(out[:, n:].isnan().all())
    return out[:rows, :n]


@pytest.mark.parametrize("name", list(CODINGS))
def test_dense_matrix_is_the_decoded_one(name: str, tmp_path: Path) -> None:
    """Every code of every format comes back, rounded once, from rows and columns that end inside of blocks."""
    plan = StreamPlan(259, 480, 2, 4, 2, 33, 16, 2, 2, 1, name)
    weight = odd_weight(259, 480, name)
    assert torch.equal(dense(plan, weight, (1, 259, 259), tmp_path), weight.dequantize().to(torch.bfloat16))


def test_dense_matrix_in_the_order_of_streams(tmp_path: Path) -> None:
    """Rows of the tape as hc_mix orders them: blocks of 3 channels of 2 streams, the last of 2 channels."""
    plan = StreamPlan(18, 64, 1, 1, 8, 1, 1, 2, 2, 1, "fp8_channel")
    weight = odd_weight(16, 64, "fp8_channel")
    order = torch.tensor(
        [s * 8 + c if c < 8 else 16 for b in range(3) for s in range(2) for c in range(3 * b, 3 * b + 3)]
    )
    found = dense(plan, weight, (2, 8, 3), tmp_path, order)
    assert torch.equal(found, weight.dequantize().to(torch.bfloat16))


def dense(
    plan: StreamPlan, weight: PackedWeight, order: tuple[int, int, int], directory: Path, rows: Tensor | None = None
) -> Tensor:
    """What `stream_dense.cu` makes of a tape."""
    tape, scales = pack_tape(weight, plan, rows), outer_scales(weight)
    if scales is not None and rows is not None:
        scales = torch.cat((scales, scales.new_zeros(1)))[rows]
    library = build("stream_dense", DENSE, dense_macros(plan, order), directory)
    out = torch.full((weight.shape[0] + 1, plan.k), torch.nan, dtype=torch.bfloat16)
    library.run.argtypes = [ctypes.c_void_p, *[ctypes.c_uint64] * 2, ctypes.c_int]
    arguments = ctypes.create_string_buffer(dense_arguments(tape, scales, out))
    assert library.run(arguments, tape.numel(), size(scales), dense_blocks(plan, order)) == 0
    assert bool(out[-1].isnan().all())
    return out[:-1]


def run(
    library: ctypes.CDLL, plan: StreamPlan, variant: Variant, tape: Tensor, scales: Tensor | None, x: Tensor
) -> Tensor:
    """The kernel's output, with NaN around the input and a check of what it must leave alone."""
    rows, n = x.shape[0], plan.n
    held = torch.full((rows, plan.k + 8), torch.nan, dtype=torch.bfloat16)
    held[:, : plan.k] = x
    out = torch.full((rows + 2, n + 3), torch.nan, dtype=torch.bfloat16)
    arguments = ctypes.create_string_buffer(pack_arguments(tape, held[:, : plan.k], out[:rows], scales))
    library.run.argtypes = [ctypes.c_void_p, *[ctypes.c_uint64] * 3, *[ctypes.c_int] * 3, ctypes.c_uint64]
    blocks, cluster = grid(plan, variant)
    limits = (tape.numel(), size(scales), held.numel() * 2)
    assert library.run(arguments, *limits, blocks, cluster, block_threads(variant), shared_bytes(plan, variant)) == 0
    assert bool(out[rows:].isnan().all())
    assert bool(out[:, n:].isnan().all())
    return out[:rows, :n]


def size(t: Tensor | None) -> int:
    """Bytes of a tensor."""
    return 0 if t is None else t.numel() * t.element_size()
