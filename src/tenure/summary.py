"""What the facts add up to: a pure fold, read by the metrics, `/v1/kv` and (later) the replay report.

    facts ──absorb──▶ Summary (counts, tokens, histograms) ──copy──▶ whoever reports

A Summary holds no lock and no clock. Whoever shares one between threads guards `absorb` and `copy` himself.
"""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

from tenure.events import (
    BlockGone,
    BlockReused,
    BlockStored,
    CacheCleared,
    ConversationChanged,
    Fact,
    FactsMissed,
    PinEnded,
    PinGranted,
    PinRefused,
    RequestDone,
    RequestQueued,
    RequestRefused,
    RequestStarted,
    SequencePaused,
    SequenceResumed,
    SequenceSlid,
    SiblingStarted,
    StepDone,
    TokenFirst,
    WindowGone,
)

# fmt: off
# vLLM's buckets, in seconds, so that dashboards made for it show the same lines.
FIRST_TOKEN = (.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1,
               2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
INTER_TOKEN = (.01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
LATENCY = (.3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
RESIDENCY = (.001, .002, .005, .01, .02, .05, .1, .2, .5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800)
# fmt: on
TOKENS = tuple(m * 10**e for e in range(6) for m in (1, 2, 5))

HELD = ("expired", "corrupt", "window", "recoded", "below_minimum", "prompt_logprobs")
"""Reasons of a miss, beside `evicted`, for which tokens are computed again."""
MAX_GONE_LABELS = 256
"""Distinct (tier, fate, by, reason) that are told apart; later ones are counted under the reason `other`."""


class Histogram:
    """Counts per bucket (upper bounds inclusive, the last one open), their sum and number."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    @property
    def count(self) -> int:
        return sum(self.counts)

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def __copy__(self) -> Histogram:
        other = Histogram(self.bounds)
        other.counts = list(self.counts)
        other.total = self.total
        return other


_token_gaps = partial(Histogram, INTER_TOKEN)
_latencies = partial(Histogram, LATENCY)
_residencies = partial(Histogram, RESIDENCY)
_sizes = partial(Histogram, TOKENS)


@dataclass(slots=True)
class Summary:
    """Sums since the start. Tokens and blocks are counts, `…_seconds` are seconds."""

    queued: int = 0
    started: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    """By error code."""
    finished: Counter[str] = field(default_factory=Counter)
    """Sequences by how they ended: stop, length, cancelled, error."""
    limit_causes: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    """Of requests that ended, as their receipts say."""
    cached_tokens: int = 0
    cached_by_tier: Counter[str] = field(default_factory=Counter)
    generation_tokens: int = 0
    prefix_queries: int = 0
    """Prompt tokens looked up in the cache when their requests started."""
    prefix_hits: int = 0
    misses: Counter[str] = field(default_factory=Counter)
    forgotten: Counter[str] = field(default_factory=Counter)
    paused: int = 0
    resumed: int = 0
    recomputed: Counter[str] = field(default_factory=Counter)
    """Tokens that were computed again: when paused or slid sequences went on (`preempted`), by the further answers of n
    (`sibling`), and of prompts what had been held, by why it did not serve (`evicted`, `recoded`, …)."""
    slid: int = 0
    pins: Counter[str] = field(default_factory=Counter)
    """Granted and refused, and how they ended."""
    conversations: Counter[str] = field(default_factory=Counter)
    """By what was done to them."""
    tenant_tokens: Counter[str] = field(default_factory=Counter)
    """Computed and generated, of requests that ended."""
    stored: Counter[str] = field(default_factory=Counter)
    gone: Counter[tuple[str, str, str, str]] = field(default_factory=Counter)
    windows_gone: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    """By tier, fate, by whom and why."""
    reused_blocks: int = 0
    cleared_blocks: int = 0
    facts_missed: int = 0
    steps: int = 0
    decode_rows: int = 0
    prefill_rows: int = 0
    step_seconds: float = 0.0
    last_step_at: float | None = None
    ttft: Histogram = field(default_factory=partial(Histogram, FIRST_TOKEN))
    inter_token: Histogram = field(default_factory=_token_gaps)
    per_output_token: Histogram = field(default_factory=_token_gaps)
    e2e: Histogram = field(default_factory=_latencies)
    queue: Histogram = field(default_factory=_latencies)
    prediction_error: Histogram = field(default_factory=partial(Histogram, FIRST_TOKEN))
    prefill: Histogram = field(default_factory=_latencies)
    decode: Histogram = field(default_factory=_latencies)
    inference: Histogram = field(default_factory=_latencies)
    prompt_sizes: Histogram = field(default_factory=_sizes)
    generation_sizes: Histogram = field(default_factory=_sizes)
    block_lifetime: Histogram = field(default_factory=_residencies)
    block_idle: Histogram = field(default_factory=_residencies)
    block_reuse_gap: Histogram = field(default_factory=_residencies)

    def absorb(self, fact: Fact) -> None:
        """Add one fact, in the order they were told; kinds that nothing counts are let pass."""
        rule = _RULES.get(type(fact))
        if rule is not None:
            rule(self, fact)

    def copy(self) -> Summary:
        """An independent Summary with the same sums."""
        return Summary(**{f.name: copy.copy(getattr(self, f.name)) for f in fields(self)})


def _queued(s: Summary, fact: RequestQueued) -> None:
    s.queued += 1


def _refused(s: Summary, fact: RequestRefused) -> None:
    s.refused[fact.code] += 1


def _started(s: Summary, fact: RequestStarted) -> None:
    s.started += 1
    s.prefix_queries += fact.prompt_tokens
    s.prefix_hits += fact.cached_tokens
    s.queue.observe(fact.queue_s)
    s.prediction_error.observe(abs(fact.queue_s - fact.predicted_s))
    s.recomputed[fact.recomputed_why or "evicted"] += fact.recomputed_tokens
    if fact.miss is not None:
        s.misses[fact.miss] += 1


def _first(s: Summary, fact: TokenFirst) -> None:
    s.ttft.observe(fact.ttft_s)


def _paused(s: Summary, fact: SequencePaused) -> None:
    s.paused += 1


def _resumed(s: Summary, fact: SequenceResumed) -> None:
    s.resumed += 1
    s.recomputed["preempted"] += fact.recomputed_tokens


def _sibling(s: Summary, fact: SiblingStarted) -> None:
    s.recomputed["sibling"] += fact.recomputed_tokens


def _slid(s: Summary, fact: SequenceSlid) -> None:
    s.slid += 1


def _pinned(s: Summary, fact: PinGranted) -> None:
    s.pins["granted"] += 1


def _unpinned(s: Summary, fact: PinEnded) -> None:
    s.pins[fact.reason] += 1


def _not_pinned(s: Summary, fact: PinRefused) -> None:
    s.pins["refused"] += 1


def _changed(s: Summary, fact: ConversationChanged) -> None:
    s.conversations[fact.change] += 1


def _step(s: Summary, fact: StepDone) -> None:
    # A decode row's former token came with the step before, so the time between the two is its inter-token latency.
    if fact.decode_rows and s.last_step_at is not None:
        s.inter_token.observe(fact.at - s.last_step_at, fact.decode_rows)
    s.last_step_at = fact.at
    s.steps += 1
    s.decode_rows += fact.decode_rows
    s.prefill_rows += fact.prefill_rows
    s.step_seconds += fact.step_ms / 1000


def _done(s: Summary, fact: RequestDone) -> None:
    for finish in fact.finishes:
        s.finished[finish.value] += 1
    if fact.limit_cause is not None:
        s.limit_causes[fact.limit_cause] += 1
    s.prompt_tokens += fact.usage.prompt_tokens
    s.cached_tokens += fact.usage.cached_tokens
    s.cached_by_tier.update(fact.receipt.cached_by_tier)
    s.generation_tokens += fact.usage.completion_tokens
    s.tenant_tokens[fact.tenant] += fact.receipt.computed_tokens + fact.usage.completion_tokens
    for forgotten in fact.receipt.forgotten:
        s.forgotten[forgotten.policy] += forgotten.end - forgotten.start
    s.prompt_sizes.observe(fact.usage.prompt_tokens)
    s.generation_sizes.observe(fact.usage.completion_tokens)
    s.e2e.observe(fact.e2e_s)
    if fact.ttft_s is None:
        return
    prefill, decode = fact.timings.prompt_ms / 1000, fact.timings.predicted_ms / 1000
    s.prefill.observe(prefill)
    s.decode.observe(decode)
    s.inference.observe(prefill + decode)
    if fact.timings.predicted_n > 1:
        s.per_output_token.observe(decode / (fact.timings.predicted_n - 1))


def _stored(s: Summary, fact: BlockStored) -> None:
    s.stored[fact.tier] += 1


def _gone(s: Summary, fact: BlockGone) -> None:
    label = (fact.tier, fact.fate.value, fact.by, fact.reason)
    if label not in s.gone and len(s.gone) >= MAX_GONE_LABELS:
        label = (fact.tier, fact.fate.value, fact.by, "other")
    s.gone[label] += 1
    s.block_lifetime.observe(fact.age_s)
    s.block_idle.observe(fact.idle_s)


def _window_gone(s: Summary, fact: WindowGone) -> None:
    s.windows_gone[str(fact.window), fact.by, fact.reason] += 1


def _reused(s: Summary, fact: BlockReused) -> None:
    s.reused_blocks += 1
    s.block_reuse_gap.observe(fact.gap_s)


def _cleared(s: Summary, fact: CacheCleared) -> None:
    s.cleared_blocks += fact.blocks


def _missed(s: Summary, fact: FactsMissed) -> None:
    s.facts_missed += fact.count


_RULES: dict[type[Fact], Callable[[Summary, Any], None]] = {
    RequestQueued: _queued,
    RequestRefused: _refused,
    RequestStarted: _started,
    TokenFirst: _first,
    SequencePaused: _paused,
    SequenceResumed: _resumed,
    SiblingStarted: _sibling,
    SequenceSlid: _slid,
    PinGranted: _pinned,
    PinRefused: _not_pinned,
    PinEnded: _unpinned,
    ConversationChanged: _changed,
    StepDone: _step,
    RequestDone: _done,
    BlockStored: _stored,
    BlockGone: _gone,
    WindowGone: _window_gone,
    BlockReused: _reused,
    CacheCleared: _cleared,
    FactsMissed: _missed,
}
