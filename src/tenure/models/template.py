"""Chat templates: messages to text, and text to tokens that know which message they came from.

A template is a Jinja program that came with the model; it runs in a sandbox that offers what transformers offers.
As there, special tokens in the rendered text become special tokens, whoever wrote them: a message that contains the
text of a control token contains the control token. Escaping them is the template's or the caller's matter.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tenure.errors import BrokenFile, InvalidRequest
from tenure.models.tokenizer import Tokenizer

Message = Mapping[str, Any]
_MARK = f"\ue000{secrets.randbelow(10**20):020}."
"""Starts a placeholder for an answer's text; random, so that no client can write one.

Digits survive any change of case, so a template that writes a content in two ways is found out."""

_MOST_RENDERED = 250_000
"""Messages rendered at most, all prefixes together, to find where each message ends."""


class _Generation(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's text for training; here it is just text."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's protocol)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    # Jinja's own filter escapes for HTML, which would change the prompt.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _environment() -> ImmutableSandboxedEnvironment:
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = _strftime_now
    return env


class ChatTemplate:
    """The chat template of a model. `source` None: the model has none, and rendering says so.

    `special` are the names and texts that templates write (`bos_token`, `eos_token`, …).
    """

    def __init__(self, source: str | None, special: Mapping[str, str], where: str = "the model") -> None:
        self.source = source
        self._special = dict(special)
        self._where = where

    @cached_property
    def _compiled(self) -> jinja2.Template:
        if self.source is None:
            raise InvalidRequest(
                f"{self._where} has no chat template, so it cannot chat; use /v1/completions with a plain prompt"
            )
        try:
            return _environment().from_string(self.source)
        except jinja2.TemplateError as error:
            raise BrokenFile(f"{self._where}: the chat template is broken: {error}") from error

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **kwargs: Any) -> str:
        """The text of a conversation. InvalidRequest when the template refuses it or there is no template."""
        messages = [{k: v for k, v in m.items() if v is not None} for m in messages]
        values = {"tools": None, "documents": None, **self._special, **kwargs}
        try:
            return self._compiled.render(messages=messages, add_generation_prompt=add_generation_prompt, **values)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
            # A template fails on messages it was not written for in whatever way Python has.
            raise InvalidRequest(f"the chat template refuses these messages: {error}", param="messages") from error

    def render_spans(
        self, messages: Sequence[Message], tokenizer: Tokenizer, *, add_generation_prompt: bool = True, **kwargs: Any
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids of a conversation, and for each message its half-open range of them.

        The ranges are in order, do not overlap and together cover everything but the generation prompt.
        """
        text = self.render(messages, add_generation_prompt=add_generation_prompt, **kwargs)
        ids, ends = tokenizer.encode_with_ends(text)
        return ids, _spans(self._borders(messages, text, kwargs), ends)

    def render_with_turns(
        self,
        messages: Sequence[Message],
        turns: Mapping[int, Sequence[int]],
        tokenizer: Tokenizer,
        *,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> list[int]:
        """Token ids of a conversation in which the content of message `i` is exactly `turns[i]`.

        Extends what the turn before was given: prompt of `messages[:i]` + `turns[i]` is a prefix of the answer,
        provided the template writes an old message as it wrote it when it was the last one. A turn whose text the
        template does not write out unchanged is rendered from its content instead.
        """
        return self.render_turns_spans(
            messages, turns, tokenizer, add_generation_prompt=add_generation_prompt, **kwargs
        )[0]

    def render_turns_spans(
        self,
        messages: Sequence[Message],
        turns: Mapping[int, Sequence[int]],
        tokenizer: Tokenizer,
        *,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """`render_with_turns` and the ranges of `render_spans` in one."""
        marked, kept, text = self._mark(messages, turns, add_generation_prompt, kwargs)
        borders = self._borders(marked, text, kwargs)
        ids: list[int] = []
        ends: list[int] = []
        last: Sequence[int] = ()
        for start, end, turn in self._cut(marked, kept, text, borders, kwargs):
            if turn is None:
                skipped = _already_written(text[start:end], last, tokenizer)
                piece, piece_ends = tokenizer.encode_with_ends(text[start + skipped : end], inside=start > 0)
                ids += piece
                ends += [start + skipped + e for e in piece_ends]
                last = ()
            else:
                last = turns[turn]
                ids += last
                ends += [end] * len(last)
        return ids, _spans(borders, ends)

    def _mark(
        self, messages: Sequence[Message], turns: Mapping[int, Sequence[int]], generation: bool, kwargs: dict[str, Any]
    ) -> tuple[list[Message], list[int], str]:
        """The messages with a placeholder in the place of each turn's content, the turns that kept it, the text."""
        kept = sorted(i for i in turns if 0 <= i < len(messages))
        while True:
            marked = [_marked(message, i) if i in kept else message for i, message in enumerate(messages)]
            text = self.render(marked, add_generation_prompt=generation, **kwargs)
            found = [i for i in kept if text.count(_placeholder(i)) == 1]
            if found == kept:
                return marked, kept, text
            kept = found

    def _cut(
        self,
        marked: Sequence[Message],
        kept: Sequence[int],
        text: str,
        borders: Sequence[int],
        kwargs: dict[str, Any],
    ) -> list[tuple[int, int, int | None]]:
        """The text as ranges [start, end): plain ones (None) and the placeholders (the index of their turn)."""
        if not kept:
            return [(0, len(text), None)]
        opening = self._opening(marked, kwargs)
        pieces: list[tuple[int, int, int | None]] = []
        at = 0
        for i in kept:
            start = text.index(_placeholder(i))
            end = start + len(_placeholder(i))
            # The model was given the messages before and the opening of its turn. White space that the template now
            # puts between them and the answer was not there then.
            given = (borders[i - 1] if i else 0) + len(opening)
            fits = at <= given <= start and text.startswith(opening, given - len(opening))
            stop = given if fits and not text[given:start].strip() else start
            pieces += [(at, stop, None), (start, end, i)]
            at = end
        pieces.append((at, len(text), None))
        return pieces

    def _opening(self, messages: Sequence[Message], kwargs: dict[str, Any]) -> str:
        """What the generation prompt adds to a conversation."""
        closed, opened = self._try(messages, False, kwargs), self._try(messages, True, kwargs)
        return opened[len(closed) :] if closed is not None and opened is not None and opened.startswith(closed) else ""

    def _borders(self, messages: Sequence[Message], text: str, kwargs: dict[str, Any]) -> list[int]:
        """For each message, the character of `text` at which its contribution ends; ascending."""
        borders = self._borders_one_by_one(messages, text, kwargs)
        return self._borders_by_prefixes(messages, text, kwargs) if borders is None else borders

    def _borders_one_by_one(self, messages: Sequence[Message], text: str, kwargs: dict[str, Any]) -> list[int] | None:
        """The borders when every message after the first is written as if it were the second; None when not so.

        Most templates are like that, and then the cost is linear in the messages. The sum is checked, not believed.
        """
        head = self._try(messages[:1], False, kwargs)
        if head is None or not text.startswith(head):
            return None
        borders = [len(head)]
        for message in messages[1:]:
            pair = self._try([messages[0], message], False, kwargs)
            if pair is None or not pair.startswith(head) or not text.startswith(pair[len(head) :], borders[-1]):
                return None
            borders.append(borders[-1] + len(pair) - len(head))
        return borders if self._try(messages, False, kwargs) == text[: borders[-1]] else None

    def _borders_by_prefixes(self, messages: Sequence[Message], text: str, kwargs: dict[str, Any]) -> list[int]:
        """Borders for any template: how far the rendering of each prefix of the conversation agrees with `text`.

        That is quadratic, so in very long conversations only some borders are found, and the text of the messages
        between two of them counts as the later one's.
        """
        step = max(1, len(messages) ** 2 // _MOST_RENDERED)
        borders: list[int] = []
        at = 0
        for count in range(1, len(messages) + 1):
            if count % step == 0 or count == len(messages):
                prefix = self._try(messages[:count], False, kwargs)
                at = at if prefix is None else max(at, _common_prefix(prefix, text))
            borders.append(at)
        return borders

    def _try(self, messages: Sequence[Message], generation: bool, kwargs: dict[str, Any]) -> str | None:
        """The rendering of a part of a conversation, None when the template refuses to stop there."""
        if not messages:
            return None
        try:
            return self.render(messages, add_generation_prompt=generation, **kwargs)
        except InvalidRequest:
            return None


def _marked(message: Message, index: int) -> Message:
    """The message with a placeholder for all that the model wrote: its text, its reasoning and its calls."""
    rest = {key: value for key, value in message.items() if key not in ("reasoning_content", "tool_calls")}
    return {**rest, "content": _placeholder(index)}


def _placeholder(index: int) -> str:
    return f"{_MARK}{index}\ue001"


def _already_written(text: str, turn: Sequence[int], tokenizer: Tokenizer) -> int:
    """Characters of `text` that repeat the end-of-turn token `turn` ends with (white space before it included)."""
    if not turn or turn[-1] not in tokenizer.special_ids:
        return 0
    end = tokenizer.token_text(turn[-1])
    lead = len(text) - len(text.lstrip())
    return lead + len(end) if text.startswith(end, lead) else 0


def _common_prefix(a: str, b: str) -> int:
    """Length of the longest common prefix, by bisection on whole-slice compares."""
    if b.startswith(a):
        return len(a)
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[:middle] == b[:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _spans(borders: Sequence[int], ends: Sequence[int]) -> list[tuple[int, int]]:
    """Token ranges from character borders; `ends` are the characters at which the tokens end, ascending.

    A token that straddles a border belongs to the later message: it is there that a change would show.
    """
    spans: list[tuple[int, int]] = []
    at = 0
    for border in borders:
        start = at
        while at < len(ends) and ends[at] <= border:
            at += 1
        spans.append((start, at))
    return spans
