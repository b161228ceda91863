"""What running out of memory costs: ``python -m bench.pressure [--seconds N]``. Tenure against itself, in one run.

squeeze    W6 (16 × 1500 → 200, room for 8000 tokens) against the same with room for all: wall; texts equal solo runs
overload   requests at three times the rate that can be served: goodput (tokens of those that end in time) against
           the unloaded maximum, and how wrong the predicted starts were
shares     two tenants that always have work, by weights 1:1 and 1:3: what each was served in a minute
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from bench.process import Child, free_port
from bench.targets import KV_BYTES_PER_TOKEN
from tenure.cli.bench_client import HttpEndpoint, generated, measure, solo
from tenure.cli.bench_client import load as load_workloads

START_S = 60.0
PROMPT, ANSWER = 256, 64
SEATS = 8
OVERLOAD = 3.0
DEADLINES = 4.0
"""A request must end within so many times its unloaded latency."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the report: what was measured and what it should be."""

    name: str
    value: float
    goal: str
    met: bool
    compared: str = ""
    """What against what."""


@asynccontextmanager
async def serving(tokens: int, *flags: str) -> AsyncIterator[str]:
    """A server with room for so many tokens; its URL."""
    port = free_port()
    start = (sys.executable, "-c", "from tenure.cli.main import main; main()", "serve", "--port", str(port))
    room = ("--max-model-len", "2048", "--kv-cache-memory-bytes", str(tokens * KV_BYTES_PER_TOKEN))
    with tempfile.NamedTemporaryFile() as log:
        child = Child([*start, *room, *flags], Path(log.name), env={})
        url = f"http://127.0.0.1:{port}"
        try:
            await _ready(url, child)
            yield url
        finally:
            child.kill()


async def _ready(url: str, child: Child) -> None:
    endpoint, deadline = HttpEndpoint(url), time.monotonic() + START_S
    while (await endpoint.get("/ready"))[0] != 200:
        if child.dead or time.monotonic() > deadline:
            raise SystemExit(f"the server did not start: {child.dead}")
        await asyncio.sleep(0.05)


# ------------------------------------------------------------------------------------------------------------ squeeze


async def squeeze(repetitions: int = 2) -> list[Row]:
    """W6 in little and in ample room, in turn."""
    workload = load_workloads()["W6"]
    walls: dict[int, list[float]] = {8000: [], 32_000: []}
    equal = True
    for repetition in range(repetitions):
        answers: dict[int, list[Any]] = {}
        for room, times in walls.items():
            async with serving(room) as url:
                endpoint = HttpEndpoint(url)
                await endpoint.discover()
                await endpoint.complete(generated()["warm"]["prompts"][0], 16)
                figures = await measure(endpoint, workload, repetition)
                times.append(figures["wall_s"])
                answers[room] = figures["answers"]
                if figures["errors"]:
                    raise SystemExit(f"W6 failed: {figures['errors']}")
                if room == 8000 and repetition == 0:
                    equal &= answers[room] == await solo(endpoint, workload, repetition)
        equal &= answers[8000] == answers[32_000]
    ratio = statistics.median(a / b for a, b in zip(walls[8000], walls[32_000], strict=True))
    texts = f"{len(answers[8000])} answers in little room, in ample room and alone"
    seconds = {room: ", ".join(f"{wall:.1f}" for wall in times) for room, times in walls.items()}
    return [
        Row("W6: texts equal to solo runs", float(equal), "1", equal, texts),
        Row(
            "W6: wall against ample room",
            ratio,
            "≤ 1.25",
            ratio <= 1.25,
            f"{seconds[8000]} s with room for 8000 tokens, {seconds[32_000]} s for 32 000",
        ),
    ]


# ----------------------------------------------------------------------------------------------------------- overload


