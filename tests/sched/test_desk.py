"""Conversations asked after: seen, pinned, paused, resumed and deleted, each by its own tenant only."""

from __future__ import annotations

import pytest
from tests.sched.fake import World, answer

from tenure.errors import NotFound
from tenure.events import ConversationChanged, PinEnded, PinGranted, PinRefused, SequencePaused
from tenure.sched.desk import Desk
from tenure.types import Done, Pin, Scope

ACME, ZOO = Scope("fake", tenant="acme"), Scope("fake", tenant="zoo")


def desk(world: World) -> Desk:
    return Desk(world.scheduler, world.history, world.log)


def alone(tokens: list[int], count: int) -> list[int]:
    context = list(tokens)
    for _ in range(count):
        context.append(answer(context, 0))
    return context[len(tokens) :]


def test_lists_what_each_tenant_has() -> None:
    world = World(64, 4)
    world.ask("a", range(1, 11), 3, scope=ACME, session_id="talk")
    world.ask("b", range(1, 6), 3, scope=ZOO)
    at = desk(world)
    assert {(view.id, view.state) for view in at.conversations(None, 0.0)} == {("talk", "waiting"), ("b", "waiting")}
    world.step()
    assert {view.state for view in at.conversations(None, 0.0)} == {"running"}
    world.run()
    now = world.clock.now()
    (view,) = at.conversations("acme", now + 5.0)
    assert (view.id, view.tenant, view.tokens, view.held_tokens, view.state) == ("talk", "acme", 13, 12, "idle")
    assert view.bytes == {"bf16": 3} and view.idle_s == pytest.approx(5.0) and view.pins == ()
    assert at.inspect("zoo", "b", now).tokens == 8
    assert at.inspect(None, "b", now).tokens == 8
    with pytest.raises(NotFound, match="no conversation 'talk'"):
        at.inspect("zoo", "talk", now)
    shares = {view.name: view.share for view in at.tenants()}
    assert sum(shares.values()) == pytest.approx(1.0) and shares["acme"] > shares["zoo"]


def test_a_conversation_keeps_its_name_over_turns() -> None:
    world = World(64, 4)
    world.ask("first", range(1, 11), 3)
    world.run()
    world.ask("second", [*range(1, 11), *world.text("first"), 500], 3)
    world.run()
    (view,) = desk(world).conversations(None, world.clock.now())
    assert (view.id, view.tokens) == ("first", 17)


def test_paused_until_resumed() -> None:
    world = World(64, 4)
    world.ask("a", range(1, 11), 8, session_id="talk")
    world.ask("b", range(21, 31), 12)
    world.step()
    at = desk(world)
    assert at.pause("", "talk", world.clock.now()).state == "paused"
    world.ask("c", range(1, 5), 2, session_id="talk")
    for _ in range(12):
        world.step()
    assert world.text("b") == alone(list(range(21, 31)), 12)
    assert len(world.text("a")) == 1 and world.text("c") == []
    assert world.step() is None and world.scheduler.idle
    (fact,) = world.of(SequencePaused)
    assert (fact.by, fact.freed_blocks) == ("operator", 4)  # type: ignore[attr-defined]
    at.resume("", "talk", world.clock.now())
    world.run()
    assert world.text("a") == alone(list(range(1, 11)), 8)
    assert world.text("c") == alone(list(range(1, 5)), 2)
    (receipt,) = [item.receipt for item in world.news if isinstance(item, Done) and item.request == "a"]
    assert (receipt.preempted, receipt.recomputed_tokens) == (1, 0)
    changes = [fact.change for fact in world.of(ConversationChanged)]  # type: ignore[attr-defined]
    assert changes == ["paused", "resumed"]


def test_paused_while_its_step_runs() -> None:
    world = World(64, 4)
    world.ask("a", range(1, 11), 4, session_id="talk")
    world.step()
    plan = world.scheduler.next_step(world.clock.now())
    assert plan is not None
    context = list(world.device.contexts["a", 0])
    result = world.device.run(plan)
    at = desk(world)
    at.pause("", "talk", world.clock.now())
    assert world.scheduler.absorb(result, world.clock.now()) == []
    world.device.contexts["a", 0] = context
    at.resume("", "talk", world.clock.now())
    world.run()
    assert world.text("a") == alone(list(range(1, 11)), 4)


