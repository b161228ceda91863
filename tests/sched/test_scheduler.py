"""The scheduler over a device that refuses to read what was not written: answers never depend on the company kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.sched.fake import SCOPE, Setup, World, answer

from tenure.cache.lease import LeaseId
from tenure.cache.plan import Match
from tenure.errors import Corrupt
from tenure.events import RequestDone, RequestStarted, SequencePaused, SequenceResumed, TokenFirst
from tenure.policy.base import Load, RunningView, Shortfall, Wait
from tenure.sched.sequence import stillborn
from tenure.types import Done, Finish, Request, StepResult


def alone(tokens: list[int], index: int, count: int) -> list[int]:
    """What the fake model answers when nothing else is going on."""
    context = list(tokens)
    for _ in range(count):
        context.append(answer(context, index))
    return context[len(tokens) :]


def done(world: World, name: str) -> Done:
    (found,) = [item for item in world.news if isinstance(item, Done) and item.request == name]
    return found


PROMPTS = st.tuples(st.integers(0, 20), st.lists(st.integers(1, 3), max_size=6)).map(
    lambda made: [*range(50, 50 + made[0]), *made[1]] or [1]
)
ASKS = st.tuples(PROMPTS, st.integers(1, 9), st.integers(1, 3), st.integers(0, 2))


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    asks=st.lists(ASKS, min_size=1, max_size=7),
    gaps=st.lists(st.integers(0, 3), min_size=7, max_size=7),
    cancels=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 12)), max_size=3),
    blocks=st.integers(9, 24),
    batch=st.sampled_from([1, 3, 8, 64]),
    seqs=st.integers(1, 6),
    setup=st.sampled_from([Setup("pause"), Setup("pause@95%", "gittins"), Setup("pause@50%", ghosts=5)]),
)
def test_answers_do_not_depend_on_company(
    asks: list[tuple[list[int], int, int, int]],
    gaps: list[int],
    cancels: list[tuple[int, int]],
    blocks: int,
    batch: int,
    seqs: int,
    setup: Setup,
) -> None:
    world = World(blocks, 4, seqs=seqs, batch=batch, setup=setup)
    cancelled: set[str] = set()
    steps = 0

    def step() -> None:
        nonlocal steps
        for which, when in cancels:
            if when == steps and world.scheduler.cancel(f"r{which}", world.clock.now()):
                cancelled.add(f"r{which}")
        world.step()
        steps += 1

    for number, (tokens, max_tokens, n, priority) in enumerate(asks):
        world.ask(f"r{number}", tokens, max_tokens, n=n, priority=priority)
        for _ in range(gaps[number]):
            step()
    for _ in range(13):
        step()
    world.run()
    for number, (tokens, max_tokens, n, _) in enumerate(asks):
        name = f"r{number}"
        for index in range(n):
            got = world.text(name, index)
            assert got == alone(tokens, index, len(got))
            if name not in cancelled and done(world, name).receipt.limit_cause != "pool":
                assert len(got) == max_tokens
    ended = [fact.request for fact in world.of(RequestDone)]  # type: ignore[attr-defined]
    assert sorted(ended) == sorted(f"r{number}" for number in range(len(asks)))
    for fact in world.of(RequestDone):
        receipt = fact.receipt  # type: ignore[attr-defined]
        assert receipt.prompt_tokens == receipt.cached_tokens + receipt.computed_tokens
    assert world.cache.counts().leased == 0


def test_resumes_with_the_same_tokens_and_tells() -> None:
    world = World(12, 4)
    prompts = {name: [base + i for i in range(9)] for name, base in (("a", 10), ("b", 30), ("c", 60))}
    for name, tokens in prompts.items():
        world.ask(name, tokens, 16)
    world.run()
    paused, resumed = world.of(SequencePaused), world.of(SequenceResumed)
    assert paused and len(paused) == len(resumed)
    assert sum(done(world, name).receipt.preempted for name in prompts) == len(paused)
    told = sum(done(world, name).receipt.recomputed_tokens for name in prompts)
    assert told == sum(fact.recomputed_tokens for fact in resumed)  # type: ignore[attr-defined]
    for name, tokens in prompts.items():
        assert world.text(name) == alone(tokens, 0, 16)
    assert done(world, "a").receipt.preempted == 0


def test_every_token_is_computed_once() -> None:
    """Eight at once with a common prefix: the rows of all steps add up to the distinct tokens."""
    world = World(200, 4, batch=16)
    for i in range(8):
        world.ask(f"r{i}", [*range(1, 41), 100 + i, 200 + i], 1)
    world.run()
    rows = sum(len(rows.tokens) for plan in world.plans for rows in plan.rows)
    assert rows == 40 + 8 * 2
    cached = [fact.cached_tokens for fact in world.of(RequestStarted)]  # type: ignore[attr-defined]
    assert cached == [0] + [40] * 7


def test_a_waiting_prefix_is_taken_over_when_its_owner_goes() -> None:
    world = World(64, 4, batch=8)
    world.ask("a", range(1, 41), 5)
    world.ask("b", range(1, 41), 2)
    world.step()
    world.scheduler.cancel("a", world.clock.now())
    world.run()
    assert done(world, "b").receipt.cached_tokens == 8
    assert world.text("b") == alone(list(range(1, 41)), 0, 2)


def test_the_next_turn_computes_only_its_new_tokens() -> None:
    world = World(64, 4)
    world.ask("a", range(1, 11), 7)
    world.run()
    said = world.text("a")
    world.ask("b", [*range(1, 11), *said, 500, 501], 1)
    world.run()
    receipt = done(world, "b").receipt
    assert receipt.computed_tokens == 3  # the answer's last token, never computed before, and the two new ones
    assert receipt.miss is None


def test_clamped_to_the_context_and_told() -> None:
    world = World(64, 4, context=12)
    world.ask("a", range(1, 9), 100)
    world.ask("b", range(1, 9), None)
    world.ask("c", range(1, 9), 4)
    world.run()
    asked, absent, exact = (done(world, name).receipt for name in "abc")
    assert (asked.limit_cause, asked.max_tokens_requested, asked.max_tokens_granted) == ("context", 100, 4)
    assert (absent.limit_cause, absent.max_tokens_requested, absent.max_tokens_granted) == ("context", None, None)
    assert (exact.limit_cause, exact.max_tokens_granted) == ("max_tokens", None)
    assert [done(world, name).usage.completion_tokens for name in "abc"] == [4, 4, 4]
    assert asked.context_used == 12 == asked.context_limit


def test_a_stop_ends_one_answer_of_n() -> None:
    world = World(64, 4)
    world.stops = lambda rows: rows.index == 1 and rows.counter == 1
    world.ask("a", range(1, 9), 5, n=3)
    world.run()
    (fact,) = world.of(RequestDone)
    assert fact.finishes == (Finish.LENGTH, Finish.STOP, Finish.LENGTH)  # type: ignore[attr-defined]
    assert [len(world.text("a", index)) for index in range(3)] == [5, 2, 5]
    assert done(world, "a").usage.prompt_tokens == 8
    assert done(world, "a").usage.completion_tokens == 12


def test_a_failed_sequence_ends_its_request_alone() -> None:
    world = World(64, 4)
    world.ask("bad", range(1, 9), 5, n=2)
    world.ask("good", range(20, 29), 3)
    plan = world.scheduler.next_step(0.0)
    assert plan is not None
    result = world.device.run(plan)
    bad = next(rows.seq for rows in plan.rows if rows.request == "bad")
    tokens = {seq: token for seq, token in result.tokens.items() if seq != bad}
    world.news += world.scheduler.absorb(StepResult(0, tokens, frozenset(), {bad: "NaN"}, 5.0), 0.01)
    world.run()
    assert done(world, "bad").error == "NaN"
    assert done(world, "good").error is None
    assert world.text("good") == alone(list(range(20, 29)), 0, 3)
    # What the failed step wrote is not shared: the same prompt computes again from where the cache is sure.
    world.ask("again", range(1, 9), 1)
    world.run()
    assert done(world, "again").receipt.cached_tokens == 0


def test_decode_goes_on_while_a_long_prompt_is_computed() -> None:
    world = World(128, 4, step_ms=20.0, context=300)
    world.ask("stream", range(1, 5), 40)
    for _ in range(3):
        world.step(8.0)
    world.ask("long", range(1000, 1200), 1)
    while not world.text("long"):
        plan = world.step(20.0)
        assert plan is not None
        assert any(rows.request == "stream" for rows in plan.rows)
        assert sum(len(rows.tokens) for rows in plan.rows) < 40
    world.run()


def test_predicts_a_later_start_the_longer_the_queue() -> None:
    world = World(64, 4, seqs=1)
    assert world.scheduler.load().predicted_start_s == 0.0
    world.ask("a", range(1, 5), 50)
    world.step()
    predictions = []
    for i in range(4):
        world.ask(f"w{i}", range(1, 9), 10)
        predictions.append(world.scheduler.load().predicted_start_s)
    assert predictions == sorted(predictions) and predictions[0] > 0.0
    load = world.scheduler.load()
    assert (load.queued_requests, load.queued_tokens, load.running) == (4, 32, 1)


def test_shutdown_and_abandon_leave_nobody_waiting() -> None:
    world = World(64, 4, seqs=1)
    for name in "ab":
        world.ask(name, range(1, 9), 9, n=2)
    world.step()
    news = world.scheduler.end_all("shutdown", 1.0)
    assert [item.receipt.limit_cause for item in news if isinstance(item, Done)] == ["shutdown", "shutdown"]
    assert world.scheduler.idle and world.cache.counts().leased == 0
    world.ask("c", range(1, 9), 9)
    world.ask("d", range(1, 9), 9)
    world.step()
    ends = world.scheduler.abandon("broken", 2.0)
    assert [(end.request, end.error) for end in ends] == [("c", "broken"), ("d", "broken")]
    assert world.scheduler.idle
    assert len(world.of(RequestDone)) == 4


def test_first_token_is_told_once() -> None:
    world = World(64, 4)
    world.ask("a", range(1, 9), 4, n=2)
    world.run()
    (fact,) = world.of(TokenFirst)
    assert fact.ttft_s == pytest.approx(0.01)  # type: ignore[attr-defined]
    timings = done(world, "a").timings
    assert (timings.prompt_n, timings.predicted_n, timings.cache_n) == (8, 8, 0)
    assert timings.prompt_ms == pytest.approx(10.0)


class WaitsAlways:
    """A pressure policy that never lets anyone go first."""

    name = "waits"
    codecs = ()

    def limit(self, total_blocks: int) -> int:
        return total_blocks

    def start_limit(self, total_blocks: int) -> int:
        return total_blocks

    def relieve(self, shortfall: Shortfall, running: Sequence[RunningView], load: Load) -> Wait:
        return Wait("for this test")


def test_waiting_for_room_is_done_in_the_queue() -> None:
    """Everyone waiting with blocks in hand would be a deadlock."""
    world = World(6, 4)
    world.scheduler.pressure = WaitsAlways()
    world.ask("a", range(1, 9), 9)
    world.ask("b", range(11, 17), 9)
    world.run()
    assert world.text("a") == alone(list(range(1, 9)), 0, 9)
    assert world.text("b") == alone(list(range(11, 17)), 0, 9)
    assert {fact.reason for fact in world.of(SequencePaused)} == {"for this test"}  # type: ignore[attr-defined]


def test_cancelled_while_its_step_runs() -> None:
    world = World(32, 4)
    world.ask("gone", range(1, 9), 5)
    world.ask("stays", range(20, 29), 3)
    plan = world.scheduler.next_step(0.0)
    assert plan is not None
    result = world.device.run(plan)
    (end,) = world.scheduler.cancel("gone", 0.0)
    assert end.usage.completion_tokens == 0
    world.news += world.scheduler.absorb(result, 0.01)
    world.run()
    assert world.text("gone") == []
    assert world.text("stays") == alone(list(range(20, 29)), 0, 3)


def test_waits_again_only_when_the_promise_is_kept_or_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence that waits for a prefix is matched again once per block that came, not in every step."""
    world = World(64, 4, batch=6)
    world.ask("a", range(1, 41), 2)
    world.ask("b", range(1, 41), 2)
    matches = []
    original = world.cache.match
    monkeypatch.setattr(world.cache, "match", lambda *ask, **more: matches.append(ask) or original(*ask, **more))
    for _ in range(16):
        world.step()
    assert 8 <= len(matches) <= 12
    world.run()
    assert done(world, "b").receipt.cached_tokens == 39


