"""A step plan as the flat arrays that the decoder takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import is_

import numpy as np
from numpy.typing import NDArray

from tenure.device.ops import Places
from tenure.spec import BLOCK_TOKENS
from tenure.types import BlockId, Rows, SeqId, StepPlan

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
U8 = NDArray[np.uint8]


Table = tuple[I32, I32, I64, U8, I64, U8]
"""Where the blocks of S sequences lie for a group of layers: starts i32[S+1], first_block i32[S], offsets i64[B]
(bytes into the arena), codecs u8[B], encode_to i64[B] (-1: not encoded in this step), encode_codec u8[B]; see
`Decoder.step`."""


@dataclass(frozen=True, slots=True)
class Batch:
    """R rows of S sequences over B block table entries; logits are wanted after L of the rows."""

    tokens: I32
    """i32[R]"""
    seq_rows: I32
    """i32[S+1]: rows of sequence s are [seq_rows[s], seq_rows[s+1])"""
    first_pos: I32
    """i32[S]: position of its first row"""
    tables: tuple[Table, ...]
    """One per group of layers."""
    logit_rows: I32
    """i32[L]"""
    sampled: list[Rows]
    """Whose logits they are."""


Entries = tuple[int, I64, U8, I64, U8]
"""Of one sequence in a group of layers: first_block, offsets, codecs, encode_to, encode_codec; as in `Table`."""


class Batcher:
    """Builds batches; keeps each running sequence's entries as arrays, so that a step mostly only joins them."""

    def __init__(self, places: Places, block_tokens: int = BLOCK_TOKENS) -> None:
        self._places = places
        self._size = block_tokens
        self._kept: dict[SeqId, tuple[tuple[Sequence[BlockId], ...], int, list[Entries]]] = {}
        """Tables, number of the open block, and the entries of each table while they stay the same."""

    def build(self, plan: StepPlan) -> Batch:
        tokens: list[int] = []
        seq_rows = [0]
        first_pos: list[int] = []
        logit_rows: list[int] = []
        sampled: list[Rows] = []
        kept: dict[SeqId, tuple[tuple[Sequence[BlockId], ...], int, list[Entries]]] = {}
        for rows in plan.rows:
            before = self._kept.get(rows.seq)
            first, full = rows.start // self._size, (rows.start + len(rows.tokens)) // self._size
            same = before is not None and all(map(is_, before[0], rows.tables))
            if before and same and (rows.open is None or before[1] == first == full):
                kept[rows.seq] = before
            else:
                kept[rows.seq] = (rows.tables, first if first == full else -1, self._entries(rows))
            tokens.extend(rows.tokens)
            seq_rows.append(len(tokens))
            first_pos.append(rows.start)
            if rows.sample:
                logit_rows.append(len(tokens) - 1)
                sampled.append(rows)
        self._kept = kept
        return Batch(
            np.array(tokens, np.int32),
            np.array(seq_rows, np.int32),
            np.array(first_pos, np.int32),
            tuple(map(_joined, zip(*(entries for *_, entries in kept.values()), strict=True))),
            np.array(logit_rows, np.int32),
            sampled,
        )

    def _entries(self, rows: Rows) -> list[Entries]:
        """Of each group of layers."""
        if rows.open is None:
            return [self._stored(table) for table in rows.tables]
        staged = int(self._places.offsets([rows.open])[0])
        return [
            self._staged(rows, table, staged + at) for table, at in zip(rows.tables, self._places.parts, strict=True)
        ]

    def _stored(self, table: Sequence[BlockId]) -> Entries:
        """Every block is written where it is stored."""
        first, ids = _given(table)
        codecs = self._places.codecs(ids)
        return first, self._places.offsets(ids), codecs, np.full(len(ids), -1, np.int64), codecs

    def _staged(self, rows: Rows, table: Sequence[BlockId], where: int) -> Entries:
        """Blocks that become full in this step are encoded where they will be stored. What is still open afterwards,
        and what was open before, lies at `where`; the scheduler sees to it that not both need it in one step."""
        end = rows.start + len(rows.tokens)
        gone, ids = _given(table[: end // self._size])
        stored, stored_codecs = self._places.offsets(ids), self._places.codecs(ids)
        first, full, count = rows.start // self._size - gone, len(ids), -(-end // self._size) - gone
        offsets = np.full(count, -1, np.int64)
        offsets[:first] = stored[:first]
        if rows.start % self._size or end % self._size:
            offsets[first if rows.start % self._size else full] = where
        codecs = np.full(count, self._places.staging, np.uint8)
        codecs[:first] = stored_codecs[:first]
        encode_to = np.full(count, -1, np.int64)
        encode_to[first:full] = stored[first:full]
        encode_codec = codecs.copy()
        encode_codec[first:full] = stored_codecs[first:full]
        return gone, offsets, codecs, encode_to, encode_codec


def _given(table: Sequence[BlockId]) -> tuple[int, I64]:
    """How many blocks the window has left, and the others."""
    ids = np.array(table, np.int64)
    gone = int(np.count_nonzero(ids < 0))
    return gone, ids[gone:]


def _joined(entries: Sequence[Entries]) -> Table:
    """The table of a group of layers, from the entries of each sequence."""
    first_block, offsets, codecs, encode_to, encode_codec = zip(*entries, strict=True)
    return (
        np.cumsum([0, *map(len, offsets)]).astype(np.int32),
        np.array(first_block, np.int32),
        np.concatenate(offsets),
        np.concatenate(codecs),
        np.concatenate(encode_to),
        np.concatenate(encode_codec),
    )
