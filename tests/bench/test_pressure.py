"""The arithmetic of bench/trim and bench/pressure; what they measure needs a quiet machine."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from bench.pressure import Load, Row, Starts, table
from bench.trim import CONTEXT, common, talk

from tenure.overflow import Window
from tenure.server.serves import Prompt
from tenure.server.trim import trim
from tenure.types import Span


def test_common_heads() -> None:
    assert common([1, 2, 3], [1, 2, 4]) == 2
    assert common([1, 2], [1, 2, 3]) == 2
    assert common([], [1]) == 0


def test_the_talk_outgrows_the_context_and_is_trimmed() -> None:
    def render(messages: Sequence[Mapping[str, Any]]) -> Prompt:
        tokens: list[int] = []
        spans = []
        for number, message in enumerate(messages):
            start = len(tokens)
            tokens += [hash(word) for word in message["content"].split()]
            spans.append(Span(start, len(tokens), number))
        return Prompt(tuple(tokens), tuple(spans))

    messages = talk(40, random.Random(1))
    assert len(render(messages).tokens) > CONTEXT
    assert len(trim(messages, render, Window(CONTEXT, "context"), 128).tokens) <= CONTEXT - 128


def test_goodput_counts_what_ended_in_time_and_within_the_window() -> None:
    load = Load("http://127.0.0.1:9")
    load.done = [(0.0, 1.0, 64), (0.0, 5.0, 64), (4.0, 6.0, 64), (9.0, 12.0, 64)]
    assert load.rate(0.5, 10.0) == pytest.approx(3 * 64 / 9.5)
    assert load.rate(0.5, 10.0, deadline_s=2.0) == pytest.approx(2 * 64 / 9.5)


def test_the_error_of_predictions_is_relative() -> None:
    starts = Starts("http://127.0.0.1:9")
    assert math.isnan(starts.median_error()) and math.isnan(starts.lean())
    starts.waits = [(1.0, 2.0), (2.0, 2.0), (4.0, 2.0)]
    assert (starts.median_error(), starts.lean()) == (0.5, 1.0)


def test_the_report_names_what_was_missed() -> None:
    shown = table([Row("a", 1.3, "≤ 1.25", False), Row("b", 0.95, "≥ 0.9", True, "95 of 100")])
    assert "| a | 1.3 | ≤ 1.25 | MISS |  |" in shown
    assert "| b | 0.95 | ≥ 0.9 | ok | 95 of 100 |" in shown
