"""`tenure plan`: what a budget holds of a model. A config.json or a GGUF header is all it reads."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tenure.cli.machine import budget_unchecked, human, probe
from tenure.cli.options import takes
from tenure.config import Resolved
from tenure.errors import ConfigError

if TYPE_CHECKING:
    from tenure.planner.anatomy import Anatomy, Kind
    from tenure.planner.memory import CodecPlan, Plan, Wish
    from tenure.planner.speed import Speed

SHORT = 1
"""Exit code when the conversations that are wanted fit in no codec."""
LENGTH_FORMS = "a number of tokens such as 8192, 8k (8 × 1024) or 1M"

Context = Annotated[str, typer.Option("--context", metavar="TOKENS", help="Length of a conversation: 8192 or 8k.")]
Shared = Annotated[str, typer.Option("--shared-prefix", metavar="TOKENS", help="What all of them begin with.")]
Kv = Annotated[str | None, typer.Option("--kv", metavar="NAMES", help="Codecs to compare, with commas; else all.")]
Target = Annotated[
    int | None, typer.Option("--target-conversations", min=1, help="So many are to fit: how much memory do they need?")
]
Svg = Annotated[Path | None, typer.Option("--svg", metavar="FILE", help="Write the plot as SVG too.")]
Json = Annotated[bool, typer.Option("--json", help="Print the plan as JSON, and nothing else.")]


@takes("model", "weights", "memory", "kv_cache_memory_bytes", "max_num_seqs")
def plan(
    resolved: Resolved,
    context: Context = "2048",
    shared_prefix: Shared = "0",
    kv: Kv = None,
    target_conversations: Target = None,
    svg: Svg = None,
    as_json: Json = False,
) -> int:
    """How many conversations fit: KV bytes by codec, what binds, what sharing buys. Loads no weights."""
    from tenure.cli.compose import model_source
    from tenure.lab import plots
    from tenure.models.anatomy import anatomy
    from tenure.planner import memory

    settings = resolved.settings
    granted = budget_unchecked(settings, probe())
    names = memory.CODEC_NAMES if kv is None else codec_names(kv)
    wish = memory.Wish(
        context=tokens("context", context),
        memory_bytes=granted.memory_bytes,
        kv_bytes=granted.kv_cache_bytes,
        shared_prefix=tokens("shared_prefix", shared_prefix),
        codecs=names,
        weights=settings.weights,
        max_num_seqs=settings.max_num_seqs,
        target=target_conversations,
    )
    model = anatomy(model_source(settings))
    made = memory.plan(model, wish)
    speeds = predictions(model, made, wish)
    chart = curves(model, made)
    if svg is not None:
        write(svg, plots.svg(chart))
    if as_json:
        print(json.dumps(to_json(model, made, wish, speeds), indent=2))
    else:
        show(model, made, wish, speeds, granted.note)
        print("\n" + plots.terminal(chart, colour=sys.stdout.isatty()))
    fit = max(codec.conversations for codec in made.codecs.values())
    return SHORT if fit < (target_conversations or 0) else 0


def tokens(param: str, words: str) -> int:
    """A length as people write it. ConfigError shows the accepted forms."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kKmM]?)\s*", words)
    count = float(found[1]) * {"": 1, "k": 1024, "m": 1024**2}[found[2].lower()] if found else -1.0
    if count < 0 or count != int(count) or count > 2**40:
        raise ConfigError(param, f"--{param.replace('_', '-')} {words!r}: write it as {LENGTH_FORMS}")
    return int(count)


def codec_names(words: str) -> tuple[str, ...]:
    """Names of codecs between commas, each known."""
    from tenure.spec import codec

    names = tuple(dict.fromkeys(name.strip().lower() for name in words.split(",") if name.strip()))
    if not names:
        raise ConfigError("kv", "--kv needs names of codecs with commas between, such as bf16,int8")
    return tuple(codec(name).name for name in names)


def write(file: Path, text: str) -> None:
    """Write a file the operator named; ConfigError when it can't be."""
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError("svg", f"{file}: cannot be written: {error.strerror}") from None


def predictions(model: Anatomy, made: Plan, wish: Wish) -> dict[str, Speed]:
    """Speeds by codec, when this machine has been calibrated."""
    from tenure.cli.calibration import here
    from tenure.planner.memory import Room
    from tenure.planner.speed import predict

    calibration = here()
    if calibration is None:
        return {}
    shared = min(wish.shared_prefix, made.context)
    return {
        name: predict(model, calibration, Room(model, name, made.kv_bytes), made.context, shared, wish.weights)
        for name in made.codecs
    }


def curves(model: Anatomy, made: Plan) -> Any:
    """The chart: conversations against context, by codec."""
    from tenure.lab.plots import Chart, Series

    series = tuple(
        Series(name, tuple((float(x), float(y)) for x, y in zip(made.lengths, counts, strict=True)))
        for name, counts in made.curves.items()
    )
    return Chart(
        f"Conversations that fit, {model.name}",
        f"Conversations against context length for {', '.join(made.codecs)} in {made.kv_bytes} bytes of KV memory.",
        "context, tokens", "conversations", series, log_x=True, log_y=True,
    )  # fmt: skip


