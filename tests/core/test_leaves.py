"""Choosing victims under any policy: the contract of EvictionPolicy, against a search through all leaves."""

from __future__ import annotations

from collections.abc import Hashable
from random import Random

import pytest

from core.support import SCOPE, B, Bench
from tenure.cache.lease import Lease
from tenure.cache.plan import Plan, Shortfall
from tenure.cache.radix import Node
from tenure.events import BlockGone, BlockReused, BlockStored, Fact
from tenure.policy import registry
from tenure.policy.base import BlockView, EvictionPolicy


class ByDepth:
    """Many buckets, ranks that change with age: what LRU does not exercise."""

    name = "by_depth"

    def __init__(self) -> None:
        self.learned: list[Fact] = []

    def learn(self, fact: Fact) -> None:
        self.learned.append(fact)

    def bucket(self, view: BlockView) -> Hashable:
        return view.depth, view.tokens

    def rank(self, bucket: Hashable, age_s: float) -> float:
        return hash(bucket) % 7 - (age_s if hash(bucket) % 2 else 0.5 * age_s)


class OneBucket(ByDepth):
    name = "one_bucket"

    def bucket(self, view: BlockView) -> Hashable:
        return None

    def rank(self, bucket: Hashable, age_s: float) -> float:
        return 0.0


POLICIES = [*registry.EVICTION.values(), ByDepth, OneBucket]


def work(bench: Bench, random: Random, steps: int) -> None:
    """Conversations come, go on, fork and go."""
    past: list[list[int]] = [[]]
    live: list[tuple[Lease, list[int]]] = []
    for _ in range(steps):
        before = random.choice(past)
        ids = [*before[: random.randint(0, len(before))], *(random.randint(0, 2) for _ in range(random.randint(1, 9)))]
        while len(live) > 3 or isinstance(bench.plan(ids), Shortfall):
            lease, before = live.pop(0)
            bench.release(lease, before)
            past.append(before)
        live.append((bench.start(ids).lease, ids))
    bench.cache.check()


def search(bench: Bench, n: int, now: float) -> list[Node]:
    """The contract in the plainest words: of the longest idle leaves of all buckets, the one with the lowest rank."""
    cache, policy = bench.cache, bench.policy
    left = {node for node in cache._index.nodes.values() if not node.holds}
    chosen: list[Node] = []
    for _ in range(n):
        parents = {node.parent for node in left}
        oldest: dict[Hashable, Node] = {}
        for node in left - parents:
            name = policy.bucket(cache._leaves.view(node))
            if name not in oldest or node.last_used < oldest[name].last_used:
                oldest[name] = node
        best = min(oldest.values(), key=lambda leaf: (rank_of(bench, leaf, now), leaf.last_used))
        chosen.append(best)
        left.discard(best)
    return chosen


def rank_of(bench: Bench, leaf: Node, now: float) -> float:
    return bench.policy.rank(bench.policy.bucket(bench.cache._leaves.view(leaf)), now - leaf.last_used)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(8))
def test_victims_are_chosen_as_the_contract_says(policy: type[EvictionPolicy], seed: int) -> None:
    bench = Bench(blocks=60, policy=policy())
    work(bench, Random(seed), 150)
    now = bench.tick()
    idle = bench.cache.counts().cached
    assert idle > 5
    expected = search(bench, idle, now)
    chosen = bench.cache._leaves.choose(idle, now, frozenset())
    assert [(rank_of(bench, a, now), a.last_used) for a in chosen] == [
        (rank_of(bench, b, now), b.last_used) for b in expected
    ]
    assert len(set(chosen)) == idle
    for at, node in enumerate(chosen):
        assert not bench.cache._pool.refs[node.blocks[0]]
        assert set(node.kids) <= set(chosen[:at])
    assert bench.cache._leaves.choose(idle + 5, now, frozenset()) == chosen


@pytest.mark.parametrize("policy", POLICIES)
def test_the_spared_and_all_before_them_stay(policy: type[EvictionPolicy]) -> None:
    bench = Bench(blocks=60, policy=policy())
    work(bench, Random(3), 150)
    leaves = [node for node in bench.cache._index.nodes.values() if node in bench.cache._leaves]
    spared = frozenset(leaves[::3])
    chosen = bench.cache._leaves.choose(60, bench.tick(), spared)
    kept = set(spared)
    for node in spared:
        while node.parent is not None:
            kept.add(node := node.parent)
    assert chosen and not kept & set(chosen)


def test_policies_learn_every_fact_of_the_cache() -> None:
    policy = ByDepth()
    bench = Bench(blocks=8, policy=policy)
    work(bench, Random(1), 60)
    assert {type(fact) for fact in policy.learned} >= {BlockStored, BlockReused, BlockGone}
    assert policy.learned == bench.facts.since(0)[0]


def test_a_policy_sees_what_it_is_told() -> None:
    seen: list[BlockView] = []

    class Watch(OneBucket):
        def bucket(self, view: BlockView) -> Hashable:
            seen.append(view)
            return None

    bench = Bench(policy=Watch())
    bench.visit(list(range(B + 2)))  # starts at 1, ends at 2
    (view,) = seen
    assert (view.tokens, view.is_tail, view.depth, view.created, view.last_used) == (2, True, 1, 2.0, 2.0)
    again = bench.start([*range(B + 2), 7], scope=SCOPE).lease
    bench.release(again, [*range(B + 2), 7], B + 2)
    assert seen[-1] == BlockView(view.key, 2, True, 1, view.scope_digest, 4.0, 2.0)


def test_the_dead_do_not_pile_up() -> None:
    bench = Bench(blocks=40)
    for first in range(30):
        bench.visit([first] * B)
    for _ in range(300):
        plan = bench.plan([29] * B + [1])
        assert isinstance(plan, Plan)
        lease = bench.cache.apply(plan, bench.tick()).lease
        bench.release(lease, [29] * B + [1], B)
    assert len(bench.cache._leaves) == 30
    assert len(bench.cache._leaves._buckets["full"].entries) <= 2 * 30 + 17
    bench.cache.check()
