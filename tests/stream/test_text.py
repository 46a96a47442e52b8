"""Text deltas: whole characters, nothing of a stop string, the same for every split of tokens into steps."""

from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from stepfloor.stream.text import TextStream

# two letters and a character of four bytes: stop strings overlap often and are cut often
SMALL = st.text(alphabet="ab😀", max_size=12)


def deltas(tokens: list[bytes], stop: tuple[str, ...] = ()) -> tuple[list[str], TextStream]:
    text = TextStream(tokens.__getitem__, stop=stop)
    return [text.push(i) for i in range(len(tokens))], text


def cut(data: bytes, marks: set[int]) -> list[bytes]:
    """The bytes cut at the marks that fall inside."""
    edges = [0, *sorted(m for m in marks if 0 < m < len(data)), len(data)]
    return [data[a:b] for a, b in pairwise(edges)]


def first_stop(text: str, stop: tuple[str, ...]) -> tuple[int, int] | None:
    """(start, end) of the stop string that is complete first as the text grows letter by letter."""
    for end in range(len(text) + 1):
        starts = [end - len(s) for s in stop if text[:end].endswith(s)]
        if starts:
            return min(starts), end
    return None


def test_character_in_two_tokens() -> None:
    """A character whose bytes fall into two tokens was shown as replacement characters."""
    found, text = deltas([b"Hi ", b"\xf0\x9f", b"\x98\x80", b"!"])
    assert found == ["Hi ", "", "😀", "!"]
    assert text.flush() == ""


def test_stop_string_in_two_tokens() -> None:
    """The first part of a stop string that spans two tokens was sent; only that suffix may wait."""
    found, text = deltas([b"The", b" quick", b" br", b"own", b" f"], ("own fox",))
    assert found == ["The", " quick", " br", "", ""]
    assert text.stopped is None
    found, text = deltas([b"The", b" quick", b" br", b"own", b" f", b"ox", b" jumps"], ("own fox",))
    assert "".join(found) == "The quick br"
    assert text.stopped
    assert text.flush() == ""


def test_false_alarm_is_released() -> None:
    found, text = deltas([b"own", b" f", b"ig", b" own"], ("own fox",))
    assert found == ["", "", "own fig", " "]
    assert text.flush() == "own"


def test_hidden_ids_leave_no_trace() -> None:
    tokens = [b"\xf0\x9f", b"<|im_end|>", b"\x98\x80"]
    text = TextStream(tokens.__getitem__, hidden_ids={1})
    assert [text.push(i) for i in range(3)] == ["", "", "😀"]


@given(st.text(max_size=30), st.sets(st.integers(0, 120)))
def test_any_text_in_any_tokens(whole: str, marks: set[int]) -> None:
    found, text = deltas(cut(whole.encode(), marks))
    assert "".join(found) == whole  # nothing of complete characters waits
    assert text.flush() == ""


@given(st.binary(max_size=24), st.sets(st.integers(0, 24)))
@example(b"\xf0\x9f", set())
@example(b"\xe2\x82A\xff\xf0\x9f\x98", {1, 2, 5, 6})
def test_any_bytes_in_any_tokens(data: bytes, marks: set[int]) -> None:
    """Broken UTF-8 gives the replacement characters that the whole would give, and a cut adds none."""
    found, text = deltas(cut(data, marks))
    assert "".join(found) + text.flush() == data.decode("utf-8", "replace")


@given(SMALL, st.sets(st.integers(0, 50)), st.lists(SMALL.filter(bool), min_size=1, max_size=3))
def test_stop_strings_in_any_tokens(whole: str, marks: set[int], stops: list[str]) -> None:
    stop = tuple(stops)
    tokens = cut(whole.encode(), marks)
    text = TextStream(tokens.__getitem__, stop=stop)
    sent = ""
    for i in range(len(tokens)):
        sent += text.push(i)
        seen = b"".join(tokens[: i + 1]).decode("utf-8", "ignore")
        where = first_stop(seen, stop)
        assert (text.stopped is not None) == (where is not None)
        if where:
            assert sent == seen[: where[0]]
            assert text.flush() == ""
            return
        # what waits is the longest end that begins a stop string, and no more
        held = max(n for n in range(len(seen) + 1) if any(s.startswith(seen[len(seen) - n :]) for s in stop))
        assert sent == seen[: len(seen) - held]
    assert sent + text.flush() == whole
