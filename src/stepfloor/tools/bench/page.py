"""One HTML page of a measurement: who was asked what, whether it counts, the figures with intervals, and charts.

The page is one file without a script, a font or a link to anywhere. It follows the reader's light or dark setting,
prints on paper, and speaks: charts are images with a description, tables have headings. A result that does not count is
marked wherever it appears.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from stepfloor.errors import UserError
from stepfloor.tools.bench.charts import RATES, Chart, charts, labels, place
from stepfloor.tools.bench.plot import SERIES, short
from stepfloor.tools.bench.result import Flag, Item, Metric, Result

if TYPE_CHECKING:  # it brings scipy, which a page of one measurement does without
    from stepfloor.tools.bench.verdict import Comparison

_PERCENTILES = ("p50", "p90", "p95", "p99")
_FIRST = (
    "ttft_ms", "itl_ms", "tpot_ms", "e2e_ms", "per_user_rate", "output_throughput", "total_throughput",
    "request_throughput", "goodput", "steps_per_s", "ms_per_step", "acceptance_length",
)  # fmt: skip
_CELL_METRICS = (
    "output_throughput",
    "sustained_throughput",
    "per_user_rate",
    "ttft_ms",
    "tpot_ms",
    "acceptance_length",
    "accuracy",
)
_WRONG_ITEMS = 200
_LOADS = 24


def write_page(
    results: Sequence[Result], path: Path, comparisons: Sequence["Comparison"] = (), names: Sequence[str] = ()
) -> None:
    """Write the page of one result, of a matrix, or of an A/B run; names as charts takes them, the arms of an A/B run.

    Raises UserError if it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page(results, comparisons, names), encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; pass a path in a directory that is yours") from None


def page(results: Sequence[Result], comparisons: Sequence["Comparison"] = (), names: Sequence[str] = ()) -> str:
    """The whole document. Raises ValueError without anything to show."""
    if not results and not comparisons:
        raise ValueError("a page wants at least one result or comparison")
    title = _title(results, comparisons)
    names = names or labels(results)
    rows = _numbered(names)
    body = [*_header(title, results, rows)]
    if comparisons:
        body.append(_verdicts(comparisons))
    if len(results) == 1:
        body.append(_metrics_table(results[0].metrics))
    elif results:
        body += _matrix(results)
        body.append(_cells_table(results, rows))
    body.append(f'<section class="charts">{"".join(map(_chart, charts(results, comparisons, names)))}</section>')
    body += [wrong for result, name in zip(results, rows, strict=True) if (wrong := _wrong_items(result.items, name))]
    # the rounds of an arm have one configuration
    firsts = dict(reversed(list(zip(names, results, strict=True))))
    body += [_load(firsts[name], name) for name in list(dict.fromkeys(names))[:_LOADS]]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f"<style>{_STYLE}</style></head>\n<body><main>\n" + "\n".join(body) + "\n</main></body></html>\n"
    )


def _title(results: Sequence[Result], comparisons: Sequence["Comparison"]) -> str:
    if comparisons:
        s = comparisons[0].series
        return f"{s.arm_name} against {s.base_name}"
    kinds = {r.kind for r in results}
    kind = kinds.pop() if len(kinds) == 1 else "results"
    if len(results) > 1:
        kind = "matrix" if kind == "matrix cell" else f"{kind}, {len(results)} results"
    return f"{kind[:1].upper()}{kind[1:]}: {results[0].target.model}"


def _numbered(names: Sequence[str]) -> tuple[str, ...]:
    """Names that come more than once, the rounds of an arm, with their number."""
    return tuple(
        f"{name}, {names[:i].count(name) + 1}" if names.count(name) > 1 else name for i, name in enumerate(names)
    )


