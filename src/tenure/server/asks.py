"""OpenAI's request bodies, and how they become a `Request` of integers."""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationInfo, field_validator

from tenure.errors import InvalidRequest, UnknownModel
from tenure.overflow import Window, window
from tenure.server.body import Strict, validate
from tenure.server.caller import Caller
from tenure.server.guides import read_guide
from tenure.server.logprobs import TokenBytes
from tenure.server.pins import read_pins
from tenure.server.serves import Prompt, Reader, Serves
from tenure.server.tools import Offer, check_calls, read_offer
from tenure.server.trim import fit, slide
from tenure.server.unbuilt import CHAT, COMPLETION, refuse_unbuilt
from tenure.types import Guide, Overflow, Request, Sampling

Kind = Literal["chat", "text"]
INT64 = 2**63
INT32 = 2**31
MAX_N = 16
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_STOP_IDS = 256
MAX_BIASED = 1024
MAX_TOLD = 1 << 18
"""Logprobs of prompts in one reply: about 10 MiB of JSON."""
MAX_PROMPTS = 256
"""Choices of all prompts of one request together."""
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
Name = Annotated[str, Field(min_length=1, max_length=256)]
Int32 = Annotated[int, Field(ge=-INT32, lt=INT32)]
MAX_MESSAGES = 10_000
MAX_KWARGS = 16
TAKEN = frozenset(
    {"self", "messages", "tools", "turns", "tokenizer", "add_generation_prompt", "bos_token", "eos_token"}
)
"""Names that the template is told by others."""
NO_OFFER = Offer()


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
    tool_calls: Any = None
    content: Annotated[Any, Field(validate_default=True)] = None
    reasoning_content: str | None = None
    tool_call_id: Name | None = None
    name: Name | None = None
    function_call: Any = None
    audio: Any = None

    @field_validator("role")
    @classmethod
    def _known(cls, value: str) -> str:
        if value == "function":
            raise ValueError("'function' is not built yet; use 'tool'")
        if value not in ROLES:
            raise ValueError(f"must be one of {', '.join(ROLES)}")
        return ROLES[value]

    @field_validator("tool_calls")
    @classmethod
    def _calls(cls, value: Any, info: ValidationInfo) -> list[dict[str, Any]] | None:
        calls = check_calls(value)
        if calls and info.data.get("role") != "assistant":
            raise ValueError("belong to messages of the assistant")
        return calls

    @field_validator("content")
    @classmethod
    def _text(cls, value: Any, info: ValidationInfo) -> str | None:
        if isinstance(value, str) or (value is None and info.data.get("tool_calls")):
            return value
        if not isinstance(value, list) or not value:
            raise ValueError("must be a string or a non-empty list of text parts")
        return "\n".join(_part_text(part) for part in value)

    @field_validator("function_call", "audio")
    @classmethod
    def _absent(cls, value: Any) -> None:
        if value:
            raise ValueError("is not built yet")

    def for_template(self) -> dict[str, Any]:
        """As templates take it: what is absent is left out."""
        more = {
            "reasoning_content": self.reasoning_content if self.role == "assistant" else None,
            "tool_calls": self.tool_calls,
            "tool_call_id": self.tool_call_id,
            "name": self.name if self.role == "tool" else None,
        }
        return {"role": self.role, "content": self.content, **{k: v for k, v in more.items() if v is not None}}


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
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: Any = None
    min_tokens: Annotated[int, Field(ge=0, lt=INT32)] | None = None
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
    overflow: Overflow | None = None
    truncation: Literal["auto", "disabled"] | None = None
    codec: Literal["exact", "any"] | None = None

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

    @field_validator("logit_bias")
    @classmethod
    def _biases(cls, value: Any) -> tuple[tuple[int, float], ...]:
        if value is None:
            return ()
        if not isinstance(value, dict) or len(value) > MAX_BIASED:
            raise ValueError(f"must be an object of at most {MAX_BIASED} token ids")
        if not all(key.isascii() and key.isdecimal() and len(key) < 12 for key in value):
            raise ValueError("must have token ids for keys")
        if not all(type(bias) in (int, float) and -100 <= bias <= 100 for bias in value.values()):
            raise ValueError("must have biases from -100 to 100")
        return tuple((int(key), float(bias)) for key, bias in value.items())

    @field_validator("stop_token_ids")
    @classmethod
    def _few(cls, value: list[int] | None) -> list[int] | None:
        if value is not None and len(value) > MAX_STOP_IDS:
            raise ValueError(f"may hold at most {MAX_STOP_IDS} ids")
        return value


