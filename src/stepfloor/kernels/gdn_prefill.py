"""Gated delta net over a prompt chunk of one sequence: convolution, gates, delta rule, gated norm.

On the CPU the recurrence runs row by row, so that any chunking gives the same bits. On other devices the chunk
form runs: C rows at a time as matrix products and one triangular solve, equal up to float32 rounding.

Source: transformers 5.24, Qwen4ExpTextGatedDeltaNet.forward; chunk form of Yang et al. 2024 (Gated Delta
Networks), section 3.3, with c the running sum of log decays in the chunk and G[i, j] = exp(c[i] - c[j]), j <= i:

    A = strictly_lower(diag(beta) K Kᵀ * G)
    U = (I + A)⁻¹ diag(beta) (V - diag(exp c) K M)
    O = diag(exp c) Q M + (Q Kᵀ * G) U;   M <- exp(c_last) M + Kᵀ diag(exp(c_last - c)) U
"""

import torch
from torch import Tensor

from stepfloor.kernels._delta import DeltaConstants
from stepfloor.kernels._torch import DeltaRows, delta_rows, delta_rule, gated_norm

CHUNK_ROWS = 64


def gdn_prefill_reference(
    projected: Tensor, state: Tensor, raw_rows: Tensor, slots: Tensor, constants: DeltaConstants
) -> Tensor:
    """The recurrence, row by row."""
    slot = int(slots[0])
    rows, z = _operands(projected, raw_rows[slot], constants)
    mixed = delta_rule(rows, state[slot], 0, projected.shape[0]).to(projected.dtype)
    return gated_norm(mixed, z, constants.norm_weight, constants.eps, constants.activation).flatten(1)


def gdn_prefill(projected: Tensor, state: Tensor, raw_rows: Tensor, slots: Tensor, constants: DeltaConstants) -> Tensor:
    """Run T prompt rows of one sequence and leave the state after the last.

    projected  [T, C + HV * V + 2 * HV]: q, k, v before convolution, z, b, a
    state      [slots, HV, K, V] float32, advanced in place
    raw_rows   [slots, at least taps - 1, C]: projected rows before the chunk (zeros at the start), replaced in place
    slots      [1] int64, the sequence's
    Returns [T, HV * V]. Raises ValueError if the shapes disagree.
    """
    if projected.ndim != 2 or projected.shape[1] != constants.columns or slots.shape != (1,):
        raise ValueError(
            f"gdn_prefill wants projected [T, {constants.columns}], slots [1]; got {tuple(projected.shape)}, "
            f"{tuple(slots.shape)}"
        )
    run = gdn_prefill_reference if projected.device.type == "cpu" else _gdn_prefill_chunked
    return run(projected, state, raw_rows, slots, constants)


def _gdn_prefill_chunked(
    projected: Tensor, state: Tensor, raw_rows: Tensor, slots: Tensor, constants: DeltaConstants
) -> Tensor:
    slot = int(slots[0])
    rows, z = _operands(projected, raw_rows[slot], constants)
    output, after = chunked_delta_rule(
        rows.query.transpose(0, 1),
        rows.key.transpose(0, 1),
        rows.value.transpose(0, 1),
        rows.log_decay.transpose(0, 1),
        rows.beta.transpose(0, 1),
        state[slot],
    )
    state[slot] = after
    mixed = output.transpose(0, 1).to(projected.dtype)
    return gated_norm(mixed, z, constants.norm_weight, constants.eps, constants.activation).flatten(1)


def chunked_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The gated delta rule in chunk form, float32, differentiable.

    query, key  [.., T, K]; value [.., T, V]; log_decay, beta [.., T]; state [.., K, V]
    Returns output [.., T, V] and the state after the last row, a new tensor.
    """
    outputs = []
    for start in range(0, query.shape[-2], CHUNK_ROWS):
        part = slice(start, start + CHUNK_ROWS)
        q, k, v, b = query[..., part, :], key[..., part, :], value[..., part, :], beta[..., part, None]
        c = log_decay[..., part].cumsum(-1)
        size = c.shape[-1]
        lower = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()
        # masked before the exponential: above the diagonal the difference is positive and may overflow
        g = (c[..., :, None] - c[..., None, :]).masked_fill(~lower, -torch.inf).exp()
        a = ((b * k) @ k.transpose(-1, -2) * g).tril(-1)
        unit = a + torch.eye(size, device=q.device)
        right = b * (v - c.exp()[..., None] * (k @ state))
        u = torch.linalg.solve_triangular(unit, right, upper=False, unitriangular=True)
        outputs.append(c.exp()[..., None] * (q @ state) + (q @ k.transpose(-1, -2) * g) @ u)
        last = c[..., -1:]
        state = last.exp()[..., None] * state + (k * (last - c).exp()[..., None]).transpose(-1, -2) @ u
    return torch.cat(outputs, -2), state


def gdn_prefill_inputs(
    t: int, key_heads: int, heads: int, key_dim: int, value_dim: int, dtype: torch.dtype, device: str
) -> dict[str, object]:
    """Inputs that the test, the tuner and the bench share."""
    make = torch.Generator(device).manual_seed(0)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=make, device=device)

    channels = 2 * key_heads * key_dim + heads * value_dim
    return {
        "projected": rand(t, channels + heads * value_dim + 2 * heads).to(dtype),
        "state": 0.1 * rand(2, heads, key_dim, value_dim),
        "raw_rows": rand(2, 4, channels).to(dtype),
        "slots": torch.ones(1, dtype=torch.int64, device=device),
        "constants": DeltaConstants(
            conv_weight=rand(channels, 4) / 2,
            a_log=torch.linspace(0, 2, heads, device=device),
            dt_bias=torch.ones(heads, device=device),
            norm_weight=(1 + 0.1 * rand(value_dim)).to(dtype),
            key_heads=key_heads,
            key_dim=key_dim,
            eps=1e-6,
            activation="sigmoid",
        ),
    }


def _operands(projected: Tensor, raw_rows: Tensor, constants: DeltaConstants) -> tuple[DeltaRows, Tensor]:
    history = raw_rows[: constants.history]
    raw, z, gates = projected.split(constants.parts, -1)
    window = torch.cat((history, raw))
    history.copy_(window[window.shape[0] - history.shape[0] :])
    rows = delta_rows(window, gates, constants)
    return rows, z.reshape(projected.shape[0], constants.heads, constants.value_dim)
