"""What is told of sequences and requests: facts made of what the scheduler knows of them."""

from __future__ import annotations

from tenure.events import (
    RequestDone,
    RequestQueued,
    RequestStarted,
    SequenceEnded,
    SequencePaused,
    SequenceSlid,
)
from tenure.policy.base import RunningView
from tenure.sched.sequence import Job, Sequence
from tenure.types import Done, Forgotten, Key, MissReason


def queued(job: Job, now: float) -> RequestQueued:
    request = job.request
    return RequestQueued(now, request.id, job.prompt_len, request.n, request.session_id, tenant=request.scope.tenant)


def started(job: Job, recomputed: int, why: MissReason | None, now: float) -> RequestStarted:
    return RequestStarted(
        now,
        job.request.id,
        now - job.arrived,
        job.prompt_len,
        job.cached,
        None if job.miss is None else job.miss.reason,
        job.predicted_s,
        recomputed,
        why,
        tenant=job.request.scope.tenant,
    )


def paused(seq: Sequence, view: RunningView, by: str, reason: str, block_bytes: int, now: float) -> SequencePaused:
    """`view`: what it held before it was paused."""
    freed = view.blocks_freed_if_paused
    return SequencePaused(
        now,
        seq.job.request.id,
        seq.id,
        by,
        reason,
        freed,
        view.recompute_tokens,
        freed * block_bytes,
        tenant=seq.tenant,
    )


def slid(seq: Sequence, what: Forgotten, now: float) -> SequenceSlid:
    request = seq.job.request.id
    return SequenceSlid(now, request, seq.id, what.start, what.end, len(seq.tokens), tenant=seq.tenant)


def ended(seq: Sequence, tip: Key | None, now: float) -> SequenceEnded:
    job = seq.job
    return SequenceEnded(now, job.request.id, seq.id, tip, job.prompt_len, seq.generated, tenant=seq.tenant)


def done(job: Job, end: Done, now: float) -> RequestDone:
    return RequestDone(
        now,
        end.request,
        tuple(seq.finish for seq in job.sequences if seq.finish is not None),
        job.limit_cause,
        end.usage,
        end.receipt,
        end.timings,
        now - job.arrived,
        None if job.first_token is None else job.first_token - job.arrived,
        end.error,
        tenant=job.request.scope.tenant,
    )
