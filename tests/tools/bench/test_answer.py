"""A streamed answer: what counts as generated, when it came, how many tokens it was."""

import json
from typing import Any

import pytest

from stepfloor.tools.bench.answer import Answer


def answer_of(*events: dict[str, Any] | str) -> Answer:
    """Each event arrives at the second of its number."""
    answer = Answer()
    for at, event in enumerate(events):
        data = event if isinstance(event, str) else json.dumps(event)
        answer.feed(float(at), f"data: {data}\n\n".encode())
    return answer


def delta(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": None}]}


@pytest.mark.parametrize(
    "first",
    [
        {"content": "Hi"},
        {"reasoning_content": "Hm"},
        {"reasoning": "Hm"},
        {"tool_calls": [{"index": 0, "function": {"name": "look", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a"'}}]},
    ],
)
def test_the_first_token_is_of_any_kind(first: dict[str, Any]) -> None:
    """Guards against: a thinking model whose first token seems to come after its reasoning."""
    answer = answer_of(delta(role="assistant", content=""), delta(**first), delta(content="more"))
    assert answer.chunk_s == [1.0, 2.0]


def test_tokens_are_those_of_usage() -> None:
    """Guards against: chunks counted as tokens; a count without usage is none."""
    chunks = [{"choices": [{"index": 0, "text": " a b c"}]}] * 2
    usage = {"prompt_tokens": 7, "completion_tokens": 6, "prompt_tokens_details": {"cached_tokens": 4}}
    answer = answer_of(*chunks, {"choices": [], "usage": usage}, "[DONE]")
    assert (answer.output_tokens, answer.prompt_tokens, answer.cached_tokens) == (6, 7, 4)
    assert answer.finished
    assert answer.chunk_tokens == []
    assert answer_of(*chunks, "[DONE]").output_tokens is None


def test_a_token_without_text_is_a_token() -> None:
    """Guards against: a token that waits for the rest of its character missing from times and counts."""
    by_ids = answer_of(*({"choices": [{"text": t, "token_ids": [i]}]} for i, t in enumerate(("", "é"))))
    assert (by_ids.chunk_s, by_ids.chunk_tokens, by_ids.output_tokens) == ([0.0, 1.0], [1, 2], 2)
    by_usage = answer_of(*({"choices": [{"text": ""}], "usage": {"completion_tokens": n}} for n in (0, 1, 1, 3)))
    assert (by_usage.chunk_s, by_usage.chunk_tokens) == ([1.0, 3.0], [1, 3])


def test_llamacpps_timings_count_as_well() -> None:
    """Guards against: a server whose chunks have timings in place of usage."""
    events = ({"choices": [{"text": "a"}], "timings": {"predicted_n": n, "cache_n": 5}} for n in (1, 2))
    answer = answer_of(*events)
    assert (answer.chunk_tokens, answer.output_tokens, answer.cached_tokens) == ([1, 2], 2, 5)


def test_pieces_may_be_torn_anywhere() -> None:
    """Guards against: an event that is lost because it arrives in two pieces."""
    data = b"".join(f"data: {json.dumps(delta(content=f'word {i} ü'))}\r\n\r\n".encode() for i in range(3))
    for size in (1, 7, 50):
        answer = Answer()
        for at in range(0, len(data), size):
            answer.feed(at / 1000, data[at : at + size])
        assert answer.text == "word 0 üword 1 üword 2 ü"


def test_errors_inside_a_stream_are_seen() -> None:
    """Guards against: an error event in a stream with status 200 counted as an answer."""
    assert answer_of(delta(content="a"), {"error": {"message": "out of memory"}}).error == "out of memory"
    assert "not JSON" in (answer_of("{broken").error or "")
