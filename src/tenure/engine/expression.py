"""Where an answer stands in a regular expression, said so that places from which the same may follow are equal.

llguidance walks its tree of tokens for each mask: most of a guided token's time when an expression is not a string of
JSON. A mask depends on what may follow, and of that only on as many bytes as the longest token has: in the fifth of a
hundred repetitions it is that of the sixth. `Place.ahead` says just so much, and masks are kept by it (`guided.py`).
The masks themselves are always llguidance's. What this reads differently from Rust's expressions it must not read: it
covers the plain parts, says nothing about the others, and their masks are computed as if it were not there.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

MAX_CHARS = 4096
MAX_TERMS = 512
"""Of an expression that is read: so it takes some tens of kilobytes."""
MAX_RANGES = 16
"""Beyond ASCII, of a set."""
MAX_DEPTH = 16
"""Of groups in groups."""
MAX_WAYS = 8
"""In which a text may stand in the expression at once; a repeated part that may end anywhere makes many."""
MAX_VISITS = 128
"""Of terms for one token: a fraction of what a mask costs."""

Way = tuple[int, int, int | None, "Way | None"]
"""One of the ways to go on: term `i`, at least and at most so often (None: without an end), and what comes after it and
those that follow it in its sequence."""


def _ascii(low: str, high: str) -> int:
    """A bit for each character from `low` to `high` that is of ASCII."""
    return ((1 << max(0, min(127, ord(high)) + 1 - ord(low))) - 1) << ord(low) if low < "\x80" else 0


_ASCII = _ascii("\0", "\x7f")
_DIGITS = _ascii("0", "9")
_PERL = {
    "d": _DIGITS,
    "w": _DIGITS | _ascii("a", "z") | _ascii("A", "Z") | _ascii("_", "_"),
    "s": _ascii("\t", "\r") | _ascii(" ", " "),
}
"""Of ASCII; what lies beyond is for llguidance to say."""
_CONTROL = {"n": "\n", "r": "\r", "t": "\t"}
_PUNCTUATION = frozenset(r"""!"#$%&'()*+,-./:;=?@[\]^_`{|}~ """)
"""What stands for itself after a backslash."""


class _Unread(Exception):
    """A part that is not covered."""


@dataclass(frozen=True, slots=True)
class _Chars:
    """One character of a set."""

    ascii: int
    """A bit for each character."""
    unclear: int = 0
    """Those it may or may not hold, depending on flags."""
    ranges: tuple[tuple[str, str], ...] | None = ()
    """Beyond ASCII; None where only llguidance knows."""
    negated: bool = False
    """Whether it is what `ranges` are not."""

    def holds(self, char: str) -> bool:
        if char < "\x80":
            if self.unclear >> ord(char) & 1:
                raise _Unread
            return bool(self.ascii >> ord(char) & 1)
        if self.ranges is None:
            raise _Unread
        return any(low <= char <= high for low, high in self.ranges) != self.negated


@dataclass(frozen=True, slots=True)
class _Either:
    """One of some sequences, each said by its first term; −1 is the empty one."""

    firsts: tuple[int, ...]


@dataclass(slots=True, eq=False)
class Expression:
    """An expression as it was read: terms, of which those of a sequence follow one another."""

    nodes: list[_Chars | _Either] = field(default_factory=list)
    least: list[int] = field(default_factory=list)
    most: list[int | None] = field(default_factory=list)
    follows: list[bool] = field(default_factory=list)
    """Whether another term of the same sequence comes next."""
    shortest: list[int] = field(default_factory=list)
    """Bytes of one repetition, at least; 0 where it may be empty."""
    start: int = -1

    def enter(self, term: int, after: Way | None) -> Way:
        return (term, self.least[term], self.most[term], after)

    def follow(self, term: int, after: Way | None) -> Way | None:
        return self.enter(term + 1, after) if self.follows[term] else after


