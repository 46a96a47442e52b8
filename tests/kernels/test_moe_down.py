"""Down projections, weighted sum and shared expert."""

from typing import Any

import pytest
import torch
from torch import Tensor

from stepfloor.formats.codec import quantize
from stepfloor.kernels.moe_down import moe_down, moe_down_inputs
from stepfloor.kernels.moe_gate_up import moe_gate_up
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
PER_ROW = ("hidden", "ids", "weights", "shared_hidden", "shared_gate")


def exact(inputs: dict[str, Any], magnitudes: bool = False) -> Tensor:
    """The equation in float64, or the sum of the magnitudes of all its products."""
    size = torch.abs if magnitudes else (lambda t: t)
    chosen = size(inputs["down"].dequantize().double())[inputs["ids"]]  # [T, topk, D, I]
    out = torch.einsum("tji,tjdi->tjd", size(inputs["hidden"].double()), chosen)
    shared = torch.cat([size(w.dequantize().double()) for w in inputs["shared_down"]])
    routed = (size(inputs["weights"].double())[..., None] * out).sum(1)
    return routed + size(inputs["shared_gate"].double()) * (size(inputs["shared_hidden"].double()) @ shared.T)


def roundings_bound(inputs: dict[str, Any], dtype: torch.dtype) -> Tensor:
    """How far a result lies from the exact one: K + topk float32 terms, five roundings to the model's dtype.

    Down product, its weighted value, the sum, the shared product with its gate, the total: none is larger than the
    sum of magnitudes. (Product and gate of the shared expert round twice, but not what the routed experts add.)
    """
    terms = max(inputs["hidden"].shape[2], inputs["shared_hidden"].shape[1]) + inputs["ids"].shape[1]
    return (terms * 2.0**-24 + 5 * UNIT[dtype]) * 1.02 * exact(inputs, magnitudes=True)


@pytest.mark.parametrize("layer", [0, 3])
def test_block_is_the_sources(recording: Recording, layer: int) -> None:
    """The source's own routing, hidden rows from our first half; its output is the whole block's."""
    prefix = f"layers.{layer}.mlp"
    experts = recording.module(f"{prefix}.experts")
    ids = recording.out(f"{prefix}.gate", 2)
    inputs = {
        "hidden": moe_gate_up(recording.into(prefix), ids, as_stored(experts.gate_up_proj)),
        "ids": ids,
        "weights": recording.out(f"{prefix}.gate", 1),
        "down": as_stored(experts.down_proj),
        "shared_hidden": recording.into(f"{prefix}.shared_expert.down_proj"),
        "shared_gate": torch.sigmoid(recording.out(f"{prefix}.shared_expert_gate")),
        "shared_down": (recording.weight(f"{prefix}.shared_expert.down_proj"),),
    }
    ours, wanted = moe_down(**inputs), recording.out(prefix)
    # ours and the source's each off as derived; the source rounds once more an expert, adding into its own dtype, and
    # its hidden rows may be a step from ours (two orders of D float32 products before a rounding)
    adds = ids.shape[1] * UNIT[recording.dtype] + 2 * recording.config.hidden_size * 4 * 2.0**-24
    flips = 2 * UNIT[recording.dtype] if recording.dtype == torch.bfloat16 else 0.0
    bound = 2 * roundings_bound(inputs, recording.dtype) + (adds + flips) * exact(inputs, magnitudes=True)
    assert_within(ours, wanted, bound)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("t", "experts", "topk"), [(1, 5, 5), (21, 3, 1), (21, 2, 2), (33, 64, 3), (4, 6, 3)])
def test_tiles_of_any_fill_are_the_equation(t: int, experts: int, topk: int, dtype: torch.dtype) -> None:
    """One row; more than eight rows on one expert; every expert the same rows; experts nobody chose."""
    inputs = moe_down_inputs(t, 19, 11, 13, experts, topk, "fp32", dtype, "cpu")
    assert_within(moe_down(**inputs).double(), exact(inputs), roundings_bound(inputs, dtype))


