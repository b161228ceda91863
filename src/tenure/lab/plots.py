"""Line charts, drawn twice from one description: in characters for a terminal, as SVG for a file or a page."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

COLOURS = ("#2563eb", "#d97706", "#059669", "#dc2626", "#7c3aed", "#0891b2")
DARK = ("#60a5fa", "#fbbf24", "#34d399", "#f87171", "#a78bfa", "#22d3ee")
TERMINAL = ("34", "33", "32", "31", "35", "36")
MARKS = "●▲■◆✚✖"
STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#1f2937}.title{font-size:15px;font-weight:600}.axis{fill:#6b7280}"
    ".grid{stroke:#e5e7eb}.line{fill:none;stroke-width:2.2;stroke-linejoin:round}"
    + "".join(f".s{i}{{stroke:{c}}}.f{i}{{fill:{c}}}" for i, c in enumerate(COLOURS))
    + "@media (prefers-color-scheme: dark){text{fill:#e5e7eb}.axis{fill:#9ca3af}.grid{stroke:#374151}"
    + "".join(f".s{i}{{stroke:{c}}}.f{i}{{fill:{c}}}" for i, c in enumerate(DARK))
    + "}"
)
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 360, 76, 150, 44, 52


@dataclass(frozen=True, slots=True)
class Series:
    """Points (x, y) in the order of x; on a logarithmic axis what is not above zero is left out."""

    name: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Axis:
    """From `low` to `high`, drawn on 0 to 1."""

    label: str
    low: float
    high: float
    log: bool

    @staticmethod
    def over(label: str, values: Sequence[float], *, log: bool) -> Axis:
        """Just wide enough; a linear one begins at zero."""
        if not values:
            return Axis(label, 1.0, 10.0, log)
        low, high = (min(values), max(values)) if log else (min(0.0, *values), max(values))
        if high <= low:
            high = low * 2 if log else low + 1
        return Axis(label, low, high, log)

    def place(self, value: float) -> float:
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        """Round numbers along it."""
        if self.log:
            base = 2.0 if self.high / self.low < 1000 else 10.0
            first = math.ceil(round(math.log(self.low, base), 6))
            last = math.floor(round(math.log(self.high, base), 6))
            every = max(1, -(-(last - first + 1) // 9))
            return [base**n for n in range(first, last + 1, every)]
        step: float = 10.0 ** math.floor(math.log10((self.high - self.low) / 4))
        step *= next(n for n in (1, 2, 5, 10) if (self.high - self.low) / (n * step) <= 6)
        first = math.ceil(self.low / step)
        return [n * step for n in range(first, math.floor(self.high / step + 1e-9) + 1)]


@dataclass(frozen=True, slots=True)
class Chart:
    """What is drawn. `told` says in a sentence what is to be seen, for those who cannot see it."""

    title: str
    told: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    log_x: bool = False
    log_y: bool = False

    def axes(self) -> tuple[Axis, Axis]:
        points = [point for series in self.series for point in self.drawn(series)]
        x = Axis.over(self.x_label, [x for x, _ in points], log=self.log_x)
        return x, Axis.over(self.y_label, [y for _, y in points], log=self.log_y)

    def drawn(self, series: Series) -> list[tuple[float, float]]:
        return [(x, y) for x, y in series.points if (x > 0 or not self.log_x) and (y > 0 or not self.log_y)]


def short(value: float) -> str:
    """For an axis: 8k, 1.5M, 0.02."""
    for size, unit in ((2**20, "Mi"), (2**10, "k")):
        if value >= size and value % size == 0:
            return f"{value / size:g}{unit}"
    for scale, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= scale:
            return f"{value / scale:.3g}{unit}"
    return f"{value:.3g}"


def terminal(chart: Chart, *, width: int = 64, height: int = 15, colour: bool = False) -> str:
    """The chart in characters, `width` × `height` of them and the axes around."""
    x_axis, y_axis = chart.axes()
    cells: dict[tuple[int, int], int] = {}
    for index, series in enumerate(chart.series):
        for column, row in _trace(chart.drawn(series), x_axis, y_axis, (width, height)):
            cells.setdefault((column, row), index)

    def painted(index: int, mark: str) -> str:
        return f"\033[{TERMINAL[index % len(TERMINAL)]}m{mark}\033[0m" if colour else mark

    labels = {round(y_axis.place(tick) * (height - 1)): short(tick) for tick in y_axis.ticks()}
    lines = [f"{chart.title}  ({chart.y_label})"]
    for row in reversed(range(height)):
        drawn = (
            painted(cells[column, row], MARKS[cells[column, row] % len(MARKS)]) if (column, row) in cells else " "
            for column in range(width)
        )
        lines.append(f"{labels.get(row, ''):>8} {'┤' if row in labels else '│'}{''.join(drawn).rstrip()}")
    ruler, names = ["─"] * width, [" "] * (width + 8)
    for tick in x_axis.ticks():
        at, label = round(x_axis.place(tick) * (width - 1)), short(tick)
        if all(mark == " " for mark in names[max(0, at - 1) : at + len(label) + 1]):
            ruler[at] = "┬"
            names[at : at + len(label)] = label
    lines.append(f"{'':>8} └{''.join(ruler)}")
    lines.append(f"{'':>9} {''.join(names).rstrip()}  {chart.x_label}")
    legend = "   ".join(f"{painted(i, MARKS[i % len(MARKS)])} {s.name}" for i, s in enumerate(chart.series))
    return "\n".join([*lines, f"{'':>9} {legend}"])


def _trace(
    points: Sequence[tuple[float, float]], x_axis: Axis, y_axis: Axis, size: tuple[int, int]
) -> Iterator[tuple[int, int]]:
    """The cells that a line through the points crosses."""
    scaled = [(x_axis.place(x) * (size[0] - 1), y_axis.place(y) * (size[1] - 1)) for x, y in points]
    for (x0, y0), (x1, y1) in zip(scaled, scaled[1:] or scaled, strict=False):
        steps = max(1, round(abs(x1 - x0)))
        for n in range(steps + 1):
            yield round(x0 + (x1 - x0) * n / steps), round(y0 + (y1 - y0) * n / steps)


def svg(chart: Chart) -> str:
    """The chart as an SVG element that needs nothing beside it and follows the reader's light or dark."""
    x_axis, y_axis = chart.axes()
    width, height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def at(x: float, y: float) -> tuple[float, float]:
        return LEFT + x_axis.place(x) * width, TOP + (1 - y_axis.place(y)) * height

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        f"<title>{escape(chart.title)}</title><desc>{escape(chart.told)}</desc><style>{STYLE}</style>",
        f'<text class="title" x="{LEFT}" y="22">{escape(chart.title)}</text>',
    ]
    for tick in y_axis.ticks():
        y = TOP + (1 - y_axis.place(tick)) * height
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{LEFT + width}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="axis" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{short(tick)}</text>')
    for tick in x_axis.ticks():
        x = LEFT + x_axis.place(tick) * width
        parts.append(f'<line class="grid" y1="{TOP}" y2="{TOP + height}" x1="{x:.1f}" x2="{x:.1f}"/>')
        parts.append(
            f'<text class="axis" x="{x:.1f}" y="{TOP + height + 18}" text-anchor="middle">{short(tick)}</text>'
        )
    middle = f'x="{LEFT + width / 2:.0f}" y="{HEIGHT - 10}" text-anchor="middle"'
    parts.append(f'<text class="axis" {middle}>{escape(chart.x_label)}</text>')
    upright = f'transform="translate(16 {TOP + height / 2:.0f}) rotate(-90)" x="0" y="0" text-anchor="middle"'
    parts.append(f'<text class="axis" {upright}>{escape(chart.y_label)}</text>')
    for index, series in enumerate(chart.series):
        colour, points = index % len(COLOURS), [at(x, y) for x, y in chart.drawn(series)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline class="line s{colour}" points="{path}"/>')
        radius = 3 if len(points) > 1 else 5
        parts += [f'<circle class="f{colour}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}"/>' for x, y in points]
        y = TOP + 10 + 20 * index
        parts.append(f'<rect class="f{colour}" x="{LEFT + width + 14}" y="{y - 9}" width="12" height="12" rx="3"/>')
        parts.append(f'<text x="{LEFT + width + 32}" y="{y + 2}">{escape(series.name)}</text>')
    return "".join([*parts, "</svg>"])
