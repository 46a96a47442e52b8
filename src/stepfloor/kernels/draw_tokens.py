"""One token for each row of logits: Gumbel-max, the argmax of processed logits plus noise.

The noise is a function of (seed, position, stream, token id), so the token does not depend on the row, the batch or
the number of drafts. At temperature 0 there is no noise and the token is the argmax.

On a GPU two kernels: programs over parts of rows find the best of their part, straight from bf16 and with the stages
applied on the way, then one small program a row picks. Without noise and stages nothing but logits is read.

Source: Gumbel 1954 (argmax(log p + G) is distributed as p; a constant added to a row changes nothing, so processed
logits need no softmax); kernels/_noise.py for the noise.
"""

import torch
from torch import Tensor

from stepfloor.kernels._jit import runs_triton, start, start_in_turn, tl, triton
from stepfloor.kernels._logits import (
    SEGMENT,
    Proposals,
    check_stages,
    first_best,
    launch_options,
    part_sum,
    processed,
    processed_reference,
    row_arguments,
    scale_reference,
    segments,
    whole_sum,
    window_rows,
)
from stepfloor.kernels._logits import Stages as Stages
from stepfloor.kernels._noise import DRAFT as DRAFT
from stepfloor.kernels._noise import TARGET as TARGET
from stepfloor.kernels._noise import gumbel_noise, gumbel_tile

# From so many rows on, a program takes four segments of its row: the largest value does not depend on the cut.
MANY_ROWS = 16


def draw_tokens_reference(
    logits: Tensor,
    slots: Tensor,
    positions: Tensor,
    temperature: Tensor,
    seeds: Tensor | None,
    stream: int,
    stages: Stages | None = None,
    proposals: Proposals | None = None,
    drafts: Tensor | None = None,
    column: int = 0,
) -> Tensor:
    """The source's equation."""
    rows = window_rows(logits, slots)
    x = logits.float() if stages is None else processed_reference(logits, slots, temperature, stages)
    if proposals is not None:
        proposals.logits[slots, column] = x
        proposals.scale[slots, column] = scale_reference(x)
    healthy = torch.isfinite(x.amax(-1))
    if seeds is not None:
        row_slots = slots.repeat_interleave(rows)
        row_positions = (positions[:, None] + torch.arange(rows, device=positions.device)).flatten()
        noise = gumbel_noise(seeds[row_slots], row_positions, torch.full_like(row_positions, stream), x.shape[1])
        x = x + torch.where(temperature[row_slots][:, None] == 0, 0.0, noise)
    # argmax returns the lowest id among equals
    tokens = torch.where(healthy, x.argmax(-1), -1)
    if drafts is not None:
        drafts[slots, column] = tokens
    return tokens


