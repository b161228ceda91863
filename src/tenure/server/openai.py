"""`/v1/chat/completions`, `/v1/completions`, `/v1/models`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from tenure.errors import Internal
from tenure.server.answer import Ends, Whole
from tenure.server.asks import Ask, chat_ask, check_model, completion_ask
from tenure.server.batch import submit_all
from tenure.server.body import parse_object
from tenure.server.caller import Caller, caller_of
from tenure.server.guards import require_json
from tenure.server.leash import Cut, Leash
from tenure.server.receipts import account
from tenure.server.replies import Json, error_reply
from tenure.server.serves import ModelCard, Serves
from tenure.server.settings import ServerSettings
from tenure.server.stream import Reply, StreamReply
from tenure.server.texts import Texts, weight
from tenure.types import Done, Request

log = logging.getLogger("tenure.server")

Reader = Callable[[Serves, Mapping[str, Any], Caller], Ask]


class WholeReply(Reply):
    """Writes the answer when it is whole."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._leash(receive) as leash:
            reply = await self._gather(leash, scope["path"])
        if not leash.gone:
            await reply(scope, receive, send)

    async def _gather(self, leash: Leash, path: str) -> Response:
        whole, ends, done = Whole(self._ask, int(time.time())), Ends(), None
        try:
            async with leash.patience():
                async for item in self._handle:
                    if isinstance(item, Done):
                        done = item
                        leash.ended()
                        continue
                    whole.add(item)
                    ends.note(item)
        except TimeoutError:
            log.error("request %s did not end when it was cancelled", self._handle.request.id)
        error = leash.failure(done, ends.seen)
        if error is not None or done is None:
            error = error or Internal("the engine ended the request without a result")
            return error_reply(error, path, None if done is None else account(done))
        return Json(whole.body(done))


class OpenAI:
    """The OpenAI routes over one `Serves`."""

    def __init__(
        self,
        serves: Serves,
        settings: ServerSettings,
        texts: Texts,
        told: Callable[[Cut], None],
        saw: Callable[[Request], None],
    ) -> None:
        """`told` hears of answers cut short, `saw` of each request before it is submitted."""
        self._serves = serves
        self._settings = settings
        self._texts = texts
        self._told = told
        self._saw = saw

    async def chat(self, request: HttpRequest) -> ASGIApp:
        """POST /v1/chat/completions."""
        return await self._answer(request, chat_ask)

    async def completions(self, request: HttpRequest) -> ASGIApp:
        """POST /v1/completions."""
        return await self._answer(request, completion_ask)

    async def models(self, request: HttpRequest) -> Response:
        """GET /v1/models."""
        return Json({"object": "list", "data": [model_object(self._serves.card)]})

    async def model(self, request: HttpRequest) -> Response:
        """GET /v1/models/{id}."""
        check_model(self._serves, request.path_params["id"])
        return Json(model_object(self._serves.card))

    async def _answer(self, request: HttpRequest, reader: Reader) -> ASGIApp:
        require_json(request.scope)
        body = await request.body()
        caller = caller_of(request)
        ask = await self._texts.run(weight(body), lambda: reader(self._serves, parse_object(body), caller))
        for asked in ask.requests:
            self._saw(asked)
        handle = submit_all(self._serves, ask.requests)
        kind = StreamReply if ask.stream else WholeReply
        return kind(ask, handle, self._settings, self._told)


def model_object(card: ModelCard) -> dict[str, Any]:
    """A model as `/v1/models` lists it, with vLLM's `max_model_len`."""
    return {
        "id": card.id,
        "object": "model",
        "created": card.created,
        "owned_by": "tenure",
        "root": card.id,
        "parent": None,
        "max_model_len": card.context_limit,
    }
