"""The rows of a decode step, gathered from what the last step left in each slot.

    tokens[b] = newest token, then its drafts;   first[b] = position of the newest token

A draft that was not proposed (-1) is embedded as token 0: acceptance ends there, whatever the row computes. A step may
verify fewer drafts than a slot can hold: the first k.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from stepfloor.kernels._jit import dependent_launch, runs_triton, start, tl, triton


@dataclass(frozen=True, slots=True)
class SlotState:
    """What a step knows about each slot, all int64.

    token    [slots] the newest token, not yet verified; length [slots] its position
    drafts   [slots, most drafts] tokens proposed after it, -1 where there is none
    pending, rejected  [slots] rows of the last step that count, and that do not
    history  [slots, W] the committed tokens before `token`, oldest first
    """

    token: Tensor
    length: Tensor
    drafts: Tensor
    pending: Tensor
    rejected: Tensor
    history: Tensor


@dataclass(frozen=True, slots=True)
class BegunRows:
    """What a step verifies of B sequences, all int64; R = k + 1 rows.

    tokens     [B, R] the newest token, then its drafts, 0 for a missing one; drafts [B, k] with -1 there
    first      [B] position of the newest token; positions [B] of the first one to decide
    pending, rejected  [B]; history [B, W]
    """

    tokens: Tensor
    drafts: Tensor
    first: Tensor
    positions: Tensor
    pending: Tensor
    rejected: Tensor
    history: Tensor


def begin_rows_reference(state: SlotState, slots: Tensor, k: int) -> BegunRows:
    """One indexing each."""
    drafts, first = state.drafts[slots, :k], state.length[slots]
    tokens = torch.cat((state.token[slots, None], drafts), 1).clamp(min=0)
    return BegunRows(
        tokens, drafts, first, first + 1, state.pending[slots], state.rejected[slots], state.history[slots]
    )


def begin_rows(state: SlotState, slots: Tensor, k: int) -> BegunRows:
    """Gather the rows that a step verifies: k drafts of each of slots [B] int64.

    Raises ValueError if slots is not one-dimensional, or a slot holds fewer drafts.
    """
    if slots.ndim != 1 or not 0 <= k <= state.drafts.shape[1]:
        raise ValueError(
            f"begin_rows wants slots [B] and k of {state.drafts.shape[1]} drafts; got {tuple(slots.shape)} and {k}"
        )
    if runs_triton(slots):
        return begin_rows_launch(state, slots, k)
    return begin_rows_reference(state, slots, k)


def begin_rows_launch(state: SlotState, slots: Tensor, k: int) -> BegunRows:
    """Queue the kernel, one program a sequence."""
    count, width = slots.shape[0], state.history.shape[1]
    tokens, drafts = slots.new_empty((count, k + 1)), slots.new_empty((count, k))
    first, positions, pending, rejected = (torch.empty_like(slots) for _ in range(4))
    history = slots.new_empty((count, width))
    _begin_rows_kernel[(count,)](
        slots,
        state.token,
        state.length,
        state.drafts,
        state.pending,
        state.rejected,
        state.history,
        tokens,
        drafts,
        first,
        positions,
        pending,
        rejected,
        history,
        K=k,
        KEPT=state.drafts.shape[1],
        W=width,
        BLOCK=triton.next_power_of_2(max(k + 1, width)),
        num_warps=1,
        **dependent_launch(slots),
    )
    return BegunRows(tokens, drafts, first, positions, pending, rejected, history)


@triton.jit
def _begin_rows_kernel(
    slots_ptr,
    token_ptr,
    length_ptr,
    drafts_ptr,
    pending_ptr,
    rejected_ptr,
    history_ptr,
    tokens_ptr,
    row_drafts_ptr,
    first_ptr,
    positions_ptr,
    row_pending_ptr,
    row_rejected_ptr,
    row_history_ptr,
    K: tl.constexpr,
    KEPT: tl.constexpr,
    W: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    # All loads before the first store: none moves up past one, and each that waits costs a latency.
    start(PDL)
    b = tl.program_id(0)
    slot = tl.load(slots_ptr + b)
    at = tl.arange(0, BLOCK)
    drafted = tl.load(drafts_ptr + slot * KEPT + at - 1, mask=(at > 0) & (at <= K), other=0)
    history = tl.load(history_ptr + slot * W + at, mask=at < W, other=0)
    token, length = tl.load(token_ptr + slot), tl.load(length_ptr + slot)
    pending, rejected = tl.load(pending_ptr + slot), tl.load(rejected_ptr + slot)
    tokens = tl.where(at == 0, token, drafted)
    tl.store(tokens_ptr + b * (K + 1) + at, tl.maximum(tokens, 0), mask=at <= K)
    tl.store(row_drafts_ptr + b * K + at - 1, drafted, mask=(at > 0) & (at <= K))
    tl.store(first_ptr + b, length)
    tl.store(positions_ptr + b, length + 1)
    tl.store(row_pending_ptr + b, pending)
    tl.store(row_rejected_ptr + b, rejected)
    tl.store(row_history_ptr + b * W + at, history, mask=at < W)


def begin_rows_inputs(b: int, k: int, width: int, device: str) -> dict[str, object]:
    """Inputs that the test and the bench share: slots hold a draft more than k, and every second one lacks its last."""
    make = torch.Generator(device).manual_seed(0)

    def rand(high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=make, device=device)

    state = SlotState(
        rand(1000, b + 2),
        rand(500, b + 2),
        rand(1000, b + 2, k + 1),
        rand(k + 2, b + 2),
        rand(k + 1, b + 2),
        rand(1000, b + 2, width),
    )
    state.drafts[::2, max(0, k - 1) :] = -1
    return {"state": state, "slots": torch.randperm(b + 2, generator=make, device=device)[:b], "k": k}
