"""Run one step: verify the newest token and its drafts, draw, accept, draft again, and prepare the next inputs.

Everything a step needs to know about a sequence is on the device, by slot; the host sends integers when a sequence
joins and reads the emitted ids. A prompt's last chunk ends like a step whose rows were all accepted.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stepfloor.cache.tensors import Rows, allocate
from stepfloor.config import EngineConfig
from stepfloor.model.model import Model
from stepfloor.request import Batch, Chunk, Join
from stepfloor.sampler.sampler import Sampler


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Ids that a step emitted, still on the device; wait() brings them to the host.

    parts  (slots, emitted [B, R] int64, accepted [B] int64): row b holds accepted[b] drafts and one more id, which
           is -1 where the logits were not finite; what stands behind that is no token
    """

    parts: tuple[tuple[tuple[int, ...], Tensor, Tensor], ...]

    def wait(self) -> dict[int, list[int]]:
        """Emitted ids by slot, at least one each."""
        result: dict[int, list[int]] = {}
        for slots, emitted, accepted in self.parts:
            for slot, ids, count in zip(slots, emitted.tolist(), accepted.tolist(), strict=True):
                result[slot] = ids[: count + 1]
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

    @torch.inference_mode()
    def run(self, batch: Batch) -> StepOutput:
        """Queue one step. The ids arrive with StepOutput.wait()."""
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
            parts.append((batch.decodes, *self._decode(self._tensor(batch.decodes))))
        return StepOutput(tuple(parts))

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
            token = self.sampler.sample(model.logits(hidden[-1:]), slots, self.length[slots])
            self.sampler.commit(slots, token)
            self.token[slots] = token
            following = token.clamp(min=0)
        if model.drafter is not None:
            shifted = torch.cat((tokens[:, 1:], following[None]), 1)
            residual, hidden = model.draft(model.drafter, residual, shifted, rows, self.cache)
            if token is not None:
                self._draft(slots, residual[-1:], hidden[-1:])
        return token

    def _decode(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Verify k + 1 rows of each slot, commit what was accepted, draft again.

        Returns emitted [B, k + 1] and accepted [B].
        """
        model = self.model
        drafts, first = self.drafts[slots], self.length[slots]
        tokens = torch.cat((self.token[slots, None], drafts), 1).clamp(min=0)
        pending, rejected = self.pending[slots], self.rejected[slots]
        # settled: the gather of history is a plain kernel behind that of pending
        rows = Rows(tokens, slots, first, pending, rejected, self.history[slots], chunk=False, settled=True)
        residual, hidden = model.target(rows, self.cache)
        logits = model.logits(hidden).unflatten(0, tokens.shape)
        log_q = None if self.log_q is None else self.log_q[slots]
        emitted, accepted = self.sampler.accept(logits, drafts, log_q, slots, first + 1)
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

    def _tensor(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.config.device)
