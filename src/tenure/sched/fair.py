"""The order of the queue: priority buys a head start, and nobody is overtaken for good.

A request's place is fixed when it arrives: its arrival time plus PATIENCE_S for each step of priority. So a request of
the next better priority goes first only when it came less than PATIENCE_S later, and whoever waits is sure to be at
the head one day, however many better ones keep coming. A paused sequence keeps the place it arrived with, which puts it
in front of everything that came later.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from tenure.sched.sequence import Phase, Sequence

PATIENCE_S = 30.0
MAX_PRIORITY = 100
"""Priorities beyond ± this are taken as this: it bounds how long the head of the queue can be overtaken."""


def order(arrived: float, priority: int) -> float:
    """Place in the queue of a request that arrived at `arrived` seconds; lower `priority` runs first, as in vLLM."""
    return arrived + PATIENCE_S * max(-MAX_PRIORITY, min(MAX_PRIORITY, priority))


class WaitingQueue:
    """Sequences that wait, in order. `new` and `new_tokens` count those never started; the prompt counts once for n."""

    def __init__(self) -> None:
        self._items: list[tuple[float, int, Sequence]] = []
        self.new = 0
        self.new_tokens = 0

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Sequence]:
        """In order, over a copy: sequences may be removed on the way."""
        return iter([item[2] for item in self._items])

    def add(self, seq: Sequence) -> None:
        insort(self._items, (seq.job.order, int(seq.id), seq))
        self._count(seq, 1)

    def remove(self, seq: Sequence) -> None:
        """Take out a sequence that is in the queue, before its phase changes."""
        at = bisect_left(self._items, (seq.job.order, int(seq.id)))
        if at == len(self._items) or self._items[at][2] is not seq:
            raise ValueError(f"sequence {seq.id} is not in the queue")
        del self._items[at]
        self._count(seq, -1)

    def _count(self, seq: Sequence, sign: int) -> None:
        if seq.phase is Phase.WAITING:
            self.new += sign
            if seq.index == 0:
                self.new_tokens += sign * seq.job.prompt_len
