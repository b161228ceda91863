"""Storing full blocks again in fewer bits, instead of dropping them or pausing who leases them."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass, replace

from tenure.cache.lease import Held, Lease, LeaseId
from tenure.cache.plan import Goes, Shortfall
from tenure.cache.pool import STORED, BlockPool, SlabPool
from tenure.cache.radix import NO_BLOCK, Node, RadixIndex
from tenure.cache.supply import Supply
from tenure.cache.windows import Windows
from tenure.types import BlockId, Key, RecodeOp


@dataclass(frozen=True, slots=True)
class RecodePlan:
    """What `apply_recode` would do, as data; good for one `epoch` of the cache."""

    epoch: int
    kind: int
    """The kind the blocks are going to be of."""
    keys: tuple[Key, ...]
    goes: Goes
    """Who makes room for it."""


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
        supply: Supply,
        windows: Windows,
        leases: MutableMapping[LeaseId, Held],
        promises: MutableMapping[Key, LeaseId],
    ) -> None:
        self._pool = pool
        self._index = index
        self._supply = supply
        self._windows = windows
        self._leases = leases
        self._promises = promises
        firsts = pool.codecs[: len(pool.codecs) - len(pool.groups) + 1]
        self._codecs = {name: kind for kind, name in enumerate(firsts) if kind not in (STORED, pool.staging)}
        """Those that blocks can be recoded to, and the kind of such blocks."""

    def able(self, held: Held) -> int:
        """Blocks of a lease that are stored as they came; none when they must stay exact."""
        if not self._codecs or held.lease.exact:
            return 0
        return sum(self._is_as_it_came(node) for node in held.nodes[held.seen[0] :])

    def plan(self, epoch: int, held: Held, codec: str, n: int, now: float) -> RecodePlan | Shortfall:
        """At least as many blocks as fill a slab in the new form, and `n`: the oldest first. A Shortfall when the lease
        has none that may be recoded, or there is no room to write them."""
        pool = self._pool
        kind = self._codecs.get(codec)
        if not isinstance(pool, SlabPool) or kind is None:
            return Shortfall(n, 0, 0, f"this cache has no blocks of {codec}")
        exact = {node for other in self._leases.values() if other.lease.exact for node in other.nodes}
        tree = held.nodes[-1].scope_digest if held.nodes else None
        chosen: list[Node] = []
        for node in held.nodes[held.seen[0] :]:
            if not self._is_as_it_came(node) or node in exact or node.scope_digest != tree:
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
        room = pool.room([(kind, len(chosen))])
        goes = self._supply.goes_for(room, now)
        if not room.met:
            return Shortfall(n, 0, 0, f"no room for {len(chosen)} blocks of {codec}")
        return RecodePlan(epoch, kind, tuple(node.key for node in chosen), goes)

    def _is_as_it_came(self, node: Node) -> bool:
        return node.blocks[0] != NO_BLOCK and self._pool.kind(node.blocks[0]) == STORED

    def apply(self, plan: RecodePlan) -> tuple[Recoded, list[tuple[Node, Key, BlockId]]]:
        """Once the victims are gone. The blocks, and those whose name changed: with the key and the place they had."""
        nodes = [self._index.nodes[key] for key in plan.keys]
        moved: dict[Node, BlockId] = {}
        told: dict[Node, tuple[Key, BlockId]] = {}
        for node, block in zip(nodes, self._pool.take(len(nodes), plan.kind), strict=True):
            old = moved[node] = node.blocks[0]
            told.setdefault(node, (node.key, old))
            for renamed, was in self._index.recode(node, block):
                told.setdefault(renamed, (was, renamed.blocks[0]))
            for _ in range(self._pool.refs[old] - 1):
                self._pool.hold(block)
            while self._pool.refs[old]:
                self._pool.unhold(old)
        ops = tuple(RecodeOp(old, node.blocks[0]) for node, old in moved.items())
        self._pool.give(moved.values())
        for node in told:
            self._windows.refresh(node)  # its place in the order of eviction may depend on its name
        leases = tuple(self._renew(held) for held in self._leases.values() if not moved.keys().isdisjoint(held.nodes))
        return Recoded(leases, ops), [(node, key, block) for node, (key, block) in told.items()]

    def _renew(self, held: Held) -> Lease:
        """The receipt of a lease whose blocks moved; what it promised under exact names it no longer computes."""
        first, *others = held.lease.tables
        seen = held.seen[0]
        blocks = [node.blocks[0] for node in held.nodes[seen:]]
        held.lease = replace(held.lease, tables=((*first[:seen], *blocks, *first[len(held.nodes) :]), *others))
        if held.nodes[-1].recoded:
            for key in held.promised:
                del self._promises[key]
            held.promised.clear()
        return held.lease
