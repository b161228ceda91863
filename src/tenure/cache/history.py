"""What conversations looked like before, so that a miss can be explained: why reuse ended where it did."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tenure.cache.radix import common_head
from tenure.types import Miss, MissReason, Request, Scope, Token

SameText = Callable[[Sequence[Token], Sequence[Token]], bool]
"""Whether the text of one of two token runs begins that of the other (the second may carry end marks behind)."""


@dataclass(frozen=True, slots=True)
class _Past:
    """A sequence as it ended: the first `computed` tokens had valid KV, `generated` are the ranges of its answers."""

    scope: Scope
    session_id: str | None
    request: str
    tokens: tuple[Token, ...]
    computed: int
    generated: tuple[tuple[int, int], ...]


class History:
    """The newest sequences, up to a bound on their number and on their tokens together."""

    def __init__(
        self,
        block_tokens: int,
        *,
        heads: bool,
        same_text: SameText,
        max_sequences: int = 1024,
        max_tokens: int = 2_000_000,
    ) -> None:
        """`heads`: whether the codec reuses heads of blocks (`Codec.head_reusable`)."""
        self._size = block_tokens
        self._heads = heads
        self._same_text = same_text
        self._max_sequences = max_sequences
        self._max_tokens = max_tokens
        self._past: OrderedDict[tuple[Scope, tuple[Token, ...]], _Past] = OrderedDict()
        self._sorted: dict[Scope, list[tuple[Token, ...]]] = {}
        self._sessions: dict[tuple[Scope, str], list[_Past]] = {}
        self._firsts: Counter[tuple[Token, ...]] = Counter()
        self._tokens = 0

    def __len__(self) -> int:
        return len(self._past)

    @property
    def tokens(self) -> int:
        """Tokens remembered."""
        return self._tokens

    def remember(self, request: Request, tokens: Sequence[Token], computed: int) -> None:
        """A sequence of `request` ended (or paused): `tokens` are its prompt and answer, `computed` have valid KV."""
        ids = tuple(tokens)
        before = self._closest(request.scope, ids)
        generated: tuple[tuple[int, int], ...] = ()
        if before and ids[: len(before.tokens)] == before.tokens:  # an earlier turn, or this one before a pause
            generated = tuple(run for run in before.generated if run[1] <= len(request.tokens))
            if before.session_id in (None, request.session_id):
                self._forget(before)
        if len(ids) > len(request.tokens):
            generated = (*generated, (len(request.tokens), len(ids)))
        if (request.scope, ids) in self._past:
            self._forget(self._past[request.scope, ids])
        past = _Past(request.scope, request.session_id, request.id, ids, computed, generated)
        self._past[past.scope, ids] = past
        insort(self._sorted.setdefault(past.scope, []), ids)
        self._firsts[ids[: self._size]] += 1
        self._tokens += len(ids)
        if past.session_id is not None:
            turn = self._sessions.setdefault((past.scope, past.session_id), [])
            turn[:] = [*(other for other in turn if other.request == past.request), past]
        while len(self._past) > 1 and (len(self._past) > self._max_sequences or self._tokens > self._max_tokens):
            self._forget(next(iter(self._past.values())))

    def explain(self, request: Request, matched: int) -> Miss | None:
        """Why no more than `matched` tokens of the prompt were reused; None when no more could be."""
        prompt = request.tokens
        if matched >= self._reusable(len(prompt) - 1):
            return None
        turn = self._sessions.get((request.scope, request.session_id)) if request.session_id is not None else None
        known = turn is not None
        past = max(turn, key=lambda past: common_head(past.tokens, prompt)) if turn else None
        past = past or self._closest(request.scope, prompt)
        if past is None:
            elsewhere = self._firsts[prompt[: self._size]]
            return self._miss("scope_changed" if elsewhere and not matched else "cold", matched, request)
        same = common_head(past.tokens, prompt)
        if matched < self._reusable(min(same, past.computed, len(prompt) - 1)):
            return self._miss("evicted", matched, request)
        if same == min(len(past.tokens), len(prompt)):  # nothing differs; the newest token never has KV yet
            return None if past.computed >= same - 1 else self._miss("cold", matched, request)
        if matched > same and not known:
            return self._miss("cold", matched, request)
        return self._differs(request, past, same, known)

    def _differs(self, request: Request, past: _Past, at: int, known: bool) -> Miss:
        """All that is equal was reused; token `at` differs from the one remembered."""
        for start, end in past.generated:
            if start <= at < end:
                stop = next((span.end for span in request.spans if span.start <= at < span.end), len(request.tokens))
                if self._same_text(past.tokens[start:end], request.tokens[start:stop]):
                    return self._miss("retokenised", at, request)
        last = request.spans[-1].start if request.spans else 0
        changed = known or at < last
        return self._miss("content_changed" if changed else "cold", at, request)

    def _miss(self, reason: MissReason, at: int, request: Request) -> Miss:
        message = next((span.message for span in request.spans if span.start <= at < span.end), None)
        return Miss(reason, at, message)

    def _reusable(self, tokens: int) -> int:
        """How many of `tokens` equal and computed ones the codec can reuse."""
        return tokens if self._heads else tokens - tokens % self._size

    def _closest(self, scope: Scope, tokens: tuple[Token, ...]) -> _Past | None:
        """The remembered sequence that shares the longest head, at least one token: a neighbour in sorted order."""
        known = self._sorted.get(scope, [])
        at = bisect_left(known, tokens)
        near = max(known[max(0, at - 1) : at + 1], key=lambda ids: common_head(ids, tokens), default=())
        return self._past[scope, near] if common_head(near, tokens) else None

    def _forget(self, past: _Past) -> None:
        del self._past[past.scope, past.tokens]
        known = self._sorted[past.scope]
        del known[bisect_left(known, past.tokens)]
        if not known:
            del self._sorted[past.scope]
        first = past.tokens[: self._size]
        self._firsts[first] -= 1
        if not self._firsts[first]:
            del self._firsts[first]
        self._tokens -= len(past.tokens)
        if past.session_id is not None:
            name = (past.scope, past.session_id)
            left = [other for other in self._sessions.get(name, ()) if other is not past]
            if left:
                self._sessions[name] = left
            else:
                self._sessions.pop(name, None)