class ChatBody(CommonBody):
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    chat_template_kwargs: Any = None

    @field_validator("chat_template_kwargs")
    @classmethod
    def _kwargs(cls, value: Any) -> dict[str, Any] | None:
        if value is not None and (not isinstance(value, dict) or len(value) > MAX_KWARGS):
            raise ValueError(f"must be an object of at most {MAX_KWARGS} values")
        for name, given in (value or {}).items():
            if not isinstance(given, str | bool | int | float | None):
                raise ValueError("may hold texts, numbers, true, false and null only")
            if not name.isidentifier() or name in TAKEN:
                raise ValueError(f"may not hold {name!r:.64}")
        return value


class CompletionBody(CommonBody):
    prompt: Any
    max_tokens: Annotated[int, Field(ge=0, lt=INT32)] | None = None
    add_special_tokens: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    echo: bool | None = None

    @field_validator("prompt")
    @classmethod
    def _prompts(cls, value: Any) -> list[str | list[int]]:
        """One prompt or several, always as a list of them."""
        several = isinstance(value, list) and bool(value) and isinstance(value[0], str | list)
        prompts = value if several else [value]
        if len(prompts) > MAX_PROMPTS:
            raise ValueError(f"may hold at most {MAX_PROMPTS} prompts")
        for prompt in prompts:
            if not isinstance(prompt, str) and not (isinstance(prompt, list) and all(type(v) is int for v in prompt)):
                raise ValueError("must be a string, a list of token ids, or a list of either")
            if not prompt:
                raise ValueError("must not be empty")
        return prompts


@dataclass(frozen=True, slots=True)
class Ask:
    """A request ready to submit (several when it has several prompts), and how its answer is to be written."""

    requests: tuple[Request, ...]
    kind: Kind
    model: str
    stream: bool
    include_usage: bool
    token_ids: bool
    token_bytes: TokenBytes
    echoes: tuple[str, ...] = ()
    """What each prompt's answers begin with."""
    reader: Callable[[], Reader] | None = None
    """Makes what reads each choice for reasoning and calls; None when all of it is text."""

    @property
    def request(self) -> Request:
        """The first one, whose id is the answer's."""
        return self.requests[0]

    @property
    def choices(self) -> int:
        return sum(request.n for request in self.requests)

    @property
    def tells_prompt(self) -> bool:
        """Whether the echo comes with logprobs."""
        return self.request.sampling.prompt_logprobs is not None

    def prompt(self, index: int) -> int:
        """The number of the prompt that choice `index` answers."""
        return index // self.requests[0].n

    def of(self, index: int) -> Request:
        """The request that choice `index` answers."""
        return self.requests[self.prompt(index)]

    def echo(self, index: int) -> str:
        """What the text of choice `index` begins with."""
        return self.echoes[self.prompt(index)] if self.echoes else ""


def chat_ask(serves: Serves, fields: Mapping[str, Any], caller: Caller) -> Ask:
    """A chat request from its JSON fields. Raises RequestError."""
    refuse_unbuilt(fields, CHAT)
    body = validate(ChatBody, dict(fields))
    check_model(serves, body.model)
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        raise InvalidRequest("max_tokens and max_completion_tokens contradict each other", param="max_tokens")
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    max_tokens = body.max_completion_tokens or body.max_tokens
    offer, guide = read_offer(serves, fields), read_guide(serves, fields)
    if offer.guide is not None and guide is not None:
        raise InvalidRequest(
            "tool_choice: an answer that must call a tool can follow no other guide", param="tool_choice"
        )
    sampling = _sampling(serves, body, max_tokens, logprobs, guide or offer.guide)
    prompt = render(serves, body, caller, max_tokens, offer, fields["messages"])
    ask = _ask(serves, body, [prompt], "chat", caller, replace(sampling, marks=prompt.reader is not None))
    return replace(ask, reader=offer.reads(prompt.reader))


