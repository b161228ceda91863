"""`cache_control` becomes wishes to pin, and the receipt tells what became of them."""

from __future__ import annotations

from typing import Any

import pytest
from tests.server.conftest import Running

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


def test_a_part_pins_its_message_and_the_longest_time_counts(server: Running) -> None:
    parts = [
        {"type": "text", "text": "one", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
        {"type": "text", "text": "two", "cache_control": EPHEMERAL},
    ]
    assert server.chat(messages=[{"role": "user", "content": parts}], max_tokens=1).status_code == 200
    request = server.fake.handles[-1].request
    assert [(pin.end_token, pin.ttl_s) for pin in request.pins] == [(request.spans[0].end, 3600.0)]


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
