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
from tenure.cache.plan import Ask, Goes, Plan, Shortfall
from tenure.cache.pool import SlabPool
from tenure.cache.recode import RecodePlan
from tenure.cache.windows import AHEAD
from tenure.events import BlockGone, BlockStored, FactLog
from tenure.policy.eviction import Lru
from tenure.spec import ArenaLayout, KvGeometry, LayerGroup, codec
from tenure.types import BlockId, Fate

B = 4
Slot = tuple[int, ...]
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=22).map(tuple)


def layout(slabs: int = 6) -> ArenaLayout:
    """Slabs of 4 stored blocks, or of 2 staged ones."""
    first = (0, 4 * slabs)
    return ArenaLayout(("int8", "bf16"), (50, 100), slabs, 200, staged=True, slots=(4, 2), first=first, kept=(0, 1))


@dataclass
class Live:
    lease: Lease
    tokens: list[int]
    computed: int


class StagedMachine(RuleBasedStateMachine):
    """Stored as int8, staged as bf16; recoded to int4."""

    recoded = "int4"
    layout = ArenaLayout(
        ("int8", "bf16", "int4"), (50, 100, 25), 10, 200, True, slots=(4, 2, 8), first=(0, 40, 60), kept=(0, 1, 0)
    )

    def __init__(self) -> None:
        super().__init__()
        self.facts = FactLog()
        self.cache = KvCache(self.layout, B, codec=codec(self.layout.kinds[0]), eviction=Lru(), facts=self.facts)
        self.live: list[Live] = []
        self.past: list[Slot] = []
        self.arena: dict[BlockId, list[tuple[Slot, bool]]] = {}
        """For each token of each block the prefix it was computed from, and whether what it was computed on, or it
        itself, had been recoded."""
        self.now = 0.0

    def tick(self) -> float:
        self.now += 1.0
        return self.now

    # ---- rules

    @rule(prompt=prompts, extra=st.integers(0, 5), exact=st.booleans())
    def start(self, prompt: Slot, extra: int, exact: bool) -> None:
        ask = Ask(SCOPE, prompt, len(prompt) + extra, exact=exact)
        held = self.cache.match(SCOPE, prompt[:-1], exact=exact).tokens
        plan = self.plan(ask)
        if not isinstance(plan, Plan):
            assert self.live, f"nobody is there, but {ask} does not fit: {plan}"
            return
        grant = self.apply(plan)
        assert (grant.lease.open is not None) == self.layout.staged
        assert grant.lease.room >= (ask.room if len(self.layout.groups) == 1 else grant.lease.reused_tokens + 1)
        if plan.head is not None or plan.reused_tokens % B:
            assert grant.lease.reused_tokens == held
        self.live.append(Live(grant.lease, list(prompt), grant.lease.reused_tokens))
        self.verify(self.live[-1])

    @precondition(lambda self: self.past)
    @rule(data=st.data(), more=st.lists(st.integers(0, 1), max_size=5))
    def start_next_turn(self, data: st.DataObject, more: list[int]) -> None:
        before = data.draw(st.sampled_from(self.past))
        prompt = (*before[: data.draw(st.integers(1, len(before)))], *more)
        self.start(prompt=prompt, extra=1, exact=data.draw(st.booleans()))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), more=st.lists(st.integers(0, 1), min_size=1, max_size=9), exact=st.booleans())
    def fork(self, data: st.DataObject, more: list[int], exact: bool) -> None:
        """Somebody goes on from where another one is."""
        seq = data.draw(st.sampled_from(self.live))
        self.start(prompt=(*seq.tokens[: seq.computed], *more), extra=1, exact=exact)

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
        if seq.computed < len(seq.tokens):  # it found no room to go on
            return
        plan = self.plan(Ask(SCOPE, (), len(seq.tokens) + len(tokens), seq.lease))
        if isinstance(plan, Plan):
            seq.lease = self.apply(plan).lease
            seq.tokens += tokens
        elif len(self.live) == 1:
            assert len(seq.tokens) + len(tokens) > self.sure

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

    @precondition(lambda self: self.live)
    @rule(data=st.data(), n=st.integers(1, 6))
    def recode(self, data: st.DataObject, n: int) -> None:
        seq = data.draw(st.sampled_from(self.live))
        self.run(seq, len(seq.tokens))
        seq.lease = self.cache.commit(seq.lease, seq.tokens, seq.computed, self.tick())
        before = {other.lease.id: self.cache.codecs(other.lease, other.computed, other.computed) for other in self.live}
        plan = self.cache.plan_recode(seq.lease, self.recoded, n, self.now)
        if isinstance(plan, Shortfall):
            return
        made = self.cache.apply_recode(plan, "test", self.tick())
        for op in made.ops:
            self.arena[op.dst] = [(prefix, True) for prefix, _ in self.arena[op.src]]
        newest = {lease.id: lease for lease in made.leases}
        assert seq.lease.id in newest
        for other in self.live:
            other.lease = newest.get(other.lease.id, other.lease)
            after = self.cache.codecs(other.lease, other.computed, other.computed)
            assert sum(after.values()) == other.computed
            changed, renewed = after != before[other.lease.id], other.lease.id in newest
            # Where its window has left the block that moved, a lease is renewed for the names of what it computes.
            assert changed == renewed or (renewed and self.layout.groups[0].window is not None)
            assert not (other.lease.exact and other.lease.id in newest)

    @rule()
    def drop(self) -> None:
        self.cache.drop_unleased(self.tick())

    # ---- how

    @property
    def sure(self) -> int:
        """Tokens that a sequence alone is sure to get: the pool, less the slabs beyond those kept in which blocks of
        windows may lie that were taken while there was room, and are not left yet: one more where they begin inside."""
        layout, slabs = self.layout, 0
        for k, group in list(zip(layout.stored, layout.groups, strict=True))[1:]:
            most = -(-(group.held(1 << 30, B) + AHEAD) // layout.slots[k]) + (layout.slots[k] > 1)
            slabs += max(0, most - layout.kept[k])
        return B * (layout.blocks - slabs * layout.slots[0])

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
        """Compute positions [computed, upto) as the decoder does: staged, and encoded when the block is full. Where
        windows let blocks go meanwhile, piece by piece, as far as there is room."""
        while seq.computed < upto:
            room = seq.lease.room
            reach = min(upto, room if room >= len(seq.tokens) else room - room % B)
            if reach > seq.computed:
                self.compute_rows(seq, reach)
                seq.lease = self.cache.commit(seq.lease, seq.tokens, seq.computed, self.tick())
                continue
            plan = self.plan(Ask(SCOPE, (), len(seq.tokens), seq.lease))
            if isinstance(plan, Shortfall):
                assert len(self.live) > 1 or len(seq.tokens) > self.sure
                return
            seq.lease = self.apply(plan).lease

    def compute_rows(self, seq: Live, upto: int) -> None:
        self.verify(seq)
        tainted = any(taint for _, taint in self.slots(seq, 0))
        for at in range(seq.computed, upto):
            ends = at % B == B - 1
            staged = seq.lease.open
            stored = [table[at // B] for table in seq.lease.tables] if ends or staged is None else []
            for block in stored if staged is None else [staged]:
                self.arena.setdefault(block, [((), False)] * B)[at % B] = (tuple(seq.tokens[: at + 1]), tainted)
            if staged is not None:
                for block in stored:
                    self.arena[block] = list(self.arena[staged])
        seq.computed = max(seq.computed, upto)

    def slots(self, seq: Live, group: int) -> list[tuple[Slot, bool]]:
        """What the next row sees in a group of layers, from its window's first position on."""
        lease, window = seq.lease, self.layout.groups[group].window
        first = 0 if window is None else max(0, seq.computed + 1 - window)
        found = []
        for at in range(first, seq.computed):
            staged = lease.open is not None and at // B == seq.computed // B
            found.append(self.arena[lease.open if staged else lease.tables[group][at // B]][at % B])  # type: ignore[index]
        return found

    def verify(self, seq: Live) -> None:
        for group in range(len(self.layout.groups)):
            slots = self.slots(seq, group)
            for at, (prefix, tainted) in enumerate(slots, seq.computed - len(slots)):
                assert prefix == tuple(seq.tokens[: at + 1]), f"token {at} reads another's bytes"
                assert not (tainted and seq.lease.exact), f"token {at} of an exact sequence reads what was recoded"

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


class RecodeMachine(StagedMachine):
    """Stored as bf16, written where it is stored; recoded to int8."""

    recoded = "int8"
    layout = ArenaLayout(("bf16", "int8"), (100, 50), 12, 200, staged=False, slots=(2, 4), first=(0, 24), kept=(0, 0))


def windowed(*windows: int | None, slabs: int, codecs: tuple[str, ...]) -> ArenaLayout:
    """A group of layers for each window; blocks of 100 bytes in bf16."""
    groups = tuple(LayerGroup(1, window) for window in windows)
    geometry = KvGeometry(len(groups), 1, 25, block_tokens=B, v_dim=0, groups=groups)
    found = geometry.layout(slabs * 200, codecs[0], codecs[1:])
    return found


class WindowMachine(StagedMachine):
    """Layers that see everything, and some that see 6 tokens; all written where they are stored."""

    recoded = "int8"
    layout = windowed(None, 6, slabs=16, codecs=("bf16", "int8"))


class AllWindowsMachine(StagedMachine):
    """Two groups of layers, and none that sees everything."""

    recoded = "int8"
    layout = windowed(9, 5, slabs=16, codecs=("bf16", "int8"))


class StagedWindowsMachine(StagedMachine):
    """Three groups of layers stored as int8, the first recoded to int4."""

    layout = windowed(None, 9, 4, slabs=24, codecs=("int8", "int4"))


ALL = list(HealthCheck)


def machine(kind: type[StagedMachine]) -> type[TestCase]:
    case = kind.TestCase
    case.settings = settings(max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=ALL)
    return case


TestStaged = machine(StagedMachine)
TestRecode = machine(RecodeMachine)
TestWindows = machine(WindowMachine)
TestAllWindows = machine(AllWindowsMachine)
TestStagedWindows = machine(StagedWindowsMachine)


@pytest.mark.full
@pytest.mark.parametrize("kind", [StagedMachine, RecodeMachine, WindowMachine, AllWindowsMachine, StagedWindowsMachine])
def test_for_long(kind: type[StagedMachine]) -> None:
    long = settings(max_examples=500, stateful_step_count=60, deadline=None, suppress_health_check=ALL)
    run_state_machine_as_test(kind, settings=long)


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


# ---- recoding


def recoding() -> tuple[KvCache, FactLog]:
    facts = FactLog()
    return KvCache(RecodeMachine.layout, B, codec=codec("bf16"), eviction=Lru(), facts=facts), facts


def begin(kv: KvCache, tokens: list[int], now: float, *, exact: bool = False) -> Lease:
    """A sequence that has computed all of its tokens."""
    plan = kv.plan(Ask(SCOPE, tokens, len(tokens), exact=exact), now)
    assert isinstance(plan, Plan), plan
    return kv.commit(kv.apply(plan, now).lease, tokens, len(tokens), now)


def test_forks_share_what_is_recoded_and_exact_requests_do_not() -> None:
    kv, facts = recoding()
    tokens = list(range(18))
    one, two = begin(kv, tokens, 1.0), begin(kv, [*tokens, 99], 2.0)
    assert two.reused_tokens >= 16
    plan = kv.plan_recode(one, "int8", 3, 3.0)
    assert isinstance(plan, RecodePlan) and len(plan.keys) == 4
    made = kv.apply_recode(plan, "recode:int8", 3.0)
    kv.check()
    assert [lease.id for lease in made.leases] == [one.id, two.id] and len(made.ops) == 4
    one, two = made.leases
    assert one.blocks[:4] == two.blocks[:4] == tuple(op.dst for op in made.ops)
    assert kv.codecs(one, 18, 18) == {"int8": 16, "bf16": 2}
    assert kv.match(SCOPE, tokens).tokens >= 16 and kv.match(SCOPE, tokens, exact=True).tokens == 0
    gone = [fact for fact in facts.since(0)[0] if isinstance(fact, BlockGone)]
    assert {(fact.fate, fact.by) for fact in gone} == {(Fate.RECODED, "recode:int8")}
    assert not any(fact.fate.is_loss for fact in gone)
    # One that must be exact computes its own beside them, and those are found by everyone again.
    mine = begin(kv, tokens, 4.0, exact=True)
    assert mine.reused_tokens == 0 and kv.match(SCOPE, tokens, exact=True).tokens == 16
    assert isinstance(kv.plan_recode(mine, "int8", 3, 5.0), Shortfall)
    for lease in (one, two, mine):
        kv.release(lease, [*tokens, 99][: 18 + (lease.id == two.id)], 18, 6.0, "stop")
    kv.check()
    kv.drop_unleased(7.0)
    kv.check()
    assert kv.counts().free == kv.counts().total and kv.leaked() == 0


def test_what_is_computed_on_a_recoded_block_is_never_exact() -> None:
    kv, _ = recoding()
    tokens = list(range(16))
    lease = begin(kv, tokens, 1.0)
    plan = kv.plan_recode(lease, "int8", 1, 2.0)
    assert isinstance(plan, RecodePlan)
    (lease,) = kv.apply_recode(plan, "test", 2.0).leases
    grown = kv.plan(Ask(SCOPE, (), 24, lease), 3.0)
    assert isinstance(grown, Plan)
    lease = kv.commit(kv.apply(grown, 3.0).lease, list(range(24)), 24, 4.0)
    kv.release(lease, list(range(24)), 24, 5.0, "stop")
    kv.check()
    assert kv.match(SCOPE, list(range(24))).tokens == 24
    assert kv.match(SCOPE, list(range(24)), exact=True).tokens == 0


def test_recoding_that_frees_nothing_is_not_planned() -> None:
    kv, _ = recoding()
    lease = begin(kv, list(range(8)), 1.0)
    short = kv.plan_recode(lease, "int8", 1, 2.0)
    assert isinstance(short, Shortfall) and "would free nothing" in short.reason
    assert isinstance(kv.plan_recode(lease, "int4", 1, 2.0), Shortfall)


def test_an_idle_tail_goes_when_a_block_gets_back_what_a_window_had_left() -> None:
    facts = FactLog()
    kv = KvCache(windowed(9, 5, slabs=16, codecs=("bf16",)), B, codec=codec("bf16"), eviction=Lru(), facts=facts)
    tokens = list(range(12))
    visit(kv, tokens, 0.0)
    second = kv.match(SCOPE, tokens).keys[1]
    kv._make_room(Goes(parts=((second, 1),)), "test", 1.0)
    assert kv.match(SCOPE, tokens[:8]).tokens == 4
    visit(kv, tokens[:6], 2.0)
    assert kv.match(SCOPE, tokens[:8]).tokens == 6, "the tail of six: the block cannot serve"
    plan = kv.plan(Ask(SCOPE, tokens[:8], 8, fresh=True), 3.0)
    assert isinstance(plan, Plan)
    lease = kv.commit(kv.apply(plan, 3.0).lease, tokens[:8], 8, 3.0)
    kv.check()
    assert kv.match(SCOPE, tokens[:8]).tokens == 8
    gone = [fact for fact in facts.since(0)[0] if isinstance(fact, BlockGone)]
    assert [(fact.fate, fact.reason) for fact in gone] == [(Fate.DUPLICATE, "a longer block holds it")]
    kv.release(lease, tokens[:8], 8, 4.0, "stop")
    kv.check()