class Place:
    """Where one answer stands: the ways in which it may go on."""

    __slots__ = ("_expression", "_horizon", "_rest", "_visits", "_ways")

    def __init__(self, expression: Expression, horizon: int) -> None:
        """`horizon`: bytes of the longest token."""
        self._expression: Expression | None = expression
        self._horizon = horizon
        self._ways: list[Way | None] = [expression.enter(expression.start, None)]
        self._rest = b""
        self._visits = 0

    def take(self, token: bytes) -> None:
        """The answer's next token. What is not covered ends all that is said of this answer."""
        if self._expression is None:
            return
        data = self._rest + token
        try:
            text, self._rest = _split(data)
            self._visits = 0
            for char in text:
                found: list[Way | None] = []
                for way in self._ways:
                    self._after(self._expression, way, char, found, None)
                if not 1 <= len(found) <= MAX_WAYS:
                    raise _Unread
                self._ways = found
        except (_Unread, UnicodeDecodeError):
            self._expression = None

    def ahead(self) -> Hashable:
        """Equal for places of an expression after which the same tokens may come; None when it cannot be said."""
        expression = self._expression
        if expression is None or self._rest:
            return None
        if len(self._ways) == 1:
            return self._seen(expression, self._ways[0])
        return frozenset([self._seen(expression, way) for way in self._ways])

    def _after(
        self, expression: Expression, way: Way | None, char: str, found: list[Way | None], end: Way | None
    ) -> None:
        """The ways that are left of `way`, up to `end`, after a character."""
        while way is not end and way is not None:
            self._visits += 1
            if self._visits > MAX_VISITS:
                raise _Unread
            term, least, most, after = way
            node, follow = expression.nodes[term], expression.follow(term, after)
            again: Way | None
            if most == 1:
                again = follow
            else:
                again = (term, least - 1 if least else 0, most if most is None else most - 1, after)
            if isinstance(node, _Chars):
                if node.holds(char) and again not in found:
                    found.append(again)
            else:
                for first in node.firsts:
                    if first >= 0:
                        self._after(expression, expression.enter(first, again), char, found, again)
            if least:
                return
            way = follow

    def _seen(self, expression: Expression, way: Way | None) -> tuple[int, ...]:
        """A way as far as a token can see: counts no higher than as often as their terms can come within one."""
        seen: list[int] = []
        left = self._horizon
        while way is not None:
            term, least, most, after = way
            each = max(1, expression.shortest[term])
            often = left // each + 1
            seen += (term, min(least, often), often if most is None or most > often else most)
            left -= least * each
            if left < 0:
                break
            way = expression.follow(term, after)
        return tuple(seen)


def read(text: str) -> Expression | None:
    """The expression that `text` is; None when it has parts that are not covered."""
    try:
        return _Reader(text).read()
    except _Unread:
        return None


