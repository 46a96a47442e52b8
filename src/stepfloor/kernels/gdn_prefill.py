"""Gated delta net over a prompt chunk of one sequence: convolution, gates, delta rule, gated norm.

On the CPU the recurrence runs row by row, so that any chunking gives the same bits. On a GPU most rows run in chunk
form, 64 at a time as matrix products and one triangular solve; a last part of up to 16 rows runs row by row, and so do
heads of more than 128 values (64 in float32). A prompt cut at multiples of 64 rows therefore has the bits of the whole.

Source: transformers 5.24, Qwen4ExpTextGatedDeltaNet.forward; chunk form of Yang et al. 2024 (Gated Delta
Networks), section 3.3, with c the running sum of log decays in the chunk and G[i, j] = exp(c[i] - c[j]), j <= i:

    A = strictly_lower(diag(beta) K Kᵀ * G)
    U = (I + A)⁻¹ diag(beta) (V - diag(exp c) K M)
    O = diag(exp c) Q M + (Q Kᵀ * G) U;   M <- exp(c_last) M + Kᵀ diag(exp(c_last - c)) U

Three kernels: `_solve_kernel` makes W = (I + A)⁻¹ diag(beta exp c) K and X = (I + A)⁻¹ diag(beta) V of all chunks at
once, `_scan_kernel` goes from chunk to chunk with U = X - W M and the new M, `_read_kernel` makes O and closes it, all
chunks at once. Products run on bf16 matrix units with float32 sums: q, k and v are bf16 and exact; what is float32 goes
in as two bf16 parts, high and low, which leave out 2**-16 of a number; low times low, another 2**-16, is left out.
Decays, the inverse, the sums and the state are float32. In float32 models all products are float32.
"""

import logging
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from stepfloor.kernels._delta import (
    DeltaConstants,
    Prepared,
    close,
    gated,
    keep,
    prepare,
    recur,
    rounded,
    total,
    why_not_triton,
)
from stepfloor.kernels._jit import dependent_launch, runs_triton, start, tl, triton
from stepfloor.kernels._torch import DeltaRows, delta_rows, delta_rule, gated_norm

logger = logging.getLogger(__name__)

CHUNK_ROWS = 64
# Of heads that have a chunk form: a chunk's operands must fit into shared memory, and float32 products of 128 values
# spill 12 KB a thread.
MOST_HEAD_DIM = {torch.bfloat16: 128, torch.float32: 64}


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """How the GPU runs a prompt chunk. The defaults are not measured yet; `benchmarks.delta_net` compares some.

    chunks    whether there is a chunk form; else all rows run row by row
    few_rows  a last part of so many rows runs row by row
    columns, stages, warps  of a program of the scan; chunks whose operands (56 KB) it holds, where they fit
    segment_rows  rows whose W, X, U and states are held at once: 250 MB for 48 heads of 128
    """

    chunks: bool = True
    few_rows: int = 16
    columns: int = 32
    stages: int = 2
    warps: int = 4
    segment_rows: int = 2048


PLAN = PrefillPlan()


def gdn_prefill_reference(
    projected: Tensor, state: Tensor, raw_rows: Tensor, slots: Tensor, constants: DeltaConstants
) -> Tensor:
    """The recurrence, row by row."""
    slot = int(slots[0])
    rows, z = _operands(projected, raw_rows[slot], constants)
    mixed = delta_rule(rows, state[slot], 0, projected.shape[0]).to(projected.dtype)
    return gated_norm(mixed, z, constants.norm_weight, constants.eps, constants.activation).flatten(1)


