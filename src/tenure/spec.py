"""Arithmetic of shapes and bytes: the only place that multiplies layers × heads × dim × bits.

The planner and the allocator both ask here, so what is planned is what is allocated.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tenure.errors import ConfigError

BLOCK_TOKENS = 32
"""Tokens of one block in the native half; the pure core takes it as a parameter."""
SLAB_BLOCKS = 64
"""At most so many blocks of a kind decide the size of a slab."""
STAGING = ("bf16", "f32")
"""Codecs that blocks can be written in token by token."""

MIN_BLOCKS = 2
"""The least a pool has: a prompt's block and one to answer into."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a decoder. All counts are of elements, not bytes."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    context_length: int
    windows: tuple[int | None, ...] = ()
    """Per layer the tokens it sees, the newest included, None: all of them; empty when no layer has a window."""


@dataclass(frozen=True, slots=True)
class Codec:
    """How a full block's K and V are stored: bits per value, and bytes of the scales of one head beside them."""

    name: str
    k_bits: int
    v_bits: int
    head_reusable: bool
    """True when the head of a block can be copied on write: values are unquantised."""
    k_token_scale: int = 0
    """Bytes for each token."""
    v_token_scale: int = 0
    k_channel_scale: int = 0
    """Bytes for each channel of a block."""


CODECS = {
    known.name: known
    for known in (
        Codec("bf16", 16, 16, head_reusable=True),
        Codec("f32", 32, 32, head_reusable=True),
        Codec("int8", 8, 8, head_reusable=False, k_token_scale=2, v_token_scale=2),
        Codec("k8v4", 8, 4, head_reusable=False, k_token_scale=2, v_token_scale=2),
        Codec("int4", 4, 4, head_reusable=False, k_channel_scale=3, v_token_scale=2),
    )
}
"""In the order of their numbers in the native half (`enum class Codec` in native/codecs.h)."""


def codec(name: str) -> Codec:
    """The codec called `name`; ConfigError lists the known ones."""
    try:
        return CODECS[name]
    except KeyError:
        raise ConfigError("kv_cache_dtype", f"unknown KV codec {name!r}; known: {', '.join(CODECS)}") from None


def staging_codec(name: str) -> str:
    """The codec that blocks are written in token by token, before codec `name` stores them: f32 for f32, else bf16."""
    return "f32" if codec(name).name == "f32" else "bf16"


