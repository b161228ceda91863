"""Blocks of several kinds: full ones stored in fewer bits, open ones staged, slabs that serve any kind.

A random walk over the cache with an arena that holds, for each token of each block, the prefix it was computed from:
whoever reads must find its own.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from unittest import TestCase

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from core.support import SCOPE
from tenure.cache.kvcache import KvCache
from tenure.cache.lease import Grant, Lease
from tenure.cache.plan import Ask, Plan, Shortfall
from tenure.cache.pool import SlabPool
from tenure.events import BlockStored, FactLog
from tenure.policy.eviction import Lru
from tenure.spec import ArenaLayout, codec
from tenure.types import BlockId

B = 4
Slot = tuple[int, ...]
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=22).map(tuple)


def layout(slabs: int = 6) -> ArenaLayout:
    """Slabs of 4 stored blocks, or of 2 staged ones."""
    return ArenaLayout(("int8", "bf16"), (50, 100), slabs, 200, staged=True, slots=(4, 2), first=(0, 4 * slabs))


@dataclass
class Live:
    lease: Lease
    tokens: list[int]
    computed: int


class StagedMachine(RuleBasedStateMachine):
    slabs = 6

    def __init__(self) -> None:
        super().__init__()
        self.facts = FactLog()
        self.layout = layout(self.slabs)
        self.cache = KvCache(self.layout, B, codec=codec("int8"), eviction=Lru(), facts=self.facts)
        self.live: list[Live] = []
        self.past: list[Slot] = []
        self.arena: dict[BlockId, list[Slot]] = {}
        self.now = 0.0

    def tick(self) -> float:
        self.now += 1.0
        return self.now

    # ---- rules

    @rule(prompt=prompts, extra=st.integers(0, 5))
    def start(self, prompt: Slot, extra: int) -> None:
        ask = Ask(SCOPE, prompt, len(prompt) + extra)
        plan = self.plan(ask)
        if not isinstance(plan, Plan):
            assert self.live, f"nobody is there, but {ask} does not fit: {plan}"
            return
        grant = self.apply(plan)
        assert grant.lease.open is not None and grant.lease.room >= ask.room
        if plan.head is not None or plan.reused_tokens % B:
            assert grant.lease.reused_tokens == self.cache.match(SCOPE, prompt[:-1]).tokens
        self.live.append(Live(grant.lease, list(prompt), grant.lease.reused_tokens))
        self.verify(self.live[-1])

    @precondition(lambda self: self.past)
    @rule(data=st.data(), more=st.lists(st.integers(0, 1), max_size=5))
    def start_next_turn(self, data: st.DataObject, more: list[int]) -> None:
        before = data.draw(st.sampled_from(self.past))
        self.start(prompt=(*before[: data.draw(st.integers(1, len(before)))], *more), extra=1)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), n=st.integers(0, 12), tail=st.booleans())
    def compute(self, data: st.DataObject, n: int, tail: bool) -> None:
        seq = data.draw(st.sampled_from(self.live))
        self.run(seq, min(len(seq.tokens), seq.computed + n))
        seq.lease = self.cache.commit(seq.lease, seq.tokens, seq.computed, self.tick(), tail=tail)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def generate(self, data: st.DataObject, tokens: list[int]) -> None:
        seq = data.draw(st.sampled_from(self.live))
        self.run(seq, len(seq.tokens))
        seq.lease = self.cache.commit(seq.lease, seq.tokens, seq.computed, self.tick())
        plan = self.plan(Ask(SCOPE, (), len(seq.tokens) + len(tokens), seq.lease))
        if isinstance(plan, Plan):
            seq.lease = self.apply(plan).lease
            seq.tokens += tokens
        elif len(self.live) == 1:
            assert len(seq.tokens) + len(tokens) > B * self.layout.blocks

    @precondition(lambda self: self.live)
    @rule(data=st.data(), n=st.integers(0, 12))
    def release(self, data: st.DataObject, n: int) -> None:
        seq = data.draw(st.sampled_from(self.live))
        self.run(seq, min(len(seq.tokens), seq.computed + n))
        self.cache.release(seq.lease, seq.tokens, seq.computed, self.tick(), "test")
        self.live.remove(seq)
        self.past.append(tuple(seq.tokens))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(self.live))
        self.cache.release(seq.lease, seq.tokens, 0, self.tick(), "bad")
        self.live.remove(seq)

    @rule()
    def drop(self) -> None:
        self.cache.drop_unleased(self.tick())

    # ---- how

    def plan(self, ask: Ask) -> Plan | Shortfall:
        """The cache's plan; whoever grows is only told of a shortfall when nothing that could go would make room."""
        plan = self.cache.plan(ask, self.now)
        if isinstance(plan, Shortfall):
            assert plan.is_hard
            if ask.lease:
                other = deepcopy(self.cache)
                other.drop_unleased(self.now)
                same = Ask(SCOPE, (), ask.room, other._leases[ask.lease.id].lease)
                assert isinstance(other.plan(same, self.now), Shortfall)
        return plan

    def apply(self, plan: Plan) -> Grant:
        grant = self.cache.apply(plan, self.tick())
        for op in grant.copies:
            self.arena[op.dst] = list(self.arena[op.src])
        return grant

    def run(self, seq: Live, upto: int) -> None:
        """Compute positions [computed, upto) as the decoder does: into the open block, encoded when it is full."""
        self.verify(seq)
        assert seq.lease.open is not None
        staged = self.arena.setdefault(seq.lease.open, [()] * B)
        for at in range(seq.computed, upto):
            staged[at % B] = tuple(seq.tokens[: at + 1])
            if at % B == B - 1:
                self.arena[seq.lease.blocks[at // B]] = list(staged)
        seq.computed = max(seq.computed, upto)

    def verify(self, seq: Live) -> None:
        for at in range(seq.computed):
            open_now = at // B == seq.computed // B
            block = seq.lease.open if open_now else seq.lease.blocks[at // B]
            assert block is not None
            assert self.arena[block][at % B] == tuple(seq.tokens[: at + 1]), f"token {at} reads another's bytes"

    @invariant()
    def holds(self) -> None:
        self.cache.check()
        assert self.cache.leaked() == 0
        for seq in self.live:
            self.verify(seq)
        for kind in self.cache.by_codec():
            assert kind.leased >= 0 and kind.cached >= 0

    def teardown(self) -> None:
        for seq in self.live:
            self.cache.release(seq.lease, seq.tokens, seq.computed, self.tick(), "end")
        assert sum(kind.leased for kind in self.cache.by_codec()) == 0
        self.cache.drop_unleased(self.tick())
        self.cache.check()
        assert self.cache.counts().free == self.layout.blocks


ALL = list(HealthCheck)
TestStaged = StagedMachine.TestCase
TestStaged.settings = settings(max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=ALL)
assert issubclass(TestStaged, TestCase)


@pytest.mark.full
def test_for_long() -> None:
    long = settings(max_examples=500, stateful_step_count=60, deadline=None, suppress_health_check=ALL)
    run_state_machine_as_test(StagedMachine, settings=long)


# ---- one by one


def cache(slabs: int = 6) -> tuple[KvCache, FactLog]:
    facts = FactLog()
    return KvCache(layout(slabs), B, codec=codec("int8"), eviction=Lru(), facts=facts), facts


def visit(kv: KvCache, tokens: list[int], now: float) -> int:
    plan = kv.plan(Ask(SCOPE, tokens, len(tokens)), now)
    assert isinstance(plan, Plan), plan
    lease = kv.apply(plan, now).lease
    kv.release(lease, tokens, len(tokens), now, "stop")
    kv.check()
    return plan.reused_tokens


def test_full_blocks_are_reused_whole_and_tails_by_their_head() -> None:
    kv, facts = cache()
    first = list(range(10))
    assert visit(kv, first, 1.0) == 0
    assert visit(kv, [*first[:7], 99], 2.0) == 4  # the head of a stored block is of no use
    assert visit(kv, [*first, 98, 97, 96], 3.0) == 10
    assert visit(kv, [*first[:9], 98], 4.0) == 8  # its tail was written on and stored
    stored = [fact for fact in facts.since(0)[0] if isinstance(fact, BlockStored)]
    assert {(fact.codec, fact.tokens == B) for fact in stored} == {("int8", True), ("bf16", False)}


def test_a_tail_goes_when_only_room_to_stage_is_missing() -> None:
    kv, _ = cache(slabs=3)
    visit(kv, [1, 2, 3, 4, 5], 1.0)
    visit(kv, [9, 9], 2.0)
    plans = []
    for i in range(4):
        plan = kv.plan(Ask(SCOPE, [20 + i], 1), 3.0 + i)
        assert isinstance(plan, Plan), plan
        plans.append(plan)
        kv.apply(plan, 3.0 + i)
    assert [len(plan.victims) for plan in plans] == [0, 0, 1, 1]
    assert kv.match(SCOPE, [1, 2, 3, 4, 5]).tokens == 4
    assert kv.match(SCOPE, [9, 9]).tokens == 0


def test_a_pool_of_slabs_refuses_what_makes_no_sense() -> None:
    with pytest.raises(ValueError, match="too small"):
        SlabPool(layout(1))
    pool = SlabPool(layout(2))
    with pytest.raises(ValueError, match="5 blocks of int8 wanted, 4 free"):
        pool.take(5)
