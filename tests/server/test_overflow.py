"""What becomes of prompts that leave no room: which turns go, how seldom the cut moves, what the client is told."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
from tests.server.conftest import Running
from tests.server.fake import BOS, CONTEXT, FakeServes

from tenure.errors import ContextLengthExceeded
from tenure.overflow import Window
from tenure.server import trim as trimming
from tenure.server.serves import Prompt
from tenure.server.trim import fit, room
from tenure.types import Scope, Span
from tenure.views import TenantView

SCOPE = Scope("f" * 16)
Messages = list[dict[str, Any]]


def render(messages: Any) -> Prompt:
    return FakeServes().render(messages, session_id=None, scope=SCOPE)


def trim(messages: Messages, draw: Any, context: int, wanted: int | None, steps: int = 4) -> Prompt:
    return trimming.trim(messages, draw, Window(context, "context"), wanted, steps)


def slide(prompt: Prompt, context: int) -> Prompt:
    return trimming.slide(prompt, Window(context, "context"))


def say(role: str, size: int, mark: str = "x") -> dict[str, Any]:
    """A message of exactly `size` tokens in the fake's rendering."""
    return {"role": role, "content": mark * (size - len(f"<{role}>\n"))}


def talk(turns: int, size: int = 100) -> Messages:
    """A system message and so many turns of a question and an answer; the last one has no answer yet."""
    messages = [say("system", 50, "s")]
    for turn in range(turns):
        mark = chr(ord("a") + turn % 26)
        messages += [say("user", size, mark), say("assistant", size, mark)]
    return messages[:-1]


def test_what_fits_is_left_alone() -> None:
    messages = talk(4)
    assert trim(messages, render, 4096, 100) == render(messages)
    assert trim(messages, render, 4096, 100).forgotten == ()


def test_whole_oldest_turns_go_and_the_receipt_says_which() -> None:
    messages = talk(10)
    prompt = trim(messages, render, 1600, 200)
    assert len(prompt.tokens) <= 1400
    (gone,) = prompt.forgotten
    assert gone.policy == "trim"
    assert gone.messages == tuple(range(1, 1 + len(gone.messages)))
    assert len(gone.messages) % 2 == 0
    assert (gone.start, gone.end) == (51, 51 + 100 * len(gone.messages))
    kept = [0, *range(1 + len(gone.messages), len(messages))]
    assert prompt.tokens == render([messages[number] for number in kept]).tokens
    assert [span.message for span in prompt.spans] == kept, "spans keep the numbers the client knows"
    assert len(render(messages).tokens) == len(prompt.tokens) + gone.end - gone.start, "nothing else is missing"


def test_the_cut_moves_in_steps_so_that_the_prefix_stays() -> None:
    context, moves, last = 2000, 0, ()
    prompts: list[Prompt] = []
    for turns in range(1, 60):
        prompt = trim(talk(turns), render, context, 200)
        prompts.append(prompt)
        if prompt.forgotten:
            cut = prompt.forgotten[0].messages
            moves += cut != last
            last = cut
    trimmed = sum(bool(prompt.forgotten) for prompt in prompts)
    kept_prefix = sum(
        after.tokens[: len(before.tokens)] == before.tokens for before, after in pairwise(prompts) if before.forgotten
    )
    assert moves <= trimmed * 200 / (context / 4) + 2, "one cut for each quarter of the window that came in"
    assert kept_prefix >= trimmed - moves - 1


def test_without_steps_the_cut_moves_every_turn() -> None:
    cuts = {trim(talk(turns), render, 2000, 200, steps=2000).forgotten for turns in range(20, 40)}
    assert len(cuts) == 20


