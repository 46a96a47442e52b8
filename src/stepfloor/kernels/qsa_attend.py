"""Sparse attention over the selected blocks and the open tail, with the output gate.

    keep = every position of the selected blocks, and the 0 to ratio - 1 positions after the last complete block
    s    = q · k / sqrt(head_dim);   p = softmax(s), rounded;   o = (Σ p v) * sigmoid(gate)

Source: transformers 5.24, Qwen4ExpTextAttention.forward with eager_attention_forward.

On a GPU a decode step in bf16 takes one kernel (`qsa_attend.cu`) for rows that keep all their positions: a cluster of
blocks a key head, whose rows share what they read. Rows that select take two: 64 kept positions of one row and key head
at a time, with all query heads that share the key head; then the pieces of a row are joined in their order and gated.
All rows do where the first kernel cannot be built. Whatever a row takes follows from its own position, pieces and their
order too, so its bits depend on nothing else. Rows of a prompt chunk (more than MOST_DECODE_ROWS) go over all their
positions in one program: eight rows together as long as they keep everything, later row by row, which gathers what each
selected. Their sums have another order than a decode step's.

The reference rounds p, relative to the whole row's softmax. A kernel rounds a piece's exp(s - max of the piece) and
divides later: each weight is rounded once as well, by at most 2**-8 of itself in bf16, but elsewhere. So a kernel is as
close to the exact result as the reference is, and the two lie within twice that bound of each other.
"""

import logging
from functools import cache

import torch
from torch import Tensor

from stepfloor.kernels._attend import AttendPlan, attend_launch, choose_attend, pack_attend
from stepfloor.kernels._attend_triton import MOST_DECODE_ROWS, attend_triton
from stepfloor.kernels._jit import default_cache_dir, missing_for_cuda, runs_triton
from stepfloor.kernels._stream import readable, say_once, shared_limit
from stepfloor.kernels._torch import sigmoid

logger = logging.getLogger(__name__)


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
    selected      [B, R, topk] int64 blocks ascending, -1 behind the last, as qsa_select chooses them: a row that has no
                  more than topk complete blocks selects them all
    slots, first  [B] int64; first is the position of each sequence's first row
    keys, values  [pages, P, KV heads, head_dim], in the dtype of q or float8_e4m3fn; page_table [slots, pages] int64
    ratio         tokens per block
    Returns [B, R, H * head_dim] in the dtype of q. On a GPU slots, first, the page table and what earlier steps left in
    the cache are read as soon as the kernel before lets this one start: whatever wrote them has to have ended then. In
    a layer it has, since the product before qsa_prepare waits before it lets anything start. The first call of a shape
    loads its kernel, which a graph capture must not do. Raises ValueError if the shapes disagree.
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
    operands = (q, gate, selected, slots, first, keys, values, page_table)
    if q.is_cuda and q.shape[1] <= MOST_DECODE_ROWS:
        topk = selected.shape[2]
        plan = choose_attend(q, keys, ratio, topk, shared_limit(q.device))
        reason = _why_not_cuda(plan, q.device, _as_the_kernel_reads(*operands))
        if plan is not None and reason is None and (runs_triton(q) or not _may_select(page_table, keys, ratio, topk)):
            return attend_rows(plan, *operands, ratio)
    if runs_triton(q):
        return attend_triton(*operands, ratio)
    return qsa_attend_reference(*operands, ratio)


def _may_select(page_table: Tensor, keys: Tensor, ratio: int, topk: int) -> bool:
    """Whether there is room for texts of which a row cannot keep everything."""
    return page_table.shape[1] * keys.shape[1] // ratio > topk


def attend_rows(
    plan: AttendPlan,
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
    """Queue the kernel of rows that keep everything, and where there may be others, theirs."""
    q, gate = readable(q), readable(gate)
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    units = q.shape[0] * -(-q.shape[1] // plan.tile) * plan.kv_heads
    launch = attend_launch(plan, units, q.device, default_cache_dir())
    launch(pack_attend(q, gate, slots, first, keys, values, page_table, out))
    if not _may_select(page_table, keys, ratio, selected.shape[2]):
        return out
    return attend_triton(q, gate, selected, slots, first, keys, values, page_table, ratio, selecting=out)


def _as_the_kernel_reads(
    q: Tensor,
    gate: Tensor,
    selected: Tensor,
    slots: Tensor,
    first: Tensor,
    keys: Tensor,
    values: Tensor,
    page_table: Tensor,
) -> bool:
    """Whether dtypes, strides and alignment are those that the addresses in the kernel assume."""
    return (
        q.dtype == gate.dtype == torch.bfloat16
        and keys.dtype == values.dtype
        and keys.dtype in (torch.bfloat16, torch.float8_e4m3fn)
        and all(t.dtype == torch.int64 for t in (selected, slots, first, page_table))
        and all(t.is_contiguous() for t in (slots, first, keys, values, page_table))
        and keys.data_ptr() % 16 == 0
        and values.data_ptr() % 16 == 0
    )


@cache
def _why_not_cuda(plan: AttendPlan | None, device: torch.device, suits: bool) -> str | None:
    """Why the CUDA kernel does not run, said once."""
    reason = missing_for_cuda()
    if reason is None and not suits:
        reason = "the kernel reads bf16 rows, and contiguous caches in bf16 or E4M3"
    if reason is None and plan is None:
        reason = "the kernel cannot be built for these heads"
    if reason is None and torch.cuda.get_device_capability(device)[0] < 9:
        reason = "the kernel needs compute capability 9.0 (clusters)"
    if reason is not None:
        say_once(logger, f"qsa_attend does not run its CUDA kernel: {reason}")
    return reason


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
