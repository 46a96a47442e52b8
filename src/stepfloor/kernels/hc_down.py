"""Hyper-connection write, norm and down projection, the seam between two sub-layers.

    R      <- R[s] + w[s] * y                 the sub-layer before writes its output to every stream
    n       = norm of each stream of R
    low     = silu((n downᵀ) / S)
    w_next  = 2 sigmoid((n injectᵀ) / S)      how this sub-layer's output will be written

Source: transformers 5.24, Qwen4ExpTextGatedResidual.forward and the write in Qwen4ExpTextDecoderLayer.forward.
The source rounds every step to the model's dtype; so does the reference.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from stepfloor.formats.codec import PackedWeight, quantize
from stepfloor.kernels._torch import product, rms_norm, sigmoid, silu


def hc_down_reference(
    residual: Tensor,
    y: Tensor | None,
    y_weights: Tensor | None,
    norm_scale: Tensor,
    down: Sequence[PackedWeight],
    rank: int,
    streams: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The source's equations with the source's rounding."""
    if y is not None and y_weights is not None:
        residual = residual + (y.unsqueeze(-2) * y_weights.unsqueeze(-1)).flatten(-2)
    normed = rms_norm(residual, norm_scale, eps, streams)
    projected = product(normed, down) / streams
    low = silu(projected[:, :rank])
    next_weights = 2 * sigmoid(projected[:, rank:])
    return residual, normed, low, next_weights


def hc_down(
    residual: Tensor,
    y: Tensor | None,
    y_weights: Tensor | None,
    norm_scale: Tensor,
    down: Sequence[PackedWeight],
    rank: int,
    streams: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Finish the write of one sub-layer and begin the read of the next.

    residual    [T, S * D] stream-major
    y           [T, D] output of the sub-layer before, or None when nothing waits to be written
    y_weights   [T, S] its write weights, None together with y
    norm_scale  [S * D] float32, 1 already added
    down        matrices [rank (+ S), S * D]: the down rows, then the inject rows (a mixer has none)
    Returns residual [T, S * D], normed [T, S * D], low [T, rank], next write weights [T, S] or [T, 0].
    Raises ValueError if the shapes disagree.
    """
    count, width = residual.shape
    rows = sum(w.shape[0] for w in down)
    written = (None if y is None else tuple(y.shape), None if y_weights is None else tuple(y_weights.shape))
    if (
        written not in ((None, None), ((count, width // streams), (count, streams)))
        or width % streams
        or norm_scale.shape != (width,)
        or rows not in (rank, rank + streams)
        or any(w.shape[1] != width for w in down)
    ):
        raise ValueError(
            f"hc_down wants residual [T, {streams} * D], y [T, D] and weights [T, {streams}] or neither, norm_scale "
            f"[{streams} * D], {rank} or {rank + streams} down rows of {streams} * D; got residual "
            f"{tuple(residual.shape)}, y {written[0]}, weights {written[1]}, norm_scale {tuple(norm_scale.shape)}, "
            f"down {[w.shape for w in down]}"
        )
    return hc_down_reference(residual, y, y_weights, norm_scale, down, rank, streams, eps)


def hc_down_inputs(
    t: int, d: int, rank: int, format_name: str, dtype: torch.dtype, device: str, write: bool = True
) -> dict[str, object]:
    """Inputs that the test, the tuner and the bench share; four streams."""
    make = torch.Generator(device).manual_seed(0)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=make, device=device)

    return {
        "residual": rand(t, 4 * d).to(dtype),
        "y": rand(t, d).to(dtype) if write else None,
        "y_weights": (2 * sigmoid(rand(t, 4))).to(dtype) if write else None,
        "norm_scale": 1 + 0.1 * rand(4 * d),
        "down": (quantize(rand(rank + 4, 4 * d) / (4 * d) ** 0.5, format_name),),
        "rank": rank,
        "streams": 4,
        "eps": 1e-6,
    }
