from __future__ import annotations

import pytest

from core.support import QUANTISED, SCOPE, B, Bench
from tenure.cache import keys
from tenure.cache.kvcache import KvCache
from tenure.cache.plan import Ask, Plan, Shortfall
from tenure.errors import StalePlan
from tenure.events import BlockGone, BlockMerged, BlockReused, BlockStored, CacheCleared, FactLog
from tenure.policy.eviction import Lru
from tenure.spec import codec
from tenure.types import Fate, PoolCounts, Scope

LENGTHS = [1, B - 1, B, B + 1, 4 * B - 1, 4 * B, 4 * B + 1, *(64 * j + 1 for j in range(1, 5))]


def tokens(n: int, first: int = 0) -> list[int]:
    return list(range(first, first + n))


@pytest.mark.parametrize("n", LENGTHS)
def test_the_same_prompt_again_computes_its_last_token_only(n: int) -> None:
    bench = Bench(blocks=200)
    assert bench.visit(tokens(n)) == 0
    assert bench.visit(tokens(n)) == n - 1
    assert bench.visit(tokens(n)) == n - 1


@pytest.mark.parametrize("n", LENGTHS)
def test_a_codec_without_heads_reuses_whole_blocks(n: int) -> None:
    bench = Bench(blocks=200, codec=QUANTISED)
    bench.visit(tokens(n))
    assert bench.visit(tokens(n)) == (n - 1) // B * B
    assert all(fact.tokens == B for fact in bench.told(BlockStored))


def test_who_needs_all_logits_reuses_nothing_and_shares_what_it_computes() -> None:
    bench = Bench()
    bench.visit(tokens(10))
    plan = bench.cache.plan(Ask(SCOPE, tokens(10), 10, fresh=True), bench.now)
    assert isinstance(plan, Plan)
    assert (plan.reused, plan.head, plan.reused_tokens, plan.takes.stored) == ((), None, 0, (3,))
    lease = bench.cache.apply(plan, bench.tick()).lease
    lease = bench.cache.commit(lease, tokens(10), 10, bench.tick(), tail=True)
    bench.cache.check()
    assert len(bench.told(BlockMerged)) == 2  # the full ones; the open one stays its own until the end
    bench.release(lease, tokens(10))
    bench.cache.check()
    assert bench.cache.counts().cached == 3
    assert bench.visit(tokens(12)) == 10


def test_the_next_turn_computes_only_what_is_new_and_needs_no_copy() -> None:
    bench = Bench()
    bench.visit(tokens(10))
    grant = bench.start(tokens(15))
    assert grant.lease.reused_tokens == 10
    assert grant.copies == ()  # the tail that nobody else holds is taken over
    bench.release(grant.lease, tokens(15))
    bench.cache.check()
    assert bench.cache.counts().cached == 4


def test_a_tail_in_use_is_copied_on_write() -> None:
    bench = Bench()
    first = bench.start(tokens(6)).lease
    first = bench.cache.commit(first, tokens(6), 6, bench.tick(), tail=True)
    grant = bench.start([*tokens(6), 9, 9])
    assert grant.lease.reused_tokens == 6
    assert [(op.src, op.dst) for op in grant.copies] == [(first.blocks[1], grant.lease.blocks[1])]
    bench.release(first, [*tokens(6), 7], 6)
    bench.release(grant.lease, [*tokens(6), 9, 9])
    bench.cache.check()


def test_prompts_that_share_a_block_in_part_copy_its_head() -> None:
    bench = Bench()
    bench.visit([1, 2, 3, 4])
    grant = bench.start([1, 2, 9, 9])
    assert grant.lease.reused_tokens == 2 and len(grant.copies) == 1
    assert [fact.tokens for fact in bench.told(BlockReused)] == [2]


def test_the_source_of_a_copy_is_not_its_victim() -> None:
    bench = Bench(blocks=3)
    bench.visit([1, 2, 3, 4])
    bench.visit([5, 6, 7, 8])
    plan = bench.plan([1, 2, 9, 9, 9])
    assert isinstance(plan, Plan) and plan.head is not None
    assert plan.victims == (keys.chain(keys.root(SCOPE), [5, 6, 7, 8]),)
    source = bench.cache.match(SCOPE, [1, 2, 3, 4]).blocks[0]
    grant = bench.cache.apply(plan, bench.tick())
    assert grant.copies[0].src == source and source not in grant.lease.blocks


