"""What a Python program may ask of an answer, by name, and what it gets."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from tenure.engine.given import check
from tenure.errors import InvalidRequest
from tenure.models.answers import read_whole
from tenure.server.serves import Reader
from tenure.types import Done, Guide, Logprob, Piece, Receipt, Sampling, Timings, Token, Usage


class Options(TypedDict, total=False):
    """Keywords of `generate`, `chat` and `stream`. Absent: greedy, one answer, as long as the context allows."""

    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[Token]
    ignore_eos: bool
    min_tokens: int
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[Token, float]
    logprobs: int
    """So many of the likeliest tokens beside each one chosen; 0: only the chosen one's."""
    prompt_logprobs: int
    """As `logprobs`, for every token of the prompt but the first. Nothing held of the prompt is reused then."""
    logits: bool
    """All logits that each token was chosen from."""
    json_schema: Mapping[str, Any]
    """The answer is JSON of this schema."""
    regex: str
    choices: Sequence[str]
    grammar: str
    """Lark, or EBNF as llama.cpp writes it."""
    n: int
    """Answers to the same prompt; they share its blocks."""
    priority: int
    session_id: str
    """The engine's own earlier answers in that session go into a chat by their exact tokens."""
    cache_salt: str
    """Only requests with the same salt share blocks."""
    tools: Sequence[Mapping[str, Any]]
    """Of a chat: what the model may call, as OpenAI's tool objects."""
    template: Mapping[str, Any]
    """Of a chat: what else its template is told, such as `enable_thinking`."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a tool; `arguments` are JSON as the model wrote it."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer. `finish` is `stop` or `length`; `stopped_by` the stop string or id, when one ended it.

    `text` is what is left when `reasoning` and `calls` are taken out.
    """

    text: str
    reasoning: str
    calls: tuple[Call, ...]
    tokens: tuple[Token, ...]
    finish: str
    stopped_by: str | int | None
    logprobs: tuple[Logprob, ...]
    """One for each token, when they were asked for."""

    @property
    def logits(self) -> NDArray[np.float32] | None:
        """f32[tokens, vocab]: what each token was chosen from, before anything shaped it; None when not asked for."""
        rows = [np.frombuffer(told.logits, np.float32) for told in self.logprobs if told.logits is not None]
        return np.stack(rows) if rows else None


@dataclass(frozen=True, slots=True)
class Result:
    """All answers to one prompt, and what became of its context."""

    answers: tuple[Answer, ...]
    usage: Usage
    receipt: Receipt
    timings: Timings
    prompt_logprobs: tuple[Logprob, ...] = ()
    """One for each token of the prompt but the first, when they were asked for."""

    @property
    def text(self) -> str:
        """The first answer's."""
        return self.answers[0].text

    @property
    def tokens(self) -> tuple[Token, ...]:
        """The first answer's."""
        return self.answers[0].tokens


def checked(options: Options) -> Options:
    """The options without those that are None. InvalidRequest for names that do not exist and for wrong values."""
    strange = next((name for name in options if name not in Options.__annotations__), None)
    if strange is not None:
        raise InvalidRequest(f"{strange}: there is no such option", param=strange)
    check(options)
    given: Any = {name: value for name, value in options.items() if value is not None}
    found: Options = given
    return found


def sampling_of(options: Options, *, marks: bool) -> Sampling:
    """The sampling that (checked) options ask for; `marks`: somebody reads the answer for reasoning and calls.

    InvalidRequest for guides that exclude another.
    """
    stop = options.get("stop", ())
    return Sampling(
        temperature=options.get("temperature", 0.0),
        top_p=options.get("top_p", 1.0),
        top_k=max(0, options.get("top_k", 0)),
        seed=options.get("seed", 0),
        max_tokens=options.get("max_tokens"),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=tuple(options.get("stop_token_ids", ())),
        ignore_eos=options.get("ignore_eos", False),
        min_p=options.get("min_p", 0.0),
        repetition_penalty=options.get("repetition_penalty", 1.0),
        presence_penalty=options.get("presence_penalty", 0.0),
        frequency_penalty=options.get("frequency_penalty", 0.0),
        logit_bias=tuple(options.get("logit_bias", {}).items()),
        min_tokens=options.get("min_tokens", 0),
        guide=_guide(options),
        logprobs=options.get("logprobs"),
        logits=options.get("logits", False),
        prompt_logprobs=options.get("prompt_logprobs"),
        marks=marks,
    )


def _guide(options: Options) -> Guide | None:
    guides: list[Guide] = []
    if "json_schema" in options:
        guides.append(Guide("json_schema", json.dumps(options["json_schema"])))
    if "regex" in options:
        guides.append(Guide("regex", options["regex"]))
    if "choices" in options:
        guides.append(Guide("choice", json.dumps(list(options["choices"]))))
    if "grammar" in options:
        guides.append(Guide("grammar", options["grammar"]))
    if len(guides) > 1:
        raise InvalidRequest("an answer can follow only one of json_schema, regex, choices and grammar")
    return guides[0] if guides else None


def result_of(pieces: Sequence[Piece], done: Done, n: int, reader: Callable[[], Reader] | None) -> Result:
    """The answers that the pieces of a request add up to. RuntimeError when it failed or was cancelled."""
    if done.error is not None:
        raise RuntimeError(f"the request failed: {done.error}")
    answers = tuple(_answer([piece for piece in pieces if piece.index == index], reader) for index in range(n))
    prompt = tuple(told for piece in pieces for told in piece.prompt_logprobs)
    return Result(answers, done.usage, done.receipt, done.timings, prompt)


def _answer(pieces: Sequence[Piece], reader: Callable[[], Reader] | None) -> Answer:
    last = pieces[-1] if pieces else None
    if last is None or last.finish is None:
        raise RuntimeError("the request was cancelled")
    text, reasoning = "".join(piece.text for piece in pieces), ""
    calls: list[tuple[str, str]] = []
    if reader is not None:
        reasoning, text, calls = read_whole(text, reader())
    return Answer(
        text=text,
        reasoning=reasoning,
        calls=tuple(Call(name, arguments) for name, arguments in calls),
        tokens=tuple(token for piece in pieces for token in piece.tokens),
        finish=last.finish.value,
        stopped_by=last.stopped_by,
        logprobs=tuple(told for piece in pieces for told in piece.logprobs),
    )
