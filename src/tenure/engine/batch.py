"""A step plan as the flat arrays that the decoder takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tenure.types import BlockId, Rows, SeqId, StepPlan

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Batch:
    """R rows of S sequences over B block table entries; logits are wanted after L of the rows."""

    tokens: I32
    """i32[R]"""
    seq_rows: I32
    """i32[S+1]: rows of sequence s are [seq_rows[s], seq_rows[s+1])"""
    first_pos: I32
    """i32[S]: position of its first row"""
    block_starts: I32
    """i32[S+1]: its part of the block table"""
    block_offsets: I64
    """i64[B]: bytes into the arena"""
    block_codecs: NDArray[np.uint8]
    """u8[B]"""
    logit_rows: I32
    """i32[L]"""
    sampled: list[Rows]
    """Whose logits they are."""


class Batcher:
    """Builds batches; keeps each running sequence's block table as an array, so that a step only joins them."""

    def __init__(self, block_bytes: int, codec: int) -> None:
        """`codec`: the number of the arena's codec in the native half."""
        self._block_bytes = block_bytes
        self._codec = codec
        self._codecs = np.full(1024, codec, np.uint8)
        self._tables: dict[SeqId, tuple[Sequence[BlockId], I64]] = {}

    def build(self, plan: StepPlan) -> Batch:
        tokens: list[int] = []
        seq_rows = [0]
        first_pos: list[int] = []
        block_starts = [0]
        logit_rows: list[int] = []
        sampled: list[Rows] = []
        tables: dict[SeqId, tuple[Sequence[BlockId], I64]] = {}
        blocks = 0
        for rows in plan.rows:
            held = self._tables.get(rows.seq)
            if held is None or held[0] is not rows.blocks:
                held = (rows.blocks, np.array(rows.blocks, np.int64) * self._block_bytes)
            tables[rows.seq] = held
            tokens.extend(rows.tokens)
            seq_rows.append(len(tokens))
            first_pos.append(rows.start)
            blocks += len(rows.blocks)
            block_starts.append(blocks)
            if rows.sample:
                logit_rows.append(len(tokens) - 1)
                sampled.append(rows)
        self._tables = tables
        if blocks > len(self._codecs):
            self._codecs = np.full(2 * blocks, self._codec, np.uint8)
        return Batch(
            np.array(tokens, np.int32),
            np.array(seq_rows, np.int32),
            np.array(first_pos, np.int32),
            np.array(block_starts, np.int32),
            np.concatenate([table for _, table in tables.values()]),
            self._codecs[:blocks],
            np.array(logit_rows, np.int32),
            sampled,
        )
