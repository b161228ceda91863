"""Who shares the server: tenants, their limits and what all of them may share."""

from __future__ import annotations

from dataclasses import dataclass

from tenure.types import Token


@dataclass(frozen=True, slots=True)
class Tenant:
    """One of those who share the server. Limits that are None do not bind. `name` is what scopes and facts carry."""

    name: str
    keys: tuple[str, ...] = ()
    weight: float = 1.0
    max_concurrent: int | None = None
    max_queued_tokens: int | None = None
    max_kv_bytes: int | None = None
    max_pinned_bytes: int | None = 0
    """None, as for requests without a tenant: up to half of the pool."""


ANYONE = Tenant("", max_pinned_bytes=None)
"""Whoever comes without a key of any tenant."""


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """A prefix that all tenants may hit: as text (tokenised as a completion's prompt is) or as token ids."""

    text: str | None = None
    tokens: tuple[Token, ...] | None = None


@dataclass(frozen=True, slots=True)
class Tenants:
    """The whole file."""

    tenants: tuple[Tenant, ...] = ()
    shared: tuple[SharedPrefix, ...] = ()

    def of(self, name: str) -> Tenant:
        """The tenant called `name`; one without limits, of weight 1, when there is none."""
        return next((tenant for tenant in self.tenants if tenant.name == name), ANYONE)

    def by_key(self) -> dict[str, Tenant]:
        """Tenants by their API keys."""
        return {key: tenant for tenant in self.tenants for key in tenant.keys}
