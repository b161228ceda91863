"""What every request passes before a route sees it, as plain ASGI wrappers.

RequestIds (echo x-request-id, last net for bugs) ▶ Keys ▶ Bodies (size and time) ▶ routes
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import secrets
import uuid
from collections.abc import Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tenure.errors import Internal, InvalidRequest, Overloaded, PayloadTooLarge, RequestError, SlowClient, Unauthorized
from tenure.server.caller import TENANT
from tenure.server.replies import error_reply, refuse
from tenure.server.settings import ServerSettings
from tenure.tenants import Tenants

log = logging.getLogger("tenure.server")

REQUEST_ID = re.compile(rb"[!-~]{1,128}")
OPEN_PATHS = frozenset({"/health", "/ping", "/ready", "/metrics"})
BODILESS = frozenset({"GET", "HEAD", "OPTIONS"})
LINGER_S = 2.0
"""How long a refused body is still read (and thrown away), so that the client gets to read the refusal."""


def header(scope: Scope, name: bytes) -> bytes | None:
    """The first value of a header, or None."""
    headers: Iterable[tuple[bytes, bytes]] = scope["headers"]
    return next((value for key, value in headers if key == name), None)


class RequestIds:
    """Gives every request an id, echoes the client's own, and turns bugs into a plain 500 that leaks nothing."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = header(scope, b"x-request-id")
        rid = given if given is not None and REQUEST_ID.fullmatch(given) else uuid.uuid4().hex.encode()
        started = False

        async def tagged(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message["headers"], (b"x-request-id", rid)]
            await send(message)

        try:
            await self.app(scope, receive, tagged)
        except Exception:
            log.exception("request %s on %s failed", rid.decode(), scope["path"])
            if started:
                raise
            error = Internal(f"internal error; the server's log has it under request id {rid.decode()}")
            await refuse(error, scope, receive, tagged)


class Keys:
    """Asks for a key as `Authorization: Bearer …` or `x-api-key: …`, and finds out whose it is.

    Keys are looked up by a keyed hash: however long that takes, it says nothing about the keys there are.
    """

    def __init__(self, app: ASGIApp, operator: str | None, tenants: Tenants) -> None:
        self.app = app
        self._secret = secrets.token_bytes(32)
        self._owners = {self._digest(key.encode()): tenant.name for key, tenant in tenants.by_key().items()}
        if operator is not None:
            self._owners[self._digest(operator.encode())] = ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self.app(scope, receive, send)
            return
        owner = self._owner(scope)
        if owner is not None:
            scope[TENANT] = owner
            await self.app(scope, receive, send)
            return
        error = Unauthorized("a valid API key is needed: `Authorization: Bearer KEY` or `x-api-key: KEY`")
        await refuse_unread(error, scope, receive, send)

    def _digest(self, key: bytes) -> bytes:
        return hashlib.blake2b(key, key=self._secret).digest()

    def _owner(self, scope: Scope) -> str | None:
        """The tenant's name, empty for the operator; None when nobody has that key."""
        bearer = header(scope, b"authorization") or b""
        kind, _, value = bearer.partition(b" ")
        given = value.strip() if kind.lower() == b"bearer" else header(scope, b"x-api-key") or b""
        return self._owners.get(self._digest(given))


class Bodies:
    """Reads the whole body before the route runs, within the limits of size and time.

    The route then gets it as one message. `max_bodies_bytes` bounds what all connections hold together.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self.app = app
        self._limit = settings.max_body_bytes
        self._total = max(settings.max_bodies_bytes, settings.max_body_bytes)
        self._timeout_s = settings.body_timeout_s
        self._held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in BODILESS:
            await self.app(scope, receive, send)
            return
        length = header(scope, b"content-length")
        if length is not None and length.isdigit() and int(length) > self._limit:
            await refuse_unread(self._too_large(), scope, receive, send)
            return
        body = bytearray()
        try:
            if not await self._read(receive, body):
                return
            await self.app(scope, _replay(bytes(body), receive), send)
        except _Refused as refused:
            await refuse_unread(refused.error, scope, receive, send)
        finally:
            self._held -= len(body)

    async def _read(self, receive: Receive, body: bytearray) -> bool:
        """Fill `body`; False when the client left."""
        try:
            async with asyncio.timeout(self._timeout_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return False
                    part = message.get("body", b"")
                    if len(body) + len(part) > self._limit:
                        raise _Refused(self._too_large())
                    if self._held + len(part) > self._total:
                        raise _Refused(Overloaded("too many large bodies at once; try again", retry_after_s=1.0))
                    body += part
                    self._held += len(part)
                    if not message.get("more_body", False):
                        return True
        except TimeoutError as slow:
            message_ = f"the body did not arrive within {self._timeout_s:g} s"
            raise _Refused(SlowClient(message_, limit_s=self._timeout_s)) from slow

    def _too_large(self) -> PayloadTooLarge:
        return PayloadTooLarge(f"the body is larger than {self._limit} bytes", limit=self._limit)


class _Refused(Exception):
    """Carries the refusal out of the reading loop."""

    def __init__(self, error: RequestError) -> None:
        super().__init__(error.message)
        self.error = error


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body once and then whatever the connection says."""
    given = False

    async def replay() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


async def refuse_unread(error: RequestError, scope: Scope, receive: Receive, send: Send) -> None:
    """Refuse at once although the body is not read, and close.

    Closing with unread bytes makes the kernel reset the connection, and the client would see a broken pipe instead of
    the reply. So the reply goes out first, then what still comes is thrown away for a moment.
    """
    reply = error_reply(error, scope["path"])
    reply.headers["connection"] = "close"
    await send({"type": "http.response.start", "status": reply.status_code, "headers": reply.raw_headers})
    await send({"type": "http.response.body", "body": reply.body, "more_body": True})
    try:
        async with asyncio.timeout(LINGER_S):
            more = scope["method"] not in BODILESS
            while more:
                message = await receive()
                more = message["type"] == "http.request" and message.get("more_body", False)
    except TimeoutError:
        log.info("a refused body on %s was still coming after %g s", scope["path"], LINGER_S)
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def require_json(scope: Scope) -> None:
    """Refuse what a web page of another origin could post without asking (text/plain and forms)."""
    kind = (header(scope, b"content-type") or b"").split(b";")[0].strip().lower()
    if kind != b"application/json" and not kind.endswith(b"+json"):
        shown = kind.decode("latin-1") or "absent"
        raise InvalidRequest(f"content-type must be application/json, not {shown!r}", param="content-type")
