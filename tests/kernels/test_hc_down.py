"""The write of one sub-layer, the norms and the down projection of the next."""

from typing import Any

import pytest
import torch

from stepfloor.formats.codec import PackedWeight
from stepfloor.kernels._product import launch_product
from stepfloor.kernels._torch import product
from stepfloor.kernels.hc_down import hc_down, hc_down_inputs, hc_down_reference, launch_activations, launch_norms
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
from tests.kernels.edges import DEVICE, REAL, empty_is_nan, fenced
from tests.kernels.source import Recording

DTYPES = [torch.float32, torch.bfloat16]
PER_ROW = ("residual", "y", "y_weights")


def source_inputs(recording: Recording, layer: int) -> dict[str, Any]:
    """What the hyper-connection before the experts of a layer gets."""
    prefix, attention = f"layers.{layer}.mlp_hyper_connection", f"layers.{layer}.attn_hyper_connection"
    mixer = "linear_attn" if layer % 4 != 3 else "self_attn"
    return {
        "residual": recording.into(attention),
        "y": recording.out(f"layers.{layer}.{mixer}"),
        "y_weights": recording.out(attention, 2),
        "norm_scale": recording.norm(f"{prefix}.hc_norm"),
        "down": (
            recording.weight(f"{prefix}.input_mix_weight_down"),
            recording.weight(f"{prefix}.block_inject_weight"),
        ),
        "rank": recording.config.hc_lowrank,
        "streams": recording.config.hc_count,
        "eps": recording.config.rms_norm_eps,
    }


@pytest.mark.parametrize("layer", [0, 3])
def test_write_norm_and_projections_are_the_sources(recording: Recording, layer: int) -> None:
    prefix = f"layers.{layer}.mlp_hyper_connection"
    inputs = source_inputs(recording, layer)
    residual, normed, low, weights = hc_down(**inputs)
    unit, streams = UNIT[recording.dtype], recording.config.hc_count
    # one product and one sum, element by element: nothing may differ, in bf16 neither (a write kept in float32 would)
    assert_same(residual, recording.into(prefix))
    # the mean of D squares in another order, D 2**-24 relative before the root halves it; one rounding each
    source_normed = recording.out(f"{prefix}.hc_norm")
    width = recording.config.hidden_size
    assert_within(normed, source_normed, (width * 2.0**-24 + 2 * unit) * source_normed.double().abs())
    # the product: two orders, a norm off by as much, and in bf16 one step between two roundings of one number
    step = 2 * unit * (recording.dtype == torch.bfloat16)
    moved = sum_bound(source_normed, inputs["down"]) + 2 * width * 2.0**-24 * magnitudes(source_normed, inputs["down"])
    for ours, source, rows, slope in (
        # silu's slope is at most 1.1; sigmoid's a quarter, doubled by the factor of two
        (low, recording.into(f"{prefix}.input_mix_weight_up"), slice(0, inputs["rank"]), 1.1),
        (weights, recording.out(prefix, 2), slice(inputs["rank"], None), 0.5),
    ):
        projected = source_projection(recording, prefix)[:, rows].double().abs()
        # three steps: the product's and the quotient's pass through the function, whose own result is rounded
        bound = (
            slope * (moved[:, rows] + 2 * step * projected) / streams + (step + 4 * 2.0**-24) * source.double().abs()
        )
        assert_within(ours, source, bound)
        assert_rounded_alike(ours, source)


def source_projection(recording: Recording, prefix: str) -> torch.Tensor:
    parts = ("input_mix_weight_down", "block_inject_weight")
    return torch.cat([recording.out(f"{prefix}.{part}") for part in parts], -1)


def test_final_mixer_has_no_write_weights(recording: Recording) -> None:
    prefix = "hyper_connection_mixer"
    inputs = source_inputs(recording, 0) | {
        "residual": recording.into(prefix),
        "y": None,
        "y_weights": None,
        "norm_scale": recording.norm(f"{prefix}.hc_norm"),
        "down": (recording.weight(f"{prefix}.input_mix_weight_down"),),
    }
    residual, normed, low, weights = hc_down(**inputs)
    assert_same(residual, inputs["residual"])
    assert weights.shape == (len(recording.tokens), 0)
    assert_rounded_alike(normed, recording.out(f"{prefix}.hc_norm"))
    assert_rounded_alike(low, recording.into(f"{prefix}.input_mix_weight_up"))
    if recording.dtype == torch.float32:
        # silu's slope is at most 1.1; the norm and the product are off by K 2**-24 of the magnitudes each
        bound = 1.1 * 2 * sum_bound(normed, inputs["down"]) / inputs["streams"]
        assert_within(low, recording.into(f"{prefix}.input_mix_weight_up"), bound)


def test_every_stream_is_normed_by_its_own_mean() -> None:
    """One mean over all streams is the drafter's norm, not this one; a stream 1000 times larger shows it."""
    inputs = hc_down_inputs(3, 16, 4, "fp32", torch.float32, "cpu", write=False)
    inputs["residual"][:, :16] *= 1000
    _, normed, _, _ = hc_down(**inputs)
    means = (normed / inputs["norm_scale"]).square().unflatten(-1, (4, 16)).mean(-1)
    # eps is 1e-6 of a mean near one; the rest is rounding of 16 squares
    assert_within(means, torch.ones_like(means), 1e-4)


def test_norm_reads_the_rounded_residual() -> None:
    """A fused kernel that norms the unrounded float32 sum differs from the source in bf16."""
    inputs = hc_down_inputs(9, 24, 8, "bf16", torch.bfloat16, "cpu")
    residual, *rest = hc_down(**inputs)
    assert_same(hc_down(**{**inputs, "residual": residual, "y": None, "y_weights": None})[1:], tuple(rest))


