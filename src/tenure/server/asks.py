"""OpenAI's request bodies, and how they become a `Request` of integers."""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator

from tenure.errors import InvalidRequest, UnknownModel
from tenure.server.body import Strict, validate
from tenure.server.serves import Prompt, Serves
from tenure.server.unbuilt import CHAT, COMPLETION, refuse_unbuilt
from tenure.types import Request, Sampling

Kind = Literal["chat", "text"]
INT64 = 2**63
INT32 = 2**31
MAX_N = 16
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_STOP_IDS = 256
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
Name = Annotated[str, Field(min_length=1, max_length=256)]
Int32 = Annotated[int, Field(ge=-INT32, lt=INT32)]
MAX_MESSAGES = 10_000


def _ids(value: Any) -> list[int]:
    # Not left to pydantic, which would write an error for each of a million wrong items.
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise ValueError("must be a list of token ids")
    return value


Ids = Annotated[Any, AfterValidator(_ids)]
Count = Annotated[int, Field(ge=1, lt=INT32)]


class StreamOptions(Strict):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None

    @field_validator("continuous_usage_stats")
    @classmethod
    def _unbuilt(cls, value: bool | None) -> bool | None:
        if value:
            raise ValueError("is not built yet; leave it out")
        return value


class Message(Strict):
    """One chat message. `content` becomes one string: text parts are joined by line breaks, as vLLM does."""

    role: str
    content: Any
    tool_calls: Any = None
    function_call: Any = None
    audio: Any = None

    @field_validator("role")
    @classmethod
    def _known(cls, value: str) -> str:
        if value in ("tool", "function"):
            raise ValueError(f"{value!r} is not built yet")
        if value not in ROLES:
            raise ValueError(f"must be one of {', '.join(ROLES)}")
        return ROLES[value]

    @field_validator("content")
    @classmethod
    def _text(cls, value: Any) -> str:
        if isinstance(value, str):
            return value
        if not isinstance(value, list) or not value:
            raise ValueError("must be a string or a non-empty list of text parts")
        return "\n".join(_part_text(part) for part in value)

    @field_validator("tool_calls", "function_call", "audio")
    @classmethod
    def _absent(cls, value: Any) -> None:
        if value:
            raise ValueError("is not built yet")


def _part_text(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text":
        raise ValueError(f"part of type {kind!r:.64} is not built yet; only text parts are")
    text = part.get("text")
    if not isinstance(text, str):
        raise ValueError("text part must have a string `text`")
    return text


class CommonBody(Strict):
    """What chat and completions share. Null and absent mean the same."""

    model: str | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=INT32)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    max_tokens: Count | None = None
    seed: Annotated[int, Field(ge=-INT64, lt=INT64)] | None = None
    stop: Any = None
    stop_token_ids: Ids | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    priority: Int32 | None = None
    user: Name | None = None
    cache_salt: Name | None = None
    session_id: Name | None = None
    prompt_cache_key: Name | None = None

    @field_validator("stop")
    @classmethod
    def _stops(cls, value: Any) -> tuple[str, ...]:
        stops = [] if value is None else [value] if isinstance(value, str) else value
        if isinstance(stops, list) and len(stops) > MAX_STOPS:
            raise ValueError(f"may hold at most {MAX_STOPS} strings")
        if not isinstance(stops, list) or not all(isinstance(s, str) for s in stops):
            raise ValueError("must be a string or a list of strings")
        if not all(1 <= len(s) <= MAX_STOP_CHARS for s in stops):
            raise ValueError(f"strings must have 1 to {MAX_STOP_CHARS} characters")
        return tuple(stops)

    @field_validator("stop_token_ids")
    @classmethod
    def _few(cls, value: list[int] | None) -> list[int] | None:
        if value is not None and len(value) > MAX_STOP_IDS:
            raise ValueError(f"may hold at most {MAX_STOP_IDS} ids")
        return value


class ChatBody(CommonBody):
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Count | None = None


class CompletionBody(CommonBody):
    prompt: Any
    add_special_tokens: bool | None = None

    @field_validator("prompt")
    @classmethod
    def _one(cls, value: Any) -> str | list[int]:
        if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
            value = value[0]
        if isinstance(value, list) and value and all(isinstance(v, str | list) for v in value):
            raise ValueError("with several prompts is not built yet; send one request for each")
        if not isinstance(value, str) and not (isinstance(value, list) and all(type(v) is int for v in value)):
            raise ValueError("must be a string or a list of token ids")
        if not value:
            raise ValueError("must not be empty")
        return value


@dataclass(frozen=True, slots=True)
class Ask:
    """A request ready to submit, and how its answer is to be written."""

    request: Request
    kind: Kind
    model: str
    stream: bool
    include_usage: bool
    token_ids: bool


