"""The whole core over a logical clock: figures that add up, golden ones, and the same as when serving."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.sim.worlds import WORKLOADS, conversations

from tenure.cli import costs
from tenure.errors import ConfigError
from tenure.policy import registry
from tenure.sim.replay import Calibration, Replay, Report, Setup, percentiles
from tenure.sim.trace import TraceRequest

COSTS = Calibration()
GOLDEN: dict[str, tuple[list[int], float]] = {
    # Tokens found, evicted and computed again; pauses and steps; seconds of the logical clock.
    "conversations": ([114944, 32589, 593, 7, 1602], 75.791),
    "agents": ([388608, 10086, 95, 4, 776], 58.533),
    "documents": ([39232, 176899, 0, 0, 3139], 218.958),
    "mixed": ([130688, 96378, 0, 3, 1742], 128.918),
}


def run(requests: list[TraceRequest], blocks: int, **setup: Any) -> Report:
    size = requests[0].block_tokens if requests else 64
    return Replay(Setup(blocks, size, **setup), COSTS).run(requests)


@pytest.mark.parametrize("eviction", registry.EVICTION)
def test_figures_add_up(eviction: str) -> None:
    requests = list(conversations(150, 2))
    report = run(requests, 400, eviction=eviction)
    assert report.requests == len(requests)
    assert report.prompt_tokens == sum(request.prompt_tokens for request in requests)
    assert report.output_tokens == sum(request.output_tokens for request in requests)
    assert 0 < report.hits < report.prompt_tokens
    assert len(report.ttft) == len(report.queue) == len(requests)
    assert len(report.gaps) == report.output_tokens - len(requests)
    assert report.evicted_tokens > 0
    assert report.peak_bytes["bf16"] <= 400 * 64 * COSTS.kv_bytes_per_token
    assert report.seconds > requests[-1].at - requests[0].at


def test_the_same_again_gives_the_same() -> None:
    requests = list(conversations(100, 3))
    assert run(requests, 300).to_json() == run(requests, 300).to_json()


@pytest.mark.parametrize("name", GOLDEN)
def test_golden(name: str) -> None:
    report = run(list(WORKLOADS[name](60, 7)), 260, speed=20.0)
    found = [report.hits, report.evicted_tokens, report.recomputed, report.pauses, report.steps]
    assert (found, round(report.seconds, 3)) == GOLDEN[name]


def test_more_memory_and_more_time_help() -> None:
    requests = list(conversations(150, 4))
    small, large = run(requests, 200), run(requests, 4000)
    assert small.hits < large.hits
    slow, fast = run(requests, 300, speed=0.1), run(requests, 300, speed=50.0)
    assert percentiles(slow.queue)["p99"] < percentiles(fast.queue)["p99"]


def test_a_pool_outgrown_pauses() -> None:
    requests = [TraceRequest(0.0, 60, 200, (n,), 64) for n in range(1, 9)]
    report = run(requests, 12)
    assert report.pauses > 0
    assert report.recomputed > 0
    assert report.output_tokens == 1600


def test_what_never_fits_is_refused_and_counted() -> None:
    requests = [TraceRequest(0.0, 64 * 50, 5, tuple(range(50)), 64), TraceRequest(1.0, 64, 5, (99,), 64),
                TraceRequest(2.0, 0, 5, (), 64)]  # fmt: skip
    report = run(requests, 10)
    assert report.refused == {"kv_capacity_exceeded": 1, "empty_prompt": 1}
    assert len(report.ttft) == 1


def test_answers_named_in_the_trace_are_reused() -> None:
    first = TraceRequest(0.0, 40, 30, (1,), 32, answer=(2,))
    second = TraceRequest(100.0, 70, 5, (1, 2), 32)
    report = run([first, second], 50)
    assert report.hits == 64
    unnamed = run([TraceRequest(0.0, 40, 30, (1,), 32), second], 50)
    assert unnamed.hits == 32


def test_tenants_share_nothing() -> None:
    requests = [TraceRequest(float(n), 64, 2, (1, 2), 32, tenant=f"t{n % 2}") for n in range(4)]
    assert run(requests, 50).hits == 2 * 63


def test_percentiles() -> None:
    assert percentiles([]) == {}
    assert percentiles([3.0, 1.0, 2.0]) == {"p50": 2.0, "p90": 3.0, "p99": 3.0, "max": 3.0}


def test_calibration_is_read_and_checked(tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    file.write_text(json.dumps({"base_ms": 1.5, "doubling": 900}))
    assert costs.read(file) == Calibration(base_ms=1.5, doubling=900)
    broken = {
        '{"base_ms": Infinity}': "base_ms",
        '{"kv_bytes_per_token": 9}': "object",
        "{": "not valid JSON",
        "[]": "object",
        '{"speed": 1}': "object",
        '{"base_ms": 0}': "base_ms",
    }
    for text, words in broken.items():
        file.write_text(text)
        with pytest.raises(ConfigError, match=words):
            costs.read(file)
    with pytest.raises(ConfigError, match="No such file"):
        costs.read(tmp_path / "none")


@pytest.mark.parametrize("name", sorted(WORKLOADS))
def test_every_world_runs_to_its_end(name: str) -> None:
    requests = list(WORKLOADS[name](40, 5))
    report = run(requests, 900, eviction="gittins", speed=100.0)
    assert len(report.ttft) == len(requests)
