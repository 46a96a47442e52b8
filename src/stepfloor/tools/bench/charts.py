"""Which data of results becomes which chart. A chart that has nothing to show is left out."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from stepfloor.tools.bench.plot import SERIES, Axis, Plot, short
from stepfloor.tools.bench.proportions import wilson
from stepfloor.tools.bench.result import Device, Item, Request, Result

if TYPE_CHECKING:  # it brings scipy, which a page of one measurement does without
    from stepfloor.tools.bench.verdict import Comparison

# beyond this, lines on one plot cannot be told apart
MOST_LINES = SERIES
# tokens a second of a cell, whichever it has
RATES = ("output_throughput", "sustained_throughput")
MOST_BINS, ARRIVALS_A_BIN = 60, 8
_POINTS = 400


@dataclass(frozen=True, slots=True)
class Chart:
    """A drawing with its caption, and the names of its series where there are several."""

    id: str
    caption: str
    svg: str
    legend: tuple[str, ...] = ()


def charts(
    results: Sequence[Result], comparisons: Sequence["Comparison"] = (), names: Sequence[str] = ()
) -> Iterator[Chart]:
    """Every chart that these results have data for, in the order of the page.

    names  one for each result; those of one name, the rounds of an arm, share a line. Without them, labels
    """
    for i, comparison in enumerate(comparisons):
        if comparison.series.rounds:
            yield _pairs(comparison, i)
    names = names or labels(results)
    if any(r.items for r in results):
        yield _accuracy(results, names)
    if len(results) > 1:
        yield from _over_concurrency(results)
    groups: dict[str, list[Result]] = {}
    for name, result in zip(names, results, strict=True):
        groups.setdefault(name, []).append(result)
    of = f" The first {MOST_LINES} of {len(groups)} results." if len(groups) > MOST_LINES else ""
    groups = dict(list(groups.items())[:MOST_LINES])
    for id_, title, values in _DISTRIBUTIONS:
        pooled = {name: [v for r in group for v in values(r)] for name, group in groups.items()}
        if any(pooled.values()):
            yield _distribution(id_, title, pooled, of)
    # time runs from the begin of a window, so only one window of a name can be drawn
    first = {
        name: group[0].requests
        for name, group in groups.items()
        if any(r.sent_s is not None for r in group[0].requests)
    }
    once = " The first round of each." if len(groups) < len(results) and not of else of
    if first:
        flight = {name: _in_flight(requests) for name, requests in first.items()}
        yield _over_time("concurrency", "Requests in flight", "requests", flight, once)
        tokens = {name: _tokens_over_time(requests) for name, requests in first.items()}
        yield _over_time("throughput", "Output tokens a second", "tokens/s", tokens, once)
    for i, (name, group) in enumerate(groups.items()):
        positions = group[0].metrics.get("acceptance_per_position")
        if positions is not None:
            yield _acceptance(positions.stats, name, i)
        for device in group[0].telemetry.devices if group[0].telemetry else ():
            yield from _device(device, name, i)


def labels(results: Sequence[Result]) -> tuple[str, ...]:
    """A short name for each result: what its load, or else its target's configuration, differs in; or the model."""
    if len(results) == 1:
        return (results[0].target.model or results[0].kind,)
    for facts in ([r.load for r in results], [r.target.config for r in results]):
        keys = [
            k
            for k in dict.fromkeys(k for f in facts for k in f)
            if k not in _NOT_NAMES and len({str(f.get(k)) for f in facts}) > 1
        ]
        names = tuple(
            ", ".join(f"{k} {f[k]}" for k in keys[:3] if isinstance(f.get(k), (int, float, str))) for f in facts
        )
        if keys and all(names):
            return names
    return tuple(f"{r.target.model or r.kind} {i}" for i, r in enumerate(results, 1))


# these differ between any two runs
_NOT_NAMES = ("seed", "bodies_sha256", "dataset_path", "label", "input_len", "num_prompts", "num_warmups", "output_len")


