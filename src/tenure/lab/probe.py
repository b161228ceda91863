"""Sequences fed to a model by hand, in any KV codec, past scheduler and cache: what is measured is the codec alone.

Blocks lie as the engine lays them: a full one encoded, the open one staged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tenure.models.loader import Model
from tenure.spec import BLOCK_TOKENS, CODECS, STAGING, KvGeometry

F32 = NDArray[np.float32]
NUMBERS = {name: number for number, name in enumerate(CODECS)}


class Probe:
    """`count` sequences of at most `capacity` tokens each. The model must stage what the codec stages."""

    def __init__(self, model: Model, codec: str, count: int, capacity: int) -> None:
        geometry = KvGeometry.of(model.shape)
        self._staging = geometry.staging_codec(codec)
        stored, staged = geometry.block_bytes(codec), geometry.block_bytes(self._staging)
        blocks = geometry.blocks(capacity)
        self._quantised = codec not in STAGING
        self._codec = codec
        size = count * (blocks * stored + (staged if self._quantised else 0))
        raw = np.zeros(size + 64, np.uint8)
        start = -raw.ctypes.data % 64
        self.arena = raw[start : start + size]
        self._stored = (np.arange(count * blocks, dtype=np.int64) * stored).reshape(count, blocks)
        self._staged = count * blocks * stored + np.arange(count, dtype=np.int64) * staged
        # Blocks hold all layers: what a window has left is kept, and a group's layers are a part of each.
        parts = geometry.part_offsets(codec), geometry.part_offsets(self._staging)
        self._parts = list(zip(*parts, strict=True))
        self._decoder, self._vocab = model.decoder, model.shape.vocab
        self._lengths = [0] * count

    def feed(self, tokens: Sequence[Sequence[int]], *, last_only: bool = False) -> F32:
        """Append tokens to each sequence; logits of every new row, or of each sequence's last: f32[rows, vocab].

        An open block is filled up to its end at most: what follows it begins with the next call.
        """
        rows = np.cumsum([0, *map(len, tokens)]).astype(np.int32)
        tables = [self._table(tokens, *part) for part in self._parts]
        wanted = (rows[1:] - 1 if last_only else np.arange(rows[-1])).astype(np.int32)
        logits = np.empty((len(wanted), self._vocab), np.float32)
        flat = np.concatenate([np.asarray(new, np.int32) for new in tokens])
        first = np.array(self._lengths, np.int32)
        self._decoder.step(self.arena, flat, rows, first, tables, wanted, logits)
        self._lengths = [length + len(new) for length, new in zip(self._lengths, tokens, strict=True)]
        return logits

    def _table(self, tokens: Sequence[Sequence[int]], stored_at: int, staged_at: int) -> tuple[Any, ...]:
        """Of the group of layers that begin so many bytes into a stored and into a staged block."""
        entries = [self._entries(s, len(new), stored_at, staged_at) for s, new in enumerate(tokens)]
        return (
            np.cumsum([0, *(len(offsets) for offsets, *_ in entries)]).astype(np.int32),
            np.zeros(len(tokens), np.int32),
            *(np.concatenate(column) for column in zip(*entries, strict=True)),
        )

    def _entries(self, sequence: int, count: int, stored_at: int, staged_at: int) -> tuple[NDArray[Any], ...]:
        """Offsets, codecs, encode_to and encode_codec of one sequence for a step of `count` more tokens."""
        begin, end = self._lengths[sequence], self._lengths[sequence] + count
        first, full, blocks = begin // BLOCK_TOKENS, end // BLOCK_TOKENS, -(-end // BLOCK_TOKENS)
        if begin % BLOCK_TOKENS and end > (first + 1) * BLOCK_TOKENS:
            raise ValueError("a step may not go beyond the open block")
        offsets = self._stored[sequence, :blocks] + stored_at
        codecs = np.full(blocks, NUMBERS[self._codec], np.uint8)
        encode_to, encode_codec = np.full(blocks, -1, np.int64), codecs.copy()
        if self._quantised:
            encode_to[first:full] = offsets[first:full]
            offsets[first:] = -1
            codecs[first:] = encode_codec[full:] = NUMBERS[self._staging]
            if begin % BLOCK_TOKENS or end % BLOCK_TOKENS:
                offsets[first if begin % BLOCK_TOKENS else full] = self._staged[sequence] + staged_at
        return offsets, codecs, encode_to, encode_codec