class Load:
    """Sends prompts that share nothing and notes what came back."""

    def __init__(self, url: str, key: str | None = None, seed: int = 0) -> None:
        self._endpoint = HttpEndpoint(url, api_key=key)
        self._rng = random.Random(seed)
        self.done: list[tuple[float, float, int]] = []
        """When each request was sent, when it ended, and its tokens; of those that were served."""
        self.refused = 0

    async def begin(self) -> None:
        """Ask for the model's name."""
        await self._endpoint.discover()

    async def one(self) -> None:
        prompt = [self._rng.randrange(100, 40_000) for _ in range(PROMPT)]
        reply = await self._endpoint.complete(prompt, ANSWER)
        if reply.error is None and reply.last is not None:
            self.done.append((reply.sent, reply.last, reply.tokens))
        else:
            self.refused += 1

    async def closed(self, width: int, seconds: float) -> None:
        """`width` requests at all times."""
        end = time.perf_counter() + seconds

        async def worker() -> None:
            while time.perf_counter() < end:
                await self.one()

        await asyncio.gather(*(worker() for _ in range(width)))

    async def opened(self, rate: float, seconds: float) -> None:
        """`rate` requests a second, whatever becomes of them."""
        tasks, end = [], time.perf_counter() + seconds
        while time.perf_counter() < end:
            tasks.append(asyncio.create_task(self.one()))
            await asyncio.sleep(self._rng.expovariate(rate))
        await asyncio.gather(*tasks)

    def rate(self, start: float, end: float, deadline_s: float = float("inf")) -> float:
        """Tokens a second of requests that ended between `start` and `end` and within their deadline."""
        good = [tokens for sent, last, tokens in self.done if start <= last <= end and last - sent <= deadline_s]
        return sum(good) / (end - start)


async def overload(seconds: float) -> list[Row]:
    """The unloaded maximum, then three times that."""
    flags = ("--max-num-seqs", str(SEATS), "--max-num-queued-reqs", str(SEATS))
    async with serving(SEATS * 2 * (PROMPT + ANSWER), *flags) as url:
        calm = Load(url, seed=1)
        await calm.begin()
        await calm.closed(SEATS, 3.0)  # to warm up
        calm.done.clear()
        began = time.perf_counter()
        await calm.closed(SEATS, seconds)
        most = calm.rate(began, began + seconds)
        latency = statistics.median(last - sent for sent, last, _ in calm.done)
        starts = Starts(url)
        following = asyncio.create_task(starts.follow())
        storm = Load(url, seed=2)
        await storm.begin()
        began = time.perf_counter()
        await storm.opened(OVERLOAD * most / ANSWER, seconds)
        warm = 2 * latency
        good = storm.rate(began + warm, began + seconds, DEADLINES * latency)
        following.cancel()
    share, error = good / most, starts.median_error()
    return [
        Row(
            "3 × overload: goodput of the unloaded maximum",
            share,
            "≥ 0.90",
            share >= 0.9,
            f"{good:.1f} tokens/s within {DEADLINES * latency:.2f} s each, {most:.1f} unloaded",
        ),
        Row(f"… requests refused with 429, of {storm.refused + len(storm.done)}", storm.refused, "–", True),
        Row(
            f"predicted start: median error of {len(starts.waits)} waits",
            error,
            "≤ 0.25",
            error <= 0.25,
            f"predictions {starts.lean():.2f} times the real waits in the median",
        ),
    ]


