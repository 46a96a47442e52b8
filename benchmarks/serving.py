"""Load on a running server, beside the bare engine loop: is every answer right, is all given back, what does HTTP cost?

    python -m benchmarks.serving                    # starts a server on the shipped model, and stops it
    python -m benchmarks.serving --requests 200     # a short run

64 clients over 16 slots send requests of mixed length; a fifth of them leaves at a random point. Greedy answers are
compared with the same request run alone by an engine of its own. The bare loop serves the same requests, 64 at a time,
without a second process or HTTP. Prints one JSON line at the end.
"""

import argparse
import asyncio
import json
import os
import random
import re
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import stepfloor
from stepfloor.config import EngineConfig
from stepfloor.engine import Engine
from stepfloor.request import Request, SamplingParams
from stepfloor.tokenizer.tokenizer import Tokenizer
from stepfloor.weights.checkpoint import open_checkpoint

SHIPPED = Path(stepfloor.__file__).parent / "shipped"
SLOTS, CLIENTS = 16, 64
DISTINCT = 100
CANCELLED_SHARE = 0.2
GREEDY = SamplingParams(temperature=0.0, seed=0)


@dataclass
class Answer:
    """What one request got, and when: begun, and each delivery with its tokens."""

    ids: list[int] = field(default_factory=list)
    begun: float = 0.0
    deliveries: list[tuple[float, int]] = field(default_factory=list)
    reason: str | None = None
    left: bool = False
    status: int = 0


def make_requests(tokenizer: Tokenizer, count: int) -> list[tuple[tuple[int, ...], int]]:
    """Distinct (prompt, max_tokens): pieces of this file's text, 1 to 100 tokens long, 2 to 24 tokens wanted."""
    dice = random.Random(0)
    text = tokenizer.encode(Path(__file__).read_text(encoding="utf-8"))
    made = []
    for _ in range(count):
        length = dice.choice((1, 4, 16, 40, 100))
        start = dice.randrange(len(text) - length)
        made.append((tuple(text[start : start + length]), dice.choice((2, 4, 8, 16, 24))))
    return made


async def ask(port: int, prompt: Sequence[int], max_tokens: int, leave_after: int | None) -> Answer:
    """One streamed completion over a connection of its own; leave_after deliveries the client goes."""
    body = {"prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    payload = json.dumps({**body, "stream": True, "return_token_ids": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(payload)}\r\nconnection: close\r\n"
    answer = Answer(begun=time.perf_counter())
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(f"{head}content-type: application/json\r\n\r\n".encode() + payload)
        answer.status = int((await reader.readline()).split()[1])
        if leave_after == 0:
            answer.left = True
            return answer
        async for line in reader:
            if not line.startswith(b"data: {"):
                continue
            for choice in json.loads(line[6:])["choices"]:
                answer.ids += choice["token_ids"]
                answer.deliveries.append((time.perf_counter(), len(choice["token_ids"])))
                answer.reason = choice["finish_reason"]
            if leave_after is not None and len(answer.deliveries) >= leave_after:
                answer.left = answer.reason is None
                return answer
    finally:
        writer.close()
    return answer


async def load(port: int, requests: Sequence[tuple[tuple[int, ...], int]], count: int) -> list[tuple[int, Answer]]:
    """Serve count requests to CLIENTS clients; (which request, its answer) for each."""
    dice = random.Random(1)
    plan = [(dice.randrange(len(requests)), dice.random() < CANCELLED_SHARE, dice.randrange(6)) for _ in range(count)]
    answers: list[tuple[int, Answer]] = []
    todo = iter(plan)

    async def client() -> None:
        for which, leaves, after in todo:
            prompt, max_tokens = requests[which]
            answers.append((which, await ask(port, prompt, max_tokens, after if leaves else None)))

    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return answers


def make_engine(sequences: int) -> Engine:
    config = EngineConfig(max_num_seqs=sequences, max_model_len=1024)
    return Engine(open_checkpoint(SHIPPED), config, Tokenizer.load(SHIPPED))


def alone(requests: Sequence[tuple[tuple[int, ...], int]]) -> list[list[int]]:
    """Each request by itself."""
    engine = make_engine(1)
    results = []
    for i, (prompt, max_tokens) in enumerate(requests):
        engine.submit(Request(f"r{i}", prompt, GREEDY, max_tokens))
        results.append([token for piece in engine.run() for token in piece.token_ids])
    return results


def bare(requests: Sequence[tuple[tuple[int, ...], int]], which: Sequence[int]) -> tuple[list[Answer], float]:
    """The engine's loop with CLIENTS requests open at any time; the answers and the time it took."""
    engine = make_engine(SLOTS)
    answers = [Answer() for _ in which]
    todo = iter(enumerate(which))

    def submit() -> None:
        if (following := next(todo, None)) is not None:
            number, index = following
            answers[number].begun = time.perf_counter()
            engine.submit(Request(str(number), requests[index][0], GREEDY, requests[index][1]))

    begin = time.perf_counter()
    for _ in range(CLIENTS):
        submit()
    for piece in engine.run():
        answer = answers[int(piece.request_id)]
        answer.ids += piece.token_ids
        answer.deliveries.append((time.perf_counter(), len(piece.token_ids)))
        if piece.finish_reason is not None:
            submit()
    return answers, time.perf_counter() - begin


def figures(answers: Sequence[Answer], seconds: float) -> dict[str, float]:
    """Rates and latencies of the answers that had a token."""
    shown = [a for a in answers if a.deliveries]
    tokens = sum(len(a.ids) for a in shown)
    ttft = [a.deliveries[0][0] - a.begun for a in shown]
    itl = [
        (b[0] - a[0]) / max(1, b[1])
        for one in shown
        for a, b in zip(one.deliveries, one.deliveries[1:], strict=False)
        for _ in range(b[1])
    ]
    return {
        "tokens": tokens,
        "seconds": round(seconds, 2),
        "tokens_per_s": round(tokens / seconds, 1),
        **{f"ttft_p{p}_ms": round(1e3 * quantile(ttft, p), 1) for p in (50, 99)},
        **{f"itl_p{p}_ms": round(1e3 * quantile(itl, p), 2) for p in (50, 99)},
    }


def quantile(values: Sequence[float], percent: int) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1] if len(values) > 1 else values[0]


