"""Block ids and how many leases hold each: free, cached (held by nobody) or leased."""

from __future__ import annotations

from collections.abc import Iterable

from tenure.types import BlockId, PoolCounts

FREE = -1


class BlockPool:
    """Ids 0 … total − 1. The one who takes an id holds it; it is given back after the last hold ended."""

    def __init__(self, total: int) -> None:
        if total < 1:
            raise ValueError(f"a pool needs at least one block, not {total}")
        self.total = total
        self.refs = [FREE] * total
        """Leases per block, or FREE."""
        self._free = [BlockId(i) for i in range(total - 1, -1, -1)]  # a stack: the block freed last is warm
        self._leased = 0

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def cached(self) -> int:
        return self.total - len(self._free) - self._leased

    def counts(self) -> PoolCounts:
        return PoolCounts(self._leased, self.cached, self.free, self.total)

    def take(self, n: int) -> list[BlockId]:
        """`n` free blocks, each held once; ValueError when there are fewer."""
        if not 0 <= n <= len(self._free):
            raise ValueError(f"{n} blocks wanted, {len(self._free)} free")
        ids = [self._free.pop() for _ in range(n)]
        for block in ids:
            self.refs[block] = 1
        self._leased += n
        return ids

    def give(self, ids: Iterable[BlockId]) -> None:
        """Make blocks free that nobody holds."""
        for block in ids:
            if self.refs[block] != 0:
                raise ValueError(f"block {block} given while its count is {self.refs[block]}")
            self.refs[block] = FREE
            self._free.append(block)

    def hold(self, block: BlockId) -> bool:
        """Count one more lease; True when the block had none."""
        refs = self.refs[block]
        if refs < 0:
            raise ValueError(f"block {block} is free")
        self.refs[block] = refs + 1
        if refs:
            return False
        self._leased += 1
        return True

    def unhold(self, block: BlockId) -> bool:
        """Count one lease less; True when none is left."""
        refs = self.refs[block]
        if refs < 1:
            raise ValueError(f"block {block} is not held")
        self.refs[block] = refs - 1
        if refs > 1:
            return False
        self._leased -= 1
        return True

    def free_ids(self) -> list[BlockId]:
        """A copy of the free ids, for audits."""
        return list(self._free)
