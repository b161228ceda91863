"""The cache said plainly: a dictionary of names, no tree, no heaps, no counters. What KvCache does must equal this."""

from __future__ import annotations

from dataclasses import dataclass, field

Tokens = tuple[int, ...]
Name = tuple[str, Tokens]  # a held block by its scope and all tokens up to its end


def common(a: Tokens, b: Tokens) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@dataclass
class Entry:
    used: float
    holders: set[int] = field(default_factory=set)


@dataclass
class Naive:
    total: int
    size: int
    heads: bool = True
    held: dict[Name, Entry] = field(default_factory=dict)
    private: dict[int, int] = field(default_factory=dict)  # blocks per lease that are not in `held`
    promised: dict[Name, int] = field(default_factory=dict)

    def parent(self, name: Name) -> Name:
        return name[0], name[1][: (len(name[1]) - 1) // self.size * self.size]

    def idle(self) -> set[Name]:
        return {name for name, entry in self.held.items() if not entry.holders}

    def free(self) -> int:
        return self.total - len(self.held) - sum(self.private.values())

    def reuse(self, scope: str, tokens: Tokens) -> tuple[list[Name], int]:
        """The full blocks held, and how many tokens of the best block behind them are the same."""
        path: list[Name] = []
        while len(tokens) >= (end := self.size * (len(path) + 1)) and (scope, tokens[:end]) in self.held:
            path.append((scope, tokens[:end]))
        start = len(path) * self.size
        behind = [n[1] for n in self.held if self.heads and self.parent(n) == (scope, tokens[:start])]
        return path, max((common(ids[start:], tokens[start:]) for ids in behind), default=0)

    def victims(self, n: int, spared: set[Name]) -> list[Name]:
        """Longest idle leaves, tails before full blocks."""
        gone: list[Name] = []
        for _ in range(n):
            left = self.held.keys() - set(gone)
            leaves = (self.idle() & left) - spared - {self.parent(name) for name in left}
            gone.append(min(leaves, key=lambda name: (len(name[1]) % self.size == 0, self.held[name].used)))
        return gone

    def tidy(self) -> None:
        """An idle tail that a sibling continues is held twice."""
        for name in [n for n in self.idle() if len(n[1]) % self.size]:
            mine = [o for o in self.held if o != name and self.parent(o) == self.parent(name)]
            if any(other[1][: len(name[1])] == name[1] for other in mine):
                del self.held[name]
