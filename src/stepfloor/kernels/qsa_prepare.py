"""What a sparse-attention layer does to its projections before it looks back: norm, rotation, cache writes.

    q, k   = rotate(norm(q)), rotate(norm(k));  v and the output gate pass unchanged
    iq     = rotate(norm(indexer query));       the raw indexer key waits until its block of `ratio` is full
    K_b    = rotate_at_first(norm(mean of the block's raw keys)), the mean rounded before the norm

Source: transformers 5.24, Qwen4ExpTextAttention and Qwen4ExpTextQSAIndexer.forward.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from stepfloor.kernels._torch import rms_norm, rotate


@dataclass(frozen=True, slots=True)
class SparseCache:
    """Cache of one sparse-attention layer; a page holds P tokens.

    keys, values  [pages, P, KV heads, head_dim]
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
    cache.keys[pages, offsets] = k.to(cache.keys.dtype)
    cache.values[pages, offsets] = v.unflatten(-1, (shape.kv_heads, -1)).to(cache.values.dtype)
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
    Raises ValueError if the columns do not match the shape, or slots and first the rows.
    """
    columns = (2 * shape.heads + 2 * shape.kv_heads) * shape.head_dim + (shape.index_heads + 1) * shape.index_dim
    if projected.ndim != 3 or projected.shape[-1] != columns:
        raise ValueError(f"qsa_prepare wants projected [B, R, {columns}]; got {tuple(projected.shape)}")
    if slots.shape != projected.shape[:1] or first.shape != slots.shape:
        raise ValueError(
            f"qsa_prepare wants slots and first [{projected.shape[0]}]; got {tuple(slots.shape)}, {tuple(first.shape)}"
        )
    return qsa_prepare_reference(projected, slots, first, cos, sin, norms, cache, shape, eps)


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
            rand(b + 1, shape.ratio + r, shape.index_dim).to(dtype),
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