def completion_ask(serves: Serves, fields: Mapping[str, Any], caller: Caller) -> Ask:
    """A completion request from its JSON fields. Raises RequestError."""
    table = COMPLETION
    if fields.get("best_of") is not None and fields.get("best_of") == fields.get("n"):
        table = {**COMPLETION, "best_of": (fields["n"],)}
    refuse_unbuilt(fields, table)
    body = validate(CompletionBody, dict(fields))
    check_model(serves, body.model)
    if body.max_tokens == 0 and not body.echo:
        message = "max_tokens: should be greater than or equal to 1, not 0; with echo: true, 0 gives the prompt alone"
        raise InvalidRequest(message, param="max_tokens")
    prompts = [Prompt(tuple(_tokens(serves, body, prompt)), ()) for prompt in body.prompt]
    if overflow_of(serves, body) == "slide":
        prompts = [slide(prompt, _window(serves, caller)) for prompt in prompts]
    sampling = _sampling(serves, body, body.max_tokens, body.logprobs, read_guide(serves, fields))
    if body.echo and body.logprobs is not None:
        told = sum(len(prompt.tokens) for prompt in prompts) * (body.n or 1) * (body.logprobs + 1)
        if told > MAX_TOLD:
            message = f"echo: with logprobs, prompt tokens times n times (1 + logprobs) may be {MAX_TOLD}, not {told}"
            raise InvalidRequest(message, param="echo", limit=MAX_TOLD)
        sampling = replace(sampling, prompt_logprobs=body.logprobs)
    ask = _ask(serves, body, prompts, "text", caller, sampling)
    if not body.echo:
        return ask
    echoes = [prompt if isinstance(prompt, str) else serves.decode(prompt) for prompt in body.prompt]
    return replace(ask, echoes=tuple(echoes))


def _tokens(serves: Serves, body: CompletionBody, prompt: str | list[int]) -> list[int]:
    if isinstance(prompt, str):
        tokens = serves.encode(prompt, special=body.add_special_tokens is not False)
    else:
        tokens = check_ids(serves, prompt, "prompt")
    if not tokens:
        raise InvalidRequest("prompt has no tokens", param="prompt")
    return tokens


def render(
    serves: Serves,
    body: ChatBody,
    caller: Caller,
    max_tokens: int | None = None,
    offer: Offer = NO_OFFER,
    wishes: Sequence[Mapping[str, Any]] = (),
) -> Prompt:
    """The messages through the model's template, as tokens; shortened when they are too long and may be. `wishes`: the
    messages as they came, to be read for pins."""
    if not serves.card.has_template:
        raise InvalidRequest("this model has no chat template; use /v1/completions", param="messages")
    scope = serves.scope(tenant=caller.tenant, salt=body.cache_salt or "")
    session = session_of(body, caller)

    def rendered(messages: Sequence[Mapping[str, Any]]) -> Prompt:
        return serves.render(
            messages, session_id=session, scope=scope, tools=offer.tools, kwargs=body.chat_template_kwargs
        )

    messages = [message.for_template() for message in body.messages]
    odd = next((n for n, m in enumerate(body.messages) if m.role == "tool" or m.tool_calls), None)
    if odd is not None and not serves.card.calls:
        param = f"messages[{odd}].{'role' if body.messages[odd].role == 'tool' else 'tool_calls'}"
        raise InvalidRequest(f"{param}: this model's chat template has no tools", param=param)
    overflow, steps = overflow_of(serves, body), serves.stats().trim_steps
    prompt = fit(messages, rendered, overflow, _window(serves, caller), max_tokens, steps)

    def cut(number: int, content: str) -> Sequence[int]:
        before = [messages[span.message] for span in prompt.spans if span.message < number]
        return rendered([*before, {**messages[number], "content": content}]).tokens

    return replace(prompt, pins=read_pins(wishes, prompt, cut)) if wishes else prompt


def _window(serves: Serves, caller: Caller) -> Window:
    """What one of the caller's sequences can ever have: the context, or less."""
    stats = serves.stats()
    mine = next((view.max_blocks for view in stats.tenants if view.name == caller.tenant), None)
    return window(stats.context_limit, stats.block_tokens, stats.longest_blocks, mine)


