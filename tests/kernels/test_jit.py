"""What Triton kernels share, under the interpreter or on a GPU."""

import inspect
from typing import Any

import pytest
import torch

from stepfloor.kernels._jit import dependent_launch, runs_triton, start, tl, triton
from stepfloor.kernels.draw_tokens import _part_kernel
from stepfloor.kernels.embed import _embed_kernel
from tests.kernels.compiled import Case, assert_compiles

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def _add_one(x_ptr, y_ptr, n, BLOCK: tl.constexpr, PDL: tl.constexpr):
    start(PDL)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(x_ptr + i, mask=i < n) + 1, mask=i < n)


def test_a_chain_of_dependent_launches() -> None:
    x = torch.arange(100.0, device=DEVICE)
    for _ in range(10):
        y = torch.full_like(x, float("nan"))
        _add_one[(2,)](x, y, 100, BLOCK=64, **dependent_launch(x))
        x = y
    assert torch.equal(x.cpu(), torch.arange(100.0) + 10)


@pytest.mark.parametrize("kernel", [_embed_kernel, _part_kernel], ids=["embed", "draw_tokens"])
def test_what_settles_rows_starts_in_turn(kernel: Any) -> None:
    """Rows.settled rests on them. Were they to begin like all others, kernels behind them would now and then read
    begin_rows' integers, or a drafting pass's raw keys, before they are written."""
    assert "\n    start_in_turn(PDL)\n" in inspect.getsource(kernel.fn)


def test_the_cpu_runs_references() -> None:
    assert not runs_triton(torch.zeros(1))


def test_a_dependent_launch_compiles() -> None:
    signature = {"x_ptr": "*bf16", "y_ptr": "*bf16", "n": "i32"}
    constants = {"BLOCK": 64, "PDL": True}
    assert_compiles([Case("tests.kernels.test_jit", "_add_one", signature, constants, arch=arch) for arch in (90, 120)])
