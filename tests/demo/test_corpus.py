"""What the recipe reads, and what it keeps aside."""

from pathlib import Path

from demo.corpus import collect, first_paragraph, is_held_out

MODULE = '''"""A module about nothing.

More of it.
"""

def public(x):
    """Return x
    unchanged.

    Really.
    """
    return x

def _private():
    """Nobody asks for this."""

class Thing:
    """A thing that is."""
    def act(self):
        """act(how) -> None

        Do what a thing does.
        """
'''


def a_library(root: Path) -> Path:
    for name in ("pkg/one.py", "site-packages/other.py", "pkg/test/check.py", "encodings/cp437.py"):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(MODULE, encoding="utf-8")
    (root / "pkg" / "__init__.py").write_text("from .one import Thing, public\n" + "# filler\n" * 20, encoding="utf-8")
    (root / "broken.py").write_bytes(b"\xff" * 200)
    return root


def test_only_the_librarys_own_sources_are_read(tmp_path: Path) -> None:
    corpus = collect(a_library(tmp_path))
    assert [d.name for d in corpus.documents] == ["pkg/__init__.py", "pkg/one.py"]


def test_questions_are_public_names_and_first_paragraphs(tmp_path: Path) -> None:
    answers = {(q.kind, q.name): q.answer for q in collect(a_library(tmp_path)).questions}
    assert answers == {
        ("module", "pkg.one"): "A module about nothing.",
        ("function", "pkg.public"): "Return x unchanged.",
        ("class", "pkg.Thing"): "A thing that is.",
        ("method", "pkg.Thing.act"): "Do what a thing does.",
    }


def test_the_same_files_give_the_same_corpus(tmp_path: Path) -> None:
    root = a_library(tmp_path)
    first = collect(root)
    assert collect(root).digest == first.digest
    (root / "pkg" / "one.py").write_text(MODULE + "\n", encoding="utf-8")
    assert collect(root).digest != first.digest


def test_a_held_out_file_holds_out_its_questions() -> None:
    corpus = collect()
    aside = {d.name for d in corpus.documents if d.held_out}
    held = sum(len(d.text) for d in corpus.documents if d.held_out)
    assert 0.005 < held / sum(len(d.text) for d in corpus.documents) < 0.1
    assert aside == {d.name for d in corpus.documents if is_held_out(d.name)}
    modules = {name.removesuffix(".py").replace("/", ".") for name in aside}
    assert all(q.held_out for q in corpus.questions if q.name in modules)


def test_paragraphs_without_prose_are_no_answers() -> None:
    assert first_paragraph(">>> 1 + 1\n2") is None
    assert first_paragraph("short") is None
    assert first_paragraph("len(x) -> int\n\nReturn the length of x.") == "Return the length of x."
    assert first_paragraph("One sentence of text. " + "Another much longer one " * 30) == "One sentence of text."
