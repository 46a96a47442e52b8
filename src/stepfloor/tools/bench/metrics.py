"""Figures from requests. Every name is the field's, and means what docs/bench.md says.

    ttft_ms           first generated token, of any kind, from the planned time
    itl_ms            gaps between chunks that brought something generated, all requests together
    tpot_ms           (last - first) / (tokens - 1) of a request: what a token took, however many a chunk holds
    e2e_ms            last generated token, from the planned time
    per_user_rate     1000 / tpot_ms: tokens a second that one reader sees
    output_throughput, total_throughput, request_throughput    of the window, finished requests
    goodput           requests a second that met every limit of the SLO

Source: vLLM 0.33, benchmarks/serve.py, for ttft, itl, tpot and the throughputs. AIPerf calls tpot "inter token
latency". An interval is 95 % by bootstrap over requests: gaps within one answer depend on each other, so whole answers
are drawn.
"""

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from stepfloor.errors import UserError
from stepfloor.tools.bench.result import Metric, Request

PERCENTILES = (50, 90, 95, 99)
RESAMPLES = 1000
# so many samples are drawn at most, all resamples together: 10**8 take about 2 s
MOST_DRAWN = 10**8

LOOP_PERIODS = 4
LOOP_CHARS = 128
LOOP_LONGEST_PERIOD = 400

SLO_NAMES = {"ttft": "ttft_ms", "tpot": "tpot_ms", "e2el": "e2e_ms", "itl": "itl_ms"}


def measure(
    requests: Sequence[Request], window_s: float, slo: Mapping[str, float] | None = None, seed: int = 0
) -> dict[str, Metric]:
    """Figures of the requests of a window; those with an error are left out.

    Of one that the window's end cut, the tokens until then count in the rates, and its first token in the latencies.
    slo  limits in ms by the names of SLO_NAMES; itl is the mean gap of a request
    """
    done = [r for r in requests if r.error is None and not r.cut and r.first_s is not None]
    begun = [r for r in requests if r.error is None and r.first_s is not None]
    metrics = latencies(begun, seed)
    outputs = sum(r.output_tokens or 0 for r in begun)
    inputs = sum(r.prompt_tokens or 0 for r in begun)
    metrics["request_throughput"] = _rate("requests/s", len(done), window_s)
    metrics["output_throughput"] = _rate("tokens/s", outputs, window_s)
    metrics["total_throughput"] = _rate("tokens/s", inputs + outputs, window_s)
    metrics["effective_concurrency"] = Metric("requests", {"value": mean_in_flight(requests, 0.0, window_s)})
    cached = [r.cached_tokens for r in begun if r.cached_tokens is not None]
    if cached and inputs:
        metrics["cache_hit_rate"] = Metric("ratio", {"value": sum(cached) / inputs}, count=len(cached))
    if slo:
        good = sum(_meets(r, slo) for r in done)
        metrics["goodput"] = _rate("requests/s", good, window_s)
        metrics["goodput_share"] = Metric("ratio", {"value": good / len(requests) if requests else 0.0}, count=good)
    return metrics


def latencies(requests: Sequence[Request], seed: int = 0) -> dict[str, Metric]:
    """The distributions, of requests that got at least one token."""
    late = [r for r in requests if r.sent_s is not None and r.sent_s - r.planned_s > 0.001]
    found = {
        "ttft_ms": distribution("ms", [[ttft_ms(r)] for r in requests], seed),
        "itl_ms": distribution("ms", [gaps_ms(r) for r in requests], seed),
        "tpot_ms": distribution("ms", [[x] for r in requests if (x := tpot_ms(r)) is not None], seed),
        "e2e_ms": distribution("ms", [[e2e_ms(r)] for r in requests if not r.cut], seed),
        "per_user_rate": distribution("tokens/s", [[1000 / x] for r in requests if (x := tpot_ms(r))], seed),
    }
    if late:  # what a client saw that counts from its own sending
        sent = [(r, 1000 * (r.sent_s - r.planned_s)) for r in requests if r.sent_s is not None]
        found["ttft_from_sent_ms"] = distribution("ms", [[ttft_ms(r) - wait] for r, wait in sent], seed)
        found["send_delay_ms"] = distribution("ms", [[wait] for _, wait in sent], seed)
    return {name: metric for name, metric in found.items() if metric is not None}


def ttft_ms(request: Request) -> float:
    """Time to the first generated token, from the planned time."""
    if request.first_s is None:
        raise ValueError(f"request {request.index} got no token")
    return 1000 * (request.first_s - request.planned_s)


def e2e_ms(request: Request) -> float:
    """Time to the last generated token, from the planned time."""
    if request.last_s is None:
        raise ValueError(f"request {request.index} got no token")
    return 1000 * (request.last_s - request.planned_s)


def tpot_ms(request: Request) -> float | None:
    """Time of a token after the first; None for an answer of fewer than two, or of an unknown number."""
    if request.first_s is None or request.last_s is None or (request.output_tokens or 0) < 2:
        return None
    return 1000 * (request.last_s - request.first_s) / ((request.output_tokens or 0) - 1)


def gaps_ms(request: Request) -> list[float]:
    """Gaps between chunks."""
    return [1000 * (b - a) for a, b in pairwise(request.chunk_s or ())]


