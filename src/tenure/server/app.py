"""The server: `create_app` puts routes and guards together over a `Serves`."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tenure.errors import Internal, InvalidRequest, MethodNotAllowed, NotFound, RequestError
from tenure.server.conversations import Conversations
from tenure.server.feed import Feed
from tenure.server.guards import Bodies, Keys, RequestIds
from tenure.server.metrics import Metrics
from tenure.server.misses import Habits, Misses
from tenure.server.openai import OpenAI
from tenure.server.ops import Load, Ops, not_built
from tenure.server.query import asked
from tenure.server.replies import error_reply, on_request_error
from tenure.server.serves import Serves
from tenure.server.settings import ServerSettings
from tenure.server.texts import Texts

__all__ = ["ServerSettings", "create_app"]

METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]
UNBUILT = [
    "/v1/embeddings",
    "/v1/responses",
    "/v1/responses/{rest:path}",
    "/v1/messages",
    "/v1/messages/{rest:path}",
    "/v1/audio/{rest:path}",
    "/v1/images/{rest:path}",
    "/v1/moderations",
    "/v1/files",
    "/v1/files/{rest:path}",
    "/v1/batches",
    "/v1/batches/{rest:path}",
    "/v1/fine_tuning/{rest:path}",
    "/v1/assistants",
    "/v1/threads",
    "/v1/conversations",
    "/v1/rerank",
    "/rerank",
    "/v1/score",
    "/score",
    "/pooling",
    "/classify",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
]


def create_app(serves: Serves, settings: ServerSettings, habits: Habits | None = None) -> Starlette:
    """The ASGI application. It imports no engine; everything it knows comes through `serves`. `habits` looks at
    prompts, for `/v1/kv/misses`."""
    metrics, texts, load = Metrics(serves), Texts(), Load()
    misses = Misses(serves, habits)
    openai, ops = OpenAI(serves, settings, texts, metrics.cut, misses.saw), Ops(serves, metrics, texts, load)
    feed = Feed(serves, settings)
    routes = [
        Route("/v1/chat/completions", openai.chat, methods=["POST"]),
        Route("/v1/completions", openai.completions, methods=["POST"]),
        Route("/tokenize", ops.tokenize, methods=["POST"]),
        Route("/detokenize", ops.detokenize, methods=["POST"]),
        asked("/v1/models", openai.models),
        asked("/v1/models/{id:path}", openai.model),
        asked("/v1/kv", ops.kv),
        asked("/v1/kv/misses", misses.misses),
        asked("/v1/kv/events", feed.events, takes=("types",)),
        *Conversations(serves, texts).routes(),
        asked("/version", ops.version),
        asked("/load", ops.load),
        asked("/metrics", ops.metrics),
        asked("/reset_prefix_cache", ops.reset, ["POST"]),
        # Probes take any query: a balancer may add one of its own, and a probe that fails gets the server restarted.
        Route("/health", ops.health, methods=["GET"]),
        Route("/ping", ops.health, methods=["GET", "POST"]),
        Route("/ready", ops.ready, methods=["GET"]),
        *(Route(path, not_built, methods=METHODS) for path in UNBUILT),
    ]
    guards = [Middleware(RequestIds)]
    if settings.api_key is not None or settings.tenants.tenants:
        guards.append(Middleware(Keys, operator=settings.api_key, tenants=settings.tenants))
    guards += [Middleware(Bodies, settings=settings), Middleware(_Counted, load=load)]
    handlers = {RequestError: on_request_error, HTTPException: _on_http_error}
    app = Starlette(routes=routes, middleware=guards, exception_handlers=handlers)
    app.router.redirect_slashes = False
    return app


class _Counted:
    """Counts answers under way for `/load`."""

    def __init__(self, app: ASGIApp, load: Load) -> None:
        self.app = app
        self._load = load

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith("/v1/") or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        self._load.count += 1
        try:
            await self.app(scope, receive, send)
        finally:
            self._load.count -= 1


async def _on_http_error(request: HttpRequest, error: Exception) -> Response:
    """Starlette's own refusals (no such route, wrong method) in our shape."""
    if not isinstance(error, HTTPException):
        raise error
    path: str = request.scope["path"]
    reply = error_reply(_translated(error, request.method, path), path)
    for name, value in (error.headers or {}).items():
        reply.headers[name] = value
    return reply


def _translated(error: HTTPException, method: str, path: str) -> RequestError:
    if error.status_code == 404:
        return NotFound(f"there is no {path!r:.200} here")
    if error.status_code == 405:
        return MethodNotAllowed(f"{method} is not allowed on {path!r:.200}")
    if error.status_code < 500:
        return InvalidRequest(error.detail)
    return Internal(error.detail)
