"""Run one step: verify the newest token and its drafts, draw, accept, draft again, and prepare the next inputs.

Everything a step needs to know about a sequence is on the device, by slot; the host sends integers when a sequence
joins and reads the emitted ids. A prompt's last chunk ends like a step whose rows were all accepted.

On a GPU the decode part of a step is one captured graph for each number of sequences (BUCKETS); slots that a batch
leaves free point at the padding slot. The host queues a step, then reads the ids of the step before.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from stepfloor.cache.tensors import Rows, allocate
from stepfloor.config import EngineConfig
from stepfloor.kernels.begin_rows import SlotState, begin_rows
from stepfloor.kernels.commit_rows import commit_rows
from stepfloor.model.model import Model
from stepfloor.request import Batch, Chunk, Join
from stepfloor.sampler.sampler import Sampler, Stage

logger = logging.getLogger(__name__)

BUCKETS = (1, 2, 4, 8, 16)
_POLL_S = 20e-6


@dataclass(frozen=True, slots=True)
class Report:
    """What the device says of some slots, on its way to the host.

    ids    [B, R + 1] int64 on the host: emitted ids, then how many of them are accepted drafts
    ready  recorded behind the copy; None where there is nothing to wait for
    """

    slots: tuple[int, ...]
    ids: Tensor
    ready: torch.cuda.Event | None


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Ids that a step emitted, still on their way; wait() reads them.

    An id is -1 where the logits were not finite.
    """

    reports: tuple[Report, ...]

    def wait(self) -> dict[int, list[int]]:
        """Emitted ids by slot, at least one each."""
        result: dict[int, list[int]] = {}
        for report in self.reports:
            # asking does not stop the queue, as a synchronising call could
            while report.ready is not None and not report.ready.query():
                time.sleep(_POLL_S)
            for slot, (*ids, accepted) in zip(report.slots, report.ids.tolist(), strict=False):
                result[slot] = ids[: accepted + 1]
        return result


@dataclass(slots=True)
class DecodeGraph:
    """The captured decode part of a step: slots [B] is what it reads, report [B, R + 1] what it leaves."""

    graph: torch.cuda.CUDAGraph
    slots: Tensor
    report: Tensor
    loaded: tuple[int, ...] = ()


@dataclass(slots=True)
class Graphs:
    """Decode graphs by number of sequences and by what the sampler does; they share one memory pool."""

    made: dict[tuple[int, frozenset[Stage]], DecodeGraph] = field(default_factory=dict)
    pool: Any = None


