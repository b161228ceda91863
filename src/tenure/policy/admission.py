"""Which requests are taken."""

from __future__ import annotations

from tenure.overflow import window
from tenure.policy.base import AdmissionAsk, Admit, Load, Refuse, TenantLoad, Wait


class BoundedQueue:
    """Takes what can ever run, up to a bounded queue of requests and tokens."""

    name = "bounded_queue"

    def judge(self, ask: AdmissionAsk, load: Load) -> Admit | Wait | Refuse:
        mine = load.tenants.get(ask.tenant)
        refusal = self._never(ask, load, mine) or self._not_now(ask, load)
        refusal = refusal or (_tenant_refuses(ask, load, mine) if mine else None)
        if refusal:
            return refusal
        if load.queued_requests:
            return Wait(f"behind {load.queued_requests} queued requests")
        needed = load.blocks(ask.prompt_tokens) + 1
        if needed > load.free_blocks + load.evictable_blocks:
            return Wait(f"{needed} blocks needed, {load.free_blocks} free and {load.evictable_blocks} evictable")
        return Admit(f"{needed} blocks can be had")

    def _never(self, ask: AdmissionAsk, load: Load, mine: TenantLoad | None) -> Refuse | None:
        """What no waiting helps: a prompt that leaves no room for an answer in the tightest of its limits."""
        blocks = load.longest_blocks if mine is None or mine.max_blocks is None else mine.max_blocks
        most = window(load.context_limit, load.block_tokens, load.longest_blocks, blocks)
        if ask.prompt_tokens < most.tokens:
            return None
        numbers = {
            "prompt_tokens": ask.prompt_tokens,
            "requested_tokens": ask.prompt_tokens + (ask.max_tokens or 1),
            "limit": most.tokens,
        }
        if most.cause == "context":
            reason = (
                f"The prompt has {ask.prompt_tokens} tokens; the context of {most.tokens} leaves no room for an answer."
            )
            return Refuse(reason, "context_length_exceeded", numbers)
        needed = load.blocks(ask.prompt_tokens + 1)
        whole = f"the pool has {load.total_blocks}" if most.cause == "pool" else f"this tenant may hold {blocks}"
        return Refuse(
            f"The prompt and one token need {needed} KV blocks of {load.block_tokens} tokens; {whole}.",
            "kv_capacity_exceeded",
            {"needed_blocks": needed, "pool_blocks": min(blocks, load.total_blocks), **numbers},
        )

    def _not_now(self, ask: AdmissionAsk, load: Load) -> Refuse | None:
        """A full queue. An empty one takes any request, else one larger than the bounds could never come in."""
        if not load.queued_requests:
            return None
        retry = {"retry_after_s": max(0.0, load.predicted_start_s)}
        if load.queued_requests + ask.n > load.max_queued_requests:
            return Refuse(
                f"The queue holds {load.queued_requests} of at most {load.max_queued_requests} requests.",
                "queue_full",
                {"queued_requests": load.queued_requests, "limit": load.max_queued_requests, **retry},
            )
        if load.queued_tokens + ask.prompt_tokens > load.max_queued_tokens:
            return Refuse(
                f"The queue holds {load.queued_tokens} of at most {load.max_queued_tokens} prompt tokens.",
                "queue_full",
                {"queued_tokens": load.queued_tokens, "limit": load.max_queued_tokens, **retry},
            )
        return None


def _tenant_refuses(ask: AdmissionAsk, load: Load, mine: TenantLoad) -> Refuse | None:
    """What the tenant's own queue has no room for now."""
    tokens = mine.queued_tokens + ask.prompt_tokens
    if mine.max_queued_tokens is not None and mine.queued_requests and tokens > mine.max_queued_tokens:
        return Refuse(
            f"The tenant has {mine.queued_tokens} of at most {mine.max_queued_tokens} prompt tokens waiting.",
            "queue_full",
            {
                "queued_tokens": mine.queued_tokens,
                "limit": mine.max_queued_tokens,
                "retry_after_s": max(0.0, load.predicted_start_s),
            },
        )
    return None
