"""Does the bench's own client distort what it measures? 5,000 streamed events a second on one core.

    python -m benchmarks.bench_client
    python -m benchmarks.bench_client --clients ours,httpx,aiohttp,httptools     # where they are installed
    chrt -f 1 python -m benchmarks.bench_client             # on a machine with other work: it uses half a core

The stub server (tests/tools/bench/stub_server.py) runs in a process of its own on another core and notes when it writes
each event. 64 streams of 400 events, one each 12.8 ms: once all in step, as an engine delivers, and once spread. A
piece is late by the time from the server's write to the client's note of its arrival; the figures that a bench reports
are worked out from both. Clients take turns, in reversed order every other round. Prints one JSON line at the end.
"""

import argparse
import asyncio
import json
import os
import platform
import re
import resource
import subprocess
import sys
import time
import urllib.request
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stepfloor.tools.bench.answer import Answer
from stepfloor.tools.bench.client import Client, Exchange

ROOT = Path(__file__).parents[1]
STREAMS, EVENTS, GAP_MS = 64, 400, 12.8

# sends all bodies at once, one each `stagger` seconds; arrivals of each
Send = Callable[[str, list[bytes], float], Awaitable[list[list[float]]]]


def events_in(data: bytes) -> int:
    """Parse the events of some whole lines as a client must; how many bring a token."""
    parsed = [json.loads(line[6:]) for line in data.split(b"\n") if line.startswith(b"data: {")]
    return sum(bool(event["choices"]) for event in parsed)


async def ours(url: str, bodies: list[bytes], stagger: float) -> list[list[float]]:
    client = Client(url)
    await client.open(len(bodies))

    async def one(index: int) -> list[float]:
        await asyncio.sleep(stagger * index)
        answer = Answer()
        await client.exchange("POST", "/v1/completions", bodies[index], Exchange(answer.feed))
        return answer.chunk_s

    return await asyncio.gather(*(one(i) for i in range(len(bodies))))


async def with_httpx(url: str, bodies: list[bytes], stagger: float) -> list[list[float]]:
    import httpx

    async with httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None)) as client:

        async def one(index: int) -> list[float]:
            await asyncio.sleep(stagger * index)
            times: list[float] = []
            async with client.stream("POST", f"{url}/v1/completions", content=bodies[index]) as answer:
                async for line in answer.aiter_lines():
                    now = time.perf_counter()
                    times += [now] * events_in(line.encode())
            return times

        return await asyncio.gather(*(one(i) for i in range(len(bodies))))


async def with_aiohttp(url: str, bodies: list[bytes], stagger: float) -> list[list[float]]:
    import aiohttp

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as client:

        async def one(index: int) -> list[float]:
            await asyncio.sleep(stagger * index)
            times: list[float] = []
            rest = b""
            async with client.post(f"{url}/v1/completions", data=bodies[index]) as answer:
                async for data in answer.content.iter_any():
                    now = time.perf_counter()
                    whole, _, rest = (rest + data).rpartition(b"\n")
                    times += [now] * events_in(whole)
            return times

        return await asyncio.gather(*(one(i) for i in range(len(bodies))))


async def with_httptools(url: str, bodies: list[bytes], stagger: float) -> list[list[float]]:
    """httptools under a protocol that parses where pieces arrive: the plain way to be near the socket."""
    import httptools

    class Plain(asyncio.Protocol):
        def __init__(self, body: bytes) -> None:
            self.body, self.times, self.rest, self.now = body, list[float](), b"", 0.0
            self.parser = httptools.HttpResponseParser(self)
            self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def connection_made(self, transport: Any) -> None:
            self.transport = transport
            head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(self.body)
            transport.write(head + self.body)

        def data_received(self, data: bytes) -> None:
            self.now = time.perf_counter()
            self.parser.feed_data(data)

        def on_body(self, data: bytes) -> None:
            whole, _, self.rest = (self.rest + data).rpartition(b"\n")
            self.times += [self.now] * events_in(whole)

        def on_message_complete(self) -> None:
            self.done.set_result(None)
            self.transport.close()

    host, port = url.removeprefix("http://").split(":")
    loop = asyncio.get_running_loop()

    async def one(index: int) -> list[float]:
        await asyncio.sleep(stagger * index)
        _, plain = await loop.create_connection(lambda: Plain(bodies[index]), host, int(port))
        await plain.done
        return plain.times

    return await asyncio.gather(*(one(i) for i in range(len(bodies))))


