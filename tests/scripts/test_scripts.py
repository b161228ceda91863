"""Runs the *.kv scripts beside this file: commands go in, facts come out, line by line.

pool 8 of 4                     8 blocks of 4 tokens; with `seqs=2 batch=16 step_ms=50 context=64 queue=4`, with
                                `pressure=pause@80% shared=1..8` and tenants: `acme.weight=2 acme.max_pinned_bytes=4`
ask a 1..11 50 max=3 n=2        a request: tokens and ranges; also session=, salt=, priority=, stop=K (th token),
                                tenant=, overflow=slide, pin=END for ttl= seconds
step 3 ms=20 · run · cancel a · end · drop · counts · wait 1.5
pause s · resume s · pin s ttl=5 · unpin s · delete s      of a conversation: its session, or its first request
= started a cached=0 miss=cold  what must have come out since, in this order and complete
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.sched.fake import Setup, World

from tenure.events import (
    BlockGone,
    ConversationChanged,
    Fact,
    PinEnded,
    PinGranted,
    PinRefused,
    RequestDone,
    RequestRefused,
    RequestStarted,
    SequencePaused,
    SequenceResumed,
    SequenceSlid,
    StepDone,
)
from tenure.policy.base import AdmissionAsk, Refuse
from tenure.sched.desk import Desk
from tenure.tenants import Tenant, Tenants
from tenure.types import Pin, Rows, Scope

SCRIPTS = sorted(Path(__file__).parent.glob("*.kv"))


class Script:
    """One world, told what to do a line at a time."""

    def __init__(self) -> None:
        self.world = World()
        self.desk = Desk(self.world.scheduler, self.world.history, self.world.log)
        self.out: list[str] = []
        self.stop_at: dict[str, int] = {}

    def do(self, line: str) -> None:
        verb, *words = line.split()
        fields = dict(word.split("=", 1) for word in words if "=" in word)
        getattr(self, "do_" + verb)([word for word in words if "=" not in word], fields)

    def do_pool(self, words: list[str], fields: dict[str, str]) -> None:
        shared = tuple(numbers_of(fields.pop("shared"))) if "shared" in fields else ()
        setup = Setup(fields.pop("pressure", "pause"), shared=(shared,), tenants=tenants_of(fields))
        numbers = {name: int(value) for name, value in fields.items()}
        self.world = World(int(words[0]), int(words[2]), setup=setup, **numbers)
        self.desk = Desk(self.world.scheduler, self.world.history, self.world.log)
        self.world.stops = self._stops
        self.world.log.listen(lambda fact: self.out.extend(told(fact)))

    def do_ask(self, words: list[str], fields: dict[str, str]) -> None:
        name, tokens = words[0], [token for word in words[1:] for token in numbers_of(word)]
        self.stop_at[name] = int(fields.get("stop", 0))
        n, priority = int(fields.get("n", 1)), int(fields.get("priority", 0))
        max_tokens = int(fields["max"]) if "max" in fields else None
        scheduler = self.world.scheduler
        verdict = scheduler.admission.judge(AdmissionAsk(len(tokens), n, max_tokens, priority), scheduler.load())
        if isinstance(verdict, Refuse):
            numbers = " ".join(f"{key}={value:g}" for key, value in verdict.numbers.items() if key != "retry_after_s")
            self.world.log.emit(RequestRefused(self.world.clock.now(), name, f"{verdict.code} {numbers}"))
            return
        self.world.ask(
            name,
            tokens,
            max_tokens,
            n=n,
            priority=priority,
            scope=Scope("fake", salt=fields.get("salt", ""), tenant=fields.get("tenant", "")),
            session_id=fields.get("session"),
            overflow=fields.get("overflow", "refuse"),
            pins=(Pin(int(fields["pin"]), float(fields["ttl"])),) if "pin" in fields else (),
        )

    def do_step(self, words: list[str], fields: dict[str, str]) -> None:
        for _ in range(int(words[0]) if words else 1):
            self.world.step(float(fields.get("ms", 10)))

    def do_run(self, words: list[str], fields: dict[str, str]) -> None:
        while self.world.step():
            pass

    def do_cancel(self, words: list[str], fields: dict[str, str]) -> None:
        self.world.scheduler.cancel(words[0], self.world.clock.now())
        self.world.cache.check()

    def do_end(self, words: list[str], fields: dict[str, str]) -> None:
        self.world.scheduler.end_all("shutdown", self.world.clock.now())

    def do_pause(self, words: list[str], fields: dict[str, str]) -> None:
        self.desk.pause(None, words[0], self.world.clock.now())

    def do_resume(self, words: list[str], fields: dict[str, str]) -> None:
        self.desk.resume(None, words[0], self.world.clock.now())

    def do_pin(self, words: list[str], fields: dict[str, str]) -> None:
        self.desk.pin(None, words[0], float(fields["ttl"]), self.world.clock.now())

    def do_unpin(self, words: list[str], fields: dict[str, str]) -> None:
        self.desk.unpin(None, words[0], self.world.clock.now())

    def do_delete(self, words: list[str], fields: dict[str, str]) -> None:
        self.world.news += self.desk.delete(None, words[0], self.world.clock.now())[1]

    def do_drop(self, words: list[str], fields: dict[str, str]) -> None:
        self.out.append(f"dropped {self.world.cache.drop_unleased(self.world.clock.now())}")

    def do_counts(self, words: list[str], fields: dict[str, str]) -> None:
        counts, scheduler = self.world.cache.counts(), self.world.scheduler
        self.out.append(f"leased={counts.leased} cached={counts.cached} free={counts.free} running={scheduler.running}"
                        f" waiting={scheduler.waiting}")  # fmt: skip

    def do_wait(self, words: list[str], fields: dict[str, str]) -> None:
        self.world.clock.advance(float(words[0]))

    def _stops(self, rows: Rows) -> bool:
        return rows.counter + 1 == self.stop_at[rows.request]


def tenants_of(fields: dict[str, str]) -> Tenants:
    """Takes what is said of tenants out of the fields."""
    said: dict[str, dict[str, int]] = {}
    for name in [name for name in fields if "." in name]:
        tenant, limit = name.split(".")
        said.setdefault(tenant, {})[limit] = int(fields.pop(name))
    return Tenants(tuple(Tenant(tenant, **limits) for tenant, limits in said.items()))


def numbers_of(word: str) -> Iterator[int]:
    first, _, last = word.partition("..")
    yield from range(int(first), int(last or first) + 1)


def told(fact: Fact) -> Iterator[str]:
    """A fact in words; those that no script asks about are left out."""
    match fact:
        case RequestStarted():
            yield f"started {fact.request} cached={fact.cached_tokens} miss={fact.miss or 'none'}"
        case RequestRefused():
            yield f"refused {fact.request} {fact.code}"
        case StepDone():
            yield f"step decode={fact.decode_rows} prefill={fact.prefill_rows}"
        case SequencePaused():
            yield f"paused {fact.request} computed={fact.recompute_tokens}"
        case SequenceResumed():
            yield f"resumed {fact.request} recomputed={fact.recomputed_tokens}"
        case SequenceSlid():
            yield f"slid {fact.request} {fact.start}..{fact.end} kept={fact.kept_tokens}"
        case PinGranted():
            yield f"pinned {fact.tokens} for {fact.until - fact.at:g}"
        case PinRefused():
            yield f"not pinned: {fact.reason}"
        case PinEnded():
            yield f"unpinned {fact.blocks} blocks: {fact.reason}"
        case ConversationChanged():
            yield f"{fact.change} {fact.conversation} blocks={fact.blocks}"
        case BlockGone() if fact.fate.is_loss:
            yield f"{fact.fate.value} recompute={fact.recompute_tokens}"
        case RequestDone():
            finishes = ",".join(finish.value for finish in fact.finishes)
            receipt, usage = fact.receipt, fact.usage
            cause = f" cause={fact.limit_cause}" if fact.limit_cause else ""
            yield (f"done {fact.request} {finishes}{cause} prompt={usage.prompt_tokens} cached={usage.cached_tokens}"
                   f" answer={usage.completion_tokens} preempted={receipt.preempted}"
                   f" recomputed={receipt.recomputed_tokens}")  # fmt: skip


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_script(path: Path) -> None:
    script = Script()
    expected: list[str] = []
    for number, line in enumerate([*path.read_text().splitlines(), "# the end"], 1):
        if line.startswith("="):
            expected.append(line[1:].strip())
            continue
        command = line.split("#")[0].strip()
        if command or line == "# the end":
            assert script.out == expected, f"{path.name}: before line {number}"
            script.out.clear()
            expected.clear()
        if command:
            script.do(command)