def gdn_prefill(projected: Tensor, state: Tensor, raw_rows: Tensor, slots: Tensor, constants: DeltaConstants) -> Tensor:
    """Run T prompt rows of one sequence and leave the state after the last.

    projected  [T, C + HV * V + 2 * HV]: q, k, v before convolution, z, b, a
    state      [slots, HV, K, V] float32, advanced in place
    raw_rows   [slots, at least taps - 1, C]: projected rows before the chunk (zeros at the start), replaced in place
    slots      [1] int64, the sequence's
    Returns [T, HV * V]. Raises ValueError if the shapes disagree.
    """
    if projected.ndim != 2 or projected.shape[1] != constants.columns or slots.shape != (1,):
        raise ValueError(
            f"gdn_prefill wants projected [T, {constants.columns}], slots [1]; got {tuple(projected.shape)}, "
            f"{tuple(slots.shape)}"
        )
    operands = (projected, state, raw_rows, slots, constants)
    if runs_triton(projected):
        reason = why_not_triton(projected, (state, raw_rows, slots), constants)
        if reason is None:
            return gdn_prefill_triton(*operands)
        _say(reason)
    return (gdn_prefill_reference if projected.device.type == "cpu" else _gdn_prefill_chunked)(*operands)


@cache
def _say(reason: str) -> None:
    logger.info("gdn_prefill runs in torch: %s", reason)


def gdn_prefill_triton(
    projected: Tensor,
    state: Tensor,
    raw_rows: Tensor,
    slots: Tensor,
    constants: DeltaConstants,
    plan: PrefillPlan = PLAN,
) -> Tensor:
    """Queue the kernels."""
    rows = projected.shape[0]
    prepared = prepare(projected[None], raw_rows, slots, constants, None)
    out = projected.new_empty((rows, constants.parts[1]))
    first = rows - rows % CHUNK_ROWS if rows % CHUNK_ROWS <= plan.few_rows else rows
    if max(constants.key_dim, constants.value_dim) > MOST_HEAD_DIM[projected.dtype] or not plan.chunks:
        first = 0
    for begin in range(0, first, plan.segment_rows):
        stop = min(begin + plan.segment_rows, first)
        _queue_segment(prepared, projected, state, slots, constants, out, begin, stop, plan)
    if first < rows:
        recur(prepared, state, slots, constants, None, out, first)
        close(out, projected, constants, first)
    keep(projected[None], raw_rows, slots, constants, None)
    return out


