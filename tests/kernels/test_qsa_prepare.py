"""Norm, rotation and cache writes of sparse attention; block keys across windows, rejections and pages."""

import random
from typing import Any

import pytest
import torch
import transformers.models.qwen4_exp.modeling_qwen4_exp as hf
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stepfloor.kernels.mtp_fuse import mtp_fuse
from stepfloor.kernels.qsa_prepare import SparseShape, qsa_prepare, qsa_prepare_inputs
from tests.kernels.compare import UNIT, assert_rounded_alike, assert_same, assert_within, copied, groups
from tests.kernels.source import Recording
from tests.kernels.sparse_layer import (
    Operands,
    SparseLayer,
    random_operands,
    same_bits,
    source_operands,
    source_projections,
)

DTYPES = [torch.float32, torch.bfloat16]
ODD = SparseShape(heads=6, kv_heads=3, head_dim=10, index_heads=3, index_dim=12, ratio=4, topk=3)


def rows_of(operands: Operands, count: int, seed: int = 0) -> Tensor:
    make = torch.Generator().manual_seed(seed)
    return torch.randn(count, operands.columns, generator=make).to(operands.dtype)


def normed_bound(wanted: Tensor, recording: Recording, head: int) -> Tensor:
    """Two norms of the same numbers, then a rotation of two products and a sum.

    The mean of a head's squares in another order is head 2**-24 off; the norm's rounding, two products and their
    sum may each fall a step (two roundings) aside; a rotated value is no larger than the head's largest times 1.5.
    """
    largest = 1.5 * wanted.double().abs().amax(-1, keepdim=True)
    return ((head * 2.0**-24 + 4 * 2 * UNIT[recording.dtype]) * largest).expand_as(wanted)


def test_queries_keys_and_values_are_the_sources(recording: Recording) -> None:
    prefix, count = "layers.3.self_attn", len(recording.tokens)
    operands = source_operands(recording, 3)
    layer = SparseLayer(operands, 2, count, ring=4)
    q, gate, index_q = layer.prepare([2], [0], source_projections(recording, 3)[None])
    cos, sin = recording.cos[None], recording.sin[None]
    turned = {
        name: hf.apply_rotary_pos_emb(recording.out(f"{prefix}.{name}")[None], cos=cos, sin=sin, unsqueeze_dim=2)[0]
        for name in ("q_norm", "k_norm", "indexer.q_layernorm")
    }
    kept = layer.sequence(2, count)
    for ours, wanted in (
        (q[0], turned["q_norm"]),
        (kept["keys"], turned["k_norm"]),
        (index_q[0], turned["indexer.q_layernorm"]),
    ):
        assert_within(ours, wanted, normed_bound(wanted, recording, wanted.shape[-1]))
        assert_rounded_alike(ours, wanted)
    # values and gates are neither normed nor rotated
    assert_same(kept["values"].flatten(1), recording.out(f"{prefix}.v_proj"))
    heads = recording.out(f"{prefix}.q_proj").unflatten(-1, (operands.shape.heads, -1))
    assert_same(gate[0].unflatten(-1, (operands.shape.heads, -1)), heads[..., operands.shape.head_dim :])


def test_block_keys_are_pooled_then_normed_then_turned(recording: Recording) -> None:
    """The source forms block keys inside its selection; here they are built from its own norm and rotation."""
    prefix, count = "layers.3.self_attn.indexer", len(recording.tokens)
    ratio, dim = recording.config.indexer_compress_ratio, recording.config.indexer_head_dim
    layer = SparseLayer(source_operands(recording, 3), 1, count, ring=ratio)
    layer.prepare([1], [0], source_projections(recording, 3)[None])
    blocks = count // ratio
    raw = recording.out(f"{prefix}.index_qk_proj")[: blocks * ratio, -dim:]
    pooled = torch.stack([block.float().mean(0).to(raw.dtype) for block in raw.split(ratio)])
    with torch.no_grad():
        normed = recording.module(f"{prefix}.k_layernorm")(pooled)
    starts = ratio * torch.arange(blocks)  # the first token of each block
    wanted = hf.apply_rotary_pos_emb(normed[:, None], cos=recording.cos[starts], sin=recording.sin[starts])[:, 0]
    ours = layer.sequence(1, count)["block_keys"]
    # the mean of four is one more rounding, a step in bf16, which the norm does not magnify
    bound = normed_bound(wanted, recording, dim) + 2 * UNIT[recording.dtype] * wanted.double().abs().amax(-1, True)
    assert_within(ours, wanted, bound)
    assert_rounded_alike(ours, wanted)


