"""Result files of AIPerf: profile_export_aiperf.json or .csv, and profile_export.jsonl with one request a line.

| there | here | note |
|---|---|---|
| time_to_first_token, request_latency | ttft_ms, e2e_ms | at a rate they count from sending: named apart |
| inter_token_latency | tpot_ms | the same; with --per-chunk-usage it divides otherwise and is named apart |
| inter_chunk_latency | itl_ms | the gap between chunks |
| output_token_throughput_per_user | per_user_rate | |
| output_token_throughput, total_token_throughput | output_throughput, total_throughput | |
| request_throughput, goodput | the same | |

AIPerf counts tokens with a tokenizer of its own unless it ran with --use-server-token-count. Where that count and the
server's usage differ, every figure made from it is named apart (`..._by_client_tokens`). Its rates are of the phase's
window, which is longer than its benchmark_duration; that window is taken here. The CSV is rounded to 0.01.

Source: aiperf 0.13.0, metrics/types/*.py, exporters/metrics_json_exporter.py and metrics_csv_exporter.py.
"""

import csv
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from stepfloor.errors import UserError
from stepfloor.tools.bench.exchange.values import (
    FROM_SENT,
    Taken,
    arrival_rate,
    failed_flags,
    from_sent,
    is_open_loop,
    totals,
)
from stepfloor.tools.bench.result import Flag, Metric, Request, Result, Target

TOOL = "aiperf"
SUMMARY, TABLE, RECORDS = "profile_export_aiperf.json", "profile_export_aiperf.csv", "profile_export.jsonl"
# theirs: ours, its unit, whether it is made from token counts, and its heading in the CSV
METRICS = {
    "time_to_first_token": ("ttft_ms", "ms", False, "Time to First Token"),
    "request_latency": ("e2e_ms", "ms", False, "Request Latency"),
    "inter_chunk_latency": ("itl_ms", "ms", False, "Inter Chunk Latency"),
    "inter_token_latency": ("tpot_ms", "ms", True, "Inter Token Latency"),
    "output_token_throughput_per_user": ("per_user_rate", "tokens/s", True, "Output Token Throughput Per User"),
    "output_token_throughput": ("output_throughput", "tokens/s", True, "Output Token Throughput"),
    "total_token_throughput": ("total_throughput", "tokens/s", True, "Total Token Throughput"),
    "request_throughput": ("request_throughput", "requests/s", False, "Request Throughput"),
    "goodput": ("goodput", "requests/s", False, "Goodput"),
}
_STATISTIC = re.compile(r"avg|min|max|std|p\d+(\.\d+)?")
_ABOUT = (
    "schema_version", "aiperf_version", "benchmark_id", "input_config", "run_info", "was_cancelled", "is_complete",
    "error_summary", "start_time", "end_time", "request_count", "error_request_count", "benchmark_duration",
    "total_isl", "total_osl",
)  # fmt: skip
# the same figures again, or made from those that are read
_DERIVED = (
    "completed_request_count", "request_error_rate", "good_request_count", "good_request_fraction",
    "total_output_tokens", "output_token_count", "time_to_first_output_token", "total_usage_prompt_tokens",
    "total_usage_completion_tokens", "total_usage_total_tokens", "usage_prompt_tokens", "usage_completion_tokens",
    "usage_total_tokens", "input_sequence_length", "output_sequence_length", "input_token_throughput",
    "decode_duration", "telemetry_data",
)  # fmt: skip
_PLAN_UNKNOWN = Flag("plan_unknown", f"{SUMMARY} tells it, and is not here: latencies count from sending")
_THEIR_UNITS = {"ms": "ms", "tokens/s": "tokens/sec", "requests/s": "requests/sec"}
_COUNTS = (
    ("request_count", "completed", "requests"),
    ("error_request_count", "failed", "requests"),
    ("total_isl", "total_input_tokens", "tokens"),
    ("total_osl", "total_output_tokens", "tokens"),
)
_FIRST_CHUNK_APART = {"tpot_ms": "tpot_after_first_chunk_ms", "per_user_rate": "per_user_rate_after_first_chunk"}


