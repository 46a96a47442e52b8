"""Prompts: exact lengths, no two alike, the same ones for the same seed."""

import ast
import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

import stepfloor
from stepfloor.errors import UserError
from stepfloor.tools.bench.arrivals import constant, poisson, read_trace
from stepfloor.tools.bench.prompts import MEASURED, WARM_UP, Lengths, Prompt, PromptPlan, make_prompts, write_code
from stepfloor.tools.bench.tokens import LocalTokens, PlainIds, Tokens

SHIPPED = Path(stepfloor.__file__).parent / "shipped"


class WithTemplate(LocalTokens):
    """The shipped tokenizer behind a template of nine tokens, as a server would count it."""

    async def count_chat(self, messages: Sequence[Mapping[str, str]]) -> int | None:
        return 9 + sum([len(await self.encode(message["content"])) for message in messages])


def plan(kind: str = "random", chat: bool = False, **more: object) -> PromptPlan:
    given = {"seed": 3, "input_lengths": Lengths("uniform", 40, 90), "output_lengths": Lengths("fixed", 8, 8), **more}
    return PromptPlan(kind, chat, **given)


def make(wanted: PromptPlan, count: int = 6, tokens: Tokens | None = None, stream: int = MEASURED) -> list[Prompt]:
    return asyncio.run(make_prompts(wanted, count, tokens, stream))


@pytest.mark.parametrize("kind", ["random", "unique", "code"])
@pytest.mark.parametrize("chat", [False, True])
def test_lengths_are_exact_and_prompts_differ(kind: str, chat: bool) -> None:
    """Guards against: prompts of about the wanted length, and prompts a cache knows."""
    tokens = WithTemplate(SHIPPED)
    made = make(plan(kind, chat), tokens=tokens) + make(plan(kind, chat), tokens=tokens, stream=WARM_UP)
    assert len({prompt.hash for prompt in made}) == len(made)
    for prompt in made:
        assert prompt.exact
        assert 40 <= (prompt.tokens or 0) <= 90
        if chat:
            assert asyncio.run(tokens.count_chat(prompt.value)) == prompt.tokens
        else:
            assert len(prompt.value) == prompt.tokens
    assert [p.value for p in make(plan(kind, chat), tokens=tokens)] == [p.value for p in made[:6]]
    assert make(plan(kind, chat, seed=4), tokens=tokens)[0].value != made[0].value


def test_unique_prompts_hold_no_token_twice() -> None:
    """Guards against: repeated tokens, which hide the reads of an n-gram table."""
    for prompt in make(plan("unique"), tokens=PlainIds(5000)):
        assert len(set(prompt.value)) == len(prompt.value)


def test_prefixes_are_shared_as_far_as_asked() -> None:
    """Guards against: a prefix-sharing ratio that is another one at the server."""
    lengths = Lengths("fixed", 80, 80)
    made = make(plan(prefix_share=0.25, input_lengths=lengths), tokens=PlainIds(5000))
    assert len({prompt.value[:20] for prompt in made}) == 1
    assert len({prompt.value[20:22] for prompt in made}) == len(made)
    other = make(plan(prefix_share=0.25, input_lengths=lengths), tokens=PlainIds(5000), stream=WARM_UP)
    assert other[0].value[:20] != made[0].value[:20]


def test_lengths_that_cannot_be_counted_are_said_to_be() -> None:
    """Guards against: a guessed length of a chat prompt whose template is unknown."""
    for prompt in make(plan(chat=True), tokens=LocalTokens(SHIPPED)):
        assert not prompt.exact
        assert prompt.tokens is None
    with pytest.raises(UserError, match=r"--tokenizer .* --vocab-size"):
        make(plan())
    with pytest.raises(UserError, match="shorter than the template"):
        make(plan(chat=True, input_lengths=Lengths("fixed", 5, 5)), tokens=WithTemplate(SHIPPED))


