"""POST /v1/responses: the same answer as items: reasoning, a message, function calls. Nothing is stored.

Source: OpenAI's responses API, as its Python package 3.57 types it, for the items and the order of the events.
"""

import json
import logging
import secrets
import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from stepfloor.server.chat import chosen_tools, constraint
from stepfloor.server.faults import ApiError
from stepfloor.server.generation import Delta, Generation
from stepfloor.server.protocol import (
    ChatMessage,
    JsonSchemaFormat,
    ResponseFormat,
    ResponsesRequest,
    ResponsesToolChoice,
)
from stepfloor.server.service import Limits, Service, check_delta, message_dicts
from stepfloor.server.sse import EventStream, until_gone
from stepfloor.stream.parser import Event

log = logging.getLogger(__name__)
router = APIRouter()
Item = dict[str, Any]


@router.post("/v1/responses")
async def create_response(body: ResponsesRequest, http: Request) -> Response:
    """Answer a conversation with a list of items."""
    service: Service = http.app.state.service
    model = service.check_model(body.model)
    functions = [tool for tool in body.tools or () if tool.type == "function" and tool.name]
    if len(functions) < len(body.tools or ()):
        log.info("tools that are no functions are left out: only the client could run them")
    schemas = {tool.name or "": tool.parameters or {} for tool in functions}
    choice = " " + body.tool_choice.name if isinstance(body.tool_choice, ResponsesToolChoice) else body.tool_choice
    tools, choice = chosen_tools(schemas, choice)
    prompt = await service.chat_prompt(
        message_dicts(_messages(body)),
        [_template_tool(tool.name, tool.description, tool.parameters) for tool in functions] if tools else None,
        body.chat_template_kwargs,
        body.reasoning.effort if body.reasoning is not None else None,
    )
    _take_text_format(body)
    grammar = constraint(body, prompt, tools, choice, body.parallel_tool_calls is not False)
    generation = service.generation(body, [prompt], Limits(body.max_output_tokens), tools, grammar, parse=True)
    answer = _Answer(body, model)
    if not body.stream:
        return await until_gone(http, _whole(service, body, generation, answer))
    await generation.start(service.deadline(body.deadline_s))
    return EventStream(_stream(generation, answer), generation.close)


def _take_text_format(body: ResponsesRequest) -> None:
    """text.format is this API's response_format."""
    text_format = body.text.format if body.text is not None else None
    if text_format is not None and text_format.type != "text":
        schema = JsonSchemaFormat(name=text_format.name, schema=text_format.schema_)
        body.response_format = ResponseFormat(type=text_format.type, json_schema=schema)


def _template_tool(name: str | None, description: str | None, parameters: dict[str, Any] | None) -> dict[str, Any]:
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": {k: v for k, v in function.items() if v is not None}}


def _messages(body: ResponsesRequest) -> list[ChatMessage]:
    """The conversation as chat messages."""
    raw: list[dict[str, Any]] = []
    items = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    for item in items:
        kind = item.get("type", "message")
        if kind == "message":
            raw.append({"role": item.get("role"), "content": item.get("content")})
        elif kind == "reasoning":
            parts = item.get("content") or item.get("summary") or []
            texts = [p.get("text", "") for p in parts if isinstance(p, dict)] if isinstance(parts, list) else []
            raw.append({"role": "assistant", "content": None, "reasoning_content": "\n".join(map(str, texts))})
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            raw.append({"role": "assistant", "content": None, "tool_calls": [{"function": function}]})
        elif kind == "function_call_output":
            raw.append({"role": "tool", "content": item.get("output"), "tool_call_id": item.get("call_id")})
        else:
            raise ApiError(400, f"input items of type {kind!r} are not served", param="input")
    merged: list[dict[str, Any]] = []
    for message in raw:
        last = merged[-1] if merged else None
        if last is not None and last["role"] == message["role"] == "assistant":
            # reasoning, text and calls of one turn are one message of the template
            last["content"] = last["content"] or message["content"]
            last["tool_calls"] = [*last.get("tool_calls", []), *message.get("tool_calls", [])]
            last["reasoning_content"] = last.get("reasoning_content") or message.get("reasoning_content")
        else:
            merged.append(message)
    if body.instructions:
        system = merged.pop(0)["content"] if merged and merged[0]["role"] in ("system", "developer") else None
        parts = [body.instructions, *([system] if isinstance(system, str) else [])]
        merged.insert(0, {"role": "system", "content": "\n\n".join(parts)})
    try:
        return [ChatMessage.model_validate(message) for message in merged]
    except ValueError as error:
        raise ApiError(400, f"the input is no conversation: {error}", param="input") from None


