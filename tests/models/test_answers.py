"""Reasoning and calls of tools, read from text that comes in whatever pieces."""

from __future__ import annotations

import json
import random

import pytest

from tenure.models.answers import AnswerReader, Style, call_guide, opens_reasoning, read_whole, reasons, style_of
from tenure.types import Part

ARGS = '{"z": 1, "a": {"b": [true, "}]\\" {"]},  "c":null}'
Read = tuple[str, str, list[tuple[str, str]]]

CASES: list[tuple[Style | None, bool, str, Read]] = [
    ("hermes", False, "Just text. <tool", ("", "Just text. <tool", [])),
    (
        "hermes", False, f'Let me see.\n<tool_call>\n{{"name": "f", "arguments": {ARGS}}}\n</tool_call>',
        ("", "Let me see.", [("f", ARGS)]),
    ),
    (
        "hermes", False,
        f'<tool_call>\n{{"name": "f", "arguments": {ARGS}}}\n</tool_call>\n'
        '<tool_call>{"name":"g","arguments":{}}</tool_call>',
        ("", "", [("f", ARGS), ("g", "{}")]),
    ),
    ("hermes", False, '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', ("", "", [("f", '{"a": 1}')])),
    ("hermes", False, '<tool_call>\n{"name": "f"}\n</tool_call> Done.', ("", "Done.", [("f", "{}")])),
    ("hermes", False, '<tool_call>{"x": 1}</tool_call>', ("", '<tool_call>{"x": 1}</tool_call>', [])),
    ("hermes", False, '<tool_call>{"name": "f", "argu', ("", '<tool_call>{"name": "f", "argu', [])),
    ("hermes", False, '<tool_call>{"name": "f", "arguments": {"a": "b', ("", "", [("f", '{"a": "b')])),
    (
        "hermes", True, '<think>\nHm, {"name"} <tool_call>\n</think>\n\n'
        '<tool_call>{"name": "f", "arguments": {}}</tool_call>',
        ('Hm, {"name"} <tool_call>', "", [("f", "{}")]),
    ),
    (None, True, "<think>\na\n\nb\n</think>\n\nAnswer\n", ("a\n\nb", "Answer\n", [])),
    (None, True, "<think>endless", ("endless", "", [])),
    (None, True, "<thinner> no", ("", "<thinner> no", [])),
    (None, True, "  plain", ("", "  plain", [])),
    (None, False, "<think>a</think>b", ("", "<think>a</think>b", [])),
    (
        "mistral", False, f'[TOOL_CALLS][{{"name": "f", "arguments": {ARGS}}}, '
        '{"name": "g", "arguments": {}, "id": "x"}]',
        ("", "", [("f", ARGS), ("g", "{}")]),
    ),
    ("mistral", False, f"[TOOL_CALLS]f[ARGS]{ARGS}[TOOL_CALLS]g[ARGS]{{}}", ("", "", [("f", ARGS), ("g", "{}")])),
    ("mistral", False, "A [list] of {things}", ("", "A [list] of {things}", [])),
    ("llama3", False, f'{{"name": "f", "parameters": {ARGS}}}', ("", "", [("f", ARGS)])),
    (
        "llama3", False, '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}',
        ("", "", [("f", "{}"), ("g", "{}")]),
    ),
    ("llama3", False, '{"nothing": 1}', ("", '{"nothing": 1}', [])),
    ("llama3", False, '{"name": 5} and more', ("", '{"name": 5} and more', [])),
    ("llama3", False, "Hello", ("", "Hello", [])),
]  # fmt: skip


@pytest.mark.parametrize(("style", "thinks", "text", "expected"), CASES, ids=range(len(CASES)))
def test_answers_are_read_the_same_in_whatever_pieces(
    style: Style | None, thinks: bool, text: str, expected: Read
) -> None:
    assert read_whole(text, AnswerReader(style, thinks=thinks)) == expected
    chance = random.Random(len(text))
    for _ in range(60):
        reader = AnswerReader(style, thinks=thinks)
        cuts = sorted(chance.sample(range(len(text) + 1), min(len(text), chance.randrange(1, 8))))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        parts = [part for piece in pieces for part in reader.push(piece)] + reader.finish()
        assert gathered(parts) == expected
    reader = AnswerReader(style, thinks=thinks)
    assert gathered([part for letter in text for part in reader.push(letter)] + reader.finish()) == expected


def gathered(parts: list[Part]) -> Read:
    calls = [[part.text, ""] for part in parts if part.kind == "call"]
    for part in parts:
        if part.kind == "arguments":
            calls[part.call][1] += part.text
    texts = ("".join(part.text for part in parts if part.kind == kind) for kind in ("reasoning", "text"))
    return (*texts, [(name, arguments) for name, arguments in calls])  # type: ignore[return-value]


def test_arguments_come_as_they_are_written() -> None:
    reader = AnswerReader("hermes")
    parts = reader.push('<tool_call>{"name": "f", "arguments": {"a": "x')
    assert [(part.kind, part.text) for part in parts] == [("call", "f"), ("arguments", '{"a": "x')]
    assert [part.text for part in reader.push(" y")] == [" y"]


def test_ids_are_of_the_form_that_templates_take() -> None:
    for style, length in (("mistral", 9), ("hermes", 29)):
        text = "[TOOL_CALLS]f[ARGS]{}" if style == "mistral" else '<tool_call>{"name": "f", "arguments": {}}'
        ids = {AnswerReader(style).push(text)[0].id for _ in range(20)}  # type: ignore[arg-type]
        assert len(ids) == 20
        assert {len(one) for one in ids} == {length}


def test_styles_are_seen_in_the_template() -> None:
    assert style_of(None) is None
    assert style_of("{{ messages }}") is None
    assert style_of("{% if tools %}<tool_call>{% endif %}") == "hermes"
    assert style_of("{{ tools }}[TOOL_CALLS]") == "mistral"
    assert style_of('{{ tools }} {"name": x, "parameters": y}') == "llama3"
    assert style_of("{{ tools }} in an unknown way") is None
    assert reasons("x.split('</think>')")
    assert not reasons("x")
    assert opens_reasoning("<|Assistant|><think>\n")
    assert not opens_reasoning("<think>x</think>\n")


def test_forced_calls_name_their_tools() -> None:
    tools = [{"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}, {"name": "g"}]
    for style in ("hermes", "mistral", "llama3"):
        guide = call_guide(style, tools, marks={"[TOOL_CALLS]": 7})  # type: ignore[arg-type]
        assert guide.kind == "grammar"
        assert '"const": "g"' in guide.text
        assert ("<[7]>" in guide.text) == (style == "mistral")
        json.loads(guide.text.split("%json ")[1])
        single = call_guide(style, tools, marks={}, one=True).text  # type: ignore[arg-type]
        assert {"hermes": "start: one\n", "mistral": '"maxItems": 1', "llama3": "start: call\n"}[style] in single
