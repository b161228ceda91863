"""A trace through the real cache, scheduler and policies: logical clock, no model, step times from a cost model."""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tenure import spec
from tenure.cache.history import History
from tenure.cache.kvcache import KvCache
from tenure.clock import LogicalClock
from tenure.errors import Corrupt
from tenure.events import BlockGone, BlockStored, Fact, FactLog, RequestDone, RequestStarted, SequencePaused, TokenFirst
from tenure.policy import registry
from tenure.policy.base import AdmissionAsk, Refuse
from tenure.sched.scheduler import Scheduler, SchedulerLimits
from tenure.sched.step import CostModel
from tenure.sim.store import NullStore
from tenure.sim.trace import TraceRequest
from tenure.types import Delta, Request, Sampling, Scope, SeqId, StepPlan, StepResult, Token

POSITIONS = (0.5, 0.9, 0.99)
WORD = 1 << 32


@dataclass(frozen=True, slots=True)
class Calibration:
    """What a machine and a model cost: milliseconds per step, per decode row and per prefill row at position 0, the
    context that doubles a row's cost where all layers see all of it, the groups of layers that see as much, and the
    bytes of one token's K and V. The defaults are SmolLM2-135M on two cores."""

    base_ms: float = 2.0
    decode_ms: float = 1.6
    prefill_ms: float = 0.55
    doubling: float = 3000.0
    kv_bytes_per_token: int = 23_040
    codec: str = "bf16"
    groups: tuple[spec.LayerGroup, ...] = (spec.LayerGroup(1),)

    def costs(self) -> CostModel:
        return CostModel(self.base_ms, self.decode_ms, self.prefill_ms, self.doubling, self.groups)


@dataclass(frozen=True, slots=True)
class Setup:
    """What is replayed against: blocks of the pool, policies by name, limits, and how much faster requests come."""

    blocks: int
    block_tokens: int
    eviction: str = "lru"
    pressure: str = "pause"
    speed: float = 1.0
    max_num_seqs: int = 64
    max_step_ms: float = 120.0
    context_limit: int = 1 << 20
    layout: spec.ArenaLayout | None = None
    """How the pool is cut, when its blocks are of several kinds: staged ones, recoded ones."""


@dataclass(slots=True)
class Report:
    """What happened. Times are seconds, of the logical clock."""

    requests: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    """By code."""
    prompt_tokens: int = 0
    hits: int = 0
    output_tokens: int = 0
    recomputed: int = 0
    """Tokens computed again after a pause, or for a sibling."""
    evicted_tokens: int = 0
    pauses: int = 0
    steps: int = 0
    copies: int = 0
    seconds: float = 0.0
    queue: array[float] = field(default_factory=lambda: array("d"))
    ttft: array[float] = field(default_factory=lambda: array("d"))
    gaps: array[float] = field(default_factory=lambda: array("d"))
    misses: Counter[str] = field(default_factory=Counter)
    """Requests by the reason why no more of them was held."""
    peak_bytes: dict[str, int] = field(default_factory=dict)
    """The most that was held, by codec."""

    @property
    def hit_rate(self) -> float:
        return self.hits / self.prompt_tokens if self.prompt_tokens else 0.0

    def to_json(self) -> dict[str, Any]:
        """Plain numbers under plain names."""
        return {
            "requests": self.requests,
            "refused": dict(self.refused),
            "hit_rate": self.hit_rate,
            "prompt_tokens": self.prompt_tokens,
            "hit_tokens": self.hits,
            "output_tokens": self.output_tokens,
            "recomputed_tokens": self.recomputed,
            "evicted_tokens": self.evicted_tokens,
            "pauses": self.pauses,
            "steps": self.steps,
            "copies": self.copies,
            "seconds": self.seconds,
            "queue_s": percentiles(self.queue),
            "ttft_s": percentiles(self.ttft),
            "gap_s": percentiles(self.gaps),
            "misses": dict(self.misses),
            "peak_bytes": dict(self.peak_bytes),
        }


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """p50, p90, p99 and the largest; nothing of nothing."""
    if not values:
        return {}
    ordered = sorted(values)
    last = len(ordered) - 1
    return {**{f"p{round(100 * at)}": ordered[round(at * last)] for at in POSITIONS}, "max": ordered[last]}


