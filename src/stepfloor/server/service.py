"""From what a client asked to Requests of the engine: prompts, sampling values, stops, grammars and limits."""

import asyncio
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stepfloor.errors import UserError
from stepfloor.request import Grammar, Request, SamplingParams
from stepfloor.server.client import EngineClient
from stepfloor.server.faults import ApiError
from stepfloor.server.generation import Delta, Generation, new_answers
from stepfloor.server.metrics import Metrics
from stepfloor.server.protocol import ChatMessage, Sampling, StructuredOutputs, Tool
from stepfloor.stream.parser import END_THINK, THINK, Parser
from stepfloor.tokenizer.tokenizer import Tokenizer

# OpenAI's words for effort, and what of the template's they mean
EFFORTS = {"minimal": "low", "low": "low", "medium": "medium", "high": "xhigh", "xhigh": "xhigh"}


@dataclass(frozen=True, slots=True)
class ServiceConfig:
    """What the server knows of its model and its user's wishes.

    names             the model answers to; the first is what it calls itself
    sampling          values used where a request gives none, from generation_config.json
    template_kwargs   variables of the chat template where a request gives none
    deadline_s        of a request that brings none; None: no deadline
    """

    names: tuple[str, ...]
    max_model_len: int
    vocab_size: int
    stop_token_ids: tuple[int, ...]
    sampling: Mapping[str, float]
    max_logprobs: int = 20
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    deadline_s: float | None = None
    force_usage: bool = False


@dataclass(frozen=True, slots=True)
class Prompt:
    """Ids of one prompt; thinking says that it ends inside the reasoning."""

    token_ids: tuple[int, ...]
    text: str | None = None
    thinking: bool = False


@dataclass(frozen=True, slots=True)
class Limits:
    """What a route found in its body that Sampling does not hold."""

    max_tokens: int | None
    n: int = 1
    logprobs: int | None = None
    stop: tuple[str, ...] = ()


class Service:
    """What all routes share."""

    def __init__(self, config: ServiceConfig, tokenizer: Tokenizer, client: EngineClient, metrics: Metrics) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.client = client
        self.metrics = metrics
        self.draining = False

    def check_model(self, name: str | None) -> str:
        """The name to answer with. Raises ApiError 404 for a model that is not served."""
        if name is None or name == "":
            return self.config.names[0]
        if name not in self.config.names:
            served = ", ".join(self.config.names)
            raise ApiError(404, f"the model {name!r} does not exist; served here: {served}", "model_not_found", "model")
        return name

    async def chat_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        template_kwargs: Mapping[str, Any] | None,
        effort: str | None = None,
        add_generation_prompt: bool = True,
    ) -> Prompt:
        """Render messages; raises UserError where the template or a message forbids it."""
        variables: dict[str, Any] = {**self.config.template_kwargs}
        if effort == "none":
            variables["enable_thinking"] = False
        elif effort is not None:
            variables["reasoning_effort"] = EFFORTS[effort]
        variables |= {k: v for k, v in (template_kwargs or {}).items() if k not in ("messages", "tools")}
        if tools:
            variables["tools"] = list(tools)
        variables.setdefault("add_generation_prompt", add_generation_prompt)
        return await asyncio.to_thread(self._render, messages, variables)

    def _render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> Prompt:
        try:
            text = self.tokenizer.apply_chat_template(messages, **variables)
        except (TypeError, ValueError, AttributeError, RecursionError, OverflowError) as error:
            # what a template does with values of an unexpected kind is Python's to say
            raise UserError(f"the chat template cannot render these messages and variables: {error}") from None
        return Prompt(tuple(self.tokenizer.encode(text)), text, text.rstrip().endswith(THINK))

    async def text_prompt(self, text: str) -> Prompt:
        """Ids of plain text."""
        return Prompt(tuple(await asyncio.to_thread(self.tokenizer.encode, text)), text)

    def generation(
        self,
        body: Sampling,
        prompts: Sequence[Prompt],
        limits: Limits,
        tools: Mapping[str, Mapping[str, Any]] | None = None,
        grammar: Grammar | None = None,
        parse: bool = False,
    ) -> Generation:
        """A Generation that is not started yet: limits.n answers to each prompt.

        tools  parameter schemas by function name; None: calls are not looked for
        parse  tell reasoning, content and calls apart. Raises ApiError or UserError for what cannot be served.
        """
        requests: list[Request] = []
        parsers: list[Parser | None] = []
        for prompt in prompts:
            room = self.room(prompt)
            max_tokens = room if limits.max_tokens is None else min(limits.max_tokens, room)
            for i in range(limits.n):
                requests.append(self._request(body, prompt, max_tokens, limits, grammar, i))
                parsers.append(Parser(prompt.thinking, tools) if parse else None)
        prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        return Generation(self.client, self.metrics, new_answers(requests, parsers), prompt_tokens)

    def room(self, prompt: Prompt) -> int:
        """Tokens that fit behind the prompt. Raises ApiError, with both numbers, where none does."""
        length, limit = len(prompt.token_ids), self.config.max_model_len
        if length == 0:
            raise ApiError(400, "the prompt is empty; send at least one token", param="prompt")
        if length >= limit:
            raise ApiError(
                400,
                f"This model's maximum context length is {limit} tokens, and the prompt has {length} tokens, which "
                "leaves no room for a new one. Shorten the prompt, or start the server with a larger --max-model-len.",
                "context_length_exceeded",
                "messages",
            )
        return limit - length

    def deadline(self, body_deadline_s: float | None) -> float | None:
        """Seconds a request may take."""
        return self.config.deadline_s if body_deadline_s is None else body_deadline_s

    def _request(
        self, body: Sampling, prompt: Prompt, max_tokens: int, limits: Limits, grammar: Grammar | None, i: int
    ) -> Request:
        if limits.logprobs is not None and limits.logprobs > self.config.max_logprobs:
            most = self.config.max_logprobs
            raise ApiError(400, f"at most {most} logprobs are given (--max-logprobs); {limits.logprobs} asked for")
        stop = [body.stop] if isinstance(body.stop, str) else (body.stop or [])
        stops = tuple(text for text in stop if text) + limits.stop
        own = () if body.ignore_eos else self.config.stop_token_ids
        request = Request(
            request_id=f"req-{secrets.token_hex(12)}",
            token_ids=prompt.token_ids,
            sampling=self._sampling(body, i),
            max_tokens=max_tokens,
            stop_token_ids=tuple(dict.fromkeys((*own, *(body.stop_token_ids or ())))),
            stop=stops,
            min_tokens=min(body.min_tokens or 0, max_tokens),
            logprobs=limits.logprobs,
            grammar=grammar,
            include_stop=bool(body.include_stop_str_in_output),
            skip_special_tokens=body.skip_special_tokens is not False,
        )
        if body.min_tokens is not None and limits.max_tokens is not None and body.min_tokens > limits.max_tokens:
            raise ApiError(400, f"min_tokens is {body.min_tokens}, above max_tokens {limits.max_tokens}")
        request.sampling.check(self.config.vocab_size)
        return request

    def _sampling(self, body: Sampling, i: int) -> SamplingParams:
        own = self.config.sampling

        def value(name: str, default: float) -> float:
            given = getattr(body, name)
            return own.get(name, default) if given is None else given

        try:
            bias = tuple((int(token), amount) for token, amount in (body.logit_bias or {}).items())
        except ValueError:
            raise ApiError(400, "the keys of logit_bias must be token ids", param="logit_bias") from None
        # where a request brings a seed its answers differ by it, and are the same in every run
        return SamplingParams(
            temperature=value("temperature", 1.0),
            top_k=int(value("top_k", 0)),
            top_p=value("top_p", 1.0),
            min_p=value("min_p", 0.0),
            presence_penalty=value("presence_penalty", 0.0),
            frequency_penalty=value("frequency_penalty", 0.0),
            repetition_penalty=value("repetition_penalty", 1.0),
            logit_bias=bias,
            seed=None if body.seed is None else body.seed + i,
        )


