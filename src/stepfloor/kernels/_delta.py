"""What the two operators of a gated delta net share: a layer's constants, and its row-by-row form in Triton.

Source: transformers 5.24, Qwen4ExpTextGatedDeltaNet.

The row-by-row form is four kernels: `prepare` (convolution, silu, norms, gates; all rows at once), `recur` (the delta
rule, a program for some columns of one head's state), `close` (the gated norm) and `keep` (rewrites the kept rows in
place, after everything that reads them). It rounds where the references round; sums are float32 in another order. No
multiplication and addition are joined but where `fma` is written, and nothing depends on the number of rows or
sequences, so a row has the same bits alone, in company, as a new row and as a replayed one.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from stepfloor.kernels._jit import dependent_launch, start, tl, triton

TILE_ROWS = 16  # rows of a program of `prepare` and `close`


@dataclass(frozen=True, slots=True, eq=False)
class DeltaConstants:
    """What a layer's weights and config fix; HV value heads of size V, C = 2 * key_heads * key_dim + HV * V channels.

    conv_weight    [C, taps] float32
    a_log, dt_bias [HV] float32
    norm_weight    [V] in the model's dtype, centred on one
    key_heads      query heads and key heads, each serving HV / key_heads value heads
    key_dim        K, size of a query or key head
    eps            of the closing norm
    activation     of the closing norm's gate: sigmoid or silu
    """

    conv_weight: Tensor
    a_log: Tensor
    dt_bias: Tensor
    norm_weight: Tensor
    key_heads: int
    key_dim: int
    eps: float
    activation: str

    @property
    def channels(self) -> int:
        """C."""
        return self.conv_weight.shape[0]

    @property
    def history(self) -> int:
        """Rows before a row that its convolution reads."""
        return self.conv_weight.shape[1] - 1

    @property
    def heads(self) -> int:
        """HV."""
        return self.a_log.shape[0]

    @property
    def value_dim(self) -> int:
        """V."""
        return self.norm_weight.shape[0]

    @property
    def parts(self) -> tuple[int, int, int]:
        """Columns of a projected row: q, k, v before convolution; z; b and a."""
        return self.channels, self.heads * self.value_dim, 2 * self.heads

    @property
    def columns(self) -> int:
        """All columns of a projected row."""
        return sum(self.parts)


@dataclass(frozen=True, slots=True)
class Prepared:
    """Operands of the delta rule. Row b * A + t of each is row t of sequence b, replayed rows first, A of them at most.

    mixed      [B * A, C] in the model's dtype: q, k, v after convolution and silu
    scale      [B * A, 2 * key_heads] float32: what makes a query and a key of `mixed` a unit vector
    log_decay  [B * A, HV] float32; beta [B * A, HV] float32
    """

    mixed: Tensor
    scale: Tensor
    log_decay: Tensor
    beta: Tensor


@dataclass(frozen=True, slots=True)
class Replay:
    """Rows of the last step: gate_rows [slots, R', 2 * HV], and pending [B], how many of them count."""

    gate_rows: Tensor
    pending: Tensor


def why_not_triton(projected: Tensor, whole: tuple[Tensor, ...], constants: DeltaConstants) -> str | None:
    """What the Triton kernels cannot read, as the end of a sentence; None if nothing."""
    if projected.dtype not in (torch.bfloat16, torch.float32):
        return f"its kernels round to bf16 or not at all, not to {projected.dtype}"
    if any(not tensor.is_contiguous() for tensor in whole) or projected.stride(-1) != 1:
        return "its kernels read contiguous tensors and rows"
    if (
        projected.ndim == 3
        and projected.shape[0] > 1
        and projected.stride(0) != projected.shape[1] * projected.stride(1)
    ):
        return "its kernels read sequences that follow each other row by row"
    if max(constants.key_dim, constants.value_dim) > 256:
        return f"its kernels hold heads of up to 256 values, not {constants.key_dim} and {constants.value_dim}"
    return None


def prepare(
    projected: Tensor, raw_rows: Tensor, slots: Tensor, constants: DeltaConstants, replay: Replay | None
) -> Prepared:
    """Queue convolution, norms and gates of rows [B, R, columns] and of what they replay."""
    c = constants
    count, rows = projected.shape[:2]
    kept = 0 if replay is None else replay.gate_rows.shape[1]
    total = count * (kept + rows)

    def floats(columns: int) -> Tensor:
        return torch.empty((total, columns), dtype=torch.float32, device=projected.device)

    out = Prepared(projected.new_empty((total, c.channels)), floats(2 * c.key_heads), floats(c.heads), floats(c.heads))
    _prepare_kernel[(-(-(kept + rows) // TILE_ROWS), 2 * c.key_heads + c.heads, count)](
        projected,
        projected.stride(1),
        raw_rows,
        raw_rows.shape[1],
        slots if replay is None else replay.gate_rows,
        slots,
        slots if replay is None else replay.pending,
        c.conv_weight,
        c.a_log,
        c.dt_bias,
        out.mixed,
        out.scale,
        out.log_decay,
        out.beta,
        rows,
        kept,
        KEY_HEADS=c.key_heads,
        HEADS=c.heads,
        K=c.key_dim,
        V=c.value_dim,
        TAPS=c.history + 1,
        BLOCK=triton.next_power_of_2(max(c.key_dim, c.value_dim)),
        TILE=TILE_ROWS,
        REPLAY=replay is not None,
        **dependent_launch(projected),
    )
    return out


def recur(
    prepared: Prepared,
    state: Tensor,
    slots: Tensor,
    constants: DeltaConstants,
    replay: Replay | None,
    out: Tensor,
    first: int = 0,
) -> None:
    """Queue the rule over rows `first` .. R - 1 of each sequence, into out [B * R, HV * V].

    With `replay` the state is left as it is after the replayed rows, without it as after the last row.
    """
    c = constants
    count = slots.shape[0]
    kept = 0 if replay is None else replay.gate_rows.shape[1]
    block_k = triton.next_power_of_2(c.key_dim)
    # a warp of 64 state values a thread at most
    block_v = min(triton.next_power_of_2(c.value_dim), max(4, 2048 // block_k))
    _recur_kernel[(-(-c.value_dim // block_v), c.heads, count)](
        prepared.mixed,
        prepared.scale,
        prepared.log_decay,
        prepared.beta,
        state,
        slots,
        slots if replay is None else replay.pending,
        out,
        out.shape[0] // count,
        kept,
        first,
        c.key_dim**0.5,
        KEY_HEADS=c.key_heads,
        HEADS=c.heads,
        K=c.key_dim,
        V=c.value_dim,
        BLOCK_K=block_k,
        BLOCK_V=block_v,
        REPLAY=replay is not None,
        num_warps=1,
        **dependent_launch(out),
    )


def close(mixed: Tensor, projected: Tensor, constants: DeltaConstants, first: int = 0) -> None:
    """Queue the gated norm of mixed [T, HV * V], in place from row `first` on; z stands in projected [.., columns]."""
    c = constants
    rows = mixed.shape[0] - first
    _close_kernel[(-(-rows * c.heads // TILE_ROWS),)](
        mixed,
        projected,
        projected.stride(-2),
        c.norm_weight,
        first * c.heads,
        mixed.shape[0] * c.heads,
        c.eps,
        HEADS=c.heads,
        V=c.value_dim,
        CHANNELS=c.channels,
        SILU=c.activation == "silu",
        BLOCK=triton.next_power_of_2(c.value_dim),
        TILE=TILE_ROWS,
        **dependent_launch(mixed),
    )


def keep(projected: Tensor, raw_rows: Tensor, slots: Tensor, constants: DeltaConstants, replay: Replay | None) -> None:
    """Queue what the next call reads: the convolution's history, and with `replay` the new rows behind it."""
    c = constants
    count, rows = projected.shape[:2]
    written = c.history + (0 if replay is None else rows)
    block = 256
    _keep_kernel[(-(-c.channels // block), count)](
        projected,
        projected.stride(1),
        raw_rows,
        raw_rows.shape[1],
        slots if replay is None else replay.gate_rows,
        slots,
        slots if replay is None else replay.pending,
        rows,
        0 if replay is None else replay.gate_rows.shape[1],
        written,
        CHANNELS=c.channels,
        GATES=c.channels + c.parts[1],
        GATE_COLUMNS=c.parts[2],
        HISTORY=c.history,
        ROWS=triton.next_power_of_2(written),
        BLOCK=block,
        REPLAY=replay is not None,
        **dependent_launch(projected),
    )


@triton.jit
def total(x, AXIS: tl.constexpr):
    """Sum along an axis. The interpreter has no tl.sum where it is switched on after Triton was imported."""
    return tl.reduce(x, AXIS, tl.standard._sum_combine)


@triton.jit
def rounded(x, DTYPE: tl.constexpr):
    """float32 x with the value that DTYPE rounds it to, ties to even. The interpreter's own conversion cuts off."""
    if tl.bfloat16 == DTYPE:
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    return x


@triton.jit
def silu(x):
    """x sigmoid(x)."""
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _softplus(x):
    # log(1 + e) keeps the digits of a small e through what 1 + e rounded away; linear above 20, like the source
    e = tl.exp(tl.minimum(x, 20.0))
    above = 1.0 + e
    kept = tl.where(above == 1.0, 1.0, above - 1.0)
    return tl.where(x > 20.0, x, tl.where(above == 1.0, e, tl.log(above) * (e / kept)))


@triton.jit
def gated(o, z, weight, eps, V: tl.constexpr, SILU: tl.constexpr, DTYPE: tl.constexpr):
    """The gated norm of o [rows, V], float32 that DTYPE holds; z alike, weight [V]. Columns from V on are zero."""
    normed = rounded(o * (1.0 / tl.sqrt(total(o * o, 1) / V + eps))[:, None], DTYPE)
    if SILU:
        act = silu(z)
    else:
        act = 1.0 / (1.0 + tl.exp(-z))
    return rounded(rounded(weight[None, :] * normed, DTYPE) * act, DTYPE)


@triton.jit
def _replayed(pending_ptr, b, kept, REPLAY: tl.constexpr):
    accepted = kept * 0
    if REPLAY:
        accepted = tl.minimum(tl.maximum(tl.load(pending_ptr + b), 0), kept).to(tl.int32)
    return accepted


@triton.jit(do_not_specialize=["rows", "kept"])
def _prepare_kernel(
    projected_ptr,
    projected_stride,
    raw_ptr,
    raw_rows,
    gate_ptr,
    slots_ptr,
    pending_ptr,
    conv_ptr,
    a_log_ptr,
    dt_bias_ptr,
    mixed_ptr,
    scale_ptr,
    log_decay_ptr,
    beta_ptr,
    rows,
    kept,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    REPLAY: tl.constexpr,
    PDL: tl.constexpr,
):
    # One program: TILE rows of one head of q, k or v.
    start(PDL)
    DTYPE: tl.constexpr = mixed_ptr.dtype.element_ty
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * K + HEADS * V
    unit = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    slot = tl.load(slots_ptr + b)
    accepted = _replayed(pending_ptr, b, kept, REPLAY)
    t = tl.program_id(0) * TILE + tl.arange(0, TILE)
    live = t < accepted + rows
    is_key = unit < 2 * KEY_HEADS
    width = tl.where(is_key, K, V)
    head = unit - 2 * KEY_HEADS
    at = tl.arange(0, BLOCK)
    channel = tl.where(is_key, unit * K, 2 * KEY_HEADS * K + head * V) + at
    inside = live[:, None] & (at < width)[None, :]
    summed = tl.full((TILE, BLOCK), 0.0, tl.float32)
    for tap in tl.static_range(TAPS):
        row = t + tap  # of the history, the replayed rows and the new ones, in this order
        old = row < TAPS - 1 + accepted
        old_row = (slot * raw_rows + row) * CHANNELS
        new_row = (b * rows + row - (TAPS - 1) - accepted) * projected_stride
        x = tl.load(raw_ptr + old_row[:, None] + channel[None, :], mask=inside & old[:, None], other=0.0)
        y = tl.load(
            projected_ptr + new_row[:, None] + channel[None, :],
            mask=inside & (row >= TAPS - 1 + accepted)[:, None],
            other=0.0,
        )
        weight = tl.load(conv_ptr + channel * TAPS + tap, mask=at < width, other=0.0)
        summed += tl.where(old[:, None], x.to(tl.float32), y.to(tl.float32)) * weight[None, :]
    mixed = rounded(silu(rounded(summed, DTYPE)), DTYPE)
    to = b * (kept + rows) + t
    tl.store(mixed_ptr + to[:, None] * CHANNELS + channel[None, :], mixed.to(DTYPE), mask=inside)
    if is_key:
        tl.store(scale_ptr + to * (2 * KEY_HEADS) + unit, 1.0 / tl.sqrt(total(mixed * mixed, 1) + 1e-6), mask=live)
    else:
        new = t >= accepted
        fresh = projected_ptr + (b * rows + t - accepted) * projected_stride + CHANNELS + HEADS * V + head
        gate_b = tl.load(fresh, mask=live & new, other=0.0).to(tl.float32)
        gate_a = tl.load(fresh + HEADS, mask=live & new, other=0.0).to(tl.float32)
        if REPLAY:
            again = gate_ptr + (slot * kept + t) * (2 * HEADS) + head
            gate_b += tl.load(again, mask=live & (t < accepted), other=0.0).to(tl.float32)
            gate_a += tl.load(again + HEADS, mask=live & (t < accepted), other=0.0).to(tl.float32)
        soft = _softplus(gate_a + tl.load(dt_bias_ptr + head))
        tl.store(log_decay_ptr + to * HEADS + head, -tl.exp(tl.load(a_log_ptr + head)) * soft, mask=live)
        tl.store(beta_ptr + to * HEADS + head, rounded(1.0 / (1.0 + tl.exp(-gate_b)), DTYPE), mask=live)


@triton.jit
def _operands(
    mixed_ptr,
    scale_ptr,
    log_decay_ptr,
    beta_ptr,
    row,
    head,
    k,
    v,
    root,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
):
    # One row of the rule, as the reference rounds it: unit key, unit query over sqrt(K).
    key_head = head // (HEADS // KEY_HEADS)
    at = mixed_ptr + row * (2 * KEY_HEADS * K + HEADS * V)
    scale = scale_ptr + row * (2 * KEY_HEADS) + key_head
    query = tl.load(at + key_head * K + k, mask=k < K, other=0.0).to(tl.float32) * tl.load(scale)
    key = tl.load(at + (KEY_HEADS + key_head) * K + k, mask=k < K, other=0.0).to(tl.float32)
    value = tl.load(at + 2 * KEY_HEADS * K + head * V + v, mask=v < V, other=0.0).to(tl.float32)
    decay = tl.exp(tl.load(log_decay_ptr + row * HEADS + head))
    return query / root, key * tl.load(scale + KEY_HEADS), value, decay, tl.load(beta_ptr + row * HEADS + head)


@triton.jit(do_not_specialize=["rows", "kept", "first"])
def _recur_kernel(
    mixed_ptr,
    scale_ptr,
    log_decay_ptr,
    beta_ptr,
    state_ptr,
    slots_ptr,
    pending_ptr,
    out_ptr,
    rows,
    kept,
    first,
    root,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    REPLAY: tl.constexpr,
    PDL: tl.constexpr,
):
    # One program: BLOCK_V columns of the state of one head of one sequence, in the registers of one warp.
    start(PDL)
    v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    k = tl.arange(0, BLOCK_K)
    head = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    accepted = _replayed(pending_ptr, b, kept, REPLAY)
    at = ((tl.load(slots_ptr + b) * HEADS + head) * K + k)[:, None] * V + v[None, :]
    inside = (k < K)[:, None] & (v < V)[None, :]
    m = tl.load(state_ptr + at, mask=inside, other=0.0)
    begin = b * (kept + rows)
    last = accepted + rows - 1
    query, key, value, decay, beta = _operands(
        mixed_ptr, scale_ptr, log_decay_ptr, beta_ptr, begin + first, head, k, v, root, KEY_HEADS, HEADS, K, V
    )
    for t in tl.range(first, accepted + rows):
        # the next row's operands are on their way while this row is worked on
        next_query, next_key, next_value, next_decay, next_beta = _operands(
            mixed_ptr,
            scale_ptr,
            log_decay_ptr,
            beta_ptr,
            begin + tl.minimum(t + 1, last),
            head,
            k,
            v,
            root,
            KEY_HEADS,
            HEADS,
            K,
            V,
        )
        m = m * decay
        u = beta * (value - total(key[:, None] * m, 0))
        m = tl.fma(tl.broadcast_to(key[:, None], m.shape), tl.broadcast_to(u[None, :], m.shape), m)
        if REPLAY:
            # one loop for replayed and new rows: one code, hence the same bits
            tl.store(state_ptr + at, m, mask=inside & (k * 0 + t + 1 == accepted)[:, None])
        out = rounded(total(query[:, None] * m, 0), out_ptr.dtype.element_ty)
        to = ((b * rows + t - accepted) * HEADS + head) * V + v
        tl.store(out_ptr + to, out.to(out_ptr.dtype.element_ty), mask=(v < V) & (v * 0 + t >= accepted))
        query, key, value, decay, beta = next_query, next_key, next_value, next_decay, next_beta
    if not REPLAY:
        tl.store(state_ptr + at, m, mask=inside)


@triton.jit(do_not_specialize=["first", "stop"])
def _close_kernel(
    mixed_ptr,
    projected_ptr,
    projected_stride,
    weight_ptr,
    first,
    stop,
    eps,
    HEADS: tl.constexpr,
    V: tl.constexpr,
    CHANNELS: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    # One program: TILE pairs of a row and a head.
    start(PDL)
    DTYPE: tl.constexpr = mixed_ptr.dtype.element_ty
    pair = first + tl.program_id(0) * TILE + tl.arange(0, TILE).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = (pair < stop)[:, None] & (at < V)[None, :]
    place = mixed_ptr + pair[:, None] * V + at[None, :]
    o = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    z_row = projected_ptr + (pair // HEADS) * projected_stride + CHANNELS + (pair % HEADS) * V
    z = tl.load(z_row[:, None] + at[None, :], mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + at, mask=at < V, other=0.0).to(tl.float32)
    tl.store(place, gated(o, z, weight, eps, V, SILU, DTYPE).to(DTYPE), mask=inside)


@triton.jit
def _keep_kernel(
    projected_ptr,
    projected_stride,
    raw_ptr,
    raw_rows,
    gate_ptr,
    slots_ptr,
    pending_ptr,
    rows,
    kept,
    written,
    CHANNELS: tl.constexpr,
    GATES: tl.constexpr,
    GATE_COLUMNS: tl.constexpr,
    HISTORY: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    REPLAY: tl.constexpr,
    PDL: tl.constexpr,
):
    # One program: BLOCK channels of one sequence. It alone reads and writes them, and it reads all of them first.
    start(PDL)
    b = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots_ptr + b)
    accepted = _replayed(pending_ptr, b, kept, REPLAY)
    i = tl.arange(0, ROWS)
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = (i < written)[:, None] & (channel < CHANNELS)[None, :]
    if REPLAY:
        row = i + accepted
    else:
        row = i + rows
    fresh = row - HISTORY - accepted  # among the new rows
    old_at = ((slot * raw_rows + row) * CHANNELS)[:, None] + channel[None, :]
    new_at = ((b * rows + fresh) * projected_stride)[:, None] + channel[None, :]
    x = tl.load(raw_ptr + old_at, mask=inside & (fresh < 0)[:, None], other=0.0)
    y = tl.load(projected_ptr + new_at, mask=inside & (fresh >= 0)[:, None], other=0.0)
    tl.debug_barrier()
    to = ((slot * raw_rows + i) * CHANNELS)[:, None] + channel[None, :]
    tl.store(raw_ptr + to, tl.where((fresh < 0)[:, None], x, y), mask=inside)
    if REPLAY:
        # the first programs copy the gates, BLOCK columns each
        column = (i < rows)[:, None] & (channel < GATE_COLUMNS)[None, :]
        from_at = ((b * rows + i) * projected_stride + GATES)[:, None] + channel[None, :]
        gates_at = ((slot * kept + i) * GATE_COLUMNS)[:, None] + channel[None, :]
        tl.store(gate_ptr + gates_at, tl.load(projected_ptr + from_at, mask=column, other=0.0), mask=column)