def test_a_head_is_given_up_when_its_block_is_needed() -> None:
    bench = Bench(blocks=2)
    bench.visit([1, 2, 3, 4])
    grant = bench.start([1, 2, 9, 9, 9])
    assert grant.lease.reused_tokens == 0 and grant.copies == ()
    assert [fact.fate for fact in bench.told(BlockGone)] == [Fate.DROPPED]


def test_a_source_that_was_copied_from_is_young_again() -> None:
    bench = Bench(blocks=4)
    bench.visit([1, 2, 3, 4])
    bench.visit([5, 6, 7, 8])
    bench.release(bench.start([1, 2]).lease, [1, 2], 1)
    plan = bench.plan(tokens(12, 20))
    assert isinstance(plan, Plan)
    assert plan.victims[0] == keys.chain(keys.root(SCOPE), [5, 6, 7, 8])


def test_a_shortfall_says_what_is_missing() -> None:
    bench = Bench(blocks=4)
    bench.visit(tokens(4))
    lease = bench.start(tokens(8, 50)).lease
    short = bench.plan(tokens(16, 80))
    assert short == Shortfall(4, 1, 1, "4 blocks wanted, 1 free, 1 evictable; 1 leases hold 2")
    short = bench.cache.plan(Ask(SCOPE, (), 20, lease), bench.now)
    assert isinstance(short, Shortfall) and short.needed == 3
    assert bench.grow(lease, 16).blocks[:2] == lease.blocks


def test_growing_to_what_is_there_takes_nothing() -> None:
    bench = Bench()
    lease = bench.start(tokens(4), room=9).lease
    assert len(lease.blocks) == 3
    assert bench.grow(lease, 5).blocks == lease.blocks


def test_a_prompt_under_way_is_awaited_until_its_blocks_are_there() -> None:
    bench = Bench()
    first = bench.start(tokens(8)).lease
    assert bench.cache.match(SCOPE, tokens(8)).awaited == first.id
    assert bench.cache.match(SCOPE, tokens(3)).awaited is None
    assert bench.cache.match(Scope("m", salt="s"), tokens(8)).awaited is None
    first = bench.cache.commit(first, tokens(8), 4, bench.tick())
    half = bench.cache.match(SCOPE, [*tokens(8), 1])
    assert (half.tokens, half.awaited) == (4, first.id)
    assert bench.cache.match(SCOPE, [*tokens(4), 9, 9, 9, 9]).awaited is None
    first = bench.cache.commit(first, tokens(8), 8, bench.tick())
    assert bench.cache.match(SCOPE, tokens(8)) == bench.cache.match(SCOPE, [*tokens(8), 1])
    assert bench.cache.match(SCOPE, tokens(8)).awaited is None
    bench.cache.check()


def test_promises_end_with_their_lease() -> None:
    bench = Bench()
    first = bench.start(tokens(8)).lease
    second = bench.start(tokens(8)).lease  # who does not wait may still compute it: the first promise stands
    assert bench.cache.match(SCOPE, tokens(8)).awaited == first.id
    bench.release(second, tokens(8), 0)
    assert bench.cache.match(SCOPE, tokens(8)).awaited == first.id
    bench.release(first, tokens(8), 5)
    assert bench.cache.match(SCOPE, tokens(8)).awaited is None
    assert bench.cache.match(SCOPE, tokens(8)).tokens == 5
    assert bench.cache.ended == {"stop": 2}


def test_a_block_computed_twice_is_merged() -> None:
    bench = Bench()
    first, second = bench.start(tokens(9)).lease, bench.start(tokens(9)).lease
    first = bench.cache.commit(first, tokens(9), 8, bench.tick())
    merged = bench.cache.commit(second, tokens(9), 8, bench.tick())
    assert merged.blocks[:2] == first.blocks[:2] and merged.blocks[2] == second.blocks[2]
    assert [(fact.kept, fact.given) for fact in bench.told(BlockMerged)] == list(
        zip(first.blocks[:2], second.blocks[:2], strict=True)
    )
    assert bench.cache.counts() == PoolCounts(leased=4, cached=0, free=12, total=16)
    assert (bench.cache.freed_by(merged), bench.cache.freed_by(first)) == (1, 1)
    bench.cache.check()