def test_files_of_prompts(tmp_path: Path) -> None:
    """Guards against: a file's prompt used twice, its lengths ignored, a bad line met without its number."""
    sharegpt = tmp_path / "s.json"
    turns = [
        [{"from": "human", "value": f"What is {i}?"}, {"from": "gpt", "value": f"A number, {i}."}] for i in range(8)
    ]
    sharegpt.write_text(json.dumps([{"conversations": turn} for turn in turns]))
    own = {"output_lengths": None}
    made = make(plan("sharegpt", file=sharegpt, **own), tokens=LocalTokens(SHIPPED))
    warm = make(plan("sharegpt", file=sharegpt, **own), 2, LocalTokens(SHIPPED), WARM_UP)
    assert len({p.hash for p in made + warm}) == 8
    assert all(p.exact and p.output_tokens > 1 for p in made)
    with pytest.raises(UserError, match="8 different prompts and 9 are wanted"):
        make(plan("sharegpt", file=sharegpt, **own), 9, LocalTokens(SHIPPED))
    with pytest.raises(UserError, match="--output-len"):
        make(plan("sharegpt", file=sharegpt, **own))
    lines = tmp_path / "p.jsonl"
    lines.write_text('{"prompt": "One", "output_len": 5}\n{"messages": [{"role": "user", "content": "Two"}]}\n')
    with pytest.raises(UserError, match="--route chat"):
        make(plan("jsonl", file=lines), 2)
    chat = make(plan("jsonl", True, file=lines), 2)
    assert {prompt.value[0]["content"] for prompt in chat} == {"One", "Two"}
    assert not chat[0].exact
    lines.write_text('{"prompt": "One"}\n{"text": "Two"}\n')
    with pytest.raises(UserError, match="line 2"):
        make(plan("jsonl", file=lines), 2)


def test_written_code_is_code() -> None:
    """Guards against: generated text that no model would take for Python."""
    tree = ast.parse(write_code(4000, np.random.default_rng(0)))
    assert len(tree.body) > 5


def test_lengths_are_read_as_written() -> None:
    """Guards against: a distribution that is another one than was asked for."""
    random = np.random.default_rng(0)
    assert Lengths.parse("2k", "--x").draw(2, random) == [2048, 2048]
    drawn = Lengths.parse("lognormal:500:0.5:1k", "--x").draw(4001, random)
    # the median of 4001 draws is within 3 standard errors, 1.25 * 0.5 / sqrt(4001), of the distribution's
    assert abs(np.log(np.median(drawn) / 500)) < 3 * 1.25 * 0.5 / 4001**0.5
    assert max(drawn) == 1024
    for bad in ("0", "many", "uniform:9:3", "lognormal:5", "normal:1:2"):
        with pytest.raises(UserError, match="--x wants tokens like"):
            Lengths.parse(bad, "--x")


def test_arrivals(tmp_path: Path) -> None:
    """Guards against: a rate that is another one than asked for, times that change from run to run."""
    assert constant(3, 2.0) == (0.0, 0.5, 1.0)
    times = poisson(4000, 10.0, 1)
    assert times == poisson(4000, 10.0, 1)
    gaps = np.diff(times)
    # mean and standard deviation of an exponential are equal; 3 standard errors of the mean are 3/sqrt(4000)
    assert abs(gaps.mean() * 10 - 1) < 3 / 4000**0.5
    assert abs(gaps.std() / gaps.mean() - 1) < 0.1
    assert np.diff(poisson(4000, 10.0, 1, burstiness=0.25)).std() * 10 > 1.7  # 1/sqrt(0.25) is 2
    trace = tmp_path / "t"
    rows = [{"timestamp": 1000, "input_length": 5}, {"timestamp": 1500, "input_length": 9}]
    trace.write_text("\n".join(map(json.dumps, rows)))
    assert read_trace(trace).at_s == (0.0, 0.5)
    assert read_trace(trace).input_tokens == (5, 9)
    trace.write_text("0\n2.5\n1\n")
    with pytest.raises(UserError, match="ascending"):
        read_trace(trace)
