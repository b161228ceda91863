"""`tenure chat`: a conversation in the terminal that shows what the KV cache did for each turn."""

from __future__ import annotations

import contextlib
import json
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tenure.cli.options import complain, takes
from tenure.cli.seen import history, in_words
from tenure.config import Resolved
from tenure.errors import ConfigError

if TYPE_CHECKING:
    import httpx

HELP = """/new      start over: a fresh conversation
/history  what was said, and what of it the model can no longer see
/kv       what the KV cache holds
/quit     leave (also Ctrl-D); Ctrl-C stops an answer, not the program
/help     this"""

BAR = {"leased": "#", "cached": "="}

Url = Annotated[str | None, typer.Option("--url", help="Talk to this server instead of starting an engine here.")]
MaxTokens = Annotated[int, typer.Option("--max-tokens", min=1, help="Longest answer, in tokens.")]
Temperature = Annotated[float, typer.Option("--temperature", min=0.0, help="0 is greedy.")]
System = Annotated[str | None, typer.Option("--system", help="A system prompt.")]


@takes(
    "model", "weights", "max_model_len", "memory", "kv_cache_memory_bytes", "kv_cache_dtype",
    "kv_cache_dtype_k", "kv_cache_dtype_v",
    "max_step_ms",
    "api_key", "request_timeout", "threads", "isa", "overflow", "trim_steps",
)  # fmt: skip
def chat(
    resolved: Resolved,
    url: Url = None,
    max_tokens: MaxTokens = 512,
    temperature: Temperature = 0.0,
    system: System = None,
) -> int:
    """Talk to a model in the terminal."""
    settings = resolved.settings
    # Someone who talks wants to go on talking: without a word from the user the oldest turns go, and it is told.
    overflow = "trim" if resolved.sources["overflow"] == "default" else settings.overflow
    with contextlib.ExitStack() as stack:
        if url is None:
            from tenure.cli.local import local_server

            url = stack.enter_context(local_server(settings))
        client = stack.enter_context(connect(url, settings.api_key, settings.request_timeout))
        talk = Talk(client, model_of(client), max_tokens, temperature, system, overflow)
        return loop(talk)


def connect(url: str, api_key: str | None, timeout_s: float) -> httpx.Client:
    """An HTTP client for a server's URL, with or without /v1 at its end."""
    import httpx

    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    return httpx.Client(base_url=url.rstrip("/").removesuffix("/v1"), headers=headers, timeout=timeout_s)


def model_of(client: httpx.Client) -> str:
    """The id of the first model the server has. ConfigError when there is no such server."""
    import httpx

    try:
        reply = client.get("/v1/models")
    except httpx.HTTPError as error:
        raise ConfigError("url", f"no server answers at {client.base_url}: {error}") from None
    if reply.status_code != 200:
        raise ConfigError("url", f"{client.base_url} answered {reply.status_code}: {_error_of(reply)}")
    return str(reply.json()["data"][0]["id"])


