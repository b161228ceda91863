"""Which cached block goes first."""

from __future__ import annotations

from collections.abc import Hashable

from tenure.events import Fact
from tenure.policy.base import BlockView


class Lru:
    """Least recently used, tails before full blocks: a tail helps one conversation, by less than a block."""

    name = "lru"

    def learn(self, fact: Fact) -> None:
        """Nothing: the cache itself keeps the order within a bucket."""

    def bucket(self, view: BlockView) -> Hashable:
        return "tail" if view.is_tail else "full"

    def rank(self, bucket: Hashable, age_s: float) -> float:
        return 0.0 if bucket == "tail" else 1.0
