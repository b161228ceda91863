"""Cases R1, R3 and R5 of shared/cases: what is reused, and why not more."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from tests.e2e.support import Running, prompt_ids

from tenure.spec import BLOCK_TOKENS as B

LENGTHS = sorted({1, B - 1, B, B + 1, 4 * B - 1, 4 * B, 4 * B + 1, *(64 * j + 1 for j in range(1, 5))})


@pytest.mark.parametrize("length", LENGTHS)
def test_r1_the_same_prompt_twice(server: Running, length: int) -> None:
    prompt = prompt_ids(length, seed=1000 + length)
    first = server.complete(prompt, 8, ignore_eos=True)
    second = server.complete(prompt, 8, ignore_eos=True)
    assert second["choices"][0]["text"] == first["choices"][0]["text"]
    assert first["kv"]["cached_tokens"] == 0
    # All but the last token, which is computed again for its logits.
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == length - 1
    assert second["kv"]["computed_tokens"] == 1


def turns(server: Running, line: Any, session: str | None = None) -> list[dict[str, Any]]:
    """Three turns of a chat whose system prompt begins with `line(turn)`; the replies."""
    history: list[dict[str, str]] = []
    replies = []
    for turn in range(3):
        history.append({"role": "user", "content": f"Question number {turn}: what comes after {turn}?"})
        system = {
            "role": "system",
            "content": f"{line(turn)} You are a patient teacher who answers in one sentence. " * 3,
        }
        extra = {"session_id": session} if session else {}
        reply = server.chat([system, *history], 12, **extra)
        replies.append(reply)
        history.append({"role": "assistant", "content": reply["choices"][0]["message"]["content"]})
    return replies


def test_r3_a_line_that_changes_at_the_front_ends_reuse_there_and_says_so(server: Running) -> None:
    server.reset()
    replies = turns(server, lambda turn: f"{0x9E3779B9 * (turn + 3) & 0xFFFFFFFF:08x}", session="r3-changing")
    for reply in replies[1:]:
        miss = reply["kv"]["miss"]
        assert miss["reason"] == "content_changed"
        assert miss["message"] == 0
        assert miss["at_token"] < 2 * B
        assert reply["kv"]["cached_tokens"] <= miss["at_token"]


def test_r3_without_that_line_all_earlier_tokens_are_reused(server: Running) -> None:
    server.reset()
    replies = turns(server, lambda turn: "Steady.", session="r3-steady")
    for before, reply in itertools.pairwise(replies):
        earlier = before["usage"]["prompt_tokens"] + before["usage"]["completion_tokens"]
        # The last token of an answer has no keys and values yet: nothing was computed after it.
        assert reply["kv"]["cached_tokens"] >= earlier - 2
        assert reply["kv"]["computed_tokens"] < 40


def test_r5_an_answer_that_retokenises_differently(server: Running) -> None:
    question = {"role": "user", "content": "Write a line of noise."}
    for seed in range(60):
        server.reset()
        fields = {"temperature": 2.0, "seed": seed, "ignore_eos": False, "return_token_ids": True}
        first = server.chat([question], 24, session_id=f"r5-{seed}", **fields)
        text = first["choices"][0]["message"]["content"]
        generated = first["choices"][0]["token_ids"]
        again = server.http.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"]
        if "\ufffd" not in text and again != generated[: len(again)] and text.strip() == text:
            break
    else:
        pytest.fail("no answer was found whose tokens change when its text is tokenised again")
    history = [question, {"role": "assistant", "content": text}, {"role": "user", "content": "Thanks."}]
    earlier = first["usage"]["prompt_tokens"] + first["usage"]["completion_tokens"]
    without = server.chat(history, 8)
    faithful = server.chat(history, 8, session_id=f"r5-{seed}")
    assert faithful["kv"]["cached_tokens"] >= earlier - 2
    miss = without["kv"]["miss"]
    assert miss["reason"] == "retokenised"
    assert first["usage"]["prompt_tokens"] <= miss["at_token"] < earlier
    server.reset()
    cold = server.chat(history, 8, session_id=f"r5-{seed}")
    assert cold["kv"]["cached_tokens"] == 0
    assert cold["choices"][0]["message"] == faithful["choices"][0]["message"]
