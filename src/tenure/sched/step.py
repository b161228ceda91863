"""How many rows a step may have: a cost model that learns from every step, and the budget it gives.

    step_ms ≈ base + decode · Σ weight(decode row) + prefill · Σ weight(prefill row)
    weight = 1 + seen / doubling

`seen` is what a row looks back at: its position, in layers with a window no more than that, on the average of all
layers. `doubling` is the length at which attention costs a row as much as all its linear layers: both are known from
the model's shape. The three costs are learned, so that the chunk adapts to the machine and to what else runs on it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tenure.sched.sequence import Phase, Sequence
from tenure.spec import LayerGroup, seen

LEARN = 0.2
"""Weight of the newest step in the averages."""
SPIKE = 4.0
"""A step this many times dearer than predicted teaches no more than this: a stolen core says nothing of the model."""


@dataclass(slots=True)
class CostModel:
    """Predicts what a step costs, in milliseconds. Pure: it sees only what `learn` tells it."""

    base: float = 4.0
    decode: float = 1.0
    prefill: float = 0.6
    doubling: float = 3000.0
    groups: tuple[LayerGroup, ...] = (LayerGroup(1),)
    _seen_decode: bool = field(default=False, init=False)
    _seen_prefill: bool = field(default=False, init=False)

    def weight(self, start: int, rows: int = 1) -> float:
        """Rows at positions start, start + 1, … in units of one row at position 0."""
        return rows + seen(self.groups, start, start + rows) / self.doubling

    def predict(self, decode_weight: float, prefill_weight: float) -> float:
        return self.base + self.decode * decode_weight + self.prefill * prefill_weight

    def learn(self, decode_weight: float, prefill_weight: float, step_ms: float) -> None:
        """A step with rows of these weights, at least one of them above 0, took `step_ms`."""
        if prefill_weight > 0.0:
            self._learn_prefill(decode_weight, prefill_weight, step_ms)
        else:
            self._learn_decode(decode_weight, step_ms)

    def _learn_decode(self, weight: float, step_ms: float) -> None:
        predicted = self.predict(weight, 0.0)
        if not self._seen_decode:  # the guess it started with may be off by any factor: take the first step as it is
            self._seen_decode = True
            self.base *= step_ms / predicted
            self.decode *= step_ms / predicted
            return
        error = min(step_ms, SPIKE * predicted) - predicted
        step = LEARN * error / (1.0 + weight * weight)
        self.base = max(0.0, self.base + step)
        self.decode = max(0.0, self.decode + step * weight)

    def _learn_prefill(self, decode_weight: float, weight: float, step_ms: float) -> None:
        rest = max(0.1 * step_ms, step_ms - self.predict(decode_weight, 0.0))
        cost = rest / weight
        if not self._seen_prefill:
            self._seen_prefill = True
            self.prefill = cost
            return
        self.prefill += LEARN * (min(cost, SPIKE * self.prefill) - self.prefill)


TOLD_ROWS = 64
"""Prompt rows of a step whose logits are told: what they take is this times the vocabulary, whatever the prompts."""


@dataclass(slots=True)
class RowBudget:
    """The rows one step may still take. Decode rows are in already; prefill asks with `chunk`."""

    costs: CostModel
    block_tokens: int
    rows_left: int
    ms_left: float
    """Infinite when no stream is kept waiting by this step."""
    staged: bool = False
    """Open blocks are staged apart: one that was begun in a step before is filled without going on to the next, which
    would be staged in the same place."""
    granted: bool = False
    told_left: int = TOLD_ROWS

    @property
    def open(self) -> bool:
        """Whether one more sequence is worth starting."""
        return self.rows_left > 0 and (self.ms_left > 0.0 or not self.granted)

    def chunk(self, start: int, wanted: int, *, told: bool = False) -> int:
        """How many of the `wanted` rows from position `start` on fit; takes them from the budget. `told`: the logits of
        all of them are wanted.

        The first chunk of a step is at least a block, so that a prefill always moves on. A chunk that does not
        finish its prompt ends at a block's end, where what it computed can be shared.
        """
        if told:
            wanted = min(wanted, self.told_left)
        if self.staged and (begun := start % self.block_tokens):
            wanted = min(wanted, self.block_tokens - begun)
        fit = min(wanted, self.rows_left)
        if self.ms_left != float("inf"):
            affordable = int(self.ms_left / max(1e-6, self.costs.prefill * self.costs.weight(start)))
            fit = min(fit, max(affordable, 0 if self.granted else min(self.block_tokens, wanted)))
        if fit < wanted:
            cut = (start + fit) % self.block_tokens
            if cut < fit:
                fit -= cut
            elif self.granted:  # not even to the block's end: better in the next step
                return 0
        if fit <= 0:
            return 0
        self.granted = True
        self.rows_left -= fit
        self.told_left -= fit if told else 0
        self.ms_left -= self.costs.prefill * self.costs.weight(start, fit)
        return fit


@dataclass(slots=True)
class Flight:
    """A step that is being put together, then computed."""

    number: int
    at: float = 0.0
    """When it was put together."""
    rows: list[tuple[Sequence, int, bool]] = field(default_factory=list)
    """Sequence, how many rows, whether a token is sampled after them."""
    decode_rows: int = 0
    prefill_rows: int = 0
    decode_weight: float = 0.0
    prefill_weight: float = 0.0

    def add(self, seq: Sequence, count: int, sample: bool, weight: float) -> None:
        self.rows.append((seq, count, sample))
        if seq.phase is Phase.DECODE:
            self.decode_rows += count
            self.decode_weight += weight
        else:
            self.prefill_rows += count
            self.prefill_weight += weight
