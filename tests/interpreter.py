"""Two places where Triton's interpreter (3.6 to 3.9) computes what no GPU does, set right for the tests.

float32 became bf16 by cutting bits off, where the hardware rounds to nearest, ties to even; and a dot product of bf16
operands multiplied their bits as integers.
"""

from typing import Any

import numpy as np
import torch
from triton import language as tl
from triton.runtime import interpreter


def mend() -> None:
    """Replace both functions of the interpreter; once, before a kernel runs."""
    convert, dot = interpreter._convert_float, interpreter.InterpreterBuilder.create_dot

    def rounded(values: Any, source: Any, target: Any, mode: Any) -> Any:
        if source != tl.float32 or target != tl.bfloat16:
            return convert(values, source, target, mode)
        flat = np.ascontiguousarray(values, dtype=np.float32).reshape(-1)
        return torch.from_numpy(flat).to(torch.bfloat16).view(torch.uint16).numpy().reshape(values.shape)

    def widened(operand: Any) -> Any:
        if operand.dtype.scalar != tl.bfloat16:
            return operand
        values = convert(operand.data, tl.bfloat16, tl.float32, None).view(np.float32)
        return interpreter.TensorHandle(values, tl.float32)

    def dotted(builder: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(builder, widened(a), widened(b), *rest)

    interpreter._convert_float = rounded
    interpreter.InterpreterBuilder.create_dot = dotted
