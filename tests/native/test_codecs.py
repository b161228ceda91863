"""KV codecs: their bytes, their rounding, attention over encoded blocks, and recoding; against the oracle."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.native.support import BLOCK, CODECS, ISAS, NAN_BYTE, Shelf, blocks_for, make_decoder, shelf_table, starts

from tenure import _native, spec
from tenure.device import reference

ENCODED = ["int8", "k8v4", "int4"]
Floats = NDArray[np.float32]
ROUNDING = {"int8": (0.011, 0.011), "k8v4": (0.011, 0.11), "int4": (0.13, 0.11)}
"""Relative error of K and of V that a Gaussian may suffer."""


def tolerance(isa: str, codec: str) -> float:
    """Queries and probabilities are bf16 with avx512; a value at a tie may go to another step, wide in int4."""
    return (6e-3 if isa == "avx512" else 1e-3) + (5e-3 if codec == "int4" else 1e-3)


def draw(tokens: int, heads: int, kv_heads: int, dim: int, seed: int) -> tuple[Floats, Floats, Floats]:
    """q, k and v; the channels of K have means and sizes of their own, as those of models have."""
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((tokens, heads, dim), dtype=np.float32)
    k = rng.standard_normal((tokens, kv_heads, dim), dtype=np.float32)
    k = k * rng.uniform(0.3, 2, (kv_heads, dim)) + rng.standard_normal((kv_heads, dim))
    return q, k.astype(np.float32), rng.standard_normal((tokens, kv_heads, dim), dtype=np.float32)


class Bench:
    """One layer of keys and values in an arena full of NaN; each slot holds a block of any codec."""

    def __init__(self, isa: str, heads: int, kv_heads: int, dim: int, slots: int, seed: int = 0) -> None:
        self.isa, self.heads, self.kv_heads, self.dim = isa, heads, kv_heads, dim
        self.slot = _native.block_bytes("bf16", 1, kv_heads, dim)
        self.arena = np.full(self.slot * slots, NAN_BYTE, np.uint8)
        self.free = list(np.random.default_rng(seed).permutation(slots) * self.slot)

    def shelf(self, codec: str, tokens: int, keep: bool = True) -> Shelf:
        staging, stored = ([int(self.free.pop()) for _ in range(blocks_for(tokens))] for _ in range(2))
        return Shelf(codec, staging, stored, keep)

    def run(self, parts: Sequence[tuple[Shelf, int, Floats, Floats, Floats]], threads: int = 1) -> list[Floats]:
        """Each part is (shelf, first position, q, k, v) of rows to store and attend."""
        counts = [len(q) for _, _, q, _, _ in parts]
        out = np.full((sum(counts), self.heads, self.dim), np.nan, np.float32)
        q, k, v = (np.concatenate([part[i] for part in parts]) for i in (2, 3, 4))
        table = shelf_table([(shelf, first, len(rows)) for shelf, first, rows, _, _ in parts])
        first = np.array([at for _, at, *_ in parts], np.int32)
        _native.attention(self.arena, "bf16", self.isa, threads, q, k, v, starts(counts), first, table, out)
        return np.split(out, np.cumsum(counts)[:-1])


@pytest.mark.parametrize("codec", ["bf16", "f32", *ENCODED])
@pytest.mark.parametrize(("layers", "kv_heads", "dim"), [(3, 2, 96), (30, 3, 64), (1, 1, 16), (2, 8, 128)])
def test_block_bytes_is_what_the_planner_counts(codec: str, layers: int, kv_heads: int, dim: int) -> None:
    geometry = spec.KvGeometry(layers, kv_heads, dim)
    assert _native.block_bytes(codec, layers, kv_heads, dim) == geometry.block_bytes(codec)


def test_bytes_of_a_token() -> None:
    bf16 = _native.block_bytes("bf16", 30, 3, 64)
    share = {codec: _native.block_bytes(codec, 30, 3, 64) / bf16 for codec in ENCODED}
    assert share["int8"] <= 0.52 and share["k8v4"] <= 0.41 and share["int4"] <= 0.282


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("codec", ENCODED)
@pytest.mark.parametrize(("kv_heads", "dim"), [(3, 64), (1, 16), (2, 80), (1, 256)])
def test_a_block_there_and_back(isa: str, codec: str, kv_heads: int, dim: int) -> None:
    """bf16 to the codec and back is what the oracle says, and no further away than the codec's rounding."""
    bench = Bench(isa, kv_heads, kv_heads, dim, 8)
    q, k, v = draw(BLOCK, kv_heads, kv_heads, dim, 5)
    plain = bench.shelf("bf16", BLOCK)
    bench.run([(plain, 0, q, k, v)])
    slots = np.array([plain.stored[0], *(bench.free.pop() for _ in range(2))], np.int64)
    recode(bench, slots[:1], "bf16", slots[1:2], codec)
    recode(bench, slots[1:2], codec, slots[2:], "bf16")
    got = [unpack(bench, int(slots[2]), of) for of in "kv"]
    want = reference.stored(codec, k, v)
    for x, y, exact, most in zip(got, want, (k, v), ROUNDING[codec], strict=True):
        assert np.linalg.norm(x - y) <= 6e-3 * np.linalg.norm(y)  # once more to bf16; at ties the other step is as near
        assert np.linalg.norm(x - exact) <= most * np.linalg.norm(exact)


