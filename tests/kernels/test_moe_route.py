"""Which experts a row gets, with what weights, and the first half of the shared expert."""

from typing import Any

import pytest
import torch
from torch import Tensor

from stepfloor.formats.codec import PackedWeight
from stepfloor.kernels.linear import linear
from stepfloor.kernels.moe_route import moe_route, moe_route_inputs, moe_route_reference, route_triton
from tests.kernels.compare import (
    UNIT,
    assert_rounded_alike,
    assert_rows_alone,
    assert_same,
    assert_within,
    sum_bound,
)
from tests.kernels.compiled import Case, assert_compiles
from tests.kernels.source import Recording, as_stored

DTYPES = [torch.float32, torch.bfloat16]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def source_weights(recording: Recording, layer: int) -> tuple[PackedWeight, PackedWeight, PackedWeight]:
    """Router, gate and up of the shared expert, its gate."""
    prefix = f"layers.{layer}.mlp"
    shared = torch.cat([recording.module(f"{prefix}.shared_expert.{p}_proj").weight for p in ("gate", "up")])
    return (
        recording.weight(f"{prefix}.gate"),
        as_stored(shared),
        recording.weight(f"{prefix}.shared_expert_gate"),
    )


def source_inputs(recording: Recording, layer: int) -> dict[str, Any]:
    return {
        "products": linear(recording.into(f"layers.{layer}.mlp"), source_weights(recording, layer)),
        "experts": recording.config.num_experts,
        "topk": recording.config.num_experts_per_tok,
        "renormalize": recording.config.norm_topk_prob,
    }


@pytest.mark.parametrize("layer", [0, 3])
def test_experts_and_weights_are_the_sources(recording: Recording, layer: int) -> None:
    prefix = f"layers.{layer}.mlp.gate"
    inputs = source_inputs(recording, layer)
    x, router = recording.into(f"layers.{layer}.mlp"), source_weights(recording, layer)[0]
    ids, weights, _, _ = moe_route(**inputs)
    logits, wanted_weights, wanted_ids = (recording.out(prefix, i) for i in range(3))
    # a logit may move by the product's two orders, in bf16 by a step on top; of experts that lie closer either is right
    moved = (sum_bound(x, router) + 2 * UNIT[recording.dtype] * logits.double().abs()).amax(-1)
    ranked = logits.double().sort(-1, descending=True).values
    gaps = ranked[:, : inputs["topk"]] - ranked[:, 1 : inputs["topk"] + 1]
    clear = gaps.amin(-1) > 2 * moved
    # the test would be empty if most rows were near ties; bf16's steps of 2**-7 make them common
    assert clear.sum() >= len(clear) * (0.9 if recording.dtype == torch.float32 else 0.3)
    assert_same(ids[clear], wanted_ids[clear])
    # softmax turns a logit's error into a relative one, in numerator and sum; then one rounding each
    bound = (4 * moved[:, None] + 20 * 2.0**-24 + 2 * UNIT[recording.dtype]) * wanted_weights.double()
    assert_within(weights[clear], wanted_weights[clear], bound[clear])
    assert_rounded_alike(weights, wanted_weights)


@pytest.mark.parametrize("layer", [0, 3])
def test_shared_expert_begins_like_the_sources(recording: Recording, layer: int) -> None:
    prefix = f"layers.{layer}.mlp"
    x, (_, gate_up, shared_gate) = recording.into(prefix), source_weights(recording, layer)
    _, _, hidden, gate = moe_route(**source_inputs(recording, layer))
    gate_rows, up_rows = (recording.out(f"{prefix}.shared_expert.{p}_proj").double().abs() for p in ("gate", "up"))
    unit = UNIT[recording.dtype]
    step = 2 * unit * (recording.dtype == torch.bfloat16)
    moved_gate, moved_up = sum_bound(x, gate_up).chunk(2, -1)
    # silu's slope is at most 1.1 and |silu(g)| at most |g|; silu's own rounding and the product's follow
    bound = 1.1 * (moved_gate + step * gate_rows) * up_rows + gate_rows * (moved_up + step * up_rows)
    bound = bound * 1.01 + (4 * unit + 8 * 2.0**-24) * gate_rows * up_rows
    wanted = recording.into(f"{prefix}.shared_expert.down_proj")
    assert_within(hidden, wanted, bound)
    assert_rounded_alike(hidden, wanted)
    raw = recording.out(f"{prefix}.shared_expert_gate")
    # through sigmoid's slope of a quarter; values up to one
    bound = 0.25 * (sum_bound(x, shared_gate) + step * raw.double().abs()) + 2 * unit + 2.0**-22
    assert_within(gate, torch.sigmoid(raw), bound)
    assert_rounded_alike(gate, torch.sigmoid(raw))


