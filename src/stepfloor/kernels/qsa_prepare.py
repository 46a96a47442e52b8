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

from stepfloor.kernels._jit import dependent_launch, runs_triton, start, tl, triton
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
) -> tuple[Tensor, Tensor, Tensor]:
    """Prepare R rows of each of B sequences and write their keys, values and index keys.

    projected  [B, R, columns]: per query head its query then its gate; k; v; indexer queries; indexer key
    slots      [B] int64; first [B] int64, position of each sequence's first row
    cos, sin   [positions, rotary] in the dtype of projected
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
        return qsa_prepare_triton(projected, slots, first, cos, sin, norms, cache, shape, eps)
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
    ring = cache.raw_keys.shape[1]
    units = 1 + shape.kv_heads + shape.index_heads + shape.heads
    _prepare_kernel[(units, b * r)](
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
        r,
        columns,
        cache.page_table.shape[1],
        ring,
        eps,
        PAGE=cache.keys.shape[1],
        HEADS=shape.heads,
        KV_HEADS=shape.kv_heads,
        DIM=shape.head_dim,
        INDEX_HEADS=shape.index_heads,
        INDEX_DIM=shape.index_dim,
        RATIO=shape.ratio,
        ROTARY=cos.shape[1],
        BLOCK_D=triton.next_power_of_2(shape.head_dim),
        BLOCK_I=triton.next_power_of_2(shape.index_dim),
        BLOCK_RING=triton.next_power_of_2(ring),
        num_warps=1,
        **dependent_launch(projected),
    )
    return q, gate, index_q


@triton.jit(do_not_specialize=["rows"])  # one binary for every number of rows
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
    rows,
    columns,
    pages,
    ring,
    eps,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    INDEX_HEADS: tl.constexpr,
    INDEX_DIM: tl.constexpr,
    RATIO: tl.constexpr,
    ROTARY: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_RING: tl.constexpr,
    PDL: tl.constexpr,
):
    # One program per row and unit: the index key first (its chain of loads is the longest), then KV, indexer, query.
    start(PDL)
    unit = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)  # rows * columns passes 2**31
    b = row // rows
    r = row % rows
    position = tl.load(first_ptr + b) + r
    projected_ptr += row * columns
    cos_row = cos_ptr + position * ROTARY
    sin_row = sin_ptr + position * ROTARY
    kv_ptr = projected_ptr + 2 * HEADS * DIM
    index_ptr = kv_ptr + 2 * KV_HEADS * DIM
    d = tl.arange(0, BLOCK_D)
    i = tl.arange(0, BLOCK_I)
    if unit == 0:
        first = position - r
        slot = tl.load(slots_ptr + b)
        ring_ptr = raw_keys_ptr + slot * ring * INDEX_DIM
        index_ptr += INDEX_HEADS * INDEX_DIM
        # A block belongs to the row it starts at, or to row 0 if it was open before: `base` is its first row.
        base = r - position % RATIO
        if ((r == 0) | (base == r)) & (base + RATIO <= rows):
            partner = _partner(i, ROTARY)
            key = _pooled(index_ptr, ring_ptr, i, r, base, first, columns, ring, INDEX_DIM, RATIO)
            other = _pooled(index_ptr, ring_ptr, partner, r, base, first, columns, ring, INDEX_DIM, RATIO)
            begin = (first + base) * ROTARY
            key = _norm_rotate(
                key, other, norm_index_k_ptr, cos_ptr + begin, sin_ptr + begin, eps, INDEX_DIM, ROTARY, BLOCK_I
            )
            block = (first + base) // RATIO
            page = tl.load(page_table_ptr + slot * pages + tl.minimum(block // (PAGE // RATIO), pages - 1))
            at = page * (PAGE // RATIO) + block % (PAGE // RATIO)
            tl.store(block_keys_ptr + at * INDEX_DIM + i, key.to(block_keys_ptr.dtype.element_ty), mask=i < INDEX_DIM)
        if r == 0:
            # The same program that read the open block's raw keys, and after it: many rows overwrite the whole ring.
            tl.debug_barrier()
            kept = tl.minimum(rows, ring)
            last = tl.arange(0, BLOCK_RING)[:, None]
            live = (last < kept) & (i < INDEX_DIM)[None, :]
            new = (rows - kept + last).to(tl.int64)
            raw = tl.load(index_ptr + new * columns + i[None, :], mask=live, other=0.0)
            to = (first + new) % ring * INDEX_DIM + i[None, :]
            tl.store(ring_ptr + to, raw.to(raw_keys_ptr.dtype.element_ty), mask=live)
    elif unit <= KV_HEADS:
        head = unit - 1
        slot = tl.load(slots_ptr + b)
        page = tl.load(page_table_ptr + slot * pages + tl.minimum(position // PAGE, pages - 1))
        to = ((page * PAGE + position % PAGE) * KV_HEADS + head) * DIM
        k = _load_norm_rotate(kv_ptr + head * DIM, norm_k_ptr, cos_row, sin_row, eps, DIM, ROTARY, BLOCK_D)
        v = tl.load(kv_ptr + (KV_HEADS + head) * DIM + d, mask=d < DIM, other=0.0)
        tl.store(keys_ptr + to + d, _stored(k, keys_ptr.dtype.element_ty), mask=d < DIM)
        tl.store(values_ptr + to + d, _stored(v.to(tl.float32), values_ptr.dtype.element_ty), mask=d < DIM)
    elif unit <= KV_HEADS + INDEX_HEADS:
        head = unit - 1 - KV_HEADS
        iq = _load_norm_rotate(
            index_ptr + head * INDEX_DIM, norm_index_q_ptr, cos_row, sin_row, eps, INDEX_DIM, ROTARY, BLOCK_I
        )
        to = (row * INDEX_HEADS + head) * INDEX_DIM
        tl.store(index_q_ptr + to + i, iq.to(index_q_ptr.dtype.element_ty), mask=i < INDEX_DIM)
    else:
        head = unit - 1 - KV_HEADS - INDEX_HEADS
        gate = tl.load(projected_ptr + (2 * head + 1) * DIM + d, mask=d < DIM, other=0.0)
        q = _load_norm_rotate(projected_ptr + 2 * head * DIM, norm_q_ptr, cos_row, sin_row, eps, DIM, ROTARY, BLOCK_D)
        to = (row * HEADS + head) * DIM
        tl.store(q_ptr + to + d, q.to(q_ptr.dtype.element_ty), mask=d < DIM)
        tl.store(gate_ptr + to + d, gate, mask=d < DIM)


@triton.jit
def _partner(i, ROTARY: tl.constexpr):
    """The value that value i is rotated with; of values that are not rotated, themselves."""
    return tl.where(i < ROTARY // 2, i + ROTARY // 2, tl.where(i < ROTARY, i - ROTARY // 2, i))


@triton.jit
def _pooled(index_ptr, ring_ptr, i, r, base, first, columns, ring, INDEX_DIM: tl.constexpr, RATIO: tl.constexpr):
    """Mean of RATIO raw keys, rounded; rows before row 0 lie in the ring. index_ptr is row r's key."""
    total = i.to(tl.float32) * 0.0
    for j in tl.static_range(RATIO):
        row = base + j
        before = tl.where(row < 0, INDEX_DIM, 0)  # values to take from the ring: all or none
        old = tl.load(ring_ptr + (first + row) % ring * INDEX_DIM + i, mask=i < before, other=0.0)
        new = tl.load(index_ptr + (row - r) * columns + i, mask=i < INDEX_DIM - before, other=0.0)
        total += old.to(tl.float32) + new.to(tl.float32)
    return (total / RATIO).to(index_ptr.dtype.element_ty)


