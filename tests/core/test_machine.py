"""KvCache against the naive model, with every invariant checked after every step, and the bytes followed by hand."""

from __future__ import annotations

from dataclasses import dataclass
from unittest import TestCase

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from core.naive import Entry, Naive, Name, Tokens
from tenure.cache import keys
from tenure.cache.kvcache import KvCache
from tenure.cache.lease import Lease
from tenure.cache.plan import Ask, Plan, Shortfall
from tenure.errors import StalePlan
from tenure.events import FactLog
from tenure.policy.eviction import Lru
from tenure.spec import Codec, codec
from tenure.types import CopyOp, Key, Scope

SCOPES = (Scope("m"), Scope("m", tenant="t"))
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=24).map(tuple)
few = st.integers(0, 12)


@dataclass
class Sequence:
    lease: Lease
    tokens: list[int]
    computed: int

    @property
    def scope(self) -> str:
        return self.lease.scope.tenant


class CacheMachine(RuleBasedStateMachine):
    size = 4
    pool = 14
    codec = codec("bf16")

    def __init__(self) -> None:
        super().__init__()
        self.facts = FactLog()
        self.cache = KvCache(self.pool, self.size, codec=self.codec, eviction=Lru(), facts=self.facts)
        self.naive = Naive(self.pool, self.size, self.codec.head_reusable)
        self.live: list[Sequence] = []
        self.past: list[Tokens] = []
        self.pinned: list[tuple[Lease, Tokens]] = []
        self.arena: dict[int, list[Tokens]] = {i: [()] * self.size for i in range(self.pool)}
        """What each slot of each block holds: the prefix its K and V were computed from."""
        self.now = 0.0

    def tick(self) -> float:
        self.now += 1.0
        return self.now

    def key(self, name: Name) -> Key:
        full = len(name[1]) // self.size * self.size
        root = keys.root(Scope("m", tenant=name[0]))
        chain = keys.chain_of(root, name[1][:full], self.size)
        last = chain[-1] if chain else root
        return keys.chain(last, name[1][full:]) if name[1][full:] else last

    # ---- rules

    @rule(prompt=prompts, scope=st.sampled_from(SCOPES), extra=st.integers(0, 5))
    def start(self, prompt: Tokens, scope: Scope, extra: int) -> None:
        self.begin(prompt, scope, extra)

    @precondition(lambda self: self.past)
    @rule(data=st.data(), more=st.lists(st.integers(0, 1), max_size=5), scope=st.sampled_from(SCOPES))
    def start_next_turn(self, data: st.DataObject, more: list[int], scope: Scope) -> None:
        before = data.draw(st.sampled_from(self.past))
        cut = data.draw(st.integers(1, len(before)))
        self.begin((*before[:cut], *more), scope, 1)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), n=few, tail=st.booleans())
    def compute(self, data: st.DataObject, n: int, tail: bool) -> None:
        seq = data.draw(st.sampled_from(self.live))
        self.run(seq, min(len(seq.tokens), seq.computed + n))
        epoch = self.cache.epoch
        after = self.cache.commit(seq.lease, seq.tokens, seq.computed, self.tick(), tail=tail)
        if not tail and seq.computed - seq.lease.committed_tokens < self.size:
            assert after is seq.lease and self.cache.epoch == epoch
        seq.lease = after
        self.mirror_commit(seq, tail)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), token=st.integers(0, 1))
    def generate(self, data: st.DataObject, token: int) -> None:
        seq = data.draw(st.sampled_from(self.live))
        self.run(seq, len(seq.tokens))
        self.compute_all(seq)
        room = len(seq.tokens) + 1
        plan = self.cache.plan(Ask(seq.lease.scope, (), room, seq.lease), self.now)
        needed = max(0, -(-room // self.size) - len(seq.lease.blocks))
        possible = needed <= self.naive.free() + len(self.naive.idle())
        assert isinstance(plan, Plan if possible else Shortfall)
        if isinstance(plan, Plan):
            self.mirror_victims(plan, needed, set())
            grant = self.cache.apply(plan, self.tick())
            assert grant.copies == () and grant.lease.blocks[: len(seq.lease.blocks)] == seq.lease.blocks
            seq.lease = grant.lease
            self.naive.private[seq.lease.id] += needed
            seq.tokens.append(token)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), n=few)
    def release(self, data: st.DataObject, n: int) -> None:
        seq = data.draw(st.sampled_from(self.live))
        self.run(seq, min(len(seq.tokens), seq.computed + n))
        self.cache.release(seq.lease, seq.tokens, seq.computed, self.tick(), "test")
        self.live.remove(seq)
        self.past.append(tuple(seq.tokens))
        self.mirror_commit(seq, tail=True)
        self.leave(seq.lease.id)
        self.naive.tidy()
        with pytest.raises(ValueError, match="was released"):
            self.cache.commit(seq.lease, seq.tokens, seq.computed, self.now)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), valid=few)
    def fail(self, data: st.DataObject, valid: int) -> None:
        """A sequence proves bad from token `valid` on."""
        seq = data.draw(st.sampled_from(self.live))
        if valid >= seq.lease.committed_tokens:
            return
        me, held = seq.lease.id, self.naive.held
        self.cache.release(seq.lease, seq.tokens, valid, self.tick(), "non-finite")
        self.live.remove(seq)
        mine = sorted((n for n, e in held.items() if me in e.holders), key=lambda name: len(name[1]))
        self.leave(me)
        first = next((name[1] for name in mine[valid // self.size :] if not held[name].holders), None)
        for name in [n for n in held if first and n[0] == seq.scope and n[1][: len(first)] == first]:
            del held[name]

    @precondition(lambda self: self.past)
    @rule(data=st.data(), scope=st.sampled_from(SCOPES))
    def pin(self, data: st.DataObject, scope: Scope) -> None:
        tokens = data.draw(st.sampled_from(self.past))
        path, _ = self.naive.reuse(scope.tenant, tokens)
        lease = self.cache.hold(scope, tokens, self.tick())
        assert (lease is None) == (not path)
        if lease is not None:
            assert lease.committed_tokens == self.size * len(path)
            self.naive.private[lease.id] = 0
            for name in path:
                self.naive.held[name].holders.add(lease.id)
            self.pinned.append((lease, tokens))

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        lease, tokens = self.pinned.pop(data.draw(st.integers(0, len(self.pinned) - 1)))
        self.cache.release(lease, tokens, lease.committed_tokens, self.tick(), "unpinned")
        self.leave(lease.id)

    @rule()
    def drop(self) -> None:
        idle = self.naive.idle()
        plan = self.cache.plan(Ask(SCOPES[0], (7,), 1), self.now)
        assert self.cache.drop_unleased(self.tick()) == len(idle)
        for name in idle:
            del self.naive.held[name]
        if isinstance(plan, Plan):
            before = self.cache.counts()
            with pytest.raises(StalePlan):
                self.cache.apply(plan, self.now)
            assert self.cache.counts() == before

    # ---- the mirror

    def begin(self, prompt: Tokens, scope: Scope, extra: int) -> None:
        room = len(prompt) + extra
        path, head = self.naive.reuse(scope.tenant, prompt)
        match = self.cache.match(scope, prompt)
        assert match.tokens == self.size * len(path) + head
        end = self.size * (len(path) + 1)
        assert match.awaited == (self.naive.promised.get((scope.tenant, prompt[:end])) if len(prompt) >= end else None)
        assert [self.key(name) for name in path] == list(match.keys)
        path, head = self.naive.reuse(scope.tenant, prompt[:-1])
        plan = self.cache.plan(Ask(scope, prompt, room), self.now)
        assert plan == self.cache.plan(Ask(scope, prompt, room), self.now)
        spared = {name for name in path if not self.naive.held[name].holders}
        needed = -(-room // self.size) - len(path)
        available = self.naive.free() + len(self.naive.idle()) - len(spared)
        assert isinstance(plan, Plan if needed <= available else Shortfall)
        if not isinstance(plan, Plan):
            assert plan.free == self.naive.free()
            assert plan.needed - plan.free - plan.evictable == needed - available > 0
            return
        source = next((n for n in self.naive.held if plan.head and self.key(n) == plan.head.key), None)
        if source:
            assert plan.head and plan.head.tokens == head
            spared |= {source} - {n for n, e in self.naive.held.items() if e.holders}
        else:  # only when the head's block itself was needed
            assert not head or needed == available
        whole = bool(plan.head and plan.head.whole)
        assert plan.takes.stored == (needed - whole,)
        assert plan.reused_tokens == self.size * len(path) + (head if source else 0)
        self.mirror_victims(plan, plan.takes.stored[0], spared)
        grant = self.cache.apply(plan, self.tick())
        self.follow(grant.copies, whole or not source)
        for name in [*path, *([source] if source else [])]:
            self.naive.held[name].used = self.now
            if name != source or whole:
                self.naive.held[name].holders.add(grant.lease.id)
        for end in range(self.size * (len(path) + 1), len(prompt) + 1, self.size):
            self.naive.promised.setdefault((scope.tenant, prompt[:end]), grant.lease.id)
        self.naive.private[grant.lease.id] = plan.takes.stored[0]
        self.live.append(Sequence(grant.lease, list(prompt), plan.reused_tokens))
        self.verify(self.live[-1])

    def follow(self, copies: tuple[CopyOp, ...], none: bool) -> None:
        assert len(copies) == (not none)
        for op in copies:
            self.arena[op.dst] = list(self.arena[op.src])

    def mirror_victims(self, plan: Plan, takes: int, spared: set[Name]) -> None:
        gone = self.naive.victims(max(0, takes - self.naive.free()), spared)
        assert [self.key(name) for name in gone] == list(plan.victims)
        for name in gone:
            del self.naive.held[name]

    def mirror_commit(self, seq: Sequence, tail: bool) -> None:
        """Publish what is computed: full blocks, and the open block's head when asked."""
        me, held = seq.lease.id, self.naive.held
        ends = [e for e in range(self.size, seq.computed + 1, self.size) if me not in self.holders(seq, e)]
        grown = tail and self.naive.heads and seq.computed % self.size
        own = next((n for n, e in held.items() if me in e.holders and len(n[1]) % self.size), None)
        if own and (ends or (grown and seq.computed > len(own[1]))):
            del held[own]
            self.naive.private[me] += 1
            own = None
        for end in ends:
            held.setdefault((seq.scope, tuple(seq.tokens[:end])), Entry(self.now)).holders.add(me)
            held[seq.scope, tuple(seq.tokens[:end])].used = self.now
            self.naive.private[me] -= 1
            self.naive.tidy()
            if self.naive.promised.get((seq.scope, tuple(seq.tokens[:end]))) == me:
                del self.naive.promised[seq.scope, tuple(seq.tokens[:end])]
        name = (seq.scope, tuple(seq.tokens[: seq.computed]))
        if grown and not own and self.naive.reuse(*name)[1] < seq.computed % self.size:
            held[name] = Entry(self.now, {me})
            self.naive.private[me] -= 1
            self.naive.tidy()

    def leave(self, me: int) -> None:
        del self.naive.private[me]
        self.naive.promised = {name: who for name, who in self.naive.promised.items() if who != me}
        for entry in self.naive.held.values():
            if me in entry.holders:
                entry.holders.discard(me)
                entry.used = self.now if not entry.holders else entry.used

    def holders(self, seq: Sequence, end: int) -> set[int]:
        entry = self.naive.held.get((seq.scope, tuple(seq.tokens[:end])))
        return entry.holders if entry else set()

    def compute_all(self, seq: Sequence) -> None:
        seq.lease = self.cache.commit(seq.lease, seq.tokens, seq.computed, self.tick())
        self.mirror_commit(seq, tail=False)

    # ---- the bytes

    def run(self, seq: Sequence, upto: int) -> None:
        """Compute positions [computed, upto): read all earlier ones, write these."""
        self.verify(seq)
        for at in range(seq.computed, upto):
            self.arena[seq.lease.blocks[at // self.size]][at % self.size] = (len(seq.scope), *seq.tokens[: at + 1])
        seq.computed = max(seq.computed, upto)

    def verify(self, seq: Sequence) -> None:
        for at in range(seq.computed):
            slot = self.arena[seq.lease.blocks[at // self.size]][at % self.size]
            assert slot == (len(seq.scope), *seq.tokens[: at + 1]), f"token {at} reads another sequence's bytes"

    # ---- always

    @invariant()
    def holds(self) -> None:
        self.cache.check()
        assert self.cache.leaked() == 0
        counts = self.cache.counts()
        assert counts.free == self.naive.free()
        assert counts.cached == len(self.naive.idle())
        for seq in self.live:
            self.verify(seq)

    def teardown(self) -> None:
        for lease, tokens in self.pinned:
            self.cache.release(lease, tokens, lease.committed_tokens, self.tick(), "unpinned")
        for seq in self.live:
            self.cache.release(seq.lease, seq.tokens, seq.computed, self.tick(), "end")
        assert self.cache.counts().leased == 0
        self.cache.drop_unleased(self.tick())
        self.cache.check()
        assert self.cache.counts().free == self.pool


class WholeBlocks(CacheMachine):
    """A codec whose blocks can't be reused by their head."""

    codec = Codec("q", 8, 8, head_reusable=False)


class OneToken(CacheMachine):
    """Blocks of one token, as traces of block ids are replayed with."""

    size = 1
    pool = 30


def machine(kind: type[CacheMachine], examples: int) -> type[TestCase]:
    case = kind.TestCase
    case.settings = settings(max_examples=examples, stateful_step_count=40, deadline=None, suppress_health_check=ALL)
    return case


ALL = list(HealthCheck)
TestCache = machine(CacheMachine, 100)
TestWholeBlocks = machine(WholeBlocks, 40)
TestOneToken = machine(OneToken, 40)


@pytest.mark.full
@pytest.mark.parametrize("kind", [CacheMachine, WholeBlocks, OneToken])
def test_for_long(kind: type[CacheMachine]) -> None:
    run_state_machine_as_test(
        kind, settings=settings(max_examples=500, stateful_step_count=60, deadline=None, suppress_health_check=ALL)
    )
