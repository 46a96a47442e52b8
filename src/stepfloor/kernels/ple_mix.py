"""The n-gram block: what hashed n-grams add to every residual stream, before layer 1 reads it.

    R    <- R[s] + w[s] * y                              the write that layer 0 left waiting
    key   = norm_key(e K_projᵀ);  val = e V_projᵀ;  qry = norm_query(R)     e: the gathered table rows
    d_s   = Σ_j key[s, j] qry[s, j] / sqrt(D);   a_s = sigmoid(sign(d_s) sqrt(max(|d_s|, 1e-6)))
    u     = a_s val on each stream;   n = norm_conv(u)
    c     = silu(Σ_j conv[j] n[t - dilation (taps - 1 - j)])                 per channel, zeros before the start
    R    <- R + (u + c)

Source: transformers 5.24, Qwen4ExpTextPLELayer.forward. The convolution is summed in float32, rounded, then silu.

On a GPU it is two kernels: one program for each stream of each row writes, norms and gates; then one for each run of
channels of each sequence convolves, and rewrites these channels' history itself. A prompt chunk's rows are many
programs that all read the history, so there a third kernel rewrites it. A row's bits depend on nothing but that row and
the convolution inputs before it.
"""

import torch
from torch import Tensor

from stepfloor.kernels._jit import dependent_launch, let_successor_in, runs_triton, start, tl, triton, wait
from stepfloor.kernels._torch import rms_norm, sigmoid, silu

