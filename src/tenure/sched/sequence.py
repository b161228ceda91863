"""What the scheduler knows of a request (Job) and of each of its n answers (Sequence)."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from tenure.cache.lease import Lease
from tenure.overflow import Window
from tenure.types import (
    Done,
    Finish,
    Forgotten,
    LimitCause,
    Miss,
    Pin,
    PinReceipt,
    Receipt,
    Request,
    SeqId,
    Timings,
    Token,
    Usage,
)


class Phase(Enum):
    WAITING = "waiting"
    """In the queue, never started."""
    PREFILL = "prefill"
    DECODE = "decode"
    PAUSED = "paused"
    """In the queue again: its blocks were needed elsewhere."""
    SLID = "slid"
    """In the queue again, shortened: it outgrew the context."""
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """One answer under way. The KV of `tokens[:computed]` lies in the blocks of `lease`.

    A sequence that runs has at least one token to compute: the newest one, whose logits choose the next.
    """

    id: SeqId
    job: Job
    index: int
    tokens: list[Token]
    phase: Phase = Phase.WAITING
    computed: int = 0
    lease: Lease | None = None
    started: float = 0.0
    """When it last entered a step after waiting."""
    resumed_at: int = 0
    """Tokens it had when it was last admitted."""
    lost_at_pause: int = 0
    """Tokens whose KV it had when it was last paused, or whose KV it had elsewhere when it slid."""
    pauses: int = 0
    """Times it was paused."""
    dropped: int = 0
    """Tokens it let go from behind its first ones when its context slid."""
    codecs: dict[str, int] = field(default_factory=dict)
    """Its tokens by how they were held when it last stopped running."""
    awaits: tuple[Sequence, int] | None = None
    """The sequence that computes what this one would share, and how far it must get."""
    finish: Finish | None = None
    limit_cause: LimitCause | None = None

    @property
    def generated(self) -> int:
        return len(self.tokens) + self.dropped - self.job.prompt_len

    @property
    def tenant(self) -> str:
        return self.job.request.scope.tenant

    @property
    def fresh(self) -> bool:
        """Whether all of its tokens have to be computed, held or not: the logprobs of the prompt are asked for, and
        the first of the n answers gives them."""
        return self.job.request.sampling.prompt_logprobs is not None and self.index == self.generated == 0

    @property
    def pending(self) -> int:
        """Tokens that must be computed before the next one can be chosen."""
        return len(self.tokens) - self.computed

    def within_reach(self, block_tokens: int) -> int:
        """Tokens of those pending that there are blocks for: of a prompt that windows take in piece by piece, up to the
        end of a block."""
        room = 0 if self.lease is None else self.lease.room
        reach = room if room >= len(self.tokens) else room - room % block_tokens
        return max(0, min(reach, len(self.tokens)) - self.computed)

    @property
    def committed(self) -> int:
        """Tokens in full blocks that the cache knows."""
        return 0 if self.lease is None else self.lease.committed_tokens

    @property
    def live(self) -> bool:
        return self.phase is not Phase.FINISHED

    def room(self, block_tokens: int) -> int:
        """Tokens to have blocks for at the start: what is there and one block more, but never more than it may grow to.

        The last token of an answer is never computed, hence − 1.
        """
        final = len(self.tokens) + self.job.granted - self.generated - 1
        return max(len(self.tokens), min(len(self.tokens) + block_tokens, final))


@dataclass(slots=True, eq=False)
class Job:
    """A request under way and what its receipt will say. Times are seconds of the clock that the caller holds."""

    request: Request
    arrived: float
    order: float
    """Place in the queue: lower first."""
    granted: int
    """Tokens that each answer may have; 0: the prompt is computed, and that is all."""
    clamped: bool
    """The context leaves less than the client asked for (or asked nothing of)."""
    sequences: list[Sequence] = field(default_factory=list)
    started: float | None = None
    first_token: float | None = None
    cached: int = 0
    miss: Miss | None = None
    preempted: int = 0
    recomputed: int = 0
    predicted_s: float = 0.0
    """The wait that was predicted when it arrived."""
    forgotten: list[Forgotten] = field(default_factory=list)
    """What its answers let go."""
    pins: tuple[PinReceipt, ...] = ()
    slides: Window | None = None
    """Where its answers let tokens go and go on; None: they end there."""
    error: str | None = None

    @property
    def name(self) -> str:
        """The conversation's."""
        return self.request.session_id or self.request.id

    @property
    def prompt_len(self) -> int:
        return len(self.request.tokens)

    @property
    def ended(self) -> bool:
        return all(not seq.live for seq in self.sequences)

    @property
    def limit_cause(self) -> LimitCause | None:
        """What cut an answer short, of the first answer that was."""
        return next((seq.limit_cause for seq in self.sequences if seq.limit_cause is not None), None)

    def usage(self) -> Usage:
        return Usage(self.prompt_len, sum(seq.generated for seq in self.sequences), self.cached)

    def receipt(self, now: float, context_limit: int) -> Receipt:
        """What the client is told of its context. A request that never started computed nothing and cached nothing:
        then all of its prompt counts as computed, so that the sum holds."""
        asked = self.request.sampling.max_tokens
        told = self.clamped and asked is not None
        longest = max(self.sequences, key=lambda seq: len(seq.tokens))
        used = len(longest.tokens)
        return Receipt(
            prompt_tokens=self.prompt_len,
            cached_tokens=self.cached,
            computed_tokens=self.prompt_len - self.cached,
            cached_by_tier={"device": self.cached},
            miss=self.miss,
            forgotten=(*self.request.forgotten, *self.forgotten),
            codec=longest.codecs or {self.request.scope.codec: used},
            preempted=self.preempted,
            recomputed_tokens=self.recomputed,
            queue_ms=self._queue_ms(now),
            context_limit=context_limit,
            context_used=used,
            limit_cause=self.limit_cause,
            max_tokens_requested=asked if told else None,
            max_tokens_granted=self.granted if told else None,
            pins=self.pins or tuple(_never_computed(pin) for pin in self.request.pins),
        )

    def timings(self, now: float) -> Timings:
        first = now if self.first_token is None else self.first_token
        started = first if self.started is None else self.started
        predicted = sum(seq.generated for seq in self.sequences)
        return Timings(
            prompt_n=self.prompt_len - self.cached,
            prompt_ms=1e3 * (first - started),
            predicted_n=predicted,
            predicted_ms=1e3 * (now - first),
            cache_n=self.cached,
            queue_ms=self._queue_ms(now),
        )

    def done(self, now: float, context_limit: int) -> Done:
        return Done(self.request.id, self.usage(), self.receipt(now, context_limit), self.timings(now), self.error)

    def _queue_ms(self, now: float) -> float:
        return 1e3 * ((now if self.started is None else self.started) - self.arrived)


def _never_computed(pin: Pin) -> PinReceipt:
    return PinReceipt(pin.end_token, False, 0, 0, 0.0, "the prompt was not computed to its end")


def stillborn(request: Request, error: str, now: float, context_limit: int) -> Done:
    """The Done of a request that nothing was done for."""
    job = Job(request, now, now, granted=1, clamped=False, error=error)
    job.sequences.append(Sequence(SeqId(-1), job, 0, list(request.tokens), Phase.FINISHED))
    return job.done(now, context_limit)
