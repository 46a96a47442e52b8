"""The n-gram block: what hashed n-grams add to every residual stream, before layer 1 reads it.

    R    <- R[s] + w[s] * y                              the write that layer 0 left waiting
    key   = norm_key(e K_projᵀ);  val = e V_projᵀ;  qry = norm_query(R)     e: the gathered table rows
    d_s   = Σ_j key[s, j] qry[s, j] / sqrt(D);   a_s = sigmoid(sign(d_s) sqrt(max(|d_s|, 1e-6)))
    u     = a_s val on each stream;   n = norm_conv(u)
    c     = silu(Σ_j conv[j] n[t - dilation (taps - 1 - j)])                 per channel, zeros before the start
    R    <- R + (u + c)

Source: transformers 5.24, Qwen4ExpTextPLELayer.forward. The convolution is summed in float32, rounded, then silu.
"""

import torch
from torch import Tensor

from stepfloor.kernels._torch import rms_norm, sigmoid, silu


def ple_mix_reference(
    residual: Tensor,
    y: Tensor | None,
    y_weights: Tensor | None,
    key_value: Tensor,
    conv_rows: Tensor,
    slots: Tensor,
    rejected: Tensor,
    norm_key: Tensor,
    norm_query: Tensor,
    norm_conv: Tensor,
    conv_weight: Tensor,
    dilation: int,
    streams: int,
    eps: float,
) -> Tensor:
    """All rows at once, then the convolution sequence by sequence."""
    count, rows = key_value.shape[:2]
    width = residual.shape[-1]
    if y is not None and y_weights is not None:
        residual = residual + (y.unsqueeze(-2) * y_weights.unsqueeze(-1)).flatten(-2)
    key, value = key_value.flatten(0, 1).split((width, width // streams), -1)
    key = rms_norm(key, norm_key, eps, streams).unflatten(-1, (streams, -1))
    query = rms_norm(residual, norm_query, eps, streams).unflatten(-1, (streams, -1))
    score = (key * query).sum(-1, keepdim=True) / (width // streams) ** 0.5
    gate = sigmoid(score.abs().clamp_min(1e-6).sqrt() * score.sign())
    gated = (gate * value.unsqueeze(-2)).flatten(-2)  # [B * R, S * D]
    normed = rms_norm(gated, norm_conv, eps, streams).unflatten(0, (count, rows))
    history = dilation * (conv_weight.shape[1] - 1)
    convolved = []
    for b in range(count):
        slot, last = int(slots[b]), conv_rows.shape[1] - int(rejected[b])
        window = torch.cat((conv_rows[slot, last - history : last], normed[b]))
        kept = min(conv_rows.shape[1], history + rows)
        conv_rows[slot, conv_rows.shape[1] - kept :] = window[-kept:]
        convolved.append(_convolve(window, conv_weight, dilation, rows))
    return residual + (gated + torch.cat(convolved))


def ple_mix(
    residual: Tensor,
    y: Tensor | None,
    y_weights: Tensor | None,
    key_value: Tensor,
    conv_rows: Tensor,
    slots: Tensor,
    rejected: Tensor,
    norm_key: Tensor,
    norm_query: Tensor,
    norm_conv: Tensor,
    conv_weight: Tensor,
    dilation: int,
    streams: int,
    eps: float,
) -> Tensor:
    """Add the n-gram block to R rows of each of B sequences.

    residual      [B * R, S * D]; y [B * R, D] and y_weights [B * R, S] wait to be written, or None
    key_value     [B, R, S * D + D], the projected table rows: keys, then the value
    conv_rows     [slots, history + R', S * D]: the newest convolution inputs, newest last; rewritten in place
    slots         [B] int64; rejected [B] int64, rows at the end of conv_rows that the last step did not accept
    norm_*        [S * D] float32, 1 already added; conv_weight [S * D, taps] float32
    dilation      tokens between taps
    Returns the residual [B * R, S * D]. Raises ValueError if the rows disagree.
    """
    count, width = residual.shape
    written = (None if y is None else tuple(y.shape), None if y_weights is None else tuple(y_weights.shape))
    history = dilation * (conv_weight.shape[1] - 1)
    if (
        count != key_value.shape[0] * key_value.shape[1]
        or width % streams
        or key_value.shape[2] != width + width // streams
        or written not in ((None, None), ((count, width // streams), (count, streams)))
        or conv_rows.shape[1] < history
    ):
        raise ValueError(
            f"ple_mix wants residual [B * R, {streams} * D], key_value [B, R, {streams + 1} * D], y [B * R, D] and "
            f"weights [B * R, {streams}] or neither, at least {history} convolution rows; got residual "
            f"{tuple(residual.shape)}, key_value {tuple(key_value.shape)}, y {written[0]}, weights {written[1]}, "
            f"{conv_rows.shape[1]} rows"
        )
    return ple_mix_reference(
        residual,
        y,
        y_weights,
        key_value,
        conv_rows,
        slots,
        rejected,
        norm_key,
        norm_query,
        norm_conv,
        conv_weight,
        dilation,
        streams,
        eps,
    )


def ple_mix_inputs(b: int, r: int, d: int, dtype: torch.dtype, device: str) -> dict[str, object]:
    """Inputs that the test, the tuner and the bench share; four streams, four taps, dilation 3."""
    make = torch.Generator(device).manual_seed(0)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=make, device=device)

    return {
        "residual": rand(b * r, 4 * d).to(dtype),
        "y": rand(b * r, d).to(dtype),
        "y_weights": (2 * sigmoid(rand(b * r, 4))).to(dtype),
        "key_value": rand(b, r, 5 * d).to(dtype),
        "conv_rows": rand(b + 1, 9 + r, 4 * d).to(dtype),
        "slots": torch.arange(1, b + 1, device=device),
        "rejected": torch.randint(0, r + 1, (b,), generator=make, device=device),
        "norm_key": 1 + 0.1 * rand(4 * d),
        "norm_query": 1 + 0.1 * rand(4 * d),
        "norm_conv": 1 + 0.1 * rand(4 * d),
        "conv_weight": rand(4 * d, 4) / 2,
        "dilation": 3,
        "streams": 4,
        "eps": 1e-6,
    }


def _convolve(window: Tensor, weight: Tensor, dilation: int, rows: int) -> Tensor:
    summed = window[:rows].float() * weight[:, 0]
    for tap in range(1, weight.shape[1]):
        summed = summed + window[tap * dilation : tap * dilation + rows].float() * weight[:, tap]
    return silu(summed.to(window.dtype))
