"""What shapes and tells an answer: the fields reach the engine, and logprobs, echoes and batches come back right."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from tests.server.conftest import Running
from tests.server.fake import BOS

from tenure.server.logprobs import TextLogprobs
from tenure.types import Guide, Logprob

SCHEMA = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "integer"}}}
DUMPED = '{"type":"object","properties":{"b":{"type":"string"},"a":{"type":"integer"}}}'


def events(reply: httpx.Response) -> list[dict[str, Any]]:
    """The chunks of a stream."""
    assert reply.status_code == 200, reply.text
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_fields_reach_the_request(server: Running) -> None:
    server.chat(
        min_p=0.1, repetition_penalty=1.2, presence_penalty=-1, frequency_penalty=0.5, logit_bias={"7": 3, "9": -100},
        min_tokens=2, logprobs=True, top_logprobs=4,
    )  # fmt: skip
    sampling = server.fake.handles[-1].request.sampling
    assert (sampling.min_p, sampling.repetition_penalty, sampling.presence_penalty) == (0.1, 1.2, -1.0)
    assert (sampling.frequency_penalty, sampling.logit_bias) == (0.5, ((7, 3.0), (9, -100.0)))
    assert (sampling.min_tokens, sampling.logprobs, sampling.guide) == (2, 4, None)
    server.chat(logprobs=True)
    assert server.fake.handles[-1].request.sampling.logprobs == 0
    server.chat(logprobs=False, presence_penalty=0, repetition_penalty=1.0, logit_bias={})
    assert not server.fake.handles[-1].request.sampling.tells
    assert not server.fake.handles[-1].request.sampling.shapes


@pytest.mark.parametrize(
    ("body", "guide"),
    [
        ({"response_format": {"type": "json_object"}}, Guide("json_schema", '{"type":"object"}')),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
            Guide("json_schema", DUMPED),
        ),
        ({"response_format": {"type": "text"}}, None),
        ({"guided_json": SCHEMA}, Guide("json_schema", DUMPED)),
        ({"guided_json": DUMPED}, Guide("json_schema", DUMPED)),
        ({"guided_regex": "a+", "response_format": {"type": "text"}}, Guide("regex", "a+")),
        ({"guided_choice": ["ja", "nein ß"]}, Guide("choice", '["ja","nein ß"]')),
        ({"guided_grammar": "start: /a/"}, Guide("grammar", "start: /a/")),
        ({"structured_outputs": {"json": SCHEMA, "regex": None}}, Guide("json_schema", DUMPED)),
        ({"structured_outputs": {"json_object": True}}, Guide("json_schema", '{"type":"object"}')),
        ({"structured_outputs": {"choice": ["a"]}}, Guide("choice", '["a"]')),
    ],
    ids=str,
)
def test_guides_reach_the_request(server: Running, body: dict[str, Any], guide: Guide | None) -> None:
    for reply in (server.chat(**body), server.complete(**body)):
        assert reply.status_code == 200, reply.text
        assert server.fake.handles[-1].request.sampling.guide == guide


def test_contradictions_are_refused(server: Running) -> None:
    two = server.chat(guided_regex="a", response_format={"type": "json_object"})
    assert (two.status_code, two.json()["error"]["param"]) == (400, "guided_regex")
    for field, body in (
        ("top_logprobs", {"top_logprobs": 3}),
        ("min_tokens", {"min_tokens": 5, "max_tokens": 4}),
    ):
        reply = server.chat(**body)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, field)
    much = server.complete(prompt=[[65] * 3000] * 4, echo=True, logprobs=5, n=4)
    assert (much.status_code, much.json()["error"]["param"]) == (400, "echo")
    assert much.json()["error"]["limit"] == 1 << 18


def test_chat_logprobs_streamed_and_not(server: Running) -> None:
    server.play(text="aé!")
    body: dict[str, Any] = {"logprobs": True, "top_logprobs": 2, "n": 2}
    whole = server.chat(**body).json()
    for choice in whole["choices"]:
        content = choice["logprobs"]["content"]
        assert [entry["bytes"] for entry in content] == [[0x61], [0xC3], [0xA9], [0x21]]
        assert content[0] == {
            "token": "a", "logprob": -0.25, "bytes": [97],
            "top_logprobs": [
                {"token": "a", "logprob": -0.25, "bytes": [97]}, {"token": "b", "logprob": -1.25, "bytes": [98]},
            ],
        }  # fmt: skip
        assert content[1]["token"] == "\ufffd"
    streamed: list[list[Any]] = [[], []]
    for chunk in events(server.chat(stream=True, **body)):
        for choice in chunk["choices"]:
            if choice["logprobs"] is not None:
                streamed[choice["index"]] += choice["logprobs"]["content"]
    assert streamed == [choice["logprobs"]["content"] for choice in whole["choices"]]


def test_completion_logprobs_streamed_and_not(server: Running) -> None:
    server.play(text="aé!")
    whole = server.complete(logprobs=1).json()["choices"][0]["logprobs"]
    assert whole == {
        "text_offset": [0, 1, 1, 2],
        "token_logprobs": [-0.25] * 4,
        "tokens": ["a", "bytes:\\xc3", "bytes:\\xa9", "!"],
        "top_logprobs": [{"a": -0.25}, {"bytes:\\xc3": -0.25}, {"bytes:\\xa9": -0.25}, {"!": -0.25}],
    }
    parts: dict[str, list[Any]] = {key: [] for key in whole}
    for chunk in events(server.complete(logprobs=1, stream=True)):
        told = chunk["choices"][0]["logprobs"]
        for key in parts:
            parts[key] += told[key] if told else []
    assert parts == whole


def test_openai_client_reads_logprobs(server: Running) -> None:
    server.play(text="ab")
    reply = server.client.chat.completions.create(
        model="fake", messages=[{"role": "user", "content": "Hi"}], logprobs=True, top_logprobs=1
    )
    told = reply.choices[0].logprobs
    assert told is not None
    assert [entry.token for entry in told.content or []] == ["a", "b"]


def test_echo(server: Running) -> None:
    server.play(text="!")
    assert server.complete(prompt="Hi", echo=True).json()["choices"][0]["text"] == "Hi!"
    assert server.complete(prompt=[72, 105], echo=True).json()["choices"][0]["text"] == "Hi!"
    chunks = events(server.complete(prompt="Hi", echo=True, stream=True, n=2))
    texts = ["", ""]
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == ["Hi!", "Hi!"]


def test_echo_with_logprobs(server: Running) -> None:
    """The prompt's tokens come first, of the first of them nothing can be said; whole and streamed alike."""
    server.play(text="!é")
    body: dict[str, Any] = {"prompt": ["Hé", [72, 105, 66]], "echo": True, "logprobs": 1, "n": 2}
    whole = server.complete(**body).json()["choices"]
    assert [choice["text"] for choice in whole] == ["Hé!é", "Hé!é", "HiB!é", "HiB!é"]
    told = whole[0]["logprobs"]
    assert told["tokens"] == ["<bos>", "H", "bytes:\\xc3", "bytes:\\xa9", "!", "bytes:\\xc3", "bytes:\\xa9"]
    assert told["token_logprobs"] == [None, -0.5, -0.5, -0.5, -0.25, -0.25, -0.25]
    assert told["text_offset"] == [0, 0, 1, 1, 2, 3, 3]
    assert told["top_logprobs"][:2] == [None, {"H": -0.5}]
    assert told == whole[1]["logprobs"]
    assert whole[2]["logprobs"]["text_offset"][:4] == [0, 1, 2, 3]
    assert server.fake.handles[0].request.sampling.prompt_logprobs == 1
    texts = [""] * 4
    parts: list[dict[str, list[Any]]] = [{name: [] for name in told} for _ in range(4)]
    for chunk in events(server.complete(stream=True, **body)):
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
            for name, values in (choice["logprobs"] or {}).items():
                parts[choice["index"]][name] += values
    assert texts == [choice["text"] for choice in whole]
    assert parts == [choice["logprobs"] for choice in whole]


