"""Rows of the n-gram table that each token reads: a hash of the token and its one and two predecessors.

    h2 = t0 m0 ^ t1 m1;   h3 = h2 ^ t2 m2   (m0 goes with the current token; signed 64-bit wrap)
    row = h mod size + offset, one per head; the first half of the heads hashes h2, the second h3

A predecessor before the sequence, or behind an end-of-text token, reads as end-of-text. The current token being
end-of-text hides nothing of its own context.

Source: transformers 5.24, Qwen4ExpTextNGramEmbedding.forward.
"""

import torch
from torch import Tensor

from stepfloor.kernels._jit import dependent_launch, runs_triton, start, tl, triton

BLOCK_ROWS = 8


def ngram_rows_reference(
    tokens: Tensor, history: Tensor, multipliers: Tensor, sizes: Tensor, offsets: Tensor, eos: int
) -> Tensor:
    """The source's equation over the tokens and the few before them."""
    orders = multipliers.shape[0]
    rows = tokens.shape[1]
    sequence = torch.cat((history, tokens), 1)
    crossed = torch.zeros_like(tokens, dtype=torch.bool)
    mixed = tokens * multipliers[0]
    per_order = sizes.shape[0] // (orders - 1)
    heads = []
    for lag in range(1, orders):
        start = history.shape[1] - lag
        earlier = sequence[:, start : start + rows]
        earlier = torch.where(crossed, eos, earlier)
        crossed = crossed | (earlier == eos)
        mixed = mixed ^ (earlier * multipliers[lag])
        part = slice((lag - 1) * per_order, lag * per_order)
        heads.append(torch.remainder(mixed.unsqueeze(-1), sizes[part]) + offsets[part])
    return torch.cat(heads, -1)


def ngram_rows(
    tokens: Tensor, history: Tensor, multipliers: Tensor, sizes: Tensor, offsets: Tensor, eos: int
) -> Tensor:
    """Hash R tokens of each of B sequences.

    tokens       [B, R] int64
    history      [B, n - 1] int64, the tokens before, oldest first, end-of-text where there are none
    multipliers  [n] int64; sizes, offsets [heads] int64; eos  the segment token
    Returns [B, R, heads] int64. Raises ValueError if history is not n - 1 wide.
    """
    if history.shape != (tokens.shape[0], multipliers.shape[0] - 1):
        raise ValueError(
            f"ngram_rows wants history [B, {multipliers.shape[0] - 1}] for tokens {tuple(tokens.shape)}; "
            f"got {tuple(history.shape)}"
        )
    run = launch_rows if runs_triton(tokens) else ngram_rows_reference
    return run(tokens, history, multipliers, sizes, offsets, eos)


def launch_rows(
    tokens: Tensor, history: Tensor, multipliers: Tensor, sizes: Tensor, offsets: Tensor, eos: int
) -> Tensor:
    """Queue the kernel."""
    count, heads, orders = tokens.numel(), sizes.shape[0], multipliers.shape[0]
    out = tokens.new_empty((*tokens.shape, heads))
    _ngram_rows_kernel[(-(-count // BLOCK_ROWS),)](
        tokens.contiguous(),
        history.contiguous(),
        multipliers,
        sizes,
        offsets,
        out,
        count,
        tokens.shape[1],
        eos,
        HEADS=heads,
        ORDERS=orders,
        BLOCK_ROWS=BLOCK_ROWS,
        BLOCK_HEADS=triton.next_power_of_2(heads),
        **dependent_launch(tokens),
    )
    return out


@triton.jit
def _ngram_rows_kernel(
    tokens_ptr,
    history_ptr,
    multipliers_ptr,
    sizes_ptr,
    offsets_ptr,
    out_ptr,
    count,
    rows,
    eos,
    HEADS: tl.constexpr,
    ORDERS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    PDL: tl.constexpr,
):
    # One program: BLOCK_ROWS of all B * R rows, every head.
    start(PDL)
    at = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    head = tl.arange(0, BLOCK_HEADS)
    live = at < count
    sequence, place = at // rows, at % rows
    mixed = tl.load(tokens_ptr + at, mask=live, other=0) * tl.load(multipliers_ptr)
    hashed = tl.full((BLOCK_ROWS, BLOCK_HEADS), 0, tl.int64)
    crossed = tl.full((BLOCK_ROWS,), 0, tl.int1)
    for lag in tl.static_range(1, ORDERS):
        # one of the two addresses lies behind the sequence's edge and is not read
        inside = place >= lag
        new = tl.load(tokens_ptr + at - lag, mask=live & inside, other=0)
        before = sequence * (ORDERS - 1) + place + (ORDERS - 1 - lag)
        old = tl.load(history_ptr + before, mask=live & ~inside, other=0)
        earlier = tl.where(inside, new, old)
        earlier = tl.where(crossed, eos, earlier)
        crossed = crossed | (earlier == eos)
        mixed = mixed ^ (earlier * tl.load(multipliers_ptr + lag))
        mine = head // (HEADS // (ORDERS - 1)) == lag - 1
        hashed = tl.where(mine[None, :], mixed[:, None], hashed)
    size = tl.load(sizes_ptr + head, mask=head < HEADS, other=1)
    offset = tl.load(offsets_ptr + head, mask=head < HEADS, other=0)
    rest = hashed % size[None, :]  # has the sign of the product, torch.remainder that of the size
    rest = tl.where(rest < 0, rest + size[None, :], rest)
    mask = live[:, None] & (head < HEADS)[None, :]
    tl.store(out_ptr + at[:, None] * HEADS + head[None, :], rest + offset[None, :], mask=mask)


def ngram_rows_inputs(b: int, r: int, vocabulary: int, heads: int, device: str) -> dict[str, object]:
    """Inputs that the test, the tuner and the bench share; trigrams, end-of-text inside."""
    make = torch.Generator(device).manual_seed(0)
    sizes = torch.arange(heads, device=device) * 2 + 1009
    eos = 1

    def tokens(count: int) -> Tensor:
        drawn = torch.randint(0, vocabulary, (b, count), generator=make, device=device)
        # chance alone would put no end-of-text into a large vocabulary's tokens
        return drawn.masked_fill(torch.rand(b, count, generator=make, device=device) < 0.2, eos)

    return {
        "tokens": tokens(r),
        "history": tokens(2),
        "multipliers": torch.randint(0, 2**62 // vocabulary, (3,), generator=make, device=device) * 2 + 1,
        "sizes": sizes,
        "offsets": sizes.cumsum(0) - sizes,
        "eos": eos,
    }
