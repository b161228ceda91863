"""Small models and ragged steps for the tests of attention and of the decoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tenure import _native, spec
from tenure.device import reference

ISAS = _native.isas()
CODECS = {name: number for number, name in enumerate(spec.CODECS)}
BLOCK = 32
NAN_BYTE = 0xFF  # as f32 or as bf16, bytes of all ones are NaN


def blocks_for(tokens: int) -> int:
    return -(-tokens // BLOCK)


@dataclass
class Sequence_:
    """A sequence in an arena: `table` holds the byte offsets of its blocks, `done` its tokens already computed."""

    table: NDArray[np.int64]
    done: int = 0


class Slots:
    """Hands out the blocks of an arena full of NaN, in a shuffled order."""

    def __init__(self, block_bytes: int, blocks: int, seed: int = 0) -> None:
        self.arena = np.full(block_bytes * blocks, NAN_BYTE, np.uint8)
        self.block_bytes = block_bytes
        self._free = list(np.random.default_rng(seed).permutation(blocks))

    def take(self, tokens: int) -> Sequence_:
        ids = [self._free.pop() for _ in range(blocks_for(tokens))]
        return Sequence_(np.array(ids, np.int64) * self.block_bytes)


def starts(counts: Sequence[int]) -> NDArray[np.int32]:
    return np.cumsum([0, *counts]).astype(np.int32)


def plain_table(tables: Sequence[Sequence[int] | NDArray[np.int64]], codec: str) -> _native.Table:
    """The offsets of each sequence's blocks as a table: all of one codec, none to be encoded."""
    offsets = np.concatenate([np.asarray(table, np.int64) for table in tables])
    codecs, nowhere = np.full(len(offsets), CODECS[codec], np.uint8), np.full(len(offsets), -1, np.int64)
    return starts([len(table) for table in tables]), np.zeros(len(tables), np.int32), offsets, codecs, nowhere, codecs


@dataclass
class Shelf:
    """Where one sequence lies when its full blocks are encoded: where each block is staged, and stored."""

    codec: str
    staging: Sequence[int]
    stored: list[int]
    keep: bool = True
    """Whether a block that is written whole in one step, the last of it, is staged in the arena too."""

    def entries(self, first: int, rows: int) -> list[tuple[int, int, int, int]]:
        """Offset, codec, encode_to and encode_codec of each block for a step of `rows` tokens from position `first`."""
        out = []
        for block in range(blocks_for(first + rows)):
            start, end = BLOCK * block, BLOCK * (block + 1)
            if self.codec == "bf16":
                out.append((self.stored[block], 0, -1, 0))
                continue
            if end <= first:
                out.append((self.stored[block], CODECS[self.codec], -1, 0))
                continue
            full, whole, last = end <= first + rows, start >= first, end >= first + rows
            staged = -1 if full and whole and not (last and self.keep) else self.staging[block]
            out.append((staged, 0, self.stored[block] if full else -1, CODECS[self.codec]))
        return out


def shelf_table(work: Sequence[tuple[Shelf, int, int]]) -> _native.Table:
    """The table of a step: (shelf, first position, rows) of each sequence."""
    entries = [shelf.entries(first, rows) for shelf, first, rows in work]
    offsets, codecs, encode_to, encode_codec = zip(*(entry for one in entries for entry in one), strict=True)
    return (
        starts([len(one) for one in entries]), np.zeros(len(entries), np.int32), np.array(offsets, np.int64),
        np.array(codecs, np.uint8), np.array(encode_to, np.int64), np.array(encode_codec, np.uint8),
    )  # fmt: skip


@dataclass
class Tiny:
    """A decoder of random weights and its oracle."""

    native: _native.Decoder
    oracle: reference.Decoder
    codec: str
    vocab: int
    geometry: spec.KvGeometry

    def slots(self, blocks: int = 64, seed: int = 0) -> Slots:
        return Slots(self.native.block_bytes, blocks, seed)

    def step(
        self, slots: Slots, work: Sequence[tuple[Sequence_, Sequence[int]]], last_only: bool = False
    ) -> list[NDArray[np.float32]]:
        """Compute the next tokens of each sequence in one step; logits [rows, vocab] of each (or of the last row)."""
        counts = [len(tokens) for _, tokens in work]
        first = np.array([s.done for s, _ in work], np.int32)
        tables = [s.table for s, _ in work]
        ends = starts(counts)
        rows = (ends[1:] - 1 if last_only else np.arange(ends[-1])).astype(np.int32)
        logits = np.full((len(rows), self.vocab), np.nan, np.float32)
        tokens = np.concatenate([np.asarray(t, np.int32) for _, t in work])
        parts = [
            plain_table([table + part for table in tables], self.codec)
            for part in self.geometry.part_offsets(self.codec)
        ]
        self.native.step(slots.arena, tokens, ends, first, parts, rows, logits)
        for (sequence, _), count in zip(work, counts, strict=True):
            sequence.done += count
        return np.split(logits, np.arange(1, len(work)) if last_only else ends[1:-1])