@pytest.mark.parametrize("seed", range(30))
def test_any_chat_keeps_system_newest_turn_and_room(seed: int) -> None:
    rng = random.Random(seed)
    messages: Messages = []
    for _ in range(rng.randrange(1, 40)):
        messages.append(
            say(rng.choice(["user", "assistant", "user", "assistant", "system", "tool"]), rng.randrange(12, 200))
        )
    messages.append(say("user", 60))
    context, wanted = rng.randrange(700, 3000), rng.choice([None, 10, 300, 5000])
    newest = max(i for i, m in enumerate(messages) if m["role"] == "user" and not _follows_a_user(messages, i))
    try:
        prompt = trim(messages, render, context, wanted)
    except ContextLengthExceeded as refused:
        needed = [m for i, m in enumerate(messages) if m["role"] == "system" or i >= newest]
        assert len(render(needed).tokens) > context - room(context, wanted)
        assert refused.numbers["prompt_tokens"] == len(render(messages).tokens)
        assert refused.numbers["limit"] == context
        return
    assert len(prompt.tokens) + room(context, wanted) <= context or not prompt.forgotten
    gone = {number for part in prompt.forgotten for number in part.messages}
    kept = [number for number in range(len(messages)) if number not in gone]
    assert prompt.tokens == render([messages[number] for number in kept]).tokens
    assert all(messages[number]["role"] != "system" for number in gone)
    assert max(gone, default=-1) < newest
    first = next((number for number in kept if messages[number]["role"] != "system"), None)
    if gone and first is not None:
        assert messages[first]["role"] == "user", "no result of a tool without its call, no answer without its question"
    assert sum(part.end - part.start for part in prompt.forgotten) == len(render(messages).tokens) - len(prompt.tokens)


def _follows_a_user(messages: Messages, at: int) -> bool:
    before = [m["role"] for m in messages[:at] if m["role"] != "system"]
    return bool(before) and before[-1] == "user"


def test_sliding_keeps_the_first_tokens_and_the_recent_half() -> None:
    tokens = tuple(range(1000))
    spans = (Span(0, 3, 0), Span(3, 500, 1), Span(500, 900, 2), Span(900, 1000, 3))
    assert slide(Prompt(tokens, spans), 1001) == Prompt(tokens, spans)
    slid = slide(Prompt(tokens, spans), 400)
    assert slid.tokens == tokens[:4] + tokens[800:]
    assert [(span.start, span.end, span.message) for span in slid.spans] == [
        (0, 3, 0),
        (3, 4, 1),
        (4, 104, 2),
        (104, 204, 3),
    ]
    (gone,) = slid.forgotten
    assert (gone.start, gone.end, gone.messages, gone.policy) == (4, 800, (1, 2), "slide")


def test_refuse_leaves_it_to_the_engine() -> None:
    assert len(fit(talk(100), render, "refuse", Window(500, "context"), 10).tokens) > 500


LONG = talk(60)


def test_a_trimmed_chat_over_http(server: Running) -> None:
    for asked in ({"overflow": "trim"}, {"truncation": "auto"}):
        reply = server.chat(messages=LONG, max_tokens=64, **asked)
        assert reply.status_code == 200
        request = server.fake.handles[-1].request
        assert len(request.tokens) <= CONTEXT - 64
        assert request.overflow == "trim"
        (gone,) = reply.json()["kv"]["forgotten"]
        assert gone["policy"] == "trim"
        assert gone["tokens"][0] == 51
        assert gone["messages"][0] == 1
        assert gone["messages"] == list(request.forgotten[0].messages)
        assert str(CONTEXT) in gone["reason"]


def test_a_trimmed_stream_says_so_at_its_end(server: Running) -> None:
    chunks = list(
        server.client.chat.completions.create(
            model="fake",
            messages=LONG,
            max_tokens=8,
            stream=True,
            extra_body={"overflow": "trim"},  # type: ignore[arg-type]
        )
    )
    assert chunks[-1].model_extra is not None
    assert chunks[-1].model_extra["kv"]["forgotten"][0]["policy"] == "trim"


def test_a_newest_turn_that_alone_is_too_long_is_refused(server: Running) -> None:
    messages = [*talk(3), {"role": "assistant", "content": "ok"}, {"role": "user", "content": "z" * CONTEXT}]
    reply = server.chat(messages=messages, max_tokens=16, overflow="trim")
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["limit"]) == (400, "context_length_exceeded", CONTEXT)
    assert error["requested_tokens"] == error["prompt_tokens"] + 16


