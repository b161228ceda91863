"""GET /v1/kv/misses looks at the prompts themselves: places and patterns, within bounds, never another's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from tests.server.fake import FakeServes

from tenure.events import ConversationChanged, FactLog, RequestDone, RequestRefused
from tenure.lint import Recent
from tenure.lint import live as live_module
from tenure.server.app import create_app
from tenure.server.settings import ServerSettings
from tenure.tenants import Tenant, Tenants
from tenure.types import Miss, Receipt, Request, Scope, Span, Timings, Usage

STORY = " ".join(f"word{n}" for n in range(40))
HEADER = {"pool_blocks": 4096, "codec": "bf16", "declared": ["memory", "overflow", "pressure"]}


def text(tokens: Sequence[int]) -> str:
    return bytes(tokens).decode()


def asked(name: str, messages: Sequence[str], session: str | None = "s", tenant: str = "", salt: str = "") -> Request:
    """A chat of one token a byte."""
    tokens: list[int] = []
    spans = []
    for at, message in enumerate(messages):
        start = len(tokens)
        tokens += message.encode()
        spans.append(Span(start, len(tokens), at))
    return Request(name, tuple(tokens), Scope("m", tenant=tenant, salt=salt), session_id=session, spans=tuple(spans))


def done(request: Request, cached: int = 0, reason: str = "content_changed") -> RequestDone:
    n = len(request.tokens)
    receipt = Receipt(n, cached, n - cached, {}, Miss(reason, cached), (), {}, 0, 0, 0.0, 4096, n)  # type: ignore[arg-type]
    timings = Timings(n - cached, 0.5 * (n - cached), 1, 1.0, cached, 0.0)
    return RequestDone(
        2.0, request.id, (), None, Usage(n, 1, cached), receipt, timings, 1.0, 1.0, None, tenant=request.scope.tenant
    )


def tell(recent: Recent, *requests: Request) -> None:
    for request in requests:
        recent.saw(request)
        recent.learn(done(request))


def turns(spoil: str, tenant: str = "", prefix: str = "") -> list[Request]:
    """Two turns of a session, the second of which is spoilt."""
    system = ["<|system|>It is 08:15. " + STORY, "<|system|>It is 08:47. " + STORY]
    if spoil == "id":
        system = ["<|system|>Request 7f31-c0. " + STORY, "<|system|>Request 8a42-d1. " + STORY]
    if spoil == "system_edited":
        system = ["<|system|>Be calm. " + STORY, "<|system|>Be very stern. " + STORY]
    if spoil == "edited":
        system = [prefix + "<|user|>Well. " + STORY, prefix + "<|user|>Indeed so. " + STORY]
    first, second = system
    if spoil == "reordered":
        first, second = '<|system|>{"a": 1, "b": 2} ' + STORY, '<|system|>{"b": 2, "a": 1} ' + STORY
    return [
        asked(f"{tenant}1", [first, "user: hi"], f"s{tenant}", tenant),
        asked(f"{tenant}2", [second, "user: hi", "hello", "user: more"], f"s{tenant}", tenant),
    ]


@pytest.mark.parametrize("pattern", ["timestamp", "id", "reordered", "system_edited", "edited"])
def test_where_prompts_part_and_what_changes(pattern: str) -> None:
    recent = Recent(text, HEADER)
    one, two = turns(pattern)
    tell(recent, one, two)
    told = recent.findings(None)
    assert (told["requests"], told["prompt_tokens"]) == (2, len(one.tokens) + len(two.tokens))
    (finding,) = told["findings"]
    first = next(at for at, (a, b) in enumerate(zip(one.tokens, two.tokens, strict=False)) if a != b)
    assert finding["rule"] == pattern
    assert finding["places"] == [
        {"request": "2", "session": "s", "token": first, "message": 0, "tokens": len(one.tokens) - first}
    ]
    assert finding["tokens"] == len(one.tokens) - first
    assert finding["seconds"] == pytest.approx(0.5e-3 * finding["tokens"])
    assert finding["advice"]
    assert "word1" not in str(told)


def test_the_dearest_habit_comes_first_and_places_are_few() -> None:
    recent = Recent(text, HEADER)
    for n in range(20):
        tell(recent, *(replace(request, session_id=f"s{n}") for request in turns("timestamp")))
    tell(recent, *(replace(request, session_id="x") for request in turns("edited")))
    found = recent.findings(None)["findings"]
    assert [finding["rule"] for finding in found] == ["timestamp", "edited"]
    assert [finding["tokens"] for finding in found] == sorted((f["tokens"] for f in found), reverse=True)
    assert len(found[0]["places"]) == 8


def test_tenants_learn_nothing_of_each_other() -> None:
    recent = Recent(text, HEADER)
    tell(recent, *turns("timestamp", "a"), *turns("edited", "b"))
    assert [finding["rule"] for finding in recent.findings("a")["findings"]] == ["timestamp"]
    assert [finding["rule"] for finding in recent.findings("b")["findings"]] == ["edited"]
    assert recent.findings("c") == {"requests": 0, "prompt_tokens": 0, "findings": []}
    assert recent.findings(None)["requests"] == 4


def test_salts_that_keep_equal_prompts_apart() -> None:
    recent = Recent(text, HEADER)
    tell(recent, *(asked(str(n), ["<|system|>" + STORY, "user: hi"], None, "a", f"salt{n}") for n in range(3)))
    assert [finding["rule"] for finding in recent.findings("a")["findings"]] == ["not_shared"]


def test_what_more_memory_would_have_saved() -> None:
    recent = Recent(text, {**HEADER, "pool_blocks": 20})
    prompts = [asked(str(n), [f"<|user|>{n % 4} " + 2 * STORY], None) for n in range(40)]
    tell(recent, *prompts)
    (finding,) = [f for f in recent.findings(None)["findings"] if f["rule"] == "memory_too_small"]
    assert "twice the KV memory would have saved" in finding["advice"]


def test_no_more_is_kept_than_the_bounds_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    recent = Recent(text, HEADER, per_tenant=1000, in_all=2500)
    for n in range(30):
        tell(recent, asked(f"a{n}", ["x" * 300], None, "a"))
        assert recent.tokens <= 1000
    tell(recent, asked("long", ["y" * 1001], None, "a"))
    assert recent.findings("a")["requests"] == 3
    for n in range(5):
        for tenant in "bcdef":
            tell(recent, asked(f"{tenant}{n}", ["x" * 300], None, tenant))
            assert recent.tokens <= 2500
    assert recent.findings("a")["requests"] == 0
    assert recent.findings("f")["requests"] > 0
    monkeypatch.setattr(live_module, "MAX_REQUESTS", 5)
    many = Recent(text, HEADER)
    tell(many, *(asked(str(n), ["x"], None) for n in range(9)))
    assert many.findings(None)["requests"] == 5


def test_nothing_is_kept_of_a_conversation_that_was_deleted() -> None:
    recent = Recent(text, HEADER)
    tell(recent, *turns("timestamp", "a"), asked("other", ["x"], "t", "a"), *turns("edited", "b"))
    recent.learn(ConversationChanged(3.0, "sa", "paused", 0, tenant="a"))
    assert recent.findings("a")["requests"] == 3
    recent.learn(ConversationChanged(3.0, "sa", "deleted", 7, tenant="a"))
    recent.learn(ConversationChanged(3.0, "sb", "deleted", 7, tenant="a"))
    assert recent.findings("a") == {"requests": 1, "prompt_tokens": 1, "findings": []}
    recent.learn(ConversationChanged(3.0, "t", "deleted", 1, tenant="a"))
    assert recent.findings("a")["requests"] == 0
    assert recent.findings("b")["requests"] == 2
    assert recent.tokens == sum(len(request.tokens) for request in turns("edited", "b"))


def test_requests_that_never_end_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_module, "UNDER_WAY", 3)
    recent = Recent(text, HEADER)
    lost, *rest = [asked(str(n), ["x"], None) for n in range(4)]
    for request in (lost, *rest):
        recent.saw(request)
    recent.learn(RequestRefused(1.0, "1", "queue_full"))
    for request in (lost, *rest):
        recent.learn(done(request))
    assert recent.findings(None)["requests"] == 2


def test_texts_without_messages_and_sessions_that_only_grow() -> None:
    recent = Recent(text, HEADER)
    grown = [Request(str(n), tuple((STORY * (n + 1)).encode()), Scope("m"), session_id="s") for n in range(3)]
    for request in grown:
        recent.saw(request)
        recent.learn(done(request, len(request.tokens)))
    assert recent.findings(None)["findings"] == []
    stamped = [Request(f"t{n}", tuple(f"At 1{n}:00 {STORY}".encode()), Scope("m"), session_id="t") for n in range(2)]
    tell(recent, *stamped)
    (finding,) = recent.findings(None)["findings"]
    assert (finding["rule"], finding["places"][0]["message"]) == ("timestamp", None)


def client(habits: Recent | None, tenants: Tenants | None = None) -> tuple[FakeServes, Any]:
    from starlette.testclient import TestClient

    fake = FakeServes()
    settings = ServerSettings(api_key="op", tenants=tenants or Tenants())
    return fake, TestClient(create_app(fake, settings, habits))


def test_the_route_tells_a_tenant_of_its_own_prompts() -> None:
    pair = Tenants((Tenant("a", ("ka",)), Tenant("b", ("kb",))))
    fake, http = client(Recent(lambda tokens: bytes(t for t in tokens if t < 256).decode(), HEADER), pair)
    assert isinstance(fake.facts, FactLog)
    for minute in (15, 47):
        body = {
            "model": "fake", "session_id": "s",
            "messages": [
                {"role": "system", "content": f"It is 08:{minute}. {STORY}"},
                {"role": "user", "content": "hi"},
            ],
        }  # fmt: skip
        reply = http.post("/v1/chat/completions", json=body, headers={"Authorization": "Bearer ka"})
        assert reply.status_code == 200, reply.text
    for key, rules in (("ka", ["timestamp"]), ("kb", []), ("op", ["timestamp"])):
        lately = http.get("/v1/kv/misses", headers={"Authorization": f"Bearer {key}"}).json()["lately"]
        assert [finding["rule"] for finding in lately["findings"]] == rules
    assert "lately" not in client(None)[1].get("/v1/kv/misses", headers={"Authorization": "Bearer op"}).json()
