"""Cases L1, L3 and L5 of shared/cases: over-long prompts, on models with large and small windows; windows that fill."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.support import Running, pool_bytes, prompt_ids, serving
from tests.models.harness import tiny_tokenizer, write_gguf
from tests.models.test_loader import random_model

CONTEXT = 1024


@pytest.fixture(scope="module")
def small() -> Iterator[Running]:
    with serving("--max-model-len", str(CONTEXT), "--kv-cache-memory-bytes", pool_bytes(4 * CONTEXT)) as running:
        yield running


def test_l1_a_prompt_of_five_contexts_is_refused_with_the_numbers(small: Running) -> None:
    filler = "The weather was fine and nobody said anything of note. " * 600
    question = f"The code word is heliotrope. {filler} What is the code word?"
    reply = small.http.post(
        "/v1/chat/completions", json={"messages": [{"role": "user", "content": question}], "max_tokens": 16}
    )
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["prompt_tokens"] > 5 * CONTEXT
    assert error["requested_tokens"] == error["prompt_tokens"] + 16
    assert error["limit"] == CONTEXT
    small.complete("still alive", 1)


def test_l3_models_with_other_windows_refuse_alike(small: Running, tmp_path: Path) -> None:
    """The embedded model was made for 8192 tokens, this one for little more than what both are served with."""
    path = tmp_path / "tiny.gguf"
    write_gguf(path, random_model(max_position_embeddings=CONTEXT + 8), "F32", tiny_tokenizer())
    ids = [3 + at % 250 for at in range(2 * CONTEXT)]  # both know these
    asks: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"prompt": ids, "max_tokens": 4}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a b c d e f " * CONTEXT}], "max_tokens": 4},
        ),
        ("/v1/embeddings", {"input": ids}),
    ]
    told = []
    with serving(str(path), "--max-model-len", str(CONTEXT)) as other:
        for server in (small, other):
            replies = [server.http.post(route, json=body) for route, body in asks]
            errors = [reply.json()["error"] for reply in replies]
            told.append([(r.status_code, e["code"], e.get("limit")) for r, e in zip(replies, errors, strict=True)])
            server.complete([3, 4, 5], 1)
    assert told[0] == told[1]
    assert told[0][:2] == [(400, "context_length_exceeded", CONTEXT)] * 2
    assert told[0][2][0] == 501  # no embeddings, and both say so


def test_l5_a_window_that_fills_mid_stream_ends_with_length(small: Running) -> None:
    body = {"prompt": prompt_ids(CONTEXT - 16), "ignore_eos": True, "stream": True, "temperature": 0}
    events = []
    with small.http.stream("POST", "/v1/completions", json=body) as reply:
        assert reply.status_code == 200
        events = [line[6:] for line in reply.iter_lines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    finishes = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]
    assert finishes == ["length"]
    receipt = next(chunk["kv"] for chunk in reversed(chunks) if chunk.get("kv"))
    assert receipt["limit_cause"] == "context"
    assert receipt["context_used"] == receipt["context_limit"] == CONTEXT


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("tokens", [CONTEXT, CONTEXT + 1, 3 * CONTEXT])
def test_l5_an_overflow_before_the_stream_is_a_real_400(small: Running, stream: bool, tokens: int) -> None:
    body = {"prompt": prompt_ids(tokens), "max_tokens": 1, "stream": stream}
    reply = small.http.post("/v1/completions", json=body)
    assert reply.status_code == 400
    assert reply.headers["content-type"].startswith("application/json")
    assert reply.json()["error"]["code"] == "context_length_exceeded"
    assert reply.json()["error"]["prompt_tokens"] == tokens


def test_more_tokens_than_are_left_are_clamped_and_told(small: Running) -> None:
    answer = small.complete(prompt_ids(CONTEXT - 8, seed=2), 10**6, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 8
    assert answer["kv"]["max_tokens"] == {"requested": 10**6, "granted": 8}
    assert answer["kv"]["limit_cause"] in ("context", "max_tokens")
