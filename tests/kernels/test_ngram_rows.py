"""Hash rows against numbers worked out by hand and by others, at every place where the context is cut."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import stepfloor
from stepfloor.config import ModelConfig
from stepfloor.kernels.ngram_rows import launch_rows, ngram_rows, ngram_rows_inputs, ngram_rows_reference
from tests.kernels.compare import assert_rows_alone, assert_same
from tests.kernels.edges import DEVICE, REAL, empty_is_nan, fenced
from tests.kernels.source import EOS, Recording

# tokens 12, 31, 8, 40 at the start of a sequence; the reversed multipliers would give REVERSED
FIELD = {"multipliers": [5, 11, 17], "sizes": [97, 89], "offsets": [0, 97], "eos": 50}
FIELD_TOKENS = [12, 31, 8, 40]
FIELD_ROWS = [[53, 158], [31, 141], [90, 174], [47, 145]]
REVERSED = [[29, 180], [70, 99], [1, 133], [12, 182]]


def constants(multipliers: list[int], sizes: list[int], offsets: list[int], eos: int) -> dict[str, Any]:
    return {
        "multipliers": torch.tensor(multipliers),
        "sizes": torch.tensor(sizes),
        "offsets": torch.tensor(offsets),
        "eos": eos,
    }


def rows_of(tokens: list[int], history: list[int], field: dict[str, Any]) -> list[list[int]]:
    return ngram_rows(torch.tensor([tokens]), torch.tensor([history]), **constants(**field))[0].tolist()


def plain_rows(sequence: list[int], field: dict[str, Any]) -> list[list[int]]:
    """The definition in Python integers, one token at a time: walk back until end-of-text, then hash."""
    multipliers, sizes, offsets, eos = field.values()
    per_order = len(sizes) // (len(multipliers) - 1)
    result = []
    for t in range(len(sequence)):
        context = [sequence[t]]
        for lag in range(1, len(multipliers)):
            behind_cut = lag > 1 and context[-1] == eos
            context.append(eos if t < lag or behind_cut else sequence[t - lag])
        row = []
        for order in range(2, len(multipliers) + 1):
            mixed = 0
            for token, multiplier in zip(context[:order], multipliers[:order], strict=True):
                mixed ^= token * multiplier % 2**64
            signed = mixed - 2**64 if mixed >= 2**63 else mixed
            heads = range((order - 2) * per_order, (order - 1) * per_order)
            row += [signed % sizes[h] + offsets[h] for h in heads]
        result.append(row)
    return result


def test_rows_reported_from_the_field() -> None:
    """Multiplier order (a kernel and its reference once agreed on the wrong one)."""
    ours = rows_of(FIELD_TOKENS, [50, 50], FIELD)
    assert ours == FIELD_ROWS
    assert ours != REVERSED
    # reversed within each order: the bigram's first head and the trigram's second
    bigram, trigram = FIELD | {"multipliers": [11, 5, 0]}, FIELD | {"multipliers": [17, 11, 5]}
    wrong = zip(*(rows_of(FIELD_TOKENS, [50, 50], field) for field in (bigram, trigram)), strict=True)
    assert [[two[0], three[1]] for two, three in wrong] == REVERSED
    small = {"multipliers": [3, 5, 7], "sizes": [101, 103], "offsets": [0, 101], "eos": 99}
    assert rows_of([7, 9, 11], [99, 99], small) == [[1, 124], [56, 136], [12, 162]]


@pytest.mark.parametrize("cuts", [[1], [2], [3], [1, 2, 3]])
def test_chunks_carry_their_history(cuts: list[int]) -> None:
    """A chunk hashed as if it began the text gives (41, 178) for the third token."""
    tokens = [50, 50, *FIELD_TOKENS]
    rows = []
    for start, stop in pairwise([0, *cuts, 4]):
        rows += rows_of(FIELD_TOKENS[start:stop], tokens[start : start + 2], FIELD)
    assert rows == FIELD_ROWS
    assert rows_of(FIELD_TOKENS[2:], [50, 50], FIELD)[0] == [41, 178]


def test_sequences_never_see_each_others_tail() -> None:
    """Two sequences at different places of their texts in one batch."""
    tokens = torch.tensor([[8, 40], [12, 31]])
    history = torch.tensor([[12, 31], [50, 50]])
    assert ngram_rows(tokens, history, **constants(**FIELD)).tolist() == [FIELD_ROWS[2:], FIELD_ROWS[:2]]


def test_released_models_rows() -> None:
    """Public transcriptions of the release: constants from the shipped configuration, tokens 1, 2, 3 at a start."""
    shipped = Path(stepfloor.__file__).parent / "shipped" / "full_config.json"
    config = ModelConfig.from_dict(json.loads(shipped.read_text(encoding="utf-8")))
    hashing = config.ngram_hash
    assert hashing.multipliers == (23703573157769, 20109073645365, 8052911324071)
    field = {
        "multipliers": list(hashing.multipliers),
        "sizes": list(hashing.sizes),
        "offsets": list(hashing.offsets),
        "eos": 248044,
    }
    assert config.eos_token_id == 248044
    wanted = """
        16121432 28938500 59087997 73487090 81148277 104500129 120276032 149373875
        176283436 184305849 216528839 231080079 257961536 266068568 289043455 305959965
        15220011 32170723 40646129 76511807 98682440 106072663 127158041 141938523
        170367010 180520041 210849650 234005644 252857364 272068622 291885712 311569748
        14605717 24410875 49313567 72177428 86060820 104022010 130963819 146886202
        161523077 195939126 219424565 220811782 248020141 275228530 284297999 309645223
    """
    rows = rows_of([1, 2, 3], [248044, 248044], field)
    assert [number for row in rows for number in row] == [int(number) for number in wanted.split()]
    assert max(max(row) for row in rows_of([248319] * 3, [248044, 248044], field)) < hashing.rows


def test_rows_are_the_sources(recording: Recording) -> None:
    """The recorded tokens hold end-of-text alone, doubled and last."""
    embedding = recording.module("layers.1.ple.ple_embedding")
    ours = ngram_rows(
        recording.tokens[None],
        torch.full((1, 2), EOS),
        embedding.layer_multipliers,
        embedding.ngram_heads_vocab_sizes,
        embedding.ngram_heads_offsets,
        EOS,
    )
    assert_same(ours[0], recording.into("layers.1.ple.ple_embedding.ngram_embedding"))


@pytest.mark.parametrize(
    ("tokens", "as_if"),
    [
        # a token right behind end-of-text has no context
        ([12, 50, 31], [50, 50, 31]),
        # nor has one two behind it anything older
        ([12, 50, 31, 8], [50, 50, 31, 8]),
        # of two in a row, either cuts
        ([12, 50, 50, 8], [50, 50, 50, 8]),
        ([12, 31, 50, 50, 8, 40], [50, 50, 50, 50, 8, 40]),
    ],
)
def test_end_of_text_hides_what_is_older(tokens: list[int], as_if: list[int]) -> None:
    assert rows_of(tokens, [50, 50], FIELD)[-1] == rows_of(as_if, [50, 50], FIELD)[-1]
    # the same when it lies in the history, at the chunk's edge
    assert rows_of(tokens[-1:], tokens[-3:-1], FIELD)[-1] == rows_of(as_if, [50, 50], FIELD)[-1]


def test_current_end_of_text_sees_its_own_past() -> None:
    """(50*5 ^ 31*11) by hand: 250 ^ 341 = 431, mod 97 = 43; then 431 ^ 12*17 = 355, mod 89 = 88, + 97."""
    assert rows_of([12, 31, 50], [50, 50], FIELD)[-1] == [43, 185]


@pytest.mark.parametrize("big", [2**62 + 1, 2**63 - 1, -(2**63) + 3])
def test_foreign_multipliers_wrap_at_64_bits(big: int) -> None:
    """A negative product must give a row inside the table: the remainder is not the sign of the product's."""
    field = FIELD | {"multipliers": [big, 5, big - 2]}
    ours = rows_of(FIELD_TOKENS, [50, 50], field)
    assert ours == plain_rows(FIELD_TOKENS, field)
    assert all(0 <= row[0] < 97 <= row[1] < 186 for row in ours)


