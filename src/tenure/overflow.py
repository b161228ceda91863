"""Which tokens a conversation lets go when it outgrows its context, with `overflow=slide`.

StreamingLLM's choice (arXiv 2309.17453): the first tokens stay, since attention leans on them, and the newest half.
What stays is prefilled again at fresh positions, so the answer goes on as that of the shortened sequence asked cold.
"""

from __future__ import annotations

from typing import NamedTuple

from tenure.types import Forgotten, LimitCause, Span

SINKS = 4
"""First tokens that always stay."""
POLICY = "slide"
NAMES: dict[LimitCause, str] = {
    "context": "the context",
    "pool": "the KV cache",
    "tenant_kv": "its tenant's part of the KV cache",
}
"""Limits as clients read of them."""


class Window(NamedTuple):
    """Tokens that a sequence can ever have, the answer included, and what limits it to so many."""

    tokens: int
    cause: LimitCause


def window(context_limit: int, block_tokens: int, pool_blocks: int, tenant_blocks: int | None = None) -> Window:
    """The tightest limit: the context, or what the pool's blocks, or those that its tenant may hold, have room for."""
    blocks: list[tuple[LimitCause, int | None]] = [("pool", pool_blocks), ("tenant_kv", tenant_blocks)]
    held = [Window(n * block_tokens, cause) for cause, n in blocks if n is not None]
    return min(Window(context_limit, "context"), *held)  # of equal ones the context, then the pool


def slid_range(length: int, limit: int) -> tuple[int, int]:
    """Tokens [start, end) that go from a sequence of `length` ≥ `limit` tokens. Empty when the limit is too small to be
    worth it: then nothing can slide."""
    kept = limit // 2
    if kept <= SINKS:
        return 0, 0
    return SINKS, length - kept


def forgotten(start: int, end: int, cause: LimitCause, spans: tuple[Span, ...] = ()) -> Forgotten:
    """What the receipt says of it: `cause` names what was outgrown. `spans` are those of the prompt, by the same
    numbers as `start` and `end`."""
    messages = tuple(span.message for span in spans if span.start < end and span.end > start)
    return Forgotten(start, end, messages, POLICY, f"the conversation outgrew {NAMES[cause]}")
