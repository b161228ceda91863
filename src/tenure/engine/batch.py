"""A step plan as the flat arrays that the decoder takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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


Entries = tuple[I64, U8, I64, U8]
"""Of one sequence: offsets, codecs, encode_to, encode_codec; as in `Table`."""


class Batcher:
    """Builds batches; keeps each running sequence's entries as arrays, so that a step mostly only joins them."""

    def __init__(self, places: Places, block_tokens: int = BLOCK_TOKENS) -> None:
        self._places = places
        self._size = block_tokens
        self._kept: dict[SeqId, tuple[Sequence[BlockId], int, Entries]] = {}
        """Blocks, number of the open one, and the entries while they stay the same."""

    def build(self, plan: StepPlan) -> Batch:
        tokens: list[int] = []
        seq_rows = [0]
        first_pos: list[int] = []
        starts = [0]
        logit_rows: list[int] = []
        sampled: list[Rows] = []
        kept: dict[SeqId, tuple[Sequence[BlockId], int, Entries]] = {}
        parts: list[Entries] = []
        for rows in plan.rows:
            before = self._kept.get(rows.seq)
            first, full = rows.start // self._size, (rows.start + len(rows.tokens)) // self._size
            if before and before[0] is rows.tables[0] and (rows.open is None or before[1] == first == full):
                kept[rows.seq] = before
            else:
                entries = self._stored(rows) if rows.open is None else self._staged(rows, rows.open)
                kept[rows.seq] = (rows.tables[0], first if first == full else -1, entries)
            parts.append(kept[rows.seq][2])
            tokens.extend(rows.tokens)
            seq_rows.append(len(tokens))
            first_pos.append(rows.start)
            starts.append(starts[-1] + len(parts[-1][0]))
            if rows.sample:
                logit_rows.append(len(tokens) - 1)
                sampled.append(rows)
        self._kept = kept
        offsets, codecs, encode_to, encode_codec = zip(*parts, strict=True)
        table = (
            np.array(starts, np.int32),
            np.zeros(len(plan.rows), np.int32),
            np.concatenate(offsets),
            np.concatenate(codecs),
            np.concatenate(encode_to),
            np.concatenate(encode_codec),
        )
        return Batch(
            np.array(tokens, np.int32),
            np.array(seq_rows, np.int32),
            np.array(first_pos, np.int32),
            (table,),
            np.array(logit_rows, np.int32),
            sampled,
        )

    def _stored(self, rows: Rows) -> Entries:
        """Every block is written where it is stored."""
        codecs = self._places.codecs(rows.tables[0])
        return self._places.offsets(rows.tables[0]), codecs, np.full(len(rows.tables[0]), -1, np.int64), codecs

    def _staged(self, rows: Rows, where: BlockId) -> Entries:
        """Blocks that become full in this step are encoded where they will be stored. What is still open afterwards,
        and what was open before, lies at `where`; the scheduler sees to it that not both need it in one step."""
        end = rows.start + len(rows.tokens)
        first, full, count = rows.start // self._size, end // self._size, -(-end // self._size)
        stored, stored_codecs = self._places.offsets(rows.tables[0][:full]), self._places.codecs(rows.tables[0][:full])
        offsets = np.full(count, -1, np.int64)
        offsets[:first] = stored[:first]
        if rows.start % self._size or end % self._size:
            offsets[first if rows.start % self._size else full] = self._places.offsets([where])[0]
        codecs = np.full(count, self._places.staging, np.uint8)
        codecs[:first] = stored_codecs[:first]
        encode_to = np.full(count, -1, np.int64)
        encode_to[first:full] = stored[first:full]
        encode_codec = codecs.copy()
        encode_codec[first:full] = stored_codecs[first:full]
        return offsets, codecs, encode_to, encode_codec
