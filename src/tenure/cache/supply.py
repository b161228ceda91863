"""Where blocks for somebody come from: free ones, and idle ones that go for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sized

from tenure.cache.lease import Lease
from tenure.cache.leaves import Leaves
from tenure.cache.plan import Head, Shortfall
from tenure.cache.pool import STORED, BlockPool, Room
from tenure.cache.radix import Node
from tenure.types import Key


class Supply:
    """What a sequence needs, whether it can be had, and who goes for it. Asks only."""

    def __init__(self, pool: BlockPool, leaves: Leaves, leases: Sized, block_tokens: int) -> None:
        self._pool = pool
        self._leases = leases
        self._leaves = leaves
        self._size = block_tokens
        self._staged = pool.staging != STORED

    def stored(self, tokens: int) -> int:
        """Stored blocks that a sequence with room for `tokens` has: those that can become full, when open ones are
        staged apart."""
        return tokens // self._size if self._staged else -(-tokens // self._size)

    def needs(self, room: int, reused: int, head: Head | None) -> tuple[int, int]:
        """Stored blocks, and blocks to stage, that a new sequence takes beside `reused` full ones and a `head`."""
        takes, whole = self.stored(room) - reused, head is not None and head.whole
        return (takes, 1 - whole) if self._staged else (takes - whole, 0)

    def room(self, blocks: int) -> int:
        """Tokens that a sequence with so many stored blocks has room for."""
        return self._size * (blocks + 1) - 1 if self._staged else self._size * blocks

    def codecs(self, lease: Lease, computed: int, tokens: int) -> dict[str, int]:
        """How the tokens of a sequence are held, in tokens by codec; what is not computed yet counts as open."""
        full = computed // self._size
        held = Counter(self._pool.codec(block) for block in lease.blocks[:full])
        found = {name: n * self._size for name, n in held.items()}
        staging = self._pool.codecs[self._pool.staging]
        if left := tokens - full * self._size:
            found[staging] = found.get(staging, 0) + left
        return found

    def shortfall(self, takes: int, opens: int, spared: Collection[Node]) -> Shortfall | None:
        """Why so many stored blocks, and staged ones beside them, cannot be had while `spared` stay."""
        lack = self._pool.lack(takes, opens, (node.block for node in spared))
        if lack is None:
            return None
        leases, leased = len(self._leases), self._pool.counts().leased
        reason = f"{lack.needed} blocks wanted, {lack.free} free, {lack.evictable} evictable; "
        return Shortfall(*lack, reason + f"{leases} leases hold {leased}")

    def victims(self, takes: int, opens: int, now: float, spared: Collection[Node]) -> tuple[Key, ...]:
        """Who goes, in order, until there is room. Every idle block can go, leaf by leaf: whoever leases a block leases
        all before it. When nothing lacks but room to stage a block, tails go, if that is enough."""
        room = self._pool.room(takes, opens)
        if room.met:
            return ()
        kept = frozenset(spared)
        if not room.lacks_stored:
            tails = self._until(room, self._leaves.order(now, kept, lambda node: len(node.tokens) < self._size))
            if tails:
                return tails
        return self._until(self._pool.room(takes, opens), self._leaves.order(now, kept))

    def _until(self, room: Room, order: Iterable[Node]) -> tuple[Key, ...]:
        """Keys of the first of `order` whose going makes room; none when all of them are not enough."""
        gone: list[Key] = []
        for node in order:
            room.gone(node.block)
            gone.append(node.key)
            if room.met:
                return tuple(gone)
        return ()
