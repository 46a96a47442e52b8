"""The logits a token is drawn from: bias, penalties, temperature and filters applied to each row.

On a GPU three kernels and no sort: the largest of every 32 ids; one program a row finds the value below which nothing
stays; one pass writes. The program looks at the ids whose group of 32 has a large maximum, first 128 groups, then
1024, then all. The k-th largest, or the bulk of the probability, is nearly always among the first; every look beyond is
slower and as exact. Probabilities are summed as integers in units of 2**-40 of the largest, so no order moves the
boundary; it may fall elsewhere than in the reference only where a token's cumulative probability is within 2**-17 of
1 - p: exp and the softmax round each probability by less than 2**-18 of itself, on both sides.

Source: vLLM's order (fp32 copy, logit bias, penalties, forbidden ids, temperature, min-p, top-k, top-p); bias and
penalties do not commute. Penalties: vLLM model_executor/layers/utils.py, apply_penalties. Filters: vLLM
v1/sample/ops/topk_topp_sampler.py (ascending order, drop while the cumulative probability is at most 1 - p).

Two things are fixed here that the source leaves to its sort: tokens tied with the k-th logit all survive top-k, and
where top-p must split a tie the lower id stays.
"""

import torch
from torch import Tensor

from stepfloor.kernels._jit import runs_triton, start, tl, triton
from stepfloor.kernels._logits import (
    INF,
    SEGMENT,
    Stages,
    check_stages,
    check_strides,
    exp_below,
    fixed,
    launch_options,
    part_sum,
    processed,
    processed_reference,
    row_arguments,
    segments,
    window_rows,
)
from stepfloor.kernels._logits import Filters as Filters
from stepfloor.kernels._logits import Penalties as Penalties

GROUP = 32  # ids that share a maximum
FEW_GROUPS = 128


def process_logits_reference(
    logits: Tensor,
    slots: Tensor,
    temperature: Tensor,
    bias: Tensor | None = None,
    penalties: Penalties | None = None,
    filters: Filters | None = None,
    earlier: Tensor | None = None,
) -> Tensor:
    """The source's equations, stage by stage."""
    x = processed_reference(logits, slots, temperature, Stages(bias, penalties, earlier))
    if filters is not None:
        row_slots = slots.repeat_interleave(window_rows(logits, slots))
        greedy = temperature[row_slots][:, None] == 0
        x = torch.where(greedy | _keeps(x, row_slots, filters), x, -INF)
    # NaN and +inf pass through every stage or leave no candidate, so one look at the end finds all three.
    healthy = torch.isfinite(x.amax(-1))
    return torch.where(healthy[:, None], x, float("nan"))


def _keeps(x: Tensor, slots: Tensor, filters: Filters) -> Tensor:
    """Which tokens survive min-p, then top-k, then top-p over what is left; bool [N, V]."""
    floor = x.amax(-1, keepdim=True) + torch.log(filters.min_p[slots])[:, None]
    x = torch.where(x < floor, -INF, x)

    # Best first, lower id first among equals.
    ordered, ids = torch.sort(x, dim=-1, descending=True, stable=True)
    kth = ordered.gather(1, filters.top_k[slots][:, None] - 1)
    ordered = torch.where(ordered < kth, -INF, ordered)

    # Summed from the worst upward, in double: no order of the scan then moves the boundary.
    mass = torch.softmax(ordered, dim=-1).double().flip(-1).cumsum(-1).flip(-1)
    top_p = filters.top_p[slots][:, None]
    # At top_p 1 nothing goes, not even what underflowed to probability 0: the row is the same without this stage.
    keep = (mass > 1.0 - top_p.double()) | (top_p >= 1.0)
    keep[:, 0] = True
    keep = keep & (ordered > -INF)
    return torch.zeros_like(keep).scatter_(1, ids, keep)