def _done(result: Result) -> list[Request]:
    return [r for r in result.requests if r.error is None and r.first_s is not None]


def _ttft(result: Result) -> list[float]:
    return [1000 * (r.first_s - r.planned_s) for r in _done(result) if r.first_s is not None]


def _gaps(result: Result) -> list[float]:
    chunks = [r.chunk_s for r in _done(result) if r.chunk_s]
    return [1000 * (b - a) for times in chunks for a, b in pairwise(times)]


def _e2e(result: Result) -> list[float]:
    return [1000 * (r.last_s - r.planned_s) for r in _done(result) if r.last_s is not None]


_DISTRIBUTIONS: tuple[tuple[str, str, Callable[[Result], list[float]]], ...] = (
    ("ttft", "Time to the first token", _ttft),
    ("itl", "Gap between chunks", _gaps),
    ("e2e", "Time to the last token", _e2e),
)


def _distribution(id_: str, title: str, groups: Mapping[str, list[float]], of: str) -> Chart:
    """The share of values at or below each value, with the median and the 99th percentile marked."""
    every = [v for values in groups.values() for v in values]
    wide = min(every) > 0 and max(every) / min(every) > 20
    x = Axis.around("ms", every, zero=False, log=wide)
    y = Axis("share of requests" if id_ != "itl" else "share of gaps", 0.0, 1.0, ticks=_SHARES)
    plot = Plot(
        title, f"cumulative distribution, {len(every)} values from {min(every):.1f} to {max(every):.1f} ms", x, y
    )
    shown = []
    for i, (name, values) in enumerate(groups.items()):
        if not values:
            continue
        shown.append(name)
        ordered = sorted(values)
        n = len(ordered)
        picked = sorted({min(n - 1, round(j * (n - 1) / _POINTS)) for j in range(_POINTS + 1)})
        points = [(ordered[0], 0.0), *((ordered[j], (j + 1) / n) for j in picked)]
        plot.line(points, i, name, step=True)
        for share in (0.5, 0.99):
            at = ordered[min(n - 1, int(share * n))]
            plot.dot(at, share, i, f"{name}: {100 * share:g} % within {at:.2f} ms")
    return Chart(id_, f"{title}: share at or below. Dots mark 50 % and 99 %.{of}", plot.svg(), tuple(shown))


_SHARES = tuple((p / 100, f"{p} %") for p in (0, 25, 50, 75, 100))


def _over_time(id_: str, title: str, unit: str, lines: Mapping[str, list[tuple[float, float]]], of: str) -> Chart:
    values = [v for line in lines.values() for _, v in line]
    plot = Plot(
        title,
        f"over time, at most {short(max(values, default=0.0))} {unit}",
        Axis.around("seconds", (t for line in lines.values() for t, _ in line)),
        Axis.around(unit, values, whole=unit == "requests"),
    )
    for i, (name, line) in enumerate(lines.items()):
        plot.area(line, i)
        plot.line(line, i, name, step=True)
    return Chart(id_, f"{title} over time.{of}", plot.svg(), tuple(lines))


def _in_flight(requests: Sequence[Request]) -> list[tuple[float, float]]:
    ends = [(r.sent_s, e) for r in requests if r.sent_s is not None and (e := r.end_s or r.last_s) is not None]
    changes = sorted([(s, 1) for s, _ in ends] + [(e, -1) for _, e in ends])
    line, now = [(0.0, 0.0)], 0
    for at, change in changes:
        now += change
        line.append((at, float(now)))
    return line


