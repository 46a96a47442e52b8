"""A linear layer of any stored format: y = x Wᵀ, several matrices that share an input side by side.

Source: torch.nn.Linear without bias; formats in formats.table. Activations are never quantized.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from stepfloor.formats.codec import PackedWeight, quantize
from stepfloor.kernels._torch import product


def linear_reference(x: Tensor, weights: Sequence[PackedWeight]) -> Tensor:
    """float32 products of the dequantized weights, rounded once to the dtype of x."""
    return product(x, weights)


def linear(x: Tensor, weights: Sequence[PackedWeight]) -> Tensor:
    """Project rows through one or more matrices that share their input.

    x        [T, K]
    weights  matrices [N_i, K], each in its own format
    Returns [T, sum of N_i] in the dtype of x. Raises ValueError if a K disagrees.
    """
    if any(w.shape[1] != x.shape[-1] for w in weights):
        raise ValueError(
            f"linear wants x [T, K] and weights [N, K]; got {tuple(x.shape)}, {[w.shape for w in weights]}"
        )
    return linear_reference(x, weights)


def linear_inputs(t: int, n: int, k: int, format_name: str, dtype: torch.dtype, device: str) -> dict[str, object]:
    """Inputs that the test, the tuner and the bench share."""
    make = torch.Generator(device).manual_seed(0)
    x = torch.randn(t, k, generator=make, device=device).to(dtype)
    w = torch.randn(n, k, generator=make, device=device) / k**0.5
    return {"x": x, "weights": (quantize(w, format_name),)}
