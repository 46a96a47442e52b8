"""bench matrix: a server at several concurrencies and contexts, one cell after another, in a file that can go on.

A cell that measures decode sends its requests at once and lets them all prefill; its window begins when each has its
first token, so the rates are those of decode at that context and nothing else. The file has one result a line and is
written after every cell; a cell that is in it is not measured again.
"""

import asyncio
import hashlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from stepfloor.errors import UserError
from stepfloor.tools.bench import checks
from stepfloor.tools.bench.client import Client
from stepfloor.tools.bench.drive import Driver
from stepfloor.tools.bench.load import ROUTES, Load
from stepfloor.tools.bench.metrics import distribution, gaps_ms, mean_in_flight, tokens_between, ttft_ms
from stepfloor.tools.bench.prompts import tokens_of
from stepfloor.tools.bench.result import Flag, Metric, Request, Result, read_results, write_results
from stepfloor.tools.bench.scrape import Page, fetch_page, server_metrics
from stepfloor.tools.bench.serve import (
    Progress,
    Seen,
    Session,
    conclude,
    prepare,
    result_of,
    send,
    warm_up,
    watched,
)
from stepfloor.tools.bench.target import find_target

MEASURES = ("decode", "whole")
# a context of 0 is a prompt of this many tokens: there must be one, and a chat template takes some
SHORTEST = 32
LONGEST_ANSWER = 8192  # without an output_len
WARM_UP_LENGTHS = (SHORTEST, 16)
SETTLE_S = 1.0
# what one more request must add at least, as a share of what the ones before it bring on average
KNEE = 0.5
# these differ from cell to cell, or say nothing of the load
_OF_A_CELL = (
    "concurrency",
    "num_prompts",
    "num_warmups",
    "input_len",
    "output_len",
    "seed",
    "bodies_sha256",
    "context",
)


class MatrixProgress(Progress, Protocol):
    """Is told the cell as well."""

    def name(self, prefix: str) -> None:
        """What all following phases belong to."""
        ...


@dataclass(frozen=True, slots=True)
class Grid:
    """Which cells: every concurrency at every context, in tokens.

    seconds  of decode in each cell that measures decode
    load     what all cells share; a cell sets its concurrency, number and length of prompts, and a seed of its own.
             output_len is the most that an answer may grow to in a cell that measures decode
    """

    concurrency: tuple[int, ...]
    context: tuple[int, ...]
    seconds: float
    measure: str
    load: Load

    def check(self) -> None:
        """Raises UserError for what a matrix cannot measure."""
        self.load.resolve()
        if self.measure not in MEASURES:
            raise UserError(f"--measure is one of {', '.join(MEASURES)}; got {self.measure!r}")
        if self.load.arrivals != "closed":
            raise UserError("a matrix is measured in a closed loop; leave --arrivals out")
        if self.load.dataset_name in ("sharegpt", "jsonl"):
            raise UserError("a cell has prompts of one length; pass --dataset-name random, unique or code")
        if self.measure == "decode" and (self.load.plain or not self.load.ignore_eos):
            raise UserError("a decode cell wants answers that do not end; leave --plain and --no-ignore-eos out")
        if not 0 < self.seconds < math.inf:
            raise UserError(f"--seconds must be more than 0; got {self.seconds}")

    def cells(self) -> list[tuple[int, int]]:
        """(concurrency, context), contexts in order, in each the concurrencies."""
        return [(c, context) for context in self.context for c in self.concurrency]

    def cell_load(self, concurrency: int, context: int, longest: int | None) -> Load:
        """The load of a cell. Its prompts are its own: those of another cell would be in the server's cache."""
        digest = hashlib.sha256(f"{self.load.seed}/{concurrency}/{context}".encode()).digest()
        prompt = max(context, SHORTEST)
        load = replace(
            self.load, concurrency=concurrency, input_len=str(prompt), seed=int.from_bytes(digest[:4], "big")
        )
        if self.measure == "whole":
            return load
        answer = tokens_of(self.load.output_len or str(LONGEST_ANSWER))
        answer = answer if longest is None else min(answer, longest - prompt)
        return replace(load, num_prompts=concurrency, num_warmups=concurrency, output_len=str(answer))


