"""The drafter's norms: one mean over all streams, and the vector of the token that followed."""

from typing import Any

import pytest
import torch

from stepfloor.kernels.mtp_norm import FEW_ROWS, launch_norms, mtp_norm, mtp_norm_inputs, mtp_norm_reference
from tests.kernels.compare import UNIT, assert_rounded_alike, assert_rows_alone, assert_same, assert_within
from tests.kernels.edges import DEVICE, REAL, empty_is_nan, fenced
from tests.kernels.source import Recording

DTYPES = [torch.float32, torch.bfloat16]


def test_norms_are_the_drafters(recording: Recording) -> None:
    drafter, streams = recording.oracle.drafter, recording.config.hc_count
    residual, tokens = recording.into("hyper_connection_mixer"), recording.tokens.roll(-1, 0)
    table = recording.module("embed_tokens").weight.detach()
    with torch.no_grad():
        wanted = (drafter.pre_fc_norm_hidden(residual), drafter.pre_fc_norm_embedding(table[tokens]))
    scales = [1 + n.weight.detach().float() for n in (drafter.pre_fc_norm_hidden, drafter.pre_fc_norm_embedding)]
    hidden, vectors = mtp_norm(residual, table, tokens, *scales, streams, recording.config.rms_norm_eps)
    for ours, theirs in ((hidden.flatten(1), wanted[0]), (vectors, wanted[1])):
        # the mean of that many squares in another order, and one rounding each
        bound = (ours.shape[1] * 2.0**-24 + 2 * UNIT[recording.dtype]) * theirs.double().abs()
        assert_within(ours, theirs, bound)
        assert_rounded_alike(ours, theirs)


def test_one_statistic_serves_all_streams() -> None:
    """One port norms each stream by itself (trap 26); a stream 8 times as large as another must stay so."""
    inputs = mtp_norm_inputs(5, 24, 11, torch.float32, "cpu")
    inputs["residual"] = torch.tensor([1.0, 2.0, 4.0, 8.0]).repeat_interleave(24).repeat(5, 1)
    hidden, _ = mtp_norm(**inputs)
    sizes = (hidden / inputs["norm_hidden"].unflatten(0, (4, 24))).mean((0, 2))
    assert_within(sizes / sizes[0], torch.tensor([1.0, 2.0, 4.0, 8.0]), 1e-5)  # roundings of 100 values


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ids_and_their_vectors_give_the_same(dtype: torch.dtype) -> None:
    inputs = mtp_norm_inputs(5, 24, 11, dtype, "cpu")
    vectors = inputs["embedding"][inputs["tokens"]]
    assert_same(mtp_norm(**inputs), mtp_norm(**{**inputs, "embedding": vectors, "tokens": None}))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gather", [True, False])
@pytest.mark.parametrize(
    ("t", "d", "vocabulary"),
    [(5, 13, 11), (2, 300, 7), *(pytest.param(t, 2560, 248320, marks=REAL) for t in (1, 16, 80)),
     pytest.param(8192, 2560, 9000, marks=REAL)],
)  # fmt: skip
def test_kernel_is_the_reference(t: int, d: int, vocabulary: int, gather: bool, dtype: torch.dtype) -> None:
    inputs = mtp_norm_inputs(t, d, vocabulary, dtype, DEVICE)
    if not gather:
        inputs |= {"embedding": inputs["embedding"][inputs["tokens"]], "tokens": None}
    with empty_is_nan():
        outputs = launch_norms(**{name: fenced(value) for name, value in inputs.items()})
    for ours, wanted in zip(outputs, mtp_norm_reference(**inputs), strict=True):
        # as many squares in another order, a GPU's root, one rounding each
        step = 2 * UNIT[dtype] + 2.0**-21 + 4 * d * 2.0**-24
        assert_within(ours, wanted, step * wanted.double().abs())
        assert_rounded_alike(ours, wanted)


def test_kernel_rows_do_not_disturb_each_other() -> None:
    """More rows than have a program for each stream, and groups that have."""
    assert_rows_alone(
        launch_norms, mtp_norm_inputs(FEW_ROWS + 2, 13, 11, torch.bfloat16, DEVICE), ("residual", "tokens")
    )


def test_ids_outside_of_the_vocabulary_stay_in_the_table() -> None:
    """Rows that pad a captured step may hold anything."""
    inputs = mtp_norm_inputs(4, 13, 3, torch.bfloat16, DEVICE)
    inside = torch.tensor([0, 2, 2, 0], device=DEVICE)
    outside = torch.tensor([-1, 3, 2**40, -(2**63)], device=DEVICE)
    assert_same(launch_norms(**{**inputs, "tokens": outside}), launch_norms(**{**inputs, "tokens": inside}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": torch.zeros(1).long()}, r"\(5, 32\), \(11, 8\), \(1,\)"),
        ({"tokens": torch.zeros(5, 1).long()}, r"\(5, 1\)"),
        ({"tokens": None}, r"\(5, 32\), \(11, 8\), None"),
        ({"residual": torch.zeros(5, 24)}, r"\(5, 24\), \(11, 8\)"),
    ],
)
def test_disagreeing_shapes_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mtp_norm(**{**mtp_norm_inputs(5, 8, 11, torch.float32, "cpu"), **change})
