"""When a request would start: the queue is played forward with what was learned of costs and lengths."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heapify, heappop, heappush

from tenure.sched.sequence import Job, Phase, Sequence
from tenure.sched.step import CostModel

LEARN = 0.1
MOST = 256
"""Waiting sequences that are played forward one by one; what is behind them is taken to go on at their pace."""


class Outlook:
    """Predicts starts, in seconds. Learns how long answers are: of those whose client named a limit as a part of that
    limit, of others in tokens."""

    def __init__(self, costs: CostModel, block_tokens: int, max_num_seqs: int) -> None:
        self._costs = costs
        self._size = block_tokens
        self._max_seqs = max_num_seqs
        self._tokens = 128.0
        self._part = 0.75

    def learn(self, job: Job) -> None:
        """A request has ended."""
        got = job.sequences[0].generated
        if job.clamped:
            self._tokens += LEARN * (got - self._tokens)
        elif job.granted:
            self._part += LEARN * (got / job.granted - self._part)

    def start_s(self, running: Iterable[Sequence], waiting: Iterable[Sequence], available: int, needed: int) -> float:
        """Seconds until one that needs `needed` blocks starts behind all of `waiting`, when `available` blocks are free
        or evictable now."""
        costs = self._costs
        ends: list[tuple[float, int, float]] = []
        """Of those that run: the token at which each ends, the blocks it has then, the weight of its rows."""
        ms = at = 0.0
        played = behind = 0
        for seq in running:
            left = self._left(seq)
            held = 0 if seq.lease is None else len(seq.lease.blocks)
            final = max(held, self._blocks(len(seq.tokens) + left))
            available -= final - held
            ends.append((left, final, costs.weight(len(seq.tokens))))
            if seq.phase is Phase.PREFILL:
                ms += costs.prefill * costs.weight(seq.computed, seq.pending)
        heapify(ends)
        weight = sum(end[2] for end in ends)

        def free(wants: int) -> None:
            """Play on until a slot and so many blocks are free."""
            nonlocal ms, at, available, weight
            while ends and (len(ends) >= self._max_seqs or wants > available):
                end, freed, less = heappop(ends)
                ms += (end - at) * costs.predict(weight, 0.0)
                at = end
                available += freed
                weight -= less

        for seq in waiting:
            if played == MOST:
                behind += 1
                continue
            played += 1
            left = self._left(seq)
            wants = self._blocks(len(seq.tokens) + left)
            free(wants)
            ms += costs.prefill * costs.weight(0, 1 if seq.index else seq.pending)
            available -= wants
            more = costs.weight(len(seq.tokens))
            weight += more
            heappush(ends, (at + left, wants, more))
        free(needed)
        return 1e-3 * ms * (1.0 + behind / max(1, played))

    def prefill_s(self, start: int, tokens: int) -> float:
        """Seconds to compute a prompt's `tokens` behind `start` ones that are held, and to choose a token."""
        return 1e-3 * self._costs.predict(0.0, self._costs.weight(start, tokens))

    def _left(self, seq: Sequence) -> float:
        """Tokens that are still to come."""
        job = seq.job
        whole = min(self._tokens, job.granted) if job.clamped else self._part * job.granted
        beyond = 0.5 * min(whole, job.granted - seq.generated)  # longer than expected: half as much again
        return max(1.0, whole - seq.generated, beyond)

    def _blocks(self, tokens: float) -> int:
        return -(-int(tokens) // self._size)
