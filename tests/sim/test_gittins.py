"""What a policy may rely on, and what the learned one may cost."""

from __future__ import annotations

from dataclasses import fields

import pytest
from tests.sim.worlds import conversations, scans

from tenure.events import BlockGone, BlockReused, BlockStored, SequenceEnded
from tenure.policy import registry
from tenure.policy.base import BlockView, EvictionPolicy
from tenure.policy.gittins import BINS, Gittins, age_bin
from tenure.policy.shadow import ShadowLru
from tenure.sim.instant import InstantCache
from tenure.types import BlockId, Fate, Key, SeqId


class Told(Gittins):
    """Notes the facts it was told."""

    def __init__(self) -> None:
        super().__init__()
        self.facts: list[object] = []

    def learn(self, fact: object) -> None:
        self.facts.append(fact)
        super().learn(fact)  # type: ignore[arg-type]


def key_of(name: int) -> Key:
    return Key(name.to_bytes(2, "big") * 8)


def view(key: int, *, tail: bool = False) -> BlockView:
    return BlockView(key_of(key), 1, tail, 3, Key(bytes(16)), 5.0, 1.0)


def store(policy: EvictionPolicy, at: float, *keys: int, output: int = 5) -> None:
    """A sequence of blocks begins, is computed and ends."""
    parent = None
    for name in keys:
        key = key_of(name)
        policy.learn(BlockStored(at, key, parent, BlockId(0), "device", "bf16", 32, ()))
        parent = key
    policy.learn(SequenceEnded(at, "r", SeqId(1), parent, 32 * len(keys), output))


def drop(policy: EvictionPolicy, at: float, name: int) -> None:
    key = key_of(name)
    policy.learn(BlockGone(at, key, BlockId(0), "device", Fate.DROPPED, "x", "room", 32, 1.0, 1.0))


@pytest.mark.parametrize("name", registry.EVICTION)
def test_asking_changes_nothing(name: str) -> None:
    policy = registry.eviction(name)
    store(policy, 1.0, 1, 2, 3)
    for tail in (False, True):
        for key in (1, 2, 3, 9):
            first = policy.bucket(view(key, tail=tail))
            ranks = [policy.rank(first, age) for age in (0.0, 0.4, 3.0, 1e9)]
            assert policy.bucket(view(key, tail=tail)) == first
            assert [policy.rank(first, age) for age in (0.0, 0.4, 3.0, 1e9)] == ranks
            assert hash(first) == hash(policy.bucket(view(key, tail=tail)))


def test_every_field_it_reads_is_written_when_simulated() -> None:
    policy = Told()
    cache = InstantCache(200, policy)
    for request in conversations(300):
        cache.serve(request)
    for kind, read in {
        BlockStored: {"key", "parent", "tier", "tokens"},
        BlockReused: {"key", "tier"},
        BlockGone: {"key", "tier", "fate"},
        SequenceEnded: {"tip", "prompt_tokens", "output_tokens"},
    }.items():
        told = [fact for fact in policy.facts if type(fact) is kind]
        assert told
        assert read <= {item.name for item in fields(kind)}  # type: ignore[arg-type]
        for name in read:
            assert any(getattr(fact, name) not in (None, "", 0) for fact in told), (kind.__name__, name)


def test_ages_fall_into_their_bins() -> None:
    assert [age_bin(age) for age in (0.0, 0.49, 0.5, 0.674, 0.676)] == [0, 0, 1, 1, 2]
    assert age_bin(1e30) == BINS - 1
    assert all(age_bin(1.35**n) <= age_bin(1.35 ** (n + 1)) for n in range(100))


def test_what_it_remembers_is_bounded() -> None:
    policy = Gittins(ghosts=50)
    cache = InstantCache(100, policy)
    for request in conversations(400):
        cache.serve(request)
        assert policy.remembered <= 100 + 50
    assert policy.remembered == 150


