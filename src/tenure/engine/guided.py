"""Answers that must be JSON of a schema, match an expression, be one of several, or follow a grammar.

llguidance computes, for each state of a grammar, which tokens may come next: a bit for each, in some microseconds for a
JSON schema and some tens for an expression. A grammar is compiled once, before the engine hears of the request, and
copied for each answer.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from functools import cached_property
from threading import Lock

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import any_to_lark
from numpy.typing import NDArray

from tenure.engine.shape import Guided
from tenure.errors import InvalidRequest
from tenure.models.tokenizer import Tokenizer
from tenure.types import Guide, GuideKind, Token

MAX_CHARS = 1 << 18
"""Characters of a guide: the largest compile in some tenths of a second."""
_KEPT = 64
_NO_TOKEN = "NoExtensionBias"
"""llguidance's word for a state in which no token may come next."""
_IMPOSSIBLE: dict[GuideKind, str] = {
    "json_schema": "no value satisfies it: it refers back to itself without an end, or its keywords contradict each "
    "other; a schema must allow at least one finite value",
    "regex": "nothing matches it; an expression must match at least one text",
    "choice": "none of them can be written; the list must hold at least one text",
    "grammar": "no text follows it: a rule needs itself to come to its end; a grammar (Lark, or EBNF as llama.cpp "
    "writes it) must derive at least one finite text from its first rule",
}
_SPACE = r"(\x20|\n\x20{0,24})"
"""White space between JSON tokens. Bounded: a small model can be led to write blanks for ever."""


class Matcher:
    """The state of one guided answer."""

    def __init__(self, matcher: LLMatcher, vocab: int) -> None:
        self.matcher = matcher
        self.vocab = vocab

    @property
    def error(self) -> str | None:
        """Why the answer cannot go on: a limit on the work per token, in most cases."""
        return self.matcher.get_error().splitlines()[0] if self.matcher.is_error() else None

    def consume(self, token: Token) -> None:
        """The token that was chosen."""
        self.matcher.consume_token(token)


def ask(guided: Sequence[Guided]) -> NDArray[np.int32]:
    """Which tokens may come next, by guide: a bit for each token, int32[G, ⌈V / 32⌉], G above 0.

    One after the other, after the native call. Measured: two threads of llguidance take as long as one for the same
    masks, and one beside the native call takes the cores from its team, whose others then wait.
    """
    matchers = [one for one in guided if isinstance(one, Matcher)]
    words = -(-matchers[0].vocab // 32)
    bits = np.zeros((len(matchers), words), np.int32)
    # By address: to slice an array and ask its address takes as long as an easy mask.
    start, size = bits.ctypes.data, words * bits.itemsize
    for at, one in enumerate(matchers):
        one.matcher.unsafe_compute_mask_ptr(start + at * size, size)
    return bits


class _Words:
    """A tokenizer as llguidance wants to see one: ours, so that a mask and a decoded text never disagree on a byte."""

    def __init__(self, tokenizer: Tokenizer, vocab: int, eos: Token) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = eos
        self.bos_token_id = tokenizer.bos_id
        self.tokens = [tokenizer.token_bytes(token) for token in range(vocab)]
        self.special_token_ids = sorted(tokenizer.special_ids)

    def __call__(self, text: bytes) -> list[Token]:
        return self._tokenizer.encode(text.decode("utf-8", "replace"))


class Guides:
    """The compiled guides of one model; the least used are forgotten. Threads may share it."""

    def __init__(self, tokenizer: Tokenizer, vocab: int, eos_ids: Iterable[Token]) -> None:
        self._tokenizer = tokenizer
        self._vocab = vocab
        self._eos_ids = sorted(eos_ids)
        self._limits = LLParserLimits(verbose_errors=False)
        self._compiled: OrderedDict[Guide, LLMatcher] = OrderedDict()
        self._lock = Lock()

    def check(self, guide: Guide) -> None:
        """Compile a guide. InvalidRequest when it is broken, cannot be satisfied, is too large or of a kind unknown."""
        self.start(guide)

    def start(self, guide: Guide) -> Matcher:
        """The state before an answer's first token."""
        with self._lock:
            compiled = self._compiled.get(guide)
        # Not under the lock: who has a compiled guide must not wait for who compiles one.
        compiled = self._compile(guide) if compiled is None else compiled
        with self._lock:
            self._compiled[guide] = compiled
            self._compiled.move_to_end(guide)
            if len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
            return Matcher(compiled.deep_copy(), self._vocab)

    @cached_property
    def _tokens(self) -> LLTokenizer:
        # Takes a third of a second, so only those who need it pay.
        words = TokenizerWrapper(_Words(self._tokenizer, self._vocab, self._eos_ids[0] if self._eos_ids else 0))
        return LLTokenizer(words, n_vocab=self._vocab, eos_token=self._eos_ids or None)

    def _compile(self, guide: Guide) -> LLMatcher:
        if len(guide.text) > MAX_CHARS:
            raise InvalidRequest(f"may have {MAX_CHARS} characters at most, not {len(guide.text)}", limit=MAX_CHARS)
        matcher = LLMatcher(self._tokens, _grammar(guide), log_level=0, limits=self._limits)
        if not matcher.is_error():
            # The first mask finds what compiling does not: an expression that nothing matches, a limit on its size.
            allowed = matcher.deep_copy()
            if any(allowed.compute_bitmask()) and not allowed.is_error():
                return matcher
            error = allowed.get_error().splitlines()[0] if allowed.is_error() else _NO_TOKEN
            raise InvalidRequest(_IMPOSSIBLE[guide.kind] if error == _NO_TOKEN else error)
        raise InvalidRequest(" ".join(matcher.get_error().split()))


def _grammar(guide: Guide) -> str:
    """The guide in llguidance's own form."""
    try:
        if guide.kind == "json_schema":
            return LLMatcher.grammar_from_json_schema(guide.text, defaults={"whitespace_pattern": _SPACE})
        if guide.kind == "regex":
            return LLMatcher.grammar_from_regex(guide.text)
        if guide.kind == "choice":
            choices = [json.dumps(choice, ensure_ascii=False) for choice in json.loads(guide.text)]
            if not choices:
                raise InvalidRequest("must have a choice")
            return LLMatcher.grammar_from_lark(f"start: {' | '.join(choices)}")
    except ValueError as error:
        raise InvalidRequest(str(error)) from error
    try:
        return LLMatcher.grammar_from_lark(any_to_lark(guide.text))
    except Exception as error:  # the converter raises nothing more precise
        raise InvalidRequest(f"is no grammar: {error}") from error
