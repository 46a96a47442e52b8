"""The gated delta rule over whole sequences, batched and differentiable: every chunk at once, then a short scan.

Source: Yang et al. 2024, Gated Delta Networks, section 3.3. Within a chunk of C rows, with c the running sum of
log decays and G[i, j] = exp(c[i] - c[j]) for j <= i:

    X = (I + strictly_lower(diag(beta) K Kᵀ * G))⁻¹;   U = X diag(beta) V;   W = X diag(beta exp c) K
    M' = P M + Kᵀ diag(exp(c_last - c)) U   with   P = exp(c_last) I - Kᵀ diag(exp(c_last - c)) W
    O = diag(exp c) Q M + (Q Kᵀ * G) (U - W M)

Only M' = P M + .. runs chunk after chunk, one product each.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK_ROWS = 64


def gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, chunk_rows: int = CHUNK_ROWS
) -> Tensor:
    """Run T rows of B sequences from a zero state.

    query, key [B, T, H, K] of unit length, query over sqrt(K); value [B, T, H, V]; log_decay, beta [B, T, H];
    all float32. chunk_rows must be a power of two. Returns [B, T, H, V] float32.
    """
    rows = query.shape[1]
    padding = -rows % chunk_rows

    def chunked(t: Tensor) -> Tensor:
        """[B, T, H, ..] -> [B, H, N, C, ..]; padded rows have beta 0 and decay 1, and change nothing."""
        t = F.pad(t, (0, 0) * (t.ndim - 2) + (0, padding))
        return t.unflatten(1, (-1, chunk_rows)).movedim(3, 1)

    q, k, v = chunked(query), chunked(key), chunked(value)
    b, total = chunked(beta).unsqueeze(-1), chunked(log_decay).cumsum(-1)  # [B, H, N, C, 1], [B, H, N, C]
    lower = torch.ones(chunk_rows, chunk_rows, dtype=torch.bool, device=q.device).tril()
    between = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(~lower, float("-inf")).exp()
    inverse = UnitLowerInverse.apply((b * (k @ k.mT) * between).tril(-1))
    since = total.exp().unsqueeze(-1)
    u, w = inverse @ (b * v), inverse @ (b * since * k)
    last = total[..., -1:]
    fading = k * (last - total).exp().unsqueeze(-1)
    eye = torch.eye(k.shape[-1], dtype=k.dtype, device=k.device)
    states = ChunkScan.apply(last.exp().unsqueeze(-1) * eye - fading.mT @ w, fading.mT @ u)
    out = (q * since) @ states + ((q @ k.mT) * between) @ (u - w @ states)
    return out.movedim(1, 3).flatten(1, 2)[:, :rows]


class UnitLowerInverse(torch.autograd.Function):
    """(I + A)⁻¹ of strictly lower triangular A [.., C, C], C a power of two.

    Neighbouring blocks of known inverse are joined, doubling their size, until one is left: as stable as forward
    substitution, in matrix products only.
    """

    @staticmethod
    def forward(ctx, a: Tensor) -> Tensor:
        size = a.shape[-1]
        row = torch.arange(size, device=a.device)
        inverse = torch.eye(size, dtype=a.dtype, device=a.device).expand_as(a)
        block = 1
        while block < size:
            pair, half = row // (2 * block), row // block % 2
            corner = (pair[:, None] == pair) & (half[:, None] == 1) & (half == 0)
            inverse = inverse - inverse @ torch.where(corner, a, 0) @ inverse
            block *= 2
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        return -(inverse.mT @ grad @ inverse.mT).tril(-1)


class ChunkScan(torch.autograd.Function):
    """States before each chunk: M_0 = 0, M_{n+1} = P_n M_n + Q_n, with P [B, H, N, K, K] and Q [B, H, N, K, V]."""

    @staticmethod
    def forward(ctx, p: Tensor, q: Tensor) -> Tensor:
        states = [torch.zeros_like(q[:, :, 0])]
        for n in range(p.shape[2] - 1):
            states.append(p[:, :, n] @ states[-1] + q[:, :, n])
        stacked = torch.stack(states, 2)
        ctx.save_for_backward(p, stacked)
        return stacked

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        p, states = ctx.saved_tensors
        flowing = [torch.zeros_like(grad[:, :, 0])]  # gradient of the state after the last chunk
        for n in range(p.shape[2] - 1, 0, -1):
            flowing.append(grad[:, :, n] + p[:, :, n].mT @ flowing[-1])
        after = torch.stack(flowing[::-1], 2)
        return after @ states.mT, after