def test_roundings_are_the_sources_but_for_the_sum() -> None:
    """Each weighted product is rounded as in the source; the sum runs in float32 and is rounded once."""
    inputs = moe_down_inputs(9, 16, 8, 8, 6, 4, "bf16", torch.bfloat16, "cpu")
    matrices = inputs["down"].data[inputs["ids"]].float()  # [T, topk, D, I]
    out = torch.einsum("tji,tjdi->tjd", inputs["hidden"].float(), matrices).to(torch.bfloat16)
    routed = (out * inputs["weights"][..., None]).float().sum(1).to(torch.bfloat16)
    shared = (inputs["shared_hidden"].float() @ inputs["shared_down"][0].data.float().T).to(torch.bfloat16)
    assert_rounded_alike(moe_down(**inputs), routed + inputs["shared_gate"] * shared)


def test_sum_of_the_choices_is_float32() -> None:
    """In a bf16 sum 256 swallows each of the ones that follow."""
    topk = 9
    weights = torch.ones(1, topk, dtype=torch.bfloat16)
    hidden = torch.ones(1, topk, 1, dtype=torch.bfloat16)
    hidden[0, 0] = 256
    one = (quantize(torch.zeros(1, 1), "bf16"),)
    zero = torch.zeros(1, 1, dtype=torch.bfloat16)
    down = quantize(torch.ones(topk, 1, 1), "bf16")
    ids = torch.arange(topk)[None]
    assert moe_down(hidden, ids, weights, down, zero, zero, one).item() == 264


def test_sum_runs_in_order_of_the_choices() -> None:
    """By falling weight, as routed: 2**24 + 1 - 2**24 is 0 in that order, and 1 in ascending expert id."""
    hidden = torch.tensor([[[2.0**24], [1.0], [-(2.0**24)]]])
    ids, weights = torch.tensor([[2, 1, 3]]), torch.ones(1, 3)
    nothing = torch.zeros(1, 1)
    down, shared = quantize(torch.ones(4, 1, 1), "fp32"), (quantize(torch.zeros(1, 1), "fp32"),)
    assert moe_down(hidden, ids, weights, down, nothing, nothing, shared).item() == 0.0
    assert moe_down(hidden[:, [0, 2, 1]], ids[:, [0, 2, 1]], weights, down, nothing, nothing, shared).item() == 1.0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MATRIX_FORMATS)
def test_every_format_is_its_decoded_matrix(name: str, dtype: torch.dtype) -> None:
    inputs = moe_down_inputs(9, 130, 160, 96, 5, 2, name, dtype, "cpu")
    inputs["shared_down"] = (quantize(inputs["shared_down"][0].dequantize(), name),)
    ours = moe_down(**inputs)
    assert_same(ours, moe_down(**with_weights(inputs, decoded)))
    near = moe_down(**with_weights(inputs, twin))
    # the twin's weights are off by 2**-8, and each side as derived from the exact result
    assert_within(near, ours, 2.0**-8 * exact(inputs, magnitudes=True) + 2.02 * roundings_bound(inputs, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("d", "width", "shared"), [(19, 11, 13), (64, 24, 24), (33, 515, 7)])
def test_rows_do_not_disturb_each_other(d: int, width: int, shared: int, dtype: torch.dtype) -> None:
    inputs = moe_down_inputs(21, d, width, shared, 5, 3, "fp32", dtype, "cpu")
    assert_rows_alone(moe_down, inputs, PER_ROW)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids": torch.zeros(1, 2).long()}, r"\(3, 2, 11\), \(1, 2\)"),
        ({"weights": torch.zeros(3, 1)}, r"\(3, 2\), \(3, 1\)"),
        ({"hidden": torch.zeros(3, 2, 10)}, r"\(3, 2, 10\).*\(19, 11\)"),
        ({"shared_gate": torch.zeros(1, 1)}, r"\[3, 1\].*\(3, 13\), \(1, 1\)"),  # would broadcast over all rows
        ({"shared_hidden": torch.zeros(1, 13)}, r"\[3, Is\].*\(1, 13\)"),
        ({"shared_down": (quantize(torch.zeros(1, 13), "fp32"),)}, r"\[19, Is\].*\[\(1, 13\)\]"),
    ],
)
def test_disagreeing_shapes_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        moe_down(**{**moe_down_inputs(3, 19, 11, 13, 4, 2, "fp32", torch.float32, "cpu"), **change})
