"""POST /v1/completions: text in, text out, streamed or whole."""

import json
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from stepfloor.request import TokenLogprob
from stepfloor.server.faults import ApiError, error_event
from stepfloor.server.generation import Delta, Generation, Usage
from stepfloor.server.protocol import CompletionRequest
from stepfloor.server.service import Limits, Prompt, Service, check_delta, grammar_of
from stepfloor.server.sse import EventStream, until_gone

router = APIRouter()


@router.post("/v1/completions")
async def create_completion(body: CompletionRequest, http: Request) -> Response:
    """Continue each prompt."""
    service: Service = http.app.state.service
    model = service.check_model(body.model)
    if body.echo and body.logprobs is not None:
        raise ApiError(400, "echo with logprobs is not supported: the prompt's logits are not kept")
    prompts = await _prompts(service, body)
    limits = Limits(body.max_tokens, body.n or 1, body.logprobs)
    generation = service.generation(body, prompts, limits, grammar=grammar_of(body, thinking=False))
    head = {"id": f"cmpl-{secrets.token_hex(12)}", "object": "text_completion", "created": int(time.time())}
    head["model"] = model
    echoes = [await _echo(service, body, prompt) for prompt in prompts for _ in range(limits.n)]
    if not body.stream:
        return await until_gone(http, _whole(service, body, generation, head, echoes))
    await generation.start(service.deadline(body.deadline_s))
    return EventStream(_stream(service, body, generation, head, echoes), generation.close)


async def _prompts(service: Service, body: CompletionRequest) -> list[Prompt]:
    prompt: Any = body.prompt
    if isinstance(prompt, str):
        return [await service.text_prompt(prompt)]
    if not prompt:
        raise ApiError(400, "the prompt is empty; send at least one token", param="prompt")
    if isinstance(prompt[0], str):
        return [await service.text_prompt(text) for text in prompt]
    lists = [prompt] if isinstance(prompt[0], int) else prompt
    for token in (token for ids in lists for token in (min(ids, default=0), max(ids, default=0))):
        if token >= service.config.vocab_size:
            most = service.config.vocab_size - 1
            raise ApiError(400, f"token ids must be 0 to {most}; the prompt holds {token}", param="prompt")
    return [Prompt(tuple(ids)) for ids in lists]


async def _echo(service: Service, body: CompletionRequest, prompt: Prompt) -> str:
    if not body.echo:
        return ""
    return service.tokenizer.decode(prompt.token_ids) if prompt.text is None else prompt.text


@dataclass(slots=True)
class _Choice:
    """One answer as it grows."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None


async def _whole(
    service: Service, body: CompletionRequest, generation: Generation, head: dict[str, Any], echoes: list[str]
) -> Response:
    choices = [_Choice(echo) for echo in echoes]
    try:
        await generation.start(service.deadline(body.deadline_s))
        async for deltas in generation.deltas():
            for delta in deltas:
                check_delta(delta)
                choice = choices[delta.index]
                choice.text += "".join(event.text for event in delta.events)
                choice.tokens += delta.token_ids
                choice.logprobs += delta.logprobs
                choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason
    finally:
        generation.close()
    rendered = [
        {
            "index": index,
            "text": choice.text,
            "logprobs": None
            if body.logprobs is None
            else logprobs_json(service, choice.tokens, choice.logprobs, body.logprobs, 0),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            **({"token_ids": choice.tokens} if body.return_token_ids else {}),
        }
        for index, choice in enumerate(choices)
    ]
    return JSONResponse({**head, "choices": rendered, "usage": usage_json(generation.usage)})


async def _stream(
    service: Service, body: CompletionRequest, generation: Generation, head: dict[str, Any], echoes: list[str]
) -> AsyncIterator[bytes]:
    options = body.stream_options
    continuous = options is not None and bool(options.continuous_usage_stats)
    include = service.config.force_usage or (options is not None and bool(options.include_usage))
    prefix = json.dumps(head, ensure_ascii=False)[:-1]
    offsets = [len(echo) for echo in echoes]
    try:
        for index, echo in enumerate(echoes):
            if echo:
                yield _chunk(prefix, {"index": index, "text": echo, "logprobs": None, "finish_reason": None}, None)
        async for deltas in generation.deltas():
            usage = generation.usage if continuous else None
            yield b"".join(_delta_chunk(service, body, delta, prefix, offsets, usage) for delta in deltas)
        if include:
            usage_text = json.dumps(usage_json(generation.usage))
            yield f'data: {prefix}, "choices": [], "usage": {usage_text}}}\n\n'.encode()
        yield b"data: [DONE]\n\n"
    except ApiError as error:
        yield error_event(error)


def _delta_chunk(
    service: Service, body: CompletionRequest, delta: Delta, prefix: str, offsets: list[int], usage: Usage | None
) -> bytes:
    check_delta(delta)
    text = "".join(event.text for event in delta.events)
    choice: dict[str, Any] = {
        "index": delta.index,
        "text": text,
        "logprobs": None,
        "finish_reason": delta.finish_reason,
    }
    if delta.finish_reason is not None:
        choice["stop_reason"] = delta.stop_reason
    if body.return_token_ids:
        choice["token_ids"] = delta.token_ids
    if body.logprobs is not None:
        choice["logprobs"] = logprobs_json(
            service, list(delta.token_ids), list(delta.logprobs), body.logprobs, offsets[delta.index]
        )
    offsets[delta.index] += len(text)
    return _chunk(prefix, choice, usage)


def _chunk(prefix: str, choice: dict[str, Any], usage: Usage | None) -> bytes:
    tail = "" if usage is None else f', "usage": {json.dumps(usage_json(usage))}'
    return f'data: {prefix}, "choices": [{json.dumps(choice, ensure_ascii=False)}]{tail}}}\n\n'.encode()


def logprobs_json(
    service: Service, tokens: list[int], logprobs: list[TokenLogprob], top: int, offset: int
) -> dict[str, Any]:
    """The parallel lists of a completion's logprobs; offset is where the first token's text begins."""
    texts = [service.tokenizer.decode([token]) for token in tokens]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [entry.logprob for entry in logprobs],
        "top_logprobs": [
            {service.tokenizer.decode([token]): value for token, value in entry.top[:top]} for entry in logprobs
        ]
        if top
        else None,
        "text_offset": offsets,
    }


def usage_json(usage: Usage) -> dict[str, Any]:
    """Usage as OpenAI's clients read it."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }
