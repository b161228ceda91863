"""Routes for operators: health, load, metrics, the cache, and tokens."""

from __future__ import annotations

import dataclasses
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

import tenure
from tenure.errors import NotBuilt
from tenure.server.asks import ChatBody, Ids, check_ids, check_model, render
from tenure.server.body import Strict, parse_object, validate
from tenure.server.caller import Caller, caller_of
from tenure.server.guards import require_json
from tenure.server.metrics import CONTENT_TYPE, Metrics
from tenure.server.replies import Json
from tenure.server.serves import Serves
from tenure.server.texts import Texts
from tenure.server.unbuilt import CHAT, refuse_unbuilt


class TokenizeBody(Strict):
    model: str | None = None
    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChatBody(ChatBody):
    return_token_strs: bool | None = None


class DetokenizeBody(Strict):
    model: str | None = None
    tokens: Ids


class Ops:
    """The operators' routes over one `Serves`."""

    def __init__(self, serves: Serves, metrics: Metrics, texts: Texts, load: Load) -> None:
        self._serves = serves
        self._metrics = metrics
        self._texts = texts
        self._load = load

    async def health(self, request: HttpRequest) -> Response:
        """GET /health, /ping: 200 while the engine's thread works."""
        health = self._serves.health()
        if health.alive:
            return Json({"status": "ok"})
        return Json({"status": "dead", "cause": health.cause}, status_code=503)

    async def ready(self, request: HttpRequest) -> Response:
        """GET /ready: 200 while requests are taken; otherwise 503 that says why not."""
        health = self._serves.health()
        if health.alive and health.ready:
            return Json({"status": "ready"})
        return Json({"status": "not ready", "cause": health.cause}, status_code=503)

    async def version(self, request: HttpRequest) -> Response:
        """GET /version."""
        return Json({"version": tenure.__version__})

    async def load(self, request: HttpRequest) -> Response:
        """GET /load: answers under way, as vLLM counts them."""
        return Json({"server_load": self._load.count})

    async def metrics(self, request: HttpRequest) -> Response:
        """GET /metrics."""
        return Response(self._metrics.text(), headers={"content-type": CONTENT_TYPE})

    async def reset(self, request: HttpRequest) -> Response:
        """POST /reset_prefix_cache: drop all blocks that no sequence holds."""
        caller_of(request).require_operator()
        return Json({"blocks": await self._serves.clear_cache()})

    async def tokenize(self, request: HttpRequest) -> Response:
        """POST /tokenize: a prompt, or messages as the chat route would render them."""
        require_json(request.scope)
        body, caller = await request.body(), caller_of(request)
        return Json(await self._texts.run(len(body), lambda: self._tokens(parse_object(body), caller)))

    def _tokens(self, fields: dict[str, Any], caller: Caller) -> dict[str, Any]:
        serves = self._serves
        body: TokenizeBody | TokenizeChatBody
        if "messages" in fields:
            refuse_unbuilt(fields, CHAT)
            body = chat = validate(TokenizeChatBody, fields)
            check_model(serves, chat.model)
            if chat.overflow is None and chat.truncation is None:  # whoever counts tokens wants all of them
                chat = chat.model_copy(update={"overflow": "refuse"})
            tokens = list(render(serves, chat, caller).tokens)
        else:
            body = plain = validate(TokenizeBody, fields)
            check_model(serves, plain.model)
            tokens = serves.encode(plain.prompt, special=plain.add_special_tokens is not False)
        texts = [serves.decode([token]) for token in tokens] if body.return_token_strs else None
        limit = serves.card.context_limit
        return {"count": len(tokens), "max_model_len": limit, "tokens": tokens, "token_strs": texts}

    async def detokenize(self, request: HttpRequest) -> Response:
        """POST /detokenize."""
        require_json(request.scope)
        body = await request.body()
        return Json(await self._texts.run(len(body), lambda: self._prompt(parse_object(body))))

    def _prompt(self, fields: dict[str, Any]) -> dict[str, Any]:
        body = validate(DetokenizeBody, fields)
        check_model(self._serves, body.model)
        return {"prompt": self._serves.decode(check_ids(self._serves, body.tokens, "tokens"))}

    async def kv(self, request: HttpRequest) -> Response:
        """GET /v1/kv: the pool, its budget and policies, and what has become of blocks and tokens since the start."""
        return Json(self._kv(caller_of(request)))

    def _kv(self, caller: Caller) -> dict[str, Any]:
        stats, card, sums = self._serves.stats(), self._serves.card, self._metrics.summary()
        pool = stats.pool
        return {
            "object": "kv",
            "model": card.id,
            "codec": stats.codec,
            "block_tokens": stats.block_tokens,
            "block_bytes": stats.block_bytes,
            "layers": [{"layers": group.layers, "window": group.window} for group in card.groups],
            "context_limit": stats.context_limit,
            "conversations_that_fit": stats.conversations_that_fit,
            "budget": {
                "total_bytes": stats.budget_bytes,
                "weight_bytes": stats.weight_bytes,
                "arena_bytes": stats.arena_bytes,
            },
            "tiers": {"device": {"leased": pool.leased, "cached": pool.cached, "free": pool.free, "total": pool.total}},
            "pinned_blocks": stats.pinned_blocks,
            "leaked_blocks": stats.leaked_blocks,
            "policy": {"eviction": stats.eviction, "pressure": stats.pressure, "overflow": stats.overflow},
            "running": stats.running,
            "waiting": stats.waiting,
            "queued_tokens": stats.queued_tokens,
            "max_num_seqs": stats.max_num_seqs,
            "predicted_start_s": stats.predicted_start_s,
            "steps": stats.steps,
            "tenants": [dataclasses.asdict(tenant) for tenant in stats.tenants if caller.sees in (None, tenant.name)],
            "since_start": {
                "prompt_tokens": sums.prompt_tokens,
                "cached_tokens": sums.cached_tokens,
                "generation_tokens": sums.generation_tokens,
                "blocks_stored": sum(sums.stored.values()),
                "blocks_reused": sums.reused_blocks,
                "blocks_gone": [
                    {"tier": tier, "fate": fate, "by": by, "reason": reason, "blocks": count}
                    for (tier, fate, by, reason), count in sorted(sums.gone.items())
                ],
                "misses": dict(sums.misses),
                "preemptions": sums.paused,
                "recomputed_tokens": sums.recomputed.total(),
                "facts_missed": sums.facts_missed,
            },
        }


class Load:
    """How many answers are under way."""

    def __init__(self) -> None:
        self.count = 0


async def not_built(request: HttpRequest) -> Response:
    """Routes that other servers have and this one does not have yet."""
    raise NotBuilt(f"{request.method} {request.scope['path']} is not built yet in Tenure {tenure.__version__}")
