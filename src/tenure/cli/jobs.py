"""What one process of `tenure replay` does: one policy against one size of the cache."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future as Pending
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from tenure import traces
from tenure.cli.files import lines
from tenure.errors import ConfigError
from tenure.policy import registry
from tenure.sim import instant, optimum
from tenure.sim.replay import Calibration, Replay, Setup
from tenure.sim.trace import TraceRequest

TELL = 256
"""Requests between two signs of life."""
_counter: Any = None
"""Shared by all processes: requests replayed so far."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where requests come from; `model` tokenises those that are text."""

    path: Path
    limit: int | None = None
    model: str | None = None

    def requests(self) -> Iterator[TraceRequest]:
        return islice(traces.read(lines(self.path), tokeniser(self.model)), self.limit)


@dataclass(frozen=True, slots=True)
class Job:
    """One row of the table."""

    source: Source
    policy: str
    share: float
    setup: Setup
    calibration: Calibration
    instant: bool


def tokeniser(model: str | None) -> traces.Tokenise:
    """Tokenises with the model's own tokenizer and template, fetched when the first text comes."""
    loaded: list[traces.Tokenise] = []

    def tokenise(prompt: object) -> Sequence[int]:
        if not loaded:
            from tenure.cli.texts import model_tokeniser

            loaded.append(model_tokeniser(model))
        return loaded[0](prompt)

    return tokenise


def work(job: Job) -> dict[str, Any]:
    """Do it; what `--json` prints for it."""
    blocks = job.setup.blocks
    row: dict[str, Any] = {"policy": job.policy, "share": job.share, "blocks": blocks}
    counted = _counting(job.source.requests())
    if job.policy == optimum.NAME:
        return {**row, "hit_rate": optimum.run(optimum.Future(counted), blocks).rate}
    if job.instant:
        return {**row, "hit_rate": instant.run(counted, blocks, registry.eviction(job.policy)).rate}
    report = Replay(job.setup, job.calibration).run(counted)
    return {**row, "pressure": job.setup.pressure, **report.to_json()}


def work_all(jobs: Sequence[Job], processes: int, told: Callable[[int], None]) -> list[dict[str, Any]]:
    """All of them, in parallel; `told` hears how many requests have been replayed in all."""
    processes = min(processes, len(jobs))
    context = multiprocessing.get_context("spawn")
    counter = context.Value("q", 0)
    if processes < 2:
        _share(counter)
        results = []
        for job in jobs:
            results.append(work(job))
            told(counter.value)
        return results
    with ProcessPoolExecutor(processes, context, _share, (counter,)) as pool:
        pending: list[Pending[dict[str, Any]]] = [pool.submit(work, job) for job in jobs]
        try:
            left: Iterable[Pending[dict[str, Any]]] = pending
            while left:
                done, left = wait(left, timeout=0.2)
                told(counter.value)
                for item in done:
                    item.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return [item.result() for item in pending]


def usable_cores() -> int:
    with contextlib.suppress(AttributeError):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _share(counter: Any) -> None:
    global _counter
    _counter = counter


def _counting(requests: Iterable[TraceRequest]) -> Iterator[TraceRequest]:
    for count, request in enumerate(requests, 1):
        yield request
        if count % TELL == 0 and _counter is not None:
            with _counter.get_lock():
                _counter.value += TELL


@dataclass(frozen=True, slots=True)
class Census:
    """A trace counted: what shares are shares of. `infinite`: the hit rate of a cache that never forgets."""

    requests: int
    prompt_tokens: int
    unique_blocks: int
    block_tokens: int
    seconds: float
    late: int
    """Requests earlier than the one before; they are taken to come with it."""
    infinite: float


def census(source: Source) -> Census:
    seen: set[tuple[int, int]] = set()
    requests = tokens = late = hits = 0
    block_tokens = 0
    first = last = float("nan")
    for request in source.requests():
        if block_tokens and request.block_tokens != block_tokens and request.blocks:
            raise ConfigError(
                "trace", f"request {requests + 1} has blocks of {request.block_tokens} tokens, not {block_tokens}"
            )
        block_tokens = block_tokens or request.block_tokens
        requests += 1
        tokens += request.prompt_tokens
        first = request.at if requests == 1 else first
        late += request.at < last
        last = request.at if requests == 1 else max(last, request.at)
        above, held = -1, 0
        for block in request.blocks:
            held += (above, block) in seen
            seen.add((above, block))
            above = block
        hits += request.tokens_of(held)
    return Census(requests, tokens, len(seen), block_tokens, last - first, late, hits / tokens if tokens else 0.0)
