"""The cache alone: requests in time order, each over in an instant, against the real index, leaves and policy.

All blocks of a request are inserted after its lookup, then leaves go until the cache has its size again; so a block
just inserted may be the first to go, and a request may be longer than the cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b

from tenure.cache.leaves import Leaves
from tenure.cache.radix import Node, RadixIndex
from tenure.events import BlockGone, BlockReused, BlockStored, SequenceEnded
from tenure.policy.base import EvictionPolicy
from tenure.sim.trace import TraceRequest
from tenure.types import BlockId, Fate, Key, SeqId

TIER = "device"
ROOT = Key(bytes(16))
_BLOCK = BlockId(0)


@dataclass(slots=True)
class Hits:
    """Tokens looked up and tokens found, of so many requests."""

    requests: int = 0
    tokens: int = 0
    hits: int = 0

    @property
    def rate(self) -> float:
        return self.hits / self.tokens if self.tokens else 0.0

    def count(self, request: TraceRequest, blocks: int) -> None:
        """The first `blocks` blocks of a request were held."""
        self.requests += 1
        self.tokens += request.prompt_tokens
        self.hits += request.tokens_of(blocks)


class InstantCache:
    """`blocks` blocks at most between two requests. A block is one pseudo token of the index: its id in the trace."""

    def __init__(self, blocks: int, policy: EvictionPolicy) -> None:
        self._blocks = blocks
        self._policy = policy
        self._index = RadixIndex(1)
        self.leaves = Leaves(policy, 1)
        self._now = -math.inf
        self._count = 0
        self.hits = Hits()

    def __len__(self) -> int:
        return len(self._index.nodes)

    def serve(self, request: TraceRequest) -> int:
        """One request; how many of its blocks were held."""
        # Times as told, but never the same twice: the order of use must not depend on the clock's grain.
        now = self._now = max(request.at, math.nextafter(self._now, math.inf))
        ids = request.blocks
        path = self._index.walk(ROOT, ids, len(ids))
        found = len(path)
        self.hits.count(request, found)
        learn = self._policy.learn
        for at, node in enumerate(path):
            tokens = request.block_size(at)
            learn(BlockReused(now, node.key, TIER, tokens, now - node.last_used))
            node.last_used = now
        if path:
            self.leaves.discard(path[-1])
        node = path[-1] if path else self._index.root(ROOT)
        for at in range(found, len(ids)):
            node = self._store(node, ids[at : at + 1], request.block_size(at), now)
        if ids:
            self._count += 1
            learn(SequenceEnded(now, "", SeqId(self._count), node.key, request.prompt_tokens, request.output_tokens))
            if not node.kids:
                self.leaves.add(node)
        self._shrink(now)
        return found

    def _store(self, parent: Node, ids: tuple[int, ...], tokens: int, now: float) -> Node:
        key = Key(blake2b(parent.key + ids[0].to_bytes(8, "little"), digest_size=16).digest())
        node = self._index.attach(parent, key, ids, [_BLOCK], now)
        above = parent.key if parent.parent else None
        self._policy.learn(BlockStored(now, key, above, _BLOCK, TIER, "", tokens, ids))
        return node

    def _shrink(self, now: float) -> None:
        excess = len(self._index.nodes) - self._blocks
        if excess <= 0:
            return
        victims = self.leaves.choose(excess, now, ())
        going = set(victims)
        for node in victims:
            self.leaves.discard(node)
            self._index.detach(node)
            idle, age = now - node.last_used, now - node.created
            self._policy.learn(
                BlockGone(now, node.key, _BLOCK, TIER, Fate.DROPPED, self._policy.name, "room", 0, idle, age)
            )
            parent = node.parent
            if parent and parent.parent and not parent.kids and parent not in going:
                self.leaves.add(parent)


def run(requests: Iterable[TraceRequest], blocks: int, policy: EvictionPolicy) -> Hits:
    """Replay `requests` against a cache of `blocks` blocks."""
    cache = InstantCache(blocks, policy)
    for request in requests:
        cache.serve(request)
    return cache.hits
