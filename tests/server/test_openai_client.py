"""The `openai` client works unchanged, and streams say the same as whole answers."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from tests.server.conftest import Running
from tests.server.fake import CONTEXT

from tenure.errors import ContextLengthExceeded, Draining, QueueFull
from tenure.types import Finish, Forgotten

ASK: Any = [{"role": "user", "content": "Hi"}]
TEXT = "Hello, wörld! 🙂"


def events(body: str) -> list[dict[str, Any]]:
    """The JSON of a stream's events; the end mark must be there, and last."""
    blocks = [block for block in body.split("\n\n") if block]
    assert blocks[-1] == "data: [DONE]"
    assert all(block.startswith("data: ") for block in blocks)
    return [json.loads(block[6:]) for block in blocks[:-1]]


def test_chat(server: Running) -> None:
    server.play(cached=2)
    reply = server.client.chat.completions.create(model="fake", messages=ASK)
    assert reply.object == "chat.completion"
    assert reply.id.startswith("chatcmpl-")
    assert reply.model == "fake"
    assert reply.choices[0].message.role == "assistant"
    assert reply.choices[0].message.content == TEXT
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage is not None
    assert reply.usage.completion_tokens == len(TEXT.encode())
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    assert reply.usage.prompt_tokens_details is not None
    assert reply.usage.prompt_tokens_details.cached_tokens == 2


