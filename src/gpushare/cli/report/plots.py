"""Plots as SVG in HTML: drawings stretch with the page, labels stay readable, colours follow its theme."""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray

_WIDTH: Final = 1000
_HEIGHT: Final = 300
_MOST_POINTS: Final = 500  # most points of a line; screens have few more columns


class Ink(StrEnum):
    """Colours of lines, defined by the page's style."""

    ONE = "one"
    TWO = "two"
    THREE = "three"
    FOUR = "four"
    OTHER = "other"


_BOLD: Final = 2.4
_WIDTHS: Final = {Ink.OTHER: 1.2}


@dataclass(frozen=True, slots=True)
class PlotLine:
    """One line, interrupted by NaN. Lines in `Ink.OTHER` are thin and share an entry of the legend."""

    name: str
    x: NDArray[np.float64]
    y: NDArray[np.float64]
    ink: Ink
    is_step: bool = False


@dataclass(frozen=True, slots=True)
class Spread:
    """One row of a plot of distributions: five quantiles in ascending order."""

    name: str
    quantiles: tuple[float, float, float, float, float]
    ink: Ink


@dataclass(frozen=True, slots=True)
class PlotAxis:
    """Range of an axis; ticks are (value, label)."""

    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    is_log: bool = False

    def part(self, value: float) -> float:
        """Return the position of a value, 0 at the low end and 1 at the high end."""
        low, high, at = (math.log(v) if self.is_log else v for v in (self.low, self.high, value))
        return (at - low) / (high - low) if high > low else 0.5


def linear(low: float, high: float, form: str = "{:g}") -> PlotAxis:
    """Return an axis with about five round ticks that includes both ends."""
    if not high > low:
        high = low + 1
    raw = (high - low) / 5
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = tuple((step * n, form.format(round(step * n, 10))) for n in range(first, last + 1))
    return PlotAxis(step * first, step * last, ticks)


def logarithmic(low: float, high: float) -> PlotAxis:
    """Return a logarithmic axis with ticks at 1, 2 and 5 of each decade."""
    low, high = max(low, 1e-9), max(high, low * 1.01, 1e-9)
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    all_ticks = [m * 10.0**n for n in range(first, last + 1) for m in (1, 2, 5)]
    ticks = [t for t in all_ticks if low <= t <= high]
    if len(ticks) > 8:
        ticks = [t for t in ticks if math.isclose(math.log10(t) % 1, 0, abs_tol=1e-9)]
    return PlotAxis(low, high, tuple((t, f"{t:g}") for t in ticks), is_log=True)


def line_plot(
    title: str, lines: Sequence[PlotLine], x: PlotAxis, y: PlotAxis, *, x_label: str, y_label: str
) -> str:
    """Render a figure of lines with its legend."""
    ordered = [line for line in lines if line.ink is Ink.OTHER] + [
        line for line in lines if line.ink is not Ink.OTHER
    ]
    paths = "".join(
        f'<path class="{line.ink}" stroke-width="{_WIDTHS.get(line.ink, _BOLD)}" d="{_path(line, x, y)}"/>'
        for line in ordered
    )
    return _figure(title, _drawing(title, paths, x, y), _legend(lines), f"{y_label}; {x_label}")


def spread_plot(title: str, spreads: Sequence[Spread], x: PlotAxis, *, x_label: str) -> str:
    """Render a figure with one row per distribution: a thin line from p5 to p95, a bar from p25 to p75."""
    row = _HEIGHT / max(len(spreads), 1)
    shapes = []
    for index, spread in enumerate(spreads):
        middle = row * (index + 0.5)
        ends = [_WIDTH * min(max(x.part(value), 0.0), 1.0) for value in spread.quantiles]
        shapes.append(
            f'<path class="{spread.ink}" stroke-width="1.5" d="M{ends[0]:.1f} {middle:.1f}H{ends[4]:.1f}"/>'
        )
        width = max(ends[3] - ends[1], 3)
        shapes.append(
            f'<rect class="{spread.ink}" x="{ends[1]:.1f}" y="{middle - row * 0.28:.1f}" width="{width:.1f}" '
            f'height="{row * 0.56:.1f}"/>'
        )
        shapes.append(
            f'<path class="gap" stroke-width="3" d="M{ends[2]:.1f} {middle - row * 0.28:.1f}v{row * 0.56:.1f}"/>'
        )
    count = len(spreads)
    names = PlotAxis(0, count, tuple((count - index - 0.5, one.name) for index, one in enumerate(spreads)))
    drawing = _drawing(title, "".join(shapes), x, names, rows=count)
    return _figure(title, drawing, "", f"{x_label}; line: p5 to p95, bar: p25 to p75, gap: median")


