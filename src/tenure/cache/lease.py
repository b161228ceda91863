"""A lease: a sequence's right to its blocks. Outside a frozen receipt, inside what stands behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NewType

from tenure.cache.radix import NO_BLOCK, Node
from tenure.types import BlockId, CopyOp, Key, Scope

LeaseId = NewType("LeaseId", int)


@dataclass(frozen=True, slots=True)
class Lease:
    """The blocks one sequence may read, and from `committed_tokens` on write.

    A receipt: `apply` and `commit` return its successor (same id), and the cache takes only the newest one.
    """

    id: LeaseId
    scope: Scope
    tables: tuple[tuple[BlockId, ...], ...]
    """Of each group of layers: block i holds tokens [i·B, (i+1)·B) of the sequence, or will once it is full and stored.
    NO_BLOCK where the group's window has left it."""
    reused_tokens: int
    """Tokens that were held when the lease began: the sequence computes from here on."""
    committed_tokens: int
    """Tokens in full blocks that are shareable: a multiple of B."""
    room: int
    """Tokens there are blocks for."""
    open: BlockId | None = None
    """Where the block that is not full yet is staged; None: where it is stored."""
    exact: bool = False
    """Its blocks are never recoded."""

    @property
    def blocks(self) -> tuple[BlockId, ...]:
        """Those of the first group of layers."""
        return self.tables[0]

    @property
    def held(self) -> int:
        """How many it holds of the first group of layers."""
        return len(self.blocks) - self.blocks.count(NO_BLOCK)


@dataclass(frozen=True, slots=True)
class Grant:
    """What applying a plan gave. The copies must be executed before the lease's blocks are read or written."""

    lease: Lease
    copies: tuple[CopyOp, ...]


class Held:
    """What a live lease holds: `nodes` for its shareable full blocks, a `tail` when its open block's head is one. Of
    the nodes before `seen[g]` it holds no block of group g."""

    __slots__ = ("lease", "nodes", "promised", "seen", "tail")

    def __init__(
        self, lease: Lease, nodes: list[Node], tail: Node | None, promised: set[Key], seen: Sequence[int]
    ) -> None:
        self.lease = lease
        self.nodes = nodes
        self.tail = tail
        self.promised = promised
        self.seen = list(seen)

    def shared(self) -> list[Node]:
        """The nodes it holds, in order; the rest of its blocks nobody else can see."""
        return [*self.nodes, self.tail] if self.tail else self.nodes

    def private(self) -> list[BlockId]:
        """Its blocks that nobody else can see."""
        lease = self.lease
        mine = [block for table in lease.tables for block in table[len(self.nodes) :]]
        if lease.open is not None:
            mine.append(lease.open)
        if self.tail:
            for block in self.tail.blocks:
                mine.remove(block)
        return mine
