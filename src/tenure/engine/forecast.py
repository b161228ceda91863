"""A dry run: what would become of a request that came now, by the same objects that would serve it."""

from __future__ import annotations

from tenure.cache.plan import Plan, Shortfall
from tenure.policy.base import AdmissionAsk, Refuse
from tenure.sched.scheduler import Scheduler
from tenure.sched.sequence import Job, Sequence
from tenure.types import Request
from tenure.views import Forecast


def forecast(scheduler: Scheduler, request: Request, now: float) -> Forecast:
    """Nothing is done. On the thread that owns the scheduler."""
    cache, length = scheduler.cache, len(request.tokens)
    cached = min(cache.match(request.scope, request.tokens, exact=request.exact).tokens, length - 1)
    needed = _blocks(scheduler, request, length + 1)
    ask = AdmissionAsk(length, request.n, request.sampling.max_tokens, request.priority, request.scope.tenant)
    verdict = scheduler.admission.judge(ask, scheduler.load())
    if isinstance(verdict, Refuse) and verdict.code != "queue_full":
        return Forecast(False, False, verdict.reason, cached, length - cached, needed, 0, 0, None, None)
    job = scheduler.job(request, now)
    plan = scheduler.room.start(job.sequences[0], scheduler.pressure, now)
    victims = () if isinstance(plan, Shortfall) else plan.victims
    if not isinstance(plan, Shortfall):
        cached = plan.reused_tokens
    reason = verdict.reason if isinstance(verdict, Refuse) else _obstacle(scheduler, job.sequences[0], plan)
    behind = f", behind {scheduler.waiting} that wait" if scheduler.waiting else ""
    tokens, cause = _answer(scheduler, job)
    counts, whole = cache.counts(), max(needed, _blocks(scheduler, request, length + tokens - 1))
    held = _held(scheduler, request, length + tokens - 1, whole)
    return Forecast(
        fits_now=reason is None,
        fits_ever=True,
        reason=reason or f"it fits{behind}",
        cached_tokens=cached,
        computed_tokens=length - cached,
        needed_blocks=needed,
        would_evict_blocks=len(victims),
        would_evict_tokens=cache.tokens_of(victims),
        predicted_start_s=job.predicted_s,
        predicted_ttft_s=job.predicted_s + scheduler.outlook.prefill_s(cached, length - cached),
        answer_tokens=tokens,
        answer_cause=cause,
        whole_blocks=whole,
        lacking_blocks=max(0, held - cached // cache.block_tokens - counts.free - counts.cached),
    )


def _obstacle(scheduler: Scheduler, seq: Sequence, plan: Plan | Shortfall) -> str | None:
    """Why a sequence cannot start, whoever waits before it; None when it can."""
    if (seq.tenant, seq.job.name) in scheduler.on_hold:
        return "its conversation is paused"
    if scheduler.running >= scheduler.limits.max_num_seqs:
        return f"{scheduler.running} sequences run, as many as may"
    if not scheduler.room.within_tenant(seq):
        return "its tenant runs, or holds, all it may at once"
    if scheduler.awaits(seq):
        return "it waits for blocks that another request is computing"
    if isinstance(plan, Shortfall) and scheduler.running:
        return plan.reason + ("; recoding others may make room" if scheduler.pressure.codecs else "")
    return None  # pins give way to a lone one


def _answer(scheduler: Scheduler, job: Job) -> tuple[int, str]:
    """Tokens that each answer can have, and what ends it then. The last one is never computed: it needs no room."""
    most = scheduler.room.window(job.request.scope.tenant)
    room = most.tokens - job.prompt_len + 1
    if job.slides is None and most.cause != "context" and job.granted > room:
        return room, most.cause
    return job.granted, "context" if job.clamped else "max_tokens"


def _blocks(scheduler: Scheduler, request: Request, each: int) -> int:
    """Blocks of all answers when each has so many tokens, prompt included: its full blocks are shared."""
    size, most = scheduler.cache.block_tokens, scheduler.room.window(request.scope.tenant).tokens
    full = len(request.tokens) // size
    each = min(each, most) if request.overflow == "slide" else each
    return full + request.n * max(0, -(-each // size) - full)


def _held(scheduler: Scheduler, request: Request, each: int, whole: int) -> int:
    """What all answers hold in the end at most, in blocks of the first group of layers: with what windows see, without
    what they have let go. `whole` where some layers see everything, and what the windows of all answers but one see
    beside it: for one, places are kept."""
    cache, most = scheduler.cache, scheduler.room.window(request.scope.tenant).tokens
    blocks = scheduler.room.blocks(min(each, most) if request.overflow == "slide" else each)
    if cache.longest > cache.counts().total:  # all layers have windows
        return request.n * cache.weighs(blocks)
    return whole + (request.n - 1) * (cache.weighs(blocks) - blocks)
