"""Chats on their way in and out: through the model's template with what was said by its exact tokens, and answers read
for reasoning and calls."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from tenure.engine.sessions import Said, Sessions
from tenure.errors import InvalidRequest
from tenure.models.answers import (
    SHOWN,
    AnswerReader,
    call_guide,
    opens_reasoning,
    read_whole,
    reasons,
    style_of,
)
from tenure.models.template import ChatTemplate
from tenure.models.tokenizer import Tokenizer
from tenure.server.serves import Prompt
from tenure.types import Guide, MissReason, Scope, Span, Token

Message = Mapping[str, Any]
_TAIL = 8
"""Tokens at a prompt's end that tell whether it has opened reasoning."""


class Chats:
    """What one model's template makes of messages, and what its answers mean. Threads may share it."""

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer) -> None:
        self._template = template
        self._tokenizer = tokenizer
        self.style = style_of(template.source)
        self._thinks = reasons(template.source)
        self.sessions = Sessions(tokenizer, read=self.read)

    def render(
        self, messages: Sequence[Message], kwargs: Mapping[str, Any], session_id: str | None, scope: Scope
    ) -> Prompt:
        """Template and tokenise; `kwargs` are what the template is told beside the messages.

        With a session, its own earlier answers are spliced in by their exact ids.
        """
        turns = {} if session_id is None else self.sessions.turns(session_id, scope, messages)
        parsed = [_parsed(message) for message in messages]
        if turns:
            ids, ranges = self._template.render_turns_spans(parsed, turns, self._tokenizer, **kwargs)
        else:
            ids, ranges = self._template.render_spans(parsed, self._tokenizer, **kwargs)
        spans = tuple(Span(start, end, message) for message, (start, end) in enumerate(ranges))
        if not kwargs.get("tools") and not self._thinks:
            return Prompt(tuple(ids), spans)
        opened = self._thinks and opens_reasoning(self._tokenizer.decode(ids[-_TAIL:], skip_special=False))
        style = self.style if kwargs.get("tools") else None
        return Prompt(tuple(ids), spans, reader=partial(AnswerReader, style, thinks=self._thinks, opened=opened))

    def guide(self, tools: Sequence[Mapping[str, Any]], *, one: bool = False) -> Guide:
        """A guide that lets an answer be nothing but calls of `tools`, OpenAI's tool objects; `one`: a single call."""
        if self.style is None:
            raise InvalidRequest("tools: this model's chat template has none", param="tools")
        ids = self._tokenizer.special_ids
        marks = {self._tokenizer.token_text(i): i for i in ids if self._tokenizer.token_text(i) in SHOWN}
        return call_guide(self.style, [tool["function"] for tool in tools], marks=marks, one=one)

    def read(self, text: str) -> Said:
        """What a client was shown of an answer of this text."""
        if self.style is None and not self._thinks:
            return "", text, ()
        # Who opened the reasoning is not remembered: it was the prompt, when the answer closes what it never opened.
        opened = self._thinks and "</think>" in text and "<think>" not in text
        reasoning, said, calls = read_whole(text, AnswerReader(self.style, thinks=self._thinks, opened=opened))
        return reasoning, said, tuple(calls)

    def why_not(self, generated: Sequence[Token], rendered: Sequence[Token]) -> MissReason | None:
        """Why an answer's own tokens are not those that it was rendered by: None when it is another text."""
        said, shown = self._tokenizer.decode(generated).strip(), self._tokenizer.decode(rendered).strip()
        if said and _begins(said, shown):
            return "retokenised"
        reasoning, rest, _ = self.read(said) if self._thinks else ("", "", ())
        return "reasoning_stripped" if reasoning and rest.strip() and _begins(rest.strip(), shown) else None


def _begins(said: str, shown: str) -> bool:
    """Whether one begins the other: what was rendered may carry end marks behind, or be cut."""
    return bool(shown) and (said.startswith(shown) or shown.startswith(said))


def _parsed(message: Message) -> Message:
    """The message as templates expect it: arguments of calls as objects, in the order they were written."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    return {**message, "tool_calls": [{**call, "function": _with_object(call["function"])} for call in calls]}


def _with_object(function: Mapping[str, Any]) -> Mapping[str, Any]:
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):  # what the model wrote and the client sends back need not be JSON
        return function
    return {**function, "arguments": arguments} if isinstance(arguments, dict) else function
