"""Parity with transformers on random configurations: conformance tests 1 to 3 of the architecture, and greedy text.

Bounds. float32: 2e-5 on logits of size 1 to 4, as the architecture asks; a value passes some 40 roundings of 2**-24
a layer that add up as a random walk, so an eighth of that is usual. Routing and block selection are steps: where the
oracle's own margin at one is below what such errors can move, either side is right. Such a place is printed, and
nothing from that row on is compared.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import transformers.models.qwen4_exp.modeling_qwen4_exp as hf
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tests.oracle import TINY, Oracle
from tests.ours import Ours, engine_config, kept_sets
from torch import Tensor, nn
from transformers import DynamicCache, Qwen4ExpTextConfig

from stepfloor.config import ModelConfig
from stepfloor.engine import Engine
from stepfloor.model import model as model_room
from stepfloor.model.rope import inverse_frequencies, rope_tables
from stepfloor.request import Request, SamplingParams
from stepfloor.weights.checkpoint import open_checkpoint

BOUND = 2e-5
EOS = TINY["eos_token_id"]
GREEDY = SamplingParams(temperature=0.0)
# an example takes a second and a failing one is small enough to read; shrinking would take minutes
UNSHRUNK = (Phase.explicit, Phase.reuse, Phase.generate)


@dataclass
class Seen:
    """What the oracle decided: margins [T] of its steps, and by layer the kept positions and the table rows."""

    margins: list[Tensor] = field(default_factory=list)
    kept: list[list[set[int]]] = field(default_factory=list)
    table_rows: list[Tensor] = field(default_factory=list)

    def clear_rows(self, rows: int, bound: float = BOUND) -> int:
        """How many rows lie before the first margin that is too small to tell."""
        margin = torch.stack([torch.full((rows,), math.inf), *self.margins]).amin(0)
        close = (margin < bound).nonzero()
        if not close.numel():
            return rows
        row = int(close[0])
        print(f"near-tie: a router or indexer margin of {float(margin[row]):.1e} at row {row} of {rows}")
        return row


@contextmanager
def watch(*modules: nn.Module) -> Iterator[Seen]:
    """Note every step that the oracle takes in one pass over one sequence."""
    seen = Seen()

    def router(module: hf.Qwen4ExpTextTopKRouter, _: Any, output: tuple[Tensor, ...]) -> None:
        if module.top_k < module.num_experts:
            ordered = output[0].float().sort(-1, descending=True).values
            seen.margins.append(ordered[:, module.top_k - 1] - ordered[:, module.top_k])

    def indexer(module: hf.Qwen4ExpTextQSAIndexer, _: Any, output: Tensor) -> None:
        seen.kept.append([set(row.nonzero().flatten().tolist()) for row in output[0, 0]])

    def table(_: nn.Module, inputs: tuple[Tensor]) -> None:
        seen.table_rows.append(inputs[0][0])

    handles = []
    for module in (m for top in modules for m in top.modules()):
        if isinstance(module, hf.Qwen4ExpTextTopKRouter):
            handles.append(module.register_forward_hook(router))
        elif isinstance(module, hf.Qwen4ExpTextQSAIndexer):
            handles.append(module.register_forward_hook(indexer))
        elif isinstance(module, hf.Qwen4ExpTextNGramEmbedding):
            handles.append(module.ngram_embedding.register_forward_pre_hook(table))
    plain = Tensor.topk

    def topk(scores: Tensor, k: int, *args: Any, **kwargs: Any) -> Any:
        # the oracle's indexer ranks the blocks of each query by itself, in one dimension
        if scores.ndim == 1 and k < scores.shape[0]:
            ordered = scores.sort(descending=True).values
            seen.margins.append(_of_query(scores.shape[0], ordered[k - 1] - ordered[k]))
        return plain(scores, k, *args, **kwargs)

    rows, ratio = 0, 1

    def _of_query(blocks: int, margin: Tensor) -> Tensor:
        # a query that sees `blocks` complete blocks stands at one of `ratio` rows; all of them are marked
        marked = torch.full((rows,), math.inf)
        marked[blocks * ratio - 1 : blocks * ratio + ratio - 1] = margin
        return marked

    def length(module: hf.Qwen4ExpTextQSAIndexer, args: Any, kwargs: dict[str, Any]) -> None:
        nonlocal rows, ratio
        rows, ratio = (args[0] if args else kwargs["hidden_states"]).shape[1], module.compress_ratio

    handles += [
        module.register_forward_pre_hook(length, with_kwargs=True)
        for top in modules
        for module in top.modules()
        if isinstance(module, hf.Qwen4ExpTextQSAIndexer)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "topk", topk)
        try:
            yield seen
        finally:
            for handle in handles:
                handle.remove()


@contextmanager
def watch_ours(ours: Ours) -> Iterator[Seen]:
    """The same from stepfloor's operators."""
    seen = Seen()
    ratio = ours.model.config.indexer_compress_ratio
    select, rows = model_room.qsa_select, model_room.ngram_rows

    def selecting(index_q: Tensor, slots: Tensor, first: Tensor, *args: Any) -> Tensor:
        selected = select(index_q, slots, first, *args)
        seen.kept.append(kept_sets(selected[0], int(first[0]), ratio))
        return selected

    def hashing(*args: Any) -> Tensor:
        ids = rows(*args)
        seen.table_rows.append(ids[0])
        return ids

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_room, "qsa_select", selecting)
        patch.setattr(model_room, "ngram_rows", hashing)
        yield seen


