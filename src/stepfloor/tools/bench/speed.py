"""The speed on a pinned set of questions: each answered with the same number of tokens, one at a time unless told so.

What the seeds call the GSM8K throughput profile, 64 items of 256 tokens. The answers are not judged: the end of text is
ignored, so that every run makes the same number of tokens. Other questions of the set warm up.
"""

import asyncio
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from stepfloor.errors import UserError
from stepfloor.tools.bench.load import Load
from stepfloor.tools.bench.questions import Profile, Question
from stepfloor.tools.bench.result import Result
from stepfloor.tools.bench.serve import Progress, conclude, prepare, send, warm_up

ITEMS, TOKENS = 64, 256
WARM_UP = 4


def run_speed(
    url: str,
    profile: Profile,
    items: int | None = None,
    *,
    tokens: int = TOKENS,
    concurrency: int = 1,
    model: str | None = None,
    headers: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> Result:
    """Measure the speed on `items` of a profile's chat questions; without a number 64, or as many as there are.

    Raises UserError as bench serve does, and if no questions are left to warm up with.
    """
    asked = Profile(profile.name, tuple(q for q in profile.questions if q.route == "chat"), tokens)
    spare = max(WARM_UP, concurrency)
    most = len(asked.questions) - spare
    if items is not None and items > most:
        raise UserError(
            f"{profile.name} has {most} questions to measure beside {spare} to warm up; got --items {items}"
        )
    pinned = asked.part(items or min(ITEMS, most))
    others = [q for q in asked.questions if q not in pinned.questions][:spare]
    load = Load(
        route="chat",
        dataset_name="jsonl",
        output_len=str(tokens),
        concurrency=concurrency,
        num_warmups=0,
        sampling="greedy",
        model=model,
    )
    with tempfile.TemporaryDirectory() as directory:
        measured, warming = (
            replace(load, dataset_path=str(_put(Path(directory) / name, questions)), num_prompts=len(questions))
            for name, questions in (("measured.jsonl", pinned.questions), ("warm-up.jsonl", others))
        )
        result = asyncio.run(_measure(url, measured, warming, headers, progress))
    about = {"profile": profile.name, "items": len(pinned.questions), "set_sha256": pinned.digest}
    # the file was written for this run and is gone; its hash stays
    return replace(result, load={**result.load, **about, "dataset_path": None, "num_warmups": len(others)})


async def _measure(
    url: str, load: Load, warming: Load, headers: Mapping[str, str] | None, progress: Progress | None
) -> Result:
    others = await prepare(url, warming, headers)
    others.client.close()
    session = replace(await prepare(url, load, headers), warm_up=others.jobs)
    try:
        await warm_up(session, progress)
        return conclude(session, await send(session, progress))
    finally:
        session.client.close()


def _put(file: Path, questions: Sequence[Question]) -> Path:
    lines = [json.dumps({"messages": [{"role": "user", "content": q.prompt}]}, ensure_ascii=False) for q in questions]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file
