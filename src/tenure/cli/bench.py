"""`tenure bench`: a few workloads against the embedded model or any OpenAI-compatible URL, medians of repetitions.

The full table beside other servers is `make bench`; both send the same workloads with the same client.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tenure.cli.options import complain, takes
from tenure.config import Resolved
from tenure.errors import ConfigError

if TYPE_CHECKING:
    from tenure.cli.bench_client import HttpEndpoint, Workload

DEFAULT = "W1,W3,W4,W5"
COLUMNS = {
    "ttft_s": ("time to first token", "s", 3),
    "prefill_tps": ("prefill", "tokens/s", 0),
    "decode_tps": ("decode", "tokens/s", 1),
    "wall_s": ("wall", "s", 2),
    "output_tps": ("output", "tokens/s", 1),
    "ttft_mean_s": ("mean time to first token", "s", 3),
    "ttft_first_s": ("first token, turn 1", "s", 3),
    "ttft_sixth_s": ("first token, turn 6", "s", 3),
    "cached_tokens": ("tokens reused", "", 0),
    "preemptions": ("preemptions", "", 0),
}

Url = Annotated[str | None, typer.Option("--url", help="Measure this server instead of an engine in this process.")]
Only = Annotated[str, typer.Option("--workloads", help="Which of W1 to W6, with commas.")]
Repeat = Annotated[int, typer.Option("--repeat", min=1, help="Repetitions; medians are shown.")]
Data = Annotated[Path | None, typer.Option("--data", help="A workloads.json; without one, generated token ids.")]
Json = Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")]


@takes(
    "model", "weights", "memory", "kv_cache_memory_bytes", "kv_cache_dtype", "kv_cache_dtype_k", "kv_cache_dtype_v",
    "max_num_seqs", "max_num_batched_tokens", "max_step_ms", "api_key", "threads", "isa",
)  # fmt: skip
def bench(
    resolved: Resolved,
    url: Url = None,
    workloads: Only = DEFAULT,
    repeat: Repeat = 3,
    data: Data = None,
    as_json: Json = False,
) -> int:
    """Measure speed on this machine, now."""
    chosen = choose(workloads, data)
    with contextlib.ExitStack() as stack:
        if url is None:
            from tenure.cli.local import local_server

            url = stack.enter_context(local_server(resolved.settings))
        endpoint = endpoint_of(url, resolved.settings.api_key)
        failed = False
        figures: dict[str, Any] = {}
        for workload in chosen:
            found = asyncio.run(run(endpoint, workload, repeat))
            figures[workload.name] = found
            failed |= bool(found["errors"])
            if not as_json:
                show(workload, found)
        if as_json:
            print(json.dumps(figures, indent=2))
    return 1 if failed else 0


def choose(names: str, data: Path | None) -> list[Workload]:
    """The workloads named, from a file or generated. ConfigError names an unknown one."""
    from tenure.cli.bench_client import load

    if data is not None and not data.is_file():
        raise ConfigError("data", f"--data {data}: there is no such file")
    known = load(data)
    wanted = [name.strip().upper() for name in names.split(",") if name.strip()]
    unknown = [name for name in wanted if name not in known]
    if unknown or not wanted:
        raise ConfigError("workloads", f"--workloads {names!r}: choose from {', '.join(known)}")
    return [known[name] for name in wanted]


def endpoint_of(url: str, api_key: str | None) -> HttpEndpoint:
    """The completions endpoint of a server. ConfigError when the URL is none or nobody answers there."""
    from tenure.cli.bench_client import HttpEndpoint
    from tenure.cli.chat import connect, model_of

    with connect(url, api_key, 30) as client:
        model = model_of(client)
    try:
        return HttpEndpoint(url.rstrip("/").removesuffix("/v1"), model=model, api_key=api_key)
    except ValueError as error:
        raise ConfigError("url", f"--url {url}: {error}") from None


async def run(endpoint: HttpEndpoint, workload: Workload, repeat: int) -> dict[str, Any]:
    """Medians over `repeat` repetitions after one short warm-up, which is not counted."""
    from tenure.cli.bench_client import measure

    await endpoint.complete([1] * 64, 4)
    runs = [await measure(endpoint, workload, repetition) for repetition in range(repeat)]
    found: dict[str, Any] = {"title": workload.title, "repetitions": repeat}
    for name in COLUMNS:
        values = [one[name] for one in runs if name in one and not math.isnan(one[name])]
        if values:
            found[name] = statistics.median(values)
    found["finished"] = sum(one["finished"] for one in runs)
    found["requests"] = sum(one["requests"] for one in runs)
    found["errors"] = [error for one in runs for error in one["errors"]][:3]
    return found


def show(workload: Workload, found: Mapping[str, Any]) -> None:
    """One workload, readable."""
    print(f"{workload.name}  {workload.title}   ({found['finished']} of {found['requests']} requests as asked)")
    for line in _lines(found):
        print(f"    {line}")
    for error in found["errors"]:
        complain(f"{workload.name}: {error}")


def _lines(found: Mapping[str, Any]) -> Iterator[str]:
    for name, (label, unit, digits) in COLUMNS.items():
        if name in found:
            yield f"{label:<26}{found[name]:>10.{digits}f} {unit}".rstrip()
