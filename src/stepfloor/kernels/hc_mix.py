"""Hyper-connection up projection and mix: the one vector a sub-layer reads from the residual streams.

    gate = sigmoid(low upᵀ);   x = mean over streams of gate[s] * n[s]     (normalised streams, not raw)

Source: transformers 5.24, Qwen4ExpTextGatedResidual.forward.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from stepfloor.formats.codec import PackedWeight, quantize
from stepfloor.kernels._torch import product, sigmoid


def hc_mix_reference(low: Tensor, normed: Tensor, up: Sequence[PackedWeight], streams: int) -> Tensor:
    """The source's equations with the source's rounding."""
    gate = sigmoid(product(low, up))
    return (gate * normed).unflatten(-1, (streams, -1)).mean(-2)


def hc_mix(low: Tensor, normed: Tensor, up: Sequence[PackedWeight], streams: int) -> Tensor:
    """Mix the normalised streams into a sub-layer's input.

    low     [T, rank]
    normed  [T, S * D] stream-major
    up      matrices [S * D, rank]
    Returns [T, D]. Raises ValueError if the shapes disagree.
    """
    if (
        low.shape[0] != normed.shape[0]
        or sum(w.shape[0] for w in up) != normed.shape[1]
        or any(w.shape[1] != low.shape[1] for w in up)
        or normed.shape[1] % streams
    ):
        raise ValueError(
            f"hc_mix wants low [T, rank], normed [T, S * D], up [S * D, rank]; got low {tuple(low.shape)}, "
            f"normed {tuple(normed.shape)}, up {[w.shape for w in up]}, {streams} streams"
        )
    return hc_mix_reference(low, normed, up, streams)


def hc_mix_inputs(t: int, d: int, rank: int, format_name: str, dtype: torch.dtype, device: str) -> dict[str, object]:
    """Inputs that the test, the tuner and the bench share; four streams."""
    make = torch.Generator(device).manual_seed(0)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=make, device=device)

    return {
        "low": rand(t, rank).to(dtype),
        "normed": rand(t, 4 * d).to(dtype),
        "up": (quantize(rand(4 * d, rank) / rank**0.5, format_name),),
        "streams": 4,
    }
