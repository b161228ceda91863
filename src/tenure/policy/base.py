"""What policies see and answer: frozen views, verdicts and protocols.

A policy holds no clock, no I/O, no logger and no reference to the cache. Structural safety (leaves only, never leased)
is the cache's job; taste is the policy's. New ideas wrap a policy, they do not add flags to one.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from tenure.errors import Number
from tenure.events import Fact
from tenure.spec import UNBOUNDED
from tenure.types import Key, SeqId


@dataclass(frozen=True, slots=True)
class BlockView:
    """What an eviction policy sees of an evictable leaf. `tokens` counts what it holds, times are seconds."""

    key: Key
    tokens: int
    is_tail: bool
    depth: int
    """Blocks between the leaf and its root: 0 for the first block of a prompt."""
    scope_digest: Key
    """Equal for blocks of one scope and lineage, different for others."""
    last_used: float
    created: float


class EvictionPolicy(Protocol):
    """Which cached leaf goes first.

    Within a bucket the longest idle leaf goes first; across buckets the one whose longest idle leaf has the lowest
    rank (of equal ranks the longest idle again). `bucket` and `rank` are pure between two facts. A leaf is put into
    its bucket when it becomes evictable.
    """

    @property
    def name(self) -> str: ...

    def learn(self, fact: Fact) -> None: ...

    def bucket(self, view: BlockView) -> Hashable: ...

    def rank(self, bucket: Hashable, age_s: float) -> float: ...


@dataclass(frozen=True, slots=True)
class TenantLoad:
    """What of one tenant waits, and its limits; None does not bind."""

    queued_requests: int
    queued_tokens: int
    max_queued_tokens: int | None
    max_blocks: int | None
    """Blocks that one of its running sequences can have within what all may hold together."""


@dataclass(frozen=True, slots=True)
class Load:
    """How busy the runtime is, and the limits that bind. Counts of sequences, requests, tokens and blocks."""

    running: int
    waiting: int
    queued_requests: int
    queued_tokens: int
    free_blocks: int
    evictable_blocks: int
    total_blocks: int
    predicted_start_s: float
    """Seconds until a request that came now would start."""
    max_queued_requests: int
    max_queued_tokens: int
    context_limit: int
    block_tokens: int
    tenants: Mapping[str, TenantLoad] = field(default_factory=dict)
    """Of tenants that have limits."""
    windowed: bool = False
    """All layers have windows: a sequence may outgrow the pool."""

    @property
    def longest_blocks(self) -> int:
        """Blocks that one sequence can ever have."""
        return UNBOUNDED if self.windowed else self.total_blocks

    def blocks(self, tokens: int) -> int:
        """Blocks that `tokens` tokens occupy, the open one included."""
        return -(-tokens // self.block_tokens)


@dataclass(frozen=True, slots=True)
class AdmissionAsk:
    """A request before it is taken. `max_tokens` None: what the context leaves. Lower `priority` runs first."""

    prompt_tokens: int
    n: int
    max_tokens: int | None
    priority: int
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class Admit:
    """It can start now."""

    reason: str


@dataclass(frozen=True, slots=True)
class Wait:
    """Not now; nothing needs to be done for it to come true later."""

    reason: str


@dataclass(frozen=True, slots=True)
class Refuse:
    """No, and nothing will change that soon: an error code and the numbers that bind, fit for the client."""

    reason: str
    code: str
    numbers: Mapping[str, Number] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Pause:
    """Sequence `seq` gives its blocks back and waits; what is evicted meanwhile is computed again."""

    seq: SeqId
    reason: str


@dataclass(frozen=True, slots=True)
class Recode:
    """The oldest blocks of sequence `seq` are stored again by `codec`, to make room of about `blocks`."""

    seq: SeqId
    codec: str
    blocks: int
    reason: str


class AdmissionPolicy(Protocol):
    @property
    def name(self) -> str: ...

    def judge(self, ask: AdmissionAsk, load: Load) -> Admit | Wait | Refuse:
        """Whether to take a request. Pure: callable from any thread."""
        ...


@dataclass(frozen=True, slots=True)
class Shortfall:
    """Why blocks cannot be had (needed > free + evictable), or should not be: a limit below the whole pool is reached.
    All counts are blocks."""

    needed: int
    free: int
    evictable: int
    reason: str

    @property
    def is_hard(self) -> bool:
        """There is no such room, whatever the policy says."""
        return self.needed > self.free + self.evictable


@dataclass(frozen=True, slots=True)
class RunningView:
    """What a pressure policy sees of a running sequence. `arrived` and `started` are seconds."""

    seq: SeqId
    request: str
    priority: int
    arrived: float
    started: float
    tokens: int
    blocks_freed_if_paused: int
    """Blocks that nobody else leases."""
    recompute_tokens: int
    """Tokens to compute again if all of those were evicted meanwhile."""
    progress_since_resume: int
    """Tokens generated since it last started or resumed."""
    pauses: int = 0
    """Times it was paused before."""
    recodable_blocks: int = 0
    """Blocks that could be stored in fewer bits."""
    served: float = 0.0
    """What its tenant has been served, by its weight: higher for those that had more than their share."""


Relief = Pause | Recode | Wait | Refuse
"""What a pressure policy answers."""


class PressurePolicy(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def codecs(self) -> tuple[str, ...]:
        """Codecs that blocks may be recoded to."""
        ...

    def limit(self, total_blocks: int) -> int:
        """Leased blocks up to which nothing needs to be done, of a pool of `total_blocks`."""
        ...

    def start_limit(self, total_blocks: int) -> int:
        """Leased blocks up to which sequences start: where someone would have to wait."""
        ...

    def relieve(self, shortfall: Shortfall, running: Sequence[RunningView], load: Load) -> Relief:
        """What to do before a running sequence grows above the limit. When the shortfall is not hard, it grows all the
        same if nothing is to be done; else Wait pauses it, and Refuse ends it."""
        ...


class Placement(Enum):
    """What becomes of a block that leaves a tier with another below it."""

    KEEP = "keep"
    COPY = "copy"
    DROP = "drop"


class PlacementPolicy(Protocol):
    @property
    def name(self) -> str: ...

    def place(self, view: BlockView, below: str) -> Placement:
        """What to do with a block when tier `below` could take it."""
        ...
