"""Block ids and how many leases hold each: free, cached (held by nobody) or leased."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tenure.errors import Corrupt
from tenure.spec import ArenaLayout, LayerGroup, codec
from tenure.types import BlockId, KindCounts, PoolCounts

FREE = -1
STORED = 0
"""The kind of full blocks as they are stored, and of open ones too when these are written in the same form; of the
first group of layers, when there are several."""

Wanted = Sequence[tuple[int, int]]
"""Kinds, and how many blocks of each; STORED first."""


class Lack(NamedTuple):
    """Why blocks cannot be had, in stored blocks: needed > free + evictable."""

    needed: int
    free: int
    evictable: int


class BlockPool:
    """Ids 0 … total − 1, all of one kind. The one who takes an id holds it; it is given back after the last hold."""

    staging = STORED
    """The kind of open blocks."""
    stored: tuple[int, ...] = (STORED,)
    """The kind of stored blocks of each group of layers."""
    groups: tuple[LayerGroup, ...] = (LayerGroup(1),)

    def __init__(self, total: int, codec: str = "bf16") -> None:
        if total < 1:
            raise ValueError(f"a pool needs at least one block, not {total}")
        self.total = total
        """Stored blocks that one sequence could have."""
        self.refs = [FREE] * total
        """Leases per block, or FREE."""
        self.codecs: tuple[str, ...] = (codec,)
        """Of each kind."""
        self._free = [BlockId(i) for i in range(total - 1, -1, -1)]  # a stack: the block freed last is warm
        self._leased = 0

    # ---- ask

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def cached(self) -> int:
        return self.total - len(self._free) - self._leased

    @property
    def used(self) -> int:
        """Blocks of all kinds that are not free."""
        return self.total - len(self._free)

    def counts(self) -> PoolCounts:
        return PoolCounts(self._leased, self.cached, self.free, self.total)

    def by_kind(self) -> tuple[KindCounts, ...]:
        """Blocks in use of each kind."""
        return (KindCounts(self.codecs[STORED], self._leased, self.cached),)

    def kind(self, block: BlockId) -> int:
        return STORED

    def codec(self, block: BlockId) -> str:
        """How a block is stored."""
        return self.codecs[STORED]

    def unquantised(self, block: BlockId) -> bool:
        """Whether the head of a block can be copied."""
        return codec(self.codec(block)).head_reusable

    def lack(self, wanted: Wanted, spared: Iterable[BlockId]) -> Lack | None:
        """Why these blocks cannot be had together if all idle ones may go but those `spared`; None when they can."""
        evictable, needed = self.cached - sum(1 for _ in spared), sum(n for _, n in wanted)
        return None if needed <= self.free + evictable else Lack(needed, self.free, evictable)

    def room(self, wanted: Wanted) -> Room:
        """How far free blocks go towards what is wanted, to be told which blocks would go."""
        return Room(sum(n for _, n in wanted) - self.free)

    def weigh(self, wanted: Wanted) -> int:
        """Stored blocks of the first group that take as much room as these, at least."""
        return sum(n for _, n in wanted)

    def free_ids(self) -> list[BlockId]:
        """A copy of the free ids, for audits."""
        return list(self._free)

    def ids(self) -> list[BlockId]:
        """All ids that could be in use or free as the pool is cut now, ascending."""
        return [BlockId(i) for i in range(self.total)]

    def check(self) -> None:
        """Verify what the pool counts apart from its references."""

    # ---- do

    def take(self, n: int, kind: int = STORED) -> list[BlockId]:
        """`n` free blocks, each held once; ValueError when there are fewer."""
        if not 0 <= n <= len(self._free):
            raise ValueError(f"{n} blocks wanted, {len(self._free)} free")
        ids = [self._free.pop() for _ in range(n)]
        for block in ids:
            self.refs[block] = 1
        self._leased += n
        return ids

    def give(self, ids: Iterable[BlockId]) -> None:
        """Make blocks free that nobody holds."""
        for block in ids:
            if self.refs[block] != 0:
                raise ValueError(f"block {block} given while its count is {self.refs[block]}")
            self.refs[block] = FREE
            self._freed(block)

    def hold(self, block: BlockId) -> None:
        """Count one more lease."""
        refs = self.refs[block]
        if refs < 0:
            raise ValueError(f"block {block} is free")
        self.refs[block] = refs + 1
        if not refs:
            self._count_leased(block, 1)

    def unhold(self, block: BlockId) -> None:
        """Count one lease less."""
        refs = self.refs[block]
        if refs < 1:
            raise ValueError(f"block {block} is not held")
        self.refs[block] = refs - 1
        if refs == 1:
            self._count_leased(block, -1)

    def _freed(self, block: BlockId) -> None:
        self._free.append(block)

    def _count_leased(self, block: BlockId, change: int) -> None:
        self._leased += change


class Room:
    """Whether enough would be free once certain blocks are gone."""

    def __init__(self, lacking: int) -> None:
        self._lacking = lacking

    @property
    def met(self) -> bool:
        return self._lacking <= 0

    @property
    def lacks_stored(self) -> bool:
        """Whether it is stored blocks that are missing, not only one to stage."""
        return not self.met

    def gone(self, block: BlockId) -> None:
        """Count on the room of a block that is going to be evicted."""
        self._lacking -= 1


class SlabPool(BlockPool):
    """Blocks of several kinds in slabs; an empty slab serves any kind. Counts are in stored blocks: a slab of another
    kind counts as the stored blocks it could hold, leased while one of its blocks is.

    Some slabs of a kind are kept for what is staged and for what windows see, so that whoever is alone can always go
    on. So many are kept, not certain ones: whichever of them becomes empty serves anyone, while enough are left.
    """

    def __init__(self, layout: ArenaLayout) -> None:
        if layout.blocks < 1:
            raise ValueError(f"an arena of {layout.slabs} slabs is too small for blocks of {len(layout.kinds)} kinds")
        self.layout = layout
        self.staging = layout.staging
        self.stored = layout.stored
        self.groups = layout.groups
        self.total = layout.blocks
        self.refs = [FREE] * layout.ids
        self.codecs = layout.kinds
        self.used_in = [0] * layout.slabs
        """Blocks in each slab that are not free."""
        self.leased_in = [0] * layout.slabs
        self.kind_in: list[int | None] = [None] * layout.slabs
        self.slab_of = [slab for slots in layout.slots for slab in range(layout.slabs) for _ in range(slots)]
        """Of each block id."""
        self.empty = list(range(layout.slabs - 1, -1, -1))
        self.free_of = [0] * len(layout.kinds)
        """Free places of each kind in slabs of that kind."""
        self.slabs_of = [0] * len(layout.kinds)
        """Those cut for each kind."""
        self._places: list[list[BlockId]] = [[] for _ in range(layout.slabs)]
        self._open: list[set[int]] = [set() for _ in layout.kinds]
        self._counts: PoolCounts | None = None
        for kind in [kind for kind, n in enumerate(layout.kept) for _ in range(n)]:
            self._cut(kind)

    # ---- ask

    @property
    def free(self) -> int:
        return self.counts().free

    @property
    def cached(self) -> int:
        return self.counts().cached

    @property
    def used(self) -> int:
        return sum(self.used_in)

    def counts(self) -> PoolCounts:
        if self._counts is None:
            each, leased, cached = self.layout.slots[STORED], 0, 0
            busy = [-kept for kept in self.layout.kept]
            for slab, kind in enumerate(self.kind_in):
                if kind == STORED:
                    leased += self.leased_in[slab]
                    cached += self.used_in[slab] - self.leased_in[slab]
                elif kind is not None:
                    busy[kind] += self.leased_in[slab] > 0
            apart = sum(max(0, n) for n in busy)
            leased += each * apart
            cached += each * (sum(self.slabs_of) - self.slabs_of[STORED] - sum(self.layout.kept) - apart)
            self._counts = PoolCounts(leased, cached, self.total - leased - cached, self.total)
        return self._counts

    def by_kind(self) -> tuple[KindCounts, ...]:
        leased, used = [0] * len(self.codecs), [0] * len(self.codecs)
        for slab, kind in enumerate(self.kind_in):
            if kind is not None:
                leased[kind] += self.leased_in[slab]
                used[kind] += self.used_in[slab]
        windows = {kind: group.window for kind, group in zip(self.stored[1:], self.groups[1:], strict=True)}
        counts = zip(self.codecs, leased, used, strict=True)
        return tuple(KindCounts(codec, n, of - n, windows.get(kind)) for kind, (codec, n, of) in enumerate(counts))

    def kind(self, block: BlockId) -> int:
        return self.layout.kind(block)

    def codec(self, block: BlockId) -> str:
        return self.codecs[self.layout.kind(block)]

    def lack(self, wanted: Wanted, spared: Iterable[BlockId]) -> Lack | None:
        """Slabs in which something stays (leased or spared) serve their own kind; all others serve anyone."""
        slots = self.layout.slots
        stays = list(self.leased_in)
        for block in spared:
            stays[self.slab_of[block]] += 1
        anyones, own, idle = len(self.empty), [0] * len(slots), list(self.slabs_of)
        for slab, kind in enumerate(self.kind_in):
            if kind is not None and stays[slab]:
                own[kind] += slots[kind] - stays[slab]
                idle[kind] -= 1
        for kind, kept in enumerate(self.layout.kept):
            left = max(0, kept - self.slabs_of[kind] + idle[kind])
            own[kind] += left * slots[kind]
            anyones += idle[kind] - left
        slabs = [-(-max(0, n - own[kind]) // slots[kind]) for kind, n in wanted]
        if sum(slabs) <= anyones:
            return None
        each, free, stored = slots[STORED], self.counts().free, wanted[0][1]
        apart = each * sum(slabs[1:])
        needed = apart + max(stored, own[STORED]) if apart else stored
        return Lack(needed, free, max(0, own[STORED] + each * anyones - free))

    def room(self, wanted: Wanted) -> SlabRoom:
        return SlabRoom(self, wanted)

    def weigh(self, wanted: Wanted) -> int:
        slots = self.layout.slots
        return sum(-(-n * slots[STORED] // slots[kind]) for kind, n in wanted)

    def free_ids(self) -> list[BlockId]:
        return [block for places in self._places for block in places]

    def ids(self) -> list[BlockId]:
        layout = self.layout
        found = [
            BlockId(layout.first[kind] + slab * layout.slots[kind] + place)
            for slab, kind in enumerate(self.kind_in)
            if kind is not None
            for place in range(layout.slots[kind])
        ]
        return sorted(found)

    def check(self) -> None:
        """Slabs are cut for one kind, given back when empty, and counted right."""
        slots = self.layout.slots
        free_of, leased = [0] * len(slots), [0] * len(self.kind_in)
        for block, refs in enumerate(self.refs):
            leased[self.slab_of[block]] += refs > 0
        for slab, kind in enumerate(self.kind_in):
            if (kind is None) != (slab in self.empty):
                raise Corrupt(f"slab {slab} is cut for kind {kind}, but the empty ones are {self.empty}")
            if kind is None:
                continue
            free_of[kind] += len(self._places[slab])
            if len(self._places[slab]) != slots[kind] - self.used_in[slab] or leased[slab] != self.leased_in[slab]:
                raise Corrupt(f"slab {slab} miscounts what is in it")
            if not self.used_in[slab] and self.slabs_of[kind] > self.layout.kept[kind]:
                raise Corrupt(f"slab {slab} is empty and was not given back")
            if (slab in self._open[kind]) != bool(self._places[slab]):
                raise Corrupt(f"slab {slab} is not filed by whether it has room")
        if self.slabs_of != [self.kind_in.count(kind) for kind in range(len(slots))]:
            raise Corrupt(f"slabs of each kind are {self.kind_in}, counted {self.slabs_of}")
        if free_of != self.free_of:
            raise Corrupt(f"free places are {free_of}, counted {self.free_of}")

    # ---- do

    def take(self, n: int, kind: int = STORED) -> list[BlockId]:
        """The fullest slabs first: the emptier ones may become empty."""
        had = self.free_of[kind] + len(self.empty) * self.layout.slots[kind]
        if not 0 <= n <= had:
            raise ValueError(f"{n} blocks of {self.codecs[kind]} wanted, {had} free")
        ids: list[BlockId] = []
        fresh = self._open[kind]
        while len(ids) < n:
            slab = max(fresh, key=lambda slab: (self.used_in[slab], -slab)) if fresh else self._cut(kind)
            places = self._places[slab]
            took = min(n - len(ids), len(places))
            ids += [places.pop() for _ in range(took)]
            self.used_in[slab] += took
            self.leased_in[slab] += took
            if not places:
                fresh.discard(slab)
        for block in ids:
            self.refs[block] = 1
        self.free_of[kind] -= n
        self._counts = None
        return ids

    def _freed(self, block: BlockId) -> None:
        slab = self.slab_of[block]
        kind = self.kind_in[slab]
        if kind is None:
            raise Corrupt(f"block {block} lies in an empty slab")
        self._counts = None
        self.used_in[slab] -= 1
        self.free_of[kind] += 1
        self._places[slab].append(block)
        self._open[kind].add(slab)
        if not self.used_in[slab] and self.slabs_of[kind] > self.layout.kept[kind]:
            self.slabs_of[kind] -= 1
            self.free_of[kind] -= self.layout.slots[kind]
            self._places[slab].clear()
            self._open[kind].discard(slab)
            self.kind_in[slab] = None
            self.empty.append(slab)

    def _count_leased(self, block: BlockId, change: int) -> None:
        self.leased_in[self.slab_of[block]] += change
        self._counts = None

    # ---- how

    def _cut(self, kind: int) -> int:
        """An empty slab becomes one of `kind`."""
        slab, slots = self.empty.pop(), self.layout.slots[kind]
        first = self.layout.first[kind] + slab * slots
        self._places[slab] = [BlockId(i) for i in range(first + slots - 1, first - 1, -1)]
        self.kind_in[slab] = kind
        self.slabs_of[kind] += 1
        self.free_of[kind] += slots
        self._open[kind].add(slab)
        return slab


class SlabRoom(Room):
    """Room in slabs: a slab that would be empty serves any kind."""

    def __init__(self, pool: SlabPool, wanted: Wanted) -> None:
        self._pool = pool
        self._wanted = wanted
        self._free = list(pool.free_of)
        self._slabs = list(pool.slabs_of)
        self._empty = len(pool.empty)
        self._used: dict[int, int] = {}

    @property
    def met(self) -> bool:
        slots = self._pool.layout.slots
        return sum(-(-max(0, n - self._free[kind]) // slots[kind]) for kind, n in self._wanted) <= self._empty

    @property
    def lacks_stored(self) -> bool:
        (kind, stored), slots = self._wanted[0], self._pool.layout.slots
        return stored > self._free[kind] + self._empty * slots[kind]

    def gone(self, block: BlockId) -> None:
        pool = self._pool
        slab = pool.slab_of[block]
        kind = pool.kind_in[slab]
        if kind is None:
            raise Corrupt(f"block {block} lies in an empty slab")
        used = self._used[slab] = self._used.get(slab, pool.used_in[slab]) - 1
        self._free[kind] += 1
        if not used and self._slabs[kind] > pool.layout.kept[kind]:
            self._slabs[kind] -= 1
            self._free[kind] -= pool.layout.slots[kind]
            self._empty += 1
