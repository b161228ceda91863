"""What conversations looked like before, so that a miss can be explained: why reuse ended where it did."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from tenure.cache.keys import WORD, common_head, pack, unpack
from tenure.cache.plan import Lost
from tenure.types import Miss, MissReason, Request, Scope, Token

WhyNot = Callable[[Sequence[Token], Sequence[Token]], MissReason | None]
"""Why an answer's own tokens are not those that a later prompt has in its place (which may carry end marks behind):
its text was tokenised anew, or lacks its reasoning. None: it is another text."""
_OPENING = 4
"""Tokens before an answer in which a prompt may have opened its reasoning."""


@dataclass(frozen=True, slots=True)
class Past:
    """A sequence as it ended: the first `computed` tokens had valid KV, `generated` are the ranges of its answers."""

    scope: Scope
    session_id: str | None
    request: str
    ids: bytes
    computed: int
    generated: tuple[tuple[int, int], ...]
    name: str
    """The conversation's: its session, or else its first request."""
    at: float

    @property
    def tokens(self) -> tuple[Token, ...]:
        return unpack(self.ids)

    def __len__(self) -> int:
        return len(self.ids) // WORD

    def same(self, ids: bytes) -> int:
        """How many first tokens it shares with others."""
        return common_head(self.ids, ids) // WORD


