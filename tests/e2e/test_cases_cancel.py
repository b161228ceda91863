"""Cases X1 and X3 of shared/cases: clients that leave at token 5, and memory that must not grow."""

from __future__ import annotations

import asyncio
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from tests.e2e.support import Running, eventually, pool_bytes, prompt_ids, serving

AT_ONCE = 20


async def leave_at_token_five(http: httpx.AsyncClient, seed: int, gate: asyncio.Semaphore) -> int:
    """Open a stream, close the socket when five tokens have come; the tokens seen."""
    body = {
        "prompt": prompt_ids(40, seed), "max_tokens": 500, "ignore_eos": True, "stream": True, "return_token_ids": True,
    }  # fmt: skip
    seen = 0
    async with gate, http.stream("POST", "/v1/completions", json=body) as reply:
        assert reply.status_code == 200
        async for line in reply.aiter_lines():
            if line.startswith("data: "):
                seen += 1
                if seen >= 5:
                    break
    return seen


async def crowd(url: str, streams: int) -> list[int]:
    gate = asyncio.Semaphore(AT_ONCE)
    limits = httpx.Limits(max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as http:
        return await asyncio.gather(*(leave_at_token_five(http, seed, gate) for seed in range(streams)))


@pytest.mark.parametrize("streams", [100, pytest.param(1000, marks=pytest.mark.full)])
def test_x1_clients_that_leave_take_nothing_with_them(server: Running, streams: int) -> None:
    baseline = server.metric("tenure:kv_blocks", state="leased")
    assert baseline == 0
    seen = asyncio.run(crowd(server.url, streams))
    assert min(seen) >= 5
    assert eventually(lambda: server.metric("vllm:num_requests_running") == 0, 10)
    assert eventually(lambda: server.metric("tenure:kv_blocks", state="leased") == baseline, 10)
    assert server.metric("vllm:num_requests_waiting") == 0
    assert server.metric("tenure:leaked_blocks") == 0
    began = time.monotonic()
    server.complete(prompt_ids(8, seed=9), 1)
    assert time.monotonic() - began < 5


def resident_bytes(server: Running) -> int:
    """The server's resident memory."""
    found = re.search(r"^VmRSS:\s+(\d+) kB", Path(f"/proc/{server.process.pid}/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def mixed(server: Running, first: int, count: int) -> None:
    """Short requests of all kinds: plain, streamed, n = 2, cut by stop strings, repeated, refused."""

    def one(number: int) -> int:
        body = {"prompt": prompt_ids(5 + number % 60, number % 97), "max_tokens": 1 + number % 7, "temperature": 0.7}
        extra: dict[str, object] = [{}, {"stream": True}, {"n": 2}, {"stop": ["a"]}, {"max_tokens": -1}][number % 5]
        return server.http.post("/v1/completions", json={**body, **extra, "seed": number}).status_code

    with ThreadPoolExecutor(12) as pool:
        statuses = list(pool.map(one, range(first, first + count)))
    assert statuses.count(200) == count - count // 5
    assert statuses.count(400) == count // 5


@pytest.mark.parametrize("count", [150, pytest.param(5000, marks=pytest.mark.full)])
def test_x3_memory_after_the_second_batch_is_that_after_the_first(count: int) -> None:
    with serving("--kv-cache-memory-bytes", pool_bytes(4096)) as server:
        mixed(server, 0, count)
        after_first = resident_bytes(server)
        mixed(server, count, count)
        after_second = resident_bytes(server)
        assert after_second < after_first * 1.03
        assert eventually(lambda: server.metric("tenure:kv_blocks", state="leased") == 0)
        assert server.metric("vllm:num_requests_running") == server.metric("vllm:num_requests_waiting") == 0
        assert server.metric("tenure:leaked_blocks") == 0
