"""Run one step: verify the newest token and its drafts, draw, accept, draft again, and prepare the next inputs.

Everything a step needs to know about a sequence is on the device, by slot; the host sends integers when a sequence
joins and reads the emitted ids. A prompt's last chunk ends like a step whose rows were all accepted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from stepfloor.cache.tensors import Rows, allocate
from stepfloor.config import EngineConfig
from stepfloor.model.model import Model
from stepfloor.request import Batch, Chunk, Join, TokenLogprob
from stepfloor.sampler.sampler import Sampler

NO_MASKS: Mapping[int, Tensor] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Ids that a step emitted, still on the device; wait() brings them to the host.

    parts     (slots, emitted [B, R] int64, accepted [B] int64): row b holds accepted[b] drafts and one more id, which
              is -1 where the logits were not finite; what stands behind that is no token
    drafts    (slots, drafts [B, k] int64) proposed after what was emitted, for slots whose next mask depends on them
    logprobs  (slot, of each emitted token [R], best values [R, n], best ids [R, n]), where the batch asked for them
    """

    parts: tuple[tuple[tuple[int, ...], Tensor, Tensor], ...]
    drafts: tuple[tuple[tuple[int, ...], Tensor], ...] = ()
    logprobs: tuple[tuple[int, Tensor, Tensor, Tensor], ...] = ()

    def wait(self) -> dict[int, list[int]]:
        """Emitted ids by slot, at least one each."""
        result: dict[int, list[int]] = {}
        for slots, emitted, accepted in self.parts:
            for slot, ids, count in zip(slots, emitted.tolist(), accepted.tolist(), strict=True):
                result[slot] = ids[: count + 1]
        return result

    def wait_drafts(self) -> dict[int, list[int]]:
        """Drafts by slot."""
        return {s: row for slots, drafts in self.drafts for s, row in zip(slots, drafts.tolist(), strict=True)}

    def wait_logprobs(self) -> dict[int, list[TokenLogprob]]:
        """Log-probabilities by slot, one for each row; those behind the last emitted token mean nothing."""
        result: dict[int, list[TokenLogprob]] = {}
        for slot, chosen, values, ids in self.logprobs:
            best = (tuple(zip(i, v, strict=True)) for i, v in zip(ids.tolist(), values.tolist(), strict=True))
            result[slot] = [TokenLogprob(own, top) for own, top in zip(chosen.tolist(), best, strict=True)]
        return result


