"""The cache alone: what it means, its golden figures, and the bounds every policy keeps."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
from tests.sim.worlds import WORKLOADS

from tenure.policy import registry
from tenure.sim import instant, optimum
from tenure.sim.instant import InstantCache
from tenure.sim.trace import TraceRequest

SHARES = (0.005, 0.05, 0.3)
GOLDEN = {  # tokens found by lru, gittins and the optimum
    "conversations": [134400, 165696, 275072],
    "agents": [413888, 417600, 540096],
    "documents": [238144, 235584, 564736],
    "prompts": [68544, 65920, 241280],
    "scans": [0, 0, 15360],
    "shifts": [328960, 326080, 481536],
    "mixed": [780416, 819520, 1101248],
}


@cache
def trace(name: str) -> tuple[list[TraceRequest], int]:
    """A made-up trace and its unique blocks."""
    requests = list(WORKLOADS[name](400, 7))
    return requests, len({block for request in requests for block in request.blocks})


def ask(at: float, *blocks: int, tokens: int | None = None) -> TraceRequest:
    return TraceRequest(at, 4 * len(blocks) if tokens is None else tokens, 1, blocks, 4)


def rates(requests: Sequence[TraceRequest], blocks: int, policy: str = "lru") -> list[int]:
    cache = InstantCache(blocks, registry.eviction(policy))
    return [cache.serve(request) for request in requests]


def test_all_blocks_of_a_prompt_are_held_afterwards() -> None:
    assert rates([ask(0, 1, 2, 3), ask(1, 1, 2, 3), ask(2, 1, 2, 9)], 10) == [0, 3, 2]


def test_the_longest_idle_leaf_goes_first() -> None:
    prompts = [ask(0, 1, 2), ask(1, 5, 6), ask(2, 1, 2), ask(3, 7), ask(4, 5, 6), ask(5, 1, 2)]
    assert rates(prompts, 4) == [0, 0, 2, 0, 1, 1]


def test_a_prompt_longer_than_the_cache_keeps_its_beginning() -> None:
    assert rates([ask(0, 1, 2, 3, 4), ask(1, 1, 2, 3, 4)], 2) == [0, 2]


def test_the_order_of_use_does_not_depend_on_the_clocks_grain() -> None:
    assert rates([ask(0, 1, 2), ask(0, 5, 6), ask(0, 7), ask(0, 5, 6), ask(0, 1)], 4) == [0, 0, 0, 2, 1]


def test_times_that_go_back_count_as_now() -> None:
    assert rates([ask(9, 1, 2), ask(3, 5, 6), ask(1, 7), ask(0, 5, 6)], 4) == [0, 0, 0, 2]


def test_the_last_block_counts_what_it_holds() -> None:
    hits = instant.run([ask(0, 1, 2, tokens=6), ask(1, 1, 2, tokens=6)], 9, registry.eviction("lru"))
    assert (hits.requests, hits.tokens, hits.hits, hits.rate) == (2, 12, 6, 0.5)


def test_a_cache_of_no_blocks_hits_nothing() -> None:
    for policy in registry.EVICTION:
        assert rates([ask(0, 1), ask(1, 1)], 0, policy) == [0, 0]


def test_no_blocks_no_hits() -> None:
    hits = instant.run([TraceRequest(0, 100, 1)], 9, registry.eviction("gittins"))
    assert (hits.tokens, hits.hits) == (100, 0)


@pytest.mark.parametrize("name", WORKLOADS)
def test_no_policy_beats_the_optimum_and_gittins_does_no_harm(name: str) -> None:
    requests, unique = trace(name)
    future = optimum.Future(requests)
    longest = max(request.prompt_tokens for request in requests)  # in so short a trace one prompt more or less shows
    for share in SHARES:
        blocks = int(share * unique)
        best = optimum.run(future, blocks)
        found = {policy: instant.run(requests, blocks, registry.eviction(policy)) for policy in registry.EVICTION}
        assert all(hits.hits <= best.hits and hits.tokens == best.tokens for hits in found.values())
        assert found["gittins"].hits >= found["lru"].hits - 0.003 * best.tokens - 2 * longest


@pytest.mark.parametrize("name", WORKLOADS)
def test_golden(name: str) -> None:
    requests, unique = trace(name)
    blocks = int(0.02 * unique)
    found = [instant.run(requests, blocks, registry.eviction(policy)).hits for policy in ("lru", "gittins")]
    assert [*found, optimum.run(optimum.Future(requests), blocks).hits] == GOLDEN[name]
