"""Answers that must be JSON of a schema, match an expression, be one of several, or follow a grammar.

llguidance computes, for each state of a grammar, which tokens may come next: a bit for each, in some microseconds for a
JSON schema and up to some hundreds for an expression; so the masks of expressions are kept. A grammar is compiled once,
before the engine hears of the request, and copied for each answer.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from threading import Lock

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import any_to_lark
from numpy.typing import NDArray

from tenure.engine.expression import Expression, Place, read
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


Bits = NDArray[np.int32]
KEPT_BYTES = 16 << 20
"""Of masks, those of all guides together."""
_KEY_BYTES = 2048
"""What a mask is kept under takes less."""
_LOOKED_AT = 64
"""Words of a mask, those of the shortest tokens."""


@dataclass(frozen=True, slots=True)
class Words:
    """The bytes of each token of a vocabulary."""

    tokens: Sequence[bytes]
    special: frozenset[Token]
    longest: int
    heads: NDArray[np.int16]
    """[2, V]: the first two bytes of each, −1 where it has none. Special tokens have none: no grammar spells them."""
    whole: frozenset[int]
    """Bytes that as a text are one token, of that byte alone."""

    @classmethod
    def of(cls, tokenizer: Tokenizer, vocab: int) -> Words:
        special = frozenset(tokenizer.special_ids)
        tokens = [tokenizer.token_bytes(token) for token in range(vocab)]
        spelled = [b"" if token in special else data for token, data in enumerate(tokens)]
        heads = np.array([[data[at] if len(data) > at else -1 for data in spelled] for at in (0, 1)], np.int16)
        alone = ((byte, tokenizer.encode_with_ends(chr(byte), inside=True)[0]) for byte in range(128))
        whole = frozenset(byte for byte, ids in alone if [spelled[one] for one in ids] == [bytes([byte])])
        return cls(tokens, special, max(map(len, spelled)), heads, whole)


class Known:
    """Masks of expressions that were computed before, by where an answer stands; the least used are forgotten.

    Where only one text can come, llguidance spells it as the tokenizer would, and looks at the answer's last token for
    it. So a mask is kept only when it shows that no byte must come; or that one must, the next is free, and the
    tokenizer makes that one a token whatever comes before.
    """

    def __init__(self, words: Words) -> None:
        self._words = words
        self._masks: OrderedDict[Hashable, Bits | None] = OrderedDict()
        self._most = KEPT_BYTES // (4 * -(-len(words.tokens) // 32) + _KEY_BYTES)

    def __len__(self) -> int:
        return len(self._masks)

    def find(self, key: Hashable) -> Bits | None:
        """The mask that was kept, if one was."""
        found = self._masks.get(key)
        if found is not None:
            self._masks.move_to_end(key)
        return found

    def keep(self, key: Hashable, mask: Bits) -> None:
        if key in self._masks:
            return
        # What is not kept is noted too: to look at it again and again costs more than it may bring.
        self._masks[key] = mask.copy() if self._shows(mask) else None
        if len(self._masks) > self._most:
            self._masks.popitem(last=False)

    def _shows(self, mask: Bits) -> bool:
        words = np.flatnonzero(mask)[:_LOOKED_AT].astype(np.int32)
        bits = np.unpackbits(mask[words].view(np.uint8), bitorder="little").reshape(-1, 32)
        row, bit = np.nonzero(bits)
        first, second = self._words.heads[:, words[row] * 32 + bit]
        second, first = second[first >= 0], first[first >= 0]
        if len(first) == 0 or (first != first[0]).any():
            return len(first) > 0
        second = second[second >= 0]
        return int(first[0]) in self._words.whole and len(second) > 0 and bool((second != second[0]).any())


class Matcher:
    """The state of one guided answer."""

    def __init__(
        self,
        matcher: LLMatcher,
        words: Words,
        known: Known,
        guide: int,
        place: Place | None,
        failed: Callable[[], None],
    ) -> None:
        """`guide`: its number, the same for all answers of one guide; `place` when it is an expression that is read;
        `failed` is called when the answer cannot go on."""
        self.matcher = matcher
        self.vocab = len(words.tokens)
        self._words = words
        self._known = known
        self._guide = guide
        self._place = place
        self._failed = failed

    @property
    def error(self) -> str | None:
        """Why the answer cannot go on: a limit on the work per token, in most cases."""
        return self.matcher.get_error().splitlines()[0] if self.matcher.is_error() else None

    def consume(self, token: Token) -> None:
        """The token that was chosen."""
        self.matcher.consume_token(token)
        if self.matcher.is_error():
            self._failed()
        if self._place is not None and token not in self._words.special:
            self._place.take(self._words.tokens[token])

    def fill(self, mask: Bits, address: int) -> None:
        """Which tokens may come next, into a row of zeros that lies at `address`."""
        ahead = None if self._place is None else self._place.ahead()
        found = None if ahead is None else self._known.find((self._guide, ahead))
        if found is not None:
            mask[:] = found
            return
        self.matcher.unsafe_compute_mask_ptr(address, mask.nbytes)
        if self.matcher.is_error():
            self._failed()
        elif ahead is not None:
            self._known.keep((self._guide, ahead), mask)


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
        one.fill(bits[at], start + at * size)
    return bits


class _Asked:
    """A tokenizer as llguidance wants to see one: ours, so that a mask and a decoded text never disagree on a byte."""

    def __init__(self, tokenizer: Tokenizer, words: Words, eos: Token) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = eos
        self.bos_token_id = tokenizer.bos_id
        self.tokens = list(words.tokens)
        self.special_token_ids = sorted(words.special)

    def __call__(self, text: bytes) -> list[Token]:
        # As what goes on: the space that a SentencePiece puts before a first word is in no grammar.
        return self._tokenizer.encode_with_ends(text.decode("utf-8", "replace"), inside=True)[0]


@dataclass(frozen=True, slots=True)
class _Compiled:
    """A guide before an answer's first token."""

    matcher: LLMatcher
    number: int
    """Told apart from all others by it; one compiled again has another."""
    expression: Expression | None
    """What it is, when it is an expression that is read."""