def test_what_cannot_be_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(64, 4)
    world.ask("a", range(1, 9), 2)
    monkeypatch.setattr(world.cache, "match", lambda *ask, **more: Match(0, (), (), None, LeaseId(99)))
    with pytest.raises(Corrupt, match="lease 99"):
        world.scheduler.next_step(0.0)
    world = World(64, 4)
    world.ask("a", range(1, 9), 2)
    monkeypatch.setattr(world.cache, "plan", lambda ask, now: Shortfall(3, 1, 1, "for this test"))
    with pytest.raises(Corrupt, match="nothing runs"):
        world.scheduler.next_step(0.0)


def test_without_the_canary_nothing_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(64, 4)
    world.scheduler.limits = replace(world.scheduler.limits, canary_steps=0)
    checks: list[int] = []
    world.ask("a", range(1, 9), 2)
    plan = world.scheduler.next_step(0.0)
    assert plan is not None
    monkeypatch.setattr(world.cache, "check", lambda: checks.append(1))
    world.scheduler.absorb(world.device.run(plan), 0.0)
    assert checks == []


def test_one_that_nothing_was_done_for_is_told() -> None:
    end = stillborn(Request("late", (1, 2, 3), SCOPE), "broken", 5.0, 64)
    assert (end.request, end.error, end.usage.prompt_tokens, end.receipt.computed_tokens) == ("late", "broken", 3, 3)


def test_misuse_is_refused() -> None:
    world = World(8, 4, context=64)
    with pytest.raises(ValueError, match="can never fit"):
        world.ask("wide", range(40), 1)
    with pytest.raises(ValueError, match="context leaves"):
        world.ask("long", range(64), 1)
    world.ask("a", [1], 1)
    with pytest.raises(ValueError, match="is alive"):
        world.ask("a", [1], 1)
    with pytest.raises(RuntimeError, match="not in flight"):
        world.scheduler.absorb(StepResult(0, {}, frozenset(), {}, 1.0), 0.0)
    assert world.scheduler.next_step(0.0) is not None
    with pytest.raises(RuntimeError, match="still in flight"):
        world.scheduler.next_step(0.0)
    assert world.scheduler.cancel("nobody", 0.0) == []
