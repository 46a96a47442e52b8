"""Who runs next, in integers: a queue of requests, slots, pages, and what each step should run.

First come, first served; a sequence keeps its slot and pages until it ends. A step is one prompt chunk followed by
the decode rows of every sequence whose prompt is done, so that a long prompt costs the others one chunk a step, no
more; prompts take turns, one chunk each. Where a prompt is cut depends on nothing but its length. The loop is one step
ahead of its results, so a sequence gets pages for the longest outcome when it joins, and a result is matched to the
request that held the slot when the step was queued.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from stepfloor.cache.pages import PageAllocator
from stepfloor.errors import QueueFullError, UserError
from stepfloor.request import Batch, Chunk, Delivery, FinishReason, Join, Request


@dataclass(slots=True)
class Running:
    """A request that holds a slot.

    serial     of its joining; a request id may come back while a step of its last use is still under way
    prefilled  prompt tokens queued so far; delivered  tokens delivered so far
    in_flight  steps queued that will give this sequence at least one token each
    proposed   drafts that the last of them proposes
    turn       of its next prompt chunk: the lowest goes first
    """

    serial: int
    request: Request
    slot: int
    pages: tuple[int, ...]
    turn: int = 0
    prefilled: int = 0
    delivered: int = 0
    in_flight: int = 0
    proposed: int = 0


class Scheduler:
    """Queues and assignments; no tensor, no clock.

    max_num_seqs   slots, numbered from 0 (the one after the last is scratch)
    num_pages      pages, page 0 (scratch) included; page_tokens  tokens per page
    spec_tokens    drafts per step at most; chunk_tokens  longest prompt chunk
    max_model_len  prompt and output together, in tokens
    max_queued     requests that may wait for a slot; None: any number
    vocab_size     an id that is not below it came from a fault; None: ids are not checked
    drafts         of a step in which so many sequences decode; None: always spec_tokens
    """

    def __init__(
        self,
        max_num_seqs: int,
        num_pages: int,
        page_tokens: int,
        spec_tokens: int,
        chunk_tokens: int,
        max_model_len: int,
        max_queued: int | None = None,
        vocab_size: int | None = None,
        drafts: Callable[[int], int] | None = None,
    ) -> None:
        self.page_tokens = page_tokens
        self.max_queued = max_queued
        self.vocab_size = vocab_size
        self.spec_tokens = spec_tokens
        self.drafts = drafts or (lambda sequences: spec_tokens)
        self.chunk_tokens = chunk_tokens
        self.max_model_len = max_model_len
        self.allocator = PageAllocator(num_pages)
        self.waiting: deque[Request] = deque()
        self.running: dict[int, Running] = {}  # by slot, in order of joining
        self.free_slots = list(range(max_num_seqs - 1, -1, -1))
        self.left: list[int] = []  # slots given back since the last batch
        self.joined = 0
        self.turns = 0

    def has_work(self) -> bool:
        """Whether a step should run, if only to tell it that a slot is free."""
        return bool(self.waiting or self.running or self.left)

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises UserError if its prompt is empty or leaves no room for one token, QueueFullError if too many wait.
        """
        prompt = len(request.token_ids)
        if not prompt:
            raise UserError("the prompt is empty; send at least one token")
        if request.max_tokens < 1:
            raise UserError(f"max_tokens must be at least 1; got {request.max_tokens}")
        if prompt >= self.max_model_len:
            raise UserError(
                f"the prompt has {prompt} tokens and the context is {self.max_model_len} (--max-model-len), "
                "which leaves no room for a new token; shorten the prompt"
            )
        if request.min_tokens > request.max_tokens:
            raise UserError(f"min_tokens is {request.min_tokens}, above max_tokens {request.max_tokens}")
        self.check_room()
        self.waiting.append(request)

    def check_room(self, requests: int = 1) -> None:
        """Raise QueueFullError unless this many requests more may be submitted."""
        queued = len(self.waiting) + requests - len(self.free_slots)
        if self.max_queued is not None and queued > self.max_queued:
            raise QueueFullError(
                f"{len(self.running)} requests run, {len(self.waiting)} wait and {requests} more would make {queued} "
                f"without a slot; {self.max_queued} may wait (--max-num-queued-reqs); try again later"
            )

    def end(self, request_id: str) -> bool:
        """Drop a request wherever it is, slot and pages included; False if it is not here."""
        for request in self.waiting:
            if request.request_id == request_id:
                self.waiting.remove(request)
                return True
        for sequence in self.running.values():
            if sequence.request.request_id == request_id:
                self._release(sequence)
                return True
        return False

    def next_batch(self) -> Batch:
        """Admit what fits, then choose one prompt chunk and every sequence that can decode."""
        joins = self._admit()
        chunks: list[Chunk] = []
        decodes: list[int] = []
        owners: list[tuple[int, int]] = []
        prompts = [s for s in self.running.values() if s.prefilled < len(s.request.token_ids)]
        if prompts:
            sequence = min(prompts, key=lambda s: s.turn)
            chunks.append(self._next_chunk(sequence))
        for sequence in self.running.values():
            if chunks and sequence.slot == chunks[0].slot:
                if chunks[0].following is not None:
                    continue  # no token comes of this chunk
            elif sequence.prefilled < len(sequence.request.token_ids):
                continue
            elif sequence.request.waits and sequence.in_flight:
                continue  # the mask of its next step depends on what this one emits
            elif sequence.delivered + sequence.in_flight < self._limit(sequence.request):
                decodes.append(sequence.slot)
            else:
                continue  # the steps under way are sure to end it
            sequence.in_flight += 1
            owners.append((sequence.slot, sequence.serial))
        wanted = ((slot, self.running[slot].request.logprobs) for slot, _ in owners)
        logprobs = tuple((slot, count) for slot, count in wanted if count is not None)
        spec_tokens = self.drafts(max(1, len(decodes))) if owners else 0
        verified = tuple(min(self.running[slot].proposed, spec_tokens) for slot in decodes)
        for slot, _ in owners:
            self.running[slot].proposed = spec_tokens
        leaves = tuple(self.left)
        self.left.clear()
        return Batch(
            leaves, tuple(joins), tuple(chunks), tuple(decodes), spec_tokens, verified, tuple(owners), logprobs
        )

    def commit(self, batch: Batch, emitted: Mapping[int, Sequence[int]]) -> list[Delivery]:
        """Take the results of a step, slot -> ids; stop ids and limits are applied here, token by token."""
        deliveries = []
        for slot, serial in batch.owners:
            sequence = self.running.get(slot)
            if sequence is None or sequence.serial != serial:
                continue  # ended since the step was queued
            sequence.in_flight -= 1
            delivery = self._deliver(sequence, emitted[slot])
            deliveries.append(delivery)
            if delivery.finish_reason is not None:
                self._release(sequence)
        return deliveries

    def _admit(self) -> list[Join]:
        joins = []
        while self.waiting and self.free_slots:
            request = self.waiting[0]
            pages = self.allocator.allocate(-(-self._reach(request) // self.page_tokens))
            if pages is None:
                break  # first come, first served: nobody overtakes
            self.waiting.popleft()
            slot = self.free_slots.pop()
            self.running[slot] = Running(self.joined, request, slot, pages, self._turn())
            self.joined += 1
            joins.append(Join(slot, pages, request.token_ids, request.sampling))
        return joins

    def _next_chunk(self, sequence: Running) -> Chunk:
        prompt, start = sequence.request.token_ids, sequence.prefilled
        end = min(start + self.chunk_tokens, len(prompt))
        sequence.prefilled = end
        sequence.turn = self._turn()
        return Chunk(sequence.slot, start, prompt[start:end], prompt[end] if end < len(prompt) else None)

    def _turn(self) -> int:
        """The end of the round."""
        self.turns += 1
        return self.turns

    def _deliver(self, sequence: Running, ids: Sequence[int]) -> Delivery:
        request = sequence.request
        kept: list[int] = []
        reason: FinishReason | None = None
        stop_id = None
        consumed = 0
        for token in ids:
            if token < 0 or (self.vocab_size is not None and token >= self.vocab_size):
                reason = "error"  # the sampler saw logits that are not numbers, or its result is not an id
                break
            consumed += 1
            if token in request.stop_token_ids:
                reason, stop_id = "stop", token
                break
            kept.append(token)
            sequence.delivered += 1
            if sequence.delivered == self._limit(request):
                reason = "length"
                break
        return Delivery(request.request_id, sequence.slot, tuple(kept), consumed, reason, stop_id)

    def _limit(self, request: Request) -> int:
        """Tokens the request may be given."""
        return min(request.max_tokens, self.max_model_len - len(request.token_ids))

    def _reach(self, request: Request) -> int:
        """Positions the request may touch: its tokens, and three windows of drafts.

        The last step may start one window past the limit (its predecessor's result was not known), verifies a
        window, and its drafter writes a window ahead of that.
        """
        return len(request.token_ids) + self._limit(request) + 3 * self.spec_tokens + 1

    def _release(self, sequence: Running) -> None:
        del self.running[sequence.slot]
        self.allocator.free(sequence.pages)
        self.free_slots.append(sequence.slot)
        self.left.append(sequence.slot)
