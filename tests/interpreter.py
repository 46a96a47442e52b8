"""Triton's interpreter with the arithmetic of a GPU where it has another: import it for its effect.

Triton 3.6 to 3.9: the interpreter cuts float32 off where it should round to bf16, and multiplies the bits of bf16
operands, as integers, in `tl.dot`. Kernels round where their references do, so tests need the real rounding.
"""

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

EXACT = {tl.bfloat16: torch.bfloat16, tl.float8e4nv: torch.float8_e4m3fn}

_convert = interpreter._convert_float
_dot = interpreter.InterpreterBuilder.create_dot


def _rounding(data: np.ndarray, source: Any, target: Any, mode: Any) -> np.ndarray:
    if source == tl.float32 and target in EXACT:
        rounded = torch.from_numpy(np.array(data, dtype=np.float32)).to(EXACT[target])
        bits = torch.int16 if target == tl.bfloat16 else torch.int8
        return rounded.view(bits).numpy().view(np.uint16 if target == tl.bfloat16 else np.uint8)
    if source == tl.float8e4nv and target == tl.float32:
        return torch.from_numpy(np.array(data, dtype=np.uint8)).view(torch.float8_e4m3fn).float().numpy()
    if source == tl.float8e4nv and target == tl.bfloat16:
        return _rounding(_rounding(data, source, tl.float32, mode), tl.float32, target, mode)
    return _convert(data, source, target, mode)


def _float_dot(self: Any, a: Any, b: Any, d: Any, precision: Any, imprecise: Any) -> Any:
    """bf16 operands become float32; every sum runs over the whole of K by itself, so no row depends on its place."""

    def single(handle: Any) -> np.ndarray:
        wide = self.cast_impl(handle, tl.float32) if handle.dtype.scalar == tl.bfloat16 else handle
        return wide.data.reshape(handle.data.shape)

    if {a.dtype.scalar, b.dtype.scalar} <= {tl.bfloat16, tl.float32}:
        product = np.einsum("ik,kj->ij", single(a), single(b), optimize=False) + d.data
        return interpreter.TensorHandle(product.astype(d.data.dtype), d.dtype.scalar)
    return _dot(self, a, b, d, precision, imprecise)


if triton.knobs.runtime.interpret:
    interpreter._convert_float = _rounding
    interpreter.InterpreterBuilder.create_dot = _float_dot
