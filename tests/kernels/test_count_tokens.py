"""Emitted tokens are counted once each, in their own slot."""

import pytest
import torch

from stepfloor.kernels.count_tokens import count_tokens, count_tokens_inputs


def test_counts_worked_out_by_hand() -> None:
    counts = torch.zeros(3, 4, dtype=torch.int32)
    count_tokens(counts, torch.tensor([2, 0]), torch.tensor([[1, 1, 3], [0, -1, -1]]))
    assert counts.tolist() == [[1, 0, 0, 0], [0, 0, 0, 0], [0, 2, 0, 1]]


def test_padding_counts_nothing() -> None:
    inputs = count_tokens_inputs(3, 2, 5, "cpu")
    before = inputs["counts"].clone()
    count_tokens(inputs["counts"], inputs["slots"], torch.full((3, 2), -1))
    assert torch.equal(inputs["counts"], before)


def test_shapes_that_disagree_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(3, 4\), \(1,\), \(2, 1\)"):
        count_tokens(torch.zeros(3, 4).int(), torch.zeros(1).long(), torch.zeros(2, 1).long())
