"""Which experts a row gets, with what weights, and the first half of the shared expert."""

from typing import Any

import pytest
import torch
from torch import Tensor

from stepfloor.formats.codec import quantize
from stepfloor.kernels.moe_route import moe_route, moe_route_inputs
from tests.kernels.compare import (
    MATRIX_FORMATS,
    UNIT,
    assert_rounded_alike,
    assert_rows_alone,
    assert_same,
    assert_within,
    decoded,
    magnitudes,
    sum_bound,
    twin,
    with_weights,
)
from tests.kernels.source import Recording, as_stored

DTYPES = [torch.float32, torch.bfloat16]


def source_inputs(recording: Recording, layer: int) -> dict[str, Any]:
    prefix = f"layers.{layer}.mlp"
    shared = torch.cat([recording.module(f"{prefix}.shared_expert.{p}_proj").weight for p in ("gate", "up")])
    return {
        "x": recording.into(prefix),
        "router": (recording.weight(f"{prefix}.gate"),),
        "shared_gate_up": (as_stored(shared),),
        "shared_gate": (recording.weight(f"{prefix}.shared_expert_gate"),),
        "topk": recording.config.num_experts_per_tok,
        "renormalize": recording.config.norm_topk_prob,
    }


@pytest.mark.parametrize("layer", [0, 3])
def test_experts_and_weights_are_the_sources(recording: Recording, layer: int) -> None:
    prefix = f"layers.{layer}.mlp.gate"
    inputs = source_inputs(recording, layer)
    ids, weights, _, _ = moe_route(**inputs)
    logits, wanted_weights, wanted_ids = (recording.out(prefix, i) for i in range(3))
    # a logit may move by the product's two orders, in bf16 by a step on top; of experts that lie closer either is right
    moved = (sum_bound(inputs["x"], inputs["router"]) + 2 * UNIT[recording.dtype] * logits.double().abs()).amax(-1)
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
    inputs = source_inputs(recording, layer)
    _, _, hidden, gate = moe_route(**inputs)
    gate_rows, up_rows = (recording.out(f"{prefix}.shared_expert.{p}_proj").double().abs() for p in ("gate", "up"))
    unit = UNIT[recording.dtype]
    step = 2 * unit * (recording.dtype == torch.bfloat16)
    moved_gate, moved_up = sum_bound(inputs["x"], inputs["shared_gate_up"]).chunk(2, -1)
    # silu's slope is at most 1.1 and |silu(g)| at most |g|; silu's own rounding and the product's follow
    bound = 1.1 * (moved_gate + step * gate_rows) * up_rows + gate_rows * (moved_up + step * up_rows)
    bound = bound * 1.01 + (4 * unit + 8 * 2.0**-24) * gate_rows * up_rows
    wanted = recording.into(f"{prefix}.shared_expert.down_proj")
    assert_within(hidden, wanted, bound)
    assert_rounded_alike(hidden, wanted)
    raw = recording.out(f"{prefix}.shared_expert_gate")
    # through sigmoid's slope of a quarter; values up to one
    bound = 0.25 * (sum_bound(inputs["x"], inputs["shared_gate"]) + step * raw.double().abs()) + 2 * unit + 2.0**-22
    assert_within(gate, torch.sigmoid(raw), bound)
    assert_rounded_alike(gate, torch.sigmoid(raw))


