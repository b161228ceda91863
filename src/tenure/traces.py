"""Traces of requests on disk: several forms, told apart by their fields, read as one.

Readers take lines and give requests one by one, so that a trace may be larger than memory. What cannot be read raises
TraceError with the number of the line.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from hashlib import blake2b
from typing import Any

from tenure.errors import ConfigError
from tenure.sim.trace import BLOCK_TOKENS as MOONCAKE_BLOCK
from tenure.sim.trace import TraceRequest

VERSION = 1
"""Of Tenure's own form."""
TEXT_BLOCK = 32
Tokenise = Callable[[object], Sequence[int]]
"""Token ids of a prompt: a text, or a list of messages."""


class TraceError(ConfigError):
    """A trace cannot be read; the message begins with the line."""

    def __init__(self, line: int, message: str) -> None:
        super().__init__("trace", f"line {line}: {message}")
        self.line = line


def read(lines: Iterable[str], tokenise: Tokenise | None = None) -> Iterator[TraceRequest]:
    """The requests of a trace in any of the known forms; `tokenise` is needed for those with text only.

    An empty trace, a truncated line, a field that is missing or no number raises TraceError.
    """
    numbered = ((number, line.strip("\ufeff\r\n ")) for number, line in enumerate(lines, 1))
    filled = ((number, line) for number, line in numbered if line)
    first = next(filled, None)
    if first is None:
        raise TraceError(1, "the trace is empty")
    if first[1].lower().replace(" ", "").startswith("timestamp,contexttokens"):
        yield from _azure(first, filled)
        return
    if "tenure_trace" in _parse(*first):
        first = _after_header(first, filled)
    reader = _reader(_parse(*first), first[0], tokenise)
    for number, line in _chain(first, filled):
        record = _parse(number, line)
        if "tenure_trace" in record:  # traces that were joined
            continue
        try:
            yield reader(record)
        except KeyError as error:
            raise TraceError(number, f"the field {error} is missing") from None
        except (TypeError, ValueError, OverflowError) as error:
            raise TraceError(number, str(error)) from None


def header(lines: Iterable[str]) -> dict[str, Any]:
    """What the first line of Tenure's own form says of the server that wrote it; nothing in other forms."""
    first = next(iter(lines), "")
    record = _parse(1, first) if first.startswith("{") else {}
    return record if "tenure_trace" in record else {}


def _after_header(first: tuple[int, str], rest: Iterator[tuple[int, str]]) -> tuple[int, str]:
    if _parse(*first)["tenure_trace"] != VERSION:
        raise TraceError(
            first[0], f"a trace of version {_parse(*first)['tenure_trace']!r}; this Tenure reads {VERSION}"
        )
    following = next(rest, None)
    if following is None:
        raise TraceError(first[0], "the trace has a header and no requests")
    return following