def run(
    url: str,
    grid: Grid,
    path: Path | None,
    *,
    headers: Mapping[str, str] | None = None,
    server_config: Mapping[str, Any] | None = None,
    again: bool = False,
    progress: MatrixProgress | None = None,
    on_cell: Callable[[Result], None] | None = None,
) -> list[Result]:
    """Measure what is not in the file yet; all cells of the grid, in its order.

    again  measure invalid cells of the file once more
    Raises UserError for a file of another load, or if nobody answers. An interruption keeps the cells that are done.
    """
    grid.check()
    results: dict[tuple[int, int], Result] = {}
    if path is not None and path.exists():
        results = _resume(path, grid, again)
    for cell in grid.cells():
        if cell in results:
            continue
        if progress is not None:
            progress.name(f"{cell[0]} at {cell[1]}: ")
        result = asyncio.run(_cell(url, grid, *cell, headers, server_config, progress))
        if any(flag.code == "partial" for flag in result.flags):
            break
        results[cell] = result
        if path is not None:
            write_results(path, list(results.values()))
        if on_cell is not None:
            on_cell(result)
    return [results[cell] for cell in grid.cells() if cell in results]


async def _cell(
    url: str,
    grid: Grid,
    concurrency: int,
    context: int,
    headers: Mapping[str, str] | None,
    server_config: Mapping[str, Any] | None,
    progress: Progress | None,
) -> Result:
    client = Client(url, headers, grid.load.timeout_s)
    found = await find_target(client, grid.load.model, server_config)
    client.close()
    load = grid.cell_load(concurrency, context, found.max_model_len)
    place = {"context": context, "measure": grid.measure, "cell_seconds": grid.seconds}
    wanted = max(context, SHORTEST) + 2
    if found.max_model_len is not None and wanted > found.max_model_len:
        flag = Flag("does_not_fit", f"the model takes {found.max_model_len} tokens, and the cell wants {wanted}")
        return Result("matrix cell", found.target, {**load.stored(), **place}, {}, (flag,))
    decode = grid.measure == "decode"
    session = await prepare(url, load, headers, server_config, WARM_UP_LENGTHS if decode else None)
    try:
        await warm_up(session, progress)
        if decode:
            result = await _decode(session, grid.seconds, progress)
        else:
            result = replace(conclude(session, await send(session, progress)), kind="matrix cell")
    finally:
        session.client.close()
    return replace(result, load={**result.load, **place})


async def _decode(session: Session, seconds: float, progress: Progress | None) -> Result:
    """Decode alone: the window is between two looks at the server, or at the clock if it has no page."""
    if progress is not None:
        progress.phase("prefill, then decode", None)
    driver = Driver(session.client, ROUTES[session.load.route], None if progress is None else progress.ended)
    marks: list[tuple[float, Page | None]] = []

    async def mark() -> None:
        at = time.perf_counter()
        page = None if session.found.page is None else await fetch_page(session.client)
        marks.append((at if page is None else page.at, page))

    seen = await watched(session, driver, driver.wave(session.jobs, SETTLE_S, seconds, mark))
    if len(marks) < 2:  # stopped, or every request failed
        now = seen.end
        marks = [(now, None), (now, None)]
    (begin, before), (end, after) = marks
    seen = replace(seen, before=before, after=after)
    return _conclude_decode(session, seen, begin - driver.begin, end - driver.begin, seconds)


