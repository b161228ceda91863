"""Logprobs of prompts: the rows of a step whose logits tell of the prompt's next token, and what they said."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tenure.engine.shape import logprob
from tenure.types import Logprob, Rows, SeqId, StepPlan, Token

F32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Told:
    """Rows of a step that tell of the tokens behind them: row `first` + i of tokens[`at` + i] of a prompt."""

    rows: Rows
    first: int
    at: int
    count: int


class Prompts:
    """The prompts under way whose logprobs were asked for, by request."""

    def __init__(self) -> None:
        self._tokens: dict[str, Sequence[Token]] = {}
        self._said: dict[str, dict[int, Logprob]] = {}

    def add(self, request: str, tokens: Sequence[Token]) -> None:
        self._tokens[request] = tokens
        self._said[request] = {}

    def drop(self, request: str) -> None:
        self._tokens.pop(request, None)
        self._said.pop(request, None)

    def rows(self, plan: StepPlan) -> list[Told]:
        """Those of a step. The prompt's last row tells of the answer instead. What is computed again after a pause is
        told again, to the same bit."""
        if not self._tokens:
            return []
        found, row = [], 0
        for rows in plan.rows:
            if rows.request in self._tokens and rows.index == rows.counter == 0:
                end = min(rows.start + len(rows.tokens), len(self._tokens[rows.request]) - 1)
                if end > rows.start:
                    found.append(Told(rows, row, rows.start + 1, end - rows.start))
            row += len(rows.tokens)
        return found

    def learn(self, told: Sequence[Told], logits: F32) -> set[SeqId]:
        """Take in the `logits` f32[rows, V] of the rows of `told`, one after the other. Gives the sequences with one
        that is not finite."""
        bad: set[SeqId] = set()
        done = 0
        for one in told:
            tokens, said = self._tokens[one.rows.request], self._said[one.rows.request]
            for i in range(one.count):
                entry = logprob(logits[done + i], tokens[one.at + i], one.rows.sampling.prompt_logprobs or 0)
                if not math.isfinite(entry.logprob):
                    bad.add(one.rows.seq)
                said[one.at + i] = entry
            done += one.count
        return bad

    def take(self, request: str) -> tuple[Logprob, ...]:
        """Of all tokens of a prompt but the first, once they are complete; nothing the second time."""
        said: Mapping[int, Logprob] = self._said.get(request, {})
        count = len(self._tokens.get(request, ())) - 1
        if count < 1 or len(said) < count:
            return ()
        self._said[request] = {}
        return tuple(said[at] for at in range(1, count + 1))


def indices(told: Sequence[Told]) -> NDArray[np.int32]:
    """i32: their rows in the step."""
    parts = [np.arange(one.first, one.first + one.count, dtype=np.int32) for one in told]
    return np.concatenate(parts) if parts else np.empty(0, np.int32)