def draw_tokens(
    logits: Tensor,
    slots: Tensor,
    positions: Tensor,
    temperature: Tensor,
    seeds: Tensor | None,
    stream: int,
    stages: Stages | None = None,
    proposals: Proposals | None = None,
    drafts: Tensor | None = None,
    column: int = 0,
) -> Tensor:
    """Draw one token id from each row.

    logits       bf16 or fp32 [N, V], N = B R: R rows of each window, one after the other
    slots        int64 [B], the slot whose settings a window uses
    positions    int64 [B], index in its sequence of the token that a window's first row draws; row j is j further on
    temperature  fp32 [slots]; rows at 0 take their argmax, the lowest id among equals
    seeds        int64 [slots]; None: every row is at temperature 0
    stream       TARGET or DRAFT
    stages       what the raw logits still need, the temperature included. None: they come from process_logits
    proposals    with R = 1: where to keep what a row was drawn from, at [slot, column]. Rows at temperature 0 may be
                 left out
    drafts       int64 [slots, most drafts], with R = 1: where to keep the tokens too, at [slot, column]
    Returns int64 [N], -1 where the row has no finite maximum. Raises ValueError if shapes disagree.
    """
    rows = window_rows(logits, slots) if logits.ndim == 2 else 0
    if rows < 1 or positions.shape != slots.shape:
        raise ValueError(
            "draw_tokens wants logits [N, V], slots [B], positions [B], N a multiple of B; "
            f"got {tuple(logits.shape)}, {tuple(slots.shape)}, {tuple(positions.shape)}"
        )
    if stages is not None:
        check_stages(stages, slots.shape[0], temperature.shape[0], logits.shape[1])
    if proposals is not None and (rows > 1 or proposals.logits.shape[::2] != (temperature.shape[0], logits.shape[1])):
        raise ValueError(
            f"proposals take one row a window and {(temperature.shape[0], logits.shape[1])} slots and tokens; "
            f"got {rows} rows and {tuple(proposals.logits.shape)}"
        )
    if drafts is not None and (rows > 1 or drafts.ndim != 2 or drafts.shape[0] != temperature.shape[0]):
        raise ValueError(
            f"drafts are kept of one row a window, in [{temperature.shape[0]}, most drafts]; "
            f"got {rows} rows and {tuple(drafts.shape)}"
        )
    draw = draw_tokens_triton if runs_triton(logits) else draw_tokens_reference
    return draw(logits, slots, positions, temperature, seeds, stream, stages, proposals, drafts, column)