def check_delta(delta: Delta) -> None:
    """Raise ApiError if the answer ended in a fault or was cut off by its deadline."""
    if delta.finish_reason == "error":
        raise ApiError(500, delta.error or "the request ended in a fault", "engine_fault")
    if delta.finish_reason == "cancelled":
        raise ApiError(504, delta.error or "the request was cancelled", "deadline_exceeded")


def message_dicts(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Messages as the template takes them. Raises ApiError for pictures and other content that is not text."""
    dumped = []
    for message in messages:
        for part in message.content if isinstance(message.content, list) else ():
            if not isinstance(part, str) and part.type not in ("text", "input_text", "output_text", "refusal"):
                raise ApiError(400, f"content of type {part.type!r} is not served: this engine reads text only")
        fields = message.model_dump(exclude_none=True)
        if isinstance(message.content, list):
            texts = (p if isinstance(p, str) else p.text or "" for p in message.content)
            fields["content"] = "".join(texts)
        if fields["role"] == "function":
            fields["role"] = "tool"
        dumped.append(fields)
    return dumped


def tool_schemas(tools: Sequence[Tool] | None) -> dict[str, dict[str, Any]]:
    """Parameter schemas by function name."""
    return {tool.function.name: tool.function.parameters or {} for tool in tools or ()}


def grammar_of(body: Sampling, thinking: bool) -> Grammar | None:
    """The constraint a request brings, in any of its spellings. Raises ApiError if it brings two."""
    after = END_THINK if thinking else None
    found: list[Grammar] = []

    def schema(value: Any) -> None:
        found.append(Grammar("json_schema", value if isinstance(value, str) else json.dumps(value), after))

    response_format = body.response_format
    if response_format is not None and response_format.type == "json_object":
        schema({"type": "object"})
    elif response_format is not None and response_format.type == "json_schema":
        if response_format.json_schema is None or response_format.json_schema.schema_ is None:
            raise ApiError(400, "response_format json_schema needs json_schema.schema", param="response_format")
        schema(response_format.json_schema.schema_)
    elif response_format is not None and response_format.type == "structural_tag":
        found.append(Grammar("structural_tag", json.dumps(response_format.model_dump()), after))
    outputs = body.structured_outputs or StructuredOutputs()
    for value in (outputs.json_schema, body.guided_json):
        if value is not None:
            schema(value)
    if outputs.json_object:
        schema({"type": "object"})
    for regex in (outputs.regex, body.guided_regex):
        if regex is not None:
            found.append(Grammar("regex", regex, after))
    for text in (outputs.grammar, body.guided_grammar):
        if text is not None:
            found.append(Grammar("ebnf", text, after))
    for choice in (outputs.choice, body.guided_choice):
        if choice is not None:
            found.append(Grammar("ebnf", choice_grammar(choice), after))
    if outputs.structural_tag is not None:
        tag = outputs.structural_tag
        found.append(Grammar("structural_tag", tag if isinstance(tag, str) else json.dumps(tag), after))
    if len(found) > 1:
        raise ApiError(400, "more than one of response_format, structured_outputs and guided_* is set; send one")
    return found[0] if found else None


def choice_grammar(choices: Sequence[str]) -> str:
    """A grammar of the given texts. Raises ApiError if there is none."""
    if not choices or "" in choices:
        raise ApiError(400, "a choice needs at least one text, and none that is empty", param="structured_outputs")
    return "root ::= " + " | ".join(json.dumps(choice) for choice in choices)