MOST_TILE_ROWS = 16  # rows of a sequence in one program; a decode step has no more
BLOCK_CHANNELS = 128


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
    run = launch_mix if runs_triton(residual) else ple_mix_reference
    return run(
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


def launch_mix(
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
    """Queue the kernels. Raises ValueError if conv_rows is not contiguous: it is rewritten in place."""
    if not conv_rows.is_contiguous():
        raise ValueError(f"ple_mix rewrites conv_rows in place and wants it contiguous; strides {conv_rows.stride()}")
    sequences, rows = key_value.shape[:2]
    count, width = residual.shape
    d, taps = width // streams, conv_weight.shape[1]
    key_value = key_value.contiguous()
    out, normed = residual.new_empty((count, width)), residual.new_empty((count, width))
    gates = residual.new_empty((count, streams))
    later = dependent_launch(residual)
    _gate_kernel[count, streams](
        residual.contiguous(),
        None if y is None else y.contiguous(),
        None if y_weights is None else y_weights.contiguous(),
        key_value,
        norm_key,
        norm_query,
        norm_conv,
        out,
        gates,
        normed,
        d,
        d**0.5,
        eps,
        STREAMS=streams,
        BLOCK=triton.next_power_of_2(d),
        WRITE=y is not None,
        num_warps=8,
        **later,
    )
    history, kept_rows = dilation * (taps - 1), conv_rows.shape[1]
    kept = min(kept_rows, history + rows)
    tile_rows = min(MOST_TILE_ROWS, triton.next_power_of_2(rows))
    alone = rows <= tile_rows
    blocks = -(-width // BLOCK_CHANNELS)
    window = {
        "HISTORY": history,
        "KEPT": kept,
        "BLOCK_KEPT": triton.next_power_of_2(kept),
        "BLOCK": BLOCK_CHANNELS,
    }
    _convolve_kernel[blocks, -(-rows // tile_rows), sequences](
        conv_rows,
        normed,
        slots,
        rejected,
        conv_weight,
        key_value,
        gates,
        out,
        rows,
        kept_rows,
        width,
        d,
        TAPS=taps,
        DILATION=dilation,
        STREAMS=streams,
        ROWS=tile_rows,
        KEEP=alone,
        **window,
        **later,
    )
    if not alone:
        _keep_kernel[blocks, sequences](conv_rows, normed, slots, rejected, rows, kept_rows, width, **window, **later)
    return out


@triton.jit
def _gate_kernel(
    residual_ptr,
    y_ptr,
    y_weights_ptr,
    key_value_ptr,
    norm_key_ptr,
    norm_query_ptr,
    norm_conv_ptr,
    out_ptr,
    gates_ptr,
    normed_ptr,
    d,
    root_d,
    eps,
    STREAMS: tl.constexpr,
    BLOCK: tl.constexpr,
    WRITE: tl.constexpr,
    PDL: tl.constexpr,
):
    # One program: one stream of one row. The pending write, the gate, and the convolution's input. Scales are read
    # before the wait, everything else at once behind it.
    let_successor_in(PDL)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    stream = tl.program_id(1)
    channel = tl.arange(0, BLOCK)
    live = channel < d
    at = (row * STREAMS + stream) * d + channel
    scale_at = stream * d + channel
    key_scale = tl.load(norm_key_ptr + scale_at, mask=live, other=0)
    query_scale = tl.load(norm_query_ptr + scale_at, mask=live, other=0)
    conv_scale = tl.load(norm_conv_ptr + scale_at, mask=live, other=0)
    wait(PDL)
    residual = tl.load(residual_ptr + at, mask=live, other=0).to(tl.float32)
    key_ptr = key_value_ptr + row * (STREAMS + 1) * d
    key = tl.load(key_ptr + scale_at, mask=live, other=0).to(tl.float32)
    value = tl.load(key_ptr + STREAMS * d + channel, mask=live, other=0).to(tl.float32)
    if WRITE:
        y = tl.load(y_ptr + row * d + channel, mask=live, other=0).to(tl.float32)
        weight = tl.load(y_weights_ptr + row * STREAMS + stream).to(tl.float32)
        residual = (residual + (y * weight).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
    tl.store(out_ptr + at, residual.to(dtype), mask=live)
    key = _normed(key, key_scale, d, eps).to(dtype).to(tl.float32)
    query = _normed(residual, query_scale, d, eps).to(dtype).to(tl.float32)
    score = tl.sum((key * query).to(dtype).to(tl.float32), 0).to(dtype).to(tl.float32)
    score = (score / root_d).to(dtype).to(tl.float32)
    size = tl.abs(score)
    size = tl.where(size < 1e-6, 1e-6, size).to(dtype).to(tl.float32)
    sign = tl.where(score > 0, 1.0, tl.where(score < 0, -1.0, 0.0))
    signed = tl.sqrt(size).to(dtype).to(tl.float32) * sign
    gate = (1.0 / (1.0 + tl.exp(-signed))).to(dtype)
    tl.store(gates_ptr + row * STREAMS + stream, gate)
    gated = (gate.to(tl.float32) * value).to(dtype).to(tl.float32)
    tl.store(normed_ptr + at, _normed(gated, conv_scale, d, eps).to(dtype), mask=live)


@triton.jit
def _normed(x, scale, d, eps):
    return x * tl.rsqrt(tl.sum(x * x, 0) / d + eps) * scale


@triton.jit
def _window(conv_ptr, normed_ptr, place, channel, live, width, HISTORY: tl.constexpr):
    # Rows of the window at `place`: the history at conv_ptr, then this step's rows at normed_ptr.
    old = place < HISTORY
    kept = tl.load(conv_ptr + place[:, None] * width + channel[None, :], mask=live & old[:, None], other=0)
    new_ptr = normed_ptr + (place - HISTORY)[:, None] * width + channel[None, :]
    return tl.where(old[:, None], kept, tl.load(new_ptr, mask=live & (place >= HISTORY)[:, None], other=0))


@triton.jit
def _history(conv_rows_ptr, slots_ptr, rejected_ptr, sequence, kept_rows, width, HISTORY: tl.constexpr):
    # Where a slot begins, and the first of its HISTORY newest accepted rows. A padding row may hold any count.
    slot_ptr = conv_rows_ptr + tl.load(slots_ptr + sequence) * kept_rows * width
    rejected = tl.load(rejected_ptr + sequence)
    first = tl.minimum(tl.maximum(kept_rows - HISTORY - rejected, 0), kept_rows - HISTORY)
    return slot_ptr, slot_ptr + first * width


@triton.jit
def _keep(
    slot_ptr,
    conv_ptr,
    normed_ptr,
    rows,
    kept_rows,
    channel,
    live,
    width,
    HISTORY: tl.constexpr,
    KEPT: tl.constexpr,
    BLOCK_KEPT: tl.constexpr,
):
    # The last KEPT rows of the window become the last of the slot. All are read before one is written.
    turn = tl.arange(0, BLOCK_KEPT).to(tl.int64)
    inside = (turn < KEPT)[:, None] & live[None, :]
    newest = _window(conv_ptr, normed_ptr, HISTORY + rows - KEPT + turn, channel, inside, width, HISTORY)
    tl.debug_barrier()
    tl.store(slot_ptr + (kept_rows - KEPT + turn)[:, None] * width + channel[None, :], newest, mask=inside)


@triton.jit
def _convolve_kernel(
    conv_rows_ptr,
    normed_ptr,
    slots_ptr,
    rejected_ptr,
    conv_weight_ptr,
    key_value_ptr,
    gates_ptr,
    out_ptr,
    rows,
    kept_rows,
    width,
    d,
    TAPS: tl.constexpr,
    DILATION: tl.constexpr,
    STREAMS: tl.constexpr,
    ROWS: tl.constexpr,
    KEEP: tl.constexpr,
    HISTORY: tl.constexpr,
    KEPT: tl.constexpr,
    BLOCK_KEPT: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    # One program: BLOCK channels of ROWS rows of one sequence; with KEEP these are all its rows.
    start(PDL)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    sequence = tl.program_id(2).to(tl.int64)
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = channel < width
    inside = (row < rows)[:, None] & live[None, :]
    slot_ptr, conv_ptr = _history(conv_rows_ptr, slots_ptr, rejected_ptr, sequence, kept_rows, width, HISTORY)
    normed_ptr += sequence * rows * width
    total = tl.full((ROWS, BLOCK), 0.0, tl.float32)
    for tap in tl.static_range(TAPS):
        x = _window(conv_ptr, normed_ptr, row + tap * DILATION, channel, inside, width, HISTORY)
        weight = tl.load(conv_weight_ptr + channel * TAPS + tap, mask=live, other=0)
        total = tl.fma(x.to(tl.float32), tl.broadcast_to(weight[None, :], (ROWS, BLOCK)), total)
    summed = total.to(dtype).to(tl.float32)
    convolved = (summed / (1.0 + tl.exp(-summed))).to(dtype).to(tl.float32)
    at = sequence * rows + row
    gate = tl.load(gates_ptr + at[:, None] * STREAMS + (channel // d)[None, :], mask=inside, other=0).to(tl.float32)
    value_ptr = key_value_ptr + (at * (STREAMS + 1) + STREAMS)[:, None] * d + (channel % d)[None, :]
    value = tl.load(value_ptr, mask=inside, other=0).to(tl.float32)
    gated = (gate * value).to(dtype).to(tl.float32)
    added = (gated + convolved).to(dtype).to(tl.float32)
    to_ptr = out_ptr + at[:, None] * width + channel[None, :]
    residual = tl.load(to_ptr, mask=inside, other=0).to(tl.float32)
    tl.store(to_ptr, (residual + added).to(dtype), mask=inside)
    if KEEP:
        _keep(slot_ptr, conv_ptr, normed_ptr, rows, kept_rows, channel, live, width, HISTORY, KEPT, BLOCK_KEPT)


@triton.jit
def _keep_kernel(
    conv_rows_ptr,
    normed_ptr,
    slots_ptr,
    rejected_ptr,
    rows,
    kept_rows,
    width,
    HISTORY: tl.constexpr,
    KEPT: tl.constexpr,
    BLOCK_KEPT: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    start(PDL)
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    sequence = tl.program_id(1).to(tl.int64)
    slot_ptr, conv_ptr = _history(conv_rows_ptr, slots_ptr, rejected_ptr, sequence, kept_rows, width, HISTORY)
    normed_ptr += sequence * rows * width
    live = channel < width
    _keep(slot_ptr, conv_ptr, normed_ptr, rows, kept_rows, channel, live, width, HISTORY, KEPT, BLOCK_KEPT)


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
