"""A CUDA kernel as a library of the host, whose threads stand for lanes: host/stream.cuh in place of the GPU's own."""

import ctypes
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from functools import cache
from hashlib import sha256
from pathlib import Path

import pytest

import stepfloor.kernels

HOST = Path(__file__).parent / "host"
KERNELS = Path(stepfloor.kernels.__file__).parent
COMPILER = shutil.which("g++")
OPTIONS = ("-std=c++20", "-O1", "-w", "-fPIC", "-pthread")

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no g++ to build the kernel for the host")


def build(
    kernel: str, entry: str, macros: Mapping[str, int | str], directory: Path, options: tuple[str, ...] = ()
) -> ctypes.CDLL:
    """KERNEL.cu with `entry` behind it, compiled once in a directory; `macros` specialise it."""
    text = kernel_text(kernel) + entry
    defines = [f"-D{name}={value}" for name, value in macros.items()]
    directory.mkdir(exist_ok=True)
    source = directory / f"{kernel}-{sha256(repr((entry, defines, options)).encode()).hexdigest()[:16]}.cpp"
    target = source.with_suffix(".so")
    if not target.exists():
        source.write_text(text, encoding="utf-8")
        include = ["-include", str(library_headers(options)), "-I", str(HOST), "-idirafter", str(KERNELS / "include")]
        command = [str(COMPILER), *OPTIONS, *options, "-shared", *include, *defines, "-o", str(target), str(source)]
        subprocess.run(command, check=True)
    return ctypes.CDLL(str(target))


def kernel_text(kernel: str) -> str:
    """A kernel's text, with that of kernels it includes, made ready for the host."""
    text = (KERNELS / f"{kernel}.cu").read_text(encoding="utf-8")
    text = re.sub(r'#include "(\w+)\.cu"', lambda found: kernel_text(found[1]), text)
    return re.sub(r"extern __shared__ .*? shared\[\];", "u8* const shared = block_shared;", text)


@cache
def library_headers(options: tuple[str, ...]) -> Path:
    """The library's headers that the host's files include, compiled beforehand: half of what a small kernel takes."""
    directory = Path(_kept().name) / sha256(repr(options).encode()).hexdigest()[:16]
    directory.mkdir()
    header = directory / "library.h"
    included = {line for file in HOST.iterdir() for line in re.findall(r"^#include <\w+>$", file.read_text(), re.M)}
    header.write_text("\n".join(sorted(included)) + "\n")
    command = [str(COMPILER), *OPTIONS, *options, "-x", "c++-header", "-o", f"{header}.gch", str(header)]
    subprocess.run(command, check=True)
    return header


@cache
def _kept() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="stepfloor-lanes-")
