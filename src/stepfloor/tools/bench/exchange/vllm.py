"""Result files of `vllm bench serve` (--save-result, --save-detailed, --append-result).

| there | here | note |
|---|---|---|
| mean, median, std, pXX of ttft, e2el | ttft_ms, e2e_ms | with a request rate they count from sending: named apart |
| ... of e2el_including_client_queue | e2e_ms | with a request rate: counts from the planned time, as here |
| ... of tpot, itl | tpot_ms, itl_ms | |
| request_throughput, output_throughput | the same | |
| total_token_throughput, request_goodput | total_throughput, goodput | |
| spec_decode_acceptance_length, _rate | acceptance_length, draft_acceptance | there in %, here a share |
| spec_decode_per_position_acceptance_rates | acceptance_per_position | |
| max_output_tokens_per_s | peak_chunks_per_s | counts chunks, not tokens |
| max_concurrent_requests | peak_requests_a_second | requests that touch one second, not those at one instant |

Source: vllm 0.33.0, vllm/benchmarks/serve.py (calculate_metrics, benchmark, main_async).
"""

import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from stepfloor.tools.bench.exchange.values import (
    FROM_SENT,
    TOTALS,
    Taken,
    arrival_rate,
    failed_flags,
    from_sent,
    is_open_loop,
    totals,
)
from stepfloor.tools.bench.result import Metric, Request, Result, Target

TOOL = "vllm bench serve"
_LATENCIES = {"ttft": "ttft_ms", "tpot": "tpot_ms", "itl": "itl_ms", "e2el": "e2e_ms"}
_RATES = {
    "request_throughput": ("request_throughput", "requests/s"),
    "request_goodput": ("goodput", "requests/s"),
    "output_throughput": ("output_throughput", "tokens/s"),
    "total_token_throughput": ("total_throughput", "tokens/s"),
    "max_output_tokens_per_s": ("peak_chunks_per_s", "chunks/s"),
    "max_concurrent_requests": ("peak_requests_a_second", "requests"),
    "spec_decode_acceptance_length": ("acceptance_length", "tokens"),
}
_COUNTERS = ("spec_decode_num_drafts", "spec_decode_draft_tokens", "spec_decode_accepted_tokens")
_LOAD = (
    "backend", "label", "tokenizer_id", "num_prompts", "request_rate", "burstiness", "max_concurrency",
    "ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps",
)  # fmt: skip
_ARRAYS = ("start_times", "queue_times", "ttfts", "itls", "latencies", "input_lens", "output_lens", "errors")
_STATISTIC = re.compile(r"(mean|median|std|p\d+(?:\.\d+)?)_(\w+)_ms")


def recognises(raw: Mapping[str, Any]) -> bool:
    """Whether a JSON object looks like one of this tool's."""
    return {"model_id", "backend", "duration"} <= raw.keys()


def read(raw: Mapping[str, Any], path: Path) -> Result:
    """One of the tool's results as ours; what has no place here is named in a flag."""
    taken = Taken(raw, path)
    load = {key: taken.pop(key) for key in _LOAD if key in raw}
    counted = {key: int(taken.number(key) or 0) for key in TOTALS if key in raw}
    counters = {key: taken.pop(key) for key in _COUNTERS if key in raw}
    open_loop = load.get("request_rate") not in (None, "inf")
    metrics = _latencies(taken, open_loop)
    for theirs, (ours, unit) in _RATES.items():
        value = taken.number(theirs)
        if value is not None:
            metrics[ours] = Metric(unit, {"value": value})
    percent = taken.number("spec_decode_acceptance_rate")
    if percent is not None:
        metrics["draft_acceptance"] = Metric("ratio", {"value": percent / 100})
    positions = taken.pop("spec_decode_per_position_acceptance_rates")
    if positions:
        metrics["acceptance_per_position"] = Metric("ratio", {str(i): float(x) for i, x in enumerate(positions)})
    requests = tuple(_requests(taken, open_loop))
    window_s = taken.number("duration")
    # rtfx is about speech, and zero for text
    taken.drop("date", "endpoint_type", "model_id", "rtfx")
    return Result(
        kind="imported",
        target=Target(url="", model=str(raw["model_id"])),
        load={"tool": TOOL, **load},
        metrics=metrics,
        flags=(*failed_flags(counted.get("failed"), counted.get("completed")), *taken.unmapped()),
        requests=requests,
        server={"source": TOOL, **counters} if counters else None,
        window_s=window_s,
        origin={"tool": TOOL, "file": path.name, **counted},
        created=_our_date(str(raw.get("date", ""))),
    )


def _latencies(taken: Taken, open_loop: bool) -> dict[str, Metric]:
    found: dict[str, dict[str, float]] = {}
    for key in taken.left():
        part = _STATISTIC.fullmatch(key)
        ours = part and _our_latency(part[2], open_loop)
        value = taken.number(key) if ours else None
        if part and ours and value is not None:
            found.setdefault(ours, {})["p50" if part[1] == "median" else part[1]] = value
    return {name: Metric("ms", stats) for name, stats in found.items()}


