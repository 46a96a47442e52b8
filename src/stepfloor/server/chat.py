"""POST /v1/chat/completions: messages in; reasoning, content and tool calls out, streamed or whole."""

import json
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from stepfloor.request import Grammar, TokenLogprob
from stepfloor.server.calls import calls_grammar
from stepfloor.server.completions import usage_json
from stepfloor.server.faults import ApiError, error_event
from stepfloor.server.generation import Delta, Generation
from stepfloor.server.protocol import ChatRequest, NamedToolChoice, Sampling
from stepfloor.server.service import (
    Limits,
    Prompt,
    Service,
    check_delta,
    grammar_of,
    message_dicts,
    tool_schemas,
)
from stepfloor.server.sse import EventStream, until_gone
from stepfloor.stream.parser import Event

router = APIRouter()


@router.post("/v1/chat/completions")
async def create_chat_completion(body: ChatRequest, http: Request) -> Response:
    """Answer a conversation."""
    service: Service = http.app.state.service
    model = service.check_model(body.model)
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    if body.chat_template is not None:
        raise ApiError(400, "chat_template is the server's (--chat-template)", param="chat_template")
    schemas = tool_schemas(body.tools)
    tools, choice = chosen_tools(schemas, _choice(body))
    prompt = await service.chat_prompt(
        message_dicts(body.messages),
        [tool.model_dump(exclude_none=True) for tool in body.tools or ()] if tools is not None else None,
        body.chat_template_kwargs,
        body.reasoning_effort,
        body.add_generation_prompt is not False,
    )
    grammar = constraint(body, prompt, tools, choice, body.parallel_tool_calls is not False)
    limits = Limits(
        body.max_completion_tokens or body.max_tokens,
        body.n or 1,
        (body.top_logprobs or 0) if body.logprobs else None,
    )
    generation = service.generation(body, [prompt], limits, tools, grammar, parse=True)
    head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}
    if not body.stream:
        return await until_gone(http, _whole(service, body, generation, head))
    await generation.start(service.deadline(body.deadline_s))
    return EventStream(_stream(service, body, generation, head), generation.close)


def _choice(body: ChatRequest) -> str | None:
    """auto, none, required or the name of a function, with a space before it; None where nothing is said."""
    choice = body.tool_choice
    return " " + choice.function.name if isinstance(choice, NamedToolChoice) else choice


def chosen_tools(
    schemas: dict[str, dict[str, Any]], choice: str | None
) -> tuple[dict[str, dict[str, Any]] | None, str | None]:
    """Functions that the model may call (None: none, their text is content), and the choice that is left."""
    if choice == "none" or (not schemas and choice in (None, "auto")):
        return None, None
    if not schemas:
        raise ApiError(400, "tool_choice asks for a call and there are no tools", param="tool_choice")
    if choice is not None and choice.startswith(" "):
        name = choice[1:]
        if name not in schemas:
            raise ApiError(400, f"tool_choice names {name!r}, which is not among the tools", param="tool_choice")
        return {name: schemas[name]}, choice
    return schemas, choice


def constraint(
    body: Sampling, prompt: Prompt, tools: dict[str, dict[str, Any]] | None, choice: str | None, many: bool
) -> Grammar | None:
    """The grammar of the answer: a forced call's, else what the request brings."""
    grammar = grammar_of(body, prompt.thinking)
    if tools is not None and choice not in (None, "auto"):
        if grammar is not None:
            raise ApiError(400, "tool_choice asks for a call and response_format for something else; send one")
        return calls_grammar(tools, many and choice == "required", prompt.thinking)
    return grammar


@dataclass(slots=True)
class _Choice:
    """One answer as it grows."""

    reasoning: str = ""
    content: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def take(self, delta: Delta) -> None:
        for event in delta.events:
            if event.kind == "reasoning":
                self.reasoning += event.text
            elif event.kind == "content":
                self.content += event.text
            elif event.kind == "call":
                self.calls.append(call_json(event.text))
            else:
                self.calls[-1]["function"]["arguments"] += event.text
        self.tokens += delta.token_ids
        self.logprobs += delta.logprobs
        if delta.finish_reason is not None:
            self.finish_reason = finish_reason(delta, len(self.calls))
            self.stop_reason = delta.stop_reason

    def message(self, show_reasoning: bool) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self.content or (None if self.calls else "")}
        message["reasoning_content"] = (self.reasoning or None) if show_reasoning else None
        if self.calls:
            message["tool_calls"] = self.calls
        return message


