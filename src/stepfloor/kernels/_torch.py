"""What the torch references share: the tiled product, norms, rotation, the gated delta rule, expert tiles.

Source: transformers 5.24, qwen4_exp/modeling_qwen4_exp.py; each function names its class. Products differ from
the source in one way: they run in float32 over zero-padded tiles of 8 rows and are rounded once, so that a row's
bits depend on nothing but that row. A plain torch product gives other bits for 1, 2 and 20 rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from stepfloor.formats.codec import PackedWeight
from stepfloor.kernels._delta import DeltaConstants

TILE_ROWS = 8
# MKL gives a row other bits in products of 2 or 3 columns (K = 32 to 160, AVX-512 Xeon), and of up to 11 (AMD EPYC).
LEAST_COLUMNS = 16


def product(x: Tensor, weights: PackedWeight | Sequence[PackedWeight]) -> Tensor:
    """x Wᵀ for one matrix, or for several side by side: x [.., K], W [N, K] -> [.., sum N] in the dtype of x."""
    matrices = (weights,) if isinstance(weights, PackedWeight) else weights
    columns = [tiled_product(x.float(), w.dequantize()).to(x.dtype) for w in matrices]
    return columns[0] if len(columns) == 1 else torch.cat(columns, -1)


def tiled_product(x: Tensor, w: Tensor) -> Tensor:
    """float32 x [.., K] times w [N, K] transposed, 8 rows at a time on the CPU."""
    if x.device.type != "cpu":
        # GPU kernels make their own promise about row order; this product is their yardstick, not their rival
        return F.linear(x, w)
    rows = x.reshape(-1, x.shape[-1])
    count = rows.shape[0]
    if count % TILE_ROWS:
        rows = torch.constant_pad_nd(rows, (0, 0, 0, -count % TILE_ROWS))
    columns = w.shape[0]
    w = _wide(w)
    tiles = [F.linear(rows[i : i + TILE_ROWS], w) for i in range(0, count, TILE_ROWS)]
    out = tiles[0] if len(tiles) == 1 else torch.cat(tiles)
    return out[:count, :columns].reshape(*x.shape[:-1], columns)


def _wide(w: Tensor) -> Tensor:
    """w [N, K], zero rows added where it is too narrow for a product that treats all rows alike."""
    return torch.constant_pad_nd(w, (0, 0, 0, LEAST_COLUMNS - w.shape[0])) if w.shape[0] < LEAST_COLUMNS else w


def rms_norm(x: Tensor, scale: Tensor, eps: float, groups: int = 1) -> Tensor:
    """RMS norm with one mean per group of the last axis. Source: Qwen4ExpTextRMSNorm.

    x [.., D] any float dtype; scale [D] float32, the stored weight with its 1 already added. One rounding.
    """
    x32 = x.float().unflatten(-1, (groups, -1))
    normed = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return (normed.flatten(-2) * scale).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of the first cos.shape[-1] values, half-split pairs. Source: apply_rotary_pos_emb.

    x [.., D]; cos, sin [.., rotary] in the dtype of x and broadcastable to x.
    """
    size = cos.shape[-1]
    turned, passed = x[..., :size], x[..., size:]
    half = size // 2
    swapped = torch.cat((-turned[..., half:], turned[..., :half]), -1)
    return torch.cat((turned * cos + swapped * sin, passed), -1)


# torch's own sigmoid, silu and softplus take another code path for the last elements of a buffer, with other last
# bits, so a value's bits depend on where it lies; exp and log1p do not (2,000,000 values compared on x86).
def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)) in float32, rounded once to the dtype of x."""
    return x.float().neg().exp_().add_(1.0).reciprocal_().to(x.dtype)


def silu(x: Tensor) -> Tensor:
    """x sigmoid(x) in float32, rounded once to the dtype of x."""
    x32 = x.float()
    return (x32 / x32.neg().exp_().add_(1.0)).to(x.dtype)


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)) of float32 x, linear above 20 like the source's."""
    return torch.where(x > 20.0, x, x.clamp(max=20.0).exp().log1p())


