"""The thread team: every item once, whoever comes late; exceptions; misuse."""

from __future__ import annotations

import os
import threading
import time

import pytest

from tenure import _native


@pytest.mark.parametrize(("threads", "regions"), [(1, 3000), (2, 20000), (3, 5000), (9, 1500)])
def test_every_item_runs_once_and_no_worker_enters_a_finished_region(threads: int, regions: int) -> None:
    """Closures live on the stack of one region: a late worker that touched one would corrupt the counts."""
    _native.exercise_team(threads, regions)


def test_several_teams_at_once_on_few_cores() -> None:
    failures: list[BaseException] = []

    def exercise() -> None:
        try:
            _native.exercise_team(3, 1500)
        except RuntimeError as error:
            failures.append(error)

    callers = [threading.Thread(target=exercise) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert failures == []


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_an_exception_of_an_item_reaches_the_caller(threads: int) -> None:
    with pytest.raises(ValueError, match="item failed as asked"):
        _native.exercise_team(threads, 50, fail_at=36)


def test_after_an_exception_the_team_works_on() -> None:
    _native.exercise_team(2, 50, fail_at=-1)
    with pytest.raises(ValueError, match="item failed as asked"):
        _native.exercise_team(2, 200, fail_at=150)


def test_a_nested_region_is_refused() -> None:
    with pytest.raises(RuntimeError, match="nested or concurrent"):
        _native.exercise_nesting(2)


def test_cores_are_those_this_process_may_use() -> None:
    assert _native.cores() == len(os.sched_getaffinity(0))


def test_idle_workers_burn_no_cpu() -> None:
    import numpy as np

    layer = _native.Linear("f32", np.zeros((64, 32), np.float32))
    layer.forward(np.zeros((64, 32), np.float32), threads=4)  # wakes the team; it stays alive with the layer
    time.sleep(0.02)
    before = time.process_time()
    time.sleep(0.2)
    assert time.process_time() - before < 0.02
