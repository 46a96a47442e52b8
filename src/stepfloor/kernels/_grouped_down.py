"""The Triton kernels of moe_down: other formats and sizes, older GPUs, prompt chunks.

The first has the products of pairs (row, choice), grouped by expert as `_grouped.py` says, and of the shared expert,
also alone; the second weighs and sums them. Source: moe_down.py, with its reference's roundings.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stepfloor.formats.codec import PackedWeight
from stepfloor.kernels._experts import TiledExperts
from stepfloor.kernels._grouped import (
    DECODE_ROWS,
    WIDE,
    Groups,
    Stack,
    Tiles,
    chunk_of,
    expert_of,
    expert_products,
    group_pairs,
    most_tiles,
    pairs_before,
    pairs_led,
    pairs_of_tile,
    stack_of,
    stacks,
    why_not_grouped,
)
from stepfloor.kernels._jit import dependent_launch, runs_triton, start, tl, triton
from stepfloor.kernels._torch import product

# One H200, bf16: 13.8 us at 1 row of 10 experts, 38.3 at 4 of 37; with 128 columns of K a step 15.2 and 44.1.
DECODE = Tiles(16, 128, 64, 4, 4)
PREFILL = Tiles(128, 128, 64, 8, 3)


def down_grouped(
    hidden: Tensor,
    ids: Tensor,
    weights: Tensor,
    down: PackedWeight | TiledExperts,
    shared_hidden: Tensor,
    shared_gate: Tensor,
    shared_down: Sequence[PackedWeight],
    tiles: Tiles | None = None,
    ordered: bool | None = None,
) -> Tensor:
    """Queue the Triton kernels: products of pairs and of the shared expert, then their sum.

    tiles    how the first is cut; ordered  whether pairs are sorted first. None: as suits the number of rows
    """
    count, topk, width = hidden.shape
    x = hidden.reshape(count * topk, width)
    x = x if x.stride(-1) == 1 else x.contiguous()
    ids = ids.contiguous()
    if ordered is None:
        ordered = count > DECODE_ROWS or isinstance(down, TiledExperts)
    experts = down.data.shape[0] if isinstance(down, PackedWeight) else down.tape.shape[0]
    products = hidden.new_empty((count * topk, down.shape[0]))
    shared: _Shared | None = None
    if len(shared_down) == 1 and why_not_grouped(shared_down[0]) is None:
        shared = _Shared(shared_hidden, stack_of(shared_down[0]), hidden.new_empty((count, down.shape[0])))
    shared_products = multiply_shared(shared_hidden, shared_down) if shared is None else shared.out
    groups: Groups | None = None
    for first, stack in stacks(down):
        wide = stack.wide(x) or (shared is not None and shared.stack.wide(x))
        cut = (tiles or (WIDE if wide else PREFILL if ordered else DECODE)).fit(*stack.shape)
        if ordered and groups is None:
            groups = group_pairs(ids, experts, cut.rows)
        _queue_products(x, ids, first, experts, stack, groups, cut, products, shared if first == 0 else None)
    return _queue_sum(products, weights, shared_gate, shared_products)


def multiply_shared(x: Tensor, matrices: Sequence[PackedWeight]) -> Tensor:
    """Rows of the shared expert times its matrices, side by side."""
    reasons = [why_not_grouped(w) for w in matrices]
    if not runs_triton(x) or any(reasons):
        return product(x, matrices)
    columns = []
    for w in matrices:
        shared = _Shared(x, stack_of(w), x.new_empty((x.shape[0], w.shape[0])))
        cut = PREFILL if x.shape[0] > DECODE_ROWS else DECODE
        cut = (WIDE if shared.stack.wide(x) else cut).fit(*w.shape)
        # no pairs: the shared expert's programs alone
        _queue_products(x, x.new_empty((0, 1), dtype=torch.int64), 0, 1, shared.stack, None, cut, shared.out, shared)
        columns.append(shared.out)
    return columns[0] if len(columns) == 1 else torch.cat(columns, -1)


@dataclass(frozen=True, slots=True, eq=False)
class _Shared:
    """The shared expert's rows, matrix and products."""

    x: Tensor
    stack: Stack
    out: Tensor


def _queue_products(
    x: Tensor,
    ids: Tensor,
    first: int,
    experts: int,
    stack: Stack,
    groups: Groups | None,
    cut: Tiles,
    out: Tensor,
    shared: _Shared | None,
) -> None:
    pairs = ids.numel()
    number = pairs if groups is None else most_tiles(pairs, stack.count, cut.rows)
    order, pair_starts, tile_starts, tile_experts = (
        (None, None, None, None)
        if groups is None
        else (groups.order, groups.pair_starts, groups.tile_starts, groups.tile_experts)
    )
    last = None if shared is None else shared.stack
    rows = 0 if shared is None else shared.x.shape[0]
    constants = stack.constants(x)
    _products_kernel[(triton.cdiv(stack.shape[0], cut.columns), number + triton.cdiv(rows, cut.rows))](
        x,
        x.stride(0),
        out,
        ids,
        order,
        pair_starts,
        tile_starts,
        tile_experts,
        stack.data,
        stack.scale,
        stack.factor,
        None if shared is None else shared.x,
        0 if shared is None else shared.x.stride(0),
        None if shared is None else shared.out,
        None if last is None else last.data,
        None if last is None else last.scale,
        None if last is None else last.factor,
        pairs,
        first,
        number,
        rows,
        EXPERTS=experts,
        HELD=stack.count,
        ORDERED=groups is not None,
        **constants,
        SHARED_K=0 if last is None else last.shape[1],
        SHARED_CODES="plain" if last is None else last.codes,
        SHARED_SCALING="none" if last is None else last.scaling,
        SHARED_WIDE=constants["WIDE"] if last is None else last.wide(x),
        BLOCK_M=cut.rows,
        BLOCK_N=cut.columns,
        BLOCK_K=cut.depth,
        CHUNK=chunk_of(pairs),
        num_warps=cut.warps,
        num_stages=cut.stages,
        **dependent_launch(x),
    )