@triton.jit
def _load_norm_rotate(
    x_ptr, scale_ptr, cos_ptr, sin_ptr, eps, DIM: tl.constexpr, ROTARY: tl.constexpr, BLOCK: tl.constexpr
):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < DIM, other=0.0)
    other = tl.load(x_ptr + _partner(i, ROTARY), mask=i < ROTARY, other=0.0)
    return _norm_rotate(x, other, scale_ptr, cos_ptr, sin_ptr, eps, DIM, ROTARY, BLOCK)


@triton.jit
def _norm_rotate(
    x, other, scale_ptr, cos_ptr, sin_ptr, eps, DIM: tl.constexpr, ROTARY: tl.constexpr, BLOCK: tl.constexpr
):
    """One head x and its rotation partners, normed and turned: float32 numbers of the dtype of x."""
    i = tl.arange(0, BLOCK)
    live, turned = i < DIM, i < ROTARY
    dtype: tl.constexpr = x.dtype
    scale = tl.load(scale_ptr + i, mask=live, other=0.0)
    other_scale = tl.load(scale_ptr + _partner(i, ROTARY), mask=turned, other=0.0)
    cos = tl.load(cos_ptr + i, mask=turned, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + i, mask=turned, other=0.0).to(tl.float32)
    x, other = x.to(tl.float32), other.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, 0) / DIM + eps)
    x = (x * rstd * scale).to(dtype).to(tl.float32)
    other = (other * rstd * other_scale).to(dtype).to(tl.float32)
    other = tl.where(i < ROTARY // 2, -other, other)
    rotated = (x * cos).to(dtype).to(tl.float32) + (other * sin).to(dtype).to(tl.float32)
    return tl.where(turned, rotated.to(dtype).to(tl.float32), x)


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
