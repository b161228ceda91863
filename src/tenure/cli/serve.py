"""`tenure serve`: bind, load, say what fits, serve, leave cleanly."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from tenure.cli.options import takes
from tenure.config import SETTINGS, Resolved, Settings, is_loopback

if TYPE_CHECKING:
    from tenure.engine import Engine
    from tenure.server.serves import ModelCard
    from tenure.spec import ArenaLayout, LayerGroup
    from tenure.types import Snapshot

CONVERSATIONS = (8192, 2048, 512)
"""Lengths, in tokens, that the banner tells how many conversations of fit."""


@takes(*(setting.name for setting in SETTINGS))
def serve(resolved: Resolved) -> int:
    """Serve a model over the OpenAI API on http://127.0.0.1:8000."""
    began = time.monotonic()
    settings = resolved.settings
    configure_logging(settings)
    from tenure.cli.lifecycle import bind, server
    from tenure.cli.waiting_room import waiting_room

    sock = bind(settings.host, settings.port)
    port = int(sock.getsockname()[1])
    with contextlib.ExitStack() as stack:
        with waiting_room(sock):
            from tenure.cli.compose import compose

            composed = stack.enter_context(compose(settings, chosen(resolved)))
            await_memory(composed.engine)
        stack.enter_context(recording(resolved, composed.engine))
        lines = banner(settings, composed.engine, port, composed.budget.note)
        lines.insert(lines.index("  Try it:") - 1, f"  quality   KV {composed.engine.card.codec}: {composed.quality}")
        print("\n".join(lines), flush=True)
        # What was loaded stays: no collection of garbage looks at it again (65 000 objects, all threads waiting).
        gc.freeze()
        stack.callback(gc.unfreeze)  # else nanobind reports all of it as leaked when the process ends
        logging.getLogger("tenure").info("ready in %.2f s", time.monotonic() - began)
        server(composed, settings.grace).run([sock])
    return 0


def await_memory(engine: Engine) -> None:
    """Until the first slab is reserved: what is told next is that the server is ready."""
    while (health := engine.health()).alive and not health.ready:
        time.sleep(0.005)


def chosen(resolved: Resolved) -> list[str]:
    """The settings that the operator chose."""
    return [name for name, source in resolved.sources.items() if source != "default"]


@contextlib.contextmanager
def recording(resolved: Resolved, engine: Engine) -> Iterator[None]:
    """Write a trace of all requests while the block runs, when the operator asked for one."""
    settings = resolved.settings
    if settings.trace is None:
        yield
        return
    from tenure.cli.compose import recorded
    from tenure.cli.recording import TraceWriter

    writer = TraceWriter(Path(settings.trace), recorded(engine, chosen(resolved)), engine.stats().block_tokens)
    engine.facts.listen(writer.learn)
    try:
        yield
    finally:
        writer.close()


def configure_logging(settings: Settings) -> None:
    """Logs go to standard error, one line each; the libraries below speak only of warnings."""
    logging.basicConfig(
        stream=sys.stderr, level=settings.log_level.upper(), format="%(asctime)s %(levelname)-7s %(name)s: %(message)s"
    )
    for library in ("httpx", "httpcore", "uvicorn", "asyncio"):
        logging.getLogger(library).setLevel(max(logging.WARNING, logging.getLogger().level))


class Served(Protocol):
    """What the banner tells of an engine."""

    @property
    def card(self) -> ModelCard: ...

    @property
    def layout(self) -> ArenaLayout: ...

    def stats(self) -> Snapshot: ...


def banner(settings: Settings, engine: Served, port: int, budget_note: str) -> list[str]:
    """What the operator should know before the first request."""
    from tenure.cli.machine import human

    card, stats = engine.card, engine.stats()
    host = settings.host if is_loopback(settings.host) or settings.host not in ("0.0.0.0", "::") else "127.0.0.1"
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    key_line = [f"  -H 'Authorization: Bearer {_key_shown(settings)}' \\"] if settings.api_key else []
    message = '{"role": "user", "content": "What is a KV cache?"}'
    body = f'{{"model": "{card.id}", "max_tokens": 64, "messages": [{message}]}}'
    return [
        "",
        f"  Tenure serves {_bold(card.id)} on {_bold(url)}",
        "",
        f"  weights   {card.weights}, {human(stats.weight_bytes)}",
        f"  budget    {human(stats.budget_bytes)} ({budget_note})",
        f"  KV cache  {human(stats.arena_bytes)}, codec {card.codec}, {stats.pool.total} blocks of "
        f"{stats.block_tokens} tokens ({human(stats.block_bytes)} each{_layers_note(card.groups)})",
        f"  fits      {fits(engine.layout, stats.block_tokens, card.context_limit)}",
        f"  context   {card.context_limit} tokens{_pool_note(engine.layout, stats, card.context_limit)}",
        *([f"  windows   {windows(card.groups)}"] if any(group.window for group in card.groups) else []),
        f"  policy    eviction {stats.eviction}, pressure {stats.pressure}, overflow {stats.overflow}",
        "",
        "  Try it:",
        "",
        f"curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\",
        *key_line,
        f"  -d {shlex.quote(body)}",
        "",
    ]


def fits(layout: ArenaLayout, block_tokens: int, context_limit: int) -> str:
    """How many conversations of a few lengths the pool holds at the same time, in words."""
    lengths = [length for length in CONVERSATIONS if length < context_limit]
    if context_limit <= CONVERSATIONS[0]:
        lengths.insert(0, context_limit)
    parts = []
    for length in lengths:
        count = layout.conversations(length, block_tokens)
        parts.append(f"{count} conversation{'' if count == 1 else 's'} of {length} tokens")
    return ", or ".join(parts)


def windows(groups: Sequence[LayerGroup]) -> str:
    """What layers with a window keep, and so what of a prefix is reused, in words."""
    total = sum(group.layers for group in groups)
    seen = [(group.layers, group.window) for group in groups if group.window is not None]
    words = ", ".join(f"{layers} of {total} layers see {window} tokens" for layers, window in seen)
    widest = max(window for _, window in seen)
    return f"{words}, and keep only those: a prefix is reused where its last {widest} tokens are still held"


def _layers_note(groups: Sequence[LayerGroup]) -> str:
    """Whose blocks the pool counts, when not those of all layers."""
    if len(groups) < 2:
        return ""
    layers = "layer that sees" if groups[0].layers == 1 else f"{groups[0].layers} layers that see"
    return f", of the {layers} {'everything' if groups[0].window is None else f'{groups[0].window} tokens'}"


def _pool_note(layout: ArenaLayout, stats: Snapshot, context_limit: int) -> str:
    needed = layout.groups[0].held(-(-context_limit // stats.block_tokens), stats.block_tokens)
    held = stats.pool.total * stats.block_tokens
    if stats.pool.total >= needed:
        return ""
    return f" — but the pool holds {held}: a longer conversation ends with `length` and cause `pool`"


def _key_shown(settings: Settings) -> str:
    return "$TENURE_API_KEY" if os.environ.get("TENURE_API_KEY") == settings.api_key else "YOUR_KEY"


def _bold(words: str) -> str:
    return f"\033[1m{words}\033[0m" if sys.stdout.isatty() else words
