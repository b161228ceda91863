"""Writing a trace while serving: who came when, how long, with which blocks. Never any text.

The file rotates at half of its bound, so that it and the one before it never take more. Lines come in order of arrival:
a request that ended waits for those that came before it.
"""

from __future__ import annotations

import json
import logging
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from pathlib import Path
from typing import Any, TextIO

from tenure.errors import ConfigError
from tenure.events import BlockGone, BlockStored, Fact, RequestDone, RequestQueued, SequenceEnded
from tenure.lint.live import short
from tenure.sim.trace import TraceRequest
from tenure.traces import VERSION, write
from tenure.types import Key

MAX_BYTES = 128 << 20
"""Of the file and the one before it, together."""
MAX_SESSIONS = 10_000
"""Sessions whose turns are counted; those that were silent longest are forgotten first."""
_log = logging.getLogger("tenure")


@dataclass(slots=True)
class _Alive:
    arrived: float
    session: str | None
    tenant: str
    blocks: tuple[int, ...] = field(default=())


class TraceWriter:
    """A listener of facts. It does not raise: a disk that is full ends the trace, with an error in the log."""

    def __init__(self, path: Path, header: Mapping[str, Any], block_tokens: int, max_bytes: int = MAX_BYTES) -> None:
        """`header`: what the operator chose, for `tenure lint`. ConfigError when `path` cannot be written."""
        self._path = path
        self._header = json.dumps({"tenure_trace": VERSION, "block_tokens": block_tokens, **header}) + "\n"
        self._block_tokens = block_tokens
        self._bound = max_bytes // 2
        self._written = 0
        self._parents: dict[Key, Key | None] = {}
        self._alive: OrderedDict[str, _Alive] = OrderedDict()
        self._ended: list[tuple[float, int, str]] = []
        self._lines = 0
        self._turns: OrderedDict[str, int] = OrderedDict()
        try:
            self._file: TextIO | None = self._open()
        except OSError as error:
            raise ConfigError("trace", f"--trace {path}: {error.strerror or error}") from None

    def learn(self, fact: Fact) -> None:
        if isinstance(fact, BlockStored):
            self._parents[fact.key] = fact.parent
        elif isinstance(fact, BlockGone):
            self._parents.pop(fact.key, None)
        elif isinstance(fact, RequestQueued):
            self._alive[fact.request] = _Alive(fact.at, fact.session, fact.tenant)
        elif isinstance(fact, SequenceEnded):
            if fact.request in self._alive:
                self._alive[fact.request].blocks = self._names(fact.tip)
        elif isinstance(fact, RequestDone):
            self._done(fact)

    def close(self) -> None:
        """Write what waits, and end. Safe to call twice."""
        self._flush(float("inf"))
        if self._file:
            self._file.close()
            self._file = None

    def _names(self, tip: Key | None) -> tuple[int, ...]:
        """The blocks up to `tip`, in order, each by 64 bits of its key."""
        names = []
        while tip is not None:
            names.append(int.from_bytes(tip[:8], "big"))
            tip = self._parents.get(tip)
        return tuple(reversed(names))

    def _done(self, fact: RequestDone) -> None:
        known = self._alive.pop(fact.request, None)
        if known is None:
            return
        request = TraceRequest(
            at=known.arrived,
            prompt_tokens=fact.usage.prompt_tokens,
            output_tokens=fact.usage.completion_tokens,
            blocks=known.blocks,
            block_tokens=self._block_tokens,
            tenant=known.tenant,
            session=known.session,
            turn=self._turn(known.session),
            extra={"kv": short(fact.receipt), "prompt_ms": round(fact.timings.prompt_ms, 3)},
        )
        self._lines += 1
        heappush(self._ended, (known.arrived, self._lines, write(request) + "\n"))
        oldest = next(iter(self._alive.values()), None)
        self._flush(oldest.arrived if oldest else float("inf"))

    def _turn(self, session: str | None) -> int | None:
        if session is None:
            return None
        turn = self._turns.pop(session, 0) + 1
        self._turns[session] = turn
        if len(self._turns) > MAX_SESSIONS:
            self._turns.popitem(last=False)
        return turn

    def _flush(self, before: float) -> None:
        """Write the lines of all that arrived before the oldest request alive."""
        while self._file and self._ended and self._ended[0][0] < before:
            line = heappop(self._ended)[2]
            try:
                if self._written + len(line) > self._bound:
                    self._file.close()
                    self._path.replace(self._path.with_name(self._path.name + ".1"))
                    self._file = self._open()
                self._file.write(line)
                self._written += len(line)
            except OSError as error:
                _log.error("--trace %s: %s; the trace ends here", self._path, error.strerror or error)
                self._file = None

    def _open(self) -> TextIO:
        """A new file, with its header. What was there goes on being the one before."""
        if self._path.exists() and self._path.stat().st_size:
            self._path.replace(self._path.with_name(self._path.name + ".1"))
        stream = self._path.open("w", encoding="utf-8", buffering=1)
        stream.write(self._header)
        self._written = len(self._header)
        return stream
