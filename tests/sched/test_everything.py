"""All that can happen to requests and conversations, in any order: answers stay those of a sequence alone, every
request ends once, nothing leaks."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.sched.fake import Setup, World, answer

from tenure.errors import NotFound
from tenure.events import RequestDone
from tenure.overflow import slid_range
from tenure.sched.desk import Desk
from tenure.tenants import Tenant, Tenants
from tenure.types import Finish, Pin, Scope

LIMIT = 40
SHARED = tuple(range(1, 10))
TENANTS = Tenants((Tenant("acme", weight=2.0, max_pinned_bytes=6), Tenant("zoo", max_concurrent=2, max_kv_bytes=12)))
names = st.sampled_from(["s0", "s1", "s2"])
tenants = st.sampled_from(["", "acme", "zoo"])


def alone(tokens: list[int], index: int, count: int, limit: int | None) -> list[int]:
    """What the fake model answers when nothing else is going on, in a context that slides at `limit`."""
    context, got = list(tokens), []
    for _ in range(count):
        if limit is not None and len(context) == limit:
            start, end = slid_range(limit, limit)
            del context[start:end]
        got.append(answer(context, index))
        context.append(got[-1])
    return got


class Everything(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        setup = Setup("pause@80%", ghosts=12, shared=(SHARED,), tenants=TENANTS)
        self.world = World(18, 4, seqs=5, batch=16, context=LIMIT, queue=50, setup=setup)
        self.desk = Desk(self.world.scheduler, self.world.history, self.world.log)
        self.asked: dict[str, dict[str, Any]] = {}

    @property
    def now(self) -> float:
        return self.world.clock.now()

    @rule(
        head=st.integers(0, 9), rest=st.lists(st.integers(20, 22), min_size=1, max_size=9), tenant=tenants, name=names,
        count=st.integers(0, 40), n=st.sampled_from([1, 1, 1, 2]), slides=st.booleans(), pinned=st.integers(0, 12),
    )  # fmt: skip
    def ask(self, head: int, rest: list[int], **chosen: Any) -> None:
        request = f"r{len(self.asked)}"
        tokens = [*SHARED[:head], *rest]
        self.asked[request] = chosen | {"tokens": tokens}
        pins = (Pin(chosen["pinned"], 0.1),) if chosen["pinned"] else ()
        self.world.ask(
            request, tokens, chosen["count"], n=chosen["n"], session_id=chosen["name"], pins=pins,
            scope=Scope("fake", tenant=chosen["tenant"]), overflow="slide" if chosen["slides"] else "refuse",
        )  # fmt: skip

    @rule(steps=st.integers(1, 12))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.world.step()

    @rule(seconds=st.sampled_from([0.05, 1.0]))
    def wait(self, seconds: float) -> None:
        self.world.clock.advance(seconds)

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.asked)))
        self.world.news += self.world.scheduler.cancel(name, self.now)

    @rule(verb=st.sampled_from(["pause", "resume", "unpin", "inspect"]), tenant=tenants, name=names)
    def tend(self, verb: str, tenant: str, name: str) -> None:
        try:
            getattr(self.desk, verb)(tenant, name, self.now)
        except NotFound:
            assert all(view.id != name for view in self.desk.conversations(tenant, self.now))

    @rule(tenant=tenants, name=names, ttl=st.sampled_from([0.02, 5.0]))
    def pin(self, tenant: str, name: str, ttl: float) -> None:
        if any(view.id == name for view in self.desk.conversations(tenant, self.now)):
            self.desk.pin(tenant, name, ttl, self.now)

    @rule(tenant=tenants, name=names)
    def delete(self, tenant: str, name: str) -> None:
        if any(view.id == name for view in self.desk.conversations(tenant, self.now)):
            self.world.news += self.desk.delete(tenant, name, self.now)[1]

    @rule()
    def drop(self) -> None:
        self.world.cache.drop_unleased(self.now)

    @invariant()
    def holds(self) -> None:
        self.world.cache.check()
        assert self.world.cache.leaked() == 0
        views = self.desk.tenants()
        rest = (self.world.cache.counts().total - 6) // 2
        assert all(view.pinned_bytes <= {"acme": 6, "zoo": 0}.get(view.name, rest) for view in views)
        for account in self.world.scheduler.queue.accounts.values():
            assert account.running == sum(
                seq.lease is not None and seq.tenant == account.name for seq in self.world.scheduler.sequences()
            )

    def teardown(self) -> None:
        world = self.world
        world.scheduler.on_hold.clear()
        world.clock.advance(100.0)
        while world.step():
            pass
        world.clock.advance(100.0)  # what came last may have pinned something only now
        assert world.step() is None
        assert world.scheduler.idle and world.cache.counts().leased == 0
        assert world.scheduler.pins.blocks == 0
        ends = {fact.request: fact for fact in world.of(RequestDone)}  # type: ignore[attr-defined]
        assert len(world.of(RequestDone)) == len(ends) == len(self.asked)
        for name, chosen in self.asked.items():
            limit = world.scheduler.room.window(chosen["tenant"]).tokens
            for index in range(chosen["n"]):
                got = world.text(name, index)
                assert got == alone(chosen["tokens"], index, len(got), limit if chosen["slides"] else None)
                fact: Any = ends[name]
                if fact.finishes[index] is Finish.LENGTH and fact.limit_cause == "max_tokens":
                    assert len(got) == chosen["count"]
            receipt = ends[name].receipt  # type: ignore[attr-defined]
            assert receipt.prompt_tokens == receipt.cached_tokens + receipt.computed_tokens
            assert len(receipt.pins) == bool(chosen["pinned"])
            start, end = slid_range(limit, limit)
            assert sum(item.end - item.start for item in receipt.forgotten) % (end - start) == 0


TestEverything = Everything.TestCase
TestEverything.settings = settings(
    max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
