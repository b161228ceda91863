"""Choosing tokens: the rows' sampling parameters as arrays for one native call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tenure import _native
from tenure.types import Rows, Token

_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Masks:
    """Which tokens some rows may choose."""

    bits: NDArray[np.int32]
    """[G, ⌈V / 32⌉]: a bit for each token, lowest first."""
    of: NDArray[np.int32]
    """[L]: each row's row of `bits`; −1 where all tokens may be chosen."""


class Sampler:
    """One token per row of logits. `threads` as the decoder's; 0 takes all cores."""

    def __init__(self, threads: int = 0) -> None:
        self._threads = threads

    def sample(self, logits: NDArray[np.float32], rows: Sequence[Rows], masks: Masks | None = None) -> list[Token]:
        """`logits` f32[L, V], one row for each of `rows`. A row that is not finite gives −1, and so does one that may
        choose no token.

        A choice depends on its own logits, sampling, counter and index alone, so neither batching nor preemption
        changes it.
        """
        count = len(rows)
        temperature = np.zeros(count, np.float32)
        top_p = np.ones(count, np.float32)
        top_k = np.zeros(count, np.int32)
        seed = np.zeros(count, np.uint64)
        counter = np.zeros(count, np.uint32)
        stream = np.zeros(count, np.uint32)
        min_p = np.zeros(count, np.float32)
        for i, row in enumerate(rows):
            if row.sampling.temperature > 0.0:
                temperature[i] = row.sampling.temperature
                top_p[i] = row.sampling.top_p
                top_k[i] = row.sampling.top_k
                seed[i] = row.sampling.seed & _MASK
                counter[i] = row.counter
                stream[i] = row.index
                min_p[i] = row.sampling.min_p
        chosen: NDArray[np.int32] = _native.sample(
            logits, temperature, top_p, top_k, seed, counter, stream, self._threads, min_p,
            None if masks is None else masks.bits, None if masks is None else masks.of,
        )  # fmt: skip
        tokens: list[Token] = chosen.tolist()
        return tokens
