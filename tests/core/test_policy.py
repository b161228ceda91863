from __future__ import annotations

from dataclasses import replace

import pytest

from tenure.errors import ConfigError
from tenure.policy import registry
from tenure.policy.admission import BoundedQueue
from tenure.policy.base import AdmissionAsk, Admit, BlockView, Load, Pause, Refuse, RunningView, Shortfall, Wait
from tenure.policy.eviction import Lru
from tenure.policy.pressure import PauseYoungest
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
    verdict = judge(ask(1000, max_tokens=None))
    assert isinstance(verdict, Refuse) and verdict.numbers["requested_tokens"] == 1001


@pytest.mark.parametrize(("prompt", "needed"), [(20 * 32 - 1, 20), (20 * 32, 21)])
def test_a_prompt_and_one_token_must_fit_the_pool(prompt: int, needed: int) -> None:
    verdict = judge(ask(prompt))
    if needed <= 20:
        assert isinstance(verdict, Wait)
    else:
        assert isinstance(verdict, Refuse) and verdict.code == "kv_capacity_exceeded"
        assert verdict.numbers == {"needed_blocks": needed, "pool_blocks": 20}
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


def test_the_youngest_is_paused() -> None:
    verdict = PauseYoungest().relieve(SHORT, [view(1, 5.0), view(2, 7.0), view(3, 6.0)], LOAD)
    assert verdict == Pause(SeqId(2), "came last, frees 2 blocks: 3 blocks wanted")


def test_the_least_urgent_is_paused_before_the_youngest() -> None:
    verdict = PauseYoungest().relieve(SHORT, [view(1, 5.0, priority=3), view(2, 7.0)], LOAD)
    assert isinstance(verdict, Pause) and verdict.seq == 1


def test_a_pause_that_frees_nothing_helps_nobody() -> None:
    verdict = PauseYoungest().relieve(SHORT, [view(1, 5.0), view(2, 7.0, frees=0)], LOAD)
    assert isinstance(verdict, Pause) and verdict.seq == 1
    verdict = PauseYoungest().relieve(SHORT, [view(1, 5.0, frees=0), view(2, 7.0, frees=0)], LOAD)
    assert isinstance(verdict, Pause) and verdict.seq == 2


@pytest.mark.parametrize("running", [[], [view(1, 5.0)]])
def test_the_only_one_is_never_paused(running: list[RunningView]) -> None:
    verdict = PauseYoungest().relieve(SHORT, running, LOAD)
    assert isinstance(verdict, Refuse)
    assert verdict.numbers == {"needed_blocks": 3, "pool_blocks": 20}


def test_lru_lets_tails_go_first() -> None:
    lru = Lru()
    full = BlockView(Key(b""), 32, False, 0, Key(b""), 0.0, 0.0)
    tail = replace(full, tokens=3, is_tail=True)
    assert lru.rank(lru.bucket(tail), 0.0) < lru.rank(lru.bucket(full), 1e9)


@pytest.mark.parametrize("kind", ["eviction", "admission", "pressure"])
def test_policies_are_found_by_name(kind: str) -> None:
    make, known = getattr(registry, kind), getattr(registry, kind.upper())
    assert known
    for name in known:
        assert make(name).name == name
        assert make(name) is not make(name)
    with pytest.raises(ConfigError, match=f"unknown {kind} policy 'nope'; known: {', '.join(sorted(known))}") as error:
        make("nope")
    assert error.value.param == kind
