"""Policies by the names operators use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from tenure.errors import ConfigError
from tenure.policy.admission import BoundedQueue
from tenure.policy.base import AdmissionPolicy, EvictionPolicy, PressurePolicy
from tenure.policy.eviction import Lru
from tenure.policy.gittins import Gittins
from tenure.policy.pressure import STEPS, ladder

EVICTION: Mapping[str, Callable[[], EvictionPolicy]] = {Lru.name: Lru, Gittins.name: Gittins}
ADMISSION: Mapping[str, Callable[[], AdmissionPolicy]] = {BoundedQueue.name: BoundedQueue}
PRESSURE = STEPS
"""Steps of the ladder."""

P = TypeVar("P")


def eviction(name: str) -> EvictionPolicy:
    """A new eviction policy called `name`; ConfigError lists the known ones. So for the others."""
    return _named("eviction", EVICTION, name)


def admission(name: str) -> AdmissionPolicy:
    return _named("admission", ADMISSION, name)


def pressure(name: str) -> PressurePolicy:
    """A new ladder, such as `pause@95%`."""
    return ladder(name)


def _named(kind: str, known: Mapping[str, Callable[[], P]], name: str) -> P:
    try:
        return known[name]()
    except KeyError:
        raise ConfigError(kind, f"unknown {kind} policy {name!r}; known: {', '.join(sorted(known))}") from None
