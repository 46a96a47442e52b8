"""Cases of speculative decoding through the engine, for every split of the text into steps of 1 to 4 tokens.

Drafts are scripted to be right for exactly as long as the split says; what is delivered in each step is checked, so a
split that did not happen fails the test. Names are those of the list of cases.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

import stepfloor
from stepfloor.config import EngineConfig
from stepfloor.engine import Engine
from stepfloor.request import Grammar, Piece, Request, SamplingParams
from stepfloor.tokenizer.tokenizer import Tokenizer
from stepfloor.weights.checkpoint import Checkpoint, open_checkpoint
from tests.scripted import Propose, Scripted, by_split, from_text
from tests.server.scripted import crossings, splits

SHIPPED = Path(stepfloor.__file__).parent / "shipped"
GREEDY = SamplingParams(temperature=0.0, seed=0)
K = 3
PROMPTS = (
    "def main", "import os\n", "class Queue:\n", "for i in range(", "# a list of", "x = [", "return self.", "\n\n",
    "if __name__", "try:\n", "with open(", "def test_", "from typing ", "raise ", "print(", "while True", "assert ",
    "yield ", "lambda x", "@dataclass\n",
)  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return open_checkpoint(SHIPPED)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(SHIPPED)


@pytest.fixture(scope="module")
def drafted(checkpoint: Checkpoint, tokenizer: Tokenizer) -> Engine:
    """One engine whose drafts each test scripts."""
    engine = make(checkpoint, tokenizer, K)
    engine.step = Scripted(engine.step.model, engine.step.sampler, engine.config, lambda slot, length: [0] * K)
    return engine


def make(checkpoint: Checkpoint, tokenizer: Tokenizer, k: int, sequences: int = 1) -> Engine:
    return Engine(checkpoint, EngineConfig(spec_tokens=k, max_num_seqs=sequences, max_model_len=640), tokenizer)


def run(engine: Engine, request: Request) -> list[Piece]:
    engine.submit(request)
    return list(engine.run())


def script(engine: Engine, request: Request, text: list[int], sizes: tuple[int, ...]) -> None:
    assert isinstance(engine.step, Scripted)
    whole = [*request.token_ids, *text]
    engine.step.propose = by_split(whole, len(request.token_ids), sizes, K, engine.vocab_size)
    engine.reset_counters()


def ids(pieces: list[Piece]) -> list[int]:
    return [token for piece in pieces for token in piece.token_ids]


def what(pieces: list[Piece]) -> tuple[list[int], str, str | None]:
    return ids(pieces), "".join(piece.text for piece in pieces), pieces[-1].finish_reason


def test_greedy_text_is_that_without_drafts(checkpoint: Checkpoint, tokenizer: Tokenizer, drafted: Engine) -> None:
    """C-SPEC-04: at temperature 0 the output with drafts differed from the output without."""
    request = Request("r", tuple(tokenizer.encode("def main")), GREEDY, 7)
    expected = run(make(checkpoint, tokenizer, 0), request)
    for sizes in splits(6):
        script(drafted, request, ids(expected), sizes)
        pieces = run(drafted, request)
        assert [len(piece.token_ids) for piece in pieces] == [1, *sizes]
        assert what(pieces) == what(expected)


def test_an_end_and_what_is_counted(checkpoint: Checkpoint, tokenizer: Tokenizer, drafted: Engine) -> None:
    """C-SPEC-01 and C-SPEC-03: tokens behind an end token came out, and were counted."""
    request = Request("r", tuple(tokenizer.encode("import os\n")), GREEDY, 30)
    text = ids(run(make(checkpoint, tokenizer, 0), request))
    place = next(i for i in range(3, 12) if text[i] not in text[:i])
    ending = replace(request, stop_token_ids=(text[place],))
    expected = what(run(make(checkpoint, tokenizer, 0), ending))
    assert expected[0] == text[:place]
    for sizes in crossings(place):
        script(drafted, request, text, sizes)
        assert what(run(drafted, ending)) == expected
        counters = drafted.counters
        # the first token is the prompt's; the end token is one of its step's
        assert (counters.decode_steps, counters.delivered) == (len(sizes), place)
        last = place - sum(sizes[:-1])
        wanted = [sum(size - 1 > i for size in sizes[:-1]) + (min(sizes[-1] - 1, last) > i) for i in range(K)]
        assert counters.accepted == wanted


def test_a_limit(checkpoint: Checkpoint, tokenizer: Tokenizer, drafted: Engine) -> None:
    """C-SPEC-02: fewer tokens arrived than were counted."""
    request = Request("r", tuple(tokenizer.encode("class Queue:\n")), GREEDY, 5)
    longer = ids(run(make(checkpoint, tokenizer, 0), replace(request, max_tokens=12)))
    for sizes in crossings(4):
        script(drafted, request, longer, sizes)
        got, _, reason = what(run(drafted, request))
        assert (got, reason, drafted.counters.delivered) == (longer[:5], "length", 4)


def test_a_grammar_behind_reasoning(checkpoint: Checkpoint, tokenizer: Tokenizer, drafted: Engine) -> None:
    """C-SPEC-06: the grammar did not judge drafts behind the end of the reasoning in the same step."""
    request = Request("r", tuple(tokenizer.encode("def main")), GREEDY, 24, (2, 0))
    free = ids(run(make(checkpoint, tokenizer, 0), request))
    bound = replace(request, grammar=Grammar("regex", "[0-9]{3}", tokenizer.decode(free[2:4])))
    expected = run(make(checkpoint, tokenizer, 0), bound)
    text = ids(expected)
    assert 5 <= len(text) <= 7
    assert "".join(piece.text for piece in expected)[-3:].isdecimal()
    for sizes in splits(len(text) - 1):
        script(drafted, bound, text, sizes)
        pieces = run(drafted, bound)
        assert what(pieces) == what(expected)
        assert [len(piece.token_ids) for piece in pieces if piece.token_ids] == [1, *sizes]


def test_logprobs(checkpoint: Checkpoint, tokenizer: Tokenizer, drafted: Engine) -> None:
    """C-SPEC-08: every token had log-probability 0.0 when drafting was on."""
    request = Request("r", tuple(tokenizer.encode("def é(")), GREEDY, 6, logprobs=5)
    expected = run(make(checkpoint, tokenizer, 0), request)
    for sizes in splits(5):
        script(drafted, request, ids(expected), sizes)
        pieces = run(drafted, request)
        assert [e for p in pieces for e in p.logprobs] == [e for p in expected for e in p.logprobs]


@pytest.mark.parametrize(
    ("prompts", "tokens"), [(3, 16), pytest.param(20, 512, marks=pytest.mark.slow)], ids=["quick", "slow"]
)
def test_twenty_prompts(checkpoint: Checkpoint, tokenizer: Tokenizer, prompts: int, tokens: int) -> None:
    """C-SPEC-04 as it is stated: k = 0, 1, 2, 3 on the shipped model, and a stub right with probability 0, 0.5, 1."""
    wanted = [Request(str(i), tuple(tokenizer.encode(p)), GREEDY, tokens) for i, p in enumerate(PROMPTS[:prompts])]

    def texts(engine: Engine) -> dict[str, list[int]]:
        for request in wanted:
            engine.submit(request)
        got: dict[str, list[int]] = {request.request_id: [] for request in wanted}
        for piece in engine.run():
            got[piece.request_id] += piece.token_ids
        return got

    plain = texts(make(checkpoint, tokenizer, 0, prompts))
    assert all(len(text) == tokens for text in plain.values())
    for k in (1, 2, 3):
        assert texts(make(checkpoint, tokenizer, k, prompts)) == plain
    # All prompts in one batch: a pass costs far more than a row of it. One sequence alone is what the tests above run.
    for right in (0.0, 0.5, 1.0):
        engine = make(checkpoint, tokenizer, K, prompts)
        # slots are given in the order of joining, and there is one for every request
        scripts = [
            from_text([*r.token_ids, *plain[r.request_id]], K, right, i, engine.vocab_size, 2)
            for i, r in enumerate(wanted)
        ]
        propose = partial(propose_by_slot, scripts)
        engine.step = Scripted(engine.step.model, engine.step.sampler, engine.config, propose)
        assert texts(engine) == plain
        # a script of another slot would show here
        assert right < 1.0 or engine.counters.accepted[K - 1] >= prompts * ((tokens - 1) // (K + 1))
        assert right > 0.0 or sum(engine.counters.accepted) == 0


def propose_by_slot(scripts: list[Propose], slot: int, length: int) -> list[int]:
    return scripts[slot](slot, length)
