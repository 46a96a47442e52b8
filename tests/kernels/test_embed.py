"""Each token's vector on every stream, stream-major."""

import pytest
import torch

from stepfloor.kernels.embed import embed, embed_inputs, embed_reference, launch_embed
from tests.kernels.compare import assert_rows_alone, assert_same
from tests.kernels.edges import DEVICE, REAL, empty_is_nan, fenced
from tests.kernels.source import Recording


def test_residual_starts_like_the_sources(recording: Recording) -> None:
    ours = embed(recording.tokens, recording.module("embed_tokens").weight.detach(), recording.config.hc_count)
    assert_same(ours, recording.into("layers.0"))


def test_each_stream_is_the_whole_vector() -> None:
    """Interleaved streams (repeat_interleave) have the same shape and other values."""
    inputs = embed_inputs(5, 11, 13, torch.bfloat16, "cpu")
    for stream in embed(**inputs).split(13, -1):
        assert_same(stream, inputs["table"][inputs["tokens"]])


def test_rows_do_not_disturb_each_other() -> None:
    assert_rows_alone(embed, embed_inputs(21, 97, 13, torch.bfloat16, "cpu"), ("tokens",))


def test_batched_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match=r"wants tokens \[T\]; got \(2, 3\)"):
        embed(torch.zeros(2, 3).long(), torch.zeros(4, 5), 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("t", "vocabulary", "d"),
    [(5, 11, 13), (3, 7, 1030), *(pytest.param(t, 248320, 2560, marks=REAL) for t in (1, 4, 80, 8192))],
)
def test_kernel_is_the_reference(t: int, vocabulary: int, d: int, dtype: torch.dtype) -> None:
    inputs = {name: fenced(value) for name, value in embed_inputs(t, vocabulary, d, dtype, DEVICE).items()}
    with empty_is_nan():
        assert_same(launch_embed(**inputs), embed_reference(**inputs))


def test_ids_outside_of_the_vocabulary_stay_in_the_table() -> None:
    """Rows that pad a captured step may hold anything."""
    table = torch.arange(6.0, device=DEVICE).reshape(3, 2)
    tokens = torch.tensor([-1, 3, 2**40, -(2**63), 1], device=DEVICE)
    assert launch_embed(tokens, table, 1)[:, 0].tolist() == [0, 4, 4, 0, 2]
