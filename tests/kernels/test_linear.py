"""Projections through every stored format."""

import pytest
import torch
from torch.nn.functional import linear as torch_linear

from stepfloor.formats.codec import quantize
from stepfloor.formats.table import FORMATS
from stepfloor.kernels.linear import linear, linear_inputs
from tests.kernels.compare import (
    UNIT,
    assert_rounded_alike,
    assert_rows_alone,
    assert_same,
    assert_within,
    decoded,
    magnitudes,
    sum_bound,
    twin,
)
from tests.kernels.source import Recording, as_stored

DTYPES = [torch.float32, torch.bfloat16]


def test_projections_are_the_sources(recording: Recording) -> None:
    prefix = "layers.0.linear_attn.in_proj_"
    parts = [f"{prefix}{part}" for part in ("qkv", "z", "b", "a")]
    x, weights = recording.into(parts[0]), [recording.weight(name) for name in parts]
    ours, wanted = linear(x, weights), torch.cat([recording.out(name) for name in parts], -1)
    # two orders of one sum; in bf16 each result is then rounded once
    bound = sum_bound(x, weights)
    if x.dtype == torch.bfloat16:
        bound = bound + 2 * UNIT[torch.bfloat16] * wanted.double().abs()
    assert_within(ours, wanted, bound)
    assert_rounded_alike(ours, wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "k"), [(1, 1), (13, 37), (97, 64), (33, 2560)])
def test_odd_sizes_are_torchs_product(n: int, k: int, dtype: torch.dtype) -> None:
    inputs = linear_inputs(11, n, k, "fp32", dtype, "cpu")
    (weight,) = inputs["weights"]
    wanted = torch_linear(inputs["x"].double(), weight.data.double()).to(dtype)
    # against the exact sum: one order's error, and in bf16 one rounding on each side
    bound = sum_bound(inputs["x"], weight, orders=1) + 2 * UNIT[dtype] * wanted.double().abs()
    assert_within(linear(**inputs), wanted, bound)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", list(FORMATS))
def test_every_format_is_its_decoded_matrix(name: str, dtype: torch.dtype) -> None:
    """130 x 160: blocks of 128 end inside the matrix on both axes."""
    inputs = linear_inputs(9, 130, 160, name, dtype, "cpu")
    x, (weight,) = inputs["x"], inputs["weights"]
    ours = linear(x, (weight,))
    assert_same(ours, linear(x, (decoded(weight),)))
    # the twin's weights are off by 2**-8 of themselves; both sums and both results are rounded
    bound = 2.0**-8 * magnitudes(x, weight) + sum_bound(x, weight) + 2 * UNIT[dtype] * ours.double().abs() * 1.01
    assert_within(linear(x, (twin(weight),)), ours, bound)


def test_matrices_of_different_formats_lie_side_by_side() -> None:
    make = torch.Generator().manual_seed(1)
    x = torch.randn(5, 64, generator=make)
    weights = [quantize(torch.randn(3 + i, 64, generator=make), name) for i, name in enumerate(FORMATS)]
    assert_same(linear(x, weights), torch.cat([linear(x, (w,)) for w in weights], -1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "k"), [(1, 5), (13, 37), (97, 64), (17, 515), (33, 2560), (300, 96)])
def test_rows_do_not_disturb_each_other(n: int, k: int, dtype: torch.dtype) -> None:
    """A plain product gives other last bits for 1, 2 and 20 rows, and speculation then changes the text."""
    assert_rows_alone(linear, linear_inputs(21, n, k, "fp32", dtype, "cpu"), ("x",))


def test_activations_are_not_quantized() -> None:
    """W4A4 kernels round the input too; 1 + 2**-7 needs bf16's last bit and no fp4 or fp8 code holds it."""
    x = torch.zeros(1, 32, dtype=torch.bfloat16)
    x[0, 0] = 1 + 2**-7
    weight = quantize(torch.eye(32), "nvfp4")
    assert linear(x, (weight,))[0, 0].item() == 1 + 2**-7


def test_product_is_rounded_once() -> None:
    """A sum kept in bf16 loses 256 ones added to 256; rounded once it is exact."""
    assert linear(torch.ones(1, 512, dtype=torch.bfloat16), (as_stored(torch.ones(1, 512)),)).item() == 512


def test_disagreeing_widths_are_refused() -> None:
    weights = (quantize(torch.zeros(3, 7), "fp32"),)
    with pytest.raises(ValueError, match=r"got \(2, 5\), \[\(3, 7\)\]"):
        linear(torch.zeros(2, 5), weights)
