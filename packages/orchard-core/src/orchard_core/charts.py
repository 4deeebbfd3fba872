"""Small line and bar charts as inline SVG, readable on light and dark ground."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

MOST_POINTS = 400
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 240, 64, 12, 16, 32
COLOURS = ("#3b82f6", "#f97316", "#10b981", "#a855f7")


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """A named line of (x, y) points."""

    name: str
    points: Sequence[tuple[float, float]]


def _ticks(low: float, high: float, *, whole: bool = False) -> list[float]:
    """Three to seven round numbers between low and high."""
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    if whole:
        step = max(step, 1.0)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def _apart(low: float, high: float) -> float:
    """The upper end of an axis, moved up where floats could not tell values between its ends."""
    return high if high - low > max(1e-9 * max(abs(low), abs(high)), 1e-300) else low + (abs(low) or 1.0)


def _thin(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Finite points, evenly thinned out to what a chart can show; the last stays."""
    finite = [point for point in points if math.isfinite(point[1])]
    stride = -(-len(finite) // MOST_POINTS) or 1
    return finite[::-1][::stride][::-1]


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def line_chart(
    title: str, series: Sequence[Series], *, x_label: str, low: float | None = None, high: float | None = None
) -> str:
    """One or more lines over a common axis; each point tells its value when pointed at. Empty without points."""
    series = [Series(name=each.name, points=_thin(each.points)) for each in series]
    points = [point for each in series for point in each.points]
    if not points:
        return ""
    xs, ys = [p[0] for p in points], [p[1] for p in points]
    x0, x1 = min(xs), max(xs)
    y0 = min(ys) if low is None else min(low, *ys)
    y1 = max(ys) if high is None else max(high, *ys)
    x1, y1 = _apart(x0, x1), _apart(y0, y1)

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            LEFT + (x - x0) / (x1 - x0) * (WIDTH - LEFT - RIGHT),
            HEIGHT - BOTTOM - (y - y0) / (y1 - y0) * (HEIGHT - TOP - BOTTOM),
        )

    parts = [_open(title)]
    for tick in _ticks(y0, y1):
        _, y = place(x0, tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="axis" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_number(tick)}</text>')
    for tick in _ticks(x0, x1, whole=True):
        x, _ = place(tick, y0)
        parts.append(f'<text class="axis" x="{x:.1f}" y="{HEIGHT - 14}" text-anchor="middle">{_number(tick)}</text>')
    parts.append(f'<text class="axis" x="{WIDTH - RIGHT}" y="{HEIGHT - 2}" text-anchor="end">{escape(x_label)}</text>')
    for number, each in enumerate(series):
        colour = COLOURS[number % len(COLOURS)]
        placed = [place(x, y) for x, y in each.points]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{line}"/>')
        for (x, y), (value_x, value_y) in zip(placed, each.points, strict=True):
            told = escape(f"{each.name}: {_number(value_y)} at {_number(value_x)}")
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"><title>{told}</title></circle>')
        parts.append(
            f'<text class="name" x="{LEFT + 8 + 130 * number}" y="{TOP - 4}" fill="{colour}">{escape(each.name)}</text>'
        )
    return "".join([*parts, "</svg>"])


def bar_chart(title: str, bars: Sequence[tuple[str, float, tuple[float, float] | None]]) -> str:
    """Shares between 0 and 1 with their confidence intervals. Empty without bars."""
    if not bars:
        return ""
    parts = [_open(title)]
    inner = HEIGHT - TOP - BOTTOM
    for tick in _ticks(0, 1):
        y = HEIGHT - BOTTOM - tick * inner
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="axis" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_number(tick)}</text>')
    step = (WIDTH - LEFT - RIGHT) / len(bars)
    for number, (name, value, interval) in enumerate(bars):
        x, width = LEFT + step * (number + 0.25), step * 0.5
        y = HEIGHT - BOTTOM - value * inner
        told = escape(f"{name}: {value:.3f}" + (f" ({interval[0]:.3f} to {interval[1]:.3f})" if interval else ""))
        parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{max(value * inner, 1):.1f}" '
            f'fill="{COLOURS[0]}"><title>{told}</title></rect>'
        )
        if interval:
            top, bottom = (HEIGHT - BOTTOM - each * inner for each in reversed(interval))
            middle = x + width / 2
            parts.append(
                f'<line class="whisker" x1="{middle:.1f}" x2="{middle:.1f}" y1="{top:.1f}" y2="{bottom:.1f}"/>'
            )
        parts.append(
            f'<text class="value" x="{x + width / 2 + 6:.1f}" y="{y - 5:.1f}">{value:.2f}</text>'
            f'<text class="axis" x="{x + width / 2:.1f}" y="{HEIGHT - 12}" text-anchor="middle">{escape(name)}</text>'
        )
    return "".join([*parts, "</svg>"])


def _open(title: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}"><title>{escape(title)}</title>'
