"""Tools and reasoning over HTTP: what is refused, what the template gets, and what clients get back."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from tests.server.conftest import Running
from tests.server.test_sampling import events

from tenure.types import Guide, Part

TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
OTHER = {"type": "function", "function": {"name": "other"}}


class Marked:
    """Reads `{…}` as a call of f, `(…)` as reasoning, and holds back every blank."""

    def __init__(self) -> None:
        self._kind: Any = "text"
        self._calls = -1
        self._held = ""

    def push(self, text: str) -> list[Part]:
        parts = []
        for letter in text:
            if letter in "({":
                self._kind = "reasoning" if letter == "(" else "arguments"
                if letter == "{":
                    self._calls += 1
                    parts.append(Part("call", "f", self._calls, f"id{self._calls}"))
            elif letter in ")}":
                self._kind = "text"
            elif letter == " ":
                self._held = " "
            else:
                parts.append(Part(self._kind, self._held + letter, max(self._calls, 0)))
                self._held = ""
        return parts

    def finish(self) -> list[Part]:
        return [Part("text", self._held)] if self._held else []


def can(server: Running) -> None:
    """From now on the fake model has tools and reasons."""
    server.fake.card = replace(server.fake.card, calls=True)
    server.fake.reader = Marked


def test_without_a_template_for_tools_they_are_refused(server: Running) -> None:
    for body, param in (
        ({"tools": [TOOL]}, "tools"),
        ({"tools": [TOOL], "tool_choice": "auto"}, "tools"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}]},
            "messages[0].tool_calls",
        ),
    ):
        error = server.chat(**body).json()["error"]
        assert (error["param"], error["code"]) == (param, "invalid_request")
        assert "template" in error["message"]
    assert server.chat(tools=[TOOL], tool_choice="none").status_code == 200
    assert server.fake.offered == []


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": 5}, "tools"),
        ({"tools": [TOOL] * 129}, "tools"),
        ({"tools": [5]}, "tools[0]"),
        ({"tools": [TOOL, {"type": "retrieval"}]}, "tools[1]"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": 5}}]},
            "tools[0].function.parameters",
        ),
        ({"tools": [TOOL], "parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"tools": [TOOL], "parallel_tool_calls": 0}, "parallel_tool_calls"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "nobody"}}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "required", "guided_regex": "a"}, "tool_choice"),
        (
            {"tools": [{"type": "function", "function": {"name": "impossible"}}], "tool_choice": "required"},
            "tools",
        ),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}]},
            "messages[0].tool_calls",
        ),
        ({"messages": [{"role": "tool", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": 5}]}, "messages[0].tool_call_id"),
    ],
    ids=str,
)
def test_malformed_tools_are_named(server: Running, body: dict[str, Any], param: str) -> None:
    can(server)
    reply = server.chat(**body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


def test_what_is_nested_too_deeply_is_refused(server: Running) -> None:
    can(server)
    for depth in (90, 120, 500, 900, 980, 985, 990, 2000):
        deep = '{"a":' * depth + "1" + "}" * depth
        tool = f'[{{"type": "function", "function": {{"name": "f", "parameters": {deep}}}}}]'
        for field, value in (("guided_json", deep), ("structured_outputs", f'{{"json": {deep}}}'), ("tools", tool)):
            body = f'{{"messages": [{{"role": "user", "content": "x"}}], "{field}": {value}}}'
            reply = server.http.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
            assert reply.status_code == (200 if depth == 90 else 400), (depth, field, reply.text)
            assert depth == 90 or "deep" in reply.json()["error"]["message"]


def test_tools_and_their_history_reach_the_template(server: Running) -> None:
    can(server)
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"b": 1,  "a": 2}'}}
    messages: list[Any] = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "Hm."},
        {"role": "tool", "content": [{"type": "text", "text": "Sun"}], "tool_call_id": "c1", "name": "f"},
    ]
    assert server.chat(messages=messages, tools=[TOOL, OTHER]).status_code == 200
    assert server.fake.offered == [TOOL, OTHER]
    assert server.fake.rendered == [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [call]},
        {"role": "tool", "content": "Sun", "tool_call_id": "c1", "name": "f"},
    ]
    sampling = server.fake.handles[-1].request.sampling
    assert sampling.marks
    assert sampling.guide is None


def test_what_the_template_is_told(server: Running) -> None:
    assert server.chat(chat_template_kwargs={"enable_thinking": False, "tone": "dry"}).status_code == 200
    assert server.fake.told == {"enable_thinking": False, "tone": "dry"}
    for wrong in ([], {"a b": 1}, {"messages": "x"}, {"x": {}}, {str(i): 1 for i in range(17)}, {"tokenizer": 1}):
        reply = server.chat(chat_template_kwargs=wrong)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "chat_template_kwargs")


def test_tool_choice(server: Running) -> None:
    can(server)
    for choice, offered, guide in (
        ("none", [], None),
        ("auto", [TOOL, OTHER], None),
        ("required", [TOOL, OTHER], Guide("grammar", "get_weather,other")),
        ({"type": "function", "function": {"name": "other"}}, [TOOL, OTHER], Guide("grammar", "other!")),
    ):
        assert server.chat(tools=[TOOL, OTHER], tool_choice=choice).status_code == 200
        assert server.fake.offered == offered
        assert server.fake.handles[-1].request.sampling.guide == guide


def test_one_call_at_most(server: Running) -> None:
    """`parallel_tool_calls: false`: a forced answer is guided to one call, of any other one the first is told."""
    can(server)
    server.chat(tools=[TOOL, OTHER], tool_choice="required", parallel_tool_calls=False)
    assert server.fake.handles[-1].request.sampling.guide == Guide("grammar", "get_weather,other!")
    server.play(text="Hi {a:1}{b:2}")
    body: dict[str, Any] = {"tools": [TOOL, OTHER], "parallel_tool_calls": False}
    whole = server.chat(**body).json()["choices"][0]
    assert [call["function"]["arguments"] for call in whole["message"]["tool_calls"]] == [" a:1"]
    assert (whole["message"]["content"], whole["finish_reason"]) == ("Hi", "tool_calls")
    told = [
        call
        for chunk in events(server.chat(stream=True, **body))
        for choice in chunk["choices"]
        for call in choice["delta"].get("tool_calls", [])
    ]
    assert {call["index"] for call in told} == {0}
    assert "".join(call["function"]["arguments"] for call in told) == " a:1"
    assert len(server.chat(tools=[TOOL], parallel_tool_calls=True).json()["choices"][0]["message"]["tool_calls"]) == 2


def test_reasoning_and_calls_streamed_and_not(server: Running) -> None:
    can(server)
    server.play(text="(why now)Hi é {a:1}{}")
    body: dict[str, Any] = {"tools": [TOOL], "n": 2, "logprobs": True, "return_token_ids": True}
    whole = server.chat(**body).json()
    chunks = events(server.chat(stream=True, **body))
    for index in range(2):
        choice = whole["choices"][index]
        message = choice["message"]
        assert choice["finish_reason"] == "tool_calls"
        assert message == {
            "role": "assistant", "content": "Hi é", "refusal": None, "reasoning_content": "why now",
            "tool_calls": [
                {"id": "id0", "type": "function", "function": {"name": "f", "arguments": " a:1"}},
                {"id": "id1", "type": "function", "function": {"name": "f", "arguments": ""}},
            ],
        }  # fmt: skip
        content, reasoning, told, ids = "", "", [], []
        calls: list[Any] = []
        for part in (c for chunk in chunks for c in chunk["choices"] if c["index"] == index):
            delta = part["delta"]
            content += delta.get("content") or ""
            reasoning += delta.get("reasoning_content", "")
            told += part["logprobs"]["content"] if part["logprobs"] else []
            ids += part.get("token_ids", [])
            for call in delta.get("tool_calls", []):
                if "id" in call:
                    assert call["index"] == len(calls)
                    calls.append({"id": call["id"], "type": call["type"], "function": dict(call["function"])})
                else:
                    calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
        assert (content, reasoning, calls) == ("Hi é", "why now", message["tool_calls"])
        assert told == choice["logprobs"]["content"]
        assert ids == choice["token_ids"]
        ends = [c["finish_reason"] for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert [end for end in ends if end] == ["tool_calls"]


def test_an_answer_cut_short_says_so(server: Running) -> None:
    can(server)
    server.play(text="{a:1}")
    reply = server.chat(tools=[TOOL], max_tokens=3).json()["choices"][0]
    assert reply["finish_reason"] == "length"
    assert reply["message"]["tool_calls"][0]["function"]["arguments"] == "a:"
    assert reply["message"]["content"] is None
    last = events(server.chat(tools=[TOOL], max_tokens=3, stream=True))[-1]
    assert last["choices"][0]["finish_reason"] == "length"
    assert last["kv"]["prompt_tokens"] > 0


def test_the_openai_client_reads_calls(server: Running) -> None:
    can(server)
    server.play(text="{x}")
    tools: Any = [TOOL]
    messages: Any = [{"role": "user", "content": "Hi"}]
    reply = server.client.chat.completions.create(model="fake", messages=messages, tools=tools)
    call = (reply.choices[0].message.tool_calls or [])[0]
    assert json.loads(json.dumps(call.model_dump()))["function"] == {"name": "f", "arguments": "x"}
    with server.client.chat.completions.stream(model="fake", messages=messages, tools=tools) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.tool_calls is not None
    assert final.choices[0].finish_reason == "tool_calls"
