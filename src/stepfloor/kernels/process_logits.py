"""The logits a token is drawn from: bias, penalties, temperature and filters applied to each row.

Source: vLLM's order (fp32 copy, logit bias, penalties, forbidden ids, temperature, min-p, top-k, top-p); bias and
penalties do not commute. Penalties: vLLM model_executor/layers/utils.py, apply_penalties. Filters: vLLM
v1/sample/ops/topk_topp_sampler.py (ascending order, drop while the cumulative probability is at most 1 - p).

Two things are fixed here that the source leaves to its sort: tokens tied with the k-th logit all survive top-k, and
where top-p must split a tie the lower id stays.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

INF = float("inf")


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


def process_logits_reference(
    logits: Tensor,
    slots: Tensor,
    temperature: Tensor,
    bias: Tensor | None = None,
    penalties: Penalties | None = None,
    filters: Filters | None = None,
    earlier: Tensor | None = None,
) -> Tensor:
    """The source's equations, stage by stage."""
    x = logits.float()
    if bias is not None:
        x = x + bias[slots]
    if penalties is not None:
        x = _penalise(x, slots, penalties, earlier)
    row_temperature = temperature[slots][:, None]  # [N, 1]
    greedy = row_temperature == 0
    x = x / torch.where(greedy, 1.0, row_temperature)
    if filters is not None:
        x = torch.where(greedy | _keeps(x, slots, filters), x, -INF)
    # NaN and +inf pass through every stage or leave no candidate, so one look at the end finds all three.
    healthy = torch.isfinite(x.amax(-1))
    return torch.where(healthy[:, None], x, float("nan"))


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


def _keeps(x: Tensor, slots: Tensor, filters: Filters) -> Tensor:
    """Which tokens survive min-p, then top-k, then top-p over what is left; bool [N, V]."""
    floor = x.amax(-1, keepdim=True) + torch.log(filters.min_p[slots])[:, None]
    x = torch.where(x < floor, -INF, x)

    # Best first, lower id first among equals.
    ordered, ids = torch.sort(x, dim=-1, descending=True, stable=True)
    kth = ordered.gather(1, filters.top_k[slots][:, None] - 1)
    ordered = torch.where(ordered < kth, -INF, ordered)

    # Summed from the worst upward, in double: no order of the scan then moves the boundary.
    mass = torch.softmax(ordered, dim=-1).double().flip(-1).cumsum(-1).flip(-1)
    top_p = filters.top_p[slots][:, None]
    # At top_p 1 nothing goes, not even what underflowed to probability 0: the row is the same without this stage.
    keep = (mass > 1.0 - top_p.double()) | (top_p >= 1.0)
    keep[:, 0] = True
    keep = keep & (ordered > -INF)
    return torch.zeros_like(keep).scatter_(1, ids, keep)


def process_logits(
    logits: Tensor,
    slots: Tensor,
    temperature: Tensor,
    bias: Tensor | None = None,
    penalties: Penalties | None = None,
    filters: Filters | None = None,
    earlier: Tensor | None = None,
) -> Tensor:
    """Turn each row of raw logits into the logits its token is drawn from.

    logits       bf16 or fp32 [N, V]
    slots        int64 [N], the slot whose settings a row uses
    temperature  fp32 [slots]; rows at 0 come back neither scaled nor filtered, their argmax is the token
    bias         fp32 [slots, V], added to the logits; -inf forbids a token. None: no slot has any
    penalties    None: no slot has any
    filters      None: no slot has any
    earlier      int64 [N, W], tokens that penalties count as if already in the output; -1 is none
    Returns fp32 [N, V], -inf where a token cannot be drawn. A row without a finite maximum (NaN, +inf, or no
    candidate) comes back as NaN. Raises ValueError if shapes disagree.
    """
    if logits.ndim != 2 or slots.shape != logits.shape[:1]:
        raise ValueError(
            f"process_logits wants logits [N, V] and slots [N]; got {tuple(logits.shape)} and {tuple(slots.shape)}"
        )
    per_vocab = [] if bias is None else [bias]
    if penalties is not None:
        per_vocab += [penalties.counts, penalties.in_prompt]
    for table in per_vocab:
        if table.shape != (temperature.shape[0], logits.shape[1]):
            raise ValueError(
                f"bias, counts and in_prompt must be [slots, V] = {(temperature.shape[0], logits.shape[1])}; "
                f"got {tuple(table.shape)}"
            )
    if earlier is not None and (earlier.ndim != 2 or earlier.shape[0] != logits.shape[0]):
        raise ValueError(f"earlier must be [N, W] with N = {logits.shape[0]}; got {tuple(earlier.shape)}")
    return process_logits_reference(logits, slots, temperature, bias, penalties, filters, earlier)


def process_logits_inputs(n: int, vocab_size: int, dtype: torch.dtype, device: str) -> dict[str, object]:
    """Rows with every stage in use, one slot each; slot 0 is greedy."""
    make = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=make, device=device)

    temperature = 0.5 + draw(n)
    temperature[0] = 0.0
    bias = torch.where(draw(n, vocab_size) < 0.01, 4 * draw(n, vocab_size) - 2, 0.0)
    bias[draw(n, vocab_size) < 0.01] = -INF
    penalties = Penalties(
        repetition=1 + draw(n),
        frequency=draw(n) - 0.5,
        presence=draw(n) - 0.5,
        counts=torch.where(draw(n, vocab_size) < 0.1, (3 * draw(n, vocab_size)).int(), 0).int(),
        in_prompt=draw(n, vocab_size) < 0.1,
    )
    filters = Filters(
        min_p=0.01 * draw(n),
        top_k=(1 + draw(n) * (vocab_size - 1)).long(),
        top_p=0.5 + 0.5 * draw(n),
    )
    return {
        "logits": (8 * torch.randn(n, vocab_size, generator=make, device=device)).to(dtype),
        "slots": torch.arange(n, device=device),
        "temperature": temperature,
        "bias": bias,
        "penalties": penalties,
        "filters": filters,
        "earlier": (draw(n, 3) * (vocab_size + 1)).long() - 1,
    }
