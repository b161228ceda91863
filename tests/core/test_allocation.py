"""What is planned is what is allocated, to the byte, for every codec and number of tokens."""

from __future__ import annotations

import pytest

from core.support import SCOPE
from tenure.cache.kvcache import KvCache
from tenure.cache.lease import Lease
from tenure.cache.plan import Ask, Plan
from tenure.events import FactLog
from tenure.policy.eviction import Lru
from tenure.spec import CODECS, ArenaLayout, KvGeometry, codec

SHAPES = [KvGeometry(30, 3, 64), KvGeometry(2, 1, 16), KvGeometry(32, 8, 128), KvGeometry(5, 2, 96)]


def start(kv: KvCache, tokens: int) -> Lease:
    plan = kv.plan(Ask(SCOPE, range(tokens), tokens), 0.0)
    assert isinstance(plan, Plan), plan
    return kv.apply(plan, 0.0).lease


def held_bytes(kv: KvCache, geometry: KvGeometry) -> int:
    return sum(kind.leased * geometry.block_bytes(kind.codec) for kind in kv.by_codec())


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("geometry", SHAPES, ids=str)
def test_a_sequence_takes_what_the_formula_says(name: str, geometry: KvGeometry) -> None:
    layout = geometry.layout(64 * geometry.block_bytes("f32"), name)
    for tokens in [*range(1, 100), 500, 511, 512, 513]:
        kv = KvCache(layout, 32, codec=codec(name), eviction=Lru(), facts=FactLog())
        lease = start(kv, tokens)
        assert held_bytes(kv, geometry) == geometry.sequence_bytes(tokens, name)
        for room in range(tokens, tokens + 66):  # and as it grows, block by block
            plan = kv.plan(Ask(SCOPE, (), room, lease), 0.0)
            assert isinstance(plan, Plan)
            lease = kv.apply(plan, 0.0).lease
            assert lease.room >= room
            assert held_bytes(kv, geometry) == geometry.sequence_bytes(room, name)


@pytest.mark.parametrize("name", CODECS)
def test_as_many_conversations_fit_as_are_promised(name: str) -> None:
    geometry = KvGeometry(30, 3, 64)
    layout = geometry.layout(1 << 28, name)
    promised = layout.conversations(500)
    kv = KvCache(layout, 32, codec=codec(name), eviction=Lru(), facts=FactLog())
    for i in range(promised):
        plan = kv.plan(Ask(SCOPE, [i] * 500, 500), 0.0)
        assert isinstance(plan, Plan), (i, promised)
        kv.apply(plan, 0.0)
    kv.check()
    assert not isinstance(kv.plan(Ask(SCOPE, [promised] * 500, 500), 0.0), Plan)


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("mib", [64, 512, 2048])
def test_the_whole_arena_is_usable(name: str, mib: int) -> None:
    """Less than 2 % is lost in slabs and at the arena's end, and nothing overlaps."""
    geometry = KvGeometry(30, 3, 64)
    layout = geometry.layout(mib << 20, name)
    for kind, size in enumerate(layout.block_bytes):
        used = layout.slabs * layout.slots[kind] * size
        assert used <= mib << 20
        assert used >= (0.95 if mib == 64 else 0.98) * (mib << 20), (kind, layout)
    last = ArenaLayout.offset(layout, layout.ids - 1)
    assert last + layout.block_bytes[-1] <= mib << 20


def test_int4_holds_more_than_three_times_as_many_conversations() -> None:
    geometry = KvGeometry(30, 3, 64)
    fits = {name: geometry.layout(1 << 30, name).conversations(2048) for name in CODECS}
    assert fits["int4"] >= 3.3 * fits["bf16"]
    bits = {name: geometry.block_bytes(name) / geometry.block_bytes("bf16") for name in CODECS}
    assert bits["int8"] <= 0.52 and bits["k8v4"] <= 0.41 and bits["int4"] <= 0.30
