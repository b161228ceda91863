"""When: which rows go into the next step, who starts, who grows, who gives way.

The scheduler is told the time, and of each step what it gave. It owns no clock, no thread and no tensor; with the
cache below it, it is the same object that serves and that replays a trace.

    add ─▶ waiting ─ next_step: a lease ─▶ prefill ─▶ decode ─ absorb: stop, limit ─▶ finished ─▶ Done
              ▲                                          │
              └── paused: pool short; slid: context full ┘

After `absorb`, and after `next_step`, every running sequence has blocks for its next row.
"""

from __future__ import annotations

from tenure.cache.history import History
from tenure.cache.kvcache import KvCache
from tenure.cache.lease import Lease
from tenure.cache.pins import Pins
from tenure.errors import Corrupt
from tenure.events import FactLog, SequenceResumed, SiblingStarted, StepDone, TokenFirst
from tenure.overflow import Window, forgotten, slid_range
from tenure.policy.base import AdmissionPolicy, Load, PressurePolicy
from tenure.sched import told
from tenure.sched.fair import WaitingQueue, order
from tenure.sched.limits import SchedulerLimits
from tenure.sched.outlook import Outlook
from tenure.sched.room import End, Room
from tenure.sched.sequence import Job, Phase, Sequence
from tenure.sched.step import CostModel, Flight, RowBudget
from tenure.types import (
    Delta,
    Done,
    Finish,
    Forgotten,
    LimitCause,
    Miss,
    Request,
    Rows,
    SeqId,
    StepPlan,
    StepResult,
)

__all__ = ["News", "Scheduler", "SchedulerLimits"]

News = Delta | Done