def test_it_learns_which_class_comes_back() -> None:
    policy = Gittins()
    for number in range(200):  # long answers are followed up at once, short ones never
        at = 100.0 * number
        store(policy, at, 1, 2, output=500)
        policy.learn(BlockReused(at + 5, key_of(1), "device", 32, 5.0))
        policy.learn(BlockReused(at + 5, key_of(2), "device", 32, 5.0))
        drop(policy, at + 6, 2)
        drop(policy, at + 6, 1)
        name = 3 + number % 200
        store(policy, at + 7, name, output=1)
        drop(policy, at + 8, name)
    store(policy, 1e6, 1, 2, output=500)
    store(policy, 1e6, 250, output=1)
    assert policy.rank(policy.bucket(view(2)), 1.0) > policy.rank(policy.bucket(view(250)), 1.0)


def test_it_learns_that_much_new_text_does_not_come_back() -> None:
    policy = Gittins()
    for number in range(200):  # short prompts are asked again at once, long ones never
        at, first = 100.0 * number, 1000 + 100 * number
        short, long = range(first, first + 2), range(first + 2, first + 82)
        store(policy, at, *short)
        for name in short:
            policy.learn(BlockReused(at + 5, key_of(name), "device", 32, 5.0))
        store(policy, at + 7, *long)
        for name in (*short[::-1], *long[::-1]):
            drop(policy, at + 8, name)
    store(policy, 1e6, 1, 2)
    store(policy, 1e6, *range(3, 83))
    few, many = policy.bucket(view(2)), policy.bucket(view(82))
    assert few != many
    assert policy.rank(few, 1.0) > policy.rank(many, 1.0)


def test_a_class_that_is_new_ranks_as_its_coarse_one() -> None:
    policy = Gittins()
    for number in range(60):
        store(policy, 10.0 * number, 1 + number)
    assert policy.rank(policy.bucket(view(60)), 1.0) < 1e5
    store(policy, 700.0, *range(100, 200))
    new, known = policy.bucket(view(199)), policy.bucket(view(60))
    assert new != known
    assert policy.rank(new, 1.0) == policy.rank(known, 1.0)


def test_facts_of_other_tiers_and_strangers_teach_nothing() -> None:
    policy = Gittins()
    policy.learn(BlockReused(1.0, Key(b"x" * 16), "device", 32, 1.0))
    policy.learn(BlockStored(1.0, Key(b"y" * 16), None, BlockId(0), "disk", "bf16", 32, ()))
    policy.learn(SequenceEnded(1.0, "r", SeqId(1), Key(b"z" * 16), 1, 1))
    drop(policy, 2.0, 1)
    assert policy.remembered == 0


def test_the_shadow_is_lru() -> None:
    """It holds what a real LRU cache of the same size holds, hit by hit."""
    real, shadow = InstantCache(150, registry.eviction("lru")), ShadowLru()
    shadow.full(150)
    for request in conversations(300):
        held = real.serve(request)
        before = shadow.hits
        keys = [Key(block.to_bytes(16, "little")) for block in request.blocks]
        shadow.use([(key, 1, False) for key in reversed(keys)])
        assert shadow.hits - before == held
        assert len(shadow) <= 150


def test_it_follows_lru_while_that_does_better() -> None:
    shadow = ShadowLru()
    shadow.full(10)
    path = [(key_of(n), 32, False) for n in range(5)]
    shadow.use(path)
    assert not shadow.better
    shadow.use(path)
    assert shadow.better
    for _ in range(3):
        shadow.use([(key, tokens, True) for key, tokens, _ in path])
    assert shadow.better
    for n in range(10, 200):
        shadow.use([(key_of(n), 32, True)])
    assert not shadow.better


def test_it_gains_where_lru_is_helpless() -> None:
    requests = list(scans(2000, 3))
    unique = len({block for request in requests for block in request.blocks})
    found = []
    for name in ("lru", "gittins"):
        cache = InstantCache(unique // 2, registry.eviction(name))
        for request in requests:
            cache.serve(request)
        found.append(cache.hits.rate)
    assert found[0] == 0.0
    assert found[1] > 0.02
