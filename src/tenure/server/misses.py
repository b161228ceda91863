"""`/v1/kv/misses`: why prompts were not reused, what that cost, and where; by cause, by conversation, and by the habits
that `tenure lint` finds in what was asked lately."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict, deque
from collections.abc import Mapping
from typing import Any, Protocol

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from tenure.events import Fact, RequestDone, RequestQueued
from tenure.server.caller import caller_of
from tenure.server.replies import Json
from tenure.server.serves import Serves
from tenure.types import MissReason, Request

RECENT = 200
"""Misses told one by one."""
MAX_CAUSES = 10_000
"""Pairs of tenant, conversation and cause that are counted; the longest silent go first."""
ADVICE: Mapping[MissReason, str] = {
    "cold": "nothing like it was held: the first time is never free",
    "content_changed": "something before the newest message changed; `lately` says what, and where",
    "retokenised": "send a session_id, so that earlier answers are spliced in by their exact tokens",
    "reasoning_stripped": "send the reasoning of earlier turns back as it was, or never keep it at all",
    "scope_changed": "model, adapter, tenant or salt differ from who computed it: those never share",
    "window": "layers with a window no longer held what they see there: more memory keeps it longer",
    "evicted": "there was no room to keep it: see what `tenure replay --memory` says more would save",
    "expired": "it was kept as long as it was asked to be: ask for a longer ttl",
    "corrupt": "what was held proved bad and was dropped; see the log",
    "below_minimum": "blocks of 8 and 4 bits are reused whole: at most 31 tokens are computed again; bf16 reuses heads",
    "recoded": "memory was short, and it is held in fewer bits: give more memory, or accept it (`codec: any`)",
    "prompt_logprobs": "the request asked for the logprobs of its prompt, which takes computing it",
    "unknown": "the cause was not recorded",
}


class Habits(Protocol):
    """What looks at prompts themselves. Any thread may tell and ask."""

    def saw(self, request: Request) -> None:
        """A request is about to be submitted."""
        ...

    def learn(self, fact: Fact) -> None: ...

    def findings(self, tenant: str | None) -> dict[str, Any]:
        """For one tenant or (None) all: what was looked at, and the habits found in it. Takes its time."""
        ...


class Misses:
    """Folds facts into causes. The engine's thread tells, others ask."""

    def __init__(self, serves: Serves, habits: Habits | None = None) -> None:
        """`habits`: who looks at the prompts; without one, causes are all that is told."""
        self._habits = habits
        self._looking = asyncio.Lock()
        self._lock = threading.Lock()
        self._sessions: OrderedDict[str, str | None] = OrderedDict()
        """Of requests under way."""
        self._causes: OrderedDict[tuple[str, str | None, str], list[float]] = OrderedDict()
        """Requests, tokens and milliseconds."""
        self._recent: deque[tuple[str, dict[str, Any]]] = deque(maxlen=RECENT)
        serves.facts.listen(self._learn)
        if habits is not None:
            serves.facts.listen(habits.learn)

    def saw(self, request: Request) -> None:
        """A request is about to be submitted."""
        if self._habits is not None:
            self._habits.saw(request)

    async def misses(self, request: HttpRequest) -> Response:
        """GET /v1/kv/misses: a tenant sees its own, the operator all."""
        tenant = caller_of(request).sees
        report = self.report(tenant)
        if self._habits is not None:
            async with self._looking:  # one at a time: it takes the interpreter from the engine's thread
                report["lately"] = await asyncio.to_thread(self._habits.findings, tenant)
        return Json(report)

    def report(self, tenant: str | None) -> dict[str, Any]:
        """What the route answers, for one tenant or (None) for all of them; the dearest cause first."""
        with self._lock:
            causes = [(key, list(sums)) for key, sums in self._causes.items() if tenant in (None, key[0])]
            recent = [miss for whose, miss in self._recent if tenant in (None, whose)]
        reasons: dict[str, list[float]] = {}
        conversations = []
        for (_, session, reason), sums in causes:
            total = reasons.setdefault(reason, [0, 0, 0.0])
            for at, value in enumerate(sums):
                total[at] += value
            if session is not None:
                conversations.append({"session_id": session, "reason": reason, **_sums(sums)})
        return {
            "object": "kv.misses",
            "reasons": [
                {"reason": reason, **_sums(sums), "advice": ADVICE.get(reason, "")}  # type: ignore[call-overload]
                for reason, sums in sorted(reasons.items(), key=lambda item: -item[1][1])
            ],
            "conversations": sorted(conversations, key=lambda item: -item["computed_tokens"])[:RECENT],
            "recent": recent[::-1],
        }

    def _learn(self, fact: Fact) -> None:
        if isinstance(fact, RequestQueued):
            with self._lock:
                self._sessions[fact.request] = fact.session
                if len(self._sessions) > MAX_CAUSES:
                    self._sessions.popitem(last=False)
        elif isinstance(fact, RequestDone):
            with self._lock:
                self._done(fact, self._sessions.pop(fact.request, None))

    def _done(self, fact: RequestDone, session: str | None) -> None:
        miss, receipt, ms = fact.receipt.miss, fact.receipt, fact.timings.prompt_ms
        if miss is None:
            return
        key = (fact.tenant, session, miss.reason)
        sums = self._causes.setdefault(key, [0, 0, 0.0])
        sums[0] += 1
        sums[1] += receipt.computed_tokens
        sums[2] += ms
        self._causes.move_to_end(key)
        if len(self._causes) > MAX_CAUSES:
            self._causes.popitem(last=False)
        told = {
            "request": fact.request,
            "session_id": session,
            "reason": miss.reason,
            "at_token": miss.at_token,
            "message": miss.message,
            "prompt_tokens": receipt.prompt_tokens,
            "computed_tokens": receipt.computed_tokens,
            "prompt_ms": round(ms, 3),
        }
        self._recent.append((fact.tenant, told))


def _sums(sums: list[float]) -> dict[str, Any]:
    return {"requests": int(sums[0]), "computed_tokens": int(sums[1]), "seconds": round(1e-3 * sums[2], 3)}
