"""Content names of blocks: hash-chained, so that a key names the whole prefix and who may share it."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b

from tenure.types import Key, Lineage, Scope, Token

KEY_BYTES = 16
WORD = 4
"""Bytes of a packed token."""


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


def pack(tokens: Sequence[Token]) -> bytes:
    """Big-endian words: they sort and compare as the tokens do, at a tenth of the memory."""
    return struct.pack(f">{len(tokens)}I", *tokens)


def unpack(ids: bytes) -> tuple[Token, ...]:
    return struct.unpack(f">{len(ids) // WORD}I", ids)


def recoded(parent: Key) -> Key:
    """The key that recoded blocks behind block `parent` chain from: they and what is computed on top of them have names
    of their own."""
    return Key(blake2b(parent, digest_size=KEY_BYTES, person=b"recoded").digest())


def common_head(a: Sequence[Token], b: Sequence[Token]) -> int:
    """How many first tokens two sequences of one type share."""
    shorter = min(len(a), len(b))
    if a[:shorter] == b[:shorter]:
        return shorter
    low = 0  # a[:low] == b[:low]; halving keeps the comparing in C
    while shorter - low > 1:
        middle = (low + shorter) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            shorter = middle
    return low


def chain_of(start: Key, tokens: Sequence[Token], block_tokens: int) -> list[Key]:
    """The keys of all full blocks of `tokens`; what is left over behind the last full block has none here."""
    keys: list[Key] = []
    for at in range(0, len(tokens) - block_tokens + 1, block_tokens):
        start = chain(start, tokens[at : at + block_tokens])
        keys.append(start)
    return keys


class Roots:
    """Where chains start. Blocks that lie wholly inside a declared prefix belong to all tenants: they start at a root
    of their own, and what comes behind them starts anew at a root that names both the tenant and the last of them."""

    def __init__(self, block_tokens: int, shared: Sequence[Sequence[Token]] = ()) -> None:
        """`shared`: the declared prefixes."""
        self._size = block_tokens
        self._shared = [tuple(prefix) for prefix in shared]

    def common(self, scope: Scope, tokens: Sequence[Token]) -> int:
        """How many first blocks of `tokens` belong to all. Who sends a salt shares nothing."""
        if not self._shared or scope.salt:
            return 0
        heads = ((prefix, tuple(tokens[: len(prefix)])) for prefix in self._shared)
        return max(common_head(prefix, head) for prefix, head in heads) // self._size

    def first(self, scope: Scope, common: int) -> Key:
        """The root of the first block, when `common` blocks belong to all."""
        if not common:
            return root(scope)
        everyone = root(Scope(scope.fingerprint, scope.adapter, codec=scope.codec))
        return Key(blake2b(everyone, digest_size=KEY_BYTES, person=b"shared").digest())

    def fork(self, scope: Scope, last: Key) -> Key:
        """The root of what one scope has behind `last`, a block that belongs to all."""
        return Key(blake2b(root(scope) + last, digest_size=KEY_BYTES, person=b"fork").digest())

    def chain(self, scope: Scope, tokens: Sequence[Token], held: int, behind: Key) -> list[Key]:
        """The keys of all full blocks of `tokens` but the `held` first; `behind` is what the first of them follows."""
        common = self.common(scope, tokens)
        if held >= common:
            return chain_of(behind, tokens[self._size * held :], self._size)
        found = chain_of(behind, tokens[self._size * held : self._size * common], self._size)
        return found + chain_of(self.fork(scope, found[-1]), tokens[self._size * common :], self._size)
