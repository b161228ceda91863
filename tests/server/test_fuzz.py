"""Bodies that nobody meant, hundreds of each route: an answer or a refusal in the right shape, never a 500."""

from __future__ import annotations

import json
import random
from typing import Any

import httpx
import pytest
from tests.mutate import ODD, mutated, spoiled
from tests.server.conftest import Running
from tests.server.test_tools import OTHER, TOOL, can

JSON = {"content-type": "application/json"}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
CHAT: dict[str, Any] = {
    "model": "fake", "max_tokens": 3, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "n": 2, "seed": 7,
    "stop": ["x", "y"], "stop_token_ids": [1, 2], "logit_bias": {"7": 1.5}, "logprobs": True, "top_logprobs": 2,
    "presence_penalty": 0.1, "frequency_penalty": 0.1, "repetition_penalty": 1.1, "min_tokens": 1, "stream": True,
    "stream_options": {"include_usage": True}, "session_id": "s", "cache_salt": "salt", "priority": 1, "user": "u",
    "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}},
    "tools": [TOOL, OTHER], "tool_choice": "auto", "parallel_tool_calls": False, "return_token_ids": True,
    "chat_template_kwargs": {"enable_thinking": False}, "overflow": "trim", "codec": "any", "ignore_eos": False,
    "messages": [
        {"role": "system", "content": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "Hm."},
        {"role": "tool", "content": "Sun", "tool_call_id": "c1", "name": "f"},
    ],
}  # fmt: skip
TEXT: dict[str, Any] = {
    "model": "fake", "prompt": ["Hi", "Ho"], "max_tokens": 3, "n": 2, "logprobs": 2, "echo": True, "stop": "x",
    "guided_regex": "[a-z]+", "stream": False, "add_special_tokens": True, "best_of": 2,
    "structured_outputs": None, "prompt_cache_key": "k", "overflow": "slide", "truncation": None, "seed": -1,
    "temperature": 0,
}  # fmt: skip
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": TEXT,
    "/v1/kv/plan": CHAT,
    "/tokenize": {"prompt": "Hi", "add_special_tokens": True, "return_token_strs": True},
    "/detokenize": {"tokens": [72, 105]},
    "/v1/kv/conversations/s/pin": {"ttl": "5m"},
}


def sound(reply: httpx.Response, sent: object) -> int:
    """The status of a reply that is well formed: an answer, a stream that ends, or a refusal that says why."""
    assert reply.status_code < 500 or reply.status_code == 501, (sent, reply.text)
    assert "Traceback" not in reply.text
    if reply.status_code >= 400:
        error = reply.json()["error"]
        assert error["message"] and len(reply.content) < 4000, sent
    elif reply.headers["content-type"].startswith("text/event-stream"):
        assert reply.text.endswith("data: [DONE]\n\n"), sent
    else:
        json.loads(reply.content)
    return reply.status_code


def send(server: Running, path: str, body: bytes) -> int:
    return sound(server.http.post(path, content=body, headers=JSON), (path, body))


def lives(server: Running) -> None:
    assert server.http.get("/health").status_code == 200
    assert server.chat().status_code == 200
    server.until(lambda: not server.fake.live)


@pytest.mark.parametrize("path", ROUTES)
def test_a_valid_body_is_valid(server: Running, path: str) -> None:
    """What the mutations begin with."""
    can(server)
    status = send(server, path, json.dumps(ROUTES[path]).encode())
    assert status == (404 if "conversations" in path else 200)


@pytest.mark.parametrize("path", ROUTES)
def test_every_field_with_every_odd_value(server: Running, path: str) -> None:
    can(server)
    base = ROUTES[path]
    statuses = [send(server, path, json.dumps({**base, field: value}).encode()) for field in base for value in ODD]
    assert 400 in statuses or "conversations" in path
    lives(server)


@pytest.mark.parametrize("path", ROUTES)
def test_mutated_bodies(server: Running, path: str) -> None:
    can(server)
    chance = random.Random(path)
    for _ in range(200):
        send(server, path, json.dumps(mutated(ROUTES[path], chance)).encode())
    lives(server)


@pytest.mark.parametrize("path", ROUTES)
def test_spoiled_bodies(server: Running, path: str) -> None:
    """Cut, flipped, doubled and broken bytes."""
    can(server)
    chance = random.Random(path)
    whole = json.dumps(ROUTES[path]).encode()
    for _ in range(200):
        send(server, path, spoiled(whole, chance))
    lives(server)


@pytest.mark.parametrize("path", ROUTES)
def test_keys_that_occur_twice(server: Running, path: str) -> None:
    can(server)
    for field, value in ROUTES[path].items():
        body = json.dumps(ROUTES[path])[:-1] + f", {json.dumps(field)}: {json.dumps(value)}}}"
        assert send(server, path, body.encode()) == 400
    lives(server)


def test_odd_ids_and_methods_of_conversations(server: Running) -> None:
    for name in ("a/b", "%00", "..%2f..", "%ff", "é", "x" * 3000, "%F0%9F%99%82", "pin", "s/pin/pin"):
        for method in ("GET", "DELETE", "POST", "PUT", "PATCH"):
            reply = server.http.request(method, f"/v1/kv/conversations/{name}")
            assert sound(reply, (method, name)) in (404, 405)
    lives(server)
