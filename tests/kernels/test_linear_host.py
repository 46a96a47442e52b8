"""`linear.cu` itself, run on the CPU: a C++ compiler builds it against `host/stream.cuh`, a thread for every lane.

Guards against what a GPU would answer with a fault, a hang or a wrong value: addresses, alignment, sizes of shared
memory, slot phases, the place of every fragment, and the order of sums, which must not depend on the row count.
"""

import ctypes
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from stepfloor.kernels import linear as linear_module
from stepfloor.kernels._stream import StreamPlan, pack_tape
from stepfloor.kernels.linear import (
    Variant,
    kernel_macros,
    pack_arguments,
    plan_stream,
    shared_bytes,
)

HOST = Path(__file__).parent / "host"
COMPILER = shutil.which("g++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no g++ to build the kernel for the host")

ENTRY = """
extern "C" int run(const Arguments* a, u64 tape_bytes, u64 x_bytes, u64 shared_bytes) {
  readable = {{a->tape, tape_bytes}, {(const u8*)a->x, x_bytes}};
  return run_grid(GROUPS * SPLIT, SPLIT, THREADS, shared_bytes, [=] { linear_kernel(*a); });
}
"""
SHORT, TALL, TWO = Variant(1, False), Variant(1, True), Variant(2, True)
CASES = {
    "warps share rows": (plan_stream(40, 640, 4), [SHORT, TALL, TWO]),
    "several passes": (plan_stream(151, 2560, 2), [SHORT, TALL, Variant(1, True, 5, 2), Variant(2, True, 5, 3)]),
    "cluster": (plan_stream(13, 1280, 4, split=4), [SHORT, TALL, TWO]),
    "ring goes round": (replace(plan_stream(20, 6144, 1), chunk_steps=4, slots=2), [SHORT, TALL, TWO]),
    "padded columns": (plan_stream(37, 48, 4), [SHORT, TALL, TWO]),
    "passes of several pieces": (plan_stream(70, 4096, 1), [SHORT, TALL]),
}


@pytest.mark.parametrize("case", CASES)
def test_kernel_on_the_host(case: str, tmp_path: Path) -> None:
    plan, variants = CASES[case]
    make = torch.Generator().manual_seed(0)
    w = (torch.randn(plan.n, plan.k, generator=make) / plan.k**0.5).to(torch.bfloat16)
    x = torch.randn(20, plan.k, generator=make).to(torch.bfloat16)
    tape = pack_tape(w, plan)
    exact = x.double() @ w.double().T
    # one rounding to bf16, and float32 sums of K terms whose magnitudes add up to less than sqrt(K)
    bound = exact.abs() * 2**-8 + plan.k**1.5 * 2**-24
    longest = x.new_empty((0, plan.n))
    for variant in variants:
        library = build(plan, variant, tmp_path)
        for rows in (3, min(20, variant.max_rows)):
            y = run(library, plan, variant, tape, x[:rows])
            assert bool(((y.double() - exact[:rows]).abs() <= bound[:rows]).all())
            shared_rows = min(rows, longest.shape[0])
            assert torch.equal(y[:shared_rows], longest[:shared_rows])
            longest = y if rows > longest.shape[0] else longest


def build(plan: StreamPlan, variant: Variant, directory: Path) -> ctypes.CDLL:
    """The kernel of a plan as a shared library."""
    text = Path(linear_module.__file__).with_suffix(".cu").read_text(encoding="utf-8")
    text = re.sub(r"extern __shared__ .*? shared\[\];", "u8* shared = block_shared;", text) + ENTRY
    source = directory / f"{variant.tiles}{variant.tall}{variant.stage_steps}{variant.stages}.cpp"
    source.write_text(text, encoding="utf-8")
    macros = [f"-D{name}={value}" for name, value in kernel_macros(plan, variant).items()]
    target = source.with_suffix(".so")
    options = ["-std=c++20", "-O1", "-w", "-shared", "-fPIC", "-pthread", "-I", str(HOST)]
    subprocess.run([str(COMPILER), *options, *macros, "-o", str(target), str(source)], check=True)
    return ctypes.CDLL(str(target))


def run(library: ctypes.CDLL, plan: StreamPlan, variant: Variant, tape: Tensor, x: Tensor) -> Tensor:
    """The kernel's output, with NaN around the input and a check of what it must leave alone."""
    rows, n = x.shape[0], plan.n
    held = torch.full((rows, plan.k + 8), torch.nan, dtype=torch.bfloat16)
    held[:, : plan.k] = x
    out = torch.full((rows + 2, n + 3), torch.nan, dtype=torch.bfloat16)
    arguments = ctypes.create_string_buffer(pack_arguments(tape, held[:, : plan.k], out[:rows]))
    library.run.argtypes = [ctypes.c_void_p, *[ctypes.c_uint64] * 3]
    faults = library.run(arguments, tape.numel(), held.numel() * 2, shared_bytes(plan, variant))
    assert faults == 0
    assert bool(out[rows:].isnan().all())
    assert bool(out[:, n:].isnan().all())
    return out[:rows, :n]