def draw_config(draw: st.DrawFn) -> dict[str, Any]:
    """Changes to the tiny configuration that keep its shape valid."""
    heads, kv_heads = draw(st.sampled_from([(2, 1), (4, 2), (6, 2), (3, 3)]))
    key_heads, value_heads = draw(st.sampled_from([(1, 1), (1, 3), (2, 4), (2, 6)]))
    experts = draw(st.integers(3, 16))
    layers = draw(st.integers(4, 8))
    heads_per_ngram = draw(st.sampled_from([1, 4, 8]))
    return {
        "hidden_size": draw(st.sampled_from([32, 48, 64])),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": draw(st.sampled_from([8, 16])),
        "linear_value_head_dim": draw(st.sampled_from([8, 16])),
        "num_experts": experts,
        "num_experts_per_tok": draw(st.integers(1, min(experts, 4))),
        "norm_topk_prob": draw(st.booleans()),
        "hc_count": draw(st.sampled_from([2, 4])),
        "hc_lowrank": draw(st.sampled_from([8, 20])),
        "ple_layer_ids": [draw(st.sampled_from([i for i in range(1, layers + 1) if i % 4]))],
        "ple_embed_dim": 64,
        "heads_per_ngram": heads_per_ngram,
        "indexer_n_heads": draw(st.integers(2, 4)),
        # of up to 15 blocks: most are left out, about half, none
        "indexer_budget": draw(st.sampled_from([8, 16, 32, 256])),
        "output_gate_type": draw(st.sampled_from(["sigmoid", "silu"])),
    }


@dataclass(frozen=True)
class Case:
    """A random model and what it reads; eos and cuts anywhere, at the edges too."""

    seed: int
    changes: dict[str, Any]
    tokens: list[int]
    cuts: tuple[int, ...]
    spec_tokens: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    length = draw(st.integers(1, 60))
    token = st.one_of(st.integers(0, TINY["vocab_size"] - 1), st.integers(0, 96), st.integers(0, 96), st.just(EOS))
    tokens = draw(st.lists(token, min_size=length, max_size=length))
    cuts = tuple(draw(st.lists(st.integers(1, max(1, length - 1)), max_size=5)))
    return Case(draw(st.integers(0, 2**16)), draw_config(draw), tokens, cuts, draw(st.integers(0, 7)))


