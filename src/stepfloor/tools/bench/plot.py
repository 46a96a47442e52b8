"""Plots as SVG: two axes and what is drawn between them. Colours are classes of the page's style.

Every mark carries a <title>, which browsers show under the pointer and screen readers speak; series differ in their
dashes and marks as well as in colour.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise

WIDTH, HEIGHT = 640, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 18, 28, 44
SERIES = 6
_GOOD_STEPS = (1, 2, 5, 10)


@dataclass(frozen=True, slots=True)
class Axis:
    """A scale from low to high.

    ticks  values and their labels; without them round numbers are chosen, whole ones where whole is said
    """

    label: str
    low: float
    high: float
    log: bool = False
    ticks: tuple[tuple[float, str], ...] = ()
    whole: bool = False

    @classmethod
    def around(
        cls, label: str, values: Iterable[float], *, zero: bool = True, log: bool = False, whole: bool = False
    ) -> "Axis":
        """An axis that holds all values with a little room; zero  whether it begins there."""
        finite = [v for v in values if math.isfinite(v)] or [0.0, 1.0]
        low, high = min(finite), max(finite)
        if log and low > 0:
            return cls(label, low / 1.15, max(high * 1.15, low * 1.5), log=True)
        low, high = (min(low, 0.0), max(high, 0.0)) if zero else (low, high)
        room = 0.06 * (high - low or abs(high) or 1.0)
        return cls(label, low if low == 0 else low - room, high if high == 0 else high + room, whole=whole)

    def share(self, value: float) -> float:
        """Where a value lies: 0 at low, 1 at high."""
        if self.log:
            return math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        return (value - self.low) / ((self.high - self.low) or 1.0)

    def marks(self) -> tuple[tuple[float, str], ...]:
        """Ticks inside the axis."""
        if self.ticks:
            return self.ticks
        if self.log:
            return tuple((v, f"{v:,g}") for v in _log_ticks(self.low, self.high))
        values, step = _ticks(self.low, self.high, self.whole)
        digits = max(0, -math.floor(math.log10(step) + 1e-9))
        return tuple((v, f"{v:,.{digits}f}") for v in values)


@dataclass(slots=True)
class Plot:
    """Marks between two axes; svg() draws them in the order they were added."""

    name: str
    description: str
    x: Axis
    y: Axis
    height: int = HEIGHT
    _marks: list[str] = field(default_factory=list)

    def line(self, points: Sequence[tuple[float, float]], series: int, title: str, *, step: bool = False) -> None:
        """Through the points; step  level until the next point."""
        if not points:
            return
        path = [f"M{self._at(*points[0])}"]
        for (_, before), (px, py) in pairwise(points):
            path += ([f"L{self._at(px, before)}"] if step else []) + [f"L{self._at(px, py)}"]
        self._marks.append(f'<path class="line s{series % SERIES}" d="{"".join(path)}">{_title(title)}</path>')

    def area(self, points: Sequence[tuple[float, float]], series: int) -> None:
        """A pale ground under a stepped line, down to the axis."""
        if len(points) < 2:
            return
        base = max(self.y.low, 0.0)
        path = [f"M{self._at(points[0][0], base)}", f"L{self._at(*points[0])}"]
        for (_, before), (px, py) in pairwise(points):
            path += [f"L{self._at(px, before)}", f"L{self._at(px, py)}"]
        path.append(f"L{self._at(points[-1][0], base)}Z")
        self._marks.append(f'<path class="area s{series % SERIES}" d="{"".join(path)}"/>')

    def dot(self, px: float, py: float, series: int, title: str, *, hollow: bool = False) -> None:
        """A mark at a point; hollow  one that does not count."""
        at = self._at(px, py).split(" ")
        kind = f"dot s{series % SERIES}{' hollow' if hollow else ''}"
        self._marks.append(f'<circle class="{kind}" cx="{at[0]}" cy="{at[1]}" r="4">{_title(title)}</circle>')

    def span(self, px: float, low: float, high: float, series: int, title: str) -> None:
        """An upright interval with feet."""
        (cx, top), (_, end) = self._xy(px, high), self._xy(px, low)
        path = f"M{cx:.1f} {top:.1f}V{end:.1f}M{cx - 5:.1f} {top:.1f}h10M{cx - 5:.1f} {end:.1f}h10"
        self._marks.append(f'<path class="line s{series % SERIES} solid" d="{path}">{_title(title)}</path>')

    def bar(self, px: float, width: float, py: float, series: int, title: str) -> None:
        """An upright bar from zero; px is its middle, width in units of x."""
        (x0, top), (x1, base) = self._xy(px - width / 2, py), self._xy(px + width / 2, max(self.y.low, 0.0))
        box = f'x="{x0:.1f}" y="{min(top, base):.1f}" width="{x1 - x0:.1f}" height="{abs(base - top):.1f}"'
        self._marks.append(f'<rect class="bar s{series % SERIES}" {box}>{_title(title)}</rect>')

    def level(self, py: float, title: str, kind: str = "level") -> None:
        """A line across at one value."""
        y = self._xy(self.x.low, py)[1]
        self._marks.append(f'<path class="{kind}" d="M{_LEFT} {y:.1f}H{WIDTH - _RIGHT}">{_title(title)}</path>')

    def band(self, low: float, high: float, title: str) -> None:
        """A pale strip across between two values."""
        top, end = self._xy(0, min(high, self.y.high))[1], self._xy(0, max(low, self.y.low))[1]
        box = f'x="{_LEFT}" y="{top:.1f}" width="{WIDTH - _LEFT - _RIGHT}" height="{max(end - top, 0):.1f}"'
        self._marks.append(f'<rect class="band" {box}>{_title(title)}</rect>')

    def svg(self) -> str:
        """The plot as an <svg> element that scales with the page."""
        frame = f'<path class="axis" d="M{_LEFT} {_TOP}V{self.height - _BOTTOM}H{WIDTH - _RIGHT}"/>'
        return (
            f'<svg class="plot" role="img" viewBox="0 0 {WIDTH} {self.height}" aria-label="{escape(self.name)}: '
            f'{escape(self.description)}">{"".join(self._axes())}{frame}{"".join(self._marks)}</svg>'
        )

    def _axes(self) -> Iterable[str]:
        bottom, right = self.height - _BOTTOM, WIDTH - _RIGHT
        for value, label in self.y.marks():
            y = self._xy(self.x.low, value)[1]
            yield f'<path class="grid" d="M{_LEFT} {y:.1f}H{right}"/>'
            yield f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{escape(label)}</text>'
        for value, label in self.x.marks():
            x = self._xy(value, self.y.low)[0]
            yield f'<path class="tick" d="M{x:.1f} {bottom}v5"/>'
            yield f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{escape(label)}</text>'
        yield f'<text class="label" x="{right}" y="{self.height - 6}" text-anchor="end">{escape(self.x.label)}</text>'
        yield f'<text class="label" x="{_LEFT - 8}" y="{_TOP - 14}">{escape(self.y.label)}</text>'

    def _xy(self, px: float, py: float) -> tuple[float, float]:
        x = _LEFT + self.x.share(px) * (WIDTH - _LEFT - _RIGHT)
        return x, self.height - _BOTTOM - self.y.share(py) * (self.height - _BOTTOM - _TOP)

    def _at(self, px: float, py: float) -> str:
        x, y = self._xy(px, py)
        return f"{x:.1f} {y:.1f}"


def short(value: float) -> str:
    """A number as a table shows it: three digits that count, thousands grouped.

    >>> short(0.01234), short(12.3), short(30), short(1234.5), short(0)
    ('0.0123', '12.3', '30.0', '1,234', '0')
    """
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    return f"{value:,.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


def _ticks(low: float, high: float, whole: bool = False) -> tuple[list[float], float]:
    rough = (high - low) / 5 or 1.0
    power = 10 ** math.floor(math.log10(rough))
    step = next(good * power for good in _GOOD_STEPS if good * power >= rough * 0.999)
    step = max(step, 1.0) if whole else step
    return [i * step for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)], step


def _log_ticks(low: float, high: float) -> list[float]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if high / low < 1000 else (1,)
    found = [s * 10.0**p for p in powers for s in steps if low <= s * 10.0**p <= high]
    return found if len(found) >= 2 else _ticks(low, high)[0]


def _title(text: str) -> str:
    return f"<title>{escape(text)}</title>"
