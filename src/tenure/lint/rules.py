"""Why prompts missed, what it cost, and what to change: rules over a trace or a log, ranked by what each would gain.

Each rule looks at one kind of evidence and says nothing without it, so that a clean log gives no finding.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tenure.cache.keys import common_head
from tenure.lint.patterns import ADVICE, diverged, kin, text_of
from tenure.policy import registry
from tenure.sim.instant import InstantCache
from tenure.sim.trace import TraceRequest
from tenure.spec import CODECS

REMEMBERED = 4096
"""Sessions and first messages held against newer ones; the oldest go first."""
SLACK = 64
"""Tokens that may differ at a prompt's end without being a finding: two blocks of 32."""
OFTEN = 2
"""Times a thing must happen to be a habit."""
MISFIT = 0.05
"""Share of all prompt tokens that more memory must save for the budget to be called too small."""
SPARE = 4
"""A pool that many times as large as all there is to hold was not planned either."""


PLACES = 8
"""Places told of one habit."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where prompts part: the request, its session, the first token that differs, and the message it lies in, as far as
    they are known; and how many tokens had to be computed again."""

    request: str
    session: str | None
    token: int
    message: int | None
    tokens: int


@dataclass(slots=True)
class Finding:
    """One habit that costs. Tokens are those computed although they had been before."""

    rule: str
    evidence: str
    """The field that triggered it."""
    where: str
    """The first place it was seen."""
    advice: str
    requests: int = 0
    tokens: int = 0
    seconds: float = 0.0
    places: list[Place] = field(default_factory=list)
    """The dearest ones, of those where prompts part."""

    def add_place(self, place: Place) -> None:
        self.places = sorted([*self.places, place], key=lambda place: -place.tokens)[:PLACES]


@dataclass(slots=True)
class _Seen:
    """The newest prompt of a session."""

    request: TraceRequest
    name: str
    idle: int = 0
    """Turns that reused nothing although they could."""