CLIENTS: dict[str, Send] = {
    "ours": ours,
    "httpx": with_httpx,
    "aiohttp": with_aiohttp,
    "httptools": with_httptools,
}


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def measure(name: str, url: str, stagger: float, turn: int) -> dict[str, Any]:
    """One client, one load: what it costs, how late it is, and the figures from its times and from the server's."""
    wanted = {"max_tokens": EVENTS, "stream": True, "stream_options": {"include_usage": True}}
    bodies = [json.dumps({"prompt": [turn, i], **wanted}).encode() for i in range(STREAMS)]
    cpu, begin = cpu_s(), time.perf_counter()
    arrived = np.asarray(asyncio.run(_gather(CLIENTS[name], url, bodies, stagger)))
    used, wall = cpu_s() - cpu, time.perf_counter() - begin
    served = json.load(urllib.request.urlopen(f"{url}/served"))
    written = {s["body"]["prompt"][1]: s["written"] for s in served if s["body"]["prompt"][0] == turn}
    wrote = np.asarray([written[i] for i in range(STREAMS)])
    late, gaps, true_gaps = 1000 * (arrived - wrote), 1000 * np.diff(arrived), 1000 * np.diff(wrote)
    return {
        "client": name,
        "streams": "in step" if stagger == 0 else "spread",
        "events_per_s": arrived.size / wall,
        "cpu_us_per_event": 1e6 * used / arrived.size,
        "core_share": used / wall,
        **{f"late_ms_p{p}": float(np.percentile(late, p)) for p in (50, 99)},
        "late_ms_max": float(late.max()),
        **{f"itl_ms_p{p}": float(np.percentile(gaps, p)) for p in (50, 99)},
        **{f"true_itl_ms_p{p}": float(np.percentile(true_gaps, p)) for p in (50, 99)},
        "itl_ms_mean": float(gaps.mean()),
        "true_itl_ms_mean": float(true_gaps.mean()),
    }


async def _gather(send: Send, url: str, bodies: list[bytes], stagger: float) -> list[list[float]]:
    return await send(url, bodies, stagger)


def line_of(row: dict[str, Any]) -> str:
    return (
        "{client:10} {streams:8} {events_per_s:6.0f} events/s {cpu_us_per_event:5.0f} us each,"
        " {core_share:4.0%} of a core; late p50 {late_ms_p50:.2f} p99 {late_ms_p99:.2f} max {late_ms_max:.1f} ms;"
        " itl mean {itl_ms_mean:.3f} ({true_itl_ms_mean:.3f}) p99 {itl_ms_p99:.2f} ({true_itl_ms_p99:.2f})"
    ).format(**row)


def main(arguments: Sequence[str] | None = None) -> None:
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("--clients", default="ours")
    parse.add_argument("--rounds", type=int, default=3)
    given = parse.parse_args(arguments)
    names = given.clients.split(",")
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[:1])
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.tools.bench.stub_server", "--gap-ms", str(GAP_MS), "--first-ms", "50"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    rows = []
    try:
        os.sched_setaffinity(server.pid, cores[1:] or cores)
        found = re.match(r"http://\S+", server.stdout.readline() if server.stdout is not None else "")
        if found is None:
            raise RuntimeError("the stub server did not start")
        for turn in range(given.rounds):
            for name in names if turn % 2 == 0 else reversed(names):
                for stagger in (0.0, GAP_MS / 1000 / STREAMS):
                    row = measure(name, found[0], stagger, len(rows))
                    rows.append(row)
                    print(line_of(row))
    finally:
        server.terminate()
        server.wait()
    load = os.getloadavg()[0]
    print(json.dumps({"python": platform.python_version(), "cores": len(cores), "load": load, "rows": rows}))


if __name__ == "__main__":
    main()
