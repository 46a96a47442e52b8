"""What tests of Triton kernels share: where they run, memory that shows a stray read, results that begin as NaN."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
REAL = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cpu", reason="no CUDA device; the interpreter would take minutes"),
]
FENCE = 64  # elements


def fenced(value: Any) -> Any:
    """A copy of a tensor with poison before and behind it: NaN, or an integer that no table is long enough for."""
    if not isinstance(value, Tensor) or value.numel() == 0:
        return value
    poison = float("nan") if value.is_floating_point() else 2**40 if value.dtype == torch.int64 else 255
    flat = torch.full((value.numel() + 2 * FENCE,), 0, dtype=value.dtype, device=value.device)
    flat[:FENCE] = flat[FENCE + value.numel() :] = poison
    inner = flat[FENCE : FENCE + value.numel()].view(value.shape)
    inner.copy_(value)
    return inner


def fence_of(inner: Tensor) -> Tensor:
    """The poison around a fenced tensor, as it is now."""
    whole = inner.as_strided((inner.numel() + 2 * FENCE,), (1,), inner.storage_offset() - FENCE)
    return torch.cat((whole[:FENCE], whole[-FENCE:]))


@contextmanager
def empty_is_nan() -> Iterator[None]:
    """Memory that torch hands out holds NaN, or the largest integer, so that what a kernel does not write shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
