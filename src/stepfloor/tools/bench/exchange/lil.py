"""Result files of llm-inference-bench (llm_decode_bench.py, benchmark_results.json): one cell, one result.

| there, seconds | here, ms | note |
|---|---|---|
| ttft, request_latency | ttft_ms, e2e_ms | |
| inter_token_latency | tpot_ms | (last - first) / (tokens - 1) of a request |
| chunk_inter_token_latency | itl_request_mean_ms | of each request's mean gap, not of all gaps: named apart |
| output_tps_per_user | per_user_rate | |
| aggregate_tps of a burst | output_throughput | tokens / wall time of a finite burst |
| aggregate_tps of a sustained cell | sustained_throughput | requests overlap the window's ends: named apart |
| server_spec_accept_length, _pos_accept | acceptance_length, acceptance_per_position | |
| server_steps_per_s | sequence_steps_per_s | a step of 8 sequences counts 8 times: named apart |
| effective_concurrency | the same | |

Absent is 0.0 there, so a latency of zero is none. Cells that failed, were skipped, were underfilled or looped are
imported with the flag that makes them invalid.

Source: local-inference-lab/llm-inference-bench, llm_decode_bench.py 0.4.29 (CellResult, run_cell), a file of 0.6.2.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from stepfloor.tools.bench.exchange.values import Taken
from stepfloor.tools.bench.result import Flag, Metric, Result, Target

TOOL = "llm-inference-bench"
LATENCIES = {
    "ttft": "ttft_ms",
    "request_latency": "e2e_ms",
    "inter_token_latency": "tpot_ms",
    "chunk_inter_token_latency": "itl_request_mean_ms",
    "output_tps_per_user": "per_user_rate",
}
STATISTICS = {"avg": "mean", "p50": "p50", "p90": "p90", "p99": "p99"}
_RATES = {
    "server_spec_accept_length": ("acceptance_length", "tokens"),
    "server_steps_per_s": ("sequence_steps_per_s", "steps/s"),
    "effective_concurrency": ("effective_concurrency", "requests"),
}
_LOAD = (
    "concurrency", "context_tokens", "benchmark_mode", "request_count_target", "warmup_request_count",
)  # fmt: skip
_COUNTERS = ("server_spec_drafts", "server_spec_draft_tokens", "server_spec_accepted_tokens", "server_output_tokens")
# the same again, or how the tool came to it
_DERIVED = (
    "per_request_avg_tps", "measurement_wall_seconds", "total_tokens", "wall_time", "num_completed", "num_errors",
    "aggregate_source", "client_output_tokens", "server_engine_steps", "server_accept_len_effective",
    "server_spec_accept_rate", "max_running_reqs", "avg_running_reqs", "avg_queue_reqs", "max_queue_reqs",
    "queue_fraction", "ready_reason", "warmup_duration", "loop_detection_enabled", "output_seq_len_p50",
    "output_seq_len_p90", "output_seq_len_p99", "request_count", "completed_request_count", "failure_reason",
    "underfilled", "loop_detected", "capacity_limited", "warmup_timed_out", "timeout_reason",
    "server_gen_throughput", "server_utilization", "accept_norm_tps", "accept_norm_ref_len",
    "loop_diagnostics_omitted", "input_seq_len_avg", "output_seq_len_avg",
)  # fmt: skip


def recognises(raw: Mapping[str, Any]) -> bool:
    """Whether a JSON object looks like one of this tool's."""
    return isinstance(raw.get("metadata"), dict) and isinstance(raw.get("results"), list) and "summary_table" in raw


def read(raw: Mapping[str, Any], path: Path) -> Iterator[Result]:
    """Every cell of the file, sustained and burst; what has no place here is named in a flag of each."""
    about = raw["metadata"]
    for cell in (*raw["results"], *(raw.get("burst_results") or ())):
        yield _cell(cell, about, path)


def _cell(cell: Mapping[str, Any], about: Mapping[str, Any], path: Path) -> Result:
    where = f"cell {cell.get('concurrency')} x {cell.get('context_tokens')}: "
    taken = Taken(cell, path, where)
    load = {key: taken.pop(key) for key in _LOAD if key in cell}
    metrics = dict(_latencies(taken))
    rate = taken.number("aggregate_tps")
    sustained = cell.get("benchmark_mode", "duration") == "duration"
    if rate is not None and rate > 0:
        name = "sustained_throughput" if sustained else "output_throughput"
        metrics[name] = Metric("tokens/s", {"value": rate})
    for theirs, (ours, unit) in _RATES.items():
        value = taken.number(theirs)
        if value:
            metrics[ours] = Metric(unit, {"value": value})
    positions = taken.pop("server_spec_pos_accept")
    if positions:
        metrics["acceptance_per_position"] = Metric("ratio", {str(i): float(x) for i, x in enumerate(positions)})
    counters = {key: taken.pop(key) for key in _COUNTERS if cell.get(key)}
    window = taken.number("measurement_seconds")
    taken.drop(*_DERIVED)
    return Result(
        kind="imported",
        target=Target(url=str(about.get("server", "")), model=str(about.get("model", "")), server=about.get("engine")),
        load={"tool": TOOL, **load, **{k: about.get(k) for k in ("max_tokens", "temperature", "ignore_eos")}},
        metrics=metrics,
        flags=(*_flags(cell), *taken.unmapped()),
        server={"source": cell.get("aggregate_source"), **counters} if counters else None,
        window_s=window,
        origin={"tool": TOOL, "version": about.get("version"), "file": path.name},
        created=str(about.get("timestamp", "")),
    )


