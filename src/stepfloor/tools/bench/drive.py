"""Send the requests of a load and keep what came back: closed loop, closed loop for a time, open loop, one wave.

In a closed loop a request is planned for the moment when its client is free. In an open loop it is planned by the
arrivals, whatever the server does. Both times are kept: when it was planned and when it was sent.
"""

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from stepfloor.tools.bench.answer import Answer
from stepfloor.tools.bench.client import Client, Exchange, LostError
from stepfloor.tools.bench.metrics import looped
from stepfloor.tools.bench.prompts import Prompt
from stepfloor.tools.bench.result import Request

SHOWN_BODY = 300
LOOK_EVERY_S = 0.002


@dataclass(frozen=True, slots=True)
class Job:
    """A request that is ready to be sent: nothing is put together inside the window."""

    index: int
    prompt: Prompt
    body: bytes


@dataclass(slots=True)
class Visit:
    """A request that was sent, or could not be; times are those of time.perf_counter.

    planned  None in a closed loop, where a request is due when it can be sent
    """

    job: Job
    planned: float | None
    answer: Answer
    exchange: Exchange
    end: float | None = None
    error: str | None = None
    cut: bool = False

    def record(self, begin: float) -> Request:
        """As it stands in a result, with times from the window's begin."""
        answer, prompt = self.answer, self.job.prompt
        chunks = tuple(at - begin for at in answer.chunk_s)
        counted = len(answer.chunk_tokens) == len(chunks)
        cut_tokens = answer.chunk_tokens[-1] if self.cut and counted and chunks else None
        text, sent = answer.text, self.exchange.sent
        planned = self.planned if self.planned is not None else sent if sent is not None else self.end or begin
        return Request(
            self.job.index,
            planned - begin,
            None if sent is None else sent - begin,
            chunks[0] if chunks else None,
            chunks[-1] if chunks else None,
            None if self.end is None else self.end - begin,
            chunks=len(chunks),
            chunk_s=chunks,
            chunk_tokens=tuple(answer.chunk_tokens) if counted and chunks else None,
            prompt_tokens=answer.prompt_tokens,
            output_tokens=cut_tokens if self.cut else answer.output_tokens,
            cached_tokens=answer.cached_tokens,
            asked_prompt_tokens=prompt.tokens,
            asked_output_tokens=prompt.output_tokens,
            finish_reason=answer.finish_reason,
            error=self.error,
            prompt_hash=prompt.hash,
            output_hash=hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:16] if text else None,
            looped=looped(text),
            cut=self.cut,
        )


class Driver:
    """Sends jobs over one client; `visits` grows, and survives a cancellation."""

    def __init__(self, client: Client, path: str, on_end: Callable[[Visit], None] | None = None) -> None:
        self.client = client
        self.path = path
        self.on_end = on_end
        self.visits: list[Visit] = []
        self.begin = 0.0

    async def closed(self, jobs: Sequence[Job], concurrency: int, duration_s: float | None = None) -> None:
        """Keep so many requests in flight until the jobs are done, or for so long; what is in flight then is cut."""
        todo = iter(jobs)

        async def one_user() -> None:
            for job in todo:
                await self._visit(job, None)

        await self._get_ready(concurrency)
        users = [asyncio.ensure_future(one_user()) for _ in range(min(concurrency, len(jobs)))]
        await _all(users, duration_s)

    async def open(self, jobs: Sequence[Job], at_s: Sequence[float], most: int | None) -> None:
        """Send each job at its time; with `most`, no more than so many in flight, and what waits is late."""
        places = asyncio.Semaphore(most or len(jobs))

        async def at_its_time(job: Job, planned: float) -> None:
            await asyncio.sleep(planned - time.perf_counter())
            async with places:
                await self._visit(job, planned)

        await self._get_ready(min(len(jobs), most or 64))
        tasks = [asyncio.ensure_future(at_its_time(job, self.begin + at)) for job, at in zip(jobs, at_s, strict=True)]
        await _all(tasks, None)

    async def wave(
        self, jobs: Sequence[Job], settle_s: float, decode_s: float, mark: Callable[[], Awaitable[None]]
    ) -> None:
        """Send all at once, and look at their decoding alone, however long their prompts took.

        mark is awaited when each has its first token and settle_s have passed since, and again after decode_s or when
        the first answer ends. Then all are cut.
        """
        await self._get_ready(len(jobs))
        tasks = [asyncio.ensure_future(self._visit(job, None)) for job in jobs]
        try:
            while len(self.visits) < len(tasks) or not all(visit.answer.chunk_s for visit in self.visits):
                if any(task.done() for task in tasks):
                    break
                await asyncio.sleep(LOOK_EVERY_S)
            await asyncio.wait(tasks, timeout=settle_s, return_when=asyncio.FIRST_COMPLETED)
            await mark()
            await asyncio.wait(tasks, timeout=decode_s, return_when=asyncio.FIRST_COMPLETED)
            await mark()
        finally:
            await _cut(tasks)

    async def _get_ready(self, connections: int) -> None:
        with suppress(OSError):  # each request will say it for itself
            await self.client.open(connections)
        self.begin = time.perf_counter()

    async def _visit(self, job: Job, planned: float | None) -> None:
        answer, refusal = Answer(), bytearray()

        def take(at: float, data: bytes) -> None:
            if exchange.status == 200:
                answer.feed(at, data)
            else:
                refusal.extend(data)

        exchange = Exchange(take)
        visit = Visit(job, planned, answer, exchange)
        self.visits.append(visit)
        try:
            await self.client.exchange("POST", self.path, job.body, exchange)
            visit.error = _complaint(exchange, answer, refusal)
        except asyncio.CancelledError:
            visit.cut = True
            raise
        except (LostError, OSError) as error:  # a TimeoutError is an OSError
            late = isinstance(error, TimeoutError)
            visit.error = f"no end after {self.client.timeout_s:g} s" if late else str(error) or type(error).__name__
        finally:
            visit.end = time.perf_counter() if exchange.ended is None else exchange.ended
            if self.on_end is not None:
                self.on_end(visit)


def _complaint(exchange: Exchange, answer: Answer, refusal: bytes | bytearray) -> str | None:
    """Why an answer that came to its end is none."""
    if exchange.status != 200:
        return f"status {exchange.status}: {bytes(refusal[:SHOWN_BODY]).decode(errors='replace')}"
    if answer.error is not None:
        return answer.error
    if not answer.finished and answer.finish_reason is None:
        return "the stream ended without [DONE] or a finish_reason"
    return None if answer.chunk_s else "no token was generated"


async def _all(tasks: Sequence[asyncio.Future[None]], duration_s: float | None) -> None:
    """Wait for all; after duration_s, or if this is cancelled, cancel them and see them end."""
    try:
        if tasks:
            await asyncio.wait(tasks, timeout=duration_s)
    finally:
        await _cut(tasks)


async def _cut(tasks: Sequence[asyncio.Future[None]]) -> None:
    for task in tasks:
        task.cancel()
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(outcome, Exception):
            raise outcome
