"""What is done, before the engine sees it, with a prompt that leaves no room for an answer.

    refuse   the engine refuses it, with the numbers
    trim     whole oldest turns of a chat go; system messages and the newest turn stay
    slide    its first tokens and its most recent half stay

The window is the context, or what the pool (or its tenant's part of it) can ever hold, if that is less. Trimming moves
in steps of a quarter of the window. Where the cut lies depends on the conversation alone, and it moves
only when another step has been outgrown, so the shortened prompt stays a prefix of the next one for several turns:

    too long by     ├── step ──┤├── step ──┤     every length within a step has the same cut: before the first turn
    cut at          ───────────┴▲──────────┴─▲   that begins behind the step
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from tenure.errors import ContextLengthExceeded, KvCapacityExceeded, RequestError
from tenure.overflow import NAMES, Window, forgotten, slid_range
from tenure.server.serves import Prompt
from tenure.types import Forgotten, Overflow, Span

ANSWER_TOKENS = 512
"""Room that trimming leaves for an answer, unless `max_tokens` asks for less."""
STEPS = 4
"""Steps in a window, unless the operator says otherwise."""

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message]], Prompt]


def fit(
    messages: Sequence[Message],
    render: Render,
    overflow: Overflow,
    window: Window,
    max_tokens: int | None,
    steps: int = STEPS,
) -> Prompt:
    """The prompt as `overflow` wants it. One that is refused for its length is left to the engine to refuse."""
    if overflow == "trim":
        return trim(messages, render, window, max_tokens, steps)
    prompt = render(messages)
    return slide(prompt, window) if overflow == "slide" else prompt


def room(window: int, max_tokens: int | None) -> int:
    """Tokens of answer that a trimmed prompt leaves room for; never more than half of the window."""
    return max(1, min(max_tokens or ANSWER_TOKENS, ANSWER_TOKENS, window // 2))


def trim(
    messages: Sequence[Message], render: Render, window: Window, max_tokens: int | None, steps: int = STEPS
) -> Prompt:
    """The prompt without its oldest turns, if they are too many; what was left out is told in numbers of the whole one.

    ContextLengthExceeded (KvCapacityExceeded, when that is the tighter limit) when system messages and the newest turn
    alone leave no room. The spans that remain keep the numbers of the messages the client sent.
    """
    whole = render(messages)
    budget = window.tokens - room(window.tokens, max_tokens)
    excess = len(whole.tokens) - budget
    if excess <= 0:
        return whole
    sizes = {span.message: span.end - span.start for span in whole.spans}
    cuts = _cuts(messages)
    gone = [sum(sizes.get(message, 0) for message in _dropped(messages, cut)) for cut in cuts]
    for cut in cuts[_choose(gone, excess, max(1, window.tokens // steps)) :]:
        dropped = set(_dropped(messages, cut))
        kept = [number for number in range(len(messages)) if number not in dropped]
        prompt = render([messages[number] for number in kept])
        if len(prompt.tokens) <= budget:
            spans = tuple(replace(span, message=kept[span.message]) for span in prompt.spans)
            return replace(prompt, spans=spans, forgotten=_told(whole, dropped, window))
    raise _too_long(len(whole.tokens), window, max_tokens)


def _too_long(length: int, window: Window, max_tokens: int | None) -> RequestError:
    """What refuses a prompt that cannot be trimmed enough, by the name of the limit."""
    error = ContextLengthExceeded if window.cause == "context" else KvCapacityExceeded
    return error(
        f"The prompt has {length} tokens; even without its oldest turns it leaves no room for an answer in the"
        f" {window.tokens} tokens of {NAMES[window.cause]}.",
        param="messages",
        prompt_tokens=length,
        requested_tokens=length + (max_tokens or 1),
        limit=window.tokens,
    )


def slide(prompt: Prompt, window: Window) -> Prompt:
    """The prompt's first tokens and its most recent half, if it is as long as the window."""
    length = len(prompt.tokens)
    start, end = slid_range(length, window.tokens) if length >= window.tokens else (0, 0)
    if start >= end:
        return prompt
    tokens = prompt.tokens[:start] + prompt.tokens[end:]
    moved = [_moved(span, start, end) for span in prompt.spans]
    spans = tuple(span for span in moved if span.start < span.end)
    return replace(prompt, tokens=tokens, spans=spans, forgotten=(forgotten(start, end, window.cause, prompt.spans),))


def _moved(span: Span, start: int, end: int) -> Span:
    """Where a span lies once tokens [start, end) are gone."""

    def at(token: int) -> int:
        return token if token <= start else max(start, token - (end - start))

    return Span(at(span.start), at(span.end), span.message)


def _cuts(messages: Sequence[Message]) -> list[int]:
    """The messages that may come first after a cut: those that begin a turn, but for the very first turn.

    A turn begins with a user's message that does not follow another one: so tool calls stay with their results."""
    spoken = [number for number, message in enumerate(messages) if message.get("role") != "system"]
    return [
        number
        for before, number in pairwise(spoken)
        if messages[number].get("role") == "user" and messages[before].get("role") != "user"
    ]


def _dropped(messages: Sequence[Message], cut: int) -> list[int]:
    return [number for number in range(cut) if messages[number].get("role") != "system"]


def _choose(gone: Sequence[int], excess: int, step: int) -> int:
    """The first cut to try, by its index: that which frees the whole step that `excess` lies in; where turns are larger
    than steps, that which frees `excess`. `gone` are the tokens each cut frees, ascending."""
    target = -(-excess // step) * step
    behind = sum(tokens < target for tokens in gone)
    if behind < len(gone) and gone[behind] <= target + step:
        return behind
    return sum(tokens < excess for tokens in gone)


def _told(whole: Prompt, dropped: set[int], window: Window) -> tuple[Forgotten, ...]:
    """One entry for each run of messages that went."""
    reason = f"the conversation has {len(whole.tokens)} tokens and {NAMES[window.cause]} room for {window.tokens}"
    runs: list[list[Span]] = []
    for span in whole.spans:
        if span.message not in dropped or span.start == span.end:
            continue
        if runs and runs[-1][-1].end == span.start:
            runs[-1].append(span)
        else:
            runs.append([span])
    return tuple(
        Forgotten(run[0].start, run[-1].end, tuple(span.message for span in run), "trim", reason) for run in runs
    )