class History:
    """The newest sequences, up to a bound on their number and on their tokens together."""

    def __init__(
        self,
        block_tokens: int,
        *,
        heads: bool,
        why_not: WhyNot,
        max_sequences: int = 1024,
        max_tokens: int = 2_000_000,
    ) -> None:
        """`heads`: whether the codec reuses heads of blocks (`Codec.head_reusable`)."""
        self._size = block_tokens
        self._heads = heads
        self._why_not = why_not
        self._max_sequences = max_sequences
        self._max_tokens = max_tokens
        self._past: OrderedDict[tuple[Scope, bytes], Past] = OrderedDict()
        self._sorted: dict[Scope, list[bytes]] = {}
        self._sessions: dict[tuple[Scope, str], list[Past]] = {}
        self._firsts: Counter[tuple[str, bytes]] = Counter()
        self._tokens = 0

    def __len__(self) -> int:
        return len(self._past)

    @property
    def tokens(self) -> int:
        """Tokens remembered."""
        return self._tokens

    def all(self) -> Iterator[Past]:
        """What is remembered, the oldest first."""
        return iter(self._past.values())

    def of(self, tenant: str, name: str) -> list[Past]:
        """What is remembered of one conversation."""
        return [past for past in self._past.values() if past.name == name and past.scope.tenant == tenant]

    def drop(self, past: Past) -> None:
        """Forget it."""
        self._forget(past)

    def remember(self, request: Request, tokens: Sequence[Token], computed: int, now: float = 0.0) -> None:
        """A sequence of `request` ended (or paused): `tokens` are its prompt and answer, `computed` have valid KV."""
        ids = pack(tokens)
        before = self._closest(request.scope, ids)
        generated: tuple[tuple[int, int], ...] = ()
        name = request.session_id or request.id
        if before and ids.startswith(before.ids):  # an earlier turn, or this one before a pause
            generated = tuple(run for run in before.generated if run[1] <= len(request.tokens))
            if before.session_id is None and request.session_id is None:
                name = before.name
            if before.session_id in (None, request.session_id):
                self._forget(before)
        if len(tokens) > len(request.tokens):
            generated = (*generated, (len(request.tokens), len(tokens)))
        if (request.scope, ids) in self._past:
            self._forget(self._past[request.scope, ids])
        self._add(Past(request.scope, request.session_id, request.id, ids, computed, generated, name, now))
        while len(self._past) > 1 and (len(self._past) > self._max_sequences or self._tokens > self._max_tokens):
            self._forget(next(iter(self._past.values())))

    def explain(self, request: Request, matched: int, lost: Lost | None = None, now: float = 0.0) -> Miss | None:
        """Why no more than `matched` tokens of the prompt were reused; None when no more could be. `lost`: what the
        cache knows of blocks that are gone."""
        miss = self._compare(request, matched)
        if lost is None or (miss.reason not in ("cold", "evicted") if miss else not lost.tokens):
            return miss
        evicted, rest = miss is not None and miss.reason == "evicted", len(request.tokens) - 1 - matched
        sure = miss is None or lost.reason == "window" or lost.tokens >= min(self._size, rest)
        if lost.reason and (sure or (evicted and lost.reason != "below_minimum")):
            told = self._miss(lost.reason, matched, request)
            return replace(told, by=lost.first.by, ago_s=now - lost.first.at) if lost.first else told
        return replace(miss, reason="unknown") if miss and (evicted or lost.older) else miss

    def _compare(self, request: Request, matched: int) -> Miss | None:
        """What the prompts of the past say of it: `evicted` when they had more than is reused."""
        length = len(request.tokens)
        if matched >= length - 1:
            return None
        ids = pack(request.tokens)
        turn = self._sessions.get((request.scope, request.session_id), ()) if request.session_id is not None else ()
        past = max(turn, key=lambda past: past.same(ids), default=None) or self._closest(request.scope, ids)
        if past is None:
            elsewhere = self._firsts[self._first(request.scope, ids)]
            return self._miss("scope_changed" if elsewhere and not matched else "cold", matched, request)
        same = past.same(ids)
        if matched < self._reusable(min(same, past.computed, length - 1)):
            return self._miss("evicted", matched, request)
        if same == min(len(past), length):  # nothing differs; the newest token never has KV yet
            return None if past.computed >= same - 1 else self._miss("cold", matched, request)
        if matched > same and not turn:
            return self._miss("cold", matched, request)
        return self._differs(request, past, same, known=bool(turn))

    def _differs(self, request: Request, past: Past, at: int, *, known: bool) -> Miss:
        """All that is equal was reused; token `at` differs from the one remembered."""
        for start, end in past.generated:
            if start - _OPENING <= at < end:
                stop = next((span.end for span in request.spans if span.start <= at < span.end), len(request.tokens))
                generated = unpack(past.ids[WORD * start : WORD * end])
                reason = self._why_not(generated, request.tokens[min(at, start) : stop])
                if reason is not None and (at >= start or reason == "reasoning_stripped"):
                    return self._miss(reason, at, request)
        last = request.spans[-1].start if request.spans else 0
        return self._miss("content_changed" if known or at < last else "cold", at, request)

    def _miss(self, reason: MissReason, at: int, request: Request) -> Miss:
        message = next((span.message for span in request.spans if span.start <= at < span.end), None)
        return Miss(reason, at, message)

    def _reusable(self, tokens: int) -> int:
        """How many of `tokens` equal and computed ones the codec can reuse."""
        return tokens if self._heads else tokens - tokens % self._size

    def _first(self, scope: Scope, ids: bytes) -> tuple[str, bytes]:
        """The first block, or all when there is less; by tenant, for what others ask is none of his business."""
        return scope.tenant, ids[: WORD * self._size]

    def _closest(self, scope: Scope, ids: bytes) -> Past | None:
        """The remembered sequence that shares the longest head, at least one token: a neighbour in sorted order."""
        known = self._sorted.get(scope, [])
        at = bisect_left(known, ids)
        near = [self._past[scope, other] for other in known[max(0, at - 1) : at + 1]]
        best = max(near, key=lambda past: past.same(ids), default=None)
        return best if best and best.same(ids) else None

    def _add(self, past: Past) -> None:
        self._past[past.scope, past.ids] = past
        insort(self._sorted.setdefault(past.scope, []), past.ids)
        self._firsts[self._first(past.scope, past.ids)] += 1
        self._tokens += len(past)
        if past.session_id is not None:
            turn = self._sessions.setdefault((past.scope, past.session_id), [])
            turn[:] = [*(other for other in turn if other.request == past.request), past]

    def _forget(self, past: Past) -> None:
        del self._past[past.scope, past.ids]
        known = self._sorted[past.scope]
        del known[bisect_left(known, past.ids)]
        if not known:
            del self._sorted[past.scope]
        first = self._first(past.scope, past.ids)
        self._firsts[first] -= 1
        if not self._firsts[first]:
            del self._firsts[first]
        self._tokens -= len(past)
        if past.session_id is not None:
            name = (past.scope, past.session_id)
            left = [other for other in self._sessions.get(name, ()) if other is not past]
            if left:
                self._sessions[name] = left
            else:
                self._sessions.pop(name, None)
