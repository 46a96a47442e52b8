"""Each token's vector on every stream, stream-major."""

import pytest
import torch

from stepfloor.kernels.embed import embed, embed_inputs
from tests.kernels.compare import assert_rows_alone, assert_same
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