def recognises(raw: Mapping[str, Any]) -> bool:
    """Whether a JSON object looks like the tool's summary."""
    return "aiperf_version" in raw or {"schema_version", "input_config"} <= raw.keys()


def read(raw: Mapping[str, Any], path: Path, records: Iterable[Mapping[str, Any]] = ()) -> Result:
    """A summary, and the records that lay beside it, as one result of ours."""
    taken = Taken(raw, path)
    config = raw.get("input_config") or {}
    phases = [p for p in config.get("phases") or () if p.get("name", "profiling") == "profiling"]
    arrivals = next((p["type"] for p in phases if p.get("type", "concurrency") != "concurrency"), "closed")
    open_loop = arrivals != "closed"
    apart = dict(FROM_SENT) if open_loop else {}
    if (config.get("endpoint") or {}).get("per_chunk_usage"):
        apart |= _FIRST_CHUNK_APART
    recounted = _recounted(raw)
    metrics = {}
    for theirs, (ours, unit, of_tokens, _) in METRICS.items():
        name = apart.get(ours, ours)
        name = f"{name}_by_client_tokens" if recounted and of_tokens else name
        metric = _metric(taken.pop(theirs), unit, path)
        if metric is not None:
            metrics[name] = metric
    made, failed = _average(raw, "request_count"), _average(raw, "error_request_count")
    taken.drop(*_ABOUT, *_DERIVED)
    flags = [*failed_flags(failed, made), *taken.unmapped()]
    if not phases:
        flags.insert(0, _PLAN_UNKNOWN)
    if raw.get("was_cancelled") or raw.get("is_complete") is False:
        flags.insert(0, Flag("partial", "the file says that the run was not completed"))
    endpoint = config.get("endpoint") or {}
    models = (config.get("models") or {}).get("items") or [{}]
    return Result(
        kind="imported",
        target=Target(url=str((endpoint.get("urls") or [""])[0]), model=str(models[0].get("name", ""))),
        load={
            "tool": TOOL,
            "arrivals": arrivals,
            "concurrency": next((p["concurrency"] for p in phases if "concurrency" in p), None),
            "request_rate": next((p["rate"] for p in phases if "rate" in p), None),
            **{key: config[key] for key in ("endpoint", "datasets", "phases") if key in config},
        },
        metrics=metrics,
        flags=tuple(flags),
        requests=tuple(read_records(records, open_loop)),
        window_s=_window_s(raw),
        origin={
            "tool": TOOL,
            "version": raw.get("aiperf_version"),
            "file": path.name,
            "tokens_counted_by": "client" if recounted else "server or client alike",
        },
        created=str(raw.get("start_time") or ""),
    )


def read_table(text: str) -> dict[str, Any]:
    """The CSV as the summary it was made from: blocks of statistics by the tool's own names."""
    tags = {heading: tag for tag, (*_, heading) in METRICS.items()}
    tags |= {"Request Count": "request_count", "Error Request Count": "error_request_count"}
    tags |= {"Benchmark Duration": "benchmark_duration", "Total Output Sequence Length": "total_osl"}
    tags |= {"Total Usage Completion Tokens": "total_usage_completion_tokens"}
    raw: dict[str, Any] = {}
    header: list[str] = []
    for row in csv.reader(text.splitlines()):
        if not row or row[0] in ("", "Metric", "Endpoint"):
            header = row
        elif header[:1] == ["Metric"]:
            heading = re.sub(r" \([^()]*\)$", "", row[0])
            names = ["avg"] if header[1:] == ["Value"] else header[1:]
            raw[tags.get(heading, heading)] = {n: float(x) for n, x in zip(names, row[1:], strict=False) if x}
    return raw