@dataclass(slots=True)
class Lint:
    """Reads requests in order; `findings` gives the result. `ms_per_token`: what a prompt token costs to compute, used
    where the log does not tell."""

    header: Mapping[str, Any]
    ms_per_token: float
    requests: int = 0
    prompt_tokens: int = 0
    _found: dict[str, Finding] = field(default_factory=dict)
    _sessions: OrderedDict[tuple[str, str], _Seen] = field(default_factory=OrderedDict)
    _heads: OrderedDict[tuple[str, ...], _Seen] = field(default_factory=OrderedDict)
    _losses: list[tuple[str, str, int]] = field(default_factory=list)
    _caches: list[InstantCache] = field(default_factory=list)
    _spent_ms: float = 0.0
    _computed: int = 0

    def __post_init__(self) -> None:
        pool = self.header.get("pool_blocks")
        if isinstance(pool, int) and pool > 0:
            sizes = (pool, 2 * pool, 4 * pool, 1 << 60)
            self._caches = [InstantCache(size, registry.eviction("lru")) for size in sizes]

    def read(self, request: TraceRequest) -> None:
        self.requests += 1
        self.prompt_tokens += request.prompt_tokens
        self._receipt(request)
        for cache in self._caches:
            cache.serve(request)
        name = None if request.session is None else (request.tenant, request.session)
        seen = None if name is None else self._sessions.get(name)
        if name is not None:
            if seen:
                self._turn(name, seen, request)
            self._sessions[name] = _Seen(request, self._name(request), seen.idle if seen else 0)
            self._sessions.move_to_end(name)
            if len(self._sessions) > REMEMBERED:
                self._sessions.popitem(last=False)
        if seen is None:
            self._first(request)

    @property
    def timed(self) -> bool:
        """The log tells how long prompts took."""
        return self._computed > 0

    def findings(self) -> list[Finding]:
        """All that was found, the greatest gain first."""
        self._memory()
        self._undeclared()
        ms = self._spent_ms / self._computed if self._computed else self.ms_per_token
        for finding in self._found.values():
            finding.seconds = 1e-3 * ms * finding.tokens
        return sorted(self._found.values(), key=lambda finding: -finding.tokens)

    # ---- rules

    def _turn(self, name: tuple[str, str], seen: _Seen, request: TraceRequest) -> None:
        """The next request of a session: the one before should be its beginning, and should have been reused."""
        before = seen.request
        same, whole = _common(before, request)
        where = f"request {self._name(request)}, session {name[1]}"
        if whole - same > SLACK:
            place = Place(self._name(request), name[1], same, None, whole - same)
            if before.tokens is None or request.tokens is None:
                self._add("diverged", "blocks", f"{where}, token {same}", ADVICE["edited"], whole - same, place)
                return
            message, pattern = diverged(prompt_of(before), prompt_of(request))
            at = "" if message is None else f", message {message}"
            place = replace(place, message=message)
            self._add(pattern, "prompt", f"{where}{at}, token {same}", ADVICE[pattern], whole - same, place)
            return
        cached = _cached(request)
        if cached is not None and whole > SLACK and cached < whole // 5 and _reason(request) != "evicted":
            seen.idle += 1
            if seen.idle < OFTEN:  # once may be a restart
                return
            self._add(
                "history_recomputed", "cached_tokens", where,
                "the prompt begins as the turn before did, yet nothing was reused: route a session to one server, turn "
                "prefix caching on, and keep model, adapter and salt the same from turn to turn",
                whole - cached,
            )  # fmt: skip

    def _first(self, request: TraceRequest) -> None:
        """The first request of a session, or one without: others began like it, but for a time, an id or a salt."""
        if request.tokens is None:
            return
        prompt = prompt_of(request)
        text = text_of(prompt[0]) if isinstance(prompt, list) and prompt else str(prompt)
        like = kin(text)
        seen = self._heads.get(like)
        self._heads[like] = _Seen(request, self._name(request))
        self._heads.move_to_end(like)
        if len(self._heads) > REMEMBERED:
            self._heads.popitem(last=False)
        if seen is None:
            return
        before = seen.request
        same = common_head(before.tokens or (), request.tokens)
        if before.tenant != request.tenant and same > SLACK:
            self._add(
                "not_shared", "tenant or cache_salt",
                f"requests {seen.name} and {self._name(request)}, tokens 0 to {same}",
                "tenants and salts never share: leave the salt out, give those that may share one salt, or declare what"
                " all begin with as a shared_prefix",
                same,
            )  # fmt: skip
            return
        length = len(request.tokens) if not isinstance(prompt, list) else _head_tokens(text, prompt, request)
        if isinstance(prompt, list) and isinstance(older := prompt_of(before), list) and length - same > SLACK:
            old = older[:1]
            if old != prompt[:1]:
                _, pattern = diverged(old, prompt[:1])
                where = f"requests {seen.name} and {self._name(request)}, message 0, token {same}"
                place = Place(self._name(request), request.session, same, 0, length - same)
                self._add(pattern, "prompt", where, ADVICE[pattern], length - same, place)

    def _receipt(self, request: TraceRequest) -> None:
        """What the receipt tells: cost, losses, and what the model could not see."""
        kv = request.extra.get("kv")
        cached = _cached(request)
        spent = request.extra.get("prompt_ms")
        if cached is not None and isinstance(spent, int | float):
            self._spent_ms += spent
            self._computed += request.prompt_tokens - cached
        if not isinstance(kv, dict):
            return
        where = f"request {self._name(request)}"
        forgotten = sum(item["tokens"][1] - item["tokens"][0] for item in kv.get("forgotten") or ())
        if forgotten:
            self._losses.append(("kv.forgotten", where, forgotten))
            self._add(
                "forgotten", "kv.forgotten", where,
                "the model could not see part of the conversation: before blaming its reasoning, give the answer more "
                "context (--max-model-len, --memory) or trim on purpose",
                forgotten,
            )  # fmt: skip
        declared = self.header.get("codec")
        lower = sum(n for name, n in (kv.get("codec") or {}).items() if declared and _is_lower(name, declared))
        if lower:
            self._losses.append(("kv.codec", where, 0))
            self._add(
                "recoded", "kv.codec", where,
                "part of the context was kept at a lower precision under pressure: before blaming the model's "
                "reasoning, ask again with exact precision, or give more memory",
                0,
            )  # fmt: skip
        if kv.get("preempted"):
            self._losses.append(("kv.preempted", where, int(kv.get("recomputed_tokens") or 0)))
        if kv.get("limit_cause") in ("pool", "context"):
            self._losses.append(("kv.limit_cause", where, 0))
        if _reason(request) == "evicted":
            self._losses.append(("kv.miss.reason", where, request.prompt_tokens - (cached or 0)))

    def _undeclared(self) -> None:
        declared = self.header.get("declared")
        if not self._losses or not isinstance(declared, list) or {"overflow", "pressure"} & set(declared):
            return
        evidence, where, _ = self._losses[0]
        finding = self._add(
            "no_policy_declared", f"declared, {evidence}", where,
            "context or blocks were lost under policies nobody chose: declare --overflow and --pressure, so that "
            "what is lost first is your decision",
            sum(tokens for _, _, tokens in self._losses),
        )  # fmt: skip
        finding.requests = len({place for _, place, _ in self._losses})

    def _memory(self) -> None:
        """What more memory would have saved, by replaying against the pool, twice, four times and all of it."""
        if not self._caches or not self.prompt_tokens:
            return
        pool = self._caches[0].hits.hits
        everything = self._caches[-1].hits.hits
        unique = len(self._caches[-1])
        blocks = int(self.header["pool_blocks"])
        declared = self.header.get("declared")
        planned = not isinstance(declared, list) or bool({"memory", "kv_cache_memory_bytes"} & set(declared))
        saved = [cache.hits.hits - pool for cache in self._caches[1:]]
        if everything - pool > MISFIT * self.prompt_tokens:
            self._add(
                "memory_too_small" if planned else "memory_never_planned",
                "pool_blocks" if planned else "declared, pool_blocks",
                f"a pool of {blocks} blocks for {unique} that were asked for",
                f"evicted before they were needed again: twice the KV memory would have saved {saved[0]} prompt "
                f"tokens, four times {saved[1]}, any amount {saved[2]}; set --memory to what `tenure replay --memory` "
                "shows to pay",
                everything - pool,
            )
        elif not planned and blocks > SPARE * max(1, unique):
            self._add(
                "memory_never_planned", "declared, pool_blocks", f"a pool of {blocks} blocks for {unique} in use",
                "the budget was never set and is far above the need: set --memory and use the rest elsewhere", 0,
            )  # fmt: skip

    def _name(self, request: TraceRequest) -> str:
        """How findings call a request: by its id, else by its number."""
        return str(request.extra.get("id", self.requests))

    def _add(
        self, rule: str, evidence: str, where: str, advice: str, tokens: int, place: Place | None = None
    ) -> Finding:
        finding = self._found.setdefault(rule, Finding(rule, evidence, where, advice))
        finding.requests += 1
        finding.tokens += tokens
        if place is not None:
            finding.add_place(place)
        return finding