def _our_latency(theirs: str, open_loop: bool) -> str | None:
    if theirs == "e2el_including_client_queue":
        return "e2e_ms"
    ours = _LATENCIES.get(theirs)
    return FROM_SENT.get(ours, ours) if ours and open_loop else ours


def _requests(taken: Taken, open_loop: bool) -> Iterator[Request]:
    columns = {name: taken.pop(name) or [] for name in _ARRAYS}
    starts, ttfts = columns["start_times"], columns["ttfts"]
    if not starts or len(ttfts) != len(starts):
        return
    queued = columns["queue_times"] if open_loop else []
    planned = [s - q for s, q in zip(starts, queued, strict=True)] if queued else starts
    begin = min(planned)
    for i, (start, ttft) in enumerate(zip(starts, ttfts, strict=True)):
        gaps = columns["itls"][i] if columns["itls"] else []
        tokens = columns["output_lens"][i] if columns["output_lens"] else 0
        # a failed request has no tokens, and its error may be empty where the server gave no reason
        error = (columns["errors"][i] if columns["errors"] else "") or (None if tokens else "no tokens")
        sent, first = start - begin, start - begin + ttft
        chunks = tuple(accumulate(gaps, initial=first))
        # older versions do not write latencies: theirs, too, end with the last chunk
        last = sent + columns["latencies"][i] if columns["latencies"] else chunks[-1]
        yield Request(
            index=i,
            planned_s=planned[i] - begin,
            sent_s=sent,
            first_s=None if error else first,
            last_s=None if error else last,
            end_s=None if error else last,
            chunks=None if error else len(chunks),
            chunk_s=None if error else chunks,
            prompt_tokens=columns["input_lens"][i] if columns["input_lens"] else None,
            output_tokens=None if error else tokens,
            error=error,
        )


def write(result: Result) -> dict[str, Any]:
    """A file as --save-result writes it, and as --save-detailed does where the requests are known."""
    load = result.load
    raw: dict[str, Any] = {
        "date": _their_date(result.created),
        "endpoint_type": load.get("backend", "openai"),
        "backend": load.get("backend", "openai"),
        "label": load.get("label"),
        "model_id": result.target.model,
        "tokenizer_id": load.get("tokenizer_id"),
        "num_prompts": load.get("num_prompts", len(result.requests) or None),
        "request_rate": arrival_rate(result) if is_open_loop(result) else "inf",
        "burstiness": load.get("burstiness", 1.0),
        "max_concurrency": load.get("max_concurrency", load.get("concurrency")),
        "duration": result.window_s,
        **totals(result),
    }
    metrics = result.metrics
    for theirs, (ours, _) in _RATES.items():
        if ours in metrics:
            raw[theirs] = metrics[ours].value
    if "draft_acceptance" in metrics:
        raw["spec_decode_acceptance_rate"] = metrics["draft_acceptance"].value * 100
    if "acceptance_per_position" in metrics:
        raw["spec_decode_per_position_acceptance_rates"] = list(metrics["acceptance_per_position"].stats.values())
    raw |= {key: value for key, value in (result.server or {}).items() if key in _COUNTERS}
    for theirs, metric in _their_latencies(result).items():
        for name, value in metric.stats.items():
            if name in ("mean", "std") or name.startswith("p"):
                raw[f"{name}_{theirs}_ms"] = value
        if "p50" in metric.stats:
            raw[f"median_{theirs}_ms"] = metric.stats["p50"]
    return raw | _their_arrays(result)


def _their_latencies(result: Result) -> dict[str, Metric]:
    """Their names; with a request rate what counts from sending stands under the plain name."""
    metrics = result.metrics
    if not is_open_loop(result):
        return {theirs: metrics[ours] for theirs, ours in _LATENCIES.items() if ours in metrics}
    found = {}
    if "e2e_ms" in metrics:
        found["e2el_including_client_queue"] = metrics["e2e_ms"]
    metrics = from_sent(result) | dict(metrics)
    for theirs, ours in _LATENCIES.items():
        name = FROM_SENT.get(ours, ours)
        if name in metrics:
            found[theirs] = metrics[name]
    return found


def _their_arrays(result: Result) -> dict[str, Any]:
    requests = [r for r in result.requests if r.sent_s is not None]
    if not requests:
        return {}
    return {
        "input_lens": [r.prompt_tokens or 0 for r in requests],
        "output_lens": [r.output_tokens or 0 for r in requests],
        "start_times": [r.sent_s for r in requests],
        "queue_times": [(r.sent_s or 0.0) - r.planned_s for r in requests],
        "ttfts": [0.0 if r.first_s is None else r.first_s - (r.sent_s or 0.0) for r in requests],
        "latencies": [0.0 if r.last_s is None else r.last_s - (r.sent_s or 0.0) for r in requests],
        "itls": [[b - a for a, b in pairwise(r.chunk_s or ())] for r in requests],
        "errors": [r.error or "" for r in requests],
    }


def _our_date(date: str) -> str:
    try:
        return datetime.strptime(date, "%Y%m%d-%H%M%S").isoformat()
    except ValueError:
        return date


def _their_date(created: str) -> str:
    try:
        return datetime.fromisoformat(created).strftime("%Y%m%d-%H%M%S")
    except ValueError:
        return ""