def test_chat_stream(server: Running) -> None:
    stream = server.client.chat.completions.create(
        model="fake", messages=ASK, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == TEXT
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(TEXT.encode())
    assert all(c.usage is None for c in chunks[:-1])
    assert len({c.id for c in chunks}) == 1


def test_completions(server: Running) -> None:
    reply = server.client.completions.create(model="fake", prompt=[72, 105], max_tokens=5)
    assert reply.object == "text_completion"
    assert reply.choices[0].text == "Hello"
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == 2
    chunks = list(server.client.completions.create(model="fake", prompt="Hi", stream=True))
    assert "".join(c.choices[0].text for c in chunks) == TEXT
    assert chunks[-1].choices[0].finish_reason == "stop"


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("kind", ["chat", "completions"])
@pytest.mark.parametrize("usage", [True, False])
def test_stream_equals_whole(server: Running, n: int, kind: str, usage: bool) -> None:
    """Text, ends, tokens, usage, receipt and timings: the same, streamed or not."""
    server.play(cached=2)
    send = server.chat if kind == "chat" else server.complete
    common = {"n": n, "seed": 1, "max_tokens": 9, "return_token_ids": True}
    whole = send(**common).json()
    options = {"stream_options": {"include_usage": True}} if usage else {}
    chunks = events(send(**common, stream=True, **options).text)
    texts, ends, ids = [""] * n, [None] * n, [[] for _ in range(n)]
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        at = choice["index"]
        assert ends[at] is None, "nothing follows an end"
        texts[at] += choice["delta"].get("content", "") if kind == "chat" else choice["text"]
        ids[at] += choice.get("token_ids") or []
        ends[at] = choice["finish_reason"]
    said = [c["message"]["content"] if kind == "chat" else c["text"] for c in whole["choices"]]
    assert texts == said
    assert ends == [c["finish_reason"] for c in whole["choices"]] == ["length"] * n
    assert ids == [c["token_ids"] for c in whole["choices"]]
    assert chunks[-1]["kv"] == whole["kv"]
    assert chunks[-1]["timings"] == whole["timings"]
    assert ("usage" in chunks[-1]) == usage
    if usage:
        assert chunks[-1]["usage"] == whole["usage"]
        assert chunks[-1]["choices"] == []
    assert all("kv" not in chunk for chunk in chunks[:-1])
    assert whole["kv"]["limit_cause"] == "max_tokens"
    assert whole["kv"]["prompt_tokens"] == whole["kv"]["cached_tokens"] + whole["kv"]["computed_tokens"]
    prompt = chunks[0]["prompt_token_ids"] if kind == "chat" else chunks[0]["choices"][0]["prompt_token_ids"]
    assert prompt == (whole["prompt_token_ids"] if kind == "chat" else whole["choices"][0]["prompt_token_ids"])
    assert len(prompt) == whole["usage"]["prompt_tokens"]


def test_receipt_shape(server: Running) -> None:
    server.play(cached=3)
    kv = server.chat(max_tokens=2).json()["kv"]
    assert kv["cached_by_tier"] == {"device": 3, "host": 0, "disk": 0, "remote": 0}
    assert kv["miss"]["reason"] == "content_changed"
    assert (kv["miss"]["at_token"], kv["miss"]["message"]) == (3, 0)
    assert kv["forgotten"] == []
    assert kv["codec"] == {"bf16": 2}
    assert (kv["preempted"], kv["recomputed_tokens"], kv["queue_ms"]) == (0, 0, 4.0)
    assert kv["context_limit"] == CONTEXT


def test_what_was_forgotten_and_clamped_is_told(server: Running) -> None:
    server.play(granted=40, forgotten=(Forgotten(0, 12, (0, 1), "slide", "context"),))
    for kv in (server.chat(max_tokens=99).json()["kv"], events(server.chat(max_tokens=99, stream=True).text)[-1]["kv"]):
        assert kv["max_tokens"] == {"requested": 99, "granted": 40}
        assert kv["forgotten"] == [{"tokens": [0, 12], "messages": [0, 1], "policy": "slide", "reason": "context"}]


def test_timings_shape(server: Running) -> None:
    timings = server.chat(max_tokens=10).json()["timings"]
    assert timings["predicted_n"] == 10
    assert timings["predicted_per_second"] == 100.0
    assert timings["prompt_per_second"] == round(timings["prompt_n"] / 20.0 * 1000, 3)
    assert timings["cache_n"] == 0


def test_models(server: Running) -> None:
    assert [m.id for m in server.client.models.list()] == ["fake"]
    assert server.client.models.retrieve("fake").id == "fake"
    with pytest.raises(openai.NotFoundError) as caught:
        server.client.models.retrieve("other/one")
    assert caught.value.code == "model_not_found"


@pytest.mark.parametrize("stream", [False, True])
def test_refusals_are_real_statuses(server: Running, stream: bool) -> None:
    server.play(refuse=ContextLengthExceeded("too long", prompt_tokens=5000, requested_tokens=5001, limit=4096))
    with pytest.raises(openai.BadRequestError) as bad:
        server.client.chat.completions.create(model="fake", messages=ASK, stream=stream)
    assert bad.value.code == "context_length_exceeded"
    assert isinstance(bad.value.body, dict)
    assert (bad.value.body["prompt_tokens"], bad.value.body["limit"]) == (5000, 4096)
    server.play(refuse=QueueFull("the queue is full", queued_requests=4, limit=4, retry_after_s=1.25))
    with pytest.raises(openai.RateLimitError) as full:
        server.client.chat.completions.create(model="fake", messages=ASK, stream=stream)
    assert full.value.response.headers["retry-after"] == "2"
    assert full.value.response.headers["retry-after-ms"] == "1250"
    assert full.value.code == "queue_full"
    server.play(refuse=Draining("the server is shutting down", retry_after_s=5.0))
    with pytest.raises(openai.InternalServerError) as draining:
        server.client.chat.completions.create(model="fake", messages=ASK, stream=stream)
    assert draining.value.status_code == 503
    assert draining.value.response.headers["retry-after"] == "5"


def test_error_in_a_running_stream(server: Running) -> None:
    server.play(error_at=4)
    got = []
    with pytest.raises(openai.APIError, match="logits are not finite"):
        for chunk in server.client.chat.completions.create(model="fake", messages=ASK, stream=True):
            got += [c.delta.content for c in chunk.choices]
    assert "".join(got) == "Hell"
    last = events(server.chat(stream=True).text)[-1]
    assert last["error"]["code"] == "internal_error"
    assert last["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("stream", [False, True])
def test_error_before_the_first_token(server: Running, stream: bool) -> None:
    server.play(error_at=0)
    reply = server.chat(stream=stream)
    assert reply.status_code == 500
    assert reply.json()["error"]["message"] == "logits are not finite"


def test_an_engine_that_ends_without_a_word(server: Running) -> None:
    server.play(silent=True)
    assert server.chat().status_code == 500
    assert events(server.chat(stream=True).text)[-1]["error"]["code"] == "internal_error"


def test_an_engine_that_breaks(server: Running) -> None:
    """A bug behind the seam cancels the request and says no more than that there was one."""
    server.play(broken="secret", repeat=1000, step_s=0.001)
    whole = server.chat()
    assert whole.status_code == 500
    stream = server.chat(stream=True).text
    assert events(stream)[-1]["error"]["code"] == "internal_error"
    assert "secret" not in whole.text + stream
    server.until(lambda: not server.fake.live)
    assert all(handle.cancelled for handle in server.fake.handles)


SHUTDOWNS: list[dict[str, Any]] = [
    {"shutdown_at": 3},
    {"text": "Hel", "finish": Finish.LENGTH, "cause": "shutdown"},
]


@pytest.mark.parametrize("script", SHUTDOWNS)
@pytest.mark.parametrize("usage", [True, False])
def test_shutdown_is_told(server: Running, script: dict[str, Any], usage: bool) -> None:
    """An answer that the shutdown cut short never looks like one that ended."""
    server.play(**script)
    reply = server.chat()
    assert reply.status_code == 503
    assert reply.json()["error"]["code"] == "draining"
    assert reply.json()["usage"]["completion_tokens"] == 3
    chunks = events(server.chat(stream=True, n=2, stream_options={"include_usage": usage}).text)
    assert chunks[-1]["error"]["code"] == "draining"
    assert all(c["finish_reason"] is None for chunk in chunks[:-1] for c in chunk["choices"])
    assert "".join(c["delta"]["content"] for chunk in chunks[:-1] for c in chunk["choices"] if c["index"] == 1) == "Hel"


@pytest.mark.parametrize("stream", [False, True])
def test_shutdown_before_the_first_token(server: Running, stream: bool) -> None:
    server.play(shutdown_at=0)
    assert server.chat(stream=stream).status_code == 503


def test_emoji_streams_whole(server: Running) -> None:
    server.play(text='👩‍🚀 한국어 é\u2028\x85 "quoted" \\ \n\n data: [DONE]')
    chunks = events(server.chat(stream=True).text)
    text = "".join(c["choices"][0]["delta"]["content"] for c in chunks)
    assert text == server.chat().json()["choices"][0]["message"]["content"] == server.fake.script.text
    assert "\ufffd" not in text