class Scheduler:
    """Chooses the rows of each step. One step is in flight at a time: `next_step`, then `absorb`."""

    def __init__(
        self,
        cache: KvCache,
        *,
        limits: SchedulerLimits,
        admission: AdmissionPolicy,
        pressure: PressurePolicy,
        history: History,
        facts: FactLog,
        costs: CostModel | None = None,
    ) -> None:
        self.cache = cache
        self.limits = limits
        self.admission = admission
        self.pressure = pressure
        self.costs = CostModel() if costs is None else costs
        self.steps = 0
        self._history = history
        self._facts = facts
        self._block = cache.block_tokens
        self.queue = WaitingQueue(limits.tenants)
        self._running: dict[SeqId, Sequence] = {}
        self._jobs: dict[str, Job] = {}
        self._flight: Flight | None = None
        self._next_seq = 0
        self._charged_at = 0.0
        """Until when held blocks are charged for."""
        self._blocked: tuple[SeqId, int, int] | None = None
        """The head of the queue that found too few blocks, how many could be had then, and in which step."""
        self.on_hold: set[tuple[str, str]] = set()
        """Conversations, by tenant and session, that someone paused."""
        self.pins = Pins(cache, limits.tenants, limits.block_bytes, facts)
        self.room = Room(cache, self.pins, self.queue, self._running, limits)
        self.outlook = Outlook(self.costs, self._block, limits.max_num_seqs)

    # --- ask ---------------------------------------------------------------------------------------------------------

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self.queue)

    @property
    def idle(self) -> bool:
        """True when no request is alive, but for those that someone paused."""
        return not self._jobs or (not self._running and all(self._held_back(seq) for seq in self.queue))

    def load(self) -> Load:
        """The state admission and pressure judge by."""
        counts = self.cache.counts()
        return Load(
            running=len(self._running),
            waiting=len(self.queue),
            queued_requests=self.queue.new,
            queued_tokens=self.queue.new_tokens,
            free_blocks=counts.free,
            evictable_blocks=counts.cached,
            total_blocks=counts.total,
            predicted_start_s=self.predicted_start_s(),
            max_queued_requests=self.limits.max_queued_requests,
            max_queued_tokens=self.limits.max_queued_tokens,
            context_limit=self.limits.context_limit,
            block_tokens=self._block,
            tenants=self.room.tenant_loads(),
            windowed=self.cache.longest > counts.total,
        )

    def predicted_start_s(self, tokens: int = 0) -> float:
        """Seconds until a request of so many tokens that came now would start."""
        needed = self.room.blocks(tokens + self._block)
        return self.outlook.start_s(self._running.values(), self.queue, self._available(), needed)

    def sequences(self) -> list[Sequence]:
        """All that live, to be looked at."""
        return [seq for job in self._jobs.values() for seq in job.sequences if seq.live]

    def job(self, request: Request, now: float) -> Job:
        """A request that arrived at `now` as it would be put into the queue. ValueError when it could never run."""
        left = self.limits.context_limit - len(request.tokens)
        if left < 1 or not request.tokens or request.n < 1:
            raise ValueError(f"{request.id}: {len(request.tokens)} tokens, n={request.n}, context leaves {left}")
        if self.room.blocks(len(request.tokens) + 1) > self.cache.longest:
            raise ValueError(f"{request.id}: {len(request.tokens)} tokens can never fit the pool")
        asked, window = request.sampling.max_tokens, self.room.window(request.scope.tenant)
        start, end = slid_range(window.tokens, window.tokens)
        slides = request.overflow == "slide" and end > start  # what is tiny ends instead
        if slides:
            granted, clamped = window.tokens if asked is None else asked, False
        else:
            granted = left if asked is None else min(asked, left)
            clamped = asked is None or asked > left
        job = Job(request, now, order(now, request.priority), granted, clamped, slides=window if slides else None)
        job.predicted_s = self.predicted_start_s(len(request.tokens))
        for index in range(request.n):
            job.sequences.append(Sequence(SeqId(self._next_seq + index), job, index, list(request.tokens)))
        return job

    # --- do ----------------------------------------------------------------------------------------------------------

    def add(self, request: Request, now: float) -> None:
        """Put a request into the queue; the caller has had it judged. ValueError as `job`, or when its id is alive."""
        if request.id in self._jobs:
            raise ValueError(f"{request.id}: a request of this id is alive")
        job = self._jobs[request.id] = self.job(request, now)
        self._next_seq += request.n
        for seq in job.sequences:
            self.queue.add(seq)
        self._facts.emit(told.queued(job, now))

    def next_step(self, now: float) -> StepPlan | None:
        """The next pass over the model, or None when nothing can run. Decode first, then prefill, then newcomers."""
        if self._flight is not None:
            raise RuntimeError(f"step {self._flight.number} is still in flight")
        self.pins.expire(now)
        flight = Flight(self.steps, now)
        prefills: list[Sequence] = []
        for seq in self._running.values():
            if seq.phase is Phase.DECODE:
                self._enter(flight, seq, 1)
            else:
                prefills.append(seq)
        budget = self._budget(flight)
        prefills.sort(key=lambda seq: (self.queue.account(seq.tenant).counter, seq.job.order))
        for seq in prefills:
            if chunk := budget.chunk(seq.computed, seq.within_reach(self._block), told=seq.fresh):
                self._enter(flight, seq, chunk)
        self._start_waiting(flight, budget, now)
        if not flight.rows:
            return None
        self._flight = flight
        self.steps += 1
        rows = tuple(self._rows(*row) for row in flight.rows)  # last of all: starting someone may move others' blocks
        return StepPlan(flight.number, self.room.take_ops(), rows)

    def absorb(self, result: StepResult, now: float) -> list[News]:
        """Take in what the step in flight gave: tokens, ends; then room for everyone's next row."""
        flight, self._flight = self._flight, None
        if flight is None or flight.number != result.number:
            raise RuntimeError(f"step {result.number} is not in flight")
        self.queue.charge(self._running.values(), max(0.0, now - max(self._charged_at, flight.at)))
        self._charged_at = now
        self.costs.learn(flight.decode_weight, flight.prefill_weight, result.step_ms)
        self._facts.emit(StepDone(now, flight.number, flight.decode_rows, flight.prefill_rows, result.step_ms))
        news: list[News] = []
        for seq, count, sample in flight.rows:
            if seq.lease is None:  # cancelled, paused, or its request failed, while the step ran
                continue
            reason = result.failed.get(seq.id)
            if reason is not None:
                self._fail(seq.job, reason, now, news)
                continue
            self._computed(seq, count, now)
            if sample:
                self._sampled(seq, result, now, news)
        for seq in [seq for seq in self._running.values() if self._is_full(seq)]:
            self._grow(seq, now, news)
        if self.limits.canary_steps and self.steps % self.limits.canary_steps == 0:
            self.cache.check()
        return news

    def cancel(self, request_id: str, now: float) -> list[Done]:
        """End a request in whatever phase it is; everything it held is free on return. Nothing when it is not alive."""
        job = self._jobs.get(request_id)
        if job is None:
            return []
        news: list[News] = []
        self._end_job(job, Finish.CANCELLED, None, now, news)
        return [item for item in news if isinstance(item, Done)]

    def end_all(self, cause: LimitCause, now: float) -> list[News]:
        """End every living request with what it has so far."""
        news: list[News] = []
        for job in list(self._jobs.values()):
            self._end_job(job, Finish.LENGTH, cause, now, news)
        return news

    def abandon(self, error: str, now: float) -> list[Done]:
        """The Done of every living request after an error that leaves nothing to rely on: the cache is not touched."""
        news: list[News] = []
        for job in list(self._jobs.values()):
            job.error = error
            for seq in job.sequences:
                if seq.live:
                    seq.phase, seq.finish = Phase.FINISHED, Finish.ERROR
            self._finish_job(job, now, news)
        return [item for item in news if isinstance(item, Done)]

    # --- one step's rows ---------------------------------------------------------------------------------------------

    def _enter(self, flight: Flight, seq: Sequence, count: int) -> None:
        """`count` rows of a running sequence go into the flight."""
        sample = seq.computed + count == len(seq.tokens)
        flight.add(seq, count, sample, self.costs.weight(seq.computed, count))

    def _rows(self, seq: Sequence, count: int, sample: bool) -> Rows:
        if seq.lease is None:
            raise Corrupt(f"sequence {seq.id} runs without a lease")
        start, job = seq.computed, seq.job
        end = start + count
        return Rows(
            seq.id, job.request.id, seq.index, start, seq.tokens[start:end], seq.lease.tables,
            sample and job.granted > 0, seq.generated, job.request.sampling, seq.lease.open,
        )  # fmt: skip

    def _budget(self, flight: Flight) -> RowBudget:
        """What the decode rows leave. When none decodes, nobody waits for this step to end."""
        rows = max(1, self.limits.max_num_batched_tokens - flight.decode_rows)
        if not flight.decode_rows:
            return RowBudget(self.costs, self._block, rows, float("inf"), self.cache.staged)
        spent = self.costs.predict(flight.decode_weight, 0.0)
        return RowBudget(self.costs, self._block, rows, max(0.0, self.limits.max_step_ms - spent), self.cache.staged)

    # --- starting ----------------------------------------------------------------------------------------------------

    def _start_waiting(self, flight: Flight, budget: RowBudget, now: float) -> None:
        """Start whoever can, in turn. Overtaken are only those that wait for blocks under computation, for the limits
        of their tenant, or because someone paused them."""
        for seq in self.queue.turns(self._held):
            if len(self._running) >= self.limits.max_num_seqs or not budget.open or self._still_blocked(seq):
                return
            if self._held_back(seq) or not self.room.within_tenant(seq) or self.awaits(seq):
                continue
            lease = self.room.lease(seq, self.pressure, self.load, now)
            if lease is None:
                self._blocked = seq.id, self._available(), self.steps
                return
            self._blocked = None
            self._started(seq, lease, now)
            if chunk := budget.chunk(seq.computed, seq.within_reach(self._block), told=seq.fresh):
                self._enter(flight, seq, chunk)

    def _available(self) -> int:
        counts = self.cache.counts()
        return counts.free + counts.cached

    def _still_blocked(self, seq: Sequence) -> bool:
        """Whether `seq` found too few blocks before and there are no more by now, nor a block's worth of steps in which
        others got more to recode: matching it again is not free."""
        if self._blocked is None or self._blocked[0] != seq.id or not self._running:
            return False
        stale = self.pressure.codecs and self.steps - self._blocked[2] >= self._block
        return not stale and self._available() <= self._blocked[1]

    def _held(self, seq: Sequence) -> int:
        """Tokens of a waiting sequence that need not be computed."""
        return 0 if seq.fresh else self.room.match(seq).tokens

    def _held_back(self, seq: Sequence) -> bool:
        """Whether someone paused its conversation."""
        return (seq.tenant, seq.job.name) in self.on_hold

    def awaits(self, seq: Sequence) -> bool:
        """Whether blocks this sequence would share are being computed right now: by its own first sibling, or by
        whoever promised them."""
        leader = seq.job.sequences[0]
        if leader is not seq and leader.live and leader.generated == 0:
            return True
        if seq.awaits is not None and self._computing(seq.awaits):
            return True
        seq.awaits = None
        match = self.room.match(seq)
        if match.awaited is None or seq.fresh:
            return False
        holder = next((s for s in self._running.values() if s.lease is not None and s.lease.id == match.awaited), None)
        if holder is None:
            raise Corrupt(f"lease {match.awaited} has promised a block, but no sequence holds it")
        seq.awaits = (holder, match.tokens - match.tokens % self._block + self._block)
        return self._computing(seq.awaits)

    def _computing(self, awaited: tuple[Sequence, int]) -> bool:
        holder, upto = awaited
        return holder.lease is not None and holder.committed < upto

    def _started(self, seq: Sequence, lease: Lease, now: float) -> None:
        """From waiting, paused or slid to running, with what was still held of its tokens."""
        job, phase, account = seq.job, seq.phase, self.queue.account(seq.tenant)
        self.queue.remove(seq)
        reused = lease.reused_tokens
        seq.lease = lease
        seq.computed = reused
        seq.started = now
        seq.resumed_at = len(seq.tokens)
        seq.phase = Phase.PREFILL
        self._running[seq.id] = seq
        account.running += 1
        account.charge(seq.pending)
        if job.started is None:
            job.started = now
            account.started += 1
            self._first_started(job, seq, now)
            return
        # What was computed once and must be computed again: by this sequence before its pause, or, for a sibling, by
        # the first of the n (whose last prompt token each of them computes for its own logits).
        again = max(0, (job.prompt_len - 1 if phase is Phase.WAITING else seq.lost_at_pause) - reused)
        job.recomputed += again
        kind = SiblingStarted if phase is Phase.WAITING else SequenceResumed
        self._facts.emit(kind(now, job.request.id, seq.id, again, tenant=seq.tenant))

    def _first_started(self, job: Job, seq: Sequence, now: float) -> None:
        """The first sequence of a request starts: what was held of the prompt, and why not more."""
        held = min(self.room.match(seq).tokens, job.prompt_len - 1) if seq.fresh else 0
        lost = self.cache.lost(job.request.scope, seq.tokens, max(seq.computed, held))
        job.cached = seq.computed
        again = lost.tokens + held
        job.recomputed += again
        why = self._history.explain(job.request, seq.computed, lost, now)
        job.miss = Miss("prompt_logprobs", 0) if held else why
        self._facts.emit(told.started(job, again, "prompt_logprobs" if held else lost.reason, now))

    # --- going on and giving way -------------------------------------------------------------------------------------

    def _computed(self, seq: Sequence, count: int, now: float) -> None:
        """The KV of `count` more tokens is there; what became shareable is told to the cache."""
        seq.computed += count
        prompt_ends = seq.phase is Phase.PREFILL and seq.computed == len(seq.tokens)
        if (prompt_ends or seq.computed - seq.committed >= self._block) and seq.lease is not None:
            seq.lease = self.cache.commit(seq.lease, seq.tokens, seq.computed, now, tail=prompt_ends)
        job = seq.job
        if prompt_ends and job.request.pins and not job.pins:
            scope, tokens = job.request.scope, job.request.tokens
            grants = [self.pins.grant(job.request.id, scope, tokens, pin, now) for pin in job.request.pins]
            job.pins = tuple(grants)

    def _sampled(self, seq: Sequence, result: StepResult, now: float, news: list[News]) -> None:
        """One more token; the sequence ends when it is a stop or the last that was granted. With none granted it ends
        as soon as its prompt is computed: nothing was chosen, and nothing is counted."""
        job, token = seq.job, result.tokens[seq.id] if seq.job.granted else None
        if token is not None:
            seq.tokens.append(token)
        if token is not None and job.first_token is None:
            job.first_token = now
            self._facts.emit(TokenFirst(now, job.request.id, now - job.arrived, tenant=seq.tenant))
        if seq.id in result.stopped:
            self._end(seq, Finish.STOP, None, now)
        elif seq.generated >= job.granted:
            self._end(seq, Finish.LENGTH, "context" if job.clamped else "max_tokens", now)
        else:
            seq.phase = Phase.DECODE
        slid = None
        if seq.finish is None and job.slides is not None and len(seq.tokens) >= job.slides.tokens:
            slid = self._slide(seq, job.slides, now)
        news.append(Delta(job.request.id, seq.id, seq.index, token, seq.finish, seq.limit_cause, slid))
        if seq.finish is not None:
            self._finish_job(job, now, news)

    def _is_full(self, seq: Sequence) -> bool:
        """Whether the next row of a running sequence has no block."""
        return seq.lease is not None and not seq.within_reach(self._block)

    def _grow(self, seq: Sequence, now: float, news: list[News]) -> None:
        """A block for the next row; when there is none to be had, someone gives way."""
        while self._is_full(seq):
            verdict = self.room.grow(seq, self.pressure, self.load, now)
            if verdict is None:
                return
            if isinstance(verdict, End):
                self._end(seq, Finish.LENGTH, verdict.cause, now)
                news.append(Delta(seq.job.request.id, seq.id, seq.index, None, seq.finish, seq.limit_cause))
                self._finish_job(seq.job, now, news)
            else:
                self.pause(self._running[verdict.seq], self.pressure.name, verdict.reason, now)

    def pause(self, seq: Sequence, by: str, reason: str, now: float) -> None:
        """Give the blocks back, still cached, and wait at the place it arrived with."""
        view = self.room.view(seq)
        if not seq.dropped:
            self._history.remember(seq.job.request, seq.tokens, seq.computed, now)
        seq.lost_at_pause = seq.computed
        self._give_back(seq, seq.computed, "paused", now)
        seq.phase = Phase.PAUSED
        seq.pauses += 1
        seq.job.preempted += 1
        self.queue.add(seq)
        self._facts.emit(told.paused(seq, view, by, reason, self.limits.block_bytes, now))

    def _slide(self, seq: Sequence, window: Window, now: float) -> Forgotten:
        """The window is full: go on with its first and its newest tokens, at fresh positions, as if asked so cold."""
        start, end = slid_range(len(seq.tokens), window.tokens)
        job = seq.job
        gone = forgotten(start + seq.dropped, end + seq.dropped, window.cause, job.request.spans)
        if not seq.dropped:
            self._history.remember(job.request, seq.tokens, seq.computed, now)
        self._give_back(seq, seq.computed, "slid", now)
        del seq.tokens[start:end]
        seq.dropped += end - start
        seq.lost_at_pause = len(seq.tokens) - 1
        seq.phase = Phase.SLID
        job.forgotten.append(gone)
        self.queue.add(seq)
        self._facts.emit(told.slid(seq, gone, now))
        return gone

    def _give_back(self, seq: Sequence, valid: int, why: str, now: float) -> None:
        """A running sequence stops running: its blocks stay cached, as far as the first `valid` tokens reach."""
        if seq.lease is None:
            raise Corrupt(f"sequence {seq.id} runs without a lease")
        account = self.queue.account(seq.tenant)
        # Told before its blocks become evictable: eviction policies classify them by it.
        self._facts.emit(told.ended(seq, self.cache.tip(seq.lease), now))
        seq.codecs = self.cache.codecs(seq.lease, seq.computed, len(seq.tokens))
        self.cache.release(seq.lease, seq.tokens, valid, now, why)
        if seq.phase is Phase.PREFILL:
            account.charge(-seq.pending)  # charged when it started, never computed
        del self._running[seq.id]
        account.running -= 1
        seq.lease, seq.computed = None, 0
        self._blocked = None

    # --- ending ------------------------------------------------------------------------------------------------------

    def _end(self, seq: Sequence, finish: Finish, cause: LimitCause | None, now: float) -> None:
        """End one sequence; its blocks go back with what is computed still cached."""
        if seq.lease is not None:
            # What led to non-finite logits may be bad itself: nothing that only this sequence holds is trusted again.
            valid = 0 if finish is Finish.ERROR else seq.computed
            if not seq.dropped:
                self._history.remember(seq.job.request, seq.tokens, valid, now)
            self._give_back(seq, valid, finish.value, now)
        else:
            self.queue.remove(seq)
        seq.phase, seq.finish, seq.limit_cause = Phase.FINISHED, finish, cause
        self._blocked = None

    def _end_job(self, job: Job, finish: Finish, cause: LimitCause | None, now: float, news: list[News]) -> None:
        for seq in job.sequences:
            if seq.live:
                self._end(seq, finish, cause, now)
                news.append(Delta(job.request.id, seq.id, seq.index, None, finish, cause))
        self._finish_job(job, now, news)

    def _fail(self, job: Job, reason: str, now: float, news: list[News]) -> None:
        """The model gave one sequence what cannot be used: the whole request ends, others go on."""
        job.error = reason
        self._end_job(job, Finish.ERROR, None, now, news)

    def _finish_job(self, job: Job, now: float, news: list[News]) -> None:
        """The request's one Done, when the last of its sequences has ended."""
        if not job.ended:
            return
        del self._jobs[job.request.id]
        self.outlook.learn(job)
        if job.started is not None:
            self.queue.account(job.request.scope.tenant).started -= 1
        done = job.done(now, self.limits.context_limit)
        news.append(done)
        self._facts.emit(told.done(job, done, now))
