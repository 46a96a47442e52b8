"""The HTTP process's end of the socket: requests go to the engine's process, pieces come back to whoever waits."""

import asyncio
import logging
import multiprocessing
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from stepfloor.errors import QueueFullError, UserError
from stepfloor.request import Piece, Request
from stepfloor.server.wire import EngineSpec, Frames, Message, encode, encode_submit, unpack_piece

log = logging.getLogger(__name__)


class EngineGoneError(RuntimeError):
    """The engine's process has ended; nothing can be served until the server is started again."""


class Mailbox:
    """Pieces of a group of requests that were submitted together, until one task takes them."""

    def __init__(self, request_ids: Sequence[str]) -> None:
        self.open = set(request_ids)
        self.joined_at: dict[str, float] = {}
        self._pieces: deque[Piece] = deque()
        self._changed = asyncio.Event()
        self.answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def put(self, piece: Piece) -> None:
        """Leave a piece; the last of a request closes it."""
        if piece.finish_reason is not None:
            self.open.discard(piece.request_id)
        self._pieces.append(piece)
        self._changed.set()

    async def take(self) -> list[Piece]:
        """All pieces that are here, at least one. Call it only while a request is open or a piece is left."""
        while not self._pieces:
            self._changed.clear()
            await self._changed.wait()
        pieces = list(self._pieces)
        self._pieces.clear()
        return pieces


