"""When: which rows go into the next step, who starts, who grows, who gives way.

The scheduler is told the time, and of each step what it gave. It owns no clock, no thread and no tensor; with the
cache below it, it is the same object that serves and that replays a trace.

    add ─▶ waiting ─ next_step: a lease ─▶ prefill ─▶ decode ─ absorb: stop, limit ─▶ finished ─▶ Done
              ▲                                          │
              └──────────── paused: pool short ◀─────────┘

After `absorb`, and after `next_step`, every running sequence has blocks for its next row.
"""

from __future__ import annotations

from dataclasses import dataclass

from tenure.cache.history import History
from tenure.cache.kvcache import KvCache
from tenure.cache.lease import Grant
from tenure.cache.plan import Ask, Shortfall
from tenure.errors import Corrupt
from tenure.events import (
    FactLog,
    RequestDone,
    RequestQueued,
    RequestStarted,
    SequenceEnded,
    SequencePaused,
    SequenceResumed,
    StepDone,
    TokenFirst,
)
from tenure.policy.base import AdmissionPolicy, Load, Pause, PressurePolicy, RunningView, Wait
from tenure.sched.fair import WaitingQueue, order
from tenure.sched.sequence import Job, Phase, Sequence
from tenure.sched.step import CostModel, Flight, RowBudget
from tenure.types import (
    CopyOp,
    Delta,
    Done,
    Finish,
    LimitCause,
    Request,
    Rows,
    SeqId,
    StepPlan,
    StepResult,
)

