"""From logits to tokens: the settings, seeds and counts of every slot, and the four calls a step makes.

A step calls accept (or sample, for a prompt's first token), commit, then draft k times. Nothing here waits for the
device: what a batch needs is known from host integers, and every tensor has a fixed shape.

All noise is keyed by (seed, position), position being the index of the token in its whole sequence. In standard mode
drafts have a stream of their own and acceptance is the rejection rule; in coupled mode drafts are drawn with the
target's noise and accepted while they equal the target's draw, so that the text is the same for every k.

Source: architecture of vLLM's V1 sampler for the meaning of each setting; the kernels name their papers.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from stepfloor.kernels.accept_drafts import accept_drafts
from stepfloor.kernels.draw_tokens import DRAFT, TARGET, draw_tokens
from stepfloor.kernels.match_drafts import match_drafts
from stepfloor.kernels.process_logits import Filters, Penalties, process_logits
from stepfloor.request import SamplingParams

Stage = Literal["noise", "bias", "penalties", "filters"]

# Below this temperature a row is greedy, as in vLLM: dividing by less takes fp32 logits to infinity.
_GREEDY_BELOW = 1e-5


class Sampler:
    """Draws, judges and counts tokens for all slots of one engine."""

    def __init__(
        self,
        vocab_size: int,
        max_num_seqs: int,
        spec_tokens: int,
        acceptance: Literal["standard", "coupled"],
        device: torch.device | str,
        forced_accept: int | None = None,
    ) -> None:
        """Allocate the settings of max_num_seqs slots, and of one more for rows that pad a batch.

        The padding slot is number max_num_seqs: greedy, never assigned, its tokens mean nothing.
        forced_accept takes that many drafts of each window whatever the target says, for timing kernels at a chosen
        acceptance. The text is then not the model's: never a quality run.
        Raises ValueError for an unknown acceptance or a forced_accept above spec_tokens.
        """
        if acceptance not in ("standard", "coupled"):
            raise ValueError(f"acceptance must be standard or coupled; got {acceptance!r}")
        if forced_accept is not None and not 0 <= forced_accept <= spec_tokens:
            raise ValueError(f"forced_accept must be 0 to spec_tokens = {spec_tokens}; got {forced_accept}")
        self.vocab_size = vocab_size
        self.max_num_seqs = max_num_seqs
        self.spec_tokens = spec_tokens
        self.padding_slot = max_num_seqs
        self._coupled = acceptance == "coupled"
        self._forced_accept = forced_accept
        self._device = torch.device(device)
        self._stages: dict[int, frozenset[Stage]] = {}  # of each assigned slot

        self._temperature = self._per_slot(torch.float32, 0.0)
        self._seeds = self._per_slot(torch.int64, 0)
        self._filters = Filters(
            min_p=self._per_slot(torch.float32, 0.0),
            top_k=self._per_slot(torch.int64, vocab_size),
            top_p=self._per_slot(torch.float32, 1.0),
        )
        # A row of V for each slot: made when the first request wants it, kept for good (captured graphs hold it).
        self._bias: Tensor | None = None
        self._penalties: Penalties | None = None

    @property
    def stages(self) -> frozenset[Stage]:
        """What some assigned slot needs; the others are skipped.

        A graph captured under one set serves any batch that needs no more. Slots that do not use a stage get the
        same bits with it and without it.
        """
        return frozenset().union(*self._stages.values())

    def assign(
        self, slot: int, params: SamplingParams, prompt_ids: Sequence[int], output_ids: Sequence[int] = ()
    ) -> None:
        """Give a free slot to a request.

        prompt_ids are what repetition penalties count; output_ids what a resumed request has already emitted.
        Raises ValueError if the slot is out of range or taken, or if params.seed is None.
        """
        if not 0 <= slot < self.max_num_seqs:
            raise ValueError(f"slot must be 0 to {self.max_num_seqs - 1}; got {slot}")
        if slot in self._stages:
            raise ValueError(f"slot {slot} is taken; release it before assigning it again")
        if params.seed is None:
            raise ValueError(f"the engine chooses a seed before a slot is assigned; slot {slot} got None")
        stages = _stages_of(params, self.vocab_size)
        self._stages[slot] = stages
        self._temperature[slot] = params.temperature if "noise" in stages else 0.0
        self._seeds[slot] = _as_int64(params.seed)
        if "filters" in stages:
            self._filters.min_p[slot] = params.min_p
            self._filters.top_k[slot] = params.top_k if 0 < params.top_k < self.vocab_size else self.vocab_size
            self._filters.top_p[slot] = params.top_p
        if "bias" in stages:
            self._assign_bias(slot, params)
        if "penalties" in stages:
            self._assign_penalties(slot, params, prompt_ids, output_ids)

    def release(self, slot: int) -> None:
        """Free a slot and turn its settings off. Raises ValueError if it is not assigned."""
        if slot not in self._stages:
            raise ValueError(f"slot {slot} is not assigned; assigned are {sorted(self._stages)}")
        stages = self._stages.pop(slot)
        self._temperature[slot] = 0.0
        if "filters" in stages:
            self._filters.min_p[slot] = 0.0
            self._filters.top_k[slot] = self.vocab_size
            self._filters.top_p[slot] = 1.0
        if "bias" in stages and self._bias is not None:
            self._bias[slot] = 0.0
        if "penalties" in stages and self._penalties is not None:
            self._penalties.repetition[slot] = 1.0
            self._penalties.frequency[slot] = 0.0
            self._penalties.presence[slot] = 0.0

    def sample(self, logits: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        """Draw one token for each row, as decoding without drafts does.

        logits bf16 or fp32 [B, V]; slots, positions int64 [B]. Returns int64 [B], -1 where logits were not finite.
        """
        return self._draw(self._process(logits, slots, None), slots, positions, TARGET)

    def draft(self, logits: Tensor, slots: Tensor, positions: Tensor, earlier: Tensor) -> tuple[Tensor, Tensor | None]:
        """Draw the next draft of each window, with the settings the target will judge it by.

        logits     bf16 or fp32 [B, V], the drafter's
        positions  int64 [B], index in the sequence of the token that is drafted; slots int64 [B]
        earlier    int64 [B, j], the window's drafts so far
        Returns tokens, int64 [B], and log q, fp32 [B, V], which is None where acceptance does not ask for it (coupled
        or forced acceptance, or every slot greedy). A token is -1 where logits were not finite: acceptance ends
        there, but an embedding must not be asked for it.
        """
        processed = self._process(logits, slots, earlier)
        tokens = self._draw(processed, slots, positions, TARGET if self._coupled else DRAFT)
        return tokens, torch.log_softmax(processed, dim=-1) if self._needs_log_q else None

    def accept(
        self, logits: Tensor, drafts: Tensor, log_q: Tensor | None, slots: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Judge each window of drafts.

        logits     bf16 or fp32 [B, k + 1, V], the target's; row j decides position positions + j
        drafts     int64 [B, k], -1 ends the window
        log_q      fp32 [B, k, V], the stacked results of draft; rows of greedy slots are not looked at. None: every
                   draft was made while no slot was random, and equality with the target's own draw decides (which
                   is exact for any draft; the rejection rule accepts more)
        slots      int64 [B]; positions int64 [B], index in the sequence of the first token to decide
        Penalties of row j count drafts 1 to j as if they had been emitted.
        Returns emitted, int64 [B, k + 1], and accepted, int64 [B]: accepted[b] drafts, then one more token, then -1.
        emitted[b, accepted[b]] is -1 where the row that should decide it was not finite; such a request is over.
        Raises ValueError if shapes disagree.
        """
        if drafts.ndim != 2 or logits.shape != (drafts.shape[0], drafts.shape[1] + 1, self.vocab_size):
            raise ValueError(
                f"accept wants logits [B, k + 1, {self.vocab_size}] and drafts [B, k]; "
                f"got {tuple(logits.shape)} and {tuple(drafts.shape)}"
            )
        k = drafts.shape[1]
        row_slots = slots[:, None].expand(-1, k + 1).flatten()
        processed = self._process(logits.flatten(0, 1), row_slots, _earlier_drafts(drafts))

        if self._needs_log_q and log_q is not None and k > 0:
            return accept_drafts(
                processed.view_as(logits), drafts, log_q, slots, positions, self._temperature, self._seeds
            )
        row_positions = (positions[:, None] + torch.arange(k + 1, device=positions.device)).flatten()
        drawn = self._draw(processed, row_slots, row_positions, TARGET).view(-1, k + 1)
        if self._forced_accept is not None:
            drafts, drawn = _forced(drafts, drawn, self._forced_accept)
        return match_drafts(drafts, drawn)

    def commit(self, slots: Tensor, emitted: Tensor) -> None:
        """Count emitted tokens, int64 [B] or [B, n], as output of their slots; -1 is no token."""
        if self._penalties is None:
            return
        emitted = emitted.view(slots.shape[0], -1)
        cells = slots[:, None] * self.vocab_size + emitted.clamp(min=0)
        self._penalties.counts.view(-1).scatter_add_(0, cells.flatten(), (emitted >= 0).int().flatten())

    @property
    def _needs_log_q(self) -> bool:
        return not self._coupled and self._forced_accept is None and "noise" in self.stages

    def _process(self, logits: Tensor, slots: Tensor, earlier: Tensor | None) -> Tensor:
        stages = self.stages
        return process_logits(
            logits,
            slots,
            self._temperature,
            bias=self._bias if "bias" in stages else None,
            penalties=self._penalties if "penalties" in stages else None,
            filters=self._filters if "filters" in stages else None,
            earlier=earlier,
        )

    def _draw(self, processed: Tensor, slots: Tensor, positions: Tensor, stream: int) -> Tensor:
        seeds = self._seeds if "noise" in self.stages else None
        return draw_tokens(processed, slots, positions, self._temperature, seeds, stream)

    def _per_slot(self, dtype: torch.dtype, value: float) -> Tensor:
        return torch.full((self.max_num_seqs + 1,), value, dtype=dtype, device=self._device)

    def _per_slot_and_token(self, dtype: torch.dtype) -> Tensor:
        return torch.zeros((self.max_num_seqs + 1, self.vocab_size), dtype=dtype, device=self._device)

    def _ids(self, ids: Sequence[int]) -> Tensor:
        tensor = torch.tensor(ids, dtype=torch.int64)
        if self._device.type == "cuda":
            tensor = tensor.pin_memory()  # a copy from pageable memory would wait for the device
        return tensor.to(self._device, non_blocking=True)

    def _assign_bias(self, slot: int, params: SamplingParams) -> None:
        if self._bias is None:
            self._bias = self._per_slot_and_token(torch.float32)
        row = self._bias[slot]
        for token, value in params.logit_bias:
            row[token] += value
        if params.forbidden_ids:
            row.index_fill_(0, self._ids(params.forbidden_ids), float("-inf"))

    def _assign_penalties(
        self, slot: int, params: SamplingParams, prompt_ids: Sequence[int], output_ids: Sequence[int]
    ) -> None:
        if self._penalties is None:
            self._penalties = Penalties(
                repetition=self._per_slot(torch.float32, 1.0),
                frequency=self._per_slot(torch.float32, 0.0),
                presence=self._per_slot(torch.float32, 0.0),
                counts=self._per_slot_and_token(torch.int32),
                in_prompt=self._per_slot_and_token(torch.bool),
            )
        table = self._penalties
        table.repetition[slot] = params.repetition_penalty
        table.frequency[slot] = params.frequency_penalty
        table.presence[slot] = params.presence_penalty
        table.in_prompt[slot].zero_().index_fill_(0, self._ids(prompt_ids), True)
        output = self._ids(output_ids)
        table.counts[slot].zero_().scatter_add_(0, output, torch.ones_like(output, dtype=torch.int32))


