"""The tiled product: a row's bits depend on nothing but that row, whatever the shape of the matrix."""

import pytest
import torch

from stepfloor.kernels._torch import TILE_ROWS, tiled_product


@pytest.mark.parametrize("columns", [1, 2, 3, 4, 5, 7, 8, 9, 16, 33, 100])
@pytest.mark.parametrize("inner", [8, 20, 32, 48, 100, 160, 320])
def test_a_row_has_the_same_bits_at_every_place_of_a_tile(columns: int, inner: int) -> None:
    # MKL's products of 2 or 3 columns had not, and with three experts chunking showed in the text
    make = torch.Generator().manual_seed(0)
    w, base, row = (torch.randn(*shape, generator=make) for shape in ((columns, inner), (TILE_ROWS, inner), (inner,)))
    alone = tiled_product(row[None], w)[0]
    for place in range(TILE_ROWS):
        rows = base.clone()
        rows[place] = row
        assert torch.equal(tiled_product(rows, w)[place], alone), place
