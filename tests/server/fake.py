"""A `Serves` that computes nothing: scripted tokens, delays, refusals, and the facts a real engine would tell.

A token is one byte of UTF-8 (0–255); 256 is the beginning of a text. Text is decoded whole characters at a time.
"""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tenure.errors import InvalidRequest, NotFound, RequestError
from tenure.events import FactLog, RequestDone, RequestQueued, RequestRefused, RequestStarted, StepDone, TokenFirst
from tenure.server.serves import Change, Health, ModelCard, Prompt, Reader
from tenure.types import (
    Done,
    Finish,
    Forgotten,
    Guide,
    LimitCause,
    Logprob,
    Miss,
    Overflow,
    Piece,
    Pin,
    PinReceipt,
    PoolCounts,
    Receipt,
    Request,
    Scope,
    Snapshot,
    Span,
    Timings,
    Token,
    Usage,
)
from tenure.views import ConversationView, Forecast, TenantView

BOS = 256
VOCAB = 300
CONTEXT = 4096
LONG = "the quick brown fox jumps over the lazy dog "


@dataclass
class Script:
    """How the fake answers: what text, how fast, and what goes wrong."""

    text: str = "Hello, wörld! 🙂"
    repeat: int = 1
    step_s: float = 0.0
    prefill_s: float = 0.0
    hold: bool = False
    """Never start: the request stays in the queue until it is cancelled."""
    deaf: bool = False
    """Do not even react to cancel."""
    refuse: RequestError | None = None
    crash: str | None = None
    """Raise in `submit`."""
    error_at: int | None = None
    """Fail after so many tokens (0: before the first)."""
    shutdown_at: int | None = None
    finish: Finish | None = None
    cause: LimitCause | None = None
    cached: int = 0
    granted: int | None = None
    """max_tokens was clamped to so much."""
    forgotten: tuple[Forgotten, ...] = ()
    silent: bool = False
    """The iteration ends without a Done."""
    broken: str | None = None
    """The iteration raises after its first piece."""


def _pinned(pin: Pin) -> PinReceipt:
    """Pins of whole blocks of 32 tokens are granted."""
    tokens = pin.end_token // 32 * 32
    return PinReceipt(pin.end_token, tokens > 0, tokens, 10 * tokens, pin.ttl_s, None if tokens else "nothing to pin")


@dataclass
class FakeHandle:
    request: Request
    owner: FakeServes
    script: Script
    news: asyncio.Queue[Piece | Done] = field(default_factory=asyncio.Queue)
    cancelled: bool = False
    produced: int = 0
    ended: bool = False
    task: asyncio.Task[None] | None = None

    def cancel(self) -> None:
        self.cancelled = True

    async def __aiter__(self) -> AsyncIterator[Piece | Done]:
        while True:
            item = await self.news.get()
            if isinstance(item, Done) and self.script.silent:
                return
            yield item
            if isinstance(item, Done):
                return
            if self.script.broken is not None:
                raise RuntimeError(self.script.broken)

    async def play(self) -> None:
        """Tell the scripted story, step by step, until its end or until it is cancelled."""
        script, request = self.script, self.request
        answer = list((script.text * script.repeat).encode())
        most = request.sampling.max_tokens
        want = len(answer) if most is None else min(len(answer), most)
        await self._wait(script.prefill_s, script.hold)
        finish: Finish = script.finish or (Finish.LENGTH if want < len(answer) else Finish.STOP)
        cause: LimitCause | None = script.cause or ("max_tokens" if finish is Finish.LENGTH else None)
        error = None
        if not self.cancelled:
            self.owner.tell_started(self)
        texts = [codecs.getincrementaldecoder("utf-8")("replace") for _ in range(request.n)]
        for at in range(want):
            if self.cancelled:
                break
            if script.error_at == at or script.shutdown_at == at:
                break
            self.produced += 1
            last = at == want - 1 and script.error_at is None and script.shutdown_at is None
            for index in range(request.n):
                text = texts[index].decode(bytes([answer[at]]), last)
                ends = (finish, cause) if last else (None, None)
                told = self._told(answer[at])
                prompt = self._told_prompt() if index == at == 0 else ()
                self.news.put_nowait(Piece(index, text, (answer[at],), *ends, None, told, prompt))
            self.owner.tell_step(self)
            await asyncio.sleep(script.step_s)
        if not want and not self.cancelled:
            for index in range(request.n):
                self.news.put_nowait(Piece(index, "", (), finish, cause, prompt_logprobs=self._told_prompt()))
        if self.cancelled:
            finish, cause = Finish.CANCELLED, None
        elif script.error_at is not None:
            finish, cause, error = Finish.ERROR, None, "logits are not finite"
        elif script.shutdown_at is not None:
            finish, cause = Finish.CANCELLED, "shutdown"
        if finish in (Finish.CANCELLED, Finish.ERROR):
            for index in range(request.n):
                self.news.put_nowait(Piece(index, "", (), finish, cause))
        self.ended = True
        self.news.put_nowait(self.owner.tell_done(self, finish, cause, error))

    def _told(self, token: Token) -> tuple[Logprob, ...]:
        count = self.request.sampling.logprobs
        if count is None:
            return ()
        return (Logprob(token, -0.25, tuple((token + i, -0.25 - i) for i in range(count))),)

    def _told_prompt(self) -> tuple[Logprob, ...]:
        count = self.request.sampling.prompt_logprobs
        if count is None:
            return ()
        tokens = self.request.tokens[1:]
        return tuple(Logprob(t, -0.5, tuple((t + i, -0.5 - i) for i in range(count))) for t in tokens)

    async def _wait(self, seconds: float, forever: bool) -> None:
        while ((forever or seconds > 0) and not self.cancelled) or self.script.deaf:
            await asyncio.sleep(0.005)
            seconds -= 0.005


