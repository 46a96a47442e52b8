"""A server with scripted timings: what a bench must find is known beforehand, and what it wrote when is kept.

    with stub(Script(first_ms=50, gap_ms=30, chunks=10, tokens_per_chunk=3)) as server:
        ... server.url, server.served

    python -m tests.tools.bench.stub_server --first-ms 50 --gap-ms 12.8     # a process of its own; GET /served

It speaks /v1/completions, /v1/chat/completions, /v1/models, /version, /health, /tokenize, /detokenize and /metrics.
A token is a word with a blank before it: w17 is id 17, other words get ids from 100000 on. Every write is timed with
time.perf_counter, which on Linux is one clock for all processes.
"""

import argparse
import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

VOCABULARY = 50_000
OTHER_WORDS = 100_000
TEMPLATE_TOKENS = 5
BUSY_POLL_S = 0.0005


@dataclass(frozen=True)
class Script:
    """What one request gets.

    first_ms   from the request to the first chunk; gap_ms from each chunk to the next, the last of several repeats
    chunks     how many; without it, as many as max_tokens needs
    kinds      text, reasoning, tool or empty, chunk by chunk; the last repeats
    words      the text; without it every word is another, so that nothing loops
    fail_at    before this chunk an error event ends the stream; drop_at: the connection is closed
    """

    first_ms: float = 20.0
    gap_ms: float | tuple[float, ...] = 10.0
    chunks: int | None = None
    tokens_per_chunk: int = 1
    kinds: tuple[str, ...] = ("text",)
    words: tuple[str, ...] = ()
    usage: bool = True
    cached_tokens: int | None = None
    finish_reason: str = "length"
    status: int = 200
    fail_at: int | None = None
    drop_at: int | None = None

    def gap_s(self, chunk: int) -> float:
        """Between chunk - 1 and chunk, for chunk >= 1."""
        gaps = self.gap_ms if isinstance(self.gap_ms, tuple) else (self.gap_ms,)
        return gaps[min(chunk - 1, len(gaps) - 1)] / 1000


@dataclass
class Served:
    """One request as this server saw it; times are those of time.perf_counter."""

    number: int
    path: str
    body: dict[str, Any]
    received: float
    prompt_tokens: int
    written: list[float] = field(default_factory=list)
    output_tokens: int = 0
    cancelled: bool = False


ScriptOf = Callable[[int, Mapping[str, Any]], Script]


