"""What a Prometheus scraper reads: vLLM's names, exactly, and our own with the prefix `stepfloor:`.

Source: vLLM 0.33, v1/metrics/loggers.py and v1/spec_decode/metrics.py, for names, labels and buckets.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.metrics import disable_created_metrics

LABELS = ("model_name", "engine")
FINISHED = ("stop", "length", "abort", "error", "repetition")
# a run of this many equal tokens is counted; it is no error by itself
REPEATED_RUN = 64
# the alarm looks at this many drafts of the first position, and at this share of them accepted
ALARM_DRAFTS = 512
ALARM_ACCEPTANCE = 0.02

_TTFT = (.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 640, 2560)  # fmt: skip
_ITL = (.01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)  # fmt: skip
_LATENCY = (.3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)  # fmt: skip


class AcceptanceAlarm:
    """Whether drafts have stopped being accepted: a drafter that lost its state still costs its share of a step."""

    def __init__(self) -> None:
        self.on = False
        self._drafted = 0
        self._accepted = 0

    def look(self, drafted: int, accepted: int) -> bool:
        """Take the totals of the first position; true when the alarm goes on now."""
        count = drafted - self._drafted
        if count < ALARM_DRAFTS:
            return False
        dead = accepted - self._accepted < ALARM_ACCEPTANCE * count
        self._drafted, self._accepted = drafted, accepted
        went_on = dead and not self.on
        self.on = dead
        return went_on


class Metrics:
    """One registry of one server."""

    def __init__(self, model_name: str, max_model_len: int, report: Mapping[str, Any]) -> None:
        disable_created_metrics()
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._values = (model_name, "0")
        powers = _powers(max_model_len)

        self.running = self._gauge("vllm:num_requests_running", "Requests in the step.")
        self.waiting = self._gauge("vllm:num_requests_waiting", "Requests that wait for a slot.")
        by_reason = self._labelled(
            Gauge, "vllm:num_requests_waiting_by_reason", "Requests that wait, by reason.", "reason"
        )
        self.waiting_by_reason = {r: by_reason.labels(*self._values, r) for r in ("capacity", "deferred")}
        self.kv_cache_usage = self._gauge("vllm:kv_cache_usage_perc", "Share of the pages in use, 1 is all.")
        sleep = self._labelled(Gauge, "vllm:engine_sleep_state", "Never asleep: awake is 1.", "sleep_state")
        for state in ("awake", "weights_offloaded", "discard_all"):
            sleep.labels(*self._values, state).set(state == "awake")
        info = {"block_size": report["block_size"], "num_gpu_blocks": report["pages"], "enable_prefix_caching": False}
        Gauge(
            "vllm:cache_config_info", "What the cache was made with.", [*info, "engine"], registry=self.registry
        ).labels(*map(str, info.values()), "0").set(1)

        self.prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens prefilled.")
        by_source = self._labelled(Counter, "vllm:prompt_tokens_by_source", "Prompt tokens by source.", "source")
        self.prompt_tokens_computed = by_source.labels(*self._values, "local_compute")
        for source in ("local_cache_hit", "external_kv_transfer"):
            by_source.labels(*self._values, source)
        self.generation_tokens = self._counter("vllm:generation_tokens", "Tokens delivered.")
        success = self._labelled(Counter, "vllm:request_success", "Requests that ended.", "finished_reason")
        self.finished = {reason: success.labels(*self._values, reason) for reason in FINISHED}
        for name, text in (
            ("vllm:prompt_tokens_cached", "Prompt tokens from the prefix cache (there is none yet)."),
            ("vllm:num_preemptions", "Preemptions: never, a request keeps its pages to its end."),
            ("vllm:prefix_cache_queries", "Tokens looked up in the prefix cache (there is none yet)."),
            ("vllm:prefix_cache_hits", "Tokens found in the prefix cache (there is none yet)."),
            ("vllm:external_prefix_cache_queries", "Tokens looked up in an external cache (there is none)."),
            ("vllm:external_prefix_cache_hits", "Tokens found in an external cache (there is none)."),
        ):
            self._counter(name, text)
        self.num_drafts = self._counter("vllm:spec_decode_num_drafts", "Verifications of one sequence.")
        self.draft_tokens = self._counter("vllm:spec_decode_num_draft_tokens", "Drafts proposed.")
        self.accepted_tokens = self._counter("vllm:spec_decode_num_accepted_tokens", "Drafts accepted.")
        self._accepted_per_pos = self._labelled(
            Counter, "vllm:spec_decode_num_accepted_tokens_per_pos", "Drafts accepted, by position.", "position"
        )
        self.read_bytes = self._counter("vllm:estimated_read_bytes_per_gpu", "Bytes of the steps, by the byte model.")

        self.ttft = self._histogram("vllm:time_to_first_token_seconds", "Time to the first token.", _TTFT)
        self.itl = self._histogram("vllm:inter_token_latency_seconds", "Time between deliveries, per token.", _ITL)
        self.tpot = self._histogram("vllm:request_time_per_output_token_seconds", "Mean time of a token.", _ITL)
        self.e2e = self._histogram("vllm:e2e_request_latency_seconds", "Whole request.", _LATENCY)
        self.queue_time = self._histogram("vllm:request_queue_time_seconds", "Wait for a slot.", _LATENCY)
        self.inference_time = self._histogram("vllm:request_inference_time_seconds", "Slot to end.", _LATENCY)
        self.prefill_time = self._histogram("vllm:request_prefill_time_seconds", "Slot to first token.", _LATENCY)
        self.decode_time = self._histogram("vllm:request_decode_time_seconds", "First token to end.", _LATENCY)
        self.iteration_tokens = self._histogram("vllm:iteration_tokens_total", "Tokens of a step.", _powers(16384))
        self.request_prompt_tokens = self._histogram("vllm:request_prompt_tokens", "Prompt of a request.", powers)
        self.request_generation_tokens = self._histogram(
            "vllm:request_generation_tokens", "Tokens delivered to a request.", powers
        )
        self.request_max_tokens = self._histogram("vllm:request_params_max_tokens", "max_tokens asked for.", powers)
        self.request_n = self._histogram("vllm:request_params_n", "n asked for.", (1, 2, 5, 10, 20))
        self.request_prefill = self._histogram(
            "vllm:request_prefill_kv_computed_tokens", "Prompt tokens computed for a request.", powers
        )

        self.steps = self._counter("stepfloor:steps", "Steps run.")
        self.drafted_per_pos = self._labelled(
            Counter, "stepfloor:drafted_tokens_per_pos", "Drafts proposed, by position.", "position"
        )
        self.delivered_in_decode = self._counter("stepfloor:decode_delivered_tokens", "Tokens of verifications.")
        self.repeated_runs = self._counter("stepfloor:repeated_token_runs", f"Runs of {REPEATED_RUN} equal tokens.")
        self.faults = self._counter("stepfloor:request_faults", "Requests ended by a fault of the step.")
        self.cancelled = self._counter("stepfloor:requests_cancelled", "Requests cancelled by their client.")
        self.refused = self._labelled(Counter, "stepfloor:requests_refused", "Requests refused.", "reason")
        self.acceptance_alarm = self._gauge("stepfloor:acceptance_alarm", "1 while drafts are hardly ever accepted.")
        self.stalled = self._gauge("stepfloor:engine_stalled_seconds", "Silence of an engine that has requests.")
        self.alarm = AcceptanceAlarm()
        self._step_bytes = float(report["step_bytes"])
        self._seen: dict[str, Any] = {"steps": 0, "decode_steps": 0, "delivered": 0}

    def refuse(self, reason: str) -> None:
        """Count a request that was answered with an error before it ran."""
        self.refused.labels(*self._values, reason).inc()

    def take_stats(self, stats: Mapping[str, Any]) -> bool:
        """Take the engine's totals; true when the acceptance alarm goes on now."""
        seen = self._seen
        self.running.set(stats["running"])
        self.waiting.set(stats["waiting"])
        self.waiting_by_reason["capacity"].set(stats["waiting"])
        self.kv_cache_usage.set(stats["kv_cache_usage"])
        self.steps.inc(stats["steps"] - seen["steps"])
        self.read_bytes.inc((stats["steps"] - seen["steps"]) * self._step_bytes)
        drafted, accepted = stats["drafted"], stats["accepted"]
        if drafted:
            self.num_drafts.inc(stats["decode_steps"] - seen["decode_steps"])
        self.delivered_in_decode.inc(stats["delivered"] - seen["delivered"])
        self._add(self.draft_tokens, self.drafted_per_pos, drafted, seen.get("drafted"))
        self._add(self.accepted_tokens, self._accepted_per_pos, accepted, seen.get("accepted"))
        self._seen = dict(stats)
        went_on = bool(drafted) and self.alarm.look(drafted[0], accepted[0])
        self.acceptance_alarm.set(self.alarm.on)
        return went_on

    def text(self) -> bytes:
        """The page, in Prometheus' text format."""
        return generate_latest(self.registry)

    def _add(self, total: Any, per_position: Any, now: Sequence[int], before: Sequence[int] | None) -> None:
        for position, (new, old) in enumerate(zip(now, before or [0] * len(now), strict=True)):
            total.inc(new - old)
            per_position.labels(*self._values, str(position)).inc(new - old)

    def _gauge(self, name: str, text: str) -> Any:
        return Gauge(name, text, LABELS, registry=self.registry).labels(*self._values)

    def _counter(self, name: str, text: str) -> Any:
        return Counter(name, text, LABELS, registry=self.registry).labels(*self._values)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Any:
        return Histogram(name, text, LABELS, registry=self.registry, buckets=buckets).labels(*self._values)

    def _labelled(self, kind: Any, name: str, text: str, label: str) -> Any:
        return kind(name, text, (*LABELS, label), registry=self.registry)


def _powers(largest: int) -> list[float]:
    """1, 2, 5, 10, 20 ... up to the largest, as vLLM's buckets of token counts."""
    values = [float(m * 10**e) for e in range(9) for m in (1, 2, 5)]
    return [v for v in values if v <= largest] or [1.0]
