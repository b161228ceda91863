"""The books: every block stored and gone, told only by facts, so that they audit the cache from outside."""

from __future__ import annotations

from collections import Counter

from tenure.events import BlockGone, BlockStored, Fact
from tenure.types import Fate


class Ledger:
    """Folds facts into counts; `stored − gone == resident` holds for every tier, always."""

    def __init__(self) -> None:
        self.stored: Counter[str] = Counter()
        """Blocks stored, by tier."""
        self.gone: Counter[tuple[str, Fate]] = Counter()
        """Blocks gone, by tier and fate."""
        self.recompute_tokens: Counter[str] = Counter()
        """Tokens lost, by reason."""

    def learn(self, fact: Fact) -> None:
        if isinstance(fact, BlockStored):
            self.stored[fact.tier] += 1
        elif isinstance(fact, BlockGone):
            self.gone[fact.tier, fact.fate] += 1
            if fact.fate.is_loss:
                self.recompute_tokens[fact.reason] += fact.recompute_tokens

    def resident(self, tier: str) -> int:
        """How many blocks the tier must hold if nothing was lost in silence."""
        return self.stored[tier] - sum(n for (where, _), n in self.gone.items() if where == tier)