def _tokens_over_time(requests: Sequence[Request]) -> list[tuple[float, float]]:
    """Tokens a second in equal bins; an answer's tokens are spread evenly over its chunks, or lie where it ended."""
    arrivals: list[tuple[float, float]] = []
    for r in requests:
        tokens = r.output_tokens or 0
        if r.chunk_s:
            arrivals += [(at, tokens / len(r.chunk_s)) for at in r.chunk_s]
        elif r.last_s is not None:
            arrivals.append((r.last_s, tokens))
    if not arrivals:
        return []
    count = max(1, min(MOST_BINS, len(arrivals) // ARRIVALS_A_BIN))
    width = max(at for at, _ in arrivals) / count or 1.0
    bins = [0.0] * (count + 1)
    for at, tokens in arrivals:
        bins[min(count - 1, int(at / width))] += tokens / width
    return [(i * width, value) for i, value in enumerate(bins)]


def _over_concurrency(results: Sequence[Result]) -> Iterator[Chart]:
    """One line for each context length: what more requests at once bring, and what they cost a reader."""
    wanted = (
        ("matrix-throughput", "Output tokens a second", RATES),
        ("matrix-tpot", "Mean time of a token", ("tpot_ms",)),
    )
    for id_, title, metrics in wanted:
        cells = [(c, ctx, v, ok) for r in results for c, ctx, v, ok in [_cell(r, metrics)] if c and v is not None]
        if len({c for c, *_ in cells}) < 2:
            continue
        concurrencies = sorted({c for c, *_ in cells})
        contexts = sorted({ctx for _, ctx, *_ in cells})
        unit = "ms" if metrics[0].endswith("_ms") else "tokens/s"
        x = Axis(
            "requests at once", concurrencies[0] / 1.15, concurrencies[-1] * 1.15, log=True,
            ticks=tuple((float(c), f"{c:g}") for c in concurrencies),
        )  # fmt: skip
        plot = Plot(title, f"over {len(concurrencies)} concurrencies", x, Axis.around(unit, (v for *_, v, _ in cells)))
        for i, context in enumerate(contexts):
            line = sorted((c, v, ok) for c, ctx, v, ok in cells if ctx == context)
            plot.line([(c, v) for c, v, ok in line if ok], i, f"context {short(context)}")
            for c, v, ok in line:
                note = "" if ok else ", invalid"
                plot.dot(
                    c,
                    v,
                    i,
                    f"{short(context)} tokens of context, {c:g} at once: {short(v)} {unit}{note}",
                    hollow=not ok,
                )
        names = tuple(f"{short(c)} tokens of context" for c in contexts)
        yield Chart(id_, f"{title} over requests at once. Hollow dots do not count.", plot.svg(), names)


def _cell(result: Result, metrics: Sequence[str]) -> tuple[float, float, float | None, bool]:
    concurrency, context = place(result.load)
    found = next((result.metrics[m].value for m in metrics if m in result.metrics), None)
    return concurrency or 0.0, context, found, result.valid


def place(load: Mapping[str, object]) -> tuple[float | None, float]:
    """Where a cell stands in a matrix: requests at once and tokens of context."""
    named = [load.get(k) for k in ("concurrency", "max_concurrency")]
    contexts = [load.get(k) for k in ("context", "context_tokens")]
    concurrency = next((float(v) for v in named if isinstance(v, (int, float))), None)
    return concurrency, next((float(v) for v in contexts if isinstance(v, (int, float))), 0.0)


def _acceptance(stats: Mapping[str, float], name: str, series: int) -> Chart:
    values = list(stats.values())
    x = Axis("draft position", 0.4, len(values) + 0.6, ticks=tuple((i + 1.0, str(i + 1)) for i in range(len(values))))
    shares = ", ".join(f"{v:.2f}" for v in values)
    plot = Plot("Drafts accepted", f"by position: {shares}", x, Axis("share of steps", 0.0, 1.0, ticks=_SHARES), 220)
    for i, value in enumerate(values):
        plot.bar(i + 1, 0.6, value, series, f"position {i + 1}: {100 * value:.1f} %")
    return Chart("acceptance", f"Share of steps that accepted a draft, by its position ({name}).", plot.svg())


def _device(device: Device, name: str, series: int) -> Iterator[Chart]:
    for column, unit in (("sm_clock_mhz", "MHz"), ("temperature_c", "°C"), ("power_w", "W")):
        points = [(at, v) for at, v in zip(device.at_s, device.columns.get(column, ()), strict=False) if v is not None]
        if len(points) > 1:
            plot = Plot(
                f"{device.name}: {column}",
                f"{min(v for _, v in points):g} to {max(v for _, v in points):g} {unit}",
                Axis.around("seconds", (t for t, _ in points)),
                Axis.around(unit, (v for _, v in points)),
                180,
            )
            plot.line(points, series, f"{device.name} {column}")
            yield Chart(f"device-{column}", f"{device.name}: {column.replace('_', ' ')} ({name}).", plot.svg())


def _accuracy(results: Sequence[Result], names: Sequence[str]) -> Chart:
    """Share of right answers of each result, and of each kind of question in it, with 95 % intervals."""
    bars = [
        (f"{name}: {kind}" if len(results) > 1 else kind, right, n, i)
        for i, (result, name) in enumerate(zip(results, names, strict=True))
        for kind, right, n in _kinds(result.items)
    ]
    x = Axis("", 0.4, len(bars) + 0.6, ticks=tuple((j + 1.0, kind) for j, (kind, *_) in enumerate(bars)))
    told = "; ".join(f"{kind} {right} of {n}" for kind, right, n, _ in bars)
    plot = Plot("Right answers", told, x, Axis("share right", 0.0, 1.0, ticks=_SHARES), 240)
    for j, (kind, right, n, series) in enumerate(bars):
        low, high = wilson(right, n)
        plot.bar(j + 1, 0.5, right / n, series, f"{kind}: {right} of {n}")
        plot.span(j + 1, low, high, series, f"95 % interval: {100 * low:.1f} to {100 * high:.1f} %")
    return Chart("accuracy", f"Share of right answers, with 95 % (Wilson) intervals: {told}.", plot.svg())


def _kinds(items: Sequence[Item]) -> Iterator[tuple[str, int, int]]:
    if not items:
        return
    yield "all", sum(i.correct for i in items), len(items)
    kinds = list(dict.fromkeys(i.id.split("/")[0] for i in items if "/" in i.id))
    for kind in kinds if 1 < len(kinds) <= 8 else ():
        of_kind = [i for i in items if i.id.startswith(f"{kind}/")]
        yield kind, sum(i.correct for i in of_kind), len(of_kind)


def _pairs(comparison: "Comparison", series: int) -> Chart:
    """The difference of each round, the mean's interval and the margin that would not matter."""
    s = comparison.series
    differences, rounds = s.differences, [number + 1 for number in s.rounds]
    held = [
        *differences,
        *(comparison.interval or ()),
        *((-comparison.margin, comparison.margin) if comparison.margin else ()),
    ]
    x = Axis(
        "round", min(rounds) - 0.6, max(rounds) + 0.6,
        ticks=tuple((float(r), str(r)) for r in rounds[:: max(1, len(rounds) // 12)]),
    )  # fmt: skip
    y = Axis.around(f"{s.arm_name} less {s.base_name}, {s.unit}", held)
    plot = Plot(f"{s.metric}: difference in each round", comparison.verdict.reason, x, y)
    if comparison.margin:
        plot.band(-comparison.margin, comparison.margin, f"margin: {comparison.margin:.4g} {s.unit} would not matter")
    plot.level(0.0, "no difference", "zero")
    if comparison.interval and comparison.paired:
        low, high = comparison.interval
        plot.level(comparison.paired.mean, f"mean {comparison.paired.mean:.4g}", f"mean s{series % SERIES}")
        for end in (low, high):
            plot.level(end, f"interval {low:.4g} to {high:.4g}", f"end s{series % SERIES}")
    for number, difference in zip(rounds, differences, strict=True):
        plot.dot(
            number, difference, series, f"round {number}: {difference:+.4g} {s.unit} ({comparison.show(difference)})"
        )
    caption = (
        f"{s.metric}: {s.arm_name} less {s.base_name} in each round; solid the mean, dashed its interval"
        f"{', shaded the margin' if comparison.margin else ''}. {comparison.verdict.word}: {comparison.verdict.reason}."
    )
    return Chart(f"pairs-{s.metric}-{s.arm_name}", caption, plot.svg())
