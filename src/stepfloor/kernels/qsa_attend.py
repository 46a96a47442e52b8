"""Sparse attention over the selected blocks and the open tail, with the output gate.

    keep = every position of the selected blocks, and the 0 to ratio - 1 positions after the last complete block
    s    = q · k / sqrt(head_dim);   p = softmax(s), rounded;   o = (Σ p v) * sigmoid(gate)

Source: transformers 5.24, Qwen4ExpTextAttention.forward with eager_attention_forward.
"""

import torch
from torch import Tensor

from stepfloor.kernels._torch import sigmoid


def qsa_attend_reference(
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
    """Row by row, the kept rows gathered: shapes depend on the row's own length alone."""
    count, rows, heads, head_dim = q.shape
    page_tokens, kv_heads = keys.shape[1], keys.shape[2]
    outputs = []
    for b in range(count):
        start = int(first[b])
        past = torch.arange(start + rows, device=q.device)
        pages, offsets = page_table[slots[b], past // page_tokens], past % page_tokens
        k_all, v_all = keys[pages, offsets].float(), values[pages, offsets].float()  # [length, KV heads, head_dim]
        for r in range(rows):
            kept = kept_positions(selected[b, r], start + r, ratio)
            k, v = k_all[kept].transpose(0, 1).contiguous(), v_all[kept].transpose(0, 1).contiguous()
            grouped = q[b, r].float().reshape(kv_heads, heads // kv_heads, head_dim)
            scores = torch.bmm(grouped, k.transpose(1, 2)) * head_dim**-0.5
            weights = scores.softmax(-1).to(q.dtype).float()
            outputs.append(torch.bmm(weights, v).reshape(-1))
    mixed = torch.stack(outputs).to(q.dtype).reshape(count, rows, -1)
    return mixed * sigmoid(gate)


def kept_positions(selected: Tensor, position: int, ratio: int) -> Tensor:
    """Positions one row keeps, ascending: selected [topk] blocks (-1 for none), then the tail up to `position`."""
    complete = (position + 1) // ratio
    tail = torch.arange(complete * ratio, position + 1, device=selected.device)
    blocks = selected[selected >= 0]
    inside = blocks[:, None] * ratio + torch.arange(ratio, device=selected.device)
    return torch.cat((inside.flatten(), tail))


def qsa_attend(
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
    """Attend R rows of each of B sequences to what they selected.

    q             [B, R, H, head_dim]; gate [B, R, H * head_dim]
    selected      [B, R, topk] int64 blocks ascending, -1 behind the last
    slots, first  [B] int64; first is the position of each sequence's first row
    keys, values  [pages, P, KV heads, head_dim]; page_table [slots, pages] int64
    ratio         tokens per block
    Returns [B, R, H * head_dim] in the dtype of q. Raises ValueError if the shapes disagree.
    """
    if q.ndim != 4 or selected.shape[:2] != q.shape[:2] or gate.shape != (*q.shape[:2], q.shape[2] * q.shape[3]):
        raise ValueError(
            f"qsa_attend wants q [B, R, H, D], gate [B, R, H * D], selected [B, R, topk]; got "
            f"{tuple(q.shape)}, {tuple(gate.shape)}, {tuple(selected.shape)}"
        )
    if slots.shape != q.shape[:1] or first.shape != slots.shape:
        raise ValueError(
            f"qsa_attend wants slots and first [{q.shape[0]}]; got {tuple(slots.shape)}, {tuple(first.shape)}"
        )
    return qsa_attend_reference(q, gate, selected, slots, first, keys, values, page_table, ratio)


def qsa_attend_inputs(
    b: int,
    r: int,
    context: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    ratio: int,
    topk: int,
    dtype: torch.dtype,
    device: str,
) -> dict[str, object]:
    """Inputs that the test, the tuner and the bench share: random distinct blocks, as many as are visible."""
    make = torch.Generator(device).manual_seed(0)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=make, device=device).to(dtype)

    page = 4 * ratio
    pages = -(-(context + r) // page)
    table = 1 + torch.randperm(b * pages, generator=make, device=device).reshape(b, pages)
    selected = torch.full((b, r, topk), -1, dtype=torch.int64, device=device)
    for i in range(b):
        for j in range(r):
            visible = (context + j + 1) // ratio
            chosen = torch.randperm(visible, generator=make, device=device)[:topk].sort().values
            selected[i, j, : chosen.shape[0]] = chosen
    return {
        "q": rand(b, r, heads, head_dim),
        "gate": rand(b, r, heads * head_dim),
        "selected": selected,
        "slots": torch.arange(1, b + 1, device=device),
        "first": torch.full((b,), context, device=device),
        "keys": rand(1 + b * pages, page, kv_heads, head_dim),
        "values": rand(1 + b * pages, page, kv_heads, head_dim),
        "page_table": torch.cat((torch.zeros_like(table[:1]), table)),
        "ratio": ratio,
    }
