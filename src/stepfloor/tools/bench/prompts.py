"""Prompts of known length, each another, and the same ones again for the same seed.

random    ids drawn one by one from the vocabulary
unique    ids drawn without putting back, so that no n-gram comes twice while the vocabulary lasts: a table of n-grams
          is read as it is by real text at its most varied
code      Python that nobody wrote
sharegpt  first turns of a ShareGPT file; the answers' lengths are those of the replies in it
jsonl     lines of a file: {"prompt": ...} or {"messages": [...]}, with output_len if wanted

On the completions route a prompt is sent as ids, and its length is exact. On the chat route it is text, and is fitted
until the server's own count of it, template included, is what was asked for.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stepfloor.errors import UserError
from stepfloor.tools.bench.tokens import Tokens

KINDS = ("random", "unique", "code", "sharegpt", "jsonl")
FITS = 12
# streams of random numbers of one seed
MEASURED, WARM_UP = 0, 1
_LENGTHS, _PREFIX, _BODY = 0, 1, 2
CHARS_PER_TOKEN = 6


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of token counts: N, uniform:LOW:HIGH, or lognormal:MEDIAN:SIGMA with an optional :MOST."""

    kind: str
    low: int
    high: int
    sigma: float = 0.0

    @classmethod
    def parse(cls, text: str, option: str) -> "Lengths":
        """Read it as it is written on the command line; k is 1024. Raises UserError."""
        kind, *parts = text.split(":") if ":" in text else ("fixed", text)
        try:
            if kind == "fixed":
                lengths = cls(kind, tokens_of(parts[0]), tokens_of(parts[0]))
            elif kind == "uniform" and len(parts) == 2:
                lengths = cls(kind, tokens_of(parts[0]), tokens_of(parts[1]))
            elif kind == "lognormal" and len(parts) in (2, 3):
                most = tokens_of(parts[2]) if len(parts) == 3 else 1 << 20
                lengths = cls(kind, tokens_of(parts[0]), most, float(parts[1]))
            else:
                raise ValueError(kind)
        except ValueError:
            lengths = cls("", 0, 0)
        if not 1 <= lengths.low <= lengths.high or lengths.sigma < 0:
            raise UserError(f"{option} wants tokens like 512, uniform:128:1k or lognormal:512:0.5:4k; got {text!r}")
        return lengths

    def draw(self, count: int, random: np.random.Generator) -> list[int]:
        """So many lengths."""
        if self.kind == "lognormal":
            drawn = np.rint(self.low * np.exp(self.sigma * random.standard_normal(count)))
            return np.clip(drawn, 1, self.high).astype(int).tolist()
        return random.integers(self.low, self.high + 1, count).tolist()


