"""Ghosts: what was held once is told from what never was, within a bound."""

from __future__ import annotations

from hashlib import blake2b

import pytest

from core.support import SCOPE, Bench
from tenure.cache import ghosts as module
from tenure.cache.ghosts import Ghosts
from tenure.cache.kvcache import KvCache
from tenure.events import FactLog
from tenure.policy.eviction import Lru
from tenure.spec import codec
from tenure.types import Fate, Key, Scope


def key(number: int) -> Key:
    return Key(blake2b(number.to_bytes(4, "big"), digest_size=16).digest())


def remember(ghosts: Ghosts, number: int, ids: tuple[int, ...], parent: int = 0, fate: Fate = Fate.DROPPED) -> None:
    ghosts.add(key(number), key(parent), ids, fate, "lru", float(number))


def test_finds_the_longest_head() -> None:
    ghosts = Ghosts(10)
    remember(ghosts, 1, (5, 6, 7, 8))
    remember(ghosts, 2, (5, 6, 9))
    assert ghosts.find(key(9), (5, 6)) is None
    assert ghosts.find(key(0), (4, 6)) is None
    found = ghosts.find(key(0), (5, 6, 7, 1))
    assert (
        found is not None and found[1] == 3 and (found[0].at, found[0].by, found[0].reason) == (1.0, "lru", "evicted")
    )
    ghosts.forget(key(1))
    ghosts.forget(key(1))
    found = ghosts.find(key(0), (5, 6, 7, 1))
    assert found is not None and found[1] == 2
    ghosts.forget(key(2))
    assert ghosts.find(key(0), (5, 6, 7, 1)) is None and len(ghosts) == 0


def test_says_why() -> None:
    ghosts = Ghosts(10)
    ghosts.lapse([key(1), key(2)])
    ghosts.forget(key(2))  # used again
    for number, fate in ((1, Fate.DROPPED), (2, Fate.DROPPED), (3, Fate.CORRUPT), (4, Fate.EXPIRED)):
        remember(ghosts, number, (number,), fate=fate)
    reasons = [ghosts.find(key(0), (number,)) for number in (1, 2, 3, 4)]
    assert [found[0].reason if found else None for found in reasons] == ["expired", "evicted", "corrupt", "expired"]


def test_is_bounded_and_keeps_a_mark_of_older_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FILTER_KEYS", 30)
    ghosts = Ghosts(5)
    ghosts.lapse(key(number) for number in range(100, 120))
    for number in range(1, 21):
        remember(ghosts, number, (number,))
    assert len(ghosts) == 5
    assert [ghosts.was_here(key(number)) for number in (1, 15, 16, 99)] == [True, True, False, False]
    for number in range(21, 81):
        remember(ghosts, number, (number,))
    assert ghosts.was_here(key(60)) and not ghosts.was_here(key(1))  # two generations later
    none = Ghosts(0)
    remember(none, 1, (1,))
    assert len(none) == 0 and none.was_here(key(1))


def test_the_cache_tells_what_is_lost() -> None:
    facts = FactLog()
    cache = KvCache(4, 4, codec=codec("bf16"), eviction=Lru(), facts=facts, ghosts=Ghosts(3))
    bench = Bench()
    bench.cache = cache
    told = list(range(1, 15))
    bench.visit(told)
    assert cache.lost(SCOPE, told, 13) == cache.lost(SCOPE, [9, 9, 9, 9, 9], 0)
    bench.visit(range(50, 62))
    assert cache.match(SCOPE, told).tokens == 4
    lost = cache.lost(SCOPE, told, 4)
    assert (lost.tokens, lost.older) == (9, False)  # the last of the 14 is computed for its logits
    assert lost.first is not None and (lost.first.by, lost.first.reason) == ("lru", "evicted")
    assert cache.lost(SCOPE, [*told[:6], 99, 99, 99], 4).tokens == 2
    assert cache.lost(Scope("m", tenant="t"), told, 0).tokens == 0
    bench.visit(range(70, 86))
    lost = cache.lost(SCOPE, told, 0)
    assert (lost.tokens, lost.first, lost.older) == (0, None, True)


def test_is_forgotten_when_it_is_held_again() -> None:
    cache = KvCache(4, 4, codec=codec("bf16"), eviction=Lru(), facts=FactLog(), ghosts=Ghosts(100))
    bench = Bench()
    bench.cache = cache
    bench.visit(range(1, 17))
    bench.visit(range(50, 66))
    assert len(cache.ghosts) == 4
    bench.visit(range(1, 17))
    assert len(cache.ghosts) == 4
    assert cache.ghosts.find(cache.match(SCOPE, list(range(1, 17))).keys[0], (5, 6, 7, 8)) is None
