"""Who asks: what the headers and the key say of a request, beside its body."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request as HttpRequest

from tenure.errors import Forbidden

TENANT = "tenure.tenant"
"""Where the guard that checks keys leaves the tenant's name in the ASGI scope; not there: it is the operator."""


@dataclass(frozen=True, slots=True)
class Caller:
    """A client as the routes see it."""

    session: str | None = None
    """The header X-Session-ID."""
    tenant: str = ""
    """Whose key it came with; empty for the operator, and for everyone when the server knows no tenants."""

    @property
    def sees(self) -> str | None:
        """Whose conversations and facts it may see; None: everybody's."""
        return self.tenant or None

    def require_operator(self) -> None:
        """Raise Forbidden for a tenant."""
        if self.tenant:
            raise Forbidden("this concerns all tenants: only the operator's key may do it")


def caller_of(request: HttpRequest) -> Caller:
    """The caller of a request that has passed the guards."""
    return Caller(request.headers.get("x-session-id"), request.scope.get(TENANT, ""))