def test_pooled_mean_is_rounded_before_the_norm() -> None:
    """By hand in bf16: 1, 1, 1 and 1 + 2**-7 have the mean 1 + 2**-9, which rounds to 1 (a tie would go there too)."""
    operands = random_operands(SparseShape(1, 1, 4, 1, 4, 4, 1), 8, torch.bfloat16)
    operands.norms.index_k.fill_(1.0)
    layer = SparseLayer(operands, 1, 8, ring=4)
    projected = torch.zeros(1, 4, operands.columns, dtype=torch.bfloat16)
    # the key's other three values are large, so that the norm leaves the first small: its steps are then finer
    projected[0, :, -4:] = torch.tensor([1.0, 64.0, 64.0, 64.0])
    rounded = SparseLayer(operands, 1, 8, ring=4)
    rounded.prepare([1], [0], projected)
    projected[0, 3, -4] = 1 + 2**-7
    layer.prepare([1], [0], projected)
    assert_same(layer.sequence(1, 4)["block_keys"], rounded.sequence(1, 4)["block_keys"])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=25, deadline=None)
@given(sizes=st.lists(st.integers(1, 11), min_size=1, max_size=5))
def test_any_chunking_leaves_the_same_cache(dtype: torch.dtype, sizes: list[int]) -> None:
    """Blocks follow the sequence, not the chunk; a chunk may complete none, one or several."""
    operands = random_operands(ODD, 40, dtype)
    projected = rows_of(operands, 37)
    whole, parts = (SparseLayer(operands, 3, 40, ring=7) for _ in range(2))
    together = whole.prepare([2], [0], projected[None])
    outputs = [parts.prepare([2], [rows.start], projected[None, rows]) for rows in groups(37, sizes)]
    assert_same(tuple(torch.cat(column, 1) for column in zip(*outputs, strict=True)), together)
    for name, kept in whole.sequence(2, 37).items():
        assert_same(parts.sequence(2, 37)[name], kept)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_only_a_sequences_own_pages_and_slot_are_written(dtype: torch.dtype) -> None:
    """Page 0 is nobody's; a page is written at the rows of its positions and no further."""
    operands = random_operands(ODD, 40, dtype)
    layer = SparseLayer(operands, 3, 40, ring=6, seed=3)
    before = [tensor.clone() for tensor in layer.tensors()]
    layer.prepare([2], [0], rows_of(operands, 13)[None])
    table = layer.cache.page_table
    assert table[2].tolist() != sorted(table[2].tolist())
    own = table[2, :2].tolist()
    for tensor, old in zip(layer.tensors()[:3], before[:3], strict=True):
        others = [page for page in range(len(tensor)) if page not in own]
        assert same_bits(tensor[others], old[others])
    assert int(layer.cache.keys.isnan().logical_not().any(-1).any(-1).sum()) == 13
    assert int(layer.cache.block_keys.isnan().logical_not().any(-1).sum()) == 13 // 4
    assert same_bits(layer.cache.raw_keys[[0, 1, 3]], before[3][[0, 1, 3]])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sequences_together_equal_each_alone(dtype: torch.dtype) -> None:
    """Each at its own position of its own pages: a past length taken as the batch's maximum is the failure."""
    operands = random_operands(ODD, 60, dtype)
    together, alone = (SparseLayer(operands, 4, 60, ring=7, seed=5) for _ in range(2))
    lengths = {1: 3, 2: 30, 3: 8, 4: 17}
    for slot, length in lengths.items():
        for layer in (together, alone):
            layer.prepare([slot], [0], rows_of(operands, length, slot)[None])
    slots = [3, 1, 4, 2]
    new = torch.stack([rows_of(operands, 4, 10 + slot) for slot in slots])
    outputs = together.prepare(slots, [lengths[slot] for slot in slots], new)
    for b, slot in enumerate(slots):
        one = alone.prepare([slot], [lengths[slot]], new[b : b + 1])
        assert_same(tuple(tensor[0] for tensor in one), tuple(tensor[b] for tensor in outputs))
    for ours, theirs in zip(together.tensors(), alone.tensors(), strict=True):
        assert same_bits(ours, theirs)


