"""Cases from the field, through the whole HTTP path, for every split of the tokens into steps of 1 to 4.

The names C-API, C-SPEC and C-H are those of the list of cases. Where each of them is tested, files under tests/; "all"
is every split into steps of 1 to 4, and "no" says that a split changes nothing in what is tested there:

    case       splits, test
    C-API-01   all server/test_protocol_cases.py test_a_character_in_two_tokens
    C-API-03   all server/test_protocol_cases.py test_a_stop_string_in_two_tokens
    C-API-05   all server/test_protocol_cases.py test_reasoning_ends_with_a_stop_list
    C-API-07   all server/test_protocol_cases.py test_streamed_arguments_are_json_for_every_split
    C-API-08   all server/test_protocol_cases.py test_usage_of_reasoning_that_is_cut_off
    C-API-08   all server/test_protocol_cases.py test_reasoning_tokens_are_counted_to_its_end
    C-API-10   all server/test_protocol_cases.py test_the_context_is_never_shortened
    C-API-12   no  test_engine.py                test_a_cancelled_request_stops_and_gives_everything_back
    C-API-12   no  server/test_life.py           test_two_hundred_clients_that_leave
    C-SPEC-01  all server/test_protocol_cases.py test_tokens_behind_an_end_token_are_not_shown
    C-SPEC-01  all test_every_split.py           test_an_end_and_what_is_counted
    C-SPEC-02  all server/test_protocol_cases.py test_exactly_max_tokens_arrive
    C-SPEC-02  all test_every_split.py           test_a_limit
    C-SPEC-03  all test_every_split.py           test_an_end_and_what_is_counted
    C-SPEC-03  no  server/test_routes.py         test_acceptance_is_exported_by_position
    C-SPEC-04  all test_every_split.py           test_greedy_text_is_that_without_drafts
    C-SPEC-04  no  test_every_split.py           test_twenty_prompts
    C-SPEC-04  no  server/test_clients.py        test_chat_streamed_drafted_or_neither
    C-SPEC-06  all test_every_split.py           test_a_grammar_behind_reasoning
    C-SPEC-06  no  test_constraints.py           test_drafts_behind_the_end_of_the_reasoning_are_judged_by_the_grammar
    C-SPEC-08  all server/test_protocol_cases.py test_one_logprob_for_each_delivered_token
    C-SPEC-08  all test_every_split.py           test_logprobs
    C-H-01     all server/test_protocol_cases.py test_logits_that_are_not_finite_end_in_an_error
    C-H-01     all server/test_protocol_cases.py test_an_impossible_id_is_never_text
    C-H-01     all server/test_protocol_cases.py test_repetition_is_counted_and_is_no_error
    C-H-01     no  step/test_speculation.py      test_logits_that_are_not_finite_end_their_own_request
    C-H-01     no  test_constraints.py           test_a_grammar_that_allows_nothing_ends_in_an_error
"""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from tests.server.scripted import EOS, FIRST, Scripted, crossings, scripted, splits

PLAIN = {"prompt": "x", "temperature": 0}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
NO_THINKING = {**CHAT, "chat_template_kwargs": {"enable_thinking": False}}


def text_of(events: list[Any]) -> str:
    return "".join(c["text"] for e in events if e != "[DONE]" for c in e["choices"])


def joined(events: list[Any]) -> dict[str, Any]:
    """What a client puts together from the chunks of one chat answer."""
    answer: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "reasons": []}
    for event in events[:-1]:
        for choice in event["choices"]:
            delta = choice["delta"]
            answer["content"] += delta.get("content") or ""
            answer["reasoning"] += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls", ()):
                if call["index"] == len(answer["calls"]):
                    assert call["id"]
                    assert call["type"] == "function"
                    answer["calls"].append([call["function"]["name"], ""])
                assert call["index"] == len(answer["calls"]) - 1
                answer["calls"][-1][1] += call["function"].get("arguments", "")
            if choice["finish_reason"] is not None:
                answer["reasons"].append(choice["finish_reason"])
    assert events[-1] == "[DONE]"
    return answer


