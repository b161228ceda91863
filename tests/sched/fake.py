"""A device and a model without arithmetic: it remembers what was written where, and refuses to read anything else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tenure.cache.ghosts import Ghosts
from tenure.cache.history import History
from tenure.cache.kvcache import KvCache
from tenure.clock import LogicalClock
from tenure.events import Fact, FactLog
from tenure.lab.rerun import TakenDown
from tenure.policy.registry import admission, eviction, pressure
from tenure.sched.scheduler import News, SchedulerLimits
from tenure.sched.step import CostModel
from tenure.spec import ArenaLayout, LayerGroup, codec
from tenure.tenants import Tenants
from tenure.types import Delta, Done, Forgotten, Receipt, RecodeOp, Request, Rows, Sampling, Scope, StepPlan, StepResult

SCOPE = Scope("fake")
Context = tuple[int, ...]


def answer(context: Sequence[int], index: int) -> int:
    """The fake model's next token: any function of the whole context, and of which of the n answers it is."""
    total = 7 * index
    for token in context:
        total = (31 * total + token) % 9973
    return 100 + total % 900


class FakeDevice:
    """Position i of a block holds the whole context up to it, as KV does. Reading what is not there is an error."""

    def __init__(self, blocks: int, size: int, groups: Sequence[LayerGroup] = (LayerGroup(1),)) -> None:
        self.size = size
        self.groups = groups
        self.held: list[list[Context | None]] = [[None] * size for _ in range(blocks)]
        self.contexts: dict[tuple[str, int], list[int]] = {}
        self.dropped: dict[tuple[str, int], int] = {}
        self.computed: Counter[Context] = Counter()
        """How often each position, named by all tokens up to it, was computed."""

    def begin(self, request: Request) -> None:
        for index in range(request.n):
            self.contexts[request.id, index] = list(request.tokens)

    def slide(self, request: str, index: int, gone: Forgotten) -> None:
        """A sequence lets tokens go, counted from its prompt's first: what comes behind moves up."""
        context = self.contexts[request, index]
        before = self.dropped.get((request, index), 0)
        del context[gone.start - before : gone.end - before]
        self.dropped[request, index] = before + gone.end - gone.start

    def run(
        self, plan: StepPlan, step_ms: float = 10.0, stops: Callable[[Rows], bool] = lambda rows: False
    ) -> StepResult:
        for op in plan.copies:  # one by one: the source of one may be where another one goes
            self.held[op.dst] = list(self.held[op.src])
            if isinstance(op, RecodeOp):
                self.held[op.src] = [None] * self.size
        for rows in plan.rows:
            self._write(rows)
        tokens, stopped = {}, set()
        for rows in plan.rows:
            context = self._read(rows)
            if rows.sample:
                assert len(context) == len(self.contexts[rows.request, rows.index])
                token = answer(context, rows.index)
                self.contexts[rows.request, rows.index].append(token)
                tokens[rows.seq] = token
                if stops(rows):
                    stopped.add(rows.seq)
        return StepResult(plan.number, tokens, frozenset(stopped), {}, step_ms)

    def _write(self, rows: Rows) -> None:
        context = tuple(self.contexts[rows.request, rows.index])
        assert tuple(rows.tokens) == context[rows.start : rows.start + len(rows.tokens)]
        for position in range(rows.start, rows.start + len(rows.tokens)):
            self.computed[context[: position + 1]] += 1
            if rows.open is None:
                for table in rows.tables:
                    self.held[table[position // self.size]][position % self.size] = context[: position + 1]
                continue
            self.held[rows.open][position % self.size] = context[: position + 1]
            if (position + 1) % self.size == 0:  # it is full, and stored
                for table in rows.tables:
                    self.held[table[position // self.size]] = list(self.held[rows.open])

    def _read(self, rows: Rows) -> Context:
        end = rows.start + len(rows.tokens)
        context = tuple(self.contexts[rows.request, rows.index])[:end]
        for group, table in zip(self.groups, rows.tables, strict=True):
            for position in range(0 if group.window is None else max(0, rows.start + 1 - group.window), end):
                staged = rows.open is not None and position // self.size == end // self.size
                found = self.held[rows.open if staged else table[position // self.size]][position % self.size]
                assert found == context[: position + 1], f"{rows.request}: position {position} holds {found}"
        return context


@dataclass(frozen=True)
class Setup:
    """The operator's choices that few tests change."""

    pressure: str = "pause"
    eviction: str = "lru"
    ghosts: int = 10_000
    shared: tuple[tuple[int, ...], ...] = ()
    tenants: Tenants = field(default_factory=Tenants)
    codec: str = "bf16"
    layout: ArenaLayout | None = None
    """How the arena is cut; else all blocks are alike."""


class World:
    """A scheduler over a fake device, driven by hand."""

    def __init__(
        self,
        blocks: int = 64,
        size: int = 4,
        *,
        seqs: int = 8,
        batch: int = 64,
        step_ms: float = 1000.0,
        context: int = 200,
        queue: int = 16,
        doubling: float = 1e9,
        setup: Setup | None = None,
    ) -> None:
        setup = Setup() if setup is None else setup
        self.clock = LogicalClock()
        self.log = FactLog()
        self.facts: list[Fact] = []
        self.log.listen(self.facts.append)
        self.cache = KvCache(
            blocks if setup.layout is None else setup.layout,
            size,
            codec=codec(setup.codec),
            eviction=eviction(setup.eviction),
            facts=self.log,
            ghosts=Ghosts(setup.ghosts),
            shared=setup.shared,
        )
        self.device = FakeDevice(blocks if setup.layout is None else setup.layout.ids, size, self.cache._pool.groups)
        self.history = History(
            size,
            heads=codec(setup.codec).head_reusable,
            why_not=lambda a, b: "retokenised" if list(a) == list(b) else None,
        )
        self.scheduler = TakenDown(
            self.cache,
            limits=SchedulerLimits(seqs, batch, step_ms, context, queue, 10_000, canary_steps=1, tenants=setup.tenants),
            admission=admission("bounded_queue"),
            pressure=pressure(setup.pressure),
            history=self.history,
            facts=self.log,
            costs=CostModel(doubling=doubling),
        )
        self.news: list[News] = []
        self.plans: list[StepPlan] = []
        self.stops: Callable[[Rows], bool] = lambda rows: False

    def ask(self, name: str, tokens: Sequence[int], max_tokens: int | None = 4, **fields: object) -> Request:
        scope = fields.pop("scope", SCOPE)
        request = Request(name, tuple(tokens), scope, Sampling(max_tokens=max_tokens), **fields)  # type: ignore[arg-type]
        self.device.begin(request)
        self.scheduler.add(request, self.clock.now())
        return request

    def step(self, step_ms: float = 10.0) -> StepPlan | None:
        plan = self.scheduler.next_step(self.clock.now())
        self.cache.check()
        if plan is None:
            return None
        self.plans.append(plan)
        result = self.device.run(plan, step_ms, self.stops)
        self.clock.advance(step_ms / 1000)
        news = self.scheduler.absorb(result, self.clock.now())
        for item in news:
            if isinstance(item, Delta) and item.forgotten is not None:
                self.device.slide(item.request, item.index, item.forgotten)
        self.news += news
        self.cache.check()
        return plan

    def run(self, limit: int = 2000, leased: int = 0) -> None:
        """Step until nothing is alive; `leased` blocks are then held by pins."""
        for _ in range(limit):
            if self.step() is None:
                assert self.scheduler.idle
                assert self.cache.counts().leased == leased
                assert self.cache.leaked() == 0
                return
        raise AssertionError(f"still alive after {limit} steps")

    def text(self, name: str, index: int = 0) -> list[int]:
        """The tokens an answer got."""
        return [item.token for item in self.news if getattr(item, "request", "") == name
                and getattr(item, "index", None) == index and getattr(item, "token", None) is not None]  # fmt: skip

    def receipt(self, name: str) -> Receipt:
        """What an ended request was told."""
        (found,) = [item.receipt for item in self.news if isinstance(item, Done) and item.request == name]
        return found

    def of(self, kind: type[Fact]) -> list[Fact]:
        return [fact for fact in self.facts if isinstance(fact, kind)]
