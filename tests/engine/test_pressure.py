"""Running out of memory and of context with the real model: to the last bit as if nothing had happened, or as the
shortened sequence asked cold; and a recorded run that replays without the model."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from engine.harness import Watched, model, watched
from tenure import spec
from tenure.cache.ghosts import Ghosts
from tenure.cache.history import History
from tenure.cache.kvcache import KvCache
from tenure.engine import Engine
from tenure.errors import KvCapacityExceeded, NotFound
from tenure.events import CacheCleared, ConversationChanged, Fact, FactLog, PinEnded, PinGranted, RequestRefused
from tenure.lab.rerun import TakenDown, TakenDownDesk, rerun
from tenure.overflow import slid_range
from tenure.policy import registry
from tenure.sched.desk import Desk
from tenure.sched.scheduler import Scheduler
from tenure.server.serves import Change
from tenure.sim.store import NullStore
from tenure.types import Piece

LIMIT = 96


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_slides_as_the_shortened_sequence_asked_cold(temperature: float) -> None:
    loaded = model()
    prompt = loaded.tokenizer.encode("The lighthouse keeper wrote a long letter about the storms of that winter. " * 4)
    sampling = {"temperature": temperature, "seed": 5}
    with watched(loaded, max_model_len=LIMIT) as engine:
        request = replace(engine.ask(prompt[:60], 130, **sampling), overflow="slide")
        handle = engine.engine.submit(request)
        pieces, done = handle.result()
        trace = engine.trace(request)
    assert done.usage.completion_tokens == 130 == len(trace)
    told = [piece.forgotten for piece in pieces if piece.forgotten is not None]
    assert tuple(told) == done.receipt.forgotten and len(told) == 3
    assert (told[0].start, told[0].end) == slid_range(LIMIT, LIMIT)
    assert done.receipt.recomputed_tokens > 0 and done.receipt.preempted == 0
    context = list(prompt[:60])
    at = 0
    while at < len(trace):
        if len(context) == LIMIT:
            start, end = slid_range(LIMIT, LIMIT)
            del context[start:end]
        count = min(LIMIT - len(context), len(trace) - at)
        with watched(loaded, max_model_len=LIMIT) as engine:
            if temperature:  # the sampling counter starts anew: logits of the first token only
                cold = engine.ask(context, 1, **sampling)
                engine.run(cold)
                assert engine.trace(cold)[0][1] == trace[at][1]
            else:
                cold = engine.ask(context, count)
                engine.run(cold)
                assert engine.trace(cold) == trace[at : at + count]
        context += [token for token, _ in trace[at : at + count]]
        at += count


def recorded(engine: Watched) -> tuple[TakenDown, list[Fact]]:
    """The engine's scheduler and desk, made to take down their calls from now on."""
    scheduler = engine.engine._scheduler
    scheduler.__class__ = TakenDown
    engine.engine._desk.__class__ = TakenDownDesk
    facts: list[Fact] = []
    engine.engine.facts.listen(facts.append)
    assert isinstance(scheduler, TakenDown)
    return scheduler, facts


def again(engine: Engine) -> tuple[Scheduler, Desk, list[Fact]]:
    """A scheduler and its desk over no device, set up as the engine's."""
    original, settings = engine._scheduler, engine.settings
    log, facts = FactLog(), list[Fact]()
    log.listen(facts.append)
    codec = spec.codec(settings.kv_codec)
    cache = KvCache(
        original.cache.counts().total,
        spec.BLOCK_TOKENS,
        codec=codec,
        eviction=registry.eviction(settings.eviction),
        facts=log,
        ghosts=Ghosts(settings.ghosts),
    )
    history = History(spec.BLOCK_TOKENS, heads=codec.head_reusable, why_not=lambda said, shown: None)
    scheduler = Scheduler(
        cache,
        limits=original.limits,
        admission=original.admission,
        pressure=registry.pressure(settings.pressure),
        history=history,
        facts=log,
        costs=type(original.costs)(doubling=original.costs.doubling),
    )
    return scheduler, Desk(scheduler, history, log), facts


