"""Attention of a sparse layer in Triton: decode steps piece by piece, in two kernels, and prompt chunks.

Source: qsa_attend.py, which has the operator and its reference.
"""

import torch
from torch import Tensor

from stepfloor.kernels._attend import PIECE
from stepfloor.kernels._jit import dependent_launch, start, tl, triton

MOST_DECODE_ROWS = 16  # more are a prompt chunk
JOINED = 16  # pieces that are joined at a time
# Programs that work on the pieces of rows that select, six a multiprocessor of an H200, and registers of a thread: so
# three run at once. 119 us a layer for 171 with half as many programs and 196 registers (16 x 4 rows of 8,192 tokens)
PROGRAMS = 792
REGISTERS = 168


def attend_triton(
    q: Tensor,
    gate: Tensor,
    selected: Tensor,
    slots: Tensor,
    first: Tensor,
    keys: Tensor,
    values: Tensor,
    page_table: Tensor,
    ratio: int,
    *,
    piece: int = PIECE,
    selecting: Tensor | None = None,
) -> Tensor:
    """Two launches; see qsa_attend.

    piece      positions; decides the bits of a decode step's rows
    selecting  the output, if only rows that select are wanted: others are left as they are
    """
    q, gate, selected = q.contiguous(), gate.contiguous(), selected.contiguous()
    keys, values, page_table = keys.contiguous(), values.contiguous(), page_table.contiguous()
    if q.shape[1] > MOST_DECODE_ROWS:
        return _attend_chunk(q, gate, selected, slots, first, keys, values, page_table, ratio)
    b, r, heads, dim = q.shape
    page, kv_heads = keys.shape[1:3]
    topk, pages = selected.shape[2], page_table.shape[1]
    # as many positions as a row can keep, and no more than there are places
    pieces = -(-min(topk * ratio + ratio - 1, pages * page) // piece)
    partial = torch.empty((b * r, pieces, heads, dim), dtype=torch.float32, device=q.device)
    # largest score and sum of weights of each piece, piece by piece for each head
    sums = torch.empty((2, b * r, heads, pieces), dtype=torch.float32, device=q.device)
    output = torch.empty((b, r, heads * dim), dtype=q.dtype, device=q.device) if selecting is None else selecting
    launch = dependent_launch(q)
    tasks = pieces * kv_heads * b * r
    _piece_kernel[(tasks if selecting is None else min(tasks, PROGRAMS),)](
        q,
        selected,
        slots,
        first,
        keys,
        values,
        page_table,
        partial,
        sums[0],
        sums[1],
        b,
        r,
        pages,
        pieces,
        dim**-0.5,
        SELECTING=selecting is not None,
        BLOCK_B=triton.next_power_of_2(page_table.shape[0]),  # of all slots: one binary for every number of sequences
        PAGE=page,
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        RATIO=ratio,
        TOPK=topk,
        PIECE=piece,
        BLOCK_H=_block_heads(heads // kv_heads),
        BLOCK_D=max(16, triton.next_power_of_2(dim)),
        num_warps=4,
        maxnreg=None if selecting is None else REGISTERS,
        **launch,
    )
    _join_kernel[(heads, b * r)](
        partial,
        sums[0],
        sums[1],
        gate,
        first,
        output,
        r,
        SELECTING=selecting is not None,
        RATIO=ratio,
        TOPK=topk,
        HEADS=heads,
        DIM=dim,
        PIECES=pieces,
        JOINED=min(JOINED, triton.next_power_of_2(pieces)),
        BLOCK_P=triton.next_power_of_2(pieces),
        BLOCK_D=triton.next_power_of_2(dim),
        num_warps=4,
        **launch,
    )
    return output


def _block_heads(group: int) -> int:
    """Rows of a product that hold the query heads of one key head; a tensor core's tile has 16."""
    return max(16, triton.next_power_of_2(group))


def _attend_chunk(
    q: Tensor,
    gate: Tensor,
    selected: Tensor,
    slots: Tensor,
    first: Tensor,
    keys: Tensor,
    values: Tensor,
    page_table: Tensor,
    ratio: int,
) -> Tensor:
    """Two launches: tiles of rows that keep everything, then the others one by one; each skips the other's rows."""
    b, r, heads, dim = q.shape
    page, kv_heads = keys.shape[1:3]
    topk, pages = selected.shape[2], page_table.shape[1]
    block_h, narrow = _block_heads(heads // kv_heads), q.dtype == torch.float32
    # float32 is multiplied without tensor cores, in small tiles
    tile_rows = 1 if narrow else max(1, 128 // block_h)
    output = torch.empty((b, r, heads * dim), dtype=q.dtype, device=q.device)
    operands = (q, gate, selected, slots, first, keys, values, page_table, output, r, pages, dim**-0.5)
    constants = {
        "PAGE": page,
        "HEADS": heads,
        "KV_HEADS": kv_heads,
        "DIM": dim,
        "RATIO": ratio,
        "TOPK": topk,
        "TILE_ROWS": tile_rows,
        "BLOCK_H": block_h,
        "BLOCK_D": max(16, triton.next_power_of_2(dim)),
        **dependent_launch(q),
    }
    _dense_kernel[(-(-r // tile_rows), kv_heads, b)](
        *operands, BLOCK_N=16 if narrow else 64, num_warps=4 if narrow else 8, **constants
    )
    _gather_kernel[(r, kv_heads, b)](*operands, BLOCK_N=16 if narrow else 64, num_warps=4, num_stages=2, **constants)
    return output


@triton.jit
def _kept(selected_ptr, j, position, RATIO: tl.constexpr, TOPK: tl.constexpr):
    """The kept positions of a row in their order: numbers j to positions, and which of them there are."""
    complete = (position + 1) // RATIO
    inside = tl.minimum(complete, TOPK) * RATIO  # positions in blocks; the tail comes behind them
    # not masked by what is visible, so that the load does not wait for the position
    block = tl.load(selected_ptr + j // RATIO, mask=j < TOPK * RATIO, other=-1)
    at = tl.where(j < inside, block * RATIO + j % RATIO, complete * RATIO + j - inside)
    return at, (j < inside + position + 1 - complete * RATIO) & ((j >= inside) | (block >= 0))


@triton.jit
def _places(page_table_ptr, at, live, pages, PAGE: tl.constexpr):
    """Where positions lie, as numbers of rows of the cache. page_table_ptr is the sequence's own row."""
    page = tl.load(page_table_ptr + tl.minimum(at // PAGE, pages - 1), mask=live, other=0)
    return page * PAGE + at % PAGE


@triton.jit(do_not_specialize=["count", "rows"])  # one binary for every number of rows
def _piece_kernel(
    q_ptr,
    selected_ptr,
    slots_ptr,
    first_ptr,
    keys_ptr,
    values_ptr,
    page_table_ptr,
    partial_ptr,
    largest_ptr,
    sum_ptr,
    count,
    rows,
    pages,
    pieces,
    scale,
    SELECTING: tl.constexpr,
    BLOCK_B: tl.constexpr,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    RATIO: tl.constexpr,
    TOPK: tl.constexpr,
    PIECE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """Pieces of rows' kept positions, each with all query heads of one key head: one, or of SELECTING rows many."""
    start(PDL)
    if SELECTING:
        b = tl.arange(0, BLOCK_B)
        last = tl.load(first_ptr + b, mask=b < count, other=0) + rows - 1
        if tl.max((last + 1) // RATIO, 0) <= TOPK:
            return  # at once, as most short texts want it: nobody selects
    GROUP: tl.constexpr = HEADS // KV_HEADS
    h = tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_D)
    for task in tl.range(tl.program_id(0), count * rows * KV_HEADS * pieces, tl.num_programs(0), num_stages=1):
        piece = task % pieces
        kv = task // pieces % KV_HEADS
        row = (task // pieces // KV_HEADS).to(tl.int64)
        position = tl.load(first_ptr + row // rows) + row % rows
        complete = (position + 1) // RATIO
        sums = (row * HEADS + kv * GROUP + h) * pieces + piece
        kept = tl.minimum(complete, TOPK) * RATIO + position + 1 - complete * RATIO
        if SELECTING:
            kept = tl.where(complete > TOPK, kept, 0)  # a row that keeps everything is nobody's here
        if piece * PIECE < kept:
            slot = tl.load(slots_ptr + row // rows)
            j = piece * PIECE + tl.arange(0, PIECE)
            head_live = (h < GROUP)[:, None] & (d < DIM)[None, :]
            heads = (kv * GROUP + h)[:, None] * DIM + d[None, :]
            q = tl.load(q_ptr + row * HEADS * DIM + heads, mask=head_live, other=0.0)
            at, live = _kept(selected_ptr + row * TOPK, j, position, RATIO, TOPK)
            places = _places(page_table_ptr + slot * pages, at, live, pages, PAGE)
            cells = (places[:, None] * KV_HEADS + kv) * DIM + d[None, :]
            cell_live = live[:, None] & (d < DIM)[None, :]
            k = tl.load(keys_ptr + cells, mask=cell_live, other=0.0).to(q.dtype)
            v = tl.load(values_ptr + cells, mask=cell_live, other=0.0).to(q.dtype)
            s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            s = tl.where(live[None, :], s, float("-inf"))
            largest = tl.max(s, 1)
            p = tl.where(live[None, :], tl.exp(s - largest[:, None]), 0.0)
            o = tl.dot(p.to(q.dtype), v, input_precision="ieee")
            tl.store(largest_ptr + sums, largest, mask=h < GROUP)
            tl.store(sum_ptr + sums, tl.sum(p, 1), mask=h < GROUP)
            tl.store(partial_ptr + (row * pieces + piece) * HEADS * DIM + heads, o, mask=head_live)
        else:
            # so that whoever joins the pieces need not know how many there are
            tl.store(largest_ptr + sums, float("-inf"), mask=h < GROUP)


@triton.jit(do_not_specialize=["rows"])  # one binary for every number of rows
def _join_kernel(
    partial_ptr,
    largest_ptr,
    sum_ptr,
    gate_ptr,
    first_ptr,
    output_ptr,
    rows,
    SELECTING: tl.constexpr,
    RATIO: tl.constexpr,
    TOPK: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PIECES: tl.constexpr,
    JOINED: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """One head of one row: its pieces in their order, then the gate."""
    start(PDL)
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    if SELECTING and (tl.load(first_ptr + row // rows) + row % rows + 1) // RATIO <= TOPK:
        return
    d = tl.arange(0, BLOCK_D)
    i = tl.arange(0, BLOCK_P)
    line = (row * HEADS + head) * PIECES
    gate = tl.load(gate_ptr + (row * HEADS + head) * DIM + d, mask=d < DIM, other=0.0)
    largest = tl.load(largest_ptr + line + i, mask=i < PIECES, other=float("-inf"))
    sums = tl.load(sum_ptr + line + i, mask=i < PIECES, other=0.0)
    most = tl.max(largest, 0)
    # a piece without positions has no sums: what lies there counts nothing
    total = tl.sum(tl.where(largest > float("-inf"), sums * tl.exp(largest - most), 0.0), 0)
    o = tl.full((BLOCK_D,), 0.0, tl.float32)
    for begin in tl.static_range(0, PIECES, JOINED):
        n = begin + tl.arange(0, JOINED)
        part = tl.load(largest_ptr + line + n, mask=n < PIECES, other=float("-inf"))
        cells = ((row * PIECES + n) * HEADS + head)[:, None] * DIM + d[None, :]
        inside = (n < PIECES)[:, None] & (d < DIM)[None, :]
        if begin > 0:
            inside = inside & (part > float("-inf"))[:, None]
        # of the first ones also those that were not written are read, rather than wait for `part`
        tile = tl.load(partial_ptr + cells, mask=inside, other=0.0)
        alive = (part > float("-inf"))[:, None]
        o += tl.sum(tl.where(alive, tile * tl.exp(part - most)[:, None], 0.0), 0)
    tl.store(output_ptr + (row * HEADS + head) * DIM + d, _gated(o / total, gate), mask=d < DIM)


@triton.jit
def _gated(o, gate):
    """float32 o, rounded, times the rounded sigmoid of the gate."""
    opened = 1.0 / (1.0 + tl.exp(-gate.to(tl.float32)))
    opened = opened.to(gate.dtype).to(tl.float32)
    return (o.to(gate.dtype).to(tl.float32) * opened).to(gate.dtype)


@triton.jit
def _keeps_all(first, tile, rows, TILE_ROWS: tl.constexpr, RATIO: tl.constexpr, TOPK: tl.constexpr):
    """Whether every row of a tile keeps all positions up to its own."""
    return (first + tl.minimum((tile + 1) * TILE_ROWS, rows)) // RATIO <= TOPK


@triton.jit(do_not_specialize=["rows"])  # one binary for every number of rows
def _dense_kernel(
    q_ptr,
    gate_ptr,
    selected_ptr,
    slots_ptr,
    first_ptr,
    keys_ptr,
    values_ptr,
    page_table_ptr,
    output_ptr,
    rows,
    pages,
    scale,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    RATIO: tl.constexpr,
    TOPK: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """TILE_ROWS rows that keep everything, times the query heads of one key head, over all positions."""
    start(PDL)
    tile, kv = tl.program_id(0), tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    first = tl.load(first_ptr + b)
    if not _keeps_all(first, tile, rows, TILE_ROWS, RATIO, TOPK):
        return
    GROUP: tl.constexpr = HEADS // KV_HEADS
    m = tl.arange(0, TILE_ROWS * BLOCK_H)
    r, h = tile * TILE_ROWS + m // BLOCK_H, m % BLOCK_H
    d = tl.arange(0, BLOCK_D)
    head_live = ((h < GROUP) & (r < rows))[:, None] & (d < DIM)[None, :]
    heads = ((b * rows + r) * HEADS + kv * GROUP + h)[:, None] * DIM + d[None, :]
    q = tl.load(q_ptr + heads, mask=head_live, other=0.0)
    page_table_ptr += tl.load(slots_ptr + b) * pages
    position = (first + tl.minimum(r, rows - 1)).to(tl.int32)
    length = (first + tl.minimum((tile + 1) * TILE_ROWS, rows)).to(tl.int32)
    largest = tl.full((TILE_ROWS * BLOCK_H,), float("-inf"), tl.float32)
    total = tl.full((TILE_ROWS * BLOCK_H,), 0.0, tl.float32)
    o = tl.full((TILE_ROWS * BLOCK_H, BLOCK_D), 0.0, tl.float32)
    for begin in range(0, length, BLOCK_N):
        at = begin + tl.arange(0, BLOCK_N)
        places = _places(page_table_ptr, at, at < length, pages, PAGE)
        cells = (places[:, None] * KV_HEADS + kv) * DIM + d[None, :]
        cell_live = (at < length)[:, None] & (d < DIM)[None, :]
        k = tl.load(keys_ptr + cells, mask=cell_live, other=0.0).to(q.dtype)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        s = tl.where(at[None, :] <= position[:, None], s, float("-inf"))
        # position 0 is everybody's, so from the first tile on there is a largest score
        most = tl.maximum(largest, tl.max(s, 1))
        p = tl.exp(s - most[:, None])
        fade = tl.exp(largest - most)
        total = total * fade + tl.sum(p, 1)
        v = tl.load(values_ptr + cells, mask=cell_live, other=0.0).to(q.dtype)
        o = tl.dot(p.to(q.dtype), v, o * fade[:, None], input_precision="ieee")
        largest = most
    gate = tl.load(gate_ptr + heads, mask=head_live, other=0.0)
    tl.store(output_ptr + heads, _gated(o / total[:, None], gate), mask=head_live)


@triton.jit(do_not_specialize=["rows"])  # one binary for every number of rows
def _gather_kernel(
    q_ptr,
    gate_ptr,
    selected_ptr,
    slots_ptr,
    first_ptr,
    keys_ptr,
    values_ptr,
    page_table_ptr,
    output_ptr,
    rows,
    pages,
    scale,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    RATIO: tl.constexpr,
    TOPK: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row whose tile keeps not everything, times the query heads of one key head, over what it selected."""
    start(PDL)
    r, kv = tl.program_id(0), tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    first = tl.load(first_ptr + b)
    if _keeps_all(first, r // TILE_ROWS, rows, TILE_ROWS, RATIO, TOPK):
        return
    GROUP: tl.constexpr = HEADS // KV_HEADS
    row = b * rows + r
    position = first + r
    h = tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_D)
    head_live = (h < GROUP)[:, None] & (d < DIM)[None, :]
    heads = (row * HEADS + kv * GROUP + h)[:, None] * DIM + d[None, :]
    q = tl.load(q_ptr + heads, mask=head_live, other=0.0)
    page_table_ptr += tl.load(slots_ptr + b) * pages
    complete = (position + 1) // RATIO
    kept = (tl.minimum(complete, TOPK) * RATIO + position + 1 - complete * RATIO).to(tl.int32)
    # lower than any score, and finite: a piece may hold no position
    largest = tl.full((BLOCK_H,), -1e38, tl.float32)
    total = tl.full((BLOCK_H,), 0.0, tl.float32)
    o = tl.full((BLOCK_H, BLOCK_D), 0.0, tl.float32)
    for begin in range(0, kept, BLOCK_N):
        at, live = _kept(selected_ptr + row * TOPK, begin + tl.arange(0, BLOCK_N), position, RATIO, TOPK)
        places = _places(page_table_ptr, at, live, pages, PAGE)
        cells = (places[:, None] * KV_HEADS + kv) * DIM + d[None, :]
        cell_live = live[:, None] & (d < DIM)[None, :]
        k = tl.load(keys_ptr + cells, mask=cell_live, other=0.0).to(q.dtype)
        v = tl.load(values_ptr + cells, mask=cell_live, other=0.0).to(q.dtype)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        s = tl.where(live[None, :], s, float("-inf"))
        most = tl.maximum(largest, tl.max(s, 1))
        p = tl.exp(s - most[:, None])
        fade = tl.exp(largest - most)
        total = total * fade + tl.sum(p, 1)
        o = tl.dot(p.to(q.dtype), v, o * fade[:, None], input_precision="ieee")
        largest = most
    gate = tl.load(gate_ptr + heads, mask=head_live, other=0.0)
    tl.store(output_ptr + heads, _gated(o / total[:, None], gate), mask=head_live)
