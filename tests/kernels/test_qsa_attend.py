"""Attention over selected blocks and the open tail."""

from typing import Any

import pytest
import torch
from torch import Tensor

from stepfloor.kernels.qsa_attend import kept_positions, qsa_attend, qsa_attend_inputs
from tests.kernels.compare import UNIT, assert_rounded_alike, assert_same, assert_within, groups
from tests.kernels.source import Recording
from tests.kernels.sparse_layer import SparseLayer, source_operands, source_projections

DTYPES = [torch.float32, torch.bfloat16]


def odd_inputs(b: int, r: int, context: int, dtype: torch.dtype, topk: int = 3) -> dict[str, Any]:
    return qsa_attend_inputs(b, r, context, 6, 3, 10, 4, topk, dtype, "cpu")


def exact(inputs: dict[str, Any], positions: Any) -> tuple[Tensor, Tensor]:
    """Softmax attention in float64 over the given positions of each row, head by head; and the largest value read."""
    q, page = inputs["q"].double(), inputs["keys"].shape[1]
    heads, group = q.shape[2], q.shape[2] // inputs["keys"].shape[2]
    result = torch.empty(*q.shape)
    result = result.double()
    largest = torch.empty_like(result)
    for b in range(q.shape[0]):
        table = inputs["page_table"][inputs["slots"][b]]
        for r in range(q.shape[1]):
            at = positions(b, r)
            k = inputs["keys"][table[at // page], at % page].double()
            v = inputs["values"][table[at // page], at % page].double()
            for h in range(heads):
                p = (k[:, h // group] @ q[b, r, h] / q.shape[3] ** 0.5).softmax(0)
                result[b, r, h] = p @ v[:, h // group]
                largest[b, r, h] = v[:, h // group].abs().amax(0)
    gate = torch.sigmoid(inputs["gate"].double())
    return result.flatten(2) * gate, largest.flatten(2) * gate


def roundings_bound(inputs: dict[str, Any], largest: Tensor, kept: int) -> Tensor:
    """How far a result may lie from the exact one, in shares of the largest value read.

    Scores sum head_dim products, q k of size at most s; an error of a score is a relative one of its weight. Then
    `kept` weights are summed twice (softmax and values) in float32, and in the model's dtype weight, sum, gate and
    product are rounded once each.
    """
    size = inputs["q"].double().norm(dim=-1).max() * inputs["keys"].double().nan_to_num().norm(dim=-1).max()
    scores = inputs["q"].shape[3] * 2.0**-24 * float(size) / inputs["q"].shape[3] ** 0.5
    return (2 * scores + (2 * kept + 8) * 2.0**-24 + 4 * UNIT[inputs["q"].dtype]) * 1.02 * largest


@pytest.mark.parametrize("layer", [3, 7])
def test_attended_rows_are_the_sources(recording: Recording, layer: int) -> None:
    operands = source_operands(recording, layer)
    sparse = SparseLayer(operands, 1, len(recording.tokens), ring=4)
    projected = source_projections(recording, layer)
    ours, selected = sparse.run([1], [0], projected[None])
    wanted = recording.into(f"layers.{layer}.self_attn.o_proj")
    # a row for which several blocks score exactly zero may read another of them than the source's (test_qsa_select)
    mask, ratio = recording.out(f"layers.{layer}.self_attn.indexer")[0], operands.shape.ratio
    alike = [
        t
        for t in range(len(recording.tokens))
        if torch.equal(kept_positions(selected[0, t], t, ratio), mask[t].nonzero().flatten())
    ]
    assert len(alike) >= len(recording.tokens) - 2
    # both sides as derived for one; in bf16 q, k may also be steps apart (four each, normed_bound of test_qsa_prepare),
    # and each is a relative error of a score no larger than the product of two heads' lengths
    q, gate, _ = SparseLayer(operands, 1, len(recording.tokens), ring=4).prepare([1], [0], projected[None])
    kept = sparse.sequence(1, len(recording.tokens))
    group = operands.shape.heads // operands.shape.kv_heads
    values = kept["values"].double().abs().amax(0).repeat_interleave(group, 0).flatten()
    largest = values * torch.sigmoid(gate[0].double())
    bound = 2 * roundings_bound({"q": q, "keys": kept["keys"]}, largest, len(recording.tokens))
    if recording.dtype == torch.bfloat16:
        scores = (q.double().norm(dim=-1).max() * kept["keys"].double().norm(dim=-1).max()).item()
        bound = bound + 2 * 2 * 2.0**-7 * scores / operands.shape.head_dim**0.5 * largest
    assert_within(ours[0, alike], wanted[alike], bound[alike])


def test_weights_and_sums_are_rounded_where_the_source_rounds_them() -> None:
    """Scores stay float32 (the source's eager form rounds them, its fused form does not); weights, sum, gate round."""
    inputs = odd_inputs(1, 40, 0, torch.bfloat16, topk=10)
    k, v = (
        inputs[name][inputs["page_table"][1]].flatten(0, 1)[:40].repeat_interleave(2, 1).float()
        for name in ("keys", "values")
    )
    scores = torch.einsum("thd,shd->hts", inputs["q"][0].float(), k) * 10**-0.5
    weights = scores.masked_fill(~torch.ones(40, 40).tril().bool(), -torch.inf).softmax(-1).to(torch.bfloat16)
    mixed = torch.einsum("hts,shd->thd", weights.float(), v).to(torch.bfloat16).flatten(1)
    assert_rounded_alike(qsa_attend(**inputs)[0], mixed * torch.sigmoid(inputs["gate"][0]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("context", [0, 3, 30])
def test_rows_read_what_was_selected_and_the_tail(context: int, dtype: torch.dtype) -> None:
    inputs = odd_inputs(2, 5, context, dtype)

    def positions(b: int, r: int) -> Tensor:
        t = context + r
        blocks = [block for block in inputs["selected"][b, r].tolist() if block >= 0]
        inside = [4 * block + i for block in blocks for i in range(4)]
        return torch.tensor(inside + list(range((t + 1) // 4 * 4, t + 1)))

    wanted, largest = exact(inputs, positions)
    assert_within(qsa_attend(**inputs).double(), wanted, roundings_bound(inputs, largest, 4 * 3 + 3))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_everything_within_the_budget_is_dense_attention(dtype: torch.dtype) -> None:
    inputs = odd_inputs(2, 7, 17, dtype, topk=9)
    wanted, largest = exact(inputs, lambda b, r: torch.arange(17 + r + 1))
    assert_within(qsa_attend(**inputs).double(), wanted, roundings_bound(inputs, largest, 24))


def test_positions_kept_by_hand() -> None:
    """Two blocks of four and the tail; a row that completes its block has none, a first row only itself."""
    selected = torch.tensor([0, 2, -1])
    assert kept_positions(selected, 13, 4).tolist() == [0, 1, 2, 3, 8, 9, 10, 11, 12, 13]
    assert kept_positions(torch.tensor([0, 1, 2]), 11, 4).tolist() == list(range(12))
    assert kept_positions(torch.tensor([-1, -1, -1]), 0, 4).tolist() == [0]
    assert kept_positions(torch.tensor([0, -1, -1]), 6, 4).tolist() == list(range(7))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nothing_else_is_read(dtype: torch.dtype) -> None:
    """Positions that were not selected, rows after the query, other pages: all may be anything finite."""
    inputs = odd_inputs(2, 1, 30, dtype)
    wanted = qsa_attend(**inputs)
    page = inputs["keys"].shape[1]
    for name in ("keys", "values"):
        poisoned = torch.full_like(inputs[name], 1e4)
        for b in range(2):
            table = inputs["page_table"][inputs["slots"][b]]
            at = kept_positions(inputs["selected"][b, 0], 30, 4)
            poisoned[table[at // page], at % page] = inputs[name][table[at // page], at % page]
        inputs[name] = poisoned
    assert_same(qsa_attend(**inputs), wanted)


def test_query_heads_read_their_own_key_value_head() -> None:
    """Six query heads, three of keys: 0 and 1 read the first. A value per head names it; the gate is open by half."""
    inputs = odd_inputs(1, 1, 6, torch.float32)
    inputs["values"] = torch.arange(3.0)[:, None].expand(inputs["values"].shape).contiguous()
    inputs["gate"] = torch.zeros_like(inputs["gate"])
    heads = qsa_attend(**inputs).unflatten(-1, (6, 10))[0, 0]
    # weights sum to one within the roundings of seven of them
    wanted = 0.5 * torch.arange(3.0).repeat_interleave(2)[:, None].expand(6, 10)
    assert_within(heads, wanted, 16 * 2.0**-24)


def test_large_scores_do_not_overflow() -> None:
    inputs = odd_inputs(1, 3, 20, torch.bfloat16)
    inputs["q"] = inputs["q"] * 1e4
    assert bool(torch.isfinite(qsa_attend(**inputs)).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_and_sequences_do_not_disturb_each_other(dtype: torch.dtype) -> None:
    inputs = odd_inputs(3, 9, 21, dtype)
    inputs["slots"] = torch.tensor([3, 1, 2])
    together = qsa_attend(**inputs)
    for sizes in ((1,), (2, 5)):
        for b in range(3):
            for rows in groups(9, sizes):
                part = {name: inputs[name][b : b + 1, rows] for name in ("q", "gate", "selected")}
                part |= {"slots": inputs["slots"][b : b + 1], "first": inputs["first"][b : b + 1] + rows.start}
                assert_same(qsa_attend(**{**inputs, **part})[0], together[b, rows])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gate": torch.zeros(2, 3, 59)}, r"\(2, 3, 6, 10\), \(2, 3, 59\)"),
        ({"gate": torch.zeros(2, 1, 60)}, r"\(2, 3, 6, 10\), \(2, 1, 60\)"),  # would broadcast over all rows
        ({"selected": torch.zeros(2, 2, 3).long()}, r"\(2, 3, 6, 10\).*\(2, 2, 3\)"),
        ({"slots": torch.tensor([1])}, r"\[2\]; got \(1,\), \(2,\)"),
    ],
)
def test_disagreeing_shapes_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        qsa_attend(**{**odd_inputs(2, 3, 9, torch.float32), **change})
