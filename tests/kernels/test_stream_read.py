"""Every value is read: a maximum anywhere is found."""

import pytest
import torch

from stepfloor.kernels.stream_read import PIECE, stream_read_inputs, stream_read_launch, stream_read_reference
from tests.kernels.compiled import Case, assert_compiles

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("n", [1, 100, PIECE, PIECE + 1, 3 * PIECE - 7])
def test_the_largest_of_each_piece(n: int) -> None:
    x = stream_read_inputs(n, DEVICE)["x"]
    assert torch.equal(stream_read_launch(x), stream_read_reference(x))
    x[n - 1] = 5000
    assert int(stream_read_launch(x)[-1]) == 5000


def test_it_compiles() -> None:
    signature = {"x_ptr": "*i32", "out_ptr": "*i32", "n": "i32"}
    constants = {"BLOCK": 8192, "LOOPS": 8, "PDL": True}
    assert_compiles([Case("stepfloor.kernels.stream_read", "_stream_read_kernel", signature, constants, 8)])
