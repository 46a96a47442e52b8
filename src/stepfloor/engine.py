"""A request goes in, pieces of text come out: the loop that knows every stage, and nothing else."""

import secrets
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from stepfloor.cache.tensors import num_pages, positions_needed
from stepfloor.config import EngineConfig
from stepfloor.errors import UserError
from stepfloor.model.load import is_small, load_model
from stepfloor.model.model import Model
from stepfloor.request import Batch, Piece, Request
from stepfloor.sampler.sampler import Sampler
from stepfloor.scheduler.scheduler import Scheduler
from stepfloor.step.step import Step, StepOutput
from stepfloor.stream.stream import Stream
from stepfloor.tokenizer.tokenizer import Tokenizer
from stepfloor.weights.checkpoint import Checkpoint


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

    def count(self, accepted: int, consumed: int) -> None:
        """Add one verification: drafts accepted, and tokens looked at before the request ended (a stop id included).

        One that gave no token at all, because the logits were not finite, is not counted.
        """
        if not consumed:
            return
        self.decode_steps += 1
        self.delivered += consumed
        for position in range(len(self.drafted)):
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
    ) -> None:
        """Load the weights and allocate the cache.

        tokenizer      None for a checkpoint without one: requests then carry ids, and pieces carry no text
        on_layer       called as (layers loaded, layers in all), for a progress bar
        model          of this checkpoint, loaded before for positions and rows enough; None loads it here
        forced_accept  drafts taken of each window whatever the target says, to time steps: the text means nothing
        Raises UserError for a configuration that this model cannot serve.
        """
        model_config = checkpoint.config
        config.check(model_config)
        self.config = config
        self.vocab_size = model_config.vocab_size
        self.tokenizer = tokenizer
        if config.device == "cpu" and is_small(checkpoint):
            torch.set_num_threads(1)
        if model is None:
            model = load_model(
                checkpoint,
                positions_needed(config),
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
        self.step = Step(model, sampler, config)
        self.scheduler = Scheduler(
            config.max_num_seqs,
            num_pages(config),
            config.block_size,
            config.spec_tokens,
            config.max_num_batched_tokens,
            config.max_model_len,
        )
        special = () if tokenizer is None else tokenizer.special_ids
        self.stream = Stream(None if tokenizer is None else tokenizer.token_bytes, special)
        self.counters = Counters([0] * config.spec_tokens, [0] * config.spec_tokens)
        self.under_way: tuple[Batch, StepOutput] | None = None
        self.pieces: deque[Piece] = deque()  # made and not taken yet

    def submit(self, request: Request) -> None:
        """Queue a request; a refused one leaves nothing behind.

        Raises UserError for bad sampling values, foreign token ids, a prompt too long, stop strings that cannot be
        found and a request id in use.
        """
        request.sampling.check(self.vocab_size)
        for token in request.token_ids:
            if not 0 <= token < self.vocab_size:
                raise UserError(f"token ids must be 0 to {self.vocab_size - 1}; the prompt holds {token}")
        if request.sampling.seed is None:
            request = replace(request, sampling=replace(request.sampling, seed=secrets.randbits(63)))
        self.stream.open(request)
        try:
            self.scheduler.submit(request)
        except UserError:
            self.stream.close(request.request_id)
            raise

    def cancel(self, request_id: str) -> None:
        """Stop a request; nothing more of it is delivered."""
        self.scheduler.end(request_id)
        self.stream.close(request_id)
        self.pieces = deque(piece for piece in self.pieces if piece.request_id != request_id)

    def run(self) -> Iterator[Piece]:
        """Serve until no request is left, one step ahead of the ids it reads.

        Requests may be submitted and cancelled between pieces; a run that was left goes on with the next one.
        """
        while True:
            while self.pieces:
                yield self.pieces.popleft()
            if self.under_way is None and not self.scheduler.has_work():
                return
            batch = self.scheduler.next_batch()
            current = (batch, self.step.run(batch)) if batch != Batch() else None
            previous, self.under_way = self.under_way, current
            if previous is not None:
                self._deliver(*previous)

    def _deliver(self, batch: Batch, output: StepOutput) -> None:
        """Turn what a step emitted into pieces, and end the sequences that are done."""
        emitted = output.wait()
        for delivery in self.scheduler.commit(batch, emitted):
            piece = self.stream.push(delivery.request_id, delivery.token_ids, delivery.finish_reason)
            if delivery.slot in batch.decodes:
                # a stop string may end the text before the last token that the scheduler let through
                cut = len(piece.token_ids) < len(delivery.token_ids)
                consumed = len(piece.token_ids) if cut else delivery.consumed
                self.counters.count(len(emitted[delivery.slot]) - 1, consumed)
            if piece.finish_reason is not None:
                self.scheduler.end(delivery.request_id)  # a stop string ends what the scheduler would go on with
            if piece.token_ids or piece.finish_reason is not None:
                self.pieces.append(piece)
