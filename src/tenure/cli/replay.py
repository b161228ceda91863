"""`tenure replay`: what a trace would have met with other policies and other amounts of memory."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tenure.cli.options import complain, options_of
from tenure.errors import ConfigError

if TYPE_CHECKING:
    from tenure.cli.costs import Budgeting, Room
    from tenure.cli.jobs import Census, Source

SHARES = "0.01,0.05,0.10,0.25"
_TRACE = "A trace: Tenure's own, Mooncake's, Azure's CSV or OpenAI-style logs; plain, gzip or zstd."


def _option(flag: str, help: str, low: float | None = None) -> Any:
    return typer.Option(flag, help=help, min=low)


@dataclass(frozen=True, slots=True)
class Options:
    """What `tenure replay` is told."""

    trace: Annotated[Path, typer.Argument(help=_TRACE)]
    instant: Annotated[bool, _option("--instant", "The cache alone: requests take no time, answers no room.")] = False
    cache_share: Annotated[
        str | None, _option("--cache-share", f"Sizes, as shares of the trace's unique blocks. Default: {SHARES}.")
    ] = None
    memory: Annotated[
        str | None,
        _option("--memory", "Budgets instead, for weights and cache as `tenure serve` takes them: 1GiB,80%."),
    ] = None
    kv_cache_memory_bytes: Annotated[
        str | None, _option("--kv-cache-memory-bytes", "Budgets for the cache alone: 512MiB,2GiB.")
    ] = None
    eviction: Annotated[str, _option("--eviction", "lru, gittins; with --instant also optimum.")] = "lru,gittins"
    pressure: Annotated[
        str, _option("--pressure", "What is done when running sequences outgrow the pool; ladders with ; between.")
    ] = "pause"
    speed: Annotated[float, _option("--speed", "Requests come so many times as fast.", 1e-6)] = 1.0
    calibration: Annotated[
        Path | None, _option("--calibration", "What a step costs. Default: as `tenure doctor --calibrate` measured it.")
    ] = None
    limit: Annotated[int | None, _option("--limit", "Only the first so many requests.", 1)] = None
    model: Annotated[
        str | None, _option("--model", "Whose tokenizer reads texts, whose bytes and steps count. Default: embedded.")
    ] = None
    weights: Annotated[str, _option("--weights", "How the model keeps its weights.")] = "auto"
    kv_cache_dtype: Annotated[
        str, _option("--kv-cache-dtype", "How K and V are stored; auto: as the trace says, else bf16.")
    ] = "auto"
    jobs: Annotated[int | None, _option("--jobs", "Processes at the same time. Default: one for each core.", 1)] = None
    plot: Annotated[Path | None, _option("--plot", "Write hit rate against size of the cache to this SVG file.")] = None
    as_json: Annotated[bool, _option("--json", "Print the figures as JSON, and nothing else.")] = False


@options_of(Options)
def replay(options: Options) -> int:
    """Replay a trace against the real cache, scheduler and policies, without a model."""
    from tenure import spec
    from tenure.cli import costs, jobs
    from tenure.sim.replay import Setup

    policies = _policies(options)
    source = jobs.Source(options.trace, options.limit, options.model)
    found = jobs.census(source)
    if found.late and not options.as_json:
        complain(f"{found.late} requests are earlier than the one before them; they are taken to come with it")
    codec = spec.codec(_codec(options)).name
    budgets = options.memory or options.kv_cache_memory_bytes
    model = None if options.instant and not budgets else costs.anatomy_of(options.model)
    weights = costs.weights_format(options.weights)
    known = costs.known(model, weights, codec, options.calibration)
    todo: list[jobs.Job] = []
    notes: dict[str, None] = {}
    for pressure in _words(options.pressure, "pressure", ";"):
        budgeting = costs.Budgeting(model, weights, codec, pressure, found.block_tokens)
        sizes = _sizes(options, found, budgeting)
        notes |= dict.fromkeys(size.note for size in sizes if size.note)
        for policy in policies:
            for size in sizes:
                setup = Setup(size.blocks, found.block_tokens, policy, pressure, options.speed, layout=size.layout)
                share = size.blocks / max(1, found.unique_blocks) if size.share is None else size.share
                todo.append(jobs.Job(source, policy, share, setup, known.costs, options.instant))
    with _progress(len(todo) * found.requests) as told:
        rows = jobs.work_all(todo, options.jobs or jobs.usable_cores(), told)
    if options.plot:
        _write_plot(options.plot, rows, source, found)
    if options.as_json:
        print(json.dumps(rows if options.instant else [{**row, "cost_model": known.told()} for row in rows], indent=1))
    else:
        _show(rows, found, options, ([] if options.instant else [f"cost model: {known}"]) + list(notes))
    return 0


def _codec(options: Options) -> str:
    """As asked, else as the trace was served, else bf16."""
    if options.kv_cache_dtype != "auto":
        return options.kv_cache_dtype
    from tenure import traces
    from tenure.cli.files import lines

    served = traces.header(lines(options.trace)).get("codec")
    return served if isinstance(served, str) else "bf16"


def _policies(options: Options) -> list[str]:
    """The eviction policies asked for; ConfigError lists the known ones."""
    from tenure.policy import registry
    from tenure.sim import optimum

    names = _words(options.eviction, "eviction")
    for name in names:
        if name == optimum.NAME and not options.instant:
            raise ConfigError("eviction", "optimum knows the future of a trace, not of a scheduler: add --instant")
        if name != optimum.NAME:
            try:
                registry.eviction(name)
            except ConfigError as error:
                raise ConfigError("eviction", f"{error}, {optimum.NAME} (replay only)") from None
    for name in _words(options.pressure, "pressure", ";"):
        registry.pressure(name)
    return names


def _words(text: str, flag: str, between: str = ",") -> list[str]:
    words = [word.strip() for word in text.split(between) if word.strip()]
    if not words:
        raise ConfigError(flag, f"--{flag} is empty")
    return words


def _sizes(options: Options, found: Census, budgeting: Budgeting) -> list[Room]:
    """What is replayed against: by budgets, or by shares of the unique blocks."""
    from tenure.cli.costs import Room

    given = {name: getattr(options, name) for name in ("memory", "kv_cache_memory_bytes", "cache_share")}
    asked = [f"--{name.replace('_', '-')}" for name, words in given.items() if words is not None]
    if len(asked) > 1:
        raise ConfigError("memory", f"{' and '.join(asked)} exclude each other")
    for param in ("memory", "kv_cache_memory_bytes"):
        if given[param] is not None:
            return [budgeting.room(word, param) for word in _words(given[param], param)]
    shares = []
    for word in _words(options.cache_share or SHARES, "cache-share"):
        try:
            share = float(word)
        except ValueError:
            share = float("nan")
        if not 0 < share <= 1:
            raise ConfigError("cache_share", f"--cache-share {word!r}: must be above 0 and at most 1")
        shares.append(share)
    sizes = [Room(int(share * found.unique_blocks), share=share) for share in shares]
    if not options.instant and any(size.blocks < 1 for size in sizes):
        raise ConfigError("cache_share", f"a cache needs at least one block of {found.block_tokens} tokens")
    return sizes


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.completed:,.0f} of {task.total:,.0f} requests"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("replay", total=total)
        yield lambda done: bar.update(task, completed=done)


def _write_plot(file: Path, rows: Sequence[dict[str, Any]], source: Source, found: Census) -> None:
    """Every policy as a line; between them the limits: the optimum, and a cache that never forgets."""
    from tenure.cli import replay_plot
    from tenure.sim import optimum

    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        name = row["policy"] if len({r.get("pressure") for r in rows}) < 2 else f"{row['policy']}, {row['pressure']}"
        lines.setdefault(name, []).append((row["share"], row["hit_rate"]))
    if optimum.NAME not in lines:
        future = optimum.Future(source.requests())
        lines[optimum.NAME] = [
            (share, optimum.run(future, int(share * found.unique_blocks)).rate)
            for share, _ in next(iter(lines.values()))
        ]
    try:
        file.write_text(replay_plot.svg(source.path.name, lines, found.infinite), encoding="utf-8")
    except OSError as error:
        raise ConfigError("plot", f"--plot {file}: {error.strerror}") from None


def _show(rows: Sequence[dict[str, Any]], found: Census, options: Options, notes: Sequence[str]) -> None:
    """The table, one row for each policy and size; above it what the figures rest on."""
    from rich.console import Console
    from rich.table import Table

    print(
        f"{found.requests} requests, {found.prompt_tokens} prompt tokens, {found.unique_blocks} unique blocks of "
        f"{found.block_tokens} tokens, {found.seconds:.0f} s; one that never "
        f"forgets would hit {found.infinite:.1%} in whole blocks"
    )
    for note in notes:
        print(note)
    table = Table()
    columns = ["policy", "share", "blocks", "hit rate"]
    if not options.instant:
        columns += [
            "pressure",
            "recomputed",
            "queue p50/p99",
            "first token p50/p99",
            "gap p50/p99",
            "pauses",
            "refused",
        ]
    for column in columns:
        table.add_column(column, justify="left" if column in ("policy", "pressure") else "right")
    for row in rows:
        cells = [row["policy"], f"{row['share']:.4g}", str(row["blocks"]), f"{row['hit_rate']:.1%}"]
        if not options.instant:
            cells += [
                row["pressure"], str(row["recomputed_tokens"]), _spread(row["queue_s"]), _spread(row["ttft_s"]),
                _spread(row["gap_s"]), str(row["pauses"]), str(sum(row["refused"].values())),
            ]  # fmt: skip
        table.add_row(*cells)
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def _spread(found: dict[str, float]) -> str:
    return f"{found['p50']:.3g}/{found['p99']:.3g} s" if found else "–"
