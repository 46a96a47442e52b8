"""What counts as the answer in a text, and whether it is right: one rule for each kind of question.

    number    the last number marked as the answer, by `####`, `\\boxed{}` or "the answer is"; else the last number
    letter    the last letter marked as the answer, by `\\boxed{}`, "the answer is" or "Answer:"; else a last line
              that is nothing but a letter
    sentence  the first sentence of the text, blanks collapsed
    line      the first line of the text up to closing quotes, blanks collapsed

What a model thinks (up to `</think>`) is never the answer. Numbers are compared as exact fractions, so 1,234.50 dollars
is 1234.5; everything else letter by letter. No answer found is None, and wrong.
"""

import re
from decimal import Decimal
from fractions import Fraction
from typing import Literal

Rule = Literal["number", "letter", "sentence", "line"]

# a sign, digits with or without commas between groups of three, decimals; a bare fraction a/b; a minus of typography
_NUMBER = r"(?:(?<![\w.])[-−–]\s?)?[$€£]?\s?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+|(?<=\d))(?:\s?/\s?\d+)?"
_BOXED = re.compile(r"\\boxed\s*\{((?:[^{}]|\{[^{}]*\})*)\}")
_IS = r"(?i:answer\s*(?:is\s*:?|:|=)(?:\s*option)?)[\s*]*"
_MARKED_NUMBER = (
    re.compile(r"####\s*(.*)"),
    _BOXED,
    re.compile(rf"{_IS}({_NUMBER})"),
)
# small letters only in brackets or at an end: "the answer is a dog" names no option
_MARKED_LETTER = (
    _BOXED,
    re.compile(rf"{_IS}(\([A-Ja-j]\)|[A-J]\b|[a-j](?=[*\s]*(?:[.,;]|$)))", re.MULTILINE),
)
_BARE_LETTER = re.compile(r"[(*\s]*([A-J])[).*\s]*")


def answer_of(text: str, rule: Rule) -> str | None:
    """The answer that a text gives, normalised as comparisons want it; None where it gives none."""
    text = text.rpartition("</think>")[2]
    if rule == "number":
        return _number_of(text)
    if rule == "letter":
        return _letter_of(text)
    if rule == "sentence":
        return first_sentence(text) or None
    return " ".join(text.lstrip("\n").split("\n")[0].split('"""')[0].split()) or None


def is_right(answer: str | None, expected: str, rule: Rule) -> bool:
    """Whether an answer is the expected one; both as answer_of gives them."""
    if answer is None:
        return False
    if rule == "number":
        return number(answer) == number(expected)
    return answer == expected


def first_sentence(text: str) -> str:
    """Up to the first full stop, exclamation or question mark that a blank follows; blanks collapsed."""
    return re.split(r"(?<=[.!?])\s", " ".join(text.split()), maxsplit=1)[0]


def number(text: str) -> Fraction | None:
    """The number that a text consists of, read past currency, percent, units and commas; None where there is none.

    >>> number("$1,234.50 dollars")
    Fraction(2469, 2)
    """
    found = re.search(_NUMBER, text)
    if found is None:
        return None
    plain = re.sub(r"[\s,$€£]", "", found[0]).replace("−", "-").replace("–", "-")
    try:
        return Fraction(plain)
    except (ValueError, ZeroDivisionError):
        return None


def _number_of(text: str) -> str | None:
    for mark in _MARKED_NUMBER:
        for marked in reversed(mark.findall(text)):
            value = number(_flat(marked))
            if value is not None:
                return _written(value)
    for found in reversed(re.findall(_NUMBER, text)):
        value = number(found)
        if value is not None:
            return _written(value)
    return None


def _written(value: Fraction) -> str:
    """As a decimal where that is exact, else as a fraction."""
    decimal = Decimal(value.numerator) / value.denominator
    return f"{decimal:f}" if Fraction(decimal) == value else str(value)


def _flat(text: str) -> str:
    """LaTeX as a person reads it: \\frac{1}{2} is 1/2, braces and \\text{} are gone."""
    text = re.sub(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}", r"\1/\2", text)
    return re.sub(r"\\[a-zA-Z]+|\\.|[{}]", "", text)


def _letter_of(text: str) -> str | None:
    for mark in _MARKED_LETTER:
        for marked in reversed(mark.findall(text)):
            letter = _BARE_LETTER.fullmatch(_flat(marked).upper())
            if letter:
                return letter[1]
    lines = text.strip().splitlines()
    bare = _BARE_LETTER.fullmatch(lines[-1]) if lines else None
    return bare[1] if bare else None
