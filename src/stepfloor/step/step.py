"""Run one step: verify the newest token and its drafts, draw, accept, draft again, and prepare the next inputs.

Everything a step needs to know about a sequence is on the device, by slot; the host sends integers when a sequence
joins and reads the emitted ids. A prompt's last chunk ends like a step whose rows were all accepted.

On a GPU the decode part of a step is one captured graph for each number of sequences and of drafts
(`EngineConfig.decode_shapes`), and for what the sampler may have to do (STAGE_SETS), all captured at the start. Slots
that a batch leaves free point at the padding slot. The host queues a step, then reads the ids of the step before.
Sequences with a mask or whose log-probabilities are wanted decode behind the graph, kernel by kernel, in a pass of
their own.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from stepfloor.cache.tensors import Rows, allocate
from stepfloor.config import EngineConfig
from stepfloor.kernels.begin_rows import SlotState, begin_rows
from stepfloor.kernels.commit_rows import commit_rows
from stepfloor.kernels.take_rows import take_rows
from stepfloor.model.model import Model
from stepfloor.request import Batch, Chunk, Join, TokenLogprob
from stepfloor.sampler.sampler import Sampler, Stage

logger = logging.getLogger(__name__)

# A batch runs under the first of these that does all it needs: greedy, sampled, sampled among the likeliest, anything.
STAGE_SETS: tuple[frozenset[Stage], ...] = (
    frozenset(),
    frozenset({"noise"}),
    frozenset({"noise", "filters"}),
    frozenset({"noise", "filters", "bias", "penalties"}),
)
_POLL_S = 20e-6
_LIMIT_S = 300.0  # far beyond the longest chunk of the longest prompt


@dataclass(frozen=True, slots=True)
class Report:
    """What the device says of some slots, on its way to the host.

    values  [B, ...] on the host
    ready   recorded behind the copy; None where there is nothing to wait for
    """

    slots: tuple[int, ...]
    values: Tensor
    ready: torch.cuda.Event | None

    def wait(self) -> list[tuple[int, list[Any]]]:
        """Each slot with its row."""
        # asking does not stop the queue, as a synchronising call could
        begin = time.monotonic()
        while self.ready is not None and not self.ready.query():
            if time.monotonic() - begin > _LIMIT_S:
                raise RuntimeError(
                    f"the GPU has not ended the step of slots {list(self.slots)} after {_LIMIT_S:.0f} s: a kernel "
                    "hangs; end this process, and please report it with the command line"
                )
            time.sleep(_POLL_S)
        return list(zip(self.slots, self.values.tolist(), strict=False))


NO_MASKS: Mapping[int, Tensor] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Ids that a step emitted, still on their way; wait() reads them.

    reports   [B, R + 1] int64: emitted ids, -1 where the logits were not finite, then how many are accepted drafts
    drafts    [B, k] int64, proposed after what was emitted, of slots whose next mask depends on them
    logprobs  [1, R, 1 + 2 n] fp32 of a slot that wants them: of each emitted token, of the n best, and their ids
    failed    slot -> why its prompt could not be read; known at once. It emits nothing, its sequence is to be ended
    """

    reports: tuple[Report, ...]
    drafts: tuple[Report, ...] = ()
    logprobs: tuple[Report, ...] = ()
    failed: Mapping[int, str] = field(default_factory=dict)

    def wait(self) -> dict[int, list[int]]:
        """Emitted ids by slot, at least one each."""
        result: dict[int, list[int]] = {}
        for report in self.reports:
            for slot, (*ids, accepted) in report.wait():
                result[slot] = ids[: accepted + 1]
        return result

    def wait_drafts(self) -> dict[int, list[int]]:
        """Drafts by slot."""
        return {slot: drafts for report in self.drafts for slot, drafts in report.wait()}

    def wait_logprobs(self) -> dict[int, list[TokenLogprob]]:
        """Log-probabilities by slot, one for each row; those behind the last emitted token mean nothing."""
        result: dict[int, list[TokenLogprob]] = {}
        for report in self.logprobs:
            for slot, rows in report.wait():
                n = len(rows[0]) // 2
                best = (zip(map(int, row[1 + n :]), row[1 : 1 + n], strict=True) for row in rows)
                result[slot] = [TokenLogprob(row[0], tuple(top)) for row, top in zip(rows, best, strict=True)]
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
    """Decode graphs by number of sequences, of drafts, and by what the sampler does; they share one memory pool."""

    made: dict[tuple[int, int, frozenset[Stage]], DecodeGraph] = field(default_factory=dict)
    pool: Any = None


