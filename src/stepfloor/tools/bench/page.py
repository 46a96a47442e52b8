"""One HTML page of a measurement: who was asked what, whether it counts, the figures with intervals, and charts.

The page is one file without a script, a font or a link to anywhere. It follows the reader's light or dark setting, prints
on paper, and speaks: charts are images with a description, tables have headings. A result that does not count is marked
wherever it appears.
"""

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path

from stepfloor.errors import UserError
from stepfloor.tools.bench.charts import Chart, charts, label, place
from stepfloor.tools.bench.plot import SERIES, short
from stepfloor.tools.bench.result import Flag, Item, Metric, Result
from stepfloor.tools.bench.verdict import Comparison

_COLUMNS = ("value", "mean", "p50", "p90", "p95", "p99")
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
)
_WRONG_ITEMS = 200


def write_page(results: Sequence[Result], path: Path, comparisons: Sequence[Comparison] = ()) -> None:
    """Write the page of one result, of a matrix, or of an A/B run. Raises UserError if it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page(results, comparisons), encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; pass a path in a directory that is yours") from None


def page(results: Sequence[Result], comparisons: Sequence[Comparison] = ()) -> str:
    """The whole document. Raises ValueError without anything to show."""
    if not results and not comparisons:
        raise ValueError("a page wants at least one result or comparison")
    title = _title(results, comparisons)
    body = [*_header(title, results)]
    if comparisons:
        body.append(_verdicts(comparisons))
    if len(results) == 1:
        body.append(_metrics_table(results[0].metrics))
    elif results:
        body += _matrix(results)
        body.append(_cells_table(results))
    body.append(f'<section class="charts">{"".join(map(_figure, charts(results, comparisons)))}</section>')
    body += [wrong for result in results if (wrong := _wrong_items(result.items, label(result, results)))]
    body += [_load(result, label(result, results)) for result in results[:24]]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<style>{_STYLE}</style></head>\n<body><main>\n" + "\n".join(body) + "\n</main></body></html>\n"
    )


def _title(results: Sequence[Result], comparisons: Sequence[Comparison]) -> str:
    if comparisons:
        s = comparisons[0].series
        return f"{s.arm_name} against {s.base_name}"
    kind = "matrix" if len(results) > 1 else results[0].kind
    return f"{kind.capitalize()}: {results[0].target.model}"


def _header(title: str, results: Sequence[Result]) -> Iterator[str]:
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
    for result in results:
        for flag in result.flags:
            flags.setdefault(flag, []).append(label(result, results))
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


def _metrics_table(metrics: Mapping[str, Metric]) -> str:
    """A row for each metric; under a figure its interval."""
    ordered = [name for name in _FIRST if name in metrics] + [name for name in metrics if name not in _FIRST]
    rows = "".join(_metric_row(name, metrics[name]) for name in ordered)
    heads = "".join(f'<th scope="col">{column}</th>' for column in ("", "mean or value", *_COLUMNS[2:]))
    return (
        f'<section><h2>Figures</h2><div class="wide"><table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>'
        '</div><p class="small">Under a figure: its 95 % interval, where there is one.</p></section>'
    )


def _metric_row(name: str, metric: Metric) -> str:
    unit = "" if metric.unit in name.split("_") else f' <span class="unit">{escape(metric.unit)}</span>'
    head = (
        f'<th scope="row">{escape(name.removesuffix("_" + metric.unit).replace("_", " "))}{unit or _unit(metric)}</th>'
    )
    if not any(column in metric.stats for column in _COLUMNS):  # one value for each position
        listed = " · ".join(short(v) for v in metric.stats.values())
        return f'<tr>{head}<td colspan="{len(_COLUMNS) - 1}" class="listed">{listed}</td></tr>'
    first = "value" if "value" in metric.stats else "mean"
    return f"<tr>{head}{''.join(_figure_cell(metric, column) for column in (first, *_COLUMNS[2:]))}</tr>"


def _unit(metric: Metric) -> str:
    return f' <span class="unit">{escape(metric.unit)}</span>'


def _figure_cell(metric: Metric, column: str) -> str:
    if column not in metric.stats:
        return "<td></td>"
    interval = metric.intervals.get(column)
    under = f'<span class="interval">{short(interval[0])} – {short(interval[1])}</span>' if interval else ""
    return f"<td>{short(metric.stats[column])}{under}</td>"


def _cells_table(results: Sequence[Result]) -> str:
    """A row for each of several results; those that do not count are struck through."""
    shown = [name for name in _CELL_METRICS if any(name in r.metrics for r in results)]
    heads = "".join(
        f'<th scope="col">{escape(name.replace("_", " "))}</th>' for name in ("", *shown)
    )  # the unit stands in the name or in docs/bench.md
    rows = "".join(
        f'<tr class="{"" if r.valid else "invalid"}"><th scope="row">{escape(label(r, results))}'
        f"{'' if r.valid else ' <span class=badge-small>✗ invalid</span>'}</th>"
        + "".join(
            _figure_cell(r.metrics[name], r.metrics[name].headline) if name in r.metrics else "<td></td>"
            for name in shown
        )
        + "</tr>"
        for r in results
    )
    return (
        f'<section><h2>Every result</h2><div class="wide"><table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody>'
        "</table></div></section>"
    )


def _matrix(results: Sequence[Result]) -> Iterator[str]:
    """Output tokens a second by concurrency and context, darker where there are more; hatched where invalid."""
    cells: dict[tuple[float, float], Result] = {}
    for result in results:
        concurrency, context = place(result.load)
        if concurrency is not None:
            cells[concurrency, context] = result
    rows, columns = sorted({c for c, _ in cells}), sorted({ctx for _, ctx in cells})
    rates = {at: _rate(r) for at, r in cells.items()}
    known = [rate for at, rate in rates.items() if rate is not None and cells[at].valid]
    if len(cells) < 4 or len(rows) < 2 or len(columns) < 2 or not known:
        return
    most = max(known)
    heads = "".join(f'<th scope="col">{short(ctx)}</th>' for ctx in columns)
    lines = []
    for c in rows:
        line = [f'<th scope="row">{c:g}</th>']
        for ctx in columns:
            rate = rates.get((c, ctx))
            if rate is None:
                line.append('<td class="none">–</td>')
            elif not cells[c, ctx].valid:
                line.append(f'<td class="void" title="invalid"><s>{short(rate)}</s> ✗</td>')
            else:
                line.append(f'<td class="heat" style="--heat:{rate / most:.3f}">{short(rate)}</td>')
        lines.append(f"<tr>{''.join(line)}</tr>")
    yield (
        '<section><h2>Output tokens a second</h2><div class="wide"><table class="matrix"><caption>rows: requests at once; '
        f"columns: tokens of context; hatched cells do not count</caption><thead><tr><th></th>{heads}</tr></thead>"
        f"<tbody>{''.join(lines)}</tbody></table></div></section>"
    )


def _rate(result: Result) -> float | None:
    names = ("output_throughput", "sustained_throughput")
    return next((result.metrics[n].value for n in names if n in result.metrics), None)


def _verdicts(comparisons: Sequence[Comparison]) -> str:
    rows = []
    for c in comparisons:
        word = c.verdict.word
        kind = {True: "good", False: "bad", None: "note"}[c.verdict.better]
        better = {True: " (better)", False: " (worse)", None: ""}[c.verdict.better]
        notes = "".join(f"<li>{escape(note)}</li>" for note in c.notes)
        rows.append(
            f'<tr><th scope="row">{escape(c.series.metric)}</th><td><span class="badge {kind}">{word}{better}</span></td>'
            f"<td>{short(c.base_mean)}</td><td>{short(c.arm_mean)}</td>"
            f'<td class="listed">{escape(c.verdict.reason)}{f"<ul>{notes}</ul>" if notes else ""}</td></tr>'
        )
    s = comparisons[0].series
    heads = "".join(f'<th scope="col">{escape(head)}</th>' for head in ("", "verdict", s.base_name, s.arm_name))
    return (
        f'<section><h2>Verdict</h2><div class="wide"><table><thead><tr>{heads}<th scope="col" class="listed">why</th></tr>'
        f"</thead><tbody>{''.join(rows)}</tbody></table></div></section>"
    )


def _figure(chart: Chart) -> str:
    keys = "".join(
        f'<li><svg class="key" viewBox="0 0 28 10" aria-hidden="true"><path class="line s{i % SERIES}" d="M0 5H28"/></svg>'
        f"{escape(name)}</li>"
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
    rows = "".join(
        f'<tr><th scope="row">{escape(i.id)}</th><td class="listed">{escape(i.expected or "")}</td>'
        f'<td class="listed">{escape(i.answer or i.error or "no answer")}{" (loops)" if i.looped else ""}</td></tr>'
        for i in wrong[:_WRONG_ITEMS]
    )
    return (
        f"<details><summary>{len(wrong)} of {len(items)} answers are wrong ({escape(name)})</summary>"
        '<div class="wide"><table><thead><tr><th scope="col">item</th><th scope="col">expected</th>'
        f'<th scope="col">answered</th></tr></thead><tbody>{rows}</tbody></table></div></details>'
    )


def _load(result: Result, name: str) -> str:
    rows = "".join(
        f'<tr><th scope="row">{escape(str(key))}</th><td class="listed">{escape(str(value))}</td></tr>'
        for key, value in (*result.load.items(), *result.target.config.items())
    )
    return (
        f"<details><summary>Load and configuration ({escape(name)})</summary>"
        f'<div class="wide"><table><tbody>{rows}</tbody></table></div></details>'
    )


_STYLE = (Path(__file__).with_name("page.css")).read_text(encoding="utf-8")
