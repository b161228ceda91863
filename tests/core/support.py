"""A small cache to try things on: blocks of 4 tokens, a clock that counts calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from tenure.cache.kvcache import KvCache
from tenure.cache.lease import Grant, Lease
from tenure.cache.plan import Ask, Plan, Shortfall
from tenure.events import Fact, FactLog
from tenure.policy.base import EvictionPolicy
from tenure.policy.eviction import Lru
from tenure.spec import Codec, codec
from tenure.types import Scope

B = 4
SCOPE = Scope("m")
QUANTISED = Codec("q", 8, 8, head_reusable=False)
F = TypeVar("F", bound=Fact)


@dataclass
class Bench:
    blocks: int = 16
    codec: Codec = field(default_factory=lambda: codec("bf16"))
    policy: EvictionPolicy = field(default_factory=Lru)
    size: int = B
    now: float = 0.0

    def __post_init__(self) -> None:
        self.facts = FactLog()
        self.cache = KvCache(self.blocks, self.size, codec=self.codec, eviction=self.policy, facts=self.facts)

    def tick(self) -> float:
        self.now += 1.0
        return self.now

    def plan(self, tokens: Sequence[int], room: int | None = None, scope: Scope = SCOPE) -> Plan | Shortfall:
        return self.cache.plan(Ask(scope, tokens, len(tokens) if room is None else room), self.now)

    def start(self, tokens: Sequence[int], room: int | None = None, scope: Scope = SCOPE) -> Grant:
        plan = self.plan(tokens, room, scope)
        assert isinstance(plan, Plan), plan
        return self.cache.apply(plan, self.tick())

    def grow(self, lease: Lease, room: int) -> Lease:
        plan = self.cache.plan(Ask(lease.scope, (), room, lease), self.now)
        assert isinstance(plan, Plan), plan
        return self.cache.apply(plan, self.tick()).lease

    def release(self, lease: Lease, tokens: Sequence[int], computed: int | None = None) -> None:
        self.cache.release(lease, tokens, len(tokens) if computed is None else computed, self.tick(), "stop")

    def visit(self, tokens: Sequence[int], scope: Scope = SCOPE) -> int:
        """A sequence comes, computes all of `tokens` and goes; how many it reused."""
        grant = self.start(tokens, scope=scope)
        self.release(grant.lease, tokens)
        self.cache.check()
        return grant.lease.reused_tokens

    def told(self, kind: type[F]) -> list[F]:
        return [fact for fact in self.facts.since(0)[0] if isinstance(fact, kind)]
