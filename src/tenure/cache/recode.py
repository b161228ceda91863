"""Storing full blocks again in fewer bits, instead of dropping them or pausing who leases them."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass, replace

from tenure.cache.lease import Held, Lease, LeaseId
from tenure.cache.leaves import Leaves
from tenure.cache.plan import Shortfall
from tenure.cache.pool import STORED, BlockPool, SlabPool
from tenure.cache.radix import Node, RadixIndex
from tenure.types import BlockId, Key, RecodeOp


@dataclass(frozen=True, slots=True)
class RecodePlan:
    """What `apply_recode` would do, as data; good for one `epoch` of the cache."""

    epoch: int
    kind: int
    """The kind the blocks are going to be of."""
    keys: tuple[Key, ...]
    victims: tuple[Key, ...]
    """Idle blocks that go, in order, to make room for it."""


@dataclass(frozen=True, slots=True)
class Recoded:
    """What applying a plan gave: the newest receipt of each lease whose blocks moved. The ops come before all else that
    reads or writes blocks."""

    leases: tuple[Lease, ...]
    ops: tuple[RecodeOp, ...]


class Recoder:
    """Chooses blocks and moves them; whoever leases them goes on, with a new receipt.

    What is recoded, and all that stands on it, changes its lineage: the names change, and who asks for exact blocks no
    longer finds them. A block is left alone while a lease that must be exact holds it, when it belongs to all tenants,
    or when it, or one behind it, is there in both lineages.
    """

    def __init__(
        self,
        pool: BlockPool,
        index: RadixIndex,
        leaves: Leaves,
        leases: MutableMapping[LeaseId, Held],
        promises: MutableMapping[Key, LeaseId],
    ) -> None:
        self._pool = pool
        self._index = index
        self._leaves = leaves
        self._leases = leases
        self._promises = promises

    def able(self, held: Held) -> int:
        """Blocks of a lease that are stored as they came; none when they must stay exact."""
        if len(self._pool.codecs) - 1 <= (self._pool.staging != STORED) or held.lease.exact:
            return 0
        return sum(self._pool.kind(node.block) == STORED for node in held.nodes)

    def plan(self, epoch: int, held: Held, codec: str, n: int, now: float) -> RecodePlan | Shortfall:
        """At least as many blocks as fill a slab in the new form, and `n`: the oldest first. A Shortfall when the lease
        has none that may be recoded, or there is no room to write them."""
        pool = self._pool
        if not isinstance(pool, SlabPool) or codec not in pool.codecs[1:]:
            return Shortfall(n, 0, 0, f"this cache has no blocks of {codec}")
        kind = pool.codecs.index(codec)
        exact = {node for other in self._leases.values() if other.lease.exact for node in other.nodes}
        tree = held.nodes[-1].scope_digest if held.nodes else None
        chosen: list[Node] = []
        for node in held.nodes:
            if pool.kind(node.block) != STORED or node in exact or node.scope_digest != tree:
                continue
            if not self._index.recodable(node):
                break
            chosen.append(node)
            if len(chosen) >= max(n, pool.layout.slots[kind]):
                break
        if not chosen:
            return Shortfall(n, 0, 0, f"lease {held.lease.id} has no block that may be stored in {codec}")
        slabs = -(-max(0, len(chosen) - pool.free_of[kind]) // pool.layout.slots[kind])
        if len(chosen) <= slabs * pool.layout.slots[STORED]:
            return Shortfall(n, 0, 0, f"{len(chosen)} blocks in {codec} would free nothing")
        room = pool.room_for(kind, len(chosen))
        victims: list[Key] = []
        for node in self._leaves.order(now, ()):
            if room.met:
                break
            room.gone(node.block)
            victims.append(node.key)
        if not room.met:
            return Shortfall(n, 0, 0, f"no room for {len(chosen)} blocks of {codec}")
        return RecodePlan(epoch, kind, tuple(node.key for node in chosen), tuple(victims))

    def apply(self, plan: RecodePlan) -> tuple[Recoded, list[tuple[Node, Key, BlockId]]]:
        """Once the victims are gone. The blocks, and those whose name changed: with the key and the place they had."""
        nodes = [self._index.nodes[key] for key in plan.keys]
        moved: dict[Node, BlockId] = {}
        told: dict[Node, tuple[Key, BlockId]] = {}
        for node, block in zip(nodes, self._pool.take(len(nodes), plan.kind), strict=True):
            old = moved[node] = node.block
            told.setdefault(node, (node.key, old))
            for renamed, was in self._index.recode(node, block):
                told.setdefault(renamed, (was, renamed.block))
            for _ in range(self._pool.refs[old] - 1):
                self._pool.hold(block)
            while self._pool.refs[old]:
                self._pool.unhold(old)
        ops = tuple(RecodeOp(old, node.block) for node, old in moved.items())
        self._pool.give(moved.values())
        for node in told:
            if node in self._leaves:  # its place in the order of eviction may depend on its name
                self._leaves.discard(node)
                self._leaves.add(node)
        leases = tuple(self._renew(held) for held in self._leases.values() if not moved.keys().isdisjoint(held.nodes))
        return Recoded(leases, ops), [(node, key, block) for node, (key, block) in told.items()]

    def _renew(self, held: Held) -> Lease:
        """The receipt of a lease whose blocks moved; what it promised under exact names it no longer computes."""
        blocks = [node.block for node in held.nodes]
        held.lease = replace(held.lease, blocks=(*blocks, *held.lease.blocks[len(blocks) :]))
        if held.nodes[-1].recoded:
            for key in held.promised:
                del self._promises[key]
            held.promised.clear()
        return held.lease
