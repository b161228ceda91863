"""What is held, by content: one node per block, children sorted by their tokens.

A sorted list finds the exact child and the one with the longest common head by the same bisection: in sorted order
that child is a neighbour of the place where the tokens would stand.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Sequence

from tenure.cache.keys import common_head
from tenure.types import BlockId, Key, Token

NO_BLOCK = BlockId(-1)


class Node:
    """A resident block, or a root (no tokens, no block). A tail holds fewer tokens than a full block, and no kids."""

    __slots__ = (
        "block",
        "bucket",
        "created",
        "depth",
        "heads",
        "key",
        "kids",
        "last_used",
        "parent",
        "scope_digest",
        "ticket",
        "tokens",
    )

    def __init__(self, parent: Node | None, key: Key, tokens: tuple[Token, ...], block: BlockId, now: float) -> None:
        self.parent = parent
        self.key = key
        self.tokens = tokens
        self.block = block
        self.created = self.last_used = now
        self.depth: int = -1 if parent is None else parent.depth + 1
        self.scope_digest: Key = key if parent is None else parent.scope_digest
        self.heads: list[tuple[Token, ...]] = []
        """The tokens of `kids`, sorted; kept apart so that bisection compares tuples and calls nothing."""
        self.kids: list[Node] = []
        self.ticket = 0
        self.bucket: Hashable = None


Usable = Callable[[Node], bool]
"""Whether the head of a block can be copied."""


class RadixIndex:
    """Full blocks and tails of all scopes. `nodes` are the resident ones by key, `roots` the scopes that have any."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.roots: dict[Key, Node] = {}
        self.nodes: dict[Key, Node] = {}

    def walk(self, root: Key, tokens: Sequence[Token], limit: int, start: int = 0) -> list[Node]:
        """The longest chain of full blocks from `root` on that hold tokens[start:limit]."""
        path: list[Node] = []
        node = self.roots.get(root)
        size = self.block_tokens
        end = start + size
        while node is not None and end <= limit:
            ids = tuple(tokens[end - size : end])
            heads = node.heads
            at = bisect_left(heads, ids)
            if at == len(heads) or heads[at] != ids:
                break
            node = node.kids[at]
            path.append(node)
            end += size
        return path

    def closest(self, parent: Node, ids: tuple[Token, ...], usable: Usable | None = None) -> tuple[Node, int] | None:
        """The child that shares the longest head with `ids`, and its length; None when no child shares a token.
        With `usable`, of those children."""
        if usable:
            return self._closest_of(parent, ids, usable)
        heads, kids = parent.heads, parent.kids
        at = bisect_left(heads, ids)
        below = common_head(heads[at - 1], ids) if at else 0
        above = common_head(heads[at], ids) if at < len(heads) else 0
        if not below and not above:
            return None
        return (kids[at - 1], below) if below >= above else (kids[at], above)

    def child(self, parent: Node, ids: tuple[Token, ...]) -> Node | None:
        """The child that holds exactly `ids`."""
        at = bisect_left(parent.heads, ids)
        return parent.kids[at] if at < len(parent.heads) and parent.heads[at] == ids else None

    def _closest_of(self, parent: Node, ids: tuple[Token, ...], usable: Usable) -> tuple[Node, int] | None:
        """From where the tokens would stand, the common head gets no longer to either side."""
        heads, kids = parent.heads, parent.kids
        place = bisect_left(heads, ids)
        best: tuple[Node, int] | None = None
        for side in (range(place - 1, -1, -1), range(place, len(heads))):
            for at in side:
                shared = common_head(heads[at], ids)
                if shared <= (best[1] if best else 0):
                    break
                if usable(kids[at]):
                    best = kids[at], shared
                    break
        return best

    def is_head(self, parent: Node, ids: tuple[Token, ...], usable: Usable | None = None) -> bool:
        """Whether a (usable) child other than one that holds exactly `ids` begins with them."""
        heads = parent.heads
        for at in range(bisect_left(heads, ids), len(heads)):
            if heads[at][: len(ids)] != ids:
                return False
            if heads[at] != ids and (usable is None or usable(parent.kids[at])):
                return True
        return False

    def shorter(self, node: Node, usable: Usable | None = None) -> Node | None:
        """The longest sibling whose tokens are a head of node's; no two usable ones continue each other."""
        assert node.parent is not None
        parent, ids = node.parent, node.tokens
        at = bisect_left(parent.heads, ids)
        if usable is None:  # then nothing can stand in between
            before = parent.kids[at - 1] if at else None
            return before if before is not None and ids[: len(before.tokens)] == before.tokens else None
        heads = (self.child(parent, ids[:n]) for n in range(len(ids) - 1, 0, -1))
        return next((head for head in heads if head is not None), None) if usable(node) else None

    def root(self, key: Key) -> Node:
        """The root named `key`. A new one lasts from its first child to its last."""
        return self.roots.get(key) or Node(None, key, (), NO_BLOCK, 0.0)

    def attach(self, parent: Node, key: Key, ids: tuple[Token, ...], block: BlockId, now: float) -> Node:
        """Add a block that holds `ids` behind `parent`."""
        node = Node(parent, key, ids, block, now)
        at = bisect_left(parent.heads, ids)
        parent.heads.insert(at, ids)
        parent.kids.insert(at, node)
        self.nodes[key] = node
        if parent.parent is None:
            self.roots[parent.key] = parent
        return node

    def detach(self, leaf: Node) -> None:
        """Remove a block without kids."""
        parent = leaf.parent
        if parent is None or leaf.kids:
            raise ValueError("only leaves are detached")
        at = bisect_left(parent.heads, leaf.tokens)
        del parent.heads[at], parent.kids[at]
        del self.nodes[leaf.key]
        if parent.parent is None and not parent.kids:
            del self.roots[parent.key]
