"""Pins: prefixes that stay held for a while whoever needs room, each tenant's within a budget of bytes."""

from __future__ import annotations

from collections import Counter, defaultdict
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
    """A pin that holds. `keys` name its blocks, in order; `blocks` is what those of them weigh that it keeps."""

    tenant: str
    tokens: tuple[Token, ...]
    keys: tuple[Key, ...]
    blocks: int
    lease: Lease
    until: float


class Pins:
    """All pins, and what each tenant may still pin. A block counts once for a tenant, however many pins hold it; of
    layers with a window those count that a prompt which goes on from there sees, all in blocks of the first group."""

    def __init__(self, cache: KvCache, tenants: Tenants, block_bytes: int, facts: FactLog) -> None:
        """ConfigError when the budgets together are larger than the pool."""
        self._cache = cache
        self._facts = facts
        self._block_bytes = block_bytes
        self._budgets = {tenant.name: (tenant.max_pinned_bytes or 0) // block_bytes for tenant in tenants.tenants}
        """In blocks."""
        given, total = sum(self._budgets.values()), cache.counts().total
        if given > total:
            given, total = given * block_bytes, total * block_bytes
            message = f"the tenants may pin {given:,} bytes together, but the KV cache has {total:,}"
            raise ConfigError("tenants", message)
        self._rest = (total - given) // 2
        """Blocks for those without a budget of their own: half of what is left, so that there is room to work."""
        self._pins: dict[tuple[str, Key], Pinned] = {}
        self._held: dict[str, list[Counter[Key]]] = defaultdict(lambda: [Counter() for _ in cache.seen(())])
        """By tenant and group of layers."""
        self.due = float("inf")
        """When the next one ends, in seconds; infinite when there is none."""

    # ---- ask

    @property
    def blocks(self) -> int:
        """Blocks that pins hold, each counted once for every tenant."""
        return sum(self._cache.weigh(map(len, held)) for held in self._held.values())

    def bytes_of(self, tenant: str) -> int:
        return self._cache.weigh(map(len, self._held[tenant])) * self._block_bytes

    def within(self, scope: Scope, keys: Sequence[Key]) -> list[Pinned]:
        """The pins whose last block is one of `keys`."""
        return [pin for key in keys if (pin := self._pins.get((scope.tenant, key))) is not None]

    # ---- do

    def grant(self, request: str, scope: Scope, tokens: Sequence[Token], pin: Pin, now: float) -> PinReceipt:
        """Hold the full blocks within the first `pin.end_token` tokens, all of them computed, or say why not."""
        tenant, wanted, cache = scope.tenant, tokens[: pin.end_token], self._cache
        keys, budget = cache.match(scope, wanted).keys, self._budgets.get(tenant, self._rest)
        seen, held = cache.seen(keys), self._held[tenant]
        blocks, had = cache.weigh(map(len, seen)), cache.weigh(map(len, held))
        then = cache.weigh(len(of) + sum(key not in of for key in more) for of, more in zip(held, seen, strict=True))
        new, room = (then - had) * self._block_bytes, max(0, budget - had) * self._block_bytes
        lack = self._lack(scope, wanted, len(keys))
        if not keys or new > room:
            short = f"it needs {new:,} bytes more; the budget for pins has {room:,} left"
            reason = short if keys else f"nothing to pin: {lack}"
            self._facts.emit(PinRefused(now, request, pin.end_token, blocks, reason, tenant=tenant))
            return PinReceipt(pin.end_token, False, 0, 0, 0.0, reason)
        old = self._pins.get((tenant, keys[-1]))
        until = now + pin.ttl_s if old is None else max(now + pin.ttl_s, old.until)
        pinned = tuple(tokens[: len(keys) * cache.block_tokens])
        lease = cache.hold(scope, pinned, now)
        assert lease is not None
        if old is not None:
            self._end(old, "replaced", now)
        self._pins[tenant, keys[-1]] = Pinned(tenant, pinned, keys, blocks, lease, until)
        for of, more in zip(held, seen, strict=True):
            of.update(more)
        self.due = min(self.due, until)
        self._facts.emit(PinGranted(now, request, keys[-1], len(pinned), blocks, until, tenant=tenant))
        notes = "; ".join(note for note in (pin.note, lack) if note) or None
        return PinReceipt(pin.end_token, True, len(pinned), blocks * self._block_bytes, until - now, notes)

    def expire(self, now: float) -> None:
        """Let go of the pins whose time has passed."""
        if now < self.due:
            return
        for pin in [pin for pin in self._pins.values() if pin.until <= now]:
            self._end(pin, "expired", now)
        self.due = min((pin.until for pin in self._pins.values()), default=float("inf"))

    def unpin(self, pin: Pinned, reason: str, now: float) -> int:
        """Let go of one; its blocks."""
        self._end(pin, reason, now)
        return pin.blocks

    def revoke(self, now: float) -> bool:
        """Let go of the pin that would end first, because nothing else gives room; False when there is none."""
        first = min(self._pins.values(), key=lambda pin: pin.until, default=None)
        if first is None:
            return False
        self._end(first, "revoked", now)
        return True

    def _end(self, pin: Pinned, reason: str, now: float) -> None:
        del self._pins[pin.tenant, pin.keys[-1]]
        for of, less in zip(self._held[pin.tenant], self._cache.seen(pin.keys), strict=True):
            of.subtract(less)
            for key in [key for key in less if not of[key]]:
                del of[key]
        self._cache.release(pin.lease, pin.tokens, pin.lease.committed_tokens, now, "unpinned")
        if reason == "expired":
            self._cache.ghosts.lapse(pin.keys)
        self._facts.emit(PinEnded(now, pin.keys[-1], pin.blocks, reason, tenant=pin.tenant))

    def _lack(self, scope: Scope, tokens: Sequence[Token], held: int) -> str | None:
        """Why of the full blocks of `tokens` no more than the first `held` can be pinned; None when all can."""
        size = self._cache.block_tokens
        full = len(tokens) // size
        if held == full:
            return None if full else f"no full block of {size} tokens lies before its end"
        lost = self._cache.lost(scope, [*tokens, 0], held * size)
        why = "windows have let go of what their layers see there" if lost.reason == "window" else "no more is held"
        return f"{held} of {full} full blocks before its end can be reused: {why}"
