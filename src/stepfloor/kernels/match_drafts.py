"""Acceptance by equality: a draft stands while it is the token that the target itself drew.

Exact whatever the drafter does, because every emitted token is the target's own draw: the greedy rule at temperature
0, and the coupled rule when draft and target share their Gumbel noise, which makes them agree often.

Source: greedy acceptance, Leviathan et al. 2023 (arXiv 2211.17192), as a special case; drafter-invariant Gumbel
coupling, Daliri, Musco, Suresh 2024 (arXiv 2408.07978).
"""

import torch
from torch import Tensor

from stepfloor.kernels._jit import dependent_launch, runs_triton, start, tl, triton


def match_drafts_reference(drafts: Tensor, drawn: Tensor, forced: int | None = None) -> tuple[Tensor, Tensor]:
    """Count the leading matches; emit the draws up to and including the first mismatch."""
    k = drafts.shape[1]
    columns = torch.arange(k + 1, device=drafts.device)
    match = drafts == drawn[:, :k] if forced is None else (columns[:k] < forced).expand_as(drafts)
    accepted = (match & (drafts >= 0)).long().cumprod(1).sum(1)
    proposed = torch.nn.functional.pad(drafts, (0, 1), value=-1)
    emitted = torch.where(columns < accepted[:, None], proposed, drawn)
    return torch.where(columns <= accepted[:, None], emitted, -1), accepted


def match_drafts(drafts: Tensor, drawn: Tensor, forced: int | None = None) -> tuple[Tensor, Tensor]:
    """Accept drafts while they equal the target's draws.

    drafts  int64 [B, k], -1 matches nothing
    drawn   int64 [B, k + 1], the target's draw at each row of the window; -1 where the row had no finite maximum
    forced  accept that many drafts of each window instead, fewer where a -1 is among them
    Returns emitted, int64 [B, k + 1], and accepted, int64 [B], 0 to k. emitted[b, :accepted[b]] are drafts,
    emitted[b, accepted[b]] is the draw that ends the window (-1 if that row had no finite maximum), the rest is -1.
    Raises ValueError if shapes disagree.
    """
    if drafts.ndim != 2 or drawn.shape != (drafts.shape[0], drafts.shape[1] + 1):
        raise ValueError(
            f"match_drafts wants drafts [B, k] and drawn [B, k + 1]; got {tuple(drafts.shape)} and {tuple(drawn.shape)}"
        )
    match = match_drafts_triton if runs_triton(drawn) else match_drafts_reference
    return match(drafts, drawn, forced)


def match_drafts_triton(drafts: Tensor, drawn: Tensor, forced: int | None = None) -> tuple[Tensor, Tensor]:
    """One launch, a program a window."""
    b, k = drafts.shape
    emitted = drawn.new_empty((b, k + 1))
    accepted = drawn.new_empty((b,))
    _match_kernel[(b,)](
        drafts.contiguous(),
        drawn.contiguous(),
        emitted,
        accepted,
        K=k,
        COLUMNS=triton.next_power_of_2(k + 1),
        FORCED=-1 if forced is None else forced,
        num_warps=1,
        **dependent_launch(drawn),
    )
    return emitted, accepted


@triton.jit
def _match_kernel(
    drafts_ptr,
    drawn_ptr,
    emitted_ptr,
    accepted_ptr,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    FORCED: tl.constexpr,
    PDL: tl.constexpr,
):
    start(PDL)
    window = tl.program_id(0)
    column = tl.arange(0, COLUMNS)
    draft = tl.load(drafts_ptr + window * K + column, mask=column < K, other=-1)
    drawn = tl.load(drawn_ptr + window * (K + 1) + column, mask=column <= K, other=-1)
    if FORCED < 0:
        stands = (draft == drawn) & (draft >= 0)
    else:
        stands = (column < FORCED) & (draft >= 0)
    accepted = tl.min(tl.where(stands, COLUMNS, column), 0)  # at most K: no draft stands there
    emitted = tl.where(column < accepted, draft, tl.where(column == accepted, drawn, -1))
    tl.store(emitted_ptr + window * (K + 1) + column, emitted, mask=column <= K)
    tl.store(accepted_ptr + window, accepted.to(tl.int64))


def match_drafts_inputs(b: int, k: int, device: str) -> dict[str, Tensor]:
    """Draws of a two-token vocabulary, so that half of the drafts match."""
    make = torch.Generator(device).manual_seed(0)
    return {
        "drafts": torch.randint(2, (b, k), generator=make, device=device),
        "drawn": torch.randint(2, (b, k + 1), generator=make, device=device),
    }
