"""How sequences would get what they ask for: what they reuse, what they take, who goes for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tenure.cache import keys
from tenure.cache.find import Finder
from tenure.cache.lease import Lease, LeaseId
from tenure.cache.leaves import Item
from tenure.cache.plan import Ask, Head, Match, Plan, Shortfall
from tenure.cache.pool import BlockPool
from tenure.cache.radix import NO_BLOCK, Node, Usable
from tenure.cache.supply import Supply
from tenure.cache.windows import AHEAD, Windows
from tenure.types import BlockId, Key, MissReason, Scope, Token


class Plans:
    """Asks only: nothing here changes what is held. Plans are good for the epoch they are made in."""

    def __init__(
        self,
        pool: BlockPool,
        find: Finder,
        supply: Supply,
        windows: Windows,
        promises: Mapping[Key, LeaseId],
        *,
        tails: bool,
    ) -> None:
        """`tails`: whether heads of blocks are reused."""
        self._pool = pool
        self._find = find
        self._index = find.index
        self._supply = supply
        self._windows = windows
        self._promises = promises
        self._tails = tails
        self._size = find.index.block_tokens
        self.usable: Usable | None = self._is_usable if len(pool.codecs) > 1 or windows else None
        """Whether the head of a block serves who goes on from the block before it; None: always."""

    def match(self, scope: Scope, tokens: Sequence[Token], exact: bool) -> Match:
        """The longest reusable prefix of all of `tokens`."""
        path, head, behind = self.reach(scope, tokens, len(tokens), exact)
        start = self._size * len(path)
        awaited = None
        if self._promises and start + self._size <= len(tokens):
            awaited = self._promises.get(keys.chain(behind, tokens[start : start + self._size]))
        return Match(
            start + (head.tokens if head else 0),
            tuple(node.key for node in path),
            tuple(node.blocks[0] for node in path),
            head,
            awaited,
        )

    def growth(self, epoch: int, lease: Lease, full: int, room: int, now: float) -> Plan | Shortfall:
        """For a sequence with so many `full` blocks to have `room`. Ahead of its windows it goes as far as it can, one
        block at least."""
        short: Shortfall | None = None
        for ahead in (AHEAD, 0) if self._windows else (0,):
            takes = self._supply.grows(lease.tables, room, full, ahead)
            short = self._supply.shortfall(takes, ())
            if short is None:
                goes, leases = self._supply.goes(takes, now, ()), self._supply.weight(takes)
                return Plan(epoch, lease.scope, lease.exact, lease, (), None, takes, goes, (), 0, leases)
        assert short is not None
        return short

    def start(self, epoch: int, ask: Ask, now: float) -> Plan | Shortfall:
        """For a new sequence: with all it could reuse, else without the head of a block, since to compute that again is
        better than not to start. Ahead of its windows as far as it can; whoever is alone goes on, be it slowly, and be
        it from the beginning."""
        if not ask.tokens or ask.room < len(ask.tokens):
            raise ValueError(f"room for {ask.room} tokens asked for a sequence of {len(ask.tokens)}")
        path, head, behind = self.reach(ask.scope, ask.tokens, 0 if ask.fresh else len(ask.tokens) - 1, ask.exact)
        short = self._try(epoch, ask, path, head, behind, now)
        if isinstance(short, Shortfall) and path and self._windows and self._supply.unused:
            path, head, behind = self.reach(ask.scope, ask.tokens, 0, ask.exact)
            return self._try(epoch, ask, path, head, behind, now)
        return short

    def reach(
        self, scope: Scope, tokens: Sequence[Token], limit: int, exact: bool = False, *, all_held: bool = False
    ) -> tuple[list[Node], Head | None, Key]:
        """The full blocks that can be reused (or `all_held`), the longest head behind them, and the key that what comes
        next follows."""
        path, behind = self._find.walk(scope, tokens, limit, exact=exact)
        if not all_held and (whole := self._windows.whole(path)) < len(path):
            path, behind = self._find.walk(scope, tokens, self._size * whole, exact=exact)
        start = self._size * len(path)
        parent = self._index.nodes.get(behind) or self._index.roots.get(behind)
        if parent is None or not parent.kids or start == limit or not self._tails:
            return path, None, behind
        found = self._index.closest(parent, tuple(tokens[start : min(limit, start + self._size)]), self.usable)
        if found is None or found[1] == self._size:  # a whole block, but of another lineage than the longest way
            return path, None, behind
        node, n = found
        return path, Head(node.key, node.blocks[0], n, n == len(node.tokens) and not node.holds), behind

    def why_not(self, node: Node) -> MissReason:
        """Why the head of a block does not serve; `evicted`: it would, but there was no room to copy it."""
        if node.recoded:
            return "recoded"
        if NO_BLOCK in node.blocks:
            return "window"
        return "evicted" if self._tails and self._pool.unquantised(node.blocks[0]) else "below_minimum"

    # ---- how

    def _is_usable(self, node: Node) -> bool:
        above = node.parent is not None and node.parent.recoded
        return above == node.recoded and NO_BLOCK not in node.blocks and self._pool.unquantised(node.blocks[0])

    def _try(
        self, epoch: int, ask: Ask, path: list[Node], head: Head | None, behind: Key, now: float
    ) -> Plan | Shortfall:
        """The first way that there is room for."""
        short: Shortfall | None = None
        for ahead in self._aheads():
            for taken in (head, None) if head else (None,):
                takes = self._supply.needs(ask.room, len(path), taken, ahead)
                spared, idle = self._spare(path, taken)
                short = self._supply.shortfall(takes, idle)
                if short is not None:
                    continue
                newly = sum(not node.holds for node in path) + (taken is not None and taken.whole)
                return Plan(
                    epoch=epoch,
                    scope=ask.scope,
                    exact=ask.exact,
                    lease=None,
                    reused=tuple(node.key for node in path),
                    head=taken,
                    takes=takes,
                    goes=self._supply.goes(takes, now, spared),
                    promises=self._open_keys(ask.scope, ask.tokens, len(path), behind),
                    reused_tokens=self._size * len(path) + (taken.tokens if taken else 0),
                    leases=self._supply.weight(takes) + newly,
                )
        assert short is not None
        return short

    def _aheads(self) -> tuple[int | None, ...]:
        if not self._windows:
            return (0,)
        return (AHEAD, 0, None) if self._supply.unused else (AHEAD, 0)

    def _spare(self, path: list[Node], head: Head | None) -> tuple[set[Item], list[BlockId]]:
        """What is reused must not go; and those of its blocks that nobody leases."""
        spared, idle = self._windows.spare(path, self._size * len(path) + (head.tokens if head else 0))
        if head:
            source = self._index.nodes[head.key]
            spared.update((source, *source.parts))
            idle += [block for block in source.blocks if not self._pool.refs[block]]
        return spared, idle

    def _open_keys(self, scope: Scope, tokens: Sequence[Token], held: int, behind: Key) -> tuple[Key, ...]:
        """Keys of the full blocks behind the `held` first that nobody computes yet."""
        rest = self._find.roots.chain(scope, tokens, held, behind)
        return tuple(key for key in rest if key not in self._promises)