def call_json(name: str) -> dict[str, Any]:
    """A tool call as it begins."""
    return {
        "id": f"call_{secrets.token_hex(12)}",
        "type": "function",
        "function": {"name": name, "arguments": ""},
    }


def finish_reason(delta: Delta, calls: int) -> str | None:
    """OpenAI's word: an answer that ends with calls says so, unless its limit cut it off."""
    return "tool_calls" if calls and delta.finish_reason == "stop" else delta.finish_reason


async def _whole(service: Service, body: ChatRequest, generation: Generation, head: dict[str, Any]) -> Response:
    choices = [_Choice() for _ in generation.answers]
    try:
        await generation.start(service.deadline(body.deadline_s))
        async for deltas in generation.deltas():
            for delta in deltas:
                check_delta(delta)
                choices[delta.index].take(delta)
    finally:
        generation.close()
    rendered = [
        {
            "index": index,
            "message": choice.message(body.include_reasoning is not False),
            "logprobs": _logprobs(service, choice.tokens, choice.logprobs) if body.logprobs else None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            **({"token_ids": choice.tokens} if body.return_token_ids else {}),
        }
        for index, choice in enumerate(choices)
    ]
    usage = usage_json(generation.usage)
    return JSONResponse({**head, "object": "chat.completion", "choices": rendered, "usage": usage})


async def _stream(
    service: Service, body: ChatRequest, generation: Generation, head: dict[str, Any]
) -> AsyncIterator[bytes]:
    options = body.stream_options
    continuous = options is not None and bool(options.continuous_usage_stats)
    include = service.config.force_usage or (options is not None and bool(options.include_usage))
    prefix = json.dumps({**head, "object": "chat.completion.chunk"}, ensure_ascii=False)[:-1]

    def chunk(index: int, delta: dict[str, Any], rest: dict[str, Any] | None = None) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **(rest or {})}
        tail = f', "usage": {json.dumps(usage_json(generation.usage))}' if continuous else ""
        return f'data: {prefix}, "choices": [{json.dumps(choice, ensure_ascii=False)}]{tail}}}\n\n'.encode()

    try:
        yield b"".join(chunk(answer.index, {"role": "assistant", "content": ""}) for answer in generation.answers)
        async for deltas in generation.deltas():
            chunks: list[bytes] = []
            for delta in deltas:
                check_delta(delta)
                parser = generation.answers[delta.index].parser
                rest: dict[str, Any] = {}
                if body.logprobs and delta.logprobs:
                    rest["logprobs"] = _logprobs(service, delta.token_ids, delta.logprobs)
                if body.return_token_ids:
                    rest["token_ids"] = delta.token_ids
                if delta.finish_reason is not None:
                    rest["finish_reason"] = finish_reason(delta, parser.num_calls if parser is not None else 0)
                    rest["stop_reason"] = delta.stop_reason
                shown = [_delta_json(e) for e in delta.events if e.kind != "reasoning" or body.include_reasoning]
                # what belongs to the whole delta goes with its last change
                chunks += [chunk(delta.index, one) for one in shown[:-1]]
                if shown or rest:
                    chunks.append(chunk(delta.index, shown[-1] if shown else {}, rest))
            if chunks:
                yield b"".join(chunks)
        if include:
            usage_text = json.dumps(usage_json(generation.usage))
            yield f'data: {prefix}, "choices": [], "usage": {usage_text}}}\n\n'.encode()
        yield b"data: [DONE]\n\n"
    except ApiError as error:
        yield error_event(error)


def _delta_json(event: Event) -> dict[str, Any]:
    if event.kind == "reasoning":
        return {"reasoning_content": event.text}
    if event.kind == "content":
        return {"content": event.text}
    if event.kind == "call":
        return {"tool_calls": [{"index": event.index, **call_json(event.text)}]}
    return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}


def _logprobs(service: Service, tokens: Sequence[int], logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
    """One entry for each delivered token; the bytes of all entries are those of the whole output."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        data = service.tokenizer.token_bytes(token)
        return {"token": data.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(data)}

    return {
        "content": [
            {**entry(token, one.logprob), "top_logprobs": [entry(i, value) for i, value in one.top]}
            for token, one in zip(tokens, logprobs, strict=True)
        ]
    }
