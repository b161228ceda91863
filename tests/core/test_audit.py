"""The auditor finds every kind of damage, by name. Each case breaks one thing that only a bug could break."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from core.support import Bench
from tenure.cache import keys
from tenure.cache.kvcache import KvCache
from tenure.cache.lease import Held, LeaseId
from tenure.cache.radix import Node
from tenure.errors import Corrupt
from tenure.types import Key, Token


def node(cache: KvCache, *ids: Token) -> Node:
    return next(node for node in cache._index.nodes.values() if node.tokens == ids)


def held(cache: KvCache) -> Held:
    return next(iter(cache._leases.values()))


def relabel(n: Node, **values: object) -> None:
    for name, value in values.items():
        setattr(n, name, value)


def replace_lease(cache: KvCache, **values: object) -> None:
    for name, value in values.items():
        object.__setattr__(held(cache).lease, name, value)


def swap_kids(cache: KvCache) -> None:
    root = next(iter(cache._index.roots.values()))
    root.kids.reverse()
    root.heads.reverse()


def lease_also(cache: KvCache, extra: Node) -> None:
    """The lease holds a block without the one before it."""
    stands = held(cache)
    stands.nodes.append(extra)
    blocks = stands.lease.blocks
    replace_lease(cache, tables=((blocks[0], extra.blocks[0], *blocks[1:]),), committed_tokens=8)
    cache._windows.hold(extra, 1, [0], 0.0)


def hold_again(cache: KvCache) -> None:
    """A block goes on from the tail [2, 2], and the tail stays."""
    root = next(iter(cache._index.roots.values()))
    (block,) = cache._pool.take(1)
    cache._pool.unhold(block)
    cache._leaves.add(cache._index.attach(root, keys.chain(root.key, (2, 2, 2)), (2, 2, 2), [block], 0.0))


DAMAGE: dict[str, Callable[[KvCache], object]] = {
    "a root is not the root": lambda c: relabel(next(iter(c._index.roots.values())), key=Key(b"x")),
    "a root without kids": lambda c: c._index.roots.update({Key(b"x"): Node(None, Key(b"x"), (), [], 0.0)}),
    "heads are not its kids' tokens": lambda c: node(c, 1, 2, 3, 4).heads.append((9,)),
    "kids are not sorted": swap_kids,
    "does not know its parent": lambda c: relabel(node(c, 5, 6, 7, 8), depth=7),
    "not that of its chain": lambda c: relabel(node(c, 5, 6, 7, 8), key=Key(b"x")),
    "holds no tokens, or too many": lambda c: setattr(c._index, "block_tokens", 1),
    "a tail has kids": lambda c: setattr(c._index, "block_tokens", 5),
    "another scope than its root": lambda c: relabel(node(c, 5, 6, 7, 8), scope_digest=Key(b"x")),
    "reachable from the roots": lambda c: c._index.nodes.popitem(),
    "holds a block twice": lambda c: replace_lease(c, tables=(held(c).lease.blocks * 2,)),
    "not those of its nodes": lambda c: replace_lease(c, tables=(held(c).lease.blocks[::-1],)),
    "do not partition the ids": lambda c: c._pool._free.pop(),
    "a free block has references": lambda c: c._pool.refs.__setitem__(c._pool._free[0], 1),
    "references are not the sum": lambda c: c._pool.refs.__setitem__(node(c, 5, 6, 7, 8).blocks[0], 1),
    "count of leased blocks": lambda c: setattr(c._pool, "_leased", 0),
    "evictable leaves are not": lambda c: c._leaves.discard(node(c, 5, 6, 7, 8)),
    "stands behind an idle one": lambda c: lease_also(c, node(c, 5, 6, 7, 8)),
    "an idle tail is held again": hold_again,
    "bucket 'full' counts": lambda c: setattr(c._leaves._buckets["full"], "live", 2),
    "longest idle leaf on top": lambda c: c._leaves._buckets["tail"].entries.reverse(),
    "the promises are not": lambda c: c._promises.clear(),
    "filed under another id": lambda c: replace_lease(c, id=LeaseId(99)),
    "miscounts what it has committed": lambda c: replace_lease(c, committed_tokens=8),
    "are not one chain": lambda c: lease_also(c, node(c, 2, 2)),
    "stored − gone is": lambda c: c.ledger.stored.update(device=1),
}


@pytest.fixture
def cache() -> KvCache:
    """Two idle blocks in a chain, two idle tails, and a lease with one shared block and a promise."""
    bench = Bench()
    bench.visit([1, 2, 3, 4, 5, 6, 7, 8])
    bench.visit([2, 2])
    bench.visit([3, 3])
    lease = bench.start([4, 4, 4, 4, 5, 5, 5, 5]).lease
    bench.cache.commit(lease, [4, 4, 4, 4, 5, 5, 5, 5], 4, bench.tick())
    bench.cache.check()
    return bench.cache


@pytest.mark.parametrize("sentence", DAMAGE)
def test_damage_is_found_and_named(cache: KvCache, sentence: str) -> None:
    DAMAGE[sentence](cache)
    with pytest.raises(Corrupt, match=sentence):
        cache.check()


def test_blocks_that_leak_are_counted(cache: KvCache) -> None:
    assert cache.leaked() == 0
    cache._pool.take(2)
    assert cache.leaked() == 2
