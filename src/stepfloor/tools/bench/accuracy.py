"""bench accuracy: a pinned set of questions, greedily answered, each item on record, and nothing about speed.

Speed and accuracy are measured apart: here requests may run together, wait and repeat warm prefixes as they like. Two
runs over the same set are compared item by item with `bench compare` (exact McNemar), which refuses other sets.
"""

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepfloor.errors import UserError
from stepfloor.tools.bench.answers import answer_of, is_right
from stepfloor.tools.bench.client import Client
from stepfloor.tools.bench.metrics import looped
from stepfloor.tools.bench.proportions import wilson
from stepfloor.tools.bench.questions import Profile, Question
from stepfloor.tools.bench.result import Flag, Item, Metric, Result
from stepfloor.tools.bench.target import find_target

SEED = 0
WARM_UP_PROMPTS = 16


@dataclass(frozen=True, slots=True)
class Plan:
    """How the questions are asked.

    max_tokens  most tokens of an answer; None takes the profile's
    thinking    what chat templates are told as enable_thinking; None says nothing
    """

    concurrency: int = 4
    max_tokens: int | None = None
    thinking: bool | None = None


async def measure_accuracy(
    client: Client,
    profile: Profile,
    plan: Plan,
    model: str | None = None,
    on_item: Callable[[Item], None] | None = None,
) -> Result:
    """Ask every question and judge the answers. Stopped early, it keeps what it has and says so.

    Raises UserError if nobody answers at the client's URL or the model is another.
    """
    if plan.concurrency < 1:
        raise UserError(f"--concurrency is at least 1; got {plan.concurrency}")
    found = await find_target(client, model)
    items: dict[str, Item] = {}
    waiting = list(profile.questions)[::-1]

    async def one_reader() -> None:
        while waiting:
            question = waiting.pop()
            item = await _ask(client, found.target.model, question, profile, plan)
            items[question.id] = item
            if on_item is not None:
                on_item(item)

    stopped = False
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(plan.concurrency, len(waiting))):
                group.create_task(one_reader())
    except asyncio.CancelledError:
        stopped = True
    done = tuple(items[q.id] for q in profile.questions if q.id in items)
    return Result(
        kind="accuracy",
        target=found.target,
        load={
            "profile": profile.name,
            "items": len(profile.questions),
            "set_sha256": profile.digest,
            "temperature": 0.0,
            "seed": SEED,
            "max_tokens": plan.max_tokens or profile.max_tokens,
            "thinking": _thinking(profile, plan),
            "concurrency": plan.concurrency,
        },
        metrics=figures(done),
        flags=tuple(_flags(done, len(profile.questions), stopped)),
        items=done,
    )


def figures(items: Sequence[Item]) -> dict[str, Metric]:
    """accuracy with its Wilson interval, in all and of each kind (what stands before the slash of an id).

    answered   share of items whose text holds an answer at all
    truncated  items that were still going at max_tokens; looped  items whose text repeats without end
    """
    if not items:
        return {}
    n = len(items)
    right = sum(i.correct for i in items)
    found = {"accuracy": Metric("ratio", {"value": right / n}, {"value": wilson(right, n)}, count=n)}
    kinds: dict[str, list[Item]] = {}
    for item in items:
        kinds.setdefault(item.id.partition("/")[0] if "/" in item.id else "", []).append(item)
    if len(kinds) > 1:
        counts = {kind: (sum(i.correct for i in of_kind), len(of_kind)) for kind, of_kind in sorted(kinds.items())}
        found["accuracy_by_kind"] = Metric(
            "ratio",
            {kind: k / total for kind, (k, total) in counts.items()},
            {kind: wilson(k, total) for kind, (k, total) in counts.items()},
            count=n,
        )
    for name, count in (
        ("answered", sum(i.answer is not None for i in items)),
        ("truncated", sum(i.finish_reason == "length" for i in items)),
        ("looped", sum(i.looped for i in items)),
    ):
        found[name] = Metric("ratio", {"value": count / n}, count=count)
    return found


def write_prompts(profile: Profile, path: Path, rest: Sequence[Question] = ()) -> None:
    """The set as JSON lines for `bench serve`, which measures its speed; after it, other questions to warm up with."""
    lines = []
    for question in (*profile.questions, *rest[:WARM_UP_PROMPTS]):
        asked = {"prompt": question.prompt} if question.route == "completion" else {"messages": _messages(question)}
        lines.append(json.dumps(asked, ensure_ascii=False))
    try:
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; pass a path in a directory that is yours") from None


def _messages(question: Question) -> list[dict[str, str]]:
    return [{"role": "user", "content": question.prompt}]


def _thinking(profile: Profile, plan: Plan) -> bool | None:
    # the shipped questions ask for recall, which the small model learned without thinking
    return False if plan.thinking is None and profile.name == "stdlib" else plan.thinking


async def _ask(client: Client, model: str, question: Question, profile: Profile, plan: Plan) -> Item:
    body: dict[str, Any] = {
        "model": model,
        "temperature": 0.0,
        "seed": SEED,
        "max_tokens": plan.max_tokens or profile.max_tokens,
    }
    thinking = _thinking(profile, plan)
    if question.route == "completion":
        path, body = "/v1/completions", {**body, "prompt": question.prompt, "stop": ["\n"]}
    else:
        path, body = "/v1/chat/completions", {**body, "messages": _messages(question)}
        if thinking is not None:
            body["chat_template_kwargs"] = {"enable_thinking": thinking}
    try:
        status, data = await client.fetch("POST", path, body)
    except UserError as error:
        return Item(question.id, False, expected=question.expected, error=str(error))
    return judged(question, status, data)


def judged(question: Question, status: int, data: bytes) -> Item:
    """An item from the server's answer to a question; one that is no answer is an error, and wrong."""
    try:
        told = json.loads(data)
        choice = told["choices"][0]
        text = (choice["message"]["content"] if "message" in choice else choice["text"]) or ""
    except (ValueError, KeyError, IndexError, TypeError):
        shown = data[:200].decode(errors="replace")
        return Item(question.id, False, expected=question.expected, error=f"status {status}: {shown}")
    answer = answer_of(text, question.rule)
    return Item(
        question.id,
        is_right(answer, question.expected, question.rule),
        answer=answer,
        expected=question.expected,
        looped=looped(text),
        output_tokens=(told.get("usage") or {}).get("completion_tokens"),
        finish_reason=choice.get("finish_reason"),
    )


def _flags(items: Sequence[Item], wanted: int, stopped: bool) -> list[Flag]:
    flags = []
    if stopped or len(items) < wanted:
        flags.append(Flag("partial", f"{len(items)} of {wanted} questions were answered"))
    failed = [i for i in items if i.error is not None]
    if failed:
        flags.append(Flag("errors", f"{len(failed)} of {len(items)} requests failed, the first: {failed[0].error}"))
    return flags