def _header(title: str, results: Sequence[Result], rows: Sequence[str]) -> Iterator[str]:
    bad = [r for r in results if not r.valid]
    if not results:
        badge = ""
    elif not bad:
        badge = '<span class="badge good">✓ valid</span>'
    elif len(results) == 1:
        badge = '<span class="badge bad">✗ invalid</span>'
    else:
        badge = f'<span class="badge bad">✗ {len(bad)} of {len(results)} invalid</span>'
    yield f"<header><h1>{escape(title)} {badge}</h1>"
    if results:
        first = results[0]
        target = first.target
        server = " ".join(x for x in (target.server, target.server_version) if x)
        facts = [target.url, server, f"made {first.created}" if first.created else "", f"stepfloor {first.version}"]
        if first.origin:
            facts.append(f"imported from {first.origin.get('tool')}, {first.origin.get('file')}")
        yield f'<p class="facts">{escape(" · ".join(fact for fact in facts if fact))}</p>'
    yield "</header>"
    flags: dict[Flag, list[str]] = {}
    for result, name in zip(results, rows, strict=True):
        for flag in result.flags:
            flags.setdefault(flag, []).append(name)
    if flags:
        # what makes a result invalid first
        ordered = sorted(flags.items(), key=lambda held: not held[0].invalidates)
        yield f'<ul class="flags">{"".join(_flag(flag, names, len(results)) for flag, names in ordered)}</ul>'


def _flag(flag: Flag, names: Sequence[str], results: int) -> str:
    where = "" if results == 1 else f"{len(names)} of {results} results" if len(names) > 2 else "; ".join(names)
    return (
        f'<li class="{"bad" if flag.invalidates else "note"}"><b>{escape(flag.code.replace("_", " "))}</b> '
        f"{escape(flag.text)}{f' <i>({escape(where)})</i>' if where else ''}</li>"
    )


def _table(heads: Sequence[str], rows: Iterable[str], caption: str = "", kind: str = "") -> str:
    """A table that scrolls by itself where the page is too narrow; heads are HTML, of the columns after the first."""
    head = "".join(f'<th scope="col">{head}</th>' for head in ("", *heads))
    top = f"<thead><tr>{head}</tr></thead>" if heads else ""
    above = f"<caption>{caption}</caption>" if caption else ""
    return f'<div class="wide"><table class="{kind}">{above}{top}<tbody>{"".join(rows)}</tbody></table></div>'


def _row(name: str, cells: Iterable[str], kind: str = "") -> str:
    """A row with its heading; name and cells are HTML."""
    return f'<tr class="{kind}"><th scope="row">{name}</th>{"".join(cells)}</tr>'


def _metrics_table(metrics: Mapping[str, Metric]) -> str:
    """A row for each metric; under a figure its interval."""
    ordered = [name for name in _FIRST if name in metrics] + [name for name in metrics if name not in _FIRST]
    table = _table(("mean or value", *_PERCENTILES), (_metric_row(name, metrics[name]) for name in ordered))
    below = '<p class="small">Under a figure: its 95 % interval, where there is one.</p>'
    return f"<section><h2>Figures</h2>{table}{below}</section>"


def _metric_row(name: str, metric: Metric) -> str:
    head = f'{escape(_words(name, metric.unit))} <span class="unit">{escape(metric.unit)}</span>'
    if metric.headline in ("value", "mean"):
        return _row(head, (_figure(metric, column) for column in (metric.headline, *_PERCENTILES)))
    # one value for each position, or for each kind
    named = metric.headline != "0"
    listed = " · ".join(f"{k} {short(v)}" if named else short(v) for k, v in metric.stats.items())
    return _row(head, (f'<td class="listed" colspan="{1 + len(_PERCENTILES)}">{escape(listed)}</td>',))


def _words(name: str, unit: str) -> str:
    return name.removesuffix(f"_{unit}").replace("_", " ")


def _figure(metric: Metric | None, column: str) -> str:
    if metric is None or column not in metric.stats:
        return "<td></td>"
    interval = metric.intervals.get(column)
    under = f'<span class="interval">{short(interval[0])} – {short(interval[1])}</span>' if interval else ""
    return f"<td>{short(metric.stats[column])}{under}</td>"


def _cells_table(results: Sequence[Result], names: Sequence[str]) -> str:
    """A row for each of several results; those that do not count are struck through."""
    shown = {name: r.metrics[name].unit for name in _CELL_METRICS for r in results if name in r.metrics}
    heads = [f'{escape(_words(name, unit))} <span class="unit">{escape(unit)}</span>' for name, unit in shown.items()]
    rows = []
    for r, name in zip(results, names, strict=True):
        mark = "" if r.valid else ' <span class="badge-small">✗ invalid</span>'
        cells = (_figure(m, m.headline) if (m := r.metrics.get(metric)) else "<td></td>" for metric in shown)
        rows.append(_row(escape(name) + mark, cells, "" if r.valid else "invalid"))
    return f"<section><h2>Every result</h2>{_table(heads, rows)}</section>"


