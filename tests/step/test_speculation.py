"""Verify and roll back: whatever is drafted and accepted, ids and state are those of plain decoding, bit for bit.

Conformance tests 4 and 6 of the architecture, and the cases about stops, limits and counts from the field.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import cycle, pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from stepfloor.config import EngineConfig
from stepfloor.engine import Engine
from stepfloor.kernels._torch import delta_rows, delta_rule
from stepfloor.model.load import load_model
from stepfloor.model.model import LinearAttention
from stepfloor.request import Batch, Chunk, Join, Request, SamplingParams
from stepfloor.sampler.sampler import Sampler
from stepfloor.step.step import Step
from stepfloor.weights.checkpoint import Checkpoint, open_checkpoint
from tests.oracle import Oracle
from tests.ours import engine_config
from tests.scripted import Scripted, from_text, scripted_engine, serve

EOS, VOCAB = 5, 97
SHAPE = {"num_hidden_layers": 5, "hidden_size": 32, "num_experts": 6, "indexer_budget": 8}
PROMPT = tuple(range(10, 23))
NEW = 36
GREEDY = SamplingParams(temperature=0.0, seed=0)
# every sixth token or so ends a segment of the n-gram context
MANY_EOS = SamplingParams(temperature=1.0, seed=7, logit_bias=((EOS, 2.8),))


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return Oracle(tmp_path_factory.mktemp("model"), 3, **SHAPE)


@pytest.fixture(scope="module")
def checkpoint(oracle: Oracle) -> Checkpoint:
    return open_checkpoint(oracle.directory)


def make_step(checkpoint: Checkpoint, config: EngineConfig) -> Step:
    model = load_model(checkpoint, config.max_model_len + 32, "cpu", drafter=config.spec_tokens > 0)
    return Step(model, Sampler(VOCAB, config.max_num_seqs, config.spec_tokens, "coupled", "cpu"), config)


def prefill(step: Step, chunk: int, sampling: SamplingParams) -> list[int]:
    """Join slot 0 and run the prompt; returns the first token."""
    join = Join(0, tuple(range(1, 1 + step.config.pages_per_sequence)), PROMPT, sampling)
    emitted: dict[int, list[int]] = {}
    for start in range(0, len(PROMPT), chunk):
        end = min(start + chunk, len(PROMPT))
        part = Chunk(0, start, PROMPT[start:end], PROMPT[end] if end < len(PROMPT) else None)
        batch = Batch(joins=() if start else (join,), chunks=(part,), spec_tokens=step.config.spec_tokens)
        emitted = step.run(batch).wait()
    return emitted[0]


def decode(step: Step, first: list[int], tokens: int, drafts: Sequence[int] = ()) -> Iterator[list[int]]:
    """Decode until there are enough tokens; yields all ids so far after each step. drafts: of steps, in turn."""
    turns = cycle(drafts or (step.config.spec_tokens,))
    ids = list(first)
    yield ids
    while len(ids) < tokens:
        ids = ids + step.run(Batch(decodes=(0,), spec_tokens=next(turns))).wait()[0]
        yield ids


@torch.no_grad()
def committed(step: Step, slot: int = 0) -> dict[str, Tensor]:
    """What a slot's committed tokens left behind, independent of k and of what was drafted and rejected."""
    model, cache, config = step.model, step.cache, step.model.config
    length, pending, rejected = (int(t[slot]) for t in (step.state.length, step.state.pending, step.state.rejected))
    out = {name: getattr(step.state, name)[slot].clone() for name in ("token", "length", "history")}
    taps = config.linear_conv_kernel_dim - 1
    for layer in model.layers:
        if isinstance(layer.attention, LinearAttention):
            part, i = layer.attention, layer.index
            state = cache.state[i][slot].clone()
            if pending:
                raw, gates = cache.raw_rows[i][slot, : taps + pending], cache.gate_rows[i][slot, :pending]
                rows = delta_rows(raw, gates, part.constants)
                delta_rule(rows, state, 0, rows.beta.shape[0])
            out[f"state {i}"] = state
            out[f"convolution {i}"] = cache.raw_rows[i][slot, pending : pending + taps].clone()
    newest = cache.ngram_rows.shape[1] - rejected
    out["n-gram rows"] = cache.ngram_rows[slot, newest - 3 * config.ngram_size : newest].clone()
    past, ratio = torch.arange(length), config.indexer_compress_ratio
    page_tokens = step.config.block_size
    pages, offsets = cache.page_table[slot, past // page_tokens], past % page_tokens
    first_rows, ring = past[::ratio][: length // ratio], cache.raw_keys[0].shape[1]
    for i in range(len(cache.keys)):
        name = f"{i}" if i < len(config.sparse_layers) else "of the drafter"
        out[f"keys {name}"] = cache.keys[i][pages, offsets]
        out[f"values {name}"] = cache.values[i][pages, offsets]
        blocks = cache.page_table[slot, first_rows // page_tokens], first_rows % page_tokens // ratio
        out[f"block keys {name}"] = cache.block_keys[i][blocks]
        out[f"open block {name}"] = cache.raw_keys[i][slot, past[length - length % ratio :] % ring]
    return out


def differences(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """Names that both have and that are not the same bits."""
    return [name for name in one if name in other and not torch.equal(one[name], other[name])]


@pytest.fixture(scope="module")
def plain(checkpoint: Checkpoint) -> dict[SamplingParams, tuple[list[int], dict[int, dict[str, Tensor]]]]:
    """By sampling: the text, prompt included, and by length what plain decoding leaves behind.

    The drafter's part comes from one draft a step that is always wrong: its rows are then written one by one.
    """
    out = {}
    for sampling in (GREEDY, MANY_EOS):
        step = make_step(checkpoint, engine_config(spec_tokens=0))
        states, text = {}, []
        for ids in decode(step, prefill(step, len(PROMPT), sampling), NEW + 16):
            states[int(step.state.length[0])] = committed(step)
            text = [*PROMPT, *ids]
        config = engine_config(spec_tokens=1)
        base = make_step(checkpoint, config)
        wrong = Scripted(base.model, base.sampler, config, from_text(text, 1, 0.0, 0, VOCAB, EOS))
        for _ in decode(wrong, prefill(wrong, len(PROMPT), sampling), NEW + 16):
            drafter = {name: t for name, t in committed(wrong).items() if name.endswith("drafter")}
            states[int(wrong.state.length[0])] |= drafter
        out[sampling] = text, states
    assert EOS in out[MANY_EOS][0][len(PROMPT) :]
    return out


@pytest.mark.parametrize("right", [0.0, 0.3, 0.7, 1.0])
@pytest.mark.parametrize("k", range(1, 8))
def test_ids_and_state_are_those_of_plain_decoding(
    checkpoint: Checkpoint,
    plain: dict[SamplingParams, tuple[list[int], dict[int, dict[str, Tensor]]]],
    k: int,
    right: float,
) -> None:
    """A state that kept a rejected row, or lost an accepted one, differs from here on and for good."""
    sampling = GREEDY if (k + int(10 * right)) % 3 == 0 else MANY_EOS
    text, states = plain[sampling]
    config = engine_config(spec_tokens=k)
    base = make_step(checkpoint, config)
    step = Scripted(base.model, base.sampler, config, from_text(text, k, right, 10 * k, VOCAB, EOS))
    counts = []
    for ids in decode(step, prefill(step, 5, sampling), NEW):
        counts.append(len(ids))
        assert ids == text[len(PROMPT) :][: len(ids)]
        assert int(step.state.length[0]) == len(PROMPT) + len(ids) - 1
        assert not differences(committed(step), states[int(step.state.length[0])])
    emitted = [b - a for a, b in pairwise(counts)]
    if right in (0.0, 1.0):
        assert set(emitted) == {1 if right == 0.0 else k + 1}
    elif k > 2:
        assert len(set(emitted)) > 1, "the script should give windows of different lengths"


@pytest.mark.parametrize("drafts", [(3, 0, 1, 1), (0, 4, 4), (4, 2, 4, 1, 3), (1, 1, 0, 4, 4)], ids=str)
def test_steps_may_differ_in_their_drafts(
    checkpoint: Checkpoint,
    plain: dict[SamplingParams, tuple[list[int], dict[int, dict[str, Tensor]]]],
    drafts: tuple[int, ...],
) -> None:
    """Rows that one step leaves pending are replayed by the next, however many it has; what was not proposed falls."""
    sampling = GREEDY if drafts[0] else MANY_EOS
    text, states = plain[sampling]
    config = engine_config(spec_tokens=4)
    base = make_step(checkpoint, config)
    step = Scripted(base.model, base.sampler, config, from_text(text, 4, 0.7, 11, VOCAB, EOS))
    counts = []
    for ids in decode(step, prefill(step, 5, sampling), NEW, drafts):
        counts.append(len(ids))
        assert ids == text[len(PROMPT) :][: len(ids)]
        assert not differences(committed(step), states[int(step.state.length[0])])
    emitted = [b - a for a, b in pairwise(counts)]
    proposed = [step.config.spec_tokens, *(drafts * NEW)[: len(emitted)]]
    verified = [min(before, now) for before, now in pairwise(proposed)]
    assert all(count <= most + 1 for count, most in zip(emitted, verified, strict=True))
    assert any(count == most + 1 > 1 for count, most in zip(emitted, verified, strict=True))


def test_the_comparison_sees_a_row_too_many(
    checkpoint: Checkpoint, plain: dict[SamplingParams, tuple[list[int], dict[int, dict[str, Tensor]]]]
) -> None:
    """An accepted count that is off by one shows in every kind of state; a test that passes should know."""
    text, states = plain[MANY_EOS]
    config = engine_config(spec_tokens=3)
    base = make_step(checkpoint, config)
    step = Scripted(base.model, base.sampler, config, from_text(text, 3, 0.0, 1, VOCAB, EOS))
    *_, ids = decode(step, prefill(step, 5, MANY_EOS), 8)
    step.state.pending[0] += 1
    step.state.rejected[0] -= 1
    wrong = differences(committed(step), states[int(step.state.length[0])])
    assert {"state 0", "convolution 0", "n-gram rows"} <= set(wrong)
    assert len(ids) >= 8


@pytest.mark.parametrize("chunk", [1, 2, 4, 7, 12])
def test_the_drafter_is_filled_during_prefill(checkpoint: Checkpoint, oracle: Oracle, chunk: int) -> None:
    """A drafter that saw only the last chunk drafts well on short prompts and badly on long ones."""
    whole, parts = (make_step(checkpoint, engine_config(spec_tokens=3)) for _ in range(2))
    first = prefill(whole, len(PROMPT), GREEDY)
    assert prefill(parts, chunk, GREEDY) == first
    assert not differences(committed(parts), committed(whole))
    assert torch.equal(parts.state.drafts[0], whole.state.drafts[0])
    following = torch.tensor([*PROMPT[1:], *first])
    with torch.no_grad():
        embedding = oracle.model.model.embed_tokens(following)
        _, mixed = oracle.drafter(oracle.residual(list(PROMPT)), embedding, *oracle.rope(len(PROMPT)))
        logits = oracle.model.lm_head(mixed[-1])
    best, second = logits.topk(2).values
    assert best - second > 1e-4, "choose a seed without a near-tie"
    assert int(whole.state.drafts[0, 0]) == int(logits.argmax())


# What follows goes through the engine: drafts are the true continuation.


@cache
def continuation(directory: Path) -> list[int]:
    """Prompt and greedy continuation without drafts."""
    engine = Engine(open_checkpoint(directory), engine_config(spec_tokens=0))
    return [*PROMPT, *serve(engine, Request("r", PROMPT, GREEDY, 40))["r"].ids]


def true_text(checkpoint: Checkpoint, tokens: int = 24) -> list[int]:
    return continuation(checkpoint.directory)[: len(PROMPT) + tokens]


def right_engine(checkpoint: Checkpoint, k: int, right: float = 1.0) -> Engine:
    propose = from_text(true_text(checkpoint, 40), k, right, 0, VOCAB, EOS)
    return scripted_engine(checkpoint, engine_config(spec_tokens=k), propose)


@pytest.mark.parametrize("others", [(), (96,)], ids=["one id", "second of two"])
@pytest.mark.parametrize("place", range(1, 7))
def test_a_stop_id_inside_an_accepted_window_ends_the_text(
    checkpoint: Checkpoint, place: int, others: tuple[int, ...]
) -> None:
    """C-SPEC-01: tokens after an end token came out when it was accepted in the middle of a draft."""
    target = true_text(checkpoint)[len(PROMPT) :][:7]
    assert len(set(target)) == 7
    assert not set(others) & set(target)
    request = Request("r", PROMPT, GREEDY, 20, (*others, target[place]))
    speculated = serve(right_engine(checkpoint, 5), request)["r"]
    assert speculated.ids == target[:place]
    assert speculated.finish_reason == "stop"
    assert speculated == serve(Engine(checkpoint, engine_config(spec_tokens=0)), request)["r"]


@pytest.mark.parametrize("max_tokens", range(1, 10))
def test_exactly_max_tokens_are_delivered(checkpoint: Checkpoint, max_tokens: int) -> None:
    """C-SPEC-02: fewer arrived than were counted when a window crossed the limit."""
    engine = right_engine(checkpoint, 3)
    served = serve(engine, Request("r", PROMPT, GREEDY, max_tokens))["r"]
    assert served.ids == true_text(checkpoint)[len(PROMPT) :][:max_tokens]
    assert served.finish_reason == "length"
    # the first token is the prompt's, not a verification's
    assert engine.counters.delivered == max_tokens - 1


def test_what_is_counted(checkpoint: Checkpoint) -> None:
    """C-SPEC-03: the mean accepted length counted drafts after the end token."""
    target = true_text(checkpoint)[len(PROMPT) :]
    engine = right_engine(checkpoint, 5)
    # one verification, five right drafts, the third is the end
    assert serve(engine, Request("r", PROMPT, GREEDY, 20, (target[3],)))["r"].ids == target[:3]
    assert (engine.counters.decode_steps, engine.counters.delivered) == (1, 3)
    assert isinstance(engine.step, Scripted)
    engine.step.propose = from_text([*PROMPT, *target], 5, 0.0, 0, VOCAB, EOS)
    # a second request, one verification, none right
    assert serve(engine, Request("s", PROMPT, GREEDY, 2))["s"].ids == target[:2]
    assert engine.counters.delivered_per_step == 2.0
    assert engine.counters.drafted == [2, 2, 2, 2, 2]
    assert engine.counters.accepted == [1, 1, 1, 0, 0]
    assert engine.counters.acceptance() == [0.5, 0.5, 0.5, 0.0, 0.0]


@pytest.mark.parametrize("k", [0, 3])
def test_logits_that_are_not_finite_end_their_own_request(checkpoint: Checkpoint, k: int) -> None:
    """C-H-01: NaN logits became token 0 until the limit. The token with the broken embedding is drawn mid-text."""
    target = true_text(checkpoint, 24)[len(PROMPT) :]
    place = next(i for i in range(8, 24) if target[i] not in (*PROMPT, *target[:i]))
    broken = target[place]
    other = Request("other", tuple(range(40, 60)), replace(GREEDY, forbidden_ids=(broken,)), 24)
    config = engine_config(spec_tokens=k, max_num_seqs=2)
    alone = serve(Engine(checkpoint, config), other)["other"]
    engine = Engine(checkpoint, config)
    engine.step.model.embedding[broken] = torch.nan
    served = serve(engine, Request("r", PROMPT, GREEDY, 24), other)
    assert served["r"].ids == target[: place + 1]
    assert served["r"].finish_reason == "error"
    assert served["other"] == alone
    assert engine.counters.delivered == place + 23
    # the slot that saw NaN serves the next request as if nothing had been
    assert serve(engine, replace(other, request_id="next"))["next"] == alone
    assert serve(engine, Request("at once", (broken,), GREEDY, 4))["at once"].finish_reason == "error"
