"""An hour of a small team's server, compressed: random arrivals of long and short requests, conversations that come
back, clients that leave; in a pool too small for all of them."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field

import httpx
import pytest
from tests.e2e.support import Running, eventually, pool_bytes, prompt_ids, serving
from tests.e2e.test_cases_cancel import resident_bytes

GAP_S = 5.0
"""Between two arrivals, on average."""
FLAGS = (
    "--kv-cache-memory-bytes", pool_bytes(4096), "--canary", "8", "--max-model-len", "2048",
    "--pressure", "recode:int8@70%,pause@90%", "--no-quality-gate",
)  # fmt: skip


@dataclass
class Team:
    """Who asks: some conversations by name, and what became of all requests."""

    chance: random.Random
    histories: dict[str, list[int]] = field(default_factory=dict)
    outcomes: Counter[str] = field(default_factory=Counter)

    def body(self, number: int) -> dict[str, object]:
        chance = self.chance
        kind = chance.choice(("short", "short", "long", "turn", "turn", "several", "odd"))
        name = f"c{chance.randrange(12)}"
        if kind == "turn":
            prompt = [*self.histories.get(name, prompt_ids(60, len(name))), *prompt_ids(20, number)][-1200:]
            self.histories[name] = prompt
            return {"prompt": prompt, "max_tokens": chance.randrange(5, 60), "session_id": name}
        size = chance.randrange(600, 1500) if kind == "long" else chance.randrange(4, 120)
        prompt = prompt_ids(size, chance.randrange(40))
        body: dict[str, object] = {"prompt": prompt, "max_tokens": chance.randrange(1, 40)}
        if kind == "several":
            body |= {"n": 3, "temperature": 0.8, "seed": number}
        if kind == "odd":
            odd = {"echo": True, "logprobs": 2}, {"priority": -1}, {"max_tokens": 10**5}, {"stop": ["e"]}, {"top_p": 7}
            body |= chance.choice(odd)
        return body


async def ask(http: httpx.AsyncClient, team: Team, number: int) -> None:
    body = team.body(number)
    leaves = team.chance.random() < 0.2
    if not leaves:
        reply = await http.post("/v1/completions", json=body)
        team.outcomes[str(reply.status_code)] += 1
        assert reply.status_code in (200, 400, 429, 503), reply.text
        return
    patience = team.chance.randrange(0, 6)
    async with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as reply:
        async for _ in reply.aiter_lines():
            patience -= 1
            if patience < 0:
                break
    team.outcomes["left"] += 1


async def hour(url: str, team: Team, first: int, count: int, speed: float) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=httpx.Limits(max_connections=400)) as http:
        tasks = []
        for number in range(first, first + count):
            tasks.append(asyncio.create_task(ask(http, team, number)))
            await asyncio.sleep(team.chance.expovariate(1 / GAP_S) / speed)
        await asyncio.gather(*tasks)


def at_rest(server: Running) -> bool:
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
    return not any(map(server.metric, names)) and not server.metric("tenure:kv_blocks", state="leased")


@pytest.mark.parametrize(("requests", "growth"), [(60, 1.10), pytest.param(720, 1.03, marks=pytest.mark.full)])
def test_an_hour_leaves_nothing_behind(requests: int, growth: float) -> None:
    """`growth`: in the last third. Before that buffers grow to the largest step, and what is kept of the past fills its
    bounds."""
    team = Team(random.Random(7))
    with serving(*FLAGS) as server:
        asyncio.run(hour(server.url, team, 0, 2 * requests // 3, speed=15))
        assert eventually(lambda: at_rest(server), 60)
        before = resident_bytes(server)
        asyncio.run(hour(server.url, team, 2 * requests // 3, requests // 3, speed=15))
        assert eventually(lambda: at_rest(server), 60)
        assert resident_bytes(server) < before * growth
        assert server.metric("tenure:leaked_blocks") == 0
        assert team.outcomes.total() == requests
        assert team.outcomes["200"] > requests // 3
        assert team.outcomes["left"] and team.outcomes["400"]
        server.reset()
        assert server.metric("tenure:kv_blocks", state="cached") == 0
        assert server.terminate() == 0
