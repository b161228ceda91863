"""From tokens to the text a client may see: whole characters, nothing of a stop, held back no longer than needed.

Lives in the engine's thread, because a stop string ends a sequence (docs/adr/0003).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tenure.types import Sampling, Token


class Decodes(Protocol):
    """One stream's incremental detokeniser."""

    def push(self, token: Token) -> str: ...

    def finish(self) -> str: ...


class StopMatcher:
    """Finds the first of several stop strings in text that comes in pieces."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Text that is safe to show, and the stop string that was completed, if one was.

        Of several the one that begins first counts, then the longer one. What could still become a stop is held back.
        """
        text = self._held + text
        found: tuple[int, int, str] | None = None
        for stop in self._stops:
            at = text.find(stop)
            if at >= 0 and (found is None or (at, -len(stop)) < found[:2]):
                found = (at, -len(stop), stop)
        if found is not None:
            self._held = ""
            return text[: found[0]], found[2]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        cut = len(text) - keep
        self._held = text[cut:]
        return text[:cut], None

    def finish(self) -> str:
        """What was held back and turned out to be no stop."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper beginning of `stop` that `text` ends with."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


class TextStream:
    """The text of one answer under way, and whether it has come to a stop.

    `push` each token, then `take` what may be shown. The eos token, a stop id and everything from a stop string on are
    never shown.
    """

    __slots__ = ("_decoder", "_eos", "_matcher", "_stop_ids", "_text", "_tokens", "stopped", "stopped_by")

    def __init__(self, decoder: Decodes, sampling: Sampling, eos_ids: frozenset[Token]) -> None:
        self._decoder = decoder
        self._eos = frozenset() if sampling.ignore_eos else eos_ids
        self._stop_ids = frozenset(sampling.stop_token_ids)
        self._matcher = StopMatcher(sampling.stop) if any(sampling.stop) else None
        self._text = ""
        self._tokens: list[Token] = []
        self.stopped = False
        self.stopped_by: str | int | None = None

    def push(self, token: Token) -> bool:
        """Take in the next token; True when it completed a stop."""
        self._tokens.append(token)
        if token in self._stop_ids:
            self.stopped, self.stopped_by = True, token
        elif token in self._eos:
            self.stopped = True
        else:
            self._say(self._decoder.push(token))
        return self.stopped

    def end(self) -> None:
        """No more tokens come: let out what was held back, unless it belongs behind a stop string."""
        if isinstance(self.stopped_by, str):
            return
        self._say(self._decoder.finish())
        if self._matcher is not None and not isinstance(self.stopped_by, str):
            self._text += self._matcher.finish()

    def take(self) -> tuple[str, tuple[Token, ...]]:
        """Text and tokens since the last time."""
        text, tokens = self._text, tuple(self._tokens)
        self._text = ""
        self._tokens.clear()
        return text, tokens

    @property
    def has_text(self) -> bool:
        return bool(self._text)

    def _say(self, text: str) -> None:
        if self._matcher is None:
            self._text += text
            return
        if not text:
            return
        safe, stop = self._matcher.push(text)
        self._text += safe
        if stop is not None:
            self.stopped, self.stopped_by = True, stop