def test_same_output_goes_to_every_stream_by_its_weight() -> None:
    inputs = hc_down_inputs(2, 3, 5, "fp32", torch.float32, "cpu")
    inputs["residual"] = torch.zeros(2, 12)
    inputs["y_weights"] = torch.tensor([[1.0, 2.0, 3.0, 4.0]]).repeat(2, 1)
    residual = hc_down(**inputs)[0].unflatten(-1, (4, 3))
    for stream in range(4):
        assert_same(residual[:, stream], (stream + 1) * inputs["y"])


@pytest.mark.parametrize("name", MATRIX_FORMATS)
def test_every_format_is_its_decoded_matrix(name: str) -> None:
    inputs = hc_down_inputs(5, 40, 13, name, torch.float32, "cpu")
    ours = hc_down(**inputs)
    assert_same(ours, hc_down(**with_weights(inputs, decoded)))
    near = hc_down(**with_weights(inputs, twin))
    # the twin's weights are off by 2**-8; over S, then silu's slope of at most 1.1, or twice sigmoid's quarter
    moved = (2.0**-8 * magnitudes(ours[1], inputs["down"]) + sum_bound(ours[1], inputs["down"])) / 4
    assert_within(near[2], ours[2], 1.1 * moved[:, :13] + 2.0**-22)
    assert_within(near[3], ours[3], 0.5 * moved[:, 13:] + 2.0**-22)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("write", [True, False])
def test_rows_do_not_disturb_each_other(dtype: torch.dtype, write: bool) -> None:
    inputs = hc_down_inputs(21, 13, 7, "fp32", dtype, "cpu", write)
    assert_rows_alone(hc_down, inputs, PER_ROW)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"y_weights": None}, r"y \(5, 8\).*weights None"),
        ({"y": torch.zeros(1, 8)}, r"residual \(5, 32\), y \(1, 8\)"),  # would broadcast over all rows
        ({"y_weights": torch.zeros(1, 4)}, r"weights \(1, 4\)"),
        ({"rank": 4}, r"4 or 8 down rows.*\[\(7, 32\)\]"),
        ({"norm_scale": torch.zeros(8)}, r"norm_scale \(8,\)"),
        ({"residual": torch.zeros(5, 28)}, r"residual \(5, 28\)"),
    ],
)
def test_disagreeing_shapes_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hc_down(**{**hc_down_inputs(5, 8, 3, "fp32", torch.float32, "cpu"), **change})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("write", [True, False])
@pytest.mark.parametrize(
    ("t", "d", "rank"), [(5, 13, 7), (3, 100, 300), *(pytest.param(t, 2560, 320, marks=REAL) for t in (1, 81, 8192))]
)
def test_kernels_around_the_product_are_the_reference(
    t: int, d: int, rank: int, write: bool, dtype: torch.dtype
) -> None:
    inputs = hc_down_inputs(t, d, rank, "bf16", dtype, DEVICE, write)
    wanted = hc_down_reference(**inputs)
    given = [fenced(inputs[name]) for name in ("residual", "y", "y_weights", "norm_scale")]
    with empty_is_nan():
        residual, normed = launch_norms(*given, 4, inputs["eps"])
        low, weights = launch_activations(fenced(product(wanted[1], inputs["down"])), rank, 4)
    if dtype == torch.bfloat16:
        # one product and one sum, each rounded
        assert_same(residual, wanted[0])
    # float32 on a GPU: one fused multiply and add where the reference rounds twice
    assert_within(residual, wanted[0], 2.0**-23 * (wanted[0].double().abs() + 2))
    # D squares in another order and a GPU's root, then one rounding each
    step = 2 * UNIT[dtype] + 2.0**-21
    assert_within(normed, wanted[1], (d * 2.0**-24 + step) * wanted[1].double().abs())
    # the same product: a GPU's exponential, then silu or sigmoid rounded once, the write weights doubled
    assert_within(low, wanted[2], step * wanted[2].double().abs())
    assert_within(weights, wanted[3], step * wanted[3].double().abs())
    for ours, reference in zip((residual, normed, low, weights), wanted, strict=True):
        assert_rounded_alike(ours, reference)


@pytest.mark.parametrize("inject", [True, False])
def test_kernels_give_a_row_the_same_bits_in_any_batch(inject: bool) -> None:
    """The portable path: norms, product, activations."""
    inputs = hc_down_inputs(10, 24, 20 if inject else 24, "bf16", torch.bfloat16, DEVICE)
    if not inject:
        inputs["down"] = (PackedWeight("bf16", (24, 96), inputs["down"][0].data[:24].contiguous()),)

    def down(**given: Any) -> tuple[torch.Tensor, ...]:
        residual, normed = launch_norms(*(given[n] for n in (*PER_ROW, "norm_scale", "streams", "eps")))
        projected = normed.new_empty((normed.shape[0], given["down"][0].shape[0]))
        launch_product(normed, given["down"][0], projected)
        return residual, normed, *launch_activations(projected, given["rank"], given["streams"])

    assert_rows_alone(down, inputs, PER_ROW)
    wanted = hc_down_reference(**inputs)
    # n may be a bf16 step aside in one place of a hundred, which moves a sum of 96 terms by less than a step or two
    for ours, reference in zip(down(**inputs)[: 4 if inject else 3], wanted, strict=inject):
        assert_within(ours, reference, 2.0**-6 * (reference.double().abs() + 0.25))
        assert_rounded_alike(ours, reference)