def read_records_alone(path: Path) -> Result:
    """A result with the requests of a record file and no figures of the tool's; planned times are taken as sent."""
    requests = tuple(read_records(load_records(path), open_loop=False))
    failed = sum(r.error is not None for r in requests)
    return Result(
        kind="imported",
        target=Target(url="", model=""),
        load={"tool": TOOL},
        metrics={},
        flags=(_PLAN_UNKNOWN, *failed_flags(failed, len(requests) - failed)),
        requests=requests,
        window_s=max((r.last_s for r in requests if r.last_s is not None), default=None),
        origin={"tool": TOOL, "file": path.name},
        created="",
    )


def read_records(records: Iterable[Mapping[str, Any]], open_loop: bool) -> Iterator[Request]:
    """Requests of the measured phase, in the order of sending; token counts are the server's where it told them."""
    kept = [r for r in records if r["metadata"].get("benchmark_phase", "profiling") == "profiling"]
    kept.sort(key=lambda r: r["metadata"]["request_start_ns"])
    planned = [r["metadata"].get("credit_issued_ns") if open_loop else None for r in kept]
    planned = [r["metadata"]["request_start_ns"] if at is None else at for r, at in zip(kept, planned, strict=True)]
    begin = min(planned, default=0)
    for i, record in enumerate(kept):
        about, values = record["metadata"], {k: v["value"] for k, v in (record.get("metrics") or {}).items()}
        sent = (about["request_start_ns"] - begin) / 1e9
        error = record.get("error")
        first = sent + values["time_to_first_token"] / 1e3 if "time_to_first_token" in values else None
        gaps = values.get("inter_chunk_latency") or []
        yield Request(
            index=i,
            planned_s=(planned[i] - begin) / 1e9,
            sent_s=sent,
            first_s=first,
            last_s=sent + values["request_latency"] / 1e3 if "request_latency" in values else None,
            end_s=(about["request_end_ns"] - begin) / 1e9,
            chunks=None if first is None else len(gaps) + 1,
            chunk_s=None if first is None else tuple(accumulate((g / 1e3 for g in gaps), initial=first)),
            prompt_tokens=values.get("usage_prompt_tokens", values.get("input_sequence_length")),
            output_tokens=values.get("usage_completion_tokens", values.get("output_sequence_length")),
            cached_tokens=values.get("usage_prompt_cache_read_tokens"),
            error=None if error is None else str(error.get("message") or error),
        )


def write(result: Result) -> dict[str, Any]:
    """The summary, in the tool's blocks and units."""
    metrics = dict(result.metrics)
    if is_open_loop(result):
        metrics |= {ours: m for ours, name in FROM_SENT.items() for m in [(from_sent(result) | metrics).get(name)] if m}
    raw: dict[str, Any] = {
        "schema_version": "1.4",
        "input_config": {
            "models": {"items": [{"name": result.target.model}]},
            "endpoint": {"urls": [result.target.url], "streaming": True},
            "phases": [_phase(result)],
            **{key: result.load[key] for key in ("endpoint", "datasets", "phases") if key in result.load},
        },
        "start_time": result.created,
        "is_complete": not any(flag.code == "partial" for flag in result.flags),
    }
    for theirs, (ours, unit, _, _) in METRICS.items():
        if ours in metrics:
            raw[theirs] = _block(metrics[ours], "tokens/sec/user" if ours == "per_user_rate" else _THEIR_UNITS[unit])
    counted = totals(result)
    raw |= {theirs: {"unit": unit, "avg": counted[ours]} for theirs, ours, unit in _COUNTS if ours in counted}
    if result.window_s is not None:
        raw["benchmark_duration"] = {"unit": "sec", "avg": result.window_s}
    return raw


