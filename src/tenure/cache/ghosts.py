"""What was held once: evicted blocks, so that a miss can say that memory was short and not that the prompt is new.

The newest are remembered by content, so that tokens computed twice are counted exactly. Of older ones only a mark is
left in a filter of fixed size: enough to say `unknown` instead of `cold`.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tenure.cache.keys import WORD, common_head, pack
from tenure.types import Fate, Key, MissReason, Token

_FILTER_BITS = 1 << 22
"""512 KiB for each of the two generations: at 400 000 keys one in a hundred strangers is taken for one of them."""
_FILTER_KEYS = 400_000


@dataclass(frozen=True, slots=True)
class Ghost:
    """How a block left: when (seconds), by whom, and what a miss says of it."""

    at: float
    by: str
    reason: MissReason
    parent: Key
    ids: bytes


class Ghosts:
    """The newest `capacity` blocks lost from the device, by key; 0 remembers none."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._ghosts: OrderedDict[Key, Ghost] = OrderedDict()
        self._kids: dict[Key, list[tuple[bytes, Key]]] = {}
        self._lapsed: OrderedDict[Key, None] = OrderedDict()
        self._older = _Filter()

    def __len__(self) -> int:
        return len(self._ghosts)

    # ---- ask

    def find(self, parent: Key, ids: Sequence[Token]) -> tuple[Ghost, int] | None:
        """The ghost behind `parent` that shares the longest head with `ids`, and how many tokens."""
        kids = self._kids.get(parent)
        if not kids:
            return None
        packed = pack(ids)
        at = bisect_left(kids, (packed, b""))
        near = [(common_head(raw, packed) // WORD, key) for raw, key in kids[max(0, at - 1) : at + 1]]
        shared, key = max(near, key=lambda pair: pair[0])
        return (self._ghosts[key], shared) if shared else None

    def was_here(self, key: Key) -> bool:
        """Whether a block of this key was lost so long ago that no more is known; wrong once in a hundred."""
        return key in self._older

    # ---- do

    def add(self, key: Key, parent: Key, ids: Sequence[Token], fate: Fate, by: str, now: float) -> None:
        """A block was lost."""
        reason: MissReason = "corrupt" if fate is Fate.CORRUPT else "evicted"
        if fate is Fate.EXPIRED or key in self._lapsed:
            self._lapsed.pop(key, None)
            reason, by = "expired", "pin"
        if not self._capacity:
            self._older.add(key)
            return
        self.forget(key)  # it may be lost in two lineages
        ghost = Ghost(now, by, reason, parent, pack(ids))
        self._ghosts[key] = ghost
        insort(self._kids.setdefault(parent, []), (ghost.ids, key))
        if len(self._ghosts) > self._capacity:
            oldest = next(iter(self._ghosts))
            self.forget(oldest)
            self._older.add(oldest)

    def forget(self, key: Key) -> None:
        """It is held again, if it was a ghost."""
        self._lapsed.pop(key, None)
        ghost = self._ghosts.pop(key, None)
        if ghost is None:
            return
        kids = self._kids[ghost.parent]
        del kids[bisect_left(kids, (ghost.ids, key))]
        if not kids:
            del self._kids[ghost.parent]

    def lapse(self, keys: Iterable[Key]) -> None:
        """The time of a pin on these blocks has passed: if they are lost unused, that is why."""
        for key in keys:
            self._lapsed[key] = None
        while len(self._lapsed) > self._capacity:
            self._lapsed.popitem(last=False)


class _Filter:
    """A Bloom filter in two generations: when the newer is full, the older is forgotten."""

    def __init__(self) -> None:
        self._new = bytearray(_FILTER_BITS // 8)
        self._old = bytearray(0)
        self._count = 0

    def __contains__(self, key: Key) -> bool:
        return any(
            bits and all(bits[place >> 3] >> (place & 7) & 1 for place in _places(key))
            for bits in (self._new, self._old)
        )

    def add(self, key: Key) -> None:
        if self._count == _FILTER_KEYS:
            self._old, self._new, self._count = self._new, bytearray(_FILTER_BITS // 8), 0
        for place in _places(key):
            self._new[place >> 3] |= 1 << (place & 7)
        self._count += 1


def _places(key: Key) -> Iterable[int]:
    """A key is a digest already: four of its words say where its bits are. Shorter keys do not occur."""
    return (word % _FILTER_BITS for word in struct.unpack("<4I", key))