def apart(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference, in units of the values where those exceed 1; 0 for nothing to compare."""
    if not ours.numel():
        return 0.0
    return float((ours.float() - theirs.float()).abs().max() / max(1.0, float(theirs.float().abs().max())))


@torch.no_grad()
def cached_logits(oracle: Oracle, tokens: list[int], cuts: tuple[int, ...]) -> Tensor:
    """The oracle's chunks and one-token steps through its own cache."""
    cache, parts = DynamicCache(config=oracle.config), []
    edges = sorted({0, len(tokens), *(cut for cut in cuts if cut < len(tokens))})
    for a, b in zip(edges, edges[1:], strict=False):
        out = oracle.model(input_ids=torch.tensor([tokens[a:b]]), cache=cache, use_cache=True)
        parts.append(out.logits[0])
    return torch.cat(parts)


def check_one_pass(case: Case) -> None:
    """Logits, residual, kept positions, table rows, any chunking, the oracle's own cache, and the drafter."""
    with TemporaryDirectory() as directory:
        oracle = Oracle(Path(directory), case.seed, **case.changes)
        ours = Ours(open_checkpoint(directory), spec_tokens=1)
        with watch(oracle.model) as theirs:
            expected = oracle.logits(case.tokens)
        with watch_ours(ours) as mine:
            logits = ours.logits(case.tokens)
        clear = theirs.clear_rows(len(case.tokens))
        assert torch.equal(mine.table_rows[0], theirs.table_rows[0]), "a token reads other table rows"
        for layer, (a, b) in enumerate(zip(mine.kept, theirs.kept, strict=True)):
            assert a[:clear] == b[:clear], f"sparse layer {layer} keeps other positions"
        assert apart(logits[:clear], expected[:clear]) <= BOUND
        assert torch.equal(ours.logits(case.tokens, case.cuts), logits), "chunking shows"
        assert torch.equal(ours.logits(case.tokens, tuple(range(len(case.tokens)))), logits), "one by one shows"
        last = range(max(1, len(case.tokens) - 3), len(case.tokens))
        cached = cached_logits(oracle, case.tokens, (*case.cuts[:2], *last))
        assert apart(logits[:clear], cached[:clear]) <= BOUND
        check_drafter(oracle, ours, case.tokens, clear)


@torch.no_grad()
def check_drafter(oracle: Oracle, ours: Ours, tokens: list[int], clear: int) -> None:
    """The residual that leaves the target, and the drafter over it."""
    rows, following = tokens[:-1], tokens[1:]
    if not rows:
        return
    residual = oracle.residual(rows)
    embedding = oracle.model.model.embed_tokens(torch.tensor(following))
    with watch(oracle.drafter) as theirs:
        after, mixed = oracle.drafter(residual, embedding, *oracle.rope(len(rows)))
    clear = min(clear, theirs.clear_rows(len(rows)))
    ours.start()
    assert apart(ours.chunk(rows)[0][:clear], residual[:clear]) <= BOUND
    ours.start()
    our_after, our_mixed = ours.chunk(rows, following)
    assert apart(our_after[:clear], after[:clear]) <= BOUND
    assert apart(ours.model.logits(our_mixed)[:clear], oracle.model.lm_head(mixed)[:clear]) <= BOUND


def check_greedy(case: Case, new_tokens: int = 64) -> None:
    """Every id the engine emits is the oracle's choice for the text before it, or as good as that."""
    with TemporaryDirectory() as directory:
        oracle = Oracle(Path(directory), case.seed, **case.changes)
        chunk = max(1, len(case.tokens) // (len(case.cuts) + 1))
        config = engine_config(spec_tokens=case.spec_tokens, max_num_batched_tokens=chunk)
        engine = Engine(open_checkpoint(directory), config)
        engine.submit(Request("r", tuple(case.tokens), GREEDY, new_tokens))
        ids = [token for piece in engine.run() for token in piece.token_ids]
        assert len(ids) == new_tokens
        text = [*case.tokens, *ids]
        with watch(oracle.model) as theirs:
            logits = oracle.logits(text[:-1])
        clear = theirs.clear_rows(len(text) - 1)
        for row in range(len(case.tokens) - 1, clear):
            best, chosen = logits[row].max(), logits[row, text[row + 1]]
            if text[row + 1] != int(logits[row].argmax()):
                # each of the two logits may be off by the bound
                gap, room = float(best - chosen), 2 * BOUND * max(1.0, float(logits.abs().max()))
                print(f"near-tie: {text[row + 1]} for {int(logits[row].argmax())}, {gap:.1e} apart, at row {row}")
                assert gap <= room


@settings(max_examples=10, phases=UNSHRUNK)
@given(case=cases())
def test_one_pass(case: Case) -> None:
    check_one_pass(case)


@settings(max_examples=5, phases=UNSHRUNK)
@given(case=cases())
def test_greedy_ids(case: Case) -> None:
    check_greedy(case)


@pytest.mark.slow
@settings(max_examples=150, derandomize=False, phases=UNSHRUNK)
@given(case=cases())
def test_one_pass_of_many(case: Case) -> None:
    check_one_pass(case)


@pytest.mark.slow
@settings(max_examples=40, derandomize=False, phases=UNSHRUNK)
@given(case=cases())
def test_greedy_ids_of_many(case: Case) -> None:
    check_greedy(case)