def whole(response: Any) -> dict[str, Any]:
    """The same of an answer that was not streamed."""
    (choice,) = response.json()["choices"]
    message = choice["message"]
    calls = [[c["function"]["name"], c["function"]["arguments"]] for c in message.get("tool_calls", ())]
    return {
        "content": message["content"] or "",
        "reasoning": message["reasoning_content"] or "",
        "calls": calls,
        "reasons": [choice["finish_reason"]],
    }


def test_a_character_in_two_tokens() -> None:
    """C-API-01: half a character was shown as replacement characters."""
    pieces = [b"\x48\x69\x20", b"\xf0\x9f", b"\x98\x80", b"\x21", EOS]
    server = scripted(pieces)
    for server.engine.sizes in splits(len(pieces)):
        events = server.events("/v1/completions", **PLAIN)
        assert text_of(events) == "Hi 😀!"
        assert not any("�" in c["text"] for e in events[:-1] for c in e["choices"])
        answer = server.post("/v1/completions", **PLAIN).json()
        assert answer["choices"][0]["text"] == "Hi 😀!"
        assert answer["usage"]["completion_tokens"] == 4


def test_a_stop_string_in_two_tokens() -> None:
    """C-API-03: the first part of a stop string was sent; only that suffix may wait."""
    pieces = ["The", " quick", " br", "own", " f", "ox", " jumps", EOS]
    server = scripted(pieces)
    for server.engine.sizes in splits(len(pieces)):
        events = server.events("/v1/completions", **PLAIN, stop=["own fox"])
        assert text_of(events) == "The quick br"
        assert events[-2]["choices"][0]["finish_reason"] == "stop"
        assert events[-2]["choices"][0]["stop_reason"] == "own fox"
    one_by_one = scripted(pieces).events("/v1/completions", **PLAIN, stop=["own fox"])
    assert [e["choices"][0]["text"] for e in one_by_one[:3]] == ["The", " quick", " br"]


def test_reasoning_ends_with_a_stop_list() -> None:
    """C-API-05: with a stop list and several tokens a step the end of the reasoning landed in content."""
    pieces = ["done", ".", "</think>", "\n\n", "Hello", EOS]
    server = scripted(pieces)
    for stop, server.engine.sizes in itertools.product([None, ["QQQQQQQQ"]], splits(len(pieces))):
        for stream in (True, False):
            if stream:
                answer = joined(server.events("/v1/chat/completions", **CHAT, stop=stop))
            else:
                answer = whole(server.post("/v1/chat/completions", **CHAT, stop=stop))
            assert (answer["reasoning"], answer["content"]) == ("done.", "Hello")


EDIT = {
    "type": "function",
    "function": {
        "name": "edit",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}, "text": {"type": "string"}}},
    },
}
VALUE = 'a "b" \\ c\n</param 😀 {'
CALL = [
    "<tool_call>",
    "\n<function=",
    "edit>\n<parameter=path>\na\n</parameter>\n",
    "<parameter=text>\n",
    'a "b" \\',
    " c\n</param",
    b" " + "😀".encode()[:2],
    "😀".encode()[2:] + b" {",
    "\n</parameter>\n</function>",
    "\n</tool_call>",
    EOS,
]


def test_streamed_arguments_are_json_for_every_split() -> None:
    """C-API-07: streamed tool-call arguments were cut off and were not JSON."""
    expected = whole(scripted(CALL).post("/v1/chat/completions", **NO_THINKING, tools=[EDIT]))
    assert [json.loads(a) for _, a in expected["calls"]] == [{"path": "a", "text": VALUE}]
    server = scripted(CALL)
    for server.engine.sizes in splits(len(CALL)):
        events = server.events("/v1/chat/completions", **NO_THINKING, tools=[EDIT])
        answer = joined(events)
        assert answer == expected
        assert answer["reasons"] == ["tool_calls"]


