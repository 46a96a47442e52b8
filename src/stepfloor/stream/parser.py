"""Generated text to what a chat client is shown: reasoning, content and tool calls, as they come.

Every joined result is the same for any split of the text, so a streamed answer equals an unstreamed one; what may still
become a tag waits. Calls are written as the model's chat template shows them; their arguments leave as JSON, strings
piece by piece and other values when they are complete.

Source: chat_template.jinja of the releases for the form of a call (vLLM's names for it are qwen3_coder and qwen3_xml).
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Schema = Mapping[str, Any]

THINK, END_THINK = "<think>", "</think>"
CALL, END_CALL = "<tool_call>", "</tool_call>"
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"

# A tag that the end of the stream cut in two is not shown if this much of it is there; less may be text.
_CUT_TAG = 5
_MAY_END = re.compile("[\n<]")
_AFTER_PARAMETER = (PARAMETER, END_FUNCTION, END_CALL, CALL)


@dataclass(frozen=True, slots=True)
class Event:
    """One change of what the client sees.

    kind   reasoning or content: text follows; call: a tool call begins, text is its name; arguments: JSON of the call
    index  of the call, from 0; -1 for text
    """

    kind: Literal["reasoning", "content", "call", "arguments"]
    text: str
    index: int = -1


class Parser:
    """The unsent text of one chat answer, and what it is part of."""

    def __init__(self, thinking: bool, tools: Mapping[str, Schema] | None = None) -> None:
        """Begin an answer.

        thinking  the prompt has opened the reasoning
        tools     JSON schema of each function's parameters, by name; None: calls are not looked for
        """
        self._tools = tools
        self._buffer = ""
        self._state: Literal["reasoning", "content", "call", "function", "value"] = (
            "reasoning" if thinking else "content"
        )
        self._events: list[Event] = []
        self._calls = 0
        self._fresh = thinking  # nothing was shown of the part under way: blanks before it are dropped
        self._shown = False  # some content was
        self._after_think = False
        self._value = ""
        self._types: frozenset[str] = frozenset()
        self._properties: Schema = {}
        self._parameters: Schema = {}
        self._first_parameter = True

    @property
    def reasons(self) -> bool:
        """Whether what comes next is reasoning."""
        return self._state == "reasoning"

    @property
    def num_calls(self) -> int:
        """Tool calls begun so far."""
        return self._calls

    def push(self, text: str) -> list[Event]:
        """Take more text; returns what can be shown now."""
        self._buffer += text
        return self._run(final=False)

    def flush(self) -> list[Event]:
        """The rest, when no text will follow; an open call is closed so that its arguments are JSON."""
        self._run(final=True, keep=True)
        if self._state == "value":
            self._end_value()
        if self._state in ("function", "value"):
            self._end_function()
        return self._take()

    def _run(self, final: bool, keep: bool = False) -> list[Event]:
        step = {
            "reasoning": self._reasoning,
            "content": self._content,
            "call": self._call,
            "function": self._function,
            "value": self._in_value,
        }
        while self._buffer and step[self._state](final):
            pass
        return [] if keep else self._take()

    def _take(self) -> list[Event]:
        """The events so far, neighbours of one kind joined."""
        joined: list[Event] = []
        for event in self._events:
            if joined and event.kind != "call" and (joined[-1].kind, joined[-1].index) == (event.kind, event.index):
                joined[-1] = Event(event.kind, joined[-1].text + event.text, event.index)
            else:
                joined.append(event)
        self._events = []
        return joined

    def _reasoning(self, final: bool) -> bool:
        markers = (END_THINK, THINK) if self._tools is None else (END_THINK, THINK, CALL)
        at, marker = _find(self._buffer, markers)
        text = self._buffer[:at] if marker else self._buffer[: _safe_length(self._buffer, markers, final)]
        rest = self._buffer[len(text) :]
        if self._fresh:
            text = text.lstrip()
        # blanks at the end are shown only when more reasoning follows them
        shown = text.rstrip()
        if shown:
            self._events.append(Event("reasoning", shown))
            self._fresh = False
        blanks = text[len(shown) :]
        if marker is None:
            self._buffer = blanks + rest
            if final:
                self._buffer = ""
            return False
        self._buffer = rest[len(marker) :]
        if marker == THINK:
            self._buffer = blanks + self._buffer
            return True
        self._fresh = True
        self._after_think = True
        self._state = "content" if marker == END_THINK else "call"
        return True

    def _content(self, final: bool) -> bool:
        markers = (END_THINK, THINK)
        if self._tools is not None:
            markers = (*markers, CALL, FUNCTION, END_CALL, END_FUNCTION)
        at, marker = _find(self._buffer, markers)
        text = self._buffer[:at] if marker else self._buffer[: _safe_length(self._buffer, markers, final)]
        rest = self._buffer[len(text) :]
        if self._fresh:
            # after reasoning only newlines are the template's; between calls every blank is
            text = text.lstrip() if self._calls else text.lstrip("\n")
        # blanks wait where a call may follow, or the opening of late reasoning
        waits = self._tools is not None or not self._shown
        shown = text.rstrip() if waits and not (final and marker is None) else text
        if shown:
            self._events.append(Event("content", shown))
            self._fresh = False
            self._shown = True
        blanks = text[len(shown) :]
        if marker is None:
            self._buffer = "" if final else blanks + rest
            return False
        self._buffer = rest[len(marker) :]
        if marker == THINK and not self._shown and not self._calls and not self._after_think:
            self._state, self._fresh = "reasoning", True
        elif marker == CALL:
            self._state = "call"
        elif marker == FUNCTION:
            self._buffer = FUNCTION + self._buffer
            self._state = "call"
        else:
            self._buffer = blanks + self._buffer  # a tag without a partner
        return True

    def _call(self, final: bool) -> bool:
        """Behind <tool_call>: a function, or text that is none."""
        text = self._buffer.lstrip()
        if not text:
            self._buffer = ""
            return False
        if text.startswith(FUNCTION):
            ends = [i for mark in (">", "\n") if (i := text.find(mark)) >= 0]
            if not ends:
                self._buffer = "" if final else text
                return False
            name = text[len(FUNCTION) : min(ends)].strip()
            self._buffer = text[min(ends) + 1 :]
            self._begin_function(name)
            return True
        if FUNCTION.startswith(text) and not final:
            self._buffer = text
            return False
        self._buffer = text
        self._state, self._fresh = "content", True
        return True

    def _begin_function(self, name: str) -> None:
        parameters = (self._tools or {}).get(name) or {}
        self._parameters = parameters
        properties = parameters.get("properties")
        self._properties = properties if isinstance(properties, Mapping) else {}
        self._events.append(Event("call", name, self._calls))
        self._first_parameter = True
        self._state = "function"

    def _end_function(self) -> None:
        self._arguments("{}" if self._first_parameter else "}")
        self._calls += 1
        self._state, self._fresh = "content", True

    def _function(self, final: bool) -> bool:
        """Between the parameters of a call."""
        at = self._buffer.find("<")
        if at < 0:
            self._buffer = ""
            return False
        text = self._buffer = self._buffer[at:]
        if text.startswith(END_FUNCTION):
            self._buffer = text[len(END_FUNCTION) :]
            self._end_function()
            return True
        if any(text.startswith(tag) for tag in (END_CALL, CALL, FUNCTION)):
            self._end_function()  # </function> was forgotten
            return True
        if text.startswith(PARAMETER):
            end = text.find(">")
            if end < 0:
                self._buffer = "" if final else text
                return False
            self._buffer = text[end + 1 :]
            self._begin_value(text[len(PARAMETER) : end].strip())
            return True
        if not final and any(tag.startswith(text) for tag in (END_FUNCTION, END_CALL, CALL, FUNCTION, PARAMETER)):
            return False
        self._buffer = text[1:]
        return True

    def _begin_value(self, key: str) -> None:
        schema = self._properties.get(key)
        self._types = json_types(schema, self._parameters) if isinstance(schema, Mapping) else frozenset()
        opening = "{" if self._first_parameter else ", "
        self._first_parameter = False
        self._arguments(opening + json.dumps(key, ensure_ascii=False) + ": ")
        self._value = ""
        self._fresh = True
        if self._is_string:
            self._arguments('"')
        self._state = "value"

    @property
    def _is_string(self) -> bool:
        return self._types <= {"string"}

    def _in_value(self, final: bool) -> bool:
        if self._fresh and self._buffer.startswith("\n"):
            self._buffer = self._buffer[1:]
        self._fresh = False
        text, at = self._buffer, 0
        while found := _MAY_END.search(text, at):
            at = found.start()
            verdict, length = _value_end(text, at, final)
            if verdict == "yes":
                self._take_value(text[:at])
                self._buffer = text[at + length :]
                self._end_value()
                return True
            if verdict == "maybe":
                break
            at += 1
        else:
            at = len(text)
        self._take_value(text[:at])
        self._buffer = "" if final else text[at:]
        return False

    def _take_value(self, text: str) -> None:
        if self._is_string:
            if text:
                self._arguments(json.dumps(text, ensure_ascii=False)[1:-1])
        else:
            self._value += text

    def _end_value(self) -> None:
        self._arguments('"' if self._is_string else converted(self._value, self._types))
        self._state = "function"

    def _arguments(self, text: str) -> None:
        self._events.append(Event("arguments", text, self._calls))


def _find(text: str, markers: tuple[str, ...]) -> tuple[int, str | None]:
    """The marker that begins first, and where; of two at one place the longer."""
    found = [(at, -len(m), m) for m in markers if (at := text.find(m)) >= 0]
    if not found:
        return len(text), None
    at, _, marker = min(found)
    return at, marker


def _safe_length(text: str, markers: tuple[str, ...], final: bool) -> int:
    """How much of the text can be no part of a marker; at the end of the stream only a cut tag is left out."""
    longest = max(map(len, markers)) - 1
    shortest = _CUT_TAG if final else 1
    for length in range(min(longest, len(text)), shortest - 1, -1):
        if any(marker.startswith(text[-length:]) for marker in markers):
            return len(text) - length
    return len(text)


def _value_end(text: str, at: int, final: bool) -> tuple[Literal["yes", "no", "maybe"], int]:
    """Whether a parameter's value ends at `at`, and how much to skip there.

    It ends where </parameter> stands before the next tag of the call, or where that was forgotten and the whole call
    ends; anything else that looks like a tag is part of the value. The newline before the tag is not.
    """
    start = at + 1 if text[at] == "\n" else at
    for tag, followers, skipped in (
        (END_PARAMETER, _AFTER_PARAMETER, len(END_PARAMETER)),
        (END_FUNCTION, (END_CALL,), 0),
    ):
        if text.startswith(tag, start):
            rest = text[start + len(tag) :].lstrip()
            if any(rest.startswith(f) for f in followers):
                return "yes", start + skipped - at
            if not rest or any(f.startswith(rest) for f in followers):
                return ("yes", start + skipped - at) if final else ("maybe", 0)
        elif tag.startswith(text[start:]):
            if not final:
                return "maybe", 0
            if len(text) - start >= _CUT_TAG:
                return "yes", len(text) - at
    return "no", 0


def json_types(schema: Schema, root: Schema, depth: int = 8) -> frozenset[str]:
    """JSON types that a schema allows; empty where it does not say.

    root  the schema that "$ref" paths begin at
    """
    if depth == 0:
        return frozenset()
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        target: Any = root
        for part in reference[2:].split("/"):
            target = target.get(part) if isinstance(target, Mapping) else None
        return json_types(target, root, depth - 1) if isinstance(target, Mapping) else frozenset()
    declared = schema.get("type")
    names = [declared] if isinstance(declared, str) else declared if isinstance(declared, list) else []
    types = {name for name in names if isinstance(name, str)}
    if not types:
        for key in ("anyOf", "oneOf", "allOf"):
            parts = schema.get(key)
            for part in parts if isinstance(parts, list) else []:
                if isinstance(part, Mapping):
                    types |= json_types(part, root, depth - 1)
    if not types:
        values = schema.get("enum")
        values = values if isinstance(values, list) else [schema["const"]] if "const" in schema else []
        types = {_type_of(value) for value in values}
    return frozenset(types)


def converted(text: str, types: frozenset[str]) -> str:
    """JSON of a parameter's value: of a declared type if it reads as one, else the text as a string."""
    spelled = {"True": "true", "False": "false", "None": "null"}.get(text.strip(), text)
    try:
        value = json.loads(spelled, parse_constant=_no_constant)
        kind = _type_of(value)
        if kind == "number" and "integer" in types and value.is_integer():
            value, kind = int(value), "integer"
        if kind != "string" and (kind in types or (kind == "integer" and "number" in types)):
            return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        pass
    return json.dumps(text, ensure_ascii=False)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    return {int: "integer", float: "number", str: "string", list: "array"}.get(type(value), "object")