def test_a_recorded_run_replays_to_the_same_facts() -> None:
    """Three conversations in a pool for two: pauses, evictions and misses, replayed from tokens and times alone."""
    loaded = model()
    tokens = loaded.tokenizer.encode("A tale of rivers, of mills, and of the people who lived beside them. " * 12)
    with watched(loaded, blocks=12) as engine:
        taken, facts = recorded(engine)
        requests = [engine.ask([*tokens[i : i + 100 + 10 * i]], 90) for i in range(3)]
        dones = engine.run(*requests)
        dones += engine.run(engine.ask([*tokens[:100], *[token for token, _ in engine.trace(requests[0])]], 10))
        engine.engine.check()
        scheduler, desk, repeated = again(engine.engine)
        calls = list(taken.tape.calls)
        told = list(facts)
    rerun(calls, scheduler, desk, NullStore())
    assert repeated[: len(told)] == told and len(told) > 100
    assert sum(done.receipt.preempted for done in dones) > 0


def test_what_is_done_to_conversations_is_in_the_record() -> None:
    """Paused, resumed, pinned and deleted while they run, refused, and the cache cleared: the same facts again."""
    loaded = model()
    tokens = loaded.tokenizer.encode("A tale of rivers, of mills, and of the people who lived beside them. " * 12)
    with watched(loaded, blocks=24) as watch:
        engine = watch.engine
        taken, facts = recorded(watch)
        asked = [replace(watch.ask(tokens[i : i + 70], 60), session_id=f"talk{i}") for i in range(3)]

        def tend(change: Change, name: str) -> None:
            asyncio.run(engine.change_conversation(None, name, change, 60.0))

        handles = [engine.submit(request) for request in asked]
        tend("pause", "talk0")
        with pytest.raises(NotFound):
            tend("pause", "nobody")
        with pytest.raises(KvCapacityExceeded):
            engine.submit(watch.ask(tokens[:1] * 24 * 32, 1))
        asyncio.run(engine.delete_conversation(None, "talk1"))
        handles[2].result()
        tend("pin", "talk2")
        tend("resume", "talk0")
        handles[0].result()
        engine.reset_prefix_cache()
        tend("unpin", "talk2")
        engine.check()
        scheduler, desk, repeated = again(engine)
        calls, told = list(taken.tape.calls), list(facts)
    rerun(calls, scheduler, desk, NullStore())
    assert repeated[: len(told)] == told
    changes = [fact.change for fact in told if isinstance(fact, ConversationChanged)]
    assert changes == ["paused", "deleted", "resumed"]
    kinds = {type(fact) for fact in told}
    assert {CacheCleared, PinGranted, PinEnded, RequestRefused} <= kinds


def test_squeezed_answers_equal_solo_ones() -> None:
    """Eight conversations in a pool for a third of them: pauses cost work, never a bit."""
    loaded = model()
    tokens = loaded.tokenizer.encode("Of all the harbours on that coast the smallest had the oldest bell. " * 8)
    prompts = [tokens[i : i + 70] for i in range(8)]
    with watched(loaded, blocks=200) as engine:
        solo = []
        for prompt in prompts:
            request = engine.ask(prompt, 60)
            engine.run(request)
            solo.append(engine.trace(request))
    with watched(loaded, blocks=12) as engine:
        requests = [engine.ask(prompt, 60) for prompt in prompts]
        dones = engine.run(*requests)
        assert [engine.trace(request) for request in requests] == solo
    assert sum(done.receipt.preempted for done in dones) > 0


def test_a_slide_is_an_event_in_the_stream() -> None:
    loaded = model()
    prompt = loaded.tokenizer.encode("One day the river stopped. " * 8)[:50]
    with watched(loaded, max_model_len=64) as engine:
        request = replace(engine.ask(prompt, 40), overflow="slide")
        news = list(engine.engine.submit(request))
    slid = [item for item in news if isinstance(item, Piece) and item.forgotten is not None]
    assert len(slid) == 1