def recode(bench: Bench, src: NDArray[np.int64], old: str, dst: NDArray[np.int64], new: str) -> None:
    _native.recode(bench.arena, src, old, dst, new, 1, bench.kv_heads, bench.dim, bench.isa)


def unpack(bench: Bench, offset: int, of: str) -> NDArray[np.float32]:
    """K or V of a staged bf16 block, [32, kv_heads, dim]."""
    bits = bench.arena[offset : offset + bench.slot].view(np.uint16)
    tiles = reference.from_bf16(bits).reshape(bench.kv_heads, 2, 2, 16 * bench.dim)
    if of == "k":  # [dim / 2][token][2]
        k = tiles[:, :, 0].reshape(bench.kv_heads, 2, bench.dim // 2, 16, 2)
        return k.transpose(1, 3, 0, 2, 4).reshape(BLOCK, bench.kv_heads, bench.dim)
    v = tiles[:, :, 1].reshape(bench.kv_heads, 2, 8, bench.dim, 2)  # [token pair][dim][2]
    return v.transpose(1, 2, 4, 0, 3).reshape(BLOCK, bench.kv_heads, bench.dim)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("codec", ENCODED)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (8, 1, 128), (3, 1, 80)])
def test_against_oracle(isa: str, codec: str, heads: int, kv_heads: int, dim: int) -> None:
    """Rows see their own block as staged and those before it as encoded."""
    lengths = [(1, 1), (33, 2), (64, 64), (160, 97), (1100, 40)]  # tokens, of which so many in the last step
    bench = Bench(isa, heads, kv_heads, dim, sum(2 * blocks_for(n) for n, _ in lengths))
    parts, wanted = [], []
    for seed, (tokens, rows) in enumerate(lengths):
        q, k, v = draw(tokens, heads, kv_heads, dim, seed)
        shelf, first = bench.shelf(codec, tokens, keep=seed % 2 == 0), tokens - rows
        if first:
            bench.run([(shelf, 0, q[:first], k[:first], v[:first])])
        parts.append((shelf, first, q[first:], k[first:], v[first:]))
        staged = [reference.round_bf16(x) for x in (k, v)]
        wanted.append(reference.attention(q[first:], *staged, first, later=reference.stored(codec, k, v)))
    for got, want in zip(bench.run(parts, threads=2), wanted, strict=True):
        assert np.linalg.norm(got - want) <= tolerance(isa, codec) * np.linalg.norm(want)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("codec", ENCODED)
def test_a_row_is_the_same_in_any_company(isa: str, codec: str) -> None:
    tokens, heads, kv_heads, dim = 600, 3, 1, 64
    q, k, v = draw(tokens, heads, kv_heads, dim, 1)

    def chunked(first: int, size: int, threads: int, seed: int, strangers: int = 0) -> Floats:
        """All tokens before `first` at once, the others `size` at a time."""
        bench = Bench(isa, heads, kv_heads, dim, 2 * blocks_for(tokens) + 6 * strangers, seed)
        shelf, out = bench.shelf(codec, tokens, keep=seed % 2 == 0), []
        others = [(bench.shelf(codec, 64), 40 + 8 * i, *draw(1, heads, kv_heads, dim, i)) for i in range(strangers)]
        for other, past, *_ in others:
            bench.run([(other, 0, *draw(past, heads, kv_heads, dim, past))])
        for a in [0] * (first > 0) + list(range(first, tokens, size)):
            rows = slice(a, first if a < first else a + size)
            place = len(others) // 2
            parts = [*others[:place], (shelf, a, q[rows], k[rows], v[rows]), *others[place:]]
            out.append(bench.run(parts, threads)[place])
        return np.concatenate(out)

    want = chunked(0, tokens, 1, 0)
    assert np.isfinite(want).all()
    for case in [(0, 513, 2, 1, 2), (0, 64, 2, 2), (505, 7, 1, 3, 2), (0, 7, 1, 4), (500, 1, 2, 5, 2)]:
        assert np.array_equal(chunked(*case), want), case