def speculate(operands: Operands, drafts: int, ring: int, seed: int, length: int = 40) -> tuple[bool, bool]:
    """Random windows of drafts + 1 rows, any number of them kept, also none.

    Returns whether the block keys of everything kept are those of plain running, and whether some block was
    completed by rejected rows and completed again later.
    """
    draw = random.Random(seed)
    text = rows_of(operands, length, seed)
    plain, layer = (SparseLayer(operands, 1, length + drafts + 1, ring) for _ in range(2))
    plain.prepare([1], [0], text[None])
    at = draw.randint(1, 6)
    layer.prepare([1], [0], text[None, :at])
    equal, again, ratio = True, False, operands.shape.ratio
    while at < length:
        good = draw.randint(0, min(drafts + 1, length - at))
        junk = rows_of(operands, drafts + 1 - good, 1000 * seed + at)
        layer.prepare([1], [at], torch.cat((text[at : at + good], junk))[None])
        again |= (at + drafts + 1) // ratio > (at + good) // ratio
        at += good
        ours, wanted = layer.sequence(1, at), plain.sequence(1, at)
        equal &= all(same_bits(ours[name], wanted[name]) for name in wanted)
    return equal, again


@pytest.mark.parametrize("drafts", [0, 1, 3, 5, 7])
def test_ring_of_ratio_and_drafts_holds_every_open_block(drafts: int) -> None:
    """Rejected rows complete blocks that are completed again; the raw keys before them must still be there."""
    operands = random_operands(ODD, 60, torch.float32)
    results = [speculate(operands, drafts, ODD.ratio + drafts, seed) for seed in range(12)]
    assert all(equal for equal, _ in results)
    assert drafts == 0 or any(again for _, again in results)


@pytest.mark.parametrize("drafts", [1, 3, 5, 7])
def test_ring_of_one_less_is_wrong(drafts: int) -> None:
    """A window of which nothing is kept overwrites the open block's first key, and the block comes out other.

    A kernel that writes the ring before it pools needs the last place for every window.
    """
    operands = random_operands(ODD, 60, torch.float32)
    assert not all(speculate(operands, drafts, ODD.ratio + drafts - 1, seed)[0] for seed in range(12))


@pytest.mark.parametrize("context", [0, 5, 16])
def test_shared_inputs_are_rows_like_any(context: int) -> None:
    """The maker's cache holds a past; rows one at a time and as a window leave the same bytes."""
    inputs = qsa_prepare_inputs(2, 5, context, ODD, torch.float32, "cpu")
    whole, steps = copied(inputs), copied(inputs)
    together = qsa_prepare(**whole)
    outputs = []
    for r in range(5):
        row: dict[str, Any] = {"projected": inputs["projected"][:, r : r + 1], "first": inputs["first"] + r}
        outputs.append(qsa_prepare(**{**steps, **row}))
    assert_same(tuple(torch.cat(column, 1) for column in zip(*outputs, strict=True)), together)
    for name in ("keys", "values", "block_keys", "raw_keys"):
        assert_same(getattr(steps["cache"], name), getattr(whole["cache"], name))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(("b", "r"), [(1, 1), (1, 4), (4, 4), (16, 5)])
def test_settled_calls_have_the_same_bits(b: int, r: int) -> None:
    """Steps in a graph, a dependent launch in front: what is read before the wait is what the step before left.

    Windows begin at every place of a block and overlap, as those with rejected drafts do.
    """
    shape = SparseShape(heads=24, kv_heads=2, head_dim=256, index_heads=4, index_dim=128, ratio=4, topk=512)
    inputs: dict[str, Any] = qsa_prepare_inputs(b, 80, 300, shape, torch.bfloat16, "cuda")
    # the sum that gives the rows is a dependent launch, and they are there only after it
    streams = inputs.pop("projected")[:, :r].reshape(b * r, 4, -1).contiguous()
    nothing = torch.zeros_like(streams[:, 0])
    plain, held = copied(inputs), copied(inputs)

    def step(held: dict[str, Any], settled: bool) -> tuple[Tensor, ...]:
        return qsa_prepare(mtp_fuse(streams, nothing).view(b, r, -1), **held, settled=settled)

    step(copied(inputs), True)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = step(held, True)
    for turn in range(16):
        streams.add_(turn + 1)
        for each in (plain, held):
            each["first"].add_(1 + turn % r)
        graph.replay()
        assert_same(output, step(plain, False))
        for name in ("keys", "values", "block_keys", "raw_keys"):
            assert_same(getattr(held["cache"], name), getattr(plain["cache"], name))


def test_disagreeing_shapes_are_refused() -> None:
    inputs = qsa_prepare_inputs(2, 3, 5, ODD, torch.float32, "cpu")
    with pytest.raises(ValueError, match=r"\[B, R, 228\]; got \(2, 3, 20\)"):
        qsa_prepare(**{**inputs, "projected": torch.zeros(2, 3, 20)})
    with pytest.raises(ValueError, match=r"\[2\]; got \(1,\), \(2,\)"):
        qsa_prepare(**{**inputs, "slots": torch.tensor([1])})
