"""The engine's thread and who calls it: what a command changed can be seen before its caller hears of it, and nobody is
left waiting, however things end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import TypeVar

import pytest
from tests.engine.harness import Watched, english, model, watched

from tenure.engine import Engine, EngineSettings
from tenure.errors import EngineDead, InvalidRequest
from tenure.tenants import Tenant, Tenants
from tenure.types import Request, Sampling

T = TypeVar("T")


class Held:
    """A command that keeps the engine's thread where it is until `go`; what is called meanwhile waits together."""

    def __init__(self, engine: Engine, error: Exception | None = None) -> None:
        self._gate, begun = threading.Event(), threading.Event()

        def hold(now: float) -> None:
            begun.set()
            assert self._gate.wait(20)
            if error is not None:
                raise error

        self.future = engine._loop.call(hold)
        assert begun.wait(20)

    def go(self) -> None:
        self._gate.set()


def at_the_answer(engine: Engine, command: Callable[[float], object], look: Callable[[], T]) -> T:
    """What `look` sees in the very moment in which the command is answered, on the thread that answers it."""
    held = Held(engine)
    future = engine._loop.call(command)
    seen: Future[T] = Future()
    future.add_done_callback(lambda _: seen.set_result(look()))
    held.go()
    return seen.result(20)


def cached(seen: Watched) -> int:
    return seen.engine.stats().pool.cached


def test_what_a_command_changed_is_seen_when_it_is_answered() -> None:
    with watched(model()) as seen:
        seen.run(seen.ask(english(100), 2))
        assert cached(seen) > 0
        assert at_the_answer(seen.engine, seen.engine._desk.clear, lambda: cached(seen)) == 0


def test_what_tenants_have_is_seen_too_while_others_run() -> None:
    tenants = Tenants((Tenant("t", ("key",), max_pinned_bytes=4 << 20),))
    with watched(model(), tenants=tenants) as seen:
        scope = seen.engine.scope(tenant="t", salt="")
        tokens = tuple(english(100))
        request = Request("a", tokens, scope, Sampling(max_tokens=2, ignore_eos=True), session_id="s")
        seen.engine.submit(request).result()
        running = seen.engine.submit(seen.ask(english(20, 400), 2000))
        next(iter(running))
        desk = seen.engine._desk
        for _ in range(5):  # within the time for which sums of tenants may be old
            pinned = at_the_answer(seen.engine, lambda now: desk.pin("t", "s", 300.0, now), seen.engine.stats)
            assert sum(tenant.pinned_bytes for tenant in pinned.tenants) > 0
            free = at_the_answer(seen.engine, lambda now: desk.unpin("t", "s", now), seen.engine.stats)
            assert sum(tenant.pinned_bytes for tenant in free.tenants) == 0
        running.cancel()
        running.result()


def test_a_deleted_answer_ends_before_its_deletion_is_told() -> None:
    with watched(model()) as seen:
        request = Request("a", tuple(english(20)), seen.scope, Sampling(max_tokens=5000), session_id="s")
        handle = seen.engine.submit(request)
        next(iter(handle))

        def delete(now: float) -> None:
            seen.engine._loop.tell(seen.engine._desk.delete(None, "s", now)[1])

        stats = at_the_answer(seen.engine, delete, seen.engine.stats)
        assert (stats.running, stats.pool.leased) == (0, 0)


def test_a_refusal_is_the_answer_and_the_engine_goes_on() -> None:
    def refuse(now: float) -> None:
        raise InvalidRequest("not this", param="this")

    with watched(model()) as seen:
        with pytest.raises(InvalidRequest, match="not this"):
            seen.engine._loop.call(refuse).result(20)
        assert seen.run(seen.ask(english(20), 2))[0].error is None


def test_a_cancelled_command_is_not_carried_out() -> None:
    with watched(model()) as seen:
        done: list[float] = []
        held = Held(seen.engine)
        assert seen.engine._loop.call(done.append).cancel()
        last = seen.engine._loop.call(lambda now: "last")
        assert not held.future.cancel()  # it runs
        held.go()
        assert last.result(20) == "last"
        assert done == []


def test_a_command_that_fails_leaves_none_waiting() -> None:
    """Those of the same turn before and behind it, those that come meanwhile, those cancelled, and requests."""
    with Engine(model(), EngineSettings(kv_cache_bytes=64 << 20)) as engine:
        held = Held(engine)
        scope = engine.scope(tenant="", salt="")

        def broken(now: float) -> None:
            behind_all.append(engine._loop.call(lambda now: "late"))
            behind_all.append(engine._loop.call(lambda now: "left"))
            assert behind_all[1].cancel()
            raise ZeroDivisionError("for this test")

        behind_all: list[Future[str]] = []
        before = engine._loop.call(lambda now: "before")
        fails = engine._loop.call(broken)
        behind = engine._loop.call(lambda now: "behind")
        gone = engine._loop.call(lambda now: "gone")
        gone.cancel()
        handle = engine.submit(Request("a", (5, 6), scope, Sampling(max_tokens=5)))
        held.go()
        assert held.future.result(20) is None
        with pytest.raises(ZeroDivisionError):
            fails.result(20)
        for future in (before, behind, behind_all[0]):
            with pytest.raises(EngineDead, match="for this test"):
                future.result(20)
        for future in (gone, behind_all[1]):
            with pytest.raises(CancelledError):
                future.result(20)
        assert handle.result()[1].error == "ZeroDivisionError: for this test"
        assert not engine.health().alive


def test_a_step_that_cannot_be_chosen_leaves_no_command_waiting() -> None:
    """It was carried out, but what it changed was never published: its caller is told of the end, not of success."""
    with Engine(model(), EngineSettings(kv_cache_bytes=64 << 20)) as engine:
        held = Held(engine)

        def broken(now: float) -> None:
            raise ZeroDivisionError("for this test")

        engine._scheduler.next_step = broken  # type: ignore[method-assign, assignment]
        held.go()
        with pytest.raises(EngineDead, match="for this test"):
            held.future.result(20)


def test_commands_that_wait_when_the_engine_is_closed_are_carried_out() -> None:
    engine = Engine(model(), EngineSettings(kv_cache_bytes=64 << 20))
    try:
        held = Held(engine)
        waiting = engine._loop.call(lambda now: "done")
        seen: Future[bool] = Future()
        waiting.add_done_callback(lambda _: seen.set_result(engine._loop.idle))
        closing = threading.Thread(target=engine.close)
        closing.start()
        held.go()
        assert waiting.result(20) == "done"
        assert seen.result(20)
        closing.join(20)
        with pytest.raises(EngineDead):
            engine._loop.call(lambda now: None)
    finally:
        engine.close()
