"""The engine's thread: it alone touches scheduler and cache.

Work comes in through the inbox, news goes out once a step:

    submit ─▶ arrivals ─┐                                        ┌▶ Outbox ─ once per event loop ─▶ Handle
    call   ─▶ commands ─┴▶ next_step ▶ compute ▶ text ▶ absorb ──┘

Nobody hears of a change that cannot be seen yet: the state is published first, then news go out and commands are
answered.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from tenure.clock import Clock
from tenure.engine.handle import Handle, Outbox
from tenure.engine.runner import Computed, Runner
from tenure.engine.sessions import Sessions
from tenure.engine.text import TextStream
from tenure.errors import Corrupt, EngineDead, InvalidRequest, RequestError
from tenure.models.tokenizer import Tokenizer
from tenure.sched.scheduler import News, Scheduler
from tenure.sched.sequence import stillborn
from tenure.types import Delta, Done, Finish, Logprob, Piece, StepPlan, StepResult, Token

log = logging.getLogger("tenure.engine")
T = TypeVar("T")

IDLE_CHECK_S = 1.0
"""Seconds without work after which the cache is checked, once."""


@dataclass(slots=True)
class _Live:
    """A request under way: who reads it, and each answer's text stream and what it has said."""

    handle: Handle
    streams: list[TextStream]
    said: list[list[str]]
    ids: list[list[Token]]
    told: list[list[Logprob]]
    """What the tokens that no piece has carried yet were chosen from, if the request asked."""


@dataclass(slots=True)
class _Command:
    run_at: Callable[[float], Any]
    future: Future[Any]
    _result: Any = None
    _error: Exception | None = None

    def run(self, now: float) -> None:
        """Carry it out, to be answered later; what goes wrong goes wrong for the engine as well."""
        try:
            self._result = self.run_at(now)
        except RequestError as refusal:  # what was asked for cannot be: nothing was changed
            self._error = refusal
        except Exception as error:
            self._error = error
            raise

    def answer(self, death: Exception | None = None) -> None:
        """Say what came of it; `death` stands for what is lost with the engine."""
        error = self._error or death
        if error is None:
            self.future.set_result(self._result)
        else:
            self.future.set_exception(error)