def _path(line: PlotLine, x: PlotAxis, y: PlotAxis) -> str:
    xs, ys = thinned(line.x, line.y)
    parts: list[str] = []
    is_down, before = False, 0.0
    for at, value in zip(xs, ys, strict=True):
        if not (math.isfinite(at) and math.isfinite(value)):
            is_down = False
            continue
        across = _WIDTH * min(max(x.part(at), 0.0), 1.0)
        up = _HEIGHT * (1 - min(max(y.part(max(value, y.low)), 0.0), 1.0))
        if not is_down:
            parts.append(f"M{across:.1f} {up:.1f}")
        elif line.is_step:
            parts.append(f"H{across:.1f}V{up:.1f}" if up != before else f"H{across:.1f}")
        else:
            parts.append(f"L{across:.1f} {up:.1f}")
        is_down, before = True, up
    return "".join(parts)


def thinned(x: NDArray[np.float64], y: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return at most _MOST_POINTS points, evenly chosen, including the first and the last."""
    if len(x) <= _MOST_POINTS:
        return x, y
    chosen = np.unique(np.linspace(0, len(x) - 1, _MOST_POINTS).round().astype(int))
    return x[chosen], y[chosen]


def _drawing(title: str, shapes: str, x: PlotAxis, y: PlotAxis, rows: int = 0) -> str:
    grid = "".join(
        f'<path class="grid" d="M0 {_HEIGHT * (1 - y.part(value)):.1f}H{_WIDTH}"/>'
        for value, _ in y.ticks
        if not rows
    )
    up = "".join(
        f'<span style="bottom:{100 * y.part(value):.1f}%">{html.escape(label)}</span>' for value, label in y.ticks
    )
    across = "".join(
        f'<span{_edge(x.part(value))} style="left:{100 * x.part(value):.1f}%">{html.escape(label)}</span>'
        for value, label in x.ticks
    )
    style = f"grid-template-rows:{max(rows * 1.5, 4):.1f}rem auto" if rows else ""
    names = ' style="width:8rem"' if rows else ""
    return (
        f'<div class="plot" style="{style}"><div class="y"{names} aria-hidden="true">{up}</div>'
        f'<svg role="img" aria-label="{html.escape(title)}" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'preserveAspectRatio="none">{grid}{shapes}</svg><div class="x" aria-hidden="true">{across}</div></div>'
    )


def _edge(part: float) -> str:
    return ' class="first"' if part < 0.04 else ' class="last"' if part > 0.96 else ""


def _legend(lines: Sequence[PlotLine]) -> str:
    entries: list[tuple[Ink, str]] = [(line.ink, line.name) for line in lines if line.ink is not Ink.OTHER]
    if others := [line.name for line in lines if line.ink is Ink.OTHER]:
        entries.append((Ink.OTHER, f"others: {', '.join(others)}"))
    return (
        '<ul class="legend">'
        + "".join(f'<li><i class="{ink}"></i>{html.escape(name)}</li>' for ink, name in entries)
        + "</ul>"
    )


def _figure(title: str, drawing: str, legend: str, labels: str) -> str:
    caption = f"<strong>{html.escape(title)}</strong> ({html.escape(labels)})"
    return f"<figure><figcaption>{caption}</figcaption>{drawing}{legend}</figure>"
