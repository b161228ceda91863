"""`/v1/kv/events`: the facts as server-sent events, as they happen.

Readers poll the bounded log; nothing is kept for any of them. So a slow one costs no memory and holds nobody up: it
misses facts, and is told how many. `Last-Event-ID` goes on where a connection broke.
"""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from collections.abc import Collection
from enum import Enum
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp, Receive, Scope, Send

from tenure import events
from tenure.errors import InvalidRequest, Overloaded
from tenure.events import Fact, FactsMissed
from tenure.server.answer import KEEP_ALIVE
from tenure.server.caller import caller_of
from tenure.server.receipts import receipt_object, timings_object, usage_object
from tenure.server.replies import dump
from tenure.server.serves import Serves
from tenure.server.settings import ServerSettings
from tenure.server.stream import HEADERS
from tenure.types import Receipt, Timings, Usage

POLL_S = 0.05
BATCH = 256
"""Facts written at once: it bounds what a reader costs before others get their turn."""
MAX_READERS = 64
KINDS = frozenset(kind.__name__ for kind in vars(events).values() if isinstance(kind, type) and Fact in kind.__bases__)
"""Names of facts; not their base."""


def plain(value: Any) -> Any:
    """A value of a fact as JSON has it: keys in hex, enums by value, what receipts hold as receipts show it."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Receipt):
        return receipt_object(value)
    if isinstance(value, Usage):
        return usage_object(value)
    if isinstance(value, Timings):
        return timings_object(value)
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    return value


def fact_object(fact: Fact) -> dict[str, Any]:
    """A fact as an object; `type` is its name."""
    fields = {field.name: plain(getattr(fact, field.name)) for field in dataclasses.fields(fact)}
    return {"type": type(fact).__name__, **fields}


class Feed:
    """The facts of one `Serves`, for any number of readers up to a bound."""

    def __init__(self, serves: Serves, settings: ServerSettings) -> None:
        self._serves = serves
        self.facts = serves.facts
        self.settings = settings
        self.readers = 0
        self._life = secrets.token_hex(4)
        """Names this process in event ids: numbers of another one mean nothing here."""

    async def events(self, request: HttpRequest) -> ASGIApp:
        """GET /v1/kv/events."""
        kinds = self._kinds(request.query_params.get("types"))
        if self.readers >= MAX_READERS:
            raise Overloaded(f"{MAX_READERS} readers follow the events already", retry_after_s=5.0)
        start = self._start(request.headers.get("last-event-id"))
        return _FeedReply(self, caller_of(request).sees, kinds, start)

    def name(self, seq: int) -> str:
        """The id of the fact numbered `seq`."""
        return f"{self._life}-{seq}"

    @property
    def over(self) -> bool:
        """The server has said its last word to everyone: nothing happens any more."""
        if self._serves.health().cause != "draining":
            return False
        stats = self._serves.stats()
        return not stats.running and not stats.waiting

    def _start(self, last: str | None) -> int:
        """The first fact to tell: what follows `last`; the next one without it; all that is held, of another life."""
        if last is None:
            return self.facts.next_seq
        life, _, number = last.partition("-")
        if not (number.isascii() and number.isdecimal() and len(number) < 20):
            raise InvalidRequest(f"Last-Event-ID is no id of this feed: {last!r:.64}", param="Last-Event-ID")
        return min(int(number) + 1, self.facts.next_seq) if life == self._life else 0

    def _kinds(self, text: str | None) -> frozenset[str]:
        if text is None:
            return KINDS
        names = frozenset(name for name in text.split(",") if name)
        unknown = sorted(names - KINDS)
        if unknown or not names:
            shown = f"unknown {unknown[0]!r:.64}" if unknown else "empty"
            raise InvalidRequest(
                f"types: {shown}; give one or more names, separated by commas; known: {', '.join(sorted(KINDS))}",
                param="types",
            )
        return names


class _FeedReply:
    """One reader's stream, until it leaves or stops reading."""

    def __init__(self, feed: Feed, tenant: str | None, kinds: Collection[str], start: int) -> None:
        self._feed = feed
        self._tenant = tenant
        self._kinds = kinds
        self._next = start

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        feed = self._feed
        feed.readers += 1
        gone = asyncio.get_running_loop().create_task(_left(receive))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
            await self._tell(gone, send)
        except TimeoutError:  # it reads nothing any more: closing would wait for it
            if (abort := scope.get("tenure.abort")) is not None:
                abort()
        finally:
            feed.readers -= 1
            gone.cancel()

    async def _tell(self, gone: asyncio.Task[None], send: Send) -> None:
        silent = 0.0
        data = b": facts as they happen\n\n"
        while not gone.done():
            if data:
                async with asyncio.timeout(self._feed.settings.stall_timeout_s):
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                silent = 0.0
            data, more = self._batch()
            if not more and not data:
                await asyncio.wait([gone], timeout=POLL_S)
                if self._feed.over:
                    await send({"type": "http.response.body", "body": b"", "more_body": False})
                    return
                silent += POLL_S
                if silent >= self._feed.settings.keep_alive_s:
                    data = KEEP_ALIVE

    def _batch(self) -> tuple[bytes, bool]:
        """What is new for this reader, as far as one batch goes, and whether there is more."""
        facts, upto, missed = self._feed.facts.since(self._next, BATCH)
        first = upto - len(facts)
        parts = []
        if missed:
            at = facts[0].at if facts else 0.0
            parts.append(self._event(FactsMissed(at, missed), first - 1))
        parts += [self._event(fact, seq) for seq, fact in enumerate(facts, first) if self._concerns(fact)]
        self._next = upto
        return b"".join(parts), upto < self._feed.facts.next_seq

    def _concerns(self, fact: Fact) -> bool:
        mine = self._tenant is None or fact.tenant == self._tenant
        return mine and type(fact).__name__ in self._kinds

    def _event(self, fact: Fact, seq: int) -> bytes:
        name = type(fact).__name__
        return f"id: {self._feed.name(seq)}\nevent: {name}\ndata: ".encode() + dump(fact_object(fact)) + b"\n\n"


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
