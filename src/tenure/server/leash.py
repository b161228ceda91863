"""Ends a request whose client has left, reads too slowly or has waited long enough, and says which it was."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from enum import Enum
from types import TracebackType

from starlette.types import Receive

from tenure.errors import Deleted, Draining, Internal, RequestError, SlowClient, TimedOut
from tenure.server.serves import Handle
from tenure.types import Done, Finish, LimitCause

HARD_STOP_S = 5.0
"""How long after `cancel` the engine may take to say its last word before the server speaks for it."""


class Cut(Enum):
    """Why the server ended a request that the engine would have gone on with."""

    DISCONNECT = "disconnect"
    TIMEOUT = "timeout"
    SLOW_READER = "slow_reader"
    STALLED = "stalled"


class Leash:
    """Holds a running request: watches for the client's leaving and for the time limit while entered.

    async with Leash(handle, receive, 600.0, count) as leash:
        async for item in handle: ...
    leash.cut_by   # None, or why the handle was cancelled
    """

    def __init__(self, handle: Handle, receive: Receive, timeout_s: float | None, told: Callable[[Cut], None]) -> None:
        self._handle = handle
        self._receive = receive
        self._timeout_s = timeout_s
        self._told = told
        self._ended = False
        self._patience: asyncio.Timeout | None = None
        self.cut_by: Cut | None = None
        self.on_cut: Callable[[], None] = lambda: None

    @property
    def gone(self) -> bool:
        """Nobody is there any more to be told anything."""
        return self.cut_by in (Cut.DISCONNECT, Cut.STALLED)

    @contextlib.asynccontextmanager
    async def patience(self) -> AsyncIterator[None]:
        """Around the reading of the handle: TimeoutError when the engine does not answer to `cancel`."""
        async with asyncio.timeout(None) as self._patience:
            self._hurry()
            try:
                yield
            finally:
                self._patience = None

    def _hurry(self) -> None:
        if self.cut_by is not None and self._patience is not None:
            self._patience.reschedule(asyncio.get_running_loop().time() + HARD_STOP_S)

    def ended(self) -> None:
        """The engine has said its last word: from now on nothing is cut any more, only the client may leave."""
        self._ended = True

    def cut(self, why: Cut) -> None:
        """Cancel the request. The first reason stands, unless the client has left since."""
        leaves = why in (Cut.DISCONNECT, Cut.STALLED)
        if self.cut_by is None and not self._ended:
            self._told(why)
            self._handle.cancel()
            self.cut_by = why
            self._hurry()
        elif leaves:
            self.cut_by = why
        self.on_cut()

    async def __aenter__(self) -> Leash:
        loop = asyncio.get_running_loop()
        self._watcher = loop.create_task(self._watch())
        self._timer = None if self._timeout_s is None else loop.call_later(self._timeout_s, self.cut, Cut.TIMEOUT)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._watcher.cancel()
        if error is not None:
            self._handle.cancel()

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.cut(Cut.DISCONNECT)

    def failure(self, done: Done | None, finishes: list[tuple[Finish, LimitCause | None]]) -> RequestError | None:
        """What to tell the client when the request did not end as it should; None when it did.

        `finishes` are the ends of the choices seen so far; `done` is None when the engine never said its last word.
        """
        if self.cut_by is Cut.TIMEOUT:
            limit = self._timeout_s or 0.0
            return TimedOut(f"the request took longer than {limit:g} s and was ended", limit_s=limit)
        if self.cut_by is not None:
            return SlowClient("the client read too slowly; the request was cancelled")
        if done is None:
            return Internal("the engine ended the request without a result")
        if done.receipt.limit_cause == "shutdown" or any(cause == "shutdown" for _, cause in finishes):
            return Draining("the server is shutting down; the answer is cut short")
        if done.error is not None:
            return Internal(done.error)
        normal = sum(finish in (Finish.STOP, Finish.LENGTH) for finish, _ in finishes)
        if normal < self._handle.request.n:
            return Deleted("the conversation was deleted while this answer was written")  # nothing else cancels it
        return None
