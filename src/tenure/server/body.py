"""From the bytes of a body to a validated model: strict JSON, and every error names its field."""

from __future__ import annotations

import json
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from tenure.errors import InvalidRequest

M = TypeVar("M", bound=BaseModel)
MAX_DEPTH = 100
MAX_VALUES = 1_000_000
"""Brackets and commas of a body, those in its strings included: each may become an object 20 times its size, and the
parser lets no other thread run meanwhile."""


class Strict(BaseModel):
    """Base of all request bodies: no coercion, no NaN, unknown fields ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


def parse_object(body: bytes) -> dict[str, Any]:
    """A JSON object, or InvalidRequest: not UTF-8, duplicate keys, NaN, lone surrogates, too deep, not an object."""
    if sum(body.count(mark) for mark in (b"{", b"[", b",")) > MAX_VALUES:
        raise InvalidRequest(f"the body has more than {MAX_VALUES} brackets and commas", limit=MAX_VALUES)
    try:
        value = json.loads(body.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
        if b"\\u" in body:
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not UTF-8: {error.reason} at byte {error.start}") from error
    except UnicodeEncodeError as error:
        raise InvalidRequest("the body has half a surrogate pair (\\ud800–\\udfff) in a string") from error
    except json.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not JSON: {error.msg} at character {error.pos}") from error
    except RecursionError as error:
        raise InvalidRequest("the body is nested too deeply") from error
    except ValueError as error:  # integers of thousands of digits
        raise InvalidRequest("the body holds a number that is too long") from error
    if not isinstance(value, dict):
        raise InvalidRequest("the body must be a JSON object")
    return value


def check_depth(value: Any, param: str) -> None:
    """Raise InvalidRequest when objects and lists lie in each other more than MAX_DEPTH deep: nothing that reads such a
    value by recursion, here or in a template, may meet its end in it."""
    level, depth = [value], 0
    while level:
        if depth > MAX_DEPTH:
            raise InvalidRequest(f"{param}: is nested more than {MAX_DEPTH} deep", param=param, limit=MAX_DEPTH)
        inner: list[Any] = []
        for one in level:
            if isinstance(one, dict | list):
                inner.extend(one.values() if isinstance(one, dict) else one)
        level, depth = inner, depth + 1


def validate(kind: type[M], value: dict[str, Any]) -> M:
    """The model, or InvalidRequest that names the first wrong field, the limit and what was sent."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        param, message = _first(error)
    # Raised outside, so that the refusal does not keep the whole body alive through pydantic's error.
    raise InvalidRequest(message, param=param)


def _first(error: ValidationError) -> tuple[str, str]:
    """The field and the message of the first mistake."""
    first = error.errors(include_url=False)[0]
    param = _path(first["loc"])
    message = first["msg"].removeprefix("Value error, ").removeprefix("Input ")
    given = first["input"]
    tell = isinstance(given, int | float | str) and first["type"] != "missing" and "not built" not in message
    shown = f", not {_short(given)}" if tell else ""
    return param, f"{param}: {message[:1].lower()}{message[1:]}{shown}"


def _short(value: Any) -> str:
    return repr(value[:64]) if isinstance(value, str) else f"{value!r:.64}"


def _path(loc: tuple[int | str, ...]) -> str:
    path = ""
    for part in loc:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path or "body"


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise InvalidRequest(f"the key {twice!r:.64} occurs twice", param=twice[:64])
    return value


def _no_constant(name: str) -> NoReturn:
    raise InvalidRequest(f"{name} is not JSON")