@dataclass(frozen=True, slots=True)
class DeltaRows:
    """Operands of the gated delta rule for T rows, float32.

    query, key [T, HV, K] (unit length, query over sqrt(K)); value [T, HV, V]; log_decay, beta [T, HV]
    The decay travels as its logarithm: exp of less than -104 is 0 in float32, and the chunk form needs it back.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    log_decay: Tensor
    beta: Tensor


def delta_rows(raw: Tensor, gates: Tensor, constants: DeltaConstants) -> DeltaRows:
    """Convolution, gates and normalisation before the delta rule. Source: Qwen4ExpTextGatedDeltaNet.forward.

    raw    [taps - 1 + T, C] projected rows, the history first
    gates  [T, 2 * HV], b then a
    """
    rows, heads = gates.shape[0], constants.heads
    key_heads, key_dim = constants.key_heads, constants.key_dim
    summed = raw[:rows].float() * constants.conv_weight[:, 0]
    for tap in range(1, constants.history + 1):
        summed = summed + raw[tap : tap + rows].float() * constants.conv_weight[:, tap]
    mixed = silu(summed.to(raw.dtype)).float()
    key_width = key_heads * key_dim
    query, key, value = mixed.split((key_width, key_width, mixed.shape[1] - 2 * key_width), -1)
    per_key = heads // key_heads

    def unit(t: Tensor) -> Tensor:
        t = t.reshape(rows, key_heads, key_dim)
        return (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + 1e-6)).repeat_interleave(per_key, 1)

    b, a = gates.split(heads, -1)
    log_decay = -constants.a_log.exp() * softplus(a.float() + constants.dt_bias)
    return DeltaRows(
        unit(query) / key_dim**0.5,
        unit(key),
        value.reshape(rows, heads, -1),
        log_decay,
        sigmoid(b).float(),
    )


def delta_rule(rows: DeltaRows, state: Tensor, start: int, stop: int) -> Tensor:
    """Run rows start .. stop - 1 through the recurrence and leave `state` [HV, K, V], changed in place, after them.

    Source: torch_recurrent_gated_delta_rule. Returns [stop - start, HV, V] float32.
    """
    outputs = [state.new_empty((state.shape[0], 0, state.shape[2]))]
    decay = rows.log_decay.exp()
    for t in range(start, stop):
        state.mul_(decay[t][:, None, None])
        key = rows.key[t].unsqueeze(1)  # [HV, 1, K]
        error = rows.value[t] - torch.bmm(key, state).squeeze(1)
        state.baddbmm_(key.transpose(1, 2), (rows.beta[t][:, None] * error).unsqueeze(1))
        outputs.append(torch.bmm(rows.query[t].unsqueeze(1), state))
    return torch.cat(outputs, 1).transpose(0, 1)


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, activation: str) -> Tensor:
    """The norm that closes a gated delta net: weight * norm(x) * act(gate). Source: Qwen4ExpTextRMSNormGated.

    x, gate [T, HV, V] in the model's dtype; weight [V] in the same dtype, centred on one (no 1 is added).
    """
    x32 = x.float()
    normed = (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    act = sigmoid(gate.float()) if activation == "sigmoid" else silu(gate.float())
    return ((weight * normed) * act).to(x.dtype)


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    """(row, choice) pairs sorted by expert, each expert's run padded to whole tiles of 8.

    experts  expert of each tile
    source   [tiles, 8] row of x that each tile row reads; the row after the last is a row of zeros
    place    [T, topk] where pair (t, j) went: tile * 8 + row
    """

    experts: list[int]
    source: Tensor
    place: Tensor


def expert_tiles(ids: Tensor, num_rows: int, per_pair: bool) -> ExpertTiles:
    """Group routed pairs by expert. ids [T, topk]; per_pair numbers sources by pair (t * topk + j), not by row."""
    choices: list[list[int]] = ids.tolist()
    topk = ids.shape[1]
    runs: dict[int, list[tuple[int, int]]] = {}
    for t, chosen in enumerate(choices):
        for j, expert in enumerate(chosen):
            runs.setdefault(expert, []).append((t, j))
    experts: list[int] = []
    source: list[int] = []
    place = [[0] * topk for _ in choices]
    for expert in sorted(runs):
        pairs = runs[expert]
        for t, j in pairs:
            place[t][j] = len(source)
            source.append(t * topk + j if per_pair else t)
        padding = -len(pairs) % TILE_ROWS
        source.extend([num_rows] * padding)
        experts.extend([expert] * ((len(pairs) + padding) // TILE_ROWS))
    device = ids.device
    return ExpertTiles(
        experts,
        torch.tensor(source, device=device).reshape(-1, TILE_ROWS),
        torch.tensor(place, device=device),
    )


def expert_product(x: Tensor, tiles: ExpertTiles, weights: PackedWeight) -> Tensor:
    """Each tile's rows of x [rows, K] through its expert's matrix [N, K]: [tiles * 8, N], dtype of x."""
    padded = torch.cat((x.float(), x.new_zeros((1, x.shape[1]), dtype=torch.float32)))
    gathered = padded[tiles.source]  # [tiles, 8, K]
    results: list[Tensor] = []
    matrix, loaded = None, -1
    for i, expert in enumerate(tiles.experts):
        if matrix is None or expert != loaded:
            matrix, loaded = _wide(weights.expert(expert).dequantize()), expert
        results.append(F.linear(gathered[i], matrix)[:, : weights.shape[0]])
    return torch.cat(results).to(x.dtype)
