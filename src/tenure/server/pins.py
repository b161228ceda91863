"""`cache_control` on messages and their parts, as Anthropic has it: wishes that the prompt up to there stay held."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tenure.errors import InvalidRequest
from tenure.server.serves import Prompt
from tenure.types import Pin, Span, Token

TTLS = {"5m": 300.0, "1h": 3600.0}
MOST = 4
"""Wishes of one request, as Anthropic takes them."""


Cut = Callable[[int, str], Sequence[Token]]
"""The tokens of the prompt if it ended with message number so and so, of this content."""
NOTE = "this chat template does not tell where the part ends: it is pinned to the end of its message"


def read_pins(messages: Sequence[Mapping[str, Any]], prompt: Prompt, cut: Cut) -> tuple[Pin, ...]:
    """The pins that messages and their parts ask for, by where these end in the rendered prompt. Of several for one of
    them the longest lasts.

    A message that was left out of the prompt has nothing to pin; its wish goes on, to be refused in the receipt.
    """
    spans = {span.message: span for span in prompt.spans}
    wishes: dict[tuple[int, int | None], float] = {}
    for number, part, path, control in _controls(messages):
        wishes[number, part] = max(wishes.get((number, part), 0.0), _ttl(path, control))
    if len(wishes) > MOST:
        raise InvalidRequest(
            f"cache_control: at most {MOST} messages or parts may have one, not {len(wishes)}",
            param="cache_control",
            limit=MOST,
        )
    pins = []
    for (number, part), ttl_s in wishes.items():
        span, end, note = spans.get(number), None, None
        if span is not None and part is not None:
            end = _end_of_part(prompt, span, cut(number, _text(messages[number]["content"][: part + 1])))
            note = NOTE if end is None else None
        pins.append(Pin(end or (span.end if span else 0), ttl_s, note))
    return tuple(pins)


def _end_of_part(prompt: Prompt, span: Span, cut: Sequence[Token]) -> int | None:
    """Where a part of the message at `span` ends: as far as the prompt agrees with one `cut` behind that part. None
    when they part before the message begins: then the template renders it differently when something follows."""
    if any(part.policy == "slide" for part in prompt.forgotten):
        return None  # its middle is gone: positions do not compare
    agree = next((at for at, (a, b) in enumerate(zip(prompt.tokens, cut, strict=False)) if a != b), len(cut))
    return min(agree, span.end) if agree > span.start else None


def _text(parts: Sequence[Mapping[str, Any]]) -> str:
    """The parts as one content; the whole message is joined in the same way."""
    return "\n".join(part["text"] for part in parts)


def _controls(messages: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, int | None, str, Any]]:
    """Every cache_control there is: the message's number, that of the part unless it is the last one, the path to it
    and its value."""
    for number, message in enumerate(messages):
        path = f"messages[{number}]"
        if message.get("cache_control") is not None:
            yield number, None, f"{path}.cache_control", message["cache_control"]
        content = message.get("content")
        parts = content if isinstance(content, list) else []
        for at, part in enumerate(parts):
            if isinstance(part, dict) and part.get("cache_control") is not None:
                last = at == len(parts) - 1
                yield number, None if last else at, f"{path}.content[{at}].cache_control", part["cache_control"]


def _ttl(path: str, control: Any) -> float:
    """Seconds that a cache_control asks for."""
    if not isinstance(control, dict) or control.get("type") != "ephemeral":
        raise InvalidRequest(f'{path}: must be an object of type "ephemeral"', param=path)
    ttl = control.get("ttl") or "5m"
    if not isinstance(ttl, str) or ttl not in TTLS:
        raise InvalidRequest(f"{path}.ttl: must be one of {', '.join(TTLS)}", param=f"{path}.ttl")
    return TTLS[ttl]
