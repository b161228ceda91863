"""The desk where conversations are asked after: seen, pinned, paused, resumed, deleted; each by tenant:
another's conversations are not found.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass

from tenure.cache.history import History, Past
from tenure.errors import NotFound
from tenure.events import ConversationChanged, FactLog, RequestRefused
from tenure.sched.scheduler import News, Scheduler
from tenure.sched.sequence import Phase, Sequence
from tenure.types import Pin, PinReceipt, Request, Scope, Token
from tenure.views import ConversationView, PinView, TenantView

STATES = {Phase.PREFILL: "running", Phase.DECODE: "running"}
MOST = 1000
"""Conversations listed at once, the newest first."""


@dataclass(frozen=True, slots=True)
class _Talk:
    """A conversation as it was or is: the newest of its sequences, and who computes on it right now."""

    scope: Scope
    newest: Past | Sequence
    at: float
    live: tuple[Sequence, ...] = ()

    @property
    def tokens(self) -> Many[Token]:
        """Of the newest sequence; history unpacks them only when they are asked for."""
        return self.newest.tokens


class Desk:
    """Belongs to the thread that owns the scheduler."""

    def __init__(self, scheduler: Scheduler, history: History, facts: FactLog) -> None:
        self._scheduler = scheduler
        self._history = history
        self._facts = facts
        self._cache = scheduler.cache
        self._pins = scheduler.pins

    # --- ask ---------------------------------------------------------------------------------------------------------

    def conversations(self, tenant: str | None, now: float) -> list[ConversationView]:
        """Those of a tenant, or of all (None), the last used first."""
        talks = sorted(self._talks(tenant).items(), key=lambda item: -item[1].at)[:MOST]
        return [self._view(name, talk, now) for (_, name), talk in talks]

    def inspect(self, tenant: str | None, name: str, now: float) -> ConversationView:
        """One of them; NotFound when there is none of this name, or it is another tenant's."""
        return self._view(name, self._find(tenant, name), now)

    def tenants(self) -> tuple[TenantView, ...]:
        """What each tenant has, uses and was served."""
        queue, size = self._scheduler.queue, self._scheduler.limits.block_bytes
        whole = sum(account.service for account in queue.accounts.values()) or 1.0
        return tuple(
            TenantView(
                name=account.name,
                weight=account.tenant.weight,
                running=account.running,
                waiting=len(account.queue),
                queued_tokens=account.new_tokens,
                held_bytes=self._scheduler.room.held_by(account.name) * size,
                pinned_bytes=self._pins.bytes_of(account.name),
                service=account.service,
                share=account.service / whole,
                max_blocks=self._scheduler.room.longest_of(account),
            )
            for account in queue.accounts.values()
        )

    # --- do ----------------------------------------------------------------------------------------------------------

    def pin(self, tenant: str | None, name: str, ttl_s: float, now: float) -> PinReceipt:
        """Keep what is held of a conversation for `ttl_s` seconds."""
        talk = self._find(tenant, name)
        tokens = talk.tokens
        return self._pins.grant(name, talk.scope, tokens, Pin(len(tokens), ttl_s), now)

    def unpin(self, tenant: str | None, name: str, now: float) -> int:
        """End the conversation's pins; how many blocks they held."""
        return self._unpin(self._find(tenant, name), "unpinned", now)

    def pause(self, tenant: str | None, name: str, now: float) -> ConversationView:
        """What runs of it gives its blocks back and waits until `resume`, and so does what comes."""
        talk = self._find(tenant, name)
        self._scheduler.on_hold.add((talk.scope.tenant, name))
        for seq in talk.live:
            if seq.lease is not None:
                self._scheduler.pause(seq, "operator", "its conversation was paused", now)
        self._changed(talk, name, "paused", 0, now)
        return self.inspect(tenant, name, now)

    def resume(self, tenant: str | None, name: str, now: float) -> ConversationView:
        """Go on with what was paused."""
        talk = self._find(tenant, name)
        self._scheduler.on_hold.discard((talk.scope.tenant, name))
        self._changed(talk, name, "resumed", 0, now)
        return self.inspect(tenant, name, now)

    def delete(self, tenant: str | None, name: str, now: float) -> tuple[int, list[News]]:
        """Cancel what runs of it and let go of all that only it holds: the blocks dropped, and the ends of requests."""
        talk = self._find(tenant, name)
        news: list[News] = []
        for request in dict.fromkeys(seq.job.request.id for seq in talk.live):
            news += self._scheduler.cancel(request, now)
        self._scheduler.on_hold.discard((talk.scope.tenant, name))
        self._unpin(talk, "deleted", now)
        blocks = 0
        for past in self._history.of(talk.scope.tenant, name):
            blocks += self._cache.let_go(past.scope, past.tokens, now, "operator", "deleted")
            self._history.drop(past)
        self._changed(talk, name, "deleted", blocks, now)
        return blocks, news

    def clear(self, now: float) -> int:
        """Drop all blocks that nobody leases; how many."""
        return self._cache.drop_unleased(now)

    def refuse(self, request: Request, code: str, now: float) -> None:
        """Tell that a request was not taken."""
        self._facts.emit(RequestRefused(now, request.id, code, tenant=request.scope.tenant))

    # --- how ---------------------------------------------------------------------------------------------------------

    def _talks(self, tenant: str | None) -> dict[tuple[str, str], _Talk]:
        """All conversations by tenant and name: what history remembers, and what lives."""
        found: dict[tuple[str, str], _Talk] = {}
        for past in self._history.all():  # the oldest first: later turns replace earlier ones
            if tenant is None or past.scope.tenant == tenant:
                found[past.scope.tenant, past.name] = _Talk(past.scope, past, past.at)
        for seq in self._scheduler.sequences():
            request = seq.job.request
            if tenant is not None and request.scope.tenant != tenant:
                continue
            name = seq.job.name
            before = found.get((request.scope.tenant, name))
            live = (*(before.live if before else ()), seq)
            found[request.scope.tenant, name] = _Talk(request.scope, seq, float("inf"), live)
        return found

    def _find(self, tenant: str | None, name: str) -> _Talk:
        found = [talk for (_, other), talk in self._talks(tenant).items() if other == name]
        if not found:
            raise NotFound(f"there is no conversation {name!r}", param="conversation")
        return max(found, key=lambda talk: talk.at)

    def _view(self, name: str, talk: _Talk, now: float) -> ConversationView:
        tokens = talk.tokens
        match = self._cache.match(talk.scope, tokens)
        on_hold = (talk.scope.tenant, name) in self._scheduler.on_hold
        states = {STATES.get(seq.phase, "waiting") for seq in talk.live}
        held = [*match.blocks, match.head.block if match.head else None]
        leased = [[*seq.lease.blocks, seq.lease.open] for seq in talk.live if seq.lease is not None]
        computed = max([match.tokens, *(seq.computed for seq in talk.live)])
        return ConversationView(
            id=name,
            tenant=talk.scope.tenant,
            tokens=len(tokens),
            held_tokens=computed,
            bytes=self._cache.bytes_of(max([held, *leased], key=len), self._scheduler.limits.block_bytes),
            idle_s=0.0 if talk.live else max(0.0, now - talk.at),
            state="paused" if on_hold else min(states, default="idle"),
            pins=tuple(
                PinView(len(pin.tokens), pin.blocks * self._scheduler.limits.block_bytes, pin.until - now)
                for pin in self._pins.within(talk.scope, match.keys)
                if pin.until > now
            ),
        )

    def _unpin(self, talk: _Talk, reason: str, now: float) -> int:
        keys = self._cache.match(talk.scope, talk.tokens).keys
        return sum(self._pins.unpin(pin, reason, now) for pin in self._pins.within(talk.scope, keys))

    def _changed(self, talk: _Talk, name: str, change: str, blocks: int, now: float) -> None:
        self._facts.emit(ConversationChanged(now, name, change, blocks, tenant=talk.scope.tenant))
