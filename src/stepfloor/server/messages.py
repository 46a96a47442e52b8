"""POST /v1/messages and /v1/messages/count_tokens: the same answer as Anthropic's clients read it.

Source: Anthropic's messages API, as its Python package 2.14 types it, for the blocks and the order of the events.
"""

import json
import secrets
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from stepfloor.server.chat import chosen_tools, constraint
from stepfloor.server.faults import ApiError, error_body
from stepfloor.server.generation import Delta, Generation, Usage
from stepfloor.server.protocol import ChatMessage, CountTokensRequest, MessagesRequest, Sampling
from stepfloor.server.service import Limits, Prompt, Service, check_delta, message_dicts
from stepfloor.server.sse import EventStream, until_gone
from stepfloor.stream.parser import Event

router = APIRouter()
Block = dict[str, Any]


@router.post("/v1/messages")
async def create_message(body: MessagesRequest, http: Request) -> Response:
    """Answer a conversation with a list of content blocks."""
    service: Service = http.app.state.service
    model = service.check_model(body.model)
    prompt, tools, choice = await _prompt(service, body)
    sampling = Sampling(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        seed=body.seed,
        deadline_s=body.deadline_s,
    )
    many = body.tool_choice is None or not body.tool_choice.disable_parallel_tool_use
    grammar = constraint(sampling, prompt, tools, choice, many)
    stop = tuple(text for text in body.stop_sequences or () if text)
    limits = Limits(body.max_tokens, stop=stop)
    generation = service.generation(sampling, [prompt], limits, tools, grammar, parse=True)
    answer = _Answer(model, stop)
    if not body.stream:
        return await until_gone(http, _whole(service, body, generation, answer))
    await generation.start(service.deadline(body.deadline_s))
    return EventStream(_stream(generation, answer), generation.close)


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: CountTokensRequest, http: Request) -> dict[str, int]:
    """Tokens of the prompt that a message request with the same fields would have."""
    service: Service = http.app.state.service
    service.check_model(body.model)
    prompt, _, _ = await _prompt(service, body)
    return {"input_tokens": len(prompt.token_ids)}


async def _prompt(
    service: Service, body: CountTokensRequest
) -> tuple[Prompt, dict[str, dict[str, Any]] | None, str | None]:
    schemas = {tool.name: tool.input_schema or {} for tool in body.tools or ()}
    choice = None
    if body.tool_choice is not None:
        choice = {"auto": "auto", "any": "required", "none": "none"}.get(body.tool_choice.type)
        choice = " " + (body.tool_choice.name or "") if choice is None else choice
    tools, choice = chosen_tools(schemas, choice)
    listed = [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                **({"description": tool.description} if tool.description else {}),
                "parameters": tool.input_schema or {},
            },
        }
        for tool in body.tools or ()
    ]
    kwargs = dict(body.chat_template_kwargs or {})
    if body.thinking is not None:
        kwargs.setdefault("enable_thinking", body.thinking.type != "disabled")
    else:
        # this API's default; its clients do not expect blocks that they did not ask for
        kwargs.setdefault("enable_thinking", False)
    prompt = await service.chat_prompt(message_dicts(_messages(body)), listed if tools is not None else None, kwargs)
    return prompt, tools, choice


def _messages(body: CountTokensRequest) -> list[ChatMessage]:
    """The conversation as chat messages: results of tools become turns of their own."""
    messages: list[dict[str, Any]] = []
    systems = [_text_of(body.system)] if body.system else []
    for message in body.messages:
        if message.role == "system":
            systems.append(_text_of(message.content))
            continue
        if isinstance(message.content, str):
            messages.append({"role": message.role, "content": message.content})
            continue
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[dict[str, Any]] = []
        for block in message.content:
            kind = block.get("type")
            if kind == "text":
                texts.append(str(block.get("text", "")))
            elif kind == "thinking":
                thoughts.append(str(block.get("thinking", "")))
            elif kind == "redacted_thinking":
                continue
            elif kind == "tool_use":
                calls.append({"function": {"name": block.get("name"), "arguments": block.get("input") or {}}})
            elif kind == "tool_result":
                content = block.get("content")
                text = content if isinstance(content, str) else _text_of(content)
                messages.append({"role": "tool", "content": text, "tool_call_id": str(block.get("tool_use_id", ""))})
            else:
                raise ApiError(400, f"content of type {kind!r} is not served: this engine reads text only")
        if texts or calls or thoughts:
            turn: dict[str, Any] = {"role": message.role, "content": "".join(texts)}
            if calls:
                turn["tool_calls"] = calls
            if thoughts:
                turn["reasoning_content"] = "\n".join(thoughts)
            messages.append(turn)
    if systems:
        messages.insert(0, {"role": "system", "content": "\n\n".join(systems)})
    try:
        return [ChatMessage.model_validate(message) for message in messages]
    except ValueError as error:
        raise ApiError(400, f"the messages are no conversation: {error}", param="messages") from None


