"""Facts: immutable records of what happened, and the bounded log they are told to.

Policies learn from facts, metrics count them, traces and event streams carry them. Nothing else tells what happened.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice

from tenure.types import BlockId, Fate, Finish, Key, LimitCause, Receipt, SeqId, Timings, Usage


@dataclass(frozen=True, slots=True)
class Fact:
    """Base of all facts; `at` is the time of the clock that the caller holds, in seconds."""

    at: float
    tenant: str = field(default="", kw_only=True)
    """Whom it concerns: a tenant, or nobody in particular."""


@dataclass(frozen=True, slots=True)
class BlockStored(Fact):
    """A block became shareable. `tokens` is how many it holds (a tail holds fewer than a full block)."""

    key: Key
    parent: Key | None
    block: BlockId
    tier: str
    codec: str
    tokens: int
    ids: tuple[int, ...]
    """The block's token ids, for event streams that carry them."""


@dataclass(frozen=True, slots=True)
class BlockGone(Fact):
    """A key left a tier; the only way one does."""

    key: Key
    block: BlockId
    tier: str
    fate: Fate
    by: str
    reason: str
    recompute_tokens: int
    idle_s: float
    age_s: float


@dataclass(frozen=True, slots=True)
class BlockReused(Fact):
    """A stored block was leased again, `gap_s` seconds after its last use."""

    key: Key
    tier: str
    tokens: int
    gap_s: float


@dataclass(frozen=True, slots=True)
class BlockMerged(Fact):
    """Two sequences had computed the same block: `given` was freed and its owner leases `kept`. No key left."""

    key: Key
    kept: BlockId
    given: BlockId


@dataclass(frozen=True, slots=True)
class WindowGone(Fact):
    """What layers with a window of so many tokens had kept of a block was evicted: no window of a sequence that runs
    needs it. Whoever goes on from there must compute it again; the block is still held in the other layers."""

    key: Key
    block: BlockId
    window: int
    by: str
    reason: str
    idle_s: float


@dataclass(frozen=True, slots=True)
class RequestQueued(Fact):
    request: str
    prompt_tokens: int
    n: int
    session: str | None = None


@dataclass(frozen=True, slots=True)
class RequestRefused(Fact):
    request: str
    code: str


@dataclass(frozen=True, slots=True)
class RequestStarted(Fact):
    """First admitted into a step; how much of its prompt was held, and why not more."""

    request: str
    queue_s: float
    prompt_tokens: int
    cached_tokens: int
    miss: str | None
    predicted_s: float = 0.0
    """The wait that was predicted when it arrived, to be held against `queue_s`."""
    recomputed_tokens: int = 0
    """Of the prompt's tokens that are computed now, those that were held once, or are and do not serve."""
    recomputed_why: str | None = None


@dataclass(frozen=True, slots=True)
class TokenFirst(Fact):
    """The first token of a request came `ttft_s` seconds after it arrived."""

    request: str
    ttft_s: float


@dataclass(frozen=True, slots=True)
class SequencePaused(Fact):
    """A running sequence gave its blocks back; they stay cached until evicted. Freed are those that nobody else holds;
    `recompute_tokens` is what evicting all of them would cost."""

    request: str
    seq: SeqId
    by: str
    reason: str
    freed_blocks: int
    recompute_tokens: int
    freed_bytes: int = 0


@dataclass(frozen=True, slots=True)
class SequenceResumed(Fact):
    """A paused or slid sequence runs again; of what it once had, so many tokens are computed again."""

    request: str
    seq: SeqId
    recomputed_tokens: int


@dataclass(frozen=True, slots=True)
class SiblingStarted(Fact):
    """Another of a request's n answers starts. Of the prompt's tokens but the last, which each of them computes for its
    own logits, so many are computed again that the first of them had computed."""

    request: str
    seq: SeqId
    recomputed_tokens: int


