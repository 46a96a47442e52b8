"""Load on a running server, beside the bare engine loop: is every answer right, is all given back, what does HTTP cost?

    python -m benchmarks.serving                    # starts a server on the shipped model, and stops it
    python -m benchmarks.serving --requests 200     # a short run

64 clients over 16 slots send requests of mixed length; 22 % of them leave at a random point where at least 9 tokens are
still to come, before the first token or later, so that more than a fifth really is cancelled by the server's own count.
Greedy answers are compared with the same request run alone by an engine of its own. The bare loop serves the first half
of the same plan, with the same cancellations, 64 at a time, without a second process or HTTP; the two take turns, ABBA
and so on, in blocks of a quarter. Prints one JSON line at the end.
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
# more than the fifth that is wanted: some finish while their client goes
CANCELLED_SHARE = 0.22
# two steps of 4 tokens may pass between a client's going and its request's end
LEFT_OVER = 9
BLOCKS = 4
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


@dataclass(frozen=True)
class Visit:
    """One request of the plan: which of the distinct ones, and after how many tokens its client goes, if it does."""

    which: int
    leave_at: int | None


@dataclass
class Side:
    """What one of the two did in all its blocks: answers, wall time, CPU time by process, tokens made."""

    answers: list[tuple[Visit, Answer]] = field(default_factory=list)
    seconds: float = 0.0
    engine_cpu: float = 0.0
    http_cpu: float = 0.0
    made: float = 0.0


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


def make_plan(requests: Sequence[tuple[tuple[int, ...], int]], count: int) -> list[Visit]:
    """count visits; those that leave are drawn from the requests long enough for it."""
    dice = random.Random(1)
    which = [dice.randrange(len(requests)) for _ in range(count)]
    leaving: dict[int, int] = {}
    for block in range(BLOCKS):  # the same share in every block
        places = range(block * count // BLOCKS, (block + 1) * count // BLOCKS)
        long = [i for i in places if requests[which[i]][1] > LEFT_OVER]
        for i in dice.sample(long, min(len(long), round(CANCELLED_SHARE * len(places)))):
            leaving[i] = dice.randint(0, requests[which[i]][1] - LEFT_OVER)
    return [Visit(index, leaving.get(i)) for i, index in enumerate(which)]


async def ask(port: int, prompt: Sequence[int], max_tokens: int, leave_at: int | None) -> Answer:
    """One streamed completion over a connection of its own; with leave_at tokens the client goes."""
    body = {"prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    payload = json.dumps({**body, "stream": True, "return_token_ids": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(payload)}\r\nconnection: close\r\n"
    answer = Answer(begun=time.perf_counter())
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(f"{head}content-type: application/json\r\n\r\n".encode() + payload)
        answer.status = int((await reader.readline()).split()[1])
        if leave_at == 0:
            answer.left = True
            return answer
        async for line in reader:
            if not line.startswith(b"data: {"):
                continue
            for choice in json.loads(line[6:])["choices"]:
                answer.ids += choice["token_ids"]
                answer.deliveries.append((time.perf_counter(), len(choice["token_ids"])))
                answer.reason = choice["finish_reason"]
            if leave_at is not None and len(answer.ids) >= leave_at:
                answer.left = answer.reason is None
                return answer
    finally:
        writer.close()
    return answer


async def load(
    port: int, requests: Sequence[tuple[tuple[int, ...], int]], plan: Sequence[Visit]
) -> list[tuple[Visit, Answer]]:
    """Let CLIENTS clients make these visits; the answer to each."""
    answers: list[tuple[Visit, Answer]] = []
    todo = iter(plan)

    async def client() -> None:
        for visit in todo:
            prompt, max_tokens = requests[visit.which]
            answers.append((visit, await ask(port, prompt, max_tokens, visit.leave_at)))

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


def bare(engine: Engine, requests: Sequence[tuple[tuple[int, ...], int]], plan: Sequence[Visit]) -> list[Answer]:
    """The engine's loop with CLIENTS requests open at any time; a request whose client goes at once is never begun."""
    answers = [Answer() for _ in plan]
    todo = iter(enumerate(plan))

    def submit() -> None:
        for number, visit in todo:
            answers[number].begun = time.perf_counter()
            if visit.leave_at != 0:
                prompt, max_tokens = requests[visit.which]
                engine.submit(Request(str(number), prompt, GREEDY, max_tokens))
                return
            answers[number].left = True

    for _ in range(CLIENTS):
        submit()
    for piece in engine.run():
        answer, leave_at = answers[int(piece.request_id)], plan[int(piece.request_id)].leave_at
        answer.ids += piece.token_ids
        answer.deliveries.append((time.perf_counter(), len(piece.token_ids)))
        answer.left = leave_at is not None and len(answer.ids) >= leave_at and piece.finish_reason is None
        if answer.left:
            engine.cancel(piece.request_id)
        if answer.left or piece.finish_reason is not None:
            submit()
    return answers


def figures(side: Side) -> dict[str, float]:
    """Rates and latencies of the answers that had a token."""
    shown = [a for _, a in side.answers if a.deliveries]
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
        "seconds": round(side.seconds, 2),
        "tokens_per_s": round(tokens / side.seconds, 1),
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


