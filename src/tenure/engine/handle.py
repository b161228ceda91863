"""A request under way as its submitter sees it, and the way news gets there: one wake-up per step and event loop."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

from tenure.engine.shape import Shape
from tenure.types import Done, Piece, Request

News = Piece | Done


class Handle:
    """Iterate it, with `async for` on the event loop it was submitted from, or with `for` when there was none."""

    def __init__(
        self,
        request: Request,
        arrived: float,
        cancel: Callable[[str], None],
        loop: asyncio.AbstractEventLoop | None,
        shapes: Sequence[Shape] = (),
    ) -> None:
        """`arrived`: when it was submitted, on the engine's clock. `loop` None: it is read by blocking. `shapes`: one
        for each answer, unless they are plain."""
        self._request = request
        self.arrived = arrived
        self._cancel = cancel
        self.loop = loop
        self.shapes = shapes
        self._news: deque[News] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._queue: queue.SimpleQueue[News] | None = queue.SimpleQueue() if loop is None else None
        self._ended = False

    @property
    def request(self) -> Request:
        return self._request

    def cancel(self) -> None:
        """Free everything within one step; the iteration then ends with its Done. Safe to call twice."""
        if not self._ended:
            self._cancel(self._request.id)

    async def __aiter__(self) -> AsyncIterator[News]:
        """News as they come, ending after the Done. Leaving early cancels the request."""
        if self.loop is None:
            raise RuntimeError("this request was submitted without an event loop: iterate with `for`")
        try:
            while True:
                while self._news:
                    item = self._news.popleft()
                    if isinstance(item, Done):
                        self._ended = True
                        yield item
                        return
                    yield item
                self._waiter = self.loop.create_future()
                await self._waiter
        finally:
            self.cancel()

    def __iter__(self) -> Iterator[News]:
        """As `async for`, blocking the calling thread."""
        if self._queue is None:
            raise RuntimeError("this request belongs to an event loop: iterate with `async for`")
        try:
            while True:
                item = self._queue.get()
                if isinstance(item, Done):
                    self._ended = True
                    yield item
                    return
                yield item
        finally:
            self.cancel()

    def result(self) -> tuple[list[Piece], Done]:
        """Block until the request has ended: all its pieces, and the Done."""
        pieces: list[Piece] = []
        for item in self:
            if isinstance(item, Done):
                return pieces, item
            pieces.append(item)
        raise RuntimeError("the iteration ended without a Done")

    def put(self, item: News) -> None:
        """Deliver: on the event loop's thread, or from any thread when there is no loop."""
        if self._queue is not None:
            self._queue.put(item)
            return
        self._news.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


_ByLoop = dict[asyncio.AbstractEventLoop | None, list[tuple[Handle, News]]]


class Outbox:
    """Collects the news of a step and hands them over, one call per event loop, from a thread of its own.

    Waking an event loop lets go of the interpreter's lock, and its thread, with many streams to write, may keep it for
    milliseconds. `flush` only passes the news on and never lets go: the engine is inside its native call, which needs
    no lock, by the time anyone else wakes up.
    """

    def __init__(self, lost: Callable[[Handle], None]) -> None:
        """`lost` is told, on the outbox's thread, of handles whose event loop is closed: nobody will read them."""
        self._lost = lost
        self._by_loop: _ByLoop = {}
        self._mail: queue.SimpleQueue[_ByLoop | None] = queue.SimpleQueue()
        self._sent = self._carried = 0
        self._thread = threading.Thread(target=self._carry, name="tenure-outbox", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def add(self, handle: Handle, item: News) -> None:
        self._by_loop.setdefault(handle.loop, []).append((handle, item))

    def flush(self) -> None:
        """Send off what was added. Nothing to send costs nothing."""
        if self._by_loop:
            self._sent += 1
            self._mail.put(self._by_loop)
            self._by_loop = {}

    @property
    def empty(self) -> bool:
        """Whether all that was added has reached its event loop or reader."""
        return not self._by_loop and self._sent == self._carried

    def stop(self) -> None:
        """Deliver what was added, then end the thread."""
        self.flush()
        self._mail.put(None)
        self._thread.join()

    def _carry(self) -> None:
        while (by_loop := self._mail.get()) is not None:
            for loop, news in by_loop.items():
                if loop is None:
                    _deliver(news)
                    continue
                try:
                    loop.call_soon_threadsafe(_deliver, news)
                except RuntimeError:  # the loop is closed
                    for handle in {id(handle): handle for handle, _ in news}.values():
                        self._lost(handle)
            self._carried += 1


def _deliver(news: list[tuple[Handle, News]]) -> None:
    for handle, item in news:
        handle.put(item)
