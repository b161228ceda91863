"""Case X1 of shared/cases: many streams whose clients leave at token 5."""

from __future__ import annotations

import asyncio
import time

import httpx
import pytest

from e2e.support import Running, eventually, prompt_ids

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