def to_json(model: Anatomy, made: Plan, wish: Wish, speeds: dict[str, Speed]) -> dict[str, Any]:
    """What `--json` prints."""
    return {
        "model": model.name,
        "architecture": model.architecture,
        "served": model.served is not None,
        "unserved_because": model.unserved or None,
        "parameters": model.parameters,
        "active_parameters": round(model.active),
        "weights_bytes": made.weights_bytes,
        "memory_bytes": made.memory_bytes,
        "kv_bytes": made.kv_bytes,
        "context": made.context,
        "context_limit": model.context_length,
        "shared_prefix": min(wish.shared_prefix, made.context),
        "binding_limit": made.binding_limit,
        "binding": made.binding,
        "codecs": {
            name: dataclasses.asdict(codec) | ({"speed": dataclasses.asdict(speeds[name])} if name in speeds else {})
            for name, codec in made.codecs.items()
        },
        "kinds": [kind_json(kind, made) for kind in model.kinds],
        "target_conversations": wish.target,
        "curves": {"context": made.lengths, "conversations": made.curves},
    }


def kind_json(kind: Kind, made: Plan) -> dict[str, Any]:
    per_token = {name: kind.geometry.token_bytes(name) for name in made.codecs} if kind.geometry else {}
    return {
        "kind": kind.name, "layers": kind.layers, "window": kind.window, "bytes_per_token": per_token,
        "state_bytes": kind.state_bytes,
    }  # fmt: skip


def show(model: Anatomy, made: Plan, wish: Wish, speeds: dict[str, Speed], note: str) -> None:
    """Tables for people."""
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, soft_wrap=True)
    used = f", {model.active / 1e9:.3g} B a token" if model.active < 0.9 * model.parameters else ""
    console.print(f"[bold]{model.name}[/] ({model.architecture}): {model.parameters / 1e9:.3g} B parameters{used}")
    if model.served is None:
        console.print(f"[yellow]Tenure can plan this model, but not serve it[/]: {model.unserved}")
    console.print(
        f"weights {human(made.weights_bytes)} + KV {human(made.kv_bytes)} of {human(made.memory_bytes)} ({note})"
    )
    for kind in model.kinds:
        held = f"{human(kind.state_bytes)} a conversation, whatever its length" if kind.geometry is None else (
            f"{kind.geometry.token_bytes('bf16'):,} bytes a token in bf16"
            + (f", the last {kind.window} tokens" if kind.window else "")
        )  # fmt: skip
        console.print(f"  {kind.layers} layers {kind.name}: {held}")
    table = Table(box=SIMPLE, pad_edge=False)
    table.add_column("KV codec")
    for name in made.codecs:
        table.add_column(name, justify="right", no_wrap=True)
    base = made.codecs.get("bf16")
    columns = [cells(codec, base, wish, speeds.get(name)) for name, codec in made.codecs.items()]
    for label in columns[0]:
        table.add_row(label.format(context=made.context), *(column[label] for column in columns))
    console.print(table)
    console.print(f"[bold]what binds[/]: {made.binding}")
    if not speeds:
        console.print("speeds: not known here; `tenure doctor --calibrate` measures this machine once, in seconds")


def cells(codec: CodecPlan, base: CodecPlan | None, wish: Wish, speed: Speed | None) -> dict[str, str]:
    """One codec's column, by what each line tells."""
    ratio = f"{codec.conversations / base.conversations:.2f} ×" if base and base.conversations else "–"
    column = {
        "bits a value, with scales": f"{codec.bits:.2f}",
        "bytes a token": f"{codec.bytes_per_token:,}",
    }
    if codec.bytes_per_token_beyond_windows != codec.bytes_per_token:
        column["… once windows are full"] = f"{codec.bytes_per_token_beyond_windows:,}"
    column["tokens the pool holds"] = "no end" if codec.tokens is None else f"{codec.tokens:,}"
    column["conversations of {context}"] = f"[bold]{codec.conversations:,}[/]"
    if wish.shared_prefix:
        column["… when nothing is shared"] = f"{codec.conversations_unshared:,}"
    column["against bf16"] = ratio
    if codec.memory_for_target is not None:
        column[f"memory for {wish.target} of them"] = human(codec.memory_for_target)
    if speed is not None:
        column["first token, predicted"] = f"{speed.ttft_s:.2f} s"
        if wish.shared_prefix:
            column["… with the prefix held"] = f"{speed.ttft_shared_s:.2f} s"
        column["tokens/s alone"] = f"{speed.tokens_per_s:.1f}"
        column["tokens/s all together"] = f"{speed.tokens_per_s_all:.1f}"
    return column
