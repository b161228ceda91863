"""A lease: a sequence's right to its blocks, as a frozen receipt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType

from tenure.types import BlockId, CopyOp, Scope

LeaseId = NewType("LeaseId", int)


@dataclass(frozen=True, slots=True)
class Lease:
    """The blocks one sequence may read, and from `committed_tokens` on write.

    A receipt: `apply` and `commit` return its successor (same id), and the cache takes only the newest one.
    """

    id: LeaseId
    scope: Scope
    blocks: tuple[BlockId, ...]
    """Block i holds tokens [i·B, (i+1)·B) of the sequence."""
    reused_tokens: int
    """Tokens that were held when the lease began: the sequence computes from here on."""
    committed_tokens: int
    """Tokens in full blocks that are shareable: a multiple of B."""


@dataclass(frozen=True, slots=True)
class Grant:
    """What applying a plan gave. The copies must be executed before the lease's blocks are read or written."""

    lease: Lease
    copies: tuple[CopyOp, ...]
