"""Squeezes: many conversations in a pool that holds a fraction of them. Each ends with its solo text, or refused."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tests.sched.fake import Setup, World, answer

from tenure.events import RequestStarted, SequencePaused, SequenceResumed
from tenure.policy.base import AdmissionAsk, Refuse
from tenure.policy.pressure import MIN_PROGRESS

SIZE = 8


def alone(tokens: Sequence[int], count: int) -> list[int]:
    context = list(tokens)
    for _ in range(count):
        context.append(answer(context, 0))
    return context[len(tokens) :]


@pytest.mark.parametrize("conversations", [8, 32])
@pytest.mark.parametrize("squeeze", [1.5, 3, 10])
@pytest.mark.parametrize(("pressure", "eviction"), [("pause@95%", "lru"), ("pause@60%", "gittins")])
def test_squeezed(conversations: int, squeeze: float, pressure: str, eviction: str) -> None:
    """Two turns of each conversation; together they need `squeeze` times the pool."""
    each = 2 * (16 + 24)
    blocks = max(each // SIZE + 1, int(conversations * each / SIZE / squeeze))
    world = World(blocks, SIZE, seqs=32, batch=128, context=200, setup=Setup(pressure, eviction))
    texts: dict[int, list[int]] = {}
    for turn in range(2):
        for i in range(conversations):
            prompt = [*range(100 * i, 100 * i + 16)] if not turn else [*texts[i], *range(100 * i + 50, 100 * i + 66)]
            verdict = world.scheduler.admission.judge(AdmissionAsk(len(prompt), 1, 24, 0), world.scheduler.load())
            if isinstance(verdict, Refuse):
                assert verdict.code == "queue_full"
                world.run()
            world.ask(f"t{turn}c{i}", prompt, 24, session_id=f"c{i}")
            texts[i] = prompt + alone(prompt, 24)
        world.run(20_000)
    for i in range(conversations):
        assert world.text(f"t1c{i}") == texts[i][-24:]
    paused = world.of(SequencePaused)
    receipts = [world.receipt(f"t{turn}c{i}") for turn in range(2) for i in range(conversations)]
    assert sum(receipt.preempted for receipt in receipts) == len(paused) == len(world.of(SequenceResumed))
    assert {receipt.limit_cause for receipt in receipts} == {"max_tokens"}


def test_the_ladder_keeps_room_until_someone_is_alone() -> None:
    world = World(20, 4, setup=Setup("pause@50%"))
    for name, first in (("a", 1), ("b", 101), ("c", 201)):
        world.ask(name, range(first, first + 8), 48)
    most = 0
    while world.step():
        if world.scheduler.running > 1:
            most = max(most, world.cache.counts().leased)
    assert most == 10
    assert max(len(rows.tables[0]) for plan in world.plans for rows in plan.rows) == 14
    for name, first in (("a", 1), ("b", 101), ("c", 201)):
        assert world.text(name) == alone(range(first, first + 8), 48)


def test_each_action_says_what_it_cost() -> None:
    world = World(12, 4)
    for name, first in (("a", 1), ("b", 101)):
        world.ask(name, [*range(1, 9), *range(first, first + 4)], 30)
    world.run()
    paused = world.of(SequencePaused)
    assert paused
    for fact in paused:
        assert fact.by == "pause" and "blocks wanted" in fact.reason  # type: ignore[attr-defined]
        assert fact.freed_bytes == fact.freed_blocks > 0  # type: ignore[attr-defined]
        assert 0 < fact.recompute_tokens <= 4 * fact.freed_blocks  # type: ignore[attr-defined]


def test_a_resumed_one_gets_some_way_before_it_is_paused_again() -> None:
    """Blocks as large as the minimum: whoever resumes has room for so much."""
    world = World(14, MIN_PROGRESS, batch=256, context=1000)
    for i in range(8):
        world.ask(f"r{i}", range(1000 * i, 1000 * i + 40), 100 + 40 * i)
    progress: dict[int, int] = {}
    moved: list[int] = []

    def follow(fact: object) -> None:
        if isinstance(fact, SequenceResumed):
            progress[fact.seq] = len(world.text(fact.request))
        if isinstance(fact, SequencePaused) and fact.seq in progress:
            moved.append(len(world.text(fact.request)) - progress[fact.seq])

    world.log.listen(follow)
    world.run(5000)
    assert moved and min(moved) >= MIN_PROGRESS - 1  # the newest token is told after the fact
    for i in range(8):
        assert world.text(f"r{i}") == alone(range(1000 * i, 1000 * i + 40), 100 + 40 * i)


def test_urgent_ones_are_paused_last() -> None:
    world = World(14, 4)
    for name, first, priority in (("urgent", 1, -5), ("plain", 101, 0), ("idle", 201, 5)):
        world.ask(name, range(first, first + 8), 24, priority=priority)
    world.run()
    preempted = {name: world.receipt(name).preempted for name in ("urgent", "plain", "idle")}
    assert preempted["idle"] > 0 and preempted["urgent"] == 0


def test_predicted_starts_are_near() -> None:
    """A backlog behind four slots: answers of equal length, steps as the cost model learns them."""
    world = World(400, 4, seqs=4, batch=512, context=300, queue=64)
    costs = world.scheduler.costs
    for i in range(24):
        world.ask(f"r{i}", range(100 * i, 100 * i + 20), 50)
    while True:
        plan = world.scheduler.next_step(world.clock.now())
        if plan is None:
            break
        prefill = sum(len(rows.tokens) for rows in plan.rows if len(rows.tokens) > 1)
        ms = 5.0 + sum(len(rows.tokens) == 1 for rows in plan.rows) + 0.5 * prefill
        result = world.device.run(plan, ms)
        world.clock.advance(ms / 1000)
        world.news += world.scheduler.absorb(result, world.clock.now())
        if plan.number == 150:
            for i in range(24, 40):
                world.ask(f"r{i}", range(100 * i, 100 * i + 20), 50)
    late = [fact for fact in world.of(RequestStarted) if int(fact.request[1:]) >= 24]  # type: ignore[attr-defined]
    errors = sorted(abs(f.queue_s - f.predicted_s) / f.queue_s for f in late)  # type: ignore[attr-defined]
    assert len(errors) == 16 and errors[8] < 0.25, (errors, costs.base)