def metrics(port: int) -> dict[str, float]:
    """Series of /metrics, those with labels summed."""
    page = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60).read().decode()
    totals: dict[str, float] = {}
    for line in page.splitlines():
        if not line.startswith("#"):
            name, value = re.split(r"[{ ]", line, maxsplit=1)[0], line.rsplit(" ", 1)[1]
            totals[name] = totals.get(name, 0.0) + float(value)
    return totals


def resident_mib(pid: int) -> float:
    """Memory of a process."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024  # type: ignore[index]


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def start_server(log: Path) -> tuple[subprocess.Popen[bytes], int, int]:
    """The process, its port and the engine's pid."""
    flags = ["--port", "0", "--max-num-seqs", str(SLOTS), "--max-model-len", "1024", "--disable-uvicorn-access-log"]
    command = [sys.executable, "-m", "stepfloor", "serve", *flags]
    process = subprocess.Popen(command, stdout=log.open("wb"), stderr=subprocess.STDOUT)
    while (found := re.search(r"engine pid (\d+): http://[^:]+:(\d+)", log.read_text(encoding="utf-8"))) is None:
        if process.poll() is not None:
            raise SystemExit(log.read_text(encoding="utf-8"))
        time.sleep(0.1)
    return process, int(found[2]), int(found[1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--log", type=Path, default=Path("serving.log"))
    options = parser.parse_args()
    requests = make_requests(Tokenizer.load(SHIPPED), DISTINCT)
    expected = alone(requests)
    process, port, engine_pid = start_server(options.log)
    try:
        asyncio.run(load(port, requests, CLIENTS))  # both processes have allocated what they need after that
        time.sleep(1.0)
        before, memory = metrics(port), (resident_mib(process.pid), resident_mib(engine_pid))
        cpu = cpu_seconds(process.pid), cpu_seconds(engine_pid)
        begin = time.perf_counter()
        answers = asyncio.run(load(port, requests, options.requests))
        seconds = time.perf_counter() - begin
        cpu = cpu_seconds(process.pid) - cpu[0], cpu_seconds(engine_pid) - cpu[1]
        time.sleep(1.0)
        after, memory_after = metrics(port), (resident_mib(process.pid), resident_mib(engine_pid))
    finally:
        process.terminate()
        process.wait(60)
    served = [answer for _, answer in answers]
    wrong = [i for i, a in answers if a.ids != expected[i][: len(a.ids)] or (not a.left and a.ids != expected[i])]
    bare_answers, bare_seconds = bare(requests, [which for which, _ in answers])
    server, loop = figures(served, seconds), figures(bare_answers, bare_seconds)
    delivered = after["vllm:generation_tokens_total"] - before["vllm:generation_tokens_total"]
    result: dict[str, Any] = {
        "requests": len(answers),
        "left": sum(a.left for a in served),
        "refused": sum(a.status != 200 for a in served),
        "without_an_end": sum(not a.left and a.reason is None and a.status == 200 for a in served),
        "wrong": len(wrong),
        "running_after": after["vllm:num_requests_running"],
        "waiting_after": after["vllm:num_requests_waiting"],
        "pages_in_use_after": after["vllm:kv_cache_usage_perc"],
        "memory_mib_before": [round(m, 1) for m in memory],
        "memory_mib_after": [round(m, 1) for m in memory_after],
        "server": server,
        "bare_loop": loop,
        "http_cpu_us_per_token": round(1e6 * cpu[0] / delivered, 1),
        "engine_cpu_us_per_token": round(1e6 * cpu[1] / delivered, 1),
        "python": sys.version.split()[0],
        "cores": os.cpu_count(),
    }
    for name, row in (("server", server), ("bare loop", loop)):
        print(f"{name:10} " + "  ".join(f"{key} {value}" for key, value in row.items()))
    print(json.dumps(result))
    good = not (wrong or result["without_an_end"] or result["running_after"] or result["pages_in_use_after"])
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
