"""bench accuracy: a pinned set of questions, greedily answered, each item on record, and nothing about speed.

Speed and accuracy are measured apart: here requests may wait for each other and meet warm caches. The speed on the same
items is measured by speed.py. Two runs over one set are compared item by item by `bench compare` (exact McNemar).
"""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stepfloor.errors import UserError
from stepfloor.tools.bench.client import Client
from stepfloor.tools.bench.grading import answer_of, is_right
from stepfloor.tools.bench.metrics import looped
from stepfloor.tools.bench.proportions import wilson
from stepfloor.tools.bench.questions import Profile, Question
from stepfloor.tools.bench.result import Flag, Item, Metric, Result
from stepfloor.tools.bench.target import find_target

SEED = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """How the questions are asked.

    max_tokens  most tokens of an answer; None takes the profile's
    thinking    what chat templates are told as enable_thinking; None says nothing
    """

    concurrency: int = 4
    max_tokens: int | None = None
    thinking: bool | None = None


def run_accuracy(
    url: str,
    profile: Profile,
    plan: Plan,
    model: str | None = None,
    headers: Mapping[str, str] | None = None,
    on_item: Callable[[Item], None] | None = None,
) -> Result:
    """Ask a server every question. An interruption by the keyboard gives what was answered until then."""

    async def measured() -> Result:
        client = Client(url, headers)
        try:
            return await measure_accuracy(client, profile, plan, model, on_item)
        finally:
            client.close()

    return asyncio.run(measured())


def run_with_bar(
    url: str, profile: Profile, plan: Plan, model: str | None = None, headers: Mapping[str, str] | None = None
) -> Result:
    """The same, with a progress bar on standard error."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True, refresh_per_second=2) as bar:
        task = bar.add_task(profile.name, total=len(profile.questions))
        return run_accuracy(url, profile, plan, model, headers, on_item=lambda _: bar.advance(task))


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


def summary(result: Result) -> list[str]:
    """The result in lines for people."""
    load, metrics = result.load, result.metrics
    lines = [f"{load['profile']}, {load['items']} items ({load['set_sha256'][:12]}), greedy, on {result.target.model}"]
    for name in ("accuracy", "accuracy_by_kind"):
        metric = metrics.get(name)
        for kind, share in metric.stats.items() if metric else ():
            low, high = metric.intervals[kind] if metric else (0.0, 0.0)
            lines.append(f"{'all' if kind == 'value' else kind:>16} {share:7.1%}   ({low:.1%} to {high:.1%})")
    counted = (f"{name} {metrics[name].count}" for name in ("answered", "truncated", "looped") if name in metrics)
    lines.append(", ".join(counted))
    return lines + [f"{'INVALID' if f.invalidates else 'note'}: {f.code}: {f.text}" for f in result.flags]


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