class Step:
    """Device state of all slots, and the one function that advances it.

    state  what begin_rows reads of each slot and commit_rows leaves there
    """

    def __init__(
        self,
        model: Model,
        sampler: Sampler,
        config: EngineConfig,
        stage_sets: Sequence[frozenset[Stage]] = STAGE_SETS,
    ) -> None:
        """Allocate all slots; on a GPU capture graphs for these of STAGE_SETS, the others at their first use."""
        self.model = model
        self.sampler = sampler
        self.config = config
        self.cache = allocate(model.config, config, model.embedding.dtype)
        self.on_gpu = model.embedding.is_cuda
        self.device = model.embedding.device
        slots = config.max_num_seqs + 1

        def integers(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=self.device)

        self.state = SlotState(
            token=integers(slots),
            length=integers(slots),
            drafts=integers(slots, config.spec_tokens),
            pending=integers(slots),
            rejected=integers(slots),
            history=integers(slots, model.config.ngram_size - 1),
        )
        self._nothing = integers(1)
        self._masks: Mapping[int, Tensor] = NO_MASKS
        self._wanted: dict[int, int] = {}
        self._logprobs: list[Report] = []
        self.graphs = Graphs()
        if self.on_gpu:
            self._warm_up(stage_sets)

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
        reports: list[Report] = []
        failed: dict[int, str] = {}
        for chunk in batch.chunks:
            try:
                token = self._prefill(chunk, batch.spec_tokens)
            except torch.OutOfMemoryError as error:  # a prompt's work alone is not allocated beforehand
                failed[chunk.slot] = str(error).partition("\n")[0]
                continue
            if token is not None:
                report = torch.cat((token[:, None], torch.zeros_like(token)[:, None]), 1)
                reports.append(self._to_host((chunk.slot,), report))
        if failed and self.on_gpu:
            torch.cuda.empty_cache()
        decodes = tuple(slot for slot in batch.decodes if slot not in failed)
        if decodes:
            apart = tuple(slot for slot in decodes if slot in masks or slot in self._wanted)
            together = tuple(slot for slot in decodes if slot not in apart) if self.on_gpu else decodes
            k = batch.spec_tokens
            if together:
                reports.append(self._to_host(together, self._run_decodes(together, k, len(batch.decodes))))
            if apart and self.on_gpu:
                reports.append(self._to_host(apart, self._decode(self._tensor(apart), k, apart)))
        masked = tuple(slot for slot, _ in batch.owners if slot in masks and slot not in failed)
        drafts = (self._to_host(masked, self.state.drafts[self._tensor(masked)]),) if masked else ()
        return StepOutput(tuple(reports), drafts, tuple(self._logprobs), failed)

    def _run_decodes(self, decodes: tuple[int, ...], k: int, sequences: int) -> Tensor:
        """Queue the decode part for these slots of all sequences that decode, captured where it can be; its report."""
        if not self.on_gpu:
            return self._decode(self._tensor(decodes), k, decodes)
        # k follows from all sequences, and there is a graph for both together only
        size = self.config.graph_size(sequences)
        slots = decodes + (self.sampler.padding_slot,) * (size - len(decodes))
        if self.config.enforce_eager:
            return self._decode(self._tensor(slots), k)
        captured = self._graph(size, k)
        if captured.loaded != slots:
            captured.slots.copy_(self._tensor(slots))
            captured.loaded = slots
        captured.graph.replay()
        return captured.report

    def _warm_up(self, stage_sets: Sequence[frozenset[Stage]]) -> None:
        """Run each graph's work once and capture it, all rows padding, so that no request waits for that."""
        begin = time.perf_counter()
        shapes = self.config.decode_shapes
        for size, k in sorted(shapes, key=lambda shape: -shape[0] * (shape[1] + 1)):  # the others fit in its memory
            for stages in stage_sets:
                with self.sampler.as_if(stages):
                    if self.config.enforce_eager:
                        with torch.inference_mode():
                            self.sampler.prepare(stages)
                            self._decode(self._padding(size), k)
                    else:
                        self.graphs.made[size, k, stages] = self._capture(size, k, stages)
        torch.cuda.synchronize(self.device)
        how, seconds = "ran" if self.config.enforce_eager else "captured", time.perf_counter() - begin
        logger.info("%s %d kinds of decode steps in %.1f s", how, len(shapes) * len(stage_sets), seconds)

    def _graph(self, size: int, k: int) -> DecodeGraph:
        """The graph for so many sequences and drafts, and for all that the sampler has to do now."""
        stages = self.sampler.stages
        for captured in STAGE_SETS:
            if stages <= captured and (made := self.graphs.made.get((size, k, captured))) is not None:
                return made
        made = self.graphs.made[size, k, stages] = self._capture(size, k, stages)
        logger.info("captured a decode step of %d sequences with %s", size, ", ".join(sorted(stages)))
        return made

    @torch.inference_mode()
    def _capture(self, size: int, k: int, stages: frozenset[Stage]) -> DecodeGraph:
        self.sampler.prepare(stages)
        slots = self._padding(size)
        # eagerly first: kernels are loaded and libraries make their workspaces
        self._decode(slots, k)
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.graphs.pool):
            report = self._decode(slots, k)
        self.graphs.pool = graph.pool()
        return DecodeGraph(graph, slots, report, tuple([self.sampler.padding_slot] * size))

    def _padding(self, size: int) -> Tensor:
        return torch.full((size,), self.sampler.padding_slot, dtype=torch.int64, device=self.device)

    def _join(self, join: Join) -> None:
        slot, state = join.slot, self.state
        self.sampler.assign(slot, join.sampling, join.token_ids)
        self.cache.reset(slot)
        self.cache.page_table[slot].zero_()
        self.cache.page_table[slot, : len(join.pages)] = self._tensor(join.pages)
        state.history[slot] = self.model.config.eos_token_id
        state.pending[slot] = 0
        state.rejected[slot] = 0

    def _prefill(self, chunk: Chunk, k: int) -> Tensor | None:
        """Run a prompt chunk; at the prompt's end draw the first token [1] and k drafts after it."""
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
            raw = model.logits(hidden[-1:])
            token = self.sampler.sample(self._masked(raw[None], (chunk.slot,))[0], slots, state.length[slots])
            self._note_logprobs(raw[None], token[None], (chunk.slot,))
            self.sampler.commit(slots, token)
            state.token[slots] = token
            following = token.clamp(min=0)
        if model.drafter is not None:
            shifted = torch.cat((tokens[:, 1:], following[None]), 1)
            residual, hidden = model.draft(model.drafter, residual, shifted, rows, self.cache)
            if token is not None:
                state.drafts[slots] = -1
                ahead = [state.length[slots] + j for j in range(k + 1)]
                self._draft(slots, ahead, residual[-1:], hidden[-1:], k)
        return token

    def _decode(self, slots: Tensor, k: int, numbers: Sequence[int] = ()) -> Tensor:
        """Verify k + 1 rows of each slot, commit what was accepted, draft k tokens again.

        numbers  the slots as the host knows them, where masks and log-probabilities are looked at; never in a graph
        Returns the report [B, k + 2]: emitted ids, then how many of them are accepted drafts.
        """
        model, state = self.model, self.state
        begun = begin_rows(state, slots, k)
        tokens, first, history = begun.tokens, begun.first, begun.history
        # settled by `embed`, which starts in turn: nothing behind it starts before begin_rows has ended
        rows = Rows(tokens, slots, first, begun.pending, begun.rejected, history, chunk=False, settled=True)
        residual, hidden = model.target(rows, self.cache)
        logits = model.logits(hidden).unflatten(0, tokens.shape)
        masked = self._masked(logits, numbers)
        emitted, accepted = self.sampler.accept(masked, begun.drafts, slots, begun.positions)
        self._note_logprobs(logits, emitted, numbers)
        self.sampler.commit(slots, emitted)
        following, last, ahead, report = commit_rows(
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
            state.drafts,
            self.sampler.padding_slot,
        )
        if model.drafter is not None:
            residual, hidden = model.draft(model.drafter, residual, following, rows, self.cache)
            if k:
                self._draft(slots, ahead.unbind(), *take_rows(residual, hidden, last), k)
        return report

    def _draft(self, slots: Tensor, ahead: Sequence[Tensor], residual: Tensor, hidden: Tensor, k: int) -> None:
        """Propose k tokens after the newest one; ahead: its position, and those of the k, [B] each.

        residual [B, S D] and hidden [B, D] are the drafter's at the row before the newest token. Each further pass
        is one row, whose keys and values are provisional: the next step's first pass writes those positions again.
        The slots' drafts are -1 before: a step that verifies more than this one proposes finds -1 behind them.
        """
        model, drafter = self.model, self.model.drafter
        if drafter is None:
            raise RuntimeError("drafting without a drafter")
        nothing = self._nothing.expand_as(slots)
        drafts: list[Tensor] = []
        for j in range(k):
            if j:
                previous = drafts[-1][:, None]
                # A pass of one row without history: the drafter has no n-gram layer, which would read pending and
                # rejected. Settled by the draw before it, which starts in turn.
                rows = Rows(previous, slots, ahead[j - 1], nothing, nothing, previous[:, :0], chunk=False, settled=True)
                residual, hidden = model.draft(drafter, residual, previous, rows, self.cache)
            logits = model.logits(hidden, drafter.head)
            drafts.append(self.sampler.draft(logits, slots, ahead[j + 1], drafts, self.state.drafts))

    def _to_host(self, slots: tuple[int, ...], values: Tensor) -> Report:
        if not self.on_gpu:
            return Report(slots, values, None)
        copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        copy.copy_(values, non_blocking=True)
        ready = torch.cuda.Event()
        ready.record()
        return Report(slots, copy, ready)

    def _masked(self, logits: Tensor, slots: Sequence[int]) -> Tensor:
        """Logits [B, R, V] with -inf where a slot's mask forbids a token; the same tensor if none has a mask."""
        rows = [row for row, slot in enumerate(slots) if slot in self._masks]
        if not rows:
            return logits
        masks = torch.stack([self._masks[slots[row]] for row in rows])
        masks = masks.pin_memory().to(self.device, non_blocking=True) if self.on_gpu else masks
        bits = (masks[..., None] >> torch.arange(32, dtype=torch.int32, device=self.device)) & 1  # [rows, R, W, 32]
        allowed = bits.flatten(2)[..., : logits.shape[2]] != 0
        index = self._tensor(rows)
        logits = logits.clone()
        logits[index] = logits[index].masked_fill(~allowed, float("-inf"))
        return logits

    def _note_logprobs(self, logits: Tensor, emitted: Tensor, slots: Sequence[int]) -> None:
        """Keep what was asked for of logits [B, R, V], before any setting or mask, and emitted [B, R]."""
        for row, slot in enumerate(slots):
            if (count := self._wanted.get(slot)) is not None:
                log_p = torch.log_softmax(logits[row].float(), dim=-1)
                chosen = log_p.gather(1, emitted[row].clamp(min=0)[:, None])
                values, ids = torch.topk(log_p, count, dim=-1)
                # float32 holds every id: a vocabulary has fewer than 2**24
                self._logprobs.append(self._to_host((slot,), torch.cat((chosen, values, ids.float()), 1)[None]))

    def _tensor(self, values: Sequence[int]) -> Tensor:
        """Integers on the device, without waiting for what is queued there."""
        made = torch.tensor(values, dtype=torch.int64)
        return made.pin_memory().to(self.device, non_blocking=True) if self.on_gpu else made
