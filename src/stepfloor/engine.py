"""A request goes in, pieces of text come out: the loop that knows every stage, and nothing else."""

import logging
import secrets
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from stepfloor.config import EngineConfig
from stepfloor.errors import UserError
from stepfloor.model.backends import backends
from stepfloor.model.load import is_small, load_model
from stepfloor.model.model import Model
from stepfloor.request import Batch, Piece, Request
from stepfloor.roofline.floor import Floor, checkpoint_step_bytes
from stepfloor.roofline.memory import (
    CGROUP_FILES,
    MemoryPlan,
    cgroup_available,
    discrete_capacity,
    parse_meminfo,
    placement_of,
    plan_memory,
    unified_capacity,
)
from stepfloor.sampler.grammar import Constraint, GrammarCompiler
from stepfloor.sampler.sampler import Sampler, Stage
from stepfloor.scheduler.scheduler import Scheduler
from stepfloor.step.bandwidth import read_bandwidth_gbps
from stepfloor.step.memory import keep_to_plan, open_memory
from stepfloor.step.step import STAGE_SETS, Step, StepOutput
from stepfloor.stream.stream import Stream
from stepfloor.tokenizer.tokenizer import Tokenizer
from stepfloor.weights.checkpoint import Checkpoint

logger = logging.getLogger(__name__)

# a prompt chunk decodes 128 experts of a layer at a time: 0.84 GB of bf16
EXPERT_WORKSPACE_BYTES = 1 << 30


@dataclass(slots=True)
class Counters:
    """What the steps so far delivered.

    decode_steps      verifications of one sequence that delivered something
    delivered         tokens those gave, a stop id included
    drafted           drafts proposed, per position; accepted  drafts accepted, per position
    """

    drafted: list[int]
    accepted: list[int]
    decode_steps: int = 0
    delivered: int = 0

    def count(self, drafted: int, accepted: int, consumed: int) -> None:
        """Add one verification: drafts, accepted ones, and tokens looked at before the end (a stop id included).

        One that gave no token at all, because the logits were not finite, is not counted.
        """
        if not consumed:
            return
        self.decode_steps += 1
        self.delivered += consumed
        for position in range(drafted):
            self.drafted[position] += 1
            self.accepted[position] += position < min(accepted, consumed)

    def add(self, other: "Counters") -> None:
        """Add another run's counts."""
        self.decode_steps += other.decode_steps
        self.delivered += other.delivered
        self.drafted = [a + b for a, b in zip(self.drafted, other.drafted, strict=True)]
        self.accepted = [a + b for a, b in zip(self.accepted, other.accepted, strict=True)]

    def acceptance(self) -> list[float]:
        """Share of the drafts at each position that were accepted; empty before the first step."""
        return [a / d for a, d in zip(self.accepted, self.drafted, strict=True) if d]

    @property
    def delivered_per_step(self) -> float:
        """Tokens delivered over verification steps; 0 before the first."""
        return self.delivered / self.decode_steps if self.decode_steps else 0.0


def open_device(device: str) -> None:
    """Make a device ready for its first allocation. Raises UserError for one that PyTorch cannot reach here."""
    find_device(device)
    if device != "cpu":
        open_memory(device)


def find_device(device: str) -> None:
    """Raise UserError for a device that PyTorch cannot reach here; nothing is started on it."""
    if device == "cpu":
        return
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    kind, _, index = device.partition(":")
    if kind != "cuda" or not (index or "0").isdigit():
        raise UserError(f"--device must be cpu, cuda or cuda:N; got {device!r}")
    if int(index or 0) >= found:
        raise UserError(
            f"--device {device}: PyTorch {torch.__version__} finds {found} CUDA devices; run this on such a GPU with a "
            "CUDA build of PyTorch, or pass --device cpu"
        )


