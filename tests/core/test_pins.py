"""Pins within a budget, and declared prefixes under every change of the cache."""

from __future__ import annotations

import pytest

from core.support import Bench
from tenure.cache.kvcache import KvCache
from tenure.cache.pins import Pins
from tenure.errors import ConfigError
from tenure.events import FactLog, PinEnded, PinGranted, PinRefused
from tenure.policy.eviction import Lru
from tenure.spec import codec
from tenure.tenants import Tenant, Tenants
from tenure.types import Pin, Scope

ACME, ZOO, NOBODY = Scope("m", tenant="acme"), Scope("m", tenant="zoo"), Scope("m")


def pins_of(bench: Bench, *tenants: Tenant) -> Pins:
    return Pins(bench.cache, Tenants(tenants), 10, bench.facts)


def test_each_tenant_has_its_budget() -> None:
    bench = Bench(20)
    pins = pins_of(bench, Tenant("acme", max_pinned_bytes=45), Tenant("zoo", max_pinned_bytes=0))
    tokens = list(range(1, 21))
    for scope in (ACME, ZOO, NOBODY):
        bench.visit(tokens[:18], scope=scope)
    assert pins.grant("r", ACME, tokens, Pin(18, 5.0), 1.0).bytes == 40
    assert pins.grant("r", ACME, tokens, Pin(9, 5.0), 1.0).granted  # two blocks that are pinned already
    bench.cache.check()
    assert pins.blocks == 4 and pins.bytes_of("acme") == 40 and pins.bytes_of("zoo") == 0
    bench.visit([7, 7, 7, 7, 7], scope=ACME)
    refused = pins.grant("r", ACME, [7, 7, 7, 7, 7], Pin(4, 5.0), 2.0)
    assert refused.reason == "it needs 10 bytes more; the budget for pins has 0 left"
    assert pins.grant("r", ZOO, tokens, Pin(4, 5.0), 2.0).reason is not None
    assert pins.grant("r", NOBODY, tokens, Pin(16, 1.0), 2.0).granted  # half of what tenants leave: 8 blocks
    assert len(bench.told(PinGranted)) == 3 and len(bench.told(PinRefused)) == 2
    pins.expire(2.5)
    assert pins.blocks == 8
    pins.expire(3.5)
    assert [(fact.tenant, fact.reason, fact.blocks) for fact in bench.told(PinEnded)] == [("", "expired", 4)]
    assert [pin.until for pin in pins.within(ACME, bench.cache.match(ACME, tokens).keys)] == [6.0, 6.0]
    assert pins.within(ZOO, bench.cache.match(ACME, tokens).keys) == []
    assert pins.revoke(4.0) and pins.revoke(4.0) and not pins.revoke(4.0)
    assert bench.cache.counts().leased == 0
    bench.cache.check()


def test_budgets_beyond_the_pool_are_refused() -> None:
    bench = Bench(10)
    with pytest.raises(ConfigError, match="may pin 110 bytes together, but the KV cache has 100"):
        pins_of(bench, Tenant("a", max_pinned_bytes=60), Tenant("b", max_pinned_bytes=50))
    pins_of(bench, Tenant("a", max_pinned_bytes=60), Tenant("b", max_pinned_bytes=40))


def test_holding_and_letting_go() -> None:
    bench = Bench(10)
    assert bench.cache.hold(ACME, [1, 2, 3, 4], 0.0) is None
    bench.visit(range(1, 11), scope=ACME)
    lease = bench.cache.hold(ACME, list(range(1, 11)), 1.0)
    assert lease is not None and lease.committed_tokens == 8
    assert bench.cache.let_go(ACME, list(range(1, 11)), 2.0, "operator", "deleted") == 1  # its tail
    bench.cache.release(lease, list(range(1, 11)), 8, 3.0, "unpinned")
    bench.visit([1, 2, 3, 4, 9, 9], scope=ACME)
    assert bench.cache.let_go(ACME, list(range(1, 11)), 4.0, "operator", "deleted") == 1  # the first has another kid
    assert bench.cache.match(ACME, list(range(1, 11))).tokens == 4
    bench.cache.check()


def test_declared_prefixes_belong_to_all() -> None:
    facts = FactLog()
    shared = [(1, 2, 3, 4, 5, 6, 7, 8, 9), (1, 2, 3, 4, 5, 6, 7, 8, 20, 21, 22, 23)]
    cache = KvCache(20, 4, codec=codec("bf16"), eviction=Lru(), facts=facts, shared=shared)
    bench = Bench()
    bench.cache, bench.facts = cache, facts
    assert bench.visit([*range(1, 9), 30, 31, 32, 33, 34], scope=ACME) == 0
    assert bench.visit([*range(1, 9), 30, 31, 32, 33, 34], scope=ZOO) == 8
    assert bench.visit([*range(1, 9), 20, 21, 22, 23, 24], scope=ZOO) == 8
    assert bench.visit([*range(1, 9), 20, 21, 22, 23, 25], scope=ACME) == 12
    assert bench.visit([1, 2, 3, 4, 9], scope=ACME) == 4
    assert bench.visit([1, 2, 3, 4, 9], scope=Scope("m", salt="s")) == 0
    owners = {fact.tenant for fact in facts.since(0)[0] if type(fact).__name__ == "BlockStored"}
    assert owners == {"", "acme", "zoo"}
    assert cache.drop_unleased(bench.tick()) > 0
    cache.check()
    assert cache.counts().free == 20
