"""What a KV cache is, does and costs, told with figures measured here and now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tenure.engine import Engine, EngineSettings
from tenure.errors import RequestError
from tenure.lab.gate import Quality
from tenure.lab.plots import Chart, Series
from tenure.lab.report import Section
from tenure.lab.speed import Point, Reuse, text_of
from tenure.models.loader import Model
from tenure.planner.anatomy import Anatomy
from tenure.planner.memory import Room
from tenure.spec import MIN_BLOCKS, KvGeometry, staging_codec

LENGTH = 2048
"""Tokens of the conversations that are counted."""
SMALL_BLOCKS = 20
"""Of the pool that is filled to its limit."""


@dataclass(frozen=True, slots=True)
class Limit:
    """What happened when more was asked of a small pool than it holds."""

    policy: str
    pool_tokens: int
    finished: int
    paused: int
    recomputed: int
    forgotten: int
    recoded: int
    """Tokens that were read in fewer bits than they had been stored in."""
    refusal: str


def at_the_limit(model: Model, codec: str, pressure: str) -> Limit:
    """Four conversations that fit one by one and not together; then a prompt that can never fit."""
    room = small_pool(model, codec)
    with Engine(model, EngineSettings(kv_cache_bytes=room, kv_codec=codec, pressure=pressure)) as engine:
        pool = engine.stats().pool.total * engine.stats().block_tokens
        prompt, own = text_of(engine, pool // 8), {codec, staging_codec(codec)}
        streams = [engine.stream(prompt, max_tokens=pool // 2, ignore_eos=True, cache_salt=str(n)) for n in range(4)]
        paused = recomputed = forgotten = recoded = 0
        for stream in streams:
            for _ in stream:
                pass
            paused += stream.result.receipt.preempted
            recomputed += stream.result.receipt.recomputed_tokens
            forgotten += sum(part.end - part.start for part in stream.result.receipt.forgotten)
            recoded += sum(n for name, n in stream.result.receipt.codec.items() if name not in own)
        try:
            engine.generate(text_of(engine, pool + 32), max_tokens=8)
            refusal = "none: it fits"
        except RequestError as error:
            refusal = str(error)
    return Limit(pressure, pool, len(streams), paused, recomputed, forgotten, recoded, refusal)


def small_pool(model: Model, codec: str) -> int:
    """Bytes of the small pool."""
    geometry = KvGeometry.of(model.shape)
    # What windows see has its places beside it, however large they are.
    more = (SMALL_BLOCKS - MIN_BLOCKS) * geometry.parts()[0].block_bytes(geometry.staging_codec(codec))
    return geometry.least_arena(codec) + more


def repeated_work(points: Sequence[Point]) -> Section:
    """Work for one more token without a cache, and with one."""
    without = tuple((float(p.tokens), p.first_token_ms) for p in points)
    with_ = tuple((float(p.tokens), p.next_token_ms) for p in points)
    last = points[-1]
    return Section(
        "Why there is a cache",
        (
            f"A model reads all tokens so far to choose the next one. Computed anew each time, a token after "
            f"{last.tokens} others takes {last.first_token_ms:.0f} ms here. With the keys and values of earlier tokens "
            f"kept, it takes {last.next_token_ms:.1f} ms: "
            f"{last.first_token_ms / max(last.next_token_ms, 1e-6):.0f} times less.",
        ),
        (
            Chart(
                "Time for one more token", "Milliseconds against context, computed anew and with the cache.",
                "tokens before it", "milliseconds", (Series("no cache", without), Series("with cache", with_)),
                log_x=True, log_y=True,
            ),
        ),
    )  # fmt: skip


def stored(anatomy: Anatomy, codec: str) -> Section:
    """What is kept, and how it grows against the weights."""
    weights, room = anatomy.weight_bytes(), Room(anatomy, codec, 0)
    per_token = sum(kind.geometry.token_bytes(codec) for kind in anatomy.kinds if kind.geometry)
    layers = sum(kind.layers for kind in anatomy.kinds if kind.geometry)
    rows = [("kept in " + codec, "bytes"), ("one token, one layer", f"{per_token // max(1, layers):,}")]
    rows += [("one token", f"{per_token:,}"), (f"a conversation of {LENGTH}", f"{room.bytes_of(LENGTH):,}")]
    rows += [("the weights", f"{weights:,}")]
    grown = tuple((float(n), n * room.bytes_of(LENGTH) / 2**20) for n in (1, 2, 4, 8, 16, 32, 64))
    flat = tuple((n, weights / 2**20) for n, _ in grown)
    many = -(-weights // max(1, room.bytes_of(LENGTH)))
    return Section(
        "What is kept",
        (
            f"For each token {per_token:,} bytes. The weights are there once, whoever asks; keys and values are there "
            f"for each conversation: from {many} conversations of {LENGTH} tokens on they are more than the weights.",
        ),
        (
            Chart(
                "Memory by conversations", f"KV memory of conversations of {LENGTH} tokens, and of the weights.",
                "conversations", "MiB", (Series("keys and values", grown), Series("weights", flat)),
                log_x=True, log_y=True,
            ),
        ),
        tuple(rows),
    )  # fmt: skip


def two_phases(points: Sequence[Point]) -> Section:
    first = tuple((float(p.tokens), p.first_token_ms) for p in points)
    following = tuple((float(p.tokens), p.next_token_ms) for p in points)
    rows = [("prompt, tokens", "first token, ms", "prompt tokens/s", "each next token, ms")]
    rows += [
        (str(p.tokens), f"{p.first_token_ms:.0f}", f"{1e3 * p.tokens / p.first_token_ms:.0f}", f"{p.next_token_ms:.1f}")
        for p in points
    ]
    return Section(
        "Two phases",
        (
            "The prompt is computed all tokens at a time: its time grows with its length and is bound by arithmetic. "
            "The answer comes one token at a time: each reads all weights and all keys and values, bound by memory.",
        ),
        (
            Chart("Time to first token", "By prompt.", "prompt, tokens", "ms", (Series("first token", first),)),
            Chart("Time per token", "Against context.", "context, tokens", "ms", (Series("next token", following),)),
        ),
        tuple(rows),
    )  # fmt: skip


def savings(found: Sequence[Reuse]) -> Section:
    rows = [("what was held", "prompt", "reused", "cold, ms", "reused, ms", "saved")]
    rows += [
        (
            r.what, str(r.prompt_tokens), str(r.cached_tokens), f"{r.cold_ms:.0f}", f"{r.reused_ms:.0f}",
            f"{1 - r.reused_ms / max(r.cold_ms, 1e-9):.0%}",
        )
        for r in found
    ]  # fmt: skip
    return Section(
        "What reuse saves",
        ("Keys and values of a prefix are the same for everyone who begins with it: computed once, shared by all.",),
        table=tuple(rows),
    )


def codecs(anatomy: Anatomy, quality: Mapping[str, Quality], arena: int) -> Section:
    rows = [("codec", "bytes a token", f"conversations of {LENGTH}", "KL to bf16", "same first choice")]
    points = []
    for name, q in quality.items():
        count = Room(anatomy, name, arena).conversations(LENGTH)
        rows.append((name, f"{q.bytes_per_token:,}", f"{count:,}", f"{q.kl:.4f}", f"{q.top1:.1%}"))
        points.append(Series(name, ((float(count), q.kl),)))
    return Section(
        "What fewer bits cost, and buy",
        ("Fewer bits for a full block hold more conversations and blur the answers a little: measured on this model.",),
        (
            Chart(
                "Quality against conversations", "KL to bf16 against conversations that fit, by codec.",
                f"conversations of {LENGTH} tokens", "KL, nats",
                tuple(points),
            ),
        ),
        tuple(rows),
    )  # fmt: skip


def limit(found: Limit) -> Section:
    return Section(
        "What happens at the limit",
        (
            f"A pool of {found.pool_tokens} tokens, four conversations that fit one by one but not together, and the "
            f"declared policy {found.policy}: {found.finished} finished. Pauses: {found.paused}; tokens forgotten: "
            f"{found.forgotten}, computed again: {found.recomputed}, read in fewer bits than before: {found.recoded}.",
            "A user can tell: every answer carries a receipt (`kv` beside `usage`) with `preempted`, "
            "`recomputed_tokens`, `cached_tokens`, `codec` and `forgotten`.",
            f"A prompt that can never fit is refused at once, with the numbers: “{found.refusal}”.",
        ),
        table=(
            ("in the receipts", "count"), ("paused", str(found.paused)),
            ("tokens computed again", str(found.recomputed)), ("tokens in fewer bits", str(found.recoded)),
        ),
    )  # fmt: skip