def tokens_of(text: str) -> int:
    """A count of tokens, 512 or 16k; k is 1024. Raises ValueError."""
    text = text.strip().lower()
    return int(text[:-1]) * 1024 if text.endswith("k") else int(text)


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """Which prompts are wanted. input_tokens and output_tokens, if given, are one for each prompt (of a trace)."""

    kind: str
    chat: bool
    seed: int
    input_lengths: Lengths
    output_lengths: Lengths | None
    prefix_share: float = 0.0
    file: Path | None = None
    input_tokens: tuple[int, ...] | None = None
    output_tokens: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: ids or messages or text. tokens is its length where it is known, template included."""

    value: tuple[int, ...] | str | tuple[Mapping[str, str], ...]
    tokens: int | None
    output_tokens: int
    exact: bool

    @property
    def hash(self) -> str:
        """Names the prompt in a result file."""
        return hashlib.sha256(json.dumps(self.value).encode()).hexdigest()[:16]


async def make_prompts(plan: PromptPlan, count: int, tokens: Tokens | None, stream: int) -> list[Prompt]:
    """The prompts of a stream, MEASURED or WARM_UP: no two are equal, and the streams share none.

    Raises UserError for what cannot be had: too few lines in a file, text without a tokenizer.
    """
    if count == 0:
        return []
    if plan.kind in ("sharegpt", "jsonl"):
        return await _from_file(plan, count, tokens, stream)
    if tokens is None:
        raise UserError(
            f"{plan.kind} prompts of an exact length need a tokenizer, and this server has no /tokenize; pass "
            "--tokenizer with its tokenizer.json, or --vocab-size for random ids on the completions route"
        )
    random = np.random.default_rng([plan.seed, stream, _LENGTHS])
    inputs = list(plan.input_tokens or ())[:count] or plan.input_lengths.draw(count, random)
    if plan.output_lengths is None:
        raise UserError(f"{plan.kind} prompts have no answers of their own; pass --output-len")
    outputs = list(plan.output_tokens or ())[:count] or plan.output_lengths.draw(count, random)
    source = await _Source.make(plan, tokens)
    prefix = await source.ids(round(plan.prefix_share * max(inputs)), [plan.seed, stream, _PREFIX])
    prompts = []
    for index, (length, output) in enumerate(zip(inputs, outputs, strict=True)):
        shared = prefix[: round(plan.prefix_share * length)]
        # text put together from pieces may come out shorter
        spare = length // 16 + 16 if plan.chat else 0
        own = await source.ids(length - len(shared) + spare, [plan.seed, stream, _BODY, index])
        if plan.chat:
            prompts.append(await _fit_chat(shared + own, length, output, tokens))
        else:
            prompts.append(Prompt(tuple(shared + own), length, output, exact=True))
    return prompts


@dataclass(frozen=True, slots=True)
class _Source:
    """Makes ids of one kind."""

    kind: str
    pool: np.ndarray[Any, np.dtype[np.int64]]
    tokens: Tokens

    @classmethod
    async def make(cls, plan: PromptPlan, tokens: Tokens) -> "_Source":
        ids = tokens.ids
        if plan.chat and plan.kind != "code":
            # words with a blank before them: put together as text they are the same tokens again
            texts = [(i, await tokens.decode([i])) for i in ids]
            ids = tuple(i for i, text in texts if text[:1] == " " and text[1:].isascii() and text[1:].isalpha()) or ids
        return cls(plan.kind, np.array(ids, dtype=np.int64), tokens)

    async def ids(self, count: int, seed: Sequence[int]) -> list[int]:
        random = np.random.default_rng(seed)
        if self.kind == "random":
            return random.choice(self.pool, count).tolist()
        if self.kind == "unique":
            rounds = -(-count // len(self.pool))
            return np.concatenate([random.permutation(self.pool) for _ in range(max(1, rounds))])[:count].tolist()
        ids: list[int] = []
        chars = CHARS_PER_TOKEN * count
        while len(ids) < count:
            ids = await self.tokens.encode(write_code(chars, np.random.default_rng(seed)))
            chars *= 2
        return ids[:count]


async def _fit_chat(ids: list[int], length: int, output: int, tokens: Tokens) -> Prompt:
    """A user's turn that is `length` tokens with its template; the nearest that was found, if none is."""
    keep, best, best_miss = length, None, 1 << 30
    for _ in range(FITS):
        content = (await tokens.decode(ids[:keep])).strip()
        messages = ({"role": "user", "content": content},)
        count = await tokens.count_chat(messages)
        if count is None:
            return Prompt(messages, None, output, exact=False)
        if abs(length - count) < best_miss:
            best, best_miss = Prompt(messages, count, output, exact=count == length), abs(length - count)
        if count == length:
            break
        keep += length - count
        if not 0 < keep <= len(ids):
            break
    if best is None or best.tokens is None or (best.tokens > length and keep <= 0):
        raise UserError(
            f"a chat prompt of {length} tokens is shorter than the template alone; pass a larger --input-len"
        )
    return best


async def _from_file(plan: PromptPlan, count: int, tokens: Tokens | None, stream: int) -> list[Prompt]:
    if plan.file is None:
        raise UserError(f"{plan.kind} prompts are read from a file; pass --dataset-path")
    rows = _read_sharegpt(plan.file) if plan.kind == "sharegpt" else _read_jsonl(plan.file)
    rows = list({json.dumps(row.value): row for row in rows}.values())
    order = np.random.default_rng([plan.seed, _BODY]).permutation(len(rows))
    # warm-up takes its prompts from the other end
    chosen = [rows[i] for i in (order if stream == MEASURED else order[::-1])[:count]]
    if len(chosen) < count:
        raise UserError(
            f"{plan.file} has {len(rows)} different prompts and {count} are wanted; pass a smaller --num-prompts"
        )
    lengths = (plan.output_lengths or Lengths("fixed", 1, 1)).draw(count, np.random.default_rng([plan.seed, stream]))
    return [await _file_prompt(plan, row, length, tokens) for row, length in zip(chosen, lengths, strict=True)]


