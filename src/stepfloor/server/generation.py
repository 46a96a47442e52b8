"""The one path of a delivered token: from a Piece to what a route shows, with every count taken on the way.

A Generation is one HTTP request: several prompts or several answers to one are Requests of one group. However many
tokens a step delivered, each is counted, parsed and measured here, once.
"""

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace

from stepfloor.request import FinishReason, Piece, Request, TokenLogprob
from stepfloor.server.client import EngineClient, Mailbox
from stepfloor.server.metrics import REPEATED_RUN, Metrics
from stepfloor.stream.parser import Event, Parser


@dataclass(slots=True)
class Usage:
    """Tokens of one HTTP request; a prompt with several answers counts once."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Delta:
    """What a step changed in one answer.

    index  of the answer; events  what to show; token_ids and logprobs  of the tokens delivered
    error  set where finish_reason is "error", or "cancelled" by a deadline
    """

    index: int
    events: tuple[Event, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None


@dataclass(slots=True)
class Answer:
    """One of a Generation's answers, as far as it has come.

    parser  None for a plain completion: all text is content
    """

    index: int
    request: Request
    parser: Parser | None
    tokens: int = 0
    reasoning_tokens: int = 0
    last_token: int = -1
    run: int = 0
    first_at: float | None = None
    last_at: float = 0.0
    repeated: int = 0
    finish_reason: FinishReason | None = None

    def take(self, piece: Piece) -> Delta:
        """Count and parse what a step delivered."""
        events: list[Event] = []
        for i, text in enumerate(piece.deltas):
            reasons = self.parser is not None and self.parser.reasons
            events += self._parse(text)
            # what ends the reasoning belongs to it; the last delta may be text that was held, of no new token
            self.reasoning_tokens += reasons and i < len(piece.token_ids)
        if piece.finish_reason is not None and self.parser is not None:
            events += self.parser.flush()
        self.tokens += len(piece.token_ids)
        for token in piece.token_ids:
            self.run = self.run + 1 if token == self.last_token else 1
            self.last_token = token
            self.repeated += self.run == REPEATED_RUN
        self.finish_reason = piece.finish_reason
        return Delta(
            self.index,
            tuple(events),
            piece.token_ids,
            piece.logprobs,
            piece.finish_reason,
            piece.stop_reason,
            piece.error,
        )

    def _parse(self, text: str) -> list[Event]:
        if not text:
            return []
        return self.parser.push(text) if self.parser is not None else [Event("content", text)]


@dataclass(slots=True)
class Generation:
    """Requests of one HTTP call, from submission to the last token.

    prompts  distinct prompts among the requests, whose tokens count in the usage
    """

    client: EngineClient
    metrics: Metrics
    answers: list[Answer]
    prompt_tokens: int
    usage: Usage = field(default_factory=Usage)
    mailbox: Mailbox | None = None
    begun_at: float = 0.0
    _by_id: dict[str, Answer] = field(default_factory=dict)

    async def start(self, deadline_s: float | None = None) -> None:
        """Submit; raises UserError, QueueFullError or EngineGoneError where the engine does not take it."""
        requests = [answer.request for answer in self.answers]
        self._by_id = {answer.request.request_id: answer for answer in self.answers}
        self.begun_at = time.monotonic()
        self.mailbox = await self.client.submit(requests, deadline_s)
        self.usage.prompt_tokens = self.prompt_tokens
        metrics = self.metrics
        metrics.request_n.observe(len(requests))
        for request in requests:
            count = len(request.token_ids)
            metrics.prompt_tokens.inc(count)
            metrics.prompt_tokens_computed.inc(count)
            metrics.request_prompt_tokens.observe(count)
            metrics.request_prefill.observe(count)
            metrics.request_max_tokens.observe(request.max_tokens)

    async def deltas(self) -> AsyncIterator[list[Delta]]:
        """What has come since the last time, until every answer has ended.

        A delta with an error stands alone, so that what came before it is shown first.
        """
        mailbox = self.mailbox
        if mailbox is None:
            raise RuntimeError("a generation that was not started has no deltas")
        open_answers = len(self.answers)
        while open_answers:
            pieces = await mailbox.take()
            deltas: list[Delta] = []
            for delta in (self._take(piece, mailbox) for piece in pieces):
                if delta.error is None:
                    deltas.append(delta)
                    continue
                # the tokens before a fault are as good as any
                yield [*deltas, replace(delta, error=None, finish_reason=None)]
                yield [replace(delta, events=(), token_ids=(), logprobs=())]
                deltas = []
            if deltas:
                yield deltas
            open_answers -= sum(piece.finish_reason is not None for piece in pieces)

    def close(self) -> None:
        """Cancel what has not ended: the client is gone, or has no more use for it."""
        if self.mailbox is not None and self.mailbox.open:
            self.metrics.cancelled.inc(len(self.mailbox.open))
            self.metrics.finished["abort"].inc(len(self.mailbox.open))
            self.client.cancel(self.mailbox)

    def _take(self, piece: Piece, mailbox: Mailbox) -> Delta:
        answer = self._by_id[piece.request_id]
        repeated, reasoned = answer.repeated, answer.reasoning_tokens
        delta = answer.take(piece)
        self.usage.completion_tokens += len(piece.token_ids)
        self.usage.reasoning_tokens += answer.reasoning_tokens - reasoned
        self._measure(answer, len(piece.token_ids), mailbox)
        self.metrics.repeated_runs.inc(answer.repeated - repeated)
        return delta

    def _measure(self, answer: Answer, tokens: int, mailbox: Mailbox) -> None:
        metrics, now = self.metrics, self.client.heard_at
        if tokens:
            metrics.generation_tokens.inc(tokens)
            if answer.first_at is None:
                answer.first_at = now
                metrics.ttft.observe(now - self.begun_at)
            else:
                # a step may deliver several tokens; their time is shared among them
                for _ in range(tokens):
                    metrics.itl.observe((now - answer.last_at) / tokens)
            answer.last_at = now
        if answer.finish_reason is None:
            return
        reason = "abort" if answer.finish_reason == "cancelled" else answer.finish_reason
        metrics.finished[reason].inc()
        metrics.faults.inc(reason == "error")
        metrics.e2e.observe(now - self.begun_at)
        metrics.request_generation_tokens.observe(answer.tokens)
        joined = mailbox.joined_at.get(answer.request.request_id)
        if joined is not None and answer.first_at is not None:
            metrics.queue_time.observe(max(0.0, joined - self.begun_at))
            metrics.prefill_time.observe(answer.first_at - joined)
            metrics.decode_time.observe(now - answer.first_at)
            metrics.inference_time.observe(now - joined)
            if answer.tokens > 1:
                metrics.tpot.observe((now - answer.first_at) / (answer.tokens - 1))


def new_answers(requests: Sequence[Request], parsers: Sequence[Parser | None]) -> list[Answer]:
    """An answer for each request, numbered."""
    return [Answer(i, request, parser) for i, (request, parser) in enumerate(zip(requests, parsers, strict=True))]