@dataclass(frozen=True, slots=True)
class KvGeometry:
    """Bytes of K and V for one model shape."""

    layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int = BLOCK_TOKENS
    v_dim: int | None = None
    """Size of a V head when it is not that of K; 0: what is kept serves as both, as in latent attention."""

    @staticmethod
    def of(shape: ModelShape) -> KvGeometry:
        return KvGeometry(shape.layers, shape.kv_heads, shape.head_dim)

    def with_layers(self, layers: int) -> KvGeometry:
        """The same for so many layers."""
        return replace(self, layers=layers)

    def token_bytes(self, name: str) -> int:
        """Bytes of one token's K and V over all layers, as stored by codec `name`: its share of a full block."""
        return self.block_bytes(name) // self.block_tokens

    def block_bytes(self, name: str) -> int:
        """Bytes of one full block as stored by codec `name`, scales included."""
        how = codec(name)
        v_dim = self.head_dim if self.v_dim is None else self.v_dim
        token = (self.head_dim * how.k_bits + v_dim * how.v_bits) // 8 + how.k_token_scale
        token += how.v_token_scale if v_dim else 0
        return self.layers * self.kv_heads * (self.block_tokens * token + self.head_dim * how.k_channel_scale)

    def staging_codec(self, name: str) -> str:
        """The codec the open block is staged in: f32 for f32, else bf16."""
        return staging_codec(name)

    def blocks(self, tokens: int) -> int:
        """Blocks that `tokens` tokens occupy, the open one included."""
        return -(-tokens // self.block_tokens)

    def sequence_blocks(self, tokens: int, name: str) -> dict[str, int]:
        """Blocks that a running sequence of `tokens` holds, by codec. The open block of an unquantised one is like the
        others; else full blocks are stored, and one is staged all the while."""
        staging = self.staging_codec(name)
        if name == staging:
            return {name: self.blocks(tokens)}
        return {name: tokens // self.block_tokens, staging: 1}

    def least_arena(self, name: str) -> int:
        """Bytes of the smallest arena worth serving from: two blocks, and with them the places to stage open ones."""
        block, staged = self.block_bytes(name), self.block_bytes(self.staging_codec(name))
        return MIN_BLOCKS * (block if block == staged else max(staged, 2 * block))

    def sequence_bytes(self, tokens: int, name: str) -> int:
        """Bytes of a running sequence of `tokens`: what the allocator takes for it."""
        return sum(n * self.block_bytes(codec) for codec, n in self.sequence_blocks(tokens, name).items())

    def layout(self, arena_bytes: int, name: str, also: Sequence[str] = ()) -> ArenaLayout:
        """How an arena is cut for blocks of codec `name`, of its staging, and of the codecs `also`."""
        kinds = tuple(dict.fromkeys((name, self.staging_codec(name), *also)))
        return ArenaLayout.cut(arena_bytes, kinds, tuple(map(self.block_bytes, kinds)), staged=name not in STAGING)


@dataclass(frozen=True, slots=True)
class ArenaLayout:
    """An arena cut into slabs; each holds blocks of one kind, and of any other once it is empty.

    Kind 0 are the stored blocks, and the open ones too unless `staged`: then those are of kind 1. A block's id packs
    its kind, slab and place: ids of kind k are first[k] + slab · slots[k] + place.
    """

    kinds: tuple[str, ...]
    """Codec of each kind."""
    block_bytes: tuple[int, ...]
    slabs: int
    slab_bytes: int
    staged: bool
    slots: tuple[int, ...]
    """Blocks of each kind in a slab."""
    first: tuple[int, ...]

    @staticmethod
    def cut(arena_bytes: int, kinds: tuple[str, ...], block_bytes: tuple[int, ...], *, staged: bool) -> ArenaLayout:
        """The cut that loses least: what no block of a kind fills in a slab, no slab fills in the arena, and half a
        slab for each kind, as its last slab is part full. One kind: one slab, nothing lost."""

        def lost(slab: int) -> float:
            unfilled = max(slab % block for block in block_bytes) / slab
            return unfilled + (arena_bytes % slab + 0.5 * slab * len(kinds)) / arena_bytes

        if len(kinds) == 1:
            slab = arena_bytes // block_bytes[0] * block_bytes[0]
        else:
            sizes = {n * block for block in block_bytes for n in range(1, SLAB_BLOCKS + 1)}
            slab = min((size for size in sizes if size >= max(block_bytes)), key=lost)
        slots = tuple(slab // block for block in block_bytes)
        slabs = arena_bytes // slab if slab else 0
        first = tuple(slabs * sum(slots[:kind]) for kind in range(len(kinds)))
        return ArenaLayout(kinds, block_bytes, slabs, slab, staged, slots, first)

    @staticmethod
    def flat(blocks: int, name: str) -> ArenaLayout:
        """`blocks` blocks of one kind that are as large as nothing: for those who count only."""
        return ArenaLayout((name,), (0,), 1, 0, False, (blocks,), (0,))

    @property
    def ids(self) -> int:
        """Block ids are below this."""
        return self.slabs * sum(self.slots)

    @property
    def staging(self) -> int:
        """The kind of open blocks."""
        return int(self.staged)

    @property
    def blocks(self) -> int:
        """Stored blocks that one sequence can have: all slabs but the one that is kept for staging."""
        return (self.slabs - self.staged) * self.slots[0]

    def offset(self, block: int) -> int:
        """Where a block lies in the arena, in bytes."""
        kind = self.kind(block)
        slab, place = divmod(block - self.first[kind], self.slots[kind])
        return slab * self.slab_bytes + place * self.block_bytes[kind]

    def kind(self, block: int) -> int:
        """The kind of a block."""
        return bisect_right(self.first, block) - 1

    def conversations(self, tokens: int, block_tokens: int = BLOCK_TOKENS) -> int:
        """How many running sequences of `tokens` fit side by side, when they share nothing."""
        if not self.staged:
            return self.blocks // max(1, -(-tokens // block_tokens))
        stored = tokens // block_tokens
        low, high = 0, self.slabs * self.slots[1]
        while low < high:
            n = (low + high + 1) // 2
            fits = -(-n * stored // self.slots[0]) - (-n // self.slots[1]) <= self.slabs
            low, high = (n, high) if fits else (low, n - 1)
        return low
