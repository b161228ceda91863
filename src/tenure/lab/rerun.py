"""A run taken down, and run again without a model: the same calls at the same times give the same facts.

Everything the scheduler decides follows from the calls of it and of the desk: who came when, what was done to
conversations and to the cache, which tokens a step gave and how long it took.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tenure.errors import RequestError
from tenure.sched.desk import Desk
from tenure.sched.scheduler import News, Scheduler
from tenure.tiers.base import BlockStore
from tenure.types import Done, LimitCause, PinReceipt, Request, StepPlan, StepResult
from tenure.views import ConversationView


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a verb of the scheduler, or of the desk, at a time: what came in with it."""

    at_desk: bool
    verb: str
    what: tuple[Any, ...]
    now: float


class Tape:
    """Takes calls down, but not those that they make of each other."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._inside = False

    @contextmanager
    def take(self, call: Call) -> Iterator[None]:
        if self._inside:
            yield
            return
        self.calls.append(call)
        self._inside = True
        try:
            yield
        finally:
            self._inside = False


class TakenDown(Scheduler):
    """A scheduler that takes its calls down."""

    @cached_property
    def tape(self) -> Tape:
        return Tape()

    def add(self, request: Request, now: float) -> None:
        with self.tape.take(Call(False, "add", (request,), now)):
            super().add(request, now)

    def next_step(self, now: float) -> StepPlan | None:
        with self.tape.take(Call(False, "next_step", (), now)):
            return super().next_step(now)

    def absorb(self, result: StepResult, now: float) -> list[News]:
        with self.tape.take(Call(False, "absorb", (result,), now)):
            return super().absorb(result, now)

    def cancel(self, request_id: str, now: float) -> list[Done]:
        with self.tape.take(Call(False, "cancel", (request_id,), now)):
            return super().cancel(request_id, now)

    def end_all(self, cause: LimitCause, now: float) -> list[News]:
        with self.tape.take(Call(False, "end_all", (cause,), now)):
            return super().end_all(cause, now)


class TakenDownDesk(Desk):
    """A desk that takes down, on the tape of its scheduler, what is done at it."""

    @property
    def tape(self) -> Tape:
        if not isinstance(self._scheduler, TakenDown):
            raise TypeError("the scheduler of this desk is not taken down")
        return self._scheduler.tape

    def pin(self, tenant: str | None, name: str, ttl_s: float, now: float) -> PinReceipt:
        with self.tape.take(Call(True, "pin", (tenant, name, ttl_s), now)):
            return super().pin(tenant, name, ttl_s, now)

    def unpin(self, tenant: str | None, name: str, now: float) -> int:
        with self.tape.take(Call(True, "unpin", (tenant, name), now)):
            return super().unpin(tenant, name, now)

    def pause(self, tenant: str | None, name: str, now: float) -> ConversationView:
        with self.tape.take(Call(True, "pause", (tenant, name), now)):
            return super().pause(tenant, name, now)

    def resume(self, tenant: str | None, name: str, now: float) -> ConversationView:
        with self.tape.take(Call(True, "resume", (tenant, name), now)):
            return super().resume(tenant, name, now)

    def delete(self, tenant: str | None, name: str, now: float) -> tuple[int, list[News]]:
        with self.tape.take(Call(True, "delete", (tenant, name), now)):
            return super().delete(tenant, name, now)

    def clear(self, now: float) -> int:
        with self.tape.take(Call(True, "clear", (), now)):
            return super().clear(now)

    def refuse(self, request: Request, code: str, now: float) -> None:
        with self.tape.take(Call(True, "refuse", (request, code), now)):
            super().refuse(request, code, now)


def rerun(calls: Iterable[Call], scheduler: Scheduler, desk: Desk, store: BlockStore) -> None:
    """Make the same calls to a new scheduler and its desk, set up as the first ones were. What was refused then, as a
    conversation that is not there, is refused again."""
    for call in calls:
        with suppress(RequestError):
            found = getattr(desk if call.at_desk else scheduler, call.verb)(*call.what, call.now)
            if isinstance(found, StepPlan):
                store.execute(found.copies)