def _stages_of(params: SamplingParams, vocab_size: int) -> frozenset[Stage]:
    stages: set[Stage] = set()
    if params.temperature >= _GREEDY_BELOW:
        stages.add("noise")
        if params.min_p > 0.0 or 0 < params.top_k < vocab_size or params.top_p < 1.0:
            stages.add("filters")
    if params.logit_bias or params.forbidden_ids:
        stages.add("bias")
    if (params.repetition_penalty, params.frequency_penalty, params.presence_penalty) != (1.0, 0.0, 0.0):
        stages.add("penalties")
    return frozenset(stages)


def _as_int64(seed: int) -> int:
    """The low 64 bits of any integer, in the signed form a tensor can hold."""
    return (seed + 2**63) % 2**64 - 2**63


def _earlier_drafts(drafts: Tensor) -> Tensor:
    """For row j of each window the drafts before it, -1 elsewhere; [B * (k + 1), k]."""
    b, k = drafts.shape
    before = torch.ones(k + 1, k, dtype=torch.bool, device=drafts.device).tril(-1)  # [row, draft]
    return torch.where(before, drafts[:, None], -1).view(b * (k + 1), k)


def _forced(drafts: Tensor, drawn: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Drafts and draws that match in exactly the first count columns, where there are drafts."""
    columns = torch.arange(drawn.shape[1], device=drawn.device)
    proposed = torch.nn.functional.pad(drafts, (0, 1), value=-1)
    drawn = torch.where((columns < count) & (proposed >= 0), proposed, drawn)
    return torch.where(columns[:-1] < count, drafts, -1), drawn