@dataclass(frozen=True, slots=True)
class SequenceSlid(Fact):
    """A sequence reached its context and goes on without tokens [start, end), counted from its prompt's first."""

    request: str
    seq: SeqId
    start: int
    end: int
    kept_tokens: int


@dataclass(frozen=True, slots=True)
class PinGranted(Fact):
    """Blocks are held for a tenant until `until`, whoever else needs room. `key` names the last of them."""

    request: str
    key: Key
    tokens: int
    blocks: int
    until: float


@dataclass(frozen=True, slots=True)
class PinRefused(Fact):
    """A pin would not fit the tenant's budget, or the pool."""

    request: str
    tokens: int
    blocks: int
    reason: str


@dataclass(frozen=True, slots=True)
class PinEnded(Fact):
    """A pin's blocks are evictable again. `reason`: expired, replaced, unpinned, deleted or revoked (for room)."""

    key: Key
    blocks: int
    reason: str


@dataclass(frozen=True, slots=True)
class ConversationChanged(Fact):
    """Someone paused, resumed or deleted a conversation; `blocks` were dropped."""

    conversation: str
    change: str
    blocks: int


@dataclass(frozen=True, slots=True)
class SequenceEnded(Fact):
    """A sequence is about to give its lease back, at its end or for a pause: told before its blocks become evictable.

    `tip` is the key of its last full block that is shareable, None when there is none."""

    request: str
    seq: SeqId
    tip: Key | None
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class StepDone(Fact):
    """One step ended: rows by phase and how long it took."""

    number: int
    decode_rows: int
    prefill_rows: int
    step_ms: float


@dataclass(frozen=True, slots=True)
class RequestDone(Fact):
    """The end of a request, exactly one for each that was accepted."""

    request: str
    finishes: tuple[Finish, ...]
    limit_cause: LimitCause | None
    usage: Usage
    receipt: Receipt
    timings: Timings
    e2e_s: float
    ttft_s: float | None
    error: str | None


@dataclass(frozen=True, slots=True)
class CacheCleared(Fact):
    """All unleased blocks were dropped on request."""

    blocks: int


@dataclass(frozen=True, slots=True)
class FactsMissed(Fact):
    """A reader came so late that `count` facts had already left the bounded log."""

    count: int


Listener = Callable[[Fact], None]


class FactLog:
    """A bounded, numbered log of facts with listeners.

    A fact takes 650 to 850 bytes, most of it the token ids of stored blocks (a deep count over runs of the scheduler
    with short chats, batches and long prompts): the default holds some minutes of a busy server in 10 to 13 MiB.

    One thread emits. Readers on other threads call `since`, which copies; listeners run on the emitting thread and
    must be quick and must not raise.
    """

    def __init__(self, capacity: int = 16_384) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, not {capacity}")
        self._facts: deque[Fact] = deque(maxlen=capacity)
        self._begun = 0
        self._next = 0
        self._listeners: list[Listener] = []

    @property
    def next_seq(self) -> int:
        """The number the next fact will get."""
        return self._next

    def listen(self, listener: Listener) -> None:
        self._listeners.append(listener)

    def emit(self, fact: Fact) -> None:
        self._begun += 1
        self._facts.append(fact)
        self._next = self._begun
        for listener in self._listeners:
            listener(fact)

    def since(self, seq: int, most: int | None = None) -> tuple[list[Fact], int, int]:
        """Facts numbered from `seq` on, at most `most` of them, the number to ask for next, and how many before them
        are gone. Costs as much as there are facts from `seq` on, not as many as are held."""
        while True:
            upto = self._next
            wanted = max(0, upto - seq)
            behind = 0 if most is None else max(0, min(wanted, len(self._facts)) - most)
            try:
                held = list(islice(reversed(self._facts), behind, wanted))
            except RuntimeError:  # the deque moved under the copy: another thread emitted; copy again
                continue
            if self._begun == upto:  # else one is being emitted: which number each has is not sure
                break
        held.reverse()
        return held, upto - behind, wanted - behind - len(held)