def test_usage_of_reasoning_that_is_cut_off() -> None:
    """C-API-08: reasoning_tokens was larger than completion_tokens when a draft crossed the limit."""
    server = scripted(["hm "], sizes=(8,))
    events = server.events("/v1/chat/completions", **CHAT, max_tokens=64, stream_options={"include_usage": True})
    usage = events[-2]["usage"]
    assert events[-2]["choices"] == []
    assert usage["completion_tokens"] == 64
    assert usage["completion_tokens_details"]["reasoning_tokens"] == 64
    assert usage["total_tokens"] == usage["prompt_tokens"] + 64
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0
    assert not any("usage" in e for e in events[:-2])
    assert joined(events)["reasoning"].count("hm") == 64
    server = scripted(["hm "])
    for server.engine.sizes in crossings(5):
        usage = server.post("/v1/chat/completions", **CHAT, max_tokens=5).json()["usage"]
        assert usage["completion_tokens"] == usage["completion_tokens_details"]["reasoning_tokens"] == 5


def test_reasoning_tokens_are_counted_to_its_end() -> None:
    """C-API-08, where the reasoning does end: what a step brings behind it is no reasoning."""
    pieces = ["a", "b", "</think>", "\n\n", "c", "d", EOS]
    server = scripted(pieces)
    for server.engine.sizes in splits(len(pieces)):
        usage = server.post("/v1/chat/completions", **CHAT).json()["usage"]
        assert usage["completion_tokens"] == 6
        assert usage["completion_tokens_details"]["reasoning_tokens"] == 3


@pytest.mark.parametrize("max_tokens", [None, 1, 4096])
@pytest.mark.parametrize("length", [4095, 4096, 4097])
def test_the_context_is_never_shortened(length: int, max_tokens: int | None) -> None:
    """C-API-10: a prompt longer than the context was shortened silently and answered with 200."""
    server = scripted(["a"])
    if length == 4095:
        for server.engine.sizes in crossings(1):
            usage = server.post("/v1/completions", prompt=[7] * length, max_tokens=max_tokens).json()["usage"]
            assert (usage["prompt_tokens"], usage["completion_tokens"]) == (4095, 1)
        return
    response = server.post("/v1/completions", prompt=[7] * length, max_tokens=max_tokens)
    error = response.json()["error"]
    assert response.status_code == 400
    assert (error["type"], error["code"]) == ("invalid_request_error", "context_length_exceeded")
    assert "4096" in error["message"]
    assert str(length) in error["message"]
    assert server.post("/v1/completions", **PLAIN, max_tokens=2).json()["choices"][0]["text"] == "aa"


@pytest.mark.parametrize("end", [EOS, 0])
@pytest.mark.parametrize("place", range(1, 7))
def test_tokens_behind_an_end_token_are_not_shown(place: int, end: int) -> None:
    """C-SPEC-01: an end token that was accepted in the middle of a draft was followed by more."""
    pieces: list[str | int] = ["a", "b", "c", "d", "e", "f"]
    pieces.insert(place, end)
    server = scripted(pieces)
    for server.engine.sizes in ((6,), *splits(len(pieces))):
        answer = server.post("/v1/completions", **PLAIN).json()
        assert answer["choices"][0]["text"] == "abcdef"[:place]
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["usage"]["completion_tokens"] == place


@pytest.mark.parametrize("max_tokens", range(1, 10))
def test_exactly_max_tokens_arrive(max_tokens: int) -> None:
    """C-SPEC-02: fewer tokens than max_tokens arrived although usage said the full number."""
    server = scripted(["ab"])
    for server.engine.sizes in crossings(max_tokens):
        events = server.events(
            "/v1/completions", **PLAIN, max_tokens=max_tokens, stream_options={"include_usage": True}
        )
        assert text_of(events) == "ab" * max_tokens
        assert events[-2]["usage"]["completion_tokens"] == max_tokens
        assert events[-3]["choices"][0]["finish_reason"] == "length"


