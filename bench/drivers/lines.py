"""How an engine that runs inside a driver process is asked: JSON lines on stdin and stdout.

in:   {"id": 7, "prompt": [ids], "output": 128}                    any number of lines, at any time
out:  {"ready": true, "version": "…"}                              once, when requests are welcome
      {"id": 7, "first": s, "last": s, "ids": […], "error": null, …}     when the request is over

Times are of CLOCK_MONOTONIC, which all processes of a machine share, so the asking side knows when it sent the request.
A driver has an environment of its own, so this file imports the standard library only.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, TextIO

GATHER_S = 0.002  # how long an idle driver waits after a first request for those sent in the same burst


@dataclass
class Live:
    """A request under way, and in the end its reply line."""

    id: int
    first: float | None = None
    last: float | None = None
    ids: list[int] = field(default_factory=list)
    cached: int | None = None
    finish: str | None = None
    error: str | None = None

    def take(self, ids: list[int]) -> None:
        """Note tokens that just came."""
        if ids:
            self.last = time.perf_counter()
            self.first = self.first or self.last
            self.ids += ids


class Engine(Protocol):
    """What a driver wraps."""

    def add(self, live: Live, prompt: list[int], output: int) -> None: ...

    def step(self) -> list[Live]:
        """Advance all requests once; those that are over."""
        ...

    def busy(self) -> bool: ...


def claim_stdout() -> TextIO:
    """Keep the real stdout for reply lines and send what libraries print to stderr. Call before importing them."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return replies


def serve(engine: Engine, version: str, replies: TextIO, **facts: Any) -> None:
    """Answer until stdin closes."""
    inbox: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            inbox.put(line)
        inbox.put(None)

    threading.Thread(target=read, daemon=True).start()
    replies.write(json.dumps({"ready": True, "version": version, **facts}) + "\n")
    while True:
        if not engine.busy():
            if not _submit(engine, inbox.get(), replies):
                return
            time.sleep(GATHER_S)
        while not inbox.empty():
            if not _submit(engine, inbox.get(), replies):
                return
        if engine.busy():
            for live in engine.step():
                replies.write(json.dumps(asdict(live)) + "\n")


def _submit(engine: Engine, line: str | None, replies: TextIO) -> bool:
    if line is None:
        return False
    request = json.loads(line)
    live = Live(request["id"])
    try:
        engine.add(live, request["prompt"], request["output"])
    except (ValueError, RuntimeError) as refused:
        live.error = str(refused)
        replies.write(json.dumps(asdict(live)) + "\n")
    return True
