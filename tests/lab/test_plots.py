"""Charts show their points, in characters and as SVG."""

from __future__ import annotations

from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from tenure.lab.plots import Axis, Chart, Series, short, svg, terminal
from tenure.lab.report import Section, page

NUMBERS = st.just(0.0) | st.floats(1e-6, 1e7)
POINTS = st.lists(st.tuples(NUMBERS, NUMBERS), max_size=8)
CHART = Chart("a < b", "told", "x", "y", (Series("one & two", ((1.0, 1.0), (8.0, 64.0))),), log_x=True, log_y=True)


@given(POINTS, POINTS, st.booleans(), st.booleans())
def test_whatever_is_drawn_stays_inside(
    a: list[tuple[float, float]], b: list[tuple[float, float]], x: bool, y: bool
) -> None:
    chart = Chart(
        "t", "told", "x", "y", (Series("a", tuple(sorted(a))), Series("b", tuple(sorted(b)))), log_x=x, log_y=y
    )
    lines = terminal(chart, width=40, height=8).splitlines()
    assert len(lines) == 8 + 4
    assert max(map(len, lines[1:9])) <= 50
    root = ElementTree.fromstring(svg(chart))
    for line in root.iter("{http://www.w3.org/2000/svg}circle"):
        assert 75 <= float(line.attrib["cx"]) <= 571
        assert 43 <= float(line.attrib["cy"]) <= 309


def test_corners_and_words() -> None:
    shown = terminal(CHART, width=20, height=5)
    rows = shown.splitlines()[1:6]
    assert rows[0].endswith("●")
    assert "●" in rows[-1][:12]
    assert "one & two" in shown
    assert "one &amp; two" in svg(CHART)
    assert "<title>a &lt; b</title>" in svg(CHART)


def test_ticks_are_round_and_few() -> None:
    assert Axis("x", 256, 8192, log=True).ticks() == [256, 512, 1024, 2048, 4096, 8192]
    assert Axis("x", 0, 97, log=False).ticks() == [0, 20, 40, 60, 80]
    assert len(Axis("x", 1e-3, 1e12, log=True).ticks()) <= 9
    assert [short(v) for v in (8192, 2**20, 1500, 0.02, 3e9)] == ["8k", "1Mi", "1.5k", "0.02", "3G"]


def test_a_page_needs_nothing_beside_it() -> None:
    made = page("T <1>", "lead", [Section("S", ("words",), (CHART,), (("a", "b"), ("1", "<2>")))])
    assert "<h2>S</h2>" in made
    assert "<td>&lt;2&gt;</td>" in made
    for outside in ("http://", "https://", "<script", "<link", "url("):
        assert outside not in made.replace("http://www.w3.org/2000/svg", "")
