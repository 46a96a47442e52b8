"""How operator tests compare: within a bound, in how many places, rows alone and together, formats with float32."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from stepfloor.formats.codec import PackedWeight
from stepfloor.formats.table import FORMATS

# largest relative error of one rounding to nearest
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}
# fp8_tensor is a format of the n-gram table; one scale cannot serve a stack of experts
MATRIX_FORMATS = [name for name in FORMATS if name != "fp8_tensor"]


def assert_within(ours: Tensor, wanted: Tensor, bound: Tensor | float) -> None:
    """Every value within its bound, same shape and dtype, nothing infinite."""
    assert ours.shape == wanted.shape
    assert ours.dtype == wanted.dtype
    assert bool(torch.isfinite(ours).all())
    difference = (ours.double() - wanted.double()).abs()
    excess = difference - bound
    worst = int(excess.argmax())
    assert excess.max() <= 0, (
        f"value {worst}: {ours.flatten()[worst]:.9g} and {wanted.flatten()[worst]:.9g} differ by "
        f"{difference.flatten()[worst]:.3g}, {excess.max():.3g} more than the bound"
    )


def assert_rounded_alike(ours: Tensor, wanted: Tensor) -> None:
    """In bf16 all but one value in twenty have the same bits.

    Sums in another order differ by some 2**-22 and move a bf16 value, whose steps are 2**-7, only where they
    straddle a boundary: one in thousands, and the few tens of values that a moved one feeds. A rounding that is
    missing or in another place moves every third.
    """
    if ours.dtype == torch.bfloat16:
        assert (ours != wanted).float().mean() <= 0.05


def sum_bound(x: Tensor, weight: PackedWeight | Sequence[PackedWeight], orders: int = 2) -> Tensor:
    """How far two orders of the same K float32 products may stray: K 2**-24 of the sum of magnitudes each."""
    return orders * x.shape[-1] * UNIT[torch.float32] * magnitudes(x, weight)


def magnitudes(x: Tensor, weight: PackedWeight | Sequence[PackedWeight]) -> Tensor:
    """|x| |W|ᵀ in float64."""
    matrices = (weight,) if isinstance(weight, PackedWeight) else weight
    return torch.cat([x.double().abs() @ w.dequantize().double().abs().T for w in matrices], -1)


def decoded(weight: PackedWeight) -> PackedWeight:
    """The same matrix, stored as the float32 numbers it decodes to."""
    return PackedWeight("fp32", weight.shape, weight.dequantize())


def twin(weight: PackedWeight) -> PackedWeight:
    """The same matrix rounded to bf16: each weight off by at most 2**-8 of itself."""
    return PackedWeight("bf16", weight.shape, weight.dequantize().to(torch.bfloat16))


def with_weights(inputs: dict[str, Any], change: Callable[[PackedWeight], PackedWeight]) -> dict[str, Any]:
    """Inputs with every matrix changed."""

    def changed(value: Any) -> Any:
        if isinstance(value, PackedWeight):
            return change(value)
        if isinstance(value, tuple):
            return tuple(changed(v) for v in value)
        return value

    return {name: changed(value) for name, value in inputs.items()}


def assert_same(ours: Any, wanted: Any) -> None:
    """Bit for bit, tensors or tuples of them."""
    if isinstance(wanted, Tensor):
        assert ours.dtype == wanted.dtype
        assert torch.equal(ours, wanted)
        return
    assert len(ours) == len(wanted)
    for one, other in zip(ours, wanted, strict=True):
        assert_same(one, other)


def assert_rows_alone(operator: Callable[..., Any], inputs: dict[str, Any], per_row: Sequence[str]) -> None:
    """Rows one by one, and in groups of several sizes, have the bits they have together."""
    together = operator(**inputs)
    count = next(inputs[name].shape[0] for name in per_row if inputs[name] is not None)
    for sizes in ((1,), (3, 5, 1, 8), (2, 9)):
        parts = []
        for rows in groups(count, sizes):
            part = {name: inputs[name] if inputs[name] is None else inputs[name][rows] for name in per_row}
            parts.append(operator(**{**inputs, **part}))
        if isinstance(together, Tensor):
            assert_same(torch.cat(parts), together)
        else:
            assert_same(tuple(torch.cat(column) for column in zip(*parts, strict=True)), together)


def groups(count: int, sizes: Sequence[int]) -> Iterator[slice]:
    """Slices of 0..count in the given sizes, repeated; the last may be shorter."""
    start, turn = 0, 0
    while start < count:
        stop = min(count, start + sizes[turn % len(sizes)])
        yield slice(start, stop)
        start, turn = stop, turn + 1


def copied(inputs: dict[str, Any]) -> dict[str, Any]:
    """Inputs of an operator that writes in place, safe to run twice."""

    def copy(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.clone()
        if type(value).__name__ == "SparseCache":
            return replace(value, **{name: getattr(value, name).clone() for name in value.__slots__})
        return value

    return {name: copy(value) for name, value in inputs.items()}
