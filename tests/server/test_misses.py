"""GET /v1/kv/misses: causes, costs and places of what was not reused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.server.conftest import Running
from tests.server.fake import FakeServes

from tenure.events import RequestDone, RequestQueued
from tenure.server.misses import ADVICE, Misses
from tenure.server.receipts import miss_object
from tenure.types import Miss, MissReason, Receipt, Timings, Usage


@pytest.fixture
def server(serve: Callable[..., Running]) -> Running:
    """One of its own: the sums are those of everything a server was asked."""
    return serve()


def tell(server: Running, name: str, reason: MissReason | None, computed: int, session: str | None = None) -> None:
    miss = None if reason is None else Miss(reason, 17, 2)
    receipt = Receipt(1000, 1000 - computed, computed, {}, miss, (), {}, 0, 0, 0.0, 4096, 1000)
    usage, timings = Usage(1000, 1, 1000 - computed), Timings(computed, 2.0 * computed, 1, 1.0, 0, 0.0)
    server.fake.facts.emit(RequestQueued(1.0, name, 1000, 1, session))
    server.fake.facts.emit(RequestDone(2.0, name, (), None, usage, receipt, timings, 1.0, 1.0, None))


def test_causes_are_ranked_by_cost(server: Running) -> None:
    tell(server, "a", "content_changed", 900, "s")
    tell(server, "b", "evicted", 300, "s")
    tell(server, "c", "content_changed", 100)
    tell(server, "d", None, 5)
    reply = server.http.get("/v1/kv/misses").json()
    assert reply["object"] == "kv.misses"
    assert [(r["reason"], r["requests"], r["computed_tokens"], r["seconds"]) for r in reply["reasons"]] == [
        ("content_changed", 2, 1000, 2.0),
        ("evicted", 1, 300, 0.6),
    ]
    assert reply["reasons"][0]["advice"] == ADVICE["content_changed"]
    assert [(c["session_id"], c["reason"], c["computed_tokens"]) for c in reply["conversations"]] == [
        ("s", "content_changed", 900),
        ("s", "evicted", 300),
    ]
    newest = reply["recent"][0]
    assert (newest["request"], newest["at_token"], newest["message"], newest["session_id"]) == ("c", 17, 2, None)
    assert len(reply["recent"]) == 3


def test_nothing_has_happened_yet() -> None:
    report = Misses(FakeServes()).report(None)
    assert (report["reasons"], report["conversations"], report["recent"]) == ([], [], [])


def test_tenants_see_their_own() -> None:
    fake = FakeServes()
    misses = Misses(fake)
    receipt = Receipt(9, 0, 9, {}, Miss("cold", 0), (), {}, 0, 0, 0.0, 4096, 9)
    for name in ("a", "b"):
        done = RequestDone(
            2.0, name, (), None, Usage(9, 1, 0), receipt, Timings(9, 1.0, 1, 1.0, 0, 0.0), 1.0, 1.0, None, tenant=name
        )
        fake.facts.emit(done)
    assert [miss["request"] for miss in misses.report("a")["recent"]] == ["a"]
    assert len(misses.report(None)["recent"]) == 2


def test_a_cold_miss_behind_a_reused_head_does_not_say_that_nothing_was_held() -> None:
    assert miss_object(Miss("cold", 0))["detail"] == "nothing of this prompt was held"
    assert miss_object(Miss("cold", 96))["detail"] == "nothing beyond it was held"
