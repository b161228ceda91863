"""Pins: prefixes that stay held for a while whoever needs room, each tenant's within a budget of bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tenure.cache.kvcache import KvCache
from tenure.cache.lease import Lease
from tenure.errors import ConfigError
from tenure.events import FactLog, PinEnded, PinGranted, PinRefused
from tenure.tenants import Tenants
from tenure.types import Key, Pin, PinReceipt, Scope, Token


@dataclass(frozen=True, slots=True)
class Pinned:
    """A pin that holds. `keys` name its blocks, in order."""

    tenant: str
    tokens: tuple[Token, ...]
    keys: tuple[Key, ...]
    lease: Lease
    until: float


class Pins:
    """All pins, and what each tenant may still pin. A block counts once for a tenant, however many pins hold it."""

    def __init__(self, cache: KvCache, tenants: Tenants, block_bytes: int, facts: FactLog) -> None:
        """ConfigError when the budgets together are larger than the pool."""
        self._cache = cache
        self._facts = facts
        self._block_bytes = block_bytes
        total = cache.counts().total
        self._budgets = {
            tenant.name: (tenant.max_pinned_bytes or 0) // block_bytes for tenant in tenants.tenants
        }  # in blocks
        given = sum(self._budgets.values())
        if given > total:
            raise ConfigError(
                "tenants",
                f"the tenants may pin {given * block_bytes:,} bytes together, but the KV cache has"
                f" {total * block_bytes:,}",
            )
        self._rest = (total - given) // 2
        """Blocks for those without a budget of their own: half of what is left, so that there is room to work."""
        self._pins: dict[tuple[str, Key], Pinned] = {}
        self._held: dict[str, Counter[Key]] = {}
        self._next = float("inf")

    # ---- ask

    @property
    def blocks(self) -> int:
        """Blocks that pins hold, each counted once for every tenant."""
        return sum(len(held) for held in self._held.values())

    @property
    def due(self) -> float:
        """When the next one ends, in seconds; infinite when there is none."""
        return self._next

    def bytes_of(self, tenant: str) -> int:
        return len(self._held.get(tenant, ())) * self._block_bytes

    def within(self, scope: Scope, keys: Sequence[Key]) -> list[Pinned]:
        """The pins whose last block is one of `keys`."""
        return [pin for key in keys if (pin := self._pins.get((scope.tenant, key))) is not None]

    # ---- do

    def grant(self, request: str, scope: Scope, tokens: Sequence[Token], pin: Pin, now: float) -> PinReceipt:
        """Hold the full blocks within the first `pin.end_token` tokens, all of them computed, or say why not."""
        match = self._cache.match(scope, tokens[: pin.end_token])
        keys, tenant = match.keys, scope.tenant
        held = self._held.setdefault(tenant, Counter())
        new = len(set(keys) - held.keys())
        budget = self._budgets.get(tenant, self._rest)
        old = self._pins.get((tenant, keys[-1])) if keys else None
        reason = None
        if not keys:
            reason = f"nothing to pin: no full block of {self._cache.block_tokens} tokens lies before its end"
        elif new + len(held) > budget:
            room = max(0, budget - len(held)) * self._block_bytes
            reason = f"it needs {new * self._block_bytes:,} bytes more; the budget for pins has {room:,} left"
        if reason is not None:
            self._facts.emit(PinRefused(now, request, pin.end_token, len(keys), reason, tenant=tenant))
            return PinReceipt(pin.end_token, False, 0, 0, 0.0, reason)
        until = now + pin.ttl_s
        if old is not None:
            until = max(until, old.until)
        size = len(keys) * self._cache.block_tokens
        pinned = tuple(tokens[:size])
        lease = self._cache.hold(scope, pinned, now)
        assert lease is not None
        if old is not None:
            self._end(old, "replaced", now)
        self._pins[tenant, keys[-1]] = Pinned(tenant, pinned, keys, lease, until)
        held.update(keys)
        self._next = min(self._next, until)
        self._facts.emit(PinGranted(now, request, keys[-1], size, len(keys), until, tenant=tenant))
        return PinReceipt(pin.end_token, True, size, len(keys) * self._block_bytes, until - now, pin.note)

    def expire(self, now: float) -> None:
        """Let go of the pins whose time has passed."""
        if now < self._next:
            return
        for pin in [pin for pin in self._pins.values() if pin.until <= now]:
            self._end(pin, "expired", now)
        self._next = min((pin.until for pin in self._pins.values()), default=float("inf"))

    def unpin(self, pin: Pinned, reason: str, now: float) -> int:
        """Let go of one; its blocks."""
        self._end(pin, reason, now)
        return len(pin.keys)

    def revoke(self, now: float) -> bool:
        """Let go of the pin that would end first, because nothing else gives room; False when there is none."""
        first = min(self._pins.values(), key=lambda pin: pin.until, default=None)
        if first is None:
            return False
        self._end(first, "revoked", now)
        return True

    def _end(self, pin: Pinned, reason: str, now: float) -> None:
        del self._pins[pin.tenant, pin.keys[-1]]
        held = self._held[pin.tenant]
        held.subtract(pin.keys)
        for key in pin.keys:
            if not held[key]:
                del held[key]
        self._cache.release(pin.lease, pin.tokens, pin.lease.committed_tokens, now, "unpinned")
        if reason == "expired":
            self._cache.ghosts.lapse(pin.keys)
        self._facts.emit(PinEnded(now, pin.keys[-1], len(pin.keys), reason, tenant=pin.tenant))
