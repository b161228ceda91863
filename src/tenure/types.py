"""The nouns that cross layers: frozen records and typed ids, no behaviour beyond arithmetic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, NewType

from tenure.views import TenantView

Token = int
BlockId = NewType("BlockId", int)
"""Where a block lies in a tier: an index from 0 to capacity − 1."""
SeqId = NewType("SeqId", int)
Key = NewType("Key", bytes)
"""Content name of a block: 16 bytes, chained over scope, lineage and all tokens up to the block's end."""


class Lineage(Enum):
    EXACT = "exact"
    RECODED = "recoded"


class Fate(Enum):
    """How a block left a tier."""

    COPIED_BELOW = "copied_below"
    DUPLICATE = "duplicate"
    RECODED = "recoded"
    DROPPED = "dropped"
    EXPIRED = "expired"
    CORRUPT = "corrupt"
    REVOKED = "revoked"

    @property
    def is_loss(self) -> bool:
        return self in (Fate.DROPPED, Fate.EXPIRED, Fate.CORRUPT, Fate.REVOKED)


class Finish(Enum):
    """Why a sequence ended. `value` is OpenAI's finish_reason, except for the two that no answer carries."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


LimitCause = Literal["max_tokens", "context", "pool", "tenant_kv", "shutdown"]
MissReason = Literal[
    "cold", "content_changed", "retokenised", "reasoning_stripped", "scope_changed", "evicted", "window", "expired",
    "corrupt", "below_minimum", "recoded", "prompt_logprobs", "unknown",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Scope:
    """What must match for two prompts to share. `fingerprint` names model, weights and whatever else computes KV."""

    fingerprint: str
    adapter: str = ""
    tenant: str = ""
    salt: str = ""
    codec: str = "bf16"


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens [start, end) of a prompt that message number `message` contributed."""

    start: int
    end: int
    message: int


GuideKind = Literal["json_schema", "regex", "choice", "grammar"]


@dataclass(frozen=True, slots=True)
class Guide:
    """What an answer must be: the text of a JSON schema, of a regular expression, of a JSON list of the strings to
    choose from, or of a grammar (Lark, or EBNF as llama.cpp writes it)."""

    kind: GuideKind
    text: str


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen. temperature 0 is greedy; top_k 0, top_p 1, min_p 0 and neutral penalties are off.

    Penalties as vLLM has them: repetition looks at prompt and answer, presence and frequency at the answer alone.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    max_tokens: int | None = None
    """None: what the context leaves. 0: the prompt is computed, no token is chosen."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[Token, ...] = ()
    ignore_eos: bool = False
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[Token, float], ...] = ()
    min_tokens: int = 0
    """Tokens before which no end or stop id may come."""
    guide: Guide | None = None
    logprobs: int | None = None
    """None: none are told; else those of the tokens chosen, and of so many of the likeliest beside them."""
    logits: bool = False
    """Tell all logits that each token was chosen from."""
    prompt_logprobs: int | None = None
    """As `logprobs`, for the tokens of the prompt. All of it is computed then, held or not: no logits are kept."""
    marks: bool = False
    """Show the control tokens that open and close calls and reasoning, for whoever reads the answer for them."""

    @property
    def shapes(self) -> bool:
        """Whether logits are changed before a token is chosen."""
        neutral = (0.0, 1.0, 0.0, 0.0, 0)
        given = (
            self.min_p, self.repetition_penalty, self.presence_penalty, self.frequency_penalty, self.min_tokens,
        )  # fmt: skip
        return given != neutral or self.guide is not None or bool(self.logit_bias)

    @property
    def tells(self) -> bool:
        """Whether each token comes with what it was chosen from."""
        return self.logprobs is not None or self.logits


Overflow = Literal["refuse", "trim", "slide"]


@dataclass(frozen=True, slots=True)
class Pin:
    """A wish that the first `end_token` tokens of a prompt stay held for `ttl_s` seconds from when they are computed.

    Whole blocks are pinned: those that end at or before `end_token`."""

    end_token: int
    ttl_s: float
    note: str | None = None
    """What the receipt adds when it is granted."""


@dataclass(frozen=True, slots=True)
class PinReceipt:
    """What became of a wish to pin: granted for `ttl_s` seconds, or refused. `tokens` in whole blocks, `bytes` as they
    count against the tenant's budget; `reason` of a refusal, or a note."""

    end_token: int
    granted: bool
    tokens: int
    bytes: int
    ttl_s: float
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """What a client wants computed, as integers. `id` is unique among the living; `scope.tenant` is who asks."""

    id: str
    tokens: tuple[Token, ...]
    scope: Scope
    sampling: Sampling = field(default_factory=Sampling)
    n: int = 1
    priority: int = 0
    session_id: str | None = None
    spans: tuple[Span, ...] = ()
    pins: tuple[Pin, ...] = ()
    exact: bool = False
    """Nothing that was recoded, nor anything computed on top of it, may serve this request."""
    overflow: Overflow = "refuse"
    """`slide`: the answer goes on past the context. What concerns the prompt was settled before it came here."""
    forgotten: tuple[Forgotten, ...] = ()
    """What was left out of the prompt before it came here; the receipt repeats it."""


