"""What a step leaves behind, for every count of accepted rows."""

from typing import Any

import pytest
import torch
from torch import Tensor

from stepfloor.kernels.commit_rows import commit_rows_inputs, commit_rows_launch, commit_rows_reference
from tests.kernels.compiled import Case, assert_compiles

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STATE = ("token", "length", "pending", "rejected", "history", "drafts")


def copied(inputs: dict[str, Any]) -> dict[str, Any]:
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in inputs.items()}


@pytest.mark.parametrize(("b", "k", "width"), [(1, 0, 2), (3, 1, 2), (5, 3, 2), (16, 4, 2), (2, 7, 1), (4, 2, 5)])
def test_the_kernel_leaves_what_the_reference_does(b: int, k: int, width: int) -> None:
    inputs = commit_rows_inputs(b, k, width, DEVICE)
    for count in range(k + 1):
        inputs["accepted"][-1] = count
        ours, wanted = copied(inputs), copied(inputs)
        for a, c in zip(commit_rows_launch(**ours), commit_rows_reference(**wanted), strict=True):
            assert torch.equal(a, c)
        for name in STATE:
            assert torch.equal(ours[name], wanted[name]), name


def test_by_hand() -> None:
    """Two drafts, one accepted, in slot 1 of 3."""
    tensor = torch.tensor
    state = {name: torch.zeros(3, dtype=torch.int64) for name in STATE[:4]}
    history = torch.zeros((3, 2), dtype=torch.int64)
    drafts = torch.full((3, 3), 6)
    following, last, ahead, report = commit_rows_reference(
        tensor([[8, 9, -1]]),
        tensor([1]),
        tensor([[7, 8, 5]]),
        tensor([1]),
        tensor([40]),
        tensor([[1, 2]]),
        **state,
        history=history,
        drafts=drafts,
        padding_slot=2,
    )
    assert following.tolist() == [[8, 9, 7]]
    assert last.tolist() == [1]
    assert ahead.tolist() == [[42], [43], [44]]
    assert drafts.tolist() == [[6] * 3, [-1] * 3, [6] * 3]
    assert report.tolist() == [[8, 9, -1, 1]]
    assert {name: int(t[1]) for name, t in state.items()} == {"token": 9, "length": 42, "pending": 2, "rejected": 1}
    assert history.tolist() == [[0, 0], [7, 8], [0, 0]]


def test_a_padding_slot_never_moves_on() -> None:
    """Its length would pass the rotary tables after a few hundred thousand steps."""
    inputs = commit_rows_inputs(3, 2, 2, DEVICE)
    commit_rows_launch(**inputs)
    for name in STATE[:4]:
        assert int(inputs[name][inputs["padding_slot"]]) == 0


def test_it_compiles() -> None:
    names = "emitted accepted tokens slots first before token length pending rejected history drafts following "
    names += "last ahead report"
    signature = {f"{name}_ptr": "*i64" for name in names.split()} | {"padding_slot": "i32", "pitch": "i32"}
    constants = {"W": 2, "KEPT": 3, "BLOCK": 8, "PDL": True}
    cases = [
        Case("stepfloor.kernels.commit_rows", "_commit_rows_kernel", signature, constants | {"R": r}, 1) for r in (1, 4)
    ]
    assert_compiles(cases)
