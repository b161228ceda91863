"""Where blocks for somebody come from: free ones, and idle ones that go for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence, Sized

from tenure.cache.lease import Lease
from tenure.cache.leaves import Item, Leaves
from tenure.cache.plan import Goes, Head, Shortfall, Takes
from tenure.cache.pool import STORED, BlockPool, Room, Wanted
from tenure.cache.radix import NO_BLOCK, Node
from tenure.types import BlockId, Key


class Supply:
    """What a sequence needs, whether it can be had, and who goes for it. Asks only."""

    def __init__(self, pool: BlockPool, leaves: Leaves, leases: Sized, block_tokens: int) -> None:
        self._pool = pool
        self._leases = leases
        self._leaves = leaves
        self._size = block_tokens
        self._staged = pool.staging != STORED

    @property
    def unused(self) -> bool:
        """Whether nobody leases anything."""
        return not len(self._leases)

    def stored(self, tokens: int) -> int:
        """Stored blocks that a sequence with room for `tokens` has: those that can become full, when open ones are
        staged apart."""
        return tokens // self._size if self._staged else -(-tokens // self._size)

    def needs(self, room: int, reused: int, head: Head | None, ahead: int | None) -> Takes:
        """What a new sequence takes beside `reused` full blocks and a `head`. Where windows let others go meanwhile, it
        takes what they see and `ahead` blocks, None: just the next one."""
        whole = head is not None and head.whole
        blocks = self.stored(room)
        stored = []
        for group in self._pool.groups:
            seen = blocks if group.window is None else 1 if ahead is None else group.held(blocks, self._size) + ahead
            stored.append(min(blocks - reused, seen) - (whole and not self._staged))
        return Takes(tuple(stored), 1 - whole if self._staged else 0)

    def grows(self, tables: Sequence[Sequence[BlockId]], room: int, full: int, ahead: int) -> Takes:
        """What a sequence takes to have room for `room` tokens; where windows let others go meanwhile, for the block
        after its `full` ones and `ahead` more."""
        stored, near = self.stored(room), full + 1 + ahead
        wanted = (stored if group.window is None else min(stored, near) for group in self._pool.groups)
        return Takes(tuple(max(0, n - len(table)) for n, table in zip(wanted, tables, strict=True)), 0)

    def wanted(self, takes: Takes) -> Wanted:
        """The same by the kinds of the pool."""
        first, *others = zip(self._pool.stored, takes.stored, strict=True)
        if not self._staged:
            return (first, *others)
        return (first, (self._pool.staging, takes.opens), *others)

    def weight(self, takes: Takes) -> int:
        """Stored blocks of the first group that take as much room as those to store, at least."""
        return self._pool.weigh(list(zip(self._pool.stored, takes.stored, strict=True)))

    def take(self, takes: Takes) -> tuple[list[list[BlockId]], list[BlockId]]:
        """Stored blocks for each group, and where to stage one; they are free."""
        stored = [self._pool.take(n, kind) for n, kind in zip(takes.stored, self._pool.stored, strict=True)]
        return stored, self._pool.take(takes.opens, self._pool.staging)

    def room(self, tables: Sequence[Sequence[BlockId]]) -> int:
        """Tokens that a sequence with these stored blocks has room for."""
        blocks = min(map(len, tables))
        return self._size * (blocks + 1) - 1 if self._staged else self._size * blocks

    def codecs(self, lease: Lease, computed: int, tokens: int) -> dict[str, int]:
        """How the tokens of a sequence are held, in tokens by codec; what is not computed yet counts as open."""
        full = computed // self._size
        kept = [block for block in lease.blocks[:full] if block != NO_BLOCK]
        held = Counter(map(self._pool.codec, kept))
        found = {name: n * self._size for name, n in held.items()}
        if gone := full - len(kept):  # all layers have windows: what they left is stored nowhere, but was in this form
            first = self._pool.codecs[STORED]
            found[first] = found.get(first, 0) + gone * self._size
        staging = self._pool.codecs[self._pool.staging]
        if left := tokens - full * self._size:
            found[staging] = found.get(staging, 0) + left
        return found

    def shortfall(self, takes: Takes, spared: Iterable[BlockId]) -> Shortfall | None:
        """Why these cannot be had while the `spared` blocks stay."""
        lack = self._pool.lack(self.wanted(takes), spared)
        if lack is None:
            return None
        leases, leased = len(self._leases), self._pool.counts().leased
        reason = f"{lack.needed} blocks wanted, {lack.free} free, {lack.evictable} evictable; "
        return Shortfall(*lack, reason + f"{leases} leases hold {leased}")

    def goes(self, takes: Takes, now: float, spared: Collection[Item]) -> Goes:
        """Who goes until there is room. Every idle block can go, leaf by leaf: whoever leases a block leases all before
        it. When nothing lacks but room to stage one, tails go, if that is enough."""
        wanted = self.wanted(takes)
        room = self._pool.room(wanted)
        if room.met:
            return Goes()
        kept = frozenset(spared)
        if not room.lacks_stored:
            tails = self._until(room, self._leaves.order(now, kept, self._is_tail))
            if room.met:
                return tails
        return self._until(self._pool.room(wanted), self._leaves.order(now, kept))

    def goes_for(self, room: Room, now: float) -> Goes:
        """Who goes until `room` is met, if it can be."""
        return Goes() if room.met else self._until(room, self._leaves.order(now, ()))

    def _until(self, room: Room, order: Iterable[tuple[Item, list[BlockId]]]) -> Goes:
        """The first of `order` whose going makes room; all, when they are not enough."""
        parts: list[tuple[Key, int]] = []
        victims: list[Key] = []
        for item, blocks in order:
            for block in blocks:
                room.gone(block)
            if isinstance(item, Node):
                victims.append(item.key)
            else:
                parts.append((item.node.key, item.group))
            if room.met:
                break
        return Goes(tuple(parts), tuple(victims))

    def _is_tail(self, item: Item) -> bool:
        return isinstance(item, Node) and len(item.tokens) < self._size