def test_an_echo_alone(server: Running) -> None:
    """How OpenAI's clients score a prompt: `max_tokens` 0 gives its text and logprobs, and no token."""
    server.play(text="never said")
    scored: dict[str, Any] = {"prompt": ["Hi", [72, 111]], "echo": True, "max_tokens": 0, "logprobs": 1, "n": 2}
    reply = server.complete(**scored).json()
    assert [choice["text"] for choice in reply["choices"]] == ["Hi", "Hi", "Ho", "Ho"]
    assert {choice["finish_reason"] for choice in reply["choices"]} == {"length"}
    assert [choice["logprobs"]["tokens"] for choice in reply["choices"]] == [["<bos>", "H", "i"]] * 2 + [["H", "o"]] * 2
    assert reply["choices"][0]["logprobs"]["token_logprobs"] == [None, -0.5, -0.5]
    assert (reply["usage"]["prompt_tokens"], reply["usage"]["completion_tokens"]) == (5, 0)
    assert [handle.request.sampling.max_tokens for handle in server.fake.handles[:2]] == [0, 0]
    assert reply["kv"]["limit_cause"] == "max_tokens"
    chunks = [chunk for chunk in events(server.complete(**scored, stream=True)) if chunk["choices"]]
    for index, whole in enumerate(reply["choices"]):
        parts = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert "".join(part["text"] for part in parts) == whole["text"]
        assert parts[-1]["finish_reason"] == "length"
        told = [part["logprobs"] for part in parts if part["logprobs"]]
        assert [token for part in told for token in part["tokens"]] == whole["logprobs"]["tokens"]
    plain = server.complete(prompt="Hi", echo=True, max_tokens=0, return_token_ids=True).json()["choices"][0]
    assert (plain["text"], plain["logprobs"], plain["token_ids"]) == ("Hi", None, [])
    scored = server.client.completions.create(model="fake", prompt="Hi", echo=True, max_tokens=0, logprobs=0)
    assert scored.choices[0].text == "Hi"


