"""Keep what is likely to be needed soon, for the room it takes until then: learned on line, per class of block.

Each block belongs to the class it had at its last use: how often it was used, how long the answer was, how much of the
prompt was new, whether it was the last of its prompt, whether prompts branch behind it, how quickly the conversation
came back. For each class the policy counts at which ages blocks were used again, and from that takes the Gittins index
of a block of age a:

    index(a) = max over w of  P(used again in (a, a + w]) / E[time it is kept in (a, a + w]]

The block with the lowest index goes first. What left the cache is remembered for a while, so that a reuse that came too
late teaches as well. Where learning does not pay, it does no harm: a shadow LRU runs over the same facts, and while the
record is worse than the shadow's, the longest idle block goes first (see `ShadowLru`); so it does before the first fit.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict, defaultdict
from collections.abc import Hashable
from math import log

from tenure.events import BlockGone, BlockReused, BlockStored, Fact, SequenceEnded
from tenure.policy.base import BlockView
from tenure.policy.shadow import ShadowLru
from tenure.types import Fate, Key

DEVICE = "device"
BINS = 64
FIRST_S = 0.5
GROWTH = 1.35
"""Ages fall into bins that grow by this factor: 64 of them reach from half a second to years."""
PRIOR, FINE_PRIOR = 20.0, 100.0
"""Observations that the average over all classes weighs in a coarse class, and that class in its fine ones."""
GHOSTS = 100_000
"""Blocks remembered after they left, at most: about 25 MB."""
FIT_FIRST, FIT_LAST = 50, 2000
"""Sequences between two fits: few at first, then a twentieth of those seen, at most so many."""
HALF_LIFE = 2_000_000
"""Uses after which what was learned counts half."""
SHORT, LONG = 16, 200
"""Tokens of answers that separate short, middling and long ones."""
BRANCHES = 3
"""Kids from which a block counts as a place where prompts branch."""
SHARED = 50
"""Uses from which a block belongs to no single conversation."""
PACES_S = (15.0, 60.0, 300.0)
FRESH = (128, 512, 2048, 8192)
"""New tokens of prompts that separate short questions from pasted documents."""
FINE = len(FRESH) + 1
"""Fine classes in a coarse one."""
CLASSES = 4 * 3 * 2 * 2 * 5 * FINE
TAIL = CLASSES
"""Added to the bucket of partly filled blocks."""
_LOG_GROWTH = log(GROWTH)
_EDGES = [0.0] + [FIRST_S * GROWTH**i for i in range(BINS)]
_UNKNOWN = [1e6 - 1e-3 * edge for edge in _EDGES[:BINS]]
"""The index of a class of which nothing is known yet: it is kept, the longest idle goes."""


def age_bin(age_s: float) -> int:
    """The bin of an age in seconds."""
    if age_s < FIRST_S:
        return 0
    return min(BINS - 1, int(log(age_s / FIRST_S) / _LOG_GROWTH) + 1)


class _Block:
    """What is remembered of a block, while it is held and some time after."""

    __slots__ = ("gap", "hits", "kids", "last", "of", "parent", "tokens", "uses")

    def __init__(self, parent: Key | None, tokens: int, of: int, at: float) -> None:
        self.parent = parent
        self.tokens = tokens
        self.of = of
        """Its class."""
        self.uses = 0
        self.kids = 0
        self.last = at
        self.gap = -1.0
        """Seconds between its last two uses; below 0 when there was but one."""
        self.hits = 0
        """Times it was reused by sequences that have not ended yet."""

    def took_hit(self) -> bool:
        """Whether the sequence that ends had found it held."""
        if not self.hits:
            return False
        self.hits -= 1
        return True


class _Ages:
    """At which ages the blocks of one class were used again: `counts` by bin, of `total` uses; `index` as fitted."""

    __slots__ = ("counts", "index", "stale", "total")

    def __init__(self) -> None:
        self.total = 0.0
        self.counts = [0.0] * BINS
        self.index = _UNKNOWN
        self.stale = True
        """Something was counted since it was fitted."""

    def count(self, into: int) -> None:
        """A block was used again."""
        self.counts[into] += 1.0
        self.stale = True

    def add(self) -> None:
        """A block came into the class."""
        self.total += 1.0
        self.stale = True

    def smoothed(self, prior: list[float], weight: float) -> list[float]:
        """Chances to be used again, by bin: as counted, where that is little as `prior` says."""
        whole = self.total + weight
        return [(count + weight * mean) / whole for count, mean in zip(self.counts, prior, strict=True)]

    def fit(self, prior: list[float], weight: float) -> list[float]:
        """Take the index of every age from the chances; those."""
        self.stale = False
        alive = 1.0
        gains, costs = self.smoothed(prior, weight), []
        for at, p in enumerate(gains):
            costs.append(max(1e-9, (_EDGES[at + 1] - _EDGES[at]) * (alive - 0.5 * p)))
            alive = max(0.0, alive - p)
        # From the back, each bin takes in the groups behind it as long as that raises its ratio: that is the best w.
        groups: list[tuple[float, float]] = []
        self.index = [0.0] * BINS
        for at in range(BINS - 1, -1, -1):
            gain, cost = gains[at], costs[at]
            while groups and groups[-1][0] * cost > gain * groups[-1][1]:
                more = groups.pop()
                gain += more[0]
                cost += more[1]
            groups.append((gain, cost))
            self.index[at] = gain / cost
        return gains

    def halve(self) -> None:
        self.stale = True
        self.total *= 0.5
        self.counts = [0.5 * count for count in self.counts]


class Gittins:
    """Workload-aware eviction: the lowest Gittins index of its class and age first; LRU while that does better."""

    name = "gittins"

    def __init__(self, ghosts: int = GHOSTS) -> None:
        self._blocks: dict[Key, _Block] = {}
        self._ghosts: OrderedDict[Key, _Block] = OrderedDict()
        self._max_ghosts = ghosts
        self._ages: defaultdict[int, _Ages] = defaultdict(_Ages)
        """By class …"""
        self._coarse: defaultdict[int, _Ages] = defaultdict(_Ages)
        """… and by coarse class: whatever was new of the prompt."""
        self._all = _Ages()
        self._sequences = 0
        self._next_fit = FIT_FIRST
        self._fitted = False
        self._shadow = ShadowLru()

    @property
    def remembered(self) -> int:
        """Blocks it keeps a record of, held ones and others."""
        return len(self._blocks) + len(self._ghosts)

    # ---- ask

    def bucket(self, view: BlockView) -> Hashable:
        block = self._blocks.get(view.key)
        of = block.of if block else 0
        return of + TAIL if view.is_tail else of

    def rank(self, bucket: Hashable, age_s: float) -> float:
        if self._shadow.better or not self._fitted:
            return -age_s
        assert isinstance(bucket, int)
        of = bucket % TAIL
        ages = self._ages.get(of)
        if ages is None or ages.index is _UNKNOWN:  # too new for a fit
            ages = self._coarse.get(of // FINE)
        index = (ages.index if ages else _UNKNOWN)[age_bin(age_s)]
        return index if bucket < TAIL else 0.5 * index  # on average a tail is half full

    # ---- told

    def learn(self, fact: Fact) -> None:
        if isinstance(fact, BlockReused):
            block = self._blocks.get(fact.key)
            if block and fact.tier == DEVICE:
                block.hits += 1
                self._used_again(block, fact.at)
        elif isinstance(fact, BlockStored):
            if fact.tier == DEVICE:
                self._stored(fact)
        elif isinstance(fact, SequenceEnded):
            self._ended(fact)
        elif isinstance(fact, BlockGone) and fact.tier == DEVICE:
            self._gone(fact)

    def _used_again(self, block: _Block, at: float) -> None:
        block.gap = at - block.last
        into = age_bin(block.gap)
        for ages in (self._ages[block.of], self._coarse[block.of // FINE], self._all):
            ages.count(into)

    def _stored(self, fact: BlockStored) -> None:
        block = self._ghosts.pop(fact.key, None)
        if block is None:
            above = None if fact.parent is None else self._blocks.get(fact.parent)
            block = _Block(fact.parent, fact.tokens, above.of if above else 0, fact.at)
            if above:
                above.kids += 1
        else:
            self._used_again(block, fact.at)
        self._blocks[fact.key] = block

    def _gone(self, fact: BlockGone) -> None:
        block = self._blocks.pop(fact.key, None)
        if block is None or fact.fate is not Fate.DROPPED:
            return
        self._ghosts[fact.key] = block
        if len(self._ghosts) > self._max_ghosts:
            self._ghosts.popitem(last=False)
        self._shadow.full(len(self._blocks))

    def _ended(self, fact: SequenceEnded) -> None:
        """All blocks of a sequence get the class that this use gives them, from the last to the first."""
        path: list[tuple[Key, _Block]] = []
        key = fact.tip
        while key is not None and (block := self._blocks.get(key)):
            path.append((key, block))
            key = block.parent
        self._shadow.use([(key, block.tokens, block.took_hit()) for key, block in path])
        answer = 0 if fact.output_tokens <= SHORT else 1 if fact.output_tokens <= LONG else 2
        common = 5 * answer + self._pace(path)
        new = bisect_right(FRESH, fact.prompt_tokens - sum(block.tokens for _, block in path if block.uses))
        last = True
        for _, block in path:
            coarse = ((min(block.uses, 3) * 2 + last) * 2 + (block.kids >= BRANCHES)) * 15 + common
            block.of = coarse * FINE + new
            for ages in (self._ages[block.of], self._coarse[coarse], self._all):
                ages.add()
            block.uses += 1
            block.last = fact.at
            last = False
        self._sequences += 1
        if self._sequences >= self._next_fit:
            self._fit()

    def _pace(self, path: list[tuple[Key, _Block]]) -> int:
        """How quickly the conversation came back, 1 to 4; 0 when this is no next turn of one."""
        below: _Block | None = None
        for _, block in path:
            if block.uses:
                kids = block.kids - (below is not None and below.gap < 0.0)
                if kids > 1 or block.uses > SHARED:
                    return 0
                return 1 + sum(block.gap >= pace for pace in PACES_S)
            below = block
        return 0

    def _fit(self) -> None:
        self._fitted = True
        whole = max(1.0, self._all.total)
        average = [count / whole for count in self._all.counts]
        priors = {of: ages.fit(average, PRIOR) for of, ages in self._coarse.items() if ages.stale}
        for of, ages in self._ages.items():
            if ages.stale:
                ages.fit(priors[of // FINE], FINE_PRIOR)
        if self._all.total > HALF_LIFE:
            for ages in (*self._ages.values(), *self._coarse.values(), self._all):
                ages.halve()
        self._next_fit = self._sequences + min(FIT_LAST, max(FIT_FIRST, self._sequences // 20))
