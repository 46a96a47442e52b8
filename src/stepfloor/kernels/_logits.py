"""What the sampling operators share: settings of slots, the stages in front of a draw, sums over a split vocabulary.

A row of logits belongs to a window: N rows are B windows of R = N / B rows, row j of a window decides position
positions + j, and everything is looked up by the window's slot. A GPU kernel never copies logits to float32 first: it
applies the stages (`processed`) wherever it reads, with the roundings of the reference, so that two kernels see the
same bits of the same logit.

The vocabulary is cut into segments of 2048 ids. Exponentials are summed as integers, in units of 2**-40 of the
largest: no order, tile or layout moves a bit, and what is cut off a row of 248,320 is below 2**-21 of its sum.

Source: process_logits.py names the papers and the order of the stages.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stepfloor.kernels._jit import dependent_launch, tl, triton

INF = float("inf")
SEGMENT = 2048


@dataclass(frozen=True, slots=True)
class Penalties:
    """What penalties need to know of each slot.

    repetition, frequency, presence  fp32 [slots]; 1, 0, 0 change nothing, to the bit
    counts     int32 [slots, V], occurrences in the output
    in_prompt  bool [slots, V]
    """

    repetition: Tensor
    frequency: Tensor
    presence: Tensor
    counts: Tensor
    in_prompt: Tensor


@dataclass(frozen=True, slots=True)
class Filters:
    """How many tokens stay candidates in each slot.

    min_p, top_p  fp32 [slots]; 0 and 1 keep all
    top_k         int64 [slots], 1 to V; V keeps all
    """

    min_p: Tensor
    top_k: Tensor
    top_p: Tensor


@dataclass(frozen=True, slots=True)
class Stages:
    """What is done to raw logits before the temperature.

    bias     fp32 [slots, V], added; -inf forbids a token. None: no slot has any
    penalties  None: no slot has any
    earlier  int64 [B, W], tokens that penalties count as if already in the output, -1 is none; row j of a window of R
             rows counts the first W - (R - 1) + j of them: all for a single row, the drafts before it for a window
             of k + 1 rows and k drafts
    """

    bias: Tensor | None = None
    penalties: Penalties | None = None
    earlier: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Proposals:
    """The distributions that each slot's drafts were drawn from: log q = logits - scale[.., 0] - scale[.., 1].

    logits  fp32 [slots, k, V], processed
    scale   fp32 [slots, k, 2]: their largest, and the logarithm of the sum of exponentials of what they are below it
    """

    logits: Tensor
    scale: Tensor


def window_rows(logits: Tensor, slots: Tensor) -> int:
    """R of N rows and B slots; 0 if they do not fit."""
    b = slots.shape[0] if slots.ndim == 1 else 0
    return logits.shape[0] // b if b and logits.shape[0] % b == 0 else 0


def check_stages(stages: Stages, windows: int, slots: int, vocab_size: int) -> None:
    """Raise ValueError if a table is not [slots, V], or earlier not [B, W]."""
    per_vocab = [] if stages.bias is None else [stages.bias]
    if stages.penalties is not None:
        per_vocab += [stages.penalties.counts, stages.penalties.in_prompt]
    for table in per_vocab:
        if table.shape != (slots, vocab_size):
            raise ValueError(
                f"bias, counts and in_prompt must be [slots, V] = {(slots, vocab_size)}; got {tuple(table.shape)}"
            )
    earlier = stages.earlier
    if earlier is not None and (earlier.ndim != 2 or earlier.shape[0] != windows):
        raise ValueError(f"earlier must be [B, W] with B = {windows}; got {tuple(earlier.shape)}")


def processed_reference(logits: Tensor, slots: Tensor, temperature: Tensor, stages: Stages) -> Tensor:
    """float32 [N, V]: bias, penalties and temperature, stage by stage."""
    rows = window_rows(logits, slots)
    row_slots = slots.repeat_interleave(rows)
    x = logits.float()
    if stages.bias is not None:
        x = x + stages.bias[row_slots]
    if stages.penalties is not None:
        x = _penalise(x, row_slots, stages.penalties, _earlier_of_rows(stages.earlier, rows))
    row_temperature = temperature[row_slots][:, None]  # [N, 1]
    return x / torch.where(row_temperature == 0, 1.0, row_temperature)


def scale_reference(x: Tensor) -> Tensor:
    """[.., 2] of x [.., V]: the largest, and the logarithm of the sum of exponentials of what the others are below."""
    # torch's own log_softmax treats every row alike, however many there are; at the largest it is minus the logarithm
    return torch.stack((x.amax(-1), -torch.log_softmax(x, dim=-1).amax(-1)), -1)


def log_softmax_reference(x: Tensor, scale: Tensor) -> Tensor:
    """log-probabilities of x [.., V] with scale [.., 2]."""
    return (x - scale[..., :1]) - scale[..., 1:]


def _earlier_of_rows(earlier: Tensor | None, rows: int) -> Tensor | None:
    """[N, W]: what each row counts, -1 elsewhere."""
    if earlier is None or rows == 1:
        return earlier
    width = earlier.shape[1]
    counted = width - (rows - 1) + torch.arange(rows, device=earlier.device)  # [R]
    seen = torch.arange(width, device=earlier.device) < counted[:, None]  # [R, W]
    return torch.where(seen, earlier[:, None], -1).flatten(0, 1)


def _penalise(x: Tensor, slots: Tensor, penalties: Penalties, earlier: Tensor | None) -> Tensor:
    counts = penalties.counts[slots]  # [N, V], a copy
    if earlier is not None:
        counts.scatter_add_(1, earlier.clamp(min=0), (earlier >= 0).to(counts.dtype))
    in_output = counts > 0
    repetition = penalties.repetition[slots][:, None]
    repeated = torch.where(x > 0, x / repetition, x * repetition)
    x = torch.where(in_output | penalties.in_prompt[slots], repeated, x)
    x = x - penalties.frequency[slots][:, None] * counts
    return x - penalties.presence[slots][:, None] * in_output


# ---------------------------------------------------------------------- on a GPU


def segments(vocab_size: int) -> int:
    """Parts that a row is cut into."""
    return -(-vocab_size // SEGMENT)


def launch_options(tensor: Tensor, num_warps: int = 4) -> dict[str, Any]:
    """Options of every launch. No product is fused with a sum: the reference rounds between them."""
    return {"num_warps": num_warps, **dependent_launch(tensor)}


def row_arguments(logits: Tensor, slots: Tensor, temperature: Tensor, stages: Stages | None) -> dict[str, Any]:
    """The arguments by which a kernel hands rows to `processed`, in its order.

    logits [N, V]; stages None: they are processed already. Settings of one dtype must have one stride, as
    columns of one table do.
    """
    raw = stages or Stages()
    table = raw.penalties
    earlier = None if table is None else raw.earlier
    if table is not None:
        check_strides(temperature, table.repetition, table.frequency, table.presence)
    for tensor in (raw.bias, None if table is None else table.counts, None if table is None else table.in_prompt):
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(f"tables of slots and tokens must be contiguous; got strides {tensor.stride()}")
    return {
        "logits_ptr": logits if logits.stride(-1) == 1 else logits.contiguous(),
        "slots_ptr": slots.contiguous(),
        "temperature_ptr": temperature,
        "bias_ptr": raw.bias,
        "repetition_ptr": None if table is None else table.repetition,
        "frequency_ptr": None if table is None else table.frequency,
        "presence_ptr": None if table is None else table.presence,
        "counts_ptr": None if table is None else table.counts,
        "in_prompt_ptr": None if table is None else table.in_prompt.view(torch.uint8),
        "earlier_ptr": None if earlier is None else earlier.contiguous(),
        "logits_stride": logits.stride(0) if logits.stride(-1) == 1 else logits.shape[1],
        "float_stride": temperature.stride(0),
        "vocab": logits.shape[1],
        "rows": window_rows(logits, slots),
        "EARLIER": 0 if earlier is None else earlier.shape[1],
        "SCALE": stages is not None,
    }


def check_strides(*settings: Tensor) -> None:
    """Raise ValueError unless per-slot settings have one stride."""
    if len({tensor.stride(0) for tensor in settings}) > 1:
        raise ValueError(f"settings of one dtype must share a stride; got {[t.stride(0) for t in settings]}")


@triton.jit
def processed(source, row, ids, EARLIER: tl.constexpr, SCALE: tl.constexpr):
    """The processed logits of some ids of a row, float32, -inf past the vocabulary.

    source  the arguments of `row_arguments`, in order; row int64; ids int32 of any shape
    A NaN becomes +inf: like +inf it makes the row one without a finite maximum.
    """
    logits_ptr, slots_ptr, temperature_ptr = source[0], source[1], source[2]
    bias_ptr, repetition_ptr, frequency_ptr, presence_ptr = source[3], source[4], source[5], source[6]
    counts_ptr, in_prompt_ptr, earlier_ptr = source[7], source[8], source[9]
    logits_stride, float_stride, vocab, rows = source[10], source[11], source[12], source[13]
    live = ids < vocab
    x = tl.load(logits_ptr + row * logits_stride + ids, mask=live, other=float("-inf")).to(tl.float32)
    window = row // rows
    slot = tl.load(slots_ptr + window)
    if bias_ptr is not None:
        x = x + tl.load(bias_ptr + slot * vocab + ids, mask=live, other=0.0)
    if counts_ptr is not None:
        counts = tl.load(counts_ptr + slot * vocab + ids, mask=live, other=0)
        counted = EARLIER - (rows - 1) + row - window * rows
        for i in tl.static_range(EARLIER):
            token = tl.load(earlier_ptr + window * EARLIER + i)
            counts += ((ids == token) & (i < counted)).to(tl.int32)
        in_output = counts > 0
        in_prompt = tl.load(in_prompt_ptr + slot * vocab + ids, mask=live, other=0) != 0
        repetition = tl.load(repetition_ptr + slot * float_stride)
        repeated = tl.where(x > 0, tl.div_rn(x, tl.full(x.shape, 0.0, tl.float32) + repetition), x * repetition)
        x = tl.where(in_output | in_prompt, repeated, x)
        x = x - tl.load(frequency_ptr + slot * float_stride) * counts.to(tl.float32)
        x = x - tl.load(presence_ptr + slot * float_stride) * in_output.to(tl.float32)
    if SCALE:
        temperature = tl.load(temperature_ptr + slot * float_stride)
        divisor = tl.where(temperature == 0, 1.0, temperature)
        x = tl.div_rn(x, tl.full(x.shape, 0.0, tl.float32) + divisor)
    return tl.where(live, tl.where(x != x, float("inf"), x), float("-inf"))


@triton.jit
def fixed(e):
    """Numbers from 0 to 2048 in units of 2**-40, int64, rounded down: their sum has no order."""
    return (e * 1099511627776.0).to(tl.int64)


@triton.jit
def exp_below(x, top):
    """exp(x - top), at most 1; some number from 0 to 1 where top is not finite."""
    base = tl.where((top > float("-inf")) & (top < float("inf")), top, 0.0)
    return tl.minimum(tl.exp(x - base), 1.0)


@triton.jit
def part_sum(x):
    """The largest of a segment, and the sum of exponentials of what all are below it; float32 scalars."""
    top = tl.max(x, 0)
    return top, tl.sum(fixed(exp_below(x, top)), 0).to(tl.float32) * 9.094947017729282e-13


@triton.jit
def whole_sum(tops, sums):
    """Both of a row: the largest, and the logarithm of its sum, from those of its segments (-inf and 0: no segment)."""
    top = tl.max(tops, 0)
    return top, tl.log(tl.sum(fixed(sums * exp_below(tops, top)), 0).to(tl.float32) * 9.094947017729282e-13)


@triton.jit
def first_best(values, ids):
    """The largest value and the lowest id that has it; the id means nothing if all are -inf."""
    top = tl.max(values, 0)
    return top, tl.min(tl.where(values == top, ids, 2147483647), 0)
