"""Rows taken out of two tensors are the rows that were asked for."""

import pytest
import torch

from stepfloor.kernels.take_rows import launch_take, take_rows, take_rows_inputs, take_rows_reference
from tests.kernels.compare import assert_same
from tests.kernels.compiled import Case, assert_compiles
from tests.kernels.edges import DEVICE, REAL, empty_is_nan, fenced


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("b", "r", "d"), [(1, 1, 13), (3, 4, 700), (2, 3, 2048), *(pytest.param(b, 4, 2560, marks=REAL) for b in (1, 16))]
)
def test_kernel_takes_what_the_reference_does(b: int, r: int, d: int, dtype: torch.dtype) -> None:
    """Blocks that end inside a row or with it; the last row of a tensor, with NaN behind it."""
    inputs = take_rows_inputs(b, r, d, dtype, DEVICE)
    inputs["rows"][-1] = b * r - 1
    with empty_is_nan():
        taken = launch_take(**{name: fenced(value) for name, value in inputs.items()})
    assert_same(taken, take_rows_reference(**inputs))


def test_disagreeing_shapes_are_refused() -> None:
    inputs = take_rows_inputs(2, 3, 8, torch.float32, "cpu")
    with pytest.raises(ValueError, match=r"\(6, 32\), \(5, 8\), \(2,\)"):
        take_rows(**{**inputs, "hidden": torch.zeros(5, 8)})


def test_it_compiles() -> None:
    signature = dict.fromkeys(("residual_ptr", "hidden_ptr", "taken_ptr", "taken_hidden_ptr"), "*bf16")
    signature |= {"rows_ptr": "*i64"} | dict.fromkeys(("width", "d", "blocks"), "i32")
    constants = {"BLOCK": 2048, "PDL": True}
    assert_compiles([Case("stepfloor.kernels.take_rows", "_take_rows_kernel", signature, constants)])
