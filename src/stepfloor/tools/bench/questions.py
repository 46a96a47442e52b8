"""Question sets: the one that ships, and loaders for the files of GSM8K and MMLU-Pro that a user has.

A set is pinned by its digest, so two runs that compare items are known to have asked the same. A part of a set is taken
by the hash of each id, which spreads it over subjects and is the same part whatever the order of the file.

Source: GSM8K, https://github.com/openai/grade-school-math (JSON lines, question and answer, the number after ####);
MMLU-Pro, https://huggingface.co/datasets/TIGER-Lab/MMLU-Pro (question_id, question, options, answer, category).
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from stepfloor.errors import UserError
from stepfloor.tools.bench.grading import Rule, answer_of

SHIPPED = Path(__file__).with_name("stdlib.jsonl")
LETTERS = "ABCDEFGHIJ"
_GSM8K_TASK = "Solve the problem step by step. End with a line that is #### and the number alone."
_MMLU_PRO_TASK = 'Think step by step. End with "The answer is (X)" where X is the letter of the right option.'


@dataclass(frozen=True, slots=True)
class Question:
    """One question: how it is sent, by which rule its answer is read, and which answer is right."""

    id: str
    prompt: str
    rule: Rule
    expected: str
    route: Literal["chat", "completion"] = "chat"


@dataclass(frozen=True, slots=True)
class Profile:
    """A pinned set of questions and the most tokens an answer may have."""

    name: str
    questions: tuple[Question, ...]
    max_tokens: int

    @property
    def digest(self) -> str:
        """SHA-256 over everything that is asked and wanted, whatever the order."""
        state = hashlib.sha256()
        for q in sorted(self.questions, key=lambda q: q.id):
            state.update("\0".join((q.id, q.route, q.prompt, q.rule, q.expected, "")).encode())
        return state.hexdigest()

    def part(self, items: int) -> "Profile":
        """So many of the questions, by the hashes of their ids. Raises UserError for more than there are."""
        if not 1 <= items <= len(self.questions):
            raise UserError(f"{self.name} has {len(self.questions)} questions; --items {items} cannot be taken")
        chosen = sorted(self.questions, key=lambda q: hashlib.sha256(q.id.encode()).digest())[:items]
        return Profile(self.name, tuple(q for q in self.questions if q in chosen), self.max_tokens)


def load_profile(name: str, file: Path | None = None, items: int | None = None) -> Profile:
    """The questions of a profile, or `items` of them.

    name  stdlib (ships, for the small model), gsm8k or mmlu-pro (from the user's file)
    Raises UserError for an unknown name, a missing or unreadable file, and more items than there are.
    """
    if name == "stdlib":
        if file is not None:
            raise UserError("the profile stdlib ships with stepfloor; leave --file out")
        profile = Profile(name, tuple(Question(**row) for row in _json_lines(SHIPPED)), max_tokens=96)
    elif name in _LOADERS:
        if file is None:
            raise UserError(f"the questions of {name} do not ship with stepfloor; pass its test file with --file")
        profile = _LOADERS[name](file)
    else:
        raise UserError(f"unknown profile {name!r}; there are stdlib, {', '.join(_LOADERS)}")
    return profile if items is None else profile.part(items)


def _gsm8k(file: Path) -> Profile:
    questions = []
    for place, row in _rows(file, ("question", "answer")):
        expected = (
            answer_of(f"####{row['answer'].rpartition('####')[2]}", "number") if "####" in row["answer"] else None
        )
        if expected is None:
            raise UserError(f"{place}: the answer of a GSM8K line ends with #### and a number; got {row['answer']!r}")
        text = row["question"].strip()
        questions.append(Question(_hash(text), f"{text}\n\n{_GSM8K_TASK}", "number", expected))
    return Profile("gsm8k", _distinct(questions, file), max_tokens=1024)


def _mmlu_pro(file: Path) -> Profile:
    questions = []
    for place, row in _rows(file, ("question_id", "question", "options", "answer")):
        options = [str(option) for option in row["options"] if option != "N/A"]
        if row["answer"] not in tuple(LETTERS[: len(options)]):
            raise UserError(f"{place}: answer is the letter of one of {len(options)} options; got {row['answer']!r}")
        lettered = "\n".join(f"{letter}. {option}" for letter, option in zip(LETTERS, options, strict=False))
        prompt = f"{row['question'].strip()}\n\n{lettered}\n\n{_MMLU_PRO_TASK}"
        # before the slash the kind, by which shares are told apart
        id_ = f"{row.get('category', 'any')}/{row['question_id']}"
        questions.append(Question(id_, prompt, "letter", row["answer"]))
    return Profile("mmlu-pro", _distinct(questions, file), max_tokens=2048)


_LOADERS = {"gsm8k": _gsm8k, "mmlu-pro": _mmlu_pro}


def _distinct(questions: Sequence[Question], file: Path) -> tuple[Question, ...]:
    seen = {q.id: q for q in questions}
    if not seen:
        raise UserError(f"{file} holds no question; pass the test split's file")
    return tuple(seen.values())


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _rows(file: Path, columns: tuple[str, ...]) -> list[tuple[str, dict[str, Any]]]:
    """(where, row) of a JSON lines or Parquet file. Raises UserError unless every row has the columns."""
    rows = _parquet(file) if file.suffix == ".parquet" else _json_lines(file)
    placed = [(f"{file}, row {i}", row) for i, row in enumerate(rows, 1)]
    for place, row in placed:
        missing = [name for name in columns if not isinstance(row, dict) or name not in row]
        if missing:
            raise UserError(f"{place} has no {missing[0]!r}; a file with {', '.join(columns)} is wanted")
    return placed


def _json_lines(file: Path) -> list[Any]:
    try:
        return [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line.strip()]
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"cannot read {file} as JSON lines ({error}); pass one JSON object a line") from None


def _parquet(file: Path) -> list[Any]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import read_table
    except ImportError:
        raise UserError(
            f"{file} is a Parquet file, which needs pyarrow; pip install pyarrow, or pass JSON lines"
        ) from None
    try:
        return read_table(file).to_pylist()
    except (OSError, ArrowException) as error:
        raise UserError(f"cannot read {file} as Parquet ({error}); pass the data set's own file") from None
