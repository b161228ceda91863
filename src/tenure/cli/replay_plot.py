"""One plot: hit rate against the size of the cache, as SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape

WIDTH, HEIGHT = 720, 420
LEFT, RIGHT, TOP, BOTTOM = 64, 150, 48, 52
COLOURS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2")
Line = Sequence[tuple[float, float]]
"""Shares of the unique blocks, and hit rates; both 0 to 1."""


def svg(title: str, lines: Mapping[str, Line], infinite: float) -> str:
    """Each line under its name, and the rate of a cache that never forgets as a dashed one. Shares are logarithmic."""
    shares = sorted({share for line in lines.values() for share, _ in line if share > 0}) or [1.0]
    top = max([infinite, *(rate for line in lines.values() for _, rate in line)], default=1.0) * 1.08 or 1.0
    low, high = math.log(shares[0]), math.log(shares[-1])

    def x(share: float) -> float:
        along = (math.log(share) - low) / (high - low) if high > low else 0.5
        return LEFT + along * (WIDTH - LEFT - RIGHT)

    def y(rate: float) -> float:
        return HEIGHT - BOTTOM - rate / top * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="24" font-size="15">{escape(title)}: prompt tokens found in the cache</text>',
        *_grid(shares, top, x, y),
    ]
    right = WIDTH - RIGHT
    labels = [(y(infinite), "infinite cache", "#6b7280")]
    parts.append(_path([(LEFT, y(infinite)), (right, y(infinite))], "#6b7280", dashed=True))
    for (name, line), colour in zip(lines.items(), COLOURS * (1 + len(lines) // len(COLOURS)), strict=False):
        points = [(x(share), y(rate)) for share, rate in sorted(line) if share > 0]
        if points:
            parts.append(_path(points, colour))
            parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{colour}"/>' for a, b in points]
            labels.append((points[-1][1], name, colour))
    last = -math.inf
    for at, name, colour in sorted(labels):
        last = max(at, last + 15)  # names of lines that end together stand below each other
        parts.append(f'<text x="{right + 8}" y="{last + 4:.1f}" fill="{colour}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _grid(shares: Sequence[float], top: float, x: Callable[[float], float], y: Callable[[float], float]) -> list[str]:
    """Axes, with a mark for each share that was replayed."""
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    step = 0.1 if top > 0.3 else 0.05 if top > 0.1 else 0.01
    parts = []
    for at in range(int(top / step) + 1):
        rate = at * step
        parts.append(_path([(LEFT, y(rate)), (right, y(rate))], "#e5e7eb"))
        parts.append(f'<text x="{LEFT - 8}" y="{y(rate) + 4:.1f}" text-anchor="end">{rate:.0%}</text>')
    for share in shares:
        parts.append(f'<text x="{x(share):.1f}" y="{bottom + 18}" text-anchor="middle">{100 * share:.3g}%</text>')
    middle = (LEFT + right) // 2
    parts.append(
        f'<text x="{middle}" y="{bottom + 38}" text-anchor="middle">size of the cache, of the unique blocks</text>'
    )
    return parts


def _path(points: Sequence[tuple[float, float]], colour: str, *, dashed: bool = False) -> str:
    along = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    return f'<polyline points="{along}" fill="none" stroke="{colour}" stroke-width="1.5"{dash}/>'
