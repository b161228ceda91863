"""What the model can no longer see of a chat, in plain words and in the history."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

Message = Mapping[str, str]
WHO = {"system": "system", "user": "you", "assistant": "model"}
HIDDEN, PARTLY, SEEN = "✗", "~", " "


def unseen(forgotten: Sequence[Mapping[str, Any]]) -> tuple[set[int], set[int]]:
    """The messages that the model did not see, and those that it saw in part, by a receipt's `forgotten`."""
    trimmed = {number for part in forgotten if part["policy"] == "trim" for number in part["messages"]}
    slid = {number for part in forgotten if part["policy"] != "trim" for number in part["messages"]}
    return trimmed, slid - trimmed


def in_words(kv: Mapping[str, Any], messages: Sequence[Message]) -> str:
    """One or two sentences about a receipt that forgot something; empty for one that did not."""
    forgotten = kv.get("forgotten") or []
    trimmed, _ = unseen(forgotten)
    context = kv.get("context_limit", "?")
    said = []
    if trimmed:
        asked = sum(messages[number]["role"] == "user" for number in trimmed if number < len(messages))
        oldest = "your oldest question" if asked == 1 else f"your {asked} oldest questions"
        last = messages[max(trimmed)]["content"] if max(trimmed) < len(messages) else ""
        said.append(
            f"The model can no longer see {oldest} and what was answered, up to “{_short(last)}”: "
            f"with them the conversation does not fit its context of {context} tokens."
        )
    slid = [part["tokens"] for part in forgotten if part["policy"] == "slide"]
    if slid:
        count = sum(end - start for start, end in slid)
        said.append(
            f"The context of {context} tokens filled up, and the model went on without {count} tokens from the middle "
            "of the conversation; it still sees its very beginning and its most recent half."
        )
    return " ".join(said)


def history(messages: Sequence[Message], forgotten: Sequence[Mapping[str, Any]]) -> str:
    """The conversation, a line for each message, marked where the model does not see it."""
    if not messages:
        return "(nothing was said yet)"
    hidden, partly = unseen(forgotten)
    width = max(40, shutil.get_terminal_size().columns - 12)
    lines = []
    for number, message in enumerate(messages):
        mark = HIDDEN if number in hidden else PARTLY if number in partly else SEEN
        lines.append(f"{mark} {WHO.get(message['role'], message['role']):>6}  {_short(message['content'], width)}")
    if hidden or partly:
        lines.append("")
    if hidden:
        lines.append(f"{HIDDEN} the model can no longer see this")
    if partly:
        lines.append(f"{PARTLY} the model can no longer see all of this")
    return "\n".join(lines)


def _short(text: str, width: int = 40) -> str:
    return textwrap.shorten(text, width, placeholder=" …") or "…"
