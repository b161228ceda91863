"""What operators and clients may see of what is held and what would happen: frozen answers, no internals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PinView:
    """A pin that holds: the first `tokens` tokens of a conversation, for `expires_in_s` more seconds."""

    tokens: int
    bytes: int
    expires_in_s: float


@dataclass(frozen=True, slots=True)
class ConversationView:
    """What is known of a conversation. `id` is its session_id; without one, `kv-` and the name of its last block."""

    id: str
    tenant: str
    tokens: int
    """Of its newest request, prompt and answer."""
    held_tokens: int
    """Of them, those whose KV is held: reused when it goes on now."""
    bytes: Mapping[str, int]
    """Held bytes by codec; blocks shared with others count in full."""
    idle_s: float
    """Seconds since it was last used; 0 while it runs."""
    state: str
    """running, waiting, paused (by an operator) or idle."""
    pins: tuple[PinView, ...]


@dataclass(frozen=True, slots=True)
class TenantView:
    """What a tenant has and uses at one moment. `service` counts what it was served since the start, in units of one
    computed prompt token; `share` is its part of what all were served."""

    name: str
    weight: float
    running: int
    waiting: int
    queued_tokens: int
    held_bytes: int
    pinned_bytes: int
    service: float
    share: float
    max_blocks: int | None = None
    """Blocks that one of its sequences can have within what all may hold, as far as the context goes; None: no limit of
    its own."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """What would become of a request that came now: nothing was done to find out. Seconds, tokens, blocks."""

    fits_now: bool
    fits_ever: bool
    reason: str
    """What binds when it does not fit, else that it fits."""
    cached_tokens: int
    computed_tokens: int
    needed_blocks: int
    """Blocks for the whole prompt and one token of each answer, shared ones included."""
    would_evict_blocks: int
    would_evict_tokens: int
    predicted_start_s: float | None
    """None when it never fits."""
    predicted_ttft_s: float | None
    answer_tokens: int = 0
    """What each answer can have at most; 0 when it never fits."""
    answer_cause: str | None = None
    """What ends an answer of so many tokens, as in `LimitCause`."""
    whole_blocks: int = 0
    """Blocks when all answers have so many."""
    lacking_blocks: int = 0
    """Of them, those that neither free nor idle blocks give now: others must end, wait or be recoded first."""
