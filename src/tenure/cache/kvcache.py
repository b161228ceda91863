"""The façade of the cache: what is resident, and whose."""

from __future__ import annotations

from collections.abc import Sequence

from tenure.cache.lease import Grant, Lease
from tenure.cache.plan import Ask, Match, Plan, Shortfall
from tenure.events import FactLog
from tenure.policy.base import EvictionPolicy
from tenure.spec import Codec
from tenure.types import PoolCounts, Scope, Token


class KvCache:
    """A pool of blocks, an index of what they hold, and the leases on them.

    Asks (`match`, `plan`) change nothing; `apply`, `commit`, `release` and `drop_unleased` are the only mutators. One
    thread owns it. A request asks again only after `epoch` has moved: until then the answers stay the same.
    """

    def __init__(
        self, pool_blocks: int, block_tokens: int, *, codec: Codec, eviction: EvictionPolicy, facts: FactLog
    ) -> None: ...

    @property
    def epoch(self) -> int:
        """Moves with every change of what is held, promised or leased."""
        ...

    @property
    def block_tokens(self) -> int: ...

    def match(self, scope: Scope, tokens: Sequence[Token]) -> Match:
        """The longest reusable prefix of all of `tokens`. Stamps nothing."""
        ...

    def plan(self, ask: Ask, now: float) -> Plan | Shortfall:
        """How to give what is asked, or why it cannot be given.

        For a new sequence reuse is matched over tokens[:-1]: the last token is always computed, for its logits.
        """
        ...

    def apply(self, plan: Plan, now: float) -> Grant:
        """Carry out a plan: all of it, or none (StalePlan when the epoch has moved)."""
        ...

    def commit(
        self, lease: Lease, tokens: Sequence[Token], computed: int, now: float, *, tail: bool = False
    ) -> Lease:
        """Make shareable what is computed: `tokens` are all of the sequence, the first `computed` have valid KV.

        Full blocks fulfil their promises; one that is held already is given back and the held one leased instead,
        so always go on with the lease returned. With `tail` the open block's computed head is published too
        (append-only: the owner goes on writing behind it). Costs nothing when no block became full.
        """
        ...

    def release(self, lease: Lease, tokens: Sequence[Token], computed: int, now: float, why: str) -> None:
        """Commit (tail included), then give the lease back; what is shareable stays cached, evictable."""
        ...

    def drop_unleased(self, now: float) -> int:
        """Evict everything nobody leases; the number of blocks dropped."""
        ...

    def counts(self) -> PoolCounts: ...

    def leaked(self) -> int:
        """Blocks that are neither free, cached nor of any lease; 0 unless there is a bug."""
        ...

    def check(self) -> None:
        """Verify every invariant; raises Corrupt with a sentence naming the one that does not hold."""
        ...