class Starts:
    """Follows the feed of facts for predicted and real waits, in seconds."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.waits: list[tuple[float, float]] = []

    async def follow(self) -> None:
        feed = f"{self._url}/v1/kv/events?types=RequestStarted"
        async with httpx.AsyncClient(timeout=None) as http, http.stream("GET", feed) as reply:
            async for line in reply.aiter_lines():
                if line.startswith("data: "):
                    fact = json.loads(line[6:])
                    if fact["queue_s"] > 0.05:
                        self.waits.append((fact["predicted_s"], fact["queue_s"]))

    def median_error(self) -> float:
        """|predicted − real| / real, of those that had to wait."""
        errors = [abs(predicted - real) / real for predicted, real in self.waits]
        return statistics.median(errors) if errors else float("nan")

    def lean(self) -> float:
        """predicted / real in the median: below 1 when predictions are too early."""
        return statistics.median(predicted / real for predicted, real in self.waits) if self.waits else float("nan")


# ------------------------------------------------------------------------------------------------------------- shares


async def shares(seconds: float) -> list[Row]:
    """Two tenants that always have work."""
    rows = []
    for weights in ((1, 1), (1, 3)):
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "tenants.toml"
            file.write_text("".join(_tenant(f"t{i}", weight) for i, weight in enumerate(weights)))
            flags = ("--tenants", str(file), "--api-key", "boss", "--max-num-seqs", str(SEATS))
            async with serving(SEATS * 2 * (PROMPT + ANSWER), *flags) as url:
                loads = [Load(url, f"sk-t{i}", seed=i) for i in range(2)]
                for load in loads:
                    await load.begin()
                work = [asyncio.create_task(load.closed(2 * SEATS, seconds + 5)) for load in loads]
                await asyncio.sleep(5.0)
                before = await _service(url)
                await asyncio.sleep(seconds)
                after = await _service(url)
                await asyncio.gather(*work)
        served = [after[f"t{i}"] - before[f"t{i}"] for i in range(2)]
        share, due = served[1] / sum(served), weights[1] / sum(weights)
        off = abs(share - due) / due
        name = f"tenants {weights[0]}:{weights[1]}: the second one's share off by"
        units = f"{served[0]:.0f} and {served[1]:.0f} units of service: {share:.1%} where {due:.1%} is due"
        rows.append(Row(name, off, "≤ 0.10", off <= 0.1, units))
    return rows


def _tenant(name: str, weight: float) -> str:
    return f'[[tenant]]\nname = "{name}"\nkeys = ["sk-{name}"]\nweight = {weight}\n'


async def _service(url: str) -> dict[str, float]:
    """What each tenant was served since the start, by the server's own account."""
    _, body = await HttpEndpoint(url, api_key="boss").get("/v1/kv")
    return {entry["name"]: entry["service"] for entry in json.loads(body)["tenants"]}


# ------------------------------------------------------------------------------------------------------------- report


def table(rows: Sequence[Row]) -> str:
    """The report, as Markdown."""
    lines = ["| measured | value | goal | | compared |", "|---|---|---|---|---|"]
    for row in rows:
        lines.append(f"| {row.name} | {row.value:.3g} | {row.goal} | {'ok' if row.met else 'MISS'} | {row.compared} |")
    return "\n".join(lines)


async def run(seconds: float, parts: Sequence[str], repetitions: int) -> list[Row]:
    """Measure the parts asked for."""
    rows: list[Row] = []
    if "squeeze" in parts:
        rows += await squeeze(repetitions)
    if "overload" in parts:
        rows += await overload(seconds)
    if "shares" in parts:
        rows += await shares(seconds)
    return rows


def main() -> int:
    """Print the table; 1 when a goal was missed."""
    parser = argparse.ArgumentParser(prog="python -m bench.pressure", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long each load lasts (default 60)")
    parser.add_argument("--parts", default="squeeze,overload,shares", help="comma-separated")
    parser.add_argument("--repetitions", type=int, default=2, help="of W6 (default 2)")
    options = parser.parse_args()
    unknown = set(options.parts.split(",")) - {"squeeze", "overload", "shares"}
    if unknown:
        parser.error(f"--parts: unknown {sorted(unknown)}; known: squeeze, overload, shares")
    rows = asyncio.run(run(options.seconds, options.parts.split(","), options.repetitions))
    print(table(rows))
    return int(not all(row.met for row in rows))


if __name__ == "__main__":
    sys.exit(main())