def host_memory(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> dict[str, int]:
    """/proc/meminfo in bytes, MemAvailable no more than a container's own limit leaves; empty where there is none."""
    if not (proc / "meminfo").is_file():
        return {}
    found = parse_meminfo((proc / "meminfo").read_text())
    for directory in (cgroup, cgroup / "memory"):
        files = {path.name: path.read_text() for path in directory.glob("memory.*") if path.name in CGROUP_FILES}
        if (left := cgroup_available(files)) is not None and "MemAvailable" in found:
            found["MemAvailable"] = min(found["MemAvailable"], left)
    return found


def check_memory(checkpoint: Checkpoint, config: EngineConfig) -> MemoryPlan:
    """The memory plan of an engine on a GPU, before anything is allocated; every line is logged.

    Raises UserError with the arithmetic where it does not fit.
    """
    device = torch.device(config.device)
    free = torch.cuda.mem_get_info(device)[0]
    meminfo = host_memory()
    if torch.cuda.get_device_properties(device).is_integrated and "MemAvailable" in meminfo:
        capacity = unified_capacity(meminfo, free)
    else:
        capacity = discrete_capacity(free, meminfo.get("MemAvailable", 1 << 62))
    placement = replace(placement_of(config), expert_workspace_bytes=EXPERT_WORKSPACE_BYTES)
    plan = plan_memory(checkpoint.config, checkpoint.weights, config, capacity, placement)
    for line in plan.lines:
        logger.info("memory: %s %.3f GiB on the %s", line.component, line.nbytes / 2**30, line.where)
    for where in ("device", "host"):
        logger.info(
            "memory: %.2f of %.2f GiB on the %s", plan.total(where) / 2**30, plan.available(where) / 2**30, where
        )
    if (refusal := plan.refusal()) is not None:
        raise UserError(refusal)
    return plan


class Engine:
    """One model on one device, and the requests it serves."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: EngineConfig,
        tokenizer: Tokenizer | None = None,
        on_layer: Callable[[int, int], None] | None = None,
        model: Model | None = None,
        forced_accept: int | None = None,
        stage_sets: Sequence[frozenset[Stage]] = STAGE_SETS,
    ) -> None:
        """Load the weights and allocate the cache.

        tokenizer      None for a checkpoint without one: requests then carry ids, and pieces carry no text
        on_layer       called as (layers loaded, layers in all), for a progress bar
        model          of this checkpoint, loaded before for positions and rows enough; None loads it here
        forced_accept  drafts taken of each window whatever the target says, to time steps: the text means nothing
        stage_sets     of the sampler, for which decode graphs are captured now; the others are at their first use
        Raises UserError for a configuration that this model cannot serve.
        """
        model_config = checkpoint.config
        config.check(model_config)
        open_device(config.device)
        self.config = config
        self.checkpoint = checkpoint
        self.vocab_size = model_config.vocab_size
        self.tokenizer = tokenizer
        if config.device == "cpu" and is_small(checkpoint):
            torch.set_num_threads(1)
        self._bandwidth_gbps: float | None = None
        plan: MemoryPlan | None = None
        if model is None:
            if config.device != "cpu":
                plan = check_memory(checkpoint, config)
                # now, since it reads gigabytes that are the weights' from here on, and that the plan does not hold
                self._bandwidth_gbps = read_bandwidth_gbps(config.device)
            model = load_model(
                checkpoint,
                config.positions,
                config.device,
                on_layer,
                drafter=config.spec_tokens > 0,
                decode_rows=config.max_num_seqs * (config.spec_tokens + 1),
                table_on="cpu" if config.ngram_table == "pinned" else None,
            )
        sampler = Sampler(
            self.vocab_size,
            config.max_num_seqs,
            config.spec_tokens,
            config.acceptance,
            config.device,
            forced_accept,
        )
        self.step = Step(model, sampler, config, stage_sets)
        if plan is not None:
            keep_to_plan(plan, config.device)
        self.scheduler = Scheduler(
            config.max_num_seqs,
            config.num_pages,
            config.block_size,
            config.spec_tokens,
            config.chunk_tokens,
            config.max_model_len,
            config.max_num_queued_reqs,
            self.vocab_size,
            config.drafts,
        )
        special = () if tokenizer is None else tokenizer.special_ids
        self.stream = Stream(None if tokenizer is None else tokenizer.token_bytes, special)
        self.constraints: dict[str, Constraint] = {}  # of requests that wait for each result
        self.grammars = (
            None
            if tokenizer is None
            else GrammarCompiler(tokenizer.token_bytes, self.vocab_size, tuple(tokenizer.special_ids))
        )
        self.counters = Counters([0] * config.spec_tokens, [0] * config.spec_tokens)
        self.under_way: tuple[Batch, StepOutput] | None = None
        self.pieces: deque[Piece] = deque()  # made and not taken yet
        self.joined: tuple[str, ...] = ()  # requests that got a slot in the step queued last
        self.steps = 0  # queued so far
        self.delivered_steps = 0  # whose ids were read
        self._profile: torch.profiler.profile | None = None

    def submit(self, request: Request) -> None:
        """Queue a request; a refused one leaves nothing behind.

        Raises UserError for bad sampling values, foreign token ids, a prompt too long, stop strings that cannot be
        found and a request id in use; QueueFullError, which is one, if too many wait.
        """
        request.sampling.check(self.vocab_size)
        if request.logprobs is not None and not 0 <= request.logprobs <= self.vocab_size:
            raise UserError(f"logprobs must be 0 to {self.vocab_size}; got {request.logprobs}")
        for token in (min(request.token_ids, default=0), max(request.token_ids, default=0)):
            if not 0 <= token < self.vocab_size:
                raise UserError(f"token ids must be 0 to {self.vocab_size - 1}; the prompt holds {token}")
        if request.sampling.seed is None:
            request = replace(request, sampling=replace(request.sampling, seed=secrets.randbits(63)))
        self.stream.open(request)
        try:
            if request.waits:
                self.constraints[request.request_id] = self._constraint(request)
            self.scheduler.submit(request)
        except UserError:
            self.stream.close(request.request_id)
            self.constraints.pop(request.request_id, None)
            raise

    def compile_grammar(self, request: Request) -> Any | None:
        """Compile the grammar of a request, if it has one, so that submit finds it done; any thread may call this.

        Raises UserError for a broken grammar.
        """
        if request.grammar is None:
            return None
        if self.grammars is None:
            raise UserError("a grammar needs a tokenizer and this checkpoint has none")
        return self.grammars.compile(request.grammar, request.stop_token_ids)

    def check_room(self, requests: int) -> None:
        """Raise QueueFullError unless this many requests more would be taken."""
        self.scheduler.check_room(requests)

    def cancel(self, request_id: str) -> None:
        """Stop a request; nothing more of it is delivered."""
        self.scheduler.end(request_id)
        self.stream.close(request_id)
        self.constraints.pop(request_id, None)
        self.pieces = deque(piece for piece in self.pieces if piece.request_id != request_id)

    def run(self) -> Iterator[Piece]:
        """Serve until no request is left, one step ahead of the ids it reads.

        Requests may be submitted and cancelled between pieces; a run that was left goes on with the next one.
        """
        while True:
            while self.pieces:
                yield self.pieces.popleft()
            if not self.has_work():
                return
            self.advance()

    def has_work(self) -> bool:
        """Whether a step is under way or should run."""
        return self.under_way is not None or self.scheduler.has_work()

    def advance(self) -> None:
        """Queue the next step, if there is one, and turn what the last one emitted into `pieces`."""
        batch = self.scheduler.next_batch()
        self.joined = tuple(self.scheduler.running[join.slot].request.request_id for join in batch.joins)
        current = None
        if batch != Batch():
            self.steps += 1
            output = self.step.run(batch, self._masks(batch))
            current = (batch, output)
            for slot, why in output.failed.items():
                self._fail(slot, why)
        previous, self.under_way = self.under_way, current
        if previous is not None:
            self._deliver(*previous)

    def _fail(self, slot: int, why: str) -> None:
        """End the request of a slot that has emitted nothing yet; the others go on."""
        request_id = self.scheduler.running[slot].request.request_id
        piece = self.stream.push(request_id, (), "error", None)
        self.pieces.append(replace(piece, error=f"the prompt could not be read: {why}; others go on"))
        self.constraints.pop(request_id, None)
        self.scheduler.end(request_id)

    def _constraint(self, request: Request) -> Constraint:
        token_bytes = None if self.tokenizer is None else self.tokenizer.token_bytes
        return Constraint(request, self.compile_grammar(request), token_bytes, self.vocab_size)

    def _masks(self, batch: Batch) -> dict[int, torch.Tensor]:
        """Masks of the slots in this batch that have some."""
        if not self.constraints:
            return {}
        masks: dict[int, torch.Tensor] = {}
        for slot, _ in batch.owners:
            constraint = self.constraints.get(self.scheduler.running[slot].request.request_id)
            if constraint is not None:
                rows = batch.spec_tokens + 1 if slot in batch.decodes else 1
                masks[slot] = torch.from_numpy(constraint.masks(rows))
        return masks

    def stats(self) -> dict[str, Any]:
        """What a monitor wants to know, as plain values.

        steps queued; requests running and waiting; kv_cache_usage, the share of pages in use; of all decode steps so
        far: decode_steps, delivered, and drafted and accepted per position
        """
        scheduler, counters = self.scheduler, self.counters
        pages = scheduler.allocator.num_pages - 1
        return {
            "steps": self.steps,
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            "kv_cache_usage": 1 - scheduler.allocator.num_free / pages,
            "decode_steps": counters.decode_steps,
            "delivered": counters.delivered,
            "drafted": counters.drafted,
            "accepted": counters.accepted,
        }

    def reset_counters(self) -> None:
        """Begin to count anew, after a warm-up."""
        self.counters = Counters([0] * self.config.spec_tokens, [0] * self.config.spec_tokens)
        self.steps = self.delivered_steps = 0

    @property
    def bandwidth_gbps(self) -> float:
        """What the device reads, in GB/s; measured once."""
        if self._bandwidth_gbps is None:
            self._bandwidth_gbps = read_bandwidth_gbps(self.config.device)
        return self._bandwidth_gbps

    def report(self) -> dict[str, Any]:
        """What was loaded and what it takes: bytes of weights, pages and slots, the floor of a step, backends."""
        config, cache = self.config, self.step.cache
        paged = [*cache.keys, *cache.values, *cache.block_keys]
        slots = [*cache.raw_keys, *cache.state, *cache.raw_rows, *cache.gate_rows, cache.ngram_rows, cache.page_table]
        bandwidth = self.bandwidth_gbps
        step = checkpoint_step_bytes(self.checkpoint.config, self.checkpoint.weights, 1, config.spec_tokens)
        return {
            "device": config.device,
            "weight_bytes": self.checkpoint.num_bytes,
            "page_bytes": sum(t.nbytes for t in paged),
            "slot_bytes": sum(t.nbytes for t in slots),
            "pages": self.scheduler.allocator.num_pages - 1,
            "block_size": config.block_size,
            "step_bytes": step.total,
            "bandwidth_gbps": bandwidth,
            "floor_ms": Floor(step, bandwidth).step_us / 1e3,
            "backends": backends(self.step.model, config.spec_tokens + 1),
        }

    def start_profile(self) -> None:
        """Record every operator from the next step on. Raises UserError if a profile is being recorded."""
        if self._profile is not None:
            raise UserError("a profile is being recorded; stop it first")
        self._profile = torch.profiler.profile()
        self._profile.__enter__()

    def stop_profile(self, directory: Path) -> Path:
        """End the recording and write it as a Chrome trace; returns the file.

        Raises UserError if nothing is recorded, or the directory cannot be written to.
        """
        profile, self._profile = self._profile, None
        if profile is None:
            raise UserError("no profile is being recorded; start one first")
        profile.__exit__(None, None, None)
        path = directory / f"stepfloor-step-{self.steps}.pt.trace.json"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            profile.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:
            raise UserError(f"{path} cannot be written ({error}); start the server with another directory") from None
        return path

    def _deliver(self, batch: Batch, output: StepOutput) -> None:
        """Turn what a step emitted into pieces, and end the sequences that are done."""
        emitted = output.wait()
        drafts, logprobs = output.wait_drafts(), output.wait_logprobs()
        self.delivered_steps += 1
        verified = dict(zip(batch.decodes, batch.verified, strict=True))
        for delivery in self.scheduler.commit(batch, emitted):
            piece = self.stream.push(delivery.request_id, delivery.token_ids, delivery.finish_reason, delivery.stop_id)
            if delivery.slot in logprobs:
                piece = replace(piece, logprobs=tuple(logprobs[delivery.slot][: len(piece.token_ids)]))
            if (constraint := self.constraints.get(delivery.request_id)) is not None:
                constraint.advance(delivery.token_ids)
                constraint.drafts = drafts.get(delivery.slot, ())
            if piece.finish_reason == "error":
                piece = replace(piece, error=_fault(emitted[delivery.slot], self.delivered_steps))
            if delivery.slot in verified:
                # a stop string may end the text before the last token that the scheduler let through
                cut = len(piece.token_ids) < len(delivery.token_ids)
                consumed = len(piece.token_ids) if cut else delivery.consumed
                self.counters.count(verified[delivery.slot], len(emitted[delivery.slot]) - 1, consumed)
            if piece.finish_reason is not None:
                self.constraints.pop(delivery.request_id, None)
                self.scheduler.end(delivery.request_id)  # a stop string ends what the scheduler would go on with
            if piece.token_ids or piece.finish_reason is not None:
                self.pieces.append(piece)


def _fault(emitted: list[int], step: int) -> str:
    """What is wrong with the ids of a request that ended in an error."""
    what = "the logits were not finite" if min(emitted) < 0 else f"the sampler gave ids {emitted}, not all of tokens"
    return f"step {step}: {what}; the request is over, others go on"
