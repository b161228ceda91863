"""Operators' routes, keys, ids and the shapes of what is not there."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx
import pytest
from tests.server.conftest import Running
from tests.server.fake import BOS, CONTEXT

import tenure
from tenure.server.app import UNBUILT
from tenure.server.serves import Health

Serve = Callable[..., Running]


@pytest.mark.parametrize("path", ["/health", "/ping"])
def test_health(server: Running, path: str) -> None:
    assert server.http.get(path).status_code == 200
    server.fake.state = Health(False, False, "the engine stopped: boom")
    assert server.http.get(path).status_code == 503
    assert server.http.get(path).json()["cause"] == "the engine stopped: boom"
    server.fake.state = Health(True, True, None)


def test_ready(server: Running) -> None:
    assert server.http.get("/ready").json() == {"status": "ready"}
    server.fake.state = Health(True, False, "draining")
    reply = server.http.get("/ready")
    assert (reply.status_code, reply.json()["cause"]) == (503, "draining")
    assert server.http.get("/health").status_code == 200
    server.fake.state = Health(True, True, None)


def test_version(server: Running) -> None:
    assert server.http.get("/version").json() == {"version": tenure.__version__}


def test_reset_prefix_cache(server: Running) -> None:
    assert server.http.post("/reset_prefix_cache").json() == {"blocks": 3}
    assert server.http.get("/reset_prefix_cache").status_code == 405


def test_a_reset_waits_for_the_step_and_nobody_waits_for_it(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.fake, "busy", True)
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(server.http.post, "/reset_prefix_cache")
        with httpx.Client(base_url=server.http.base_url, timeout=20) as other:
            assert all(other.get("/health").status_code == 200 for _ in range(3))
            assert not reply.done()
        server.fake.busy = False
        assert reply.result().json() == {"blocks": 3}


def test_tokenize(server: Running) -> None:
    reply = server.http.post("/tokenize", json={"model": "fake", "prompt": "ab"}).json()
    assert reply == {"count": 3, "max_model_len": CONTEXT, "tokens": [BOS, 97, 98], "token_strs": None}
    plain = {"prompt": "ab", "add_special_tokens": False, "return_token_strs": True}
    assert server.http.post("/tokenize", json=plain).json()["token_strs"] == ["a", "b"]
    chat = server.http.post("/tokenize", json={"messages": [{"role": "user", "content": "x"}]}).json()
    assert chat["tokens"] == [BOS, *b"<user>x\n"]
    assert server.http.post("/tokenize", json={"prompt": 5}).json()["error"]["param"] == "prompt"
    assert server.http.post("/tokenize", json={"prompt": "", "model": "x"}).status_code == 404


def test_detokenize(server: Running) -> None:
    assert server.http.post("/detokenize", json={"tokens": [97, 98]}).json() == {"prompt": "ab"}
    assert server.http.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}
    for wrong in ([999], [-1], ["a"], None, "x"):
        error = server.http.post("/detokenize", json={"tokens": wrong}).json()["error"]
        assert error["param"].split("[")[0] == "tokens"


def test_kv(server: Running) -> None:
    before = server.http.get("/v1/kv").json()
    usage = server.chat().json()["usage"]
    kv = server.http.get("/v1/kv").json()
    device = kv["tiers"]["device"]
    assert device["leased"] + device["cached"] + device["free"] == device["total"] == 256
    assert kv["policy"] == {"eviction": "lru", "pressure": "pause", "overflow": "refuse"}
    assert kv["budget"] == {"total_bytes": 2_000_000, "weight_bytes": 1_000_000, "arena_bytes": 65536}
    for name, ours in (("prompt_tokens", "prompt_tokens"), ("completion_tokens", "generation_tokens")):
        assert kv["since_start"][ours] - before["since_start"][ours] == usage[name]


@pytest.mark.parametrize("path", [p.replace("{rest:path}", "x/y") for p in UNBUILT])
def test_known_routes_that_are_not_built(server: Running, path: str) -> None:
    for method in ("GET", "POST"):
        reply = server.http.request(method, path)
        assert reply.status_code == 501
        assert "not built yet" in reply.json()["error"]["message"]
        assert reply.headers["x-should-retry"] == "false"


def test_anthropic_shape_on_its_routes(server: Running) -> None:
    body = server.http.post("/v1/messages", json={}).json()
    assert body["type"] == "error"
    assert body["error"].keys() == {"type", "message"}


def test_unknown_routes_and_methods(server: Running) -> None:
    for path in ("/", "/nothing", "/v1/", "/v1/models/", "/v1/chat/completions/", "/%ff%fe", "/a%00b"):
        reply = server.http.get(path)
        assert (reply.status_code, reply.json()["error"]["type"]) == (404, "invalid_request_error"), path
    reply = server.http.get("/v1/chat/completions")
    assert (reply.status_code, reply.json()["error"]["code"]) == (405, "method_not_allowed")
    assert reply.headers["allow"] == "POST"
    assert server.http.post("/metrics").status_code == 405
    assert server.http.options("/v1/models").status_code == 405


def test_request_ids(server: Running) -> None:
    replies: list[Callable[..., Any]] = [
        lambda h: server.http.get("/health", headers=h),
        lambda h: server.http.get("/nothing", headers=h),
        lambda h: server.http.post("/v1/completions", json={"prompt": "x", "stream": True}, headers=h),
        lambda h: server.http.post("/v1/completions", content=b"x" * (17 << 20), headers=h),
    ]
    for reply in replies:
        assert reply({"x-request-id": "my-id_7"}).headers["x-request-id"] == "my-id_7"
        assert len(reply({}).headers["x-request-id"]) == 32
        for bad in ("a b", "x" * 129, "", "é".encode("latin-1")):
            assert reply({"x-request-id": bad}).headers["x-request-id"] != bad


def test_api_key(serve: Serve) -> None:
    server = serve(api_key="sk-sesame")
    assert server.client.completions.create(model="fake", prompt="x").choices[0].text
    server.http.headers.pop("authorization")
    for path in ("/health", "/ping", "/ready", "/metrics"):
        assert server.http.get(path).status_code == 200
    body = {"prompt": "x"}
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic abc"}, {"x-api-key": ""}):
        for reply in (
            server.http.post("/v1/completions", json=body, headers=headers),
            server.http.get("/v1/models", headers=headers),
            server.http.post("/reset_prefix_cache", headers=headers),
            server.http.get("/nothing", headers=headers),
        ):
            assert (reply.status_code, reply.json()["error"]["code"]) == (401, "unauthorized")
            assert reply.headers["www-authenticate"] == "Bearer"
    for headers in ({"authorization": "bearer  sk-sesame"}, {"x-api-key": "sk-sesame"}):
        assert server.http.post("/v1/completions", json=body, headers=headers).status_code == 200


def test_model_without_template(serve: Serve) -> None:
    server = serve()
    server.fake.card = replace(server.fake.card, has_template=False)
    assert server.chat().json()["error"]["param"] == "messages"
    assert "no chat template" in server.chat().json()["error"]["message"]
    assert server.complete().status_code == 200
