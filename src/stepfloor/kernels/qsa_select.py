"""Block selection of sparse attention: which complete blocks of the past a query row reads.

    n        = (t + 1) div ratio                          blocks complete at the query, its own included
    score_b  = Σ over index heads of relu(iq_h · K_b) / sqrt(index dim)      float32
    selected = the min(topk, n) best; among equal scores the lower block first

Source: transformers 5.24, Qwen4ExpTextQSAIndexer.forward. The tie rule is ours, the source leaves it open.
"""

import torch
from torch import Tensor


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
    return qsa_select_reference(index_q, slots, first, block_keys, page_table, ratio, topk)


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