def _text_of(blocks: Any) -> str:
    if isinstance(blocks, str):
        return blocks
    texts = []
    for block in blocks if isinstance(blocks, list) else ():
        if not isinstance(block, dict) or block.get("type") != "text":
            raise ApiError(400, "only text blocks are served here: this engine reads text only")
        texts.append(str(block.get("text", "")))
    return "".join(texts)


class _Answer:
    """The message as it grows, and the events that say how."""

    def __init__(self, model: str, stop_sequences: tuple[str, ...]) -> None:
        self.stop_sequences = stop_sequences
        self.message: dict[str, Any] = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }
        self.block: Block | None = None
        self._arguments = ""

    @property
    def content(self) -> list[Block]:
        return self.message["content"]

    def begin(self, usage: Usage) -> list[dict[str, Any]]:
        """The event that opens every message."""
        message = {**self.message, "usage": {**_usage(usage), "output_tokens": 0}}
        return [{"type": "message_start", "message": message}]

    def take(self, delta: Delta) -> list[dict[str, Any]]:
        """The events of one delta."""
        return [event for change in delta.events for event in self._take(change)]

    def end(self, delta: Delta, usage: Usage) -> list[dict[str, Any]]:
        """The events that close the message."""
        events = self._close()
        if not self.content:
            events += [*self._open("text", ""), *self._close()]  # a message without a block is none
        reason = "max_tokens" if delta.finish_reason == "length" else "end_turn"
        if delta.finish_reason == "stop" and delta.stop_reason in self.stop_sequences:
            reason = "stop_sequence"
            self.message["stop_sequence"] = delta.stop_reason
        elif reason == "end_turn" and any(block["type"] == "tool_use" for block in self.content):
            reason = "tool_use"
        self.message["stop_reason"] = reason
        self.message["usage"] = _usage(usage)
        changed = {key: self.message[key] for key in ("stop_reason", "stop_sequence")}
        return [
            *events,
            {"type": "message_delta", "delta": changed, "usage": _usage(usage)},
            {"type": "message_stop"},
        ]

    def _take(self, change: Event) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        kind = {"reasoning": "thinking", "content": "text"}.get(change.kind, "tool_use")
        if self.block is None or self.block["type"] != kind or change.kind == "call":
            events += [*self._close(), *self._open(kind, change.text if change.kind == "call" else "")]
        block = self.block
        if block is None or change.kind == "call":
            return events
        if kind == "tool_use":
            self._arguments += change.text
            delta = {"type": "input_json_delta", "partial_json": change.text}
        else:
            block[kind] += change.text
            delta = {"type": f"{kind}_delta", kind: change.text}
        return [*events, {"type": "content_block_delta", "index": len(self.content) - 1, "delta": delta}]

    def _open(self, kind: str, name: str) -> list[dict[str, Any]]:
        if kind == "tool_use":
            block: Block = {"type": kind, "id": f"toolu_{secrets.token_hex(12)}", "name": name, "input": {}}
            self._arguments = ""
        elif kind == "thinking":
            block = {"type": kind, "thinking": "", "signature": ""}
        else:
            block = {"type": kind, "text": ""}
        self.block = block
        self.content.append(block)
        return [{"type": "content_block_start", "index": len(self.content) - 1, "content_block": dict(block)}]

    def _close(self) -> list[dict[str, Any]]:
        block, self.block = self.block, None
        if block is None:
            return []
        if block["type"] == "tool_use":
            block["input"] = json.loads(self._arguments)
        return [{"type": "content_block_stop", "index": len(self.content) - 1}]


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "output_tokens": usage.completion_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
    }


async def _whole(service: Service, body: MessagesRequest, generation: Generation, answer: _Answer) -> Response:
    try:
        await generation.start(service.deadline(body.deadline_s))
        async for deltas in generation.deltas():
            for delta in deltas:
                check_delta(delta)
                answer.take(delta)
                if delta.finish_reason is not None:
                    answer.end(delta, generation.usage)
    finally:
        generation.close()
    return JSONResponse(answer.message)


async def _stream(generation: Generation, answer: _Answer) -> AsyncIterator[bytes]:
    yield _sse(answer.begin(generation.usage))
    try:
        async for deltas in generation.deltas():
            events: list[dict[str, Any]] = []
            for delta in deltas:
                check_delta(delta)
                events += answer.take(delta)
                if delta.finish_reason is not None:
                    events += answer.end(delta, generation.usage)
            if events:
                yield _sse(events)
    except ApiError as error:
        yield _sse([error_body(error, anthropic=True)])


def _sse(events: list[dict[str, Any]]) -> bytes:
    return "".join(f"event: {e['type']}\ndata: {json.dumps(e, ensure_ascii=False)}\n\n" for e in events).encode()
