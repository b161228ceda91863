"""Fair shares between tenants by weight, nobody starved, limits that bind, and what tenants learn of each other."""

from __future__ import annotations

import pytest
from tests.sched.fake import Setup, World, answer

from tenure.events import RequestStarted
from tenure.policy.base import AdmissionAsk, Refuse
from tenure.tenants import Tenant, Tenants
from tenure.types import Request, Scope


def scope(tenant: str) -> Scope:
    return Scope("fake", tenant=tenant)


@pytest.mark.parametrize(("weight", "wide"), [(1.0, 1), (3.0, 1), (3.0, 4)])
def test_two_backlogged_tenants_are_served_by_weight(weight: float, wide: int) -> None:
    """One floods with many (and longer) requests; what counts is what each was served."""
    tenants = Tenants((Tenant("small", weight=weight), Tenant("flood")))
    world = World(200, 4, seqs=6, batch=64, context=200, queue=10_000, setup=Setup(tenants=tenants))
    for i in range(400):
        world.ask(f"f{i}", range(100 * i, 100 * i + 8 * wide), 10 * wide, scope=scope("flood"))
    for i in range(300):
        world.ask(f"s{i}", range(100 * i + 50, 100 * i + 58), 10, scope=scope("small"))
    while world.clock.now() < 3.0:
        world.step()
    accounts = world.scheduler.queue.accounts
    assert all(len(account.queue) > 5 for account in accounts.values())
    service = {name: account.service for name, account in accounts.items()}
    assert service["small"] / service["flood"] == pytest.approx(weight, rel=0.1)


def test_shares_are_lent_while_others_idle_and_not_saved_up() -> None:
    tenants = Tenants((Tenant("late"), Tenant("early")))
    world = World(200, 4, seqs=4, batch=64, queue=10_000, setup=Setup(tenants=tenants))
    for i in range(300):
        world.ask(f"e{i}", range(100 * i, 100 * i + 8), 10, scope=scope("early"))
    for _ in range(100):
        world.step()
    assert {len(plan.rows) for plan in world.plans} == {4}
    accounts = world.scheduler.queue.accounts
    for i in range(300):
        world.ask(f"l{i}", range(100 * i + 50, 100 * i + 58), 10, scope=scope("late"))
    before = accounts["early"].service
    for _ in range(200):
        world.step()
    assert accounts["late"].service / (accounts["early"].service - before) == pytest.approx(1.0, rel=0.15)


def test_an_endless_trickle_starves_nobody() -> None:
    """Small urgent requests keep coming, of the same tenant or another; a wide patient one is served all the same."""
    tenants = Tenants((Tenant("drip"), Tenant("wide")))
    for who in ("wide", "drip"):
        world = World(24, 4, seqs=4, batch=16, context=100, queue=10_000, setup=Setup(tenants=tenants))
        world.ask("wide", range(1, 61), 12, scope=scope(who), priority=1)
        for i in range(1500):
            world.ask(f"d{i}", range(100 * i + 100, 100 * i + 108), 4, scope=scope("drip"), priority=-1)
            world.step(50.0)
            world.step(50.0)
            if world.text("wide", 0)[11:]:
                break
        assert len(world.text("wide")) == 12, who
        world.run(20_000)


def test_limits_of_a_tenant_bind_it_alone() -> None:
    tenants = Tenants((Tenant("two", max_concurrent=2), Tenant("small", max_kv_bytes=8)))
    world = World(100, 4, seqs=8, queue=100, setup=Setup(tenants=tenants))
    for i in range(5):
        world.ask(f"t{i}", range(100 * i, 100 * i + 8), 6, scope=scope("two"))
        world.ask(f"s{i}", range(100 * i + 50, 100 * i + 58), 6, scope=scope("small"))
    world.ask("free", range(900, 908), 6)
    while world.step():
        alive = world.scheduler.sequences()
        assert sum(seq.lease is not None and seq.tenant == "two" for seq in alive) <= 2
        assert world.scheduler.room.held_by("small") <= 8
    starts = {fact.request: fact.queue_s for fact in world.of(RequestStarted)}  # type: ignore[attr-defined]
    assert starts["free"] == 0.0 < starts["t2"]
    assert all(len(world.text(f"{who}{i}")) == 6 for who in "ts" for i in range(5))


def test_growth_beyond_a_tenants_memory() -> None:
    """Its own give way; alone it ends, and says so."""
    tenants = Tenants((Tenant("small", max_kv_bytes=8),))
    world = World(100, 4, setup=Setup(tenants=tenants))
    world.ask("a", range(1, 9), 20, scope=scope("small"))
    world.ask("b", range(101, 109), 20, scope=scope("small"))
    world.ask("long", range(201, 209), 60, scope=scope("small"))
    world.ask("other", range(301, 309), 60)
    world.run()
    assert sum(world.receipt(name).preempted for name in ("a", "b", "long")) > 0
    assert world.receipt("other").preempted == 0
    assert len(world.text("a")) == len(world.text("b")) == 20 and len(world.text("other")) == 60
    receipt = world.receipt("long")
    assert (receipt.limit_cause, receipt.context_used) == ("tenant_kv", 33)


