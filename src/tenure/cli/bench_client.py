"""What a benchmark sends and what it times: six workloads and a light client, shared by `tenure bench` and `bench/`.

The client costs little on purpose, because on two cores it competes with the server: while a reply streams in, it only
notes when which bytes came; HTTP chunks, events and JSON are taken apart when the reply is over.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

VOCABULARY = 40_000  # generated ids and the variation of first tokens stay below every model's vocabulary we measure
REQUEST_TIMEOUT_S = 600.0


@dataclass(slots=True)
class Reply:
    """One request as the client saw it. Times are seconds of one monotonic clock; `error` None means it was served."""

    sent: float
    first: float | None = None
    last: float | None = None
    ids: list[int] = field(default_factory=list)
    text: str = ""
    tokens: int = 0
    cached: int | None = None
    preempted: int | None = None
    finish: str | None = None
    error: str | None = None

    @property
    def ttft(self) -> float:
        """Seconds to the first token; NaN when none came."""
        return float("nan") if self.first is None else self.first - self.sent

    @property
    def decode_rate(self) -> float:
        """Tokens per second after the first one; NaN with fewer than two."""
        if self.first is None or self.last is None or self.tokens < 2 or self.last <= self.first:
            return float("nan")
        return (self.tokens - 1) / (self.last - self.first)

    @property
    def answer(self) -> list[int] | str:
        """What to compare between two runs: the token ids when the server tells them, else the text."""
        return self.ids or self.text


class Endpoint(Protocol):
    """Anything that continues a prompt of token ids: greedily, ignoring end tokens, by exactly `output` tokens."""

    async def complete(self, prompt: Sequence[int], output: int) -> Reply: ...


# ---------------------------------------------------------------------------------------------------- the HTTP client


class _Recorder(asyncio.Protocol):
    """Sends one request and keeps what arrives, with the time of each arrival, until the server closes."""

    def __init__(self, request: bytes) -> None:
        self.request = request
        self.arrivals: list[tuple[float, bytes]] = []
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        self.arrivals.append((time.perf_counter(), data))

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(None)


def _pieces(arrivals: Iterable[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """Status line and headers of an HTTP/1.1 reply, then its body, each piece with the time it was complete."""
    buffer, chunked, headed = b"", False, False
    for when, data in arrivals:
        buffer += data
        if not headed:
            head, mark, rest = buffer.partition(b"\r\n\r\n")
            if not mark:
                continue
            headed, buffer = True, rest
            chunked = b"transfer-encoding: chunked" in head.lower()
            yield when, head
        while chunked:
            size, mark, rest = buffer.partition(b"\r\n")
            if not mark or not size:
                break
            length = int(size.split(b";")[0], 16)
            if len(rest) < length + 2:
                break
            yield when, rest[:length]
            buffer = rest[length + 2 :]
        if not chunked and buffer:
            yield when, buffer
            buffer = b""


def _events(pieces: Iterable[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """The data of server-sent events, each with the time it was complete."""
    buffer = b""
    for when, piece in pieces:
        *lines, buffer = (buffer + piece).split(b"\n")
        for line in lines:
            if line.startswith((b"data:", b"error:")):
                yield when, line.split(b":", 1)[1].strip()


def read_reply(sent: float, arrivals: Sequence[tuple[float, bytes]]) -> Reply:
    """Take a recorded streaming reply apart. Never raises: what was wrong is in `Reply.error`."""
    reply = Reply(sent)
    pieces = _pieces(arrivals)
    head = next(pieces, (0.0, b""))[1]
    status = head.split(b" ", 2)[1:2]
    if status != [b"200"]:
        body = b"".join(piece for _, piece in pieces).decode(errors="replace")
        reply.error = f"HTTP {status[0].decode()}: {body[:400]}" if status else "the server closed without a reply"
        return reply
    for when, data in _events(pieces):
        if data == b"[DONE]":
            break
        try:
            _absorb(reply, when, json.loads(data))
        except (ValueError, AttributeError) as broken:
            reply.error = f"unreadable event ({broken}): {data[:200]!r}"
    if reply.tokens == 0 and reply.error is None:
        reply.error = "no token came"
    return reply


def _absorb(reply: Reply, when: float, event: dict[str, Any]) -> None:
    """Add one event, of the OpenAI shape or of llama.cpp's `/completion`, to the reply."""
    if "error" in event:
        reply.error = json.dumps(event["error"])[:400]
        return
    choice = (event.get("choices") or [event])[0]
    ids = choice.get("token_ids") or choice.get("tokens") or []
    text = choice.get("text") or choice.get("content") or ""
    if ids or text:
        reply.first = reply.first or when
        reply.last = when
        reply.ids += ids
        reply.text += text
        reply.tokens += len(ids) or 1
    reply.finish = choice.get("finish_reason") or choice.get("stop_type") or reply.finish
    usage = event.get("usage") or {}
    if usage:
        reply.tokens = usage.get("completion_tokens", reply.tokens)
        reply.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", reply.cached)
    reply.cached = (event.get("timings") or {}).get("cache_n", reply.cached)
    reply.preempted = (event.get("kv") or {}).get("preempted", reply.preempted)