def test_one_logprob_for_each_delivered_token() -> None:
    """C-SPEC-08: none for rejected drafts or tokens after a stop; the bytes join to the text."""
    pieces = [b"H\xc3", b"\xa9 ", b"x", "END", "y", EOS]
    server = scripted(pieces)
    for server.engine.sizes in splits(len(pieces)):
        body = {**NO_THINKING, "logprobs": True, "top_logprobs": 5, "stop": ["END"]}
        events = server.events("/v1/chat/completions", **body)
        entries = [x for e in events[:-1] for c in e["choices"] if c["logprobs"] for x in c["logprobs"]["content"]]
        (choice,) = server.post("/v1/chat/completions", **body).json()["choices"]
        assert entries == choice["logprobs"]["content"]
        assert len(entries) == 4
        assert bytes(b for entry in entries for b in entry["bytes"]).decode() == "Hé xEND"
        assert all(len(entry["top_logprobs"]) == 5 for entry in entries)
        assert choice["message"]["content"] == "Hé x"


def faulty(server: Scripted) -> tuple[Any, list[Any]]:
    response = server.post("/v1/completions", **PLAIN)
    return response, server.events("/v1/completions", **PLAIN)


def test_logits_that_are_not_finite_end_in_an_error() -> None:
    """C-H-01: NaN logits became token 0 until the limit, with status 200."""
    server = scripted(["a"])
    for server.engine.sizes in splits(6):
        for failing in range(len(server.engine.sizes)):
            server.engine.fail_at = failing
            response, events = faulty(server)
            assert response.status_code == 500
            assert f"step {failing + 1}:" in response.json()["error"]["message"]
            assert f"step {failing + 1}:" in events[-2]["error"]["message"]
            assert events[-1] == "[DONE]"
            assert text_of(events[:-2]) == "a" * (sum(server.engine.sizes[: failing + 1]) - 1)


@pytest.mark.parametrize("token", [-1, 4294967295])
def test_an_impossible_id_is_never_text(token: int) -> None:
    """C-H-01, a sampler's result that is no token."""
    server = scripted(["a", "b", "c", token, "d"])
    for server.engine.sizes in splits(5):
        response, events = faulty(server)
        assert response.status_code == 500
        assert text_of(events[:-2]) == "abc"


def test_repetition_is_counted_and_is_no_error() -> None:
    """C-H-01, 64 equal tokens in a row."""
    server = scripted(["!"])
    for number, server.engine.sizes in enumerate(splits(4), 1):
        assert server.post("/v1/completions", **PLAIN, max_tokens=130).status_code == 200
        page = server.get("/metrics").text
        assert f'stepfloor:repeated_token_runs_total{{engine="0",model_name="small"}} {number}.0' in page
    other = scripted(["a", "b"] * 100)
    other.post("/v1/completions", **PLAIN, max_tokens=130)
    assert 'stepfloor:repeated_token_runs_total{engine="0",model_name="small"} 0.0' in other.get("/metrics").text


def test_first_ids_are_the_scripts() -> None:
    """The tests above say nothing if the script's ids are not what is delivered."""
    server = scripted(["a", "b", EOS])
    answer = server.post("/v1/completions", **PLAIN, return_token_ids=True).json()
    assert answer["choices"][0]["token_ids"] == [FIRST, FIRST + 1]


def test_the_table_above_is_true() -> None:
    """A renamed test would leave its case without one that anybody finds."""
    tests = Path(__file__).parents[1]
    rows = [line.split() for line in (__doc__ or "").splitlines() if line.startswith("    C-")]
    assert len(rows) > 20
    for _, _, file, name in rows:
        assert f"def {name}(" in (tests / file).read_text(encoding="utf-8"), (file, name)