News = Delta | Done


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """The operator's bounds. `max_step_ms` holds while any stream is decoding; `canary_steps` 0: no checks."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_step_ms: float
    context_limit: int
    max_queued_requests: int
    max_queued_tokens: int
    canary_steps: int = 0


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
        self._queue = WaitingQueue()
        self._running: dict[SeqId, Sequence] = {}
        self._jobs: dict[str, Job] = {}
        self._flight: Flight | None = None
        self._next_seq = 0
        self._answer_tokens = 128.0
        self._blocked_at = -1
        """Blocks that could be had when the head of the queue found too few; −1 when nothing is blocked."""

    # --- ask ---------------------------------------------------------------------------------------------------------

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def idle(self) -> bool:
        """True when no request is alive."""
        return not self._jobs

    def load(self) -> Load:
        """The state admission and pressure judge by."""
        counts = self.cache.counts()
        return Load(
            running=len(self._running),
            waiting=len(self._queue),
            queued_requests=self._queue.new,
            queued_tokens=self._queue.new_tokens,
            free_blocks=counts.free,
            evictable_blocks=counts.cached,
            total_blocks=counts.total,
            predicted_start_s=self.predicted_start_s(),
            max_queued_requests=self.limits.max_queued_requests,
            max_queued_tokens=self.limits.max_queued_tokens,
            context_limit=self.limits.context_limit,
            block_tokens=self._block,
        )

    def predicted_start_s(self) -> float:
        """Seconds until a request that came now would start: the prefill in front of it, then, when sequences wait for
        room, as many ends of answers as there are sequences in front."""
        pending = sum(seq.pending for seq in self._running.values() if seq.phase is Phase.PREFILL)
        ms = self.costs.prefill * (pending + self._queue.new_tokens)
        ahead = len(self._queue)
        if ahead or len(self._running) >= self.limits.max_num_seqs:
            step_ms = self.costs.predict(len(self._running), 0.0)
            ms += (ahead + 1) / max(1, len(self._running)) * 0.5 * self._answer_tokens * step_ms
        return 1e-3 * ms

    # --- do ----------------------------------------------------------------------------------------------------------

    def add(self, request: Request, now: float) -> None:
        """Put a request that arrived at `now` into the queue; the caller has had it judged. ValueError when it could
        never run."""
        left = self.limits.context_limit - len(request.tokens)
        if left < 1 or not request.tokens or request.n < 1:
            raise ValueError(f"{request.id}: {len(request.tokens)} tokens, n={request.n}, context leaves {left}")
        if self._blocks(len(request.tokens) + 1) > self.cache.counts().total:
            raise ValueError(f"{request.id}: {len(request.tokens)} tokens can never fit the pool")
        if request.id in self._jobs:
            raise ValueError(f"{request.id}: a request of this id is alive")
        asked = request.sampling.max_tokens
        clamped = asked is None or asked > left
        granted = left if asked is None else max(1, min(asked, left))
        job = Job(request, now, order(now, request.priority), granted, clamped)
        for index in range(request.n):
            job.sequences.append(Sequence(SeqId(self._next_seq), job, index, list(request.tokens)))
            self._next_seq += 1
            self._queue.add(job.sequences[-1])
        self._jobs[request.id] = job
        self._facts.emit(RequestQueued(now, request.id, len(request.tokens), request.n))

    def next_step(self, now: float) -> StepPlan | None:
        """The next pass over the model, or None when nothing can run. Decode first, then prefill, then newcomers."""
        if self._flight is not None:
            raise RuntimeError(f"step {self._flight.number} is still in flight")
        flight = Flight(self.steps)
        rows: list[Rows] = []
        copies: list[CopyOp] = []
        prefills: list[Sequence] = []
        for seq in self._running.values():
            if seq.phase is Phase.DECODE:
                rows.append(self._rows(flight, seq, 1))
            else:
                prefills.append(seq)
        budget = self._budget(flight)
        prefills.sort(key=lambda seq: seq.job.order)
        for seq in prefills:
            if chunk := budget.chunk(seq.computed, seq.pending):
                rows.append(self._rows(flight, seq, chunk))
        self._start_waiting(flight, budget, rows, copies, now)
        if not rows:
            return None
        self._flight = flight
        self.steps += 1
        return StepPlan(flight.number, tuple(copies), tuple(rows))

    def absorb(self, result: StepResult, now: float) -> list[News]:
        """Take in what the step in flight gave: tokens, ends; then room for everyone's next row."""
        flight, self._flight = self._flight, None
        if flight is None or flight.number != result.number:
            raise RuntimeError(f"step {result.number} is not in flight")
        self.costs.learn(flight.decode_weight, flight.prefill_weight, result.step_ms)
        self._facts.emit(StepDone(now, flight.number, flight.decode_rows, flight.prefill_rows, result.step_ms))
        news: list[News] = []
        for seq, count, sample in flight.rows:
            if not seq.live:  # cancelled, or its request failed, while the step ran
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

    def _rows(self, flight: Flight, seq: Sequence, count: int) -> Rows:
        """`count` rows of a running sequence, entered into the flight."""
        if seq.lease is None:
            raise Corrupt(f"sequence {seq.id} runs without a lease")
        start, job = seq.computed, seq.job
        end = start + count
        sample = end == len(seq.tokens)
        flight.add(seq, count, sample, self.costs.weight(start, count))
        return Rows(
            seq.id, job.request.id, seq.index, start, seq.tokens[start:end], seq.lease.blocks, sample, seq.generated,
            job.request.sampling,
        )  # fmt: skip

    def _budget(self, flight: Flight) -> RowBudget:
        """What the decode rows leave. When none decodes, nobody waits for this step to end."""
        rows = max(1, self.limits.max_num_batched_tokens - flight.decode_rows)
        if not flight.decode_rows:
            return RowBudget(self.costs, self._block, rows, float("inf"))
        spent = self.costs.predict(flight.decode_weight, 0.0)
        return RowBudget(self.costs, self._block, rows, max(0.0, self.limits.max_step_ms - spent))

    # --- starting ----------------------------------------------------------------------------------------------------

    def _start_waiting(
        self, flight: Flight, budget: RowBudget, rows: list[Rows], copies: list[CopyOp], now: float
    ) -> None:
        """Start whoever can, in order. Only those that wait for blocks under computation are overtaken."""
        if not len(self._queue) or not self._worth_trying():
            return
        for seq in self._queue:
            if len(self._running) >= self.limits.max_num_seqs or not budget.open:
                return
            if self._awaits(seq):
                continue
            grant = self._lease(seq, now)
            if grant is None:
                return
            copies.extend(grant.copies)
            self._started(seq, grant, now)
            if chunk := budget.chunk(seq.computed, seq.pending):
                rows.append(self._rows(flight, seq, chunk))

    def _worth_trying(self) -> bool:
        """Whether the head of the queue, once found too big, could fit by now: matching it again is not free."""
        if self._blocked_at < 0 or not self._running:
            return True
        counts = self.cache.counts()
        return counts.free + counts.cached > self._blocked_at

    def _awaits(self, seq: Sequence) -> bool:
        """Whether blocks this sequence would share are being computed right now: by its own first sibling, or by
        whoever promised them."""
        leader = seq.job.sequences[0]
        if leader is not seq and leader.live and leader.generated == 0:
            return True
        if seq.awaits is not None and self._computing(seq.awaits):
            return True
        seq.awaits = None
        match = self.cache.match(seq.job.request.scope, seq.tokens)
        if match.awaited is None:
            return False
        holder = next((s for s in self._running.values() if s.lease is not None and s.lease.id == match.awaited), None)
        if holder is None:
            raise Corrupt(f"lease {match.awaited} has promised a block, but no sequence holds it")
        seq.awaits = (holder, match.tokens - match.tokens % self._block + self._block)
        return self._computing(seq.awaits)

    def _computing(self, awaited: tuple[Sequence, int]) -> bool:
        holder, upto = awaited
        return holder.lease is not None and holder.committed < upto

    def _lease(self, seq: Sequence, now: float) -> Grant | None:
        """Blocks for the sequence and one more to grow into; for a lone one, what it needs is enough. None: too few."""
        scope = seq.job.request.scope
        plan = self.cache.plan(Ask(scope, seq.tokens, seq.room(self._block)), now)
        if isinstance(plan, Shortfall) and not self._running:
            plan = self.cache.plan(Ask(scope, seq.tokens, len(seq.tokens)), now)
            if isinstance(plan, Shortfall):
                raise Corrupt(f"nothing runs, but sequence {seq.id} of {len(seq.tokens)} tokens does not fit: {plan}")
        if isinstance(plan, Shortfall):
            counts = self.cache.counts()
            self._blocked_at = counts.free + counts.cached
            return None
        self._blocked_at = -1
        return self.cache.apply(plan, now)

    def _started(self, seq: Sequence, grant: Grant, now: float) -> None:
        """From waiting or paused to running, with what was still held of its tokens."""
        job, paused = seq.job, seq.phase is Phase.PAUSED
        self._queue.remove(seq)
        reused = grant.lease.reused_tokens
        seq.lease = grant.lease
        seq.computed = reused
        seq.started = now
        seq.resumed_at = len(seq.tokens)
        seq.phase = Phase.PREFILL
        self._running[seq.id] = seq
        if job.started is None:
            job.started = now
            job.cached = reused
            job.miss = self._history.explain(job.request, reused)
            reason = None if job.miss is None else job.miss.reason
            self._facts.emit(RequestStarted(now, job.request.id, now - job.arrived, job.prompt_len, reused, reason))
            return
        # What was computed once and must be computed again: by this sequence before its pause, or, for a sibling, by
        # the first of the n (whose last prompt token each of them computes for its own logits).
        again = max(0, (seq.lost_at_pause if paused else job.prompt_len - 1) - reused)
        job.recomputed += again
        if paused:
            self._facts.emit(SequenceResumed(now, job.request.id, seq.id, again))

    # --- going on and giving way -------------------------------------------------------------------------------------

    def _computed(self, seq: Sequence, count: int, now: float) -> None:
        """The KV of `count` more tokens is there; what became shareable is told to the cache."""
        seq.computed += count
        prompt_ends = seq.phase is Phase.PREFILL and seq.computed == len(seq.tokens)
        if (prompt_ends or seq.computed - seq.committed >= self._block) and seq.lease is not None:
            seq.lease = self.cache.commit(seq.lease, seq.tokens, seq.computed, now, tail=prompt_ends)

    def _sampled(self, seq: Sequence, result: StepResult, now: float, news: list[News]) -> None:
        """One more token; the sequence ends when it is a stop or the last that was granted."""
        job = seq.job
        token = result.tokens[seq.id]
        seq.tokens.append(token)
        if job.first_token is None:
            job.first_token = now
            self._facts.emit(TokenFirst(now, job.request.id, now - job.arrived))
        if seq.id in result.stopped:
            self._end(seq, Finish.STOP, None, now)
        elif seq.generated >= job.granted:
            self._end(seq, Finish.LENGTH, "context" if job.clamped else "max_tokens", now)
        else:
            seq.phase = Phase.DECODE
        news.append(Delta(job.request.id, seq.id, seq.index, token, seq.finish, seq.limit_cause))
        if seq.finish is not None:
            self._finish_job(job, now, news)

    def _is_full(self, seq: Sequence) -> bool:
        """Whether the next row of a decoding sequence has no block."""
        return (
            seq.phase is Phase.DECODE
            and seq.lease is not None
            and len(seq.tokens) > len(seq.lease.blocks) * self._block
        )

    def _grow(self, seq: Sequence, now: float, news: list[News]) -> None:
        """Blocks for the next row; when there are none, the pressure policy says who gives way."""
        while self._is_full(seq):
            plan = self.cache.plan(Ask(seq.job.request.scope, seq.tokens, len(seq.tokens), seq.lease), now)
            if not isinstance(plan, Shortfall):
                seq.lease = self.cache.apply(plan, now).lease
                return
            verdict = self.pressure.relieve(plan, [self._view(s) for s in self._running.values()], self.load())
            if isinstance(verdict, Pause) and verdict.seq in self._running and len(self._running) > 1:
                self._pause(self._running[verdict.seq], verdict.reason, now)
            elif isinstance(verdict, Wait) and len(self._running) > 1:
                # Waiting while holding blocks could leave everyone waiting for everyone: it waits in the queue.
                self._pause(seq, verdict.reason, now)
            else:
                self._end(seq, Finish.LENGTH, "pool", now)
                news.append(Delta(seq.job.request.id, seq.id, seq.index, None, seq.finish, seq.limit_cause))
                self._finish_job(seq.job, now, news)

    def _view(self, seq: Sequence) -> RunningView:
        job = seq.job
        return RunningView(
            seq=seq.id,
            request=job.request.id,
            priority=job.request.priority,
            arrived=job.arrived,
            started=seq.started,
            tokens=len(seq.tokens),
            blocks_freed_if_paused=0 if seq.lease is None else self.cache.freed_by(seq.lease),
            recompute_tokens=seq.computed,
            progress_since_resume=len(seq.tokens) - seq.resumed_at,
        )

    def _pause(self, seq: Sequence, reason: str, now: float) -> None:
        """Give the blocks back, still cached, and wait at the place it arrived with."""
        if seq.lease is None:
            raise Corrupt(f"sequence {seq.id} runs without a lease")
        held = len(seq.lease.blocks)
        self._tell_end(seq, now)
        self.cache.release(seq.lease, seq.tokens, seq.computed, now, "paused")
        self._history.remember(seq.job.request, seq.tokens, seq.computed)
        del self._running[seq.id]
        seq.lost_at_pause = seq.computed
        seq.lease, seq.computed, seq.phase = None, 0, Phase.PAUSED
        seq.job.preempted += 1
        self._queue.add(seq)
        self._blocked_at = -1
        fact = SequencePaused(now, seq.job.request.id, seq.id, self.pressure.name, reason, held, seq.lost_at_pause)
        self._facts.emit(fact)

    # --- ending ------------------------------------------------------------------------------------------------------

    def _end(self, seq: Sequence, finish: Finish, cause: LimitCause | None, now: float) -> None:
        """End one sequence; its blocks go back with what is computed still cached."""
        if seq.lease is not None:
            # What led to non-finite logits may be bad itself: nothing that only this sequence holds is trusted again.
            valid = 0 if finish is Finish.ERROR else seq.computed
            self._tell_end(seq, now)
            self.cache.release(seq.lease, seq.tokens, valid, now, finish.value)
            self._history.remember(seq.job.request, seq.tokens, valid)
            del self._running[seq.id]
            seq.lease = None
        else:
            self._queue.remove(seq)
        seq.phase, seq.finish, seq.limit_cause = Phase.FINISHED, finish, cause
        self._blocked_at = -1

    def _tell_end(self, seq: Sequence, now: float) -> None:
        """What eviction policies classify its blocks by, before these become evictable."""
        if seq.lease is not None:
            tip, job = self.cache.tip(seq.lease), seq.job
            self._facts.emit(SequenceEnded(now, job.request.id, seq.id, tip, job.prompt_len, seq.generated))

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
        self._answer_tokens += 0.1 * (job.sequences[0].generated - self._answer_tokens)
        done = job.done(now, self.limits.context_limit)
        news.append(done)
        finishes = tuple(seq.finish for seq in job.sequences if seq.finish is not None)
        ttft = None if job.first_token is None else job.first_token - job.arrived
        e2e = now - job.arrived
        fact = RequestDone(
            now, done.request, finishes, job.limit_cause, done.usage, done.receipt, done.timings, e2e, ttft, done.error
        )
        self._facts.emit(fact)

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._block)
