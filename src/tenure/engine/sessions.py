"""What this server said in each session, by its exact token ids, so that a later prompt can repeat them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import Any

from tenure.models.tokenizer import Tokenizer
from tenure.types import Scope, Token

_MAX_TURNS = 1024
"""Answers kept of one session: a client may use one session id for everything it ever asks."""
Said = tuple[str, str, tuple[tuple[str, str], ...]]
"""What a client was shown of an answer: reasoning, text, and calls as (name, arguments)."""
_MAX_TRIM = 64
"""Tokens dropped from an answer's end, at most, to find those that spell what the client was shown."""


class Sessions:
    """Answers by session and scope; the longest unused sessions are forgotten first. Threads may share it."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        max_tokens: int = 2_000_000,
        read: Callable[[str], Said] = lambda text: ("", text, ()),
    ) -> None:
        """`max_tokens` bounds the memory: about 8 bytes each. `read`: what clients are shown of an answer."""
        self._tokenizer = tokenizer
        self._read = read
        self._max_tokens = max_tokens
        self._tokens = 0
        self._turns: OrderedDict[tuple[str, Scope], list[tuple[Said, tuple[Token, ...]]]] = OrderedDict()
        self._lock = Lock()

    def remember(self, session_id: str, scope: Scope, text: str, tokens: Sequence[Token]) -> None:
        """An answer of the session: the `text` its client was shown and the tokens generated.

        Tokens that were cut off by a stop string must not come back as history, so the end is dropped until the rest
        spells the text; an answer cut inside a token is not remembered.
        """
        exact = self._spelling(text, tokens)
        if not exact:
            return
        said = self._read(text)
        with self._lock:
            turns = self._turns.setdefault((session_id, scope), [])
            turns.append((said, exact))
            self._turns.move_to_end((session_id, scope))
            self._tokens += len(exact)
            if len(turns) > _MAX_TURNS:
                self._tokens -= len(turns.pop(0)[1])
            while self._tokens > self._max_tokens and len(self._turns) > 1:
                _, gone = self._turns.popitem(last=False)
                self._tokens -= sum(len(ids) for _, ids in gone)

    def turns(self, session_id: str, scope: Scope, messages: Sequence[Mapping[str, Any]]) -> dict[int, Sequence[Token]]:
        """The exact ids of those assistant messages (by index) that this server generated in the session, in order."""
        with self._lock:
            said = list(self._turns.get((session_id, scope), ()))
            if said:
                self._turns.move_to_end((session_id, scope))
        found: dict[int, Sequence[Token]] = {}
        at = 0
        for index, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            shown = _shown(message)
            for turn in range(at, len(said)):
                if said[turn][0] == shown:
                    found[index] = said[turn][1]
                    at = turn + 1
                    break
        return found

    def _spelling(self, text: str, tokens: Sequence[Token]) -> tuple[Token, ...]:
        if not text:
            return ()
        for end in range(len(tokens), max(0, len(tokens) - _MAX_TRIM), -1):
            marked = self._tokenizer.decode(tokens[:end], marks=True)
            if text in (marked, self._tokenizer.decode(tokens[:end])):
                return tuple(tokens[:end])
            if len(marked) < len(text):
                return ()
        return ()


def _shown(message: Mapping[str, Any]) -> Said:
    """What a message that came back says was shown."""
    calls = message.get("tool_calls") or ()
    functions = [call["function"] for call in calls]
    return (
        message.get("reasoning_content") or "",
        message.get("content") or "",
        tuple((function["name"], function["arguments"]) for function in functions),
    )
