"""The portable product: every format against float32 products of the decoded matrix, and a row's bits in any batch."""

import pytest
import torch
from torch import Tensor

from stepfloor.formats.codec import PackedWeight, quantize
from stepfloor.formats.table import FORMATS
from stepfloor.kernels._product import (
    LEAST_K,
    MAX_ROWS,
    launch_product,
    library_product,
    packed_product,
    slices_of,
)
from stepfloor.kernels.linear import linear
from tests.kernels.compare import (
    UNIT,
    assert_rounded_alike,
    assert_rows_alone,
    assert_same,
    assert_within,
    magnitudes,
    sum_bound,
)
from tests.kernels.edges import DEVICE, REAL, empty_is_nan, fenced

DTYPES = [torch.float32, torch.bfloat16]
# of the released model: hyper-connection down, up, out projection, and the in-projection of a delta net
REAL_SHAPES = [(324, 10240), (10240, 320), (2560, 6144), (16480, 2560)]


def operands(t: int, n: int, k: int, name: str, dtype: torch.dtype) -> tuple[Tensor, PackedWeight]:
    make = torch.Generator(DEVICE).manual_seed(0)
    x = torch.randn(t, k, generator=make, device=DEVICE).to(dtype)
    return x, quantize(torch.randn(n, k, generator=make, device=DEVICE) / k**0.5, name)


def times(x: Tensor, weight: PackedWeight) -> Tensor:
    """The kernel into the middle columns of a wider result; what lies beside them must not change."""
    n = weight.shape[0]
    out = torch.full((x.shape[0], n + 10), 7.0, dtype=x.dtype, device=x.device)
    with empty_is_nan():
        launch_product(x, weight, out[:, 5 : 5 + n])
    assert bool((out[:, :5] == 7).all())
    assert bool((out[:, 5 + n :] == 7).all())
    return out[:, 5 : 5 + n].contiguous()


def assert_product(ours: Tensor, x: Tensor, weight: PackedWeight) -> None:
    """Two orders of float32 products, a scale that multiplies each or their sum, one rounding each."""
    exact = x.double() @ weight.dequantize().double().T
    bound = sum_bound(x, weight, orders=1) + 2 * 2.0**-24 * magnitudes(x, weight)
    assert_within(ours.double(), exact, bound + UNIT[x.dtype] * 1.01 * exact.abs())
    assert_rounded_alike(ours, exact.to(x.dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("t", "n", "k"),
    [(9, 130, 160), (3, 20, 1312), *(pytest.param(t, n, k, marks=REAL) for n, k in REAL_SHAPES for t in (1, 17, 80))],
)
def test_every_format(t: int, n: int, k: int, name: str, dtype: torch.dtype) -> None:
    """130 x 160: blocks of 128 end inside the matrix on both axes; 20 x 1312: two slices of K, the last one longer."""
    x, weight = operands(t, n, k, name, dtype)
    stored = PackedWeight(
        name, weight.shape, fenced(weight.data), None if weight.scale is None else fenced(weight.scale), weight.scale_2
    )
    assert_product(times(fenced(x), stored), x, weight)


@pytest.mark.parametrize(("n", "k"), [(1, 1), (13, 37), (1, 5), (97, 64)])
def test_odd_sizes(n: int, k: int) -> None:
    for dtype in DTYPES:
        x, weight = operands(5, n, k, "fp32" if dtype == torch.float32 else "bf16", dtype)
        assert_product(times(fenced(x), weight), x, weight)


def test_scales_stored_in_float32() -> None:
    """Block scales may be bf16 or float32 in a checkpoint."""
    x, weight = operands(3, 20, 256, "fp8_block", torch.bfloat16)
    assert weight.scale is not None
    wide = PackedWeight("fp8_block", weight.shape, weight.data, weight.scale.float() * 1.001)
    assert_product(times(x, wide), x, wide)


def test_smallest_and_largest_block_exponents() -> None:
    """A byte of 0 is 2**-127, which float32 holds as a subnormal; 254 is 2**127."""
    x = torch.ones(1, 32, device=DEVICE)
    data = torch.full((3, 32), 0.5, device=DEVICE).to(torch.float8_e4m3fn)
    scale = torch.tensor([[0], [127], [250]], dtype=torch.uint8, device=DEVICE)
    weight = PackedWeight("mxfp8", (3, 32), data, scale)
    assert times(x, weight).tolist() == [[16 * 2.0**-127, 16.0, 16 * 2.0**123]]


@pytest.mark.parametrize(
    ("name", "dtype", "n", "k"),
    [
        ("bf16", torch.bfloat16, 13, 1100),
        ("fp32", torch.float32, 5, 40),
        ("nvfp4", torch.bfloat16, 40, 32),
        *(pytest.param(f, torch.bfloat16, *s, marks=REAL) for f in ("bf16", "fp8_channel") for s in REAL_SHAPES),
        pytest.param("fp32", torch.float32, 324, 10240, marks=REAL),
    ],
)
def test_rows_do_not_disturb_each_other(name: str, dtype: torch.dtype, n: int, k: int) -> None:
    """In tiles of 16, alone or beside others: the library's product has other bits for 1, 2 and 20 rows."""
    x, weight = operands(20 if DEVICE == "cpu" else MAX_ROWS, n, k, name, dtype)
    assert_rows_alone(lambda x: times(x, weight), {"x": x}, ("x",))


def test_rows_may_be_parts_of_longer_ones() -> None:
    x, weight = operands(4, 9, 48, "bf16", torch.bfloat16)
    wide = torch.cat((torch.full_like(x, torch.nan), x, torch.full_like(x, torch.nan)), 1)[:, 48:96]
    assert_same(times(wide, weight), times(x, weight))
    assert_same(times(x.T.contiguous().T, weight), times(x, weight))


def test_slices_depend_on_the_matrix_alone() -> None:
    """As many as keep the multiprocessors busy, none shorter than it is worth."""
    assert [slices_of(n, k) for n, k in REAL_SHAPES] == [12, 1, 2, 1]
    assert slices_of(1, 10 * LEAST_K) == 10
    assert slices_of(1, 1) == 1


def test_matrices_of_different_formats_lie_side_by_side() -> None:
    x, _ = operands(5, 1, 64, "bf16", torch.bfloat16)
    weights = [
        operands(1, 3 + i, 64, name, torch.bfloat16)[1] for i, name in enumerate(("bf16", "nvfp4", "fp8_channel"))
    ]
    ours = packed_product(x.unflatten(0, (5, 1)), weights)
    assert_same(ours, torch.cat([times(x, w) for w in weights], -1).unflatten(0, (5, 1)))


@pytest.mark.parametrize("name", FORMATS)
def test_many_rows_go_through_the_library(name: str) -> None:
    x, weight = operands(MAX_ROWS + 1, 20, 96, name, torch.bfloat16)
    ours = packed_product(x, (weight,))
    assert_same(ours, library_product(x, weight))
    # a weight's rounding to bf16, and that of the result
    exact = x.double() @ weight.dequantize().double().T
    bound = (2.0**-9 + 96 * 2.0**-24) * magnitudes(x, weight)
    assert_within(ours.double(), exact, bound + 1.01 * 2.0**-9 * exact.abs() + 2.0**-8 * exact.abs())


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="no CUDA device")
@pytest.mark.parametrize("name", FORMATS)
def test_linear_takes_it_on_a_gpu(name: str) -> None:
    x, weight = operands(7, 60, 256, name, torch.bfloat16)
    assert_same(linear(x, (weight,)), times(x, weight))
