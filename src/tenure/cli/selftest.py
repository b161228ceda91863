"""What `tenure doctor` runs: the kernels against numpy, and the cache against its own invariants. Raises when wrong."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tenure import _native
from tenure.cache.kvcache import KvCache
from tenure.cache.plan import Ask, Shortfall
from tenure.errors import Corrupt
from tenure.events import FactLog
from tenure.policy.registry import eviction
from tenure.spec import BLOCK_TOKENS, CODECS, codec
from tenure.types import Scope

Floats = NDArray[np.float32]
TOLERANCE = {"f32": 1e-5, "bf16": 2e-2, "int8": 3e-2, "int4": 3e-2}
"""Largest error allowed, relative to the largest result: what rounding the activations may cost in each format."""


def linear_kernels() -> str:
    """Every weight format and instruction set: against numpy, and one row alone against the same row among others."""
    rng = np.random.default_rng(7)
    worst = dict.fromkeys(TOLERANCE, 0.0)
    x = rng.standard_normal((19, 96), dtype=np.float32)
    for name in TOLERANCE:
        layer = _layer(name, rng, rows=70, columns=96)
        expected = x @ layer.dequantise().T
        for isa in _native.isas():
            got = layer.forward(x, threads=2, isa=isa)
            worst[name] = max(worst[name], float(np.abs(got - expected).max() / np.abs(expected).max()))
            alone = layer.forward(x[11:12], threads=1, isa=isa)
            if not np.array_equal(alone[0], got[11]):
                raise Corrupt(f"{name} on {isa}: a row computed alone differs from the same row among others")
        if worst[name] > TOLERANCE[name]:
            raise Corrupt(f"{name}: relative error {worst[name]:.1e}, allowed {TOLERANCE[name]:.0e}")
    errors = ", ".join(f"{name} {error:.0e}" for name, error in worst.items())
    return f"equal to numpy on {', '.join(_native.isas())} (relative error {errors}); rows invariant"


def _layer(name: str, rng: np.random.Generator, rows: int, columns: int) -> _native.Linear:
    """A layer of random weights, [rows, columns], in one of the formats."""
    if name in ("f32", "bf16"):
        values = rng.standard_normal((rows, columns), dtype=np.float32)
        return _native.Linear(name, values if name == "f32" else (values.view(np.uint32) >> 16).astype(np.uint16))
    scale = (rng.random((rows, columns // 32), dtype=np.float32) * 0.02 + 0.01).astype(np.float16)
    if name == "int8":
        return _native.Linear(name, rng.integers(-127, 128, (rows, columns), dtype=np.int8), scale.view(np.uint16))
    low = (scale * np.float16(-8)).astype(np.float16)
    values4 = rng.integers(0, 16, (rows, columns), dtype=np.uint8)
    return _native.Linear(name, values4, scale.view(np.uint16), low.view(np.uint16))


def attention_kernels() -> str:
    """Each KV codec and instruction set: a prompt at once against numpy, and its last row alone against the same."""
    rng = np.random.default_rng(11)
    tokens, heads, kv_heads, dim = 77, 6, 2, 64
    q = rng.standard_normal((tokens, heads, dim), dtype=np.float32)
    k = rng.standard_normal((tokens, kv_heads, dim), dtype=np.float32)
    v = rng.standard_normal((tokens, kv_heads, dim), dtype=np.float32)
    expected = _attend(q, k, v)
    worst: dict[str, float] = {}
    for name in ("f32", "bf16"):
        for isa in _native.isas():
            got, alone = _at_once_and_alone(name, isa, q, k, v)
            error = float(np.abs(got - expected).max() / np.abs(expected).max())
            worst[name] = max(worst.get(name, 0.0), error)
            if error > TOLERANCE[name]:
                raise Corrupt(f"KV {name} on {isa}: relative error {error:.1e}, allowed {TOLERANCE[name]:.0e}")
            if not np.array_equal(alone, got[-1]):
                raise Corrupt(f"KV {name} on {isa}: the last row decoded alone differs from the prompt at once")
    errors = ", ".join(f"{name} {error:.0e}" for name, error in worst.items())
    return f"equal to numpy on {', '.join(_native.isas())} (relative error {errors}); decode equals prefill"


def _attend(q: Floats, k: Floats, v: Floats) -> Floats:
    """Causal attention in f64: [tokens, heads, dim]."""
    group = q.shape[1] // k.shape[1]
    keys, values = (np.repeat(part, group, axis=1).astype(np.float64) for part in (k, v))
    scores = np.einsum("thd,shd->hts", q.astype(np.float64), keys) / np.sqrt(q.shape[2])
    scores += np.triu(np.full(scores.shape[1:], -np.inf), 1)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    attended: Floats = np.einsum("hts,shd->thd", weights, values).astype(np.float32)
    return attended


def _at_once_and_alone(name: str, isa: str, q: Floats, k: Floats, v: Floats) -> tuple[Floats, Floats]:
    """All rows in one call, then the last row again by itself over the blocks the first call stored."""
    tokens, kv_heads, dim = k.shape
    size = _native.block_bytes(name, 1, kv_heads, dim)
    blocks = -(-tokens // BLOCK_TOKENS)
    arena = np.full(size * blocks, 0xFF, dtype=np.uint8)  # bytes never written must not be seen: as floats they are NaN
    offsets = np.arange(blocks, dtype=np.int64)[::-1].copy() * size
    results = []
    for first in (0, tokens - 1):
        out = np.empty((tokens - first, q.shape[1], dim), dtype=np.float32)
        rows = np.array([0, tokens - first], dtype=np.int32)
        codecs = np.full(blocks, list(CODECS).index(name), dtype=np.uint8)
        nowhere = np.full(blocks, -1, dtype=np.int64)
        table = (np.array([0, blocks], np.int32), np.zeros(1, np.int32), offsets, codecs, nowhere, codecs)
        first_pos = np.array([first], dtype=np.int32)
        part = (q[first:], k[first:], v[first:])
        _native.attention(arena, name, isa, 2, *part, rows, first_pos, table, out)
        results.append(out)
    return results[0], results[1][0]


def cache_exercise() -> str:
    """Share a prefix, fork it, evict under pressure, give everything back; `check()` after each."""
    facts = FactLog()
    cache = KvCache(24, BLOCK_TOKENS, codec=codec("bf16"), eviction=eviction("lru"), facts=facts)
    scope = Scope("doctor")
    first = list(range(1, 3 * BLOCK_TOKENS + 6))
    _run(cache, scope, first, now=1.0)
    reused = _run(cache, scope, [*first, 7, 8, 9], now=2.0)
    if reused != len(first):
        raise Corrupt(f"a prefix of {len(first)} tokens was held, but {reused} were reused")
    for turn in range(12):
        _run(cache, scope, [1000 + turn, *range(5 * BLOCK_TOKENS)], now=3.0 + turn)
    cache.drop_unleased(99.0)
    cache.check()
    counts = cache.counts()
    if counts.free != counts.total:
        raise Corrupt(f"{counts.total - counts.free} of {counts.total} blocks were not given back")
    return f"invariants hold after {facts.next_seq} facts: shared, evicted and given back {counts.total} blocks"


def _run(cache: KvCache, scope: Scope, tokens: list[int], now: float) -> int:
    """Take, commit and give back the blocks of one sequence; the tokens that were reused."""
    plan = cache.plan(Ask(scope, tokens, len(tokens) + 1), now)
    if isinstance(plan, Shortfall):
        raise Corrupt(f"an idle pool cannot give {plan.needed} blocks: {plan.reason}")
    grant = cache.apply(plan, now)
    cache.check()
    lease = cache.commit(grant.lease, tokens, len(tokens), now)
    cache.check()
    cache.release(lease, tokens, len(tokens), now, "doctor")
    cache.check()
    return grant.lease.reused_tokens
