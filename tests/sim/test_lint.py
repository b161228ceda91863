"""Every pattern and mistake is found where it was planted, and nothing in a clean log."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tenure.lint import Finding, lint
from tenure.sim.trace import TraceRequest
from tenure.traces import read

Messages = list[dict[str, Any]]
SYSTEM = "You are a careful assistant of the city library. " + " ".join(f"Rule {n} holds." for n in "abcdefghij" * 12)
HEADER = {"pool_blocks": 4096, "codec": "bf16", "declared": ["memory", "overflow", "pressure"]}


def words(prompt: object) -> Sequence[int]:
    """A toy tokenizer: one token for each word, and one that opens the answer."""
    if isinstance(prompt, list):
        prompt = " ".join(f"{m['role']}: {m['content']} {json.dumps(m.get('tools'))}" for m in prompt) + " assistant:"
    assert isinstance(prompt, str)
    return [sum(ord(c) * 31**i for i, c in enumerate(word[:12])) % 2**32 for word in prompt.split()]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text + " " + " ".join(f"{text}-word-{c}" for c in "abcdefghij" * 12)}


def reply(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def talk(turns: int = 4, system: str = SYSTEM) -> list[Messages]:
    """The prompts of a conversation that only ever grows."""
    messages: Messages = [{"role": "system", "content": system}]
    prompts = []
    for turn in range(turns):
        messages = [*messages, user(f"question{'abcdefgh'[turn]}")]
        prompts.append(messages)
        messages = [*messages, reply(f"answer {'abcdefgh'[turn]}")]
    return prompts


def log(prompts: Sequence[Messages], session: str | None = "s", **more: Any) -> list[str]:
    return [
        json.dumps({"timestamp": 1e9 + at, "session_id": session, "messages": messages, "output": "fine", **more})
        for at, messages in enumerate(prompts)
    ]


def found(lines: Sequence[str], header: dict[str, Any] | None = None) -> dict[str, Finding]:
    return {finding.rule: finding for finding in lint(read(lines, words), header or {}, 0.5)}


def test_a_clean_log_has_no_findings() -> None:
    lines = [*log(talk()), *log(talk(3), "t"), *log(talk(2), None)]
    assert found(lines, HEADER) == {}
    kv = {"cached_tokens": 100_000, "miss": None, "forgotten": [], "codec": {"bf16": 9}, "preempted": 0}
    assert found(log(talk(), response={"kv": kv}), HEADER) == {}


def planted(name: str) -> list[Messages]:
    prompts = talk()
    for turn, messages in enumerate(prompts):
        prompts[turn] = _spoil(name, turn, messages)
    return prompts


def _spoil(name: str, turn: int, messages: Messages) -> Messages:
    if name == "timestamp":
        return [{"role": "system", "content": f"Today is 2025-10-0{turn + 1} 08:1{turn}:00. {SYSTEM}"}, *messages[1:]]
    if name == "id":
        return [{"role": "system", "content": f"Request 7f3{turn}c0-ab{turn}. {SYSTEM}"}, *messages[1:]]
    if name == "reordered":
        tools = [{"name": "find", "about": "books"}, {"name": "lend", "about": "cards"}]
        ordered = tools if turn % 2 else [dict(reversed(tool.items())) for tool in reversed(tools)]
        return [{"role": "system", "content": json.dumps(ordered) + SYSTEM}, *messages[1:]]
    if name == "reasoning_stripped":
        thought = "<think>" + " ".join(f"thought-{c}" for c in "abcdefghij" * 10) + "</think> "
        last = len(messages) - 2
        return [
            {**m, "content": thought + m["content"]} if m["role"] == "assistant" and at == last else m
            for at, m in enumerate(messages)
        ]
    if name == "system_edited":
        mood = ("calm", "merry", "stern", "tired")[turn]
        return [{"role": "system", "content": f"Mood: {mood}. {SYSTEM}"}, *messages[1:]]
    if name == "history_cut":
        return [messages[0], *messages[1 + 2 * max(0, turn - 1) :]]
    assert name == "edited"
    word = ("Well", "Hm", "So", "But")[turn]
    return [m if at != 1 else {**m, "content": f"{word} {m['content']}"} for at, m in enumerate(messages)]


@pytest.mark.parametrize(
    ("name", "message"),
    [("timestamp", 0), ("id", 0), ("reordered", 0), ("reasoning_stripped", 2), ("system_edited", 0),
     ("history_cut", 1), ("edited", 1)],
)  # fmt: skip
def test_each_pattern_is_found_and_no_other(name: str, message: int) -> None:
    findings = found(log(planted(name)), HEADER)
    assert list(findings) == [name]
    finding = findings[name]
    assert f"message {message}, token " in finding.where
    assert finding.tokens > 100
    assert finding.seconds == pytest.approx(finding.tokens * 0.5e-3)


def test_retokenised_turns() -> None:
    def other(prompt: object) -> Sequence[int]:
        ids = list(words(prompt))
        return [*ids[:200], *([7] if len(ids) > 600 else []), *ids[200:]]

    findings = lint(read(log(talk()), other), {}, 0.5)
    assert [finding.rule for finding in findings] == ["retokenised"]


def test_common_beginnings_that_change_between_sessions() -> None:
    lines = [line for n in range(5) for line in log(talk(1, f"It is {n}:30 PM. {SYSTEM}"), f"s{n}")]
    findings = found(lines)
    assert list(findings) == ["timestamp"]
    assert findings["timestamp"].requests == 4


def test_common_beginnings_kept_apart_by_salts() -> None:
    lines = [line for n in range(3) for line in log(talk(1), f"s{n}", cache_salt=f"salt{n}")]
    findings = found(lines)
    assert list(findings) == ["not_shared"]
    assert findings["not_shared"].evidence == "tenant or cache_salt"


def test_the_whole_history_computed_again_each_turn() -> None:
    usage = {"completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 0}}
    findings = found(log(talk(), response={"usage": usage}))
    assert list(findings) == ["history_recomputed"]
    assert findings["history_recomputed"].evidence == "cached_tokens"


def receipt(**more: Any) -> dict[str, Any]:
    return {"response": {"kv": {"cached_tokens": 100_000, **more}}}


def test_forgetting_that_may_be_taken_for_poor_reasoning() -> None:
    lines = log(talk(), **receipt(forgotten=[{"tokens": [10, 250], "policy": "trim"}]))
    findings = found(lines, HEADER)
    assert list(findings) == ["forgotten"]
    assert (findings["forgotten"].evidence, findings["forgotten"].tokens) == ("kv.forgotten", 4 * 240)
    findings = found(log(talk(), **receipt(codec={"bf16": 90, "int4": 64})), HEADER)
    assert list(findings) == ["recoded"]


def test_what_serving_in_fewer_bits_does_by_itself_is_no_loss() -> None:
    """The open block is in bf16, and the head of a full one is computed again for a prompt that ends inside it."""
    ends_inside = {"codec": {"int8": 128, "bf16": 19}, "recomputed_tokens": 29, "miss": {"reason": "below_minimum"}}
    assert found(log(talk(), **receipt(**ends_inside)), {**HEADER, "codec": "int8", "declared": ["memory"]}) == {}
    smaller = receipt(codec={"int8": 96, "int4": 32, "bf16": 19})
    assert list(found(log(talk(), **smaller), {**HEADER, "codec": "int8"})) == ["recoded"]


@pytest.mark.parametrize(
    ("kv", "evidence"),
    [({"preempted": 1, "recomputed_tokens": 70}, "kv.preempted"), ({"limit_cause": "pool"}, "kv.limit_cause"),
     ({"miss": {"reason": "evicted", "at_token": 3}}, "kv.miss.reason")],
)  # fmt: skip
def test_losses_under_policies_that_nobody_declared(kv: dict[str, Any], evidence: str) -> None:
    lines = log(talk(), **receipt(**kv))
    assert found(lines, HEADER) == {}
    findings = found(lines, {**HEADER, "declared": ["memory"]})
    assert list(findings) == ["no_policy_declared"]
    assert findings["no_policy_declared"].evidence == f"declared, {evidence}"


def loop(unique: int) -> Iterator[TraceRequest]:
    """Ten prompts of their own, over and over."""
    for at in range(100):
        first = unique * (at % 10)
        yield TraceRequest(float(at), 32 * unique, 5, tuple(range(first, first + unique)), 32)


@pytest.mark.parametrize(
    ("pool", "declared", "rules"),
    [
        (1000, ["memory"], []),
        (1000, [], []),
        (50, ["memory"], ["memory_too_small"]),
        (50, [], ["memory_never_planned"]),
        (100_000, [], ["memory_never_planned"]),
    ],
)
def test_memory_that_was_never_planned(pool: int, declared: list[str], rules: list[str]) -> None:
    findings = lint(loop(40), {"pool_blocks": pool, "declared": declared}, 0.5)
    assert [finding.rule for finding in findings] == rules


def test_what_more_memory_would_have_saved() -> None:
    (finding,) = lint(loop(40), {"pool_blocks": 200, "declared": ["memory"]}, 0.5)
    assert finding.tokens == 90 * 40 * 32
    assert "twice the KV memory would have saved 115200 prompt tokens" in finding.advice


def test_traces_without_text_tell_where_sessions_part() -> None:
    requests = [
        TraceRequest(0.0, 320, 5, tuple(range(10)), 32, session="s"),
        TraceRequest(1.0, 384, 5, (0, 1, *range(20, 30)), 32, session="s"),
    ]
    (finding,) = lint(requests, {}, 0.5)
    assert (finding.rule, finding.tokens, finding.where) == ("diverged", 256, "request 2, session s, token 64")


def test_findings_are_ranked_by_gain() -> None:
    lines = [*log(planted("history_cut"), "a"), *log(planted("timestamp") * 3, "b")]
    findings = lint(read(lines, words), {}, 0.5)
    assert len(findings) > 1
    assert [finding.tokens for finding in findings] == sorted((finding.tokens for finding in findings), reverse=True)