def _conclude_decode(session: Session, seen: Seen, begin_s: float, end_s: float, seconds: float) -> Result:
    load, requests, window_s = session.load, seen.requests(), end_s - begin_s
    counts = [tokens_between(r, begin_s, end_s) for r in requests]
    flags = checks.check_requests(requests, load)
    grown = seen.grown()
    metrics = decode_metrics(requests, begin_s, end_s, load.seed)
    metrics = {**(server_metrics(grown, window_s) if grown is not None else {}), **metrics}
    if None in counts and not any(flag.code == "usage_missing" for flag in flags):
        text = "the server does not count its tokens in every chunk, so those of a window are not known"
        flags.append(Flag("usage_missing", text + "; pass --measure whole"))
    if window_s < 0.5 * seconds:
        flags.append(Flag("short", f"an answer ended after {window_s:.1f} s of {seconds:g}: there was no more room"))
    running = [(at - seen.driver.begin, count) for at, count in seen.watch.running]
    flags += checks.check_concurrency(requests, begin_s, end_s, load.concurrency or 1, running)
    flags += checks.check_server(grown, None if None in counts else sum(c or 0 for c in counts))
    flags += checks.check_client(seen.watch.heart.late_ms, metrics.get("itl_ms"))
    return result_of(session, seen, "matrix cell", metrics, flags, requests, window_s)


def decode_metrics(requests: Sequence[Request], begin_s: float, end_s: float, seed: int) -> dict[str, Metric]:
    """Figures of the tokens that arrived between two times; first tokens count from the planned time, as ever."""
    window_s = end_s - begin_s
    counts = [count for r in requests if (count := tokens_between(r, begin_s, end_s))]
    metrics: dict[str, Metric] = {}
    if counts and window_s > 0:
        metrics["output_throughput"] = Metric("tokens/s", {"value": sum(counts) / window_s}, count=sum(counts))
    inside = [replace(r, chunk_s=tuple(at for at in r.chunk_s or () if begin_s <= at <= end_s)) for r in requests]
    found = {
        "itl_ms": distribution("ms", [gaps_ms(r) for r in inside], seed),
        "tpot_ms": distribution("ms", [[1000 * window_s / count] for count in counts], seed),
        "per_user_rate": distribution("tokens/s", [[count / window_s] for count in counts], seed),
        "ttft_ms": distribution("ms", [[ttft_ms(r)] for r in requests if r.first_s is not None], seed),
    }
    metrics |= {name: metric for name, metric in found.items() if metric is not None}
    metrics["effective_concurrency"] = Metric("requests", {"value": mean_in_flight(requests, begin_s, end_s)})
    return metrics


def knee(points: Sequence[tuple[int, float]]) -> tuple[int | None, str]:
    """Up to which concurrency more requests are worth it, of (concurrency, tokens/s), and why.

    From one point to the next, what each added request brings is compared with what each of those before brought on
    average; where that falls below KNEE, the curve has bent.
    """
    points = sorted(points)
    if len(points) < 3:
        return None, f"a knee wants at least 3 valid cells; there are {len(points)}"
    for (c, rate), (next_c, next_rate) in pairwise(points):
        share = ((next_rate - rate) / (next_c - c)) / (rate / c)
        if share < KNEE:
            return c, f"from {c} to {next_c} a request more brings {share:.0%} of what one of the {c} brings"
    return None, f"no knee up to {points[-1][0]}: every step still brings at least {KNEE:.0%} of its share"


def _resume(path: Path, grid: Grid, again: bool) -> dict[tuple[int, int], Result]:
    results: dict[tuple[int, int], Result] = {}
    for result in read_results(path) if path.stat().st_size else ():
        if result.kind != "matrix cell":
            raise UserError(f"{path} holds a result of kind {result.kind!r}; pass another --output")
        concurrency, context = int(result.load["concurrency"]), int(result.load["context"])
        wanted = grid.cell_load(concurrency, context, None).stored()
        wanted |= {"measure": grid.measure, "cell_seconds": grid.seconds}
        for name, value in wanted.items():
            if name not in _OF_A_CELL and result.load.get(name) != value:
                raise UserError(
                    f"{path} was measured with {name} {result.load.get(name)!r}, and now it is {value!r}; "
                    "pass another --output"
                )
        if result.load["seed"] != grid.cell_load(concurrency, context, None).seed:
            raise UserError(f"{path} was measured with another --seed; pass that, or another --output")
        if result.valid or not again:
            results[concurrency, context] = result
    return results