def process_logits(
    logits: Tensor,
    slots: Tensor,
    temperature: Tensor,
    bias: Tensor | None = None,
    penalties: Penalties | None = None,
    filters: Filters | None = None,
    earlier: Tensor | None = None,
) -> Tensor:
    """Turn each row of raw logits into the logits its token is drawn from.

    logits       bf16 or fp32 [N, V], N = B R: R rows of each window, one after the other
    slots        int64 [B], the slot whose settings a window uses
    temperature  fp32 [slots]; rows at 0 come back neither scaled nor filtered, their argmax is the token
    bias         fp32 [slots, V], added to the logits; -inf forbids a token. None: no slot has any
    penalties    None: no slot has any
    filters      None: no slot has any
    earlier      int64 [B, W], tokens that penalties count as if already in the output; -1 is none. Row j of a window
                 counts the first W - (R - 1) + j: a single row all, row j of k + 1 rows the j drafts before it
    Returns fp32 [N, V], -inf where a token cannot be drawn. A row without a finite maximum (NaN, +inf, or no
    candidate) comes back as NaN. Raises ValueError if shapes disagree.
    """
    if logits.ndim != 2 or window_rows(logits, slots) < 1:
        raise ValueError(
            "process_logits wants logits [N, V] and slots [B], N a multiple of B; "
            f"got {tuple(logits.shape)} and {tuple(slots.shape)}"
        )
    check_stages(Stages(bias, penalties, earlier), slots.shape[0], temperature.shape[0], logits.shape[1])
    process = process_logits_triton if runs_triton(logits) else process_logits_reference
    return process(logits, slots, temperature, bias, penalties, filters, earlier)


