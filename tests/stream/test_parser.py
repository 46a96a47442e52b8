"""Reasoning, content and tool calls out of generated text: no tag leaks, and no split of the text shows."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stepfloor.stream.parser import Parser, converted, json_types

EDIT = {"type": "object", "properties": {"path": {"type": "string"}, "text": {"type": "string"}}}
TOOLS: dict[str, Any] = {
    "edit": EDIT,
    "set": {
        "properties": {
            "count": {"type": "integer"},
            "ratio": {"type": "number"},
            "on": {"type": "boolean"},
            "name": {"type": ["string", "null"]},
            "list": {"type": "array"},
            "either": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
            "kind": {"enum": ["a", "b"]},
            "ref": {"$ref": "#/$defs/point"},
            "any": {},
        },
        "$defs": {"point": {"type": "object"}},
    },
}


@dataclass
class Answer:
    """What a client puts together from the events."""

    reasoning: str = ""
    content: str = ""
    names: list[str] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)


def parse(parts: Sequence[str], thinking: bool = False, tools: dict[str, Any] | None = None) -> Answer:
    parser, answer = Parser(thinking, tools), Answer()
    for events in (*map(parser.push, parts), parser.flush()):
        for event in events:
            assert event.text or event.kind == "call"
            if event.kind == "reasoning":
                answer.reasoning += event.text
            elif event.kind == "content":
                answer.content += event.text
            elif event.kind == "call":
                assert event.index == len(answer.names)
                answer.names.append(event.text)
                answer.arguments.append("")
            else:
                assert event.index == len(answer.names) - 1
                answer.arguments[-1] += event.text
    assert parser.num_calls == len(answer.names)
    return answer


def call(function: str, **parameters: str) -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters.items())
    return f"<tool_call>\n<function={function}>\n{inner}</function>\n</tool_call>"


def cut(text: str, marks: Sequence[int]) -> list[str]:
    edges = [0, *sorted(m for m in set(marks) if 0 < m < len(text)), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


def every_cut(text: str) -> list[list[str]]:
    """One letter at a time, and every place to cut in two."""
    return [list(text), *([text[:i], text[i:]] for i in range(len(text) + 1))]


def test_reasoning_ends_where_it_says() -> None:
    """The end of the reasoning landed in content when a step brought several tokens."""
    for parts in (
        ["done", ".", "</think>", "\n\n", "Hello"],
        ["done.</think>\n\nHello"],
        list("done.</think>\n\nHello"),
    ):
        assert parse(parts, thinking=True) == Answer("done.", "Hello")


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<think>\nso\n</think>\n\nyes", "so", "yes"),  # the opening tag again
        ("so</think>yes</think> no", "so", "yes no"),  # a second end
        ("so", "so", ""),  # never ends
        ("\n\n</think>\n\nyes", "", "yes"),
        ("so < think </thin", "so < think", ""),  # cut in the tag
    ],
)
def test_tags_of_reasoning_never_leak(text: str, reasoning: str, content: str) -> None:
    for parts in every_cut(text):
        assert parse(parts, thinking=True) == Answer(reasoning, content)


def test_reasoning_that_ends_with_a_call() -> None:
    for parts in every_cut("look first\n" + call("edit", path="a")):
        assert parse(parts, True, TOOLS) == Answer("look first", "", ["edit"], ['{"path": "a"}'])


def test_late_reasoning_is_reasoning() -> None:
    """Thinking was off and the model thinks all the same."""
    assert parse(["<think>\nhm\n</think>\n\nyes"]) == Answer("hm", "yes")
    assert parse(["what is <think> for?"]).content == "what is  for?"


HARD = 'say "hi" \\ there\n</param > </parameter> {"a": "😀"}\n\n<parameter=x>'


def test_arguments_are_json_for_every_split() -> None:
    """Streamed arguments were cut off and were not JSON: quotes, backslashes, newlines, text like tags."""
    text = "I edit.\n\n" + call("edit", path="a/b", text=HARD) + "\n" + call("edit", path="c", text="")
    for parts in every_cut(text):
        answer = parse(parts, tools=TOOLS)
        assert (answer.content, answer.names) == ("I edit.", ["edit", "edit"])
        assert [json.loads(a) for a in answer.arguments] == [{"path": "a/b", "text": HARD}, {"path": "c", "text": ""}]


def test_the_first_delta_of_a_call_has_its_name() -> None:
    parser = Parser(False, TOOLS)
    events = [e for letter in call("edit", path="ab") for e in parser.push(letter)] + parser.flush()
    assert (events[0].kind, events[0].text, events[0].index) == ("call", "edit", 0)
    assert [e.text for e in events[1:]] == ['{"path": "', "a", "b", '"}']


def test_values_take_their_declared_type() -> None:
    text = call(
        "set",
        count="5",
        ratio="2",
        on="True",
        name="null",
        list='[1, "é"]',
        either="x",
        kind="a",
        ref='{"x": 1}',
        any="5",
    )
    for parts in (list(text), [text]):
        (arguments,) = parse(parts, tools=TOOLS).arguments
        assert json.loads(arguments) == {
            "count": 5, "ratio": 2, "on": True, "name": None, "list": [1, "é"], "either": "x", "kind": "a",
            "ref": {"x": 1}, "any": "5",
        }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        ("five", {"integer"}, "five"),
        ("5.0", {"integer"}, 5),
        ("1e999", {"number"}, "1e999"),
        ("NaN", {"number"}, "NaN"),
        ('"quoted"', {"string", "null"}, '"quoted"'),
        ("[" * 100_000, {"array"}, "[" * 100_000),
        ("12", {"string", "integer"}, 12),
    ],
)
def test_what_does_not_convert_stays_a_string(text: str, types: set[str], value: object) -> None:
    assert json.loads(converted(text, frozenset(types))) == value


def test_types_of_odd_schemas() -> None:
    loop: dict[str, Any] = {"$defs": {"a": {"$ref": "#/$defs/a"}}}
    assert json_types({"$ref": "#/$defs/a"}, loop) == frozenset()
    assert json_types({"$ref": "#/nowhere"}, loop) == frozenset()
    assert json_types({"type": 3, "anyOf": [1, {"const": None}]}, {}) == {"null"}


@pytest.mark.parametrize(
    ("text", "content", "arguments"),
    [
        ("<function=edit>\n<parameter=path>\na\n</parameter>\n</function>\n</tool_call>", "", ['{"path": "a"}']),
        ("<tool_call>\n<function=edit>\n<parameter=path>\na\n</parameter>\n</tool_call>ok", "ok", ['{"path": "a"}']),
        ("<tool_call>\n<function=edit>\n<parameter=path>\na\n</function>\n</tool_call>", "", ['{"path": "a"}']),
        ("<tool_call>\n<function=edit>\n</function>\n</tool_call>", "", ["{}"]),
        ("<tool_call>\n<function=edit>\n<parameter=path>\na b", "", ['{"path": "a b"}']),
        ("<tool_call>\n<function=edit>\n<parameter=path>\na b\n</para", "", ['{"path": "a b"}']),
        ("<tool_call>\n<function=edit>\n<parameter=pa", "", ["{}"]),
        ("<tool_call>\n<function=ed", "", []),
        ("yes <tool_ca", "yes ", []),
        ("<tool_call>\n{}\n</tool_call>", "{}\n", []),
        ("</tool_call>a</think>b", "ab", []),
        ("a < b", "a < b", []),
    ],
)
def test_broken_calls_leave_no_tags(text: str, content: str, arguments: list[str]) -> None:
    for parts in every_cut(text):
        answer = parse(parts, tools=TOOLS)
        assert (answer.content, answer.arguments) == (content, arguments)


def test_without_tools_calls_are_text() -> None:
    text = call("edit", path="a") + " "
    assert parse(list(text)).content == text


def strip_tags(text: str) -> str:
    for tag in ("<think", "</think", "<tool_call", "</tool_call", "<function", "</function", "</parameter", "<param"):
        text = text.replace(tag, "")
    return text


# letters that make tags, newlines and characters of several bytes
TEXT = st.text(alphabet=st.sampled_from('abc <>/="\\\n{}é😀'), max_size=30).map(strip_tags)
CALLS = st.lists(st.tuples(TEXT, TEXT), max_size=3)


@settings(max_examples=300)
@given(TEXT, TEXT, CALLS, st.lists(st.integers(0, 400), max_size=12))
@example("", "", [("\n", "</param")], [])
def test_round_trip(reasoning: str, content: str, calls: list[tuple[str, str]], marks: list[int]) -> None:
    """Any answer, written as the template writes it and cut anywhere, is read back whole."""
    written = "\n".join(call("edit", path=path, text=text) for path, text in calls)
    content, reasoning = content.strip(), reasoning.strip()
    text = f"{reasoning}\n</think>\n\n{content}" + ("\n\n" if content and calls else "") + written
    answer = parse(cut(text, marks), True, TOOLS)
    assert (answer.reasoning, answer.content) == (reasoning, content)
    assert [json.loads(a) for a in answer.arguments] == [{"path": p, "text": t} for p, t in calls]


TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<function=set>", "<function=", "</function>")
PARTS = st.sampled_from([*TAGS, "<parameter=count>", "<parameter=", "</parameter>", "\n", " ", "a", "5", "<", ">", '"'])


@settings(max_examples=500)
@given(st.lists(PARTS, max_size=25).map("".join), st.lists(st.integers(0, 200), max_size=12), st.booleans())
def test_any_text_any_split(text: str, marks: list[int], thinking: bool) -> None:
    """Whatever the model writes: the split never shows, arguments are JSON, and no whole tag is shown as content."""
    whole = parse([text], thinking, TOOLS)
    assert parse(cut(text, marks), thinking, TOOLS) == whole == parse(list(text), thinking, TOOLS)
    for arguments in whole.arguments:
        assert isinstance(json.loads(arguments), dict)
    assert not any(tag in whole.content + whole.reasoning for tag in ("<think>", "</think>", "<tool_call>"))
