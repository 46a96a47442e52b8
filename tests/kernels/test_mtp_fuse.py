"""The drafter's first step: one norm over all streams, one matrix for each, the token's vector on top."""

from typing import Any

import pytest
import torch
from torch import Tensor

from stepfloor.formats.codec import quantize
from stepfloor.kernels.linear import linear
from stepfloor.kernels.mtp_fuse import launch_fuse, mtp_fuse, mtp_fuse_inputs, mtp_fuse_reference
from stepfloor.kernels.mtp_norm import mtp_norm
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
from tests.kernels.edges import DEVICE, REAL, empty_is_nan, fenced
from tests.kernels.source import Recording, as_stored

DTYPES = [torch.float32, torch.bfloat16]


def drafter_input(
    residual: Tensor,
    embedding: Tensor,
    norm_hidden: Tensor,
    norm_embedding: Tensor,
    fc_hidden: Any,
    fc_embedding: Any,
    streams: int,
    eps: float,
) -> Tensor:
    """The three operators as the model calls them."""
    hidden, token = mtp_norm(residual, embedding, None, norm_hidden, norm_embedding, streams, eps)
    return mtp_fuse(linear(hidden, fc_hidden), linear(token, fc_embedding))


def drafter_inputs(t: int, d: int, format_name: str, dtype: torch.dtype) -> dict[str, Any]:
    """Operands of the three; four streams."""
    make = torch.Generator().manual_seed(0)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=make)

    return {
        "residual": rand(t, 4 * d).to(dtype),
        "embedding": rand(t, d).to(dtype),
        "norm_hidden": 1 + 0.1 * rand(4 * d),
        "norm_embedding": 1 + 0.1 * rand(d),
        "fc_hidden": (quantize(rand(d, d) / d**0.5, format_name),),
        "fc_embedding": (quantize(rand(d, d) / d**0.5, format_name),),
        "streams": 4,
        "eps": 1e-6,
    }


def exact(inputs: dict[str, Any], statistics: int = 1) -> tuple[Tensor, Tensor]:
    """The equation in float64 from the weights as stored, and the sum of magnitudes of both products."""
    residual, embedding = inputs["residual"].double(), inputs["embedding"].double()
    grouped = residual.unflatten(-1, (statistics, -1))
    n = (grouped / (grouped.square().mean(-1, keepdim=True) + inputs["eps"]).sqrt()).flatten(-2)
    n = (n * inputs["norm_hidden"].double()).unflatten(-1, (inputs["streams"], -1))
    e = embedding / (embedding.square().mean(-1, keepdim=True) + inputs["eps"]).sqrt()
    e = e * inputs["norm_embedding"].double()
    hidden, token = (inputs[name][0].dequantize().double() for name in ("fc_hidden", "fc_embedding"))
    total = n.abs() @ hidden.abs().T + (e.abs() @ token.abs().T)[:, None]
    return (n @ hidden.T + (e @ token.T)[:, None]).flatten(1), total.flatten(1)


def test_fused_residual_is_the_drafters(recording: Recording) -> None:
    drafter, streams = recording.oracle.drafter, recording.config.hc_count
    residual = recording.into("hyper_connection_mixer")
    embedding = recording.out("embed_tokens").roll(-1, 0)
    with torch.no_grad():
        hidden = drafter.fc_hidden(drafter.pre_fc_norm_hidden(residual).unflatten(-1, (streams, -1)))
        e = drafter.fc_embedding(drafter.pre_fc_norm_embedding(embedding))
        wanted = (hidden + e[:, None]).flatten(1)
    inputs = {
        "residual": residual,
        "embedding": embedding,
        "norm_hidden": 1 + drafter.pre_fc_norm_hidden.weight.detach().float(),
        "norm_embedding": 1 + drafter.pre_fc_norm_embedding.weight.detach().float(),
        "fc_hidden": (as_stored(drafter.fc_hidden.weight),),
        "fc_embedding": (as_stored(drafter.fc_embedding.weight),),
        "streams": streams,
        "eps": recording.config.rms_norm_eps,
    }
    ours = drafter_input(**inputs)
    truth, total = exact(inputs)
    # the norms' means of S D squares and the products' D terms, float32; in bf16 the two norms, the two products and
    # the sum may each sit one rounding away from the source's, none larger than the sum of magnitudes
    width = residual.shape[1]
    bound = 2 * (width + embedding.shape[1]) * 2.0**-24 * total
    if recording.dtype == torch.bfloat16:
        bound = bound + 2 * 3 * UNIT[torch.bfloat16] * total
    assert_within(ours, wanted, bound)
    assert_rounded_alike(ours, wanted)
    # and both lie about the exact value
    assert_within(ours.double(), truth, bound + 3 * UNIT[recording.dtype] * total)


def test_one_statistic_serves_all_streams() -> None:
    """One port norms each stream by itself (trap 26); with streams of different size the two are far apart."""
    inputs = drafter_inputs(5, 24, "fp32", torch.float32)
    inputs["residual"] = inputs["residual"] * torch.tensor([1.0, 2.0, 4.0, 8.0]).repeat_interleave(24)
    ours = drafter_input(**inputs)
    truth, total = exact(inputs)
    # D products and S D squares in float32
    assert_within(ours.double(), truth, 5 * 24 * 2 * 2.0**-24 * total)
    outlier, _ = exact(inputs, statistics=4)
    assert (ours - outlier).abs().max() > 0.5


def test_every_stream_gets_the_tokens_vector_once() -> None:
    """With a zero residual only the token is left, the same on every stream."""
    inputs = drafter_inputs(3, 24, "fp32", torch.float32)
    inputs["residual"] = torch.zeros_like(inputs["residual"])
    first, *others = drafter_input(**inputs).split(24, -1)
    assert first.abs().max() > 0.1
    for other in others:
        assert_same(other, first)


@pytest.mark.parametrize("name", MATRIX_FORMATS)
def test_every_format_is_its_decoded_matrix(name: str) -> None:
    inputs = drafter_inputs(5, 160, name, torch.float32)
    ours = drafter_input(**inputs)
    assert_same(ours, drafter_input(**with_weights(inputs, decoded)))
    # the twin's weights are off by 2**-8 of themselves; the rest is two orders of float32 sums
    _, total = exact(inputs)
    assert_within(drafter_input(**with_weights(inputs, twin)), ours, (2.0**-8 + 2 * 160 * 2.0**-24) * 1.01 * total)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("d", [13, 64, 515])
def test_rows_do_not_disturb_each_other(d: int, dtype: torch.dtype) -> None:
    """The hidden product runs over T * S rows, so a row's place in its tile changes with the batch."""
    assert_rows_alone(drafter_input, drafter_inputs(21, d, "fp32", dtype), ("residual", "embedding"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("t", "d"), [(5, 13), (2, 1030), *(pytest.param(t, 2560, marks=REAL) for t in (1, 16, 80, 8192))]
)
def test_kernel_is_the_reference(t: int, d: int, dtype: torch.dtype) -> None:
    inputs = {name: fenced(value) for name, value in mtp_fuse_inputs(t, d, dtype, DEVICE).items()}
    with empty_is_nan():
        assert_same(launch_fuse(**inputs), mtp_fuse_reference(**inputs))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token": torch.zeros(1, 8)}, r"\(5, 4, 8\), \(1, 8\)"),  # would broadcast over all rows
        ({"hidden": torch.zeros(5, 32)}, r"\(5, 32\), \(5, 8\)"),
    ],
)
def test_disagreeing_shapes_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mtp_fuse(**{**mtp_fuse_inputs(5, 8, torch.float32, "cpu"), **change})
