"""Answers that notice when their client leaves: a stream of server-sent events, and one that is awaited whole."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")


class ClientGoneError(Exception):
    """The client closed the connection before its answer was whole."""


async def until_gone(http: HttpRequest, work: Coroutine[Any, Any, T]) -> T:
    """Await the work; if the client closes the connection first, cancel it and raise ClientGoneError."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_gone(http.receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGoneError
    finally:
        watching.cancel()
        if not working.done():
            working.cancel()
            await asyncio.wait((working,))


async def _gone(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events. `close` is called whatever happens, so that what they hold in the engine is given back.

    Starlette's own streaming response notices a client that left only when it sends; one that waits in the queue
    would keep its place.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], None]) -> None:
        self.events = events
        self.close = close
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send(send))
        watching = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait((sending, watching), return_when=asyncio.FIRST_COMPLETED)
        finally:
            watching.cancel()
            if not sending.done():
                sending.cancel()
                await asyncio.wait((sending,))
            self.close()  # not left to the iterator: one that was never begun runs no finally
        if not sending.cancelled():
            sending.result()

    async def _send(self, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for chunk in self.events:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except OSError:
            return  # the client has left
