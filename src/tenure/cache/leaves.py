"""Evictable leaves, and what windows have left of other blocks, in buckets of the policy's choosing; who goes next.

Each bucket is a binary heap by last use with lazy deletion: a leaf that is leased again only loses its ticket. Choosing
reads the heaps from their tops down and changes nothing, so a plan that is thrown away costs nothing to undo.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Hashable, Iterator
from heapq import heapify, heappop, heappush
from itertools import count, islice

from tenure.cache.radix import NO_BLOCK, Node, Part
from tenure.errors import Corrupt
from tenure.policy.base import BlockView, EvictionPolicy
from tenure.types import BlockId

Item = Node | Part
"""What can go: a leaf with all its blocks, or one block of a node that stays."""
_Entry = tuple[float, int, Item]
"""Last use, ticket, item; live while the item still has that ticket."""
Only = Callable[[Item], bool]
_EXPOSED = -1
"""Place in the heap of an entry that is not in it: a parent all of whose kids have been chosen."""


class _Bucket:
    __slots__ = ("entries", "live")

    def __init__(self) -> None:
        self.entries: list[_Entry] = []
        self.live = 0


class Leaves:
    """All that nobody leases and nothing else stands on."""

    def __init__(self, policy: EvictionPolicy, block_tokens: int) -> None:
        self._policy = policy
        self._block_tokens = block_tokens
        self._buckets: dict[Hashable, _Bucket] = {}
        self._tickets = count(1)

    def __len__(self) -> int:
        return sum(bucket.live for bucket in self._buckets.values())

    def __contains__(self, item: Item) -> bool:
        return item.ticket > 0

    def add(self, item: Item) -> None:
        """It became evictable."""
        item.bucket = self._policy.bucket(self.view(item))
        item.ticket = next(self._tickets)
        bucket = self._buckets.setdefault(item.bucket, _Bucket())
        bucket.live += 1
        heappush(bucket.entries, (item.last_used, item.ticket, item))

    def discard(self, item: Item) -> None:
        """It is evictable no more, if it was."""
        if not item.ticket:
            return
        item.ticket = 0
        bucket = self._buckets[item.bucket]
        bucket.live -= 1
        if not bucket.live:
            del self._buckets[item.bucket]
            return
        if len(bucket.entries) > 2 * bucket.live + 16:
            bucket.entries = [entry for entry in bucket.entries if entry[2].ticket == entry[1]]
            heapify(bucket.entries)
        while bucket.entries[0][2].ticket != bucket.entries[0][1]:  # so that asks needn't wade through the dead
            heappop(bucket.entries)

    def view(self, item: Item) -> BlockView:
        node = item if isinstance(item, Node) else item.node
        size = len(node.tokens)
        return BlockView(
            node.key,
            size,
            size < self._block_tokens,
            node.depth,
            node.scope_digest,
            item.last_used,
            node.created,
        )

    def check(self) -> None:
        """Verify that every bucket counts its live entries right and has the oldest one on top."""
        for name, bucket in self._buckets.items():
            live = [entry for entry in bucket.entries if entry[2].ticket == entry[1]]
            if len(live) != bucket.live or not live:
                raise Corrupt(f"bucket {name!r} counts {bucket.live} evictable leaves and holds {len(live)}")
            if min(live) != bucket.entries[0]:
                raise Corrupt(f"bucket {name!r} does not have its longest idle leaf on top")

    def choose(self, n: int, now: float, spared: Collection[Item]) -> list[Node]:
        """The next `n` leaves to go, each a leaf once those before it are gone; none of `spared`.

        Fewer come back only when nothing else is evictable.
        """
        return list(islice((item for item, _ in self.order(now, spared) if isinstance(item, Node)), n))

    def order(
        self, now: float, spared: Collection[Item], only: Only | None = None
    ) -> Iterator[tuple[Item, list[BlockId]]]:
        """Who goes, one after the other, with the blocks that makes free: each evictable once those before it are gone,
        none of `spared`, and with `only` none but these. Nothing may change meanwhile."""
        chosen = 0
        gone: dict[Node, int] = {}
        left: dict[Node, set[BlockId]] = {}
        """Nodes some of whose blocks have been chosen before them: those blocks; all of them once the node is gone."""
        passed: Container[Item] = spared if only is None else _Passed(spared, only)
        fronts = {name: _Front(bucket.entries, passed) for name, bucket in self._buckets.items()}
        ranks: dict[Hashable, tuple[float, float]] = {}

        def rank(name: Hashable) -> None:
            front = fronts[name]
            if front.frontier:
                ranks[name] = self._policy.rank(name, now - front.idle_since), front.idle_since
            else:
                ranks.pop(name, None)

        for name in fronts:
            rank(name)
        while ranks:
            name = min(ranks, key=ranks.__getitem__)
            item = fronts[name].pop()
            rank(name)
            chosen += 1
            if isinstance(item, Part):
                before = left.setdefault(item.node, set())
                if item.block not in before:
                    before.add(item.block)
                    yield item, [item.block]
                continue
            before = left.get(item, set())
            yield item, [block for block in item.blocks if block != NO_BLOCK and block not in before]
            if item.parts:
                left[item] = set(item.blocks)
            parent = item.parent
            if parent is None or parent.parent is None or parent in passed or parent.holds:
                continue
            gone[parent] = gone.get(parent, 0) + 1
            if gone[parent] == len(parent.kids):
                name = self._policy.bucket(self.view(parent))
                fronts.setdefault(name, _Front([], passed)).push((parent.last_used, -chosen, parent))
                rank(name)


class _Passed(Container[Item]):
    """What is passed over: the spared, and all but a sort."""

    def __init__(self, spared: Collection[Item], only: Only) -> None:
        self._spared = spared
        self._only = only

    def __contains__(self, node: object) -> bool:
        return node in self._spared or (isinstance(node, Node | Part) and not self._only(node))


class _Front:
    """Reads a heap in order without changing it: holds the entries whose parents in the heap were read already."""

    __slots__ = ("entries", "frontier", "spared")

    def __init__(self, entries: list[_Entry], spared: Container[Item]) -> None:
        self.entries = entries
        self.spared = spared
        self.frontier: list[tuple[float, int, Item, int]] = [(*entries[0], 0)] if entries else []
        self._settle()

    @property
    def idle_since(self) -> float:
        return self.frontier[0][0]

    def push(self, entry: _Entry) -> None:
        heappush(self.frontier, (*entry, _EXPOSED))

    def pop(self) -> Item:
        item = self._step()
        self._settle()
        return item

    def _settle(self) -> None:
        """Pass over entries that are dead or spared, so that the first one can be chosen."""
        while self.frontier:
            _, ticket, item, at = self.frontier[0]
            if (at == _EXPOSED or item.ticket == ticket) and item not in self.spared:
                return
            self._step()

    def _step(self) -> Item:
        _, _, item, at = heappop(self.frontier)
        if at != _EXPOSED:
            for below in (2 * at + 1, 2 * at + 2):
                if below < len(self.entries):
                    heappush(self.frontier, (*self.entries[below], below))
        return item
