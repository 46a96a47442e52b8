"""Engines and steps whose drafts come from a script, so that any share of them can be right."""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from stepfloor.config import EngineConfig
from stepfloor.engine import Engine
from stepfloor.model.model import Model
from stepfloor.request import Piece, Request
from stepfloor.sampler.sampler import Sampler
from stepfloor.step.step import Step
from stepfloor.weights.checkpoint import Checkpoint

Propose = Callable[[int, int], list[int]]


class Scripted(Step):
    """A Step that drafts as always, so that the drafter's cache is written, and then proposes something else.

    propose  (slot, position of the newest token) -> tokens to propose after it, as many as a step may at most
    """

    def __init__(self, model: Model, sampler: Sampler, config: EngineConfig, propose: Propose) -> None:
        super().__init__(model, sampler, config)
        self.propose = propose

    def _draft(self, slots: Tensor, ahead: Sequence[Tensor], residual: Tensor, hidden: Tensor, k: int) -> None:
        super()._draft(slots, ahead, residual, hidden, k)
        for slot, newest in zip(slots.tolist(), self.state.length[slots].tolist(), strict=True):
            self.state.drafts[slot, :k] = torch.tensor(self.propose(slot, newest)[:k], dtype=torch.int64)


def from_text(text: list[int], k: int, right: float, seed: int, vocab_size: int, eos: int) -> Propose:
    """Propose the next tokens of a known text, each right with the given probability; a third of the wrong are eos."""
    dice = random.Random(seed)

    def wrong(token: int) -> int:
        other = eos if dice.random() < 1 / 3 else dice.randrange(vocab_size)
        return other if other != token else (token + 1) % vocab_size

    def propose(_: int, length: int) -> list[int]:
        following = [text[p] if p < len(text) else 0 for p in range(length + 1, length + 1 + k)]
        return [token if dice.random() < right else wrong(token) for token in following]

    return propose


def by_split(text: list[int], first: int, sizes: Sequence[int], k: int, vocab_size: int) -> Propose:
    """Propose so that greedy steps deliver `sizes` tokens in turn, then one each.

    text  prompt and continuation; first  position of the continuation's first token, which the prompt brings
    """
    ends = list(accumulate(sizes, initial=first))

    def propose(_: int, length: int) -> list[int]:
        right = sizes[ends.index(length)] - 1 if length in ends[:-1] else 0
        following = [text[p] if p < len(text) else 0 for p in range(length + 1, length + 1 + k)]
        return [token if i < right else (token + 1) % vocab_size for i, token in enumerate(following)]

    return propose


def scripted_engine(checkpoint: Checkpoint, config: EngineConfig, propose: Propose) -> Engine:
    engine = Engine(checkpoint, config)
    engine.step = Scripted(engine.step.model, engine.step.sampler, config, propose)
    return engine


@dataclass
class Served:
    """What one request got."""

    ids: list[int]
    text: str
    finish_reason: str | None


def serve(engine: Engine, *requests: Request) -> dict[str, Served]:
    """Submit, run to the end, collect."""
    for request in requests:
        engine.submit(request)
    return collect(engine.run(), {request.request_id: Served([], "", None) for request in requests})


def collect(pieces: Iterable[Piece], served: dict[str, Served]) -> dict[str, Served]:
    """Join the pieces of each request; a piece after the last is an error."""
    for piece in pieces:
        one = served[piece.request_id]
        assert one.finish_reason is None, "a piece after the last"
        one.ids.extend(piece.token_ids)
        one.text += piece.text
        one.finish_reason = piece.finish_reason
    return served
