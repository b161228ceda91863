"""How fast a loaded model is here: its two phases by length, and what reuse saves; asked as any client asks."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tenure.engine import Engine, Result
from tenure.planner.anatomy import Anatomy
from tenure.planner.speed import Calibration, attention_flops
from tenure.spec import KvGeometry

Progress = Callable[[str, float], None]
LENGTHS = (128, 256, 512, 1024, 2048)
STEPS = 24
"""Tokens generated after each prompt."""
QUESTION = 64
"""New tokens of a follow-up turn."""


@dataclass(frozen=True, slots=True)
class Point:
    """One prompt of `tokens`, nothing of it held before."""

    tokens: int
    first_token_ms: float
    next_token_ms: float
    """Each one after the first, at that context."""


@dataclass(frozen=True, slots=True)
class Reuse:
    """First tokens with and without what was held before."""

    what: str
    prompt_tokens: int
    cached_tokens: int
    cold_ms: float
    reused_ms: float


def text_of(engine: Engine, tokens: int) -> list[int]:
    """So many tokens of no meaning, the same ones every time: speed does not depend on what they say."""
    vocab = engine.model.shape.vocab
    drawn: list[int] = np.random.default_rng(11).integers(vocab // 10, vocab, tokens).tolist()
    return drawn


def ask(engine: Engine, prompt: Sequence[int], count: int, salt: str) -> tuple[Result, float]:
    """An answer of `count` tokens, and the milliseconds to its first one."""
    result = engine.generate(list(prompt), max_tokens=count, ignore_eos=True, cache_salt=salt)
    return result, result.timings.queue_ms + result.timings.prompt_ms


def phases(engine: Engine, progress: Progress, tries: int = 1) -> list[Point]:
    """Both phases, by length; of several tries the quickest, which others disturbed least."""
    room = min(engine.card.context_limit, engine.stats().pool.total * engine.stats().block_tokens) - STEPS - 1
    lengths = [length for length in LENGTHS if length <= room] or [max(1, room)]
    ask(engine, text_of(engine, 32), 4, uuid.uuid4().hex)
    points = []
    for n, length in enumerate(lengths):
        progress(f"{length} tokens", n / len(lengths))
        found = []
        for _ in range(tries):
            result, first = ask(engine, text_of(engine, length), STEPS, uuid.uuid4().hex)
            found.append((first, result.timings.predicted_ms / max(1, result.timings.predicted_n - 1)))
        points.append(Point(length, *map(min, zip(*found, strict=True))))
    return points


def reuse(engine: Engine, points: Sequence[Point]) -> list[Reuse]:
    """A prefix that another request computed, and the next turn of a conversation."""
    length = points[-1].tokens // 2
    body, salt = text_of(engine, length + 2 * QUESTION), uuid.uuid4().hex
    _, cold = ask(engine, body[: length + QUESTION], 1, salt)
    other = [*body[:length], *body[length + QUESTION :]]
    shared, warm = ask(engine, other, 1, salt)
    found = [Reuse("a shared prefix", len(other), shared.usage.cached_tokens, cold, warm)]
    history = body[:length]
    salt = uuid.uuid4().hex
    turn, _ = ask(engine, history, STEPS, salt)
    following = [*history, *turn.tokens, *body[length : length + QUESTION]]
    again, warm = ask(engine, following, 1, salt)
    _, cold = ask(engine, following, 1, uuid.uuid4().hex)
    found.append(Reuse("a follow-up turn", len(following), again.usage.cached_tokens, cold, warm))
    return found


def calibrate(engine: Engine, anatomy: Anatomy, machine: str, progress: Progress) -> Calibration:
    """What this machine does a second, from the phases by length: for predictions of other models and lengths."""
    points = phases(engine, progress, tries=2)
    short, long = points[max(0, len(points) - 3)], points[-1]
    active = max(1.0, anatomy.active)
    # Two unknowns, two lengths: a prompt costs its matrices, which grow with it, and attention, with its square.
    a, b = attention_flops(anatomy, 0, short.tokens), attention_flops(anatomy, 0, long.tokens)
    s, t = short.first_token_ms / 1e3, long.first_token_ms / 1e3
    per_pair = (t * short.tokens - s * long.tokens) / max(1.0, b * short.tokens - a * long.tokens)
    per_pair = max(per_pair, 0.02 * t / max(1.0, b))
    matrices = max(t - per_pair * b, 0.1 * t)
    near, far = points[0].next_token_ms / 1e3, long.next_token_ms / 1e3
    kv = KvGeometry.of(engine.model.shape).sequence_bytes(long.tokens - points[0].tokens, engine.card.codec)
    return Calibration(
        machine=machine,
        model=engine.card.id,
        weights=engine.card.weights,
        flops=2 * active * long.tokens / matrices,
        attention_flops=1 / per_pair,
        weight_bytes_per_s=anatomy.read_bytes() / near,
        kv_bytes_per_s=max(kv, 1) / max(far - near, 0.02 * near),
    )
