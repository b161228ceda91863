from __future__ import annotations

import pytest

from tenure.cache.pool import BlockPool
from tenure.types import BlockId, PoolCounts


def test_blocks_go_from_free_to_leased_to_cached_to_free() -> None:
    pool = BlockPool(3)
    a, b = pool.take(2)
    assert pool.counts() == PoolCounts(leased=2, cached=0, free=1, total=3)
    pool.hold(a)
    pool.unhold(a)
    assert pool.counts() == PoolCounts(leased=2, cached=0, free=1, total=3)
    pool.unhold(a)
    assert pool.counts() == PoolCounts(leased=1, cached=1, free=1, total=3)
    pool.hold(a)
    assert pool.counts() == PoolCounts(leased=2, cached=0, free=1, total=3)
    pool.unhold(a)
    pool.give([a])
    assert pool.counts() == PoolCounts(leased=1, cached=0, free=2, total=3)
    assert sorted([b, *pool.free_ids()]) == [0, 1, 2]


def test_the_block_freed_last_is_taken_first() -> None:
    pool = BlockPool(3)
    a, b = pool.take(2)
    for block in (a, b):
        pool.unhold(block)
        pool.give([block])
    assert pool.take(1) == [b]


@pytest.mark.parametrize("n", [-1, 3])
def test_no_more_than_free_can_be_taken(n: int) -> None:
    pool = BlockPool(2)
    with pytest.raises(ValueError, match="2 free"):
        pool.take(n)
    assert pool.free == 2


def test_misuse_is_refused() -> None:
    pool = BlockPool(2)
    (block,) = pool.take(1)
    with pytest.raises(ValueError, match="given while its count is 1"):
        pool.give([block])
    with pytest.raises(ValueError, match="is free"):
        pool.hold(BlockId(1))
    pool.unhold(block)
    with pytest.raises(ValueError, match="is not held"):
        pool.unhold(block)
    with pytest.raises(ValueError, match="at least one block"):
        BlockPool(0)