class HttpEndpoint:
    """A completions server on `url` (scheme, host and port).

    `dialect` is ``openai`` for ``/v1/completions``, or ``llamacpp`` for llama.cpp's own ``/completion``: only there it
    tells token ids.
    """

    def __init__(
        self, url: str, *, model: str = "default", dialect: str = "openai", api_key: str | None = None
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"need an http://host:port URL, not {url!r}")
        self.url, self.host, self.port = url, parts.hostname, parts.port or 80
        self.model, self.dialect, self.api_key = model, dialect, api_key

    def _body(self, prompt: Sequence[int], output: int) -> dict[str, Any]:
        common = {"prompt": list(prompt), "temperature": 0, "ignore_eos": True, "stream": True}
        if self.dialect == "llamacpp":
            return common | {
                "n_predict": output,
                "return_tokens": True,
                "cache_prompt": True,
                "samplers": ["temperature"],
            }
        return common | {
            "model": self.model,
            "max_tokens": output,
            "return_token_ids": True,
            "stream_options": {"include_usage": True},
        }

    def _request(self, method: str, path: str, body: bytes = b"") -> bytes:
        key = f"Authorization: Bearer {self.api_key}\r\n" if self.api_key else ""
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: {self.host}:{self.port}\r\nConnection: close\r\n{key}"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    async def _exchange(self, request: bytes, timeout_s: float) -> list[tuple[float, bytes]]:
        loop = asyncio.get_running_loop()
        transport, recorder = await loop.create_connection(lambda: _Recorder(request), self.host, self.port)
        try:
            async with asyncio.timeout(timeout_s):
                await recorder.done
        finally:
            transport.close()
        return recorder.arrivals

    async def complete(self, prompt: Sequence[int], output: int) -> Reply:
        """One greedy completion. A refused, cut or late reply comes back with its `error` told."""
        path = "/completion" if self.dialect == "llamacpp" else "/v1/completions"
        request = self._request("POST", path, json.dumps(self._body(prompt, output)).encode())
        sent = time.perf_counter()
        try:
            arrivals = await self._exchange(request, REQUEST_TIMEOUT_S)
        except (OSError, TimeoutError) as failure:
            return Reply(sent, error=f"{type(failure).__name__}: {failure}")
        return read_reply(sent, arrivals)

    async def discover(self) -> None:
        """Ask the server for its model's name. ValueError when it does not tell."""
        status, body = await self.get("/v1/models")
        if status != 200:
            raise ValueError(f"{self.url}/v1/models answers {status or 'nothing'}: {body[:200]!r}")
        self.model = json.loads(body)["data"][0]["id"]

    async def get(self, path: str, timeout_s: float = 5.0) -> tuple[int, bytes]:
        """Status and body of a GET; status 0 when nobody answers."""
        try:
            pieces = _pieces(await self._exchange(self._request("GET", path), timeout_s))
        except (OSError, TimeoutError):
            return 0, b""
        head = next(pieces, (0.0, b"HTTP/1.1 0"))[1]
        return int(head.split(b" ", 2)[1]), b"".join(piece for _, piece in pieces)


