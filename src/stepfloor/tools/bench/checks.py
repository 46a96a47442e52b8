"""What makes a measurement invalid, or must be known beside it; every check says what was wanted and what was seen."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from stepfloor.tools.bench.load import Load
from stepfloor.tools.bench.metrics import leading_outliers, mean_in_flight, tpot_ms, ttft_ms
from stepfloor.tools.bench.result import Flag, Metric, Request

UNDERFILLED = 0.95
LOOKS_NEEDED = 3
# first tokens are this much apart by chance, whatever the server: a new connection, a busy core
TTFT_CHANCE_MS = 20.0
# of all answers; fewer are noted
LOOPS = 0.05
CACHED_SLACK = 0.02
# the beginning of a chat template is the same in all prompts
TEMPLATE_TOKENS = 64
OTHERS_SLACK = 0.02
OTHERS_TOKENS = 8
# lateness of this process's timers: in ms, and as a share of the gap between chunks
LATE_MS = 10.0
LATE_SHARE = 0.25
# a percentile wants this many requests
PERCENTILE_NEEDS = {"p90": 10, "p95": 20, "p99": 100}


def check_requests(requests: Sequence[Request], load: Load) -> list[Flag]:
    """Of the answers themselves."""
    flags: list[Flag] = []
    if not any(r.first_s is not None and r.error is None for r in requests):
        first = next((r.error for r in requests if r.error), "nothing was sent")
        return [Flag("no_requests", f"no request got a token; the first error: {first}")]
    failed = [r for r in requests if r.error is not None]
    if failed:
        kinds = Counter(r.error for r in failed).most_common(1)[0]
        flags.append(Flag("errors", f"{len(failed)} of {len(requests)} requests failed, {kinds[1]} with: {kinds[0]}"))
    good = [r for r in requests if r.error is None and r.first_s is not None]
    silent = [r for r in good if r.output_tokens is None]
    if silent:
        why = "up to the cut, and the window needs that" if all(r.cut for r in silent) else "with usage"
        flags.append(Flag("usage_missing", f"{len(silent)} of {len(good)} answers do not say their tokens {why}"))
    early = [r for r in good if not r.cut and _ended_early(r)]
    if early and load.ignore_eos and not load.plain:
        shortest = min(r.output_tokens or 0 for r in early)
        flags.append(
            Flag("early_stop", f"{len(early)} of {len(good)} answers are shorter than asked, the shortest {shortest}")
        )
    loops = sum(r.looped for r in good)
    if loops:
        code = "repetition_loop" if loops > LOOPS * len(good) else "few_loops"
        flags.append(Flag(code, f"{loops} of {len(good)} answers end in a loop of the same text"))
    return flags + _check_prompts(good, load)


def _ended_early(request: Request) -> bool:
    return (
        request.output_tokens is not None
        and request.asked_output_tokens is not None
        and request.output_tokens < request.asked_output_tokens
    )


def _check_prompts(good: Sequence[Request], load: Load) -> list[Flag]:
    flags: list[Flag] = []
    unknown = sum(r.asked_prompt_tokens is None for r in good)
    if unknown:
        flags.append(Flag("inexact_prompts", f"{unknown} of {len(good)} prompts have a length that only usage tells"))
    other = [
        r
        for r in good
        if None not in (r.prompt_tokens, r.asked_prompt_tokens) and r.prompt_tokens != r.asked_prompt_tokens
    ]
    if other:
        seen = other[0]
        flags.append(
            Flag(
                "prompt_tokens_differ",
                f"{len(other)} of {len(good)} prompts have another length at the server: "
                f"{seen.prompt_tokens} tokens in place of {seen.asked_prompt_tokens}",
            )
        )
    hashes = Counter(r.prompt_hash for r in good)
    twice = sum(count > 1 for count in hashes.values())
    if twice:
        flags.append(Flag("repeated_prompts", f"{twice} prompts were sent more than once"))
    cached, inputs = sum(r.cached_tokens or 0 for r in good), sum(r.prompt_tokens or 0 for r in good)
    if cached:
        text = f"{cached} of {inputs} prompt tokens came from the server's cache"
        template = TEMPLATE_TOKENS * len(good) if load.route == "chat" else 0
        if cached > (load.prefix_share + CACHED_SLACK) * inputs + template:
            text += f", and {load.prefix_share:.0%} are shared: these prompts were sent before; pass another --seed"
            flags.append(Flag("cached_prompts", text))
        else:
            flags.append(Flag("caches_seen", text))
    return flags


def check_first_runs(requests: Sequence[Request], concurrency: int | None) -> list[Flag]:
    """Whether the first answers were unlike the rest: an average over both would be a number of neither."""
    good = sorted(
        (r for r in requests if r.error is None and r.first_s is not None and not r.cut), key=lambda r: r.sent_s or 0.0
    )
    rates = [1000 / x for r in good if (x := tpot_ms(r))]
    times = [ttft_ms(r) for r in good]
    # with several users the first wave is prefilled at once, so its first tokens differ by nature
    kinds = [(rates, "tokens/s", 0.0), (times, "ms to the first token", TTFT_CHANCE_MS)][: 2 if concurrency == 1 else 1]
    for values, unit, chance in kinds:
        if count := leading_outliers(values, chance):
            first = ", ".join(f"{v:.4g}" for v in values[:count][:4])
            rest = float(np.median(values[count:]))
            text = f"the first {count} of {len(values)}: {first} {unit}; median of the rest: {rest:.4g}; "
            code = "first_runs_differ" if concurrency == 1 else "ramp"
            return [Flag(code, text + "raise --num-warmups")]
    return []


def check_concurrency(
    requests: Sequence[Request], begin_s: float, end_s: float, asked: int, running: Sequence[tuple[float, float]]
) -> list[Flag]:
    """Whether as many requests were in flight as was asked, here and by the server's own gauge (seconds, running)."""
    sent = sorted(r.sent_s for r in requests if r.sent_s is not None)
    full = sent[min(asked, len(sent)) - 1] if sent else 0.0
    last = end_s if len(sent) <= asked else sent[-1]
    seen = [count for at, count in running if max(full, begin_s) < at < min(last, end_s)]
    # the most, as a gauge that is set after each step is behind between two requests
    if len(seen) >= LOOKS_NEEDED and 1 <= max(seen) < asked:
        text = f"the server ran at most {max(seen):.0f} of {asked} at once and let the rest wait; raise its limit"
        return [Flag("underfilled", text)]
    here = mean_in_flight(requests, begin_s, end_s)
    if here < UNDERFILLED * asked:
        text = f"{here:.2f} of {asked} requests were in flight on average; pass more --num-prompts, or --duration"
        return [Flag("underfilled", text)]
    return []


