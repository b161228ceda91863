from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenure.cache import keys
from tenure.cache.keys import common_head
from tenure.cache.radix import Node, RadixIndex
from tenure.types import BlockId, Key

ROOT = Key(b"root")
ids = st.lists(st.integers(0, 2), min_size=1, max_size=5).map(tuple)


def naive_common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


def index_of(*blocks: tuple[int, ...], size: int = 5) -> tuple[RadixIndex, Node]:
    index = RadixIndex(size)
    root = index.root(ROOT)
    for i, block in enumerate(blocks):
        index.attach(root, keys.chain(ROOT, block), block, BlockId(i), 0.0)
    return index, root


@given(ids, ids)
def test_common_head(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    assert common_head(a, b) == naive_common(a, b)
    assert common_head(list(a), list(b)) == naive_common(a, b)


@given(st.sets(ids, max_size=12), ids)
def test_the_longest_head_is_found_by_bisection(blocks: set[tuple[int, ...]], wanted: tuple[int, ...]) -> None:
    index, root = index_of(*blocks)
    best = max((naive_common(block, wanted) for block in blocks), default=0)
    found = index.closest(root, wanted)
    assert (found[1] if found else 0) == best
    if found:
        assert naive_common(found[0].tokens, wanted) == best
    child = index.child(root, wanted)
    assert child.tokens == wanted if child else wanted not in blocks
    longer = [block for block in blocks if block != wanted and block[: len(wanted)] == wanted]
    assert index.is_head(root, wanted) == bool(longer)


@given(st.sets(ids, min_size=1, max_size=12))
def test_kids_stay_sorted_and_come_off_again(blocks: set[tuple[int, ...]]) -> None:
    index, root = index_of(*blocks)
    assert root.heads == sorted(blocks) == [kid.tokens for kid in root.kids]
    for kid in list(root.kids):
        index.detach(kid)
    assert not index.nodes and not index.roots and not root.heads


def test_shorter_is_the_sibling_that_a_block_continues() -> None:
    index, root = index_of((1,), (1, 2), (2,), (1, 3))
    node = {kid.tokens: kid for kid in root.kids}
    assert index.shorter(node[1, 2]) is node[1,]
    assert index.shorter(node[1,]) is None
    assert index.shorter(node[2,]) is None
    assert index.shorter(node[1, 3]) is None  # its neighbour is [1, 2], a head of which would have gone before


def test_walk_follows_full_blocks_up_to_the_limit() -> None:
    index, root = index_of((1, 2), size=2)
    (first,) = root.kids
    second = index.attach(first, keys.chain(first.key, (3, 4)), (3, 4), BlockId(1), 0.0)
    assert index.walk(ROOT, [1, 2, 3, 4, 5, 6], 6) == [first, second]
    assert index.walk(ROOT, [1, 2, 3, 4], 3) == [first]
    assert index.walk(ROOT, [1, 2, 4, 4], 4) == [first]
    assert index.walk(Key(b"other"), [1, 2], 2) == []
    assert (second.depth, second.scope_digest) == (1, ROOT)


def test_only_leaves_are_detached() -> None:
    index, root = index_of((1, 2), size=2)
    (first,) = root.kids
    index.attach(first, keys.chain(first.key, (3, 4)), (3, 4), BlockId(1), 0.0)
    for node in (first, root):
        with pytest.raises(ValueError, match="only leaves"):
            index.detach(node)
    assert root.blocks == []