# --------------------------------------------------------------------------------------------------------- workloads


@dataclass(frozen=True, slots=True)
class Workload:
    """One of W1..W6. `rounds` is what a repetition takes one of: a prompt, a set of prompts, or a set of conversations.

    `kind`: ``single`` (one prompt), ``burst`` (a set of prompts at once), ``turns`` (conversations in a closed loop).
    `kv_tokens`: the room for keys and values, in tokens, when it is part of the workload.
    """

    name: str
    title: str
    kind: str
    output: int
    context: int
    sequences: int
    rounds: tuple[Any, ...]
    kv_tokens: int | None = None

    def round(self, repetition: int) -> Any:
        """What repetition 0, 1, … sends. No two begin with the same token, so each is cold for every prefix cache."""
        chosen = self.rounds[repetition % len(self.rounds)]
        variant = repetition // len(self.rounds)
        if variant == 0:
            return chosen
        if self.kind == "single":
            return _varied(chosen, variant)
        if self.kind == "burst":
            return [_varied(prompt, variant) for prompt in chosen]
        return [[_varied(turns[0], variant), *turns[1:]] for turns in chosen]


def _varied(prompt: Sequence[int], variant: int) -> list[int]:
    return [(prompt[0] + 101 * variant) % VOCABULARY, *prompt[1:]]


#      name   title                                                kind      context  sequences  kv_tokens
TABLE = (
    ("W1", "one stream, 512 → 128", "single", 8192, 1, None),
    ("W2", "one stream, 6000 → 64", "single", 8192, 1, None),
    ("W3", "16 at once, 512 → 128", "burst", 768, 16, None),
    ("W4", "32 sharing a 1024-token prefix, + 32 own → 32", "burst", 1152, 32, None),
    ("W5", "8 conversations × 6 turns, + 128 → 64", "turns", 1280, 8, None),
    ("W6", "16 × (1500 → 200), KV room for 8000 tokens", "burst", 2048, 16, 8000),
)


def generated(seed: int = 0) -> dict[str, Any]:
    """The data of W1..W6 and of the warm-up, in the shape of ``workloads.json``: random ids from a seed."""
    rng = random.Random(seed)

    def ids(length: int) -> list[int]:
        return [rng.randrange(100, VOCABULARY) for _ in range(length)]

    def shared(prefix: list[int]) -> list[list[int]]:
        return [prefix + ids(32) for _ in range(32)]

    return {
        "W1": {"prompts": [ids(512) for _ in range(5)], "out": 128},
        "W2": {"prompts": [ids(6000) for _ in range(4)], "out": 64},
        "W3": {"prompts": [ids(512) for _ in range(16)], "out": 128},
        "W4": {"sets": [shared(ids(1024)) for _ in range(4)], "out": 32},
        "W5": {"sets": [[[ids(128) for _ in range(6)] for _ in range(8)] for _ in range(3)], "out": 64},
        "W6": {"prompts": [ids(1500) for _ in range(16)], "out": 200},
        "warm": {"prompts": [ids(512) for _ in range(3)], "out": 16},
    }


def load(path: Path | None = None) -> dict[str, Workload]:
    """W1..W6 by name, from a ``workloads.json`` or, without one, generated."""
    data = json.loads(path.read_text()) if path else generated()
    workloads = {}
    for name, title, kind, context, sequences, kv_tokens in TABLE:
        entry = data[name]
        rounds = entry["sets"] if "sets" in entry else entry["prompts"] if kind == "single" else [entry["prompts"]]
        workloads[name] = Workload(name, title, kind, entry["out"], context, sequences, tuple(rounds), kv_tokens)
    return workloads


