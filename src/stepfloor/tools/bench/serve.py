"""bench serve: one load on one server, and a result that says whether it may be believed.

Find out who answers, make every prompt and body, warm up with other prompts, look at the server's counters, send, look
again, and only then work out figures. Nothing is computed inside the window that can be computed outside it.
"""

import asyncio
import gc
import hashlib
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from stepfloor.errors import UserError
from stepfloor.tools.bench import checks
from stepfloor.tools.bench.client import Client, Heartbeat
from stepfloor.tools.bench.drive import Driver, Job, Visit
from stepfloor.tools.bench.load import ROUTES, SEED_SPAN, Load
from stepfloor.tools.bench.metrics import distribution, measure, parse_slo
from stepfloor.tools.bench.prompts import MEASURED, WARM_UP, Lengths, make_prompts
from stepfloor.tools.bench.result import Flag, Request, Result, Telemetry
from stepfloor.tools.bench.scrape import RUNNING, Page, fetch_page, growth, server_metrics
from stepfloor.tools.bench.target import Found, find_target
from stepfloor.tools.bench.telemetry import Recorder, throttled
from stepfloor.tools.bench.tokens import LocalTokens, PlainIds, ServerTokens, Tokens

LOOK_EVERY_S = 1.0
LATE_ARRIVAL_MS = 10.0


class Progress(Protocol):
    """Is told how far a run is."""

    def phase(self, name: str, total: int | None) -> None:
        """A new part of the run begins, of so many requests."""
        ...

    def ended(self, visit: Visit) -> None:
        """A request of this part ended."""
        ...


@dataclass(slots=True)
class Watch:
    """What was seen beside the requests: running requests by the server's gauge, and how late this client was."""

    client: Client
    has_page: bool
    running: list[tuple[float, float]] = field(default_factory=list)
    heart: Heartbeat = field(default_factory=Heartbeat)
    _task: asyncio.Task[None] | None = None

    def start(self) -> None:
        gc.collect()
        gc.freeze()  # what is loaded by now is not looked through again
        self.heart.start()
        if self.has_page:
            self._task = asyncio.create_task(self._look())

    async def stop(self) -> None:
        self.heart.stop()
        gc.unfreeze()
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            page = await fetch_page(self.client)
            if page is not None and (count := page.get(RUNNING)) is not None:
                self.running.append((page.at, count))


@dataclass(frozen=True, slots=True)
class Session:
    """A server that was found and a load that is ready to be sent."""

    client: Client
    found: Found
    load: Load
    jobs: tuple[Job, ...]
    warm_up: tuple[Job, ...]
    prompt_source: str | None
    digest: str


@dataclass(frozen=True, slots=True)
class Seen:
    """Everything that was observed of a window; times are those of time.perf_counter."""

    driver: Driver
    watch: Watch
    end: float
    before: Page | None
    after: Page | None
    telemetry: Telemetry
    stopped: bool

    def requests(self) -> tuple[Request, ...]:
        """In the order of the load."""
        visits = sorted(self.driver.visits, key=lambda visit: visit.job.index)
        return tuple(visit.record(self.driver.begin) for visit in visits)

    def grown(self) -> dict[str, Any] | None:
        """What the server's counters grew by."""
        return None if self.before is None or self.after is None else growth(self.before, self.after)