def make_decoder(
    *,
    weights: str = "bf16",
    codec: str = "bf16",
    isa: str = "",
    threads: int = 1,
    tied: bool = True,
    bias: bool = False,
    heads: int = 6,
    kv_heads: int = 2,
    head_dim: int = 32,
    hidden: int = 96,
    ffn: int = 160,
    vocab: int = 131,
    layers: int = 2,
    seed: int = 0,
    rope_scale: float = 1.0,
    norms: str = "before",
    qk_norm: str = "none",
    inv_freq: NDArray[np.float32] | None = None,
    windows: Sequence[int] = (),
    rope_of_layer: Sequence[int] = (),
    **options: Any,
) -> Tiny:
    """A decoder of random weights in the given format, the same for every ISA and number of threads.

    `options` go to the decoder and to its oracle alike.
    """
    rng = np.random.default_rng(seed)
    if inv_freq is None:
        inv_freq = (10000.0 ** (-np.arange(0, head_dim, 2) / head_dim)).astype(np.float32)
    windows, rope_of_layer = list(windows) or [0] * layers, list(rope_of_layer) or [0] * layers
    native = _native.Decoder(
        layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, head_dim=head_dim, ffn=ffn, vocab=vocab,
        rms_eps=1e-5, inv_freq=inv_freq, kv_codec=codec, threads=threads, isa=isa, norms=norms, qk_norm=qk_norm,
        windows=np.array(windows, np.int32), rope_of_layer=np.array(rope_of_layer, np.int32), rope_scale=rope_scale,
        **options,
    )  # fmt: skip

    def packed(n: int, k: int, gain: float = 1.0) -> tuple[tuple[NDArray[np.generic], ...], NDArray[np.float64]]:
        w = (rng.standard_normal((n, k)) * gain / np.sqrt(k)).astype(np.float32)
        if weights == "f32":
            return (w,), w.astype(np.float64)
        if weights == "bf16":
            bits = reference.to_bf16(w)
            return (bits,), reference.dequantise("bf16", bits)
        groups = w.reshape(n, k // 32, 32)
        low, high = groups.min(-1), groups.max(-1)
        scale, floor = ((high - low) / 15).astype(np.float16), low.astype(np.float16)
        q = np.clip(np.rint((groups - floor[..., None]) / scale[..., None]), 0, 15).astype(np.uint8).reshape(n, k)
        parts = (q, scale.view(np.uint16), floor.view(np.uint16))
        return parts, reference.dequantise("int4", *parts)

    def linear(name: str, n: int, k: int, offset: NDArray[np.float32] | None = None) -> NDArray[np.float64]:
        parts, values = packed(n, k)
        native.set_linear(name, weights, *parts, bias=offset)
        return values

    def norm(name: str, size: int = hidden) -> NDArray[np.float32]:
        weight = (1 + 0.2 * rng.standard_normal(size)).astype(np.float32)
        native.set_norm(name, weight)
        return weight

    head_norms = {"none": {}, "head": {"q_norm": head_dim, "k_norm": head_dim},
                  "whole": {"q_norm": heads * head_dim, "k_norm": kv_heads * head_dim}}[qk_norm]  # fmt: skip
    layer_norms = {
        "before": ["attn_norm", "ffn_norm"],
        "after": ["attn_post_norm", "ffn_post_norm"],
        "both": ["attn_norm", "ffn_norm", "attn_post_norm", "ffn_post_norm"],
    }[norms]
    width = (heads + 2 * kv_heads) * head_dim
    sizes = {
        "qkv": (width, hidden),
        "o": (hidden, heads * head_dim),
        "gate_up": (2 * ffn, hidden),
        "down": (hidden, ffn),
    }

    def layer(i: int) -> reference.Layer:
        at = f"layers.{i}."
        biases = {name: rng.standard_normal(n).astype(np.float32) for name, (n, _) in sizes.items()} if bias else {}
        frequencies = inv_freq if inv_freq.ndim == 1 else inv_freq[rope_of_layer[i]]
        return reference.Layer(
            **{name: linear(at + name, n, k, biases.get(name)) for name, (n, k) in sizes.items()},
            norms={
                name: norm(at + name, size)
                for name, size in {**dict.fromkeys(layer_norms, hidden), **head_norms}.items()
            },
            inv_freq=None if rope_of_layer[i] < 0 else frequencies,
            window=windows[i] or None,
            bias=dict(biases),
        )

    parts, embedding = packed(vocab, hidden, 8.0)
    native.set_embedding(weights, *parts)
    stack = [layer(i) for i in range(layers)]
    final = norm("norm")
    head = None if tied else linear("lm_head", vocab, hidden)
    oracle = reference.Decoder(
        heads, kv_heads, head_dim, 1e-5, embedding, stack, final, head, kv_codec=codec, rope_scale=rope_scale, **options
    )
    shape = spec.ModelShape(
        layers, hidden, heads, kv_heads, head_dim, ffn, vocab, 4096, tuple(window or None for window in windows)
    )
    return Tiny(native, oracle, codec, vocab, spec.KvGeometry.of(shape))
