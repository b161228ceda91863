from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from tenure.errors import ConfigError
from tenure.policy import registry
from tenure.policy.admission import BoundedQueue
from tenure.policy.base import (
    AdmissionAsk,
    Admit,
    BlockView,
    Load,
    Pause,
    Recode,
    Refuse,
    RunningView,
    Shortfall,
    TenantLoad,
    Wait,
)
from tenure.policy.eviction import Lru
from tenure.policy.pressure import MIN_PROGRESS, Ladder, PauseOne, Step, ladder
from tenure.types import Key, SeqId

LOAD = Load(
    running=0,
    waiting=0,
    queued_requests=0,
    queued_tokens=0,
    free_blocks=6,
    evictable_blocks=4,
    total_blocks=20,
    predicted_start_s=1.5,
    max_queued_requests=8,
    max_queued_tokens=300,
    context_limit=1000,
    block_tokens=32,
)
SHORT = Shortfall(3, 1, 0, "3 blocks wanted")


def ask(prompt: int, n: int = 1, max_tokens: int | None = 10) -> AdmissionAsk:
    return AdmissionAsk(prompt, n, max_tokens, 0)


def judge(question: AdmissionAsk, load: Load = LOAD) -> Admit | Wait | Refuse:
    return BoundedQueue().judge(question, load)


def view(seq: int, arrived: float, frees: int = 2, priority: int = 0) -> RunningView:
    return RunningView(SeqId(seq), f"r{seq}", priority, arrived, arrived, 100, frees, 100, 10)


def test_what_fits_now_is_admitted() -> None:
    assert judge(ask(9 * 32)) == Admit("10 blocks can be had")
    assert judge(ask(9 * 32 + 1)) == Wait("11 blocks needed, 6 free and 4 evictable")
    assert judge(ask(32), replace(LOAD, queued_requests=2, queued_tokens=64)) == Wait("behind 2 queued requests")


@pytest.mark.parametrize(("prompt", "fits"), [(999, True), (1000, False), (5000, False)])
def test_a_prompt_must_leave_room_in_the_context(prompt: int, fits: bool) -> None:
    verdict = judge(ask(prompt), replace(LOAD, total_blocks=1000))
    if fits:
        assert isinstance(verdict, Wait)
    else:
        assert isinstance(verdict, Refuse) and verdict.code == "context_length_exceeded"
        assert verdict.numbers == {"prompt_tokens": prompt, "requested_tokens": prompt + 10, "limit": 1000}


def test_requested_tokens_count_at_least_one_of_answer() -> None:
    verdict = judge(ask(1000, max_tokens=None), replace(LOAD, total_blocks=1000))
    assert isinstance(verdict, Refuse) and verdict.numbers["requested_tokens"] == 1001


@pytest.mark.parametrize(("prompt", "needed"), [(20 * 32 - 1, 20), (20 * 32, 21)])
def test_a_prompt_and_one_token_must_fit_the_pool(prompt: int, needed: int) -> None:
    verdict = judge(ask(prompt))
    if needed <= 20:
        assert isinstance(verdict, Wait)
    else:
        assert isinstance(verdict, Refuse) and verdict.code == "kv_capacity_exceeded"
        limits = {"prompt_tokens": prompt, "requested_tokens": prompt + 10, "limit": 640}
        assert verdict.numbers == {"needed_blocks": needed, "pool_blocks": 20, **limits}
        assert "21 KV blocks" in verdict.reason


def test_the_queue_is_bounded_in_requests() -> None:
    full = replace(LOAD, queued_requests=7, queued_tokens=7)
    assert isinstance(judge(ask(10), full), Wait)
    verdict = judge(ask(10, n=2), full)
    assert isinstance(verdict, Refuse) and verdict.code == "queue_full"
    assert verdict.numbers == {"queued_requests": 7, "limit": 8, "retry_after_s": 1.5}


def test_the_queue_is_bounded_in_tokens() -> None:
    full = replace(LOAD, queued_requests=1, queued_tokens=200, predicted_start_s=-1.0)
    assert isinstance(judge(ask(100), full), Wait)
    verdict = judge(ask(101), full)
    assert isinstance(verdict, Refuse)
    assert verdict.numbers == {"queued_tokens": 200, "limit": 300, "retry_after_s": 0.0}


def test_an_empty_queue_takes_any_request() -> None:
    assert isinstance(judge(ask(500, n=16)), Wait)


