"""Promises that no linter keeps: an operator is five things, and the project belongs to no machine."""

import ast
import re
import subprocess
from pathlib import Path

from stepfloor.roofline import bytes as operator_bytes

ROOT = Path(__file__).parents[1]
KERNELS = ROOT / "src" / "stepfloor" / "kernels"
# a path that names a user or a workplace; /usr, /proc and /dev are the same everywhere
MACHINE_PATH = re.compile(r"(?<![\w.:/-])/(home|Users|root|work|workspace|mnt|opt)/\w|\b[A-Z]:\\\\?Users")


def test_an_operator_is_five_things() -> None:
    """Reference, kernel, inputs, test and byte count, all under the name of the kernel's file."""
    missing: list[str] = []
    for path in sorted(KERNELS.glob("[!_]*.py")):
        name = path.stem
        functions = {n.name for n in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(n, ast.FunctionDef)}
        wanted = (name, f"{name}_reference", f"{name}_inputs")
        missing += [f"kernels/{name}.py: {function}" for function in wanted if function not in functions]
        if not (ROOT / "tests" / "kernels" / f"test_{name}.py").is_file():
            missing.append(f"tests/kernels/test_{name}.py")
        if not callable(getattr(operator_bytes, name, None)):
            missing.append(f"roofline.bytes.{name}")
    assert not missing


def test_no_file_names_a_machine() -> None:
    """A path of one developer's machine makes a command or a test fail on every other."""
    found = [
        f"{name}:{number}: {line.strip()}"
        for name in project_files()
        for number, line in enumerate(text_of(ROOT / name).splitlines(), 1)
        if MACHINE_PATH.search(line)
    ]
    assert not found


def test_readme_commands_are_those_of_the_script() -> None:
    readme, script = text_of(ROOT / "README.md"), text_of(ROOT / "run.py")
    commands = re.findall(r"^python3 run\.py .*$", readme, flags=re.MULTILINE)
    assert [command.split()[2] for command in commands] == ["generate", "test"]
    for command in commands:
        assert command in script, f"{command!r} is not in the usage of run.py"


def project_files() -> list[str]:
    """Tracked files; where this is no clone, every file that is not a build or tool product."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode == 0 and listed.stdout:
        return [name for name in listed.stdout.split("\0") if name]
    paths = (path.relative_to(ROOT) for path in ROOT.rglob("*") if path.is_file())
    return [str(path) for path in paths if not path.parts[0].startswith(".") and "__pycache__" not in path.parts]


def text_of(path: Path) -> str:
    """The file's text; empty for a binary file and for one deleted but still tracked."""
    try:
        return path.read_text(encoding="utf-8")
    except (UnicodeDecodeError, FileNotFoundError):
        return ""