def chat_ask(serves: Serves, fields: Mapping[str, Any], session: str | None) -> Ask:
    """A chat request from its JSON fields; `session` is the X-Session-ID header. Raises RequestError."""
    refuse_unbuilt(fields, CHAT)
    body = validate(ChatBody, dict(fields))
    check_model(serves, body.model)
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        raise InvalidRequest("max_tokens and max_completion_tokens contradict each other", param="max_tokens")
    session_id = _session(body, session)
    prompt = render(serves, body, session_id)
    return _ask(serves, body, prompt, "chat", session_id, body.max_completion_tokens or body.max_tokens)


def completion_ask(serves: Serves, fields: Mapping[str, Any], session: str | None) -> Ask:
    """A completion request from its JSON fields; `session` is the X-Session-ID header. Raises RequestError."""
    table = COMPLETION
    if fields.get("best_of") is not None and fields.get("best_of") == fields.get("n"):
        table = {**COMPLETION, "best_of": (fields["n"],)}
    refuse_unbuilt(fields, table)
    body = validate(CompletionBody, dict(fields))
    check_model(serves, body.model)
    if isinstance(body.prompt, str):
        tokens = serves.encode(body.prompt, special=body.add_special_tokens is not False)
    else:
        tokens = check_ids(serves, body.prompt, "prompt")
    if not tokens:
        raise InvalidRequest("prompt has no tokens", param="prompt")
    return _ask(serves, body, Prompt(tuple(tokens), ()), "text", _session(body, session), body.max_tokens)


def render(serves: Serves, body: ChatBody, session_id: str | None) -> Prompt:
    """The messages through the model's template, as tokens."""
    if not serves.card.has_template:
        raise InvalidRequest("this model has no chat template; use /v1/completions", param="messages")
    messages = [{"role": m.role, "content": m.content} for m in body.messages]
    scope = serves.scope(tenant="", salt=body.cache_salt or "")
    return serves.render(messages, session_id=session_id, scope=scope)


def check_model(serves: Serves, name: str | None) -> None:
    """Raise UnknownModel unless `name` is absent or the served one."""
    if name is not None and name != serves.card.id:
        raise UnknownModel(f"there is no model {name!r:.200}; this server has {serves.card.id!r}", param="model")


def check_ids(serves: Serves, ids: list[int], param: str) -> list[int]:
    """The same ids, or InvalidRequest when one is not in the vocabulary."""
    vocab = serves.card.vocab
    if ids and not (min(ids) >= 0 and max(ids) < vocab):
        at = next(i for i, t in enumerate(ids) if not 0 <= t < vocab)
        message = f"{param}[{at}]: token ids must be from 0 to {vocab - 1}, not {ids[at]!r:.64}"
        raise InvalidRequest(message, param=param, limit=vocab - 1)
    return ids


def _session(body: CommonBody, header: str | None) -> str | None:
    if body.session_id is None and header is not None and not 1 <= len(header) <= 256:
        raise InvalidRequest("X-Session-ID must have 1 to 256 characters", param="X-Session-ID")
    return body.session_id or header or body.prompt_cache_key


def _ask(
    serves: Serves, body: CommonBody, prompt: Prompt, kind: Kind, session: str | None, max_tokens: int | None
) -> Ask:
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options needs stream: true", param="stream_options")
    n = body.n or 1
    seats = serves.stats().max_num_seqs
    if n > seats:
        raise InvalidRequest(f"n: must be at most {seats} on this server, not {n}", param="n", limit=seats)
    request = Request(
        id=f"{'chatcmpl' if kind == 'chat' else 'cmpl'}-{uuid.uuid4().hex}",
        tokens=prompt.tokens,
        scope=serves.scope(tenant="", salt=body.cache_salt or ""),
        sampling=_sampling(serves, body, max_tokens),
        n=n,
        priority=body.priority or 0,
        session_id=session,
        spans=prompt.spans,
    )
    include_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
    return Ask(request, kind, serves.card.id, bool(body.stream), include_usage, bool(body.return_token_ids))


def _sampling(serves: Serves, body: CommonBody, max_tokens: int | None) -> Sampling:
    return Sampling(
        temperature=1.0 if body.temperature is None else float(body.temperature),
        top_p=1.0 if body.top_p is None else float(body.top_p),
        top_k=min(max(body.top_k or 0, 0), serves.card.vocab),
        seed=secrets.randbits(63) if body.seed is None else body.seed,
        max_tokens=max_tokens,
        stop=body.stop or (),
        stop_token_ids=tuple(check_ids(serves, body.stop_token_ids or [], "stop_token_ids")),
        ignore_eos=bool(body.ignore_eos),
    )
