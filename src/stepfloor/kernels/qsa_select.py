"""Block selection of sparse attention: which complete blocks of the past a query row reads.

    n        = (t + 1) div ratio                          blocks complete at the query, its own included
    score_b  = Σ over index heads of relu(iq_h · K_b) / sqrt(index dim)      float32
    selected = the min(topk, n) best; among equal scores the lower block first

Source: transformers 5.24, Qwen4ExpTextQSAIndexer.forward. The tie rule is ours, the source leaves it open.

On a GPU two kernels, or one where the page table holds no more than topk blocks:
1. Scores, a row tile times a few tiles of blocks per program. A tile has as many rows for one row as for sixteen,
   and a score is summed in one order wherever its block lies, so it does not depend on B, R or the context.
2. The best of a row. A non-negative float32 and its bits, read as an integer, order alike, so the score of the last
   block that fits is found by bisection of the integers, and one prefix sum gives the chosen blocks their places. A row
   of more than PIECE blocks is cut into pieces; the piece that ends last chooses among what the pieces chose. This is
   exact, ties included: a piece's own rule drops no block that the row's rule would keep.
A row that may keep every block is not scored. Scores differ from the reference's in their last bits (another order of
sums), so near ties may be decided otherwise. More than MOST_DECODE_ROWS rows are a prompt chunk: its tiles have more
rows, and its scores may then differ in their last bits from those of the same row alone.
"""

import torch
from torch import Tensor

from stepfloor.kernels._jit import dependent_launch, runs_triton, start, tl, triton

MOST_DECODE_ROWS = 16
GROUPS = 264  # programs that score a step's blocks, two a multiprocessor of an H200
SMALL = 4096  # blocks of a row that one program chooses from with few registers
PIECE = 8192  # and with twice as many
WORKSPACE_BYTES = 200 * 2**20  # scores of a prompt chunk that are kept at one time


