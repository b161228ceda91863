"""`cache_control` on messages and their parts, as Anthropic has it: wishes that the prompt up to there stay held."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tenure.errors import InvalidRequest
from tenure.types import Pin, Span

TTLS = {"5m": 300.0, "1h": 3600.0}
MOST = 4
"""Wishes of one request, as Anthropic takes them."""


def read_pins(messages: Sequence[Mapping[str, Any]], spans: Sequence[Span]) -> tuple[Pin, ...]:
    """The pins that messages ask for, by where their rendering ends. Of several in one message the longest lasts.

    A message that was left out of the prompt has nothing to pin; its wish goes on, to be refused in the receipt.
    """
    ends = {span.message: span.end for span in spans}
    wishes: dict[int, float] = {}
    for number, path, control in _controls(messages):
        wishes[number] = max(wishes.get(number, 0.0), _ttl(path, control))
    if len(wishes) > MOST:
        raise InvalidRequest(
            f"cache_control: at most {MOST} messages may have one, not {len(wishes)}", param="cache_control", limit=MOST
        )
    return tuple(Pin(ends.get(number, 0), ttl_s) for number, ttl_s in wishes.items())


def _controls(messages: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, str, Any]]:
    """Every cache_control there is: the message's number, the path to it and its value."""
    for number, message in enumerate(messages):
        path = f"messages[{number}]"
        if message.get("cache_control") is not None:
            yield number, f"{path}.cache_control", message["cache_control"]
        content = message.get("content")
        for at, part in enumerate(content if isinstance(content, list) else ()):
            if isinstance(part, dict) and part.get("cache_control") is not None:
                yield number, f"{path}.content[{at}].cache_control", part["cache_control"]


def _ttl(path: str, control: Any) -> float:
    """Seconds that a cache_control asks for."""
    if not isinstance(control, dict) or control.get("type") != "ephemeral":
        raise InvalidRequest(f'{path}: must be an object of type "ephemeral"', param=path)
    ttl = control.get("ttl") or "5m"
    if not isinstance(ttl, str) or ttl not in TTLS:
        raise InvalidRequest(f"{path}.ttl: must be one of {', '.join(TTLS)}", param=f"{path}.ttl")
    return TTLS[ttl]
