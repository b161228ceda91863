"""What is in an answer besides text: reasoning, and calls of tools in the format the model was trained to write.

    hermes    <tool_call>{"name": …, "arguments": {…}}</tool_call>          (Qwen, Hermes, many others)
    mistral   [TOOL_CALLS][{"name": …, "arguments": {…}}, …]   or   [TOOL_CALLS]name[ARGS]{…}
    llama3    {"name": …, "parameters": {…}}, the whole answer              (also after <|python_tag|>)
    reasoning <think>…</think> before the rest

A reader takes text as it comes and gives parts that are safe to show. Arguments are passed on letter by letter as the
model wrote them: nothing is parsed and written again, so their order and their spaces stay.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

from tenure.types import Guide, Part

Style = Literal["hermes", "mistral", "llama3"]
OPENS: dict[Style, str] = {"hermes": "<tool_call>", "mistral": "[TOOL_CALLS]", "llama3": "<|python_tag|>"}
_CLOSE = "</tool_call>"
_ARGS = "[ARGS]"
_THINK, _THOUGHT = "<think>", "</think>"
SHOWN = (*OPENS.values(), _CLOSE, _ARGS, _THINK, _THOUGHT)
"""Marks that a reader must see even where they are control tokens, which the text of an answer leaves out."""

_NAME = re.compile(r'\s*\{\s*"name"\s*:\s*"((?:[^"\\]|\\.)*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*')
_LETTERS = string.ascii_letters + string.digits


def style_of(template: str | None) -> Style | None:
    """The format of calls that a chat template was written for; None when it knows no tools."""
    if template is None or "tools" not in template:
        return None
    if OPENS["mistral"] in template:
        return "mistral"
    if OPENS["hermes"] in template:
        return "hermes"
    return "llama3" if '"parameters"' in template or OPENS["llama3"] in template else None


def reasons(template: str | None) -> bool:
    """Whether a chat template was written for answers that begin with reasoning."""
    return template is not None and _THOUGHT in template


def opens_reasoning(prompt: str) -> bool:
    """Whether a rendered prompt ends inside reasoning that it has opened itself."""
    return prompt.rstrip().endswith(_THINK)


class AnswerReader:
    """Reads one answer. `style` None: calls are text. `thinks`: it may begin with reasoning; `opened`: it has begun."""

    def __init__(self, style: Style | None, *, thinks: bool = False, opened: bool = False) -> None:
        self._style = style
        self._held = ""
        self._calls = 0
        self._object: _Object | None = None
        self._mode: Literal["start", "reasoning", "text", "calls"] = "start"
        self._thinks = thinks
        self._said = False
        if opened:
            self._mode = "reasoning"

    def push(self, text: str) -> list[Part]:
        """The parts that `text` completes."""
        self._held += text
        return self._read(final=False)

    def finish(self) -> list[Part]:
        """What was held back, at the end of the answer."""
        return self._read(final=True)

    def _read(self, final: bool) -> list[Part]:
        parts: list[Part] = []
        while True:
            before = (self._mode, len(self._held))
            if self._mode == "start":
                self._start(final)
            elif self._mode == "reasoning":
                self._reasoning(parts, final)
            elif self._mode == "text":
                self._text(parts, final)
            else:
                self._call(parts, final)
            if (self._mode, len(self._held)) == before:
                return [part for part in parts if part.text or part.kind == "call"]

    def _start(self, final: bool) -> None:
        """Is it reasoning, a call without a mark, or text? Decided as soon as it can be."""
        lead = self._held.lstrip()
        if not lead and not final:
            return
        if self._thinks and lead.startswith(_THINK):
            self._mode, self._held = "reasoning", lead[len(_THINK) :]
        elif self._thinks and lead and _THINK.startswith(lead) and not final:
            return
        elif self._style == "llama3":
            begun = "".join(lead.split())[: len('{"name":')]
            if begun == '{"name":':
                self._mode, self._held = "calls", lead
            elif final or not '{"name":'.startswith(begun):
                self._mode = "text"
        else:
            self._mode = "text"

    def _reasoning(self, parts: list[Part], final: bool) -> None:
        """Everything up to the closing mark, without the line breaks next to the marks."""
        if not self._said:
            self._held = self._held.lstrip("\n")
        thought, mark, rest = self._held.partition(_THOUGHT)
        if mark or final:
            parts.append(Part("reasoning", thought.rstrip("\n")))
            self._held, self._mode, self._said = rest.lstrip("\n"), "text", False
            return
        safe = self._held[: len(self._held) - _overlap(self._held, _THOUGHT)]
        parts.append(self._give("reasoning", len(safe.rstrip("\n"))))

    def _text(self, parts: list[Part], final: bool) -> None:
        if not self._said and self._thinks:
            self._held = self._held.lstrip("\n")
        if self._style is None:
            parts.append(self._give("text", len(self._held)))
            return
        opening = OPENS[self._style]
        at = self._held.find(opening)
        if at >= 0:
            parts.append(Part("text", self._held[:at].rstrip() if self._style != "llama3" else self._held[:at]))
            self._held, self._mode = self._held[at + len(opening) :], "calls"
            return
        safe = self._held[: len(self._held) - _overlap(self._held, opening)]
        parts.append(self._give("text", len(self._held) if final else len(safe.rstrip())))

    def _give(self, kind: Literal["text", "reasoning"], length: int) -> Part:
        given, self._held = self._held[:length], self._held[length:]
        self._said = self._said or bool(given)
        return Part(kind, given)

    def _call(self, parts: list[Part], final: bool) -> None:
        """Calls until the answer ends, or until other text comes."""
        if self._object is None:
            self._object = self._next_call(final)
        call = self._object
        if call is None:
            return
        known = call.name is not None
        self._held = self._held[call.feed(self._held) :]
        if call.name is not None:
            parts += [] if known else [Part("call", call.name, self._calls, self._id())]
            parts.append(Part("arguments", call.take(), self._calls))
        elif call.closed and (found := call.fallback()) is not None:
            parts += [Part("call", found[0], self._calls, self._id()), Part("arguments", found[1], self._calls)]
        elif call.closed or final:  # no call after all
            mark = OPENS[self._style] if self._style is not None and self._style != "llama3" else ""
            parts.append(Part("text", mark + call.text))
            self._object, self._mode = None, "text"
            return
        if call.closed:
            self._calls += 1
            self._object = None

    def _next_call(self, final: bool) -> _Object | None:
        """Step over what stands between two calls; the next one, when it begins. Other text ends the calls."""
        skipped = {"hermes": "", "mistral": ", ", "llama3": "; "}[self._style or "hermes"]
        between = self._held.lstrip(skipped + "\n ")
        marks = {"hermes": (_CLOSE, OPENS["hermes"]), "mistral": (OPENS["mistral"],), "llama3": ()}[
            self._style or "hermes"
        ]
        for mark in marks:
            if between.startswith(mark):
                self._held = between[len(mark) :]
                return self._next_call(final)
        if not final and any(mark.startswith(between) for mark in marks):
            return None
        if self._style == "mistral":
            between = between.lstrip("[, \n")
            name, mark, rest = between.partition(_ARGS)
            if mark and "{" not in name:
                # Written as the other form would be, so that one way reads both.
                self._held = f'{{"name": {json.dumps(name.strip())}, "arguments": {rest}'
                return _Object(bare=True)
            if between.startswith("]"):
                self._held, self._mode = between[1:].lstrip(), "text"
                return None
            if "{" not in name and not final:
                return None
        if between.startswith("{"):
            self._held = between
            return _Object()
        if between:
            self._held, self._mode = between, "text"
        return None

    def _id(self) -> str:
        if self._style == "mistral":  # its templates refuse any other form
            return "".join(secrets.choice(_LETTERS) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"


class _Object:
    """One JSON object `{"name": …, "arguments": {…}}` as it comes in."""

    def __init__(self, bare: bool = False) -> None:
        """`bare`: the outer object has no closing brace of its own."""
        self.text = ""
        self.name: str | None = None
        self.closed = False
        self._bare = bare
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._new = ""
        self._in_arguments = False

    def feed(self, text: str) -> int:
        """Take in characters up to the object's end; how many."""
        for used, letter in enumerate(text):
            if letter == "{" and self._depth == 1 and not self._in_string and self.name is None:
                self._begin_arguments()
            self.text += letter
            if self._in_arguments:
                self._new += letter
            self._step(letter)
            if self._in_arguments and self._depth == 1 and letter == "}":
                self._in_arguments = False
                self.closed = self._bare
            if self._depth == 0 and letter == "}" and not self._in_string:
                self.closed = True
            if self.closed:
                return used + 1
        return len(text)

    def _begin_arguments(self) -> None:
        head = _NAME.fullmatch(self.text)
        if head is not None:
            self.name = json.loads(f'"{head[1]}"')
            self._in_arguments = True

    def _step(self, letter: str) -> None:
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif letter == "\\":
                self._escaped = True
            elif letter == '"':
                self._in_string = False
        elif letter == '"':
            self._in_string = True
        elif letter in "{[":
            self._depth += 1
        elif letter in "}]":
            self._depth -= 1

    def take(self) -> str:
        """The arguments' text since the last time."""
        new, self._new = self._new, ""
        return new

    def fallback(self) -> tuple[str, str] | None:
        """Name and arguments of a whole object in whatever order; None when it is no call."""
        try:
            value = json.loads(self.text)
        except ValueError:
            return None
        name = value.get("name") if isinstance(value, dict) else None
        if not isinstance(name, str):
            return None
        arguments = value.get("arguments", value.get("parameters", {}))
        return name, arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _overlap(text: str, mark: str) -> int:
    """Length of the longest proper beginning of `mark` that `text` ends with."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0


class Reads(Protocol):
    """What reads an answer as it comes: an `AnswerReader`, or whatever a prompt says."""

    def push(self, text: str) -> list[Part]: ...

    def finish(self) -> list[Part]: ...


def read_whole(text: str, reader: Reads) -> tuple[str, str, list[tuple[str, str]]]:
    """Reasoning, text and calls (name, arguments) of a whole answer."""
    reasoning, said = "", ""
    calls: list[tuple[str, str]] = []
    for part in (*reader.push(text), *reader.finish()):
        if part.kind == "reasoning":
            reasoning += part.text
        elif part.kind == "text":
            said += part.text
        elif part.kind == "call":
            calls.append((part.text, ""))
        else:
            calls[part.call] = (calls[part.call][0], calls[part.call][1] + part.text)
    return reasoning, said, calls


def call_guide(
    style: Style, tools: Sequence[Mapping[str, Any]], *, marks: Mapping[str, int], one: bool = False
) -> Guide:
    """A guide that lets an answer be nothing but calls of `tools` (OpenAI's function objects) in the model's format.

    `marks`: the ids of those of `SHOWN` that are control tokens. `one`: a single call, instead of one or more.
    """
    key = "parameters" if style == "llama3" else "arguments"
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool["name"]}, key: tool.get("parameters") or {"type": "object"}},
            "required": ["name", key],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    call: dict[str, Any] = calls[0] if len(calls) == 1 else {"anyOf": calls}
    if style == "llama3":
        return Guide("grammar", f"start: call\ncall: %json {json.dumps(call)}\n")
    opening = _mark(OPENS[style], marks)
    if style == "mistral":
        several = {"type": "array", "items": call, "minItems": 1, **({"maxItems": 1} if one else {})}
        return Guide("grammar", f"start: {opening} calls\ncalls: %json {json.dumps(several)}\n")
    closing, more = _mark(_CLOSE, marks), ' ("\\n" one)*'
    return Guide(
        "grammar",
        f'start: one{"" if one else more}\none: {opening} "\\n" call "\\n" {closing}\ncall: %json {json.dumps(call)}\n',
    )


def _mark(text: str, marks: Mapping[str, int]) -> str:
    """How a grammar writes a mark: as a token where it is a control token, else as text."""
    return f"<[{marks[text]}]>" if text in marks else json.dumps(text)