class _Answer:
    """The response object as it grows, and the events that say how."""

    def __init__(self, body: ResponsesRequest, model: str) -> None:
        tool_choice = body.tool_choice
        self.response: dict[str, Any] = {
            "id": f"resp_{secrets.token_hex(12)}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "model": model,
            "output": [],
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning is not None else None, "summary": None},
            "service_tier": "default",
            "store": False,
            "temperature": body.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": tool_choice.model_dump() if isinstance(tool_choice, ResponsesToolChoice) else tool_choice,
            "tools": [tool.model_dump(exclude_none=True) for tool in body.tools or ()],
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": None,
        }
        self.response["tool_choice"] = self.response["tool_choice"] or "auto"
        self.number = 0
        self.item: Item | None = None

    @property
    def output(self) -> list[Item]:
        return self.response["output"]

    def begin(self) -> list[dict[str, Any]]:
        """The events that open every response."""
        return [
            self._event(kind, response=dict(self.response)) for kind in ("response.created", "response.in_progress")
        ]

    def take(self, delta: Delta) -> list[dict[str, Any]]:
        """The events of one delta."""
        return [event for change in delta.events for event in self._take(change)]

    def end(self, delta: Delta, generation: Generation) -> list[dict[str, Any]]:
        """The events that close the response."""
        events = self._close()
        cut = delta.finish_reason == "length"
        usage = generation.usage
        self.response |= {
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
                "total_tokens": usage.total_tokens,
            },
        }
        kind = "response.incomplete" if cut else "response.completed"
        return [*events, self._event(kind, response=self.response)]

    def fail(self, error: ApiError) -> list[dict[str, Any]]:
        """The event that ends a response that broke."""
        self.response |= {"status": "failed", "error": {"code": "server_error", "message": error.message}}
        return [self._event("response.failed", response=self.response)]

    def _take(self, change: Event) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        kind = {"reasoning": "reasoning", "content": "message"}.get(change.kind, "function_call")
        if self.item is None or self.item["type"] != kind or change.kind == "call":
            events += [*self._close(), *self._open(kind, change.text if change.kind == "call" else "")]
        item = self.item
        if item is None or change.kind == "call":
            return events
        where = {"item_id": item["id"], "output_index": len(self.output) - 1}
        if change.kind == "arguments":
            item["arguments"] += change.text
            return [*events, self._event("response.function_call_arguments.delta", **where, delta=change.text)]
        item["content"][0]["text"] += change.text
        name = "reasoning_text" if kind == "reasoning" else "output_text"
        extra: Item = {} if kind == "reasoning" else {"logprobs": []}
        return [
            *events,
            self._event(f"response.{name}.delta", **where, content_index=0, delta=change.text, **extra),
        ]

    def _open(self, kind: str, name: str) -> list[dict[str, Any]]:
        prefix = {"reasoning": "rs", "message": "msg", "function_call": "fc"}[kind]
        item: Item = {"id": f"{prefix}_{secrets.token_hex(12)}", "type": kind, "status": "in_progress"}
        if kind == "function_call":
            item |= {"call_id": f"call_{secrets.token_hex(12)}", "name": name, "arguments": ""}
        elif kind == "message":
            item |= {"role": "assistant", "content": []}
        else:
            item |= {"summary": [], "content": []}
        self.item = item
        self.output.append(item)
        index = len(self.output) - 1
        events = [self._event("response.output_item.added", output_index=index, item=dict(item))]
        if kind != "function_call":
            part: Item = {"type": "reasoning_text" if kind == "reasoning" else "output_text", "text": ""}
            if kind == "message":
                part |= {"annotations": [], "logprobs": []}
            item["content"] = [part]
            where = {"item_id": item["id"], "output_index": index, "content_index": 0}
            events.append(self._event("response.content_part.added", **where, part=dict(part)))
        return events

    def _close(self) -> list[dict[str, Any]]:
        item, self.item = self.item, None
        if item is None:
            return []
        item["status"] = "completed"
        index = len(self.output) - 1
        where: dict[str, Any] = {"item_id": item["id"], "output_index": index}
        if item["type"] == "function_call":
            done = {"arguments": item["arguments"], "name": item["name"]}
            events = [self._event("response.function_call_arguments.done", **where, **done)]
        else:
            part = item["content"][0]
            where["content_index"] = 0
            extra: Item = {"logprobs": []} if item["type"] == "message" else {}
            events = [
                self._event(f"response.{part['type']}.done", **where, text=part["text"], **extra),
                self._event("response.content_part.done", **where, part=part),
            ]
        return [*events, self._event("response.output_item.done", output_index=index, item=item)]

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        event = {"type": kind, "sequence_number": self.number, **fields}
        self.number += 1
        return event


async def _whole(service: Service, body: ResponsesRequest, generation: Generation, answer: _Answer) -> Response:
    try:
        await generation.start(service.deadline(body.deadline_s))
        async for deltas in generation.deltas():
            for delta in deltas:
                check_delta(delta)
                answer.take(delta)
                if delta.finish_reason is not None:
                    answer.end(delta, generation)
    finally:
        generation.close()
    return JSONResponse(answer.response)


async def _stream(generation: Generation, answer: _Answer) -> AsyncIterator[bytes]:
    yield _sse(answer.begin())
    try:
        async for deltas in generation.deltas():
            events: list[Item] = []
            for delta in deltas:
                check_delta(delta)
                events += answer.take(delta)
                if delta.finish_reason is not None:
                    events += answer.end(delta, generation)
            if events:
                yield _sse(events)
    except ApiError as error:
        yield _sse(answer.fail(error))


def _sse(events: list[dict[str, Any]]) -> bytes:
    return "".join(f"event: {e['type']}\ndata: {json.dumps(e, ensure_ascii=False)}\n\n" for e in events).encode()
