"""The grammar of forced calls: it takes what the template writes, and nothing that does not end or validate."""

import json
from typing import Any

import pytest
import xgrammar

from stepfloor.server.calls import calls_grammar
from stepfloor.stream.parser import Parser

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "mode": {"enum": ["r", "w"]},
        "lines": {"type": "array", "items": {"$ref": "#/$defs/line"}},
        "deep": {"type": ["boolean", "null"]},
    },
    "required": ["path", "mode"],
    "$defs": {"line": {"type": "integer"}},
}
SCHEMAS = {"edit": SCHEMA, "free": {}}


def call(name: str, *parameters: tuple[str, str]) -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters)
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


EDIT = call("edit", ("path", 'a "b"\n</param> <c>'), ("mode", "w"), ("lines", "[1, 2]"), ("deep", "null"))


@pytest.fixture(scope="module")
def compiler() -> xgrammar.GrammarCompiler:
    letters = [bytes([i]) for i in range(256)]
    return xgrammar.GrammarCompiler(xgrammar.TokenizerInfo(letters, stop_token_ids=[0]), max_threads=1)


def takes(compiler: xgrammar.GrammarCompiler, text: str, many: bool = True) -> bool:
    matcher = xgrammar.GrammarMatcher(compiler.compile_structural_tag(calls_grammar(SCHEMAS, many, False).text))
    return all(matcher.accept_string(bytes([letter])) for letter in text.encode()) and matcher.is_completed()


@pytest.mark.parametrize(
    ("text", "good"),
    [
        (EDIT, True),
        (call("edit", ("path", ""), ("mode", "r")), True),
        (call("free"), True),
        (call("free", ("anything", "at all"), ("x", "{")), True),
        (EDIT + "\n" + call("free"), True),
        (call("edit", ("path", "a")), False),  # mode is required
        (call("edit", ("path", "a"), ("mode", "x")), False),
        (call("edit", ("path", "a"), ("mode", "r"), ("lines", '["x"]')), False),
        (call("edit", ("path", "a"), ("mode", "r"), ("lines", "[1]" + " " * 100)), False),
        (call("edit", ("path", "a"), ("mode", "r")).replace(">\n<param", ">\n\n<param"), False),
        (call("other"), False),
        ("I call edit.", False),
    ],
)
def test_what_it_takes(compiler: xgrammar.GrammarCompiler, text: str, good: bool) -> None:
    assert takes(compiler, text) is good


def test_one_call_where_only_one_is_wanted(compiler: xgrammar.GrammarCompiler) -> None:
    assert takes(compiler, EDIT, many=False)
    assert not takes(compiler, EDIT + "\n" + call("free"), many=False)


def test_the_parser_reads_what_it_takes() -> None:
    parser = Parser(False, SCHEMAS)
    events = [*parser.push(EDIT), *parser.flush()]
    arguments = json.loads("".join(e.text for e in events if e.kind == "arguments"))
    assert arguments == {"path": 'a "b"\n</param> <c>', "mode": "w", "lines": [1, 2], "deep": None}


def test_it_begins_behind_the_reasoning() -> None:
    assert calls_grammar(SCHEMAS, True, True).after == "</think>"
