"""Gate and up projections of the chosen experts."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from stepfloor.formats.codec import PackedWeight
from stepfloor.kernels.moe_gate_up import moe_gate_up, moe_gate_up_inputs
from tests.kernels.compare import (
    MATRIX_FORMATS,
    UNIT,
    assert_rounded_alike,
    assert_rows_alone,
    assert_same,
    assert_within,
    decoded,
    twin,
    with_weights,
)
from tests.kernels.source import Recording, as_stored

DTYPES = [torch.float32, torch.bfloat16]


def one_by_one(x: Tensor, ids: Tensor, matrices: Tensor) -> Tensor:
    """The source's expert loop, a pair at a time."""
    rows = []
    for t, chosen in enumerate(ids.tolist()):
        projected = [linear(x[t : t + 1], matrices[e]).chunk(2, -1) for e in chosen]
        rows.append(torch.cat([silu(gate) * up for gate, up in projected]))
    return torch.stack(rows)


def bound(x: Tensor, ids: Tensor, matrices: Tensor, weight_error: float, dtype: torch.dtype) -> Tensor:
    """How far two evaluations of silu(g) u may lie apart.

    Two orders of K float32 products, weights off by weight_error of themselves, and in bf16 a step (two roundings)
    in each of gate, up, silu and the result. silu's slope is at most 1.1 and |silu(g)| at most |g|.
    """
    chosen = matrices.double()[ids]  # [T, topk, 2 I, D]
    values = torch.einsum("td,tjnd->tjn", x.double(), chosen).abs()
    total = torch.einsum("td,tjnd->tjn", x.double().abs(), chosen.abs())
    step = 2 * UNIT[torch.bfloat16] * (dtype == torch.bfloat16)
    moved = (weight_error + 2 * x.shape[1] * 2.0**-24) * total + step * values
    (gate, up), (moved_gate, moved_up) = values.chunk(2, -1), moved.chunk(2, -1)
    return 1.1 * moved_gate * (up + moved_up) + gate * moved_up + (2 * step + 8 * 2.0**-24) * (gate * up) * 1.02


def test_hidden_rows_are_the_sources(recording: Recording) -> None:
    experts = recording.module("layers.3.mlp.experts")
    matrices = experts.gate_up_proj.detach()
    x, ids = recording.into("layers.3.mlp"), recording.out("layers.3.mlp.gate", 2)
    ours = moe_gate_up(x, ids, as_stored(matrices))
    wanted = one_by_one(x, ids, matrices)
    assert_within(ours, wanted, bound(x, ids, matrices, 0.0, recording.dtype))
    assert_rounded_alike(ours, wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("t", "experts", "topk"), [(1, 5, 5), (21, 3, 1), (21, 2, 2), (33, 64, 3), (4, 6, 3)])
def test_tiles_of_any_fill_are_pair_by_pair(t: int, experts: int, topk: int, dtype: torch.dtype) -> None:
    """One row; more than eight rows on one expert; every expert the same rows; experts nobody chose."""
    inputs = moe_gate_up_inputs(t, 19, 11, experts, topk, "fp32", dtype, "cpu")
    ours = moe_gate_up(**inputs)
    x, ids, matrices = inputs["x"], inputs["ids"], inputs["gate_up"].data
    wanted = one_by_one(x.float(), ids, matrices)
    # the yardstick stays in float32: gate, up, silu and result each rounded once in bf16, no more than a step
    assert_within(ours.float(), wanted, bound(x, ids, matrices, 0.0, dtype) + 2.0**-24)


def test_all_rows_on_one_expert() -> None:
    inputs = moe_gate_up_inputs(21, 16, 8, 4, 1, "fp32", torch.float32, "cpu")
    inputs["ids"] = torch.full((21, 1), 2)
    alone = {**inputs, "gate_up": inputs["gate_up"].expert(2)}
    alone["gate_up"] = PackedWeight("fp32", alone["gate_up"].shape, alone["gate_up"].data[None])
    assert_same(moe_gate_up(**inputs), moe_gate_up(**{**alone, "ids": torch.zeros(21, 1).long()}))


def test_an_experts_place_among_the_choices_is_free() -> None:
    inputs = moe_gate_up_inputs(13, 19, 11, 7, 4, "fp32", torch.bfloat16, "cpu")
    turned = moe_gate_up(**{**inputs, "ids": inputs["ids"].flip(-1)})
    assert_same(turned.flip(1), moe_gate_up(**inputs))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MATRIX_FORMATS)
def test_every_format_is_its_decoded_matrix(name: str, dtype: torch.dtype) -> None:
    """Each expert's own scales: a stack's first scale for all is the failure."""
    inputs = moe_gate_up_inputs(9, 160, 70, 5, 2, name, dtype, "cpu")
    ours = moe_gate_up(**inputs)
    assert_same(ours, moe_gate_up(**with_weights(inputs, decoded)))
    near = moe_gate_up(**with_weights(inputs, twin))
    assert_within(near, ours, bound(inputs["x"], inputs["ids"], inputs["gate_up"].dequantize(), 2.0**-8, dtype) * 1.01)


def test_scales_stay_with_their_expert() -> None:
    inputs = moe_gate_up_inputs(3, 32, 8, 4, 2, "nvfp4", torch.float32, "cpu")
    packed = inputs["gate_up"]
    assert packed.scale_2.shape == (4,)
    for e in range(4):
        assert_same(packed.expert(e).dequantize(), packed.dequantize()[e])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("d", "width"), [(19, 11), (64, 24), (515, 33)])
def test_rows_do_not_disturb_each_other(d: int, width: int, dtype: torch.dtype) -> None:
    """A row shares its tile with whatever rows chose the same expert."""
    inputs = moe_gate_up_inputs(21, d, width, 5, 3, "fp32", dtype, "cpu")
    assert_rows_alone(moe_gate_up, inputs, ("x", "ids"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids": torch.zeros(1, 2).long()}, r"\(3, 19\), \(1, 2\), \(22, 19\)"),
        ({"x": torch.zeros(3, 18)}, r"\(3, 18\), \(3, 2\), \(22, 19\)"),
    ],
)
def test_disagreeing_shapes_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        moe_gate_up(**{**moe_gate_up_inputs(3, 19, 11, 4, 2, "fp32", torch.float32, "cpu"), **change})
