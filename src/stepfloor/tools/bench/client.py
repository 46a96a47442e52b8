"""HTTP as a bench needs it: one request at a time on a connection, and the time of every piece that arrives.

The time is taken in the protocol's `data_received`, as near to the socket as Python gets; streams and tasks above it
would add their own waiting. At 5,000 events a second that costs a fifth of a core (benchmarks/bench-client.md). Times
are those of time.perf_counter. h11 is what uvicorn parses HTTP with, so it is there already.
"""

import asyncio
import json
import ssl
import time
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import SplitResult, urlsplit

import h11
from typing_extensions import override

from stepfloor.errors import UserError

HEARTBEAT_S = 0.005

Sink = Callable[[float, bytes], None]


class LostError(Exception):
    """The connection ended before the answer did."""


class Exchange:
    """One request and its answer as it comes: status, and every piece of the body to a sink with its time."""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self.sent: float | None = None
        self.status = 0
        self.ended: float | None = None
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class Connection(asyncio.Protocol):
    """One connection, and the exchange that is on it."""

    def __init__(self) -> None:
        self.http = h11.Connection(h11.CLIENT)
        self.exchange: Exchange | None = None
        self.closed = False
        self.used = False
        self._transport: asyncio.Transport | None = None

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if not isinstance(transport, asyncio.Transport):
            raise RuntimeError(f"asyncio made a {type(transport).__name__} for a stream")
        self._transport = transport

    @override
    def data_received(self, data: bytes) -> None:
        self._parse(time.perf_counter(), data)

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self._parse(time.perf_counter(), None)

    def send(self, exchange: Exchange, request: h11.Request, body: bytes) -> None:
        """Put a request on the wire; its time is taken just before."""
        if self._transport is None:
            raise RuntimeError("a request on a connection that was never made")
        self.exchange = exchange
        data = self.http.send(request) or b""
        data += (self.http.send(h11.Data(data=body)) or b"") if body else b""
        data += self.http.send(h11.EndOfMessage()) or b""
        exchange.sent = time.perf_counter()
        self._transport.write(data)

    def abort(self) -> None:
        """Leave at once; the server sees a client that has gone."""
        self.closed = True
        self.exchange = None
        if self._transport is not None:
            self._transport.abort()

    def _parse(self, at: float, data: bytes | None) -> None:
        """Take a piece, or None for the end of the connection."""
        exchange = self.exchange
        if exchange is None or exchange.done.done():
            return
        try:
            self.http.receive_data(b"" if data is None else data)
            while (event := self.http.next_event()) is not h11.NEED_DATA:
                if isinstance(event, h11.Response):
                    exchange.status = event.status_code
                elif isinstance(event, h11.Data):
                    exchange.sink(at, event.data)
                elif isinstance(event, h11.EndOfMessage):
                    self._end(exchange, at)
                    return
                elif isinstance(event, h11.ConnectionClosed) or event is h11.PAUSED:
                    break
        except h11.RemoteProtocolError as error:
            self.closed = True
            exchange.done.set_exception(LostError("the server closed the connection" if data is None else str(error)))
            return
        if data is None:
            exchange.done.set_exception(LostError("the server closed the connection"))

    def _end(self, exchange: Exchange, at: float) -> None:
        exchange.ended = at
        self.exchange = None
        if self.http.our_state is h11.DONE and self.http.their_state is h11.DONE:
            self.http.start_next_cycle()
            self.used = True
        else:
            self.closed = True
            if self._transport is not None:
                self._transport.close()
        exchange.done.set_result(None)


def _address(url: str) -> tuple[SplitResult, str, int | None]:
    """A server's URL in its parts, its host, and its port if it names one. Raises UserError."""
    try:
        split = urlsplit(url if "://" in url else f"http://{url}")
        if split.scheme in ("http", "https") and split.hostname and split.netloc.isascii():
            return split, split.hostname, split.port
    except ValueError:  # a port that is no number or too large, half an IPv6 address
        pass
    raise UserError(f"a server's URL looks like http://127.0.0.1:8000; got {url!r}")


