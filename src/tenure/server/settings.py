"""What the operator may set of the server, with its defaults."""

from __future__ import annotations

from dataclasses import dataclass, field

from tenure.tenants import Tenants


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Bytes and seconds. The command line builds one; everything else only reads it."""

    api_key: str | None = None
    """The operator's. With one, or with tenants, every route but `/health`, `/ping`, `/ready` and `/metrics` asks for a
    key."""
    tenants: Tenants = field(default_factory=Tenants)
    """Who else may come, each with keys of their own."""
    max_body_bytes: int = 16 << 20
    """Per request; a body beyond it is refused with 413 before it is read."""
    max_bodies_bytes: int = 128 << 20
    """For all requests at once; beyond it, 503."""
    body_timeout_s: float = 30.0
    """From the end of the headers to the end of the body."""
    header_timeout_s: float = 10.0
    """From the connection (or the first byte of a later request) to the end of the headers."""
    max_header_bytes: int = 64 << 10
    request_timeout_s: float | None = 600.0
    """From the acceptance of a request to its last token, the wait in the queue included. None: no limit."""
    stream_buffer_bytes: int = 256 << 10
    """What a stream may hold for a client that reads too slowly; beyond it the request is cancelled."""
    stall_timeout_s: float = 30.0
    """How long a client may read nothing at all before its connection is cut."""
    keep_alive_s: float = 15.0
    """A stream that has nothing to say for so long sends an SSE comment, so that proxies keep it open."""
