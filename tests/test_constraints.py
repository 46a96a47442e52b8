"""Grammars, min_tokens and log-probabilities: the same for every number of drafts, beside others or alone."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import stepfloor
from stepfloor.config import EngineConfig
from stepfloor.engine import Engine
from stepfloor.errors import UserError
from stepfloor.request import Grammar, Piece, Request, SamplingParams
from stepfloor.sampler.grammar import Constraint, GrammarCompiler
from stepfloor.tokenizer.tokenizer import Tokenizer
from stepfloor.weights.checkpoint import Checkpoint, open_checkpoint
from tests.scripted import Scripted, from_text

SHIPPED = Path(stepfloor.__file__).parent / "shipped"
GREEDY = SamplingParams(temperature=0.0, seed=0)
CITY = json.dumps(
    {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}},
        "required": ["city"],
        "additionalProperties": False,
    }
)


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return open_checkpoint(SHIPPED)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(SHIPPED)


def make(checkpoint: Checkpoint, tokenizer: Tokenizer, k: int, sequences: int = 1) -> Engine:
    return Engine(checkpoint, EngineConfig(spec_tokens=k, max_num_seqs=sequences, max_model_len=512), tokenizer)


def run(engine: Engine, *requests: Request) -> dict[str, list[Piece]]:
    for request in requests:
        engine.submit(request)
    pieces: dict[str, list[Piece]] = {request.request_id: [] for request in requests}
    for piece in engine.run():
        pieces[piece.request_id].append(piece)
    assert not engine.constraints
    return pieces


def text(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def ids(pieces: list[Piece]) -> list[int]:
    return [token for piece in pieces for token in piece.token_ids]


def request(tokenizer: Tokenizer, prompt: str, name: str = "r", **fields: object) -> Request:
    given = {"sampling": GREEDY, "max_tokens": 48, "stop_token_ids": (2, 0), **fields}
    return Request(name, tuple(tokenizer.encode(prompt)), **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(temperature=1.0, seed=3)])
def test_a_schema_holds_for_every_number_of_drafts(
    checkpoint: Checkpoint, tokenizer: Tokenizer, sampling: SamplingParams
) -> None:
    """The model does not know what JSON is wanted; whatever it drafts, what comes validates."""
    texts = []
    for k in (0, 1, 3):
        one = request(tokenizer, "def main", grammar=Grammar("json_schema", CITY), sampling=sampling)
        pieces = run(make(checkpoint, tokenizer, k), one)["r"]
        value = json.loads(text(pieces))
        assert list(value) == ["city"]
        assert pieces[-1].finish_reason == "stop"
        texts.append(text(pieces))
    assert sampling is not GREEDY or len(set(texts)) == 1


def test_a_grammar_leaves_others_alone(checkpoint: Checkpoint, tokenizer: Tokenizer) -> None:
    """In one batch, a request with a grammar runs every other step; the one beside it gives what it gives alone."""
    free = request(tokenizer, "import os\n", "free")
    bound = request(tokenizer, "def main", "bound", grammar=Grammar("regex", "[0-9]{3}-[0-9]{4}"))
    both = run(make(checkpoint, tokenizer, 3, 2), free, bound)
    assert ids(both["free"]) == ids(run(make(checkpoint, tokenizer, 3), free)["free"])
    assert ids(both["bound"]) == ids(run(make(checkpoint, tokenizer, 0), bound)["bound"])
    assert len(text(both["bound"])) == 8


def test_drafts_behind_the_end_of_the_reasoning_are_judged_by_the_grammar(tokenizer: Tokenizer) -> None:
    """C-SPEC-06: one step drafts </think>, {, "location", :; the schema knows the key city alone."""
    grammar = Grammar("json_schema", CITY, after="</think>")
    compiler = GrammarCompiler(tokenizer.token_bytes, tokenizer.vocab_size, tuple(tokenizer.special_ids))
    one = Request("r", (1,), grammar=grammar, stop_token_ids=(2,))
    constraint = Constraint(one, compiler.compile(grammar, (2,)), tokenizer.token_bytes, tokenizer.vocab_size)
    (end,), (brace,), (quote,) = (tokenizer.encode(text) for text in ("</think>", "{", '"'))
    city, location = (tokenizer.encode(text)[0] for text in ("city", "location"))
    constraint.drafts = (end, brace, quote, location)
    for _ in range(2):  # making masks changes nothing
        masks = constraint.masks(5)
        allowed = [[int(row[t // 32]) >> (t % 32) & 1 for t in (end, brace, quote, city, location)] for row in masks]
        assert allowed[0] == [1, 1, 1, 1, 1], "the reasoning is not constrained"
        assert allowed[1] == [0, 1, 0, 0, 0]
        assert allowed[2] == [0, 0, 1, 0, 0]
        assert allowed[3] == [0, 0, 0, 1, 0], "the wrong key was allowed"
    constraint.advance((end, brace, quote, *tokenizer.encode("city")))
    constraint.drafts = ()
    assert int(constraint.masks(1)[0, quote // 32]) >> (quote % 32) & 1


def test_a_grammar_that_begins_in_the_middle_of_a_step(checkpoint: Checkpoint, tokenizer: Tokenizer) -> None:
    """Accepted drafts cross the place where the grammar begins: the text before it is free, behind it bound."""
    one = request(tokenizer, "def main", max_tokens=24)
    free = run(make(checkpoint, tokenizer, 0), one)["r"]
    after = tokenizer.decode(ids(free)[9:12])
    bound = replace(one, grammar=Grammar("regex", "[0-9]{5}", after), max_tokens=40)
    texts = set()
    for k in range(5):
        engine = make(checkpoint, tokenizer, k)
        script = [*one.token_ids, *ids(free)]
        propose = from_text(script, k, 1.0, 0, engine.vocab_size, 0)
        engine.step = Scripted(engine.step.model, engine.step.sampler, engine.config, propose)
        texts.add(text(run(engine, bound)["r"]))
    (constrained,) = texts
    start = text(free).index(after) + len(after)
    assert constrained[:start] == text(free)[:start]
    assert constrained[start:].isdecimal()
    assert len(constrained) == start + 5


@pytest.mark.parametrize("k", [0, 3])
def test_no_stop_before_min_tokens(checkpoint: Checkpoint, tokenizer: Tokenizer, k: int) -> None:
    """The stop id is what the model wants at once; it may not have it, and takes it when it may."""
    eager = SamplingParams(temperature=0.0, seed=0, logit_bias=((2, 100.0),))
    for least in (1, 2, 5, 7):
        pieces = run(make(checkpoint, tokenizer, k), request(tokenizer, "a = ", sampling=eager, min_tokens=least))["r"]
        assert len(ids(pieces)) == least
        assert (pieces[-1].finish_reason, pieces[-1].stop_reason) == ("stop", 2)


def test_logprobs_are_the_targets_for_every_number_of_drafts(checkpoint: Checkpoint, tokenizer: Tokenizer) -> None:
    """C-SPEC-08: every token had log-probability 0.0 when drafting was on."""
    runs = []
    for k in (0, 3):
        # penalties and temperature must not show: the distribution is the model's own
        params = SamplingParams(temperature=0.0, seed=0, presence_penalty=0.5)
        one = request(tokenizer, "def é(", logprobs=5, sampling=params)
        other = request(tokenizer, "import os\n", "other")
        pieces = run(make(checkpoint, tokenizer, k, 2), one, other)
        assert not any(piece.logprobs for piece in pieces["other"])
        entries = [entry for piece in pieces["r"] for entry in piece.logprobs]
        assert len(entries) == len(ids(pieces["r"]))
        for token, entry in zip(ids(pieces["r"]), entries, strict=True):
            assert entry.logprob < 0
            assert len(entry.top) == 5
            assert all(a[1] >= b[1] for a, b in zip(entry.top, entry.top[1:], strict=False))
            assert dict(entry.top).get(token, entry.logprob) == entry.logprob
        runs.append((ids(pieces["r"]), entries))
    assert runs[0] == runs[1]  # decode rows have the same bits for every k on the CPU


@pytest.mark.parametrize(
    "grammar", [Grammar("json_schema", '{"type": 5}'), Grammar("regex", "(["), Grammar("ebnf", "root ::= x")]
)
def test_broken_grammars_are_refused(checkpoint: Checkpoint, tokenizer: Tokenizer, grammar: Grammar) -> None:
    engine = make(checkpoint, tokenizer, 0)
    with pytest.raises(UserError, match=f"the {grammar.kind} cannot be compiled"):
        engine.submit(request(tokenizer, "a", grammar=grammar))
    assert not engine.has_work()
    assert not engine.constraints
    run(engine, request(tokenizer, "a"))


def test_a_grammar_that_allows_nothing_ends_in_an_error(checkpoint: Checkpoint, tokenizer: Tokenizer) -> None:
    """C-H-01, over-constrained: all logits are -inf, and the request ends with the step's number; others go on."""
    forbidden = SamplingParams(temperature=0.0, seed=0, forbidden_ids=tuple(tokenizer.encode("7")))
    bound = request(tokenizer, "a", "bound", grammar=Grammar("regex", "7"), sampling=forbidden)
    pieces = run(make(checkpoint, tokenizer, 2, 2), bound, request(tokenizer, "import os\n", "free"))
    assert pieces["bound"][-1].finish_reason == "error"
    assert "step" in (pieces["bound"][-1].error or "")
    assert len(ids(pieces["free"])) == 48


def test_masks_are_bits_of_tokens() -> None:
    """The step reads bit i of word w as token 32 w + i, also where the vocabulary is no multiple of 32."""
    for stop in (0, 31, 32, 63, 96):
        constraint = Constraint(Request("r", (1,), min_tokens=2, stop_token_ids=(stop,)), None, None, 97)
        constraint.drafts = (5, 6)
        masks = torch.from_numpy(constraint.masks(3))
        bits = ((masks[..., None] >> torch.arange(32, dtype=torch.int32)) & 1).flatten(1)[:, :97]
        assert bits.sum(1).tolist() == [96, 96, 97]
        assert bits[0, stop] == bits[1, stop] == 0
