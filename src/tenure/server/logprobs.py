"""Logprobs as OpenAI writes them: for chats a list of entries, for completions four lists side by side."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Any

from tenure.types import Logprob, Token

TokenBytes = Callable[[Token], bytes]
LEAST = -9999.0
"""Stands for −∞, which JSON has no word for (as in vLLM)."""


def _number(value: float) -> float:
    return max(value, LEAST)


def _shown(piece: str, text: str, at: int) -> int:
    """How many characters of `text` from `at` on a token spells: none for a mark that was put before it, and one less
    than it says when it begins with the blank that some tokenizers put before a text."""
    if text.startswith(piece, at):
        return len(piece)
    return len(piece) - 1 if piece.startswith(" ") and text.startswith(piece[1:], at) else 0


class ChatLogprobs:
    """`choices[].logprobs` of chats."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._bytes = token_bytes

    def part(self, told: Sequence[Logprob]) -> dict[str, Any]:
        """The object for some tokens of an answer."""
        return {"content": [self._entry(one) for one in told], "refusal": None}

    def _entry(self, one: Logprob) -> dict[str, Any]:
        top = [self._token(token, value) for token, value in one.top]
        return {**self._token(one.token, one.logprob), "top_logprobs": top}

    def _token(self, token: Token, value: float) -> dict[str, Any]:
        spelled = self._bytes(token)
        return {"token": spelled.decode("utf-8", "replace"), "logprob": _number(value), "bytes": list(spelled)}


class TextLogprobs:
    """`choices[].logprobs` of one choice of completions: `text_offset` goes on from part to part."""

    def __init__(self, token_bytes: TokenBytes, offset: int) -> None:
        """`offset`: characters of the text that stand before the first token (the echo)."""
        self._bytes = token_bytes
        self._offset = offset
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def part(self, told: Sequence[Logprob]) -> dict[str, Any]:
        """The object for the next tokens of the answer. `top_logprobs` has the chosen token as well, as OpenAI does."""
        offsets = []
        for one in told:
            offsets.append(self._offset)
            self._offset += len(self._decode(self._bytes(one.token)))
        return {
            "text_offset": offsets,
            "token_logprobs": [_number(one.logprob) for one in told],
            "tokens": [self._name(one.token) for one in told],
            "top_logprobs": [self._top(one) for one in told],
        }

    def prompt(self, text: str, tokens: Sequence[Token], told: Sequence[Logprob]) -> dict[str, Any]:
        """The object for an echoed prompt: `text` is the echo, `told` are those of all `tokens` but the first, of which
        nothing can be said."""
        decode, offsets, at = codecs.getincrementaldecoder("utf-8")("replace").decode, [], 0
        for token in tokens:
            offsets.append(at)
            at += _shown(decode(self._bytes(token)), text, at)
        return {
            "text_offset": offsets,
            "token_logprobs": [None, *(_number(one.logprob) for one in told)],
            "tokens": [self._name(token) for token in tokens],
            "top_logprobs": [None, *(self._top(one) for one in told)],
        }

    def _top(self, one: Logprob) -> dict[str, float]:
        return {self._name(token): _number(value) for token, value in (*one.top, (one.token, one.logprob))}

    def _name(self, token: Token) -> str:
        """The token's text; bytes that are no whole characters are spelled out."""
        spelled = self._bytes(token)
        try:
            return spelled.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)
