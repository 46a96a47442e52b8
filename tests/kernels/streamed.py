"""How far a streamed kernel may be from its reference; shared with the benchmark, which checks before it times."""

from collections.abc import Sequence

import torch
from torch import Tensor

from stepfloor.formats.codec import PackedWeight

HALF_STEP = 2.0**-8  # bf16 rounds by at most this part of the value


def down_faults(
    ours: Sequence[Tensor], reference: Sequence[Tensor], weight: PackedWeight, norm_first: bool
) -> list[str]:
    """What is wrong with hc_down's four results.

    The residual is equal to the bit; n within a step; low and the write weights within what that moves in the product.
    """
    found = [] if torch.equal(ours[0], reference[0]) else ["residual differs"]
    normed = reference[1].double()
    # two roundings of float32 values that differ by a few 2**-24: equal, or neighbours
    found += outside("normed", ours[1], reference[1], 2 * HALF_STEP * normed.abs())
    # norm_first: rounding flips where n lies within a few 2**-24 of a midpoint between steps of 2**-8, in far less than
    # one n of a hundred; those terms move by a step. Otherwise every factor is rounded in another place, by half a step
    # on either side. Errors of terms are independent: eight times the root of their squares is passed once in 1e15.
    # float32 sums add K 2**-24 of the magnitudes.
    w = weight.data.double()
    terms = (normed.square() @ w.T.square()).sqrt()
    moved = 8 * (0.1 if norm_first else 1.0) * 2 * HALF_STEP * terms
    moved = moved + w.shape[1] * 2.0**-24 * (normed.abs() @ w.T.abs()) + 2 * HALF_STEP * (normed @ w.T).abs()
    rank = reference[2].shape[1]
    for name, index, rows, slope in (("low", 2, slice(0, rank), 1.1), ("weights", 3, slice(rank, None), 0.5)):
        # over four streams, then silu's slope of at most 1.1, or twice sigmoid's quarter; then the result's rounding
        wanted = reference[index].double()
        found += outside(
            name, ours[index], reference[index], slope * moved[:, rows] / 4 + 2 * HALF_STEP * wanted.abs() + 2.0**-20
        )
    return found


def mix_faults(ours: Tensor, reference: Tensor, low: Tensor, normed: Tensor, weight: PackedWeight) -> list[str]:
    """What is wrong with hc_mix's result: two orders of one float32 sum, then the same roundings."""
    w, x = weight.data.double(), low.double()
    logits = x @ w.T
    moved = 2 * HALF_STEP * logits.abs() + w.shape[1] * 2.0**-24 * (x.abs() @ w.T.abs())
    # sigmoid's slope is at most a quarter; a step of the gate and one of its product with n; then the result's
    gated = (0.25 * moved + 2 * 2 * HALF_STEP * torch.sigmoid(logits)) * normed.double().abs()
    bound = gated.unflatten(-1, (4, -1)).mean(-2) + 2 * HALF_STEP * reference.double().abs()
    return outside("mixed", ours, reference, bound)


def outside(name: str, ours: Tensor, reference: Tensor, bound: Tensor) -> list[str]:
    """How many values are farther from the reference than the bound."""
    count = int((~((ours.double() - reference.double()).abs() <= bound)).sum())
    return [f"{name}: {count} of {ours.numel()} values outside the bound"] if count else []
