"""Query parameters: a route takes those it declares, each once. Any other is refused by name: ignored in silence, it
would leave its sender with an answer to another question."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import wraps

from starlette.requests import Request as HttpRequest
from starlette.routing import Route
from starlette.types import ASGIApp

from tenure.errors import InvalidRequest

ANYWHERE = ("api-version",)
"""What Azure's clients add to every request; it asks for nothing."""
Endpoint = Callable[[HttpRequest], Awaitable[ASGIApp]]


def asked(path: str, endpoint: Endpoint, methods: Sequence[str] = ("GET",), takes: Sequence[str] = ()) -> Route:
    """A route that answers what its path and its query say: for all but those that read a body."""

    @wraps(endpoint)
    async def checked(request: HttpRequest) -> ASGIApp:
        check_query(request, takes)
        return await endpoint(request)

    return Route(path, checked, methods=list(methods))


def check_query(request: HttpRequest, takes: Sequence[str]) -> None:
    """Raise InvalidRequest for a parameter that is not one of `takes`, or is there twice."""
    names = [name for name, _ in request.query_params.multi_items() if name not in ANYWHERE]
    for at, name in enumerate(names):
        if name not in takes:
            known = f"known: {', '.join(takes)}" if takes else "this route takes none"
            raise InvalidRequest(f"{name:.64}: unknown query parameter; {known}", param=name[:64])
        if name in names[:at]:
            raise InvalidRequest(f"{name}: the query parameter occurs twice", param=name)
