"""Acceptance by the rejection rule: emitted tokens are distributed as the target, whatever the drafter.

A draft x drawn from q stands if p(x) > u q(x). The first that falls is replaced by a draw from max(p - q, 0),
normalised; if all stand, one more token is drawn from the last row. At temperature 0 the rule is equality with the
argmax. Only one row of each window is drawn from, so the noise is one row for each sequence.

Noise at a position is used for one decision only. A later position of the window may be drafted and judged again
with the same numbers in the next step, but what was computed there the first time decided nothing that was emitted.

On a GPU four kernels: sums and best tokens of all rows in parts; one small program a window judges its drafts; parts
of the row that ends the window are drawn from; one small program a window picks.

Source: Leviathan, Kalman, Matias 2023 (arXiv 2211.17192), algorithm 1 and appendix A.1; the residual in log space,
log p + log(1 - exp(log q - log p)).
"""

import torch
from torch import Tensor

from stepfloor.kernels._jit import runs_triton, start, tl, triton
from stepfloor.kernels._logits import (
    SEGMENT,
    Stages,
    check_stages,
    first_best,
    launch_options,
    log_softmax_reference,
    part_sum,
    processed,
    processed_reference,
    row_arguments,
    scale_reference,
    segments,
    whole_sum,
)
from stepfloor.kernels._logits import Proposals as Proposals
from stepfloor.kernels._noise import (
    ACCEPT,
    DRAFT,
    RESIDUAL,
    TARGET,
    gumbel_noise,
    gumbel_tile,
    uniform_noise,
    uniform_number,
)

INF = float("inf")
_ACCEPT = tl.constexpr(ACCEPT)
_RESIDUAL = tl.constexpr(RESIDUAL)
_TARGET = tl.constexpr(TARGET)


def accept_drafts_reference(
    logits: Tensor,
    drafts: Tensor,
    proposals: Proposals,
    slots: Tensor,
    positions: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    stages: Stages | None = None,
) -> tuple[Tensor, Tensor]:
    """The source's rule, in log space."""
    k, vocab_size = drafts.shape[1], logits.shape[2]
    if stages is None:
        logits = logits.float()
    else:
        logits = processed_reference(logits.flatten(0, 1), slots, temperature, stages).view(logits.shape)
    log_q = log_softmax_reference(proposals.logits[slots, :k], proposals.scale[slots, :k])  # [B, k, V]
    greedy = temperature[slots] == 0  # [B]
    healthy = torch.isfinite(logits.amax(-1))  # [B, k + 1]
    log_p = log_softmax_reference(logits, scale_reference(logits))
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
    proposals: Proposals,
    slots: Tensor,
    positions: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    stages: Stages | None = None,
) -> tuple[Tensor, Tensor]:
    """Judge each window of k drafts and draw the token that ends it.

    logits       bf16 or fp32 [B, k + 1, V], the target's; row j decides position positions + j
    drafts       int64 [B, k], k at least 1; -1 always falls, and the draw in its place is the target's own
    proposals    what the drafts of each slot were drawn from, k or more of them, the first k looked at; for a drafter
                 that takes its argmax 0 at the draft, -inf elsewhere, and scale 0. Slots at temperature 0 are not
                 looked at
    slots        int64 [B]; positions  int64 [B], index in the sequence of the first token to decide
    temperature  fp32 [slots]; seeds   int64 [slots]
    stages       what the raw logits still need, the temperature included. None: they come from process_logits
    Returns emitted, int64 [B, k + 1], and accepted, int64 [B], 0 to k. emitted[b, :accepted[b]] are drafts,
    emitted[b, accepted[b]] is the draw that ends the window (-1 if that row had no finite maximum), the rest is -1.
    Raises ValueError if shapes disagree.
    """
    b, k = drafts.shape if drafts.ndim == 2 else (0, 0)
    kept = proposals.logits.shape
    if (
        k < 1
        or logits.ndim != 3
        or logits.shape[:2] != (b, k + 1)
        or kept[::2] != (temperature.shape[0], logits.shape[2])
        or kept[1] < k
    ):
        raise ValueError(
            "accept_drafts wants logits [B, k + 1, V], drafts [B, k], proposals [slots, k or more, V], k at least 1; "
            f"got {tuple(logits.shape)}, {tuple(drafts.shape)}, {tuple(proposals.logits.shape)}"
        )
    if slots.shape != (b,) or positions.shape != (b,):
        raise ValueError(
            f"slots and positions must be [B] with B = {b}; got {tuple(slots.shape)} and {tuple(positions.shape)}"
        )
    if stages is not None:
        check_stages(stages, b, temperature.shape[0], logits.shape[2])
    accept = accept_drafts_triton if runs_triton(logits) else accept_drafts_reference
    return accept(logits, drafts, proposals, slots, positions, temperature, seeds, stages)


