"""Who gets blocks: leases for those that start, growth for those that run; and what a shortage asks of whom."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache as remembered

from tenure.cache.kvcache import KvCache
from tenure.cache.lease import Lease
from tenure.cache.pins import Pins
from tenure.cache.plan import Ask, Match, Plan, Shortfall
from tenure.errors import Corrupt
from tenure.overflow import Window, window
from tenure.policy.base import Load, Pause, PressurePolicy, Recode, RunningView, TenantLoad, Wait
from tenure.sched.fair import Account, WaitingQueue
from tenure.sched.limits import SchedulerLimits
from tenure.sched.sequence import Sequence
from tenure.types import BlockOp, LimitCause, SeqId


@dataclass(frozen=True, slots=True)
class End:
    """No room, and nobody can give way: the sequence ends."""

    cause: LimitCause


class Room:
    """Asks the cache, the ladder and the tenants' limits; carries out what gives blocks, never what takes them."""

    def __init__(
        self,
        cache: KvCache,
        pins: Pins,
        queue: WaitingQueue,
        running: Mapping[SeqId, Sequence],
        limits: SchedulerLimits,
    ) -> None:
        self._cache = cache
        self._pins = pins
        self._queue = queue
        self._running = running
        self._limits = limits
        self._size = cache.block_tokens
        self._ops: list[BlockOp] = []
        some = range(self.blocks(limits.context_limit) + 2)
        self._longest = remembered(lambda most: bisect_right(some, most, key=cache.weighs) - 1)
        """Blocks that a sequence can come to that weighs so much at most, as far as the context goes."""

    # --- ask ---------------------------------------------------------------------------------------------------------

    def blocks(self, tokens: int) -> int:
        return -(-tokens // self._size)

    def held_by(self, tenant: str) -> int:
        """Blocks that a tenant's running sequences hold, shared ones counted for each."""
        leases = [seq.lease for seq in self._running.values() if seq.tenant == tenant and seq.lease]
        return sum(map(self._cache.weight, leases))

    def most_of(self, account: Account) -> int | None:
        """Blocks that a tenant's running sequences may hold together."""
        limit = account.tenant.max_kv_bytes
        return None if limit is None else limit // self._limits.block_bytes

    def longest_of(self, account: Account) -> int | None:
        """Blocks that one of a tenant's sequences can come to within that."""
        most = self.most_of(account)
        return None if most is None else self._longest(most)

    def window(self, tenant: str) -> Window:
        """What a tenant's sequence can ever have."""
        mine = self.longest_of(self._queue.account(tenant))
        return window(self._limits.context_limit, self._size, self._cache.longest, mine)

    def tenant_loads(self) -> dict[str, TenantLoad]:
        """Of the tenants with limits that admission judges by."""
        return {
            account.name: TenantLoad(account.new, account.new_tokens, account.tenant.max_queued_tokens, most)
            for account in self._queue.accounts.values()
            if (most := self.longest_of(account)) is not None or account.tenant.max_queued_tokens is not None
        }

    def match(self, seq: Sequence) -> Match:
        """What is held of a sequence's tokens."""
        return self._cache.match(seq.job.request.scope, seq.tokens, exact=seq.job.request.exact)

    def view(self, seq: Sequence) -> RunningView:
        """What the pressure policy sees of a running sequence."""
        job = seq.job
        held = 0 if seq.lease is None else seq.lease.held
        freed = 0 if seq.lease is None else self._cache.freed_by(seq.lease)
        return RunningView(
            seq=seq.id,
            request=job.request.id,
            priority=job.request.priority,
            arrived=job.arrived,
            started=seq.started,
            tokens=len(seq.tokens),
            blocks_freed_if_paused=freed,
            recompute_tokens=max(0, seq.computed - self._size * (held - freed)),  # what is shared, others keep
            progress_since_resume=len(seq.tokens) - seq.resumed_at,
            pauses=seq.pauses,
            recodable_blocks=0 if seq.lease is None else self._cache.recodable(seq.lease),
            served=self._queue.account(seq.tenant).counter,
        )

    def start(self, seq: Sequence, pressure: PressurePolicy, now: float) -> Plan | Shortfall:
        """Blocks for a sequence that starts, and one more to grow into, while the pool's leased blocks stay where
        `pressure` lets sequences start; for a lone one, what it needs is enough."""
        scope, exact = seq.job.request.scope, seq.job.request.exact
        plan = self._cache.plan(Ask(scope, seq.tokens, self._wanted(seq), exact=exact, fresh=seq.fresh), now)
        if isinstance(plan, Plan) and self._running:
            return self._over(plan, pressure.start_limit(self._cache.counts().total), pressure) or plan
        if isinstance(plan, Shortfall) and not self._running:
            return self._cache.plan(Ask(scope, seq.tokens, len(seq.tokens), exact=exact, fresh=seq.fresh), now)
        return plan

    # --- do ----------------------------------------------------------------------------------------------------------

    def lease(self, seq: Sequence, pressure: PressurePolicy, load: Callable[[], Load], now: float) -> Lease | None:
        """Blocks as `start` plans them, when need be after others' were recoded for them, or pins let go for a lone
        sequence. None: too few for now."""
        while True:
            plan = self.start(seq, pressure, now)
            short = plan if isinstance(plan, Shortfall) else self._over_ladder(plan, pressure)
            if short and pressure.codecs and self._running:
                verdict = pressure.relieve(short, [self.view(other) for other in self._running.values()], load())
                if isinstance(verdict, Recode) and self._recode(verdict, pressure.name, now):
                    continue
            if isinstance(plan, Plan):
                grant = self._cache.apply(plan, now)
                self._ops += grant.copies
                return grant.lease
            if self._running:
                return None
            if not self._pins.revoke(now):
                raise Corrupt(f"nothing runs, but sequence {seq.id} of {len(seq.tokens)} tokens does not fit: {plan}")

    def within_tenant(self, seq: Sequence) -> bool:
        """Whether its tenant's limits let a sequence start."""
        account = self._queue.account(seq.tenant)
        if not account.may_start(seq):
            return False
        most = self.most_of(account)
        if most is None or not account.running:
            return True
        return self.held_by(seq.tenant) + self._cache.weighs(self.blocks(self._wanted(seq))) <= most

    def _wanted(self, seq: Sequence) -> int:
        """Tokens to have blocks for at the start, within what its tenant may ever hold."""
        return max(len(seq.tokens), min(seq.room(self._size), self.window(seq.tenant).tokens))

    def grow(self, seq: Sequence, pressure: PressurePolicy, load: Callable[[], Load], now: float) -> Pause | End | None:
        """A block for the next row of `seq`: None when it has it; else who must give way first, or that it ends."""
        if seq.lease is None:
            raise Corrupt(f"sequence {seq.id} runs without a lease")
        plan = self._cache.plan(Ask(seq.job.request.scope, seq.tokens, len(seq.tokens), seq.lease), now)
        own = self._over_own_limit(seq)
        short = own or (plan if isinstance(plan, Shortfall) else self._over_ladder(plan, pressure))
        if short is not None:
            peers = [other for other in self._running.values() if own is None or other.tenant == seq.tenant]
            views = [self.view(peer) for peer in peers]
            if own is not None:  # a tenant's limit counts blocks, whatever they are stored in
                views = [replace(view, recodable_blocks=0) for view in views]
            verdict = pressure.relieve(short, views, load())
            if isinstance(verdict, Recode):
                if self._recode(verdict, pressure.name, now):
                    return self.grow(seq, pressure, load, now)
                verdict = pressure.relieve(short, [replace(view, recodable_blocks=0) for view in views], load())
            if isinstance(verdict, Pause) and len(peers) > 1 and verdict.seq in self._running:
                return verdict
            if isinstance(verdict, Wait) and short.is_hard and len(peers) > 1:
                # Waiting while holding blocks could leave everyone waiting for everyone: it waits in the queue.
                return Pause(seq.id, verdict.reason)
            if own is not None:
                return End("tenant_kv")
        while isinstance(plan, Shortfall):
            if len(self._running) > 1 or not self._pins.revoke(now):
                return End("pool")
            plan = self._cache.plan(Ask(seq.job.request.scope, seq.tokens, len(seq.tokens), seq.lease), now)
        seq.lease = self._cache.apply(plan, now).lease
        return None

    def take_ops(self) -> tuple[BlockOp, ...]:
        """What is to be recoded and copied before anything else is done to blocks, in this order."""
        ops = tuple(self._ops)
        self._ops.clear()
        return ops

    def _recode(self, verdict: Recode, by: str, now: float) -> bool:
        """Store blocks of somebody again in fewer bits; whoever shares them goes on with a new receipt."""
        lease = self._running[verdict.seq].lease
        plan = None if lease is None else self._cache.plan_recode(lease, verdict.codec, verdict.blocks, now)
        if plan is None or isinstance(plan, Shortfall):
            return False
        made = self._cache.apply_recode(plan, by, now)
        self._ops += made.ops
        newest = {lease.id: lease for lease in made.leases}
        for other in self._running.values():
            if other.lease is not None:
                other.lease = newest.get(other.lease.id, other.lease)
        return True

    def _over_own_limit(self, seq: Sequence) -> Shortfall | None:
        """Its tenant would hold more than it may."""
        account = self._queue.account(seq.tenant)
        most, held = self.most_of(account), self.held_by(seq.tenant)
        own = self._cache.weight(seq.lease) if seq.lease else 0
        if most is None or held - own + self._cache.weighs(self.blocks(len(seq.tokens))) <= most:
            return None
        return Shortfall(1, 0, 0, f"tenant {account.name!r} holds {held} of {most} blocks")

    def _over_ladder(self, plan: Plan, pressure: PressurePolicy) -> Shortfall | None:
        """There are blocks, but a step of the ladder comes first."""
        return self._over(plan, pressure.limit(self._cache.counts().total), pressure)

    def _over(self, plan: Plan, limit: int, pressure: PressurePolicy) -> Shortfall | None:
        counts = self._cache.counts()
        if counts.leased + plan.leases <= limit:
            return None
        reason = f"{counts.leased} of {counts.total} blocks are leased, {pressure.name} lets {limit} be"
        return Shortfall(plan.leases, counts.free, counts.cached, reason)
