"""Error bodies, headers and JSON replies: the shapes that clients of OpenAI and Anthropic read."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tenure.errors import RequestError

ANTHROPIC_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
NO_RETRY = {501, 504}
"""Statuses that SDKs would retry by themselves although the answer would be the same."""


def dump(value: Any) -> bytes:
    """JSON as UTF-8 bytes, compact, text as it is."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


class Json(Response):
    """A JSON reply from plain Python values."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return dump(content)


def error_object(error: RequestError) -> dict[str, Any]:
    """The inside of `{"error": …}`: message, type, param, code and the numbers that bind."""
    return {
        "message": error.message,
        "type": error.kind,
        "param": error.param,
        "code": error.code,
        **error.numbers,
    }


def error_headers(error: RequestError) -> dict[str, str]:
    """Retry-After in whole seconds (rounded up) and in milliseconds, when another try makes sense."""
    headers: dict[str, str] = {}
    wait = error.retry_after_s
    if wait is not None:
        headers["retry-after"] = str(max(1, math.ceil(wait)))
        headers["retry-after-ms"] = str(max(1, math.ceil(wait * 1000)))
    if error.status in NO_RETRY:
        headers["x-should-retry"] = "false"
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return headers


def error_reply(error: RequestError, path: str, extra: Mapping[str, Any] | None = None) -> Json:
    """The reply that refuses a request on `path`; `extra` (usage, receipt) goes beside the error."""
    body: dict[str, Any]
    if path.startswith("/v1/messages"):
        kind = ANTHROPIC_KINDS.get(error.status, "api_error")
        body = {"type": "error", "error": {"type": kind, "message": error.message}}
    else:
        body = {"error": error_object(error), **(extra or {})}
    return Json(body, status_code=error.status, headers=error_headers(error))


async def refuse(error: RequestError, scope: Scope, receive: Receive, send: Send) -> None:
    """Send the error as the whole reply."""
    await error_reply(error, scope["path"])(scope, receive, send)


async def on_request_error(request: HttpRequest, error: Exception) -> Response:
    """Starlette's handler for the refusals that routes raise."""
    if not isinstance(error, RequestError):
        raise error
    return error_reply(error, request.scope["path"])
