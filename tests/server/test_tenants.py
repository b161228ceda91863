"""Keys and whose they are: unknown ones are 401, what is the operator's is 403, requests carry their tenant."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest
from tests.server.conftest import Running

from tenure.errors import QueueFull
from tenure.tenants import Tenant, Tenants

Serve = Callable[..., Running]
TENANTS = Tenants((Tenant("red", ("sk-red", "sk-red-2")), Tenant("blue", ("sk-blue",))))


def as_(server: Running, key: str | None) -> httpx.Client:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    return httpx.Client(base_url=server.http.base_url, headers=headers, timeout=20)


@pytest.mark.parametrize("operator", ["boss", None])
def test_every_key_leads_to_its_tenant(serve: Serve, operator: str | None) -> None:
    server = serve(api_key=operator, tenants=TENANTS)
    owners = {"sk-red": "red", "sk-red-2": "red", "sk-blue": "blue", **({operator: ""} if operator else {})}
    for key, tenant in owners.items():
        with as_(server, key) as http:
            reply = http.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 1, "cache_salt": "s"})
            assert reply.status_code == 200
            scope = server.fake.handles[-1].request.scope
            assert (scope.tenant, scope.salt) == (tenant, "s")
            assert http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]}).is_success
            assert server.fake.handles[-1].request.scope.tenant == tenant


@pytest.mark.parametrize("key", ["", "sk-re", "sk-redx", "SK-RED", "boss2", "é"])
def test_unknown_keys_are_refused(serve: Serve, key: str) -> None:
    server = serve(api_key="boss", tenants=TENANTS)
    with as_(server, None) as http:
        for headers in ({"x-api-key": key.encode()}, {"authorization": b"Bearer x" + key.encode()}, {}):
            reply = http.post("/v1/completions", json={"prompt": "Hi"}, headers=headers)
            assert reply.status_code == 401
            assert reply.json()["error"]["code"] == "unauthorized"
            assert reply.headers["www-authenticate"] == "Bearer"
    assert server.fake.handles == []


def test_tenants_alone_close_the_door(serve: Serve) -> None:
    server = serve(tenants=TENANTS)
    assert server.http.get("/v1/models").status_code == 401
    assert server.http.get("/health").status_code == 200
    assert server.http.get("/metrics").status_code == 200


def test_what_concerns_all_is_the_operators(serve: Serve) -> None:
    server = serve(api_key="boss", tenants=TENANTS)
    with as_(server, "sk-red") as http:
        reply = http.post("/reset_prefix_cache")
        assert (reply.status_code, reply.json()["error"]["code"]) == (403, "forbidden")
    assert server.http.post("/reset_prefix_cache").json() == {"blocks": 3}


def test_limits_are_refused_in_the_protocols_shape(serve: Serve) -> None:
    server = serve(tenants=TENANTS)
    server.play(refuse=QueueFull("the tenant has enough waiting", limit=100, queued_tokens=99, retry_after_s=1.25))
    with as_(server, "sk-red") as http:
        reply = http.post("/v1/completions", json={"prompt": "Hi"})
    assert reply.status_code == 429
    assert reply.headers["retry-after"] == "2"
    assert reply.headers["retry-after-ms"] == "1250"
    assert reply.json()["error"]["code"] == "queue_full"
