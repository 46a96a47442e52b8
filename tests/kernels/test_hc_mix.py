"""The mix of the normalised streams into one vector."""

from typing import Any

import pytest
import torch
from torch import Tensor

from stepfloor.kernels._product import launch_product
from stepfloor.kernels._torch import product
from stepfloor.kernels.hc_mix import hc_mix, hc_mix_inputs, hc_mix_reference, launch_gates
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


def mean_over_streams(moved_gate: Tensor, normed: Tensor, streams: int) -> Tensor:
    """How far x moves when the gates do."""
    return (moved_gate * normed.double().abs()).unflatten(-1, (streams, -1)).mean(-2)


@pytest.mark.parametrize("prefix", ["layers.0.attn_hyper_connection", "layers.3.mlp_hyper_connection"])
def test_mixed_vector_is_the_sources(recording: Recording, prefix: str) -> None:
    low, normed = recording.into(f"{prefix}.input_mix_weight_up"), recording.out(f"{prefix}.hc_norm")
    up, streams = (recording.weight(f"{prefix}.input_mix_weight_up"),), recording.config.hc_count
    ours, wanted = hc_mix(low, normed, up, streams), recording.out(prefix, 0)
    unit = UNIT[recording.dtype]
    # the product (one step in bf16) through sigmoid's slope of a quarter; the gate's own rounding, its product's with
    # n, and the sum of S and the mean: at most S + 2 roundings a side of values no larger than n
    step = 2 * unit * magnitudes(low, up) * (recording.dtype == torch.bfloat16)
    gate = 0.25 * (sum_bound(low, up) + step) + 2 * (streams + 2) * 2.0**-24 + 2 * 2 * unit
    bound = mean_over_streams(gate, normed, streams) + 2 * unit * wanted.double().abs()
    assert_within(ours, wanted, bound)
    assert_rounded_alike(ours, wanted)


def test_mean_runs_over_streams_of_gated_norms() -> None:
    """By hand: gates of a half (zero low), stream s holds s + 1, so each value is the mean of 1..4, halved."""
    inputs = hc_mix_inputs(2, 3, 5, "fp32", torch.float32, "cpu")
    inputs["low"] = torch.zeros(2, 5)
    inputs["normed"] = torch.arange(1.0, 5.0).repeat_interleave(3).repeat(2, 1)
    assert_same(hc_mix(**inputs), torch.full((2, 3), 1.25))


@pytest.mark.parametrize("name", MATRIX_FORMATS)
def test_every_format_is_its_decoded_matrix(name: str) -> None:
    inputs = hc_mix_inputs(5, 35, 160, name, torch.float32, "cpu")
    ours = hc_mix(**inputs)
    assert_same(ours, hc_mix(**with_weights(inputs, decoded)))
    # the twin's weights are off by 2**-8, through sigmoid's slope of a quarter
    moved = 2.0**-8 * magnitudes(inputs["low"], inputs["up"]) + sum_bound(inputs["low"], inputs["up"])
    bound = mean_over_streams(0.25 * moved + 2.0**-21, inputs["normed"], 4)
    assert_within(hc_mix(**with_weights(inputs, twin)), ours, bound)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("d", "rank"), [(13, 7), (64, 20), (515, 33)])
def test_rows_do_not_disturb_each_other(d: int, rank: int, dtype: torch.dtype) -> None:
    assert_rows_alone(hc_mix, hc_mix_inputs(21, d, rank, "fp32", dtype, "cpu"), ("low", "normed"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"normed": torch.zeros(5, 28)}, r"normed \(5, 28\).*\[\(32, 3\)\]"),
        ({"low": torch.zeros(1, 3)}, r"low \(1, 3\), normed \(5, 32\)"),  # would broadcast over all rows
        ({"low": torch.zeros(5, 4)}, r"low \(5, 4\).*\[\(32, 3\)\]"),
        ({"streams": 3}, "3 streams"),
    ],
)
def test_disagreeing_shapes_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hc_mix(**{**hc_mix_inputs(5, 8, 3, "fp32", torch.float32, "cpu"), **change})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("t", "d", "rank"),
    [(5, 13, 7), (2, 1030, 5), *(pytest.param(t, 2560, 320, marks=REAL) for t in (1, 81, 8192))],
)
def test_kernel_gates_are_the_reference(t: int, d: int, rank: int, dtype: torch.dtype) -> None:
    inputs = hc_mix_inputs(t, d, rank, "bf16", dtype, DEVICE)
    logits, normed = product(inputs["low"], inputs["up"]), inputs["normed"]
    with empty_is_nan():
        ours = launch_gates(fenced(logits), fenced(normed), 4)
    wanted = hc_mix_reference(**inputs)
    # a step of the gate, one of its product with n, one of the mean; a GPU's exponential is off by less than 2**-21
    step = 2 * UNIT[dtype] + 2.0**-21
    assert_within(ours, wanted, mean_over_streams(torch.full_like(normed, 3 * step).double(), normed, 4))
    assert_rounded_alike(ours, wanted)


def test_kernels_give_a_row_the_same_bits_in_any_batch() -> None:
    """The portable path: product, then gates."""
    inputs = hc_mix_inputs(10, 20, 24, "bf16", torch.bfloat16, DEVICE)

    def mix(low: Tensor, normed: Tensor, up: Any, streams: int) -> Tensor:
        logits = low.new_empty((low.shape[0], normed.shape[1]))
        launch_product(low, up[0], logits)
        return launch_gates(logits, normed, streams)

    assert_rows_alone(mix, inputs, ("low", "normed"))
    bound = mean_over_streams(torch.full_like(inputs["normed"], 4 * 2.0**-7).double(), inputs["normed"], 4)
    assert_within(mix(**inputs), hc_mix_reference(**inputs), bound)