def run(
    url: str,
    load: Load,
    *,
    headers: Mapping[str, str] | None = None,
    server_config: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> Result:
    """Measure a load. An interruption by the keyboard gives what was measured until then, marked as partial.

    Raises UserError for what the caller can mend: nobody answers, a load that cannot be.
    """
    return asyncio.run(_run(url, load, headers, server_config, progress))


async def _run(
    url: str,
    load: Load,
    headers: Mapping[str, str] | None,
    server_config: Mapping[str, Any] | None,
    progress: Progress | None,
) -> Result:
    session = await prepare(url, load, headers, server_config)
    try:
        await warm_up(session, progress)
        return conclude(session, await send(session, progress))
    finally:
        session.client.close()


async def prepare(
    url: str,
    load: Load,
    headers: Mapping[str, str] | None = None,
    server_config: Mapping[str, Any] | None = None,
    warm_up_lengths: tuple[int, int] | None = None,
) -> Session:
    """Find the server, and make all that will be sent.

    warm_up_lengths  tokens of prompt and answer of the warm-up, where they are not those of the load
    """
    load = load.resolve()
    client = Client(url, headers, load.timeout_s)
    found = await find_target(client, load.model, server_config)
    tokens = await find_tokens(client, load, found.target.model)
    plan = load.prompt_plan()
    measured = await make_prompts(plan, load.num_prompts or 0, tokens, MEASURED)
    if warm_up_lengths is not None:
        lengths = [Lengths("fixed", length, length) for length in warm_up_lengths]
        plan = replace(plan, input_lengths=lengths[0], output_lengths=lengths[1])
    warm = await make_prompts(plan, load.num_warmups or 0, tokens, WARM_UP)
    if shared := {p.hash for p in measured} & {p.hash for p in warm}:
        raise UserError(
            f"{len(shared)} prompts would warm up and be measured as well; pass a file of at least "
            f"{len(measured) + len(warm)} different ones, or smaller --num-prompts and --num-warmups"
        )
    longest = max((p.tokens or 0) + p.output_tokens for p in measured)
    if found.max_model_len is not None and longest > found.max_model_len:
        raise UserError(
            f"prompt and answer together are up to {longest} tokens, and {found.target.model} takes "
            f"{found.max_model_len}; pass a smaller --input-len or --output-len"
        )
    model, server = found.target.model, found.target.server
    jobs = tuple(Job(i, p, load.body(p, i, model, server)) for i, p in enumerate(measured))
    last = SEED_SPAN - 1
    warm_jobs = tuple(Job(i, p, load.body(p, last - i, model, server)) for i, p in enumerate(warm))
    digest = hashlib.sha256()
    for job in jobs:
        digest.update(job.body)
    source = None if tokens is None else tokens.source
    return Session(client, found, load, jobs, warm_jobs, source, digest.hexdigest())


async def find_tokens(client: Client, load: Load, model: str) -> Tokens | None:
    """Whose tokenizer counts: the file that was named, the ids that were named, or the server's own; None without."""
    if load.tokenizer is not None:
        return LocalTokens(Path(load.tokenizer))
    if load.vocab_size is not None:
        return PlainIds(load.vocab_size)
    return await ServerTokens.find(client, model)


async def warm_up(session: Session, progress: Progress | None) -> None:
    """Send the requests that are not measured. Raises UserError if none of them is answered."""
    if not session.warm_up:
        return
    if progress is not None:
        progress.phase("warm-up", len(session.warm_up))
    driver = _driver(session, progress)
    await driver.closed(session.warm_up, session.load.concurrency or 8)
    errors = [visit.error for visit in driver.visits if visit.error is not None]
    if len(errors) == len(session.warm_up):
        raise UserError(f"no request of the warm-up was answered: {errors[0]}")


async def send(session: Session, progress: Progress | None) -> Seen:
    """The window: send the measured requests, with the server's counters read before and after."""
    load = session.load
    if progress is not None:
        progress.phase("measuring", None if load.duration_s is not None else len(session.jobs))
    driver = _driver(session, progress)
    if load.arrivals == "closed":
        sending = driver.closed(session.jobs, load.concurrency or 1, load.duration_s)
    else:
        sending = driver.open(session.jobs, load.arrival_times(), load.concurrency)
    return await watched(session, driver, sending)


async def watched(session: Session, driver: Driver, sending: Any) -> Seen:
    """Await the sending with everything recorded that stands beside it; a cancellation ends it early."""
    watch = Watch(session.client, session.found.page is not None)
    recorder = Recorder(session.client.host)
    recorder.start()
    watch.start()
    before = await fetch_page(session.client)
    stopped = False
    try:
        await sending
    except asyncio.CancelledError:
        stopped = True
    end = time.perf_counter()
    after = await fetch_page(session.client)
    await watch.stop()
    telemetry = recorder.stop(driver.begin)
    return Seen(driver, watch, end, before, after, telemetry, stopped)


def conclude(session: Session, seen: Seen) -> Result:
    """Figures and flags of a window."""
    load, requests, begin = session.load, seen.requests(), seen.driver.begin
    ends = [r.end_s for r in requests if r.end_s is not None]
    window_s = load.duration_s if load.duration_s is not None and not seen.stopped else max(ends, default=0.0)
    grown = seen.grown()
    metrics = measure(requests, window_s, parse_slo(load.goodput), load.seed)
    if grown is not None:
        # all steps are inside the window, unless requests were cut: then the looks at the counters are its ends
        cut = any(r.cut for r in requests)
        metrics = {**server_metrics(grown, grown["seconds"] if cut else window_s), **metrics}
    if late := distribution("ms", [[ms] for ms in seen.watch.heart.late_ms]):
        metrics["client_late_ms"] = late
    flags = checks.check_requests(requests, load)
    if load.arrivals == "closed":
        running = [(at - begin, count) for at, count in seen.watch.running]
        flags += checks.check_first_runs(requests, load.concurrency)
        flags += checks.check_concurrency(requests, 0.0, window_s, load.concurrency or 1, running)
    elif "send_delay_ms" in metrics and metrics["send_delay_ms"].stats["p99"] > LATE_ARRIVAL_MS:
        flags.append(Flag("late_arrivals", f"sent up to {metrics['send_delay_ms'].stats['max']:.0f} ms after the plan"))
    incomplete = any(r.cut or r.error or r.output_tokens is None for r in requests)
    flags += checks.check_server(grown, None if incomplete else sum(r.output_tokens or 0 for r in requests))
    flags += checks.check_client(seen.watch.heart.late_ms, metrics.get("itl_ms"))
    flags += checks.check_counts(len(requests))
    return result_of(session, seen, "serve", metrics, flags, requests, window_s)


def result_of(
    session: Session,
    seen: Seen,
    kind: Any,
    metrics: Mapping[str, Any],
    flags: Sequence[Flag],
    requests: Sequence[Request],
    window_s: float,
) -> Result:
    """A result with the flags that every kind has."""
    more: list[Flag] = []
    grown = seen.grown()
    if seen.stopped:
        more.append(Flag("partial", f"stopped by hand after {window_s:.1f} s"))
    if session.warm_up:
        more.append(Flag("warm_up", f"{len(session.warm_up)} requests before the window, with other prompts"))
    if session.load.sampling == "server":
        more.append(Flag("sampling_unknown", "the server's own sampling values were used"))
    if not session.found.target.config:
        more.append(Flag("config_missing", "the server does not tell its configuration; pass --server-config"))
    if held := throttled(seen.telemetry):
        more.append(Flag("clock_throttle", held))
    stored = {**session.load.stored(), "prompt_source": session.prompt_source, "bodies_sha256": session.digest}
    return Result(
        kind,
        session.found.target,
        stored,
        metrics,
        (*more, *flags),
        tuple(requests),
        telemetry=seen.telemetry,
        server=None if grown is None else {**grown, "info": dict(session.found.info)},
        window_s=window_s,
    )


def _driver(session: Session, progress: Progress | None) -> Driver:
    return Driver(session.client, ROUTES[session.load.route], None if progress is None else progress.ended)