def overflow_of(serves: Serves, body: CommonBody) -> Overflow:
    """What is to happen when the context is full: as the request says, else the server's default.

    OpenAI's `truncation` says it in other words. Completions have no turns to trim: the default `trim` refuses them."""
    said: Overflow | None = None if body.truncation is None else "trim" if body.truncation == "auto" else "refuse"
    if said is not None and body.overflow not in (None, said):
        raise InvalidRequest("overflow and truncation contradict each other", param="overflow")
    asked = body.overflow or said
    if isinstance(body, CompletionBody) and asked == "trim":
        param = "overflow" if body.overflow else "truncation"
        raise InvalidRequest(f"{param}: only chats have turns to trim; completions take refuse or slide", param=param)
    default = serves.stats().overflow
    return asked or ("refuse" if isinstance(body, CompletionBody) and default == "trim" else default)


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


def session_of(body: CommonBody, caller: Caller) -> str | None:
    """The conversation a request belongs to: the body's own name for it before the header, then the cache key."""
    header = caller.session
    if body.session_id is None and header is not None and not 1 <= len(header) <= 256:
        raise InvalidRequest("X-Session-ID must have 1 to 256 characters", param="X-Session-ID")
    return body.session_id or header or body.prompt_cache_key


def _ask(
    serves: Serves, body: CommonBody, prompts: Sequence[Prompt], kind: Kind, caller: Caller, sampling: Sampling
) -> Ask:
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options needs stream: true", param="stream_options")
    n = body.n or 1
    seats = serves.stats().max_num_seqs
    if n > seats:
        raise InvalidRequest(f"n: must be at most {seats} on this server, not {n}", param="n", limit=seats)
    if n * len(prompts) > MAX_PROMPTS:
        raise InvalidRequest(f"n: {len(prompts)} prompts times {n} are more than {MAX_PROMPTS} choices", param="n")
    name = f"{'chatcmpl' if kind == 'chat' else 'cmpl'}-{uuid.uuid4().hex}"
    requests = [
        Request(
            id=name if number == 0 else f"{name}-{number}",
            tokens=prompt.tokens,
            scope=serves.scope(tenant=caller.tenant, salt=body.cache_salt or ""),
            sampling=sampling,
            n=n,
            priority=body.priority or 0,
            session_id=session_of(body, caller),
            spans=prompt.spans,
            overflow=overflow_of(serves, body),
            forgotten=prompt.forgotten,
            pins=prompt.pins,
            exact=body.codec == "exact",
        )
        for number, prompt in enumerate(prompts)
    ]
    return Ask(
        tuple(requests),
        kind,
        serves.card.id,
        bool(body.stream),
        include_usage=body.stream_options is not None and bool(body.stream_options.include_usage),
        token_ids=bool(body.return_token_ids),
        token_bytes=serves.token_bytes,
    )


def _sampling(
    serves: Serves, body: CommonBody, max_tokens: int | None, logprobs: int | None, guide: Guide | None
) -> Sampling:
    if body.min_tokens and max_tokens is not None and body.min_tokens > max_tokens:
        raise InvalidRequest(f"min_tokens: must be at most max_tokens, {max_tokens}", param="min_tokens")
    check_ids(serves, [token for token, _ in body.logit_bias or ()], "logit_bias")
    return Sampling(
        temperature=1.0 if body.temperature is None else float(body.temperature),
        top_p=1.0 if body.top_p is None else float(body.top_p),
        top_k=min(max(body.top_k or 0, 0), serves.card.vocab),
        seed=secrets.randbits(63) if body.seed is None else body.seed,
        max_tokens=max_tokens,
        stop=body.stop or (),
        stop_token_ids=tuple(check_ids(serves, body.stop_token_ids or [], "stop_token_ids")),
        ignore_eos=bool(body.ignore_eos),
        min_p=float(body.min_p or 0.0),
        repetition_penalty=1.0 if body.repetition_penalty is None else float(body.repetition_penalty),
        presence_penalty=float(body.presence_penalty or 0.0),
        frequency_penalty=float(body.frequency_penalty or 0.0),
        logit_bias=body.logit_bias or (),
        min_tokens=body.min_tokens or 0,
        guide=guide,
        logprobs=logprobs,
    )
