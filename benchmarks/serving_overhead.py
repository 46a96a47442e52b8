"""What the server adds to a token when steps are fast: an engine that does nothing, behind the real socket and HTTP.

    python -m benchmarks.serving_overhead

The stub delivers `--tokens` tokens a step to each of `--streams` requests, every `--step-ms` (0: as fast as it can).
Two numbers matter, both CPU time, so that other load on the machine does not count. On the engine's side: what reading
the socket and writing pieces takes between two steps. On the HTTP side: what a token takes; it is another core's and
only limits the rate. One JSON line ends the run.
"""

import argparse
import asyncio
import json
import socket
import sys
import tempfile
import time
from pathlib import Path

import uvicorn

import stepfloor
from stepfloor.config import EngineConfig
from stepfloor.request import Piece
from stepfloor.server.app import AppOptions, build_app
from stepfloor.server.client import EngineClient
from stepfloor.server.metrics import Metrics
from stepfloor.server.service import Service, ServiceConfig
from stepfloor.server.wire import EngineSpec, decode_submit, pack_piece
from stepfloor.server.worker import Link
from stepfloor.tokenizer.tokenizer import Tokenizer

SHIPPED = Path(stepfloor.__file__).parent / "shipped"
REPORT = {"block_size": 64, "pages": 100, "step_bytes": 1.0}


def stub_engine(connection: socket.socket, spec: EngineSpec) -> None:
    """Deliver tokens to whoever asks; of the config spec_tokens is tokens a step, block_size the step in us."""
    link = Link(connection)
    link.send({"type": "ready", "report": REPORT})
    tokens, step_s = spec.config.spec_tokens, spec.config.block_size / 1e6
    ids, deltas = tuple(range(100, 100 + tokens)), (" word",) * tokens
    left: dict[str, int] = {}
    busy = steps = 0.0
    try:
        while True:
            begin = time.thread_time()
            for message, packed in link.receive(0 if left else None):
                if message["type"] == "submit":
                    requests = decode_submit(message, packed)
                    left |= {request.request_id: request.max_tokens for request in requests}
                    link.send({"type": "accepted", "ids": [request.request_id for request in requests]})
                else:
                    for name in message["ids"]:
                        left.pop(name, None)
            if not left:
                continue
            pieces = []
            for name in list(left):
                left[name] -= tokens
                end = left[name] <= 0
                pieces.append(pack_piece(Piece(name, ids, deltas, "length" if end else None)))
                if end:
                    del left[name]
            link.send({"type": "pieces", "pieces": pieces})
            if not left:
                link.send({"type": "stats", "busy_us": busy / steps * 1e6 if steps else 0.0})
            spent = time.thread_time() - begin
            busy, steps = busy + spent, steps + 1
            if step_s > spent:
                time.sleep(step_s - spent)
    except ConnectionError:
        return


async def stream(port: int, tokens: int) -> int:
    """One streamed chat completion; bytes received."""
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": tokens, "stream": True}
    payload = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(payload)}\r\nconnection: close\r\n"
    writer.write(f"{head}content-type: application/json\r\n\r\n".encode() + payload)
    received = 0
    while data := await reader.read(1 << 16):
        received += len(data)
    writer.close()
    return received


async def serve(options: argparse.Namespace, port_file: Path) -> None:
    config = EngineConfig(spec_tokens=options.tokens, block_size=int(options.step_ms * 1000))
    client = EngineClient(EngineSpec(SHIPPED, config), stub_engine)
    report = await client.connect(lambda done, total: None)
    service_config = ServiceConfig(("stub",), 1 << 20, 1 << 20, (2,), {})
    service = Service(service_config, Tokenizer.load(SHIPPED), client, Metrics("stub", 4096, report))
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    app_config = uvicorn.Config(build_app(service, AppOptions()), log_level="warning", access_log=False, lifespan="off")
    server = uvicorn.Server(app_config)
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    while not server.started:
        await asyncio.sleep(0.01)
    port_file.write_text(str(listening.getsockname()[1]), encoding="utf-8")
    measured = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.serving_overhead", "--client", str(port_file),
        "--streams", str(options.streams), "--steps", str(options.steps), "--tokens", str(options.tokens),
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    cpu, begin = time.process_time(), time.perf_counter()
    out, _ = await measured.communicate()
    cpu, seconds = time.process_time() - cpu, time.perf_counter() - begin
    told = json.loads(out)
    total = options.streams * options.steps * options.tokens
    result = {
        "streams": options.streams,
        "tokens_per_step": options.tokens,
        "step_ms": options.step_ms,
        "tokens": total,
        "tokens_per_s": round(total / told["seconds"], 0),
        "http_cpu_us_per_token": round(cpu / total * 1e6, 1),
        "http_cpu_us_per_delivery": round(cpu / (options.streams * options.steps) * 1e6, 1),
        "engine_us_between_steps": round(client.stats.get("busy_us", 0.0), 1),
        "engine_us_per_token": round(client.stats.get("busy_us", 0.0) / (options.streams * options.tokens), 2),
        "bytes_per_token": round(told["bytes"] / total, 1),
        "seconds": round(seconds, 2),
    }
    server.should_exit = True
    await serving
    await client.close()
    print(json.dumps(result))


async def run_client(options: argparse.Namespace) -> None:
    port = int(Path(options.client).read_text(encoding="utf-8"))
    begin = time.perf_counter()
    received = await asyncio.gather(*(stream(port, options.steps * options.tokens) for _ in range(options.streams)))
    print(json.dumps({"bytes": sum(received), "seconds": time.perf_counter() - begin}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--tokens", type=int, default=3, help="tokens a step gives each stream")
    parser.add_argument("--step-ms", type=float, default=0.0)
    parser.add_argument("--client", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.client:
        asyncio.run(run_client(options))
    else:
        with tempfile.TemporaryDirectory() as directory:
            asyncio.run(serve(options, Path(directory) / "port"))


if __name__ == "__main__":
    main()
