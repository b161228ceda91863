"""Case I3 and the desk on a real server: who may reuse what, pins, plans, conversations and the feed of facts."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.e2e.support import Running, eventually, pool_bytes, prompt_ids, serving

POOL = 2048
SHARED = prompt_ids(128, seed=99)
FILE = """
[[tenant]]
name = "red"
keys = ["sk-red"]
weight = 3
max_pinned_bytes = "{pins}"

[[tenant]]
name = "blue"
keys = ["sk-blue"]
max_concurrent = 1

[[tenant]]
name = "tiny"
keys = ["sk-tiny"]
max_kv_bytes = "{tiny}"
max_queued_tokens = 400

[[shared_prefix]]
tokens = {shared}
"""


class As:
    """The same server with another key."""

    def __init__(self, server: Running, key: str) -> None:
        self.http = httpx.Client(base_url=server.url, headers={"x-api-key": key}, timeout=120)

    def complete(self, prompt: list[int], tokens: int = 2, **fields: Any) -> dict[str, Any]:
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **fields}
        reply = self.http.post("/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        answer: dict[str, Any] = reply.json()
        return answer

    def cached(self, prompt: list[int], **fields: Any) -> int:
        """How many tokens of a prompt were held."""
        count: int = self.complete(prompt, **fields)["kv"]["cached_tokens"]
        return count


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    file = Path(tmp_path_factory.mktemp("tenants")) / "tenants.toml"
    file.write_text(FILE.format(pins=pool_bytes(512), tiny=pool_bytes(256), shared=SHARED))
    flags = ("--tenants", str(file), "--kv-cache-memory-bytes", pool_bytes(POOL), "--max-model-len", "1024")
    with serving("--canary", "8", "--api-key", "boss", *flags, key="boss") as running:
        yield running


def client(server: Running, key: str) -> Iterator[As]:
    one = As(server, key)
    yield one
    one.http.close()


@pytest.fixture
def red(server: Running) -> Iterator[As]:
    yield from client(server, "sk-red")


@pytest.fixture
def blue(server: Running) -> Iterator[As]:
    yield from client(server, "sk-blue")


@pytest.fixture
def tiny(server: Running) -> Iterator[As]:
    yield from client(server, "sk-tiny")


@pytest.fixture
def boss(server: Running) -> Iterator[As]:
    yield from client(server, "boss")


def test_i3_only_the_same_tenant_and_salt_reuse(red: As, blue: As, boss: As) -> None:
    prompt = prompt_ids(100, seed=1)
    who = {"red": red, "red+salt": red, "blue": blue, "nobody": boss}
    salts: dict[str, dict[str, str]] = {"red+salt": {"cache_salt": "blue"}}
    first = {name: one.cached(prompt, **salts.get(name, {})) for name, one in who.items()}
    second = {name: one.cached(prompt, **salts.get(name, {})) for name, one in who.items()}
    assert first == dict.fromkeys(who, 0), "nobody finds what another computed, not under a name that equals a salt"
    assert second == dict.fromkeys(who, 99)


def test_i3_the_reason_does_not_tell_that_another_has_it(red: As, blue: As) -> None:
    prompt = prompt_ids(64, seed=2)
    red.complete(prompt)
    assert blue.complete(prompt)["kv"]["miss"]["reason"] == "cold"


def test_declared_prefixes_are_everyones_and_nothing_behind_them(red: As, blue: As) -> None:
    red.complete(SHARED + prompt_ids(64, seed=5))
    assert blue.cached(SHARED + prompt_ids(64, seed=6)) == len(SHARED)
    assert blue.cached(SHARED + prompt_ids(64, seed=5)) == len(SHARED), "what red wrote behind it is red's"


def test_unknown_keys_and_the_operators_routes(server: Running, red: As) -> None:
    assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"}).status_code == 401
    assert red.http.post("/reset_prefix_cache").status_code == 403
    assert server.http.post("/reset_prefix_cache").status_code == 200


def test_a_tenants_limits_are_told_by_name(tiny: As) -> None:
    reply = tiny.http.post("/v1/completions", json={"prompt": prompt_ids(300, seed=7), "max_tokens": 4})
    assert reply.status_code == 400
    assert reply.json()["error"]["code"] == "kv_capacity_exceeded"
    assert reply.json()["error"]["pool_blocks"] == 8
    answer = tiny.complete(prompt_ids(200, seed=8), 400)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["kv"]["limit_cause"] == "tenant_kv"


def test_what_is_told_last_is_that_nobody_holds_anything(server: Running, tiny: As) -> None:
    """It stays said until something comes: a short answer ends before what tenants hold is added up again."""
    for seed in range(30, 34):
        tiny.complete(prompt_ids(60, seed), 1)
        end = time.monotonic() + 30
        while (held := server.http.get("/v1/kv").json())["running"] and time.monotonic() < end:
            time.sleep(0.01)
        assert [(one["running"], one["held_bytes"]) for one in held["tenants"]] == [(0, 0)] * len(held["tenants"])


def test_one_at_a_time_for_who_is_limited_to_it(blue: As) -> None:
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda seed: blue.complete(prompt_ids(60, seed), 24), range(20, 23)))
    waits = sorted(answer["kv"]["queue_ms"] for answer in answers)
    assert waits[1] > 0
    assert waits[2] > waits[1]


def test_a_pin_outlives_pressure_and_one_too_many_is_refused(server: Running, red: As) -> None:
    server.reset()
    words = "Pinned words stay where they are, whatever else may come and go. " * 8
    pinned = [{"role": "system", "content": words, "cache_control": {"type": "ephemeral", "ttl": "1h"}}]

    def ask(messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        body = {"messages": [*messages, {"role": "user", "content": "Hi"}], "max_tokens": 2, "temperature": 0, **fields}
        reply = red.http.post("/v1/chat/completions", json=body)
        assert reply.status_code == 200, reply.text
        receipt: dict[str, Any] = reply.json()["kv"]
        return receipt

    (pin,) = ask(pinned)["pins"]
    assert pin["granted"]
    assert pin["tokens"] >= 96
    blocks = server.metric("tenure:pinned_blocks")
    assert blocks == pin["tokens"] / 32
    for seed in range(6):  # three times the pool
        red.complete(prompt_ids(900, seed=100 + seed))
    assert ask(pinned)["cached_tokens"] >= pin["tokens"], "still there"
    huge = [
        {"role": "user", "content": words * 6, "cache_control": {"type": "ephemeral"}},
        {"role": "assistant", "content": "ok"},
    ]
    (refused,) = ask(huge)["pins"]
    assert refused["granted"] is False
    assert "budget" in refused["reason"]
    assert server.metric("tenure:pins_total", outcome="refused") == 1


def test_the_plan_is_what_then_happens(server: Running, red: As) -> None:
    server.reset()
    head = prompt_ids(200, seed=30)
    red.complete(head)
    body = {"prompt": head + prompt_ids(50, seed=31), "max_tokens": 2, "temperature": 0}
    plan = red.http.post("/v1/kv/plan", json=body).json()
    again = red.http.post("/v1/kv/plan", json=body).json()
    assert {k: v for k, v in plan.items() if "_s" not in k} == {k: v for k, v in again.items() if "_s" not in k}, (
        "a dry run"
    )
    receipt = red.http.post("/v1/completions", json=body).json()["kv"]
    assert plan["fits_now"]
    assert plan["fits_ever"]
    assert (plan["cached_tokens"], plan["computed_tokens"]) == (receipt["cached_tokens"], receipt["computed_tokens"])
    assert plan["cached_tokens"] == 200
    assert plan["predicted_ttft_s"] >= plan["predicted_start_s"] >= 0


def test_a_plan_counts_what_would_have_to_go(server: Running, red: As) -> None:
    server.reset()
    for seed in range(40, 43):
        red.complete(prompt_ids(600, seed))
    body = {"prompt": prompt_ids(700, seed=44), "max_tokens": 2, "temperature": 0}
    plan = red.http.post("/v1/kv/plan", json=body).json()
    assert plan["would_evict"]["blocks"] > 0
    gone = server.metric("tenure:kv_gone_total", fate="dropped", reason="room")
    red.http.post("/v1/completions", json=body).raise_for_status()
    went = server.metric("tenure:kv_gone_total", fate="dropped", reason="room") - gone
    assert abs(went - plan["would_evict"]["blocks"]) <= 1, "one more when it grows"
    never = red.http.post("/v1/kv/plan", json={"prompt": prompt_ids(2000), "max_tokens": 2}).json()
    assert (never["fits_now"], never["fits_ever"], never["predicted_start_s"]) == (False, False, None)
    assert "context" in never["reason"]


def test_conversations_are_listed_pinned_and_deleted(server: Running, red: As, blue: As) -> None:
    server.reset()
    red.complete(prompt_ids(100, seed=50), session_id="red talk")
    blue.complete(prompt_ids(100, seed=51), session_id="blue talk")
    listed = {entry["id"]: entry for entry in red.http.get("/v1/kv/conversations").json()["data"]}
    assert "blue talk" not in listed
    mine = listed["red talk"]
    assert (mine["tokens"], mine["state"], mine["tenant"]) == (102, "idle", "red")
    assert mine["held_tokens"] >= 101
    assert mine["bytes"]["bf16"] == 4 * int(pool_bytes(32))
    assert red.http.get("/v1/kv/conversations/blue%20talk").status_code == 404
    pinned = red.http.post("/v1/kv/conversations/red%20talk/pin", json={"ttl": "1h"}).json()
    assert pinned["pins"][0]["tokens"] == 96
    assert red.http.post("/v1/kv/conversations/red%20talk/unpin").json()["pins"] == []
    gone = red.http.delete("/v1/kv/conversations/red%20talk").json()
    assert gone["blocks"] == 4
    assert red.http.get("/v1/kv/conversations/red%20talk").status_code == 404
    again = red.complete(prompt_ids(100, seed=50))
    assert again["kv"]["cached_tokens"] == 0


def test_a_paused_conversation_goes_on_to_the_same_text(server: Running, red: As) -> None:
    server.reset()
    prompt = prompt_ids(100, seed=60)
    solo = red.complete(prompt, 200)["choices"]
    server.reset()
    answer: dict[str, Any] = {}
    asking = threading.Thread(target=lambda: answer.update(red.complete(prompt, 200, session_id="held")))
    asking.start()
    url = "/v1/kv/conversations/held"
    assert eventually(lambda: red.http.get(url).json().get("state") == "running")
    assert red.http.post(f"{url}/pause").json()["state"] == "paused"
    held = red.http.get(url).json()["tokens"]
    time.sleep(0.2)
    assert red.http.get(url).json()["tokens"] == held < 300
    red.complete(prompt_ids(50, seed=61))  # others go on
    assert asking.is_alive()
    assert red.http.post(f"{url}/resume").status_code == 200
    asking.join(60)
    assert answer["choices"] == solo
    assert answer["kv"]["preempted"] == 1


def test_deleting_one_that_runs_ends_it(server: Running, red: As) -> None:
    reply: list[httpx.Response] = []
    body = {"prompt": prompt_ids(100, seed=70), "max_tokens": 800, "ignore_eos": True, "session_id": "short"}
    asking = threading.Thread(target=lambda: reply.append(red.http.post("/v1/completions", json=body)))
    asking.start()
    assert eventually(lambda: red.http.get("/v1/kv/conversations/short").status_code == 200)
    assert red.http.delete("/v1/kv/conversations/short").status_code == 200
    asking.join(30)
    assert reply[0].status_code == 409
    assert reply[0].json()["error"]["code"] == "conversation_deleted"
    assert eventually(lambda: server.metric("vllm:num_requests_running") == 0)


def test_the_feed_tells_a_tenant_of_itself_alone(server: Running, red: As, blue: As) -> None:
    seen: list[dict[str, Any]] = []
    with red.http.stream("GET", "/v1/kv/events") as reply:
        lines = reply.iter_lines()
        next(lines)
        blue.complete(prompt_ids(70, seed=80))
        name = red.complete(prompt_ids(70, seed=81))["id"]
        for line in lines:
            if line.startswith("data: "):
                seen.append(json.loads(line[6:]))
                if seen[-1]["type"] == "RequestDone":
                    break
    assert {fact["tenant"] for fact in seen} == {"red"}
    assert [fact["type"] for fact in seen if fact.get("request") == name][:2] == ["RequestQueued", "RequestStarted"]
    assert seen[-1]["receipt"]["prompt_tokens"] == 70
    assert any(fact["type"] == "BlockStored" for fact in seen), "and of its blocks"


def test_metrics_know_the_tenants(server: Running) -> None:
    assert server.metric("tenure:tenant_tokens_total", tenant="red") > 1000
    assert server.metric("tenure:tenant_waiting", tenant="blue") == 0
    assert server.metric("tenure:leaked_blocks") == 0
