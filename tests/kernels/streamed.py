"""How far a streamed kernel may be from its reference; shared with the benchmark, which checks before it times."""

from collections.abc import Sequence

import torch
from torch import Tensor

from stepfloor.formats.codec import PackedWeight, quantize

HALF_STEP = 2.0**-8  # bf16 rounds by at most this part of the value


def odd_weight(n: int, k: int, name: str, device: str = "cpu") -> PackedWeight:
    """A matrix whose scales differ from row to row and block to block, with a dead block and every code there is.

    fp8_block gets float32 scales of 24 significant bits, which no bf16 product with a code would hold.
    """
    make = torch.Generator(device).manual_seed(n + k)
    w = torch.randn(n, k, generator=make, device=device) / k**0.5
    w *= torch.exp2(torch.randint(-6, 1, (n, -(-k // 16)), generator=make, device=device)).repeat_interleave(16, 1)[
        :, :k
    ]
    w[0, :32] = 0
    weight = quantize(w, name)
    codes = weight.data.view(torch.uint8)
    if name.startswith("fp8") or name == "mxfp8":
        every = torch.tensor([c for c in range(256) if c & 127 != 127], dtype=torch.uint8, device=device)
        codes[-1, : min(k, 254)] = every[:k]
        if weight.scale is not None and name == "fp8_block":
            weight = PackedWeight(name, weight.shape, weight.data, weight.scale.float() * (1 + 2.0**-9 + 2.0**-23))
    if name == "nvfp4":
        codes[-1] = torch.arange(k // 2, device=device).to(torch.uint8)
    return weight


def product_bound(x: Tensor, weight: PackedWeight) -> Tensor:
    """How far a streamed product may be from the exact one.

    One rounding to bf16; float32 sums of K terms and two scalings are off by (K + 4) 2**-24 of the magnitudes.
    """
    w = weight.dequantize().double()
    return (x.double() @ w.T).abs() * HALF_STEP + (x.shape[1] + 4) * 2.0**-24 * (x.double().abs() @ w.abs().T)


def down_faults(ours: Sequence[Tensor], reference: Sequence[Tensor], weight: PackedWeight) -> list[str]:
    """What is wrong with hc_down's four results.

    The residual is equal to the bit; n within a step; low and the write weights within what that moves in the product.
    """
    found = [] if torch.equal(ours[0], reference[0]) else ["residual differs"]
    normed = reference[1].double()
    # two roundings of float32 values that differ by a few 2**-24: equal, or neighbours
    found += outside("normed", ours[1], reference[1], 2 * HALF_STEP * normed.abs())
    # Rounding flips where n lies within a few 2**-24 of a midpoint between steps of 2**-8, in far less than one n of a
    # hundred; those terms move by a step. Errors of terms are independent: eight times the root of their squares is
    # passed once in 1e15. float32 sums add K 2**-24 of the magnitudes.
    w = weight.dequantize().double()
    terms = (normed.square() @ w.T.square()).sqrt()
    moved = 8 * 0.1 * 2 * HALF_STEP * terms
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
    w, x = weight.dequantize().double(), low.double()
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
