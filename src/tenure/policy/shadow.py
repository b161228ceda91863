"""What LRU would have done: the yardstick a cleverer policy is held to."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from tenure.types import Key

LOSS = 0.001
"""Share of the tokens looked up that the policy may stay behind LRU before it gives way."""
HORIZON = 64
"""The record spans about so many fillings of the cache, by blocks used."""


class ShadowLru:
    """The keys that an LRU cache of the same size would hold, and both records. Its size follows the real cache's.

    Sequences are used from their last block to their first, so that a block always goes before those it stands on:
    that is leaf-only LRU without a tree.
    """

    def __init__(self) -> None:
        self._order: OrderedDict[Key, None] = OrderedDict()
        self._capacity = 0
        self._uses = 0
        self._looked_up = 0
        self._ahead = 0
        self.hits = 0
        """Tokens that LRU would have found, in all."""
        self.better = False
        """LRU's recent record is better than the policy's."""

    def __len__(self) -> int:
        return len(self._order)

    def full(self, blocks: int) -> None:
        """The real cache had to let a block go and holds so many now."""
        self._capacity = blocks

    def use(self, path: Sequence[tuple[Key, int, bool]]) -> None:
        """A sequence ended: its blocks from the last to the first, the tokens of each, and whether it had been held."""
        order = self._order
        self._uses += len(path)
        for key, tokens, held in path:
            self._looked_up += tokens
            if key in order:
                order.move_to_end(key)
                self._ahead -= tokens
                self.hits += tokens
            else:
                order[key] = None
            if held:
                self._ahead += tokens
        if self._capacity:
            while len(order) > self._capacity:
                order.popitem(last=False)
            self._judge()

    def _judge(self) -> None:
        self.better = -self._ahead > LOSS * self._looked_up
        if self._uses > HORIZON * self._capacity:
            self._uses //= 2
            self._looked_up //= 2
            self._ahead //= 2