class Guides:
    """The compiled guides of one model; the least used are forgotten. Threads may share it."""

    def __init__(self, tokenizer: Tokenizer, vocab: int, eos_ids: Iterable[Token]) -> None:
        self._tokenizer = tokenizer
        self._vocab = vocab
        self._eos_ids = sorted(eos_ids)
        self._limits = LLParserLimits(verbose_errors=False)
        self._compiled: OrderedDict[Guide, _Compiled] = OrderedDict()
        self._numbers = count()
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
            copy = compiled.matcher.deep_copy()
        place = None if compiled.expression is None else Place(compiled.expression, self._words.longest)
        number = compiled.number
        return Matcher(copy, self._words, self._known, number, place, lambda: self._forget(guide, number))

    def _forget(self, guide: Guide, number: int) -> None:
        """Compile a guide anew for the answers to come. All copies of one share llguidance's lexer: what that has built
        for one answer counts for all, and when it reaches its limit none of them goes on, not even from the start."""
        with self._lock:
            compiled = self._compiled.get(guide)
            if compiled is not None and compiled.number == number:
                del self._compiled[guide]

    # These take a third of a second, so only those who need them pay.
    @cached_property
    def _words(self) -> Words:
        return Words.of(self._tokenizer, self._vocab)

    @cached_property
    def _known(self) -> Known:
        return Known(self._words)

    @cached_property
    def _tokens(self) -> LLTokenizer:
        asked = _Asked(self._tokenizer, self._words, self._eos_ids[0] if self._eos_ids else 0)
        return LLTokenizer(TokenizerWrapper(asked), n_vocab=self._vocab, eos_token=self._eos_ids or None)

    def _compile(self, guide: Guide) -> _Compiled:
        if len(guide.text) > MAX_CHARS:
            raise InvalidRequest(f"may have {MAX_CHARS} characters at most, not {len(guide.text)}", limit=MAX_CHARS)
        matcher = LLMatcher(self._tokens, _grammar(guide), log_level=0, limits=self._limits)
        if not matcher.is_error():
            # The first mask finds what compiling does not: an expression that nothing matches, a limit on its size.
            allowed = matcher.deep_copy()
            if any(allowed.compute_bitmask()) and not allowed.is_error():
                return _Compiled(matcher, next(self._numbers), read(guide.text) if guide.kind == "regex" else None)
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
