"""How an answer is written: whole, or as the chunks of a stream. Pure: pieces in, bytes out.

Chunks are cut from a template made once per stream, because a stream writes one for each token: only the text goes
through a JSON encoder (measured: about 1 µs a chunk, 30 times less than building and dumping a dict or a model).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from json.encoder import encode_basestring_ascii as quote
from typing import Any

from tenure.errors import RequestError
from tenure.server.asks import Ask
from tenure.server.logprobs import ChatLogprobs, TextLogprobs
from tenure.server.receipts import account, forgotten_object
from tenure.server.replies import error_object
from tenure.server.serves import Reader
from tenure.types import Done, Finish, Forgotten, LimitCause, Logprob, Part, Piece

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
REASONS = {Finish.STOP: "stop", Finish.LENGTH: "length"}


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _reason(piece: Piece) -> str | None:
    """The finish_reason, unless the answer goes on or ends in a way that the error event tells."""
    if piece.finish is None or piece.limit_cause == "shutdown":
        return None
    return REASONS.get(piece.finish)


def _ended(finish: Finish, called: bool) -> str:
    """The finish_reason of an answer that came to its end; one that calls tools stops for their sake."""
    return "tool_calls" if called and finish is Finish.STOP else REASONS[finish]


class Ends:
    """How the choices of one answer ended so far."""

    def __init__(self) -> None:
        self.seen: list[tuple[Finish, LimitCause | None]] = []

    def note(self, piece: Piece) -> None:
        if piece.finish is not None:
            self.seen.append((piece.finish, piece.limit_cause))


def _deltas(parts: Sequence[Part]) -> Iterator[str]:
    """The parts of an answer as the deltas of a stream."""
    for part in parts:
        if part.kind == "text":
            yield f'{{"content":{quote(part.text)}}}'
        elif part.kind == "reasoning":
            yield f'{{"reasoning_content":{quote(part.text)}}}'
        elif part.kind == "call":
            call = {"index": part.call, "id": part.id, "type": "function"}
            yield _compact({"tool_calls": [{**call, "function": {"name": part.text, "arguments": ""}}]})
        else:
            yield _compact({"tool_calls": [{"index": part.call, "function": {"arguments": part.text}}]})


def _message(parts: Sequence[Part]) -> dict[str, Any]:
    """The parts of a whole answer as a message."""
    content = "".join(part.text for part in parts if part.kind == "text")
    reasoning = "".join(part.text for part in parts if part.kind == "reasoning")
    calls: list[dict[str, Any]] = []
    for part in parts:
        if part.kind == "call":
            calls.append({"id": part.id, "type": "function", "function": {"name": part.text, "arguments": ""}})
        elif part.kind == "arguments":
            calls[part.call]["function"]["arguments"] += part.text
    message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else ""), "refusal": None}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def _tellers(ask: Ask) -> list[ChatLogprobs | TextLogprobs] | None:
    """One writer of logprobs for each choice, when they were asked for."""
    if ask.request.sampling.logprobs is None:
        return None
    if ask.kind == "chat":
        return [ChatLogprobs(ask.token_bytes)] * ask.choices
    return [TextLogprobs(ask.token_bytes, len(ask.echo(index))) for index in range(ask.choices)]


class Whole:
    """Gathers the pieces of an answer into one reply."""

    def __init__(self, ask: Ask, created: int) -> None:
        self._ask = ask
        self._created = created
        self._tellers = _tellers(ask)
        self._texts: list[list[str]] = [[ask.echo(index)] for index in range(ask.choices)]
        self._tokens: list[list[int]] = [[] for _ in range(ask.choices)]
        self._told: list[list[Logprob]] = [[] for _ in range(ask.choices)]
        self._prompts: dict[int, tuple[Logprob, ...]] = {}
        """Of the prompts that told of themselves, by their number."""
        self._last: list[Piece | None] = [None] * ask.choices

    def add(self, piece: Piece) -> None:
        self._texts[piece.index].append(piece.text)
        self._tokens[piece.index].extend(piece.tokens)
        self._told[piece.index].extend(piece.logprobs)
        if piece.prompt_logprobs:
            self._prompts[self._ask.prompt(piece.index)] = piece.prompt_logprobs
        if piece.finish is not None:
            self._last[piece.index] = piece

    def body(self, done: Done) -> dict[str, Any]:
        """The reply of a request that ended well."""
        ask = self._ask
        reply = {
            "id": ask.request.id,
            "object": "chat.completion" if ask.kind == "chat" else "text_completion",
            "created": self._created,
            "model": ask.model,
            "choices": [self._choice(index) for index in range(ask.choices)],
            **account(done),
        }
        if ask.token_ids and ask.kind == "chat":
            reply["prompt_token_ids"] = list(ask.request.tokens)
        return reply

    def _choice(self, index: int) -> dict[str, Any]:
        text, last = "".join(self._texts[index]), self._last[index]
        choice: dict[str, Any] = {"index": index}
        called = False
        if self._ask.reader is not None:
            reader = self._ask.reader()
            choice["message"] = _message([*reader.push(text), *reader.finish()])
            called = "tool_calls" in choice["message"]
        elif self._ask.kind == "chat":
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            choice["text"] = text
        choice["logprobs"] = self._logprobs(index)
        choice["finish_reason"] = None if last is None or last.finish is None else _ended(last.finish, called)
        choice["stop_reason"] = None if last is None else last.stopped_by
        if self._ask.token_ids:
            choice["token_ids"] = self._tokens[index]
            if self._ask.kind == "text":
                choice["prompt_token_ids"] = list(self._ask.of(index).tokens)
        return choice

    def _logprobs(self, index: int) -> dict[str, Any] | None:
        if self._tellers is None:
            return None
        teller, ask = self._tellers[index], self._ask
        part = teller.part(self._told[index])
        if isinstance(teller, TextLogprobs) and ask.tells_prompt:
            told = self._prompts.get(ask.prompt(index), ())
            first = teller.prompt(ask.echo(index), ask.of(index).tokens, told)
            return {name: first[name] + part[name] for name in part}
        return part


class Chunks:
    """Writes a stream. The chunk that ends the last choice is held back until `end`, which adds the receipt to it."""

    def __init__(self, ask: Ask, created: int) -> None:
        self._ask = ask
        self._open = ask.choices
        self._held: Piece | None = None
        self._begun: set[int] = set()
        """Prompts of which something was written."""
        self._tellers = _tellers(ask)
        self._readers = None if ask.reader is None else [ask.reader() for _ in range(ask.choices)]
        self._called: set[int] = set()
        self._plain = self._tellers is None and not ask.token_ids
        chat = ask.kind == "chat"
        kind = "chat.completion.chunk" if chat else "text_completion"
        start = {"id": ask.request.id, "object": kind, "created": created, "model": ask.model}
        self._start = f"data: {_compact(start)[:-1]}"
        usage = ',"usage":null' if ask.include_usage else ""
        self._openings = [f'{self._start}{usage},"choices":[{{"index":{index},' for index in range(ask.choices)]
        self._heads = [opening + ('"delta":{"content":' if chat else '"text":') for opening in self._openings]
        self._close = "}" if chat else ""
        self._plain_end = f'{self._close},"logprobs":null,"finish_reason":null}}]}}\n\n'

    def piece(self, piece: Piece) -> bytes:
        """The bytes to send for one piece; empty when there is nothing to say yet."""
        if piece.forgotten is not None:
            return self.piece(replace(piece, forgotten=None)) + self._slid(piece.index, piece.forgotten)
        finish = _reason(piece)
        if finish is None and not piece.tokens and not piece.text and not piece.prompt_logprobs:
            return b""
        prompt = self._ask.prompt(piece.index)
        first = b"" if prompt in self._begun else self._first(prompt, piece.prompt_logprobs)
        if self._readers is not None:
            first += self._read(piece, self._readers[piece.index])
            piece = replace(piece, text="")
        if finish is None:
            if not self._plain:
                return first + self._write(piece, None, "")
            if not piece.text:
                return first
            return first + f"{self._heads[piece.index]}{quote(piece.text)}{self._plain_end}".encode()
        self._open -= 1
        if self._open == 0 and not self._ask.include_usage:
            self._held = piece
            return first
        return first + self._write(piece, finish, "")

    def _read(self, piece: Piece, reader: Reader) -> bytes:
        """A chunk for each part that the piece's text completes. Tokens and their logprobs go with the chunk after."""
        parts = reader.push(piece.text)
        if piece.finish is not None:
            parts += reader.finish()
        if any(part.kind == "call" for part in parts):
            self._called.add(piece.index)
        opening = self._openings[piece.index]
        return "".join(
            f'{opening}"delta":{delta},"logprobs":null,"finish_reason":null}}]}}\n\n' for delta in _deltas(parts)
        ).encode()

    def end(self, done: Done) -> bytes:
        """The last chunk of a stream that ended well, and the end mark."""
        sums = account(done)
        if self._ask.include_usage:
            return f'{self._start},"choices":[],{_compact(sums)[1:]}\n\n'.encode() + DONE
        del sums["usage"]
        held = self._held
        if held is None or held.finish is None:
            raise AssertionError("a stream cannot end before its choices have")
        return self._write(held, _reason(held), f",{_compact(sums)[1:-1]}") + DONE

    def fail(self, error: RequestError, done: Done | None) -> bytes:
        """An error event with what was used so far, and the end mark."""
        event = {"error": error_object(error), **({} if done is None else account(done))}
        held = b"" if self._held is None else self._write(self._held, None, "")
        return held + f"data: {_compact(event)}\n\n".encode() + DONE

    def _write(self, piece: Piece, finish: str | None, extra: str) -> bytes:
        """A chunk with everything that was asked for; `extra` goes beside its choices."""
        told = "null" if self._tellers is None else _compact(self._tellers[piece.index].part(piece.logprobs))
        if finish is not None and piece.finish is not None:
            finish = _ended(piece.finish, piece.index in self._called)
        reason = "null" if finish is None else f'"{finish}","stop_reason":{_compact(piece.stopped_by)}'
        ids = f',"token_ids":{_compact(piece.tokens)}' if self._ask.token_ids else ""
        head = f"{self._heads[piece.index]}{quote(piece.text)}{self._close}"
        if self._readers is not None:
            head = f'{self._openings[piece.index]}"delta":{{}}'
        return f'{head},"logprobs":{told},"finish_reason":{reason}{ids}}}]{extra}}}\n\n'.encode()

    def _slid(self, index: int, forgotten: Forgotten) -> bytes:
        """The event of a context that slid: a chunk without choices, so that clients who don't know it pass it by."""
        usage = ',"usage":null' if self._ask.include_usage else ""
        event = _compact({"event": "context_slid", "index": index, "forgotten": [forgotten_object(forgotten)]})
        return f'{self._start}{usage},"choices":[],"kv":{event}}}\n\n'.encode()

    def _first(self, prompt: int, told: Sequence[Logprob]) -> bytes:
        """The chunks before the first text of a prompt's choices: a role, the echo and what is `told` of it, and the
        prompt's ids when asked for."""
        self._begun.add(prompt)
        ask, usage = self._ask, ',"usage":null' if self._ask.include_usage else ""
        chunks = []
        for index in range(prompt * ask.request.n, (prompt + 1) * ask.request.n):
            ids = f',"prompt_token_ids":{_compact(ask.of(index).tokens)}' if ask.token_ids else ""
            if ask.kind == "chat":
                role = '"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null'
                shown = "" if index else ids
                chunks.append(f'{self._start}{usage}{shown},"choices":[{{"index":{index},{role}}}]}}\n\n')
            elif ids or ask.echo(index):
                said, teller = "null", None if self._tellers is None else self._tellers[index]
                if isinstance(teller, TextLogprobs) and ask.tells_prompt:
                    said = _compact(teller.prompt(ask.echo(index), ask.of(index).tokens, told))
                echo = f'{self._heads[index]}{quote(ask.echo(index))},"logprobs":{said},"finish_reason":null{ids}'
                chunks.append(f"{echo}}}]}}\n\n")
        return "".join(chunks).encode()
