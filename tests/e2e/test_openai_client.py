"""The `openai` package works unchanged: chat, stream, n, stop, usage, errors."""

from __future__ import annotations

import openai
import pytest
from tests.e2e.support import Running

QUESTION = [{"role": "user", "content": "Name three colours of the rainbow, one per line."}]


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["smollm2"]


def test_chat(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model="smollm2", messages=QUESTION, max_tokens=24, temperature=0)
    (choice,) = reply.choices
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason in ("stop", "length")
    assert reply.usage is not None
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    assert 0 < reply.usage.completion_tokens <= 24


def test_a_stream_says_the_same_and_carries_the_same_usage(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="smollm2", messages=QUESTION, max_tokens=24, temperature=0)
    stream = client.chat.completions.create(
        model="smollm2",
        messages=QUESTION,
        max_tokens=24,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    text, finishes, usage, receipt = "", [], None, None
    for chunk in stream:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finishes += [choice.finish_reason] if choice.finish_reason else []
        usage = chunk.usage or usage
        receipt = (chunk.model_extra or {}).get("kv") or receipt
    assert text == whole.choices[0].message.content
    assert finishes == [whole.choices[0].finish_reason]
    assert usage is not None
    assert whole.usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, whole.usage.completion_tokens)
    assert receipt is not None
    assert receipt["prompt_tokens"] == receipt["cached_tokens"] + receipt["computed_tokens"]
    assert receipt["cached_tokens"] == usage.prompt_tokens - 1


def test_n_shares_the_prompt_and_counts_it_once(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model="smollm2", messages=QUESTION, max_tokens=12, temperature=0.9, seed=3, n=3
    )
    assert sorted(choice.index for choice in reply.choices) == [0, 1, 2]
    alone = client.chat.completions.create(model="smollm2", messages=QUESTION, max_tokens=1, temperature=0)
    assert reply.usage is not None
    assert alone.usage is not None
    assert reply.usage.prompt_tokens == alone.usage.prompt_tokens
    assert len({choice.message.content for choice in reply.choices}) > 1


def test_the_same_seed_gives_the_same_answer(client: openai.OpenAI) -> None:
    def ask(seed: int) -> str | None:
        reply = client.chat.completions.create(
            model="smollm2", messages=QUESTION, max_tokens=16, temperature=1.2, top_p=0.95, seed=seed
        )
        return reply.choices[0].message.content

    assert ask(11) == ask(11)
    assert ask(11) != ask(12)


def test_stop_strings_end_the_answer_and_do_not_leak(client: openai.OpenAI) -> None:
    free = client.completions.create(model="smollm2", prompt="1 2 3 4 5 6 7 8", max_tokens=24, temperature=0)
    text = free.choices[0].text
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    cut = client.completions.create(
        model="smollm2", prompt="1 2 3 4 5 6 7 8", max_tokens=24, temperature=0, stop=[stop]
    )
    assert cut.choices[0].text == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"


def test_unknown_models_are_refused_by_name(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-9", messages=QUESTION)
    assert caught.value.code == "model_not_found"


def test_what_is_not_built_is_refused_by_name(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="tools"):
        client.chat.completions.create(
            model="smollm2",
            messages=QUESTION,
            tools=[{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        )


def test_tokenize_and_back(server: Running) -> None:
    text = "Grüße, 世界! 🎉"
    ids = server.http.post("/tokenize", json={"prompt": text}).json()["tokens"]
    back = server.http.post("/detokenize", json={"tokens": ids}).json()
    assert back["prompt"] == text


def test_the_banner_says_what_is_served(server: Running) -> None:
    for word in ("smollm2", server.url, "weights", "budget", "fits", "conversation", "curl", "gittins"):
        assert word in server.printed


def test_nothing_is_held_when_nobody_asks(server: Running) -> None:
    server.complete("hello", 4)
    assert server.metric("vllm:num_requests_running") == 0
    assert server.metric("tenure:kv_blocks", state="leased") == 0
    assert server.metric("tenure:leaked_blocks") == 0