class StubServer:
    """The server; `slots` answers run at once and the others wait, `dialect` is whose metrics page it has."""

    def __init__(
        self, script: Script | ScriptOf, dialect: str | None = "vllm", slots: int | None = None, drafts: int = 0
    ) -> None:
        self.script_of: ScriptOf = script if callable(script) else lambda number, body: script
        self.dialect = dialect
        self.drafts = drafts
        self.slots = asyncio.Semaphore(slots or 1 << 30)
        self.served: list[Served] = []
        self.running = 0
        self.counters = {"steps": 0, "generated": 0, "prompt": 0, "accepted": 0, "cached": 0}
        self.extra_generated = 0  # tokens of clients that are not ours
        self.url = ""
        self._words: dict[str, int] = {}

    async def listen(self, port: int = 0) -> asyncio.Server:
        """Begin to serve on this machine."""
        server = await asyncio.start_server(self._connection, "127.0.0.1", port, backlog=1024)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        return server

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                received = time.perf_counter()
                method, path, _ = head.split(b"\r\n", 1)[0].decode().split(" ")
                lines = (line.split(b":", 1) for line in head.split(b"\r\n")[1:] if b":" in line)
                headers = {name.strip().lower(): value.strip() for name, value in lines}
                data = await reader.readexactly(int(headers.get(b"content-length", 0)))
                body = json.loads(data) if data else {}
                if path.startswith("/v1/") and method == "POST":
                    await self._generate(path, body, received, writer)
                else:
                    self._plain(path, body, writer)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass  # the client has gone, or the block has ended
        finally:
            writer.close()

    def _plain(self, path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        answer: Any = None
        if path == "/v1/models":
            answer = {"object": "list", "data": [{"id": "stub", "object": "model", "max_model_len": 131_072}]}
        elif path == "/version":
            answer = {"version": "1.0-stub"}
        elif path == "/health":
            answer = {}
        elif path == "/served":
            answer = [asdict(served) for served in self.served]
        elif path == "/tokenize":
            ids = self._ids(body)
            answer = {"count": len(ids), "tokens": ids, "max_model_len": 131_072}
        elif path == "/detokenize":
            answer = {"prompt": self._text(body["tokens"])}
        elif path == "/metrics" and self.dialect is not None:
            _respond(writer, 200, self.metrics().encode(), "text/plain")
            return
        _respond(writer, 404 if answer is None else 200, json.dumps(answer or {}).encode())

    async def _generate(self, path: str, body: dict[str, Any], received: float, writer: asyncio.StreamWriter) -> None:
        served = Served(len(self.served), path, body, received, len(self._ids(body)))
        self.served.append(served)
        script = self.script_of(served.number, body)
        if script.status != 200:
            _respond(writer, script.status, json.dumps({"error": {"message": "scripted refusal"}}).encode())
            return
        waits = self.slots.locked()
        async with self.slots:
            self.running += 1
            try:
                await self._stream(script, served, writer, time.perf_counter() if waits else received)
            except ConnectionError:
                served.cancelled = True
                raise
            finally:
                self.running -= 1

    async def _stream(self, script: Script, served: Served, writer: asyncio.StreamWriter, begin: float) -> None:
        body = served.body
        most = int(body.get("max_tokens") or body.get("max_completion_tokens") or 16)
        chunks = script.chunks if script.chunks is not None else -(-most // script.tokens_per_chunk)
        continuous = (body.get("stream_options") or {}).get("continuous_usage_stats")
        self.counters["prompt"] += served.prompt_tokens
        self.counters["cached"] += script.cached_tokens or 0
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        at = begin + script.first_ms / 1000
        for chunk in range(chunks):
            await _until(at)
            if chunk == script.drop_at:
                writer.transport.abort()
                raise ConnectionError
            if chunk == script.fail_at:
                _event(writer, {"error": {"message": "scripted failure", "code": 500}})
                break
            if writer.is_closing():
                raise ConnectionError
            tokens = (
                script.tokens_per_chunk
                if script.chunks is not None
                else min(script.tokens_per_chunk, most - served.output_tokens)
            )
            event = _chunk(script, served, chunk, tokens, chunk == chunks - 1)
            served.output_tokens += tokens
            if continuous and script.usage:
                event["usage"] = _usage(script, served)
            self.counters["steps"] += 1
            self.counters["generated"] += tokens
            self.counters["accepted"] += tokens - 1
            served.written.append(time.perf_counter())
            _event(writer, event)
            at += script.gap_s(chunk + 1)
        else:
            if script.usage and (body.get("stream_options") or {}).get("include_usage"):
                _event(writer, {"object": "chunk", "choices": [], "usage": _usage(script, served)})
            writer.write(b"e\r\ndata: [DONE]\n\n\r\n")
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    def metrics(self) -> str:
        """The page of counters, with the names of the dialect."""
        c = self.counters
        generated = c["generated"] + self.extra_generated
        if self.dialect == "llamacpp":
            values = {
                "llamacpp:prompt_tokens_total": c["prompt"],
                "llamacpp:tokens_predicted_total": generated,
                "llamacpp:n_decode_total": c["steps"],
                "llamacpp:requests_processing": self.running,
            }
            return "".join(f"{name} {value}\n" for name, value in values.items())
        if self.dialect == "sglang":
            values = {
                "sglang:prompt_tokens_total": c["prompt"],
                "sglang:generation_tokens_total": generated,
                "sglang:cached_tokens_total": c["cached"],
                "sglang:num_running_reqs": self.running,
                "sglang:spec_accept_length": 1 + c["accepted"] / max(1, c["steps"]),
            }
            return "".join(f'{name}{{model_name="stub"}} {value}\n' for name, value in values.items())
        values = {
            "vllm:prompt_tokens_total": c["prompt"],
            "vllm:generation_tokens_total": generated,
            "vllm:iteration_tokens_total_count": c["steps"],
            "vllm:num_requests_running": self.running,
            "vllm:prefix_cache_queries_total": c["prompt"],
            "vllm:prefix_cache_hits_total": c["cached"],
        }
        if self.dialect == "stepfloor":
            values["stepfloor:steps_total"] = c["steps"]
        if self.drafts:
            values["vllm:spec_decode_num_drafts_total"] = c["steps"]
            values["vllm:spec_decode_num_draft_tokens_total"] = c["steps"] * self.drafts
            values["vllm:spec_decode_num_accepted_tokens_total"] = c["accepted"]
        lines = [f'{name}{{engine="0",model_name="stub"}} {value}\n' for name, value in values.items()]
        for position in range(self.drafts):  # all drafts up to the scripted length are accepted
            count = c["steps"] if c["steps"] and position < c["accepted"] / c["steps"] else 0
            name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
            lines.append(f'{name}{{engine="0",model_name="stub",position="{position}"}} {count}\n')
        return "# HELP vllm:x Text.\n" + "".join(lines)

    def _ids(self, body: Mapping[str, Any]) -> list[int]:
        """Of a prompt as text or ids, or of messages; the template adds TEMPLATE_TOKENS for each message."""
        prompt = body.get("prompt", "")
        if "messages" in body:
            ids = []
            for message in body["messages"]:
                ids += [0] * TEMPLATE_TOKENS + self._ids({"prompt": message["content"]})
            return ids
        return [self._id(word) for word in prompt.split()] if isinstance(prompt, str) else list(prompt)

    def _id(self, word: str) -> int:
        if word[:1] == "w" and word[1:].isdigit():
            return int(word[1:])
        return self._words.setdefault(word, OTHER_WORDS + len(self._words))

    def _text(self, ids: list[int]) -> str:
        other = {number: word for word, number in self._words.items()}
        return "".join(f" {other.get(number, f'w{number}')}" for number in ids)


def _usage(script: Script, served: Served) -> dict[str, Any]:
    usage: dict[str, Any] = {"prompt_tokens": served.prompt_tokens, "completion_tokens": served.output_tokens}
    usage["total_tokens"] = sum(usage.values())
    if script.cached_tokens is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": script.cached_tokens}
    return usage


def _chunk(script: Script, served: Served, chunk: int, tokens: int, last: bool) -> dict[str, Any]:
    begin = served.output_tokens
    words = script.words or tuple(f"w{(served.number * 7919 + begin + i) % VOCABULARY}" for i in range(tokens))
    text = "".join(f" {words[(begin + i) % len(words)]}" for i in range(tokens))
    kind = script.kinds[min(chunk, len(script.kinds) - 1)]
    choice: dict[str, Any] = {"index": 0, "finish_reason": script.finish_reason if last else None}
    if "chat" not in served.path:
        choice["text"] = "" if kind == "empty" else text
        return {"id": "stub", "object": "text_completion", "choices": [choice]}
    delta: dict[str, Any] = {"role": "assistant", "content": ""} if kind == "empty" else {}
    if kind == "reasoning":
        delta["reasoning_content"] = text
    elif kind == "tool":
        delta["tool_calls"] = [{"index": 0, "function": {"name": "f", "arguments": text}}]
    elif kind == "text":
        delta["content"] = text
    return {"id": "stub", "object": "chat.completion.chunk", "choices": [{**choice, "delta": delta}]}


def _event(writer: asyncio.StreamWriter, event: Mapping[str, Any]) -> None:
    data = b"data: " + json.dumps(event).encode() + b"\n\n"
    writer.write(b"%x\r\n%b\r\n" % (len(data), data))


def _respond(writer: asyncio.StreamWriter, status: int, data: bytes, kind: str = "application/json") -> None:
    head = f"HTTP/1.1 {status} Stub\r\ncontent-type: {kind}\r\ncontent-length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)


async def _until(at: float) -> None:
    """Sleep until perf_counter reaches `at`; the event loop's own clock is good to a millisecond."""
    while (left := at - time.perf_counter()) > 0:
        await asyncio.sleep(left if left > BUSY_POLL_S else 0)


@contextmanager
def stub(
    script: Script | ScriptOf, dialect: str | None = "vllm", slots: int | None = None, drafts: int = 0
) -> Iterator[StubServer]:
    """A stub server in a thread of this process, until the block ends."""
    loop = asyncio.new_event_loop()
    server = StubServer(script, dialect, slots, drafts)
    listening = loop.run_until_complete(server.listen())
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(_stop(listening), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


async def _stop(listening: asyncio.Server) -> None:
    listening.close()
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def main() -> None:
    """Serve until killed; prints the URL."""
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("--port", type=int, default=0)
    parse.add_argument("--dialect", default="vllm")
    parse.add_argument("--slots", type=int)
    parse.add_argument("--drafts", type=int, default=0)
    parse.add_argument("--first-ms", type=float, default=20.0)
    parse.add_argument("--gap-ms", type=float, default=10.0)
    parse.add_argument("--tokens-per-chunk", type=int, default=1)
    parse.add_argument("--cached-tokens", type=int)
    given = parse.parse_args()
    script = replace(Script(), **{name: getattr(given, name) for name in ("first_ms", "gap_ms", "tokens_per_chunk")})
    script = replace(script, cached_tokens=given.cached_tokens)

    async def serve() -> None:
        server = StubServer(script, given.dialect, given.slots, given.drafts)
        listening = await server.listen(given.port)
        print(server.url, flush=True)
        await listening.serve_forever()

    asyncio.run(serve())


if __name__ == "__main__":
    main()
