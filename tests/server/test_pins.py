"""`cache_control` becomes wishes to pin, and the receipt tells what became of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.server.conftest import Running

from tenure.server.pins import NOTE, read_pins
from tenure.server.serves import Prompt
from tenure.types import Forgotten, Pin, Span

EPHEMERAL = {"type": "ephemeral"}


def chat(*controls: Any) -> list[dict[str, Any]]:
    """Messages of 40 characters, some with a cache_control."""
    return [
        {"role": "assistant" if i % 2 else "user", "content": "x" * 40, **({"cache_control": c} if c else {})}
        for i, c in enumerate((*controls, None))
    ]


def test_a_message_is_pinned_up_to_its_end(server: Running) -> None:
    reply = server.chat(messages=chat(EPHEMERAL, None, {"type": "ephemeral", "ttl": "1h"}), max_tokens=1)
    request = server.fake.handles[-1].request
    ends = {span.message: span.end for span in request.spans}
    assert [(pin.end_token, pin.ttl_s) for pin in request.pins] == [(ends[0], 300.0), (ends[2], 3600.0)]
    pins = reply.json()["kv"]["pins"]
    assert [(pin["granted"], pin["tokens"], pin["ttl_s"]) for pin in pins] == [
        (True, ends[0] // 32 * 32, 300.0),
        (True, ends[2] // 32 * 32, 3600.0),
    ]
    assert pins[0]["reason"] is None


def parted(*controls: Any) -> list[dict[str, Any]]:
    """A chat whose first message has parts of 40 characters, some with a cache_control."""
    parts = [{"type": "text", "text": "x" * 40, **({"cache_control": c} if c else {})} for c in controls]
    return [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "?"},
    ]


def test_a_part_is_pinned_up_to_its_end_and_the_last_with_its_message(server: Running) -> None:
    long = {"type": "ephemeral", "ttl": "1h"}
    assert server.chat(messages=parted(long, None, EPHEMERAL, EPHEMERAL), max_tokens=1).status_code == 200
    request = server.fake.handles[-1].request
    first = 1 + len("<user>") + 41  # the line break that joins parts is the one that ends the message there
    pins = [(pin.end_token, pin.ttl_s, pin.note) for pin in request.pins]
    assert pins == [(first, 3600.0, None), (first + 82, 300.0, None), (request.spans[0].end, 300.0, None)]


def test_of_several_for_one_message_the_longest_counts(server: Running) -> None:
    messages = parted(None, {"type": "ephemeral", "ttl": "1h"})
    messages[0]["cache_control"] = EPHEMERAL
    assert server.chat(messages=messages, max_tokens=1).status_code == 200
    request = server.fake.handles[-1].request
    assert [(pin.end_token, pin.ttl_s) for pin in request.pins] == [(request.spans[0].end, 3600.0)]


def test_where_a_part_ends_is_not_always_known() -> None:
    """A template that writes the message differently when nothing follows; and a prompt whose middle is gone."""
    prompt = Prompt(tuple(range(100)), (Span(0, 10, 0), Span(10, 60, 1), Span(60, 100, 2)))
    messages = [chat()[0], parted(EPHEMERAL, None)[0], chat()[0]]

    def pin(prompt: Prompt, cut: list[int]) -> Pin:
        (found,) = read_pins(messages, prompt, lambda number, content: cut)
        return found

    assert pin(prompt, [*range(30), 999]) == Pin(30, 300.0)
    assert pin(prompt, list(range(30))) == Pin(30, 300.0)
    assert pin(prompt, list(range(99))) == Pin(60, 300.0), "never beyond its message"
    assert pin(prompt, [*range(9), 999]) == Pin(60, 300.0, NOTE)
    slid = replace(prompt, forgotten=(Forgotten(4, 50, (), "slide", "for this test"),))
    assert pin(slid, list(range(30))) == Pin(60, 300.0, NOTE)


def test_parts_of_a_trimmed_chat(server: Running) -> None:
    messages = [{"role": "assistant" if i % 2 else "user", "content": "x" * 400} for i in range(19)]
    parts = [{"type": "text", "text": "y" * 40, "cache_control": EPHEMERAL}, {"type": "text", "text": "z"}]
    messages[16] = {"role": "user", "content": parts}  # type: ignore[dict-item]
    receipt = server.chat(messages=messages, max_tokens=1, overflow="trim").json()["kv"]
    assert receipt["forgotten"]
    request = server.fake.handles[-1].request
    start = next(span.start for span in request.spans if span.message == 16)
    assert [pin.end_token for pin in request.pins] == [start + len("<user>") + 41]


def test_a_refused_pin_is_told(server: Running) -> None:
    messages = [{"role": "user", "content": "hi", "cache_control": EPHEMERAL}]
    (pin,) = server.chat(messages=messages, max_tokens=1).json()["kv"]["pins"]
    assert pin["granted"] is False
    assert pin["reason"] == "nothing to pin"


def test_what_was_trimmed_cannot_be_pinned_and_is_not_forgotten(server: Running) -> None:
    messages = [
        {
            "role": "assistant" if i % 2 else "user",
            "content": "x" * 400,
            **({"cache_control": EPHEMERAL} if i < 3 else {}),
        }
        for i in range(19)
    ]
    reply = server.chat(messages=messages, max_tokens=1, overflow="trim")
    assert reply.json()["kv"]["forgotten"]
    assert [pin["granted"] for pin in reply.json()["kv"]["pins"]] == [False] * 3


def test_without_wishes_there_is_nothing_to_tell(server: Running) -> None:
    assert "pins" not in server.chat(max_tokens=1).json()["kv"]


@pytest.mark.parametrize(
    "control",
    [{"type": "persistent"}, {}, "ephemeral", 1, {"type": "ephemeral", "ttl": "2h"}, {"type": "ephemeral", "ttl": 300}],
)
def test_wrong_controls_are_named(server: Running, control: Any) -> None:
    for messages in (
        [{"role": "user", "content": "hi", "cache_control": control}],
        [{"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": control}]}],
    ):
        reply = server.chat(messages=messages)
        assert reply.status_code == 400
        assert "cache_control" in reply.json()["error"]["param"]


def test_at_most_four(server: Running) -> None:
    assert server.chat(messages=chat(*[EPHEMERAL] * 4), max_tokens=1).status_code == 200
    error = server.chat(messages=chat(*[EPHEMERAL] * 5)).json()["error"]
    assert (error["param"], error["limit"]) == ("cache_control", 4)
