"""`tenure quality`: what each KV codec costs this model."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tenure.cli.compose import choose_isa, model_source, progress
from tenure.cli.gate import figures, floor_of
from tenure.cli.options import takes
from tenure.config import Resolved, Settings
from tenure.errors import ConfigError

if TYPE_CHECKING:
    from tenure.lab.gate import Floor, Quality
    from tenure.models.loader import Model

MISSED = 1
"""Exit code when a codec misses the floor."""

Kv = Annotated[str | None, typer.Option("--kv", metavar="NAMES", help="Codecs to measure, with commas; else all.")]
Text = Annotated[Path | None, typer.Option("--text", metavar="FILE", help="Your own text instead of the shipped one.")]
Svg = Annotated[Path | None, typer.Option("--svg", metavar="FILE", help="Write the plot as SVG too.")]
Again = Annotated[bool, typer.Option("--again", help="Measure again what is known already.")]
Quick = Annotated[bool, typer.Option("--quick", help="2048 tokens, without retrieval and free runs: a first look.")]
Json = Annotated[bool, typer.Option("--json", help="Print the figures as JSON, and nothing else.")]


@takes("model", "weights", "quality_floor", "threads", "isa")
def quality(
    resolved: Resolved, kv: Kv = None, text: Text = None, svg: Svg = None, again: Again = False, quick: Quick = False,
    as_json: Json = False,
) -> int:  # fmt: skip
    """Measure what each KV codec costs this model, against bf16. Exit 1 when one misses the floor."""
    from tenure.cli.plan import codec_names, write
    from tenure.lab import plots

    names = codec_names(kv) if kv is not None else ("bf16", "int8", "k8v4", "int4")
    if "f32" in names:
        raise ConfigError("kv", "--kv f32: the gate compares with bf16, which f32 is not below")
    words, floor = read_text(text), floor_of(resolved.settings)
    with measuring(resolved.settings) as (model, told):
        found = figures(model, names, words, told, again=again, quick=quick)
    chart = plot(model.name, found)
    if svg is not None:
        write(svg, plots.svg(chart))
    if as_json:
        from tenure.lab.gate import to_json

        print(json.dumps(to_json(found), indent=2))
    else:
        show(model.name, found, floor)
        print("\n" + plots.terminal(chart, height=10, colour=sys.stdout.isatty()))
    return MISSED if any(floor.misses(found[name], found.get("bf16")) for name in names) else 0


@contextlib.contextmanager
def measuring(settings: Settings) -> Iterator[tuple[Model, Callable[[str, float], None]]]:
    """The model, loaded, and a bar that shows how far the measurement is."""
    choose_isa(settings)
    from tenure.models import load

    with progress() as told:
        yield load(model_source(settings), weights=settings.weights, threads=settings.threads, progress=told), told


def read_text(file: Path | None) -> str:
    """The shipped text, or a file's. ConfigError when it cannot be read."""
    from tenure.lab.gate import shipped_text

    if file is None:
        return shipped_text()
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError("text", f"--text {file}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError("text", f"--text {file}: not UTF-8 text: {error.reason}") from None


def plot(name: str, found: dict[str, Quality]) -> Any:
    """Quality against size: KL over bits."""
    from tenure.lab.plots import Chart, Series

    points = tuple(Series(codec, ((q.bits, max(q.kl, 0.0)),)) for codec, q in found.items())
    return Chart(
        f"What fewer bits cost, {name}",
        "KL to bf16 against bits per value: " + ", ".join(f"{codec} {q.kl:.4f}" for codec, q in found.items()),
        "bits per value of K and V", "KL to bf16, nats", points,
    )  # fmt: skip


def show(name: str, found: dict[str, Quality], floor: Floor) -> None:
    """A table for people."""
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    from tenure.lab.gate import DEPTHS

    console = Console(highlight=False)
    table = Table(box=SIMPLE, pad_edge=False, title=f"{name}: KV codecs against bf16", title_justify="left")
    table.add_column("KV codec", no_wrap=True)
    for codec in found:
        table.add_column(codec, justify="right", no_wrap=True)
    exact, all_ = found.get("bf16"), list(found.values())
    table.add_row("bits a value, with scales", *(f"{q.bits:.2f}" for q in all_))
    table.add_row("bytes a token", *(f"{q.bytes_per_token:,}" for q in all_))
    table.add_row("perplexity", *(f"{q.ppl:.3f}" for q in all_))
    table.add_row("KL, nats", *(f"{q.kl:.4f}" for q in all_))
    one_bit = [q.kl_of_one_bit for q in all_]
    if any(one_bit):
        table.add_row("… of one changed bit", *("" if kl is None else f"{kl:.4f}" for kl in one_bit))
    table.add_row("same first choice", *(f"{q.top1:.1%}" for q in all_))
    table.add_row("planted facts found", *("–" if q.retrieval is None else f"{q.retrieval:.0%}" for q in all_))
    for n, depth in enumerate(DEPTHS if any(q.retrieval_by_depth for q in all_) else ()):
        shares = (f"{q.retrieval_by_depth[n]:.0%}" if q.retrieval_by_depth else "–" for q in all_)
        table.add_row(f"… at {depth:.0%} of the way", *shares)
    table.add_row("runs that end repeating", *("–" if q.collapse is None else f"{q.collapse:.0%}" for q in all_))
    table.add_row("floor", *("missed" if floor.misses(q, exact) else "passed" for q in all_))
    console.print(table)
    for codec, q in found.items():
        if reason := floor.misses(q, exact):
            console.print(f"{codec} misses the floor: {reason}")
