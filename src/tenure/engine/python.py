"""The engine as a Python library: prompts in, answers out, blocking or not. The server uses the very same object."""

from __future__ import annotations

import asyncio
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, Unpack

from tenure.engine.handle import Handle
from tenure.engine.options import Options, Result, checked, result_of, sampling_of
from tenure.errors import InvalidRequest
from tenure.server.serves import Prompt
from tenure.types import Done, Piece, Request, Scope, Token

Message = Mapping[str, Any]
Given = str | Sequence[Token] | Sequence[Message]
"""A prompt as text or token ids, or the messages of a chat."""


class Stream:
    """An answer under way: iterate it for its pieces, then read `result`. Leaving the loop early cancels it."""

    def __init__(self, handle: Handle, prompt: Prompt) -> None:
        self._handle = handle
        self._prompt = prompt
        self._pieces: list[Piece] = []
        self._done: Done | None = None

    def __iter__(self) -> Iterator[Piece]:
        for item in self._handle:
            if self._keep(item):
                yield self._pieces[-1]

    def cancel(self) -> None:
        """End it, and free everything within one step."""
        self._handle.cancel()

    @property
    def result(self) -> Result:
        """Everything, once the last piece was read."""
        if self._done is None:
            raise RuntimeError("the stream has not been read to its end")
        return result_of(self._pieces, self._done, self._handle.request.n, self._prompt.reader)

    def _keep(self, item: Piece | Done) -> bool:
        if isinstance(item, Done):
            self._done = item
            return False
        self._pieces.append(item)
        return True


class AsyncStream(Stream):
    """As `Stream`, for `async for`."""

    async def __aiter__(self) -> AsyncIterator[Piece]:
        async for item in self._handle:
            if self._keep(item):
                yield self._pieces[-1]


class PythonApi(ABC):
    """`generate` and `chat` wait for the whole answer, `stream` gives it piece by piece; with an a, for asyncio."""

    def generate(self, prompt: str | Sequence[Token], **options: Unpack[Options]) -> Result:
        """The answer to a prompt of text or token ids. RequestError when it is refused."""
        return self._wait(self.stream(prompt, **options))

    def chat(self, messages: Sequence[Message], **options: Unpack[Options]) -> Result:
        """The next turn of a chat. RequestError when it is refused."""
        return self._wait(self.stream(messages, **options))

    def stream(self, prompt: Given, **options: Unpack[Options]) -> Stream:
        """The answer to a prompt or to the messages of a chat, as it comes: the model's own text, reasoning and calls
        in it."""
        request, read = self._request(prompt, options)
        return Stream(self.submit_on(request, None), read)

    async def agenerate(self, prompt: str | Sequence[Token], **options: Unpack[Options]) -> Result:
        """`generate`, while the event loop goes on. Cancelling the task cancels the request."""
        return await self._gather(self.astream(prompt, **options))

    async def achat(self, messages: Sequence[Message], **options: Unpack[Options]) -> Result:
        """`chat`, while the event loop goes on. Cancelling the task cancels the request."""
        return await self._gather(self.astream(messages, **options))

    def astream(self, prompt: Given, **options: Unpack[Options]) -> AsyncStream:
        """`stream` for `async for`; call it where an event loop runs."""
        request, read = self._request(prompt, options)
        return AsyncStream(self.submit_on(request, asyncio.get_running_loop()), read)

    # --- what it stands on -------------------------------------------------------------------------------------------

    @abstractmethod
    def submit_on(self, request: Request, loop: asyncio.AbstractEventLoop | None) -> Handle: ...

    @abstractmethod
    def render(
        self,
        messages: Sequence[Message],
        *,
        session_id: str | None,
        scope: Scope,
        tools: Sequence[Mapping[str, Any]] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Prompt: ...

    @abstractmethod
    def encode(self, text: str, *, special: bool = True) -> list[Token]: ...

    @abstractmethod
    def scope(self, *, tenant: str, salt: str) -> Scope: ...

    def _request(self, given: Given, options: Options) -> tuple[Request, Prompt]:
        options = checked(options)
        scope = self.scope(tenant="", salt=options.get("cache_salt", ""))
        session = options.get("session_id")
        if isinstance(given, str):
            prompt = Prompt(tuple(self.encode(given)), ())
        elif given and all(type(token) is int for token in given):
            prompt = Prompt(tuple(given), ())  # type: ignore[arg-type]  # just seen to be ints
        elif given and all(isinstance(message, Mapping) for message in given):
            tools = options.get("tools", ())
            told = options.get("template")
            prompt = self.render(given, session_id=session, scope=scope, tools=tools, kwargs=told)  # type: ignore[arg-type]
        else:
            raise InvalidRequest("prompt: must be text, token ids or messages, and not empty", param="prompt")
        request = Request(
            f"py-{uuid.uuid4().hex}",
            prompt.tokens,
            scope,
            sampling_of(options, marks=prompt.reader is not None),
            n=options.get("n", 1),
            priority=options.get("priority", 0),
            session_id=session,
            spans=prompt.spans,
        )
        return request, prompt

    def _wait(self, stream: Stream) -> Result:
        for _ in stream:
            pass
        return stream.result

    async def _gather(self, stream: AsyncStream) -> Result:
        async for _ in stream:
            pass
        return stream.result
