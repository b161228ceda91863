"""A recorded run fed to nothing but the clock: the same facts in the same order."""

from __future__ import annotations

import random
from contextlib import suppress

import pytest
from tests.sched.fake import Setup, World

from tenure.errors import NotFound
from tenure.events import CacheCleared, ConversationChanged
from tenure.lab.rerun import TakenDownDesk, rerun
from tenure.sched.desk import Desk
from tenure.sim.store import NullStore
from tenure.tenants import Tenant, Tenants
from tenure.types import Pin, Scope

TENANTS = Tenants((Tenant("acme", weight=3.0, max_pinned_bytes=4), Tenant("zoo", max_concurrent=2)))


def tend(desk: Desk, chance: random.Random, now: float) -> None:
    """Something is done to one of four conversations, if it is there, or to the cache."""
    tenant, name = chance.choice(("acme", "zoo", "", None)), f"s{chance.randrange(4)}"
    with suppress(NotFound):
        match chance.randrange(8):
            case 0 | 1:
                desk.pause(tenant, name, now)
            case 2 | 3 | 4:
                desk.resume(tenant, name, now)
            case 5:
                desk.delete(tenant, name, now)
            case 6:
                desk.pin(tenant, name, 0.1, now)
            case 7:
                desk.clear(now)


@pytest.mark.parametrize("seed", range(6))
def test_the_same_facts_in_the_same_order(seed: int) -> None:
    setup = Setup(pressure="pause@80%", tenants=TENANTS, shared=(tuple(range(1, 9)),), ghosts=20)

    def world() -> World:
        return World(24, 4, seqs=5, batch=24, context=60, setup=setup)

    chance = random.Random(seed)
    first = world()
    desk = TakenDownDesk(first.scheduler, first.history, first.log)
    stops = {chance.randrange(200) for _ in range(40)}
    first.stops = lambda rows: (rows.start * 7 + rows.counter) % 200 in stops
    for i in range(30):
        scope = Scope("fake", tenant=chance.choice(("acme", "zoo", "")))
        tokens = [*range(1, chance.randrange(2, 20)), *(chance.randrange(50, 53) for _ in range(6))]
        pins = (Pin(8, 0.05),) if chance.random() < 0.3 else ()
        first.ask(
            f"r{i}", tokens, chance.randrange(1, 40), scope=scope, n=chance.choice((1, 1, 2)), pins=pins,
            priority=chance.randrange(-1, 2), overflow=chance.choice(("refuse", "slide")), session_id=f"s{i % 4}",
        )  # fmt: skip
        for _ in range(chance.randrange(4)):
            first.step(chance.uniform(1.0, 30.0))
        if chance.random() < 0.2:
            first.scheduler.cancel(f"r{chance.randrange(i + 1)}", first.clock.now())
        tend(desk, chance, first.clock.now())
    for _ in range(30):
        first.step(chance.uniform(1.0, 30.0))
    first.scheduler.end_all("shutdown", first.clock.now())
    second = world()
    store = NullStore()
    rerun(first.scheduler.tape.calls, second.scheduler, Desk(second.scheduler, second.history, second.log), store)
    assert second.facts == first.facts
    assert len(first.facts) > 200
    assert len(first.of(ConversationChanged)) > 2 and first.of(CacheCleared)
    assert store.copies == sum(len(plan.copies) for plan in first.plans) > 0
