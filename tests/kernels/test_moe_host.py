"""`moe_gate_up.cu` and `moe_down.cu` run on the CPU, a thread for every lane, as test_linear_host does for `linear.cu`.

Guards against wrong addresses, sizes, fragments and slot phases, and sums that depend on other rows or experts.
"""

import ctypes
import hashlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from stepfloor.formats.codec import PackedWeight, quantize
from stepfloor.kernels import moe_gate_up as gate_up_module
from stepfloor.kernels._down_few import DownPlan, plan_down, plan_for
from stepfloor.kernels._down_many import SLICES, ManyDownPlan, plan_many
from stepfloor.kernels._experts import FORMATS, SCALE_REST, decode_arguments, decode_macros, pack_experts
from stepfloor.kernels._shared_expert import SHARED_FORMATS, TiledShared, pack_shared, shared_macros
from stepfloor.kernels.moe_down import down_arguments, down_scratch
from stepfloor.kernels.moe_gate_up import GateUpPlan, gate_up_arguments, plan_gate_up
from stepfloor.kernels.moe_route import SHARED_BYTES, moe_route_reference, route_arguments, route_macros
from tests.kernels.lanes import build, needs_compiler
from tests.kernels.streamed import odd_weight, product_bound

pytestmark = needs_compiler

GATE_UP = """
extern "C" int run(const Arguments* a, const u64* bytes, int blocks, u64 shared_bytes) {
  readable = {{a->tape, bytes[0]}, {(const u8*)a->x, bytes[1]}, {(const u8*)a->ids, bytes[2]}};
  return run_grid(blocks, 1, THREADS, shared_bytes, [=] { moe_gate_up_kernel(*a); });
}
"""
DOWN = """
extern "C" int run(const Arguments* a, const u64* bytes, int blocks, u64 shared_bytes) {
  readable = {{a->tape, bytes[0]}, {(const u8*)a->hidden, bytes[1]}, {(const u8*)a->ids, bytes[2]},
              {(const u8*)a->weights, bytes[3]}, {a->shared_tape, bytes[4]}, {(const u8*)a->shared_hidden, bytes[5]},
              {(const u8*)a->shared_gate, bytes[6]}, {(const u8*)a->spilled, bytes[7]},
              {(const u8*)a->shared_scale, bytes[8]}};
  return run_grid(blocks, CLUSTER, THREADS, shared_bytes, [=] { moe_down_kernel(*a); });
}
"""
MANY_DOWN = """
extern "C" int run(const Arguments* a, const u64* bytes, int blocks, u64 shared_bytes) {
  readable = {{a->tape, bytes[0]}, {(const u8*)a->hidden, bytes[1]}, {(const u8*)a->ids, bytes[2]},
              {(const u8*)a->weights, bytes[3]}, {a->shared_tape, bytes[4]}, {(const u8*)a->shared_hidden, bytes[5]},
              {(const u8*)a->shared_gate, bytes[6]}, {(const u8*)a->sums, bytes[7]},
              {(const u8*)a->shared_scale, bytes[8]}};
  const int faults = run_grid(blocks, 1, THREADS, shared_bytes, [=] { moe_down_products_kernel(*a); });
  return faults + run_grid((ROWS * N / WIDE + 255) / 256, 1, SUM_THREADS, 0, [=] { moe_down_sum_kernel(*a); });
}
"""

ROUTE = """
extern "C" int run(const Arguments* a, const u64* bytes, int blocks, u64 shared_bytes) {
  readable = {{(const u8*)a->products, bytes[0]}};
  return run_grid(blocks, 1, THREADS, shared_bytes, [=] { moe_route_kernel(*a); });
}
"""

DECODE = """
extern "C" int run(const Arguments* a, const u64* bytes, int blocks, u64 shared_bytes) {
  readable = {{a->tape, bytes[0]}};
  return run_grid(blocks, 1, THREADS, shared_bytes, [=] { decode_experts_kernel(*a); });
}
"""


