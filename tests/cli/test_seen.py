"""What `tenure chat` says of what the model can no longer see."""

from __future__ import annotations

from typing import Any

from tenure.cli.seen import history, in_words, unseen

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "My name is Ada."},
    {"role": "assistant", "content": "Hello Ada, it is nice to meet you and I hope that you are very well indeed."},
    {"role": "user", "content": "I like the sea."},
    {"role": "assistant", "content": "Noted."},
    {"role": "user", "content": "Who am I?"},
    {"role": "assistant", "content": "I can't say."},
]


def trimmed(*messages: int) -> dict[str, Any]:
    return {"tokens": [10, 60], "messages": list(messages), "policy": "trim", "reason": "too long"}


SLID = {"tokens": [4, 516], "messages": [0, 3], "policy": "slide", "reason": "full"}


def test_nothing_forgotten_nothing_said() -> None:
    assert in_words({"forgotten": [], "context_limit": 1024}, MESSAGES) == ""
    assert in_words({}, MESSAGES) == ""


def test_a_trimmed_conversation_in_plain_words() -> None:
    words = in_words({"forgotten": [trimmed(1, 2)], "context_limit": 1024}, MESSAGES)
    assert "can no longer see your oldest question and what was answered" in words
    assert "Hello Ada, it is nice to" in words
    assert "1024 tokens" in words
    more = in_words({"forgotten": [trimmed(1, 2, 3, 4)], "context_limit": 1024}, MESSAGES)
    assert "your 2 oldest questions" in more
    assert "“Noted.”" in more


def test_a_slide_in_plain_words() -> None:
    words = in_words({"forgotten": [SLID], "context_limit": 1024}, MESSAGES)
    assert "went on without 512 tokens from the middle" in words
    assert "can no longer see your" not in words


def test_the_history_marks_what_is_hidden_and_what_is_partly_seen() -> None:
    lines = history(MESSAGES, [trimmed(1, 2), SLID]).splitlines()
    assert [line[0] for line in lines[:7]] == ["~", "✗", "✗", "~", " ", " ", " "]
    assert "you  My name is Ada." in lines[1]
    assert lines[-2:] == ["✗ the model can no longer see this", "~ the model can no longer see all of this"]
    assert len(history(MESSAGES, []).splitlines()) == 7
    assert history([], []) == "(nothing was said yet)"


def test_hidden_wins_over_partly() -> None:
    assert unseen([trimmed(1), {**SLID, "messages": [1, 2]}]) == ({1}, {2})