class Step:
    """Device state of all slots, and the one function that advances it.

    token    [slots] the newest token, not yet verified; length [slots] its position
    drafts   [slots, k] tokens proposed after it; log_q [slots, k, V] their distribution, if acceptance needs it
    pending, rejected  [slots] rows of the last step that count, and that do not
    history  [slots, ngram_size - 1] the committed tokens before `token`
    """

    def __init__(self, model: Model, sampler: Sampler, config: EngineConfig) -> None:
        self.model = model
        self.sampler = sampler
        self.config = config
        self.cache = allocate(model.config, config, model.embedding.dtype)
        self.k = config.spec_tokens
        slots = config.max_num_seqs + 1

        def integers(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=config.device)

        self.token = integers(slots)
        self.length = integers(slots)
        self.drafts = integers(slots, self.k)
        self.pending = integers(slots)
        self.rejected = integers(slots)
        self.history = integers(slots, model.config.ngram_size - 1)
        self.log_q: Tensor | None = None
        self._masks: Mapping[int, Tensor] = NO_MASKS
        self._wanted: dict[int, int] = {}
        self._logprobs: list[tuple[int, Tensor, Tensor, Tensor]] = []

    @torch.inference_mode()
    def run(self, batch: Batch, masks: Mapping[int, Tensor] = NO_MASKS) -> StepOutput:
        """Queue one step. The ids arrive with StepOutput.wait().

        masks  by slot, int32 [rows, ceil(V / 32)] on the host: bit i of word w of row j is set if row j may give token
               32 w + i. A slot that has one runs this step only after its last result was read, because row j's mask
               depends on the drafts before it; its output says which drafts come next.
        """
        self._masks, self._wanted = masks, dict(batch.logprobs)
        self._logprobs.clear()
        for slot in batch.leaves:
            # the steps that still ran for it were queued before, so its settings may change now
            self.sampler.release(slot)
        for join in batch.joins:
            self._join(join)
        parts: list[tuple[tuple[int, ...], Tensor, Tensor]] = []
        for chunk in batch.chunks:
            token = self._prefill(chunk)
            if token is not None:
                parts.append(((chunk.slot,), token[:, None], torch.zeros_like(token)))
        if batch.decodes:
            parts.append((batch.decodes, *self._decode(self._tensor(batch.decodes), batch.decodes)))
        masked = tuple(slot for slot, _ in batch.owners if slot in masks)
        drafts = ((masked, self.drafts[self._tensor(masked)]),) if masked else ()
        return StepOutput(tuple(parts), drafts, tuple(self._logprobs))

    def _join(self, join: Join) -> None:
        slot = join.slot
        self.sampler.assign(slot, join.sampling, join.token_ids)
        self.cache.reset(slot)
        self.cache.page_table[slot].zero_()
        self.cache.page_table[slot, : len(join.pages)] = self._tensor(join.pages)
        self.history[slot] = self.model.config.eos_token_id
        self.pending[slot] = 0
        self.rejected[slot] = 0

    def _prefill(self, chunk: Chunk) -> Tensor | None:
        """Run a prompt chunk; at the prompt's end draw the first token [1] and draft after it."""
        model, slots = self.model, self._tensor((chunk.slot,))
        tokens = self._tensor(chunk.token_ids)[None]
        first = self._tensor((chunk.start,))
        nothing = torch.zeros_like(slots)
        rows = Rows(tokens, slots, first, nothing, nothing, self.history[slots], chunk=True)
        residual, hidden = model.target(rows, self.cache)
        self.history[slots] = torch.cat((rows.history, tokens), 1)[:, -rows.history.shape[1] :]
        token = following = None
        if chunk.following is not None:
            following = self._tensor((chunk.following,))
        else:
            self.length[slots] = first + tokens.shape[1]
            raw = model.logits(hidden[-1:])
            token = self.sampler.sample(self._masked(raw[None], (chunk.slot,))[0], slots, self.length[slots])
            self._note_logprobs(raw[None], token[None], (chunk.slot,))
            self.sampler.commit(slots, token)
            self.token[slots] = token
            following = token.clamp(min=0)
        if model.drafter is not None:
            shifted = torch.cat((tokens[:, 1:], following[None]), 1)
            residual, hidden = model.draft(model.drafter, residual, shifted, rows, self.cache)
            if token is not None:
                self._draft(slots, residual[-1:], hidden[-1:])
        return token

    def _decode(self, slots: Tensor, numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Verify k + 1 rows of each slot, commit what was accepted, draft again.

        numbers  the slots as the host knows them
        Returns emitted [B, k + 1] and accepted [B].
        """
        model = self.model
        drafts, first = self.drafts[slots], self.length[slots]
        tokens = torch.cat((self.token[slots, None], drafts), 1).clamp(min=0)
        rows = Rows(tokens, slots, first, self.pending[slots], self.rejected[slots], self.history[slots], chunk=False)
        residual, hidden = model.target(rows, self.cache)
        logits = model.logits(hidden).unflatten(0, tokens.shape)
        log_q = None if self.log_q is None else self.log_q[slots]
        emitted, accepted = self.sampler.accept(self._masked(logits, numbers), drafts, log_q, slots, first + 1)
        self._note_logprobs(logits, emitted, numbers)
        self.sampler.commit(slots, emitted)
        newest = emitted.gather(1, accepted[:, None])
        self._commit(rows, accepted, newest)
        if model.drafter is not None:
            # row j is followed by the token of row j + 1, the last accepted row by the newest token
            following = torch.cat((tokens[:, 1:], tokens[:, :1]), 1).scatter(1, accepted[:, None], newest.clamp(min=0))
            residual, hidden = model.draft(model.drafter, residual, following, rows, self.cache)
            last = torch.arange(slots.shape[0], device=slots.device) * tokens.shape[1] + accepted
            self._draft(slots, residual[last], hidden[last])
        return emitted, accepted

    def _commit(self, rows: Rows, accepted: Tensor, newest: Tensor) -> None:
        """Make the accepted rows the sequence's past; the newest token waits to be verified."""
        seen = torch.cat((rows.history, rows.tokens), 1)
        width = rows.history.shape[1]
        last = accepted[:, None] + 1 + torch.arange(width, device=accepted.device)
        self.history[rows.slots] = seen.gather(1, last)
        self.token[rows.slots] = newest.squeeze(1)
        self.length[rows.slots] = rows.first + accepted + 1
        self.pending[rows.slots] = accepted + 1
        self.rejected[rows.slots] = rows.tokens.shape[1] - 1 - accepted

    def _draft(self, slots: Tensor, residual: Tensor, hidden: Tensor) -> None:
        """Propose k tokens after the newest one.

        residual [B, S D] and hidden [B, D] are the drafter's at the row before the newest token. Each further pass
        is one row, whose keys and values are provisional: the next step's first pass writes those positions again.
        """
        model, drafter = self.model, self.model.drafter
        if drafter is None:
            raise RuntimeError("drafting without a drafter")
        length = self.length[slots]
        drafts = slots.new_empty((slots.shape[0], 0))
        for j in range(self.k):
            if j:
                previous = drafts[:, -1:].clamp(min=0)
                nothing = torch.zeros_like(slots)
                rows = Rows(previous, slots, length + j - 1, nothing, nothing, self.history[slots], chunk=False)
                residual, hidden = model.draft(drafter, residual, previous, rows, self.cache)
            token, log_q = self.sampler.draft(model.logits(hidden, drafter.head), slots, length + 1 + j, drafts)
            drafts = torch.cat((drafts, token[:, None]), 1)
            if log_q is not None:
                if self.log_q is None:
                    self.log_q = log_q.new_zeros((self.token.shape[0], self.k, log_q.shape[1]))
                self.log_q[slots, j] = log_q
        self.drafts[slots] = drafts

    def _masked(self, logits: Tensor, slots: Sequence[int]) -> Tensor:
        """Logits [B, R, V] with -inf where a slot's mask forbids a token; the same tensor if none has a mask."""
        rows = [row for row, slot in enumerate(slots) if slot in self._masks]
        if not rows:
            return logits
        masks = torch.stack([self._masks[slots[row]] for row in rows]).to(logits.device, non_blocking=True)
        bits = (masks[..., None] >> torch.arange(32, dtype=torch.int32, device=logits.device)) & 1  # [rows, R, W, 32]
        allowed = bits.flatten(2)[..., : logits.shape[2]] != 0
        logits = logits.clone()
        logits[self._tensor(rows)] = logits[self._tensor(rows)].masked_fill(~allowed, float("-inf"))
        return logits

    def _note_logprobs(self, logits: Tensor, emitted: Tensor, slots: Sequence[int]) -> None:
        """Keep what was asked for of logits [B, R, V], before any setting or mask, and emitted [B, R]."""
        for row, slot in enumerate(slots):
            if (count := self._wanted.get(slot)) is not None:
                log_p = torch.log_softmax(logits[row].float(), dim=-1)
                chosen = log_p.gather(1, emitted[row].clamp(min=0)[:, None])[:, 0]
                self._logprobs.append((slot, chosen, *torch.topk(log_p, count, dim=-1)))

    def _tensor(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.config.device)
