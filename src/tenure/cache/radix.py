"""What is held, by content: one node per block, children sorted by their tokens.

A sorted list finds the exact child and the one with the longest common head by the same bisection: in sorted order
that child is a neighbour of the place where the tokens would stand.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Sequence

from tenure.cache.keys import chain, common_head, recoded
from tenure.types import BlockId, Key, Token

NO_BLOCK = BlockId(-1)


class Part:
    """The block of one group of layers of a node, when the group has a window: it can go alone."""

    __slots__ = ("bucket", "group", "last_used", "node", "ticket")

    def __init__(self, node: Node, group: int) -> None:
        self.node = node
        self.group = group
        self.last_used = 0.0
        """When a sequence last began or ended with it in its window, or forked behind it; 0, when none did: it goes
        first."""
        self.ticket = 0
        self.bucket: Hashable = None

    @property
    def block(self) -> BlockId:
        return self.node.blocks[self.group]


class Node:
    """What is held of some tokens: a block for each group of layers, NO_BLOCK where a window has left it. Or a root (no
    tokens, no block). A tail holds fewer tokens than a full block, and no kids."""

    __slots__ = (
        "blocks",
        "bucket",
        "created",
        "depth",
        "heads",
        "holds",
        "key",
        "kids",
        "last_used",
        "name",
        "parent",
        "parts",
        "recoded",
        "scope_digest",
        "ticket",
        "tokens",
    )

    def __init__(
        self, parent: Node | None, key: Key, tokens: tuple[Token, ...], blocks: list[BlockId], now: float
    ) -> None:
        self.parent = parent
        self.key = key
        self.name: Key = chain(parent.name, tokens) if parent is not None and parent.recoded else key
        """Its key, had nothing been recoded: what was lost is remembered by its content, whatever lineage it had."""
        self.tokens = tokens
        self.blocks = blocks
        self.holds = 0
        """Leases that it belongs to."""
        self.parts: tuple[Part, ...] = ()
        """Of the groups that have windows."""
        self.created = self.last_used = now
        self.depth: int = -1 if parent is None else parent.depth + 1
        self.scope_digest: Key = key if parent is None else parent.scope_digest
        self.heads: list[tuple[Token, ...]] = []
        """The tokens of `kids`, sorted; kept apart so that bisection compares tuples and calls nothing."""
        self.kids: list[Node] = []
        self.recoded: bool = False
        """Whether it was recoded, or computed on top of a block that was."""
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
        self.recoded = 0
        """Blocks that begin a recoded chain: recoded ones behind one that is exact."""

    def walk(self, root: Key, tokens: Sequence[Token], limit: int, start: int = 0) -> list[Node]:
        """The longest chain of full blocks from `root` on that hold tokens[start:limit]."""
        path: list[Node] = []
        node = self.roots.get(root)
        size = self.block_tokens
        end = start + size
        while node is not None and end <= limit:
            node = self.child(node, tuple(tokens[end - size : end]))
            if node is None:
                break
            path.append(node)
            end += size
        return path

    def recoded_walk(self, path: list[Node], root: Key, tokens: Sequence[Token], limit: int, first: int) -> list[Node]:
        """The longest way from one of the blocks of `path` (or the root, all behind the `first` ones) over a recoded
        block that reaches further than `path` itself, else `path`."""
        size, best = self.block_tokens, path
        for at in range(len(path), first - 1, -1):
            parent = path[at - 1] if at > first else self.roots.get(root)
            end = size * (at + 1)
            if parent is None or end > limit:
                continue
            node = self.child(parent, tuple(tokens[end - size : end]), recoded=True)
            way = path[:at]
            while node is not None:
                way.append(node)
                end += size
                node = self.child(node, tuple(tokens[end - size : end])) if end <= limit else None
            best = max(best, way, key=len)
        return best

    def closest(self, parent: Node, ids: tuple[Token, ...], usable: Usable | None = None) -> tuple[Node, int] | None:
        """The child that shares the longest head with `ids`, and its length; None when no child shares a token.
        With `usable`, of those children."""
        heads, kids = parent.heads, parent.kids
        place = bisect_left(heads, ids)
        best: tuple[Node, int] | None = None
        for side in (range(place - 1, -1, -1), range(place, len(heads))):
            for at in side:  # from where the tokens would stand, the common head gets no longer to either side
                shared = common_head(heads[at], ids)
                if shared <= (best[1] if best else 0):
                    break
                if usable is None or usable(kids[at]):
                    best = kids[at], shared
                    break
        return best

    def child(self, parent: Node, ids: tuple[Token, ...], *, recoded: bool | None = None) -> Node | None:
        """The child that holds exactly `ids`: of its parent's lineage, or the one that was `recoded`."""
        heads, kids = parent.heads, parent.kids
        at = bisect_left(heads, ids)
        wanted = parent.recoded if recoded is None else recoded
        while at < len(heads) and heads[at] == ids:
            if kids[at].recoded == wanted:
                return kids[at]
            at += 1
        return None

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
        return self.roots.get(key) or Node(None, key, (), [], 0.0)

    def attach(self, parent: Node, key: Key, ids: tuple[Token, ...], blocks: list[BlockId], now: float) -> Node:
        """Add a node whose blocks hold `ids` behind `parent`."""
        node = Node(parent, key, ids, blocks, now)
        node.recoded = parent.recoded
        at = bisect_left(parent.heads, ids)  # an exact block comes before the recoded one that holds the same
        parent.heads.insert(at, ids)
        parent.kids.insert(at, node)
        self.nodes[key] = node
        if parent.parent is None:
            self.roots[parent.key] = parent
        return node

    def recodable(self, node: Node) -> bool:
        """Whether neither the block nor any behind it is there in both lineages."""
        if node.recoded or not self.recoded:
            return True
        behind = [node]
        for one in behind:
            behind.extend(one.kids)  # grows while it is read
        return node.parent is not None and not (
            self.child(node.parent, node.tokens, recoded=True) or any(one.recoded for one in behind)
        )

    def recode(self, node: Node, block: BlockId) -> list[tuple[Node, Key]]:
        """A block lies elsewhere now, in fewer bits: it and all behind it get names of their own, parents first; with
        the keys they had. Nothing changes its name that was recoded already."""
        node.blocks[0] = block
        if node.recoded:
            return []
        assert node.parent is not None
        self.recoded += 1  # its tokens stand once among its parent's kids: it stays in order
        renamed: list[tuple[Node, Key]] = []
        stack = [node]
        for changed in stack:
            stack.extend(changed.kids)  # grows while it is read
            assert changed.parent is not None
            above = changed.parent
            changed.recoded = True
            was = changed.key
            changed.key = chain(above.key if above.recoded else recoded(above.key), changed.tokens)
            del self.nodes[was]
            self.nodes[changed.key] = changed
            renamed.append((changed, was))
        return renamed

    def detach(self, leaf: Node) -> None:
        """Remove a block without kids."""
        parent = leaf.parent
        if parent is None or leaf.kids:
            raise ValueError("only leaves are detached")
        at = bisect_left(parent.heads, leaf.tokens)
        at += parent.kids[at] is not leaf
        del parent.heads[at], parent.kids[at]
        del self.nodes[leaf.key]
        self.recoded -= leaf.recoded and not parent.recoded
        if parent.parent is None and not parent.kids:
            del self.roots[parent.key]
