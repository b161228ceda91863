"""Tools and reasoning on the real model, under templates written for them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from engine.harness import model, text_of, watched
from tenure.engine import Engine
from tenure.engine.chats import Chats
from tenure.errors import InvalidRequest
from tenure.models.answers import read_whole
from tenure.models.template import ChatTemplate
from tenure.server.pins import read_pins
from tenure.server.serves import Prompt
from tenure.types import Guide, Request, Sampling, Scope

TEMPLATE = r"""
{%- if tools %}<|im_start|>system
Tools: {{ tools | map(attribute='function') | map('tojson') | join('\n') }}
Call as <tool_call>{"name": …, "arguments": {…}}</tool_call><|im_end|>
{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}<|im_start|>user
<tool_response>{{ m.content }}</tool_response><|im_end|>
{% else %}<|im_start|>{{ m.role }}
{%- set content = m.content or '' %}
{{ '\n' + content.split('</think>')[-1].lstrip('\n') }}
{%- for call in m.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"unit": {"enum": ["C", "F"]}, "city": {"type": "string", "maxLength": 12}},
            "required": ["unit", "city"],
            "additionalProperties": False,
        },
    },
}
ASK: list[dict[str, Any]] = [{"role": "user", "content": "What is the weather in Rome?"}]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    loaded = model()
    special = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    with watched(replace(loaded, template=ChatTemplate(TEMPLATE, special)), 400) as watching:
        yield watching.engine


def ask(engine: Engine, prompt: Prompt, name: str, **fields: Any) -> tuple[str, Any]:
    """The answer's text and the Done of a request in session s."""
    scope = engine.scope(tenant="", salt="")
    sampling = Sampling(marks=True, **fields)
    request = Request(name, prompt.tokens, scope, sampling, session_id="s", spans=prompt.spans)
    pieces, done = engine.submit(request).result()
    return text_of(pieces), done


def render(engine: Engine, messages: Sequence[dict[str, Any]], session: str | None = "s") -> Prompt:
    scope = engine.scope(tenant="", salt="")
    return engine.render(messages, session_id=session, scope=scope, tools=[TOOL])


def test_the_default_model_has_no_tools() -> None:
    chats = Chats(model().template, model().tokenizer)
    assert chats.style is None
    with pytest.raises(InvalidRequest, match="template has none"):
        chats.guide([TOOL])
    assert chats.read("<tool_call>") == ("", "<tool_call>", ())


def test_a_forced_call_comes_back_word_for_word(engine: Engine) -> None:
    prompt = render(engine, ASK)
    assert prompt.reader is not None
    said, done = ask(engine, prompt, "a", guide=engine.call_guide([TOOL]), temperature=0.9, seed=5, max_tokens=200)
    assert done.usage.completion_tokens < 200
    reasoning, text, calls = read_whole(said, prompt.reader())  # type: ignore[arg-type]
    assert (reasoning, text) == ("", "")
    assert calls
    for name, arguments in calls:
        assert name == "get_weather"
        assert list(json.loads(arguments)) == ["unit", "city"]
    sent: list[dict[str, Any]] = [
        {"id": "x", "type": "function", "function": {"name": name, "arguments": arguments}} for name, arguments in calls
    ]
    more = [*ASK, {"role": "assistant", "content": None, "tool_calls": sent}, {"role": "tool", "content": "Sun"}]
    second = render(engine, more)
    assert second.tokens[: len(prompt.tokens)] == prompt.tokens
    _, again = ask(engine, second, "b", max_tokens=4)
    assert again.receipt.cached_tokens >= len(prompt.tokens) + done.usage.completion_tokens - 1
    # Without the session the template writes the call, in the order of the arguments that came back.
    swapped = dict(reversed(json.loads(calls[0][1]).items()))
    sent[0]["function"]["arguments"] = json.dumps(swapped)
    plain = engine.decode(render(engine, more, None).tokens)
    assert f'"arguments": {json.dumps(swapped)}' in plain


