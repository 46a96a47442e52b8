"""What counts as an answer, in texts as models write them."""

import doctest

import pytest

from stepfloor.tools.bench import grading
from stepfloor.tools.bench.grading import answer_of, is_right


def test_the_examples_in_the_docs_hold() -> None:
    assert doctest.testmod(grading).failed == 0


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("So 5 x 3 = 15.\n#### 15", "15"),
        ("#### 12\nNo, wait.\n#### 13", "13"),
        ("#### $1,234.50", "1234.5"),
        ("That makes 1,234,567 in all.", "1234567"),
        ("The answer is -7.", "-7"),
        ("The answer is −7 degrees.", "-7"),
        ("Between 5-7 people", "7"),
        ("The answer is **42** apples, not 41. They have 3 baskets.", "42"),
        ("It costs 18 dollars.", "18"),
        ("#### 70%", "70"),
        ("#### 70 km/h after 2 hours", "70"),
        (r"\boxed{1{,}000}", "1000"),
        (r"\boxed{\frac{1}{2}}", "0.5"),
        (r"Thus $\boxed{\text{12 eggs}}$.", "12"),
        ("a third is 1/3", "1/3"),
        ("answer: 0.50", "0.5"),
        ("<think>#### 9</think>The answer is 8", "8"),
        ("#### none", None),
        ("1/0", None),
        ("I do not know.", None),
        ("", None),
    ],
)
def test_the_number_of_a_text(text: str, wanted: str | None) -> None:
    """Guards against the number beside the answer: an earlier guess, a unit, a year, a sign lost in typography."""
    assert answer_of(text, "number") == wanted


def test_numbers_are_equal_as_numbers() -> None:
    """1,000 and 1000.0 are one answer; a close one is another."""
    assert is_right(answer_of("#### 1,000.0", "number"), "1000", "number")
    assert not is_right(answer_of("#### 1,000.1", "number"), "1000", "number")
    assert not is_right(None, "1000", "number")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("The answer is (C).", "C"),
        ("The answer is A. No, the answer is B.", "B"),
        ("answer: b", "B"),
        ("Answer: **E**", "E"),
        (r"\boxed{\text{D}}", "D"),
        ("The answer is: option (H)", "H"),
        ("First the rate.\n(J)", "J"),
        ("A is wrong, so is B.", None),
        ("The answer is a dog.", None),
        ("The answer is Banana.", None),
        ("I think so", None),
        ("", None),
    ],
)
def test_the_letter_of_a_text(text: str, wanted: str | None) -> None:
    """Guards against words that look like options: the article "a", the pronoun "I"."""
    assert answer_of(text, "letter") == wanted


def test_a_sentence_and_a_line() -> None:
    assert answer_of("Copy a tree.\nThen more. ", "sentence") == "Copy a tree."
    assert answer_of("  Copy   a tree", "sentence") == "Copy a tree"
    assert answer_of('Feed some data.  """\n    x = 1', "line") == "Feed some data."
    assert answer_of("\nFeed some data", "line") == "Feed some data"
    assert answer_of('"""', "line") is None
