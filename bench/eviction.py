"""Which eviction policy keeps what: ``python -m bench.eviction [--speed] [--quick] [TRACE …]``.

Token hit rates with ``--instant``, in %, on every trace named and on worlds made up for the tests, at shares of their
unique blocks from 0.005 to 0.5; exit code 1 when `gittins` is more than 0.3 points behind `lru` anywhere. Counted, not
timed. `--speed` times both policies on the first trace, and the choice of 64 victims among 100 000 blocks.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.sim.worlds import WORKLOADS

from tenure.cache.leaves import Leaves
from tenure.cli.files import lines
from tenure.policy import registry
from tenure.sim import instant, optimum
from tenure.sim.instant import InstantCache
from tenure.sim.trace import TraceRequest
from tenure.traces import read

SHARED = Path(__file__).parents[2] / "shared" / "traces" / "mooncake"
SHARES = (0.005, 0.01, 0.02, 0.05, 0.10, 0.25, 0.50)
REQUESTS, QUICK = 4000, 400
FLOOR = -0.3
"""Points that `gittins` may be behind `lru`."""
SEED = 7
SPEED_SHARE = 0.05
BLOCKS, VICTIMS = 100_000, 64


@dataclass(frozen=True, slots=True)
class Row:
    """One trace at one size; rates in %."""

    trace: str
    share: float
    blocks: int
    lru: float
    gittins: float
    optimum: float

    @property
    def gain(self) -> float:
        return self.gittins - self.lru


def requests_of(name: str, count: int) -> list[TraceRequest]:
    """A world by its name, or a trace by its path."""
    return list(WORKLOADS[name](count, SEED)) if name in WORKLOADS else list(read(lines(Path(name))))


def rows_of(name: str, shares: Sequence[float], count: int) -> list[Row]:
    """All sizes of one trace."""
    requests = requests_of(name, count)
    future = optimum.Future(requests)
    unique = len(future.parents)
    rows = []
    for share in shares:
        blocks = int(share * unique)
        lru, gittins = (100 * instant.run(requests, blocks, registry.eviction(p)).rate for p in ("lru", "gittins"))
        best = 100 * optimum.run(future, blocks).rate
        rows.append(Row(Path(name).stem.removesuffix("_trace"), share, blocks, lru, gittins, best))
    return rows


def table(rows: Sequence[Row]) -> list[str]:
    """As Markdown, and what is worst."""
    shown = ["| trace @ share | LRU | gittins | optimum | gain |", "|---|---|---|---|---|"]
    for name in dict.fromkeys(row.trace for row in rows):
        those = [row for row in rows if row.trace == name]
        shares = " / ".join(f"{row.share:g}" for row in those)
        cells = [
            " / ".join(f"{getattr(row, field):.1f}" for row in those) for field in ("lru", "gittins", "optimum")
        ] + [" / ".join(f"{row.gain:+.2f}" for row in those)]
        shown.append(f"| {name} {shares} | {' | '.join(cells)} |")
    worst = min(rows, key=lambda row: row.gain)
    return [*shown, "", f"worst: {worst.gain:+.2f} ({worst.trace} @ {worst.share:g})"]


def speed(name: str, count: int) -> Iterator[str]:
    """Requests a second, reading included, and milliseconds to choose victims."""
    for policy in ("lru", "gittins"):
        requests = requests_of(name, count)
        blocks = int(SPEED_SHARE * len(optimum.Future(requests).parents))
        began = time.perf_counter()
        cache = InstantCache(blocks, registry.eviction(policy))
        for request in requests_of(name, count):
            cache.serve(request)
        yield f"{policy}: {len(requests) / (time.perf_counter() - began):.0f} requests/s on {Path(name).name}"
        yield f"{policy}: {victims_ms(policy):.2f} ms to choose {VICTIMS} of {BLOCKS} blocks"


def victims_ms(policy: str) -> float:
    """Best of some choices in a cache of 100 000 blocks that conversations filled: milliseconds."""
    cache = InstantCache(BLOCKS, registry.eviction(policy))
    world = WORKLOADS["conversations"](30_000, SEED)
    for request in world:
        cache.serve(request)
        if len(cache) >= BLOCKS:
            break
    if len(cache) < BLOCKS:
        raise RuntimeError(f"the conversations fill {len(cache)} blocks only")
    leaves: Leaves = cache.leaves
    now = request.at + 1.0
    times = []
    for _ in range(20):
        began = time.perf_counter()
        chosen = leaves.choose(VICTIMS, now, ())
        times.append(time.perf_counter() - began)
        if len(chosen) != VICTIMS:
            raise RuntimeError(f"{len(chosen)} victims of {len(cache)} blocks")
    return 1e3 * min(times)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.eviction", description=__doc__)
    parser.add_argument("traces", nargs="*", help="default: those of ../shared/traces/mooncake, when they are there")
    parser.add_argument("--speed", action="store_true", help="time, on a machine that does nothing else")
    parser.add_argument("--quick", action="store_true", help="small worlds, three shares: whether it works at all")
    options = parser.parse_args(words)
    traces = options.traces or [str(SHARED / f"{n}_trace.jsonl") for n in ("conversation", "synthetic")]
    missing = [name for name in traces if not Path(name).is_file()]
    for name in missing:
        print(f"{name}: not there, left out", file=sys.stderr)
    names = [name for name in traces if name not in missing] + list(WORKLOADS)
    count, shares = (QUICK, SHARES[1::3]) if options.quick else (REQUESTS, SHARES)
    if options.speed:
        for line in speed(names[0], count):
            print(line, flush=True)
        return 0
    with ProcessPoolExecutor(min(len(names), len(os.sched_getaffinity(0)))) as pool:
        many = list(pool.map(rows_of, names, [shares] * len(names), [count] * len(names)))
    rows = [row for those in many for row in those]
    print("\n".join(table(rows)))
    return int(min(row.gain for row in rows) < FLOOR)


if __name__ == "__main__":
    raise SystemExit(main())
