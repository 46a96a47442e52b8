"""The n-gram hash against numbers that were computed elsewhere: conformance test 1 of the architecture.

A kernel and a reference that share a mistake agree with each other; only literals show the order of the multipliers.
"""

import json
from importlib import resources
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from stepfloor.config import ModelConfig
from stepfloor.kernels.ngram_rows import ngram_rows


def rows(tokens: list[int], history: list[int], m: tuple[int, ...], sizes: tuple[int, ...], eos: int) -> Tensor:
    """[T, heads] of one sequence; offsets are the sums of the sizes before."""
    offsets = torch.tensor([sum(sizes[:i]) for i in range(len(sizes))])
    return ngram_rows(
        torch.tensor([tokens]), torch.tensor([history]), torch.tensor(m), torch.tensor(sizes), offsets, eos
    )[0]


def test_constants_of_the_release() -> None:
    text = resources.files("stepfloor").joinpath("shipped", "full_config.json").read_text(encoding="utf-8")
    hashing = ModelConfig.from_dict(json.loads(text)).ngram_hash
    assert hashing.multipliers == (23703573157769, 20109073645365, 8052911324071)
    assert hashing.sizes == tuple(
        20000000 + n for n in (3, 23, 33, 47, 59, 63, 69, 77, 81, 93, 107, 147, 153, 159, 161, 171)
    )
    assert hashing.offsets[-1] == 300001275
    assert hashing.rows == 320001536
    got = rows([1, 2, 3], [248044, 248044], hashing.multipliers, hashing.sizes, 248044)
    assert got.tolist() == [
        [int(n) for n in line.split()]
        for line in (
            "16121432 28938500 59087997 73487090 81148277 104500129 120276032 149373875 "
            "176283436 184305849 216528839 231080079 257961536 266068568 289043455 305959965",
            "15220011 32170723 40646129 76511807 98682440 106072663 127158041 141938523 "
            "170367010 180520041 210849650 234005644 252857364 272068622 291885712 311569748",
            "14605717 24410875 49313567 72177428 86060820 104022010 130963819 146886202 "
            "161523077 195939126 219424565 220811782 248020141 275228530 284297999 309645223",
        )
    ]


def test_the_small_vector_of_the_architecture() -> None:
    got = rows([7, 9, 11], [99, 99], (3, 5, 7), (101, 103), 99)
    assert got.tolist() == [[1, 124], [56, 136], [12, 162]]


FIELD = {"m": (5, 11, 17), "sizes": (97, 89), "eos": 50}
EXPECTED = [[53, 158], [31, 141], [90, 174], [47, 145]]


@pytest.mark.parametrize("cuts", [(), (1,), (2,), (3,), (1, 2, 3)])
def test_multiplier_order_and_splits(cuts: tuple[int, ...]) -> None:
    """C-NG-01 and C-NG-03: reversed multipliers give (29, 180), a lost history at 2 + 2 gives (41, 178) for token 8."""
    tokens, history, got = [12, 31, 8, 40], [50, 50], []
    edges = [0, *cuts, 4]
    for a, b in pairwise(edges):
        got += rows(tokens[a:b], history, **FIELD).tolist()  # type: ignore[arg-type]
        history = (history + tokens[a:b])[-2:]
    assert got == EXPECTED


def test_end_of_text_cuts_what_lies_behind_it_for_later_tokens() -> None:
    """Its own context is whole; two in a row, and one in the history, cut alike."""
    whole = rows([12, 31, 50, 8], [50, 50], **FIELD).tolist()  # type: ignore[arg-type]
    assert whole[3] == rows([8], [50, 50], **FIELD).tolist()[0]  # type: ignore[arg-type]
    assert whole[3] == rows([8], [31, 50], **FIELD).tolist()[0]  # type: ignore[arg-type]
    assert whole[2] != rows([50], [50, 50], **FIELD).tolist()[0]  # type: ignore[arg-type]
    assert rows([50, 50, 8], [12, 31], **FIELD).tolist()[2] == whole[3]  # type: ignore[arg-type]