class _Texts:
    """Token ids that share exactly what the trace says is shared."""

    def __init__(self, block_tokens: int) -> None:
        self._size = block_tokens
        self._fresh = 0

    def sequence(self, request: TraceRequest) -> tuple[Token, ...]:
        """Prompt and answer. A named block gives the same ids wherever it comes; everything else is like nothing."""
        total = request.prompt_tokens + max(1, request.output_tokens)
        if request.tokens is not None:
            ids = list(request.tokens)
        else:
            ids = []
            for block in (*request.blocks, *request.answer):
                ids += self._block(block)
            named = request.prompt_tokens if not request.answer else total
            del ids[named:]
        return (*ids, *self._new(total - len(ids)))

    def _block(self, name: int) -> list[Token]:
        """Its two words first: blocks with different names part at once, as far as the trace can tell."""
        ids = [name % WORD, name // WORD, *[0] * (self._size - 2)]
        return ids[: self._size]

    def _new(self, count: int) -> Iterator[Token]:
        for _ in range(count):
            self._fresh += 1
            yield (self._fresh * 2_654_435_761) % WORD  # each number once in four billion, spread over all of them


class Replay:
    """One trace, one setup. `run` takes the requests in order."""

    def __init__(self, setup: Setup, calibration: Calibration) -> None:
        self.report = Report()
        self._setup = setup
        self._machine = calibration.costs()
        self._block_bytes = calibration.kv_bytes_per_token * setup.block_tokens
        cut = setup.layout
        self._bytes_of = dict(zip(cut.kinds, cut.block_bytes, strict=True)) if cut else {}
        self._codec = spec.codec(calibration.codec)
        self._scope = Scope("replay", codec=self._codec.name)
        self._store = NullStore()
        self._clock = LogicalClock()
        self._texts = _Texts(setup.block_tokens)
        self._answers: dict[str, tuple[Token, ...]] = {}
        self._last: dict[SeqId, float] = {}
        self._held: Counter[str] = Counter()
        self._codecs: dict[bytes, str] = {}
        facts = FactLog(1024)
        facts.listen(self._learn)
        cache = KvCache(
            setup.layout or setup.blocks,
            setup.block_tokens,
            codec=self._codec,
            eviction=registry.eviction(setup.eviction),
            facts=facts,
        )
        self._admission = registry.admission("bounded_queue")
        self.scheduler = Scheduler(
            cache,
            limits=SchedulerLimits(
                max_num_seqs=setup.max_num_seqs,
                max_num_batched_tokens=max(2048, 2 * setup.block_tokens),
                max_step_ms=setup.max_step_ms,
                context_limit=setup.context_limit,
                max_queued_requests=1 << 40,
                max_queued_tokens=1 << 60,
            ),
            admission=self._admission,
            pressure=registry.pressure(setup.pressure),
            history=History(setup.block_tokens, heads=self._codec.head_reusable, why_not=lambda said, shown: None),
            facts=facts,
            costs=calibration.costs(),
        )

    def run(self, requests: Iterable[TraceRequest], told: Callable[[int], None] = lambda done: None) -> Report:
        """Replay all of them; `told` hears after each arrival how many have come."""
        upcoming = deque[TraceRequest]()
        source = iter(requests)
        came = 0
        first: float | None = None
        while True:
            if not upcoming and (request := next(source, None)):
                upcoming.append(request)
            first = upcoming[0].at if first is None and upcoming else first
            now = self._clock.now()
            due = (upcoming[0].at - (first or 0.0)) / self._setup.speed if upcoming else None
            if due is not None and due <= now:
                self._arrive(upcoming.popleft(), came, now)
                came += 1
                told(came)
                continue
            plan = self.scheduler.next_step(now)
            if plan is not None:
                self._step(plan)
            elif due is not None:
                self._clock.advance(due - now)
            elif self.scheduler.idle:
                break
            else:
                raise Corrupt("nothing runs and nothing comes, but requests are alive")
        self.scheduler.cache.check()
        self.report.seconds = self._clock.now()
        self.report.steps = self.scheduler.steps
        self.report.copies = self._store.copies
        return self.report

    def _arrive(self, request: TraceRequest, number: int, now: float) -> None:
        self.report.requests += 1
        output = max(1, request.output_tokens)
        verdict = self._admission.judge(AdmissionAsk(request.prompt_tokens, 1, output, 0), self.scheduler.load())
        if isinstance(verdict, Refuse) or not request.prompt_tokens:
            self.report.refused[verdict.code if isinstance(verdict, Refuse) else "empty_prompt"] += 1
            return
        ids = self._texts.sequence(request)
        name = str(number)
        self._answers[name] = ids[request.prompt_tokens :]
        scope = Scope(self._scope.fingerprint, tenant=request.tenant, codec=self._scope.codec)
        sampling = Sampling(max_tokens=output, ignore_eos=True)
        prompt = ids[: request.prompt_tokens]
        self.scheduler.add(Request(name, prompt, scope, sampling, session_id=request.session), now)

    def _step(self, plan: StepPlan) -> None:
        self._store.execute(plan.copies)
        decode = prefill = 0.0
        tokens: dict[SeqId, Token] = {}
        for rows in plan.rows:
            weight = self._machine.weight(rows.start, len(rows.tokens))
            if rows.counter:
                decode += weight
            else:
                prefill += weight
            if rows.sample:
                tokens[rows.seq] = self._answers[rows.request][rows.counter]
        step_ms = self._machine.predict(decode, prefill)
        now = self._clock.advance(1e-3 * step_ms)
        for news in self.scheduler.absorb(StepResult(plan.number, tokens, frozenset(), {}, step_ms), now):
            if isinstance(news, Delta):
                self._streamed(news, now)
            else:
                del self._answers[news.request]

    def _streamed(self, news: Delta, now: float) -> None:
        last = self._last.pop(news.seq, None)
        if news.token is not None:
            self.report.output_tokens += 1
            if last is not None:
                self.report.gaps.append(now - last)
        if news.finish is None:
            self._last[news.seq] = now

    def _learn(self, fact: Fact) -> None:
        report = self.report
        if isinstance(fact, BlockStored):
            self._codecs[fact.key] = fact.codec
            self._held[fact.codec] += self._bytes_of.get(fact.codec, self._block_bytes)
            report.peak_bytes[fact.codec] = max(report.peak_bytes.get(fact.codec, 0), self._held[fact.codec])
        elif isinstance(fact, BlockGone):
            gone = self._codecs.pop(fact.key)
            self._held[gone] -= self._bytes_of.get(gone, self._block_bytes)
            report.evicted_tokens += fact.recompute_tokens
        elif isinstance(fact, RequestStarted):
            report.queue.append(fact.queue_s)
            report.prompt_tokens += fact.prompt_tokens
            report.hits += fact.cached_tokens
            if fact.miss:
                report.misses[fact.miss] += 1
        elif isinstance(fact, TokenFirst):
            report.ttft.append(fact.ttft_s)
        elif isinstance(fact, SequencePaused):
            report.pauses += 1
        elif isinstance(fact, RequestDone):
            report.recomputed += fact.receipt.recomputed_tokens
