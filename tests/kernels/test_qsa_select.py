"""Block selection against the source's sets, against plain Python, and its tie rule."""

from typing import Any

import pytest
import torch
from torch import Tensor

from stepfloor.kernels.qsa_attend import kept_positions
from stepfloor.kernels.qsa_select import qsa_select, qsa_select_inputs
from tests.kernels.compare import assert_same, groups
from tests.kernels.source import Recording
from tests.kernels.sparse_layer import SparseLayer, source_operands, source_projections

DTYPES = [torch.float32, torch.bfloat16]


def odd_inputs(b: int, r: int, context: int, dtype: torch.dtype = torch.float32, topk: int = 3) -> dict[str, Any]:
    return qsa_select_inputs(b, r, context, 3, 13, 4, topk, dtype, "cpu")


def keys_of(inputs: dict[str, Any], b: int, count: int) -> Tensor:
    """The first `count` block keys of a sequence, out of their pages."""
    blocks, per_page = torch.arange(count), inputs["block_keys"].shape[1]
    pages = inputs["page_table"][inputs["slots"][b], blocks // per_page]
    return inputs["block_keys"][pages, blocks % per_page]


def with_keys(inputs: dict[str, Any], b: int, keys: Tensor) -> None:
    blocks, per_page = torch.arange(len(keys)), inputs["block_keys"].shape[1]
    inputs["block_keys"][inputs["page_table"][inputs["slots"][b], blocks // per_page], blocks % per_page] = keys


@pytest.mark.parametrize("layer", [3, 7])
def test_kept_positions_are_the_sources(recording: Recording, layer: int) -> None:
    """Every row's set exactly, most rows with more blocks than the budget.

    Only where relu leaves several blocks a score of exactly zero does the source's choice among them differ.
    """
    sparse = SparseLayer(source_operands(recording, layer), 1, len(recording.tokens), ring=4)
    projected = source_projections(recording, layer)[None]
    _, selected = sparse.run([1], [0], projected)
    _, _, index_q = sparse.prepare([1], [0], projected)
    keys = sparse.sequence(1, len(recording.tokens))["block_keys"].double()
    mask = recording.out(f"layers.{layer}.self_attn.indexer")[0]
    ratio, dropped, tied = sparse.operands.shape.ratio, 0, 0
    for t in range(len(recording.tokens)):
        ours = kept_positions(selected[0, t], t, ratio)
        wanted = mask[t].nonzero().flatten()
        dropped += t + 1 - len(ours)
        if not torch.equal(ours, wanted):
            scores = (keys[: (t + 1) // ratio] @ index_q[0, t].double().T).relu().sum(-1)
            parted = set((ours // ratio).tolist()) ^ set((wanted // ratio).tolist())
            assert all(scores[block] == 0 for block in parted)
            tied += 1
    assert dropped > 100
    assert tied <= 2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("context", [0, 2, 11, 12, 50])
def test_selection_is_the_definition(context: int, dtype: torch.dtype) -> None:
    """Scores in float64, the blocks one by one."""
    inputs = odd_inputs(2, 5, context, dtype)
    selected = qsa_select(**inputs)
    for b in range(2):
        for r in range(5):
            visible = (context + r + 1) // 4
            scores = (keys_of(inputs, b, visible).double() @ inputs["index_q"][b, r].double().T).relu().sum(-1)
            ranked = sorted(range(visible), key=lambda block, s=scores: (-s[block].item(), block))
            wanted = sorted(ranked[:3])
            # float64 and float32 may only part where scores all but tie; exact ties (relu of negatives) stay ties
            distinct = scores.unique()
            assert len(distinct) < 2 or distinct.diff().min() > 1e-4
            assert selected[b, r].tolist() == wanted + [-1] * (3 - len(wanted))


def test_own_block_is_eligible_when_the_row_completes_it() -> None:
    """Row 11 completes block 2 and selects it, row 10 does not see it."""
    inputs = odd_inputs(1, 2, 10, topk=1)
    inputs["index_q"] = torch.ones_like(inputs["index_q"])
    with_keys(inputs, 0, torch.tensor([1.0, 2.0, 9.0])[:, None].expand(3, 13))
    assert qsa_select(**inputs).tolist() == [[[1], [2]]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ties_go_to_the_lower_block(dtype: torch.dtype) -> None:
    """Twenty blocks of three keys: the best key's copies in order, and zero scores (relu of negatives) likewise."""
    inputs = odd_inputs(1, 1, 79, dtype, topk=5)
    inputs["index_q"] = torch.ones_like(inputs["index_q"])
    kinds = torch.tensor([1.0, 3.0, 2.0]).repeat(7)[:20, None]
    with_keys(inputs, 0, kinds.expand(20, 13).to(dtype))
    assert qsa_select(**inputs)[0, 0].tolist() == [1, 4, 7, 10, 13]
    with_keys(inputs, 0, -kinds.expand(20, 13).to(dtype))
    assert qsa_select(**inputs)[0, 0].tolist() == [0, 1, 2, 3, 4]


def test_negative_heads_count_as_zero() -> None:
    """Heads +4 and -9 give 4, more than 3 and nothing: relu comes before the sum over heads."""
    inputs = qsa_select_inputs(1, 1, 7, 2, 2, 4, 1, torch.float32, "cpu")
    inputs["index_q"] = torch.eye(2)[None, None]
    with_keys(inputs, 0, torch.tensor([[3.0, 0.0], [4.0, -9.0]]))
    assert qsa_select(**inputs).tolist() == [[[1]]]


def test_scores_are_float32_in_bf16_models() -> None:
    """Scores 256 and 257 are one number in bf16; a rounded score would make the lower block win."""
    inputs = qsa_select_inputs(1, 1, 7, 1, 2, 4, 1, torch.bfloat16, "cpu")
    inputs["index_q"] = torch.tensor([[[[16.0, 1.0]]]], dtype=torch.bfloat16)
    with_keys(inputs, 0, torch.tensor([[16.0, 0.0], [16.0, 1.0]], dtype=torch.bfloat16))
    assert qsa_select(**inputs).tolist() == [[[1]]]


def test_blocks_not_complete_yet_are_never_read() -> None:
    """What rejected rows left behind the visible blocks, and other sequences' pages, are poisoned."""
    inputs = odd_inputs(2, 3, 20)
    wanted = qsa_select(**inputs)
    for b in range(2):
        kept = keys_of(inputs, b, 23 // 4).clone()
        inputs["block_keys"][inputs["page_table"][b + 1]] = torch.nan
        with_keys(inputs, b, kept)
    inputs["block_keys"][0] = torch.nan
    assert_same(qsa_select(**inputs), wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_and_sequences_do_not_disturb_each_other(dtype: torch.dtype) -> None:
    inputs = odd_inputs(3, 9, 21, dtype)
    inputs["first"] = torch.tensor([21, 4, 13])
    inputs["slots"] = torch.tensor([3, 1, 2])
    together = qsa_select(**inputs)
    for sizes in ((1,), (2, 5)):
        for b in range(3):
            for rows in groups(9, sizes):
                part = {
                    "index_q": inputs["index_q"][b : b + 1, rows],
                    "slots": inputs["slots"][b : b + 1],
                    "first": inputs["first"][b : b + 1] + rows.start,
                }
                assert_same(qsa_select(**{**inputs, **part})[0], together[b, rows])


@pytest.mark.parametrize("dim", [13, 128, 131])
def test_a_blocks_score_does_not_depend_on_how_many_there_are(dim: int) -> None:
    """Equal keys tie to the bit wherever they lie and however many there are; a matrix product's edge may not."""
    make = torch.Generator().manual_seed(0)
    key, index_q = torch.rand(1, dim, generator=make), torch.rand(1, 1, 3, dim, generator=make)
    for count in range(9, 80):
        inputs = qsa_select_inputs(1, 1, 4 * count - 1, 3, dim, 4, 8, torch.float32, "cpu")
        with_keys(inputs, 0, key.expand(count, dim))
        assert qsa_select(**{**inputs, "index_q": index_q})[0, 0].tolist() == list(range(8))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"index_q": torch.zeros(2, 5, 39)}, r"got \(2, 5, 39\), \(2,\), \(2,\)"),
        ({"slots": torch.tensor([1])}, r"\(1,\), \(2,\)"),
        ({"first": torch.tensor([1, 2, 3])}, r"\(2,\), \(3,\)"),
    ],
)
def test_disagreeing_shapes_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        qsa_select(**{**odd_inputs(2, 5, 8), **change})