@pytest.mark.parametrize("seed", range(4))
def test_a_single_call_is_a_single_call(engine: Engine, seed: int) -> None:
    prompt = render(engine, ASK, None)
    assert prompt.reader is not None
    guide = engine.call_guide([TOOL], one=True)
    said, done = ask(engine, prompt, f"one-{seed}", guide=guide, temperature=1.2, seed=seed, max_tokens=200)
    _, text, calls = read_whole(said, prompt.reader())  # type: ignore[arg-type]
    assert (text, [name for name, _ in calls], done.receipt.limit_cause) == ("", ["get_weather"], None)


def test_reasoning_that_comes_back_is_reused_and_what_is_stripped_is_told(engine: Engine) -> None:
    messages = [{"role": "user", "content": "One plus one?"}]
    prompt = render(engine, messages)
    guide = Guide("regex", r"<think>\n[a-z ]{60,90}\n</think>\n\n[a-z ]{20,40}\.")
    said, done = ask(engine, prompt, "c", guide=guide, temperature=0.8, seed=1)
    reasoning, text, _ = read_whole(said, prompt.reader())  # type: ignore[arg-type, misc]
    assert reasoning
    assert text.endswith(".")
    follow = {"role": "user", "content": "And two plus two?"}
    kept = [*messages, {"role": "assistant", "content": text, "reasoning_content": reasoning}, follow]
    _, first = ask(engine, render(engine, kept), "d", max_tokens=2)
    assert first.receipt.cached_tokens >= len(prompt.tokens) + done.usage.completion_tokens - 1
    stripped = [*messages, {"role": "assistant", "content": text}, follow]
    _, second = ask(engine, render(engine, stripped), "e", max_tokens=2)
    assert second.receipt.miss is not None
    assert (second.receipt.miss.reason, second.receipt.miss.message) == ("reasoning_stripped", 1)
    assert second.receipt.cached_tokens < first.receipt.cached_tokens


def test_calls_that_are_no_json_or_far_too_deep_come_back_as_they_are(engine: Engine) -> None:
    for arguments in ("{", "", "[1]", '{"a":' * 100_000 + "1" + "}" * 100_000):
        call = {"function": {"name": "f", "arguments": arguments}}
        prompt = render(engine, [*ASK, {"role": "assistant", "tool_calls": [call]}], None)
        assert prompt.tokens
    deep: Any = 1
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(InvalidRequest):
        engine.render(ASK, session_id=None, scope=Scope("m"), tools=[{"function": {"name": "f", "parameters": deep}}])


def test_prompts_that_open_reasoning_are_seen() -> None:
    template = ChatTemplate("{{ messages[0].content }}</think>{% if add_generation_prompt %}<think>\n{% endif %}", {})
    prompt = Chats(template, model().tokenizer).render(ASK, {}, None, Scope("m"))
    assert prompt.reader is not None
    assert read_whole("Hm.\n</think>\nYes", prompt.reader()) == ("Hm.", "Yes", [])  # type: ignore[arg-type]


def test_a_part_is_pinned_up_to_its_end_in_a_real_template() -> None:
    """Where the part ends among the tokens of the embedded model's prompt."""
    chats, tokenizer = Chats(model().template, model().tokenizer), model().tokenizer
    texts = ["A long document about lighthouses and storms. " * 9, "And what of the harbour?", "Say."]
    parts = [{"type": "text", "text": text} for text in texts]
    parts[0]["cache_control"] = parts[1]["cache_control"] = {"type": "ephemeral"}  # type: ignore[assignment]
    scope = Scope("f")
    prompt = chats.render([{"role": "user", "content": "\n".join(texts)}], {}, None, scope)

    def cut(number: int, content: str) -> Sequence[int]:
        return chats.render([{"role": "user", "content": content}], {}, None, scope).tokens

    pins = read_pins([{"role": "user", "content": parts}], prompt, cut)
    ends = [tokenizer.decode(prompt.tokens[: pin.end_token], skip_special=False) for pin in pins]
    assert [pin.note for pin in pins] == [None, None]
    assert ends[0].endswith(texts[0].rstrip()) or ends[0].endswith(texts[0])
    assert ends[1].endswith(texts[1])