def qsa_select_reference(
    index_q: Tensor, slots: Tensor, first: Tensor, block_keys: Tensor, page_table: Tensor, ratio: int, topk: int
) -> Tensor:
    """Row by row; a row that may keep all its blocks is not scored."""
    count, rows, _, dim = index_q.shape
    selected = torch.full((count, rows, topk), -1, dtype=torch.int64, device=index_q.device)
    blocks_per_page = block_keys.shape[1]
    for b in range(count):
        start = int(first[b])
        most = (start + rows) // ratio
        keys = None
        for r in range(rows):
            visible = (start + r + 1) // ratio
            if visible <= topk:
                selected[b, r, :visible] = torch.arange(visible, device=index_q.device)
                continue
            if keys is None:
                blocks = torch.arange(most, device=index_q.device)
                keys = block_keys[page_table[slots[b], blocks // blocks_per_page], blocks % blocks_per_page].float()
            # no matrix product: a block's score must not depend on how many blocks there are
            dots = (keys[:visible, None] * index_q[b, r].float()).sum(-1)  # [visible, index heads]
            scores = dots.relu().sum(-1) / dim**0.5
            best = torch.sort(scores, descending=True, stable=True).indices[:topk]
            selected[b, r] = best.sort().values
    return selected


def qsa_select(
    index_q: Tensor, slots: Tensor, first: Tensor, block_keys: Tensor, page_table: Tensor, ratio: int, topk: int
) -> Tensor:
    """Choose the blocks each of R rows of B sequences attends to, beside its open tail.

    index_q     [B, R, index heads, index dim], normed and rotated
    slots       [B] int64; first [B] int64, position of each sequence's first row
    block_keys  [pages, blocks a page, index dim]; page_table [slots, pages] int64
    ratio       tokens per block; topk  blocks a row may select
    Returns [B, R, topk] int64 block numbers ascending, -1 behind the last. Raises ValueError on a bad rank.
    """
    if index_q.ndim != 4 or slots.shape != index_q.shape[:1] or first.shape != slots.shape:
        raise ValueError(
            f"qsa_select wants index_q [B, R, heads, dim], slots [B], first [B]; got "
            f"{tuple(index_q.shape)}, {tuple(slots.shape)}, {tuple(first.shape)}"
        )
    if runs_triton(index_q):
        return qsa_select_triton(index_q, slots, first, block_keys, page_table, ratio, topk)
    return qsa_select_reference(index_q, slots, first, block_keys, page_table, ratio, topk)


def qsa_select_triton(
    index_q: Tensor,
    slots: Tensor,
    first: Tensor,
    block_keys: Tensor,
    page_table: Tensor,
    ratio: int,
    topk: int,
    *,
    small: int = SMALL,
    piece: int = PIECE,
    workspace_bytes: int = WORKSPACE_BYTES,
) -> Tensor:
    """Two launches for every run of rows whose scores fit the workspace; see qsa_select.

    small, piece and workspace_bytes change which program does what, and no result.
    """
    b, r, heads, dim = index_q.shape
    index_q, block_keys, page_table = index_q.contiguous(), block_keys.contiguous(), page_table.contiguous()
    per_page, pages = block_keys.shape[1], page_table.shape[1]
    width = pages * per_page
    selected = torch.empty((b, r, topk), dtype=torch.int64, device=index_q.device)
    tile_rows, tile_blocks = _tile(r, index_q.dtype)
    piece = min(piece, triton.next_power_of_2(width))
    rows = min(r, max(tile_rows, workspace_bytes // (4 * width * b) // tile_rows * tile_rows))
    pieces = -(-width // piece)
    scores = torch.empty((b, rows, width), dtype=torch.float32, device=index_q.device)
    # a row's count of finished pieces (zeroed by the kernel before), and the scores and numbers of what they chose
    arrived = torch.empty((b, rows), dtype=torch.int32, device=index_q.device)
    candidates = torch.empty((2, b, rows, pieces * topk), dtype=torch.int32, device=index_q.device)
    launch = dependent_launch(index_q)
    for row in range(0, r, rows):
        count = min(rows, r - row)
        tiles = -(-count // tile_rows)
        if width > topk:
            groups = min(-(-width // tile_blocks), max(1, GROUPS // (b * tiles)))
            _score_kernel[(groups, b * tiles)](
                index_q,
                slots,
                first,
                block_keys,
                page_table,
                scores,
                arrived,
                r,
                row,
                count,
                rows,
                pages,
                PER_PAGE=per_page,
                ROOT=dim**0.5,
                HEADS=heads,
                DIM=dim,
                RATIO=ratio,
                TOPK=topk,
                BLOCK_M=tile_rows,
                BLOCK_N=tile_blocks,
                BLOCK_I=max(16, triton.next_power_of_2(dim)),
                num_warps=4,
                **launch,
            )
        # a chunk has rows enough for all multiprocessors: one program goes through a row's pieces
        _choose_kernel[(pieces if r <= MOST_DECODE_ROWS else 1, b * count)](
            scores,
            first,
            selected,
            arrived,
            candidates[0],
            candidates[1],
            r,
            row,
            count,
            rows,
            width,
            RATIO=ratio,
            TOPK=topk,
            BLOCK_K=triton.next_power_of_2(topk),
            SMALL=min(small, piece),
            PIECE=piece,
            PIECES=pieces,
            BLOCK_FINAL=triton.next_power_of_2(pieces * topk),
            num_warps=16,
            **launch,
        )
    return selected


def _tile(rows: int, dtype: torch.dtype) -> tuple[int, int]:
    """Rows and blocks that are scored at once; float32 is multiplied without tensor cores, in small tiles."""
    if dtype == torch.float32:
        return 16, 32
    return (16, 128) if rows <= MOST_DECODE_ROWS else (64, 64)


@triton.jit(do_not_specialize=["rows", "row0", "count", "stride"])  # one binary for every number of rows
def _score_kernel(
    index_q_ptr,
    slots_ptr,
    first_ptr,
    block_keys_ptr,
    page_table_ptr,
    scores_ptr,
    arrived_ptr,
    rows,
    row0,
    count,
    stride,
    pages,
    PER_PAGE: tl.constexpr,
    ROOT: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    RATIO: tl.constexpr,
    TOPK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_I: tl.constexpr,
    PDL: tl.constexpr,
):
    """Scores [B, stride, pages * PER_PAGE] of rows row0 .. row0 + count - 1 of each sequence."""
    start(PDL)
    group = tl.program_id(0)
    tiles = tl.cdiv(count, BLOCK_M)
    b = (tl.program_id(1) // tiles).to(tl.int64)
    m = tl.program_id(1) % tiles * BLOCK_M + tl.arange(0, BLOCK_M)  # rows, counted from row0
    first = tl.load(first_ptr + b)
    last = tl.minimum((tl.program_id(1) % tiles + 1) * BLOCK_M, count)
    visible = tl.minimum((first + row0 + last) // RATIO, pages * PER_PAGE).to(tl.int32)
    if visible <= TOPK:
        return
    slot = tl.load(slots_ptr + b)
    if group == 0:
        tl.store(arrived_ptr + b * stride + m, 0, mask=m < count)
    i = tl.arange(0, BLOCK_I)
    q_ptr = index_q_ptr + ((b * rows + row0 + m)[:, None] * HEADS * DIM + i[None, :])
    q_live = (m < count)[:, None] & (i < DIM)[None, :]
    to = scores_ptr + (b * stride + m)[:, None] * (pages * PER_PAGE)
    for tile in tl.range(group, tl.cdiv(visible, BLOCK_N), tl.num_programs(0), num_stages=1):
        n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        page = tl.load(page_table_ptr + slot * pages + n // PER_PAGE, mask=n < visible, other=0)
        at = (page * PER_PAGE + n % PER_PAGE) * DIM
        live = (n < visible)[:, None] & (i < DIM)[None, :]
        keys = tl.load(block_keys_ptr + at[:, None] + i[None, :], mask=live, other=0.0)
        score = tl.full((BLOCK_M, BLOCK_N), 0.0, tl.float32)
        for head in tl.static_range(HEADS):
            q = tl.load(q_ptr + head * DIM, mask=q_live, other=0.0)
            score += tl.maximum(tl.dot(q, tl.trans(keys), input_precision="ieee"), 0.0)
        keep = (m < count)[:, None] & (n < visible)[None, :]
        tl.store(to + n[None, :], tl.div_rn(score, tl.full((BLOCK_M, BLOCK_N), ROOT, tl.float32)), mask=keep)


@triton.jit(do_not_specialize=["rows", "row0", "count", "stride"])  # one binary for every number of rows
def _choose_kernel(
    scores_ptr,
    first_ptr,
    selected_ptr,
    arrived_ptr,
    candidate_bits_ptr,
    candidate_blocks_ptr,
    rows,
    row0,
    count,
    stride,
    width,
    RATIO: tl.constexpr,
    TOPK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SMALL: tl.constexpr,
    PIECE: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK_FINAL: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row per program, and of its pieces one, or as many as there are programs too few."""
    start(PDL)
    piece = tl.program_id(0)
    b = (tl.program_id(1) // count).to(tl.int64)
    row = tl.program_id(1) % count
    visible = (tl.load(first_ptr + b) + row0 + row + 1) // RATIO
    visible = tl.minimum(visible, width).to(tl.int32)
    selected_ptr += (b * rows + row0 + row) * TOPK
    line = b * stride + row
    bits_ptr = (scores_ptr + line * width).to(tl.pointer_type(tl.int32))
    if visible <= TOPK:
        if piece == 0:
            k = tl.arange(0, BLOCK_K)
            tl.store(selected_ptr + k, tl.where(k < visible, k, -1).to(tl.int64), mask=k < TOPK)
    elif visible <= SMALL:
        if piece == 0:
            _choose_all(bits_ptr, selected_ptr, visible, TOPK, SMALL)
    elif visible <= PIECE:
        if piece == 0:
            _choose_all(bits_ptr, selected_ptr, visible, TOPK, PIECE)
    elif piece * PIECE < visible:
        candidate_bits_ptr += line * PIECES * TOPK
        candidate_blocks_ptr += line * PIECES * TOPK
        programs = tl.num_programs(0)
        for p in tl.range(piece, tl.cdiv(visible, PIECE), programs, num_stages=1):
            _choose_piece(bits_ptr, candidate_bits_ptr, candidate_blocks_ptr, p, visible, TOPK, PIECE)
        # all of this program's stores come before its count, and the last count before the loads below
        tl.debug_barrier()
        before = tl.atomic_add(arrived_ptr + line, 1, sem="acq_rel")
        if before == tl.minimum(tl.cdiv(visible, PIECE), programs) - 1:
            tl.debug_barrier()
            _choose_final(candidate_bits_ptr, candidate_blocks_ptr, selected_ptr, visible, TOPK, PIECE, BLOCK_FINAL)


@triton.jit
def _choose_all(bits_ptr, selected_ptr, visible, TOPK: tl.constexpr, N: tl.constexpr):
    n = tl.arange(0, N)
    chosen, place = _best(tl.load(bits_ptr + n, mask=n < visible, other=-1), TOPK)
    tl.store(selected_ptr + place, n.to(tl.int64), mask=chosen)


@triton.jit
def _choose_piece(
    bits_ptr, candidate_bits_ptr, candidate_blocks_ptr, piece, visible, TOPK: tl.constexpr, PIECE: tl.constexpr
):
    n = tl.arange(0, PIECE)
    here = tl.minimum(visible - piece * PIECE, PIECE)
    bits = tl.load(bits_ptr + piece * PIECE + n, mask=n < here, other=-1)
    chosen, place = _best(bits, tl.minimum(here, TOPK))
    tl.store(candidate_bits_ptr + piece * TOPK + place, bits, mask=chosen)
    tl.store(candidate_blocks_ptr + piece * TOPK + place, piece * PIECE + n, mask=chosen)


@triton.jit
def _choose_final(
    candidate_bits_ptr,
    candidate_blocks_ptr,
    selected_ptr,
    visible,
    TOPK: tl.constexpr,
    PIECE: tl.constexpr,
    N: tl.constexpr,
):
    n = tl.arange(0, N)
    live = n % TOPK < visible - n // TOPK * PIECE  # a piece has as many candidates as blocks, and at most TOPK
    # .cg: past the L1, where other programs' stores do not arrive
    bits = tl.load(candidate_bits_ptr + n, mask=live, other=-1, cache_modifier=".cg")
    block = tl.load(candidate_blocks_ptr + n, mask=live, other=0, cache_modifier=".cg")
    chosen, place = _best(bits, TOPK)
    tl.store(selected_ptr + place, block.to(tl.int64), mask=chosen)


@triton.jit
def _best(bits, wanted):
    """The `wanted` largest of `bits` (at least as many are not negative), the first among equals: mask and places."""
    low = tl.max(bits, 0)
    high = low + 1
    low = low * 0
    # invariant: at least `wanted` reach low, fewer reach high; a middle that exactly `wanted` reach ends the search
    while high - low > 1:
        middle = low + (high - low) // 2
        reached = tl.sum((bits >= middle).to(tl.int32), 0)
        low = tl.where(reached >= wanted, middle, low)
        high = tl.where(reached == wanted, middle + 1, tl.where(reached > wanted, high, middle))
    above = (bits > low).to(tl.int32)
    equal = (bits == low).to(tl.int32)
    rest = wanted - tl.sum(above, 0)
    # both counts in one prefix sum: there are less than 2**16 numbers, and less than 2**15 are above
    both = above * 65536 + equal
    before = tl.cumsum(both, 0) - both
    equal_before = before & 65535
    chosen = (above + tl.where(equal_before < rest, equal, 0)) > 0
    return chosen, (before >> 16) + tl.minimum(equal_before, rest)


def qsa_select_inputs(
    b: int, r: int, context: int, heads: int, dim: int, ratio: int, topk: int, dtype: torch.dtype, device: str
) -> dict[str, object]:
    """Inputs that the test, the tuner and the bench share."""
    make = torch.Generator(device).manual_seed(0)
    per_page = 4
    pages = -(-(context + r) // (ratio * per_page))
    table = 1 + torch.randperm(b * pages, generator=make, device=device).reshape(b, pages)
    return {
        "index_q": torch.randn(b, r, heads, dim, generator=make, device=device).to(dtype),
        "slots": torch.arange(1, b + 1, device=device),
        "first": torch.full((b,), context, device=device),
        "block_keys": torch.randn(1 + b * pages, per_page, dim, generator=make, device=device).to(dtype),
        "page_table": torch.cat((torch.zeros_like(table[:1]), table)),
        "ratio": ratio,
        "topk": topk,
    }
