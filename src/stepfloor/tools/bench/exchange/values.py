"""What the readers and writers of foreign result files share.

A latency here counts from the time a request was planned. Other tools count from when it was sent, which is the same
where a request is sent because another ended (a closed loop) and flatters where requests arrive at a rate: such a
figure is kept under a name of its own, and never under ours.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stepfloor.errors import UserError
from stepfloor.tools.bench.result import Flag, Metric, Result

# latencies that count from sending although requests were planned
FROM_SENT = {"ttft_ms": "ttft_from_sent_ms", "e2e_ms": "e2e_from_sent_ms"}
TOTALS = ("completed", "failed", "total_input_tokens", "total_output_tokens")
_NAMED_AT_MOST = 40


class Taken:
    """The keys of a foreign object, struck off as they find their place; what is left is named in a flag."""

    def __init__(self, raw: Mapping[str, Any], path: Path, where: str = "") -> None:
        self._raw, self._path, self._where = raw, path, where
        self._left = dict(raw)

    def pop(self, key: str) -> Any:
        """The value of a key, None where there is none."""
        return self._left.pop(key, None)

    def drop(self, *keys: str) -> None:
        """Strike off keys whose values are kept in another way."""
        for key in keys:
            self._left.pop(key, None)

    def number(self, key: str) -> float | None:
        """The number of a key; None where there is none, or one that is not finite. Raises UserError for a text."""
        value = self.pop(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise UserError(f"{self._path}: {self._where}{key} should be a number; got {value!r}")
        return float(value) if math.isfinite(value) else None

    def left(self) -> tuple[str, ...]:
        """The keys that are left."""
        return tuple(self._left)

    def unmapped(self) -> tuple[Flag, ...]:
        """One flag that names everything left over that holds anything, or none."""
        left = sorted(key for key, value in self._left.items() if value not in (None, "", [], {}, ()))
        if not left:
            return ()
        more = f" and {len(left) - _NAMED_AT_MOST} more" if len(left) > _NAMED_AT_MOST else ""
        return (Flag("unmapped", f"{self._where}{', '.join(left[:_NAMED_AT_MOST])}{more}"),)


def failed_flags(failed: float | None, completed: float | None) -> tuple[Flag, ...]:
    """What a foreign count of failed requests says about a result; None where the file does not count them."""
    if failed:
        return (Flag("errors", f"{failed:g} of {failed + (completed or 0):g} requests failed"),)
    if completed == 0:
        return (Flag("no_requests", "the file says that no request was answered"),)
    return ()


def is_open_loop(result: Result) -> bool:
    """Whether requests were planned ahead, by what the load says; of an imported one, by its requests."""
    if "arrivals" in result.load:
        return result.load["arrivals"] != "closed"
    if "request_rate" in result.load:
        return result.load["request_rate"] not in (None, "inf")
    return any(r.sent_s is not None and r.sent_s > r.planned_s for r in result.requests)


def arrival_rate(result: Result) -> float:
    """Requests a second of an open loop: as the load says, or as they were planned."""
    rate = result.load.get("request_rate")
    if isinstance(rate, (int, float)):
        return float(rate)
    span = max((r.planned_s for r in result.requests), default=0.0)
    return (len(result.requests) - 1) / span if span else math.inf


def from_sent(result: Result) -> dict[str, Metric]:
    """TTFT and E2E counted from sending, made from the requests; empty where there are none."""
    done = [r for r in result.requests if r.error is None and r.sent_s is not None]
    ends = {
        FROM_SENT["ttft_ms"]: [1e3 * (r.first_s - (r.sent_s or 0)) for r in done if r.first_s is not None],
        FROM_SENT["e2e_ms"]: [1e3 * (r.last_s - (r.sent_s or 0)) for r in done if r.last_s is not None],
    }
    return {name: Metric("ms", _statistics(values), count=len(values)) for name, values in ends.items() if values}


def _statistics(values: Sequence[float]) -> dict[str, float]:
    stats = {"mean": float(np.mean(values)), "std": float(np.std(values))}
    return stats | {f"p{p}": float(np.percentile(values, p)) for p in (50, 90, 95, 99)}


def totals(result: Result) -> dict[str, int]:
    """Requests completed and failed and their tokens: counted, or as the file said that the result came from."""
    if not result.requests:
        return {key: value for key, value in (result.origin or {}).items() if key in TOTALS}
    done = [r for r in result.requests if r.error is None]
    return {
        "completed": len(done),
        "failed": len(result.requests) - len(done),
        "total_input_tokens": sum(r.prompt_tokens or 0 for r in done),
        "total_output_tokens": sum(r.output_tokens or 0 for r in done),
    }
