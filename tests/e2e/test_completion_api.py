"""What shapes and tells answers, on the real server with the real model."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from tests.e2e.support import Running

ASK: Any = [{"role": "user", "content": "Describe a person as JSON."}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["kind", "tall", "loud"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def fits(value: Any) -> bool:
    """Whether a value is of SCHEMA."""
    return (
        list(value) == ["name", "age", "tags"]
        and 1 <= len(value["name"]) <= 20
        and type(value["age"]) is int
        and 0 <= value["age"] <= 120
        and 1 <= len(value["tags"]) <= 3
        and set(value["tags"]) <= {"kind", "tall", "loud"}
    )


def valid(client: openai.OpenAI, count: int, seed: int) -> int:
    """How many of `count` answers are JSON of SCHEMA."""
    form: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
    reply = client.chat.completions.create(
        model="smollm2", messages=ASK, response_format=form, n=count, temperature=1.2, seed=seed, max_tokens=400
    )
    return sum(fits(json.loads(choice.message.content or "")) for choice in reply.choices)


def test_json_of_a_schema(client: openai.OpenAI) -> None:
    assert valid(client, 8, 1) == 8


@pytest.mark.full
def test_json_of_a_schema_200_times(client: openai.OpenAI) -> None:
    assert sum(valid(client, 10, seed) for seed in range(20)) == 200


def test_logprobs_are_the_same_streamed_and_not(client: openai.OpenAI) -> None:
    ask: Any = {"model": "smollm2", "messages": ASK, "max_tokens": 12, "temperature": 0, "logprobs": True}
    whole = client.chat.completions.create(**ask, top_logprobs=3).choices[0]
    assert whole.logprobs is not None
    told = whole.logprobs.content or []
    spelled = b"".join(bytes(entry.bytes or []) for entry in told if entry.token != "<|im_end|>")
    assert spelled.decode() == whole.message.content
    for entry in told:
        assert entry.top_logprobs[0].token == entry.token  # greedy
        assert entry.top_logprobs[0].logprob == entry.logprob <= 0
    streamed = [
        entry
        for chunk in client.chat.completions.create(**ask, top_logprobs=3, stream=True)
        for choice in chunk.choices
        if choice.logprobs is not None
        for entry in choice.logprobs.content or []
    ]
    assert streamed == [type(streamed[0]).model_validate(entry.model_dump()) for entry in told]


def test_penalties_and_biases_change_the_answer_and_seeds_repeat_it(server: Running) -> None:
    plain = server.complete("A, B, A, B, A,", 24, return_token_ids=True)["choices"][0]
    banned = plain["token_ids"][0]
    biased = server.complete("A, B, A, B, A,", 24, logit_bias={str(banned): -100}, return_token_ids=True)
    assert banned not in biased["choices"][0]["token_ids"]
    fields = {"repetition_penalty": 1.5, "frequency_penalty": 1.0, "temperature": 0.8, "min_p": 0.05, "seed": 5}
    first, second = (server.complete("A, B, A, B, A,", 24, **fields)["choices"][0]["text"] for _ in range(2))
    assert first == second != plain["text"]


def test_a_batch_says_what_its_prompts_say_alone(server: Running) -> None:
    prompts = ["The sun is", "Water boils at", "Once upon a"]
    alone = [server.complete(prompt, 8) for prompt in prompts]
    together = server.complete(prompts, 8, echo=True)  # type: ignore[arg-type]
    texts = [choice["text"] for choice in together["choices"]]
    assert texts == [p + one["choices"][0]["text"] for p, one in zip(prompts, alone, strict=True)]
    assert together["usage"]["prompt_tokens"] == sum(one["usage"]["prompt_tokens"] for one in alone)


def test_a_prompt_is_scored_without_an_answer(server: Running) -> None:
    """`max_tokens` 0 with `echo`: what the same prompt says with an answer behind it, and nothing of the answer."""
    fields = {"echo": True, "logprobs": 2}
    scored = server.complete("The sun is a star.", 0, **fields)
    longer = server.complete("The sun is a star.", 3, **fields)
    (choice,), size = scored["choices"], scored["usage"]["prompt_tokens"]
    assert (choice["text"], choice["finish_reason"]) == ("The sun is a star.", "length")
    for name, told in choice["logprobs"].items():
        assert told == longer["choices"][0]["logprobs"][name][:size]
        assert len(told) == size
    assert (scored["usage"]["completion_tokens"], scored["kv"]["context_used"]) == (0, size)
    assert (scored["timings"]["predicted_n"], scored["kv"]["limit_cause"]) == (0, "max_tokens")
    plan = server.http.post("/v1/kv/plan", json={"prompt": "The sun is a star.", "echo": True, "max_tokens": 0}).json()
    assert (plan["fits_now"], plan["answer"]["tokens"]) == (True, 0)


def test_what_cannot_be_is_refused_before_the_engine_hears_of_it(server: Running) -> None:
    before = server.http.get("/v1/kv").json()["steps"]
    for field, value, word in (
        ("guided_json", {"type": "integer", "minimum": 2, "maximum": 1}, "Unsatisfiable"),
        ("guided_json", {"enum": ["x" * 300_000]}, "262144"),
        ("guided_regex", "(", "regex"),
        ("guided_grammar", "start: nothing", "nothing"),
        ("tools", [{"type": "function", "function": {"name": "f"}}], "template"),
    ):
        reply = server.http.post("/v1/chat/completions", json={"messages": ASK, field: value})
        error = reply.json()["error"]
        assert (reply.status_code, error["param"]) == (400, field)
        assert word in error["message"]
    assert server.http.get("/v1/kv").json()["steps"] == before