class Loop:
    """Runs steps until stopped. An unexpected error ends every request with an error, never in silence."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        tokenizer: Tokenizer,
        eos_ids: frozenset[Token],
        sessions: Sessions,
        clock: Clock,
        publish: Callable[[int, bool], None],
    ) -> None:
        """`publish(n, asked)` is called from the thread after every change, with how many arrivals were taken in since,
        and whether commands were carried out, whose every trace it must show."""
        self._scheduler = scheduler
        self._runner = runner
        self._tokenizer = tokenizer
        self._eos_ids = eos_ids
        self._sessions = sessions
        self._clock = clock
        self._publish = publish
        self._arrivals: deque[Handle] = deque()
        self._commands: deque[_Command] = deque()
        self._asked: list[_Command] = []
        """Commands taken in and not answered yet: none of them can be cancelled any more."""
        self._work = threading.Condition()
        self._stopping = False
        self._live: dict[str, _Live] = {}
        self._outbox = Outbox(lambda handle: self.cancel(handle.request.id))
        self._checked = False
        self.death: str | None = None
        """What ended the thread, when it was not `stop`."""
        self.busy_since: float | None = None
        """When the step under way began."""
        self._thread = threading.Thread(target=self._main, name="tenure-engine", daemon=True)

    # --- any thread --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._outbox.start()
        self._thread.start()

    def stop(self) -> None:
        """End every request, then the thread."""
        with self._work:
            self._stopping = True
            self._work.notify()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    @property
    def idle(self) -> bool:
        """True when no request is alive and all news have been handed over."""
        return not self._live and not self._arrivals and self._outbox.empty

    def submit(self, handle: Handle) -> None:
        with self._work:
            self._refuse_when_over()
            name = handle.request.id
            if name in self._live or any(other.request.id == name for other in self._arrivals):
                raise InvalidRequest(f"a request with the id {name!r} is alive", param="request_id")
            self._arrivals.append(handle)
            self._work.notify()

    def call(self, command: Callable[[float], T]) -> Future[T]:
        """Have `command(now)` run on the thread before the next step; the future holds what it returned, once what it
        changed is published."""
        future: Future[T] = Future()
        with self._work:
            self._refuse_when_over()
            self._commands.append(_Command(command, future))
            self._work.notify()
        return future

    def cancel(self, request_id: str) -> None:
        """Cancel a request, if it is still alive."""
        if self.death is None and not self._stopping:
            self.call(lambda now: self.tell(self._scheduler.cancel(request_id, now)))

    def end_all(self) -> Future[None]:
        """End every request with what it has so far, its readers told."""
        return self.call(lambda now: self.tell(self._scheduler.end_all("shutdown", now)))

    def _refuse_when_over(self) -> None:
        if self.death is not None:
            raise EngineDead(f"the engine stopped: {self.death}")
        if self._stopping:
            raise EngineDead("the engine is closed")

    # --- the thread --------------------------------------------------------------------------------------------------

    def _main(self) -> None:
        try:
            while not self._stopping:
                self._turn()
            arrivals = self._take_in(self._clock.now())
            self.tell(self._scheduler.end_all("shutdown", self._clock.now()))
            self._hand_out(arrivals)
        except BaseException as error:  # noqa: BLE001 (whatever it is, nobody may be left waiting: logged and told)
            self._die(error)
        self._outbox.stop()

    def _turn(self) -> None:
        """Take in what came, choose a step, send off the news of the one before, compute; or wait for work."""
        now = self._clock.now()
        arrivals = self._take_in(now)
        plan = self._scheduler.next_step(now)
        step = None if plan is None else self._runner.prepare(plan)
        self._hand_out(arrivals)
        if plan is None or step is None:
            if not self._scheduler.idle:
                raise Corrupt("requests are alive, but the scheduler finds nothing to run")
            self._rest()
            return
        self._checked = False
        self.busy_since = now
        result = self._read(plan, self._runner.compute(step))
        self.tell(self._scheduler.absorb(result, self._clock.now()))
        self.busy_since = None

    def _take_in(self, now: float) -> int:
        """Arrivals into the scheduler, then commands carried out; the number of arrivals."""
        if not self._arrivals and not self._commands:
            return 0
        with self._work:
            arrivals = list(self._arrivals)
            self._live.update({handle.request.id: self._new_live(handle) for handle in arrivals})
            self._arrivals.clear()
            self._asked = self._wanted()
        for handle in arrivals:
            if handle.shapes:
                self._runner.shapes.add(handle.request.id, handle.shapes)
            if handle.request.sampling.prompt_logprobs is not None:
                self._runner.prompts.add(handle.request.id, handle.request.tokens)
            self._scheduler.add(handle.request, handle.arrived)
        for command in self._asked:
            command.run(now)
        return len(arrivals)

    def _wanted(self) -> list[_Command]:
        """The commands that came and whose callers still wait; from now on they cannot leave. Under the lock."""
        commands = [command for command in self._commands if command.future.set_running_or_notify_cancel()]
        self._commands.clear()
        return commands

    def _hand_out(self, arrivals: int) -> None:
        """Publish the state, then let go of what tells of it: news, and the answers to commands."""
        self._publish(arrivals, bool(self._asked))
        self._outbox.flush()
        for command in self._asked:
            command.answer()
        self._asked.clear()

    def _new_live(self, handle: Handle) -> _Live:
        request = handle.request
        return _Live(
            handle,
            [
                TextStream(self._tokenizer.stream(marks=request.sampling.marks), request.sampling, self._eos_ids)
                for _ in range(request.n)
            ],
            [[] for _ in range(request.n)],
            [[] for _ in range(request.n)],
            [[] for _ in range(request.n)],
        )

    def _read(self, plan: StepPlan, computed: Computed) -> StepResult:
        """Turn tokens into text, and see whose newest token completed a stop."""
        stopped = set()
        for rows in plan.rows:
            token = computed.tokens.get(rows.seq)
            if token is not None and self._live[rows.request].streams[rows.index].push(token):
                stopped.add(rows.seq)
            if rows.seq in computed.told:
                self._live[rows.request].told[rows.index].append(computed.told[rows.seq])
        return StepResult(plan.number, computed.tokens, frozenset(stopped), computed.failed, computed.step_ms)

    def tell(self, news: list[News] | list[Done]) -> None:
        """Put the scheduler's news into the outbox, as pieces of text. On the thread alone."""
        for item in news:
            live = self._live[item.request]
            if isinstance(item, Done):
                del self._live[item.request]
                self._runner.shapes.drop(item.request)
                self._runner.prompts.drop(item.request)
                self._remember(live)
                self._outbox.add(live.handle, item)
            elif item.finish is None:
                if live.streams[item.index].has_text or item.forgotten is not None:
                    self._say(live, item)
            else:
                live.streams[item.index].end()
                if item.finish in (Finish.STOP, Finish.LENGTH):
                    self._say(live, item)

    def _say(self, live: _Live, delta: Delta) -> None:
        stream = live.streams[delta.index]
        text, tokens = stream.take()
        stopped_by = stream.stopped_by if delta.finish is Finish.STOP else None
        if live.handle.request.session_id is not None:
            live.said[delta.index].append(text)
            live.ids[delta.index].extend(tokens)
        told = tuple(live.told[delta.index])
        live.told[delta.index].clear()
        prompt = self._runner.prompts.take(delta.request)
        ends = (delta.finish, delta.limit_cause, stopped_by)
        self._outbox.add(live.handle, Piece(delta.index, text, tokens, *ends, told, prompt, delta.forgotten))

    def _remember(self, live: _Live) -> None:
        request = live.handle.request
        if request.session_id is None:
            return
        for said, ids in zip(live.said, live.ids, strict=True):
            self._sessions.remember(request.session_id, request.scope, "".join(said), ids)

    def _rest(self) -> None:
        """Sleep until there is work; after a while of silence see once that every invariant holds."""
        with self._work:
            if self._arrivals or self._commands or self._stopping:
                return
            due = self._scheduler.pins.due - self._clock.now()  # a pin that ends is told in time, work or no work
            patience = due if self._checked else min(due, IDLE_CHECK_S)
            if self._work.wait(None if patience == float("inf") else max(0.0, patience)) or self._checked:
                return
        self._scheduler.cache.check()
        self._checked = True

    def _die(self, error: BaseException) -> None:
        """Tell everyone. Whoever arrives from now on is refused."""
        log.critical("the engine stopped on an unexpected error", exc_info=error)
        with self._work:
            self.death = death = f"{type(error).__name__}: {error}"
            self._live.update({handle.request.id: self._new_live(handle) for handle in self._arrivals})
            self._asked += self._wanted()
            self._arrivals.clear()
        for command in self._asked:
            command.answer(EngineDead(f"the engine stopped: {death}"))
        self._asked.clear()
        now = self._clock.now()
        for done in self._scheduler.abandon(death, now):
            self._outbox.add(self._live.pop(done.request).handle, done)
        for live in self._live.values():  # the scheduler never heard of these
            self._outbox.add(
                live.handle, stillborn(live.handle.request, death, now, self._scheduler.limits.context_limit)
            )
        self._live.clear()