def distribution(unit: str, groups: Sequence[Sequence[float]], seed: int = 0) -> Metric | None:
    """Mean, percentiles and their intervals of values that come in groups (one a request); None if there are none."""
    groups = [g for g in groups if len(g)]
    if not groups:
        return None
    values = np.concatenate([np.asarray(g, dtype=float) for g in groups])
    stats = {"mean": float(values.mean()), "std": float(values.std()), "min": float(values.min())}
    stats |= {f"p{p}": float(np.percentile(values, p)) for p in PERCENTILES}
    stats["max"] = float(values.max())
    intervals = {} if len(groups) < 2 else _bootstrap(values, [len(g) for g in groups], seed)
    return Metric(unit, stats, intervals, len(values))


def _bootstrap(values: np.ndarray, sizes: Sequence[int], seed: int) -> dict[str, tuple[float, float]]:
    random = np.random.default_rng(seed)
    ends = np.cumsum(sizes)
    starts = ends - np.asarray(sizes)
    single = len(values) == len(sizes)
    places = np.asarray(PERCENTILES) / 100
    rows = []
    for _ in range(max(100, min(RESAMPLES, MOST_DRAWN // len(values)))):
        chosen = random.integers(0, len(sizes), len(sizes))
        drawn = values[chosen] if single else np.concatenate([values[starts[i] : ends[i]] for i in chosen])
        drawn.sort()
        # what np.percentile does, without its 100 us of looking at its arguments
        rows.append([drawn.mean(), *np.interp(places * (len(drawn) - 1), np.arange(len(drawn)), drawn)])
    low, high = np.percentile(np.asarray(rows), (2.5, 97.5), axis=0)
    names = ("mean", *(f"p{p}" for p in PERCENTILES))
    return {name: (float(a), float(b)) for name, a, b in zip(names, low, high, strict=True)}


def parse_slo(text: str) -> dict[str, float]:
    """Limits like "ttft:500 tpot:50", in ms, as vLLM's bench takes them. Raises UserError."""
    slo = {}
    for part in text.replace(",", " ").split():
        name, _, value = part.partition(":")
        try:
            slo[name] = float(value)
        except ValueError:
            slo[name] = -1.0
        if name not in SLO_NAMES or slo[name] <= 0:
            raise UserError(f"--goodput wants limits in ms like 'ttft:500 tpot:50 e2el:9000'; got {part!r}")
    return slo


def _meets(request: Request, slo: Mapping[str, float]) -> bool:
    gaps = gaps_ms(request)
    found = {
        "ttft": ttft_ms(request),
        "tpot": tpot_ms(request) or 0.0,
        "e2el": e2e_ms(request),
        "itl": sum(gaps) / len(gaps) if gaps else 0.0,
    }
    return all(found[name] <= limit for name, limit in slo.items())


def _rate(unit: str, count: float, window_s: float) -> Metric:
    return Metric(unit, {"value": count / window_s if window_s > 0 else 0.0}, count=int(count))


# --- concurrency


def in_flight(requests: Sequence[Request]) -> list[tuple[float, int]]:
    """(seconds, requests sent and not ended), at every change."""
    changes = [(r.sent_s, 1) for r in requests if r.sent_s is not None]
    changes += [(end, -1) for r in requests if r.sent_s is not None and (end := r.end_s) is not None]
    steps, now = [(0.0, 0)], 0
    for at, change in sorted(changes):
        now += change
        steps.append((at, now))
    return steps


def mean_in_flight(requests: Sequence[Request], begin_s: float, end_s: float) -> float:
    """Mean number of requests in flight between two times."""
    steps = [*in_flight(requests), (end_s, 0)]
    area = sum(
        count * max(0.0, min(until, end_s) - max(since, begin_s)) for (since, count), (until, _) in pairwise(steps)
    )
    return area / (end_s - begin_s) if end_s > begin_s else 0.0


# --- tokens inside a window


def tokens_between(request: Request, begin_s: float, end_s: float) -> int | None:
    """Tokens that arrived after begin_s and not after end_s; None if the server does not count them in every chunk."""
    if request.chunk_s is None or request.chunk_tokens is None:
        return None
    before = sum(1 for at in request.chunk_s if at <= begin_s)
    until = sum(1 for at in request.chunk_s if at <= end_s)
    counts = (0, *request.chunk_tokens)
    return counts[until] - counts[before]


# --- what makes numbers lie


def looped(text: str) -> bool:
    """Whether a text ends in a loop: at least LOOP_PERIODS repeats of one piece, LOOP_CHARS characters together."""
    tail = text[-4 * LOOP_LONGEST_PERIOD :]
    if len(tail) < LOOP_CHARS:
        return False
    backwards = tail[::-1]
    # any loop repeats its last characters; only their places can be periods
    probe = backwards[:8]
    for found in re.finditer(f"(?={re.escape(probe)})", backwards[: LOOP_LONGEST_PERIOD + 8]):
        period = found.start()
        wanted = max(LOOP_CHARS, LOOP_PERIODS * period)
        if period and wanted <= len(backwards) and backwards[: wanted - period] == backwards[period:wanted]:
            return True
    return False


def leading_outliers(values: Sequence[float], chance: float = 0.0) -> int:
    """How many of the first values are unlike the rest: by more than a fifth of the median, and six times its spread.

    A compilation, a cold cache, or a cache that remembers the prompt shows in the first runs. At most half of the
    values can be outliers; the spread is the median absolute deviation of the rest. chance is a difference that means
    nothing.
    """
    count = 0
    while count + 1 <= len(values) // 2:
        rest = np.asarray(values[count + 1 :])
        middle = float(np.median(rest))
        spread = float(np.median(np.abs(rest - middle)))
        if abs(values[count] - middle) <= max(0.2 * abs(middle), 6 * spread, chance):
            break
        count += 1
    return count