def accept_drafts_triton(
    logits: Tensor,
    drafts: Tensor,
    proposals: Proposals,
    slots: Tensor,
    positions: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    stages: Stages | None = None,
) -> tuple[Tensor, Tensor]:
    """Four launches."""
    b, rows, vocab = logits.shape
    parts = segments(vocab)
    tops, sums, first, second = logits.new_empty((4, b * rows, parts), dtype=torch.float32)
    ids, other_ids = logits.new_empty((2, b * rows, parts), dtype=torch.int32)
    emitted = drafts.new_empty((b, rows))
    accepted = drafts.new_empty((b,))
    kind = drafts.new_empty((b,), dtype=torch.int32)
    scale = logits.new_empty((b, 2), dtype=torch.float32)
    arguments = row_arguments(logits.reshape(b * rows, vocab), slots, temperature, stages)
    judged = {
        "proposals_ptr": proposals.logits.contiguous(),
        "proposal_scale_ptr": proposals.scale.contiguous(),
        "positions_ptr": positions.contiguous(),
        "seeds_ptr": seeds,
        "seed_stride": seeds.stride(0),
        "accepted_ptr": accepted,
        "kind_ptr": kind,
        "scale_ptr": scale,
        "K": rows - 1,
        "KEPT": proposals.logits.shape[1],
    }
    _sum_kernel[parts, b * rows](
        **arguments, tops_ptr=tops, sums_ptr=sums, ids_ptr=ids, BLOCK=SEGMENT, **launch_options(logits)
    )
    _judge_kernel[(b,)](
        **arguments,
        **judged,
        drafts_ptr=drafts.contiguous(),
        tops_ptr=tops,
        sums_ptr=sums,
        ids_ptr=ids,
        emitted_ptr=emitted,
        parts=parts,
        PARTS=triton.next_power_of_2(parts),
        **launch_options(logits, 1),
    )
    _ending_kernel[parts, b](
        **arguments,
        **judged,
        first_ptr=first,
        first_ids_ptr=ids,
        second_ptr=second,
        second_ids_ptr=other_ids,
        BLOCK=SEGMENT,
        **launch_options(logits),
    )
    _finish_kernel[(b,)](
        first,
        ids,
        second,
        other_ids,
        kind,
        accepted,
        emitted,
        parts,
        K=rows - 1,
        PARTS=triton.next_power_of_2(parts),
        **launch_options(logits, 1),
    )
    return emitted, accepted


