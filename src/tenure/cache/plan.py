"""Questions to the cache and its answers: frozen records, never internals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tenure.cache.ghosts import Ghost
from tenure.cache.lease import Lease, LeaseId
from tenure.policy.base import Shortfall
from tenure.types import BlockId, Key, MissReason, Scope, Token

__all__ = ["Ask", "Goes", "Head", "Lost", "Match", "Plan", "Shortfall", "Takes"]


@dataclass(frozen=True, slots=True)
class Head:
    """The first `tokens` tokens of a node that can be taken by copying its blocks; `whole` when it is a tail held by
    nobody that matched to its end, so that it can be taken over as it is."""

    key: Key
    block: BlockId
    """That of the first group of layers."""
    tokens: int
    whole: bool


@dataclass(frozen=True, slots=True)
class Match:
    """The longest held prefix of some tokens: `tokens` = B · len(blocks) + (head.tokens if head else 0)."""

    tokens: int
    keys: tuple[Key, ...]
    """Keys of the matching full blocks, in order."""
    blocks: tuple[BlockId, ...]
    head: Head | None
    awaited: LeaseId | None
    """The live lease that has promised (is computing) the next full block of these tokens."""


@dataclass(frozen=True, slots=True)
class Ask:
    """Blocks wanted. Without a lease: for a new sequence of `tokens`, with room for `room` ≥ len(tokens) tokens.
    With one: for the same sequence to grow to `room` (`tokens` is not looked at)."""

    scope: Scope
    tokens: Sequence[Token]
    room: int
    lease: Lease | None = None
    exact: bool = False
    """Neither recoded blocks nor what was computed on top of them will do."""
    fresh: bool = False
    """Nothing that is held will do: the logits of all tokens are wanted, and logits are not kept."""


@dataclass(frozen=True, slots=True)
class Takes:
    """Blocks to take from the free ones: `stored` for each group of layers, and to stage what is not full: 1 or 0."""

    stored: tuple[int, ...]
    opens: int


@dataclass(frozen=True, slots=True)
class Goes:
    """What is evicted to make room: first what windows have left of some blocks, by group of layers; then `victims`
    with all they have, in order: each is a leaf when its turn comes."""

    parts: tuple[tuple[Key, int], ...] = ()
    victims: tuple[Key, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """What `apply` would do, as data; good for one `epoch` of the cache."""

    epoch: int
    scope: Scope
    exact: bool
    lease: Lease | None
    reused: tuple[Key, ...]
    """Full blocks to lease, in order."""
    head: Head | None
    """Taken over when whole, else copied into the first block taken."""
    takes: Takes
    """Once the victims are gone."""
    goes: Goes
    promises: tuple[Key, ...]
    """Full blocks of the prompt that this sequence is going to compute."""
    reused_tokens: int
    leases: int
    """Blocks that are leased afterwards and were not before, in stored ones of the first group."""

    @property
    def victims(self) -> tuple[Key, ...]:
        return self.goes.victims


@dataclass(frozen=True, slots=True)
class Lost:
    """What of a prompt was held once, or is held and does not serve: so many `tokens` right behind what serves now, or
    nothing but that there was something (`older`)."""

    tokens: int
    reason: MissReason | None
    """Why the first of them do not serve: `window` and `recoded` ones are held, and of `below_minimum` ones their block
    is, which serves whole or not at all."""
    first: Ghost | None
    """The first of their blocks that is gone, when that is the reason."""
    older: bool
