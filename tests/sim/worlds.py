"""Traces made up: small worlds with one habit each, the same for the same seed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from heapq import heappop, heappush
from itertools import count
from random import Random

from tenure.sim.trace import TraceRequest

BLOCK = 64
"""Tokens of a block in these traces."""


class _World:
    """Gives out block names and collects what happens, in order of time."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self._names = count(1)
        self._heap: list[tuple[float, int, TraceRequest]] = []
        self._ties = count()

    def text(self, blocks: int) -> tuple[int, ...]:
        """Blocks that nobody has seen."""
        return tuple(next(self._names) for _ in range(blocks))

    def ask(self, at: float, blocks: tuple[int, ...], answer: int, session: str | None = None, turn: int = 1) -> None:
        part = self.random.randrange(BLOCK)
        request = TraceRequest(at, BLOCK * len(blocks) + part, answer, blocks, BLOCK, session=session, turn=turn)
        heappush(self._heap, (at, next(self._ties), request))

    def talk(self, at: float, session: str, blocks: tuple[int, ...], turns: int, pause_s: float) -> None:
        """A conversation whose every turn has all of the ones before as its beginning."""
        for turn in range(1, turns + 1):
            answer = int(self.random.expovariate(1 / 200)) + 1
            blocks += self.text(self.random.randint(1, 6))
            self.ask(at, blocks, answer, session, turn)
            blocks += self.text(answer // BLOCK + 1)
            at += self.random.lognormvariate(0.0, 1.0) * pause_s

    def history(self) -> Iterator[TraceRequest]:
        while self._heap:
            yield heappop(self._heap)[2]


def conversations(requests: int, seed: int = 0) -> Iterator[TraceRequest]:
    """People who talk: a shared system prompt, one to some twenty turns, a minute between them."""
    world = _World(seed)
    systems = [world.text(8) for _ in range(4)]
    at, made = 0.0, 0
    while made < requests:
        at += world.random.expovariate(1 / 3.0)
        turns = min(20, 1 + int(world.random.expovariate(1 / 4)))
        world.talk(at, f"c{made}", world.random.choice(systems), turns, 60.0)
        made += turns
    return world.history()


def agents(requests: int, seed: int = 0) -> Iterator[TraceRequest]:
    """Agents: long shared tool lists, up to sixty quick turns, now and then a helper that starts from the middle."""
    world = _World(seed)
    tools = [world.text(40) for _ in range(3)]
    at, made = 0.0, 0
    while made < requests:
        at += world.random.expovariate(1 / 40.0)
        blocks, now = world.random.choice(tools) + world.text(4), at
        for turn in range(1, world.random.randint(5, 60)):
            blocks += world.text(world.random.randint(1, 4))
            world.ask(now, blocks, world.random.randint(10, 120), f"a{made}", turn)
            if world.random.random() < 0.1:
                world.ask(now + 1, blocks + world.text(6), 300, f"h{made}", 1)
            now += world.random.expovariate(1 / 5.0) + (300.0 if world.random.random() < 0.03 else 0.0)
            made += 1
    return world.history()


def documents(requests: int, seed: int = 0) -> Iterator[TraceRequest]:
    """Long documents, each asked about one to four times within minutes, then never again."""
    world = _World(seed)
    at, made = 0.0, 0
    while made < requests:
        at += world.random.expovariate(1 / 10.0)
        text, now = world.text(world.random.randint(20, 120)), at
        for _ in range(world.random.choice((1, 1, 1, 2, 3, 4))):
            world.ask(now, text + world.text(1), 150, None)
            now += world.random.expovariate(1 / 90.0)
            made += 1
    return world.history()


def prompts(requests: int, seed: int = 0) -> Iterator[TraceRequest]:
    """Templates of which few are popular (Zipf), each time with a text of its own behind."""
    world = _World(seed)
    templates = [world.text(world.random.randint(4, 60)) for _ in range(500)]
    weights = [1 / (rank + 1) for rank in range(500)]
    at = 0.0
    for template in world.random.choices(templates, weights, k=requests):
        at += world.random.expovariate(1 / 0.5)
        world.ask(at, template + world.text(world.random.randint(1, 12)), world.random.randint(1, 60))
    return world.history()


def scans(requests: int, seed: int = 0) -> Iterator[TraceRequest]:
    """The same prompts over and over in the same order: what LRU is worst at."""
    world = _World(seed)
    texts = [world.text(world.random.randint(10, 60)) for _ in range(max(1, requests // 12))]
    for number in range(requests):
        world.ask(2.0 * number, texts[number % len(texts)], 20)
    return world.history()


def shifts(requests: int, seed: int = 0) -> Iterator[TraceRequest]:
    """Habits that change: talk, then templates, then documents, and again. What was learned turns wrong."""
    part, start = max(1, requests // 6), 0.0
    for number, make in enumerate((conversations, prompts, documents) * 2):
        last = start
        for request in make(part, seed + number):
            last = start + request.at
            yield _renamed(request, number, last)
        start = last


def mixed(requests: int, seed: int = 0) -> Iterator[TraceRequest]:
    """Tenants of all kinds at the same time."""
    parts = [make(requests // 4, seed + n) for n, make in enumerate((conversations, agents, documents, prompts))]
    heap: list[tuple[float, int, TraceRequest]] = []
    for number, part in enumerate(parts):
        for request in part:
            heappush(heap, (request.at, number, replace(_renamed(request, number, request.at), tenant=f"t{number}")))
    while heap:
        yield heappop(heap)[2]


def _renamed(request: TraceRequest, world: int, at: float) -> TraceRequest:
    """The same request in a world of other names."""
    return replace(request, at=at, blocks=tuple(block * 16 + world for block in request.blocks))


WORKLOADS: Mapping[str, Callable[[int, int], Iterator[TraceRequest]]] = {
    make.__name__: make for make in (conversations, agents, documents, prompts, scans, shifts, mixed)
}
