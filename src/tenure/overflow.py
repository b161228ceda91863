"""Which tokens a conversation lets go when it outgrows its context, with `overflow=slide`.

StreamingLLM's choice (arXiv 2309.17453): the first tokens stay, since attention leans on them, and the newest half.
What stays is prefilled again at fresh positions, so the answer goes on as that of the shortened sequence asked cold.
"""

from __future__ import annotations

from tenure.types import Forgotten, Span

SINKS = 4
"""First tokens that always stay."""
POLICY = "slide"


def slid_range(length: int, context_limit: int) -> tuple[int, int]:
    """Tokens [start, end) that go from a sequence of `length` ≥ `context_limit` tokens. Empty when the context is too
    small to be worth it: then nothing can slide."""
    kept = context_limit // 2
    if kept <= SINKS:
        return 0, 0
    return SINKS, length - kept


def forgotten(start: int, end: int, spans: tuple[Span, ...] = ()) -> Forgotten:
    """What the receipt says of it. `spans` are those of the prompt, by the same numbers as `start` and `end`."""
    messages = tuple(span.message for span in spans if span.start < end and span.end > start)
    return Forgotten(start, end, messages, POLICY, "the conversation outgrew the context")
