"""A request of a trace, as it is replayed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

BLOCK_TOKENS = 512
"""Of traces that do not say otherwise: Mooncake's."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace. `at` is seconds; `blocks` names the prompt's blocks of `block_tokens` tokens, each with
    its whole prefix, in 64 bits. The last may stand for a partial block; tokens behind it are never cached."""

    at: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    block_tokens: int = BLOCK_TOKENS
    tenant: str = ""
    answer: tuple[int, ...] = ()
    """Names of the blocks behind `blocks`, up to the end of the answer; the first may begin within the prompt."""
    session: str | None = None
    turn: int | None = None
    tokens: tuple[int, ...] | None = None
    """The prompt's token ids, when the trace has its text."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Fields that no reader knows, as they came."""

    def block_size(self, at: int) -> int:
        """Tokens of block number `at` of the prompt."""
        return min(self.block_tokens, self.prompt_tokens - at * self.block_tokens)

    def tokens_of(self, blocks: int) -> int:
        """Tokens that the first `blocks` blocks hold."""
        return min(blocks * self.block_tokens, self.prompt_tokens)
