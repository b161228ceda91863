"""Arithmetic of shapes and bytes: the only place that multiplies layers × heads × dim × bits.

The planner and the allocator both ask here, so what is planned is what is allocated.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

from tenure.errors import ConfigError

BLOCK_TOKENS = 32
"""Tokens of one block in the native half; the pure core takes it as a parameter."""
SLAB_BLOCKS = 64
"""At most so many blocks of a kind decide the size of a slab."""
STAGING = ("bf16", "f32")
"""Codecs that blocks can be written in token by token."""

UNBOUNDED = 1 << 40
"""Blocks or tokens: more than any machine holds."""

MIN_BLOCKS = 2
"""The least a pool has: a prompt's block and one to answer into."""


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers whose K and V come and go together: they have blocks, and a table of them, of their own."""

    layers: int
    window: int | None = None
    """Tokens a row sees in them, itself included; None: all."""

    def first(self, position: int, block_tokens: int) -> int:
        """Number of the first block that a row at `position` sees."""
        return 0 if self.window is None else max(0, position + 1 - self.window) // block_tokens

    def held(self, blocks: int, block_tokens: int) -> int:
        """How many of its first `blocks` blocks a sequence goes on holding: those that its newest row can see."""
        return blocks if self.window is None else min(blocks, 1 - (1 - self.window) // block_tokens)

    def seen(self, begin: float, end: float) -> float:
        """Tokens that rows from position `begin` to `end` look back at, in one of its layers and all together: the area
        under the position, which the window cuts off."""
        near, far = (at if self.window is None else min(at, self.window) for at in (begin, end))
        return far * (end - far / 2) - near * (begin - near / 2)


def seen(groups: Sequence[LayerGroup], begin: float, end: float) -> float:
    """The same on the average of all layers: what attention costs is predicted by this alone."""
    return sum(group.layers * group.seen(begin, end) for group in groups) / sum(group.layers for group in groups)


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

    @property
    def groups(self) -> tuple[LayerGroup, ...]:
        """The layers that see everything first, when there are any, then those with windows, the widest first."""
        counts = Counter(self.windows or (None,) * self.layers)
        found = [LayerGroup(n, window) for window, n in counts.items()]
        return tuple(sorted(found, key=lambda group: (group.window is not None, -(group.window or 0))))


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
    groups: tuple[LayerGroup, ...] = ()
    """Of its layers; empty: one, without a window."""

    @staticmethod
    def of(shape: ModelShape) -> KvGeometry:
        return KvGeometry(shape.layers, shape.kv_heads, shape.head_dim, groups=shape.groups)

    def with_layers(self, layers: int) -> KvGeometry:
        """The same for so many layers, that see everything."""
        return replace(self, layers=layers, groups=())

    def parts(self) -> tuple[KvGeometry, ...]:
        """The geometry of each group of layers."""
        return tuple(self.with_layers(group.layers) for group in self.groups) or (self,)

    def token_bytes(self, name: str) -> int:
        """Bytes of one token's K and V over all layers, as stored by codec `name`: its share of a full block."""
        return self.block_bytes(name) // self.block_tokens

    def block_bytes(self, name: str) -> int:
        """Bytes of one full block of all layers as stored by codec `name`, scales included."""
        how = codec(name)
        v_dim = self.head_dim if self.v_dim is None else self.v_dim
        token = (self.head_dim * how.k_bits + v_dim * how.v_bits) // 8 + how.k_token_scale
        token += how.v_token_scale if v_dim else 0
        return self.layers * self.kv_heads * (self.block_tokens * token + self.head_dim * how.k_channel_scale)

    def part_offsets(self, name: str) -> tuple[int, ...]:
        """Where each group's layers begin in a block of all layers, in bytes."""
        return tuple(accumulate((part.block_bytes(name) for part in self.parts()[:-1]), initial=0))

    def staging_codec(self, name: str) -> str:
        """The codec the open block is staged in: f32 for f32, else bf16."""
        return staging_codec(name)

    def blocks(self, tokens: int) -> int:
        """Blocks that `tokens` tokens occupy, the open one included."""
        return -(-tokens // self.block_tokens)

    def least_arena(self, name: str) -> int:
        """Bytes of the smallest arena worth serving from: two blocks, and with them the places to stage open ones and
        those for what windows see."""
        cuts = self._cuts(MIN_BLOCKS * self.parts()[0].block_bytes(name), name)
        return min(cut.slab_bytes * (sum(cut.kept) - -MIN_BLOCKS // cut.slots[0]) for cut in cuts)

    def sequence_bytes(self, tokens: int, name: str) -> int:
        """Bytes of a running sequence of `tokens`: what the allocator takes for it. The open block of an unquantised
        one is like the others; else full blocks are stored, and one of all layers is staged all the while."""
        staged = name not in STAGING
        blocks = tokens // self.block_tokens if staged else self.blocks(tokens)
        groups = self.groups or (LayerGroup(self.layers),)
        stored = sum(
            group.held(blocks, self.block_tokens) * part.block_bytes(name)
            for group, part in zip(groups, self.parts(), strict=True)
        )
        return stored + staged * self.block_bytes(self.staging_codec(name))

    def layout(self, arena_bytes: int, name: str, also: Sequence[str] = ()) -> ArenaLayout:
        """How an arena is cut for blocks of codec `name`, of its staging, and of the codecs `also`: those of the first
        group of layers; and then for blocks of the other groups, which are always stored in `name`. Of the cuts that
        serve it is the one that loses least."""
        cuts = self._cuts(arena_bytes, name, also)
        return min([cut for cut in cuts if cut.blocks >= MIN_BLOCKS] or cuts, key=lambda cut: cut.lost(arena_bytes))

    def _cuts(self, arena_bytes: int, name: str, also: Sequence[str] = ()) -> list[ArenaLayout]:
        """For each size of a slab that is worth a try. One kind: one slab, nothing lost."""
        first, *windows = self.parts()
        sizes = {name: first.block_bytes(name)}
        if name not in STAGING:
            sizes[self.staging_codec(name)] = self.block_bytes(self.staging_codec(name))
        for other in also:
            sizes.setdefault(other, first.block_bytes(other))
        kinds = (*sizes, *(name for _ in windows))
        block_bytes = (*sizes.values(), *(part.block_bytes(name) for part in windows))
        cut = partial(
            ArenaLayout.cut, arena_bytes, kinds, block_bytes, staged=name not in STAGING, groups=self.groups,
            size=self.block_tokens,
        )  # fmt: skip
        slabs = {n * block for block in block_bytes for n in range(1, SLAB_BLOCKS + 1)}
        return [cut()] if len(kinds) == 1 else [cut(slab=slab) for slab in slabs if slab >= max(block_bytes)]


@dataclass(frozen=True, slots=True)
class ArenaLayout:
    """An arena cut into slabs; each holds blocks of one kind, and of any other once it is empty.

    Kind 0 are the stored blocks of the first group of layers, and the open ones too unless `staged`: then those of all
    layers together are of kind 1. The last kinds are the stored blocks of the other groups. A block's id packs its
    kind, slab and place: ids of kind k are first[k] + slab · slots[k] + place.
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
    groups: tuple[LayerGroup, ...] = (LayerGroup(1),)
    kept: tuple[int, ...] = (0,)
    """Slabs of each kind that serve no other: so many that whoever is alone can stage a block, and have all that its
    windows see and the next block."""

    @staticmethod
    def cut(
        arena_bytes: int,
        kinds: tuple[str, ...],
        block_bytes: tuple[int, ...],
        *,
        staged: bool,
        groups: tuple[LayerGroup, ...] = (),
        size: int = BLOCK_TOKENS,
        slab: int | None = None,
    ) -> ArenaLayout:
        """Into slabs of `slab` bytes; None: into one of as many blocks as it holds."""
        slab = arena_bytes // block_bytes[0] * block_bytes[0] if slab is None else slab
        slots = tuple(slab // block for block in block_bytes)
        slabs = arena_bytes // slab if slab else 0
        first = tuple(slabs * sum(slots[:kind]) for kind in range(len(kinds)))
        groups = groups or (LayerGroup(1),)
        apart = len(kinds) - len(groups) + 1
        kept = [int(staged and kind == 1) for kind in range(apart)]
        seen = [1 + group.held(UNBOUNDED, size) for group in groups[1:]]
        kept += [-(-n // slots[apart + i]) for i, n in enumerate(seen)]
        return ArenaLayout(kinds, block_bytes, slabs, slab, staged, slots, first, groups, tuple(kept))

    def lost(self, arena_bytes: int) -> float:
        """The share of an arena that is lost: what no block of a kind fills in a slab, no slab fills in the arena, and
        half a slab for each kind, as its last slab is part full."""
        if len(self.kinds) == 1:
            return 0.0
        unfilled = max(self.slab_bytes % block for block in self.block_bytes) / self.slab_bytes
        return unfilled + (arena_bytes % self.slab_bytes + 0.5 * self.slab_bytes * len(self.kinds)) / arena_bytes

    @staticmethod
    def flat(blocks: int, name: str) -> ArenaLayout:
        """`blocks` blocks of one kind that are as large as nothing: for those who count only."""
        return ArenaLayout((name,), (0,), 1, 0, False, (blocks,), (0,))

    @property
    def is_plain(self) -> bool:
        """Whether its blocks are all of one kind and held as long as their sequence: then only their number counts."""
        return len(self.kinds) == 1 and self.groups[0].window is None

    @property
    def ids(self) -> int:
        """Block ids are below this."""
        return self.slabs * sum(self.slots)

    @property
    def staging(self) -> int:
        """The kind of open blocks."""
        return int(self.staged)

    @property
    def stored(self) -> tuple[int, ...]:
        """The kind of stored blocks of each group of layers."""
        return (0, *range(len(self.kinds) - len(self.groups) + 1, len(self.kinds)))

    @property
    def blocks(self) -> int:
        """Stored blocks of the first group that one sequence can have: in all slabs but those that are kept."""
        return max(0, self.slabs - sum(self.kept)) * self.slots[0]

    def offset(self, block: int) -> int:
        """Where a block lies in the arena, in bytes."""
        kind = self.kind(block)
        slab, place = divmod(block - self.first[kind], self.slots[kind])
        return slab * self.slab_bytes + place * self.block_bytes[kind]

    def kind(self, block: int) -> int:
        """The kind of a block."""
        return bisect_right(self.first, block) - 1

    def conversations(self, tokens: int, block_tokens: int = BLOCK_TOKENS, shared: int = 0) -> int:
        """How many running sequences of `tokens` fit side by side, when they share nothing but their first `shared`
        blocks, which windows have left or hold once."""
        blocks = tokens // block_tokens if self.staged else -(-tokens // block_tokens)
        needs = [0] * len(self.kinds)
        once = [0] * len(self.kinds)
        needs[self.staging] += self.staged
        for kind, group in zip(self.stored, self.groups, strict=True):
            once[kind] = min(shared, blocks) if group.held(blocks, block_tokens) == blocks else 0
            needs[kind] += group.held(blocks, block_tokens) - once[kind]
        low, high = 0, self.ids  # none when there is no slab
        while low < high:
            n = (low + high + 1) // 2
            wanted = [once[kind] + n * need for kind, need in enumerate(needs)]
            low, high = (n, high) if self.fits(wanted) else (low, n - 1)
        return low

    def fits(self, wanted: Sequence[int]) -> bool:
        """Whether an empty arena holds so many blocks of each kind."""
        slabs = (max(kept, -(-n // slots)) for n, slots, kept in zip(wanted, self.slots, self.kept, strict=True))
        return sum(slabs) <= self.slabs