def test_deleted_with_all_that_only_it_holds() -> None:
    world = World(64, 4)
    world.ask("a", range(1, 11), 3, session_id="talk")
    world.ask("b", [*range(1, 9), 70, 71], 3, session_id="other")
    world.run()
    world.ask("c", range(1, 11), 30, session_id="talk")
    world.step()
    at = desk(world)
    blocks, news = at.delete("", "talk", world.clock.now())
    world.cache.check()
    assert blocks == 1  # the two first blocks are the other's too
    assert [item.request for item in news if isinstance(item, Done)] == ["c"]
    with pytest.raises(NotFound):
        at.delete("", "talk", world.clock.now())
    assert world.scheduler.idle
    assert at.inspect("", "other", world.clock.now()).held_tokens == 12


def test_pins_outlast_the_need_of_others_until_their_time() -> None:
    world = World(16, 4)
    world.ask("a", range(1, 18), 3, session_id="talk", pins=(Pin(17, 60.0), Pin(3, 60.0)))
    world.run(leased=4)
    (receipt,) = [item.receipt for item in world.news if isinstance(item, Done)]
    granted, refused = receipt.pins
    assert (granted.granted, granted.tokens, granted.bytes, granted.ttl_s) == (True, 16, 4, 60.0)
    assert not refused.granted and refused.reason is not None and "nothing to pin" in refused.reason
    at = desk(world)
    (pin,) = at.inspect("", "talk", world.clock.now()).pins
    assert (pin.tokens, pin.bytes) == (16, 4)
    for i in range(4):
        world.ask(f"f{i}", range(100 * i + 100, 100 * i + 130), 2)
        world.run(leased=4)
    world.ask("again", [*range(1, 18), 9], 1)
    world.run(leased=4)
    assert world.receipt("again").cached_tokens == 16
    world.clock.advance(61.0)
    for i in range(4):
        world.ask(f"g{i}", range(100 * i + 100, 100 * i + 130), 2)
        world.run()
    (ended,) = world.of(PinEnded)
    assert (ended.reason, ended.blocks) == ("expired", 4)  # type: ignore[attr-defined]
    world.ask("late", [*range(1, 18), 9], 1)
    world.run()
    miss = world.receipt("late").miss
    assert miss is not None and (miss.reason, miss.by) == ("expired", "pin")
    assert len(world.of(PinGranted)) == 1 and len(world.of(PinRefused)) == 1


def test_pins_are_prolonged_replaced_and_ended() -> None:
    world = World(32, 4)
    world.ask("a", range(1, 18), 3, session_id="talk")
    world.run()
    at, now = desk(world), world.clock.now()
    assert at.pin("", "talk", 10.0, now).granted
    assert at.pin("", "talk", 5.0, now).ttl_s == 10.0
    assert at.pin("", "talk", 20.0, now).ttl_s == 20.0
    assert world.cache.counts().leased == 4
    world.cache.check()
    assert at.unpin("", "talk", now) == 4
    assert at.unpin("", "talk", now) == 0
    assert world.cache.counts().leased == 0
    assert at.pin("", "talk", 10.0, now).granted
    at.delete("", "talk", now)
    assert world.cache.counts().leased == 0
    reasons = [fact.reason for fact in world.of(PinEnded)]  # type: ignore[attr-defined]
    assert reasons == ["replaced", "replaced", "unpinned", "deleted"]


def test_a_pin_that_is_all_that_stands_in_the_way_is_revoked() -> None:
    world = World(8, 4)
    world.ask("a", range(1, 18), 3, pins=(Pin(16, 1e6),))
    world.run(leased=4)
    world.ask("wide", range(100, 127), 4)
    world.run()
    assert world.text("wide") == alone(list(range(100, 127)), 4)
    (ended,) = world.of(PinEnded)
    assert ended.reason == "revoked"  # type: ignore[attr-defined]
    world = World(8, 4)
    world.ask("a", range(1, 18), 3, pins=(Pin(16, 1e6),))
    world.run(leased=4)
    world.ask("grows", range(100, 110), 20)
    world.run()
    assert world.text("grows") == alone(list(range(100, 110)), 20)