# ------------------------------------------------------------------------------------------------------ measurements


async def measure(endpoint: Endpoint, workload: Workload, repetition: int) -> dict[str, Any]:
    """Run one repetition and return its figures: seconds, tokens per second, counts. Errors are counted and quoted."""
    what = workload.round(repetition)
    if workload.kind == "turns":
        return await _turns(endpoint, what, workload.output)
    if workload.kind == "burst":
        return await _burst(endpoint, what, workload.output)
    reply = await endpoint.complete(what, workload.output)
    return _counts([reply], workload.output) | {
        "ttft_s": reply.ttft,
        "prefill_tps": len(what) / reply.ttft,
        "decode_tps": reply.decode_rate,
    }


def _counts(replies: Sequence[Reply], output: int) -> dict[str, Any]:
    errors = [reply.error for reply in replies if reply.error]
    finished = sum(reply.error is None and reply.tokens == output for reply in replies)
    figures: dict[str, Any] = {"requests": len(replies), "finished": finished, "errors": errors[:3]}
    if replies and all(reply.cached is not None for reply in replies):
        figures["cached_tokens"] = sum(reply.cached or 0 for reply in replies)
    if replies and all(reply.preempted is not None for reply in replies):
        figures["preemptions"] = sum(reply.preempted or 0 for reply in replies)
    return figures


async def _burst(endpoint: Endpoint, prompts: Sequence[Sequence[int]], output: int) -> dict[str, Any]:
    replies = await asyncio.gather(*(endpoint.complete(prompt, output) for prompt in prompts))
    wall = max(reply.last or reply.sent for reply in replies) - min(reply.sent for reply in replies)
    served = [reply for reply in replies if reply.first is not None]
    return _counts(replies, output) | {
        "wall_s": wall or float("nan"),
        "output_tps": sum(reply.tokens for reply in replies) / wall if wall else float("nan"),
        "ttft_mean_s": statistics.fmean(reply.ttft for reply in served) if served else float("nan"),
        "ttft_max_s": max((reply.ttft for reply in served), default=float("nan")),
        "answers": [reply.answer for reply in replies],
    }


async def _turns(endpoint: Endpoint, conversations: Sequence[Sequence[Sequence[int]]], output: int) -> dict[str, Any]:
    """Each conversation sends its next turn when the last was answered; the answer's ids become part of the history."""

    async def converse(turns: Sequence[Sequence[int]]) -> list[Reply]:
        history: list[int] = []
        replies = []
        for turn in turns:
            history += turn
            reply = await endpoint.complete(history, output)
            if reply.error is None and not reply.ids:
                reply.error = "the server tells no token ids, so a conversation cannot go on with them"
            replies.append(reply)
            if reply.error:
                break
            history += reply.ids
        return replies

    talks = await asyncio.gather(*(converse(turns) for turns in conversations))
    replies = [reply for talk in talks for reply in talk]
    ends = [reply.last or reply.sent for reply in replies]
    by_turn = [[talk[i].ttft for talk in talks if len(talk) > i] for i in range(len(conversations[0]))]
    means = [statistics.fmean(times) if times else float("nan") for times in by_turn]
    return _counts(replies, output) | {
        "wall_s": max(ends) - min(reply.sent for reply in replies),
        "ttft_turns_s": means,
        "ttft_first_s": means[0],
        "ttft_sixth_s": means[-1],
    }


async def solo(endpoint: Endpoint, workload: Workload, repetition: int) -> list[list[int] | str]:
    """The answers of a burst's prompts when each runs alone: what its answers under pressure must equal."""
    return [(await endpoint.complete(prompt, workload.output)).answer for prompt in workload.round(repetition)]
