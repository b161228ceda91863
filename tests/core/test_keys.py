from __future__ import annotations

import struct
from dataclasses import replace
from hashlib import blake2b

import pytest

from tenure.cache import keys
from tenure.types import Key, Lineage, Scope

SCOPE = Scope("m")


def test_a_key_is_the_hash_of_parent_and_tokens() -> None:
    start = keys.root(SCOPE)
    expected = blake2b(start + b"\x01\0\0\0\xff\xff\xff\xff", digest_size=16).digest()
    assert keys.chain(start, (1, 2**32 - 1)) == expected
    assert len(start) == len(expected) == keys.KEY_BYTES


def test_a_chain_names_full_blocks_only() -> None:
    start = keys.root(SCOPE)
    one = keys.chain(start, (1, 2))
    assert keys.chain_of(start, [1, 2, 3, 4, 5], 2) == [one, keys.chain(one, (3, 4))]
    assert keys.chain_of(start, [1], 2) == []


def test_the_same_tokens_behind_another_prefix_have_another_key() -> None:
    assert keys.chain_of(keys.root(SCOPE), [1, 1, 1, 1], 2)[1] != keys.chain_of(keys.root(SCOPE), [1, 2, 1, 1], 2)[1]


@pytest.mark.parametrize("field", ["fingerprint", "adapter", "tenant", "salt", "codec"])
def test_every_field_of_a_scope_counts(field: str) -> None:
    assert keys.root(replace(SCOPE, **{field: "x"})) != keys.root(SCOPE)


def test_lineages_do_not_mix() -> None:
    assert keys.root(SCOPE, Lineage.RECODED) != keys.root(SCOPE)


def test_a_salt_that_reads_like_another_field_is_still_a_salt() -> None:
    roots = {keys.root(Scope("m", "x")), keys.root(Scope("m", "", "x")), keys.root(Scope("m", "", "", "x"))}
    roots |= {keys.root(Scope("mx")), keys.root(SCOPE)}
    assert len(roots) == 5


def test_any_text_makes_a_scope() -> None:
    assert keys.root(Scope("m", salt="\ud800")) != keys.root(Scope("m", salt="ü"))


@pytest.mark.parametrize("token", [-1, 2**32])
def test_tokens_out_of_range_are_refused(token: int) -> None:
    with pytest.raises(struct.error):
        keys.chain(Key(b""), [token])