def test_foreign_multipliers_are_hashed_as_by_the_source(recording: Recording) -> None:
    embedding = recording.module("layers.1.ple.ple_embedding")
    multipliers = torch.tensor([2**62 + 12345, -(2**61) - 1, 2**63 - 1])
    seen: list[torch.Tensor] = []
    hook = embedding.ngram_embedding.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    kept = embedding.layer_multipliers.clone()
    try:
        embedding.layer_multipliers.copy_(multipliers)
        embedding(recording.tokens[None], None)
    finally:
        embedding.layer_multipliers.copy_(kept)
        hook.remove()
    ours = ngram_rows(
        recording.tokens[None],
        torch.full((1, 2), EOS),
        multipliers,
        embedding.ngram_heads_vocab_sizes,
        embedding.ngram_heads_offsets,
        EOS,
    )
    assert_same(ours, seen[0])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([1, 2, 3, 99]), min_size=1, max_size=12),
    st.lists(st.integers(1, 11), max_size=4),
    st.integers(-(2**63), 2**63 - 1),
)
def test_any_split_of_any_text_is_the_definition(tokens: list[int], cuts: list[int], multiplier: int) -> None:
    field = {"multipliers": [multiplier, 5, 7, 11], "sizes": [101, 103, 107], "offsets": [0, 101, 204], "eos": 99}
    padded = [99, 99, 99, *tokens]
    edges = sorted({0, len(tokens), *(cut for cut in cuts if cut < len(tokens))})
    rows = []
    for start, stop in pairwise(edges):
        rows += rows_of(tokens[start:stop], padded[start : start + 3], field)
    assert rows == plain_rows(tokens, field)


