"""The seam between HTTP and whatever serves: all that the server knows of the engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from tenure.events import FactLog
from tenure.spec import LayerGroup
from tenure.types import Done, Forgotten, Guide, Part, Piece, Pin, Request, Scope, Snapshot, Span, Token
from tenure.views import ConversationView, Forecast

Change = Literal["pin", "unpin", "pause", "resume"]


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What clients may know of the served model. `context_limit` is in tokens, the answer included."""

    id: str
    created: int
    context_limit: int
    vocab: int
    weights: str
    codec: str
    fingerprint: str
    has_template: bool
    calls: bool = False
    """Whether the template was written for tools."""
    groups: tuple[LayerGroup, ...] = ()
    """Its layers by what they see; those with a window keep that, and no more of a conversation."""


class Reader(Protocol):
    """Reads one answer as it comes."""

    def push(self, text: str) -> list[Part]:
        """The parts that `text` completes."""
        ...

    def finish(self) -> list[Part]:
        """What was held back, at the end of the answer."""
        ...


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered prompt, the token range each message contributed, and what had to be left out of it."""

    tokens: tuple[Token, ...]
    spans: tuple[Span, ...]
    forgotten: tuple[Forgotten, ...] = ()
    pins: tuple[Pin, ...] = ()
    reader: Callable[[], Reader] | None = None
    """Makes what reads an answer for reasoning and calls; None when all of it is text."""


@dataclass(frozen=True, slots=True)
class Health:
    """`alive`: the engine thread works. `ready`: it takes requests; otherwise `cause` says why not."""

    alive: bool
    ready: bool
    cause: str | None


class Handle(Protocol):
    """A request under way. Iterating gives Pieces and ends after one Done."""

    @property
    def request(self) -> Request: ...

    def __aiter__(self) -> AsyncIterator[Piece | Done]: ...

    def cancel(self) -> None:
        """Free everything within one step; the iteration then ends with its Done. Safe to call twice."""
        ...


class Serves(Protocol):
    """The engine as the server sees it. All methods but `drain` return at once; texts may come from a worker thread."""

    facts: FactLog

    @property
    def card(self) -> ModelCard: ...

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        session_id: str | None,
        scope: Scope,
        tools: Sequence[Mapping[str, Any]] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Prompt:
        """Template and tokenise a chat; the template is told `tools` and `kwargs`.

        With a session, its own earlier answers are spliced in by their exact ids.
        """
        ...

    def call_guide(self, tools: Sequence[Mapping[str, Any]], *, one: bool = False) -> Guide:
        """A guide that lets an answer be nothing but calls of `tools`, or a single call with `one`. InvalidRequest when
        the template has none."""
        ...

    def encode(self, text: str, *, special: bool = True) -> list[Token]: ...

    def decode(self, tokens: Sequence[Token]) -> str: ...

    def token_bytes(self, token: Token) -> bytes:
        """The bytes of one token, control tokens by name."""
        ...

    def check_guide(self, guide: Guide) -> None:
        """Compile a guide, which may take tenths of a second. InvalidRequest when it cannot be followed."""
        ...

    def scope(self, *, tenant: str, salt: str) -> Scope: ...

    def submit(self, request: Request) -> Handle:
        """Take a request, or raise the RequestError that refuses it, at once. Called from the event loop's thread."""
        ...

    def stats(self) -> Snapshot: ...

    def health(self) -> Health: ...

    async def forecast(self, request: Request) -> Forecast:
        """What would become of a request that came now; nothing is done."""
        ...

    async def conversations(self, tenant: str | None) -> Sequence[ConversationView]:
        """Those of a tenant, or everybody's for None; the last used first."""
        ...

    async def conversation(self, tenant: str | None, id: str) -> ConversationView:
        """One of them. NotFound when there is none of that id, or it is another tenant's."""
        ...

    async def change_conversation(self, tenant: str | None, id: str, change: Change, ttl_s: float) -> ConversationView:
        """Do something to a conversation: what it is then. `ttl_s` is for pins alone; InvalidRequest when the tenant's
        budget has no room for one. NotFound as above."""
        ...

    async def delete_conversation(self, tenant: str | None, id: str) -> int:
        """End what runs of it and drop the blocks that nobody else needs; how many. NotFound as above."""
        ...

    async def clear_cache(self) -> int:
        """Drop all unleased blocks; the number dropped."""
        ...

    async def drain(self, grace_s: float) -> None:
        """Refuse new work, let what runs finish within `grace_s`, then end the rest with an explicit terminal event."""
        ...