def lint(requests: Iterable[TraceRequest], header: Mapping[str, Any], ms_per_token: float) -> list[Finding]:
    """All findings of a trace or log; `header` is that of Tenure's own form, empty for others."""
    reader = Lint(header, ms_per_token)
    for request in requests:
        reader.read(request)
    return reader.findings()


def prompt_of(request: TraceRequest) -> object:
    """The prompt as it was asked: a text or messages; decoded now, when it is kept as tokens alone."""
    prompt = request.extra.get("prompt")
    return prompt() if callable(prompt) else prompt


def _common(before: TraceRequest, request: TraceRequest) -> tuple[int, int]:
    """Tokens that a session's next prompt shares with the one before, and how many that one had to give."""
    if before.tokens is not None and request.tokens is not None:
        return common_head(before.tokens, request.tokens), min(len(before.tokens), len(request.tokens))
    same = common_head(before.blocks, request.blocks)
    return request.tokens_of(same), before.tokens_of(min(len(before.blocks), len(request.blocks)))


def _head_tokens(text: str, prompt: Sequence[Any], request: TraceRequest) -> int:
    """About how many tokens the first message has: its share of the characters."""
    whole = sum(len(text_of(message)) for message in prompt)
    return request.prompt_tokens * len(text) // max(1, whole)


def _cached(request: TraceRequest) -> int | None:
    """Tokens that were reused, when the log tells."""
    kv, usage = request.extra.get("kv"), request.extra.get("usage")
    if isinstance(kv, dict) and isinstance(kv.get("cached_tokens"), int):
        return int(kv["cached_tokens"])
    details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
    if isinstance(details, dict) and isinstance(details.get("cached_tokens"), int):
        return int(details["cached_tokens"])
    return None


def _is_lower(codec: str, declared: str) -> bool:
    """Whether it has fewer bits than what was declared; the open block of a quantised one has more."""
    bits = {known.name: known.k_bits + known.v_bits for known in CODECS.values()}
    return codec != declared and bits.get(codec, 0) < bits.get(declared, 64)


def _reason(request: TraceRequest) -> str | None:
    kv = request.extra.get("kv")
    miss = kv.get("miss") if isinstance(kv, dict) else None
    return miss.get("reason") if isinstance(miss, dict) else None
