"""`tenure explain`: a KV cache explained with this machine's and this model's own figures, in about a minute."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tenure.cli.compose import codec_name, model_source
from tenure.cli.gate import figures
from tenure.cli.live import live, machine_name
from tenure.cli.options import takes
from tenure.config import Resolved, Settings

if TYPE_CHECKING:
    from tenure.lab.report import Section

Html = Annotated[Path, typer.Option("--html", metavar="FILE", help="Where the report goes.")]


@takes(
    "model", "weights", "memory", "kv_cache_memory_bytes", "kv_cache_dtype", "kv_cache_dtype_k", "kv_cache_dtype_v",
    "pressure", "threads", "isa",
)  # fmt: skip
def explain(resolved: Resolved, html: Html = Path("tenure-explain.html")) -> int:
    """Measure what the KV cache does here, and write it as a page with plots."""
    from tenure.cli.plan import write
    from tenure.lab.report import page

    settings = resolved.settings
    name, sections = measured(settings)
    lead = f"Measured on {machine_name(settings)}. Times are of one run, with whatever else the machine was doing."
    write(html, page(f"The KV cache of {name}", lead, sections))
    show(sections)
    print(f"\nwith plots: {html}")
    return 0


def measured(settings: Settings) -> tuple[str, list[Section]]:
    """The model's name, and all sections in the order they are read."""
    from tenure.lab import explain as told
    from tenure.lab import speed
    from tenure.lab.gate import shipped_text
    from tenure.models.anatomy import anatomy

    body = anatomy(model_source(settings))
    codec = codec_name(settings)
    with live(settings) as (engine, tell):
        points = speed.phases(engine, lambda stage, share: tell(f"speed, {stage}", 0.3 * share))
        tell("reuse", 0.3)
        saved = speed.reuse(engine, points)
        model, arena = engine.model, engine.stats().arena_bytes
        tell("the limit", 0.45)
        limit = told.at_the_limit(model, codec, settings.pressure)
        names = ["bf16"] if codec == "f32" else ["bf16", "int8", "k8v4", "int4"]
        quality = figures(
            model, names, shipped_text(), lambda stage, share: tell(f"quality, {stage}", 0.5 + 0.5 * share), quick=True
        )
    return engine.card.id, [
        told.repeated_work(points), told.stored(body, codec), told.two_phases(points), told.savings(saved),
        told.codecs(body, quality, arena), told.limit(limit),
    ]  # fmt: skip


def show(sections: list[Section]) -> None:
    """The same in the terminal: every section's words and table."""
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    for section in sections:
        console.print(f"\n[bold]{section.title}[/]")
        for words in section.words:
            console.print(words, markup=False)
        if section.table:
            head, *body = section.table
            table = Table(*head, box=SIMPLE, pad_edge=False)
            for column in table.columns[1:]:
                column.justify = "right"
            for row in body:
                table.add_row(*row)
            console.print(table)
