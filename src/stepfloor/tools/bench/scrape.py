"""The server's own account: counters of its metrics page before and after the window, in four dialects.

Source: vLLM 0.33, v1/metrics/loggers.py and v1/spec_decode/metrics.py; SGLang's docs, production metrics; llama.cpp,
tools/server/README.md; `stepfloor.server.metrics` for ours, which has vLLM's names and its own.
"""

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stepfloor.errors import UserError
from stepfloor.tools.bench.client import Client
from stepfloor.tools.bench.result import Metric

# the first name that a page has counts
COUNTERS = {
    "steps": ("stepfloor:steps_total", "vllm:iteration_tokens_total_count", "llamacpp:n_decode_total"),
    "generated": ("vllm:generation_tokens_total", "sglang:generation_tokens_total", "llamacpp:tokens_predicted_total"),
    "prompt": ("vllm:prompt_tokens_total", "sglang:prompt_tokens_total", "llamacpp:prompt_tokens_total"),
    "drafts": ("vllm:spec_decode_num_drafts_total", "llamacpp:spec_decode_num_drafts_total"),
    "drafted": (
        "vllm:spec_decode_num_draft_tokens_total",
        "llamacpp:spec_decode_num_draft_tokens_total",
        "llamacpp:tokens_drafted_total",
    ),
    "accepted": (
        "vllm:spec_decode_num_accepted_tokens_total",
        "llamacpp:spec_decode_num_accepted_tokens_total",
        "llamacpp:tokens_drafted_accepted_total",
    ),
    "cache_queries": ("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"),
    "cache_hits": ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total", "sglang:cached_tokens_total"),
}
RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs", "llamacpp:requests_processing")
POSITIONS = (
    "vllm:spec_decode_num_accepted_tokens_per_pos_total",
    "llamacpp:spec_decode_num_accepted_tokens_per_pos_total",
)
ACCEPTANCE_GAUGE = "sglang:spec_accept_length"

_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)", re.MULTILINE)
_POSITION = re.compile(r'position="(\d+)"')
_LABEL = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True, slots=True)
class Page:
    """A metrics page: sums over labels, acceptance by position, and labels of series that only inform.

    at  time.perf_counter in the middle of asking for it
    """

    at: float
    values: Mapping[str, float]
    positions: Mapping[int, float] = field(default_factory=dict)
    info: Mapping[str, str] = field(default_factory=dict)

    def get(self, names: tuple[str, ...]) -> float | None:
        """The value of the first of these names that is there."""
        return next((self.values[name] for name in names if name in self.values), None)


def parse_page(text: str, at: float) -> Page:
    """Read Prometheus' text format, as far as a bench needs it."""
    values: dict[str, float] = {}
    positions: dict[int, float] = {}
    info: dict[str, str] = {}
    for name, labels, number in _SAMPLE.findall(text):
        if name.endswith("_bucket"):
            continue
        try:
            value = float(number)
        except ValueError:
            continue
        values[name] = values.get(name, 0.0) + value
        if name in POSITIONS and (found := _POSITION.search(labels)):
            position = int(found[1])
            positions[position] = positions.get(position, 0.0) + value
        if name.endswith("_config_info"):
            info |= _LABEL.findall(labels)
    return Page(at, values, positions, info)


async def fetch_page(client: Client) -> Page | None:
    """The page as it is now; None for a server that has none."""
    begin = time.perf_counter()
    try:
        status, data = await client.fetch("GET", "/metrics")
    except UserError:
        return None
    if status != 200:
        return None
    page = parse_page(data.decode(errors="replace"), (begin + time.perf_counter()) / 2)
    return page if page.get(COUNTERS["generated"]) is not None else None


def growth(before: Page, after: Page) -> dict[str, Any]:
    """What the counters grew by between two pages, and the seconds. A negative one means that the server restarted."""
    grown: dict[str, Any] = {"seconds": after.at - before.at}
    for key, names in COUNTERS.items():
        now = after.get(names)
        if now is not None:
            grown[key] = now - (before.get(names) or 0.0)
    if after.positions:
        grown["accepted_per_position"] = {
            str(i): value - before.positions.get(i, 0.0) for i, value in sorted(after.positions.items())
        }
    if ACCEPTANCE_GAUGE in after.values:
        grown["acceptance_gauge"] = after.values[ACCEPTANCE_GAUGE]
    return grown


def server_metrics(grown: Mapping[str, Any], seconds: float) -> dict[str, Metric]:
    """Steps, acceptance and cache hits of a window of so many seconds, as far as the server counts them.

    A server that counts no drafts makes none, except SGLang, which shows the acceptance of its last steps only, and
    llama.cpp, whose older builds do not count them.
    """
    metrics: dict[str, Metric] = {}
    steps = grown.get("steps")
    if steps and seconds > 0:
        metrics["steps_per_s"] = Metric("steps/s", {"value": steps / seconds}, count=int(steps))
        metrics["ms_per_step"] = Metric("ms", {"value": 1000 * seconds / steps}, count=int(steps))
    drafts = grown.get("drafts")
    if drafts:
        length = 1 + grown.get("accepted", 0.0) / drafts
        metrics["acceptance_length"] = Metric("tokens", {"value": length}, count=int(drafts))
        positions = grown.get("accepted_per_position")
        if positions:
            shares = {position: value / drafts for position, value in positions.items()}
            metrics["acceptance_per_position"] = Metric("ratio", shares, count=int(drafts))
    elif "acceptance_gauge" in grown:
        metrics["acceptance_length"] = Metric("tokens", {"value": grown["acceptance_gauge"]})
    elif drafts == 0 or ("cache_queries" in grown and drafts is None):
        metrics["acceptance_length"] = Metric("tokens", {"value": 1.0}, count=0)
    if grown.get("cache_queries"):
        metrics["cache_hit_rate"] = Metric("ratio", {"value": grown.get("cache_hits", 0.0) / grown["cache_queries"]})
    return metrics