def experts(count: int, n: int, k: int, name: str = "nvfp4") -> PackedWeight:
    """Matrices with scales from subnormal to large, a zero one, and tensor scales that differ; every code of FP8."""
    if name != "nvfp4":
        parts = [odd_weight(n, k, name) for _ in range(count)]
        scales = torch.stack([torch.as_tensor(p.scale).float() * (i + 1) for i, p in enumerate(parts)])
        return PackedWeight(name, (n, k), torch.stack([p.data for p in parts]), scales)
    make = torch.Generator().manual_seed(n + k)
    w = torch.randn(count, n, k, generator=make) / k**0.5
    w *= torch.exp2(torch.randint(-12, 1, (count, n, k // 16), generator=make)).repeat_interleave(16, -1)
    w[:, 3, :16] = 0
    return quantize(w * torch.arange(1, count + 1)[:, None, None], "nvfp4")


def choices(rows: int, count: int, topk: int) -> Tensor:
    """Distinct experts of each row; expert 1 is everybody's, so that it has more rows than a tile."""
    make = torch.Generator().manual_seed(count)
    ids = torch.rand(rows, count, generator=make).argsort(-1)
    ids = torch.stack([row[row != 1][: topk - 1] for row in ids])
    return torch.cat((ids, torch.ones(rows, 1, dtype=torch.int64)), 1)


@pytest.mark.parametrize("name", list(FORMATS))
@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize(("n", "k", "slices"), [(32, 128, 2), (48, 48, 2), (16, 640, 8), (272, 208, 2)])
def test_packing_is_exact(n: int, k: int, slices: int, paired: bool, name: str) -> None:
    weight = experts(9, n, k, name)
    tiled = pack_experts(weight, slices, paired, Path())
    assert torch.equal(tiled.unpack().dequantize(), weight.dequantize())
    if k % (64 * slices) == 0:
        assert weight.num_bytes <= tiled.num_bytes <= (1 if name == "nvfp4" else 1.07) * weight.num_bytes


@pytest.mark.parametrize(
    ("n", "k", "slices", "paired", "name"),
    [
        *((*shape, paired, "nvfp4") for shape in ((32, 128, 2), (48, 48, 2), (64, 208, 8)) for paired in (False, True)),
        (48, 208, 2, True, "fp8_block"),
        (48, 208, 2, False, "fp8_channel"),
    ],
)
def test_decoding_on_the_host(n: int, k: int, slices: int, paired: bool, name: str, tmp_path: Path) -> None:
    """Exact: code times NVFP4's block scale; from the second expert on, and not a value past the last."""
    weight = experts(3, n, k, name)
    if name == "nvfp4":
        weight = replace(weight, scale_2=torch.tensor([0.5, 1.0, 2.0]))  # whose products are exact
    tiled = pack_experts(weight, slices, paired, Path())
    out = torch.full((3, n, k), torch.nan, dtype=torch.bfloat16)
    macros = decode_macros(tiled.shape, tiled.slices, tiled.steps, paired, name)
    library = build("_experts", DECODE, macros, tmp_path)
    assert run(library, decode_arguments(tiled, 1, out[:2]), [tiled.tape[1:]], 2, 0) == 0
    assert bool(out[2].isnan().all())
    if name != "nvfp4":
        assert torch.equal(out[:2].float(), weight.data[1:].float())
        return
    factor = tiled.scale[1:, None, None] * SCALE_REST
    assert torch.equal(out[:2].float() * factor, weight.dequantize()[1:])


@pytest.mark.parametrize("name", list(SHARED_FORMATS))
def test_shared_packing_is_a_permutation(name: str) -> None:
    weight = odd_weight(32, 96, name)
    tiled = pack_shared(weight)
    assert torch.equal(tiled.unpack().dequantize(), weight.dequantize())
    assert tiled.tape.numel() * tiled.tape.element_size() == 2 * 2 * {"bf16": 2048, "mxfp8": 1056}.get(name, 1024)


@pytest.mark.parametrize("name", [pytest.param("fp8_channel", marks=pytest.mark.slow), "fp8_block", "mxfp8"])
def test_the_shared_expert_in_other_formats(name: str, tmp_path: Path) -> None:
    """Wrong scales or columns: rows end inside of blocks of 128, columns inside of blocks and of steps."""
    n, k, shared_k, topk = 144, 64, 160, 2
    tiled = pack_experts(experts(5, n, k), SLICES, False, tmp_path)
    make = torch.Generator().manual_seed(1)
    hidden = torch.zeros(20, topk, k, dtype=torch.bfloat16)  # the routed experts have tests of their own
    ids, weights = choices(20, 5, topk), torch.rand(20, topk, generator=make).to(torch.bfloat16)
    matrix = odd_weight(n, shared_k, name)
    rows = torch.randn(20, shared_k, generator=make).to(torch.bfloat16)
    gate = torch.rand(20, 1, generator=make).to(torch.bfloat16)
    shared = rows, gate, pack_shared(matrix)
    exact = gate.double() * (rows.double() @ matrix.dequantize().double().T)
    # the product's own bound, times the gate; one more rounding in float32
    bound = gate.double() * product_bound(rows, matrix) + exact.abs() * 2.0**-23
    full: Tensor | None = None
    for count, cluster, warps in ((20, 2, 3), (3, 4, 2)):
        plan = replace(plan_for(tiled, shared[2], topk, count, 4), cluster=cluster, warps=warps)
        y = run_down(plan, hidden[:count], ids[:count], weights[:count], tiled, part(shared, slice(count)), tmp_path)
        assert bool(((y.double() - exact[:count]).abs() <= bound[:count]).all())
        full = y if full is None else full
        assert torch.equal(y, full[:count])
    many = replace(plan_many(tiled, shared_k, topk, 20, shared_macros(name, shared_k)), slots=2)
    assert full is not None
    assert torch.equal(run_down(many, hidden, ids, weights, tiled, shared, tmp_path), full)


@pytest.mark.parametrize(
    ("k", "channels", "count", "bits"),
    [(256, 48, 8, "c5bb587ac0dd94d0"), (512, 16, 5, "8a21659b82c2e963"), (1040, 32, 3, "cf85f0ef567436ae")],
)
def test_gate_up_on_the_host(k: int, channels: int, count: int, bits: str, tmp_path: Path) -> None:
    """Right values, a row's bits its own, and the bits of the first kernel, in which every warp had its own copies."""
    weight = experts(count, 2 * channels, k)
    assert digest(check_gate_up(weight, ((20, 2, 3), (9, 1, 8), (4, 5, 8), (1, 2, 1)), tmp_path)) == bits


@pytest.mark.parametrize("name", ["fp8_block", pytest.param("fp8_channel", marks=pytest.mark.slow)])
def test_gate_up_in_fp8_on_the_host(name: str, tmp_path: Path) -> None:
    """Scales of the wrong row, block or step: 136 channels end inside of a block, and slices begin inside of one."""
    check_gate_up(experts(3, 272, 400, name), ((20, 2, 3), (3, 2, 2)), tmp_path)


def check_gate_up(weight: PackedWeight, cases: tuple[tuple[int, int, int], ...], tmp_path: Path) -> Tensor:
    """Right values and a row's bits its own in every case (rows, slots, group), the first of which has 20 rows."""
    topk, count, k = 2, weight.data.shape[0], weight.shape[1]
    tiled = pack_experts(weight, gate_up_module.WARPS, True, tmp_path)
    x = torch.randn(20, k, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    ids = choices(20, count, topk)
    both = torch.einsum("tk,tjnk->tjn", x.double(), weight.dequantize().double()[ids])
    size = torch.einsum("tk,tjnk->tjn", x.double().abs(), weight.dequantize().double()[ids].abs())
    gate, up = both.chunk(2, -1)
    exact = torch.nn.functional.silu(gate) * up
    # float32 sums are off by K 2**-24 of the sum of magnitudes, silu has a slope below 1.1; one rounding to bf16
    off, up_off = (size * k * 2.0**-24).chunk(2, -1)
    bound = exact.abs() * 2**-8 + 1.1 * off * (up.abs() + up_off) + torch.nn.functional.silu(gate).abs() * up_off + 1e-6
    full: Tensor | None = None
    for rows, slots, group in cases:
        plan = plan_gate_up(tiled, topk, rows)
        plan = replace(plan, rows=32 if rows == 20 else plan.rows, slots=slots, group=group)
        y = run_gate_up(plan, x[:rows], ids[:rows], tiled, tmp_path)
        assert bool(((y.double() - exact[:rows]).abs() <= bound[:rows]).all())
        full = y if full is None else full
        assert torch.equal(y, full[:rows])
    assert full is not None
    some = torch.tensor([13, 2, 19])  # other neighbours, other experts live
    y = run_gate_up(replace(plan_gate_up(tiled, topk, 4), slots=1), x[some], ids[some], tiled, tmp_path)
    assert torch.equal(y, full[some])
    return full


@pytest.mark.parametrize(
    ("n", "k", "shared_k", "count", "bits"),
    [
        (256, 48, 64, 8, "a1de73f2d7315cfc"),
        (64, 128, 0, 5, "3a49b6acdc4b402a"),
        (96, 640, 208, 3, "9424576442af6811"),
    ],
    ids=str,
)
def test_down_on_the_host(n: int, k: int, shared_k: int, count: int, bits: str, tmp_path: Path) -> None:
    """Right values, a row's bits its own, and the bits of the first kernel, in which two warps shared every tile."""
    cases = (
        (20, 2, 3, 2, 8, 1),
        (9, 4, 2, 1, 2, 2),
        (4, 4, 3, 3, 1, 1),
        (2, 1, 4, 1, 2, 1),
        (1, 1, 3, 2, 1, 1),
        (1, 2, 2, 2, 1, 2),
    )
    assert digest(check_down(experts(count, n, k), shared_k, cases, tmp_path)) == bits


@pytest.mark.parametrize("name", ["fp8_block", pytest.param("fp8_channel", marks=pytest.mark.slow)])
def test_down_in_fp8_on_the_host(name: str, tmp_path: Path) -> None:
    """Scales of the wrong row, block or step: halves of 208 columns are padded, 144 rows end inside of a block."""
    check_down(experts(3, 144, 208, name), 0, ((20, 2, 3, 2, 8, 1), (3, 4, 2, 1, 2, 2)), tmp_path)


def check_down(
    weight: PackedWeight, shared_k: int, cases: tuple[tuple[int, int, int, int, int, int], ...], tmp_path: Path
) -> Tensor:
    """Right values and a row's bits its own in every case (rows, cluster, warps, slots, group, sharers)."""
    topk, count, (n, k) = 2, weight.data.shape[0], weight.shape
    tiled = pack_experts(weight, SLICES, False, tmp_path)
    make = torch.Generator().manual_seed(1)
    hidden = torch.randn(20, topk, k, generator=make).to(torch.bfloat16)
    ids = choices(20, count, topk)
    weights = torch.rand(20, topk, generator=make).to(torch.bfloat16)
    exact = torch.einsum("tj,tji,tjdi->td", weights.double(), hidden.double(), weight.dequantize().double()[ids])
    size = torch.einsum(
        "tj,tji,tjdi->td", weights.double(), hidden.double().abs(), weight.dequantize().double()[ids].abs()
    )
    shared = None
    if shared_k:
        matrix = quantize(torch.randn(n, shared_k, generator=make) / shared_k**0.5, "bf16")
        rows = torch.randn(20, shared_k, generator=make).to(torch.bfloat16)
        gate = torch.rand(20, 1, generator=make).to(torch.bfloat16)
        shared = rows, gate, pack_shared(matrix)
        exact += gate.double() * (rows.double() @ matrix.data.double().T)
        size += gate.double() * (rows.double().abs() @ matrix.data.double().abs().T)
    # one rounding to bf16, float32 sums of K + topk terms
    bound = exact.abs() * 2**-8 + size * (max(k, shared_k) + topk + 4) * 2.0**-24
    full: Tensor | None = None
    for rows, cluster, warps, slots, group, sharers in cases:
        plan = plan_down(tiled, shared_k, topk, rows, 4, cluster, warps)
        plan = replace(plan, rows=32 if rows == 20 else plan.rows, slots=slots, group=group, sharers=sharers)
        y = run_down(plan, hidden[:rows], ids[:rows], weights[:rows], tiled, part(shared, slice(rows)), tmp_path)
        assert bool(((y.double() - exact[:rows]).abs() <= bound[:rows]).all())
        full = y if full is None else full
        assert torch.equal(y, full[:rows])
    for rows, slots, group in ((20, 2, 8), (3, 1, 2)):
        many = replace(plan_many(tiled, shared_k, topk, rows), slots=slots, group=group)
        y = run_down(many, hidden[:rows], ids[:rows], weights[:rows], tiled, part(shared, slice(rows)), tmp_path)
        assert full is not None
        assert torch.equal(y, full[:rows])
    assert full is not None
    some = torch.tensor([13, 2, 19])
    plan = replace(plan_down(tiled, shared_k, topk, 4, 4, 2, 2), slots=1)
    y = run_down(plan, hidden[some], ids[some], weights[some], tiled, part(shared, some), tmp_path)
    assert torch.equal(y, full[some])
    return full


@pytest.mark.parametrize(("count", "topk", "channels"), [(64, 10, 48), (37, 32, 5), (8, 2, 300)])
@pytest.mark.parametrize("renormalize", [False, True])
def test_route_on_the_host(count: int, topk: int, channels: int, renormalize: bool, tmp_path: Path) -> None:
    """The reference's choices, ties included; values at most one bf16 step apart, where two exponentials differ."""
    make = torch.Generator().manual_seed(0)
    products = torch.randn(4, count + 2 * channels + 1, generator=make).to(torch.bfloat16)
    products[1, :count] = products[1, :count].mul(2).round()  # many ties
    products[2, :count] = 0.5
    products[3, 5] = 300  # the others' probabilities are all zero: too many candidates for the lanes
    wanted = moe_route_reference(products, count, topk, renormalize)
    found = [torch.full_like(t, -7) for t in wanted]
    held = torch.full((4, products.shape[1] + 3), torch.nan, dtype=torch.bfloat16)
    held[:, :-3] = products
    library = build("moe_route", ROUTE, route_macros(count, topk, channels, renormalize), tmp_path)
    assert run(library, route_arguments(held[:, :-3], *found), [held], 4, SHARED_BYTES) == 0
    assert torch.equal(found[0], wanted[0])
    for ours, theirs in zip(found[1:], wanted[1:], strict=True):
        assert bool(((ours.float() - theirs.float()).abs() <= theirs.float().abs() * 2**-7).all())


def digest(values: Tensor) -> str:
    """Of all bits of a bf16 tensor."""
    return hashlib.sha256(values.contiguous().view(torch.int16).numpy().tobytes()).hexdigest()[:16]


def part(shared: tuple[Tensor, Tensor, TiledShared] | None, rows: object) -> tuple[Tensor, Tensor, TiledShared] | None:
    """Some rows of what the shared expert reads."""
    return None if shared is None else (shared[0][rows], shared[1][rows], shared[2])


def run_gate_up(plan: GateUpPlan, x: Tensor, ids: Tensor, tiled: gate_up_module.TiledExperts, where: Path) -> Tensor:
    """The kernel's output for rows that NaN surrounds."""
    held = torch.full((x.shape[0], plan.k + 8), torch.nan, dtype=torch.bfloat16)
    held[:, : plan.k] = x
    out = torch.full((x.shape[0] + 1, plan.topk, plan.channels), torch.nan, dtype=torch.bfloat16)
    packed = gate_up_arguments(held[:, : plan.k], ids, tiled, out[: x.shape[0]])
    library = build("moe_gate_up", GATE_UP, plan.macros, where)
    assert run(library, packed, [tiled.tape, held, ids], 3, plan.shared_bytes) == 0
    assert bool(out[x.shape[0] :].isnan().all())
    return out[: x.shape[0]]


def run_down(
    plan: DownPlan | ManyDownPlan,
    hidden: Tensor,
    ids: Tensor,
    weights: Tensor,
    tiled: gate_up_module.TiledExperts,
    shared: tuple[Tensor, Tensor, TiledShared] | None,
    where: Path,
) -> Tensor:
    """The kernel's output."""
    rows = hidden.shape[0]
    out = torch.full((rows + 1, plan.n + 3), torch.nan, dtype=torch.bfloat16)
    spilled = down_scratch(plan, torch.device("cpu"))
    packed = down_arguments(hidden, ids, weights, tiled, shared, spilled, out[:rows, : plan.n])
    read = [tiled.tape, hidden, ids, weights]
    read += [torch.empty(0)] * 3 if shared is None else [shared[2].tape, shared[0], shared[1]]
    read.append(torch.empty(0) if spilled is None else spilled)
    scale = None if shared is None else shared[2].scale
    read.append(torch.empty(0) if scale is None else scale)
    if isinstance(plan, DownPlan):
        library, blocks = build("moe_down", DOWN, plan.macros, where), plan.blocks
    else:
        library, blocks = build("moe_down_many", MANY_DOWN, plan.macros, where), 3
    assert run(library, packed, read, blocks, plan.shared_bytes) == 0
    assert bool(out[rows:].isnan().all())
    assert bool(out[:, plan.n :].isnan().all())
    return out[:rows, : plan.n]


def run(library: ctypes.CDLL, packed: bytes, read: list[Tensor], blocks: int, shared_bytes: int) -> int:
    """Faults of a launch."""
    sizes = (ctypes.c_uint64 * len(read))(*(t.numel() * t.element_size() for t in read))
    library.run.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64]
    return library.run(packed, sizes, blocks, shared_bytes)