def _chain(first: tuple[int, str], rest: Iterator[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    yield first
    yield from rest


def _parse(number: int, line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TraceError(number, f"not valid JSON (truncated?): {error}") from None
    if not isinstance(record, dict):
        raise TraceError(number, f"expected a JSON object, not {type(record).__name__}")
    return record


def _reader(
    record: Mapping[str, Any], number: int, tokenise: Tokenise | None
) -> Callable[[dict[str, Any]], TraceRequest]:
    """How records with the fields of this first one are read."""
    if "hash_ids" in record:
        return _qwen if "parent_chat_id" in record else _mooncake
    if "blocks" in record and "arrival" in record:
        return _own
    if any(name in record for name in ("messages", "prompt", "input", "body", "request")):
        if tokenise is None:
            raise TraceError(number, "the trace has text: a model is needed to tokenise it (--model)")
        return _Texts(tokenise).read
    raise TraceError(
        number,
        f"unknown kind of trace with the fields {', '.join(sorted(record))}; known: Tenure's own (arrival, blocks), "
        "Mooncake's (timestamp, hash_ids), Azure's CSV (TIMESTAMP,ContextTokens,GeneratedTokens), OpenAI-style "
        "requests (messages, prompt or input)",
    )


def _count(record: Mapping[str, Any], name: str) -> int:
    value = record[name]
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name} must be a whole number of tokens, not {value!r}")
    return value


def _seconds(value: object, unit_s: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"a time must be a finite number, not {value!r}")
    return value * unit_s


def _ids(found: object, prompt_tokens: int, block_tokens: int) -> tuple[int, ...]:
    if not isinstance(found, list):
        raise ValueError(f"block ids must be a list, not {found!r}")
    if len(found) > -(-prompt_tokens // block_tokens):
        raise ValueError(f"{len(found)} blocks of {block_tokens} tokens for a prompt of {prompt_tokens} tokens")
    return tuple([_id(item) for item in found])


def _id(item: object) -> int:
    """A block's name in 64 bits."""
    if isinstance(item, int) and 0 <= item < 1 << 64:
        return item
    if isinstance(item, int | str):
        return int.from_bytes(blake2b(str(item).encode(), digest_size=8).digest(), "little")
    raise ValueError(f"a block id must be a number or a text, not {item!r}")


def _hashed(record: dict[str, Any], unit_s: float, block_tokens: int, session: str | None) -> TraceRequest:
    prompt_tokens = _count(record, "input_length")
    known = ("timestamp", "input_length", "output_length", "hash_ids")
    return TraceRequest(
        at=_seconds(record["timestamp"], unit_s),
        prompt_tokens=prompt_tokens,
        output_tokens=_count(record, "output_length"),
        blocks=_ids(record["hash_ids"], prompt_tokens, block_tokens),
        block_tokens=block_tokens,
        session=session,
        extra={name: value for name, value in record.items() if name not in known},
    )


def _mooncake(record: dict[str, Any]) -> TraceRequest:
    return _hashed(record, 1e-3, MOONCAKE_BLOCK, None)


def _qwen(record: dict[str, Any]) -> TraceRequest:
    """Mooncake's fields in seconds and blocks of 16 tokens, with chat_id, parent_chat_id, type and turn."""
    return _hashed(record, 1.0, 16, None)


def _own(record: dict[str, Any]) -> TraceRequest:
    prompt_tokens, output_tokens = _count(record, "prompt_tokens"), _count(record, "output_tokens")
    block_tokens = _count(record, "block_tokens")
    if not block_tokens:
        raise ValueError("block_tokens must be at least 1")
    found = record["blocks"]
    named = [int(item, 16) if isinstance(item, str) else item for item in found] if isinstance(found, list) else found
    blocks = _ids(named, prompt_tokens + output_tokens, block_tokens)
    whole = len(blocks) if len(blocks) * block_tokens <= prompt_tokens else prompt_tokens // block_tokens
    known = ("arrival", "tenant", "session", "turn", "prompt_tokens", "output_tokens", "block_tokens", "blocks")
    return TraceRequest(
        at=_seconds(record["arrival"], 1.0),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        blocks=blocks[:whole],
        answer=blocks[whole:],
        block_tokens=block_tokens,
        tenant=str(record.get("tenant") or ""),
        session=record.get("session"),
        turn=record.get("turn"),
        extra={name: value for name, value in record.items() if name not in known},
    )


def write(request: TraceRequest) -> str:
    """One line of Tenure's own form."""
    record = {
        "arrival": round(request.at, 6),
        "tenant": request.tenant,
        "session": request.session,
        "turn": request.turn,
        "prompt_tokens": request.prompt_tokens,
        "output_tokens": request.output_tokens,
        "block_tokens": request.block_tokens,
        "blocks": [f"{block:016x}" for block in (*request.blocks, *request.answer)],
        **request.extra,
    }
    return json.dumps(record, separators=(",", ":"))


def _azure(header: tuple[int, str], lines: Iterable[tuple[int, str]]) -> Iterator[TraceRequest]:
    """Arrivals and lengths, no blocks: nothing is ever held."""
    columns = [name.strip().lower() for name in header[1].split(",")]
    for number, line in lines:
        row = dict(zip(columns, next(csv.reader([line])), strict=False))
        try:
            at = datetime.fromisoformat(row["timestamp"][:26]).timestamp()
            yield TraceRequest(at, int(row["contexttokens"]), int(row["generatedtokens"]))
        except KeyError as error:
            raise TraceError(number, f"the column {error} is missing (truncated?)") from None
        except ValueError as error:
            raise TraceError(number, str(error)) from None


def key_blocks(tokens: Sequence[int], block_tokens: int, salt: str = "") -> tuple[int, ...]:
    """Chained 64-bit names of the full blocks of `tokens`; prompts with another `salt` share none."""
    last = blake2b(salt.encode(), digest_size=8).digest()
    names = []
    for at in range(0, len(tokens) - block_tokens + 1, block_tokens):
        raw = b"".join(token.to_bytes(4, "little") for token in tokens[at : at + block_tokens])
        last = blake2b(last + raw, digest_size=8).digest()
        names.append(int.from_bytes(last, "little"))
    return tuple(names)


class _Texts:
    """OpenAI-style logs: requests with messages, prompt or input, bare or under `body` or `request`."""

    def __init__(self, tokenise: Tokenise) -> None:
        self._tokenise = tokenise
        self._last = 0.0

    def read(self, record: dict[str, Any]) -> TraceRequest:
        inner = record.get("body") or record.get("request") or record
        if not isinstance(inner, dict):
            raise ValueError("the request must be a JSON object")
        prompt = next((inner[name] for name in ("messages", "prompt", "input") if name in inner), None)
        if not isinstance(prompt, str | list):
            raise ValueError("messages, prompt or input is missing")
        tokens = tuple(self._tokenise(prompt))
        session = next((record[n] for n in ("session_id", "conversation_id") if record.get(n)), inner.get("session_id"))
        tenant = str(record.get("tenant") or inner.get("cache_salt") or "")
        return TraceRequest(
            at=self._time(record),
            prompt_tokens=len(tokens),
            output_tokens=self._answer(record),
            blocks=key_blocks(tokens, TEXT_BLOCK, tenant),
            block_tokens=TEXT_BLOCK,
            tenant=tenant,
            session=None if session is None else str(session),
            tokens=tokens,
            extra={"prompt": prompt, **_told(record)},
        )

    def _time(self, record: Mapping[str, Any]) -> float:
        """Seconds; numbers may be seconds, milli- or microseconds since 1970. Without a time: right after the last."""
        value = next((record[name] for name in ("timestamp", "created", "time", "ts", "at") if name in record), None)
        if value is None:
            return self._last
        if isinstance(value, str):
            self._last = datetime.fromisoformat(value.replace("Z", "+00:00")).timestamp()
        else:
            seconds = _seconds(value, 1.0)
            self._last = seconds * (1e-6 if seconds > 1e14 else 1e-3 if seconds > 1e11 else 1.0)
        return self._last

    def _answer(self, record: Mapping[str, Any]) -> int:
        """Tokens of the answer: as counted by the server, else of its text."""
        reply = _reply(record)
        if isinstance(reply, dict):
            usage = reply.get("usage") or {}
            count = usage.get("completion_tokens", usage.get("output_tokens"))
            if isinstance(count, int):
                return count
            choices = reply.get("choices") or [{}]
            reply = (choices[0].get("message") or {}).get("content") or choices[0].get("text") or ""
        usage = record.get("usage")
        if isinstance(usage, dict) and isinstance(usage.get("completion_tokens"), int):
            return int(usage["completion_tokens"])
        return len(self._tokenise(reply)) if isinstance(reply, str) and reply else 0


def _reply(record: Mapping[str, Any]) -> Any:
    """The response of a log's record: an object, a text, or nothing."""
    reply = record.get("response") or record.get("output") or ""
    return reply.get("body") or reply if isinstance(reply, dict) else reply


def _told(record: Mapping[str, Any]) -> dict[str, Any]:
    """The receipt and the usage, wherever the log has them."""
    reply = _reply(record)
    places = (record, reply if isinstance(reply, dict) else {})
    return {name: place[name] for place in places for name in ("kv", "usage") if isinstance(place.get(name), dict)}
