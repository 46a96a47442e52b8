"""The rows of a step are what the slots hold."""

from dataclasses import fields

import pytest
import torch

from stepfloor.kernels.begin_rows import begin_rows_inputs, begin_rows_launch, begin_rows_reference
from tests.kernels.compiled import Case, assert_compiles

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(("b", "k", "width"), [(1, 0, 2), (3, 1, 2), (5, 3, 2), (16, 4, 2), (2, 7, 1), (4, 2, 5)])
def test_the_kernel_gathers_what_the_reference_does(b: int, k: int, width: int) -> None:
    inputs = begin_rows_inputs(b, k, width, DEVICE)
    ours, wanted = begin_rows_launch(**inputs), begin_rows_reference(**inputs)
    for field in fields(ours):
        assert torch.equal(getattr(ours, field.name), getattr(wanted, field.name)), field.name


def test_a_missing_draft_is_no_index() -> None:
    """-1 would read the embedding before its start."""
    inputs = begin_rows_inputs(4, 2, 2, DEVICE)
    assert (inputs["state"].drafts[inputs["slots"]] < 0).any()
    assert (begin_rows_launch(**inputs).tokens >= 0).all()


def test_it_compiles() -> None:
    names = "slots token length drafts pending rejected history tokens row_drafts first positions row_pending "
    names += "row_rejected row_history"
    signature = {f"{name}_ptr": "*i64" for name in names.split()}
    constants = {"KEPT": 4, "W": 2, "BLOCK": 4, "PDL": True}
    assert_compiles(
        [Case("stepfloor.kernels.begin_rows", "_begin_rows_kernel", signature, constants | {"K": k}, 1) for k in (0, 3)]
    )