def draw_tokens_triton(
    logits: Tensor,
    slots: Tensor,
    positions: Tensor,
    temperature: Tensor,
    seeds: Tensor | None,
    stream: int,
    stages: Stages | None = None,
    proposals: Proposals | None = None,
    drafts: Tensor | None = None,
    column: int = 0,
) -> Tensor:
    """Two launches, whatever the stages."""
    n, vocab = logits.shape
    keeps = proposals is not None
    count = segments(vocab)
    loops = 4 if n >= MANY_ROWS and not keeps else 1
    parts = -(-count // loops)
    best = logits.new_empty((n, parts), dtype=torch.float32)
    ids = logits.new_empty((n, parts), dtype=torch.int32)
    tops, sums = logits.new_empty((2, n, parts), dtype=torch.float32) if keeps else (None, None)
    tokens = logits.new_empty((n,), dtype=torch.int64)
    arguments = row_arguments(logits, slots, temperature, stages)
    arguments["SCALE"] = arguments["SCALE"] and seeds is not None
    kept = proposals.logits[:, column] if proposals is not None else None
    scale = proposals.scale[:, column] if proposals is not None else None
    kept_drafts = None if drafts is None else drafts[:, column]
    _part_kernel[parts, n](
        **arguments,
        positions_ptr=positions.contiguous(),
        seeds_ptr=seeds,
        seed_stride=0 if seeds is None else seeds.stride(0),
        kept_ptr=kept,
        kept_stride=0 if kept is None else kept.stride(0),
        best_ptr=best,
        ids_ptr=ids,
        tops_ptr=tops,
        sums_ptr=sums,
        noise_stream=stream,
        LOOPS=loops,
        BLOCK=SEGMENT,
        **launch_options(logits),
    )
    _pick_kernel[(n,)](
        best,
        ids,
        tops,
        sums,
        tokens,
        arguments["slots_ptr"],
        temperature,
        scale,
        kept_drafts,
        parts,
        arguments["float_stride"],
        0 if scale is None else scale.stride(0),
        0 if kept_drafts is None else kept_drafts.stride(0),
        PARTS=triton.next_power_of_2(parts),
        **launch_options(logits, 1),
    )
    return tokens


@triton.jit
def _part_kernel(
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
    positions_ptr,
    seeds_ptr,
    seed_stride,
    kept_ptr,
    kept_stride,
    best_ptr,
    ids_ptr,
    tops_ptr,
    sums_ptr,
    noise_stream,
    EARLIER: tl.constexpr,
    SCALE: tl.constexpr,
    LOOPS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    # One program takes LOOPS segments of a row and leaves the best value and its id. In turn: the drafter's next pass
    # reads, before it waits, what its pass before this draw wrote.
    start_in_turn(PDL)
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
    window = row // rows
    slot = tl.load(slots_ptr + window)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_ids = tl.full([BLOCK], 0, tl.int32)
    for loop in tl.static_range(LOOPS):
        first = (part * LOOPS + loop) * BLOCK
        ids = first + tl.arange(0, BLOCK)
        x = processed(source, row, ids, EARLIER, SCALE)
        if seeds_ptr is not None:  # noqa: SIM102 (decided when compiled, the other when run)
            if tl.load(temperature_ptr + slot * float_stride) != 0:
                if kept_ptr is not None:
                    tl.store(kept_ptr + slot * kept_stride + ids, x, mask=ids < vocab)
                    top, total = part_sum(x)
                    tl.store(tops_ptr + row * tl.num_programs(0) + part, top)
                    tl.store(sums_ptr + row * tl.num_programs(0) + part, total)
                seed = tl.load(seeds_ptr + slot * seed_stride)
                position = tl.load(positions_ptr + window) + row - window * rows
                x = x + gumbel_tile(seed, position, noise_stream, first, BLOCK)
        # strictly: ids of a lane ascend, and the lowest of equals stays
        better = x > best
        best = tl.where(better, x, best)
        best_ids = tl.where(better, ids, best_ids)
    value, token = first_best(best, best_ids)
    tl.store(best_ptr + row * tl.num_programs(0) + part, value)
    tl.store(ids_ptr + row * tl.num_programs(0) + part, token)


@triton.jit(do_not_specialize_on_alignment=["drafts_ptr"])  # one binary for all columns
def _pick_kernel(
    best_ptr,
    ids_ptr,
    tops_ptr,
    sums_ptr,
    tokens_ptr,
    slots_ptr,
    temperature_ptr,
    scale_ptr,
    drafts_ptr,
    parts,
    float_stride,
    scale_stride,
    drafts_stride,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    # One program a row: from the best of its parts to its token.
    start(PDL)
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, PARTS)
    best = tl.load(best_ptr + row * parts + i, mask=i < parts, other=float("-inf"))
    ids = tl.load(ids_ptr + row * parts + i, mask=i < parts, other=0)
    value, token = first_best(best, ids)
    finite = (value > float("-inf")) & (value < float("inf"))
    token = tl.where(finite, token, -1).to(tl.int64)
    tl.store(tokens_ptr + row, token)
    if drafts_ptr is not None:
        tl.store(drafts_ptr + tl.load(slots_ptr + row) * drafts_stride, token)
    if scale_ptr is not None:
        slot = tl.load(slots_ptr + row)
        if tl.load(temperature_ptr + slot * float_stride) != 0:
            tops = tl.load(tops_ptr + row * parts + i, mask=i < parts, other=float("-inf"))
            sums = tl.load(sums_ptr + row * parts + i, mask=i < parts, other=0.0)
            top, log_sum = whole_sum(tops, sums)
            tl.store(scale_ptr + slot * scale_stride, top)
            tl.store(scale_ptr + slot * scale_stride + 1, log_sum)


def draw_tokens_inputs(n: int, vocab_size: int, device: str) -> dict[str, Tensor | int]:
    """Rows at temperature 1 except the first, which is greedy; one slot each."""
    make = torch.Generator(device).manual_seed(0)
    temperature = torch.ones(n, device=device)
    temperature[0] = 0.0
    return {
        "logits": 4 * torch.randn(n, vocab_size, generator=make, device=device),
        "slots": torch.arange(n, device=device),
        "positions": 1000 + torch.arange(n, device=device),
        "temperature": temperature,
        "seeds": torch.arange(n, device=device) * 0x1234567890AB,
        "stream": TARGET,
    }