def _queue_segment(
    prepared: Prepared,
    projected: Tensor,
    state: Tensor,
    slots: Tensor,
    constants: DeltaConstants,
    out: Tensor,
    begin: int,
    stop: int,
    plan: PrefillPlan,
) -> None:
    """Rows begin .. stop - 1 in chunk form; begin is a multiple of CHUNK_ROWS."""
    c, device = constants, projected.device
    chunks = -(-(stop - begin) // CHUNK_ROWS)
    rows = chunks * CHUNK_ROWS
    split = projected.dtype == torch.bfloat16
    parts = 2 if split else 1
    w = projected.new_empty((parts, rows, c.heads, c.key_dim))
    u = projected.new_empty((parts, rows, c.heads, c.value_dim))
    states = projected.new_empty((parts, chunks, c.heads, c.key_dim, c.value_dim))
    x = torch.empty((rows, c.heads, c.value_dim), dtype=torch.float32, device=device)
    running = torch.empty((rows, c.heads), dtype=torch.float32, device=device)
    block_k, block_v = (max(16, triton.next_power_of_2(size)) for size in (c.key_dim, c.value_dim))
    columns = min(plan.columns, block_v)
    sizes = {
        "KEY_HEADS": c.key_heads,
        "HEADS": c.heads,
        "K": c.key_dim,
        "V": c.value_dim,
        "BLOCK_K": block_k,
        "ROWS": CHUNK_ROWS,
        "SPLIT": split,
        # the interpreter multiplies bf16 as if it were integers
        "HALF": split and device.type == "cuda",
        **dependent_launch(projected),
    }
    operands = (prepared.mixed, prepared.scale)
    _solve_kernel[(chunks, c.heads)](
        *operands, prepared.log_decay, prepared.beta, w, x, running, begin, stop, rows, BLOCK_V=block_v, **sizes
    )
    _scan_kernel[(-(-c.value_dim // columns), c.heads)](
        *operands,
        running,
        w,
        x,
        u,
        states,
        state,
        slots,
        begin,
        stop,
        rows,
        chunks,
        BLOCK_V=columns,
        STAGES=_stages(device, plan),
        num_warps=plan.warps,
        **sizes,
    )
    _read_kernel[(chunks, c.heads)](
        *operands,
        running,
        u,
        states,
        projected,
        projected.stride(0),
        c.norm_weight,
        out,
        begin,
        stop,
        rows,
        chunks,
        c.key_dim**0.5,
        c.eps,
        BLOCK_V=block_v,
        STEP=min(64, block_k),
        SILU=c.activation == "silu",
        **sizes,
    )


@cache
def _stages(device: torch.device, plan: PrefillPlan) -> int:
    if device.type != "cuda":
        return 1
    shared = torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor
    return plan.stages if shared >= 160 * 1024 else 1


@triton.jit
def _product(a, b, HALF: tl.constexpr):
    # float32 sums of products of numbers that bf16 holds (HALF), or of any
    if HALF:
        c = tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16))
    else:
        c = tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return c


@triton.jit
def _high(x, SPLIT: tl.constexpr):
    if SPLIT:
        x = rounded(x, tl.bfloat16)
    return x


@triton.jit
def _within(c, ROWS: tl.constexpr):
    # G of a chunk: exp(c[i] - c[j]) for j <= i. Only rows from `stop` on, where c is 0, make a difference above zero.
    i = tl.arange(0, ROWS)
    return tl.exp(tl.where(i[:, None] >= i[None, :], tl.minimum(c[:, None] - c[None, :], 0.0), -float("inf")))


@triton.jit(do_not_specialize=["begin", "stop", "rows"])
def _solve_kernel(
    mixed_ptr,
    scale_ptr,
    log_decay_ptr,
    beta_ptr,
    w_ptr,
    x_ptr,
    running_ptr,
    begin,
    stop,
    rows,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    ROWS: tl.constexpr,
    SPLIT: tl.constexpr,
    HALF: tl.constexpr,
    PDL: tl.constexpr,
):
    # One program: one chunk of one value head. Rows from `stop` on read as zero and change nothing.
    start(PDL)
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * K + HEADS * V
    head = tl.program_id(1)
    key_head = head // (HEADS // KEY_HEADS)
    i = tl.arange(0, ROWS)
    local = tl.program_id(0).to(tl.int64) * ROWS + i
    t = begin + local
    live = t < stop
    k = tl.arange(0, BLOCK_K)
    v = tl.arange(0, BLOCK_V)
    at = mixed_ptr + (t * CHANNELS)[:, None]
    key = tl.load(at + ((KEY_HEADS + key_head) * K + k)[None, :], mask=live[:, None] & (k < K)[None, :], other=0.0)
    scale = tl.load(scale_ptr + t * (2 * KEY_HEADS) + KEY_HEADS + key_head, mask=live, other=0.0)
    beta = tl.load(beta_ptr + t * HEADS + head, mask=live, other=0.0)
    decay = tl.load(log_decay_ptr + t * HEADS + head, mask=live, other=0.0)
    c = total(tl.where(i[:, None] >= i[None, :], tl.broadcast_to(decay[None, :], (ROWS, ROWS)), 0.0), 1)
    tl.store(running_ptr + local * HEADS + head, c, mask=live)
    a = _product(key, tl.trans(key), HALF) * (beta * scale)[:, None] * scale[None, :] * _within(c, ROWS)
    a = tl.where(i[:, None] > i[None, :], a, 0.0)
    # (I + A)^-1 by forward substitution, row by row
    inverse = tl.where(i[:, None] == i[None, :], tl.full((ROWS, ROWS), 1.0, tl.float32), 0.0)
    for r in tl.range(1, ROWS):
        weights = total(tl.where(i[:, None] == r, a, 0.0), 0)
        inverse -= tl.where(i[:, None] == r, total(weights[:, None] * inverse, 0)[None, :], 0.0)
    for_key = inverse * (beta * tl.exp(c) * scale)[None, :]
    for_value = inverse * beta[None, :]
    high = _high(for_key, SPLIT)
    w = _product(high, key, HALF)
    if SPLIT:
        w += _product(_high(for_key - high, SPLIT), key, HALF)
    to = (local * HEADS + head)[:, None]
    mask = live[:, None] & (k < K)[None, :]
    high = _high(w, SPLIT)
    tl.store(w_ptr + to * K + k[None, :], high.to(w_ptr.dtype.element_ty), mask=mask)
    if SPLIT:
        low = _high(w - high, SPLIT).to(w_ptr.dtype.element_ty)
        tl.store(w_ptr + rows.to(tl.int64) * HEADS * K + to * K + k[None, :], low, mask=mask)
    mask = live[:, None] & (v < V)[None, :]
    value = tl.load(at + (2 * KEY_HEADS * K + head * V + v)[None, :], mask=mask, other=0.0)
    high = _high(for_value, SPLIT)
    x = _product(high, value, HALF)
    if SPLIT:
        x += _product(_high(for_value - high, SPLIT), value, HALF)
    tl.store(x_ptr + to * V + v[None, :], x, mask=mask)


@triton.jit(do_not_specialize=["begin", "stop", "rows", "chunks"])
def _scan_kernel(
    mixed_ptr,
    scale_ptr,
    running_ptr,
    w_ptr,
    x_ptr,
    u_ptr,
    states_ptr,
    state_ptr,
    slots_ptr,
    begin,
    stop,
    rows,
    chunks,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    SPLIT: tl.constexpr,
    HALF: tl.constexpr,
    PDL: tl.constexpr,
):
    # One program: BLOCK_V columns of the state of one value head, from chunk to chunk.
    start(PDL)
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * K + HEADS * V
    DTYPE: tl.constexpr = u_ptr.dtype.element_ty
    v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    k = tl.arange(0, BLOCK_K)
    i = tl.arange(0, ROWS)
    head = tl.program_id(1).to(tl.int64)
    key_head = head // (HEADS // KEY_HEADS)
    place = k[:, None] * V + v[None, :]
    inside = (k < K)[:, None] & (v < V)[None, :]
    own = state_ptr + (tl.load(slots_ptr) * HEADS + head) * (K * V)
    m = tl.load(own + place, mask=inside, other=0.0)
    part_w = rows.to(tl.int64) * HEADS * K  # from high parts to low ones
    part_u = rows.to(tl.int64) * HEADS * V
    part_m = chunks.to(tl.int64) * HEADS * K * V
    for n in tl.range(0, chunks, num_stages=STAGES):
        local = n * ROWS + i
        t = (begin + local).to(tl.int64)
        live = t < stop
        row = (local * HEADS + head)[:, None]
        keyed = live[:, None] & (k < K)[None, :]
        valued = live[:, None] & (v < V)[None, :]
        w = tl.load(w_ptr + row * K + k[None, :], mask=keyed, other=0.0)
        u = tl.load(x_ptr + row * V + v[None, :], mask=valued, other=0.0)
        c = tl.load(running_ptr + local * HEADS + head, mask=live, other=0.0)
        key = tl.load(
            mixed_ptr + (t * CHANNELS + (KEY_HEADS + key_head) * K)[:, None] + k[None, :], mask=keyed, other=0.0
        )
        scale = tl.load(scale_ptr + t * (2 * KEY_HEADS) + KEY_HEADS + key_head, mask=live, other=0.0)
        to = states_ptr + (n * HEADS + head) * (K * V) + place
        high = _high(m, SPLIT)
        tl.store(to, high.to(DTYPE), mask=inside)
        u -= _product(w, high, HALF)
        if SPLIT:
            low = _high(m - high, SPLIT)
            tl.store(to + part_m, low.to(DTYPE), mask=inside)
            w_low = tl.load(w_ptr + part_w + row * K + k[None, :], mask=keyed, other=0.0)
            u -= _product(w, low, HALF)
            u -= _product(w_low, high, HALF)
        high = _high(u, SPLIT)
        tl.store(u_ptr + row * V + v[None, :], high.to(DTYPE), mask=valued)
        if SPLIT:
            tl.store(u_ptr + part_u + row * V + v[None, :], _high(u - high, SPLIT).to(DTYPE), mask=valued)
        last = tl.minimum(stop - begin - n * ROWS, ROWS) - 1
        end = total(tl.where(i == last, c, 0.0), 0)
        written = u * (tl.exp(tl.minimum(end - c, 0.0)) * scale)[:, None]
        high = _high(written, SPLIT)
        m = m * tl.exp(end) + _product(tl.trans(key), high, HALF)
        if SPLIT:
            m += _product(tl.trans(key), _high(written - high, SPLIT), HALF)
    tl.store(own + place, m, mask=inside)


@triton.jit(do_not_specialize=["begin", "stop", "rows", "chunks"])
def _read_kernel(
    mixed_ptr,
    scale_ptr,
    running_ptr,
    u_ptr,
    states_ptr,
    projected_ptr,
    projected_stride,
    weight_ptr,
    out_ptr,
    begin,
    stop,
    rows,
    chunks,
    root,
    eps,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    SILU: tl.constexpr,
    SPLIT: tl.constexpr,
    HALF: tl.constexpr,
    PDL: tl.constexpr,
):
    # One program: the outputs of one chunk of one value head.
    start(PDL)
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * K + HEADS * V
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    n = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    key_head = head // (HEADS // KEY_HEADS)
    local = n * ROWS + tl.arange(0, ROWS)
    t = begin + local
    live = t < stop
    v = tl.arange(0, BLOCK_V)
    at = mixed_ptr + (t * CHANNELS + key_head * K)[:, None]
    part_u = rows.to(tl.int64) * HEADS * V
    part_m = chunks.to(tl.int64) * HEADS * K * V
    alike = tl.full((ROWS, ROWS), 0.0, tl.float32)
    o = tl.full((ROWS, BLOCK_V), 0.0, tl.float32)
    for step in tl.static_range(BLOCK_K // STEP):
        k = step * STEP + tl.arange(0, STEP)
        keyed = live[:, None] & (k < K)[None, :]
        inside = (k < K)[:, None] & (v < V)[None, :]
        query = tl.load(at + k[None, :], mask=keyed, other=0.0)
        key = tl.load(at + KEY_HEADS * K + k[None, :], mask=keyed, other=0.0)
        from_m = states_ptr + (n * HEADS + head) * (K * V) + k[:, None] * V + v[None, :]
        alike += _product(query, tl.trans(key), HALF)
        o += _product(query, tl.load(from_m, mask=inside, other=0.0), HALF)
        if SPLIT:
            o += _product(query, tl.load(from_m + part_m, mask=inside, other=0.0), HALF)
    c = tl.load(running_ptr + local * HEADS + head, mask=live, other=0.0)
    to_unit = scale_ptr + t * (2 * KEY_HEADS) + key_head
    scale = tl.load(to_unit, mask=live, other=0.0) / root
    o = o * (tl.exp(c) * scale)[:, None]
    alike *= scale[:, None] * tl.load(to_unit + KEY_HEADS, mask=live, other=0.0)[None, :] * _within(c, ROWS)
    valued = live[:, None] & (v < V)[None, :]
    from_u = u_ptr + (local * HEADS + head)[:, None] * V + v[None, :]
    u = tl.load(from_u, mask=valued, other=0.0)
    high = _high(alike, SPLIT)
    o += _product(high, u, HALF)
    if SPLIT:
        o += _product(_high(alike - high, SPLIT), u, HALF)
        o += _product(high, tl.load(from_u + part_u, mask=valued, other=0.0), HALF)
    from_z = projected_ptr + (t * projected_stride + CHANNELS + head * V)[:, None] + v[None, :]
    z = tl.load(from_z, mask=valued, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + v, mask=v < V, other=0.0).to(tl.float32)
    y = gated(rounded(o, DTYPE), z, weight, eps, V, SILU, DTYPE)
    tl.store(out_ptr + ((t * HEADS + head) * V)[:, None] + v[None, :], y.to(DTYPE), mask=valued)


def _gdn_prefill_chunked(
    projected: Tensor, state: Tensor, raw_rows: Tensor, slots: Tensor, constants: DeltaConstants
) -> Tensor:
    slot = int(slots[0])
    rows, z = _operands(projected, raw_rows[slot], constants)
    output, after = chunked_delta_rule(
        rows.query.transpose(0, 1),
        rows.key.transpose(0, 1),
        rows.value.transpose(0, 1),
        rows.log_decay.transpose(0, 1),
        rows.beta.transpose(0, 1),
        state[slot],
    )
    state[slot] = after
    mixed = output.transpose(0, 1).to(projected.dtype)
    return gated_norm(mixed, z, constants.norm_weight, constants.eps, constants.activation).flatten(1)


def chunked_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The gated delta rule in chunk form, float32, differentiable.

    query, key  [.., T, K]; value [.., T, V]; log_decay, beta [.., T]; state [.., K, V]
    Returns output [.., T, V] and the state after the last row, a new tensor.
    """
    outputs = []
    for first in range(0, query.shape[-2], CHUNK_ROWS):
        part = slice(first, first + CHUNK_ROWS)
        q, k, v, b = query[..., part, :], key[..., part, :], value[..., part, :], beta[..., part, None]
        c = log_decay[..., part].cumsum(-1)
        size = c.shape[-1]
        lower = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()
        # masked before the exponential: above the diagonal the difference is positive and may overflow
        g = (c[..., :, None] - c[..., None, :]).masked_fill(~lower, -torch.inf).exp()
        a = ((b * k) @ k.transpose(-1, -2) * g).tril(-1)
        unit = a + torch.eye(size, device=q.device)
        right = b * (v - c.exp()[..., None] * (k @ state))
        u = torch.linalg.solve_triangular(unit, right, upper=False, unitriangular=True)
        outputs.append(c.exp()[..., None] * (q @ state) + (q @ k.transpose(-1, -2) * g) @ u)
        last = c[..., -1:]
        state = last.exp()[..., None] * state + (k * (last - c).exp()[..., None]).transpose(-1, -2) @ u
    return torch.cat(outputs, -2), state


def gdn_prefill_inputs(
    t: int, key_heads: int, heads: int, key_dim: int, value_dim: int, dtype: torch.dtype, device: str
) -> dict[str, object]:
    """Inputs that the test, the tuner and the bench share."""
    make = torch.Generator(device).manual_seed(0)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=make, device=device)

    channels = 2 * key_heads * key_dim + heads * value_dim
    return {
        "projected": rand(t, channels + heads * value_dim + 2 * heads).to(dtype),
        "state": 0.1 * rand(2, heads, key_dim, value_dim),
        "raw_rows": rand(2, 4, channels).to(dtype),
        "slots": torch.ones(1, dtype=torch.int64, device=device),
        "constants": DeltaConstants(
            conv_weight=rand(channels, 4) / 2,
            a_log=torch.linspace(0, 2, heads, device=device),
            dt_bias=torch.ones(heads, device=device),
            norm_weight=(1 + 0.1 * rand(value_dim)).to(dtype),
            key_heads=key_heads,
            key_dim=key_dim,
            eps=1e-6,
            activation="sigmoid",
        ),
    }


def _operands(projected: Tensor, raw_rows: Tensor, constants: DeltaConstants) -> tuple[DeltaRows, Tensor]:
    history = raw_rows[: constants.history]
    raw, z, gates = projected.split(constants.parts, -1)
    window = torch.cat((history, raw))
    history.copy_(window[window.shape[0] - history.shape[0] :])
    rows = delta_rows(window, gates, constants)
    return rows, z.reshape(projected.shape[0], constants.heads, constants.value_dim)
