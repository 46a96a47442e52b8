"""What a sparse-attention layer does to its projections before it looks back: norm, rotation, cache writes.

    q, k   = rotate(norm(q)), rotate(norm(k));  v and the output gate pass unchanged
    iq     = rotate(norm(indexer query));       the raw indexer key waits until its block of `ratio` is full
    K_b    = rotate_at_first(norm(mean of the block's raw keys)), the mean rounded before the norm

Source: transformers 5.24, Qwen4ExpTextAttention and Qwen4ExpTextQSAIndexer.forward.

Keys and values are stored in the dtype of their cache: the model's, or float8_e4m3fn without a scale, saturating at
448. The kernel runs one warp per row and head, and rounds where the reference rounds; the two differ only by the order
in which a head's squares are summed.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from stepfloor.kernels._jit import dependent_launch, let_successor_in, runs_triton, tl, triton, wait
from stepfloor.kernels._torch import rms_norm, rotate


@dataclass(frozen=True, slots=True)
class SparseCache:
    """Cache of one sparse-attention layer; a page holds P tokens.

    keys, values  [pages, P, KV heads, head_dim], in the model's dtype or float8_e4m3fn
    block_keys    [pages, P / ratio, indexer_head_dim], one per complete block of `ratio` tokens
    raw_keys      [slots, ring, indexer_head_dim], raw indexer key of position p at p mod ring; ring >= ratio + k
    page_table    [slots, pages of the longest sequence] int64
    """

    keys: Tensor
    values: Tensor
    block_keys: Tensor
    raw_keys: Tensor
    page_table: Tensor


@dataclass(frozen=True, slots=True)
class SparseNorms:
    """Norm scales, float32 with 1 added: q, k [head_dim]; indexer query and key [indexer_head_dim]."""

    q: Tensor
    k: Tensor
    index_q: Tensor
    index_k: Tensor


@dataclass(frozen=True, slots=True)
class SparseShape:
    """Head counts and sizes of a sparse-attention layer."""

    heads: int
    kv_heads: int
    head_dim: int
    index_heads: int
    index_dim: int
    ratio: int
    topk: int


def qsa_prepare_reference(
    projected: Tensor,
    slots: Tensor,
    first: Tensor,
    cos: Tensor,
    sin: Tensor,
    norms: SparseNorms,
    cache: SparseCache,
    shape: SparseShape,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """One sequence after the other."""
    kv_width = shape.kv_heads * shape.head_dim
    q_gate, k, v, index_q, index_k = projected.split(
        (
            2 * shape.heads * shape.head_dim,
            kv_width,
            kv_width,
            shape.index_heads * shape.index_dim,
            shape.index_dim,
        ),
        -1,
    )
    rows = projected.shape[1]
    positions = first[:, None] + torch.arange(rows, device=first.device)  # [B, R]
    c, s = cos[positions][:, :, None], sin[positions][:, :, None]  # [B, R, 1, rotary]
    q, gate = q_gate.unflatten(-1, (shape.heads, 2, shape.head_dim)).unbind(-2)
    q = rotate(rms_norm(q, norms.q, eps), c, s)
    k = rotate(rms_norm(k.unflatten(-1, (shape.kv_heads, -1)), norms.k, eps), c, s)
    index_q = rotate(rms_norm(index_q.unflatten(-1, (shape.index_heads, -1)), norms.index_q, eps), c, s)
    page_tokens = cache.keys.shape[1]
    pages = cache.page_table[slots[:, None], positions // page_tokens]
    offsets = positions % page_tokens
    _write(cache.keys, pages, offsets, k)
    _write(cache.values, pages, offsets, v.unflatten(-1, (shape.kv_heads, -1)))
    for b in range(projected.shape[0]):
        _write_block_keys(index_k[b], int(slots[b]), int(first[b]), cos, sin, norms, cache, shape, eps)
    return q, gate.flatten(-2), index_q


def qsa_prepare(
    projected: Tensor,
    slots: Tensor,
    first: Tensor,
    cos: Tensor,
    sin: Tensor,
    norms: SparseNorms,
    cache: SparseCache,
    shape: SparseShape,
    eps: float,
    settled: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Prepare R rows of each of B sequences and write their keys, values and index keys.

    projected  [B, R, columns]: per query head its query then its gate; k; v; indexer queries; indexer key
    slots      [B] int64; first [B] int64, position of each sequence's first row
    cos, sin   [positions, rotary] in the dtype of projected
    settled    whether whatever last wrote slots, first, the page table and these slots' raw keys ran before something
               that nothing overtakes, and that before this call (see gdn_decode); the kernel then reads them before
               its predecessor has ended
    Returns q [B, R, H, head_dim], gate [B, R, H * head_dim], indexer queries [B, R, index heads, index dim].
    Block keys that the rows complete are written before this returns, so a row sees its own block.
    Raises ValueError if the columns do not match the shape, slots and first the rows, or a cache is not contiguous.
    """
    columns = (2 * shape.heads + 2 * shape.kv_heads) * shape.head_dim + (shape.index_heads + 1) * shape.index_dim
    if projected.ndim != 3 or projected.shape[-1] != columns:
        raise ValueError(f"qsa_prepare wants projected [B, R, {columns}]; got {tuple(projected.shape)}")
    if slots.shape != projected.shape[:1] or first.shape != slots.shape:
        raise ValueError(
            f"qsa_prepare wants slots and first [{projected.shape[0]}]; got {tuple(slots.shape)}, {tuple(first.shape)}"
        )
    if runs_triton(projected):
        return qsa_prepare_triton(projected, slots, first, cos, sin, norms, cache, shape, eps, settled)
    return qsa_prepare_reference(projected, slots, first, cos, sin, norms, cache, shape, eps)


