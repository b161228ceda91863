"""The auditor: every invariant of the cache, each with the sentence that tells which one broke."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import pairwise

from tenure.cache import keys
from tenure.cache.lease import Held, LeaseId
from tenure.cache.leaves import Leaves
from tenure.cache.ledger import Ledger
from tenure.cache.pool import FREE, BlockPool
from tenure.cache.radix import NO_BLOCK, Node, RadixIndex, Usable
from tenure.errors import Corrupt
from tenure.types import Key


def require(holds: bool, sentence: str) -> None:
    if not holds:
        raise Corrupt(sentence)


def check_index(index: RadixIndex) -> None:
    """Resident blocks are reachable, sorted, and named by what they hold."""
    seen: dict[Key, Node] = {}
    starts = 0
    for key, root in index.roots.items():
        require(root.key == key and root.parent is None, "a root is not the root its key names")
        require(bool(root.kids), "a root without kids is kept")
        stack = [root]
        while stack:
            node = stack.pop()
            require([kid.tokens for kid in node.kids] == node.heads, "a node's heads are not its kids' tokens")
            order = [(kid.tokens, kid.recoded) for kid in node.kids]
            require(all(a < b for a, b in pairwise(order)), "kids are not sorted")
            for kid in node.kids:
                require(kid.parent is node and kid.depth == node.depth + 1, "a kid does not know its parent")
                above = node.key if kid.recoded == node.recoded else keys.recoded(node.key)
                require(kid.key == keys.chain(above, kid.tokens), "a key is not that of its chain and tokens")
                require(kid.recoded or not node.recoded, "an exact block stands on a recoded one")
                starts += kid.recoded and not node.recoded
                require(0 < len(kid.tokens) <= index.block_tokens, "a block holds no tokens, or too many")
                require(len(kid.tokens) == index.block_tokens or not kid.kids, "a tail has kids")
                require(kid.scope_digest == key, "a block lies in another scope than its root")
                seen[kid.key] = kid
            stack.extend(node.kids)
    require(starts == index.recoded, "the recoded chains are miscounted")
    require(seen == index.nodes, "the blocks reachable from the roots are not the resident ones")


def check_pool(pool: BlockPool, index: RadixIndex, leases: Iterable[Held]) -> None:
    """Ids partition into free, cached and leased, and references are the sum of the leases."""
    refs: Counter[int] = Counter()
    private: list[int] = []
    for held in leases:
        shared = held.shared()
        lease = held.lease
        blocks = [block for table in lease.tables for block in table if block != NO_BLOCK]
        blocks += [] if lease.open is None else [lease.open]
        refs.update(blocks)
        require(len(set(blocks)) == len(blocks), "a lease holds a block twice")
        known = len(shared) if lease.open is None else len(held.nodes)
        for group, (table, seen) in enumerate(zip(lease.tables, held.seen, strict=True)):
            own = [NO_BLOCK if i < seen else node.blocks[group] for i, node in enumerate(shared[:known])]
            require(list(table[:known]) == own, "a lease's blocks are not those of its nodes")
            next_row = max(lease.committed_tokens, lease.reused_tokens)
            first = pool.groups[group].first(next_row, index.block_tokens)
            require(seen <= first, "a lease has let go of a block that it sees")
        if lease.open is not None and held.tail:
            require(held.tail.blocks == [lease.open], "a lease's open block is not that of its tail")
        private.extend(held.private())
    free = pool.free_ids()
    resident = [block for node in index.nodes.values() for block in node.blocks if block != NO_BLOCK]
    require(
        sorted([*free, *resident, *private]) == pool.ids(),
        "free, resident and private blocks do not partition the ids",
    )
    require(all(pool.refs[block] == FREE for block in free), "a free block has references")
    require(
        all(pool.refs[block] == refs[block] for block in (*resident, *private)), "references are not the sum of leases"
    )
    leased = sum(kind.leased for kind in pool.by_kind())
    require(leased == len(refs), "the count of leased blocks is not that of the blocks leased")
    counts = pool.counts()
    require(counts.leased + counts.cached + counts.free == counts.total, "the states don't add up to the total")
    pool.check()


def check_leaves(leaves: Leaves, pool: BlockPool, index: RadixIndex, usable: Usable | None) -> None:
    """Evictable are exactly the leaves that nobody has, and of other blocks what windows have left; behind what nobody
    has nobody has anything; no idle tail is held twice."""
    for node in index.nodes.values():
        leaf = not node.holds and not node.kids
        require((node in leaves) == leaf, "evictable leaves are not the idle blocks without kids")
        for part in node.parts:
            idle = not leaf and part.block != NO_BLOCK and pool.refs[part.block] == 0
            require((part in leaves) == idle, "evictable parts are not what windows have left of blocks that stay")
    for parent in (*index.roots.values(), *index.nodes.values()):
        idle = parent.parent is not None and not parent.holds
        require(not idle or not any(kid.holds for kid in parent.kids), "a leased block stands behind an idle one")
        for kid in parent.kids:
            require(
                kid.holds > 0 or len(kid.tokens) == index.block_tokens or not index.is_head(parent, kid.tokens, usable),
                "an idle tail is held again as the head of its sibling",
            )
    leaves.check()


def check_leases(leases: Mapping[LeaseId, Held], promises: Mapping[Key, LeaseId], block_tokens: int) -> None:
    """Leases know what they committed, and every promise belongs to one that lives."""
    holds = Counter(node.key for held in leases.values() for node in held.shared())
    for held in leases.values():
        for node in held.shared():
            require(node.holds == holds[node.key], "a block miscounts the leases that have it")
    promised = {key: lease for lease, held in leases.items() for key in held.promised}
    require(promised == promises, "the promises are not those of the live leases")
    for lease, held in leases.items():
        require(held.lease.id == lease, "a lease is filed under another id")
        require(
            held.lease.committed_tokens == block_tokens * len(held.nodes), "a lease miscounts what it has committed"
        )
        for node, before in zip(held.nodes[1:], held.nodes, strict=False):
            forks = node.depth == 0 and node.scope_digest != before.scope_digest  # behind what belongs to all tenants
            require(node.parent is before or forks, "the blocks of a lease are not one chain")


def check_books(ledger: Ledger, tier: str, resident: int) -> None:
    """What was stored and is not gone is here."""
    require(ledger.resident(tier) == resident, f"stored − gone is {ledger.resident(tier)}, resident are {resident}")