class FakeServes:
    """Set `script` to choose what the next request gets; `handles` are all that were submitted."""

    def __init__(self) -> None:
        self.facts = FactLog()
        self.script = Script()
        self.handles: list[FakeHandle] = []
        self.card = ModelCard("fake", 1_700_000_000, CONTEXT, VOCAB, "bf16", "bf16", "f" * 16, True)
        self.state = Health(True, True, None)
        self.dropped = 3
        self.blocks = 256
        self.longest: int | None = None
        """Blocks that a sequence can come to, when not those of the pool."""
        self.busy = False
        """A step is under way, and does not end."""
        self.waiting = 2
        self.overflow: Overflow = "refuse"
        self.tenants: tuple[TenantView, ...] = ()
        self.planned: Request | None = None
        self.talks: list[ConversationView] = []
        self.changes: list[tuple[str, str, Change, float]] = []
        self.now = 100.0
        self.reader: Callable[[], Reader] | None = None
        self.rendered: list[Mapping[str, Any]] = []
        self.offered: list[Mapping[str, Any]] = []
        self.told: dict[str, Any] = {}

    @property
    def live(self) -> list[FakeHandle]:
        return [handle for handle in self.handles if not handle.ended]

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        session_id: str | None,
        scope: Scope,
        tools: Sequence[Mapping[str, Any]] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Prompt:
        self.rendered, self.offered, self.told = list(messages), list(tools), dict(kwargs or {})
        tokens: list[Token] = [BOS]
        spans = []
        for number, message in enumerate(messages):
            start = len(tokens)
            tokens += f"<{message['role']}>{message['content']}\n".encode()
            spans.append(Span(start, len(tokens), number))
        return Prompt(tuple(tokens), tuple(spans), reader=self.reader)

    def call_guide(self, tools: Sequence[Mapping[str, Any]], *, one: bool = False) -> Guide:
        return Guide("grammar", ",".join(tool["function"]["name"] for tool in tools) + "!" * one)

    def encode(self, text: str, *, special: bool = True) -> list[Token]:
        return [BOS] * special + list(text.encode())

    def decode(self, tokens: Sequence[Token]) -> str:
        return bytes(t for t in tokens if t < 256).decode("utf-8", "replace")

    def token_bytes(self, token: Token) -> bytes:
        return bytes([token]) if token < 256 else b"<bos>"

    def check_guide(self, guide: Guide) -> None:
        if "impossible" in guide.text:
            raise InvalidRequest("nothing can follow it", limit=7)

    def scope(self, *, tenant: str, salt: str) -> Scope:
        return Scope("f" * 16, tenant=tenant, salt=salt)

    def submit(self, request: Request) -> FakeHandle:
        script = self.script
        if script.crash is not None:
            raise RuntimeError(script.crash)
        if script.refuse is not None:
            self.facts.emit(RequestRefused(self.now, request.id, script.refuse.code))
            raise script.refuse
        handle = FakeHandle(request, self, replace(script))
        self.handles.append(handle)
        whose = request.scope.tenant
        self.facts.emit(RequestQueued(self.now, request.id, len(request.tokens), request.n, tenant=whose))
        handle.task = asyncio.get_running_loop().create_task(handle.play())
        return handle

    def stats(self) -> Snapshot:
        running = len(self.live)
        return Snapshot(
            running=running,
            waiting=self.waiting,
            queued_tokens=77,
            pool=PoolCounts(running, 5, self.blocks - 5 - running, self.blocks),
            block_tokens=32,
            block_bytes=1024,
            codec="bf16",
            arena_bytes=65536,
            weight_bytes=1_000_000,
            budget_bytes=2_000_000,
            context_limit=CONTEXT,
            max_num_seqs=8,
            conversations_that_fit=2,
            longest_blocks=self.longest or self.blocks,
            predicted_start_s=0.25,
            steps=9,
            leaked_blocks=0,
            eviction="lru",
            pressure="pause",
            overflow=self.overflow,
            tenants=self.tenants,
        )

    def health(self) -> Health:
        return self.state

    async def forecast(self, request: Request) -> Forecast:
        self.planned = request
        size = len(request.tokens)
        return Forecast(
            True, True, "it fits", 32, size - 32, size // 32 + 1, 2, 64, 0.25, 0.5,
            request.sampling.max_tokens or 0, "max_tokens", size // 32 + 2, 1,
        )  # fmt: skip

    async def conversations(self, tenant: str | None) -> list[ConversationView]:
        return [view for view in self.talks if tenant in (None, view.tenant)]

    async def conversation(self, tenant: str | None, id: str) -> ConversationView:
        for view in await self.conversations(tenant):
            if view.id == id:
                return view
        raise NotFound(f"there is no conversation {id!r}")

    async def change_conversation(self, tenant: str | None, id: str, change: Change, ttl_s: float) -> ConversationView:
        view = await self.conversation(tenant, id)
        self.changes.append((view.tenant, id, change, ttl_s))
        return view

    async def delete_conversation(self, tenant: str | None, id: str) -> int:
        self.talks.remove(await self.conversation(tenant, id))
        return 5

    async def clear_cache(self) -> int:
        while self.busy:
            await asyncio.sleep(0.005)
        return self.dropped

    async def drain(self, grace_s: float) -> None:
        self.draining()

    def draining(self) -> None:
        self.state = Health(True, False, "draining")

    def tell_started(self, handle: FakeHandle) -> None:
        prompt, cached = len(handle.request.tokens), handle.script.cached
        self.facts.emit(RequestStarted(self.now, handle.request.id, 0.004, prompt, cached, "cold"))
        self.facts.emit(TokenFirst(self.now, handle.request.id, 0.03))

    def tell_step(self, handle: FakeHandle) -> None:
        self.now += 0.02
        self.facts.emit(StepDone(self.now, 1, handle.request.n, 0, 15.0))

    def tell_done(self, handle: FakeHandle, finish: Finish, cause: LimitCause | None, error: str | None) -> Done:
        request, cached = handle.request, handle.script.cached
        prompt, made = len(request.tokens), handle.produced * request.n
        receipt = Receipt(
            prompt_tokens=prompt,
            cached_tokens=cached,
            computed_tokens=prompt - cached,
            cached_by_tier={"device": cached},
            miss=Miss("content_changed", cached, 0),
            forgotten=(*request.forgotten, *handle.script.forgotten),
            codec={"bf16": 2},
            preempted=0,
            recomputed_tokens=0,
            queue_ms=4.0,
            context_limit=CONTEXT,
            context_used=prompt + handle.produced,
            limit_cause=cause,
            max_tokens_requested=None if handle.script.granted is None else request.sampling.max_tokens,
            max_tokens_granted=handle.script.granted,
            pins=tuple(_pinned(pin) for pin in request.pins),
        )
        usage = Usage(prompt, made, cached)
        timings = Timings(prompt - cached, 20.0, made, 100.0, cached, 4.0)
        ends = (finish,) * request.n
        ttft, whose = 0.03 if made else None, request.scope.tenant
        self.facts.emit(
            RequestDone(self.now, request.id, ends, cause, usage, receipt, timings, 0.2, ttft, error, tenant=whose)
        )
        return Done(request.id, usage, receipt, timings, error)
