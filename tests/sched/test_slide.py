"""Answers that go on past their context: as if the shortened sequence had been asked cold, and told."""

from __future__ import annotations

import pytest
from tests.sched.fake import Setup, World, answer

from tenure.events import SequenceResumed, SequenceSlid
from tenure.overflow import SINKS, slid_range
from tenure.tenants import Tenant, Tenants
from tenure.types import Delta, Forgotten, Scope, Span


def sliding(tokens: list[int], count: int, limit: int) -> tuple[list[int], list[tuple[int, int]]]:
    """What the fake model answers when its context slides, and the ranges it lets go, counted from the prompt."""
    context, got, gone = list(tokens), [], []
    dropped = 0
    for _ in range(count):
        if len(context) == limit:
            start, end = slid_range(limit, limit)
            gone.append((start + dropped, end + dropped))
            dropped += end - start
            del context[start:end]
        got.append(answer(context, 0))
        context.append(got[-1])
    return got, gone


@pytest.mark.parametrize("size", [4, 1])
def test_goes_on_as_the_shortened_sequence_asked_cold(size: int) -> None:
    world = World(64, size, context=32)
    spans = (Span(0, 6, 0), Span(6, 20, 1))
    world.ask("a", range(1, 21), 100, overflow="slide", spans=spans, session_id="talk")
    world.run()
    text, gone = sliding(list(range(1, 21)), 100, 32)
    assert world.text("a") == text
    receipt = world.receipt("a")
    assert [(item.start, item.end) for item in receipt.forgotten] == gone and len(gone) == 8
    assert [item.messages for item in receipt.forgotten] == [(0, 1), (1,), *[()] * 6]
    assert {item.policy for item in receipt.forgotten} == {"slide"}
    assert (receipt.limit_cause, receipt.context_limit) == ("max_tokens", 32)
    assert receipt.context_used <= 32
    slid, resumed = world.of(SequenceSlid), world.of(SequenceResumed)
    assert [(fact.start, fact.end) for fact in slid] == gone  # type: ignore[attr-defined]
    assert {fact.kept_tokens for fact in slid} == {SINKS + 16}  # type: ignore[attr-defined]
    assert receipt.recomputed_tokens == sum(fact.recomputed_tokens for fact in resumed)  # type: ignore[attr-defined]
    assert receipt.preempted == 0
    told = [item.forgotten for item in world.news if isinstance(item, Delta) and item.forgotten is not None]
    assert tuple(told) == receipt.forgotten


def test_without_a_limit_an_answer_has_one_context_more() -> None:
    world = World(64, 4, context=32)
    world.ask("a", range(1, 21), None, overflow="slide")
    world.run()
    assert len(world.text("a")) == 32
    assert world.receipt("a").limit_cause == "max_tokens"


def test_what_was_left_out_before_is_repeated() -> None:
    world = World(64, 4, context=32)
    before = Forgotten(4, 90, (1, 2), "slide", "for this test")
    world.ask("a", range(1, 31), 5, overflow="slide", forgotten=(before,))
    world.run()
    assert [item.start for item in world.receipt("a").forgotten] == [4, SINKS]
    assert world.receipt("a").forgotten[0] is before


def test_a_tiny_context_ends_instead() -> None:
    world = World(64, 4, context=8)
    world.ask("a", range(1, 6), 9, overflow="slide")
    world.run()
    assert world.receipt("a").limit_cause == "context"
    assert world.receipt("a").forgotten == ()


def test_slides_beside_others_in_a_small_pool() -> None:
    world = World(14, 4, context=32)
    for name, first in (("a", 1), ("b", 101), ("c", 201)):
        world.ask(name, range(first, first + 10), 60, overflow="slide")
    world.run()
    for name, first in (("a", 1), ("b", 101), ("c", 201)):
        assert world.text(name) == sliding(list(range(first, first + 10)), 60, 32)[0]
    assert sum(world.receipt(name).preempted for name in "abc") > 0


@pytest.mark.parametrize("tenant", [None, 7])
def test_a_pool_smaller_than_the_context_is_the_window(tenant: int | None) -> None:
    """Or what its tenant may hold of it: 7 blocks of 4 tokens."""
    tenants = Tenants(() if tenant is None else (Tenant("acme", max_kv_bytes=tenant),))
    world = World(64 if tenant else 7, 4, context=200, setup=Setup(tenants=tenants))
    scope = Scope("fake", tenant="acme" if tenant else "")
    world.ask("a", range(1, 21), 60, overflow="slide", scope=scope)
    world.run()
    text, gone = sliding(list(range(1, 21)), 60, 28)
    assert world.text("a") == text
    receipt = world.receipt("a")
    assert [(item.start, item.end) for item in receipt.forgotten] == gone and len(gone) > 3
    outgrown = "its tenant's part of the KV cache" if tenant else "the KV cache"
    assert {item.reason for item in receipt.forgotten} == {f"the conversation outgrew {outgrown}"}
    assert receipt.limit_cause == "max_tokens"
    world.ask("b", range(1, 21), 60, scope=scope)
    world.run()
    assert world.receipt("b").limit_cause == ("tenant_kv" if tenant else "pool")
    assert len(world.text("b")) == 8 + 1