def _matrix(results: Sequence[Result]) -> Iterator[str]:
    """Output tokens a second by concurrency and context, darker where there are more; hatched where invalid."""
    cells = {(c, context): r for r in results for c, context in [place(r.load)] if c is not None}
    rows, columns = sorted({c for c, _ in cells}), sorted({context for _, context in cells})
    most = max((rate for r in cells.values() if r.valid and (rate := _rate(r)) is not None), default=None)
    if len(rows) < 2 or len(columns) < 2 or most is None:
        return
    caption = "rows: requests at once; columns: tokens of context; hatched cells do not count"
    heads = [f"{context:,g}" for context in columns]
    lines = (_row(f"{c:g}", (_heat(cells.get((c, context)), most) for context in columns)) for c in rows)
    yield f"<section><h2>Output tokens a second</h2>{_table(heads, lines, caption, 'matrix')}</section>"


def _heat(result: Result | None, most: float) -> str:
    rate = None if result is None else _rate(result)
    if result is None or rate is None:
        return '<td class="none">–</td>'
    if not result.valid:
        return f'<td class="void"><s>{short(rate)}</s> ✗</td>'
    return f'<td class="heat" style="--heat:{rate / most:.3f}">{short(rate)}</td>'


def _rate(result: Result) -> float | None:
    return next((result.metrics[name].value for name in RATES if name in result.metrics), None)


def _verdicts(comparisons: Sequence["Comparison"]) -> str:
    rows = []
    for c in comparisons:
        better = {True: ("good", " (better)"), False: ("bad", " (worse)"), None: ("note", "")}[c.verdict.better]
        badge = f'<span class="badge {better[0]}">{c.verdict.word}{better[1]}</span>'
        notes = "".join(f"<li>{escape(note)}</li>" for note in c.notes)
        why = f"{escape(c.verdict.reason)}{f'<ul>{notes}</ul>' if notes else ''}"
        means = (f"<td>{short(mean)}</td>" for mean in (c.base_mean, c.arm_mean))
        name = f"{c.series.metric}" if len({x.series.arm_name for x in comparisons}) == 1 else _whose(c)
        rows.append(_row(escape(name), (f"<td>{badge}</td>", *means, f'<td class="listed">{why}</td>')))
    s = comparisons[0].series
    heads = ("verdict", escape(s.base_name), escape(s.arm_name), '<span class="listed">why</span>')
    return f"<section><h2>Verdict</h2>{_table(heads, rows, kind='verdicts')}</section>"


def _whose(comparison: "Comparison") -> str:
    return f"{comparison.series.metric}, {comparison.series.arm_name}"


def _chart(chart: Chart) -> str:
    keys = "".join(
        f'<li><svg class="key" viewBox="0 0 28 10" aria-hidden="true"><path class="line s{i % SERIES}" d="M0 5H28"/>'
        f"</svg>{escape(name)}</li>"
        for i, name in enumerate(chart.legend)
    )
    legend = f'<ul class="legend">{keys}</ul>' if len(chart.legend) > 1 else ""
    return (
        f'<figure id="{escape(chart.id)}">{legend}{chart.svg}<figcaption>{escape(chart.caption)}</figcaption></figure>'
    )


def _wrong_items(items: Sequence[Item], name: str) -> str:
    wrong = [item for item in items if not item.correct]
    if not wrong:
        return ""
    rows = (
        _row(
            escape(i.id),
            (
                f'<td class="listed">{escape(i.expected or "")}</td>',
                f'<td class="listed">{escape(i.answer or i.error or "no answer")}{" (loops)" if i.looped else ""}</td>',
            ),
        )
        for i in wrong[:_WRONG_ITEMS]
    )
    table = _table(('<span class="listed">expected</span>', '<span class="listed">answered</span>'), rows)
    return (
        f"<details><summary>{len(wrong)} of {len(items)} answers are wrong ({escape(name)})</summary>{table}</details>"
    )


def _load(result: Result, name: str) -> str:
    told = (*result.load.items(), *result.target.config.items())
    rows = (_row(escape(key), (f'<td class="listed">{escape(str(value))}</td>',)) for key, value in told)
    return f"<details><summary>Load and configuration ({escape(name)})</summary>{_table((), rows)}</details>"


_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_STYLE = (Path(__file__).with_name("page.css")).read_text(encoding="utf-8")