@pytest.mark.parametrize("vocabulary", [7, 248320])
def test_shared_inputs_hold_end_of_text(vocabulary: int) -> None:
    inputs = ngram_rows_inputs(4, 9, vocabulary, 6, "cpu")
    assert bool((inputs["tokens"] == inputs["eos"]).any())
    together = ngram_rows(**inputs)
    for b in range(4):
        one = slice(b, b + 1)
        assert_same(
            ngram_rows(**{**inputs, "tokens": inputs["tokens"][one], "history": inputs["history"][one]})[0], together[b]
        )
        sequence = [*inputs["history"][b].tolist(), *inputs["tokens"][b].tolist()]
        field = {name: inputs[name].tolist() for name in ("multipliers", "sizes", "offsets")} | {"eos": inputs["eos"]}
        assert together[b].tolist() == plain_rows(sequence, field)[2:]


def test_short_history_is_refused() -> None:
    inputs = ngram_rows_inputs(2, 3, 11, 4, "cpu")
    with pytest.raises(ValueError, match=r"wants history \[B, 2\] for tokens \(2, 3\); got \(2, 1\)"):
        ngram_rows(**{**inputs, "history": inputs["history"][:, 1:]})


@pytest.mark.parametrize("wrapping", [False, True])
@pytest.mark.parametrize(
    ("b", "r", "heads"),
    [(1, 1, 4), (4, 3, 6), (3, 9, 16), (1, 37, 4), *(pytest.param(*s, 16, marks=REAL) for s in ((16, 5), (1, 8192)))],
)
def test_kernel_is_the_reference(b: int, r: int, heads: int, wrapping: bool) -> None:
    """Wrapping products are negative as often as not, where C's remainder and torch's differ."""
    inputs = {name: fenced(value) for name, value in ngram_rows_inputs(b, r, 248320, heads, DEVICE).items()}
    if wrapping:
        inputs["multipliers"] = torch.tensor([2**62 + 12345, -(2**61) - 1, 2**63 - 1], device=DEVICE)
    with empty_is_nan():
        assert_same(launch_rows(**inputs), ngram_rows_reference(**inputs))


@pytest.mark.parametrize("orders", [2, 4])
def test_kernel_hashes_other_orders(orders: int) -> None:
    inputs = ngram_rows_inputs(2, 7, 97, 6, DEVICE)
    inputs["multipliers"] = torch.tensor([23703573157769, 20109073645365, 8052911324071, 77], device=DEVICE)[:orders]
    inputs["history"] = torch.tensor([[5, 1, 9], [1, 8, 4]], device=DEVICE)[:, 4 - orders :]
    assert_same(launch_rows(**inputs), ngram_rows_reference(**inputs))


def test_kernel_rows_do_not_disturb_each_other() -> None:
    assert_rows_alone(launch_rows, ngram_rows_inputs(21, 2, 97, 6, DEVICE), ("tokens", "history"))
