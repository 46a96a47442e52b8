"""The grammar of an answer that must be tool calls, in the form of the model's chat template.

Parameters come in the order they are declared, required ones always. Strings are raw text, other values JSON of their
schema. Source: xgrammar 0.2, structural_tag.py, for the names of the formats.
"""

import json
from collections.abc import Mapping
from typing import Any

from stepfloor.request import Grammar
from stepfloor.stream.parser import (
    CALL,
    END_CALL,
    END_FUNCTION,
    END_PARAMETER,
    END_THINK,
    FUNCTION,
    PARAMETER,
    Schema,
    json_types,
)

Format = dict[str, Any]
MAX_BLANKS = 8


def calls_grammar(schemas: Mapping[str, Schema], many: bool, thinking: bool) -> Grammar:
    """One call of one of these functions, or one and more where `many`; behind the reasoning where `thinking`."""
    call: Format = {"type": "or", "elements": [_call(name, schema) for name, schema in schemas.items()]}
    if many:
        further = {"type": "star", "content": _sequence(_text("\n"), call)}
        call = _sequence(call, further)
    return Grammar(
        "structural_tag", json.dumps({"type": "structural_tag", "format": call}), END_THINK if thinking else None
    )


def _call(name: str, schema: Schema) -> Format:
    properties = schema.get("properties")
    required = schema.get("required")
    parameters: list[Format] = []
    if isinstance(properties, Mapping) and properties:
        for key, value in properties.items():
            content = _value(value if isinstance(value, Mapping) else {}, schema)
            parameter = _tag(f"{PARAMETER}{key}>\n", content)
            optional = not isinstance(required, list) or key not in required
            parameters.append({"type": "optional", "content": parameter} if optional else parameter)
    else:
        any_parameter = _sequence(_text(PARAMETER), {"type": "regex", "pattern": "[A-Za-z_][A-Za-z0-9_]*"}, _tag(">\n"))
        parameters.append({"type": "star", "content": any_parameter})
    return _sequence(_text(f"{CALL}\n{FUNCTION}{name}>\n"), *parameters, _text(f"{END_FUNCTION}\n{END_CALL}"))


def _value(schema: Schema, root: Schema) -> Format:
    values = schema.get("enum")
    if isinstance(values, list) and values and all(isinstance(value, str) and value for value in values):
        return {"type": "or", "elements": [_text(value) for value in values]}
    types = json_types(schema, root)
    if not types or "string" in types:
        longest = schema.get("maxLength")
        text: Format = {"type": "any_text"}
        return text | ({"max_chars": longest} if types == {"string"} and isinstance(longest, int) else {})
    definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
    return {"type": "json_schema", "json_schema": {**definitions, **schema}, "max_whitespace_cnt": MAX_BLANKS}


def _tag(begin: str, content: Format | None = None) -> Format:
    return {"type": "tag", "begin": begin, "content": content or {"type": "any_text"}, "end": f"\n{END_PARAMETER}\n"}


def _text(value: str) -> Format:
    return {"type": "const_string", "value": value}


def _sequence(*elements: Format) -> Format:
    return {"type": "sequence", "elements": list(elements)}
