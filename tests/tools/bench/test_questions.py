"""Question sets: pinned, loaded, refused with a sentence."""

import json
from collections import Counter
from pathlib import Path

import pytest

from stepfloor.errors import UserError
from stepfloor.tools.bench.grading import answer_of, is_right
from stepfloor.tools.bench.questions import SHIPPED, load_profile

SHIPPED_DIGEST = "ad01db26918d8efd362a9a725c2a9f796d769036efefc97a535e2625c8a6dcdf"


def test_the_shipped_set_is_pinned() -> None:
    """A changed question makes old results incomparable; this says so before a release does."""
    profile = load_profile("stdlib")
    kinds = Counter(q.id.split("/")[0] for q in profile.questions)
    assert kinds == {"recall": 64, "docstring": 64}
    assert profile.digest == SHIPPED_DIGEST
    assert len({q.id for q in profile.questions}) == 128


def test_every_shipped_question_can_be_answered() -> None:
    """An expected text that the rule itself would change could never be right."""
    for q in load_profile("stdlib").questions:
        assert is_right(answer_of(q.expected, q.rule), q.expected, q.rule), q.id


def test_the_shipped_set_comes_from_this_library() -> None:
    """The recipe still makes it: of what it makes now, only what another Python changed may differ."""
    from demo.corpus import collect
    from demo.questions import questions

    shipped = {json.loads(line)["id"]: json.loads(line) for line in SHIPPED.read_text(encoding="utf-8").splitlines()}
    made = {q["id"]: q for q in questions(collect())}
    same = sum(made.get(id_) == q for id_, q in shipped.items())
    assert same >= 0.8 * len(shipped)


def gsm8k(path: Path, answers: list[str]) -> Path:
    rows = [{"question": f"How many are {i} and 1?", "answer": answer} for i, answer in enumerate(answers)]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


def test_gsm8k_is_read_and_a_part_does_not_depend_on_order(tmp_path: Path) -> None:
    answers = [f"{i} + 1\u2028 is <<{i}+1={i + 1}>>{i + 1}.\n#### {i + 1:,}" for i in range(1500)]
    whole = load_profile("gsm8k", gsm8k(tmp_path / "a.jsonl", answers))
    assert [q.expected for q in whole.questions[:2]] == ["1", "2"]
    assert whole.questions[1233].expected == "1234"
    part = load_profile("gsm8k", tmp_path / "a.jsonl", 64)
    assert len(part.questions) == 64
    (tmp_path / "b.jsonl").write_text("\n".join(reversed((tmp_path / "a.jsonl").read_text().split("\n"))))
    again = load_profile("gsm8k", tmp_path / "b.jsonl", 64)
    assert part.digest == again.digest != whole.digest


MMLU = {"question_id": 7, "question": "Which?", "options": ["one", "two", "N/A"], "answer": "B", "category": "law"}


def test_mmlu_pro_is_read(tmp_path: Path) -> None:
    file = tmp_path / "test.jsonl"
    file.write_text(json.dumps(MMLU) + "\n")
    (question,) = load_profile("mmlu-pro", file).questions
    assert (question.id, question.expected) == ("law/7", "B")
    assert "A. one\nB. two\n" in question.prompt
    assert "N/A" not in question.prompt


def test_parquet_is_read_where_pyarrow_is(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="reading Parquet needs pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet", reason="reading Parquet needs pyarrow")
    parquet.write_table(pyarrow.Table.from_pylist([MMLU]), tmp_path / "test.parquet")
    assert load_profile("mmlu-pro", tmp_path / "test.parquet").questions[0].expected == "B"
    (tmp_path / "bad.parquet").write_text("no")
    with pytest.raises(UserError, match="as Parquet"):
        load_profile("mmlu-pro", tmp_path / "bad.parquet")


def test_parquet_without_pyarrow_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(UserError, match="pip install pyarrow, or pass JSON lines"):
        load_profile("mmlu-pro", tmp_path / "test.parquet")


@pytest.mark.parametrize(
    ("name", "content", "items", "sentence"),
    [
        ("gsm8k", '{"question": "a", "answer": "7"}', None, "row 1.*ends with #### and a number"),
        ("gsm8k", '{"question": "a"}', None, "row 1 has no 'answer'"),
        ("gsm8k", "", None, "holds no question"),
        ("gsm8k", "{", None, "as JSON lines"),
        ("gsm8k", '{"question": "a", "answer": "#### 7"}', 2, "has 1 questions; --items 2"),
        ("mmlu-pro", json.dumps({**MMLU, "answer": "C"}), None, "one of 2 options; got 'C'"),
        ("mmlu", "", None, "unknown profile 'mmlu'"),
        ("stdlib", "", None, "leave --file out"),
    ],
)
def test_what_cannot_be_asked_is_refused(
    tmp_path: Path, name: str, content: str, items: int | None, sentence: str
) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text(content)
    with pytest.raises(UserError, match=sentence):
        load_profile(name, file, items)


def test_a_file_is_wanted() -> None:
    with pytest.raises(UserError, match="do not ship with stepfloor; pass its test file"):
        load_profile("gsm8k")