class Step:
    """Device state of all slots, and the one function that advances it.

    state  what begin_rows reads of each slot and commit_rows leaves there
    """

    def __init__(self, model: Model, sampler: Sampler, config: EngineConfig) -> None:
        self.model = model
        self.sampler = sampler
        self.config = config
        self.cache = allocate(model.config, config, model.embedding.dtype)
        self.k = config.spec_tokens
        self.on_gpu = model.embedding.is_cuda
        self.device = model.embedding.device
        slots = config.max_num_seqs + 1

        def integers(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=self.device)

        self.state = SlotState(
            token=integers(slots),
            length=integers(slots),
            drafts=integers(slots, self.k),
            pending=integers(slots),
            rejected=integers(slots),
            history=integers(slots, model.config.ngram_size - 1),
        )
        self.graphs = Graphs()
        if self.on_gpu:
            self._warm_up()

    @torch.inference_mode()
    def run(self, batch: Batch) -> StepOutput:
        """Queue one step. The ids arrive with StepOutput.wait()."""
        for slot in batch.leaves:
            # the steps that still ran for it were queued before, so its settings may change now
            self.sampler.release(slot)
        for join in batch.joins:
            self._join(join)
        reports: list[Report] = []
        for chunk in batch.chunks:
            token = self._prefill(chunk)
            if token is not None:
                report = torch.cat((token[:, None], torch.zeros_like(token)[:, None]), 1)
                reports.append(self._to_host((chunk.slot,), report))
        if batch.decodes:
            reports.append(self._to_host(batch.decodes, self._run_decodes(batch.decodes)))
        return StepOutput(tuple(reports))

    def _run_decodes(self, decodes: tuple[int, ...]) -> Tensor:
        """Queue the decode part for these slots, captured where it can be; its report."""
        if not self.on_gpu:
            return self._decode(self._tensor(decodes))
        size = bucket(len(decodes), self.config.max_num_seqs)
        slots = decodes + (self.sampler.padding_slot,) * (size - len(decodes))
        if self.config.enforce_eager:
            return self._decode(self._tensor(slots))
        captured = self._graph(size)
        if captured.loaded != slots:
            captured.slots.copy_(self._tensor(slots))
            captured.loaded = slots
        captured.graph.replay()
        return captured.report

    def _warm_up(self) -> None:
        """Run each graph's work once and capture it, all rows padding, so that no request waits for that."""
        begin = time.perf_counter()
        sizes = sorted({bucket(count, self.config.max_num_seqs) for count in range(1, self.config.max_num_seqs + 1)})
        for size in reversed(sizes):  # the largest first: the others fit in its memory
            if self.config.enforce_eager:
                with torch.inference_mode():
                    self._decode(self._tensor((self.sampler.padding_slot,) * size))
            else:
                self._graph(size)
        torch.cuda.synchronize(self.device)
        how = "ran" if self.config.enforce_eager else "captured"
        logger.info("%s decode steps of %s sequences in %.1f s", how, sizes, time.perf_counter() - begin)

    def _graph(self, size: int) -> DecodeGraph:
        """The graph for so many sequences and what the sampler has to do now; captured at its first use."""
        stages = self.sampler.stages
        made = self.graphs.made.get((size, stages))
        if made is None:
            made = self.graphs.made[size, stages] = self._capture(size)
            if stages:
                logger.info("captured a decode step of %d sequences with %s", size, ", ".join(sorted(stages)))
        return made

    @torch.inference_mode()
    def _capture(self, size: int) -> DecodeGraph:
        self.sampler.prepare(self.sampler.stages)
        slots = torch.full((size,), self.sampler.padding_slot, dtype=torch.int64, device=self.device)
        # eagerly first, on the padding slot: kernels are loaded and libraries make their workspaces
        self._decode(slots)
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.graphs.pool):
            report = self._decode(slots)
        self.graphs.pool = graph.pool()
        return DecodeGraph(graph, slots, report, tuple([self.sampler.padding_slot] * size))

    def _join(self, join: Join) -> None:
        slot, state = join.slot, self.state
        self.sampler.assign(slot, join.sampling, join.token_ids)
        self.cache.reset(slot)
        self.cache.page_table[slot].zero_()
        self.cache.page_table[slot, : len(join.pages)] = self._tensor(join.pages)
        state.history[slot] = self.model.config.eos_token_id
        state.pending[slot] = 0
        state.rejected[slot] = 0

    def _prefill(self, chunk: Chunk) -> Tensor | None:
        """Run a prompt chunk; at the prompt's end draw the first token [1] and draft after it."""
        model, state, slots = self.model, self.state, self._tensor((chunk.slot,))
        tokens = self._tensor(chunk.token_ids)[None]
        first = self._tensor((chunk.start,))
        nothing = torch.zeros_like(slots)
        rows = Rows(tokens, slots, first, nothing, nothing, state.history[slots], chunk=True)
        residual, hidden = model.target(rows, self.cache)
        state.history[slots] = torch.cat((rows.history, tokens), 1)[:, -rows.history.shape[1] :]
        token = following = None
        if chunk.following is not None:
            following = self._tensor((chunk.following,))
        else:
            state.length[slots] = first + tokens.shape[1]
            token = self.sampler.sample(model.logits(hidden[-1:]), slots, state.length[slots])
            self.sampler.commit(slots, token)
            state.token[slots] = token
            following = token.clamp(min=0)
        if model.drafter is not None:
            shifted = torch.cat((tokens[:, 1:], following[None]), 1)
            residual, hidden = model.draft(model.drafter, residual, shifted, rows, self.cache)
            if token is not None:
                self._draft(slots, state.length[slots], residual[-1:], hidden[-1:])
        return token

    def _decode(self, slots: Tensor) -> Tensor:
        """Verify k + 1 rows of each slot, commit what was accepted, draft again.

        Returns the report [B, k + 2]: emitted ids, then how many of them are accepted drafts.
        """
        model, state = self.model, self.state
        tokens, first, pending, rejected, history = begin_rows(state, slots)
        # a plain kernel, which starts when all before it has ended: what follows may read slots and pending at once
        drafts = state.drafts[slots]
        rows = Rows(tokens, slots, first, pending, rejected, history, chunk=False, settled=True)
        residual, hidden = model.target(rows, self.cache)
        logits = model.logits(hidden).unflatten(0, tokens.shape)
        emitted, accepted = self.sampler.accept(logits, drafts, slots, first + 1)
        self.sampler.commit(slots, emitted)
        following, last, report = commit_rows(
            emitted,
            accepted,
            tokens,
            slots,
            first,
            history,
            state.token,
            state.length,
            state.pending,
            state.rejected,
            state.history,
            self.sampler.padding_slot,
        )
        if model.drafter is not None:
            residual, hidden = model.draft(model.drafter, residual, following, rows, self.cache)
            self._draft(slots, first + accepted + 1, residual[last], hidden[last])
        return report

    def _draft(self, slots: Tensor, length: Tensor, residual: Tensor, hidden: Tensor) -> None:
        """Propose k tokens after the newest one, whose positions are length [B].

        residual [B, S D] and hidden [B, D] are the drafter's at the row before the newest token. Each further pass
        is one row, whose keys and values are provisional: the next step's first pass writes those positions again.
        """
        model, drafter = self.model, self.model.drafter
        if drafter is None:
            raise RuntimeError("drafting without a drafter")
        nothing = torch.zeros_like(slots)
        drafts = slots.new_empty((slots.shape[0], self.k))
        for j in range(self.k):
            if j:
                previous = drafts[:, j - 1 : j].clamp(min=0)
                # a pass of one row without history: the drafter has no n-gram layer
                rows = Rows(previous, slots, length + (j - 1), nothing, nothing, previous[:, :0], chunk=False)
                residual, hidden = model.draft(drafter, residual, previous, rows, self.cache)
            logits = model.logits(hidden, drafter.head)
            drafts[:, j] = self.sampler.draft(logits, slots, length + (1 + j), drafts[:, :j])
        self.state.drafts[slots] = drafts

    def _to_host(self, slots: tuple[int, ...], report: Tensor) -> Report:
        if not self.on_gpu:
            return Report(slots, report, None)
        ids = torch.empty(report.shape, dtype=report.dtype, pin_memory=True)
        ids.copy_(report, non_blocking=True)
        ready = torch.cuda.Event()
        ready.record()
        return Report(slots, ids, ready)

    def _tensor(self, values: Sequence[int]) -> Tensor:
        """Integers on the device, without waiting for what is queued there."""
        made = torch.tensor(values, dtype=torch.int64)
        return made.pin_memory().to(self.device, non_blocking=True) if self.on_gpu else made


def bucket(count: int, max_num_seqs: int) -> int:
    """Sequences of the graph that serves so many: the next of BUCKETS, or the engine's own limit if that is less."""
    return next((size for size in BUCKETS if count <= size <= max_num_seqs), max(count, max_num_seqs))