@pytest.mark.parametrize(("blocks", "mine"), [(40, None), (200, 40)])
def test_what_the_pool_can_ever_hold_is_a_window_too(
    server: Running, monkeypatch: pytest.MonkeyPatch, blocks: int, mine: int | None
) -> None:
    """A pool smaller than the context, or a tenant's part of it: 1280 tokens."""
    monkeypatch.setattr(server.fake, "blocks", blocks)
    monkeypatch.setattr(server.fake, "tenants", (TenantView("", 1.0, 0, 0, 0, 0, 0, 0.0, 0.0, mine),))
    name = "the KV cache" if mine is None else "its tenant's part of the KV cache"
    receipt = server.chat(messages=talk(30), max_tokens=64, overflow="trim").json()["kv"]
    assert receipt["prompt_tokens"] <= 1280 - 64
    assert receipt["forgotten"][0]["reason"] == f"the conversation has 5951 tokens and {name} room for 1280"
    long = [{"role": "user", "content": "z" * 2000}]
    error = server.chat(messages=long, max_tokens=16, overflow="trim").json()["error"]
    assert (error["code"], error["param"], error["limit"]) == ("kv_capacity_exceeded", "messages", 1280)
    assert f"no room for an answer in the 1280 tokens of {name}" in error["message"]
    assert server.complete(prompt=[BOS] * 3000, max_tokens=4, overflow="slide").status_code == 200
    request = server.fake.handles[-1].request
    assert len(request.tokens) == 640 + 4
    assert request.forgotten[0].reason == f"the conversation outgrew {name}"


def test_where_all_layers_have_windows_a_small_pool_is_no_window(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They let go of what they no longer see: a sequence may outgrow the pool, so nothing has to be left out."""
    monkeypatch.setattr(server.fake, "blocks", 40)
    monkeypatch.setattr(server.fake, "longest", 1 << 40)
    receipt = server.chat(messages=talk(15), max_tokens=64, overflow="trim").json()["kv"]
    assert receipt["prompt_tokens"] > 1280 and not receipt["forgotten"]
    assert server.complete(prompt=[BOS] * 3000, max_tokens=4, overflow="slide").status_code == 200
    assert len(server.fake.handles[-1].request.tokens) == 3000


def test_slide_and_refuse_reach_the_engine(server: Running) -> None:
    assert server.complete(prompt=[BOS] * (3 * CONTEXT), max_tokens=4, overflow="slide").status_code == 200
    request = server.fake.handles[-1].request
    assert len(request.tokens) == CONTEXT // 2 + 4
    assert request.forgotten[0].end == 3 * CONTEXT - CONTEXT // 2
    assert server.chat(max_tokens=4, truncation="disabled").status_code == 200
    assert server.fake.handles[-1].request.overflow == "refuse"


def test_what_several_prompts_forgot_is_told_of_all(server: Running) -> None:
    prompts = [[BOS] * (2 * CONTEXT), [BOS] * (3 * CONTEXT), [BOS] * 5]
    receipt = server.complete(prompt=prompts, max_tokens=1, overflow="slide").json()["kv"]
    ends = [part["tokens"][1] for part in receipt["forgotten"]]
    assert ends == [2 * CONTEXT - CONTEXT // 2, 3 * CONTEXT - CONTEXT // 2]


def test_counting_tokens_counts_all_of_them(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.fake, "overflow", "trim")
    whole = server.http.post("/tokenize", json={"messages": LONG}).json()["count"]
    assert whole > CONTEXT
    assert server.http.post("/tokenize", json={"messages": LONG, "overflow": "trim"}).json()["count"] < CONTEXT
    assert server.chat(messages=LONG, max_tokens=1).json()["kv"]["forgotten"], "the server's default"


def test_contradictions_and_unknown_values_are_refused(server: Running) -> None:
    for body in ({"overflow": "slide", "truncation": "auto"}, {"overflow": "rolling"}, {"truncation": True}):
        reply = server.chat(**body)
        assert reply.status_code == 400, body
        assert reply.json()["error"]["param"] in body