def test_no_tokens_without_an_echo_is_refused(server: Running) -> None:
    for reply in (server.complete(max_tokens=0), server.complete(max_tokens=0, echo=False)):
        error = reply.json()["error"]
        assert (reply.status_code, error["param"]) == (400, "max_tokens")
        assert "not 0; with echo: true" in error["message"]
    error = server.chat(max_tokens=0).json()["error"]
    assert (error["param"], error["code"]) == ("max_tokens", "invalid_request")
    odd = server.complete(max_tokens=0, echo=True, min_tokens=1)
    assert (odd.status_code, odd.json()["error"]["param"]) == (400, "min_tokens")
    assert server.complete(max_tokens=-1, echo=True).status_code == 400


def test_a_long_echo_is_no_sign_of_a_slow_reader(serve: Callable[..., Running]) -> None:
    server = serve(stream_buffer_bytes=4096)
    server.play(text="!")
    chunks = events(server.complete(prompt="x" * 3000, echo=True, logprobs=2, stream=True))
    assert len(chunks[0]["choices"][0]["logprobs"]["tokens"]) == 3001
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_echo_offsets_where_a_tokenizer_puts_a_blank_before_a_text() -> None:
    spelled = [b"<s>", b" Hi", b" you"]
    told = TextLogprobs(spelled.__getitem__, 0).prompt("Hi you", [0, 1, 2], [Logprob(1, -1.0), Logprob(2, -1.0)])
    assert told["text_offset"] == [0, 0, 2]


@pytest.mark.parametrize("prompt", [["a", "bcd", "ef"], [[97], [98, 99, 100], [101, 102]]])
def test_batches_of_prompts(server: Running, prompt: Any) -> None:
    server.play(text="xy", cached=1)
    reply = server.complete(prompt=prompt, n=2, echo=True).json()
    assert [choice["index"] for choice in reply["choices"]] == list(range(6))
    assert [choice["text"] for choice in reply["choices"]] == ["axy", "axy", "bcdxy", "bcdxy", "efxy", "efxy"]
    tokens = 6 if prompt[0] == [97] else 9
    assert reply["usage"]["prompt_tokens"] == tokens
    assert reply["usage"]["completion_tokens"] == 12
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 3
    kv = reply["kv"]
    assert kv["prompt_tokens"] == kv["cached_tokens"] + kv["computed_tokens"] == tokens
    assert [part["prompt_tokens"] for part in kv["prompts"]] == [len(h.request.tokens) for h in server.fake.handles]
    assert len({handle.request.id for handle in server.fake.handles}) == 3


def test_batches_streamed(server: Running) -> None:
    server.play(text="xyz")
    chunks = events(
        server.complete(prompt=["a", "b"], stream=True, stream_options={"include_usage": True}, return_token_ids=True)
    )
    texts, ends, prompts = ["", ""], [], {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
            ends += [choice["index"]] if choice["finish_reason"] else []
            if "prompt_token_ids" in choice:
                prompts[choice["index"]] = choice["prompt_token_ids"]
    assert texts == ["xyz", "xyz"]
    assert sorted(ends) == [0, 1]
    assert prompts == {0: [BOS, 97], 1: [BOS, 98]}
    assert chunks[-1]["usage"]["total_tokens"] == 10


def test_a_batch_ends_when_its_client_leaves(server: Running) -> None:
    server.play(hold=True)
    with pytest.raises(httpx.ReadTimeout):
        server.http.post("/v1/completions", json={"prompt": ["a", "b", "c"]}, timeout=0.3)
    assert len(server.fake.handles) == 3
    server.until(lambda: not server.fake.live)


def test_one_failure_fails_the_batch(server: Running) -> None:
    server.play(text="abc", error_at=1)
    assert server.complete(prompt=["a", "b"]).status_code == 500
    server.until(lambda: not server.fake.live)