def test_weights_by_hand() -> None:
    """Softmax over all experts, then the chosen ones to a sum of one: odds 4 : 3 : 2 : 1, two chosen."""
    inputs = moe_route_inputs(1, 4, 3, 2, torch.float32, "cpu")
    inputs["products"][:, :4] = torch.tensor([2.0, 4.0, 1.0, 3.0]).log()
    ids, weights, _, _ = moe_route(**inputs)
    assert ids.tolist() == [[1, 3]]
    # a few roundings of exp, sum and quotient
    assert_within(weights, torch.tensor([[4 / 7, 3 / 7]]), 8 * 2.0**-24)
    _, plain, _, _ = moe_route(**{**inputs, "renormalize": False})
    assert_within(plain, torch.tensor([[0.4, 0.3]]), 8 * 2.0**-24)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ties_go_to_the_lower_expert(dtype: torch.dtype) -> None:
    """Twin experts have equal logits to the bit; without a rule the choice depends on the sort."""
    few = torch.randn(13, 6, generator=torch.Generator().manual_seed(0)).to(dtype)
    inputs = moe_route_inputs(13, 240, 3, 5, dtype, "cpu")
    inputs["products"][:, :240] = few.repeat(1, 40)
    for route in (moe_route, route_triton):
        moved = {name: value.to(DEVICE) if isinstance(value, Tensor) else value for name, value in inputs.items()}
        ids, _, _, _ = route(**moved)
        assert_same(ids.cpu(), few.argmax(-1)[:, None] + 6 * torch.arange(5))


def test_weights_fall_and_ids_differ() -> None:
    ids, weights, _, _ = moe_route(**moe_route_inputs(21, 16, 3, 16, torch.float32, "cpu"))
    assert bool((weights[:, 1:] <= weights[:, :-1]).all())
    assert_same(ids.sort(-1).values, torch.arange(16).repeat(21, 1))


def test_probabilities_are_float32_in_bf16_models() -> None:
    """Logits a bf16 step of 2**-8 apart; their probabilities, rounded to steps of up to 2**-7, would tie in pairs."""
    inputs = moe_route_inputs(1, 40, 3, 8, torch.bfloat16, DEVICE)
    inputs["products"][:, :40] = 0
    inputs["products"][:, :8] = 0.5 + torch.arange(8) * 2.0**-8
    for route in (moe_route, route_triton):
        assert route(**inputs)[0].tolist() == [[7, 6, 5, 4, 3, 2, 1, 0]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("experts", "topk", "shared"), [(8, 2, 64), (11, 3, 18), (37, 33, 300), (512, 10, 640)])
def test_kernel_is_the_reference(experts: int, topk: int, shared: int, dtype: torch.dtype) -> None:
    """Sizes the CUDA kernel has not: few experts, more than 32 choices, float32."""
    inputs = moe_route_inputs(9, experts, shared, topk, dtype, "cpu")
    inputs["products"][3, :experts] = 0.25
    wanted = moe_route_reference(**inputs)
    wide = torch.full((9, inputs["products"].shape[1] + 3), torch.nan, dtype=dtype, device=DEVICE)
    wide[:, :-3] = inputs["products"]
    found = route_triton(wide[:, :-3], experts, topk, True)
    assert_same(found[0].cpu(), wanted[0])
    # exponentials that differ in their last bits (2**-19 where the hardware's are used), then the same roundings
    for ours, theirs in zip(found[1:], wanted[1:], strict=True):
        assert_within(ours.cpu(), theirs, (2.0**-18 + 2 * UNIT[dtype]) * theirs.double().abs())
        assert_rounded_alike(ours.cpu(), theirs)


def test_a_row_that_is_not_finite_chooses_experts_that_exist() -> None:
    """The kernels that follow read the matrices of what is chosen; the weights must show the fault."""
    inputs = moe_route_inputs(2, 11, 4, 3, torch.bfloat16, DEVICE)
    inputs["products"][0, 5] = torch.nan
    ids, weights, _, _ = route_triton(**inputs)
    assert sorted(set(ids[0].tolist())) == sorted(ids[0].tolist())
    assert 0 <= int(ids.min()) <= int(ids.max()) < 11
    assert bool(weights[0].isnan().all())
    assert bool(weights[1].isfinite().all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("experts", [11, 16, 37])
def test_rows_do_not_disturb_each_other(experts: int, dtype: torch.dtype) -> None:
    assert_rows_alone(moe_route, moe_route_inputs(21, experts, 11, 5, dtype, "cpu"), ("products",))


def test_rows_of_the_kernel_do_not_disturb_each_other() -> None:
    assert_rows_alone(route_triton, moe_route_inputs(9, 11, 5, 3, torch.bfloat16, DEVICE), ("products",))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"topk": 12}, r"\(3, 22\), 11 experts, topk 12"),
        ({"products": torch.zeros(3, 11)}, r"\(3, 11\), 11 experts"),
        ({"products": torch.zeros(3, 23)}, r"\(3, 23\), 11 experts"),
    ],
)
def test_disagreeing_shapes_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        moe_route(**{**moe_route_inputs(3, 11, 5, 4, torch.float32, "cpu"), **change})


def test_kernel_compiles() -> None:
    def case(pointer: str, experts: int, topk: int, shared: int, arch: int) -> Case:
        names = ("products_ptr", "weights_ptr", "hidden_ptr", "gate_ptr")
        signature = {"ids_ptr": "*i64", "stride": "i32", **dict.fromkeys(names, pointer)}
        block = 1 << (experts - 1).bit_length()
        constants = {"EXPERTS": experts, "TOPK": topk, "CHANNELS": shared, "RENORMALIZE": True, "BLOCK_E": block}
        constants |= {"BLOCK_J": 1 << (topk - 1).bit_length(), "BLOCK_C": 256, "PDL": arch >= 90}
        return Case("stepfloor.kernels.moe_route", "_route_kernel", signature, constants, num_warps=1, arch=arch)

    assert_compiles([case("*bf16", 512, 10, 640, 90), case("*fp32", 11, 3, 18, 80)])