class Client:
    """Requests to one server. url may end with /v1 or not, and may hold a path that a proxy strips."""

    def __init__(self, url: str, headers: Mapping[str, str] | None = None, timeout_s: float = 600.0) -> None:
        split, host, port = _address(url)
        self.host = host
        self.port = port or (443 if split.scheme == "https" else 80)
        self.base = split.path.rstrip("/").removesuffix("/v1")
        self.url = f"{split.scheme}://{split.netloc}{self.base}"
        self.timeout_s = timeout_s
        self._headers = [("host", split.netloc), ("accept", "*/*"), *(headers or {}).items()]
        try:
            h11.Request(method="GET", target=self.base or "/", headers=self._headers)
        except (UnicodeEncodeError, h11.LocalProtocolError):
            # not the values: one of them may be a key
            names = ", ".join(headers or {}) or "none"
            raise UserError(
                f"a URL's path and headers want printable ASCII without line breaks; got headers {names!a} "
                f"and path {self.base!a}; look at the URL, --header and --api-key"
            ) from None
        self._tls = ssl.create_default_context() if split.scheme == "https" else None
        self._idle: list[Connection] = []

    async def open(self, count: int) -> None:
        """Open connections beforehand, so that no request waits for one."""
        self._idle += await asyncio.gather(*(self._connect() for _ in range(count - len(self._idle))))

    async def exchange(self, method: str, path: str, body: bytes, exchange: Exchange) -> None:
        """Send one request and wait for the end of its answer.

        Raises LostError if the connection breaks, TimeoutError, OSError if there is no connection.
        """
        headers = [*self._headers, ("content-length", str(len(body)))]
        if body:
            headers.append(("content-type", "application/json"))
        request = h11.Request(method=method, target=self.base + path, headers=headers)
        async with asyncio.timeout(self.timeout_s):
            connection = await self._take()
            again = connection.used
            while True:
                connection.send(exchange, request, body)
                try:
                    await exchange.done
                except asyncio.CancelledError:
                    connection.abort()
                    raise
                except LostError:
                    # the server closed an idle connection just when this request went out: send it on a fresh one
                    if not again or exchange.status:
                        raise
                    again = False
                    exchange.done = asyncio.get_running_loop().create_future()
                    connection = await self._connect()
                    continue
                break
        if not connection.closed:
            self._idle.append(connection)

    async def fetch(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> tuple[int, bytes]:
        """Status and body of a request whose answer is not streamed. Raises UserError if nobody answers."""
        parts: list[bytes] = []
        exchange = Exchange(lambda _, data: parts.append(data))
        try:
            await self.exchange(method, path, b"" if body is None else json.dumps(body).encode(), exchange)
        except (OSError, LostError) as error:  # a TimeoutError is an OSError
            reason = str(error) or type(error).__name__
            raise UserError(f"no answer from {self.url}{path} ({reason}); start the server, or pass its URL") from None
        return exchange.status, b"".join(parts)

    async def fetch_json(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The JSON of an answer with status 200; None for another status or for something else than JSON."""
        status, data = await self.fetch(method, path, body)
        try:
            return json.loads(data) if status == 200 else None
        except ValueError:
            return None

    def close(self) -> None:
        """Close what is idle."""
        for connection in self._idle:
            connection.abort()
        self._idle.clear()

    async def _take(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed:
                return connection
        return await self._connect()

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(Connection, self.host, self.port, ssl=self._tls)
        return connection


class Heartbeat:
    """How late this process is for a timer, which is how late it may be for a piece that arrives.

    asyncio rounds timers up to a millisecond, so about one is seen in a process that does nothing else.
    """

    def __init__(self) -> None:
        self.late_ms: list[float] = []
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._beat())

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _beat(self) -> None:
        while True:
            due = time.perf_counter() + HEARTBEAT_S
            await asyncio.sleep(HEARTBEAT_S)
            self.late_ms.append(1000 * (time.perf_counter() - due))
