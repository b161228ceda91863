"""Usage, timings and the receipt as clients see them (CONVENTIONS: `usage`, `kv`, `timings`)."""

from __future__ import annotations

from typing import Any

from tenure.types import Done, Forgotten, Miss, PinReceipt, Receipt, Timings, Usage

MISS_MESSAGES = {
    "cold": "nothing of this prompt was held",
    "content_changed": "the text differs from what is held",
    "retokenised": "the text is the same as an earlier answer, but its tokens are not; send a session_id to keep them",
    "reasoning_stripped": "reasoning of an earlier turn was left out of the prompt",
    "scope_changed": "the same text is held under another model, adapter, tenant, salt or codec",
    "evicted": "what was held had to make room",
    "window": "what layers with a window had kept there had to make room; the other layers still held it",
    "expired": "what was held had outlived its time",
    "corrupt": "what was held failed its check and was thrown away",
    "below_minimum": "the prompt ends inside a block that is held in 8 or 4 bits, and such a block is reused whole",
    "recoded": "it is held in fewer bits since memory was short: of no use for exact blocks, nor for the head of one",
    "prompt_logprobs": "the logprobs of the prompt were asked for, and logits are not kept: all of it was computed",
    "unknown": "the reason was not recorded",
}
BEHIND_A_HEAD = "nothing beyond it was held"
"""Of a cold miss that is not at the first token."""


def usage_object(usage: Usage) -> dict[str, Any]:
    """OpenAI's `usage`; the prompt counts once whatever n is."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def miss_object(miss: Miss) -> dict[str, Any]:
    """Why reuse ended at token `at_token`; `message` is the number of the chat message it lies in."""
    return {
        "reason": miss.reason,
        "at_token": miss.at_token,
        "message": miss.message,
        "detail": BEHIND_A_HEAD if miss.reason == "cold" and miss.at_token else MISS_MESSAGES[miss.reason],
        **({} if miss.by is None else {"by": miss.by}),
        **({} if miss.ago_s is None else {"ago_s": round(miss.ago_s, 3)}),
    }


def forgotten_object(forgotten: Forgotten) -> dict[str, Any]:
    """Tokens and messages that the model did not see."""
    return {
        "tokens": [forgotten.start, forgotten.end],
        "messages": list(forgotten.messages),
        "policy": forgotten.policy,
        "reason": forgotten.reason,
    }


def pin_object(pin: PinReceipt) -> dict[str, Any]:
    """What became of a wish to pin; `end_token` is where the wish ended, `tokens` are whole blocks up to there."""
    return {
        "end_token": pin.end_token,
        "granted": pin.granted,
        "tokens": pin.tokens,
        "bytes": pin.bytes,
        "ttl_s": pin.ttl_s,
        "reason": pin.reason,
    }


def receipt_object(receipt: Receipt) -> dict[str, Any]:
    """The `kv` object beside `usage`."""
    kv: dict[str, Any] = {
        "prompt_tokens": receipt.prompt_tokens,
        "cached_tokens": receipt.cached_tokens,
        "cached_by_tier": {"device": 0, "host": 0, "disk": 0, "remote": 0, **receipt.cached_by_tier},
        "computed_tokens": receipt.computed_tokens,
        "miss": None if receipt.miss is None else miss_object(receipt.miss),
        "forgotten": [forgotten_object(part) for part in receipt.forgotten],
        "codec": dict(receipt.codec),
        "preempted": receipt.preempted,
        "recomputed_tokens": receipt.recomputed_tokens,
        "queue_ms": round(receipt.queue_ms, 3),
        "context_limit": receipt.context_limit,
        "context_used": receipt.context_used,
        "limit_cause": receipt.limit_cause,
    }
    if receipt.pins:
        kv["pins"] = [pin_object(pin) for pin in receipt.pins]
    if receipt.max_tokens_granted is not None:
        kv["max_tokens"] = {"requested": receipt.max_tokens_requested, "granted": receipt.max_tokens_granted}
    return kv


def timings_object(timings: Timings) -> dict[str, Any]:
    """llama.cpp's `timings`; rates are 0 where nothing was computed."""
    return {
        "prompt_n": timings.prompt_n,
        "prompt_ms": round(timings.prompt_ms, 3),
        "prompt_per_second": _rate(timings.prompt_n, timings.prompt_ms),
        "predicted_n": timings.predicted_n,
        "predicted_ms": round(timings.predicted_ms, 3),
        "predicted_per_second": _rate(timings.predicted_n, timings.predicted_ms),
        "cache_n": timings.cache_n,
        "queue_ms": round(timings.queue_ms, 3),
    }


def account(done: Done) -> dict[str, Any]:
    """All three, as they lie beside each other in a reply and in the last chunk of a stream."""
    kv = receipt_object(done.receipt)
    if done.parts:
        kv["prompts"] = [receipt_object(part.receipt) for part in done.parts]
    return {
        "usage": usage_object(done.usage),
        "kv": kv,
        "timings": timings_object(done.timings),
    }


def _rate(count: int, ms: float) -> float:
    return round(count / ms * 1000, 3) if ms > 0 else 0.0
