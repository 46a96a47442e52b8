"""Gated delta net over the rows of one decode step: convolution, gates, delta rule, gated norm.

The recurrent state is kept as it was at an earlier commit, beside the projected rows since. A step first replays
the rows that the last step accepted and writes the state once; then it runs its own rows, which stay pending
until the next step knows how many of them were accepted.

Source: transformers 5.24, Qwen4ExpTextGatedDeltaNet.forward (qwen4_exp/modeling_qwen4_exp.py).
"""

import torch
from torch import Tensor

from stepfloor.kernels._torch import delta_rows, delta_rule, gated_norm


def gdn_decode_reference(
    projected: Tensor,
    state: Tensor,
    raw_rows: Tensor,
    gate_rows: Tensor,
    slots: Tensor,
    pending: Tensor,
    conv_weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    key_heads: int,
    key_dim: int,
    eps: float,
    activation: str,
) -> Tensor:
    """One sequence after the other; the delta rule row by row."""
    history = conv_weight.shape[1] - 1
    heads, value_dim = a_log.shape[0], norm_weight.shape[0]
    channels = conv_weight.shape[0]
    count, rows = projected.shape[:2]
    raw, z, gates = projected.split((channels, heads * value_dim, 2 * heads), -1)
    outputs = []
    for b in range(count):
        slot, accepted = int(slots[b]), int(pending[b])
        # pending and new rows are neighbours, so one convolution serves the replay and the step
        window = torch.cat((raw_rows[slot, : history + accepted], raw[b]))
        window_gates = torch.cat((gate_rows[slot, :accepted], gates[b]))
        operands = delta_rows(window, window_gates, conv_weight, a_log, dt_bias, key_heads, key_dim)
        delta_rule(operands, state[slot], 0, accepted)
        outputs.append(delta_rule(operands, state[slot].clone(), accepted, accepted + rows))
        raw_rows[slot, : history + rows] = window[accepted:]
        gate_rows[slot, :rows] = gates[b]
    mixed = torch.cat(outputs).to(projected.dtype)  # [B * R, HV, V]
    gate = z.reshape(count * rows, heads, value_dim)
    return gated_norm(mixed, gate, norm_weight, eps, activation).reshape(count, rows, -1)


def gdn_decode(
    projected: Tensor,
    state: Tensor,
    raw_rows: Tensor,
    gate_rows: Tensor,
    slots: Tensor,
    pending: Tensor,
    conv_weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    key_heads: int,
    key_dim: int,
    eps: float,
    activation: str,
) -> Tensor:
    """Replay accepted rows into the state, then run R new rows of each of B sequences.

    projected    [B, R, C + HV * V + 2 * HV]: q, k, v before convolution (C channels), z, b, a
    state        [slots, HV, K, V] float32, advanced in place by the pending rows
    raw_rows     [slots, taps - 1 + R', C]: the convolution's history, then the pending rows; rewritten in place
    gate_rows    [slots, R', 2 * HV] b and a of the pending rows; rewritten in place
    slots        [B] int64; pending [B] int64, rows of the last step that were accepted (0 after a prefill)
    conv_weight  [C, taps] float32; a_log, dt_bias [HV] float32; norm_weight [V] in the dtype of projected
    key_heads    query and key heads; key_dim  K; eps  of the norm; activation  sigmoid or silu, of the gate
    Returns [B, R, HV * V]. Raises ValueError if R exceeds the rows that can be pending or the shapes disagree.
    """
    if projected.shape[1] > gate_rows.shape[1]:
        raise ValueError(f"gdn_decode holds {gate_rows.shape[1]} pending rows a sequence; got {projected.shape[1]}")
    columns = conv_weight.shape[0] + a_log.shape[0] * (norm_weight.shape[0] + 2)
    if projected.shape[2] != columns or slots.shape != projected.shape[:1] or pending.shape != slots.shape:
        raise ValueError(
            f"gdn_decode wants projected [B, R, {columns}], slots [B], pending [B]; got {tuple(projected.shape)}, "
            f"{tuple(slots.shape)}, {tuple(pending.shape)}"
        )
    return gdn_decode_reference(
        projected,
        state,
        raw_rows,
        gate_rows,
        slots,
        pending,
        conv_weight,
        a_log,
        dt_bias,
        norm_weight,
        key_heads,
        key_dim,
        eps,
        activation,
    )


def gdn_decode_inputs(
    b: int, r: int, key_heads: int, heads: int, key_dim: int, value_dim: int, dtype: torch.dtype, device: str
) -> dict[str, object]:
    """Inputs that the test, the tuner and the bench share; b sequences in the last slots, some rows pending."""
    make = torch.Generator(device).manual_seed(0)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=make, device=device)

    channels = 2 * key_heads * key_dim + heads * value_dim
    return {
        "projected": rand(b, r, channels + heads * value_dim + 2 * heads).to(dtype),
        "state": 0.1 * rand(b + 1, heads, key_dim, value_dim),
        "raw_rows": rand(b + 1, 3 + r, channels).to(dtype),
        "gate_rows": rand(b + 1, r, 2 * heads).to(dtype),
        "slots": torch.arange(1, b + 1, device=device),
        "pending": torch.randint(0, r + 1, (b,), generator=make, device=device),
        "conv_weight": rand(channels, 4) / 2,
        "a_log": torch.linspace(0, 2, heads, device=device),
        "dt_bias": torch.ones(heads, device=device),
        "norm_weight": (1 + 0.1 * rand(value_dim)).to(dtype),
        "key_heads": key_heads,
        "key_dim": key_dim,
        "eps": 1e-6,
        "activation": "sigmoid",
    }
