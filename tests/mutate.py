"""Seeded mutations of what is valid: of JSON values, of the text of JSON, and of the bytes of files."""

from __future__ import annotations

import copy
import random
from typing import Any

ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, -(2**63), 2**64, 10**40, 0.5, -1e-300, 1e308, "", " ", "x", "0", "null", "é🙂",
    "\x00", "\u202e", "x" * 3000, "{{ 1/0 }}", "<|im_end|>", "../../etc/passwd", [], [[]], [None], ["a", 1, {}], {},
    {"": ""}, {"a": {"b": []}}, [[[[[[[[[[]]]]]]]]]], list(range(50)),
)  # fmt: skip
"""What clients and files are not expected to say."""


def odd(chance: random.Random) -> Any:
    """One of them, free to be changed."""
    return copy.deepcopy(chance.choice(ODD))


def mutated(value: Any, chance: random.Random) -> Any:
    """A copy of a JSON value with one to three changes, anywhere in it."""
    value = copy.deepcopy(value)
    for _ in range(chance.randint(1, 3)):
        places = [place for place in _places(value) if place[1] is not None]
        if not places:
            return odd(chance)
        holder, key = chance.choice(places)
        _change(holder, key, chance)
    return value


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every (holder, key or index) in a value."""
    found: list[tuple[Any, Any]] = []
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        found.append((value, key))
        found += _places(value[key])
    return found


def _change(holder: Any, key: Any, chance: random.Random) -> None:
    what = chance.randrange(8)
    if what == 0:
        del holder[key]
    elif what == 1 and isinstance(holder, dict):
        holder[chance.choice(["", "x", str(key) * 2, "$ref"])] = holder.pop(key)
    elif what == 2 and isinstance(holder, list):
        holder[key:key] = [holder[key]] * chance.choice([1, 2, 70])
    elif what == 3:
        holder[key] = [holder[key]]
    elif what == 4 and isinstance(holder[key], int | float):
        holder[key] = chance.choice([-holder[key], holder[key] * 1000, str(holder[key]), holder[key] + 0.5])
    else:
        holder[key] = odd(chance)


def spoiled(data: bytes, chance: random.Random, upto: int | None = None) -> bytes:
    """Bytes with one to four changes within the first `upto`: flipped, dropped, doubled, cut, swapped, replaced by
    numbers that are too large or by what is no UTF-8."""
    raw = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        end = max(1, min(len(raw), upto or len(raw)))
        at = chance.randrange(end)
        size = min(chance.choice([1, 2, 4, 8, 40]), end - at)
        what = chance.randrange(8)
        if what == 0:
            del raw[at : at + size]
        elif what == 1:
            raw[at:at] = raw[at : at + size]
        elif what == 2:
            del raw[max(1, at) :]
        elif what == 3:
            other = chance.randrange(end)
            raw[at : at + size], raw[other : other + size] = raw[other : other + size], raw[at : at + size]
        elif what == 4:
            raw[at : at + size] = chance.choice([b"\xff", b"\x00", b"\x7f", b"\x80"]) * size
        elif what == 5:
            raw[at:at] = chance.choice(
                [b"\xff\xfe", b"\xed\xa0\x80", b"\xc3", b'"', b"{", b"}", b"[", b"\\u0000", b",", b"1e999"]
            )
        else:
            raw[at] ^= 1 << chance.randrange(8)
        if not raw:
            raw = bytearray(b"\x00")
    return bytes(raw)
