"""Time is handed in, never looked up: policies and the scheduler see only the `now` they are given."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Seconds since an arbitrary origin; never goes back."""
        ...


class MonotonicClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        return time.monotonic()


class LogicalClock:
    """A clock that moves only when told to; tests and replay hold it."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> float:
        """Move forward by `seconds` (≥ 0) and return the new time."""
        if seconds < 0:
            raise ValueError(f"a clock does not go back: {seconds}")
        self._now += seconds
        return self._now