class _Reader:
    """Reads one expression."""

    def __init__(self, text: str) -> None:
        if len(text) > MAX_CHARS:
            raise _Unread
        # At its very ends these say what holds anyway: a text is matched whole.
        text = text.removeprefix("^") if "|" not in text else text
        if "|" not in text and text.endswith("$") and not text.endswith("\\$"):
            text = text[:-1]
        self._text = text
        self._at = 0
        self._depth = 0
        self._made = Expression()

    def read(self) -> Expression:
        node, shortest = self._either()
        if self._at < len(self._text):
            raise _Unread
        self._made.start = self._add([(node, 1, 1, shortest)])
        return self._made

    def _peek(self) -> str:
        return self._text[self._at] if self._at < len(self._text) else ""

    def _next(self) -> str:
        if self._at >= len(self._text):
            raise _Unread
        self._at += 1
        return self._text[self._at - 1]

    def _add(self, terms: list[tuple[_Chars | _Either, int, int | None, int]]) -> int:
        made = self._made
        first = len(made.nodes)
        if first + len(terms) > MAX_TERMS:
            raise _Unread
        for at, (node, least, most, shortest) in enumerate(terms):
            made.nodes.append(node)
            made.least.append(least if shortest else 0)
            made.most.append(most)
            made.follows.append(at + 1 < len(terms))
            made.shortest.append(shortest)
        return first if terms else -1

    def _either(self) -> tuple[_Either, int]:
        """Sequences up to the end of the group; and their fewest bytes."""
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise _Unread
        firsts, shortest = [], []
        while True:
            terms = self._sequence()
            firsts.append(self._add(terms))
            shortest.append(sum(least * each for _, least, _, each in terms))
            if self._peek() != "|":
                break
            self._at += 1
        self._depth -= 1
        return _Either(tuple(firsts)), min(shortest)

    def _sequence(self) -> list[tuple[_Chars | _Either, int, int | None, int]]:
        terms = []
        while self._peek() not in ("", "|", ")"):
            node, shortest = self._atom()
            least, most = self._often()
            if most != 0:
                terms.append((node, least, most, shortest))
            if len(terms) > MAX_TERMS:
                raise _Unread
        return terms

    def _atom(self) -> tuple[_Chars | _Either, int]:
        char = self._next()
        if char == "(":
            if self._peek() == "?":
                self._at += 1
                if self._next() != ":":
                    raise _Unread
            node, shortest = self._either()
            if self._next() != ")":
                raise _Unread
            return node, shortest
        if char == "[":
            return self._set(), 1
        if char == ".":
            return _Chars(_ASCII, _ascii("\n", "\n") | _ascii("\r", "\r"), (), negated=True), 1
        if char == "\\":
            return self._escape(), 1
        if char in "^$*+?{}":
            raise _Unread
        return _one(char), 1

    def _escape(self) -> _Chars:
        char = self._next()
        if char in _CONTROL:
            return _one(_CONTROL[char])
        if char in _PUNCTUATION:
            return _one(char)
        if char.lower() in _PERL:
            held = _PERL[char.lower()]
            return _Chars(held if char.islower() else _ASCII & ~held, ranges=None)
        raise _Unread

    def _set(self) -> _Chars:
        """`[…]` of characters, ranges and escapes; sets of sets are not covered."""
        negated = self._peek() == "^"
        self._at += negated
        held = 0
        ranges: list[tuple[str, str]] | None = []
        first = True
        while first or self._peek() != "]":
            low = self._member(first)
            first = False
            if isinstance(low, _Chars):
                held |= low.ascii
                ranges = None
                continue
            high = low
            if self._peek() == "-" and self._text[self._at + 1 : self._at + 2] != "]":
                self._at += 1
                if self._peek() == "-":
                    raise _Unread
                other = self._member(False)
                if isinstance(other, _Chars) or other < low:
                    raise _Unread
                high = other
            held |= _ascii(low, high)
            if high >= "\x80" and ranges is not None:
                ranges.append((low, high))
                if len(ranges) > MAX_RANGES:
                    raise _Unread
        self._at += 1
        beyond = None if ranges is None else tuple(ranges)
        return _Chars(_ASCII & ~held if negated else held, 0, beyond, negated)

    def _member(self, first: bool) -> str | _Chars:
        char = self._next()
        lone = self._peek() == "]" or (first and self._peek() != "-")
        if char == "\\":
            found = self._escape()
            return found if found.ranges is None else chr(found.ascii.bit_length() - 1)
        # A bracket, and what is written twice, may be about sets of sets.
        if char in "[&~" or (char == "]" and first) or (char == "-" and not lone):
            raise _Unread
        return char

    def _often(self) -> tuple[int, int | None]:
        char = self._peek()
        if char == "" or char not in "*+?{":
            return 1, 1
        self._at += 1
        least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(char, (1, 1))
        if char == "{":
            least, most = self._counts()
        if self._peek() and self._peek() in "*+?{":
            raise _Unread
        return least, most

    def _counts(self) -> tuple[int, int | None]:
        end = self._text.find("}", self._at)
        low, comma, high = self._text[self._at : max(end, self._at)].partition(",")
        if not 1 <= len(low) <= 6 or len(high) > 6 or not set(low + high) <= set("0123456789"):
            raise _Unread
        self._at = end + 1
        return int(low), (int(high) if high else None) if comma else int(low)


def _one(char: str) -> _Chars:
    return _Chars(_ascii(char, char), ranges=((char, char),))


def _split(data: bytes) -> tuple[str, bytes]:
    """The whole characters of `data`, and the bytes of one that has only begun. UnicodeDecodeError."""
    try:
        return data.decode("utf-8"), b""
    except UnicodeDecodeError as error:
        if error.reason != "unexpected end of data":
            raise
        return data[: error.start].decode("utf-8"), data[error.start :]
