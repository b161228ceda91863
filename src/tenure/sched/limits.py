"""The operator's bounds on what runs and waits."""

from __future__ import annotations

from dataclasses import dataclass, field

from tenure.tenants import Tenants


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """The operator's bounds. `max_step_ms` holds while any stream is decoding; `canary_steps` 0: no checks. A block has
    `block_bytes` bytes where tenants' limits in bytes are counted."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_step_ms: float
    context_limit: int
    max_queued_requests: int
    max_queued_tokens: int
    canary_steps: int = 0
    block_bytes: int = 1
    tenants: Tenants = field(default_factory=Tenants)
