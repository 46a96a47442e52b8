"""Acceptance by equality: a draft stands while it is the token that the target itself drew.

Exact whatever the drafter does, because every emitted token is the target's own draw: the greedy rule at temperature
0, and the coupled rule when draft and target share their Gumbel noise, which makes them agree often.

Source: greedy acceptance, Leviathan et al. 2023 (arXiv 2211.17192), as a special case; drafter-invariant Gumbel
coupling, Daliri, Musco, Suresh 2024 (arXiv 2408.07978).
"""

import torch
from torch import Tensor


def match_drafts_reference(drafts: Tensor, drawn: Tensor) -> tuple[Tensor, Tensor]:
    """Count the leading matches; emit the draws up to and including the first mismatch."""
    k = drafts.shape[1]
    match = (drafts == drawn[:, :k]) & (drafts >= 0)
    accepted = match.long().cumprod(1).sum(1)
    columns = torch.arange(k + 1, device=drafts.device)
    return torch.where(columns <= accepted[:, None], drawn, -1), accepted


def match_drafts(drafts: Tensor, drawn: Tensor) -> tuple[Tensor, Tensor]:
    """Accept drafts while they equal the target's draws.

    drafts  int64 [B, k], -1 matches nothing
    drawn   int64 [B, k + 1], the target's draw at each row of the window; -1 where the row had no finite maximum
    Returns emitted, int64 [B, k + 1], and accepted, int64 [B], 0 to k. emitted[b, :accepted[b]] are drafts,
    emitted[b, accepted[b]] is the draw that ends the window (-1 if that row had no finite maximum), the rest is -1.
    Raises ValueError if shapes disagree.
    """
    if drafts.ndim != 2 or drawn.shape != (drafts.shape[0], drafts.shape[1] + 1):
        raise ValueError(
            f"match_drafts wants drafts [B, k] and drawn [B, k + 1]; got {tuple(drafts.shape)} and {tuple(drawn.shape)}"
        )
    return match_drafts_reference(drafts, drawn)


def match_drafts_inputs(b: int, k: int, device: str) -> dict[str, Tensor]:
    """Draws of a two-token vocabulary, so that half of the drafts match."""
    make = torch.Generator(device).manual_seed(0)
    return {
        "drafts": torch.randint(2, (b, k), generator=make, device=device),
        "drawn": torch.randint(2, (b, k + 1), generator=make, device=device),
    }
