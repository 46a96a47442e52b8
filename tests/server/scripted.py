"""The HTTP application on an engine whose model is a script: any pieces, any number of them a step.

Scheduler and Stream are the engine's own, so stops, limits and text are decided where they are in earnest.
"""

import asyncio
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx2

import stepfloor
from stepfloor.request import Piece, Request, TokenLogprob
from stepfloor.scheduler.scheduler import Scheduler
from stepfloor.server.app import AppOptions, build_app
from stepfloor.server.client import Mailbox
from stepfloor.server.metrics import Metrics
from stepfloor.server.service import Service, ServiceConfig
from stepfloor.stream.stream import Stream
from stepfloor.tokenizer.tokenizer import Tokenizer

SHIPPED = Path(stepfloor.__file__).parent / "shipped"
EOS = 2
# ids of the script's pieces; those below are the shipped tokenizer's
FIRST = 10_000
VOCAB = FIRST + 1000
REPORT = {"block_size": 64, "pages": 100, "step_bytes": 1.0}


class ScriptedTokenizer(Tokenizer):
    """The shipped tokenizer, with ids above it for the pieces of a script."""

    pieces: tuple[bytes, ...] = ()

    def token_bytes(self, token_id: int) -> bytes:
        return self.pieces[token_id - FIRST] if token_id >= FIRST else super().token_bytes(token_id)


@dataclass
class ScriptedClient:
    """Stands for EngineClient: what the target would say is `script`, ids; steps deliver `sizes` tokens in turn.

    The last id is repeated for ever. A list of several scripts answers several requests of one group.
    """

    tokenizer: ScriptedTokenizer
    scripts: list[list[int]]
    sizes: Sequence[int] = (1,)
    max_model_len: int = 4096
    max_queued: int | None = None
    gone: str | None = None
    silent_s: float = 0.0
    heard_at: float = 0.0
    stats: dict[str, Any] = field(default_factory=dict)
    cancelled: list[str] = field(default_factory=list)
    submitted: list[Request] = field(default_factory=list)
    fail_at: int | None = None  # a step whose result is no token
    num_open: int = 0

    async def submit(self, requests: Sequence[Request], deadline_s: float | None = None) -> Mailbox:
        if self.max_queued is not None:
            Scheduler(1, 2, 64, 0, 512, 4096, self.max_queued).check_room(len(requests))
        self.submitted += requests
        mailbox = Mailbox([request.request_id for request in requests])
        for request, script in zip(requests, self.scripts * len(requests), strict=False):
            for piece in self._pieces(request, script):
                mailbox.put(piece)
        return mailbox

    def cancel(self, mailbox: Mailbox) -> None:
        self.cancelled += mailbox.open
        mailbox.open.clear()

    def _pieces(self, request: Request, script: list[int]) -> Iterator[Piece]:
        window = max(self.sizes)
        pages = -(-(self.max_model_len + 3 * window) // 64) + 1
        scheduler = Scheduler(1, pages, 64, window - 1, 1 << 20, self.max_model_len, vocab_size=VOCAB)
        stream = Stream(self.tokenizer.token_bytes, self.tokenizer.special_ids)
        stream.open(request)
        scheduler.submit(request)
        at = step = 0
        ended = False
        while not ended:
            batch = scheduler.next_batch()
            size = self.sizes[step % len(self.sizes)]
            ids = [script[min(i, len(script) - 1)] for i in range(at, at + size)]
            if step == self.fail_at:
                ids[-1] = -1
            at, step = at + size, step + 1
            for delivery in scheduler.commit(batch, {0: ids}):
                piece = stream.push(delivery.request_id, delivery.token_ids, delivery.finish_reason, delivery.stop_id)
                if request.logprobs is not None:
                    top = tuple((i, -1.0 - i) for i in range(request.logprobs))
                    piece = replace(piece, logprobs=tuple(TokenLogprob(-0.5, top) for _ in piece.token_ids))
                if piece.finish_reason == "error":
                    piece = replace(piece, error=f"step {step}: the logits were not finite")
                ended = piece.finish_reason is not None
                if piece.token_ids or ended:
                    yield piece


@dataclass
class Scripted:
    """A client of the application, and what stands behind it."""

    http: httpx2.AsyncClient
    engine: ScriptedClient
    service: Service

    def post(self, path: str, **body: Any) -> httpx2.Response:
        """The whole answer."""
        return asyncio.run(self._request("POST", path, json=body))

    def get(self, path: str, **headers: str) -> httpx2.Response:
        return asyncio.run(self._request("GET", path, headers=headers))

    def events(self, path: str, **body: Any) -> list[Any]:
        """The data of a streamed answer, [DONE] as text."""
        response = self.post(path, stream=True, **body)
        assert response.status_code == 200, response.text
        return events_of(response.text)

    async def _request(self, method: str, path: str, **kwargs: Any) -> httpx2.Response:
        return await self.http.request(method, path, **kwargs)


def events_of(text: str) -> list[Any]:
    """Parsed data lines of server-sent events."""
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def scripted(
    pieces: Sequence[bytes | str | int],
    sizes: Sequence[int] = (1,),
    options: AppOptions | None = None,
    config: dict[str, Any] | None = None,
    **engine: Any,
) -> Scripted:
    """The application whose model says these pieces: text or bytes of a token, or an id."""
    tokenizer = ScriptedTokenizer.load(SHIPPED)
    assert isinstance(tokenizer, ScriptedTokenizer)
    script: list[int] = []
    table: list[bytes] = []
    for piece in pieces:
        if isinstance(piece, int):
            script.append(piece)
        else:
            script.append(FIRST + len(table))
            table.append(piece if isinstance(piece, bytes) else piece.encode())
    tokenizer.pieces = tuple(table)
    client = ScriptedClient(tokenizer, [script or [EOS]], sizes, **engine)
    settings: dict[str, Any] = {"names": ("small",), "max_model_len": client.max_model_len, "vocab_size": VOCAB}
    settings |= {"stop_token_ids": (EOS, 0), "sampling": {}, **(config or {})}
    metrics = Metrics("small", client.max_model_len, REPORT)
    service = Service(ServiceConfig(**settings), tokenizer, client, metrics)  # type: ignore[arg-type]
    app = build_app(service, options or AppOptions())
    transport = httpx2.ASGITransport(app=app, raise_app_exceptions=False)
    return Scripted(httpx2.AsyncClient(transport=transport, base_url="http://test"), client, service)


def splits(count: int) -> Iterator[tuple[int, ...]]:
    """Every way to deliver so many tokens in steps of 1 to 4."""
    if count == 0:
        yield ()
    for first in range(1, min(4, count) + 1):
        for rest in splits(count - first):
            yield (first, *rest)


def crossings(count: int) -> Iterator[tuple[int, ...]]:
    """Every way to deliver so many tokens in steps of 1 to 4, the last of which may bring more."""
    if count <= 0:
        yield ()
        return
    for first in range(1, 5):
        for rest in crossings(count - first):
            yield (first, *rest)
