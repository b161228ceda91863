"""uvicorn's HTTP protocol with what it lacks: limits on the time and size of headers, and a way to cut a connection.

Without them a client that sends its headers a byte a minute holds a connection for ever (slowloris), one that never
ends them fills the memory, and one that stops reading cannot be got rid of: closing waits for the unsent bytes.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tenure.server.replies import dump
from tenure.server.settings import ServerSettings


class Guarded(HttpToolsProtocol):
    """One connection. `limits` is set by `guarded_protocol`."""

    limits = ServerSettings()
    _header_timer: asyncio.TimerHandle | None = None
    _header_bytes = 0
    _in_headers = True

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        _tune(transport, self.limits.stall_timeout_s)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        was_in_headers = self._in_headers
        super().data_received(data)
        # Bytes that began with the tail of a body are let pass: at most one read of them.
        if was_in_headers and self._in_headers:
            self._header_bytes += len(data)
        if self._header_bytes > self.limits.max_header_bytes and not self.transport.is_closing():
            self._refuse(b"431 Request Header Fields Too Large", "the headers are too large", "headers_too_large")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_headers = True
        self._header_bytes = 0
        if self._header_timer is None:
            self._start_timer()

    def on_headers_complete(self) -> None:
        self._in_headers = False
        self._header_bytes = 0
        self._stop_timer()
        self.scope["tenure.abort"] = self.transport.abort  # type: ignore[typeddict-unknown-key]
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(b"400 Bad Request", "this is not HTTP/1.1", "invalid_request")

    def _headers_late(self) -> None:
        self._header_timer = None
        if not self.transport.is_closing():
            message = f"the headers did not arrive within {self.limits.header_timeout_s:g} s"
            self._refuse(b"408 Request Timeout", message, "client_too_slow")

    def _start_timer(self) -> None:
        self._header_timer = self.loop.call_later(self.limits.header_timeout_s, self._headers_late)

    def _stop_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _refuse(self, status: bytes, message: str, code: str) -> None:
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
        body = dump({"error": error})
        head = b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        self.transport.write(head % (status, len(body)) + body)
        self.transport.close()


def guarded_protocol(settings: ServerSettings) -> type[Guarded]:
    """The protocol class for `uvicorn.Config(http=…)`."""
    return type("Guarded", (Guarded,), {"limits": settings})


def _tune(transport: asyncio.Transport, stall_s: float) -> None:
    """Send at once, and let the kernel give up on a peer that takes nothing.

    asyncio turns Nagle's algorithm off only on sockets that were made with an explicit protocol number; on others a
    reply of two writes waits 40 ms for the peer's delayed acknowledgement.
    """
    sock = transport.get_extra_info("socket")
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        # Twice the stall limit: whoever can still speak to the client does so first.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(stall_s * 2000))


def uvicorn_config(app: ASGIApp, host: str, port: int, settings: ServerSettings, **more: Any) -> uvicorn.Config:
    """How Tenure runs under uvicorn; `more` overrides (log_level, fd, timeout_graceful_shutdown, …)."""
    options: dict[str, Any] = {
        "http": guarded_protocol(settings),
        "ws": "none",
        "lifespan": "off",
        "access_log": False,
        "server_header": False,
        "log_level": "warning",
        "timeout_keep_alive": 30,
        "backlog": 2048,
        **more,
    }
    return uvicorn.Config(app, host=host, port=port, **options)
