"""The fold of facts."""

from __future__ import annotations

import pytest

from tenure.events import BlockGone, CacheCleared, Fact, FactsMissed, StepDone
from tenure.summary import MAX_GONE_LABELS, Histogram, Summary
from tenure.types import BlockId, Fate, Key


def test_histogram_bounds_are_inclusive() -> None:
    histogram = Histogram((1, 2, 5))
    for value in (0, 1, 1.5, 2, 5, 5.1, 100):
        histogram.observe(value)
    histogram.observe(2, times=3)
    assert histogram.counts == [2, 5, 1, 2]
    assert histogram.count == 10
    assert histogram.total == pytest.approx(0 + 1 + 1.5 + 2 + 5 + 5.1 + 100 + 6)


def test_a_copy_is_independent() -> None:
    summary = Summary()
    summary.absorb(StepDone(1.0, 1, 2, 3, 10.0))
    copy = summary.copy()
    summary.absorb(StepDone(1.5, 2, 2, 0, 10.0))
    summary.absorb(CacheCleared(2.0, 4))
    summary.absorb(FactsMissed(2.0, 5))
    assert (copy.steps, copy.inter_token.count, copy.cleared_blocks) == (1, 0, 0)
    assert (summary.steps, summary.inter_token.count, summary.inter_token.total) == (2, 2, 1.0)
    assert (summary.cleared_blocks, summary.facts_missed) == (4, 5)
    assert (summary.decode_rows, summary.prefill_rows, summary.step_seconds) == (4, 3, 0.02)


def test_kinds_that_nothing_counts_pass() -> None:
    summary = Summary()
    summary.absorb(Fact(1.0))
    assert summary.copy().steps == 0


def test_labels_are_bounded() -> None:
    summary = Summary()
    for number in range(MAX_GONE_LABELS + 50):
        fact = BlockGone(1.0, Key(b"k" * 16), BlockId(0), "device", Fate.DROPPED, "lru", f"r{number}", 1, 0.0, 0.0)
        summary.absorb(fact)
    assert len(summary.gone) == MAX_GONE_LABELS + 1
    assert summary.gone["device", "dropped", "lru", "other"] == 50
    assert sum(summary.gone.values()) == MAX_GONE_LABELS + 50
