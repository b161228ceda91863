"""Who asks: what the headers and the key say of a request, beside its body."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request as HttpRequest

TENANT = "tenure.tenant"
"""Where the guard that checks keys leaves the tenant's name in the ASGI scope."""


@dataclass(frozen=True, slots=True)
class Caller:
    """A client as the routes see it."""

    session: str | None = None
    """The header X-Session-ID."""
    tenant: str = ""
    """Whose key it came with; empty when the server knows no tenants."""


def caller_of(request: HttpRequest) -> Caller:
    """The caller of a request that has passed the guards."""
    return Caller(request.headers.get("x-session-id"), request.scope.get(TENANT, ""))
