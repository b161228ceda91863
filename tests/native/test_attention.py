"""Attention against the oracle, and its row-invariance bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.native.support import BLOCK, ISAS, NAN_BYTE, blocks_for, plain_table, starts

from tenure import _native, spec
from tenure.device import reference

TOLERANCE = {"avx512": 6e-3}  # queries and probabilities are bf16 there; f32 elsewhere
Floats = NDArray[np.float32]


class Bench:
    """One layer of keys and values in an arena full of NaN."""

    def __init__(self, isa: str, codec: str, heads: int, kv_heads: int, dim: int, blocks: int, seed: int = 0) -> None:
        self.isa, self.codec, self.heads, self.kv_heads, self.dim = isa, codec, heads, kv_heads, dim
        self.block_bytes = _native.block_bytes(codec, 1, kv_heads, dim)
        self.arena = np.full(self.block_bytes * blocks, NAN_BYTE, np.uint8)
        self.free = list(np.random.default_rng(seed).permutation(blocks).astype(np.int64) * self.block_bytes)

    def table(self, tokens: int) -> list[int]:
        return [self.free.pop() for _ in range(blocks_for(tokens))]

    def run(
        self, parts: Sequence[tuple[list[int], int, Floats, Floats, Floats]], threads: int = 1, **rule: Any
    ) -> list[NDArray[np.float32]]:
        """Each part is (block table, first position, q, k, v) of rows to store and attend."""
        counts = [len(q) for _, _, q, _, _ in parts]
        out = np.full((sum(counts), self.heads, self.dim), np.nan, np.float32)
        q, k, v = (np.concatenate([part[i] for part in parts]) for i in (2, 3, 4))
        _native.attention(
            self.arena, self.codec, self.isa, threads, q, k, v, starts(counts),
            np.array([first for _, first, *_ in parts], np.int32),
            plain_table([table for table, *_ in parts], self.codec), out, **rule,
        )  # fmt: skip
        return np.split(out, np.cumsum(counts)[:-1])


def draw(tokens: int, heads: int, kv_heads: int, dim: int, seed: int) -> tuple[Floats, Floats, Floats]:
    rng = np.random.default_rng(seed)
    q = 2 * rng.standard_normal((tokens, heads, dim), dtype=np.float32)
    k = rng.standard_normal((tokens, kv_heads, dim), dtype=np.float32)
    return q, k, rng.standard_normal((tokens, kv_heads, dim), dtype=np.float32)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("codec", ["bf16", "f32"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 4, 96), (8, 1, 128), (2, 1, 16), (7, 1, 80), (2, 2, 256)]
)
def test_against_oracle(isa: str, codec: str, heads: int, kv_heads: int, dim: int) -> None:
    lengths = [(1, 1), (6, 1), (33, 2), (64, 64), (600, 70), (1100, 1)]  # tokens, of which so many in the last step
    bench = Bench(isa, codec, heads, kv_heads, dim, sum(blocks_for(n) for n, _ in lengths))
    parts, wanted = [], []
    for seed, (tokens, rows) in enumerate(lengths):
        q, k, v = draw(tokens, heads, kv_heads, dim, seed)
        table, first = bench.table(tokens), tokens - rows
        if first:
            bench.run([(table, 0, q[:first], k[:first], v[:first])])
        parts.append((table, first, q[first:], k[first:], v[first:]))
        if codec == "bf16":
            k, v = (reference.round_bf16(x) for x in (k, v))
        wanted.append(reference.attention(q[first:], k, v, first))
    for got, want in zip(bench.run(parts, threads=2), wanted, strict=True):
        tolerance = TOLERANCE.get(isa, 2e-6) if codec == "bf16" else 2e-6
        assert np.linalg.norm(got - want) <= tolerance * np.linalg.norm(want)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("codec", ["bf16", "f32"])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(3, 1, 64), (4, 2, 80)])
def test_a_row_is_the_same_in_any_company(isa: str, codec: str, heads: int, kv_heads: int, dim: int) -> None:
    tokens = 1040
    q, k, v = draw(tokens, heads, kv_heads, dim, 1)

    def chunked(first: int, size: int, threads: int, seed: int, strangers: int = 0) -> Floats:
        """All tokens before `first` at once, the others `size` at a time."""
        bench = Bench(isa, codec, heads, kv_heads, dim, blocks_for(tokens) + 7 * strangers, seed)
        table, out = bench.table(tokens), []
        others = [(bench.table(40 + 9 * i), 40 + 8 * i, *draw(1, heads, kv_heads, dim, i)) for i in range(strangers)]
        for other_table, past, *_ in others:
            bench.run([(other_table, 0, *draw(past, heads, kv_heads, dim, past))])
        for a in [0] * (first > 0) + list(range(first, tokens, size)):
            rows = slice(a, first if a < first else a + size)
            place = len(others) // 2
            parts = [*others[:place], (table, a, q[rows], k[rows], v[rows]), *others[place:]]
            out.append(bench.run(parts, threads)[place])
        return np.concatenate(out)

    want = chunked(0, tokens, 1, 0)
    assert np.isfinite(want).all()
    for case in [(0, 513, 2, 1, 3), (0, 64, 2, 2), (505, 67, 1, 3, 15), (1000, 7, 2, 4), (1025, 1, 2, 5, 15)]:
        assert np.array_equal(chunked(*case), want), case


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("codec", ["bf16", "f32"])
@pytest.mark.parametrize(("window", "soft_cap"), [(1, 0.0), (20, 0.0), (100, 5.0), (600, 0.0), (5000, 50.0)])
def test_windows_and_soft_caps(isa: str, codec: str, window: int, soft_cap: float) -> None:
    """Against the oracle and the same in any company; what lies before every window is not even looked at."""
    tokens, heads, kv_heads, dim = 1100, 4, 2, 32
    rule = {"window": window, "soft_cap": soft_cap}
    q, k, v = draw(tokens, heads, kv_heads, dim, 7)

    def chunked(sizes: Sequence[int], threads: int, seed: int) -> Floats:
        bench = Bench(isa, codec, heads, kv_heads, dim, blocks_for(tokens) + 3, seed)
        table, stranger, at, out = bench.table(tokens), bench.table(70), 0, []
        other = (stranger, 60, *draw(9, heads, kv_heads, dim, seed))
        bench.run([(stranger, 0, *draw(60, heads, kv_heads, dim, 1))])
        for size in sizes:
            for gone in range(max(0, at + 1 - window) // BLOCK):
                bench.arena[table[gone] : table[gone] + bench.block_bytes] = NAN_BYTE
                table[gone] = -(1 << 40)
            rows = slice(at, at + size)
            out.append(bench.run([other, (table, at, q[rows], k[rows], v[rows])], threads, **rule)[1])
            at += size
        return np.concatenate(out)

    want = chunked([tokens], 1, 0)
    stored = [reference.round_bf16(x) if codec == "bf16" else x for x in (k, v)]
    exact = reference.attention(q, *stored, 0, window=window, soft_cap=soft_cap)
    tolerance = TOLERANCE.get(isa, 4e-6) if codec == "bf16" else 4e-6
    assert np.linalg.norm(want - exact) <= tolerance * np.linalg.norm(exact)
    for sizes, threads in [([600, 500], 2), ([1] * 70 + [64] * 16 + [6], 1), ([1030, *[7] * 10], 2)]:
        assert np.array_equal(chunked(sizes, threads, len(sizes)), want), sizes[:3]


@pytest.mark.parametrize("isa", ISAS)
def test_large_scores_do_not_overflow(isa: str) -> None:
    q, k, v = draw(100, 2, 1, 64, 3)
    bench = Bench(isa, "bf16", 2, 1, 64, 8)
    got = bench.run([(bench.table(100), 0, 100 * q, 10 * k, v)])[0]
    assert np.isfinite(got).all()
    want = reference.attention(reference.round_bf16(100 * q), reference.round_bf16(10 * k), reference.round_bf16(v), 0)
    # Near one-hot; where two keys are close, rounding may choose the other.
    assert np.mean(np.abs(got - want).max(-1) < 0.05) > 0.9


@pytest.mark.parametrize("codec", ["bf16", "f32"])
def test_block_bytes_is_what_the_planner_counts(codec: str) -> None:
    geometry = spec.KvGeometry(layers=3, kv_heads=2, head_dim=96)
    assert _native.block_bytes(codec, 3, 2, 96) == geometry.block_bytes(codec)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 3, 64), (4, 2, 24), (4, 2, 272)])
def test_shapes_it_cannot_serve_are_refused(heads: int, kv_heads: int, dim: int) -> None:
    bench = Bench(ISAS[0], "bf16", heads, kv_heads, dim, 1)
    with pytest.raises(ValueError, match=r"^head"):
        bench.run([(bench.table(1), 0, *draw(1, heads, kv_heads, dim, 0))])


def test_unknown_codec_is_refused() -> None:
    with pytest.raises(ValueError, match="known: bf16, f32, int8, k8v4, int4"):
        _native.block_bytes("int3", 1, 1, 64)