@dataclass
class Talk:
    """One conversation and the numbers of its last turn."""

    client: httpx.Client
    model: str
    max_tokens: int
    temperature: float
    system: str | None
    overflow: str = "trim"
    session: str = field(default_factory=lambda: uuid.uuid4().hex)
    messages: list[dict[str, str]] = field(default_factory=list)
    last: dict[str, Any] = field(default_factory=dict)
    forgotten: list[dict[str, Any]] = field(default_factory=list)
    """What the model did not see when it answered last, as the receipt says."""

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin a new conversation; the old one's blocks stay cached until they are evicted."""
        self.session = uuid.uuid4().hex
        self.messages = [{"role": "system", "content": self.system}] if self.system else []
        self.forgotten = []

    def ask(self, question: str) -> Iterator[str]:
        """Stream the answer; afterwards `last` has usage, kv, timings, finish_reason and ttft_s."""
        self.messages.append({"role": "user", "content": question})
        body = {
            "model": self.model,
            "messages": self.messages,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "session_id": self.session,
            "overflow": self.overflow,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        self.last, answer, began = {}, "", time.monotonic()
        kept = False
        try:
            with self.client.stream("POST", "/v1/chat/completions", json=body) as reply:
                if reply.status_code != 200:
                    reply.read()
                    raise Refused(_error_of(reply))
                for chunk in _events(reply):
                    self._note(chunk)
                    for choice in chunk.get("choices", ()):
                        words = choice.get("delta", {}).get("content")
                        if words:
                            self.last.setdefault("ttft_s", time.monotonic() - began)
                            answer += words
                            yield words
            kept = True
        finally:
            # A stopped answer stays in the history as far as it was shown; a refused question leaves it.
            if kept or answer:
                self.messages.append({"role": "assistant", "content": answer})
            else:
                self.messages.pop()

    def _note(self, chunk: dict[str, Any]) -> None:
        if "error" in chunk:
            raise Refused(str(chunk["error"].get("message", chunk["error"])))
        for name in ("usage", "kv", "timings"):
            if chunk.get(name):
                self.last[name] = chunk[name]
        if "prompt_tokens" in (chunk.get("kv") or {}):  # the receipt, and no event on the way
            self.forgotten = chunk["kv"].get("forgotten", [])
        for choice in chunk.get("choices", ()):
            if choice.get("finish_reason"):
                self.last["finish_reason"] = choice["finish_reason"]


class Refused(Exception):
    """The server refused a turn; the conversation goes on without it."""


def loop(talk: Talk) -> int:
    """Read, answer, show the numbers; until /quit or the end of input."""
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 — gives input() its line editing
        print(f"Talking to {talk.model}. /help shows the commands.")
    while True:
        try:
            line = input("\n> " if terminal else "").strip()
        except EOFError:
            return 0
        except KeyboardInterrupt:
            print()
            continue
        if line == "/quit":
            return 0
        if line:
            turn(talk, line, terminal)


def turn(talk: Talk, line: str, terminal: bool) -> None:
    """One line of the user: a command or a question."""
    if line == "/help":
        print(HELP)
    elif line == "/new":
        talk.reset()
        print("(a new conversation)")
    elif line == "/history":
        print(history(talk.messages, talk.forgotten))
    elif line == "/kv":
        print(kv_lines(talk.client.get("/v1/kv").json()))
    elif line.startswith("/"):
        print(f"unknown command {line.split()[0]}; /help shows them")
    else:
        answer(talk, line, terminal)


def answer(talk: Talk, question: str, terminal: bool) -> None:
    """Print the answer as it comes, then one line of numbers."""
    import httpx

    before = in_words(talk.last.get("kv", {}), talk.messages)
    pieces = talk.ask(question)
    try:
        for words in pieces:
            print(words, end="", flush=True)
    except KeyboardInterrupt:
        pieces.close()  # type: ignore[attr-defined]
        print("\n(stopped)")
        return
    except Refused as refusal:
        print()
        complain(str(refusal))
        return
    except httpx.HTTPError as error:
        print()
        complain(f"the connection broke: {error}")
        return
    print()
    numbers = numbers_line(talk.last)
    print(f"\033[2m{numbers}\033[0m" if terminal else numbers, flush=True)
    news = in_words(talk.last.get("kv", {}), talk.messages)
    if news and news != before:
        print(f"\n{news} /history shows it.", flush=True)


def numbers_line(last: dict[str, Any]) -> str:
    """Tokens reused and computed, time to first token, tokens per second."""
    usage, kv, timings = last.get("usage", {}), last.get("kv", {}), last.get("timings", {})
    reused = kv.get("cached_tokens", usage.get("prompt_tokens_details", {}).get("cached_tokens", 0))
    computed = kv.get("computed_tokens", usage.get("prompt_tokens", 0) - reused)
    parts = [f"{reused} tokens reused", f"{computed} computed"]
    if "ttft_s" in last:
        parts.append(f"first token after {last['ttft_s'] * 1000:.0f} ms")
    if timings.get("predicted_per_second"):
        parts.append(f"{timings['predicted_per_second']:.1f} tokens/s")
    if last.get("finish_reason") == "length":
        parts.append(f"cut short by {kv.get('limit_cause') or 'length'}")
    miss = kv.get("miss")
    if miss and miss.get("reason") != "cold":
        parts.append(f"reuse ended at token {miss.get('at_token')}: {miss.get('reason')}")
    return f"[{' · '.join(parts)}]"


def kv_lines(kv: dict[str, Any]) -> str:
    """The reply of /v1/kv, for people; from a server that has no such route, what it said."""
    from tenure.cli.machine import human

    if "tiers" not in kv:
        return json.dumps(kv, indent=2)
    budget, pool, past = kv["budget"], kv["tiers"]["device"], kv["since_start"]
    marks = "".join(mark * round(40 * pool[state] / pool["total"]) for state, mark in BAR.items())
    gone = sum(entry["blocks"] for entry in past["blocks_gone"])
    return "\n".join(
        [
            f"budget   {human(budget['total_bytes'])}: weights {human(budget['weight_bytes'])}, "
            f"cache {human(budget['arena_bytes'])} in {kv['codec']}",
            f"blocks   [{marks:.<40.40}] {pool['leased']} leased (#), {pool['cached']} cached (=), {pool['free']} free",
            f"tokens   {past['cached_tokens']} of {past['prompt_tokens']} prompt tokens reused since the start",
            f"blocks   {past['blocks_stored']} stored, {past['blocks_reused']} reused, {gone} gone",
            f"policy   eviction {kv['policy']['eviction']}, pressure {kv['policy']['pressure']}",
        ]
    )


def _events(reply: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in reply.iter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line[6:])


def _error_of(reply: httpx.Response) -> str:
    try:
        return str(reply.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return reply.text[:200]
