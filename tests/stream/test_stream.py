"""Pieces: the same text and ids for every number of tokens a step delivers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepfloor.errors import UserError
from stepfloor.request import Piece, Request
from stepfloor.stream.stream import Stream

FOX = [b"The", b" quick", b" br", b"own", b" f", b"ox", b" jumps"]


def run(stream: Stream, ids: list[int], steps: list[int]) -> list[Piece]:
    """Push the ids in steps of these sizes, the last with finish_reason length, until the stream says stop."""
    pieces: list[Piece] = []
    at = 0
    while at < len(ids):
        size = steps[len(pieces) % len(steps)]
        step = ids[at : at + size]
        at += size
        pieces.append(stream.push("r", step, "length" if at >= len(ids) else None))
        if pieces[-1].finish_reason:
            break
    return pieces


@pytest.mark.parametrize("step", [1, 2, 3, 4, 7])
def test_stop_string(step: int) -> None:
    """Tokens after a stop string must not be delivered, though a step with accepted drafts brought them."""
    stream = Stream(FOX.__getitem__)
    stream.open(Request("r", (), stop=("own fox",)))
    pieces = run(stream, list(range(7)), [step])
    assert "".join(p.text for p in pieces) == "The quick br"
    assert [i for p in pieces for i in p.token_ids] == [0, 1, 2, 3, 4, 5]
    assert pieces[-1].finish_reason == "stop"


@given(st.text(max_size=40), st.integers(1, 4), st.lists(st.integers(1, 4), min_size=1, max_size=8))
def test_round_trip(whole: str, token_bytes: int, steps: list[int]) -> None:
    data = whole.encode()
    tokens = [data[i : i + token_bytes] for i in range(0, len(data), token_bytes)]
    stream = Stream(tokens.__getitem__)
    stream.open(Request("r", ()))
    pieces = run(stream, list(range(len(tokens))), steps)
    assert "".join(p.text for p in pieces) == whole
    assert [i for p in pieces for i in p.token_ids] == list(range(len(tokens)))


def test_requests_do_not_share_text() -> None:
    halves = [b"\xf0\x9f", b"\x98\x80", b"a"]
    stream = Stream(halves.__getitem__)
    for name in ("one", "two"):
        stream.open(Request(name, ()))
    assert stream.push("one", [0]).text == ""
    assert stream.push("two", [2]).text == "a"
    assert stream.push("one", [1], "length") == Piece("one", (1,), ("😀",), "length")


def test_the_end_flushes_what_waited() -> None:
    stream = Stream([b"own", b"\xf0\x9f"].__getitem__)
    stream.open(Request("r", (), stop=("own fox",)))
    assert stream.push("r", [0]).text == ""
    assert stream.push("r", [1], "length") == Piece("r", (1,), ("", "own�"), "length")


def test_without_a_tokenizer() -> None:
    stream = Stream()
    stream.open(Request("r", ()))
    assert stream.push("r", [5, 6], "stop") == Piece("r", (5, 6), (), "stop")
    with pytest.raises(UserError, match="stop strings need a tokenizer"):
        stream.open(Request("s", (), stop=("x",)))


def test_an_empty_stop_string_is_the_users_mistake() -> None:
    stream = Stream(FOX.__getitem__)
    with pytest.raises(UserError, match="must not be empty"):
        stream.open(Request("r", (), stop=("fox", "")))
    stream.open(Request("r", ()))  # the refusal left nothing behind


def test_a_request_id_in_use_is_refused() -> None:
    stream = Stream()
    stream.open(Request("r", ()))
    with pytest.raises(UserError, match="request ids must differ; 'r' is running"):
        stream.open(Request("r", ()))


def test_a_finished_request_is_closed() -> None:
    stream = Stream(FOX.__getitem__)
    stream.open(Request("r", ()))
    stream.push("r", [], "cancelled")
    with pytest.raises(ValueError, match="not open"):
        stream.push("r", [0])
    stream.open(Request("r", ()))
    stream.close("r")
    stream.close("r")


@pytest.mark.parametrize("step", [1, 2, 3, 7])
def test_what_ended_the_text_is_told(step: int) -> None:
    """Anthropic's clients read which stop sequence it was; OpenAI's may want it in the text."""
    stream = Stream(FOX.__getitem__)
    stream.open(Request("r", (), stop=("ps", "own fox"), include_stop=True))
    pieces = run(stream, list(range(7)), [step])
    assert "".join(p.text for p in pieces) == "The quick brown fox"
    assert pieces[-1].stop_reason == "own fox"
    stream.open(Request("s", ()))
    assert stream.push("s", [0], "stop", 7).stop_reason == 7


@pytest.mark.parametrize("step", [1, 2, 3, 7])
def test_no_stop_string_before_min_tokens(step: int) -> None:
    stream = Stream(FOX.__getitem__)
    stream.open(Request("r", (), stop=("o", "jum"), min_tokens=6))
    pieces = run(stream, list(range(7)), [step])
    assert "".join(p.text for p in pieces) == "The quick brown fox "


def test_each_delta_is_of_its_token() -> None:
    """Reasoning tokens are counted by the text each token completed."""
    stream = Stream([b"a", b"\xf0\x9f", b"\x98\x80", b"b"].__getitem__)
    stream.open(Request("r", ()))
    assert stream.push("r", [0, 1, 2, 3]).deltas == ("a", "", "😀", "b")


def test_control_tokens_show_when_asked() -> None:
    stream = Stream([b"a", b"<|im_end|>"].__getitem__, {1})
    stream.open(Request("r", (), skip_special_tokens=False))
    stream.open(Request("s", ()))
    assert (stream.push("r", [0, 1]).text, stream.push("s", [0, 1]).text) == ("a<|im_end|>", "a")