def test_tails_follow_their_owner_and_are_never_lost() -> None:
    bench = Bench()
    lease = bench.start(tokens(2), room=8).lease
    lease = bench.cache.commit(lease, tokens(2), 2, bench.tick(), tail=True)
    again = bench.cache.commit(lease, tokens(2), 2, bench.tick(), tail=True)
    assert again is lease
    lease = bench.cache.commit(lease, tokens(3), 3, bench.tick(), tail=True)
    lease = bench.cache.commit(lease, tokens(5), 5, bench.tick())
    assert [fact.tokens for fact in bench.told(BlockStored)] == [2, 3, 4]
    assert [fact.fate for fact in bench.told(BlockGone)] == [Fate.DUPLICATE, Fate.DUPLICATE]
    assert [fact.recompute_tokens for fact in bench.told(BlockGone)] == [0, 0]
    assert len({fact.block for fact in bench.told(BlockStored)}) == 1
    bench.release(lease, tokens(5))
    bench.cache.check()


def test_an_idle_tail_goes_when_a_longer_block_holds_it() -> None:
    bench = Bench()
    a = bench.start([1, 2]).lease
    b = bench.start([1, 2, 3]).lease
    bench.release(a, [1, 2])
    assert bench.cache.counts().cached == 1
    bench.release(b, [1, 2, 3])
    assert bench.cache.counts().cached == 1
    c = bench.start([1, 2, 5]).lease
    bench.release(c, [1, 2, 5], 2)  # nothing new: the longer tail already begins so
    assert bench.cache.counts().cached == 1
    bench.cache.check()


def test_a_leased_tail_goes_on_release_when_a_longer_block_holds_it() -> None:
    bench = Bench()
    a = bench.start([1, 2], room=4).lease
    a = bench.cache.commit(a, [1, 2], 2, bench.tick(), tail=True)
    bench.release(bench.start([1, 2, 3, 4]).lease, [1, 2, 3, 4])
    assert bench.cache.counts() == PoolCounts(leased=1, cached=1, free=14, total=16)
    bench.release(a, [1, 2])
    assert bench.cache.counts() == PoolCounts(leased=0, cached=1, free=15, total=16)
    bench.cache.check()


def test_facts_tell_the_whole_story_of_a_block() -> None:
    bench = Bench(blocks=2)
    bench.visit(tokens(8))
    stored = bench.told(BlockStored)
    root = keys.root(SCOPE)
    first = keys.chain(root, tokens(4))
    assert [(f.key, f.parent, f.ids, f.codec, f.tier) for f in stored] == [
        (first, None, (0, 1, 2, 3), "bf16", "device"),
        (keys.chain(first, tokens(4, 4)), first, (4, 5, 6, 7), "bf16", "device"),
    ]
    bench.now = 12.0
    bench.start(tokens(8, 40))
    gone = bench.told(BlockGone)
    assert [f.key for f in gone] == [stored[1].key, first]  # the leaf first
    assert {(f.fate, f.by, f.reason, f.recompute_tokens) for f in gone} == {(Fate.DROPPED, "lru", "room", 4)}
    assert [(f.at, f.idle_s, f.age_s) for f in gone] == [(13.0, 11.0, 11.0)] * 2
    assert bench.cache.ledger.resident("device") == 0
    assert bench.cache.ledger.gone["device", Fate.DROPPED] == 2
    assert bench.cache.ledger.recompute_tokens == {"room": 8}


def test_reuse_is_told_with_the_gap_since_the_last_use() -> None:
    bench = Bench()
    bench.visit(tokens(4))  # released at 2
    bench.now = 9.0
    bench.start(tokens(5))
    assert [(f.tokens, f.gap_s, f.tier) for f in bench.told(BlockReused)] == [(4, 8.0, "device")]


