"""`/v1/kv/plan` and `/v1/kv/conversations`: what would happen, what is held for whom, and what may be done about it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from tenure.errors import InvalidRequest
from tenure.server.asks import Ask, chat_ask, completion_ask
from tenure.server.body import Strict, parse_object, validate
from tenure.server.caller import Caller, caller_of
from tenure.server.guards import require_json
from tenure.server.pins import TTLS
from tenure.server.query import asked
from tenure.server.receipts import forgotten_object
from tenure.server.replies import Json
from tenure.server.serves import Change, Serves
from tenure.server.texts import Texts, weight
from tenure.types import Request
from tenure.views import ConversationView, Forecast

BASE = "/v1/kv/conversations"
CHANGES: tuple[Change, ...] = ("pin", "unpin", "pause", "resume")


class PinBody(Strict):
    ttl: Literal["5m", "1h"] | None = None


class Conversations:
    """The routes over one `Serves`. A tenant finds its own conversations; another's are not there for it."""

    def __init__(self, serves: Serves, texts: Texts) -> None:
        self._serves = serves
        self._texts = texts

    def routes(self) -> list[Route]:
        return [
            Route("/v1/kv/plan", self.plan, methods=["POST"]),
            asked(BASE, self.list),
            *(asked(f"{BASE}/{{id:path}}/{change}", self.change, ["POST"]) for change in CHANGES),
            asked(f"{BASE}/{{id:path}}", self.inspect),
            asked(f"{BASE}/{{id:path}}", self.delete, ["DELETE"]),
        ]

    async def plan(self, request: HttpRequest) -> Response:
        """POST /v1/kv/plan: what would become of this chat or completion request; nothing is computed or changed."""
        require_json(request.scope)
        body, caller = await request.body(), caller_of(request)
        ask = await self._texts.run(weight(body), lambda: self._ask(parse_object(body), caller))
        if len(ask.requests) > 1:
            raise InvalidRequest(f"a plan is made for one prompt, not for {len(ask.requests)}", param="prompt")
        first = ask.request
        return Json(forecast_object(first, await self._serves.forecast(first), self._serves.card.context_limit))

    def _ask(self, fields: Mapping[str, Any], caller: Caller) -> Ask:
        reader = completion_ask if "prompt" in fields and "messages" not in fields else chat_ask
        return reader(self._serves, fields, caller)

    async def list(self, request: HttpRequest) -> Response:
        """GET /v1/kv/conversations, those last used first."""
        views = await self._serves.conversations(caller_of(request).sees)
        return Json({"object": "list", "data": [conversation_object(view) for view in views]})

    async def inspect(self, request: HttpRequest) -> Response:
        """GET /v1/kv/conversations/{id}."""
        caller, name = caller_of(request), request.path_params["id"]
        return Json(conversation_object(await self._serves.conversation(caller.sees, name)))

    async def change(self, request: HttpRequest) -> Response:
        """POST /v1/kv/conversations/{id}/{pin,unpin,pause,resume}; the conversation as it is then."""
        change = request.url.path.rpartition("/")[2]
        ttl_s = 0.0
        if change == "pin":
            body = await request.body()
            fields = parse_object(body) if body else {}
            ttl_s = TTLS[validate(PinBody, fields).ttl or "5m"]
        caller, name = caller_of(request), request.path_params["id"]
        made = next(known for known in CHANGES if known == change)
        return Json(conversation_object(await self._serves.change_conversation(caller.sees, name, made, ttl_s)))

    async def delete(self, request: HttpRequest) -> Response:
        """DELETE /v1/kv/conversations/{id}: forget it, and drop the blocks that nobody else holds or shares."""
        caller, name = caller_of(request), request.path_params["id"]
        blocks = await self._serves.delete_conversation(caller.sees, name)
        return Json({"object": "kv.conversation.deleted", "id": name, "deleted": True, "blocks": blocks})


def conversation_object(view: ConversationView) -> dict[str, Any]:
    """A conversation as JSON."""
    return {
        "object": "kv.conversation",
        "id": view.id,
        "tenant": view.tenant,
        "state": view.state,
        "tokens": view.tokens,
        "held_tokens": view.held_tokens,
        "bytes": dict(view.bytes),
        "idle_s": round(view.idle_s, 3),
        "pins": [
            {"tokens": pin.tokens, "bytes": pin.bytes, "expires_in_s": round(pin.expires_in_s, 3)} for pin in view.pins
        ],
    }


def forecast_object(request: Request, forecast: Forecast, context_limit: int) -> dict[str, Any]:
    """A dry run as JSON."""

    def rounded(seconds: float | None) -> float | None:
        return None if seconds is None else round(seconds, 4)

    return {
        "object": "kv.plan",
        "fits_now": forecast.fits_now,
        "fits_ever": forecast.fits_ever,
        "reason": forecast.reason,
        "prompt_tokens": len(request.tokens),
        "cached_tokens": forecast.cached_tokens,
        "computed_tokens": forecast.computed_tokens,
        "context_limit": context_limit,
        "forgotten": [forgotten_object(part) for part in request.forgotten],
        "answer": {"n": request.n, "tokens": forecast.answer_tokens, "limit_cause": forecast.answer_cause},
        "needed_blocks": forecast.needed_blocks,
        "whole_blocks": forecast.whole_blocks,
        "lacking_blocks": forecast.lacking_blocks,
        "would_evict": {"blocks": forecast.would_evict_blocks, "tokens": forecast.would_evict_tokens},
        "predicted_start_s": rounded(forecast.predicted_start_s),
        "predicted_ttft_s": rounded(forecast.predicted_ttft_s),
    }
