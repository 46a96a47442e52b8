"""The text a small model learns from: what every Python installation carries.

Two kinds of material, both found on the machine itself and read in a fixed order: documents (sources of the
standard library and the language reference's topics) and questions (a public name and the first paragraph of
its docstring). About 4% of the files and of the names are held out by hash, so the split survives a change of
Python version.
"""

import ast
import hashlib
import inspect
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HELD_OUT_SHARE = 0.04
MAX_ANSWER_CHARS = 320

# Not on every machine (Debian splits them off, or 3.12 dropped them), generated, or tests.
_SKIPPED_FOLDERS = {
    "__pycache__", "__phello__", "config", "dist-packages", "distutils", "ensurepip", "idle_test", "idlelib",
    "lib-dynload", "lib2to3", "pydoc_data", "site-packages", "test", "tests", "tkinter", "turtledemo", "venv",
}  # fmt: skip
# Each of these is a table of code points or a build record, not Python that anybody reads.
_SKIPPED_FILES = re.compile(
    r"(_sysconfigdata.*|sitecustomize|usercustomize|_distutils_.*|antigravity|html/entities|stringprep"
    r"|encodings/(cp|iso|koi|mac|kz|ptcp|tis|hp|jo|palmos|big5|euc|gb|hz|johab|shift).*)\.py"
)
# Modules in C have no source file; their docstrings are asked for at run time.
_COMPILED_MODULES = (
    "builtins", "math", "cmath", "itertools", "time", "sys", "zlib", "binascii", "select", "array",
    "_operator", "_functools", "_collections", "_random", "_bisect", "_heapq", "posix", "gc", "marshal", "errno",
)  # fmt: skip
_BUILTIN_TYPES = (str, bytes, bytearray, list, tuple, dict, set, frozenset, int, float, complex, range, slice)
# Private modules whose names are public elsewhere.
_PUBLIC_NAME = {
    "_bisect": "bisect", "_collections": "collections", "_collections_abc": "collections.abc",
    "_functools": "functools", "_heapq": "heapq", "_operator": "operator", "_pydatetime": "datetime",
    "_pydecimal": "decimal", "_pyio": "io", "_random": "random", "builtins": "", "posix": "os",
    "posixpath": "os.path",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Document:
    """One file or topic. name is its path below the standard library, or topic:NAME."""

    name: str
    text: str
    held_out: bool


@dataclass(frozen=True, slots=True)
class Question:
    """A public name, what kind of thing it is, and the first paragraph of its docstring as one line."""

    name: str
    kind: str
    answer: str
    held_out: bool

    @property
    def text(self) -> str:
        return f"What does `{self.name}` do?"

    @property
    def first_sentence(self) -> str:
        return re.split(r"(?<=[.!?])\s", self.answer, maxsplit=1)[0]


@dataclass(frozen=True, slots=True)
class Corpus:
    documents: tuple[Document, ...]
    questions: tuple[Question, ...]

    @property
    def digest(self) -> str:
        """SHA-256 of everything in order; equal digests mean equal training text."""
        state = hashlib.sha256()
        for document in self.documents:
            state.update(f"{document.name}\0{document.text}\0".encode())
        for question in self.questions:
            state.update(f"{question.name}\0{question.answer}\0".encode())
        return state.hexdigest()


def collect(root: Path | None = None) -> Corpus:
    """Read the corpus below root, by default the standard library of the running Python.

    Same files in, same corpus out: everything is sorted by name, and each hash is of a name.
    """
    stdlib = root is None
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    files = list(_source_files(root))
    documents = [Document(name, text, is_held_out(name)) for name, text in files]
    documents += [Document(name, text, is_held_out(name)) for name, text in _topics(root)]
    homes = _public_homes(dict(files))
    found: dict[str, Question] = {}
    for document in documents:
        if document.name.endswith(".py"):
            for question in _questions_of_source(document, homes):
                found.setdefault(question.name, question)
    for question in _questions_of_compiled_modules() if stdlib else ():
        found.setdefault(question.name, question)
    return Corpus(tuple(documents), tuple(found[name] for name in sorted(found)))


def is_held_out(name: str) -> bool:
    """Whether the file or public name belongs to the 4% that training never sees."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") < HELD_OUT_SHARE * 2**32


def first_paragraph(docstring: str) -> str | None:
    """The first paragraph of prose as one line of at most MAX_ANSWER_CHARS; None where there is none.

    A leading signature, as C functions have it, is passed over; a long paragraph ends at a sentence.
    """
    for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(docstring)):
        lines = [line.strip() for line in paragraph.splitlines()]
        while lines and re.match(r"[\w.]+\(.*\)( ?->.*)?\.?$|[\w.]+\(.*(->|--)", lines[0]):
            lines = lines[1:]
        text = re.sub(r"\s+", " ", " ".join(lines)).strip()
        if not text:
            continue
        if text.startswith((">>>", "*", "-", "=")) or not re.search(r"[a-z]{3}.*\s", text):
            return None
        while len(text) > MAX_ANSWER_CHARS:
            cut = max(text.rfind(mark, 0, MAX_ANSWER_CHARS) for mark in (". ", "! ", "? "))
            if cut < 0:
                return None
            text = text[: cut + 1]
        return text if len(text) >= 12 else None
    return None


def _source_files(root: Path) -> Iterator[tuple[str, str]]:
    seen: set[str] = set()
    for path in sorted(root.rglob("*.py"), key=lambda p: p.relative_to(root).as_posix()):
        relative = path.relative_to(root)
        folders = {part.split("-")[0] if part.startswith("config-") else part for part in relative.parts[:-1]}
        if folders & _SKIPPED_FOLDERS or _SKIPPED_FILES.fullmatch(relative.as_posix()):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if len(text) > 80 and text not in seen:
            seen.add(text)
            yield relative.as_posix(), text


def _topics(root: Path) -> Iterator[tuple[str, str]]:
    path = root / "pydoc_data" / "topics.py"
    if not path.exists():
        return
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            topics = ast.literal_eval(node.value)
            yield from ((f"topic:{name}", topics[name]) for name in sorted(topics))


def _module_name(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _public_homes(files: dict[str, str]) -> dict[str, str]:
    """asyncio.locks.Lock -> asyncio.Lock: names that a package's __init__ lifts out of its modules."""
    homes: dict[str, str] = {}
    for path, text in files.items():
        if not path.endswith("/__init__.py"):
            continue
        package = _module_name(path)
        for node in ast.parse(text).body:
            if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module:
                names = [alias.name for alias in node.names]
                if names == ["*"]:
                    names = _exported(files.get(f"{path.removesuffix('__init__.py')}{node.module}.py", ""))
                homes |= {f"{package}.{node.module}.{name}": f"{package}.{name}" for name in names}
    return homes


def _exported(text: str) -> list[str]:
    """The strings of a module's literal __all__."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return [n.value for n in ast.walk(node.value) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    return []


def _questions_of_source(document: Document, homes: dict[str, str]) -> Iterator[Question]:
    module = _module_name(document.name)
    module = _PUBLIC_NAME.get(module, module)
    if any(part.startswith("_") for part in module.split(".")):
        return
    try:
        tree = ast.parse(document.text)
    except SyntaxError:
        return
    yield from _question(module, "module", ast.get_docstring(tree), document.held_out)
    yield from _questions_of_body(module, tree.body, document.held_out, homes)


def _questions_of_body(
    prefix: str, body: list[ast.stmt], held_out: bool, homes: dict[str, str], in_class: bool = False
) -> Iterator[Question]:
    for node in body:
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) or node.name.startswith("_"):
            continue
        name = homes.get(f"{prefix}.{node.name}", f"{prefix}.{node.name}")
        is_class = isinstance(node, ast.ClassDef)
        kind = "class" if is_class else "method" if in_class else "function"
        yield from _question(name, kind, ast.get_docstring(node), held_out)
        if is_class:
            yield from _questions_of_body(name, node.body, held_out, homes, in_class=True)


def _questions_of_compiled_modules() -> Iterator[Question]:
    for module_name in _COMPILED_MODULES:
        try:
            module = __import__(module_name)
        except ImportError:
            continue
        prefix = _PUBLIC_NAME.get(module_name, module_name)
        for name in sorted(vars(module)):
            value = vars(module)[name]
            if name.startswith("_") or not (inspect.isclass(value) or callable(value)):
                continue
            qualified = f"{prefix}.{name}" if prefix else name
            yield from _question(qualified, "class" if inspect.isclass(value) else "function", value.__doc__, False)
    for kind in _BUILTIN_TYPES:
        for name in sorted(vars(kind)):
            if not name.startswith("_"):
                yield from _question(f"{kind.__name__}.{name}", "method", vars(kind)[name].__doc__, False)


def _question(name: str, kind: str, docstring: str | None, file_held_out: bool) -> Iterator[Question]:
    answer = first_paragraph(docstring) if isinstance(docstring, str) else None
    if answer is not None:
        yield Question(name, kind, answer, file_held_out or is_held_out(name))