def paused(running: list[RunningView]) -> int:
    verdict = PauseOne().relieve(SHORT, running, LOAD)
    assert isinstance(verdict, Pause)
    return verdict.seq


def test_the_least_urgent_is_paused_first() -> None:
    assert paused([view(1, 5.0, priority=3), replace(view(2, 7.0), served=9.0)]) == 1


def test_then_whose_tenant_had_most() -> None:
    assert paused([replace(view(1, 5.0), served=9.0), replace(view(2, 7.0), recompute_tokens=0)]) == 1


def test_then_whoever_loses_least_for_the_room_it_gives() -> None:
    verdict = PauseOne().relieve(SHORT, [view(1, 5.0, frees=4), view(2, 7.0), view(3, 6.0)], LOAD)
    assert verdict == Pause(SeqId(1), "loses 100 tokens for 4 blocks: 3 blocks wanted")


def test_then_the_youngest() -> None:
    assert paused([view(1, 5.0), view(2, 7.0), view(3, 6.0)]) == 2


def test_a_pause_that_frees_nothing_helps_nobody() -> None:
    assert paused([view(1, 5.0), view(2, 7.0, frees=0)]) == 1
    assert paused([view(1, 5.0, frees=0), view(2, 7.0, frees=0)]) == 2


def test_who_was_paused_gets_some_way_before_it_happens_again() -> None:
    again = replace(view(2, 7.0), pauses=1)
    assert paused([view(1, 5.0), again]) == 1
    assert paused([view(1, 5.0), replace(again, progress_since_resume=MIN_PROGRESS)]) == 2
    assert paused([replace(view(1, 5.0), pauses=1), again]) == 2


@pytest.mark.parametrize("running", [[], [view(1, 5.0)]])
def test_the_only_one_is_never_paused(running: list[RunningView]) -> None:
    verdict = PauseOne().relieve(SHORT, running, LOAD)
    assert isinstance(verdict, Refuse)
    assert verdict.numbers == {"needed_blocks": 3, "pool_blocks": 20}


def test_lru_lets_tails_go_first() -> None:
    lru = Lru()
    full = BlockView(Key(b""), 32, False, 0, Key(b""), 0.0, 0.0)
    tail = replace(full, tokens=3, is_tail=True)
    assert lru.rank(lru.bucket(tail), 0.0) < lru.rank(lru.bucket(full), 1e9)


def tenant(**limits: int) -> Load:
    numbers = {"queued_requests": 1, "queued_tokens": 50, "max_queued_tokens": None, "max_blocks": None} | limits
    return replace(LOAD, tenants={"acme": TenantLoad(**numbers)})


def test_a_tenants_own_limits_bind() -> None:
    mine = replace(ask(32), tenant="acme")
    assert isinstance(judge(mine, tenant()), Admit)
    assert isinstance(judge(mine, tenant(max_blocks=2, max_queued_tokens=82)), Admit)
    verdict = judge(mine, tenant(max_blocks=1))
    assert isinstance(verdict, Refuse) and verdict.code == "kv_capacity_exceeded"
    limits = {"prompt_tokens": 32, "requested_tokens": 42, "limit": 32}
    assert verdict.numbers == {"needed_blocks": 2, "pool_blocks": 1, **limits}
    assert "this tenant may hold 1" in verdict.reason


def test_of_two_limits_the_tighter_is_named() -> None:
    """Who keeps to the limit that a refusal names is not refused by another one."""
    verdict = judge(ask(5000))
    assert isinstance(verdict, Refuse) and verdict.code == "kv_capacity_exceeded" and verdict.numbers["limit"] == 640
    verdict = judge(replace(ask(5000), tenant="acme"), tenant(max_blocks=50))
    assert isinstance(verdict, Refuse) and "the pool has 20" in verdict.reason


def test_a_tenants_queue_is_bounded_in_tokens() -> None:
    mine = replace(ask(32), tenant="acme")
    verdict = judge(mine, tenant(max_queued_tokens=81))
    assert isinstance(verdict, Refuse) and verdict.code == "queue_full"
    assert verdict.numbers == {"queued_tokens": 50, "limit": 81, "retry_after_s": 1.5}
    assert isinstance(judge(mine, tenant(max_queued_tokens=81, queued_requests=0)), Admit)
    assert isinstance(judge(ask(32), tenant(max_blocks=1)), Admit)