@dataclass(frozen=True, slots=True)
class CopyOp:
    """Copy the bytes of block `src` over block `dst`, both on the device."""

    src: BlockId
    dst: BlockId


@dataclass(frozen=True, slots=True)
class RecodeOp:
    """Write block `src` again over block `dst`, in the codec of its kind; both on the device."""

    src: BlockId
    dst: BlockId


BlockOp = CopyOp | RecodeOp


@dataclass(frozen=True, slots=True)
class Miss:
    """Why reuse ended where it did: the first token that differs and the message it lies in."""

    reason: MissReason
    at_token: int
    message: int | None = None
    by: str | None = None
    """The policy that evicted what was held, or `pin` when its time had passed."""
    ago_s: float | None = None
    """How long before."""


@dataclass(frozen=True, slots=True)
class Forgotten:
    """Tokens [start, end) of the conversation that the model could not see."""

    start: int
    end: int
    messages: tuple[int, ...]
    policy: str
    reason: str


@dataclass(frozen=True, slots=True)
class Receipt:
    """What the client is told about its context. prompt_tokens = cached_tokens + computed_tokens, always."""

    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    cached_by_tier: Mapping[str, int]
    miss: Miss | None
    forgotten: tuple[Forgotten, ...]
    codec: Mapping[str, int]
    preempted: int
    recomputed_tokens: int
    queue_ms: float
    context_limit: int
    context_used: int
    limit_cause: LimitCause | None = None
    """What ended a `length` finish."""
    max_tokens_requested: int | None = None
    max_tokens_granted: int | None = None
    """Both set when max_tokens was clamped to what the context leaves."""
    pins: tuple[PinReceipt, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request; the prompt counts once whatever n is."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Timings:
    """Milliseconds and tokens of the two phases (llama.cpp's `timings`)."""

    prompt_n: int
    prompt_ms: float
    predicted_n: int
    predicted_ms: float
    cache_n: int
    queue_ms: float


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one sequence in a step: `tokens` at positions start, start+1, …

    `tables`: the blocks of each group of layers that cover all of them, by number; those that a window has left are −1.

    `sample` asks for a token after the last row; `counter` is that token's number within the answer.
    """

    seq: SeqId
    request: str
    index: int
    start: int
    tokens: Sequence[Token]
    tables: tuple[Sequence[BlockId], ...]
    sample: bool
    counter: int
    sampling: Sampling
    open: BlockId | None = None
    """Where the block that is not full is staged, of all layers, when that is not where it will be stored."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One pass over the model: first the copies, then the rows."""

    number: int
    copies: tuple[BlockOp, ...]
    rows: tuple[Rows, ...]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gave: a token per sampled sequence, which of them ended on a stop, and how long it took."""

    number: int
    tokens: Mapping[SeqId, Token]
    stopped: frozenset[SeqId]
    """Sequences whose newest token completed a stop (eos, stop id or stop string), found by the engine."""
    failed: Mapping[SeqId, str]
    """Sequences that cannot go on (non-finite logits), with the reason."""
    step_ms: float


@dataclass(frozen=True, slots=True)
class Delta:
    """News of one sequence of a request: the token it got (None when it only ended) and whether it ended."""

    request: str
    seq: SeqId
    index: int
    token: Token | None
    finish: Finish | None
    limit_cause: LimitCause | None = None
    forgotten: Forgotten | None = None
    """What the sequence lets go from here on, when its context slides."""


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token, and what the model gave it before anything else had its say (natural logarithms)."""

    token: Token
    logprob: float
    top: tuple[tuple[Token, float], ...] = ()
    """The likeliest tokens, the likeliest first; equal ones by their ids."""
    logits: bytes | None = None
    """All logits, f32[vocab], when they were asked for."""


@dataclass(frozen=True, slots=True)
class Piece:
    """News of choice `index` as the client sees it: text that is safe to show (no half characters, no half stops)."""

    index: int
    text: str
    tokens: tuple[Token, ...]
    finish: Finish | None = None
    limit_cause: LimitCause | None = None
    stopped_by: str | int | None = None
    """The stop string or stop id that ended it, when one did (not eos)."""
    logprobs: tuple[Logprob, ...] = ()
    """One for each of `tokens`, when they were asked for."""
    prompt_logprobs: tuple[Logprob, ...] = ()
    """One for each token of the prompt but the first, with the first piece of a request that asked."""
    forgotten: Forgotten | None = None
    """What the model no longer sees from here on: the context slid."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of an answer: text, reasoning, a call (`text` is the tool's name) or the next letters of its arguments."""

    kind: Literal["text", "reasoning", "call", "arguments"]
    text: str
    call: int = 0
    """Which of the answer's calls."""
    id: str = ""
    """Of a call: what the tool's answer refers to."""


@dataclass(frozen=True, slots=True)
class Done:
    """The last word on a request, exactly one for each."""

    request: str
    usage: Usage
    receipt: Receipt
    timings: Timings
    error: str | None = None
    parts: tuple[Done, ...] = ()
    """Those of each prompt, when this one speaks for several."""


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """Blocks of a tier by state; leased + cached + free = total, always."""

    leased: int
    cached: int
    free: int
    total: int


@dataclass(frozen=True, slots=True)
class KindCounts:
    """Blocks in use that are stored by one codec: leased, and cached."""

    codec: str
    leased: int
    cached: int
    window: int | None = None
    """Of the layers whose blocks they are; None: of the first group of layers."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What the engine holds at one moment, safe to read from any thread. Bytes, tokens, seconds."""

    running: int
    waiting: int
    queued_tokens: int
    pool: PoolCounts
    block_tokens: int
    block_bytes: int
    codec: str
    arena_bytes: int
    weight_bytes: int
    budget_bytes: int
    context_limit: int
    max_num_seqs: int
    conversations_that_fit: int
    """How many conversations of the full context length the pool holds."""
    longest_blocks: int
    """Blocks that one sequence can ever have; more than the pool's when all layers have windows."""
    predicted_start_s: float
    steps: int
    leaked_blocks: int
    eviction: str
    pressure: str
    overflow: Overflow
    trim_steps: int = 4
    """Trimming moves by the context divided by this."""
    pinned_blocks: int = 0
    """Of the leased ones, those that pins hold."""
    by_codec: tuple[KindCounts, ...] = ()
    """Blocks in use by how they are stored, what is staged among them; `pool` counts in blocks of `codec`."""
    tenants: tuple[TenantView, ...] = ()