def check_server(grown: Mapping[str, Any] | None, received: int | None) -> list[Flag]:
    """The server's counters against the tokens that came here; received None: some were cut, and cannot be compared."""
    if grown is None:
        return [Flag("server_metrics_missing", "the server has no /metrics: steps and acceptance are not known")]
    if any(isinstance(v, int | float) and v < 0 for v in grown.values()):
        return [Flag("errors", "the server's counters went back: it was restarted meanwhile")]
    made = grown.get("generated", 0.0)
    if received is not None and made > (1 + OTHERS_SLACK) * received + OTHERS_TOKENS:
        return [Flag("other_clients", f"the server made {made:.0f} tokens and {received} came here: others use it too")]
    return []


def check_client(late_ms: Sequence[float], itl: Metric | None) -> list[Flag]:
    """Whether this process was ready when pieces arrived."""
    if not late_ms:
        return []
    late = float(np.percentile(late_ms, 99))
    # the mean: with drafts most chunks may come together, and the median gap be nothing
    gap = itl.value if itl is not None else 0.0
    if late > max(LATE_MS, LATE_SHARE * gap):
        text = f"this client's timers were up to {late:.1f} ms late (p99): the machine is busy, and times include that"
        return [Flag("client_overloaded", text)]
    return []


def check_counts(num_requests: int) -> list[Flag]:
    """Percentiles that so few requests cannot show."""
    weak = [name for name, needs in PERCENTILE_NEEDS.items() if num_requests < needs]
    if not weak:
        return []
    return [Flag("short", f"{', '.join(weak)} of {num_requests} requests is little more than the largest of them")]