class Nothing:
    """A step that never knows what to do."""

    name = "nothing"
    codecs = ()

    def limit(self, total_blocks: int) -> int:
        return total_blocks

    def start_limit(self, total_blocks: int) -> int:
        return total_blocks

    def relieve(self, shortfall: Shortfall, running: Sequence[RunningView], load: Load) -> Wait:
        return Wait("for this test")


TWO = [view(1, 5.0), view(2, 7.0)]


def test_the_ladder_starts_where_it_says() -> None:
    assert [ladder("pause@95%").limit(blocks) for blocks in (6, 20, 100)] == [6, 19, 95]
    assert ladder("pause").limit(20) == 20
    assert ladder(" pause@50% ").name == "pause@50%"
    soft = Shortfall(1, 6, 4, "soft")  # 10 of 20 are leased
    assert isinstance(ladder("pause@55%").relieve(soft, TWO, LOAD), Wait)
    assert isinstance(ladder("pause@50%").relieve(soft, TWO, LOAD), Pause)
    assert isinstance(ladder("pause@55%").relieve(replace(soft, needed=11), TWO, LOAD), Pause)


def test_the_gentlest_step_that_knows_what_to_do_is_taken() -> None:
    two = Ladder("two", [Step(0.2, Nothing()), Step(0.9, PauseOne())])
    assert isinstance(two.relieve(Shortfall(1, 6, 4, "soft"), TWO, LOAD), Wait)
    assert isinstance(two.relieve(SHORT, TWO, LOAD), Pause)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "step '': is not of the form NAME@PERCENT%"),
        ("pause@0%", "above 0%"),
        ("pause@101%", "at most 100%"),
        ("pause@90", "step 'pause@90': is not of the form NAME@PERCENT%"),
        ("pause@90%, pause@80%", "thresholds must rise"),
        ("pause@90%,pause@90%", "thresholds must rise"),
        ("spill@90%", "step 'spill@90%': there is no step 'spill'"),
        ("pause:int8@90%", "step 'pause:int8@90%': 'pause' takes no codec"),
        ("recode:bf16@80%, pause@97%", "step 'recode:bf16@80%': 'bf16' is no codec to recode to"),
        ("recode@80%", "step 'recode@80%': it does not say to which codec"),
    ],
)
def test_the_ladder_says_what_is_wrong(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        registry.pressure(text)
    assert words in str(error.value) and error.value.param == "pressure"
    assert str(error.value).startswith("--pressure: step ")
    assert "steps are pause@PERCENT% and recode:CODEC@PERCENT% (CODEC is int8, k8v4 or int4)" in str(error.value)


@pytest.mark.parametrize("kind", ["eviction", "admission", "pressure"])
def test_policies_are_found_by_name(kind: str) -> None:
    make, known = getattr(registry, kind), getattr(registry, kind.upper())
    assert known
    for name in known:
        assert make(name).name == name
        assert make(name) is not make(name)
    names = "steps are pause@" if kind == "pressure" else f"known: {', '.join(sorted(known))}"
    with pytest.raises(ConfigError, match=f"{kind}.*'nope'.*{names}") as error:
        make("nope")
    assert error.value.param == kind


def test_who_has_blocks_to_recode_is_recoded_before_anyone_is_paused() -> None:
    steps = ladder("recode:int8@60%, pause@90%")
    assert steps.codecs == ("int8",)
    assert (steps.limit(100), steps.start_limit(100)) == (60, 90)
    short = Shortfall(1, 4, 0, "growing")
    load = replace(LOAD, free_blocks=30, evictable_blocks=0, total_blocks=100)
    able = [view(1, 1.0), replace(view(2, 0.0), recodable_blocks=5)]
    assert steps.relieve(short, able, load) == Recode(SeqId(2), "int8", 1, "growing")
    assert isinstance(steps.relieve(short, [view(1, 1.0), view(2, 0.0)], load), Wait)


def test_a_newcomer_has_no_more_recoded_than_it_is_over_the_threshold() -> None:
    steps = ladder("recode:int8@60%, pause@90%")
    able = [replace(view(1, 5.0), recodable_blocks=9), view(2, 7.0)]
    verdict = steps.relieve(Shortfall(8, 6, 4, "a newcomer wants 8"), able, LOAD)  # 10 of 20 are leased, 12 may be
    assert isinstance(verdict, Recode) and verdict.blocks == 6
