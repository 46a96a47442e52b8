"""Bars: in the terminal as text, in a file as SVG."""

from html import escape

_EIGHTHS = " ▏▎▍▌▋▊▉"
# distinguishable with the usual kinds of colour blindness (Okabe and Ito), then greys
_COLOURS = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#CC79A7",
    "#56B4E9",
    "#D55E00",
    "#F0E442",
    "#999999",
    "#666666",
    "#333333",
)
_WIDTH, _LEFT, _BAR, _GAP, _LINE = 960, 20, 34, 30, 20


def bar(share: float, width: int) -> str:
    """A bar of `width` characters for a share of 1, in eighths of a character."""
    eighths = round(max(0.0, min(share, 1.0)) * width * 8)
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def svg_bars(title: str, bars: list[tuple[str, list[tuple[str, float]]]], unit: str) -> str:
    """Stacked horizontal bars on one scale, with a legend of every part that has at least 1 % of the longest bar.

    bars  (label, parts from the left: (name, value))
    """
    names = list(dict.fromkeys(name for _, parts in bars for name, _ in parts))
    longest = max(sum(value for _, value in parts) for _, parts in bars)
    scale = (_WIDTH - 2 * _LEFT) / longest
    shown = [
        n for n in names if any(value >= 0.01 * longest for _, parts in bars for name, value in parts if name == n)
    ]
    colour = {name: _COLOURS[min(i, len(_COLOURS) - 1)] for i, name in enumerate(names)}
    drawn = [_text(_LEFT, 28, title, 16)]
    y = 50
    for label, parts in bars:
        drawn.append(_text(_LEFT, y + 12, label, 13))
        y += _GAP - 10
        x = float(_LEFT)
        for name, value in parts:
            width = value * scale
            drawn.append(
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_BAR}" fill="{colour[name]}" stroke="white">'
                f"<title>{escape(name)}: {value:.3f} {unit}</title></rect>"
            )
            x += width
        y += _BAR + _GAP - 10
    for i, name in enumerate(shown):
        column, row = i % 3, i // 3
        left, top = _LEFT + column * 310, y + row * _LINE
        values = ", ".join(f"{dict(parts).get(name, 0.0):.2f}" for _, parts in bars)
        drawn.append(f'<rect x="{left}" y="{top}" width="12" height="12" fill="{colour[name]}"/>')
        drawn.append(_text(left + 18, top + 11, f"{name} {values} {unit}", 12))
    height = y + -(-len(shown) // 3) * _LINE + 16
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif">\n'
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>\n' + "\n".join(drawn) + "\n</svg>\n"
    )


def _text(x: int, y: int, text: str, size: int) -> str:
    return f'<text x="{x}" y="{y}" font-size="{size}" fill="#111111">{escape(text)}</text>'
