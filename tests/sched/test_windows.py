"""Layers with windows under all that a scheduler does: every answer is that of a sequence alone, in less room."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from tests.sched.fake import Setup, World
from tests.sched.test_everything import SHARED, TENANTS, Everything
from tests.sched.test_pressure import alone

from tenure.events import PinEnded, RequestStarted, SequencePaused, SequenceResumed, WindowGone
from tenure.policy.base import AdmissionAsk, Refuse
from tenure.sched.desk import Desk
from tenure.spec import ArenaLayout, KvGeometry, LayerGroup
from tenure.tenants import Tenant, Tenants
from tenure.types import Pin, PinReceipt, Scope

SIZE = 8


def layout(*windows: int | None, blocks: int, size: int = SIZE) -> ArenaLayout:
    """An arena as large as `blocks` blocks of all layers; each group of layers is as large as any other."""
    groups = tuple(LayerGroup(1, window) for window in windows)
    geometry = KvGeometry(len(groups), 1, 64, block_tokens=size, groups=groups)
    return geometry.layout(blocks * geometry.block_bytes("bf16"), "bf16")


@pytest.mark.parametrize("conversations", [4, 16])
@pytest.mark.parametrize("squeeze", [1.5, 3, 8])
@pytest.mark.parametrize("windows", [(None, 20), (24,), (None, 30, 9)])
def test_squeezed(conversations: int, squeeze: float, windows: tuple[int | None, ...]) -> None:
    """Two turns of each conversation, whose blocks of all layers together are `squeeze` times the arena."""
    each = 2 * (40 + 24)
    blocks = max(each // SIZE + 4, int(conversations * each / SIZE / squeeze))
    world = World(0, SIZE, seqs=32, batch=64, context=200, setup=Setup(layout=layout(*windows, blocks=blocks)))
    texts: dict[int, list[int]] = {}
    for turn in range(2):
        for i in range(conversations):
            prompt = [*range(100 * i, 100 * i + 40)] if not turn else [*texts[i], *range(100 * i + 50, 100 * i + 90)]
            world.ask(f"t{turn}c{i}", prompt, 24, session_id=f"c{i}")
            texts[i] = prompt + alone(prompt, 24)
        world.run(20_000)
        world.cache.check()
    for i in range(conversations):
        assert world.text(f"t1c{i}") == texts[i][-24:]
    receipts = [world.receipt(f"t{turn}c{i}") for turn in range(2) for i in range(conversations)]
    paused = world.of(SequencePaused)
    assert sum(receipt.preempted for receipt in receipts) == len(paused) == len(world.of(SequenceResumed))
    assert {receipt.limit_cause for receipt in receipts} == {"max_tokens"}
    assert world.cache.leaked() == 0 and world.cache.counts().leased == 0


def test_a_long_conversation_holds_its_windows_only() -> None:
    world = World(0, SIZE, batch=64, context=4000, setup=Setup(layout=layout(None, 20, blocks=100)))
    world.ask("a", range(400), 40)
    most = 0
    while world.step():
        seqs = world.scheduler.sequences()
        if seqs and seqs[0].lease and seqs[0].computed > 400:
            whole, seen = seqs[0].lease.tables
            most = max(most, sum(block >= 0 for block in seen))
            assert all(block >= 0 for block in whole)
    assert 0 < most <= LayerGroup(1, 20).held(100, SIZE)
    assert world.text("a") == alone(range(400), 40)


def test_a_sequence_of_windows_only_may_outgrow_the_pool() -> None:
    world = World(0, SIZE, batch=64, context=4000, setup=Setup(layout=layout(24, blocks=8)))
    world.ask("a", range(500), 40)
    world.run(2000)
    assert world.text("a") == alone(range(500), 40)
    assert world.receipt("a").limit_cause == "max_tokens"


def test_a_prefix_is_reused_where_windows_still_have_it_and_else_it_is_told() -> None:
    """A shared beginning, taken up at its end again and again; then at a place that a window had left."""
    world = World(0, SIZE, batch=512, context=400, setup=Setup(layout=layout(None, 20, blocks=60)))
    begin = list(range(64))
    for i in range(3):
        world.ask(f"a{i}", [*begin, *range(100 * i + 100, 100 * i + 140)], 8)
        world.run()
    assert [world.receipt(f"a{i}").cached_tokens for i in range(3)] == [0, 64, 64]
    while not world.of(WindowGone):  # others come until what nobody ever began from has gone
        world.ask(f"b{len(world.facts)}", range(5000 + len(world.facts), 5120 + len(world.facts)), 1)
        world.run()
    gone: Any = world.of(WindowGone)[0]
    assert gone.window == 20
    world.ask("again", [*begin[:40], 7, 7, 7], 4)
    world.run()
    receipt, started = world.receipt("again"), world.of(RequestStarted)[-1]
    assert receipt.miss is not None and receipt.miss.reason == "window"
    assert receipt.cached_tokens < 40 and receipt.recomputed_tokens == 40 - receipt.cached_tokens
    assert started.recomputed_tokens == receipt.recomputed_tokens  # type: ignore[attr-defined]
    world.ask("at last", [*begin[:40], 8, 8, 8], 4)  # it was computed again and is held again
    world.run()
    assert world.receipt("at last").cached_tokens == 40


@pytest.mark.parametrize("windows", [(None, 10), (None, 22, 9), (10,)])
@pytest.mark.parametrize("most", [4, 7, 12])
def test_a_tenants_limit_binds_where_its_window_says(windows: tuple[int | None, ...], most: int) -> None:
    """What windows hold counts, a prompt that is let in gets its answer, and all get as far as was foretold."""
    setup = Setup(layout=layout(*windows, blocks=40, size=4), tenants=Tenants((Tenant("small", max_kv_bytes=most),)))
    scope, answered = Scope("fake", tenant="small"), 0
    for prompt in range(1, 60, 5):
        world = World(0, 4, seqs=4, batch=7, context=60, setup=setup)
        window, load = world.scheduler.room.window("small"), world.scheduler.load()
        if isinstance(world.scheduler.admission.judge(AdmissionAsk(prompt, 1, 99, 0, "small"), load), Refuse):
            assert prompt >= window.tokens
            continue
        world.ask("a", range(prompt), 99, scope=scope)
        while world.step():
            assert world.scheduler.room.held_by("small") <= most + 16  # a prompt may be taken in ahead of its windows
        unheld = window.cause == "tenant_kv"  # the newest token is never computed
        assert len(world.text("a")) == window.tokens - prompt + unheld
        assert world.receipt("a").limit_cause == window.cause
        answered += 1
    assert answered or most == 4


LAYERS = [
    ((1, None), (1, 10)),
    ((1, None), (5, 30)),
    ((2, None), (5, 10)),
    ((1, None), (2, 22), (1, 9)),
    ((1, 12), (3, 6)),
]


@pytest.mark.parametrize("codec", ["bf16", "int8"])
@pytest.mark.parametrize("layers", LAYERS)
def test_who_is_alone_gets_as_far_as_its_window_says(layers: tuple[tuple[int, int | None], ...], codec: str) -> None:
    """Whatever others have left, and wherever its own windows have come to lie: to the token where a slab is a block,
    and else to a slab for each group with a window that lies across two (docs/concepts.md)."""
    groups = tuple(LayerGroup(n, window) for n, window in layers)
    geometry = KvGeometry(sum(n for n, _ in layers), 1, 64, block_tokens=4, groups=groups)
    exact = all_tried = 0
    for seed in range(6):
        chance = Random(seed)
        more = chance.randrange(3, 9) * geometry.block_bytes(codec)
        arena = geometry.layout(geometry.least_arena(codec) + more, codec)
        setup = Setup(layout=arena, codec=codec)
        world = World(0, 4, seqs=5, batch=chance.choice((7, 64, 1000)), context=100_000, setup=setup)
        window = world.scheduler.room.window("")
        most = window.tokens if window.cause == "pool" else 8 * arena.blocks  # windows only: it has no end
        for i in range(chance.choice((0, 3, 8))):
            world.ask(f"before{i}", range(1000 * i, 1000 * i + chance.randrange(2, most // 2)), chance.randrange(1, 9))
        world.run(20_000)
        prompt = chance.randrange(1, most)
        world.ask("a", range(prompt), None if window.cause == "pool" else 200)
        world.run(20_000)
        if window.cause != "pool":
            assert world.receipt("a").limit_cause == "max_tokens"
            continue
        assert world.receipt("a").limit_cause == "pool"
        got, all_tried = prompt + len(world.text("a")) - 1, all_tried + 1
        exact += got >= most
        assert got >= most - 4 * arena.slots[0] * (len(groups) - 1) * (max(arena.slots) > 1)
    assert exact >= 0.6 * all_tried


def pinned(world: World, name: str) -> PinReceipt:
    (pin,) = world.receipt(name).pins
    return pin


def crowd(world: World, first: int, leased: int) -> None:
    """Others come until all that nobody leases has gone."""
    for i in range(first, first + 6):
        world.ask(f"other{i}", range(1000 * i, 1000 * i + 100), 2)
        world.run(leased=leased)


def test_a_pin_holds_and_counts_what_windows_see() -> None:
    """A prompt of 25 blocks, of which layers with a window of 24 tokens see the last 3, in a pool of 16."""
    world = World(0, SIZE, batch=64, context=4000, setup=Setup(layout=layout(24, blocks=16)))
    prompt = list(range(200))
    world.ask("a", prompt, 1, session_id="talk", pins=(Pin(200, 60.0),))
    world.run(leased=3)
    granted = pinned(world, "a")
    assert (granted.granted, granted.tokens, granted.bytes, granted.reason) == (True, 200, 3, None)
    assert (world.scheduler.pins.blocks, world.scheduler.pins.bytes_of("")) == (3, 3)
    (view,) = Desk(world.scheduler, world.history, world.log).inspect("", "talk", world.clock.now()).pins
    assert (view.tokens, view.bytes) == (200, 3)
    crowd(world, 1, leased=3)
    world.ask("b", [*prompt, 7, 7], 1)
    world.run(leased=3)
    assert world.receipt("b").cached_tokens == 200
    world.ask("c", [*prompt, *range(500, 508), 7], 1, pins=(Pin(208, 60.0),))  # sees two of the same, and one more
    world.run(leased=4)
    assert (pinned(world, "c").bytes, world.scheduler.pins.blocks) == (3, 4)
    world.clock.advance(61.0)
    world.step()
    assert [getattr(fact, "blocks", None) for fact in world.of(PinEnded)] == [3, 3]
    assert (world.scheduler.pins.blocks, world.cache.counts().leased) == (0, 0)


def test_a_pin_where_windows_have_let_go_is_told_what_is_held() -> None:
    world = World(0, SIZE, batch=64, context=4000, setup=Setup(layout=layout(24, blocks=8)))
    world.ask("a", range(500), 1, pins=(Pin(100, 60.0),))
    world.run()
    held = "0 of 12 full blocks before its end can be reused: windows have let go of what their layers see there"
    assert pinned(world, "a").reason == f"nothing to pin: {held}"
    world.ask("b", range(700, 750), 1, pins=(Pin(7, 60.0),))
    world.run()
    assert pinned(world, "b").reason == "nothing to pin: no full block of 8 tokens lies before its end"


def test_a_pin_of_all_layers_counts_each_group() -> None:
    tenants = Tenants((Tenant("small", max_pinned_bytes=12),))
    world = World(0, SIZE, batch=512, context=400, setup=Setup(layout=layout(None, 20, blocks=60), tenants=tenants))
    scope, pins = Scope("fake", tenant="small"), world.scheduler.pins
    world.ask("a", range(64), 1, scope=scope, pins=(Pin(64, 60.0),))
    while world.step():
        pass
    assert (pinned(world, "a").tokens, pinned(world, "a").bytes) == (64, 8 + 3)
    world.ask("b", range(70), 1, scope=scope, pins=(Pin(40, 60.0),))  # the same blocks, and three more of the window's
    while world.step():
        pass
    assert pinned(world, "b").reason == "it needs 3 bytes more; the budget for pins has 1 left"
    world.ask("c", range(70), 1, scope=scope, pins=(Pin(56, 60.0),))
    while world.step():
        pass
    assert (pinned(world, "c").granted, pins.blocks, pins.bytes_of("small")) == (True, 12, 12)


def test_a_pin_of_what_is_held_no_more_says_so() -> None:
    world = World(16, SIZE)
    world.ask("a", range(40), 1, session_id="talk")
    world.run()
    desk = Desk(world.scheduler, world.history, world.log)
    granted = desk.pin("", "talk", 0.5, world.clock.now())
    assert (granted.tokens, granted.reason) == (40, None)
    world.clock.advance(1.0)
    desk.clear(world.clock.now())
    world.step()
    desk.clear(world.clock.now())
    refused = desk.pin("", "talk", 60.0, world.clock.now())
    assert refused.reason == "nothing to pin: 0 of 5 full blocks before its end can be reused: no more is held"
    world.ask("b", range(20), 1)
    world.run()
    half = desk.pin("", "talk", 60.0, world.clock.now())
    assert (half.granted, half.tokens) == (True, 16)
    assert half.reason == "2 of 5 full blocks before its end can be reused: no more is held"


class EverythingWithWindows(Everything):
    def __init__(self) -> None:
        super().__init__()
        acme, zoo = TENANTS.tenants
        tenants = Tenants((acme, replace(zoo, max_kv_bytes=24)))  # what windows hold counts too
        arena = layout(None, 10, blocks=24, size=4)
        setup = Setup("pause@80%", ghosts=12, shared=(SHARED,), tenants=tenants, layout=arena)
        self.world = World(0, 4, seqs=5, batch=16, context=40, queue=50, setup=setup)
        self.desk = Desk(self.world.scheduler, self.world.history, self.world.log)


TestEverythingWithWindows = EverythingWithWindows.TestCase
TestEverythingWithWindows.settings = settings(
    max_examples=30, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
