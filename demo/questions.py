"""The exact-match questions that ship with the bench: what the small model can be asked about the standard library.

    PYTHONPATH=src python3 -m demo.questions

writes `src/stepfloor/tools/bench/stdlib.jsonl`, half of it each kind:

- recall: "What does `shutil.copytree` do?", wanted is the first sentence of the docstring;
- docstring: a file's own text from a function's `def` to the opening quotes, wanted is the docstring's first line.

Both come from material that the model was trained on, in the order of a hash of the name, so another version of Python
changes only the questions whose text it changed. The file is what is pinned; this program says how it was made.
"""

import ast
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from demo.corpus import Corpus, Document, collect

OUTPUT = Path(__file__).parents[1] / "src" / "stepfloor" / "tools" / "bench" / "stdlib.jsonl"
OF_EACH_KIND = 64
WANTED_CHARS = range(20, 121)
CONTEXT_LINES = 12


def questions(corpus: Corpus) -> list[dict[str, Any]]:
    """The questions in the order of the file: id, route, prompt, rule, expected."""
    return [*_first(_recall(corpus)), *_first(_docstrings(corpus))]


def _recall(corpus: Corpus) -> Iterator[dict[str, Any]]:
    for question in corpus.questions:
        if not question.held_out and len(question.first_sentence) in WANTED_CHARS:
            yield _question("recall", question.name, "chat", question.text, "sentence", question.first_sentence)


def _docstrings(corpus: Corpus) -> Iterator[dict[str, Any]]:
    for document in corpus.documents:
        if document.name.endswith(".py") and not document.held_out:
            yield from _docstrings_of(document)


def _docstrings_of(document: Document) -> Iterator[dict[str, Any]]:
    lines = document.text.splitlines(keepends=True)
    for node in ast.walk(ast.parse(document.text)):
        if not isinstance(node, ast.FunctionDef) or ast.get_docstring(node) is None:
            continue
        body = node.body[0]
        opening = re.match(r'\s*"""(.*)', lines[body.lineno - 1])
        wanted = " ".join(opening[1].split('"""')[0].split()) if opening else ""
        if "\\" in wanted or len(wanted) not in WANTED_CHARS:
            continue
        begin = max(0, node.lineno - 1 - CONTEXT_LINES)
        prompt = "".join(lines[begin : body.lineno - 1]) + re.match(r"\s*", lines[body.lineno - 1])[0] + '"""'
        yield _question("docstring", f"{document.name}:{node.name}", "completion", prompt, "line", wanted)


def _question(kind: str, name: str, route: str, prompt: str, rule: str, expected: str) -> dict[str, Any]:
    return {"id": f"{kind}/{name}", "route": route, "prompt": prompt, "rule": rule, "expected": expected}


def _first(found: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
    """One of each id and of each wanted text, the first by hash of the id."""
    ordered = sorted(found, key=lambda q: hashlib.sha256(q["id"].encode()).digest())
    ids, texts, kept = set(), set(), []
    for question in ordered:
        if question["id"] not in ids and question["expected"] not in texts and len(kept) < OF_EACH_KIND:
            ids.add(question["id"])
            texts.add(question["expected"])
            kept.append(question)
    return kept


def main() -> None:
    lines = [json.dumps(question, ensure_ascii=False) for question in questions(collect())]
    OUTPUT.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{len(lines)} questions in {OUTPUT}")


if __name__ == "__main__":
    main()