def test_dropping_the_unleased_leaves_the_leased() -> None:
    bench = Bench()
    bench.visit(tokens(10))
    lease = bench.start([*tokens(4), 9]).lease
    assert bench.cache.drop_unleased(bench.tick()) == 2
    assert [fact.blocks for fact in bench.told(CacheCleared)] == [2]
    assert {(f.by, f.reason) for f in bench.told(BlockGone)} == {("operator", "reset")}
    bench.cache.check()
    bench.release(lease, [*tokens(4), 9])
    assert bench.visit([*tokens(4), 9]) == 4


def test_what_proved_bad_is_taken_back_with_all_that_stands_on_it() -> None:
    bench = Bench()
    bench.visit(tokens(12))
    lease = bench.start([*tokens(8), 60]).lease
    bench.cache.release(lease, [*tokens(8), 60], 4, bench.tick(), "non-finite logits")
    assert [(f.fate, f.reason) for f in bench.told(BlockGone)] == [(Fate.CORRUPT, "non-finite logits")] * 2
    assert bench.cache.match(SCOPE, tokens(12)).tokens == 4
    bench.cache.check()


def test_what_proved_bad_stays_while_others_lease_it() -> None:
    bench = Bench()
    bench.visit(tokens(8))
    a, b = bench.start(tokens(9)).lease, bench.start(tokens(9)).lease
    bench.cache.release(a, tokens(9), 0, bench.tick(), "non-finite logits")
    assert bench.told(BlockGone) == []
    bench.cache.release(b, tokens(9), 0, bench.tick(), "non-finite logits")
    assert len(bench.told(BlockGone)) == 2
    assert bench.cache.counts().free == 16


def test_plans_are_good_for_one_epoch() -> None:
    bench = Bench()
    stale = bench.plan(tokens(4))
    assert isinstance(stale, Plan)
    bench.start(tokens(4, 50))
    before = (bench.cache.counts(), bench.facts.next_seq, bench.cache.epoch)
    with pytest.raises(StalePlan, match="planned at epoch 0, applied at 1"):
        bench.cache.apply(stale, bench.tick())
    assert (bench.cache.counts(), bench.facts.next_seq, bench.cache.epoch) == before


def test_a_step_that_fills_no_block_changes_nothing() -> None:
    bench = Bench()
    lease = bench.start(tokens(6)).lease
    before = (bench.cache.epoch, bench.facts.next_seq)
    assert bench.cache.commit(lease, tokens(6), 3, bench.tick()) is lease
    assert (bench.cache.epoch, bench.facts.next_seq) == before


def test_only_the_newest_receipt_counts() -> None:
    bench = Bench()
    old = bench.start(tokens(4)).lease
    new = bench.cache.commit(old, tokens(4), 4, bench.tick())
    for call in (
        lambda: bench.cache.commit(old, tokens(4), 4, 0.0),
        lambda: bench.cache.release(old, tokens(4), 4, 0.0, "stop"),
        lambda: bench.cache.plan(Ask(SCOPE, (), 8, old), 0.0),
    ):
        with pytest.raises(ValueError, match="not its newest receipt"):
            call()
    bench.release(new, tokens(4))


@pytest.mark.parametrize("computed", [5, 9])
def test_no_more_can_be_computed_than_there_are_tokens_or_blocks(computed: int) -> None:
    bench = Bench()
    lease = bench.start(tokens(4)).lease
    with pytest.raises(ValueError, match="computed of 8 tokens in 1 blocks"):
        bench.cache.commit(lease, tokens(8), computed, 0.0)


def test_nonsense_is_refused() -> None:
    bench = Bench()
    for ids, room in (([], 4), ([1, 2], 1)):
        with pytest.raises(ValueError, match="asked for a sequence of"):
            bench.plan(ids, room)
    with pytest.raises(ValueError, match="at least one token"):
        KvCache(1, 0, codec=codec("bf16"), eviction=Lru(), facts=FactLog())
    assert bench.cache.block_tokens == B


def test_a_scope_leaves_nothing_behind() -> None:
    bench = Bench(blocks=1)
    for salt in "abcdef":
        bench.visit(tokens(4), Scope("m", salt=salt))
    assert len(bench.cache._index.roots) == 1
