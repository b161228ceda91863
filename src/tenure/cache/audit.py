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
from tenure.cache.radix import Node, RadixIndex, Usable
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
        blocks = [*lease.blocks] if lease.open is None else [*lease.blocks, lease.open]
        refs.update(blocks)
        require(len(set(blocks)) == len(blocks), "a lease holds a block twice")
        own = [*lease.blocks[: len(held.nodes)], *([lease.open] if held.tail and lease.open is not None else [])]
        own = own if lease.open is not None else [*lease.blocks[: len(shared)]]
        require(own == [node.block for node in shared], "a lease's blocks are not those of its nodes")
        private.extend(held.private())
    free = pool.free_ids()
    resident = [node.block for node in index.nodes.values()]
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
    """Evictable are exactly the idle blocks without kids; behind idle ones all are idle; no idle tail is held twice."""
    for node in index.nodes.values():
        idle = pool.refs[node.block] == 0
        require((node in leaves) == (idle and not node.kids), "evictable leaves are not the idle blocks without kids")
    for parent in (*index.roots.values(), *index.nodes.values()):
        idle = parent.parent is not None and pool.refs[parent.block] == 0
        leased = [pool.refs[kid.block] > 0 for kid in parent.kids]
        require(not idle or not any(leased), "a leased block stands behind an idle one")
        for kid, is_leased in zip(parent.kids, leased, strict=True):
            require(
                is_leased or len(kid.tokens) == index.block_tokens or not index.is_head(parent, kid.tokens, usable),
                "an idle tail is held again as the head of its sibling",
            )
    leaves.check()


def check_leases(leases: Mapping[LeaseId, Held], promises: Mapping[Key, LeaseId], block_tokens: int) -> None:
    """Leases know what they committed, and every promise belongs to one that lives."""
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