def serve_block(
    side: Side, pids: tuple[int, int], port: int, requests: Sequence[tuple[tuple[int, ...], int]], plan: Sequence[Visit]
) -> None:
    """One block by the server; pids are those of the HTTP process and the engine."""
    made, http, engine = metrics(port)["vllm:generation_tokens_total"], cpu_seconds(pids[0]), cpu_seconds(pids[1])
    begin = time.perf_counter()
    side.answers += asyncio.run(load(port, requests, plan))
    side.seconds += time.perf_counter() - begin
    side.http_cpu += cpu_seconds(pids[0]) - http
    side.engine_cpu += cpu_seconds(pids[1]) - engine
    time.sleep(1.0)  # until those that left last are gone
    side.made += metrics(port)["vllm:generation_tokens_total"] - made


def bare_block(
    side: Side, engine: Engine, requests: Sequence[tuple[tuple[int, ...], int]], plan: Sequence[Visit]
) -> None:
    """One block by the bare loop."""
    begin, cpu = time.perf_counter(), time.process_time()
    answers = bare(engine, requests, plan)
    side.seconds += time.perf_counter() - begin
    side.engine_cpu += time.process_time() - cpu
    side.answers += zip(plan, answers, strict=True)
    side.made += sum(len(answer.ids) for answer in answers)


def wrong_answers(answers: Sequence[tuple[Visit, Answer]], expected: Sequence[list[int]]) -> int:
    """Answers with a token that the request run alone does not have, or that end before it does."""
    return sum(
        answer.ids != expected[visit.which][: len(answer.ids)]
        or (not answer.left and answer.status != 503 and answer.ids != expected[visit.which])
        for visit, answer in answers
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--log", type=Path, default=Path("serving.log"))
    options = parser.parse_args()
    requests = make_requests(Tokenizer.load(SHIPPED), DISTINCT)
    expected = alone(requests)
    plan = make_plan(requests, options.requests)
    server, loop = Side(), Side()
    engine = make_engine(SLOTS)
    process, port, engine_pid = start_server(options.log)
    pids = process.pid, engine_pid
    load_before = os.getloadavg()[0]
    try:
        warm = make_plan(requests, CLIENTS)
        asyncio.run(load(port, requests, warm))  # both processes have allocated what they need after that
        bare(engine, requests, warm)
        time.sleep(1.0)
        before, memory = metrics(port), [resident_mib(pid) for pid in pids]
        for block in range(BLOCKS):
            part = plan[block * len(plan) // BLOCKS : (block + 1) * len(plan) // BLOCKS]
            half = part[: len(part) // 2]
            if block % 2:
                bare_block(loop, engine, requests, half)
            serve_block(server, pids, port, requests, part)
            if not block % 2:
                bare_block(loop, engine, requests, half)
            print(
                f"block {block}: server {figures(server)['tokens_per_s']} tokens/s so far, "
                f"bare loop {figures(loop)['tokens_per_s']}, load average {os.getloadavg()[0]:.1f}",
                flush=True,
            )
        after, memory_after = metrics(port), [resident_mib(pid) for pid in pids]
    finally:
        process.terminate()
        process.wait(60)
    served = [answer for _, answer in server.answers]
    cancelled = "stepfloor:requests_cancelled_total"
    result: dict[str, Any] = {
        "requests": len(served),
        "left": sum(a.left for a in served),
        "left_before_a_token": sum(a.left and not a.ids for a in served),
        "cancelled_by_the_servers_count": after[cancelled] - before[cancelled],
        "refused": sum(a.status != 200 for a in served),
        "without_an_end": sum(not a.left and a.reason is None and a.status == 200 for a in served),
        "wrong": wrong_answers(server.answers, expected),
        "wrong_in_the_bare_loop": wrong_answers(loop.answers, expected),
        "running_after": after["vllm:num_requests_running"],
        "waiting_after": after["vllm:num_requests_waiting"],
        "pages_in_use_after": after["vllm:kv_cache_usage_perc"],
        "memory_mib_before": [round(m, 1) for m in memory],
        "memory_mib_after": [round(m, 1) for m in memory_after],
        "server": figures(server),
        "bare_loop": figures(loop),
        "http_cpu_us_per_token": round(1e6 * server.http_cpu / server.made, 1),
        "engine_cpu_us_per_token": round(1e6 * server.engine_cpu / server.made, 1),
        "bare_cpu_us_per_token": round(1e6 * loop.engine_cpu / loop.made, 1),
        "load_average": [round(load_before, 1), round(os.getloadavg()[0], 1)],
        "python": sys.version.split()[0],
        "cores": os.cpu_count(),
    }
    for name in ("server", "bare_loop"):
        print(f"{name:10} " + "  ".join(f"{key} {value}" for key, value in result[name].items()))
    print(json.dumps(result))
    bad = ("wrong", "wrong_in_the_bare_loop", "without_an_end", "running_after", "waiting_after", "pages_in_use_after")
    return 1 if any(result[name] for name in bad) else 0


if __name__ == "__main__":
    raise SystemExit(main())
