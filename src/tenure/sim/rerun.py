"""A run taken down, and run again without a model: the same calls at the same times give the same facts.

Everything the scheduler decides follows from its calls: who came when, which tokens a step gave and how long it took.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tenure.sched.scheduler import News, Scheduler
from tenure.tiers.base import BlockStore
from tenure.types import Done, LimitCause, Request, StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a scheduler's verb at a time: what came in with it."""

    now: float
    what: Request | StepResult | str | None = None
    """A request that was added, the result of a step, the id of a request that was cancelled; None: the next step."""
    cause: LimitCause | None = None
    """Everything was ended, because of this."""


class TakenDown(Scheduler):
    """A scheduler that takes its calls down in `calls`."""

    calls: list[Call]

    def add(self, request: Request, now: float) -> None:
        self._take_down(Call(now, request))
        super().add(request, now)

    def next_step(self, now: float) -> StepPlan | None:
        self._take_down(Call(now))
        return super().next_step(now)

    def absorb(self, result: StepResult, now: float) -> list[News]:
        self._take_down(Call(now, result))
        return super().absorb(result, now)

    def cancel(self, request_id: str, now: float) -> list[Done]:
        self._take_down(Call(now, request_id))
        return super().cancel(request_id, now)

    def end_all(self, cause: LimitCause, now: float) -> list[News]:
        self._take_down(Call(now, cause=cause))
        return super().end_all(cause, now)

    def _take_down(self, call: Call) -> None:
        self.__dict__.setdefault("calls", []).append(call)


def rerun(calls: Iterable[Call], scheduler: Scheduler, store: BlockStore) -> list[News]:
    """Make the same calls to a new scheduler, set up as the first one was; the news it gives."""
    news: list[News] = []
    for call in calls:
        match call.what:
            case Request():
                scheduler.add(call.what, call.now)
            case StepResult():
                news += scheduler.absorb(call.what, call.now)
            case str():
                news += scheduler.cancel(call.what, call.now)
            case None if call.cause is not None:
                news += scheduler.end_all(call.cause, call.now)
            case None:
                plan = scheduler.next_step(call.now)
                if plan is not None:
                    store.execute(plan.copies)
    return news
