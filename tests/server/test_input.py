"""Bad input: a clear error in the right shape that names the field, and the next request is served."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from tests.server.conftest import Running
from tests.server.fake import BOS, VOCAB

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HI: list[Any] = [{"role": "user", "content": "Hi"}]
JSON = {"content-type": "application/json"}


@pytest.fixture(autouse=True)
def _lives(server: Running) -> Iterator[None]:
    """After whatever a test sends, an ordinary request is answered."""
    yield
    server.play()
    assert server.chat().status_code == 200
    server.until(lambda: not server.fake.live)


def refusal(reply: Any, status: int = 400) -> dict[str, Any]:
    """The error object of a refusal, its shape checked."""
    assert reply.status_code == status, reply.text
    assert reply.headers["content-type"] == "application/json"
    error: dict[str, Any] = reply.json()["error"]
    assert error.keys() >= {"message", "type", "param", "code"}
    assert error["message"]
    assert "Traceback" not in reply.text
    return error


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b"{'a': 1}",
        b'{"messages": [}',
        b"\xff\xfe{}",
        b'{"messages": "\xed\xa0\x80"}',
        b'{"messages": [{"role": "user", "content": "\\ud83d"}]}',
        b'{"messages": [{"role": "user", "content": "Hi"}], "temperature": NaN}',
        b'{"messages": [{"role": "user", "content": "Hi"}], "temperature": Infinity}',
        b'{"messages": [{"role": "user", "content": "Hi"}], "temperature": 1e999}',
        b'{"messages": [{"role": "user", "content": "Hi"}], "seed": ' + b"9" * 5000 + b"}",
        b'{"messages": [{"role": "user", "content": "Hi"}], "n": 1, "n": 2}',
        b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"tokens": [' + b"[]," * 600_000 + b"0]}",
        b'{"x": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"}",
    ],
)
@pytest.mark.parametrize("path", [CHAT, TEXT, "/tokenize", "/detokenize"])
def test_malformed_json(server: Running, path: str, body: bytes) -> None:
    assert refusal(server.http.post(path, content=body, headers=JSON))["code"] == "invalid_request"


def test_only_json_is_taken(server: Running) -> None:
    body = json.dumps({"messages": HI}).encode()
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        assert refusal(server.http.post(CHAT, content=body, headers={"content-type": kind}))["param"] == "content-type"
    assert refusal(server.http.post(CHAT, content=body))["param"] == "content-type"
    good = server.http.post(CHAT, content=body, headers={"content-type": "Application/JSON; charset=utf-8"})
    assert good.status_code == 200


NUMBERS: list[tuple[str, Any]] = [
    ("temperature", -0.1), ("temperature", 2.1), ("temperature", "1"), ("temperature", True), ("temperature", 10**400),
    ("top_p", 0), ("top_p", 1.01), ("top_p", []),
    ("top_k", -2), ("top_k", 1.5), ("top_k", 2**40),
    ("n", 0), ("n", -1), ("n", 17), ("n", 9), ("n", 10**30), ("n", "2"), ("n", True),
    ("max_tokens", 0), ("max_tokens", -5), ("max_tokens", 1.0), ("max_tokens", 2**70), ("max_tokens", "9"),
    ("seed", 2**63), ("seed", -(2**63) - 1), ("seed", 0.5),
    ("priority", 2**31), ("priority", "high"),
    ("stream", "yes"), ("stream", 1), ("ignore_eos", 1), ("return_token_ids", "x"),
    ("stop", 5), ("stop", [""]), ("stop", ""), ("stop", ["x"] * 17), ("stop", "x" * 257), ("stop", ["a", 1]),
    ("stop", {"a": 1}),
    ("stop_token_ids", [VOCAB]), ("stop_token_ids", [-1]), ("stop_token_ids", "x"), ("stop_token_ids", [1] * 257),
    ("session_id", ""), ("session_id", "x" * 257), ("session_id", 5),
    ("cache_salt", ""), ("cache_salt", "x" * 257), ("cache_salt", {}),
    ("user", 7), ("user", "x" * 257), ("prompt_cache_key", []), ("prompt_cache_key", ""),
    ("stream_options", {"include_usage": True}), ("stream_options", 1),
    ("min_p", -0.1), ("min_p", 1.1), ("repetition_penalty", 0), ("repetition_penalty", "x"), ("presence_penalty", 2.1),
    ("frequency_penalty", -2.1), ("min_tokens", -1), ("min_tokens", 1.5), ("logit_bias", {str(VOCAB): 1}),
    ("logit_bias", {"-1": 1}), ("logit_bias", {"a": 1}), ("logit_bias", {"1": 101}), ("logit_bias", {"1": "x"}),
    ("logit_bias", [1]), ("logit_bias", {str(i): 1 for i in range(1025)}), ("logprobs", "yes"), ("top_logprobs", 21),
    ("response_format", 5), ("response_format", {"type": "xml"}), ("response_format", {"type": "json_schema"}),
    ("guided_json", 5), ("guided_json", {"impossible": 1}), ("guided_json", "impossible"), ("guided_regex", ""),
    ("guided_regex", "impossible"), ("guided_choice", []), ("guided_choice", [1]), ("guided_choice", ["a"] * 1025),
    ("guided_grammar", {}), ("structured_outputs", {}), ("structured_outputs", {"json": {}, "regex": "a"}),
    ("structured_outputs", {"structural_tag": "x"}), ("structured_outputs", {"regex": "impossible"}),
    ("stop", ["x"] * 900_000), ("logit_bias", {str(i): 1 for i in range(200_000)}),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), NUMBERS, ids=lambda v: str(v)[:20])
def test_wrong_values_name_their_field(server: Running, field: str, value: Any) -> None:
    replies = [server.chat(**{field: value})]
    if field != "top_logprobs":
        replies.append(server.complete(**{field: value}))
    for reply in replies:
        error = refusal(reply)
        assert error["param"].split("[")[0].split(".")[0] == field
        assert error["message"].startswith(field)
        assert error["code"] == "invalid_request"
        assert len(reply.text) < 1000
    assert server.fake.handles == []


def test_usage_in_every_chunk_is_not_built(server: Running) -> None:
    error = refusal(server.chat(stream=True, stream_options={"continuous_usage_stats": True}))
    assert error["param"] == "stream_options.continuous_usage_stats"
    assert "not built yet" in error["message"]


def test_the_limit_is_in_the_message(server: Running) -> None:
    assert "2" in refusal(server.chat(temperature=3))["message"]
    assert "less than or equal to 1" in refusal(server.chat(top_p=1.5))["message"]
    assert "16" in refusal(server.chat(n=100))["message"]
    assert "at most 8 on this server" in refusal(server.chat(n=9))["message"]
    assert f"0 to {VOCAB - 1}" in refusal(server.complete(prompt=[VOCAB]))["message"]


MESSAGES: list[tuple[Any, str]] = [
    ([], "messages"),
    (None, "messages"),
    ("Hi", "messages"),
    ({}, "messages"),
    ([1], "messages[0]"),
    ([{}], "messages[0].role"),
    ([{"role": "user"}], "messages[0].content"),
    ([{"role": "user", "content": None}], "messages[0].content"),
    ([{"role": "user", "content": 5}], "messages[0].content"),
    ([{"role": "user", "content": []}], "messages[0].content"),
    ([*HI, {"role": "king", "content": "x"}], "messages[1].role"),
    ([*HI, {"role": "tool", "content": "x"}], "messages[1].role"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages[0].content"),
    ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content"),
    ([{"role": "user", "content": ["x"]}], "messages[0].content"),
    ([{"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}], "messages[0].tool_calls"),
]


@pytest.mark.parametrize(("messages", "param"), MESSAGES, ids=lambda v: str(v)[:30])
def test_wrong_messages(server: Running, messages: Any, param: str) -> None:
    error = refusal(server.chat(messages=messages))
    assert error["param"] == param


def test_missing_messages_and_prompt(server: Running) -> None:
    assert refusal(server.http.post(CHAT, json={}))["param"] == "messages"
    assert refusal(server.http.post(TEXT, json={}))["param"] == "prompt"


def test_image_parts_are_named(server: Running) -> None:
    parts = [{"type": "image_url", "image_url": {"url": "x"}}]
    assert "image_url" in refusal(server.chat(messages=[{"role": "user", "content": parts}]))["message"]


@pytest.mark.parametrize(
    "prompt", ["", [], None, 5, {}, [VOCAB], [-1], [1.5], [True], ["a", 5], [[1], [-2]], [[]], [""], ["a"] * 257]
)
def test_wrong_prompts(server: Running, prompt: Any) -> None:
    for _ in range(3):
        assert refusal(server.complete(prompt=prompt))["param"] == "prompt"


UNBUILT: list[tuple[str, Any]] = [
    ("modalities", ["audio"]), ("functions", [{}]),
    ("chat_template", "x"), ("guided_whitespace_pattern", "x"), ("echo", True), ("use_beam_search", True),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), UNBUILT, ids=lambda v: str(v)[:20])
def test_what_is_not_built_is_named(server: Running, field: str, value: Any) -> None:
    error = refusal(server.chat(**{field: value}))
    assert error["param"] == field
    assert "not built yet" in error["message"]


MISPLACED: list[tuple[str, Any]] = [("suffix", "x"), ("best_of", 3), ("overflow", "trim"), ("truncation", "auto")]


@pytest.mark.parametrize(("field", "value"), MISPLACED)
def test_what_completions_do_not_have_is_named(server: Running, field: str, value: Any) -> None:
    assert refusal(server.complete(**{field: value}))["param"] == field


def test_neutral_values_and_unknown_fields_pass(server: Running) -> None:
    neutral = {
        "tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "logprobs": False, "logit_bias": {},
        "presence_penalty": 0, "frequency_penalty": 0.0, "min_p": 0, "truncation": "disabled", "overflow": "refuse",
        "top_logprobs": None, "repetition_penalty": 1.0, "n": None, "stop": None, "temperature": None, "seed": None,
        "max_tokens": None, "stream": None, "stream_options": None, "metadata": {"a": "b"}, "store": False,
        "parallel_tool_calls": True, "service_tier": "auto", "something_new": [{"deep": 1}],
    }  # fmt: skip
    assert server.chat(**neutral).status_code == 200
    assert server.complete(suffix=None, echo=False, best_of=2, n=2, logprobs=None).status_code == 200


def test_empty_content_is_a_message(server: Running) -> None:
    assert server.chat(messages=[{"role": "user", "content": ""}]).status_code == 200


def test_unknown_model(server: Running) -> None:
    assert refusal(server.chat(model="gpt-5"), 404)["code"] == "model_not_found"
    assert refusal(server.chat(model=""), 404)["param"] == "model"
    assert server.chat(model="fake").status_code == 200


def test_fields_reach_the_request(server: Running) -> None:
    server.chat(
        temperature=0.5, top_p=0.9, top_k=7, seed=-3, max_completion_tokens=4, stop=["a", "b"], stop_token_ids=[5],
        n=2, priority=-4, cache_salt="s", ignore_eos=True,
        messages=[{"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
    )  # fmt: skip
    request = server.fake.handles[-1].request
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 0.9, 7, -3)
    assert (sampling.max_tokens, sampling.stop, sampling.stop_token_ids) == (4, ("a", "b"), (5,))
    assert sampling.ignore_eos
    assert (request.n, request.priority, request.scope.salt) == (2, -4, "s")
    assert request.tokens == (BOS, *b"<system>a\nb\n")
    assert [span.message for span in request.spans] == [0]


def test_defaults_reach_the_request(server: Running) -> None:
    server.chat(top_k=-1)
    server.chat(top_k=0)
    first, second = (handle.request for handle in server.fake.handles)
    assert first.sampling.temperature == 1.0
    assert first.sampling.top_p == 1.0
    assert first.sampling.top_k == second.sampling.top_k == 0
    assert first.sampling.max_tokens is None
    assert first.sampling.seed != second.sampling.seed
    assert first.id != second.id
    assert first.session_id is None


def test_session_ids(server: Running) -> None:
    header = {"x-session-id": "head"}
    body = {"messages": HI, "prompt_cache_key": "key"}
    server.http.post(CHAT, json=body)
    server.http.post(CHAT, json=body, headers=header)
    server.http.post(CHAT, json={**body, "session_id": "body"}, headers=header)
    assert [handle.request.session_id for handle in server.fake.handles] == ["key", "head", "body"]
    error = refusal(server.http.post(CHAT, json=body, headers={"x-session-id": "x" * 300}))
    assert error["param"] == "X-Session-ID"


def test_contradicting_lengths(server: Running) -> None:
    assert refusal(server.chat(max_tokens=3, max_completion_tokens=4))["param"] == "max_tokens"
    assert server.chat(max_tokens=3, max_completion_tokens=3).json()["usage"]["completion_tokens"] == 3


def test_large_prompts_take_the_other_way(server: Running) -> None:
    """Bodies that are tokenised on the worker thread are answered and refused like others."""
    assert server.complete(prompt="x" * 100_000).json()["usage"]["prompt_tokens"] == 100_001
    assert refusal(server.complete(prompt="x" * 100_000, n=0))["param"] == "n"
    assert len(server.http.post("/tokenize", json={"prompt": "y" * 50_000}).json()["tokens"]) == 50_001


def test_a_bug_leaks_nothing(server: Running) -> None:
    server.play(crash="secret /etc/passwd")
    error = refusal(server.http.post(CHAT, json={"messages": HI}, headers={"x-request-id": "r-1"}), 500)
    assert error["code"] == "internal_error"
    assert "secret" not in error["message"]
    assert "r-1" in error["message"]


def test_a_million_mistakes_cost_one_message(server: Running) -> None:
    wrong = ["ab"] * 400_000
    for path, field in ((TEXT, "stop_token_ids"), (TEXT, "prompt"), (TEXT, "stop"), ("/detokenize", "tokens")):
        error = refusal(server.http.post(path, json={"prompt": "x", field: wrong}))
        assert error["param"] == field
    assert refusal(server.complete(stop=["x"] * 1_000_000))["limit"] == 1_000_000
    many = [{"role": "user", "content": ""}] * 10_001
    assert refusal(server.chat(messages=many))["param"] == "messages"


def test_odd_hosts_and_paths(server: Running) -> None:
    for host in ("[::1", "a b", "x" * 300, "é".encode()):
        reply = server.http.get("/nothing", headers={"host": host})
        assert refusal(reply, 404)["code"] == "not_found"
