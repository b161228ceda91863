"""What of some tokens is held, was held, and where more of them would go."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tenure.cache.ghosts import Ghosts
from tenure.cache.keys import Roots
from tenure.cache.plan import Lost
from tenure.cache.radix import Node, RadixIndex
from tenure.types import Key, MissReason, Scope, Token


class Finder:
    """Looks along the tokens of a prompt, over the roots that its scope and the declared prefixes give. Asks only."""

    def __init__(self, index: RadixIndex, roots: Roots, ghosts: Ghosts) -> None:
        self.index = index
        self.roots = roots
        self._ghosts = ghosts
        self._size = index.block_tokens

    def walk(self, scope: Scope, tokens: Sequence[Token], limit: int, *, exact: bool = False) -> tuple[list[Node], Key]:
        """The full blocks that hold tokens[:limit], and the key that the next one follows. Unless it must be `exact`,
        recoded ones when they reach further."""
        common = self.roots.common(scope, tokens)
        behind = self.roots.first(scope, common)
        path = self.index.walk(behind, tokens, min(limit, self._size * common) if common else limit)
        if common and len(path) == common:
            behind = self.roots.fork(scope, path[-1].key)
            path += self.index.walk(behind, tokens, limit, self._size * common)
        if self.index.recoded and not exact and len(path) >= common:
            path = self.index.recoded_walk(path, behind, tokens, limit, common)
        return path, behind if not path or len(path) == common else path[-1].key

    def behind(self, scope: Scope, nodes: Sequence[Node], common: int) -> Node:
        """Behind which node the block after `nodes` goes, when `common` blocks belong to all tenants."""
        if nodes and len(nodes) != common:
            return nodes[-1]
        key = self.roots.fork(scope, nodes[-1].key) if nodes else self.roots.first(scope, common)
        return self.index.root(key)

    def lost(self, scope: Scope, tokens: Sequence[Token], matched: int, why_not: Callable[[Node], MissReason]) -> Lost:
        """What of tokens[matched:] was held once, as far as is known here; the newest token is always computed.
        `why_not`: why the head of a block that is held does not serve."""
        limit = len(tokens) - 1
        path, behind = self.walk(scope, tokens, limit)
        at, first = self._size * len(path), None
        again = max(0, at - matched)
        reason: MissReason | None = ("recoded" if path[-1].recoded else "evicted") if again else None
        parent = self.index.nodes.get(behind) or self.index.roots.get(behind)
        head = parent and self.index.closest(parent, tuple(tokens[at : min(limit, at + self._size)]))
        if head and at + head[1] - matched > again:
            again, reason = at + head[1] - matched, reason or why_not(head[0])
        if path and path[-1].recoded:
            behind = path[-1].name
        names = self.roots.chain(scope, tokens, len(path), behind)
        common = self.roots.common(scope, tokens)
        older = False
        for name in (*names, None):
            found = self._ghosts.find(behind, tokens[at : min(limit, at + self._size)])
            if found is None:
                older = first is None and name is not None and self._ghosts.was_here(name)
                break
            ghost, shared = found
            if at + shared - matched > again:
                again = at + shared - matched
                first = first or ghost
            if shared < self._size or name is None:
                break
            at += self._size
            behind = self.roots.fork(scope, name) if at == self._size * common else name
        gone = None if reason == "recoded" else first
        return Lost(again, gone.reason if gone else reason, gone, older)