@pytest.mark.parametrize("isa", ISAS)
def test_one_call_mixes_codecs(isa: str) -> None:
    """A sequence whose blocks were recoded one by one, each step of 64 tokens having two codecs."""
    tokens, heads, kv_heads, dim = 321, 4, 2, 64
    q, k, v = draw(tokens, heads, kv_heads, dim, 2)
    bench = Bench(isa, heads, kv_heads, dim, 40)
    staging = int(bench.free.pop())
    table = [int(bench.free.pop()) for _ in range(blocks_for(tokens))]
    codecs = ["bf16", "int4", "int8", "k8v4", "int4", "bf16", "int8", "int8", "int4", "int4"]
    staged = [reference.round_bf16(x) for x in (k, v)]
    later = [x.copy() for x in staged]
    out = np.empty((1, heads, dim), np.float32)
    for at, codec in [*enumerate(codecs), (len(codecs), "bf16")]:
        rows = slice(at * BLOCK, min(tokens, (at + 1) * BLOCK))
        shelf = Shelf(codec, [staging], table)
        if codec == "bf16":
            shelf = Shelf("bf16", [table[at]], table)
        _native.attention(
            bench.arena, "bf16", isa, 1, q[rows], k[rows], v[rows], starts([rows.stop - rows.start]),
            np.array([rows.start], np.int32), mixed_table(shelf, codecs[:at], rows.stop), out := np.empty_like(q[rows]),
        )  # fmt: skip
        if codec != "bf16":
            for x, y in zip(later, reference.stored(codec, k[rows], v[rows]), strict=True):
                x[rows] = y
    want = reference.attention(q[-1:], *staged, tokens - 1, later=(later[0], later[1]))
    assert np.linalg.norm(out - want) <= tolerance(isa, "int4") * np.linalg.norm(want)


def mixed_table(shelf: Shelf, before: Sequence[str], tokens: int) -> _native.Table:
    """Blocks stored in the codecs `before`, then the one that is written."""
    done = [(shelf.stored[i], CODECS[codec], -1, 0) for i, codec in enumerate(before)]
    full = tokens % BLOCK == 0 and shelf.codec != "bf16"
    now = (shelf.staging[0], 0, shelf.stored[len(before)] if full else -1, CODECS[shelf.codec])
    offsets, codecs, encode_to, encode_codec = zip(*done, now, strict=True)
    return (
        starts([len(offsets)]), np.zeros(1, np.int32), np.array(offsets, np.int64), np.array(codecs, np.uint8),
        np.array(encode_to, np.int64), np.array(encode_codec, np.uint8),
    )  # fmt: skip


@pytest.mark.parametrize("codec", ENCODED)
def test_decoder_in_any_chunks(codec: str) -> None:
    """The whole forward pass: bit for bit the same however the prompt is cut, and close to what bf16 gives."""
    tokens = np.random.default_rng(3).integers(0, 131, 200).astype(np.int32)
    slots = 2 * blocks_for(len(tokens))

    def run(sizes: Sequence[int], threads: int, kept: str = codec, keep: bool = True) -> Floats:
        tiny = make_decoder(codec=kept, threads=threads)
        slot = _native.block_bytes("bf16", 2, 2, 32)
        arena, out, at = np.full(slot * slots, NAN_BYTE, np.uint8), [], 0
        places = [int(i) * slot for i in np.random.default_rng(len(sizes)).permutation(slots)]
        shelf = Shelf(kept, places[: slots // 2], places[slots // 2 :], keep)
        for size in sizes:
            logits = np.full((size, 131), np.nan, np.float32)
            tiny.native.step(
                arena, tokens[at : at + size], starts([size]), np.array([at], np.int32),
                [shelf_table([(shelf, at, size)])], np.arange(size, dtype=np.int32), logits,
            )  # fmt: skip
            out.append(logits)
            at += size
        return np.concatenate(out)

    want = run([200], 1)
    for sizes, threads, keep in [([200], 2, False), ([64, 64, 72], 2, True), ([7] * 28 + [4], 1, True)]:
        assert np.array_equal(run(sizes, threads, keep=keep), want), sizes[:3]
    assert np.array_equal(run([1] * 200, 1), want)
    assert not np.array_equal(want[64:], run([200], 1, "int4" if codec == "int8" else "int8")[64:])


def test_what_cannot_be_recoded() -> None:
    arena = np.zeros(1 << 16, np.uint8)
    one, two = np.zeros(1, np.int64), np.full(1, 1 << 14, np.int64)
    with pytest.raises(ValueError, match="f32"):
        _native.recode(arena, one, "f32", two, "int8", 1, 1, 64)
    with pytest.raises(ValueError, match="overlaps"):
        _native.recode(arena, one, "bf16", one + 4096, "int8", 1, 1, 64)
    with pytest.raises(ValueError, match="outside"):
        _native.recode(arena, one, "bf16", two << 2, "int8", 1, 1, 64)
    with pytest.raises(ValueError, match="known"):
        _native.recode(arena, one, "bf16", two, "int3", 1, 1, 64)
