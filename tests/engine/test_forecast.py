"""Dry runs: what is said of a request that would come now is what happens when it comes."""

from __future__ import annotations

import random

import pytest
from tests.sched.fake import Setup, World
from tests.sched.test_windows import layout

from tenure.engine.forecast import forecast
from tenure.events import BlockGone, RequestDone, RequestStarted
from tenure.policy.base import AdmissionAsk, Refuse
from tenure.tenants import Tenant, Tenants
from tenure.types import Fate, Request, Sampling, Scope
from tenure.views import Forecast


def test_what_would_become_of_a_request() -> None:
    world = World(16, 4, context=40)

    def plan(tokens: list[int]) -> tuple[bool, bool, str, int, int, int, int]:
        seen = forecast(world.scheduler, Request("?", tuple(tokens), Scope("fake"), Sampling()), world.clock.now())
        assert (seen.predicted_start_s is None) == (not seen.fits_ever)
        return (
            seen.fits_now, seen.fits_ever, seen.reason, seen.cached_tokens, seen.computed_tokens, seen.needed_blocks,
            seen.would_evict_blocks,
        )  # fmt: skip

    assert plan(list(range(10))) == (True, True, "it fits", 0, 10, 3, 0)
    assert plan(list(range(40)))[:2] == (False, False)
    world.ask("a", range(1, 36), 3)
    world.run()
    world.ask("b", range(100, 130), 8)
    assert plan([*range(1, 31)])[:4] == (True, True, "it fits, behind 1 that wait", 29)
    world.step()
    before = len(world.facts)
    assert plan(list(range(1, 36)))[:2] == (False, True)
    assert "blocks wanted" in plan(list(range(200, 235)))[2]
    assert plan(list(range(200, 220)))[6] == 6
    assert len(world.facts) == before
    world.run()
    busy = World(16, 4, context=40, queue=0, seqs=1)
    busy.ask("a", range(10), 3)
    busy.ask("b", range(20, 30), 3)
    seen = forecast(busy.scheduler, Request("?", tuple(range(20)), Scope("fake")), 0.0)
    assert (seen.fits_now, seen.fits_ever) == (False, True) and "The queue holds 2" in seen.reason
    small = World(4, 4, context=40)
    assert not forecast(small.scheduler, Request("?", tuple(range(20)), Scope("fake")), 0.0).fits_ever


TENANTS = Tenants((Tenant("acme", max_kv_bytes=9), Tenant("zoo", max_concurrent=1)))


@pytest.mark.parametrize("seed", range(30))
def test_what_is_said_is_what_happens(seed: int) -> None:
    """At any moment of a busy run: plan a request, then ask it."""
    chance = random.Random(seed)
    setup = Setup(chance.choice(("pause@80%", "pause")), tenants=TENANTS)
    world = World(chance.randrange(10, 30), 4, seqs=4, batch=10_000, context=chance.choice((48, 400)), setup=setup)
    texts = [[*range(1, 9), *(chance.randrange(20, 23) for _ in range(chance.randrange(1, 20)))] for _ in range(8)]
    told: dict[str, Forecast] = {}
    fitted = held_up = 0
    for number in range(40):
        for _ in range(chance.choice((0, 1, 5, 20))):
            world.step()
        while world.scheduler.waiting and chance.random() < 0.95:
            world.step()
        scope, most = Scope("fake", tenant=chance.choice(("", "", "acme", "zoo"))), chance.choice((1, 9, 30, None))
        request = Request(
            f"r{number}", tuple(chance.choice(texts)), scope, Sampling(max_tokens=most), n=chance.choice((1, 1, 2)),
            overflow=chance.choice(("refuse", "slide")),
        )  # fmt: skip
        before = len(world.facts)
        seen = forecast(world.scheduler, request, world.clock.now())
        assert len(world.facts) == before
        if not seen.fits_ever:
            ask = AdmissionAsk(len(request.tokens), request.n, most, 0, scope.tenant)
            assert isinstance(world.scheduler.admission.judge(ask, world.scheduler.load()), Refuse)
            continue
        alone = not world.scheduler.waiting
        world.device.begin(request)
        world.scheduler.add(request, world.clock.now())
        world.step()
        news = world.facts[before:]
        starts = [f for f in news if isinstance(f, RequestStarted) and f.request == request.id]
        if alone:
            assert bool(starts) == seen.fits_now, seen.reason
            fitted, held_up = fitted + seen.fits_now, held_up + (not seen.fits_now)
            if starts:
                first = news[: news.index(starts[0])]
                gone = [f for f in first if isinstance(f, BlockGone) and f.fate is Fate.DROPPED]
                assert len(gone) == seen.would_evict_blocks
                assert sum(fact.recompute_tokens for fact in gone) == seen.would_evict_tokens
                assert (starts[0].cached_tokens, starts[0].predicted_s) == (seen.cached_tokens, seen.predicted_start_s)
        told[request.id] = seen
    world.run(20_000)
    assert fitted + held_up > 2
    for fact in world.of(RequestDone):
        assert isinstance(fact, RequestDone)
        seen = told[fact.request]
        texts = [world.text(fact.request, index) for index in range(len(fact.finishes))]
        assert [len(text) for text in texts] == [seen.answer_tokens] * len(texts), (fact, seen)
        assert fact.limit_cause == seen.answer_cause


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(("prompt", "answer"), [(8, 0), (11, 0), (8, 1), (8, 9), (10, 3), (11, 12), (12, 21)])
def test_blocks_of_all_answers_at_their_longest(n: int, prompt: int, answer: int) -> None:
    world = World(64, 4)
    request = Request("r", tuple(range(prompt)), Scope("fake"), Sampling(max_tokens=answer), n=n)
    seen = forecast(world.scheduler, request, 0.0)
    assert (seen.answer_tokens, seen.answer_cause, seen.lacking_blocks) == (answer, "max_tokens", 0)
    world.device.begin(request)
    world.scheduler.add(request, 0.0)
    world.run()
    held = world.cache.counts().cached
    assert held == seen.whole_blocks if answer > 1 else held <= seen.whole_blocks  # equal open blocks are kept once
    small = forecast(World(seen.whole_blocks - 1, 4).scheduler, request, 0.0)
    assert small.lacking_blocks == 1 or not small.fits_ever or small.answer_cause == "pool"


@pytest.mark.parametrize(("windows", "lacks"), [((10,), 0), ((None, 10), 3)])
def test_what_windows_let_go_is_not_lacking_and_what_they_see_is(windows: tuple[int | None, ...], lacks: int) -> None:
    """Two answers that become 40 tokens, where 12 blocks of 4 tokens are: as many of each group of layers, but for 5
    that are kept for the windows of whoever is alone."""
    world = World(0, 4, context=100, setup=Setup(layout=layout(*windows, blocks=12, size=4)))
    request = Request("?", tuple(range(8)), Scope("fake"), Sampling(max_tokens=33), n=2)
    seen = forecast(world.scheduler, request, 0.0)
    assert (seen.fits_now, seen.whole_blocks) == (True, 2 + 2 * 8)
    assert seen.lacking_blocks == lacks
