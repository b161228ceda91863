"""Arithmetic of shapes and bytes: the only place that multiplies layers × heads × dim × bits.

The planner and the allocator both ask here, so what is planned is what is allocated.
"""

from __future__ import annotations

from dataclasses import dataclass

from tenure.errors import ConfigError

BLOCK_TOKENS = 32
"""Tokens of one block in the native half; the pure core takes it as a parameter."""


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


@dataclass(frozen=True, slots=True)
class Codec:
    """How a full block's K and V are stored: bits per value, scales included elsewhere (none for these)."""

    name: str
    k_bits: int
    v_bits: int
    head_reusable: bool
    """True when the head of a block can be copied on write: values are unquantised."""


CODECS = {
    "bf16": Codec("bf16", 16, 16, head_reusable=True),
    "f32": Codec("f32", 32, 32, head_reusable=True),
}


def codec(name: str) -> Codec:
    """The codec called `name`; ConfigError lists the known ones."""
    try:
        return CODECS[name]
    except KeyError:
        raise ConfigError("kv_cache_dtype", f"unknown KV codec {name!r}; known: {', '.join(CODECS)}") from None


@dataclass(frozen=True, slots=True)
class KvGeometry:
    """Bytes of K and V for one model shape."""

    layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int = BLOCK_TOKENS

    @staticmethod
    def of(shape: ModelShape) -> KvGeometry:
        return KvGeometry(shape.layers, shape.kv_heads, shape.head_dim)

    def token_bytes(self, name: str) -> int:
        """Bytes of one token's K and V over all layers, as stored by codec `name`."""
        stored = codec(name)
        return self.layers * self.kv_heads * self.head_dim * (stored.k_bits + stored.v_bits) // 8

    def block_bytes(self, name: str) -> int:
        """Bytes of one full block as stored by codec `name`."""
        return self.block_tokens * self.token_bytes(name)

    def staging_codec(self, name: str) -> str:
        """The codec the open block is staged in: f32 for f32, else bf16."""
        return "f32" if name == "f32" else "bf16"

    def blocks(self, tokens: int) -> int:
        """Blocks that `tokens` tokens occupy, the open one included."""
        return -(-tokens // self.block_tokens)

    def sequence_bytes(self, tokens: int, name: str) -> int:
        """Bytes of a sequence of `tokens`: full blocks as stored, the open one as staged."""
        full, tail = divmod(tokens, self.block_tokens)
        staged = self.block_bytes(self.staging_codec(name)) if tail else 0
        return full * self.block_bytes(name) + staged
