"""Cases L1, L3 and L5 of shared/cases under each overflow policy, on a real server and model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from tests.e2e.support import Running, pool_bytes, prompt_ids, serving

CONTEXT = 1024
FILLER = "The weather was fine and nobody said anything of note on that long day. "


@pytest.fixture(scope="module")
def small() -> Iterator[Running]:
    with serving("--max-model-len", str(CONTEXT), "--kv-cache-memory-bytes", pool_bytes(8 * CONTEXT)) as running:
        yield running


def talk(turns: int) -> list[dict[str, str]]:
    """A chat with a code word in its first turn and a question about it in its last."""
    messages = [{"role": "system", "content": "You are brief."}]
    for turn in range(turns):
        said = "The code word is heliotrope. " if turn == 0 else ""
        messages += [
            {"role": "user", "content": f"{said}Part {turn}. {FILLER * 6}"},
            {"role": "assistant", "content": f"Noted, part {turn}. {FILLER}"},
        ]
    return [*messages, {"role": "user", "content": "What is the code word?"}]


def test_l1_trimmed_the_receipt_says_what_the_model_did_not_see(small: Running) -> None:
    messages = talk(46)
    whole = len(small.http.post("/tokenize", json={"messages": messages}).json()["tokens"])
    assert whole > 5 * CONTEXT
    answer = small.chat(messages, 16, overflow="trim")
    receipt = answer["kv"]
    assert answer["usage"]["prompt_tokens"] == receipt["prompt_tokens"] <= CONTEXT - 16
    (gone,) = receipt["forgotten"]
    assert gone["policy"] == "trim"
    assert gone["messages"][0] == 1, "the code word's message is named"
    system = len(small.http.post("/tokenize", json={"messages": messages[:1]}).json()["tokens"])
    assert gone["tokens"][0] <= system
    assert gone["tokens"][1] - gone["tokens"][0] == whole - receipt["prompt_tokens"]
    assert small.metric("tenure:forgotten_tokens_total", policy="trim") >= gone["tokens"][1] - gone["tokens"][0]


def test_trimming_leaves_a_prefix_that_the_next_turns_reuse(small: Running) -> None:
    messages = talk(8)
    cuts, reused = [], []
    for turn in range(6):
        answer = small.chat(messages, 24, overflow="trim", session_id="trimmed", ignore_eos=True)
        cuts.append(tuple(part["tokens"][1] for part in answer["kv"]["forgotten"]))
        reused.append(answer["kv"]["cached_tokens"] / answer["kv"]["prompt_tokens"])
        messages += [answer["choices"][0]["message"], {"role": "user", "content": f"And part {turn}?"}]
    assert cuts[0]
    assert len(set(cuts)) <= 2, "six short turns are less than a quarter of the window"
    assert sum(share > 0.8 for share in reused[1:]) >= 4


@pytest.mark.parametrize("overflow", ["refuse", "trim", "slide"])
def test_l3_the_same_answer_on_every_route(small: Running, overflow: str) -> None:
    """One prompt of five contexts: what no turn can be cut from is refused alike everywhere, or slides everywhere."""
    text = FILLER * 400
    seen = set()
    for stream in (True, False):
        chat = {
            "messages": [{"role": "user", "content": text}],
            "max_tokens": 4,
            "overflow": overflow,
            "stream": stream,
        }
        plain = {"prompt": text, "max_tokens": 4, "overflow": overflow, "stream": stream}
        replies = [small.http.post("/v1/chat/completions", json=chat)]
        if overflow != "trim":  # completions have no turns
            replies.append(small.http.post("/v1/completions", json=plain))
        for reply in replies:
            error = reply.json()["error"] if reply.status_code != 200 else {}
            seen.add((reply.status_code, error.get("code"), error.get("limit")))
    expected = (200, None, None) if overflow == "slide" else (400, "context_length_exceeded", CONTEXT)
    assert seen == {expected}


def test_l1_slid_the_prompt_keeps_its_ends_and_says_so(small: Running) -> None:
    ids = prompt_ids(5 * CONTEXT, seed=3)
    answer = small.complete(ids, 8, overflow="slide", ignore_eos=True)
    (gone,) = answer["kv"]["forgotten"]
    assert gone["policy"] == "slide"
    assert gone["tokens"] == [4, 5 * CONTEXT - CONTEXT // 2]
    small.reset()
    cold = small.complete(ids[:4] + ids[-(CONTEXT // 2) :], 8, ignore_eos=True)
    assert cold["kv"]["cached_tokens"] == 0
    assert cold["choices"] == answer["choices"], "as if the shortened prompt had been asked cold"


def test_l5_a_window_that_fills_slides_on(small: Running) -> None:
    """The stream tells when; what follows is, token by token, what the shortened sequence gives when asked cold."""
    ids = prompt_ids(CONTEXT - 16, seed=4)
    body = {
        "prompt": ids, "max_tokens": 600, "ignore_eos": True, "stream": True, "temperature": 0, "overflow": "slide",
        "return_token_ids": True,
    }  # fmt: skip
    made: list[int] = []
    slides: list[tuple[int, dict[str, Any]]] = []
    last: dict[str, Any] = {}
    with small.http.stream("POST", "/v1/completions", json=body) as reply:
        for line in reply.iter_lines():
            if not line.startswith("data: {"):
                continue
            last = json.loads(line[6:])
            if (last.get("kv") or {}).get("event") == "context_slid":
                slides.append((len(made), last["kv"]["forgotten"][0]))
                assert last["choices"] == []
            for choice in last["choices"]:
                made += choice.get("token_ids") or []
    assert len(made) == 600
    assert last["choices"][0]["finish_reason"] == "length"
    assert [at for at, _ in slides] == [16, 16 + CONTEXT // 2 - 4]
    assert last["kv"]["limit_cause"] == "max_tokens"
    told = [part["tokens"] for part in last["kv"]["forgotten"]]
    assert told == [part["tokens"] for _, part in slides]
    assert told[0] == [4, CONTEXT // 2]
    assert told[1][0] - 4 == told[0][1] - told[0][0], "the second slide drops what lies behind the first"
    small.reset()
    whole = ids + made[:16]
    cold = small.complete(whole[:4] + whole[-(CONTEXT // 2) :], 100, ignore_eos=True, return_token_ids=True)
    assert cold["choices"][0]["token_ids"] == made[16:116]
    assert small.metric("tenure:sequences_slid_total") == 2
    assert small.metric("tenure:leaked_blocks") == 0


def test_the_servers_default_and_what_it_means_for_completions() -> None:
    flags = ("--max-model-len", str(CONTEXT), "--kv-cache-memory-bytes", pool_bytes(2 * CONTEXT), "--overflow", "trim")
    with serving(*flags) as server:
        assert "overflow trim" in server.printed
        assert server.chat(talk(46), 16)["kv"]["forgotten"][0]["policy"] == "trim"
        reply = server.http.post("/v1/completions", json={"prompt": prompt_ids(2 * CONTEXT), "max_tokens": 1})
        assert reply.json()["error"]["code"] == "context_length_exceeded"
        body = {"messages": talk(46), "max_tokens": 16, "truncation": "disabled"}
        assert server.http.post("/v1/chat/completions", json=body).status_code == 400


def test_a_pool_smaller_than_the_context_is_what_limits_and_is_named() -> None:
    """32 blocks of 32 tokens under a context of 4096: every policy goes by the pool, and says so."""
    with serving("--max-model-len", "4096", "--kv-cache-memory-bytes", pool_bytes(CONTEXT)) as server:
        ids = prompt_ids(2 * CONTEXT, seed=5)
        error = server.http.post("/v1/completions", json={"prompt": ids, "max_tokens": 4}).json()["error"]
        assert (error["code"], error["limit"], error["pool_blocks"]) == ("kv_capacity_exceeded", CONTEXT, CONTEXT // 32)
        plan = server.http.post("/v1/kv/plan", json={"prompt": ids, "max_tokens": 4}).json()
        assert not plan["fits_ever"] and plan["reason"] in error["message"]
        trimmed = server.chat(talk(46), 16, overflow="trim")["kv"]
        assert trimmed["prompt_tokens"] <= CONTEXT - 16 and trimmed["limit_cause"] in (None, "max_tokens")
        assert f"the KV cache room for {CONTEXT}" in trimmed["forgotten"][0]["reason"]
        body = {"messages": [{"role": "user", "content": FILLER * 100}], "max_tokens": 4, "overflow": "trim"}
        error = server.http.post("/v1/chat/completions", json=body).json()["error"]
        assert (error["code"], error["limit"]) == ("kv_capacity_exceeded", CONTEXT)
        slid = server.complete(prompt_ids(CONTEXT - 20, seed=6), 60, overflow="slide", ignore_eos=True)
        assert slid["usage"]["completion_tokens"] == 60
        (gone,) = slid["kv"]["forgotten"]
        assert gone["reason"] == "the conversation outgrew the KV cache" and slid["kv"]["limit_cause"] == "max_tokens"
        ended = server.complete(prompt_ids(CONTEXT - 20, seed=7), 60, ignore_eos=True)
        asked = {"prompt": prompt_ids(CONTEXT - 20, seed=8), "max_tokens": 60}
        plan = server.http.post("/v1/kv/plan", json=asked).json()
        assert plan["answer"] == {"n": 1, "tokens": ended["usage"]["completion_tokens"], "limit_cause": "pool"}
        assert ended["kv"]["limit_cause"] == "pool"
