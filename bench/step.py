"""Where a step's time goes with sixteen sequences: ``python -m bench.step [--weights auto|bf16] [--json]``.

Serves W3's prompts over HTTP from this process, with the client in another one, and times every native call from the
inside. They are sent twice: the second time the prompts are held, so that all sixteen soon decode together. The share
of Python and scheduling is what native calls leave of the time between the starts of two steps in a row that both
decode sixteen sequences and nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tenure import _native
from tenure.cli.bench_client import HttpEndpoint, load, measure
from tenure.cli.local import local_server
from tenure.config import Settings

SEQUENCES = 16
ROOT = Path(__file__).parent.parent


@dataclass(frozen=True, slots=True)
class Call:
    """One native call: which, when, and how many rows and sampled rows the step had."""

    name: str
    start: float
    end: float
    rows: int = 0
    sampled: int = 0


def instrument(calls: list[Call]) -> None:
    """Note every decoder step and every sampling in `calls`."""
    step: Callable[..., None] = _native.Decoder.step
    sample: Callable[..., Any] = _native.sample

    def timed_step(decoder: _native.Decoder, arena: Any, tokens: Any, *rest: Any) -> None:
        start = time.perf_counter()
        step(decoder, arena, tokens, *rest)
        calls.append(Call("step", start, time.perf_counter(), len(tokens), len(rest[-2])))

    def timed_sample(*args: Any, **named: Any) -> Any:
        start = time.perf_counter()
        chosen = sample(*args, **named)
        calls.append(Call("sample", start, time.perf_counter()))
        return chosen

    _native.Decoder.step = timed_step  # type: ignore[method-assign, assignment]
    _native.sample = timed_sample


def shares(calls: list[Call]) -> dict[str, float]:
    """Medians over the steps that decode all sequences: milliseconds of each part, and Python's share of the whole."""
    steps = [i for i, call in enumerate(calls) if call.name == "step"]
    parts: list[tuple[float, float, float]] = []
    for here, there in itertools.pairwise(steps):
        one, following = calls[here], calls[there]
        if {one.rows, one.sampled, following.rows, following.sampled} != {SEQUENCES}:
            continue
        between = calls[here + 1 : there]
        parts.append((following.start - one.start, one.end - one.start, sum(c.end - c.start for c in between)))
    if not parts:
        raise SystemExit(f"no two steps in a row decoded {SEQUENCES} sequences and nothing else")
    total, native, sampling = (1e3 * statistics.median(column) for column in zip(*parts, strict=True))
    python = [1 - (native_s + sampling_s) / whole_s for whole_s, native_s, sampling_s in parts]
    return {
        "steps": len(parts),
        "step_ms": total,
        "native_ms": native,
        "sampling_ms": sampling,
        "python_ms": total - native - sampling,
        "python_share": statistics.median(python),
    }


async def drive(url: str) -> None:
    """Be the client: send W3's prompts, and the same again."""
    endpoint = HttpEndpoint(url)
    await endpoint.discover()
    for _ in range(2):
        figures = await measure(endpoint, load()["W3"], 0)
        if figures["errors"]:
            raise SystemExit(f"not served: {figures['errors']}")


def main() -> None:
    """Serve, have the prompts sent, print."""
    parser = argparse.ArgumentParser(prog="python -m bench.step", description=__doc__)
    parser.add_argument("--weights", default="auto", choices=("auto", "f32", "bf16", "int8", "int4"))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--drive", metavar="URL", help="only send the prompts to this server")
    options = parser.parse_args()
    if options.drive:
        asyncio.run(drive(options.drive))
        return
    calls: list[Call] = []
    instrument(calls)
    with local_server(Settings(weights=options.weights)) as url:
        client = [sys.executable, "-m", "bench.step", "--drive", url]
        subprocess.run(client, cwd=ROOT, check=True, timeout=300)
    found = shares(calls)
    if options.json:
        print(json.dumps(found))
        return
    print(f"{found['steps']:.0f} steps of {SEQUENCES} sequences, medians:")
    for part in ("step", "native", "sampling", "python"):
        print(f"  {part:<10}{found[f'{part}_ms']:>8.2f} ms{found[f'{part}_ms'] / found['step_ms']:>8.1%}")
    print(f"  share of Python and scheduling {found['python_share']:.1%}")


if __name__ == "__main__":
    main()
