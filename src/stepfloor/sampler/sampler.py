"""From logits to tokens: the settings, seeds and counts of every slot, and the four calls a step makes.

A step calls accept (or sample, for a prompt's first token), commit, then draft k times. Nothing here waits for the
device: what a batch needs is known from host integers, and every tensor has a fixed shape.

A captured graph may rely on the tensors that `prepare` makes for its stages, and on the settings: they are made once
and stay where they are. Settings change between replays, by copies on the current stream that nobody waits for.

All noise is keyed by (seed, position), position being the index of the token in its whole sequence. In standard mode
drafts have a stream of their own and acceptance is the rejection rule; in coupled mode drafts are drawn with the
target's noise and accepted while they equal the target's draw, so that the text is the same for every k.

Source: architecture of vLLM's V1 sampler for the meaning of each setting; the kernels name their papers.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor

from stepfloor.kernels.accept_drafts import Proposals, accept_drafts
from stepfloor.kernels.count_tokens import count_tokens
from stepfloor.kernels.draw_tokens import DRAFT, TARGET, Stages, draw_tokens
from stepfloor.kernels.match_drafts import match_drafts
from stepfloor.kernels.process_logits import Filters, Penalties, process_logits
from stepfloor.request import SamplingParams

Stage = Literal["noise", "bias", "penalties", "filters"]

# Below this temperature a row is greedy, as in vLLM: dividing by less takes fp32 logits to infinity.
_GREEDY_BELOW = 1e-5

# A slot's settings are one row of 8-byte words, so that one copy writes them: two integers, then floats in pairs.
_INTEGERS = ("seed", "top_k")
_FLOATS = ("temperature", "min_p", "top_p", "repetition", "frequency", "presence")
_WORDS = len(_INTEGERS) + len(_FLOATS) // 2


class Sampler:
    """Draws, judges and counts tokens for all slots of one engine.

    proposals  what each slot's drafts were drawn from; None until a random slot drafts or `prepare` is told of one
    """

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
        acceptance: 2 for 3 tokens a step. The text is then not the model's: never a quality run.
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
        self._as_if: frozenset[Stage] | None = None

        self._settings = torch.zeros((max_num_seqs + 1, _WORDS), dtype=torch.int64, device=self._device)
        columns = _columns(self._settings)
        self._temperature, self._seeds = columns["temperature"], columns["seed"]
        self._filters = Filters(columns["min_p"], columns["top_k"], columns["top_p"])
        self._factors = (columns["repetition"], columns["frequency"], columns["presence"])
        for slot in range(max_num_seqs + 1):
            self._write(slot, SamplingParams(temperature=0.0, seed=0))
        # A row of V for each slot, and for each draft: made when a request or a graph first wants them, kept for good.
        self._bias: Tensor | None = None
        self._penalties: Penalties | None = None
        self.proposals: Proposals | None = None

    @property
    def stages(self) -> frozenset[Stage]:
        """What some assigned slot needs; the others are skipped.

        A graph captured under one set serves any batch that needs no more. Slots that do not use a stage get the
        same bits with it and without it.
        """
        return self._as_if if self._as_if is not None else frozenset().union(*self._stages.values())

    @contextmanager
    def as_if(self, stages: frozenset[Stage]) -> Generator[None]:
        """Do what these stages ask for, whoever is assigned: a graph is captured before its requests come."""
        self._as_if = stages
        try:
            yield
        finally:
            self._as_if = None

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
        self._write(slot, params)
        self._make(stages)
        if "bias" in stages:
            self._assign_bias(slot, params)
        if "penalties" in stages:
            self._assign_penalties(slot, prompt_ids, output_ids)

    def release(self, slot: int) -> None:
        """Free a slot and turn its settings off. Raises ValueError if it is not assigned."""
        if slot not in self._stages:
            raise ValueError(f"slot {slot} is not assigned; assigned are {sorted(self._stages)}")
        stages = self._stages.pop(slot)
        self._write(slot, SamplingParams(temperature=0.0, seed=0))
        if "bias" in stages and self._bias is not None:
            self._bias[slot].zero_()

    def prepare(self, stages: frozenset[Stage]) -> None:
        """Make what a graph of these stages holds, before it is captured.

        Memory: 4 bytes a slot and token for bias, 5 for penalties, 4 for each of the k drafts with noise in standard
        mode. What is there already stays as it is, so graphs of other stages stay valid.
        """
        self._make(stages)
        if "noise" in stages and self._judges_by_q and self.proposals is None:
            shape = (self.max_num_seqs + 1, self.spec_tokens, self.vocab_size)
            self.proposals = Proposals(
                torch.zeros(shape, dtype=torch.float32, device=self._device),
                torch.zeros((*shape[:2], 2), dtype=torch.float32, device=self._device),
            )

    def sample(self, logits: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        """Draw one token for each row, as decoding without drafts does.

        logits bf16 or fp32 [B, V]; slots, positions int64 [B]. Returns int64 [B], -1 where logits were not finite.
        """
        return self._draw(logits, slots, positions, TARGET)

    def draft(
        self,
        logits: Tensor,
        slots: Tensor,
        positions: Tensor,
        earlier: Sequence[Tensor],
        table: Tensor | None = None,
    ) -> Tensor:
        """Draw the next draft of each window, with the settings the target will judge it by.

        logits     bf16 or fp32 [B, V], the drafter's
        positions  int64 [B], index in the sequence of the token that is drafted; slots int64 [B]
        earlier    the windows' j drafts so far, int64 [B] each
        table      int64 [slots, k], where to keep the tokens by slot too, in column j
        Returns tokens, int64 [B]. Where acceptance will ask for it (standard, not forced, some slot random), what draft
        j was drawn from is kept by slot. A token is -1 where logits were not finite: acceptance ends there, but an
        embedding must not be asked for it.
        """
        proposals = None
        if self._keeps_q:
            self.prepare(self.stages)
            proposals = self.proposals
        # only penalties ask for them
        before = torch.stack(tuple(earlier), 1) if earlier and "penalties" in self.stages else None
        stream = TARGET if self._coupled else DRAFT
        return self._draw(logits, slots, positions, stream, before, proposals, table, len(earlier))

    def accept(self, logits: Tensor, drafts: Tensor, slots: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Judge each window of drafts.

        logits     bf16 or fp32 [B, k + 1, V], the target's; row j decides position positions + j
        drafts     int64 [B, k], -1 ends the window. Drafts of random slots are those that draft returned last. If it
                   was not asked since a slot became random, equality with the target's own draw decides (which is exact
                   for any draft; the rejection rule accepts more)
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
        if self._keeps_q and self.proposals is not None and drafts.shape[1] > 0:
            rows, stages = self._rows(logits.flatten(0, 1), slots, drafts)
            return accept_drafts(
                rows.view_as(logits),
                drafts,
                self.proposals,
                slots,
                positions,
                self._temperature,
                self._seeds,
                stages,
            )
        drawn = self._draw(logits.flatten(0, 1), slots, positions, TARGET, drafts).view(-1, drafts.shape[1] + 1)
        return match_drafts(drafts, drawn, self._forced_accept)

    def commit(self, slots: Tensor, emitted: Tensor) -> None:
        """Count emitted tokens, int64 [B] or [B, n], as output of their slots; -1 is no token."""
        if self._penalties is not None and "penalties" in self.stages:
            count_tokens(self._penalties.counts, slots, emitted.view(slots.shape[0], -1))

    @property
    def _judges_by_q(self) -> bool:
        return not self._coupled and self._forced_accept is None and self.spec_tokens > 0

    @property
    def _keeps_q(self) -> bool:
        return self._judges_by_q and "noise" in self.stages

    def _draw(
        self,
        logits: Tensor,
        slots: Tensor,
        positions: Tensor,
        stream: int,
        earlier: Tensor | None = None,
        proposals: Proposals | None = None,
        table: Tensor | None = None,
        column: int = 0,
    ) -> Tensor:
        """Draw from each row; keep what it was drawn from in a column of proposals, and the token in the table's."""
        rows, stages = self._rows(logits, slots, earlier)
        seeds = self._seeds if "noise" in self.stages else None
        return draw_tokens(rows, slots, positions, self._temperature, seeds, stream, stages, proposals, table, column)

    def _rows(self, logits: Tensor, slots: Tensor, earlier: Tensor | None) -> tuple[Tensor, Stages | None]:
        """Rows, and what they still need: raw ones and their stages, or, where filters apply, processed ones."""
        stages = self.stages
        bias = self._bias if "bias" in stages else None
        penalties = self._penalties if "penalties" in stages else None
        if "filters" not in stages:
            return logits, Stages(bias, penalties, earlier)
        return process_logits(logits, slots, self._temperature, bias, penalties, self._filters, earlier), None

    def _make(self, stages: frozenset[Stage]) -> None:
        """Tables of slots and tokens that the stages need."""
        shape = (self.max_num_seqs + 1, self.vocab_size)
        if "bias" in stages and self._bias is None:
            self._bias = torch.zeros(shape, dtype=torch.float32, device=self._device)
        if "penalties" in stages and self._penalties is None:
            counts = torch.zeros(shape, dtype=torch.int32, device=self._device)
            in_prompt = torch.zeros(shape, dtype=torch.bool, device=self._device)
            self._penalties = Penalties(*self._factors, counts, in_prompt)

    def _write(self, slot: int, params: SamplingParams) -> None:
        """Copy a slot's settings to its row: one copy, queued behind the steps that still read the old ones."""
        row = torch.zeros((1, _WORDS), dtype=torch.int64)
        random = params.temperature >= _GREEDY_BELOW
        values = {
            "seed": _as_int64(params.seed or 0),
            "top_k": params.top_k if random and 0 < params.top_k < self.vocab_size else self.vocab_size,
            "temperature": params.temperature if random else 0.0,
            "min_p": params.min_p if random else 0.0,
            "top_p": params.top_p if random else 1.0,
            "repetition": params.repetition_penalty,
            "frequency": params.frequency_penalty,
            "presence": params.presence_penalty,
        }
        for name, column in _columns(row).items():
            column[0] = values[name]
        self._settings[slot].copy_(self._sent(row[0]), non_blocking=True)

    def _sent(self, values: Tensor) -> Tensor:
        """The values where a copy to the device need not wait for it.

        Pinned memory of torch's own allocator: it is not handed out again before the copies from it have run.
        """
        return values.pin_memory() if self._device.type == "cuda" else values

    def _on_device(self, values: Tensor) -> Tensor:
        return self._sent(values).to(self._device, non_blocking=True)

    def _ids(self, ids: Sequence[int]) -> Tensor:
        return self._on_device(torch.tensor(ids, dtype=torch.int64))

    def _assign_bias(self, slot: int, params: SamplingParams) -> None:
        """The row is zero: release leaves it so."""
        if self._bias is None:
            raise RuntimeError("a slot with bias, and no table of it")
        added: dict[int, float] = {}
        for token, value in params.logit_bias:
            added[token] = added.get(token, 0.0) + value
        added.update(dict.fromkeys(params.forbidden_ids, float("-inf")))
        values = torch.tensor(list(added.values()), dtype=torch.float32)
        self._bias[slot].scatter_(0, self._ids(list(added)), self._on_device(values))

    def _assign_penalties(self, slot: int, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> None:
        if self._penalties is None:
            raise RuntimeError("a slot with penalties, and no table of them")
        table = self._penalties
        table.in_prompt[slot].zero_().index_fill_(0, self._ids(prompt_ids), True)
        table.counts[slot].zero_()
        if output_ids:
            slots = self._ids([slot])
            count_tokens(table.counts, slots, self._ids(output_ids)[None])


def _columns(table: Tensor) -> dict[str, Tensor]:
    """The settings by name, each one number a row of the table [slots, _WORDS]."""
    floats = table.view(torch.float32)
    columns = {name: table[:, i] for i, name in enumerate(_INTEGERS)}
    return columns | {name: floats[:, 2 * len(_INTEGERS) + i] for i, name in enumerate(_FLOATS)}


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
