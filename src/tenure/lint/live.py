"""The rules of `tenure lint` over what a running server was asked lately.

Kept of each request are its tokens, where its messages lie in them, and its receipt; a bounded number of tokens for
each tenant and for all of them together. Texts are made again from the tokens when somebody asks, compared and thrown
away: what is told are places and patterns.
"""

from __future__ import annotations

import dataclasses
import re
import threading
import time
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tenure.events import ConversationChanged, Fact, RequestDone, RequestRefused
from tenure.lint.rules import Lint
from tenure.sim.trace import TraceRequest
from tenure.traces import TEXT_BLOCK, key_blocks
from tenure.types import Receipt, Request, Span, Token

PER_TENANT = 1 << 18
"""Prompt tokens kept for a tenant: 1 MiB. Prompts that are longer are left aside."""
IN_ALL = 1 << 21
"""Prompt tokens kept for all: 8 MiB. The tenant that was silent longest loses its oldest first."""
MAX_REQUESTS = 4096
"""Requests kept for a tenant, however short."""
UNDER_WAY = 4096
"""Requests whose end is awaited; the oldest go first."""
ROLE_CHARS = 48
"""A template names the role within so many characters."""
_SYSTEM = re.compile(r"system|<<SYS>>|developer", re.IGNORECASE)
Decode = Callable[[Sequence[Token]], str]


@dataclass(frozen=True)
class _Asked:
    """A request that has ended."""

    id: str
    at: float
    owner: str
    """Equal for requests that may share blocks: the tenant, and the salt if there is one."""
    session: str | None
    tokens: array[int]
    spans: tuple[Span, ...]
    output_tokens: int
    kv: Mapping[str, Any]
    prompt_ms: float

    def request(self, decode: Decode) -> TraceRequest:
        """As the rules take it."""
        tokens = tuple(self.tokens)
        text = _Text(tokens, self.spans, decode)
        return TraceRequest(
            at=self.at,
            prompt_tokens=len(tokens),
            output_tokens=self.output_tokens,
            blocks=key_blocks(tokens, TEXT_BLOCK, self.owner),
            block_tokens=TEXT_BLOCK,
            tenant=self.owner,
            session=self.session,
            tokens=tokens,
            extra={"id": self.id, "kv": self.kv, "prompt_ms": self.prompt_ms, "prompt": text},
        )


class _Text:
    """A prompt's messages, decoded when they are first asked for."""

    def __init__(self, tokens: tuple[Token, ...], spans: tuple[Span, ...], decode: Decode) -> None:
        self._tokens, self._spans, self._decode = tokens, spans, decode

    def __call__(self) -> object:
        return self._messages

    @cached_property
    def _messages(self) -> object:
        if not self._spans:
            return self._decode(self._tokens)
        texts = [self._decode(self._tokens[span.start : span.end]) for span in self._spans]
        return [
            {"role": "system" if not at and _SYSTEM.search(text[:ROLE_CHARS]) else "", "content": text}
            for at, text in enumerate(texts)
        ]


class Recent:
    """What was asked lately, and what `Lint` says of it. Any thread may tell and ask."""

    def __init__(
        self, decode: Decode, header: Mapping[str, Any], per_tenant: int = PER_TENANT, in_all: int = IN_ALL
    ) -> None:
        """`header`: what the operator chose, as a trace's first line has it."""
        self._decode = decode
        self._header = dict(header)
        self._per_tenant, self._in_all = per_tenant, in_all
        self._lock = threading.Lock()
        self._under_way: OrderedDict[str, tuple[Request, float]] = OrderedDict()
        self._asked: OrderedDict[str, deque[_Asked]] = OrderedDict()
        """By tenant; who asked last is last."""
        self._tokens: dict[str, int] = {}

    @property
    def tokens(self) -> int:
        """Kept now, of all tenants."""
        return sum(self._tokens.values())

    def saw(self, request: Request) -> None:
        """A request is about to be submitted."""
        with self._lock:
            self._under_way[request.id] = request, time.time()
            if len(self._under_way) > UNDER_WAY:
                self._under_way.popitem(last=False)

    def learn(self, fact: Fact) -> None:
        """A listener of facts."""
        if isinstance(fact, RequestRefused | RequestDone):
            with self._lock:
                known = self._under_way.pop(fact.request, None)
                if known is not None and isinstance(fact, RequestDone):
                    self._keep(*known, fact)
        elif isinstance(fact, ConversationChanged) and fact.change == "deleted":
            with self._lock:
                self._forget(fact.tenant, fact.conversation)

    def findings(self, tenant: str | None) -> dict[str, Any]:
        """For one tenant or (None) all: what was looked at, and the habits found in it, the greatest gain first. Takes
        tenths of a second when much is kept."""
        with self._lock:
            kept = [asked for whose, many in self._asked.items() if tenant in (None, whose) for asked in many]
        reader = Lint(self._header, 0.0)
        for asked in sorted(kept, key=lambda asked: asked.at):
            reader.read(asked.request(self._decode))
        return {
            "requests": reader.requests,
            "prompt_tokens": reader.prompt_tokens,
            "findings": [dataclasses.asdict(finding) for finding in reader.findings()],
        }

    def _keep(self, request: Request, at: float, fact: RequestDone) -> None:
        tenant, salt = request.scope.tenant, request.scope.salt
        if len(request.tokens) > self._per_tenant:
            return
        owner = f"{tenant} {salt}" if salt else tenant
        tokens = array("I", request.tokens)
        kv, usage = short(fact.receipt), fact.usage
        asked = _Asked(
            request.id, at, owner, request.session_id, tokens, request.spans, usage.completion_tokens, kv,
            fact.timings.prompt_ms,
        )  # fmt: skip
        self._asked.setdefault(tenant, deque()).append(asked)
        self._asked.move_to_end(tenant)
        self._tokens[tenant] = self._tokens.get(tenant, 0) + len(tokens)
        while self._tokens[tenant] > self._per_tenant or len(self._asked[tenant]) > MAX_REQUESTS:
            self._drop(tenant)
        while self.tokens > self._in_all:
            self._drop(next(iter(self._asked)))

    def _forget(self, tenant: str, session: str) -> None:
        """Whose conversation was deleted wants nothing kept of it."""
        many = self._asked.get(tenant, deque())
        kept = deque(asked for asked in many if asked.session != session)
        if kept:
            self._asked[tenant] = kept
            self._tokens[tenant] = sum(len(asked.tokens) for asked in kept)
        elif many:
            del self._asked[tenant], self._tokens[tenant]

    def _drop(self, tenant: str) -> None:
        self._tokens[tenant] -= len(self._asked[tenant].popleft().tokens)
        if not self._asked[tenant]:
            del self._asked[tenant], self._tokens[tenant]


def short(receipt: Receipt) -> dict[str, Any]:
    """What of a receipt the rules go by."""
    miss = receipt.miss
    return {
        "cached_tokens": receipt.cached_tokens,
        "miss": None if miss is None else {"reason": miss.reason, "at_token": miss.at_token, "message": miss.message},
        "forgotten": [{"tokens": [item.start, item.end], "policy": item.policy} for item in receipt.forgotten],
        "codec": dict(receipt.codec),
        "preempted": receipt.preempted,
        "recomputed_tokens": receipt.recomputed_tokens,
        "limit_cause": receipt.limit_cause,
    }