@dataclass(frozen=True, slots=True)
class _Row:
    value: str | tuple[Mapping[str, str], ...] | tuple[int, ...]
    reply: str | None = None
    output: int | None = None


async def _file_prompt(plan: PromptPlan, row: _Row, drawn: int, tokens: Tokens | None) -> Prompt:
    output = drawn if plan.output_lengths is not None else row.output
    if output is None and row.reply is not None and tokens is not None:
        output = len(await tokens.encode(row.reply)) or None
    if output is None:
        raise UserError("the length of an answer is neither in the file nor countable; pass --output-len")
    value, known = row.value, None
    if plan.chat:
        if isinstance(value, tuple) and value and isinstance(value[0], int):
            raise UserError("a prompt of ids cannot be sent on the chat route; pass --route completions")
        value = ({"role": "user", "content": value},) if isinstance(value, str) else value
        known = None if tokens is None else await tokens.count_chat([m for m in value if not isinstance(m, int)])
    elif isinstance(value, str):
        value = value if tokens is None else tuple(await tokens.encode(value))
        known = None if isinstance(value, str) else len(value)
    elif value and not isinstance(value[0], int):
        raise UserError("messages are sent on the chat route; pass --route chat")
    else:
        known = len(value)
    return Prompt(value, known, output, exact=known is not None)


def _read_sharegpt(path: Path) -> list[_Row]:
    """First human turns with their replies; as vLLM's bench, without those under four characters."""
    try:
        talks = json.loads(path.read_text(encoding="utf-8"))
        turns = [talk.get("conversations") or talk.get("conversation") or () for talk in talks]
        pairs = [(t[0]["value"], t[1]["value"]) for t in turns if len(t) >= 2]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        wanted = '[{"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}]'
        raise UserError(f"{path} is not ShareGPT's JSON, {wanted} ({type(error).__name__}: {error})") from None
    return [_Row(ask, reply) for ask, reply in pairs if min(len(ask), len(reply)) >= 4]


def _read_jsonl(path: Path) -> list[_Row]:
    rows = []
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            if not line.strip():
                continue
            raw = json.loads(line)
            value = raw["messages"] if "messages" in raw else raw["prompt"]
            output = next(
                (int(raw[name]) for name in ("output_len", "output_tokens", "max_tokens") if name in raw), None
            )
            rows.append(_Row(value if isinstance(value, str) else tuple(value), None, output))
    except (OSError, ValueError, KeyError, TypeError) as error:
        wanted = '{"prompt": "..."} or {"messages": [...]}'
        raise UserError(f"{path} wants on every line {wanted}; line {len(rows) + 1}: {error!r}") from None
    return rows


# fmt: off
_NOUNS = ("buffer", "chunk", "index", "node", "value", "token", "frame", "edge", "queue", "shard", "offset", "record")
_VERBS = ("merge", "split", "read", "write", "sort", "find", "count", "drop", "push", "scan", "hash", "bind", "pack")
# fmt: on


def write_code(chars: int, random: np.random.Generator) -> str:
    """At least so many characters of Python that parses: functions with loops, branches and docstrings."""
    parts: list[str] = []
    size = 0
    while size < chars:
        verb, noun, other = random.choice(_VERBS), random.choice(_NOUNS), random.choice(_NOUNS)
        number, limit, step = random.integers(1, 10_000, 3)
        part = (
            f"def {verb}_{noun}_{number}({other}s, limit={limit}):\n"
            f'    """{verb.capitalize()} every {noun} below {limit} and say how many {other}s are left."""\n'
            f"    {noun} = {{}}\n"
            f"    for position, {other} in enumerate({other}s):\n"
            f"        if {other} % {step} == {number % step} and position < limit:\n"
            f"            {noun}[{other}] = position * {random.integers(2, 99)} + {random.integers(1, 9999)}\n"
            f"        elif len({noun}) > {random.integers(1, 999)}:\n"
            f"            {noun}.pop({other} ^ {random.integers(1, 9999)}, None)\n"
            f"    return sorted({noun}.items())[:{random.integers(1, 500)}]\n\n\n"
        )
        parts.append(part)
        size += len(part)
    return "".join(parts)
