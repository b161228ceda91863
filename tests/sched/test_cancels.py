"""Ten thousand requests that are cancelled, in whatever phase: nothing leaks, and whoever comes next starts at once."""

from __future__ import annotations

import random

import pytest
from tests.sched.fake import World

from tenure.events import RequestDone
from tenure.types import Done, Finish


@pytest.mark.parametrize("count", [400, pytest.param(10_000, marks=pytest.mark.full)])
def test_cancelled_in_every_phase(count: int) -> None:
    chance = random.Random(count)
    world, alive, asked = World(40, 4, seqs=6, batch=24, context=120), list[str](), 0
    cancelled: list[Done] = []
    for number in range(count):
        while len(alive) < 10:
            head = [1, 2, 3, 4] * chance.randint(0, 6)
            prompt = [*head, *(chance.randrange(5, 50) for _ in range(chance.randint(1, 30)))]
            world.ask(f"r{asked}", prompt, chance.randint(1, 40), n=chance.choice([1, 1, 1, 2]))
            alive.append(f"r{asked}")
            asked += 1
        for _ in range(chance.choice([0, 1, 1, 2])):
            world.step()
        ended = {item.request for item in world.news if isinstance(item, Done)}
        world.news.clear()
        alive = [name for name in alive if name not in ended]
        if alive:
            name = alive.pop(chance.randrange(len(alive)))
            cancelled += world.scheduler.cancel(name, world.clock.now())
            assert cancelled[-1].request == name
            assert world.scheduler.cancel(name, world.clock.now()) == []  # the second time there is nothing to do
            assert world.cache.leaked() == 0
        if number % 100 == 99:
            for name in alive:
                cancelled += world.scheduler.cancel(name, world.clock.now())
            alive = []
            assert world.scheduler.idle
            assert (world.scheduler.running, world.scheduler.waiting, world.cache.counts().leased) == (0, 0, 0)
            world.ask(f"probe{number}", [7, 8, 9], 1)
            plan = world.step()
            assert plan is not None
            assert [rows.request for rows in plan.rows] == [f"probe{number}"]
            world.plans.clear()
    assert len(cancelled) > 0.8 * count
    ends = [fact for fact in world.facts if isinstance(fact, RequestDone)]
    assert sum(Finish.CANCELLED in fact.finishes for fact in ends) == len(cancelled)
