"""Who runs next: a state machine against a reference model that knows every request's whole text, and bugs it catches.

The machine is the engine's loop without the engine: a step's ids come back after the next step is queued, and
requests come, end by stop id, limit or error, and are cancelled in between, under request ids that are used again.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from stepfloor.cache.pages import SCRATCH_PAGE
from stepfloor.errors import QueueFullError, UserError
from stepfloor.request import Batch, Chunk, Delivery, Grammar, Join, Request
from stepfloor.scheduler.scheduler import Running, Scheduler

STOP = 9
PAGE_TOKENS = 4


@dataclass
class Expected:
    """One use of a request id.

    text  what the model would say, one id for each position after the prompt; -1 where it breaks down
    seen  ids delivered so far
    """

    request: Request
    text: list[int]
    seen: list[int] = field(default_factory=list)
    reason: str | None = None

    def whole(self, max_model_len: int) -> tuple[list[int], str]:
        """All it should be given, and why it ends."""
        limit = min(self.request.max_tokens, max_model_len - len(self.request.token_ids))
        ids: list[int] = []
        for token in self.text:
            if token < 0:
                return ids, "error"
            if token == STOP:
                return ids, "stop"
            ids.append(token)
            if len(ids) == limit:
                return ids, "length"
        raise AssertionError("the text is longer than any limit")


@dataclass
class Device:
    """A slot as the device sees it: positions written, and how far each sequence has come."""

    owner: Expected
    pages: tuple[int, ...]
    prefilled: int = 0
    emitted: int = 0
    passed_over: int = 0  # chunks of others since its last


class SchedulerMachine(RuleBasedStateMachine):
    make: Callable[..., Scheduler] = Scheduler

    @initialize(
        slots=st.integers(1, 4),
        spec=st.integers(0, 7),
        chunk=st.integers(1, 8),
        length=st.integers(4, 24),
        data=st.data(),
    )
    def start(self, slots: int, spec: int, chunk: int, length: int, data: st.DataObject) -> None:
        longest = -(-(length + 3 * spec + 1) // PAGE_TOKENS)
        # enough for the longest sequence, or for all slots at once, or between
        pages = 1 + data.draw(st.integers(longest, slots * longest), label="pages")
        self.scheduler = self.make(slots, pages, PAGE_TOKENS, spec, chunk, length)
        self.slots, self.pages, self.spec, self.chunk, self.length = slots, pages, spec, chunk, length
        self.queue: list[Expected] = []  # submitted, not joined
        self.open: dict[str, Expected] = {}
        self.done: list[Expected] = []
        self.device: dict[int, Device] = {}
        self.assigned: set[int] = set()  # slots that the sampler holds
        self.under_way: tuple[Batch, dict[int, list[int]], dict[int, Expected]] | None = None

    @rule(
        name=st.sampled_from("abcdef"),
        prompt=st.integers(0, 26),
        max_tokens=st.integers(0, 30),
        text=st.lists(st.sampled_from([1, 2, 3, 4, 1, 2, 3, 4, STOP, -1]), min_size=40, max_size=40),
        waits=st.booleans(),
    )
    def request(self, name: str, prompt: int, max_tokens: int, text: list[int], waits: bool) -> None:
        if name not in self.open:  # the engine refuses an id in use
            self.submit(name, prompt, max_tokens, text, waits)

    def submit(self, name: str, prompt: int, max_tokens: int, text: list[int], waits: bool = False) -> None:
        grammar = Grammar("regex", "x") if waits else None
        request = Request(name, tuple(range(prompt)), max_tokens=max_tokens, stop_token_ids=(STOP,), grammar=grammar)
        if prompt == 0 or prompt >= self.length or max_tokens < 1:
            with pytest.raises(UserError):
                self.scheduler.submit(request)
            return
        self.scheduler.submit(request)
        self.open[name] = Expected(request, text)
        self.queue.append(self.open[name])

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.open)), label="request")
        assert self.scheduler.end(name)
        self._forget(name)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), text=st.lists(st.sampled_from([5, 6, STOP]), min_size=40, max_size=40))
    def start_over(self, data: st.DataObject, text: list[int]) -> None:
        """The same id at once, with another text: its old step may still be under way in the slot it gets."""
        name = data.draw(st.sampled_from(sorted(self.open)), label="request")
        request = self.open[name].request
        assert self.scheduler.end(name)
        self._forget(name)
        self.submit(name, len(request.token_ids), request.max_tokens, text)

    @rule()
    def cancel_nobody(self) -> None:
        assert not self.scheduler.end("nobody")

    @rule(accepted=st.integers(0, 7))
    def step(self, accepted: int) -> None:
        """Queue a step, then take the results of the one before."""
        batch = self.scheduler.next_batch()
        results, owners = self._run(batch, min(accepted, self.spec))
        previous, self.under_way = self.under_way, (batch, results, owners)
        if previous is not None:
            self._commit(*previous)

    def _run(self, batch: Batch, accepted: int) -> tuple[dict[int, list[int]], dict[int, Expected]]:
        for slot in batch.leaves:
            self.assigned.remove(slot)
        for join in batch.joins:
            self._join(join)
        assert len(batch.chunks) <= 1
        results: dict[int, list[int]] = {}
        for chunk in batch.chunks:
            self._prefill(chunk, results)
        assert len(set(batch.decodes)) == len(batch.decodes)
        for slot in batch.decodes:
            device = self.device[slot]
            assert slot not in results, "a slot is prefilled and decoded in one step"
            assert device.prefilled == len(device.owner.request.token_ids), "a prompt that is not done decodes"
            assert device.emitted, "a sequence without a first token decodes"
            # The newest token and k drafts are verified; the drafter's own rows begin at the next newest token, at
            # most k + 1 on, and are k - 1.
            first = device.prefilled + device.emitted - 1
            last = first + self.spec + max(0, self.spec - 1)
            assert last < len(device.pages) * PAGE_TOKENS, "a row would be written behind the last page"
            results[slot] = self._next_ids(device, accepted)
        owned = {slot for slot, _ in batch.owners}
        assert owned == set(results)
        if self.under_way is not None:
            again = owned & {s for s, o in self.under_way[2].items() if self.device[s].owner is o}
            assert not any(self.device[slot].owner.request.waits for slot in again), "its mask is not known yet"
        return results, {slot: self.device[slot].owner for slot in owned}

    def _join(self, join: Join) -> None:
        assert join.slot not in self.assigned, "the sampler still holds the slot"
        assert 0 <= join.slot < self.slots
        self.assigned.add(join.slot)
        owner = self.queue.pop(0)
        assert owner.request.token_ids == join.token_ids
        assert self.open.get(owner.request.request_id) is owner, "first come, first served"
        assert SCRATCH_PAGE not in join.pages
        assert len(set(join.pages)) == len(join.pages)
        for other in self.device.values():
            held = self.open.get(other.owner.request.request_id) is other.owner
            assert not held or not set(other.pages) & set(join.pages), "two sequences share a page"
        self.device[join.slot] = Device(owner, join.pages)

    def _prefill(self, chunk: Chunk, results: dict[int, list[int]]) -> None:
        device = self.device[chunk.slot]
        prompt = device.owner.request.token_ids
        end = chunk.start + len(chunk.token_ids)
        assert chunk.start == device.prefilled
        assert chunk.token_ids == prompt[chunk.start : end]
        assert 0 < len(chunk.token_ids) <= self.chunk
        assert chunk.following == (prompt[end] if end < len(prompt) else None)
        assert end <= len(device.pages) * PAGE_TOKENS
        device.prefilled = end
        others = [d for d in self.device.values() if d is not device and self._prefills(d)]
        device.passed_over = 0
        for other in others:
            other.passed_over += 1
            assert other.passed_over < self.slots, "prompts do not take turns"
        if chunk.following is None:
            results[chunk.slot] = self._next_ids(device, 0)

    def _prefills(self, device: Device) -> bool:
        """Whether its prompt is under way."""
        request = device.owner.request
        return self.open.get(request.request_id) is device.owner and device.prefilled < len(request.token_ids)

    def _next_ids(self, device: Device, accepted: int) -> list[int]:
        """What the device emits: it knows no limits and no stops, and after a breakdown anything."""
        ids = (device.owner.text + [7] * 100)[device.emitted : device.emitted + accepted + 1]
        broken = next((i for i, token in enumerate(ids) if token < 0), len(ids) - 1)
        ids = ids[: broken + 1]
        device.emitted += len(ids)
        return ids

    def _commit(self, batch: Batch, results: dict[int, list[int]], owners: dict[int, Expected]) -> None:
        given: dict[str, Delivery] = {}
        for delivery in self.scheduler.commit(batch, results):
            assert delivery.request_id not in given
            given[delivery.request_id] = delivery
        for slot, owner in owners.items():
            name = owner.request.request_id
            if self.open.get(name) is not owner:
                continue  # it ended while its step was under way; whoever has its id or slot now gets nothing of it
            delivery = given.pop(name)
            assert delivery.slot == slot
            owner.seen.extend(delivery.token_ids)
            ids, reason = owner.whole(self.length)
            assert owner.seen == ids[: len(owner.seen)], "tokens of somebody else, or in another order"
            ended = delivery.finish_reason is not None
            looked_at = len(delivery.token_ids) + (delivery.finish_reason == "stop")
            assert delivery.consumed == looked_at <= len(results[slot])
            assert ended or delivery.token_ids == tuple(results[slot])
            if ended:
                assert (owner.seen, delivery.finish_reason) == (ids, reason)
                self.done.append(owner)
                del self.open[name]
        assert not given, "a delivery to somebody whose step it was not"

    def _forget(self, name: str) -> None:
        owner = self.open.pop(name)
        self.queue = [other for other in self.queue if other is not owner]

    @invariant()
    def nothing_is_lost(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        running = self.scheduler.running.values()
        held = [page for sequence in running for page in sequence.pages]
        assert len(held) == len(set(held))
        assert self.scheduler.allocator.num_free + len(held) == self.pages - 1
        slots = [*self.scheduler.running, *self.scheduler.free_slots]
        assert sorted(slots) == list(range(self.slots))
        assert len(running) + len(self.queue) == len(self.open)
        assert all(sequence.in_flight >= 0 for sequence in running)
        assert self.scheduler.has_work() == bool(self.open or self.scheduler.left)

    def teardown(self) -> None:
        """Whatever happened, everybody is served in the end, and nothing is held after that."""
        if not hasattr(self, "scheduler"):
            return
        # the slowest text is one token a step, one chunk a step, one after another
        steps = sum(len(e.request.token_ids) + 40 for e in self.open.values()) + 2
        for _ in range(steps):
            if not self.open and not self.assigned:
                break
            self.step(0)
            self.nothing_is_lost()
        assert not self.open, "deadlock"
        assert not self.assigned
        assert self.scheduler.allocator.num_free == self.pages - 1


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=100, stateful_step_count=40)


class ForgetsTheSerial(Scheduler):
    """Bug: a result is matched by request id, which may have been given out again."""

    def commit(self, batch: Batch, emitted: dict[int, list[int]]) -> list[Delivery]:
        names = getattr(self, "names", {})
        now = {slot: sequence for slot, sequence in self.running.items() if names.get(sequence.serial)}
        owners = []
        for slot, serial in batch.owners:
            sequence = now.get(slot)
            same = sequence is not None and names[sequence.serial] == names.get(serial)
            owners.append((slot, sequence.serial if same and sequence is not None else serial))
        return super().commit(replace(batch, owners=tuple(owners)), emitted)

    def next_batch(self) -> Batch:
        batch = super().next_batch()
        self.names = getattr(self, "names", {}) | {s.serial: s.request.request_id for s in self.running.values()}
        return batch


class OneWindowShort(Scheduler):
    """Bug: no pages for the step that starts past the limit because its predecessor was not read yet."""

    def _reach(self, request: Request) -> int:
        return super()._reach(request) - 2 * self.spec_tokens


class LetsTheSmallOvertake(Scheduler):
    """Bug: who fits goes first."""

    def _admit(self) -> list[Join]:
        joins = super()._admit()
        self.waiting.rotate(-1)
        return joins + super()._admit()


class KeepsPagesOfTheCancelled(Scheduler):
    """Bug: a cancelled sequence gives its slot back and not its pages."""

    def end(self, request_id: str) -> bool:
        pages = {s.request.request_id: s.pages for s in self.running.values()}.get(request_id, ())
        found = super().end(request_id)
        taken = self.allocator.allocate(len(pages)) if pages else None
        return found and (taken is not None or not pages)


class CountsStepsAsTokens(Scheduler):
    """Bug: the limit is checked when a window is accepted, not token by token."""

    def _deliver(self, sequence: object, ids: list[int]) -> Delivery:
        delivery = super()._deliver(sequence, ids)  # type: ignore[arg-type]
        return replace(delivery, token_ids=tuple(i for i in ids if i >= 0 and i != STOP))


class ReleasesLate(Scheduler):
    """Bug: a slot is handed out again before the sampler has heard that it is free."""

    def next_batch(self) -> Batch:
        batch = super().next_batch()
        late = getattr(self, "late", ())
        self.late = batch.leaves
        return replace(batch, leaves=late)


class LongPromptsFirst(Scheduler):
    """Bug: a prompt that was begun is finished before the next one has a chunk."""

    def _next_chunk(self, sequence: Running) -> Chunk:
        turn = sequence.turn
        chunk = super()._next_chunk(sequence)
        sequence.turn = turn
        return chunk


class DoesNotWait(Scheduler):
    """Bug: a request with a grammar runs on before its mask can be known."""

    def next_batch(self) -> Batch:
        held = {s.slot: s.in_flight for s in self.running.values()}
        for sequence in self.running.values():
            sequence.in_flight = 0
        batch = super().next_batch()
        for slot, count in held.items():
            if slot in self.running:
                self.running[slot].in_flight += count
        return batch


BUGS = [
    LongPromptsFirst,
    DoesNotWait,
    ForgetsTheSerial,
    OneWindowShort,
    LetsTheSmallOvertake,
    KeepsPagesOfTheCancelled,
    CountsStepsAsTokens,
    ReleasesLate,
]


@pytest.mark.parametrize("bug", BUGS)
def test_the_machine_catches(bug: type[Scheduler]) -> None:
    class Broken(SchedulerMachine):
        make = bug

    with pytest.raises((AssertionError, KeyError, IndexError, ValueError)):
        run_state_machine_as_test(
            Broken,
            settings=settings(max_examples=300, stateful_step_count=40, database=None, phases=[Phase.generate]),
        )


def test_a_step_in_steady_decode() -> None:
    """Two sequences: prompts take turns, one chunk a step, and whose prompt is done decodes beside them."""
    scheduler = Scheduler(2, 40, PAGE_TOKENS, 3, 4, 64)
    for name in "ab":
        scheduler.submit(Request(name, tuple(range(6)), max_tokens=8))
    first = scheduler.next_batch()
    assert [join.slot for join in first.joins] == [0, 1]
    assert first.chunks == (Chunk(0, 0, (0, 1, 2, 3), 4),)
    assert not first.owners
    second = scheduler.next_batch()
    assert second.chunks == (Chunk(1, 0, (0, 1, 2, 3), 4),)
    assert not second.owners
    third = scheduler.next_batch()
    assert third.chunks == (Chunk(0, 4, (4, 5), None),)
    assert third.owners == ((0, 0),)
    fourth, fifth = scheduler.next_batch(), scheduler.next_batch()
    assert (fourth.chunks, fourth.decodes) == ((Chunk(1, 4, (4, 5), None),), (0,))
    assert (fifth.chunks, fifth.decodes) == ((), (0, 1))


def test_a_long_prompt_stalls_nobody() -> None:
    """A prompt of 100 chunks came first: who decodes gets a token a step, and a short prompt waits for one chunk."""
    scheduler = Scheduler(3, 400, PAGE_TOKENS, 0, 4, 600)
    scheduler.submit(Request("decodes", (1,), max_tokens=200))
    scheduler.commit(scheduler.next_batch(), {0: [1]})
    scheduler.submit(Request("long", tuple(range(400))))
    assert scheduler.next_batch().decodes == (0,)
    scheduler.submit(Request("short", (1, 2)))
    batches = [scheduler.next_batch() for _ in range(100)]
    assert all(0 in batch.decodes for batch in batches)
    assert [batch.chunks[0].slot for batch in batches[:3]] == [1, 2, 1]
    assert 2 in batches[2].decodes
    assert all(len(batch.chunks) == 1 and len(batch.chunks[0].token_ids) <= 4 for batch in batches)


def test_the_queue_is_bounded() -> None:
    scheduler = Scheduler(1, 40, PAGE_TOKENS, 0, 4, 16, max_queued=2)
    for name in "abc":
        scheduler.submit(Request(name, (1,)))
    with pytest.raises(QueueFullError, match=r"0 requests run, 3 wait and 1 more would make 3 .* 2 may wait"):
        scheduler.submit(Request("d", (1,)))
    scheduler.next_batch()
    with pytest.raises(QueueFullError, match="1 requests run, 2 wait"):
        scheduler.submit(Request("d", (1,)))
    assert scheduler.end("a")
    scheduler.next_batch()
    scheduler.submit(Request("d", (1,)))


def test_a_request_with_a_mask_waits_for_each_result() -> None:
    """Its mask depends on what it emitted; the other one still runs a step ahead."""
    scheduler = Scheduler(2, 40, PAGE_TOKENS, 0, 4, 16)
    scheduler.submit(Request("masked", (1,), min_tokens=3, max_tokens=8))
    scheduler.submit(Request("free", (1,), max_tokens=8))
    steps = [scheduler.next_batch() for _ in range(4)]
    assert [step.decodes for step in steps] == [(), (), (1,), (1,)]
    for step in steps:
        scheduler.commit(step, {slot: [2] for slot, _ in step.owners})
    assert scheduler.next_batch().decodes == (0, 1)
    assert scheduler.next_batch().decodes == (1,)


@pytest.mark.parametrize("token", [-1, 4294967295, 100])
def test_impossible_ids_are_never_delivered(token: int) -> None:
    scheduler = Scheduler(1, 40, PAGE_TOKENS, 3, 4, 16, vocab_size=100)
    scheduler.submit(Request("r", (1,)))
    (delivery,) = scheduler.commit(scheduler.next_batch(), {0: [5, token, 6]})
    assert (delivery.token_ids, delivery.finish_reason) == ((5,), "error")
    assert not scheduler.running
