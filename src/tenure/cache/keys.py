"""Content names of blocks: hash-chained, so that a key names the whole prefix and who may share it."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b

from tenure.types import Key, Lineage, Scope, Token

KEY_BYTES = 16


@lru_cache(maxsize=4096)
def root(scope: Scope, lineage: Lineage = Lineage.EXACT) -> Key:
    """The key that all chains of one scope and lineage start from.

    Every field is hashed with its length in front, so a salt can never read as another tenant's or model's name.
    """
    digest = blake2b(digest_size=KEY_BYTES)
    for field in (scope.fingerprint, scope.adapter, scope.tenant, scope.salt, scope.codec, lineage.value):
        raw = field.encode("utf-8", "surrogatepass")
        digest.update(struct.pack("<I", len(raw)) + raw)
    return Key(digest.digest())


def chain(parent: Key, tokens: Sequence[Token]) -> Key:
    """The key of the block that holds `tokens` (each below 2³²) right behind the block named `parent`."""
    return Key(blake2b(parent + struct.pack(f"<{len(tokens)}I", *tokens), digest_size=KEY_BYTES).digest())


def chain_of(start: Key, tokens: Sequence[Token], block_tokens: int) -> list[Key]:
    """The keys of all full blocks of `tokens`; what is left over behind the last full block has none here."""
    keys = []
    for at in range(0, len(tokens) - block_tokens + 1, block_tokens):
        start = chain(start, tokens[at : at + block_tokens])
        keys.append(start)
    return keys
