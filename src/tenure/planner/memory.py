"""How many conversations a budget holds, by codec, and which limit binds: what the allocator would answer.

For a model that Tenure serves the arena is cut and filled as the allocator does it (spec.ArenaLayout), to the byte. Of
other models a conversation is as large as its layers make it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from tenure.errors import ConfigError
from tenure.planner.anatomy import Anatomy
from tenure.spec import BLOCK_TOKENS, CODECS, UNBOUNDED, ArenaLayout, LayerGroup, codec

CODEC_NAMES = tuple(name for name in CODECS if name != "f32")
"""Those worth planning with; f32 is for tests."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What is to be planned. Bytes and tokens."""

    context: int
    memory_bytes: int | None = None
    """For weights and KV cache together …"""
    kv_bytes: int | None = None
    """… or for the KV cache alone."""
    shared_prefix: int = 0
    """Tokens at the front that all conversations have in common."""
    codecs: tuple[str, ...] = CODEC_NAMES
    weights: str = "auto"
    max_num_seqs: int = 64
    target: int | None = None
    """Conversations that are to fit."""


class Room:
    """What `arena` bytes hold of a model's sequences in one codec."""

    def __init__(self, anatomy: Anatomy, name: str, arena: int) -> None:
        codec(name)
        self.anatomy, self.name, self.arena = anatomy, name, max(0, arena)

    @cached_property
    def layout(self) -> ArenaLayout | None:
        """How the allocator would cut it; None when it could not, or does not serve the model."""
        served = self.anatomy.served
        if served is None:
            return None
        if self.arena < served.least_arena(self.name):
            return None
        return served.layout(self.arena, self.name)

    def bytes_of(self, tokens: int) -> int:
        """Of one running sequence, its open block staged."""
        served = self.anatomy.served
        if served is not None:
            return served.sequence_bytes(tokens, self.name)
        return sum(kind.bytes_of(tokens, self.name) for kind in self.anatomy.kinds)

    def tokens(self) -> int:
        """Tokens that the pool holds: in stored blocks, or for a foreign model in one sequence. When all layers have
        windows, and those fit, a sequence has no end."""
        if self.anatomy.served is not None:
            blocks, group = (self.layout.blocks, self.layout.groups[0]) if self.layout else (0, LayerGroup(1))
            return UNBOUNDED if group.held(UNBOUNDED, BLOCK_TOKENS) <= blocks else blocks * BLOCK_TOKENS
        return most(UNBOUNDED, lambda tokens: self.bytes_of(tokens) <= self.arena)

    def conversations(self, tokens: int, shared: int = 0) -> int:
        """Sequences of `tokens` that fit side by side when their first `shared` tokens are held once."""
        # The last token is computed by each, whatever is held.
        shared_blocks = min(shared, tokens - 1) // BLOCK_TOKENS
        if self.anatomy.served is not None:
            return self.layout.conversations(tokens, shared=shared_blocks) if self.layout else 0
        first = self.bytes_of(tokens)
        once = sum(kind.shared_bytes(shared_blocks, tokens, self.name) for kind in self.anatomy.kinds)
        return 0 if first > self.arena else min(UNBOUNDED, 1 + (self.arena - first) // max(1, first - once))


def most(high: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to `high` that fits, 0 when none does."""
    low = 0
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


@dataclass(frozen=True, slots=True)
class CodecPlan:
    """What one codec makes of the budget."""

    bits: float
    """Per value of K and V, scales included."""
    bytes_per_token: int
    """A token's share of a full block, over all layers that keep K and V."""
    bytes_per_token_beyond_windows: int
    """What one more token costs once every window is full."""
    conversation_bytes: int
    tokens: int | None
    """That the pool holds; None: without end, as the model keeps nothing that grows past its windows."""
    conversations: int
    conversations_unshared: int
    """The same without a shared prefix."""
    memory_for_target: int | None
    """Budget for the conversations that are wanted; weights included when the wish's memory counts them."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The answer. `binding_limit` is weights, kv_memory, context or max_num_seqs; `binding` says it in words."""

    weights_bytes: int
    memory_bytes: int
    kv_bytes: int
    context: int
    binding_limit: str
    binding: str
    codecs: dict[str, CodecPlan]
    lengths: tuple[int, ...]
    """Contexts of the curves, in tokens."""
    curves: dict[str, tuple[int, ...]]
    """Conversations at each of the lengths, by codec."""


def plan(anatomy: Anatomy, wish: Wish) -> Plan:
    """What the wish comes to. ConfigError when it contradicts itself or the model."""
    if (wish.memory_bytes is None) == (wish.kv_bytes is None):
        raise ConfigError("memory", "give either a total budget or one for the KV cache")
    if wish.context < 1 or wish.shared_prefix < 0:
        raise ConfigError("context", "context must be at least 1 token, a shared prefix at least 0")
    if wish.shared_prefix > wish.context:
        raise ConfigError(
            "shared_prefix", f"--shared-prefix {wish.shared_prefix} is longer than the context of {wish.context} tokens"
        )
    weights = anatomy.weight_bytes(wish.weights)
    arena = wish.kv_bytes if wish.kv_bytes is not None else (wish.memory_bytes or 0) - weights
    beside = 0 if wish.kv_bytes is not None else weights
    context = min(wish.context, anatomy.context_length)
    shared = min(wish.shared_prefix, context)
    codecs = {name: _codec_plan(Room(anatomy, name, arena), wish, context, shared, beside) for name in wish.codecs}
    lengths = _lengths(anatomy.context_length, shared)
    curves = {}
    for name in wish.codecs:
        room = Room(anatomy, name, arena)
        curves[name] = tuple(room.conversations(length, shared) for length in lengths)
    limit, words = _binding(anatomy, wish, arena, codecs)
    total = wish.memory_bytes if wish.memory_bytes is not None else arena + weights
    return Plan(weights, total, max(0, arena), context, limit, words, codecs, lengths, curves)


def _codec_plan(room: Room, wish: Wish, context: int, shared: int, beside: int) -> CodecPlan:
    name, kinds = room.name, room.anatomy.kinds
    geometries = [kind.geometry for kind in kinds if kind.geometry is not None]
    per_token = sum(geometry.token_bytes(name) for geometry in geometries)
    beyond = sum(kind.geometry.token_bytes(name) for kind in kinds if kind.geometry and kind.window is None)
    exact = sum(geometry.token_bytes("bf16") for geometry in geometries)
    tokens = room.tokens()
    target = None if wish.target is None else beside + arena_for(room.anatomy, name, wish.target, context, shared)
    return CodecPlan(
        bits=16 * per_token / exact if exact else 0.0,
        bytes_per_token=per_token,
        bytes_per_token_beyond_windows=beyond,
        conversation_bytes=room.bytes_of(context),
        tokens=None if tokens >= UNBOUNDED else tokens,
        conversations=room.conversations(context, shared),
        conversations_unshared=room.conversations(context),
        memory_for_target=target,
    )


def arena_for(anatomy: Anatomy, name: str, conversations: int, tokens: int, shared: int = 0) -> int:
    """About the smallest arena that holds so many conversations: within 1 %, and enough."""

    def fits(arena: int) -> bool:
        return Room(anatomy, name, arena).conversations(tokens, shared) >= conversations

    high = Room(anatomy, name, 0).bytes_of(tokens) * (conversations + 2)
    while not fits(high):
        high += high // 2
    low = 0
    while high - low > max(1, high // 100):
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def _lengths(limit: int, shared: int) -> tuple[int, ...]:
    """Contexts from 256 tokens to what the model was made for, each twice the one before."""
    lengths = [256]
    while lengths[-1] * 2 < limit:
        lengths.append(lengths[-1] * 2)
    lengths.append(limit)
    return tuple(length for length in dict.fromkeys(lengths) if shared < length <= limit) or (limit,)


def _binding(anatomy: Anatomy, wish: Wish, arena: int, codecs: dict[str, CodecPlan]) -> tuple[str, str]:
    """Which limit binds, and in words."""
    weights = anatomy.weight_bytes(wish.weights)
    fit: Sequence[int] = [codec.conversations for codec in codecs.values()]
    if wish.memory_bytes is not None and arena <= 0:
        return "weights", f"the weights need {weights:,} bytes, {-arena:,} more than the budget"
    if not any(fit):
        least = min(codec.conversation_bytes for codec in codecs.values())
        return "kv_memory", f"one conversation needs {least:,} bytes of KV at least, the budget leaves {arena:,}"
    if wish.context > anatomy.context_length:
        return "context", (
            f"the model's context is {anatomy.context_length} tokens, {wish.context} were asked for: planned with "
            f"{anatomy.context_length}"
        )
    if min(fit) > wish.max_num_seqs:
        return "max_num_seqs", (
            f"{min(fit):,} conversations and more fit, but --max-num-seqs runs {wish.max_num_seqs} at a time; "
            "the others' context is kept while they wait"
        )
    return "kv_memory", f"KV memory: {arena:,} bytes are left beside the weights"
