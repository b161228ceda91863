"""One step on the machine: copies, one native call for all layers, a token for each row that asks."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tenure.device.arena import Arena
from tenure.device.ops import DeviceStore
from tenure.engine.batch import Batch, Batcher, Table
from tenure.engine.guided import ask
from tenure.engine.prompted import Prompts, Told, indices
from tenure.engine.sampler import Sampler
from tenure.engine.shape import Shapes
from tenure.types import Logprob, SeqId, StepPlan, Token

NOT_FINITE = "the model gave logits that are not finite numbers"


class Decoder(Protocol):
    """The part of tenure._native.Decoder that a step needs; see its docstring for the shapes."""

    @property
    def block_bytes(self) -> int: ...

    def step(
        self,
        arena: NDArray[np.uint8],
        tokens: NDArray[np.int32],
        seq_rows: NDArray[np.int32],
        first_pos: NDArray[np.int32],
        tables: Sequence[Table],
        logit_rows: NDArray[np.int32],
        logits: NDArray[np.float32],
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class Computed:
    """What a step gave: a token per sampled sequence, the sequences that cannot go on, the milliseconds it took."""

    tokens: Mapping[SeqId, Token]
    failed: Mapping[SeqId, str]
    step_ms: float
    told: Mapping[SeqId, Logprob]
    """What the tokens were chosen from, for those whose request asked."""


class Runner:
    """Runs step plans: `prepare`, then `compute`. `last_native_ms` were spent in the native call of the last one."""

    def __init__(self, decoder: Decoder, arena: Arena, store: DeviceStore, *, vocab: int, threads: int) -> None:
        self._decoder = decoder
        self._arena = arena
        self._store = store
        self._batcher = Batcher(store.places)
        self._sampler = Sampler(threads)
        self.shapes = Shapes(ask)
        self.prompts = Prompts()
        self._told: list[Told] = []
        self._logits = np.empty((16, vocab), np.float32)
        self._started = 0.0
        self.last_native_ms = 0.0

    def prepare(self, plan: StepPlan) -> Batch:
        """Execute the plan's copies and lay out its rows."""
        self._started = time.perf_counter()
        if plan.copies:
            self._store.execute(plan.copies)
        self._told = self.prompts.rows(plan)
        return self._batcher.build(plan)

    def compute(self, batch: Batch) -> Computed:
        """All layers over all rows, then a token for each row that asks."""
        count = len(batch.sampled)
        logit_rows = np.concatenate([batch.logit_rows, indices(self._told)]) if self._told else batch.logit_rows
        if len(logit_rows) > len(self._logits):
            self._logits = np.empty((max(2 * count, len(logit_rows)), self._logits.shape[1]), np.float32)
        logits = self._logits[:count]
        called = time.perf_counter()
        self._decoder.step(
            self._arena.bytes,
            batch.tokens,
            batch.seq_rows,
            batch.first_pos,
            batch.tables,
            logit_rows,
            self._logits[: len(logit_rows)],
        )
        self.last_native_ms = 1e3 * (time.perf_counter() - called)
        tokens: dict[SeqId, Token] = {}
        failed: dict[SeqId, str] = {}
        told: Mapping[SeqId, Logprob] = {}
        if self._told:
            bad = self.prompts.learn(self._told, self._logits[count : len(logit_rows)])
            failed.update(dict.fromkeys(bad, NOT_FINITE))
        if count:
            masks = self.shapes.apply(logits, batch.sampled)
            chosen = self._sampler.sample(logits, batch.sampled, masks)
            told = self.shapes.took(batch.sampled, chosen)
            for rows, token in zip(batch.sampled, chosen, strict=True):
                if token >= 0:
                    tokens[rows.seq] = token
                else:
                    failed[rows.seq] = self.shapes.failure(rows) or NOT_FINITE
        return Computed(tokens, failed, 1e3 * (time.perf_counter() - self._started), told)