def write_records(result: Result) -> Iterator[dict[str, Any]]:
    """One request a line of profile_export.jsonl; times in ns since the window began."""
    for r in result.requests:
        if r.sent_s is None:
            continue
        metrics: dict[str, tuple[Any, str]] = {
            "usage_prompt_tokens": (r.prompt_tokens, "tokens"),
            "usage_completion_tokens": (r.output_tokens, "tokens"),
            "output_sequence_length": (r.output_tokens, "tokens"),
        }
        if r.first_s is not None:
            metrics["time_to_first_token"] = (1e3 * (r.first_s - r.sent_s), "ms")
        if r.last_s is not None:
            metrics["request_latency"] = (1e3 * (r.last_s - r.sent_s), "ms")
        if r.chunk_s:
            metrics["inter_chunk_latency"] = ([1e3 * (b - a) for a, b in pairwise(r.chunk_s)], "ms")
        yield {
            "metadata": {
                "session_num": r.index,
                "benchmark_phase": "profiling",
                "credit_issued_ns": round(1e9 * r.planned_s),
                "request_start_ns": round(1e9 * r.sent_s),
                "request_end_ns": round(1e9 * (r.end_s or r.last_s or r.sent_s)),
                "was_cancelled": False,
            },
            "metrics": {k: {"value": v, "unit": u} for k, (v, u) in metrics.items() if v is not None},
            **({} if r.error is None else {"error": {"message": r.error}}),
        }


def _phase(result: Result) -> dict[str, Any]:
    """The measured phase; its type says whether latencies count from sending although requests were planned."""
    load = result.load
    phase = {
        "name": "profiling",
        "kind": "profiling",
        "type": load.get("arrivals", "poisson") if is_open_loop(result) else "concurrency",
        "requests": len(result.requests) or None,
        "concurrency": load.get("concurrency", load.get("max_concurrency")),
        "rate": arrival_rate(result) if is_open_loop(result) else None,
    }
    return {key: value for key, value in phase.items() if value is not None}


def _window_s(raw: Mapping[str, Any]) -> float | None:
    """The window that the rates are of."""
    requests, rate = _average(raw, "request_count"), _average(raw, "request_throughput")
    return requests / rate if requests and rate else _average(raw, "benchmark_duration")


def _recounted(raw: Mapping[str, Any]) -> bool:
    """Whether the tool's own token count is another than the server's."""
    told, counted = _average(raw, "total_usage_completion_tokens"), _average(raw, "total_osl")
    return told is not None and counted is not None and told != counted


def _average(raw: Mapping[str, Any], key: str) -> float | None:
    block = raw.get(key)
    return block.get("avg") if isinstance(block, dict) else None


def _block(metric: Metric, unit: str) -> dict[str, Any]:
    stats = {"avg" if name in ("mean", "value") else name: value for name, value in metric.stats.items()}
    return {"unit": unit, **stats, **({} if metric.count is None else {"count": metric.count})}


def _metric(block: Any, unit: str, path: Path) -> Metric | None:
    if block is None:
        return None
    if not isinstance(block, dict) or not isinstance(block.get("avg"), (int, float)):
        raise UserError(f"{path}: a block of statistics with avg is wanted; got {block!r}")
    stats = {k: float(v) for k, v in block.items() if _STATISTIC.fullmatch(k) and v is not None}
    if stats.keys() == {"avg"}:
        return Metric(unit, {"value": stats["avg"]})
    stats["mean"] = stats.pop("avg")
    return Metric(unit, stats, count=block.get("count"))


def load_records(path: Path) -> list[dict[str, Any]]:
    """The lines of profile_export.jsonl. Raises UserError for anything else."""
    try:
        records = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"cannot read {path} as JSON lines ({error}); pass AIPerf's own file") from None
    if not all(isinstance(r, dict) and "request_start_ns" in (r.get("metadata") or {}) for r in records):
        raise UserError(f"{path} is no record export of AIPerf: its lines tell no request_start_ns; pass {RECORDS}")
    return records
