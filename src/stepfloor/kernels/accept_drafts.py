"""Acceptance by the rejection rule: emitted tokens are distributed as the target, whatever the drafter.

A draft x drawn from q stands if p(x) > u q(x). The first that falls is replaced by a draw from max(p - q, 0),
normalised; if all stand, one more token is drawn from the last row. At temperature 0 the rule is equality with the
argmax. Only one row of each window is drawn from, so the noise is one row for each sequence.

Noise at a position is used for one decision only. A later position of the window may be drafted and judged again
with the same numbers in the next step, but what was computed there the first time decided nothing that was emitted.

Source: Leviathan, Kalman, Matias 2023 (arXiv 2211.17192), algorithm 1 and appendix A.1; the residual in log space,
log p + log(1 - exp(log q - log p)).
"""

import torch
from torch import Tensor

from stepfloor.kernels._noise import ACCEPT, DRAFT, RESIDUAL, TARGET, gumbel_noise, uniform_noise

INF = float("inf")


def accept_drafts_reference(
    logits: Tensor,
    drafts: Tensor,
    log_q: Tensor,
    slots: Tensor,
    positions: Tensor,
    temperature: Tensor,
    seeds: Tensor,
) -> tuple[Tensor, Tensor]:
    """The source's rule, in log space."""
    k, vocab_size = log_q.shape[1:]
    greedy = temperature[slots] == 0  # [B]
    healthy = torch.isfinite(logits.amax(-1))  # [B, k + 1]
    log_p = torch.log_softmax(logits, dim=-1)
    best = logits.argmax(-1)

    stands = torch.where(
        greedy[:, None], drafts == best[:, :k], _stands(log_p[:, :k], drafts, log_q, seeds[slots], positions)
    )
    stands = stands & (drafts >= 0) & healthy[:, :k]
    accepted = stands.long().cumprod(1).sum(1)  # [B]

    # From here on one row for each window: the one that ends it. With all drafts accepted or none proposed
    # (-1) it is a plain draw of the target, the same that decoding without drafts makes at that position.
    row = accepted[:, None, None].expand(-1, 1, vocab_size)
    draft_row = row.clamp(max=k - 1)
    refused = (accepted < k) & (drafts.gather(1, draft_row[:, :, 0])[:, 0] >= 0)
    residual = _residual(log_p.gather(1, row)[:, 0], log_q.gather(1, draft_row)[:, 0])
    # p and q may be equal but for rounding, and the residual then empty: p is as good.
    use_residual = refused & (residual.amax(-1) > -INF)
    weights = torch.where(use_residual[:, None], residual, logits.gather(1, row)[:, 0])
    streams = torch.where(refused, RESIDUAL, TARGET)
    noise = gumbel_noise(seeds[slots], positions + accepted, streams, vocab_size)
    last = torch.where(greedy, best.gather(1, accepted[:, None])[:, 0], (weights + noise).argmax(-1))
    last = torch.where(healthy.gather(1, accepted[:, None])[:, 0], last, -1)

    columns = torch.arange(k + 1, device=drafts.device)
    padded = torch.nn.functional.pad(drafts, (0, 1), value=-1)
    emitted = torch.where(columns < accepted[:, None], padded, -1)
    return torch.where(columns == accepted[:, None], last[:, None], emitted), accepted


def _stands(log_p: Tensor, drafts: Tensor, log_q: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """The rejection rule at every row, bool [B, k]."""
    rows = positions[:, None] + torch.arange(drafts.shape[1], device=drafts.device)
    uniform = uniform_noise(seeds[:, None].expand_as(rows), rows, ACCEPT)
    ids = drafts.clamp(min=0)[..., None]
    # As a difference of logarithms, so that equal p and q always stand. NaN (neither can make the draft) falls.
    return log_p.gather(2, ids)[..., 0] - log_q.gather(2, ids)[..., 0] > torch.log(uniform)


def _residual(log_p: Tensor, log_q: Tensor) -> Tensor:
    """log max(p - q, 0), -inf where p is not above q."""
    return torch.where(log_q < log_p, log_p + torch.log(-torch.expm1(log_q - log_p)), -INF)


def accept_drafts(
    logits: Tensor,
    drafts: Tensor,
    log_q: Tensor,
    slots: Tensor,
    positions: Tensor,
    temperature: Tensor,
    seeds: Tensor,
) -> tuple[Tensor, Tensor]:
    """Judge each window of k drafts and draw the token that ends it.

    logits       fp32 [B, k + 1, V], processed target logits; row j decides position positions + j
    drafts       int64 [B, k], k at least 1; -1 always falls, and the draw in its place is the target's own
    log_q        fp32 [B, k, V], log-probabilities that the drafts were drawn from; for a drafter that takes its
                 argmax 0 at the draft and -inf elsewhere
    slots        int64 [B]; positions  int64 [B], index in the sequence of the first token to decide
    temperature  fp32 [slots]; seeds   int64 [slots]
    Returns emitted, int64 [B, k + 1], and accepted, int64 [B], 0 to k. emitted[b, :accepted[b]] are drafts,
    emitted[b, accepted[b]] is the draw that ends the window (-1 if that row had no finite maximum), the rest is -1.
    Raises ValueError if shapes disagree.
    """
    b, k = drafts.shape if drafts.ndim == 2 else (0, 0)
    if k < 1 or logits.shape[:2] != (b, k + 1) or log_q.shape != (b, k, logits.shape[2]):
        raise ValueError(
            "accept_drafts wants logits [B, k + 1, V], drafts [B, k], log_q [B, k, V] with k at least 1; "
            f"got {tuple(logits.shape)}, {tuple(drafts.shape)}, {tuple(log_q.shape)}"
        )
    if slots.shape != (b,) or positions.shape != (b,):
        raise ValueError(
            f"slots and positions must be [B] with B = {b}; got {tuple(slots.shape)} and {tuple(positions.shape)}"
        )
    return accept_drafts_reference(logits, drafts, log_q, slots, positions, temperature, seeds)


def accept_drafts_inputs(b: int, k: int, vocab_size: int, device: str) -> dict[str, Tensor]:
    """Windows at temperature 1 except the first, which is greedy; drafts drawn from a noisy copy of the target."""
    make = torch.Generator(device).manual_seed(0)
    logits = 4 * torch.randn(b, k + 1, vocab_size, generator=make, device=device)
    drafter = logits[:, :k] + torch.randn(b, k, vocab_size, generator=make, device=device)
    seeds = torch.arange(b, device=device) * 0x1234567890AB
    positions = 1000 + torch.arange(b, device=device)
    rows = (positions[:, None] + torch.arange(k, device=device)).flatten()
    noise = gumbel_noise(seeds.repeat_interleave(k), rows, torch.full_like(rows, DRAFT), vocab_size)
    temperature = torch.ones(b, device=device)
    temperature[0] = 0.0
    return {
        "logits": logits,
        "drafts": (drafter + noise.view(b, k, vocab_size)).argmax(-1),
        "log_q": torch.log_softmax(drafter, dim=-1),
        "slots": torch.arange(b, device=device),
        "positions": positions,
        "temperature": temperature,
        "seeds": seeds,
    }