def qsa_prepare_triton(
    projected: Tensor,
    slots: Tensor,
    first: Tensor,
    cos: Tensor,
    sin: Tensor,
    norms: SparseNorms,
    cache: SparseCache,
    shape: SparseShape,
    eps: float,
    settled: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """One launch; see qsa_prepare."""
    for name in ("keys", "values", "block_keys", "raw_keys", "page_table"):
        if not getattr(cache, name).is_contiguous():
            raise ValueError(f"qsa_prepare writes {name} in place and wants it contiguous")
    b, r, columns = projected.shape
    projected = projected.contiguous()
    q = torch.empty((b, r, shape.heads, shape.head_dim), dtype=projected.dtype, device=projected.device)
    gate = torch.empty((b, r, shape.heads * shape.head_dim), dtype=projected.dtype, device=projected.device)
    index_q = torch.empty((b, r, shape.index_heads, shape.index_dim), dtype=projected.dtype, device=projected.device)
    ring, rotary = cache.raw_keys.shape[1], cos.shape[1]
    units = 1 + shape.kv_heads + shape.index_heads + shape.heads
    _prepare_kernel[(units * r, b)](
        projected,
        slots,
        first,
        cos.contiguous(),
        sin.contiguous(),
        norms.q,
        norms.k,
        norms.index_q,
        norms.index_k,
        cache.keys,
        cache.values,
        cache.block_keys,
        cache.raw_keys,
        cache.page_table,
        q,
        gate,
        index_q,
        columns,
        cache.page_table.shape[1],
        eps,
        PAGE=cache.keys.shape[1],
        HEADS=shape.heads,
        KV_HEADS=shape.kv_heads,
        DIM=shape.head_dim,
        INDEX_HEADS=shape.index_heads,
        INDEX_DIM=shape.index_dim,
        RATIO=shape.ratio,
        RING=ring,
        ROTARY=rotary,
        UNITS=units,
        BLOCK_D=triton.next_power_of_2(shape.head_dim),
        BLOCK_I=triton.next_power_of_2(shape.index_dim),
        BLOCK_HALF=triton.next_power_of_2(rotary // 2),
        BLOCK_RING=triton.next_power_of_2(ring),
        SETTLED=settled,
        num_warps=1,
        **dependent_launch(projected),
    )
    return q, gate, index_q


@triton.jit
def _prepare_kernel(
    projected_ptr,
    slots_ptr,
    first_ptr,
    cos_ptr,
    sin_ptr,
    norm_q_ptr,
    norm_k_ptr,
    norm_index_q_ptr,
    norm_index_k_ptr,
    keys_ptr,
    values_ptr,
    block_keys_ptr,
    raw_keys_ptr,
    page_table_ptr,
    q_ptr,
    gate_ptr,
    index_q_ptr,
    columns,
    pages,
    eps,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    INDEX_HEADS: tl.constexpr,
    INDEX_DIM: tl.constexpr,
    RATIO: tl.constexpr,
    RING: tl.constexpr,
    ROTARY: tl.constexpr,
    UNITS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_RING: tl.constexpr,
    SETTLED: tl.constexpr,
    PDL: tl.constexpr,
):
    # One program per row and unit: the index key first (it does most), then KV, indexer, query. In each, everything
    # that the predecessor did not write is read before the wait, what it wrote in one go behind: one load's latency.
    let_successor_in(PDL)
    wait(PDL and not SETTLED)
    unit = tl.program_id(0) % UNITS
    r = tl.program_id(0) // UNITS
    rows = tl.num_programs(0) // UNITS
    b = tl.program_id(1)
    row = b.to(tl.int64) * rows + r  # rows * columns passes 2**31
    first = tl.load(first_ptr + b)
    position = first + r
    projected_ptr += row * columns
    kv_ptr = projected_ptr + 2 * HEADS * DIM
    index_ptr = kv_ptr + 2 * KV_HEADS * DIM
    waits: tl.constexpr = PDL and SETTLED
    if unit == 0:
        slot = tl.load(slots_ptr + b)
        index_ptr += INDEX_HEADS * INDEX_DIM
        i = tl.arange(0, BLOCK_I)
        # A block belongs to the row it starts at, or to row 0 if it was open before: `base` is its first row.
        base = r - (position % RATIO).to(tl.int32)
        every = tl.full([], True, tl.int1)
        # `every` on the left: what the interpreter spreads over a tile is then a boolean
        complete = every & ((r == 0) | (base == r)) & (base + RATIO <= rows)
        begin = first + base
        block = begin // RATIO
        page = tl.load(page_table_ptr + slot * pages + tl.minimum(block // (PAGE // RATIO), pages - 1))
        to = (page * (PAGE // RATIO) + block % (PAGE // RATIO)) * INDEX_DIM
        scales = _load_head(norm_index_k_ptr, every, INDEX_DIM, ROTARY, BLOCK_I, BLOCK_HALF)
        turns = _load_turns(cos_ptr, sin_ptr, begin, complete, ROTARY, BLOCK_HALF)
        # Raw keys are added in their order, those before row 0 from the ring.
        ring_ptr = raw_keys_ptr + slot * RING * INDEX_DIM
        phase = (first % RING).to(tl.int32)
        half = tl.zeros([BLOCK_HALF], tl.float32)
        total = (tl.zeros([BLOCK_I], tl.float32), half, half)
        for j in tl.static_range(RATIO):
            kept = phase + base + j
            kept_ptr = ring_ptr + tl.where(kept < 0, kept + RING, kept) * INDEX_DIM
            old = _load_head(kept_ptr, complete & (base + j < 0), INDEX_DIM, ROTARY, BLOCK_I, BLOCK_HALF)
            total = _added(total, old)
        wait(waits)
        for j in tl.static_range(RATIO):
            new_ptr = index_ptr + (base + j - r).to(tl.int64) * columns
            new = _load_head(new_ptr, complete & (base + j >= 0), INDEX_DIM, ROTARY, BLOCK_I, BLOCK_HALF)
            total = _added(total, new)
        kept_rows = tl.minimum(rows, RING)
        place = tl.arange(0, BLOCK_RING)[:, None]
        keep = rows - kept_rows + place
        live = (every & (r == 0)) & (place < kept_rows) & (i < INDEX_DIM)[None, :]
        raw = tl.load(index_ptr + keep.to(tl.int64) * columns + i[None, :], mask=live, other=0.0)
        dtype: tl.constexpr = projected_ptr.dtype.element_ty
        mean = ((total[0] / RATIO).to(dtype), (total[1] / RATIO).to(dtype), (total[2] / RATIO).to(dtype))
        key = _norm_turn(mean, scales, turns, eps, INDEX_DIM)
        _store_head(block_keys_ptr + to, key, complete, INDEX_DIM, ROTARY, BLOCK_I, BLOCK_HALF)
        # The same program that read the open block's raw keys, and after it: many rows overwrite the whole ring.
        tl.debug_barrier()
        at = (phase + keep) % RING * INDEX_DIM + i[None, :]
        tl.store(ring_ptr + at, raw.to(raw_keys_ptr.dtype.element_ty), mask=live)
    elif unit <= KV_HEADS:
        head = unit - 1
        slot = tl.load(slots_ptr + b)
        page = tl.load(page_table_ptr + slot * pages + tl.minimum(position // PAGE, pages - 1))
        to = ((page * PAGE + position % PAGE) * KV_HEADS + head) * DIM
        x_ptr, beside_ptr = kv_ptr + head * DIM, kv_ptr + (KV_HEADS + head) * DIM
        _head(
            x_ptr,
            keys_ptr + to,
            beside_ptr,
            values_ptr + to,
            (norm_k_ptr, cos_ptr, sin_ptr),
            position,
            eps,
            DIM,
            ROTARY,
            BLOCK_D,
            BLOCK_HALF,
            waits,
        )
    elif unit <= KV_HEADS + INDEX_HEADS:
        head = unit - 1 - KV_HEADS
        x_ptr, to_ptr = index_ptr + head * INDEX_DIM, index_q_ptr + (row * INDEX_HEADS + head) * INDEX_DIM
        _head(
            x_ptr,
            to_ptr,
            None,
            None,
            (norm_index_q_ptr, cos_ptr, sin_ptr),
            position,
            eps,
            INDEX_DIM,
            ROTARY,
            BLOCK_I,
            BLOCK_HALF,
            waits,
        )
    else:
        head = unit - 1 - KV_HEADS - INDEX_HEADS
        x_ptr, to = projected_ptr + 2 * head * DIM, (row * HEADS + head) * DIM
        _head(
            x_ptr,
            q_ptr + to,
            x_ptr + DIM,
            gate_ptr + to,
            (norm_q_ptr, cos_ptr, sin_ptr),
            position,
            eps,
            DIM,
            ROTARY,
            BLOCK_D,
            BLOCK_HALF,
            waits,
        )


@triton.jit
def _head(
    x_ptr,
    to_ptr,
    beside_ptr,
    beside_to_ptr,
    tables,
    position,
    eps,
    DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    WAIT: tl.constexpr,
):
    """Norm and turn one head; the values beside it, if there are any, are stored as they are. Waits itself."""
    i, every = tl.arange(0, BLOCK), tl.full([], True, tl.int1)
    scales = _load_head(tables[0], every, DIM, ROTARY, BLOCK, BLOCK_HALF)
    turns = _load_turns(tables[1], tables[2], position, every, ROTARY, BLOCK_HALF)
    wait(WAIT)
    head = _load_head(x_ptr, every, DIM, ROTARY, BLOCK, BLOCK_HALF)
    if beside_ptr is not None:
        beside = tl.load(beside_ptr + i, mask=i < DIM, other=0.0)
        tl.store(beside_to_ptr + i, _stored(beside.to(tl.float32), beside_to_ptr.dtype.element_ty), mask=i < DIM)
    head = _norm_turn(head, scales, turns, eps, DIM)
    _store_head(to_ptr, head, every, DIM, ROTARY, BLOCK, BLOCK_HALF)


@triton.jit
def _load_head(x_ptr, live, DIM: tl.constexpr, ROTARY: tl.constexpr, BLOCK: tl.constexpr, BLOCK_HALF: tl.constexpr):
    """A head, then once more the two halves that are rotated with each other: three loads that none waits for."""
    i, h = tl.arange(0, BLOCK), tl.arange(0, BLOCK_HALF)
    turned = live & (h < ROTARY // 2)
    lower = tl.load(x_ptr + h, mask=turned, other=0.0)
    upper = tl.load(x_ptr + ROTARY // 2 + h, mask=turned, other=0.0)
    return tl.load(x_ptr + i, mask=live & (i < DIM), other=0.0), lower, upper


@triton.jit
def _load_turns(cos_ptr, sin_ptr, position, live, ROTARY: tl.constexpr, BLOCK_HALF: tl.constexpr):
    """cos of both halves, sin of both halves, float32."""
    h = tl.arange(0, BLOCK_HALF)
    at, turned = position * ROTARY + h, live & (h < ROTARY // 2)
    cos_lower = tl.load(cos_ptr + at, mask=turned, other=0.0).to(tl.float32)
    cos_upper = tl.load(cos_ptr + at + ROTARY // 2, mask=turned, other=0.0).to(tl.float32)
    sin_lower = tl.load(sin_ptr + at, mask=turned, other=0.0).to(tl.float32)
    sin_upper = tl.load(sin_ptr + at + ROTARY // 2, mask=turned, other=0.0).to(tl.float32)
    return cos_lower, cos_upper, sin_lower, sin_upper


@triton.jit
def _added(total, key):
    return total[0] + key[0].to(tl.float32), total[1] + key[1].to(tl.float32), total[2] + key[2].to(tl.float32)


@triton.jit
def _norm_turn(head, scales, turns, eps, DIM: tl.constexpr):
    """A head as _load_head gives it, normed, its halves turned: float32 numbers of the dtype it came in."""
    dtype: tl.constexpr = head[0].dtype
    x = head[0].to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, 0) / DIM + eps)
    whole = _normed(x, rstd, scales[0], dtype)
    lower, upper = _normed(head[1], rstd, scales[1], dtype), _normed(head[2], rstd, scales[2], dtype)
    return (
        whole,
        _turned(lower, -upper, turns[0], turns[2], dtype),
        _turned(upper, lower, turns[1], turns[3], dtype),
    )


@triton.jit
def _normed(x, rstd, scale, dtype: tl.constexpr):
    return (x.to(tl.float32) * rstd * scale).to(dtype).to(tl.float32)


@triton.jit
def _turned(x, other, cos, sin, dtype: tl.constexpr):
    rotated = (x * cos).to(dtype).to(tl.float32) + (other * sin).to(dtype).to(tl.float32)
    return rotated.to(dtype).to(tl.float32)


@triton.jit
def _store_head(
    to_ptr, head, live, DIM: tl.constexpr, ROTARY: tl.constexpr, BLOCK: tl.constexpr, BLOCK_HALF: tl.constexpr
):
    """The turned halves, and of the whole head what is not turned."""
    i, h = tl.arange(0, BLOCK), tl.arange(0, BLOCK_HALF)
    dtype: tl.constexpr = to_ptr.dtype.element_ty
    turned = live & (h < ROTARY // 2)
    tl.store(to_ptr + i, _stored(head[0], dtype), mask=live & (i >= ROTARY) & (i < DIM))
    tl.store(to_ptr + h, _stored(head[1], dtype), mask=turned)
    tl.store(to_ptr + ROTARY // 2 + h, _stored(head[2], dtype), mask=turned)


@triton.jit
def _stored(x, dtype: tl.constexpr):
    """float32 x as the cache keeps it."""
    if dtype == tl.float8e4nv:
        x = tl.clamp(x, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    return x.to(dtype)


def qsa_prepare_inputs(
    b: int, r: int, context: int, shape: SparseShape, dtype: torch.dtype, device: str
) -> dict[str, object]:
    """Inputs that the test, the tuner and the bench share; the cache holds random rows before `context`."""
    make = torch.Generator(device).manual_seed(0)

    def rand(*size: int) -> Tensor:
        return torch.randn(*size, generator=make, device=device)

    page, rotary = 4 * shape.ratio, min(shape.head_dim, shape.index_dim) // 2
    pages = -(-(context + r) // page)
    columns = (2 * shape.heads + 2 * shape.kv_heads) * shape.head_dim + (shape.index_heads + 1) * shape.index_dim
    angle = torch.arange(context + r, device=device)[:, None] * 0.1 ** torch.arange(rotary // 2, device=device)
    angle = torch.cat((angle, angle), -1)
    total = 1 + b * pages
    return {
        "projected": rand(b, r, columns).to(dtype),
        "slots": torch.arange(1, b + 1, device=device),
        "first": torch.full((b,), context, device=device),
        "cos": angle.cos().to(dtype),
        "sin": angle.sin().to(dtype),
        "norms": SparseNorms(
            *(1 + 0.1 * rand(n) for n in (shape.head_dim, shape.head_dim, shape.index_dim, shape.index_dim))
        ),
        "cache": SparseCache(
            rand(total, page, shape.kv_heads, shape.head_dim).to(dtype),
            rand(total, page, shape.kv_heads, shape.head_dim).to(dtype),
            rand(total, page // shape.ratio, shape.index_dim).to(dtype),
            # as allocated: ratio + drafts, fewer than a chunk has rows
            rand(b + 1, shape.ratio + min(r, 8) - 1, shape.index_dim).to(dtype),
            # page 0 is nobody's
            torch.cat(
                (
                    torch.zeros(1, pages, dtype=torch.int64, device=device),
                    1 + torch.randperm(b * pages, generator=make, device=device).reshape(b, pages),
                )
            ),
        ),
        "shape": shape,
        "eps": 1e-6,
    }


def _write(cache: Tensor, pages: Tensor, offsets: Tensor, rows: Tensor) -> None:
    """Store rows at their places. Not every cast to float8_e4m3fn saturates, some give NaN above 448: cut first."""
    if cache.dtype == torch.float8_e4m3fn:
        rows = rows.clamp(-448.0, 448.0)
    cache[pages, offsets] = rows.to(cache.dtype)


def _write_block_keys(
    index_k: Tensor,
    slot: int,
    first: int,
    cos: Tensor,
    sin: Tensor,
    norms: SparseNorms,
    cache: SparseCache,
    shape: SparseShape,
    eps: float,
) -> None:
    """Pool the blocks that these rows complete, then leave the last raw keys in the ring. index_k [R, dim]."""
    ratio, ring = shape.ratio, cache.raw_keys.shape[1]
    rows = index_k.shape[0]
    block, opened = first // ratio, first % ratio
    before = torch.arange(first - opened, first, device=index_k.device) % ring
    raw = torch.cat((cache.raw_keys[slot, before], index_k))
    complete = (opened + rows) // ratio
    if complete:
        pooled = raw[: complete * ratio].unflatten(0, (complete, ratio)).float().mean(1).to(raw.dtype)
        blocks = torch.arange(block, block + complete, device=index_k.device)
        starts = blocks * ratio
        keys = rotate(rms_norm(pooled, norms.index_k, eps), cos[starts], sin[starts])
        blocks_per_page = cache.block_keys.shape[1]
        cache.block_keys[cache.page_table[slot, blocks // blocks_per_page], blocks % blocks_per_page] = keys
    kept = min(rows, ring)
    last = torch.arange(first + rows - kept, first + rows, device=index_k.device) % ring
    cache.raw_keys[slot, last] = index_k[rows - kept :]