def _latencies(taken: Taken) -> Iterator[tuple[str, Metric]]:
    for theirs, ours in LATENCIES.items():
        is_rate = theirs == "output_tps_per_user"
        stats = {name: taken.number(f"{theirs}_{there}") for there, name in STATISTICS.items()}
        stats = {name: value * (1 if is_rate else 1000) for name, value in stats.items() if value}
        if stats:
            yield ours, Metric("tokens/s" if is_rate else "ms", stats)


def _flags(cell: Mapping[str, Any]) -> Iterator[Flag]:
    errors, rate = int(cell.get("num_errors") or 0), cell.get("aggregate_tps")
    if cell.get("failure_reason") or errors:
        yield Flag("errors", str(cell.get("failure_reason") or f"{errors} streams failed"))
    if cell.get("loop_detected"):
        yield Flag("repetition_loop", "the tool found text that repeats")
    if cell.get("underfilled") or cell.get("capacity_limited") or cell.get("warmup_timed_out"):
        held = cell.get("effective_concurrency")
        why = cell.get("timeout_reason") or f"{held} of {cell.get('concurrency')} requests ran together"
        yield Flag("underfilled", str(why))
    # negative rates are the tool's marks for a cell that was skipped or voided
    if not isinstance(rate, (int, float)) or rate <= 0:
        yield Flag("no_requests", f"the tool gave the cell no rate ({rate!r})")


def write(results: Sequence[Result]) -> dict[str, Any]:
    """A file that the tool's readers take: metadata, results, summary_table."""
    cells = [_written(result) for result in results]
    table: dict[str, dict[str, float | None]] = {}
    for cell in cells:
        table.setdefault(str(cell["context_tokens"]), {})[str(cell["concurrency"])] = cell["aggregate_tps"]
    first = results[0]
    metadata = {
        "engine": first.target.server,
        "model": first.target.model,
        "server": first.target.url,
        "timestamp": first.created,
        "written_by": f"stepfloor {first.version}",
        "concurrency_levels": sorted({c["concurrency"] for c in cells}),
        "context_lengths": sorted({c["context_tokens"] for c in cells}),
    }
    sustained = [c for c in cells if c["benchmark_mode"] == "duration"]
    burst = [c for c in cells if c["benchmark_mode"] != "duration"]
    return {
        "metadata": metadata, "prefill": {}, "results": sustained, "summary_table": table if sustained else {},
        "burst_results": burst, "burst_summary_table": table if burst else {},
    }  # fmt: skip


def _written(result: Result) -> dict[str, Any]:
    metrics, load = result.metrics, result.load
    rate = next((metrics[n] for n in ("sustained_throughput", "output_throughput") if n in metrics), None)
    cell: dict[str, Any] = {
        "concurrency": int(load.get("concurrency") or load.get("max_concurrency") or 1),
        "context_tokens": int(load.get("context_tokens") or 0),
        "benchmark_mode": "duration" if "sustained_throughput" in metrics else "request_count",
        "measurement_seconds": result.window_s,
        "aggregate_tps": rate.value if rate and result.valid else None,
        "underfilled": any(f.code == "underfilled" for f in result.flags),
        "loop_detected": any(f.code == "repetition_loop" for f in result.flags),
        "failure_reason": "; ".join(f.text for f in result.flags if f.invalidates),
        "num_errors": sum(r.error is not None for r in result.requests),
    }
    for theirs, ours in LATENCIES.items():
        metric = metrics.get(ours)
        for there, name in STATISTICS.items() if metric else ():
            if metric and name in metric.stats:
                cell[f"{theirs}_{there}"] = metric.stats[name] / (1000 if metric.unit == "ms" else 1)
    for theirs, (ours, _) in _RATES.items():
        if ours in metrics:
            cell[theirs] = metrics[ours].value
    if "acceptance_per_position" in metrics:
        cell["server_spec_pos_accept"] = list(metrics["acceptance_per_position"].stats.values())
    return cell
