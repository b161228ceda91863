"""The best any policy could do: who is needed farthest in the future goes first (Belady), leaves only.

It needs the whole trace before it begins, in three arrays of 8 bytes for each block of each request.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from heapq import heappop, heappush

from tenure.sim.instant import Hits
from tenure.sim.trace import TraceRequest

NAME = "optimum"
NEVER = 1 << 60


class Future:
    """A trace as arrays: each request's nodes of the tree of prefixes, and when each of them is used next."""

    def __init__(self, requests: Iterable[TraceRequest]) -> None:
        self.nodes = array("q")
        self.starts = array("q", [0])
        self.parents = array("q")
        self.next_use = array("q")
        self.requests: list[tuple[int, int, int]] = []
        """Prompt tokens, block tokens and blocks of each."""
        known: dict[tuple[int, int], int] = {}
        for request in requests:
            node = -1
            for block in request.blocks:
                above = node
                node = known.setdefault((above, block), len(known))
                if node == len(self.parents):
                    self.parents.append(above)
                self.nodes.append(node)
            self.starts.append(len(self.nodes))
            self.requests.append((request.prompt_tokens, request.block_tokens, len(request.blocks)))
        self._look_back()

    def _look_back(self) -> None:
        upcoming = array("q", [NEVER]) * len(self.parents)
        self.next_use = array("q", bytes(8 * len(self.nodes)))
        for number in range(len(self.requests) - 1, -1, -1):
            for at in range(self.starts[number], self.starts[number + 1]):
                node = self.nodes[at]
                self.next_use[at] = upcoming[node]
                upcoming[node] = number


def run(future: Future, blocks: int) -> Hits:
    """Replay against a cache of `blocks` blocks that knows the future."""
    total = len(future.parents)
    parents = future.parents
    held = bytearray(total)
    kids = array("q", bytes(8 * total))
    due = array("q", bytes(8 * total))
    heap: list[tuple[int, int]] = []
    used = 0
    hits = Hits()
    for number, (prompt_tokens, block_tokens, length) in enumerate(future.requests):
        first = future.starts[number]
        path = future.nodes[first : first + length]
        found = 0
        while found < length and held[path[found]]:
            found += 1
        hits.requests += 1
        hits.tokens += prompt_tokens
        hits.hits += min(found * block_tokens, prompt_tokens)
        for at, node in enumerate(path):
            due[node] = future.next_use[first + at]
            if at >= found:
                held[node] = 1
                used += 1
                if parents[node] >= 0:
                    kids[parents[node]] += 1
        if length and not kids[path[-1]]:
            heappush(heap, (-due[path[-1]], path[-1]))
        while used > blocks:
            key, node = heappop(heap)
            if not held[node] or kids[node] or key != -due[node]:  # it has been used since
                continue
            held[node] = 0
            used -= 1
            parent = parents[node]
            if parent >= 0:
                kids[parent] -= 1
                if not kids[parent]:
                    heappush(heap, (-due[parent], parent))
    return hits
