"""Compile Triton kernels for a GPU that is not here: the interpreter accepts much that the compiler refuses."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

_PROGRAM = """
import importlib, json, os, sys
os.environ.pop("TRITON_INTERPRET", None)  # the parent's interpreter hands itself down
import triton
sys.path[:0] = ["src", "."]
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
for case in json.load(sys.stdin):
    kernel = getattr(importlib.import_module(case["module"]), case["name"])
    constants = case["constants"]
    signature = {n: "constexpr" if n in constants else case["signature"][n] for n in kernel.arg_names}
    names = {n: i for i, n in enumerate(kernel.arg_names)}
    attributes = {(names[n],): [["tt.divisibility", 16]] for n in case["aligned"] if n not in constants}
    source = ASTSource(kernel, signature, {(names[n],): v for n, v in constants.items()}, attributes)
    options = {"num_warps": case["num_warps"], "num_stages": case["num_stages"]}
    made = triton.compile(source, target=GPUTarget("cuda", case["arch"], 32), options=options)
    print(case["name"], len(made.asm["cubin"]))
"""


@dataclass(frozen=True, slots=True)
class Case:
    """One kernel with one choice of types.

    signature  Triton's types by argument, such as `*bf16`, `*i64`, `i32`, `fp32`; constants  its constexpr arguments
    aligned    arguments that are multiples of 16, which decides how wide loads are and whether they can be pipelined
    """

    module: str
    name: str
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    num_warps: int = 4
    arch: int = 90
    num_stages: int = 3
    aligned: Sequence[str] = ()


def assert_compiles(cases: Sequence[Case]) -> None:
    """Every case becomes a cubin, in a process of its own, where the interpreter is off."""
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        input=json.dumps([asdict(case) for case in cases]),
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(done.stdout.splitlines()) == len(cases)
