"""What the references share: bits that depend on a value alone, tiles, and each function's source."""

import pytest
import torch
import torch.nn.functional as F
import transformers.models.qwen4_exp.modeling_qwen4_exp as hf
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stepfloor.kernels._torch import (
    TILE_ROWS,
    expert_tiles,
    gated_norm,
    rms_norm,
    rotate,
    sigmoid,
    silu,
    softplus,
    tiled_product,
)
from tests.kernels.compare import UNIT, assert_same, assert_within, groups

DTYPES = [torch.float32, torch.bfloat16]
FUNCTIONS = {"sigmoid": (sigmoid, torch.sigmoid), "silu": (silu, F.silu), "softplus": (softplus, F.softplus)}


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", list(FUNCTIONS))
@pytest.mark.parametrize("length", [1, 3, 7, 8, 9, 15, 16, 17, 31, 33, 63, 65])
def test_a_values_bits_do_not_depend_on_where_it_lies(name: str, length: int) -> None:
    """torch's own take another code path for the last elements of a buffer."""
    ours, _ = FUNCTIONS[name]
    x = 8 * randn(100 * length, seed=length)
    whole = ours(x)
    for rows in groups(len(x), (length,)):
        assert_same(ours(x[rows].clone()), whole[rows])
        # and not aligned as a buffer of its own would be
        assert_same(ours(x[rows]), whole[rows])
    columns = x.reshape(-1, length)
    assert_same(ours(columns.T), whole.reshape(-1, length).T)


@pytest.mark.parametrize(
    ("name", "dtype"),
    # softplus takes float32 alone: the decay is never rounded
    [(name, dtype) for name in FUNCTIONS for dtype in DTYPES if (name, dtype) != ("softplus", torch.bfloat16)],
)
def test_values_are_torchs(name: str, dtype: torch.dtype) -> None:
    ours, theirs = FUNCTIONS[name]
    extremes = torch.tensor([0.0, -0.0, 20.0, 20.1, -20.0, 80.0, -80.0, 1e-30, 300.0])
    x = torch.cat((6 * randn(5000), extremes)).to(dtype)
    wanted = theirs(x.double())
    # exp of a float32 is within two units, the sum, quotient or logarithm one each; then one rounding; a value
    # below 2**-126 may lose its last bits to the exponent
    bound = (6 * 2.0**-24 + 1.01 * UNIT[dtype]) * wanted.abs() + 2.0**-126
    assert_within(ours(x).double(), wanted, bound)
    assert ours(x).dtype == dtype


def test_infinities_and_nan_pass_through() -> None:
    """A row that is not finite must stay visible to the sampler."""
    x = torch.tensor([torch.inf, -torch.inf, torch.nan])
    assert sigmoid(x)[:2].tolist() == [1.0, 0.0]
    assert softplus(x)[:2].tolist() == [torch.inf, 0.0]
    assert silu(x)[0].item() == torch.inf
    for function in (sigmoid, silu, softplus):
        assert function(x)[2].isnan()


@pytest.mark.parametrize(("n", "k"), [(1, 1), (3, 5), (17, 33), (64, 64), (65, 515), (16, 2560)])
def test_tiled_products_rows_are_alone(n: int, k: int) -> None:
    """A row's bits depend on no other row, and not on its own place in the tile of eight."""
    x, w = randn(29, k), randn(n, k, seed=1)
    together = tiled_product(x, w)
    for row in range(29):
        assert_same(tiled_product(x[row : row + 1], w)[0], together[row])
    order = torch.randperm(29, generator=torch.Generator().manual_seed(2))
    assert_same(tiled_product(x[order], w), together[order])
    assert_same(tiled_product(x.reshape(1, 29, k), w)[0], together)
    # K products in some order, against float64
    exact = x.double() @ w.double().T
    assert_within(together.double(), exact, k * 2.0**-24 * (x.double().abs() @ w.double().abs().T))


