"""The dry run and the conversations over HTTP: shapes, verbs, and that another tenant's are not there."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest
from tests.server.conftest import Running
from tests.server.fake import CONTEXT

from tenure.tenants import Tenant, Tenants
from tenure.types import Finish
from tenure.views import ConversationView, PinView

Serve = Callable[..., Running]
MINE = ConversationView("talk/1", "red", 100, 96, {"bf16": 9216}, 1.5, "idle", (PinView(64, 6144, 299.5),))
THEIRS = ConversationView("talk/2", "blue", 50, 32, {"bf16": 3072}, 0.0, "running", ())
TENANTS = Tenants((Tenant("red", ("sk-red",)), Tenant("blue", ("sk-blue",))))
BASE = "/v1/kv/conversations"


@pytest.fixture
def shared(serve: Serve) -> Running:
    server = serve(api_key="boss", tenants=TENANTS)
    server.fake.talks = [MINE, THEIRS]
    return server


def as_(server: Running, key: str) -> httpx.Client:
    return httpx.Client(base_url=server.http.base_url, headers={"x-api-key": key}, timeout=20)


def test_a_plan_is_what_the_engine_foresees(server: Running) -> None:
    body = {"messages": [{"role": "user", "content": "x" * 100}], "max_tokens": 5, "n": 2}
    plan = server.http.post("/v1/kv/plan", json=body).json()
    assert server.fake.planned is not None
    assert plan["prompt_tokens"] == len(server.fake.planned.tokens) == plan["cached_tokens"] + plan["computed_tokens"]
    assert plan["object"] == "kv.plan"
    assert (plan["fits_now"], plan["fits_ever"]) == (True, True)
    assert plan["would_evict"] == {"blocks": 2, "tokens": 64}
    assert (plan["predicted_start_s"], plan["predicted_ttft_s"]) == (0.25, 0.5)
    assert plan["answer"] == {"n": 2, "tokens": 5, "limit_cause": "max_tokens"}
    assert plan["whole_blocks"] == plan["needed_blocks"] + 1 and plan["lacking_blocks"] == 1
    assert plan["forgotten"] == []
    assert server.fake.handles == [], "nothing was submitted"


def test_a_plan_of_a_completion_and_of_a_chat_that_would_be_trimmed(server: Running) -> None:
    assert server.http.post("/v1/kv/plan", json={"prompt": [1, 2, 3]}).json()["prompt_tokens"] == 3
    messages = [{"role": "assistant" if i % 2 else "user", "content": "x" * 500} for i in range(15)]
    plan = server.http.post("/v1/kv/plan", json={"messages": messages, "overflow": "trim"}).json()
    assert plan["forgotten"][0]["policy"] == "trim"
    assert plan["prompt_tokens"] < CONTEXT


def test_a_plan_refuses_what_a_request_would_be_refused_for(server: Running) -> None:
    assert server.http.post("/v1/kv/plan", json={"messages": []}).status_code == 400
    assert server.http.post("/v1/kv/plan", json={}).json()["error"]["param"] == "messages"


def test_a_plan_is_for_one_prompt(server: Running) -> None:
    several = server.http.post("/v1/kv/plan", json={"prompt": ["one", "two"]})
    assert (several.status_code, several.json()["error"]["param"]) == (400, "prompt")


def test_a_request_whose_conversation_is_deleted_is_told_so(server: Running) -> None:
    server.fake.script.finish = Finish.CANCELLED
    reply = server.http.post("/v1/completions", json={"prompt": "one", "session_id": "gone"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (409, "conversation_deleted")


def test_a_tenant_lists_its_own_and_the_operator_all(shared: Running) -> None:
    listed = {}
    for key in ("sk-red", "sk-blue", "boss"):
        with as_(shared, key) as http:
            reply = http.get(BASE).json()
            assert reply["object"] == "list"
            listed[key] = [entry["id"] for entry in reply["data"]]
    assert listed == {"sk-red": ["talk/1"], "sk-blue": ["talk/2"], "boss": ["talk/1", "talk/2"]}


def test_inspecting_one(shared: Running) -> None:
    assert shared.http.get(f"{BASE}/talk%2F1").json() == {
        "object": "kv.conversation",
        "id": "talk/1",
        "tenant": "red",
        "state": "idle",
        "tokens": 100,
        "held_tokens": 96,
        "bytes": {"bf16": 9216},
        "idle_s": 1.5,
        "pins": [{"tokens": 64, "bytes": 6144, "expires_in_s": 299.5}],
    }


@pytest.mark.parametrize("name", ["talk/2", "nothing", "talk/1/pin", "%00", "a" * 1000])
def test_what_is_not_there_or_anothers_is_a_404(shared: Running, name: str) -> None:
    with as_(shared, "sk-red") as http:
        tries = [http.get(f"{BASE}/{name}"), http.delete(f"{BASE}/{name}")]
        tries += [http.post(f"{BASE}/{name}/{verb}") for verb in ("pin", "unpin", "pause", "resume")]
    assert [(reply.status_code, reply.json()["error"]["code"]) for reply in tries] == [(404, "not_found")] * 6
    assert shared.fake.changes == []


def test_every_verb_reaches_the_engine(shared: Running) -> None:
    with as_(shared, "sk-red") as http:
        for verb in ("pause", "resume", "unpin", "pin"):
            assert http.post(f"{BASE}/talk/1/{verb}").json()["id"] == "talk/1"
        assert http.post(f"{BASE}/talk/1/pin", json={"ttl": "1h"}).status_code == 200
        gone = http.delete(f"{BASE}/talk/1").json()
        assert gone == {"object": "kv.conversation.deleted", "id": "talk/1", "deleted": True, "blocks": 5}
        assert http.get(f"{BASE}/talk/1").status_code == 404
    assert shared.fake.changes == [
        ("red", "talk/1", "pause", 0.0),
        ("red", "talk/1", "resume", 0.0),
        ("red", "talk/1", "unpin", 0.0),
        ("red", "talk/1", "pin", 300.0),
        ("red", "talk/1", "pin", 3600.0),
    ]


@pytest.mark.parametrize("ttl", ["2h", 5, ""])
def test_a_wrong_ttl_is_refused(shared: Running, ttl: object) -> None:
    reply = shared.http.post(f"{BASE}/talk/1/pin", json={"ttl": ttl})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "ttl")


def test_wrong_methods(server: Running) -> None:
    assert server.http.post(BASE).status_code == 405
    assert server.http.get("/v1/kv/plan").status_code == 405
