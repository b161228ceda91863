"""What sequences see of the groups of layers that have windows: held while it is seen, after that evictable by itself.

A prefix can be reused where every group still has what its window sees from there; full layers need all of it.
"""

from __future__ import annotations

from collections.abc import Sequence

from tenure.cache.lease import Held
from tenure.cache.leaves import Item, Leaves
from tenure.cache.pool import BlockPool
from tenure.cache.radix import NO_BLOCK, Node, Part
from tenure.spec import UNBOUNDED
from tenure.types import BlockId

AHEAD = 16
"""Blocks that a prompt may be computed ahead of its windows in one go, when there is room."""


class Windows:
    """Holds and lets go of the blocks of nodes, and files what is idle. Block i of a sequence is node i of its path."""

    def __init__(self, pool: BlockPool, leaves: Leaves, block_tokens: int) -> None:
        self._pool = pool
        self._leaves = leaves
        self._size = block_tokens
        self._groups = pool.groups
        self._windowed = tuple(g for g, group in enumerate(pool.groups) if group.window is not None)

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._windowed)

    # ---- ask

    def seen(self, computed: int) -> tuple[int, ...]:
        """For each group the first block that the row at position `computed` sees."""
        return tuple(group.first(computed, self._size) for group in self._groups)

    def whole(self, path: Sequence[Node]) -> int:
        """How many of the first blocks of a path can be reused: behind them everything is there that windows see."""
        n = len(path)
        while n and self._windowed:
            firsts = self.seen(n * self._size)
            gaps = (i for g in self._windowed for i in range(firsts[g], n) if path[i].blocks[g] == NO_BLOCK)
            gap = max(gaps, default=None)
            if gap is None:
                break
            n = gap
        return n

    def spare(self, path: Sequence[Node], computed: int) -> tuple[set[Item], list[BlockId]]:
        """What of a path that goes on at `computed` must not go, and those of its blocks that nobody leases."""
        firsts = self.seen(computed)
        items: set[Item] = set(path)
        blocks: list[BlockId] = []
        for i, node in enumerate(path):
            items.update(part for part in node.parts if i >= firsts[part.group])
            blocks += [block for g, block in enumerate(node.blocks) if i >= firsts[g] and not self._pool.refs[block]]
        return items, blocks

    def tables(
        self, path: Sequence[Node], seen: Sequence[int], stored: Sequence[Sequence[BlockId]], tail: Node | None
    ) -> tuple[tuple[BlockId, ...], ...]:
        """The tables of a sequence that goes on behind a path and a tail, into blocks `stored` for each group."""
        behind = [tail] if tail else []
        return tuple(
            (*[NO_BLOCK] * min(first, len(path)), *(node.blocks[g] for node in (*path[first:], *behind)), *stored[g])
            for g, first in enumerate(seen)
        )

    # ---- do

    def watch(self, node: Node, now: float) -> None:
        """A node is new. Where it makes a fork, what windows see from there is likely to be needed again."""
        node.parts = tuple(Part(node, g) for g in self._windowed if g < len(node.blocks))
        above = node.parent
        if self._windowed and above and len(above.kids) == 2:
            back, most = 0, max(group.held(UNBOUNDED, self._size) for group in self._groups if group.window is not None)
            while above and back < most:
                for part in above.parts:
                    part.last_used = now
                self.refresh(above)
                above, back = above.parent, back + 1

    def hold(self, node: Node, i: int, firsts: Sequence[int], now: float) -> None:
        """One lease more has the node as its block i, and sees those of its blocks that are in its windows."""
        node.holds += 1
        for part in node.parts:
            if i >= firsts[part.group]:
                part.last_used = now
        for g, block in enumerate(node.blocks):
            if i >= firsts[g]:
                self._pool.hold(block)
        self.file(node)

    def unhold(self, node: Node, i: int, firsts: Sequence[int], now: float) -> None:
        """One lease less."""
        node.holds -= 1
        if not node.holds:
            node.last_used = now
        for g, block in enumerate(node.blocks):
            if i >= firsts[g]:
                self._pool.unhold(block)
        for part in node.parts:
            if i >= firsts[part.group]:
                part.last_used = now
        self.file(node)

    def slide(self, held: Held, computed: int) -> tuple[tuple[BlockId, ...], ...]:
        """Let go of what a sequence no longer sees, its next row at `computed`; its tables afterwards."""
        tables = list(held.lease.tables)
        firsts = self.seen(computed)
        for g in self._windowed:
            first = min(firsts[g], len(held.nodes))
            for node in held.nodes[held.seen[g] : first]:
                self._pool.unhold(node.blocks[g])
                self.file(node)
            if first > held.seen[g]:
                tables[g] = (*[NO_BLOCK] * first, *tables[g][first:])
                held.seen[g] = first
        return tuple(tables)

    def file(self, node: Node) -> None:
        """See to it that exactly what may go is filed as evictable: a leaf that nobody has, whole; else what is idle of
        its groups with windows."""
        leaf = not node.holds and not node.kids
        if leaf != (node in self._leaves):
            (self._leaves.add if leaf else self._leaves.discard)(node)
        for part in node.parts:
            block = part.block
            idle = not leaf and block != NO_BLOCK and self._pool.refs[block] == 0
            if idle != (part in self._leaves):
                (self._leaves.add if idle else self._leaves.discard)(part)

    def refresh(self, node: Node) -> None:
        """It was used, or is named otherwise: let it queue again where it is filed."""
        items: tuple[Item, ...] = (node, *node.parts)
        for item in items:
            if item in self._leaves:
                self._leaves.discard(item)
                self._leaves.add(item)