class EngineClient:
    """Starts the engine's process, and is the one that talks to it."""

    def __init__(self, spec: EngineSpec, entry: Callable[[socket.socket, EngineSpec], None] | None = None) -> None:
        """Start the process; entry is what runs there, the engine where None."""
        here, there = socket.socketpair()
        process = multiprocessing.get_context("spawn").Process(
            target=entry or _run_engine, args=(there, spec), name="stepfloor-engine", daemon=True
        )
        process.start()
        there.close()
        here.setblocking(False)
        self._connection = here
        self._process = process
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._mailboxes: dict[str, Mailbox] = {}
        self._profiled: asyncio.Future[Message] | None = None
        self._ready: asyncio.Future[dict[str, Any]] | None = None
        self._on_progress: Callable[[int, int], None] | None = None
        self.stats: dict[str, Any] = {}
        self.on_stats: Callable[[dict[str, Any]], None] | None = None
        self.on_step: Callable[[float], None] | None = None  # called with the tokens that a step delivered
        self.heard_at = time.monotonic()
        self.gone: str | None = None

    @property
    def pid(self) -> int | None:
        """Of the engine's process."""
        return self._process.pid

    @property
    def num_open(self) -> int:
        """Requests that were sent and have not ended."""
        return len(self._mailboxes)

    @property
    def silent_s(self) -> float:
        """How long the engine has said nothing although it has requests; it speaks after every step."""
        return time.monotonic() - self.heard_at if self._mailboxes else 0.0

    def open_requests(self) -> list[str]:
        """Their ids, oldest first."""
        return list(self._mailboxes)

    async def connect(self, on_progress: Callable[[int, int], None]) -> dict[str, Any]:
        """Wait until the engine has loaded and warmed up; returns its report.

        Raises UserError for what the engine refuses, EngineGoneError if its process ends.
        """
        reader, self._writer = await asyncio.open_connection(sock=self._connection)
        self._ready = asyncio.get_running_loop().create_future()
        self._on_progress = on_progress
        self._reading = asyncio.create_task(self._read(reader))
        return await self._ready

    async def close(self) -> None:
        """Close the socket, which ends the engine's process, and wait for that."""
        if self._writer is not None:
            self._writer.close()
        if self._reading is not None:
            self._reading.cancel()
        await asyncio.to_thread(self._process.join, 10)
        if self._process.is_alive():
            log.warning("the engine's process does not end; killing it")
            self._process.kill()

    async def submit(self, requests: Sequence[Request], deadline_s: float | None = None) -> Mailbox:
        """Send a group of requests and wait until the engine has taken it.

        Raises UserError for a request that cannot be served, QueueFullError if there is no room, EngineGoneError.
        """
        self._check_alive()
        mailbox = Mailbox([request.request_id for request in requests])
        if not self._mailboxes:
            self.heard_at = time.monotonic()
        self._mailboxes |= dict.fromkeys(mailbox.open, mailbox)
        self._write(encode_submit(requests, deadline_s))
        try:
            await mailbox.answer
        except asyncio.CancelledError:
            self.cancel(mailbox)
            raise
        return mailbox

    def cancel(self, mailbox: Mailbox) -> None:
        """Stop what is still open of a group; nothing more of it will come."""
        left = [request_id for request_id in mailbox.open if self._mailboxes.pop(request_id, None) is not None]
        mailbox.open.clear()
        if left and self.gone is None:
            self._write(encode({"type": "cancel", "ids": left}))

    async def profile(self, start: bool, directory: Path) -> Message:
        """Start or stop a recording; the answer's path is the trace. Raises UserError if that cannot be done now."""
        self._check_alive()
        if self._profiled is not None:
            raise UserError("a profile is being started or stopped")
        self._profiled = asyncio.get_running_loop().create_future()
        try:
            self._write(encode({"type": "profile", "start": start, "directory": str(directory)}))
            answer = await self._profiled
        finally:
            self._profiled = None
        if answer["error"] is not None:
            raise UserError(answer["error"])
        return answer

    def _check_alive(self) -> None:
        if self.gone is not None:
            raise EngineGoneError(self.gone)

    def _write(self, data: bytes) -> None:
        if self._writer is None:
            raise RuntimeError("the engine is not connected")
        self._writer.write(data)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        frames = Frames()
        try:
            while data := await reader.read(1 << 18):
                self.heard_at = time.monotonic()
                for message, _ in frames.feed(data):
                    self._dispatch(message)
        except ConnectionError:
            pass
        await asyncio.to_thread(self._process.join, 5)
        self._lose(f"the engine's process has ended (exit code {self._process.exitcode}); start the server again")

    def _dispatch(self, message: Message) -> None:
        kind = message["type"]
        if kind == "pieces":
            for request_id in message.get("joined", ()):
                if (mailbox := self._mailboxes.get(request_id)) is not None:
                    mailbox.joined_at[request_id] = self.heard_at
            pieces = [unpack_piece(packed) for packed in message["pieces"]]
            for piece in pieces:
                self._put(piece)
            if self.on_step is not None and pieces:
                self.on_step(sum(len(piece.token_ids) for piece in pieces))
        elif kind == "stats":
            self.stats = message
            if self.on_stats is not None:
                self.on_stats(message)
        elif kind in ("accepted", "refused"):
            self._answer(message)
        elif kind == "profiled":
            if self._profiled is not None and not self._profiled.done():
                self._profiled.set_result(message)
        elif self._ready is not None and not self._ready.done():
            if kind == "ready":
                self._ready.set_result(message["report"])
            elif kind == "failed":
                self._ready.set_exception(UserError(message["message"]))
            elif self._on_progress is not None:
                self._on_progress(message["done"], message["total"])

    def _put(self, piece: Piece) -> None:
        mailbox = self._mailboxes.get(piece.request_id)
        if mailbox is None:
            return  # cancelled, and the engine had not heard of it
        mailbox.put(piece)
        if piece.finish_reason is not None:
            del self._mailboxes[piece.request_id]

    def _answer(self, message: Message) -> None:
        mailbox = self._mailboxes.get(message["ids"][0])
        if mailbox is None or mailbox.answer.done():
            return
        if message["type"] == "accepted":
            mailbox.answer.set_result(None)
            return
        for request_id in message["ids"]:
            self._mailboxes.pop(request_id, None)
        mailbox.open.clear()
        error = RuntimeError if message.get("fault") else QueueFullError if message["full"] else UserError
        mailbox.answer.set_exception(error(message["message"]))

    def _lose(self, reason: str) -> None:
        """Answer everybody who waits: nothing more will come."""
        self.gone = reason
        log.error("%s; %d requests were open", reason, len(self._mailboxes))
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(EngineGoneError(reason))
        if self._profiled is not None and not self._profiled.done():
            self._profiled.set_exception(EngineGoneError(reason))
        for request_id, mailbox in list(self._mailboxes.items()):
            if not mailbox.answer.done():
                mailbox.answer.set_exception(EngineGoneError(reason))
            mailbox.put(Piece(request_id, (), (), "error", error=reason))
        self._mailboxes.clear()


def _run_engine(connection: socket.socket, spec: EngineSpec) -> None:
    # imported here: torch is wanted in the engine's process only
    from stepfloor.server.worker import run_engine

    run_engine(connection, spec)