def test_admission_hears_of_the_tenants_limits() -> None:
    tenants = Tenants((Tenant("small", max_kv_bytes=2, max_queued_tokens=10), Tenant("plain")))
    world = World(100, 4, seqs=1, setup=Setup(tenants=tenants))
    world.ask("x", range(1, 9), 6)
    world.step()
    world.ask("a", range(1, 5), 6, scope=scope("small"))
    world.ask("b", range(1, 5), 6, scope=scope("plain"))
    load = world.scheduler.load()
    assert list(load.tenants) == ["small"]
    judge = world.scheduler.admission.judge
    verdicts = [judge(AdmissionAsk(n, 1, 4, 0, "small"), load) for n in (6, 7, 8)]
    assert [getattr(verdict, "code", None) for verdict in verdicts] == [None, "queue_full", "kv_capacity_exceeded"]
    assert not isinstance(judge(AdmissionAsk(50, 1, 4, 0, "plain"), load), Refuse)


def test_locality_has_a_say_among_equals() -> None:
    """Whose prompt is held goes first, as long as nobody falls behind by it."""
    shared = tuple(range(1, 41))
    tenants = Tenants((Tenant("a"), Tenant("b")))
    world = World(100, 4, seqs=1, setup=Setup(tenants=tenants, shared=(shared,)))
    world.ask("first", [*shared, 50], 1)
    world.run()
    world.ask("cold", range(200, 230), 2, scope=scope("a"))
    world.ask("warm", [*shared, 60, 61], 2, scope=scope("b"))
    world.run()
    order = [fact.request for fact in world.of(RequestStarted)]  # type: ignore[attr-defined]
    assert order == ["first", "warm", "cold"]


def test_only_declared_prefixes_are_shared_between_tenants() -> None:
    shared = tuple(range(1, 19))  # four blocks of four, and two tokens that fill none
    world = World(100, 4, setup=Setup(shared=(shared, (7, 7, 7)), ghosts=50))
    secret = [*shared, *range(70, 80)]

    def ask(name: str, tokens: list[int], tenant: str, salt: str = "") -> tuple[int, str | None]:
        world.ask(name, tokens, 3, scope=Scope("fake", tenant=tenant, salt=salt))
        world.run()
        world.cache.check()
        receipt = world.receipt(name)
        context = list(tokens)
        for _ in range(3):
            context.append(answer(context, 0))
        assert world.text(name) == context[len(tokens) :]
        return receipt.cached_tokens, None if receipt.miss is None else receipt.miss.reason

    assert ask("a", secret, "a") == (0, "cold")
    assert ask("b", secret, "b") == (16, "cold")
    assert ask("a2", secret, "a") == (27, None)
    assert ask("c", [*shared[:10], 99], "c") == (8, "cold")
    assert ask("salted", secret, "a", "s") == (0, "scope_changed")
    assert ask("d", secret[:16], "d") == (15, None)
    assert ask("d2", [*secret[:16], 5], "d") == (16, None)
    assert world.scheduler.cache.drop_unleased(world.clock.now()) > 0
    assert ask("b2", secret, "b") == (0, "evicted")
    assert ask("e", secret, "e") == (16, "cold")


def test_two_that_compute_a_shared_prefix_compute_it_once() -> None:
    shared = tuple(range(1, 41))
    world = World(100, 4, batch=8, setup=Setup(shared=(shared,)))
    for tenant in "abc":
        world.ask(tenant, [*shared, 50, 51], 2, scope=scope(tenant))
    world.run()
    assert [world.receipt(tenant).cached_tokens for tenant in "abc"] == [0, 40, 40]
    assert sum(len(rows.tokens) for plan in world.plans for rows in plan.rows) == 40 + 3 * 3


def test_a_tenant_learns_nothing_of_anothers_prompts() -> None:
    world = World(12, 4)
    world.ask("a", range(1, 30), 3, scope=scope("a"))
    world.run()
    world.ask("b", range(1, 30), 3, scope=scope("b"))
    world.run()
    miss = world.receipt("b").miss
    assert miss is not None and miss.reason == "cold"
    world.ask("b2", [*range(1, 30), 5], 3, scope=scope("b"))
    world.run()
    world.ask("a2", [*range(1, 30), 5], 3, scope=scope("a"))
    world.run()
    miss = world.receipt("a2").miss
    assert miss is not None and (miss.reason, miss.by) == ("evicted", "lru")
    assert miss.ago_s is not None and miss.ago_s > 0.0


def test_the_queue_is_strict() -> None:
    world = World(100, 4)
    with pytest.raises(ValueError, match="context leaves"):
        world.scheduler.add(Request("x", tuple(range(300)), scope("a")), 0.0)