def test_weights_by_hand() -> None:
    """Softmax over all experts, then the chosen ones to a sum of one: odds 4 : 3 : 2 : 1, two chosen."""
    logits = torch.tensor([2.0, 4.0, 1.0, 3.0]).log()
    inputs = moe_route_inputs(1, 4, 4, 3, 2, "fp32", torch.float32, "cpu")
    inputs |= {"x": torch.eye(4)[:1], "router": (quantize(logits[:, None] * torch.eye(4)[:1], "fp32"),)}
    ids, weights, _, _ = moe_route(**inputs)
    assert ids.tolist() == [[1, 3]]
    # a few roundings of exp, sum and quotient
    assert_within(weights, torch.tensor([[4 / 7, 3 / 7]]), 8 * 2.0**-24)
    _, plain, _, _ = moe_route(**{**inputs, "renormalize": False})
    assert_within(plain, torch.tensor([[0.4, 0.3]]), 8 * 2.0**-24)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ties_go_to_the_lower_expert(dtype: torch.dtype) -> None:
    """Twin experts have equal logits to the bit; without a rule the choice depends on the sort."""
    inputs = moe_route_inputs(13, 24, 6, 3, 5, "fp32", dtype, "cpu")
    rows = inputs["router"][0].dequantize()
    inputs["router"] = (quantize(rows.repeat(40, 1), "fp32"),)
    ids, _, _, _ = moe_route(**inputs)
    best = (inputs["x"].float() @ rows.T).to(dtype).float().argmax(-1)
    assert_same(ids, best[:, None] + 6 * torch.arange(5))


def test_weights_fall_and_ids_differ() -> None:
    ids, weights, _, _ = moe_route(**moe_route_inputs(21, 24, 16, 3, 16, "fp32", torch.float32, "cpu"))
    assert bool((weights[:, 1:] <= weights[:, :-1]).all())
    assert_same(ids.sort(-1).values, torch.arange(16).repeat(21, 1))


def test_probabilities_are_float32_in_bf16_models() -> None:
    """Logits a bf16 step of 2**-8 apart; their probabilities, rounded to steps of up to 2**-7, would tie in pairs."""
    router = torch.zeros(40, 2)
    router[:8, 0] = 0.5 + torch.arange(8) * 2.0**-8
    inputs = moe_route_inputs(1, 2, 40, 3, 8, "bf16", torch.bfloat16, "cpu")
    inputs |= {"x": torch.tensor([[1.0, 0.0]], dtype=torch.bfloat16), "router": (quantize(router, "bf16"),)}
    assert moe_route(**inputs)[0].tolist() == [[7, 6, 5, 4, 3, 2, 1, 0]]


@pytest.mark.parametrize("name", MATRIX_FORMATS)
def test_every_format_is_its_decoded_matrix(name: str) -> None:
    inputs = moe_route_inputs(5, 160, 16, 22, 4, name, torch.float32, "cpu")
    ours = moe_route(**inputs)
    assert_same(ours, moe_route(**with_weights(inputs, decoded)))
    near = moe_route(**with_weights(inputs, twin))
    # the router is bf16 already
    assert_same(near[:2] + near[3:], ours[:2] + ours[3:])
    assert_within(near[2], ours[2], swiglu_bound(inputs["x"], inputs["shared_gate_up"]))


def swiglu_bound(x: Tensor, gate_up: Any) -> Tensor:
    """How far silu(g) u moves in float32 when each weight moves by 2**-8: silu's slope is at most 1.1."""
    moved = 2.0**-8 * magnitudes(x, gate_up) + sum_bound(x, gate_up)
    values = torch.cat([x.double() @ w.dequantize().double().T for w in gate_up], -1).abs()
    (gate, up), (moved_gate, moved_up) = values.chunk(2, -1), moved.chunk(2, -1)
    return 1.1 * moved_gate * (up + moved_up) + gate * moved_up + 8 * 2.0**-24 * gate * up


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("d", "experts"), [(19, 11), (64, 16), (515, 37)])
def test_rows_do_not_disturb_each_other(d: int, experts: int, dtype: torch.dtype) -> None:
    assert_rows_alone(moe_route, moe_route_inputs(21, d, experts, 11, 5, "fp32", dtype, "cpu"), ("x",))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"topk": 12}, "got 12 of 11"),
        ({"x": torch.zeros(3, 18)}, r"\(3, 18\), \[\(11, 19\)"),
        ({"shared_gate": (quantize(torch.zeros(2, 19), "fp32"),)}, r"one row \[1, D\].*\(2, 19\)\]"),
    ],
)
def test_disagreeing_shapes_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        moe_route(**{**moe_route_inputs(3, 19, 11, 5, 4, "fp32", torch.float32, "cpu"), **change})