@pytest.mark.parametrize("columns", [1, 2, 3, 4, 5, 7, 8, 9, 16, 33, 100])
@pytest.mark.parametrize("inner", [8, 20, 32, 48, 100, 160, 320])
def test_a_row_has_the_same_bits_at_every_place_of_a_tile(columns: int, inner: int) -> None:
    """MKL's products of 2 or 3 columns had not, and with three experts chunking showed in the text."""
    w, base, row = randn(columns, inner, seed=1), randn(TILE_ROWS, inner), randn(inner, seed=2)
    alone = tiled_product(row[None], w)[0]
    for place in range(TILE_ROWS):
        rows = base.clone()
        rows[place] = row
        assert_same(tiled_product(rows, w)[place], alone)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("width", "count"), [(5, 1), (13, 3), (128, 1), (515, 4)])
def test_norm_is_the_sources(width: int, count: int, dtype: torch.dtype) -> None:
    x = (3 * randn(21, count * width)).to(dtype)
    module = hf.Qwen4ExpTextRMSNorm(count * width, group_size=width, eps=1e-6)
    with torch.no_grad():
        module.weight.copy_(0.3 * randn(count * width, seed=1))
        wanted = module(x)
    ours = rms_norm(x, 1.0 + module.weight.detach().float(), 1e-6, count)
    # a mean of as many squares in another order, halved by the root; one rounding each
    assert_within(ours, wanted, (width * 2.0**-24 + 2 * UNIT[dtype]) * wanted.double().abs())
    for row in range(21):
        assert_same(rms_norm(x[row : row + 1], 1.0 + module.weight.detach().float(), 1e-6, count)[0], ours[row])


@pytest.mark.parametrize("activation", ["sigmoid", "silu"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gated_norm_is_the_sources(dtype: torch.dtype, activation: str) -> None:
    x, gate = (2 * randn(9, 3, 14)).to(dtype), randn(9, 3, 14, seed=1).to(dtype)
    module = hf.Qwen4ExpTextRMSNormGated(14, eps=1e-6, activation=activation)
    with torch.no_grad():
        module.weight.copy_(1 + 0.3 * randn(14, seed=2))
    module.to(dtype)
    with torch.no_grad():
        wanted = module(x, gate)
    ours = gated_norm(x, gate, module.weight.detach(), 1e-6, activation)
    # norm, weight and gate: three places, each a step at most; float32 adds the mean of 14 squares
    assert_within(ours, wanted, (20 * 2.0**-24 + 3 * 2 * UNIT[dtype]) * wanted.double().abs() + 2.0**-40)
    if dtype == torch.bfloat16:
        assert (ours != wanted).float().mean() < 0.02


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotation_is_the_sources(dtype: torch.dtype) -> None:
    """Half-split pairs (i with i + size / 2), the rest of a head untouched."""
    x = randn(7, 3, 10).to(dtype)
    angle = randn(7, 3, seed=1).repeat(1, 2)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    ours = rotate(x, cos[:, None], sin[:, None])
    assert_same(ours, hf.apply_rotary_pos_emb(x[None], cos=cos[None], sin=sin[None], unsqueeze_dim=2)[0])
    assert_same(ours[..., 6:], x[..., 6:])


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 30), st.integers(1, 4), st.integers(1, 6), st.booleans(), st.integers(0, 1000))
def test_every_pair_has_one_place_in_its_experts_tiles(
    rows: int, topk: int, experts: int, per_pair: bool, seed: int
) -> None:
    topk = min(topk, experts)
    make = torch.Generator().manual_seed(seed)
    # cubed, so that some experts get most of the rows
    ids = (torch.rand(rows, experts, generator=make) * torch.arange(1, experts + 1) ** 3).argsort(-1)[:, :topk]
    zero_row = rows * topk if per_pair else rows
    tiles = expert_tiles(ids, zero_row, per_pair)
    assert len(tiles.experts) == len(tiles.source) == -(-tiles.source.numel() // TILE_ROWS)
    assert tiles.experts == sorted(tiles.experts)
    taken: set[int] = set()
    for t in range(rows):
        for j in range(topk):
            place = int(tiles.place[t, j])
            assert tiles.experts[place // TILE_ROWS] == ids[t, j]
            assert tiles.source.flatten()[place] == (t * topk + j if per_pair else t)
            taken.add(place)
    assert len(taken) == rows * topk
    # padding reads the row of zeros, and no tile is all padding
    free = [place for place in range(tiles.source.numel()) if place not in taken]
    assert all(tiles.source.flatten()[place] == zero_row for place in free)
    assert all((tile != zero_row).any() for tile in tiles.source)
