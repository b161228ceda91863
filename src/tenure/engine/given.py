"""Options of the Python API are checked before anything is done: a wrong one is told by name, to its caller alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tenure.errors import InvalidRequest

MOST_STOPS = 1024
MOST_ANSWERS = 1024
INT31 = 2**31 - 1
INT63 = 2**63 - 1

_INTEGERS: dict[str, tuple[int, int]] = {
    "max_tokens": (1, INT31), "top_k": (-1, INT31), "seed": (-INT63 - 1, INT63), "min_tokens": (0, INT31),
    "logprobs": (0, INT31), "prompt_logprobs": (0, INT31), "n": (1, MOST_ANSWERS), "priority": (-INT31 - 1, INT31),
}  # fmt: skip
_NUMBERS: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0), "top_p": (0.0, 1.0), "min_p": (0.0, 1.0), "repetition_penalty": (0.0, 100.0),
    "presence_penalty": (-100.0, 100.0), "frequency_penalty": (-100.0, 100.0),
}  # fmt: skip
_ABOVE = {"top_p", "repetition_penalty"}
"""What may not be the least value itself."""


def check(options: Mapping[str, Any]) -> None:
    """Raise InvalidRequest that names the first option of a wrong type or out of its range. None stands for absent."""
    for name, value in options.items():
        if value is None:
            continue
        wrong = _wrong(name, value)
        if wrong is not None:
            raise InvalidRequest(f"{name}: must be {wrong}, not {value!r:.60}", param=name)


def _wrong(name: str, value: Any) -> str | None:
    """What an option must be, when it is not."""
    if name in _INTEGERS:
        low, high = _INTEGERS[name]
        return None if _integer(value) and low <= value <= high else f"an integer from {low} to {high}"
    if name in _NUMBERS:
        least, most = _NUMBERS[name]
        good = _number(value) and least <= value <= most and not (name in _ABOVE and value == least)
        return None if good else f"a number {'above' if name in _ABOVE else 'from'} {least:g} to {most:g}"
    kind, says = _KINDS.get(name, (lambda value: True, ""))
    return None if kind(value) else says


def _integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _texts(value: Any, most: int) -> bool:
    many = isinstance(value, Sequence) and not isinstance(value, str) and len(value) <= most
    return many and all(isinstance(text, str) and text for text in value)


def _flag(value: Any) -> bool:
    return isinstance(value, bool)


def _text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _stops(value: Any) -> bool:
    return _text(value) or _texts(value, MOST_STOPS)


def _ids(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and all(map(_integer, value))


def _biases(value: Any) -> bool:
    return isinstance(value, Mapping) and all(_integer(token) and _number(bias) for token, bias in value.items())


def _mappings(value: Any) -> bool:
    return isinstance(value, Sequence) and all(isinstance(item, Mapping) for item in value)


_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "ignore_eos": (_flag, "True or False"),
    "logits": (_flag, "True or False"),
    "session_id": (_text, "a text, and not an empty one"),
    "cache_salt": (lambda value: isinstance(value, str), "a text"),
    "regex": (_text, "a text, and not an empty one"),
    "grammar": (_text, "a text, and not an empty one"),
    "stop": (_stops, f"a text or up to {MOST_STOPS} of them, none empty"),
    "stop_token_ids": (_ids, "token ids"),
    "logit_bias": (_biases, "a mapping from token ids to numbers"),
    "json_schema": (lambda value: isinstance(value, Mapping | bool), "a JSON schema"),
    "choices": (lambda value: _texts(value, INT31), "texts, none empty"),
    "tools": (_mappings, "a list of tools"),
    "template": (lambda value: isinstance(value, Mapping), "a mapping"),
}