def process_logits_triton(
    logits: Tensor,
    slots: Tensor,
    temperature: Tensor,
    bias: Tensor | None = None,
    penalties: Penalties | None = None,
    filters: Filters | None = None,
    earlier: Tensor | None = None,
    few: int = FEW_GROUPS,
) -> Tensor:
    """Three launches. few: groups of a tile, and of the first look."""
    n, vocab = logits.shape
    parts = segments(vocab)
    groups = parts * (SEGMENT // GROUP)
    out = logits.new_empty((n, vocab), dtype=torch.float32)
    tops, sums = logits.new_empty((2, n, parts), dtype=torch.float32)
    maxima = logits.new_empty((n, groups), dtype=torch.float32)
    chosen = logits.new_empty((n, groups), dtype=torch.int32)
    cut = logits.new_empty((n, 2), dtype=torch.int32)
    arguments = row_arguments(logits, slots, temperature, Stages(bias, penalties, earlier))
    if filters is not None:
        check_strides(temperature, filters.min_p, filters.top_p)
    _maxima_kernel[parts, n](
        **arguments, maxima_ptr=maxima, tops_ptr=tops, sums_ptr=sums, BLOCK=SEGMENT, GROUP=GROUP, **launch_options(out)
    )
    _cut_kernel[(n,)](
        **arguments,
        min_p_ptr=None if filters is None else filters.min_p,
        top_k_ptr=None if filters is None else filters.top_k,
        top_p_ptr=None if filters is None else filters.top_p,
        top_k_stride=0 if filters is None else filters.top_k.stride(0),
        maxima_ptr=maxima,
        tops_ptr=tops,
        sums_ptr=sums,
        chosen_ptr=chosen,
        cut_ptr=cut,
        parts=parts,
        groups=groups,
        PARTS=triton.next_power_of_2(parts),
        GROUPS=triton.next_power_of_2(groups),
        GROUP=GROUP,
        FEW=few,
        **launch_options(out, 8),
    )
    _write_kernel[parts, n](**arguments, cut_ptr=cut, out_ptr=out, BLOCK=SEGMENT, **launch_options(out))
    return out


@triton.jit
def _order(x):
    """int32 numbers in the order of float32 ones; equal for the two zeros."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _maxima_kernel(
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
    maxima_ptr,
    tops_ptr,
    sums_ptr,
    EARLIER: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    # One program a segment of a row: the largest of every group, and the segment's largest and sum.
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
    maxima = tl.max(tl.reshape(x, [BLOCK // GROUP, GROUP]), 1)
    at = row * tl.num_programs(0) + part
    tl.store(maxima_ptr + at * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP), maxima)
    top, total = part_sum(x)
    tl.store(tops_ptr + at, top)
    tl.store(sums_ptr + at, total)


@triton.jit
def _tile(
    source,
    row,
    chosen_ptr,
    count,
    tile,
    EARLIER: tl.constexpr,
    SCALE: tl.constexpr,
    GROUP: tl.constexpr,
    FEW: tl.constexpr,
):
    """Ids and processed logits of FEW groups of the list, in ascending order; -inf past its end."""
    i = tl.arange(0, FEW * GROUP)
    entry = tile * FEW + i // GROUP
    group = tl.load(chosen_ptr + entry, mask=entry < count, other=0)
    ids = tl.where(entry < count, group * GROUP + i % GROUP, source[12])
    x = processed(source, row, ids, EARLIER, SCALE)
    return ids, x


@triton.jit
def _above(
    source,
    row,
    chosen_ptr,
    count,
    top,
    low,
    bound,
    EARLIER: tl.constexpr,
    SCALE: tl.constexpr,
    GROUP: tl.constexpr,
    FEW: tl.constexpr,
):
    """Of the listed ids above `low`: how many are above `bound`, their sum, the lowest of them, the highest other."""
    number = tl.full([], 0, tl.int32)
    total = tl.full([], 0, tl.int64)
    lowest = tl.full([], 2147483647, tl.int32)
    highest = tl.full([], -2147483648, tl.int32)
    for tile in range(0, (count + FEW - 1) // FEW):
        _, x = _tile(source, row, chosen_ptr, count, tile, EARLIER, SCALE, GROUP, FEW)
        key = _order(x)
        over = (key > bound) & (key > low)
        number += tl.sum(over.to(tl.int32), 0)
        total += tl.sum(tl.where(over, fixed(exp_below(x, top)), 0), 0)
        lowest = tl.minimum(lowest, tl.min(tl.where(over, key, 2147483647), 0))
        highest = tl.maximum(highest, tl.max(tl.where((key > low) & (key <= bound), key, -2147483648), 0))
    return number, total, lowest, highest


@triton.jit
def _bound(
    source,
    row,
    chosen_ptr,
    count,
    top,
    low,
    high,
    wanted,
    whole,
    spare,
    EARLIER: tl.constexpr,
    SCALE: tl.constexpr,
    GROUP: tl.constexpr,
    FEW: tl.constexpr,
):
    """The highest bound with at least `wanted` listed ids above it, or where the sum above leaves more than `spare`.

    wanted > 0: the highest bound in low .. high - 1 with so many above, one less than some id's key; it is true of low.
    wanted 0: the lowest bound in low + 1 .. high that leaves more than `spare` of `whole`, some id's key, or high.
    Between bounds that no id separates nothing changes, so each turn of the bisection ends at an id.
    """
    floor = low.to(tl.int64)
    ceiling = high.to(tl.int64)
    while floor + 1 < ceiling:
        middle = (floor + (ceiling - floor) // 2).to(tl.int32)
        number, total, lowest, highest = _above(
            source, row, chosen_ptr, count, top, low, middle, EARLIER, SCALE, GROUP, FEW
        )
        higher = tl.where(wanted > 0, number >= wanted, whole - total <= spare)
        floor = tl.where(higher, lowest.to(tl.int64) - 1, floor)
        ceiling = tl.where(higher, ceiling, highest.to(tl.int64))
    return tl.where(wanted > 0, floor, ceiling).to(tl.int32)


@triton.jit
def _cut_kernel(
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
    min_p_ptr,
    top_k_ptr,
    top_p_ptr,
    top_k_stride,
    maxima_ptr,
    tops_ptr,
    sums_ptr,
    chosen_ptr,
    cut_ptr,
    parts,
    groups,
    EARLIER: tl.constexpr,
    SCALE: tl.constexpr,
    PARTS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    FEW: tl.constexpr,
    PDL: tl.constexpr,
):
    # One program a row: what stays is above the order of cut[0], or at it with an id up to cut[1]; cut[1] = -2 marks a
    # row without a finite maximum.
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
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, PARTS)
    top = tl.max(tl.load(tops_ptr + row * parts + i, mask=i < parts, other=float("-inf")), 0)
    healthy = (top > float("-inf")) & (top < float("inf"))
    cut = tl.full([], -2147483648, tl.int32)
    last = tl.where(healthy, -1, -2)
    if min_p_ptr is not None:
        slot = tl.load(slots_ptr + row // rows)
        greedy = tl.load(temperature_ptr + slot * float_stride) == 0
        if healthy & (greedy == 0):
            min_p = tl.load(min_p_ptr + slot * float_stride)
            top_p = tl.load(top_p_ptr + slot * float_stride)
            top_k = tl.load(top_k_ptr + slot * top_k_stride).to(tl.int32)
            nothing = _order(tl.full([], float("-inf"), tl.float32))
            best = _order(top)
            # ids above `under` survive min-p
            under = tl.maximum(_order(top + tl.log(min_p)) - 1, nothing)
            cut = under
            done = ((top_k >= vocab) & (top_p >= 1.0)).to(tl.int32)
            g = tl.arange(0, GROUPS)
            maxima = tl.load(maxima_ptr + row * groups + g, mask=g < groups, other=float("-inf"))
            key = _order(maxima)
            alive = tl.sum((key > nothing).to(tl.int32), 0)
            few = tl.full([], FEW, tl.int32)
            while done == 0:
                # ids above `low` are all in the groups whose maximum is: at most `few`, unless these are all
                floor = nothing.to(tl.int64)
                ceiling = tl.where(alive <= few, floor, best.to(tl.int64))
                while floor + 1 < ceiling:
                    middle = (floor + (ceiling - floor) // 2).to(tl.int32)
                    many = tl.sum((key > middle).to(tl.int32), 0) > few
                    lowest = tl.min(tl.where(key > middle, key, 2147483647), 0).to(tl.int64)
                    highest = tl.max(tl.where((key > nothing) & (key <= middle), key, -2147483648), 0).to(tl.int64)
                    floor = tl.where(many, lowest - 1, floor)
                    ceiling = tl.where(many, ceiling, highest)
                listed = key > ceiling.to(tl.int32)
                count = tl.sum(listed.to(tl.int32), 0)
                place = tl.cumsum(listed.to(tl.int32), 0) - 1
                tl.debug_barrier()
                tl.store(chosen_ptr + row * groups + place, g, mask=listed)
                tl.debug_barrier()
                low = tl.maximum(ceiling.to(tl.int32), under)
                complete = ceiling.to(tl.int32) <= under
                chosen = chosen_ptr + row * groups
                number, whole, _, _ = _above(source, row, chosen, count, top, low, low, EARLIER, SCALE, GROUP, FEW)
                # top-k, which needs at least so many ids; whole: the probability of its survivors
                cut = low
                solved = complete | (number >= top_k)
                if number >= top_k:
                    cut = _bound(
                        source, row, chosen, count, top, low, best, top_k, whole, whole, EARLIER, SCALE, GROUP, FEW
                    )
                    _, whole, _, _ = _above(source, row, chosen, count, top, low, cut, EARLIER, SCALE, GROUP, FEW)
                elif (complete == 0) & (top_k >= vocab) & (min_p <= 0.0):
                    # every id survives, and their sum is known
                    sums = tl.load(sums_ptr + row * parts + i, mask=i < parts, other=0.0)
                    tops = tl.load(tops_ptr + row * parts + i, mask=i < parts, other=float("-inf"))
                    whole = tl.sum(fixed(sums * exp_below(tops, top)), 0)
                    solved = top_p < 1.0
                if solved & (top_p < 1.0):
                    # what may go in all, and whether it goes beyond the ids that were listed
                    spare = ((1.0 - top_p.to(tl.float64)) * whole.to(tl.float64)).to(tl.int64)
                    _, total, _, _ = _above(source, row, chosen, count, top, low, cut, EARLIER, SCALE, GROUP, FEW)
                    solved = whole - total <= spare
                    if solved:
                        none = tl.full([], 0, tl.int32)
                        cut = _bound(
                            source, row, chosen, count, top, cut, best, none, whole, spare, EARLIER, SCALE, GROUP, FEW
                        )
                        _, total, _, _ = _above(source, row, chosen, count, top, low, cut, EARLIER, SCALE, GROUP, FEW)
                        last = _last_of_ties(
                            source, row, chosen, count, top, cut, whole - total - spare, EARLIER, SCALE, GROUP, FEW
                        )
                done = solved.to(tl.int32)
                few = few * 8
    tl.store(cut_ptr + row * 2, cut)
    tl.store(cut_ptr + row * 2 + 1, last)


@triton.jit
def _last_of_ties(
    source,
    row,
    chosen_ptr,
    count,
    top,
    cut,
    left,
    EARLIER: tl.constexpr,
    SCALE: tl.constexpr,
    GROUP: tl.constexpr,
    FEW: tl.constexpr,
):
    """The id of the last tie at `cut` that stays: ties stay, lower ids first, while more than nothing is `left`."""
    seen = tl.full([], 0, tl.int32)
    last = tl.full([], -1, tl.int32)
    for tile in range(0, (count + FEW - 1) // FEW):
        ids, x = _tile(source, row, chosen_ptr, count, tile, EARLIER, SCALE, GROUP, FEW)
        tied = _order(x) == cut
        before = seen + tl.cumsum(tied.to(tl.int32), 0) - 1
        # the first tie stays in any case: it may be the best token
        stays = tied & ((before == 0) | (before * fixed(exp_below(x, top)) < left))
        last = tl.maximum(last, tl.max(tl.where(stays, ids, -1), 0))
        seen += tl.sum(tied.to(tl.int32), 0)
    return last


@triton.jit
def _write_kernel(
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
    cut_ptr,
    out_ptr,
    EARLIER: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    # One program a segment of a row.
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
    row = tl.program_id(1).to(tl.int64)
    ids = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = processed(source, row, ids, EARLIER, SCALE)
    cut = tl.load(cut_ptr + row * 2)
    last = tl.load(cut_ptr + row * 2 + 1)
    key = _order(x)
    y = tl.where((key > cut) | ((key == cut) & (ids <= last)), x, float("-inf"))
    y = tl.where(last == -2, float("nan"), y)
    tl.store(out_ptr + row * vocab + ids, y, mask=ids < vocab)


def process_logits_inputs(n: int, vocab_size: int, dtype: torch.dtype, device: str) -> dict[str, object]:
    """Rows with every stage in use, one slot each; slot 0 is greedy."""
    make = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=make, device=device)

    temperature = 0.5 + draw(n)
    temperature[0] = 0.0
    bias = torch.where(draw(n, vocab_size) < 0.01, 4 * draw(n, vocab_size) - 2, 0.0)
    bias[draw(n, vocab_size) < 0.01] = -INF
    penalties = Penalties(
        repetition=1 + draw(n),
        frequency=draw(n) - 0.5,
        presence=draw(n) - 0.5,
        counts=torch.where(draw(n, vocab_size) < 0.1, (3 * draw(n, vocab_size)).int(), 0).int(),
        in_prompt=draw(n, vocab_size) < 0.1,
    )
    filters = Filters(
        min_p=0.01 * draw(n),
        top_k=(1 + draw(n) * (vocab_size - 1)).long(),
        top_p=0.5 + 0.5 * draw(n),
    )
    return {
        "logits": (8 * torch.randn(n, vocab_size, generator=make, device=device)).to(dtype),
        "slots": torch.arange(n, device=device),
        "temperature": temperature,
        "bias": bias,
        "penalties": penalties,
        "filters": filters,
        "earlier": (draw(n, 3) * (vocab_size + 1)).long() - 1,
    }
