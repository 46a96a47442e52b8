"""The HTTP client: connections that are kept, broken or stale, and the time at which a piece arrived."""

import asyncio
import json
import time

import numpy as np
import pytest

from stepfloor.errors import UserError
from stepfloor.tools.bench.answer import Answer
from stepfloor.tools.bench.client import Client, Exchange, LostError
from tests.tools.bench.stub_server import Script, stub

BODY = json.dumps(
    {"prompt": [1, 2], "max_tokens": 4, "stream": True, "stream_options": {"include_usage": True}}
).encode()


async def ask(client: Client) -> Answer:
    answer = Answer()
    await client.exchange("POST", "/v1/completions", BODY, Exchange(answer.feed))
    return answer


def test_a_url_may_be_written_in_any_way() -> None:
    """Guards against: /v1/v1/completions, and a prefix of a proxy that is lost."""

    async def urls() -> list[str]:
        given = ("http://h:1", "http://h:1/v1/", "h:1", "https://h/proxy/v1")
        return [client.url for client in map(Client, given)]

    assert asyncio.run(urls()) == ["http://h:1", "http://h:1", "http://h:1", "https://h/proxy"]
    with pytest.raises(UserError, match="looks like http"):
        Client("ftp://h")


def test_times_are_those_of_the_servers_writes() -> None:
    """Guards against: a piece with the time of another. 16 streams write at once; the stub notes each write.

    How late times are is in benchmarks/bench-client.md. Streams are alike, and their order at the server is its own.
    """
    with stub(Script(first_ms=20, gap_ms=10, chunks=20)) as server:

        async def all_at_once() -> list[Answer]:
            client = Client(server.url)
            await client.open(16)
            return await asyncio.gather(*(ask(client) for _ in range(16)))

        answers = asyncio.run(all_at_once())
        written = np.sort([served.written for served in server.served], axis=0)
    assert [len(answer.chunk_s) for answer in answers] == [20] * 16
    read = np.sort([answer.chunk_s for answer in answers], axis=0)
    assert (read - written).min() >= -0.001  # the stub notes the time just before it writes


def test_connections_are_kept_and_replaced_when_stale() -> None:
    """Guards against: a request lost because the server closed an idle connection just before it."""

    async def run() -> tuple[int, int]:
        opened = 0

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal opened
            opened += 1
            for _ in range(2):  # answers twice, takes a third request and closes without a word
                await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(len(BODY))
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 14\r\n\r\ndata: [DONE]\n\n")
            await reader.readuntil(b"\r\n\r\n")
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        client = Client(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
        finished = [(await ask(client)).finished for _ in range(4)]
        server.close()
        return opened, sum(finished)

    assert asyncio.run(run()) == (2, 4)


def test_what_breaks_is_an_error() -> None:
    """Guards against: a dropped or endless answer that hangs the bench or counts as whole."""
    with stub(Script(drop_at=2, gap_ms=5)) as server, pytest.raises(LostError, match="closed"):
        asyncio.run(ask(Client(server.url)))
    with stub(Script(first_ms=5000)) as server:
        begin = time.perf_counter()
        with pytest.raises(TimeoutError):
            asyncio.run(ask(Client(server.url, timeout_s=0.1)))
        assert time.perf_counter() - begin < 3
    with pytest.raises(UserError, match="start the server"):
        asyncio.run(Client("http://127.0.0.1:9", timeout_s=5).fetch("GET", "/version"))
