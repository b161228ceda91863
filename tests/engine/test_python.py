"""The engine as a library: what the documentation promises, on the real model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import tenure
from engine.harness import english, model, watched
from tenure.engine import Engine, EngineSettings
from tenure.errors import InvalidRequest, RequestError
from tenure.models.template import ChatTemplate

CHAT = [{"role": "user", "content": "Name a colour."}]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with tenure.Engine.load(memory="400MiB", settings=EngineSettings(canary_steps=16)) as engine:
        yield engine
        engine.check()
        assert engine.stats().pool.leased == 0


def test_text_in_text_out(engine: Engine) -> None:
    result = engine.generate("The capital of France is", max_tokens=8)
    assert "Paris" in result.text
    assert result.usage.completion_tokens == len(result.tokens) == 8
    assert result.answers[0].finish == "length"
    assert result.receipt.prompt_tokens == result.receipt.cached_tokens + result.receipt.computed_tokens
    assert engine.decode(result.tokens) == result.text


def test_token_ids_in_and_out_are_those_of_the_server(engine: Engine) -> None:
    prompt = english(40)
    with watched(model()) as other:
        ask = other.ask(prompt, 12)
        other.run(ask)
        expected = [token for token, _ in other.trace(ask)]
    assert list(engine.generate(prompt, max_tokens=12, ignore_eos=True).tokens) == expected


def test_a_second_turn_is_reused(engine: Engine) -> None:
    first = engine.chat(CHAT, max_tokens=12, session_id="s")
    more = [*CHAT, {"role": "assistant", "content": first.text}, {"role": "user", "content": "Another one."}]
    second = engine.chat(more, max_tokens=4, session_id="s")
    assert second.receipt.cached_tokens >= first.receipt.prompt_tokens + len(first.tokens) - 1
    assert second.receipt.miss is None or second.receipt.miss.at_token >= second.receipt.cached_tokens


def test_streams_add_up(engine: Engine) -> None:
    whole = engine.generate("Once upon a time", max_tokens=20, n=2, temperature=0.8, seed=4)
    stream = engine.stream("Once upon a time", max_tokens=20, n=2, temperature=0.8, seed=4)
    with pytest.raises(RuntimeError, match="not been read"):
        _ = stream.result
    pieces = list(stream)
    assert [answer.tokens for answer in stream.result.answers] == [answer.tokens for answer in whole.answers]
    assert "".join(piece.text for piece in pieces if piece.index == 1) == whole.answers[1].text
    assert len({answer.tokens for answer in whole.answers}) == 2


def test_a_stream_may_be_left(engine: Engine) -> None:
    for piece in engine.stream(CHAT, ignore_eos=True):
        assert piece.text
        break
    stream = engine.stream("Go on", ignore_eos=True)
    stream.cancel()
    list(stream)
    with pytest.raises(RuntimeError, match="cancelled"):
        _ = stream.result
    engine.check()


def test_asyncio(engine: Engine) -> None:
    async def main() -> None:
        texts = await asyncio.gather(*(engine.agenerate(f"{i} plus {i} is", max_tokens=6) for i in range(5)))
        assert [result.text for result in texts] == [
            engine.generate(f"{i} plus {i} is", max_tokens=6).text for i in range(5)
        ]
        stream = engine.astream(CHAT, max_tokens=6)
        said = "".join([piece.text async for piece in stream])
        assert said == stream.result.text == (await engine.achat(CHAT, max_tokens=6)).text
        task = asyncio.create_task(engine.agenerate("For ever", ignore_eos=True))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())


def test_logits_and_logprobs(engine: Engine) -> None:
    answer = engine.generate("One two three", max_tokens=5, logits=True, logprobs=2).answers[0]
    logits = answer.logits
    assert logits is not None
    assert logits.shape == (5, engine.model.shape.vocab)
    assert logits.argmax(axis=1).tolist() == list(answer.tokens)
    norm = np.log(np.exp(logits.astype(np.float64)).sum(axis=1))
    assert [told.logprob for told in answer.logprobs] == pytest.approx(list(logits.max(axis=1) - norm), abs=1e-4)
    assert engine.generate("One two three", max_tokens=2).answers[0].logits is None


def test_guides(engine: Engine) -> None:
    schema = {"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}}, "required": ["colour"]}
    for seed in range(5):
        said = engine.chat(CHAT, json_schema=schema, temperature=1.0, seed=seed).text
        assert json.loads(said)["colour"] in ("red", "blue")
    assert engine.generate("Yes or no?", choices=["yes", "no"]).text in ("yes", "no")
    assert engine.generate("A number:", regex="[0-9]{3}").text.isdecimal()


def test_tools_and_reasoning_are_read() -> None:
    template = "{{ tools }}<tool_call></think>{{ messages[0].content }}"
    loaded = replace(model(), template=ChatTemplate(template, {}))
    call = r'<tool_call>\n[{]"name": "f", "arguments": [{]"b": 1,  "a": 2[}][}]\n</tool_call>'
    with Engine(loaded, EngineSettings(kv_cache_bytes=64 << 20)) as engine:
        written = rf"<think>\nHm[.]\n</think>\n\nSo:\n{call}"
        tool = {"type": "function", "function": {"name": "f"}}
        result = engine.chat(CHAT, tools=[tool], regex=written)
        answer = result.answers[0]
        assert (answer.reasoning, answer.text) == ("Hm.", "So:")
        assert [(call.name, call.arguments) for call in answer.calls] == [("f", '{"b": 1,  "a": 2}')]
        assert len(answer.tokens) == result.usage.completion_tokens


def test_wrong_use_is_refused(engine: Engine) -> None:
    for prompt in ("", [], [1, "a"], [10**9]):
        with pytest.raises(RequestError):
            engine.generate(prompt)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="max_token: there is no such option"):
        engine.generate("x", max_token=3)  # type: ignore[call-arg]
    with pytest.raises(InvalidRequest, match="only one of"):
        engine.generate("x", regex="a", choices=["b"])
    with pytest.raises(InvalidRequest, match="Unsatisfiable"):
        engine.generate("x", json_schema={"enum": []})


WRONG: list[tuple[str, tuple[Any, ...]]] = [
    ("temperature", ("hot", -1, float("nan"), True, 10**6)), ("top_p", ("x", 0, 2.0)), ("top_k", (-5, 1.5)),
    ("seed", (1.5, 2**70)), ("max_tokens", ("3", 2.5, 0, True)), ("n", ("2", 0, 10**6)), ("min_p", ("x", 2)),
    ("logprobs", (-1, "x")), ("prompt_logprobs", (-3, "x")), ("repetition_penalty", (0, "x")),
    ("presence_penalty", ("x",)), ("frequency_penalty", (float("inf"),)), ("min_tokens", ("x", -1)),
    ("logit_bias", ({"a": 1}, {1: "x"}, [1], {10**9: 1}, {-1: 1})), ("stop", (5, [1], [""], "", ["x"] * 10**6)),
    ("stop_token_ids", (["x"], 5, [10**9], [-1])), ("ignore_eos", ("x", 1)), ("logits", ("x",)), ("priority", ("x",)),
    ("session_id", (5, "")), ("cache_salt", (5,)), ("json_schema", (5,)), ("regex", (5, "")), ("grammar", (5,)),
    ("choices", (5, [1], [""], "ab")), ("tools", (5, [1])), ("template", (5,)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "values"), WRONG, ids=lambda value: value if isinstance(value, str) else "")
def test_wrong_options_are_told_by_name_and_harm_nobody(engine: Engine, name: str, values: tuple[Any, ...]) -> None:
    for value in values:
        with pytest.raises(InvalidRequest) as refused:
            engine.generate("Hello", **{"max_tokens": 2, name: value})
        assert refused.value.param == name
        assert len(str(refused.value)) < 300
    assert engine.health().alive
    assert engine.generate("Hello", max_tokens=2, **{name: None} if name != "max_tokens" else {}).tokens


def test_numbers_of_the_engine(engine: Engine) -> None:
    stats = engine.stats()
    assert stats.budget_bytes <= 400 << 20
    assert stats.pool.total == stats.pool.leased + stats.pool.cached + stats.pool.free
    assert stats.leaked_blocks == 0