@triton.jit(do_not_specialize=["pairs", "first", "groups", "shared_rows"])
def _products_kernel(
    x_ptr,
    x_stride,
    out_ptr,
    ids_ptr,
    order_ptr,
    pair_starts_ptr,
    tile_starts_ptr,
    tile_experts_ptr,
    data_ptr,
    scale_ptr,
    factor_ptr,
    shared_x_ptr,
    shared_x_stride,
    shared_out_ptr,
    shared_data_ptr,
    shared_scale_ptr,
    shared_factor_ptr,
    pairs,
    first,
    groups,
    shared_rows,
    EXPERTS: tl.constexpr,
    HELD: tl.constexpr,
    ORDERED: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    CODES: tl.constexpr,
    SCALING: tl.constexpr,
    WIDE: tl.constexpr,
    NATIVE: tl.constexpr,
    SHARED_K: tl.constexpr,
    SHARED_CODES: tl.constexpr,
    SHARED_SCALING: tl.constexpr,
    SHARED_WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    start(PDL)
    group = tl.program_id(1)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    if SHARED_K > 0:  # noqa: SIM102 - the first is the compiler's, the second the program's
        if group >= groups:
            row = (group - groups) * BLOCK_M + tl.arange(0, BLOCK_M)
            sums, _ = expert_products(
                shared_x_ptr,
                shared_x_stride,
                row,
                row < shared_rows,
                shared_data_ptr,
                shared_scale_ptr,
                shared_factor_ptr,
                tl.full((), 0, tl.int32),
                n,
                N,
                SHARED_K,
                SHARED_CODES,
                SHARED_SCALING,
                SHARED_WIDE,
                NATIVE,
                BLOCK_M,
                BLOCK_N,
                BLOCK_K,
                False,
            )
            at = row.to(tl.int64)[None, :] * N + n[:, None]
            live = (row < shared_rows)[None, :] & (n[:, None] < N)
            tl.store(shared_out_ptr + at, sums.to(shared_out_ptr.dtype.element_ty), mask=live)
            return
    if ORDERED:
        tile = tl.load(tile_starts_ptr + first) + group
        if tile >= tl.load(tile_starts_ptr + first + HELD):
            return
        expert = tl.load(tile_experts_ptr + tile)
        pair, live = pairs_of_tile(order_ptr, pair_starts_ptr, tile_starts_ptr, expert, tile, BLOCK_M)
    else:
        expert = expert_of(ids_ptr, group, EXPERTS)
        if pairs_before(ids_ptr, group, expert, EXPERTS, CHUNK) % BLOCK_M != 0:
            return
        pair, live = pairs_led(ids_ptr, group, pairs, expert, EXPERTS, BLOCK_M, CHUNK)
    sums, _ = expert_products(
        x_ptr,
        x_stride,
        pair,
        live,
        data_ptr,
        scale_ptr,
        factor_ptr,
        expert - first,
        n,
        N,
        K,
        CODES,
        SCALING,
        WIDE,
        NATIVE,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
        False,
    )
    at = pair.to(tl.int64)[None, :] * N + n[:, None]
    tl.store(out_ptr + at, sums.to(out_ptr.dtype.element_ty), mask=live[None, :] & (n[:, None] < N))


def _queue_sum(products: Tensor, weights: Tensor, shared_gate: Tensor, shared_products: Tensor) -> Tensor:
    count, n = shared_products.shape
    weights, shared_gate = weights.contiguous(), shared_gate.contiguous()
    out = torch.empty_like(shared_products)
    block = max(16, min(1024, triton.next_power_of_2(n)))
    _sum_kernel[(count, triton.cdiv(n, block))](
        products,
        weights,
        shared_gate,
        shared_products,
        out,
        N=n,
        TOPK=weights.shape[1],
        BLOCK_N=block,
        **dependent_launch(products),
    )
    return out


@triton.jit
def _sum_kernel(
    products_ptr,
    weights_ptr,
    gate_ptr,
    shared_ptr,
    out_ptr,
    N: tl.constexpr,
    TOPK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    start(PDL)
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    live = n < N
    dtype = out_ptr.dtype.element_ty
    total = tl.zeros((BLOCK_N,), tl.float32)
    for j in range(TOPK):
        value = tl.load(products_ptr + (row * TOPK + j) * N + n, mask=live, other=0.0).to(tl.float32)
        weighted = value * tl.load(weights_ptr + row * TOPK + j).to(tl.float32)
        total += weighted.to(dtype).to(tl.float32)
    shared = tl.load(shared_ptr + row * N + n, mask=live, other=0.0).to(tl.float32)
    gated = (tl.load(gate_ptr + row).to(tl.float32) * shared).to(dtype).to(tl.float32)
    tl.store(out_ptr + row * N + n, (total.to(dtype).to(tl.float32) + gated).to(dtype), mask=live)
