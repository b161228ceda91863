"""What the pure core costs per call: ``python -m bench.core``. Microseconds, best of some, and the most they may be."""

from __future__ import annotations

import random
import time
import tracemalloc
from collections.abc import Callable

from tenure.cache import Ask, KvCache, Lease, Plan
from tenure.cache.ghosts import Ghosts
from tenure.cache.keys import chain_of, root
from tenure.events import FactLog
from tenure.policy.eviction import Lru
from tenure.spec import BLOCK_TOKENS, codec
from tenure.types import Fate, Scope

POOL = 100_000
PROMPT = 6_000
SCOPE = Scope("bench")


def best_us(call: Callable[[], object], repeat: int = 30) -> float:
    """Best microseconds of a call: what it costs when nothing else runs."""
    times = []
    for _ in range(repeat):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return 1e6 * min(times)


def prompt(tokens: int) -> list[int]:
    return [random.randrange(49_152) for _ in range(tokens)]


class Session:
    """A big pool, and sequences that come and go."""

    def __init__(self) -> None:
        self.cache = KvCache(POOL, BLOCK_TOKENS, codec=codec("bf16"), eviction=Lru(), facts=FactLog())
        self.now = 0.0

    def start(self, tokens: list[int]) -> Lease:
        self.now += 0.001
        plan = self.cache.plan(Ask(SCOPE, tokens, len(tokens)), self.now)
        if not isinstance(plan, Plan):
            raise RuntimeError(plan.reason)
        return self.cache.apply(plan, self.now).lease

    def end(self, lease: Lease, tokens: list[int]) -> None:
        self.cache.release(lease, tokens, len(tokens), self.now, "bench")

    def fill(self) -> None:
        """Short conversations until nothing is free: about 25 000 leaves."""
        while self.cache.counts().free > 8:
            tokens = prompt(random.randrange(1, 6) * BLOCK_TOKENS + 5)
            self.end(self.start(tokens), tokens)


def measure() -> list[tuple[str, float, float]]:
    """Name, microseconds, most allowed."""
    session = Session()
    cache = session.cache
    long, blocks = prompt(PROMPT), PROMPT // BLOCK_TOKENS
    commits = []
    for _ in range(5):
        other = prompt(PROMPT)
        lease = session.start(other)
        began = time.perf_counter()
        lease = cache.commit(lease, other, PROMPT, session.now)
        commits.append(1e6 * (time.perf_counter() - began) / blocks)
        session.end(lease, other)
    cold = best_us(lambda: cache.plan(Ask(SCOPE, long, PROMPT), session.now))
    lease = cache.commit(session.start(long), long, PROMPT - 1, session.now)
    rows = [
        (f"match of {PROMPT} held tokens", best_us(lambda: cache.match(SCOPE, long)), 500.0),
        (f"plan of {PROMPT} new tokens", cold, 1000.0),
        (f"plan of {PROMPT} held tokens", best_us(lambda: cache.plan(Ask(SCOPE, long, PROMPT), session.now)), 500.0),
        ("commit of a full block", min(commits), 10.0),
        ("commit that fills no block", best_us(lambda: cache.commit(lease, long, PROMPT - 1, session.now)), 1.0),
    ]
    session.end(lease, long)
    session.fill()
    wanted = prompt((64 + cache.counts().free) * BLOCK_TOKENS)
    ask = Ask(SCOPE, wanted, len(wanted))
    rows.append(("plan with 64 victims of 100 000 blocks", best_us(lambda: cache.plan(ask, session.now)), 1000.0))
    cache.check()
    return rows + ghosts()


GHOSTS = 65_536


def ghosts() -> list[tuple[str, float, float]]:
    """What remembering evicted blocks costs, and asking for one; the memory in the last row, in bytes per block."""
    remembered = Ghosts(GHOSTS)
    chains = [prompt(PROMPT) for _ in range(2 * GHOSTS * BLOCK_TOKENS // PROMPT)]
    blocks = [
        (key, parent, tuple(tokens[at * BLOCK_TOKENS : (at + 1) * BLOCK_TOKENS]))
        for tokens in chains
        for names in [chain_of(root(SCOPE), tokens, BLOCK_TOKENS)]
        for at, (key, parent) in enumerate(zip(names, [root(SCOPE), *names], strict=False))
    ]
    tracemalloc.start()
    for key, parent, ids in blocks[:GHOSTS]:
        remembered.add(key, parent, ids, Fate.DROPPED, "lru", 0.0)
    size = tracemalloc.get_traced_memory()[0] / GHOSTS
    tracemalloc.stop()
    began = time.perf_counter()
    for key, parent, ids in blocks[GHOSTS:]:
        remembered.add(key, parent, ids, Fate.DROPPED, "lru", 0.0)
    added = 1e6 * (time.perf_counter() - began) / len(blocks[GHOSTS:])
    key, parent, ids = blocks[-1]
    cache = KvCache(2, BLOCK_TOKENS, codec=codec("bf16"), eviction=Lru(), facts=FactLog(), ghosts=remembered)
    lost = cache.lost(SCOPE, chains[-1], 0)
    if lost.tokens < PROMPT - BLOCK_TOKENS:
        raise RuntimeError(f"{lost.tokens} of {PROMPT} tokens are known to be lost")
    return [
        (f"ghosts: one more of {GHOSTS}", added, 25.0),
        ("ghosts: find one", best_us(lambda: remembered.find(parent, ids)), 10.0),
        (f"ghosts: what of {PROMPT} tokens was lost", best_us(lambda: cache.lost(SCOPE, chains[-1], 0)), 3000.0),
        ("ghosts: bytes (not µs) of one", size, 1024.0),
    ]


def main() -> None:
    random.seed(1)
    for name, us, most in measure():
        print(f"{name:42} {us:9.2f} µs   (at most {most:g})")


if __name__ == "__main__":
    main()