@triton.jit
def _sum_kernel(
    logits_ptr,
    slots_ptr,
    temperature_ptr,
    bias_ptr,
    repetition_ptr,
    frequency_ptr,
    presence_ptr,
    counts_ptr,
    in_prompt_ptr,
    earlier_ptr,
    logits_stride,
    float_stride,
    vocab,
    rows,
    tops_ptr,
    sums_ptr,
    ids_ptr,
    EARLIER: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    # One program a segment of a row: largest, sum of exponentials, id of the largest.
    start(PDL)
    source = (
        logits_ptr,
        slots_ptr,
        temperature_ptr,
        bias_ptr,
        repetition_ptr,
        frequency_ptr,
        presence_ptr,
        counts_ptr,
        in_prompt_ptr,
        earlier_ptr,
        logits_stride,
        float_stride,
        vocab,
        rows,
    )
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    ids = part * BLOCK + tl.arange(0, BLOCK)
    x = processed(source, row, ids, EARLIER, SCALE)
    top, total = part_sum(x)
    at = row * tl.num_programs(0) + part
    tl.store(tops_ptr + at, top)
    tl.store(sums_ptr + at, total)
    tl.store(ids_ptr + at, first_best(x, ids)[1])


@triton.jit
def _judge_kernel(
    logits_ptr,
    slots_ptr,
    temperature_ptr,
    bias_ptr,
    repetition_ptr,
    frequency_ptr,
    presence_ptr,
    counts_ptr,
    in_prompt_ptr,
    earlier_ptr,
    logits_stride,
    float_stride,
    vocab,
    rows,
    proposals_ptr,
    proposal_scale_ptr,
    positions_ptr,
    seeds_ptr,
    seed_stride,
    accepted_ptr,
    kind_ptr,
    scale_ptr,
    drafts_ptr,
    tops_ptr,
    sums_ptr,
    ids_ptr,
    emitted_ptr,
    parts,
    EARLIER: tl.constexpr,
    SCALE: tl.constexpr,
    K: tl.constexpr,
    KEPT: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    # One program a window. kind: 0 the token that ends it is known (greedy, or no finite row), 1 it is a draw of the
    # target, 2 a draw of the residual. scale: of the row that ends the window.
    start(PDL)
    source = (
        logits_ptr,
        slots_ptr,
        temperature_ptr,
        bias_ptr,
        repetition_ptr,
        frequency_ptr,
        presence_ptr,
        counts_ptr,
        in_prompt_ptr,
        earlier_ptr,
        logits_stride,
        float_stride,
        vocab,
        rows,
    )
    window = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + window)
    greedy = tl.load(temperature_ptr + slot * float_stride) == 0
    random = 1 - greedy.to(tl.int32)
    seed = tl.load(seeds_ptr + slot * seed_stride)
    position = tl.load(positions_ptr + window)
    i = tl.arange(0, PARTS)
    one = tl.arange(0, 1)
    standing = tl.full([1], 1, tl.int32)
    accepted = tl.full([1], 0, tl.int32)
    kind = tl.full([1], 0, tl.int32)
    end_top = tl.full([1], 0.0, tl.float32)
    end_log_sum = tl.full([1], 0.0, tl.float32)
    for j in tl.static_range(K + 1):
        row = window * (K + 1) + j
        tops = tl.load(tops_ptr + row * parts + i, mask=i < parts, other=float("-inf"))
        sums = tl.load(sums_ptr + row * parts + i, mask=i < parts, other=0.0)
        ids = tl.load(ids_ptr + row * parts + i, mask=i < parts, other=0)
        top, log_sum = whole_sum(tops, sums)
        best = first_best(tops, ids)[1].to(tl.int64)
        healthy = (top > float("-inf")) & (top < float("inf"))
        finite = healthy.to(tl.int32)
        stands = tl.full([1], 0, tl.int32)
        drafted = tl.full([1], 0, tl.int32)
        draft = tl.full([1], -1, tl.int64)
        if j < K:
            draft = tl.load(drafts_ptr + window * K + j + one)
            drafted = (draft >= 0).to(tl.int32)
            token = tl.maximum(draft, 0).to(tl.int32)
            x = processed(source, row, token, EARLIER, SCALE)
            at = slot * KEPT + j
            q = tl.load(proposals_ptr + at * vocab + token)
            log_q = (q - tl.load(proposal_scale_ptr + at * 2)) - tl.load(proposal_scale_ptr + at * 2 + 1)
            # as a difference of logarithms, so that equal p and q always stand; NaN falls
            ratio = ((x - top) - log_sum) - log_q
            drawn = (ratio > tl.log(uniform_number(seed, position + j, _ACCEPT))).to(tl.int32)
            stands = tl.where(greedy, (draft == best).to(tl.int32), drawn) * drafted * finite
        ends = standing * (1 - stands)
        known = tl.where(healthy, best, -1)
        # the token that ends a window is written here or by the last kernel
        emitted = tl.where(standing * stands > 0, draft, tl.where(ends > 0, known, -1))
        tl.store(emitted_ptr + window * (K + 1) + j + one, emitted)
        kind = tl.where(ends * finite * random > 0, 1 + drafted, kind)
        end_top = tl.where(ends > 0, top, end_top)
        end_log_sum = tl.where(ends > 0, log_sum, end_log_sum)
        accepted += standing * stands
        standing = standing * stands
    tl.store(accepted_ptr + window + one, accepted.to(tl.int64))
    tl.store(kind_ptr + window + one, kind)
    tl.store(scale_ptr + window * 2 + one, end_top)
    tl.store(scale_ptr + window * 2 + 1 + one, end_log_sum)


@triton.jit
def _log_one_minus_exp(d):
    """log(-expm1(d)) of d < 0, from exp and log alone: dividing by log(exp(d)) cancels the rounding of exp (Kahan)."""
    t = tl.exp(d)
    inside = (t > 0.0) & (t < 1.0)
    exact = (1.0 - t) * (d / tl.log(tl.where(inside, t, 0.5)))
    return tl.log(tl.where(inside, exact, tl.where(t < 1.0, 1.0, -d)))


@triton.jit
def _ending_kernel(
    logits_ptr,
    slots_ptr,
    temperature_ptr,
    bias_ptr,
    repetition_ptr,
    frequency_ptr,
    presence_ptr,
    counts_ptr,
    in_prompt_ptr,
    earlier_ptr,
    logits_stride,
    float_stride,
    vocab,
    rows,
    proposals_ptr,
    proposal_scale_ptr,
    positions_ptr,
    seeds_ptr,
    seed_stride,
    accepted_ptr,
    kind_ptr,
    scale_ptr,
    first_ptr,
    first_ids_ptr,
    second_ptr,
    second_ids_ptr,
    EARLIER: tl.constexpr,
    SCALE: tl.constexpr,
    K: tl.constexpr,
    KEPT: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    # One program a segment of the row that ends a window. first: best of the target; second: best of the residual.
    start(PDL)
    source = (
        logits_ptr,
        slots_ptr,
        temperature_ptr,
        bias_ptr,
        repetition_ptr,
        frequency_ptr,
        presence_ptr,
        counts_ptr,
        in_prompt_ptr,
        earlier_ptr,
        logits_stride,
        float_stride,
        vocab,
        rows,
    )
    part = tl.program_id(0)
    window = tl.program_id(1).to(tl.int64)
    kind = tl.load(kind_ptr + window)
    if kind > 0:
        accepted = tl.load(accepted_ptr + window)
        row = window * (K + 1) + accepted
        ids = part * BLOCK + tl.arange(0, BLOCK)
        x = processed(source, row, ids, EARLIER, SCALE)
        slot = tl.load(slots_ptr + window)
        seed = tl.load(seeds_ptr + slot * seed_stride)
        position = tl.load(positions_ptr + window) + accepted
        stream = tl.where(kind == 2, _RESIDUAL, _TARGET)
        noise = gumbel_tile(seed, position, stream, part * BLOCK, BLOCK)
        at = window * tl.num_programs(0) + part
        value, token = first_best(x + noise, ids)
        tl.store(first_ptr + at, value)
        tl.store(first_ids_ptr + at, token)
        if kind == 2:
            proposal = (slot * KEPT + accepted) * vocab
            scaled = (slot * KEPT + accepted) * 2
            # past the vocabulary log_p is -inf, and not above anything
            q = tl.load(proposals_ptr + proposal + ids, mask=ids < vocab, other=float("-inf"))
            log_p = (x - tl.load(scale_ptr + window * 2)) - tl.load(scale_ptr + window * 2 + 1)
            log_q = (q - tl.load(proposal_scale_ptr + scaled)) - tl.load(proposal_scale_ptr + scaled + 1)
            above = log_q < log_p
            less = tl.where(above, log_q - log_p, -1.0)
            weight = tl.where(above, log_p + _log_one_minus_exp(less), float("-inf"))
            value, token = first_best(weight + noise, ids)
            tl.store(second_ptr + at, value)
            tl.store(second_ids_ptr + at, token)


@triton.jit
def _finish_kernel(
    first_ptr,
    first_ids_ptr,
    second_ptr,
    second_ids_ptr,
    kind_ptr,
    accepted_ptr,
    emitted_ptr,
    parts,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    # One program a window: the token that ends it, where it had to be drawn.
    start(PDL)
    window = tl.program_id(0)
    kind = tl.load(kind_ptr + window)
    if kind > 0:
        i = tl.arange(0, PARTS)
        live = i < parts
        at = window * parts + i
        values = tl.load(first_ptr + at, mask=live, other=float("-inf"))
        token = first_best(values, tl.load(first_ids_ptr + at, mask=live, other=0))[1]
        # p and q may be equal but for rounding, and the residual then empty: p is as good
        drawn = i < tl.where(kind == 2, parts, 0)
        values = tl.load(second_ptr + at, mask=drawn, other=float("-inf"))
        value, residual = first_best(values, tl.load(second_ids_ptr + at, mask=drawn, other=0))
        token = tl.where(value > float("-inf"), residual, token)
        accepted = tl.load(accepted_ptr + window)
        tl.store(emitted_ptr + window * (K + 1) + accepted, token.to(tl.int64))


def accept_drafts_inputs(b: int, k: int, vocab_size: int, device: str) -> dict[str, Tensor | Proposals]:
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
        "proposals": Proposals(drafter, scale_reference(drafter)),
        "slots": torch.arange(b, device=device),
        "positions": positions,
        "temperature": temperature,
        "seeds": seeds,
    }
