"""What a step leaves in each slot once its drafts are judged, and what the drafter and the host read of it.

With a rows accepted, the sequence's past is its history, then rows 0 to a; the newest token, emitted[a], waits to be
verified. Row j is followed by the token of row j + 1, row a by the newest token.
"""

import torch
from torch import Tensor

from stepfloor.kernels._jit import dependent_launch, runs_triton, start, tl, triton


def commit_rows_reference(
    emitted: Tensor,
    accepted: Tensor,
    tokens: Tensor,
    slots: Tensor,
    first: Tensor,
    before: Tensor,
    token: Tensor,
    length: Tensor,
    pending: Tensor,
    rejected: Tensor,
    history: Tensor,
    drafts: Tensor,
    padding_slot: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One indexing each; slots that pad the batch go back to a beginning."""
    rows, width = tokens.shape[1], before.shape[1]
    live = (slots != padding_slot).long()
    newest = emitted.gather(1, accepted[:, None])
    seen = torch.cat((before, tokens), 1)
    history[slots] = seen.gather(1, accepted[:, None] + 1 + torch.arange(width, device=slots.device))
    token[slots] = newest.squeeze(1) * live
    length[slots] = (first + accepted + 1) * live
    pending[slots] = (accepted + 1) * live
    rejected[slots] = (rows - 1 - accepted) * live
    drafts[slots] = -1
    ahead = first + accepted + 1 + torch.arange(rows, device=slots.device)[:, None]
    following = torch.cat((tokens[:, 1:], tokens[:, :1]), 1).scatter(1, accepted[:, None], newest.clamp(min=0))
    last = torch.arange(slots.shape[0], device=slots.device) * rows + accepted
    return following, last, ahead, torch.cat((emitted, accepted[:, None]), 1)


def commit_rows(
    emitted: Tensor,
    accepted: Tensor,
    tokens: Tensor,
    slots: Tensor,
    first: Tensor,
    before: Tensor,
    token: Tensor,
    length: Tensor,
    pending: Tensor,
    rejected: Tensor,
    history: Tensor,
    drafts: Tensor,
    padding_slot: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Make the accepted rows the past of each sequence. All tensors int64.

    emitted   [B, R] accepted drafts, then one more token (-1: not finite), then -1; accepted [B], 0 to R - 1
    tokens    [B, R] the rows of the step; slots, first [B]; before [B, W] tokens before the first row
    token, length, pending, rejected [slots], history [slots, W]  rewritten in place
    drafts        [slots, most drafts], set to -1: this step's are used up, and the next ones may be fewer
    padding_slot  rows of this slot pad the batch: it is left as a beginning, whatever they computed
    Returns following [B, R], the token after each row, 0 for -1; last [B], the flat index of the last accepted row;
    ahead [R, B], positions of the newest token and of those after it; and [B, R + 1], emitted with accepted beside it,
    for the host. Raises ValueError if the shapes disagree.
    """
    if emitted.shape != tokens.shape or before.shape[0] != tokens.shape[0] or accepted.shape != slots.shape:
        raise ValueError(
            f"commit_rows wants emitted and tokens [B, R], accepted and slots [B], before [B, W]; got "
            f"{tuple(emitted.shape)}, {tuple(tokens.shape)}, {tuple(accepted.shape)}, {tuple(slots.shape)}, "
            f"{tuple(before.shape)}"
        )
    commit = commit_rows_launch if runs_triton(slots) else commit_rows_reference
    return commit(
        emitted, accepted, tokens, slots, first, before, token, length, pending, rejected, history, drafts, padding_slot
    )


def commit_rows_launch(
    emitted: Tensor,
    accepted: Tensor,
    tokens: Tensor,
    slots: Tensor,
    first: Tensor,
    before: Tensor,
    token: Tensor,
    length: Tensor,
    pending: Tensor,
    rejected: Tensor,
    history: Tensor,
    drafts: Tensor,
    padding_slot: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queue the kernel, one program a sequence."""
    (count, rows), width = tokens.shape, before.shape[1]
    following, last, report = torch.empty_like(tokens), torch.empty_like(slots), tokens.new_empty((count, rows + 1))
    # rows 16 bytes apart: a kernel that takes one is compiled once more for another alignment
    pitch, kept = count + count % 2, drafts.shape[1]
    ahead = tokens.new_empty((rows, pitch))[:, :count]
    _commit_rows_kernel[(count,)](
        emitted.contiguous(),
        accepted,
        tokens,
        slots,
        first,
        before,
        token,
        length,
        pending,
        rejected,
        history,
        drafts,
        following,
        last,
        ahead,
        report,
        padding_slot,
        pitch,
        R=rows,
        W=width,
        KEPT=kept,
        BLOCK=triton.next_power_of_2(max(rows + 1, width, kept)),
        num_warps=1,
        **dependent_launch(slots),
    )
    return following, last, ahead, report


@triton.jit
def _commit_rows_kernel(
    emitted_ptr,
    accepted_ptr,
    tokens_ptr,
    slots_ptr,
    first_ptr,
    before_ptr,
    token_ptr,
    length_ptr,
    pending_ptr,
    rejected_ptr,
    history_ptr,
    drafts_ptr,
    following_ptr,
    last_ptr,
    ahead_ptr,
    report_ptr,
    padding_slot,
    pitch,
    R: tl.constexpr,
    W: tl.constexpr,
    KEPT: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    # All loads before the first store: none moves up past one, and each that waits costs a latency.
    start(PDL)
    b = tl.program_id(0)
    slot = tl.load(slots_ptr + b)
    accepted = tl.load(accepted_ptr + b)
    first = tl.load(first_ptr + b)
    at = tl.arange(0, BLOCK)
    emitted = tl.load(emitted_ptr + b * R + at, mask=at < R, other=0)
    after = tl.load(tokens_ptr + b * R + (at + 1) % R, mask=at < R, other=0)
    # the past is `before`, then the rows; its last W tokens end with row `accepted`
    seen = accepted + 1 + at
    old = tl.load(before_ptr + b * W + seen, mask=seen < W, other=0)
    row = tl.load(tokens_ptr + b * R + seen - W, mask=(seen >= W) & (at < W), other=0)
    live = (slot != padding_slot).to(tl.int64)
    newest = tl.sum(tl.where(at == accepted, emitted, 0), 0)
    length = first + accepted + 1
    tl.store(history_ptr + slot * W + at, tl.where(seen < W, old, row), mask=at < W)
    tl.store(token_ptr + slot, newest * live)
    tl.store(length_ptr + slot, length * live)
    tl.store(pending_ptr + slot, (accepted + 1) * live)
    tl.store(rejected_ptr + slot, (R - 1 - accepted) * live)
    tl.store(drafts_ptr + slot * KEPT + at, tl.full([BLOCK], -1, tl.int64), mask=at < KEPT)
    tl.store(following_ptr + b * R + at, tl.where(at == accepted, tl.maximum(newest, 0), after), mask=at < R)
    tl.store(last_ptr + b, b * R + accepted)
    tl.store(ahead_ptr + at * pitch + b, length + at, mask=at < R)
    tl.store(report_ptr + b * (R + 1) + at, tl.where(at == R, accepted, emitted), mask=at <= R)


def commit_rows_inputs(b: int, k: int, width: int, device: str) -> dict[str, object]:
    """Inputs that the test and the bench share; the last sequence pads, the first one's logits were not finite."""
    make = torch.Generator(device).manual_seed(0)

    def rand(high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=make, device=device)

    accepted, columns = rand(k + 1, b), torch.arange(k + 1, device=device)
    emitted = torch.where(columns <= accepted[:, None], rand(1000, b, k + 1), -1)
    emitted[0, accepted[0]] = -1
    slots = torch.randperm(b + 2, generator=make, device=device)[:b]
    return {
        "emitted": emitted,
        "accepted": accepted,
        "tokens": rand(1000, b, k + 1),
        "slots": slots,
        "first": rand(500, b),
        "before": rand(1000, b, width),
        "token": rand(1000, b + 2),
        "length": rand(500, b + 2),
        "pending": rand(k + 2, b + 2),
        "rejected": rand(k + 1, b + 2),
        "history": rand(1000, b + 2, width),
        "drafts": rand(1000, b + 2, k + 1),
        "padding_slot": int(slots[-1]),
    }
