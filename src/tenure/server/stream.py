"""Server-sent events with back-pressure.

    handle ──pump──▶ bounded buffer ──sender──▶ socket

The pump always reads, so a slow client never holds the engine up; the buffer is bounded, so it never costs memory
either: when it is full, the request is cancelled and the client is told when it reads on. Whatever gathers while the
socket is busy goes out in one write.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable

from starlette.types import Receive, Scope, Send

from tenure.errors import Internal, RequestError
from tenure.server.answer import KEEP_ALIVE, Chunks, Ends
from tenure.server.asks import Ask
from tenure.server.leash import Cut, Leash
from tenure.server.replies import error_reply
from tenure.server.serves import Handle
from tenure.server.settings import ServerSettings
from tenure.types import Done

log = logging.getLogger("tenure.server")

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Reply(ABC):
    """An ASGI reply made of a running request, which it ends when the client goes."""

    def __init__(self, ask: Ask, handle: Handle, settings: ServerSettings, told: Callable[[Cut], None]) -> None:
        """`told` hears of requests that were cut short."""
        self._ask = ask
        self._handle = handle
        self._settings = settings
        self._told = told

    def _leash(self, receive: Receive) -> Leash:
        return Leash(self._handle, receive, self._settings.request_timeout_s, self._told)

    @abstractmethod
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...


class StreamReply(Reply):
    """Writes the answer as it comes."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._leash(receive) as leash:
            await _Stream(self._ask, self._handle, leash, self._settings).run(scope, receive, send)


class _Stream:
    """The state of one stream: what waits to be sent, and whether more will come."""

    def __init__(self, ask: Ask, handle: Handle, leash: Leash, settings: ServerSettings) -> None:
        self._handle = handle
        self._leash = leash
        self._settings = settings
        self._chunks = Chunks(ask, int(time.time()))
        self._buffer: list[bytes] = []
        self._size = 0
        self._room = settings.stream_buffer_bytes
        self._begun = False
        self._ended = False
        self._refusal: RequestError | None = None
        self._wake = asyncio.Event()
        self._progress = 0
        self._ticked = -1
        self._blocked_since: float | None = None

    async def run(self, scope: Scope, receive: Receive, send: Send) -> None:
        loop = asyncio.get_running_loop()
        self._leash.on_cut = self._wake.set
        self._abort: Callable[[], None] | None = scope.get("tenure.abort")
        self._ticker = loop.call_later(self._tick_s, self._tick)
        pump = loop.create_task(self._pump())
        try:
            await self._send_all(scope, receive, send)
        finally:
            pump.cancel()
            self._ticker.cancel()

    async def _pump(self) -> None:
        """Turn the handle's pieces into waiting bytes until its last word."""
        ends, done = Ends(), None
        try:
            async with self._leash.patience():
                async for item in self._handle:
                    if isinstance(item, Done):
                        done = item
                        self._leash.ended()
                        continue
                    if self._leash.cut_by is None:
                        ends.note(item)
                        data = self._chunks.piece(item)
                        if item.prompt_logprobs:  # asked for whole, and bounded: no sign of a slow reader
                            self._room += len(data)
                        self._put(data)
            error = self._leash.failure(done, ends.seen)
        except TimeoutError:
            error = self._leash.failure(None, ends.seen)
        except Exception:
            log.exception("the stream of request %s failed", self._handle.request.id)
            self._handle.cancel()
            error = Internal("internal error; the server's log has it")
        self._finish(error, done)

    def _put(self, data: bytes) -> None:
        if data:
            self._buffer.append(data)
            self._size += len(data)
            self._begun = True
            self._wake.set()
            if self._size > self._room:
                self._leash.cut(Cut.SLOW_READER)

    def _finish(self, error: RequestError | None, done: Done | None) -> None:
        """Write the end. An error before the first chunk becomes a real HTTP status."""
        if error is None and done is not None:
            self._buffer.append(self._chunks.end(done))
        elif error is not None and not self._begun:
            self._refusal = error
        elif error is not None:
            self._buffer.append(self._chunks.fail(error, done))
        self._ended = True
        self._wake.set()

    async def _send_all(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self._leash.gone:
                return
            if self._refusal is not None and not started:
                await error_reply(self._refusal, scope["path"])(scope, receive, send)
                return
            last = self._ended
            if not self._buffer and not last:
                continue
            data = self._buffer[0] if len(self._buffer) == 1 else b"".join(self._buffer)
            self._buffer.clear()
            self._size = 0
            self._blocked_since = time.monotonic()
            if not started:
                await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
                started = True
            await send({"type": "http.response.body", "body": data, "more_body": not last})
            self._blocked_since = None
            self._progress += 1
            if last:
                return

    @property
    def _tick_s(self) -> float:
        return min(self._settings.keep_alive_s, self._settings.stall_timeout_s)

    def _tick(self) -> None:
        """Now and then: cut a client that reads nothing; keep a silent stream open."""
        now = time.monotonic()
        if self._blocked_since is not None:
            if now - self._blocked_since >= self._settings.stall_timeout_s:
                self._leash.cut(Cut.STALLED)
                if self._abort is not None:
                    self._abort()
                return
        elif self._progress == self._ticked and not self._ended:
            self._put(KEEP_ALIVE)
        self._ticked = self._progress
        self._ticker = asyncio.get_running_loop().call_later(self._tick_s, self._tick)
