"""Protocols of places that hold blocks; the device arena is the only one so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NewType, Protocol

from tenure.types import BlockId, BlockOp, Key

Ticket = NewType("Ticket", int)
"""A transfer under way; `poll` tells when it is over."""


@dataclass(frozen=True, slots=True)
class TierStat:
    """What a tier holds and could hold, in bytes and blocks."""

    name: str
    used_bytes: int
    capacity_bytes: int
    blocks: int


class BlockStore(Protocol):
    """Where the blocks of the pool lie: the device serves, a null store simulates."""

    def execute(self, ops: Sequence[BlockOp]) -> None:
        """Carry out the copies, in order, before anything else reads or writes the blocks."""
        ...


class Tier(Protocol):
    """A store below the device. Transfers run elsewhere; nothing here blocks."""

    def stat(self) -> TierStat: ...

    def begin_put(self, key: Key, src: BlockId) -> Ticket: ...

    def begin_get(self, key: Key, dst: BlockId) -> Ticket: ...

    def poll(self) -> Sequence[tuple[Ticket, str | None]]:
        """Transfers that ended since the last call, each with the reason it failed or None."""
        ...

    def drop(self, key: Key) -> None: ...
