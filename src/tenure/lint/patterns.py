"""What changed between two texts that should have been the same, as far as it can be told."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

Pattern = Literal[
    "timestamp", "id", "reordered", "reasoning_stripped", "retokenised", "system_edited", "history_cut", "edited"
]
ADVICE: Mapping[Pattern, str] = {
    "timestamp": "move the time out of the beginning: into the last message, or down to the day",
    "id": "move the changing id (request, session, user) behind what all prompts share, or drop it",
    "reordered": "write tools and JSON in a fixed order (sort the keys): the same in another order shares nothing",
    "reasoning_stripped": "send the reasoning of earlier turns back as it was, or never keep it at all",
    "retokenised": "send a session_id, so that earlier answers are spliced in by their exact tokens",
    "system_edited": "keep the system prompt fixed within a conversation; say what is new in the newest message",
    "history_cut": "cut the history rarely and by much, not by a little every turn: each cut computes the rest again",
    "edited": "append to the conversation instead of changing what was said",
}
_TIME = re.compile(
    r"\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d)?(?:\.\d+)?(?:Z|[+-]\d\d:?\d\d)?)?"
    r"|\d{1,2}:\d\d(?::\d\d)?(?:\s?[AP]M)?"
    r"|\d{1,2}[./]\d{1,2}[./]\d{2,4}"
    r"|\b(?:Mon|Tues?|Wed(?:nes)?|Thu(?:rs)?|Fri|Sat(?:ur)?|Sun)(?:day)?\b"
    r"|\b\d{0,2}\s?(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*\.?\s\d{1,4}(?:,?\s\d{4})?"
    r"|\b1[5-9]\d{8}(?:\d{3}){0,2}\b"
)
_ID = re.compile(r"\b(?=[\w-]*\d)[0-9A-Za-z]+(?:[-_][0-9A-Za-z]+)*\b")
_THOUGHT = re.compile(r"<(think|thinking|reasoning)>.*?</\1>\s*", re.DOTALL)


def text_of(message: object) -> str:
    """A message's text, with its role and whatever else it carries."""
    if isinstance(message, str):
        return message
    if isinstance(message, Mapping):
        content = message.get("content")
        rest = {name: value for name, value in message.items() if name not in ("content", "role") and value}
        return (content if isinstance(content, str) else _flat(content)) + (_flat(rest) if rest else "")
    return _flat(message)


def _flat(value: object) -> str:
    return "" if value is None else json.dumps(value, ensure_ascii=False)


def masked(text: str) -> str:
    """Without times and ids."""
    return _ID.sub("#", _TIME.sub("@", text))


def kin(text: str) -> tuple[str, ...]:
    """Equal for texts that differ by times, ids and order only."""
    return tuple(sorted(_words(masked(text))))


def _words(text: str) -> list[str]:
    return re.findall(r"\w+|@|#", text)


def changed(old: str, new: str, *, system: bool = False) -> Pattern:
    """What makes `new` differ from `old`; they are different."""
    if _TIME.sub("@", old) == _TIME.sub("@", new):
        return "timestamp"
    if masked(old) == masked(new):
        return "id"
    if _THOUGHT.search(old) and _THOUGHT.sub("", old).strip() == _THOUGHT.sub("", new).strip():
        return "reasoning_stripped"
    if _same_json(old, new) or sorted(_words(old)) == sorted(_words(new)) or kin(old) == kin(new):
        return "reordered"
    return "system_edited" if system else "edited"


def _same_json(old: str, new: str) -> bool:
    try:
        return bool(json.loads(old) == json.loads(new))
    except ValueError:
        return False


def diverged(old: object, new: object) -> tuple[int | None, Pattern]:
    """Where two prompts part, as the number of a message (None in plain texts), and the pattern. `old` is not a
    beginning of `new` by its tokens."""
    if not isinstance(old, list) or not isinstance(new, list):
        return None, changed(str(old), str(new)[: len(str(old))] if _grown(str(old), str(new)) else str(new))
    for at, (before, after) in enumerate(zip(old, new, strict=False)):
        if before != after:
            if _cut(old, new, at):
                return at, "history_cut"
            return at, changed(text_of(before), text_of(after), system=_role(before) == "system")
    return (None, "retokenised") if len(new) >= len(old) else (len(new), "history_cut")


def _grown(old: str, new: str) -> bool:
    return len(new) > len(old)


def _cut(old: Sequence[Any], new: Sequence[Any], at: int) -> bool:
    """Whether what comes at `at` stood further behind before: something in between was dropped."""
    return at < len(new) and new[at] in old[at + 1 :]


def _role(message: object) -> str:
    return str(message.get("role", "")) if isinstance(message, Mapping) else ""
