"""Queue order, cost model and row budget, each alone."""

from __future__ import annotations

import pytest

from tenure.sched.fair import PATIENCE_S, WaitingQueue, order
from tenure.sched.outlook import Outlook
from tenure.sched.sequence import Job, Sequence
from tenure.sched.step import TOLD_ROWS, CostModel, RowBudget
from tenure.spec import LayerGroup
from tenure.types import Request, Scope, SeqId


def waiting(number: int, arrived: float, priority: int = 0, tokens: int = 3) -> Sequence:
    request = Request(f"r{number}", tuple(range(tokens)), Scope("f"), priority=priority)
    job = Job(request, arrived, order(arrived, priority), 1, False)
    return Sequence(SeqId(number), job, 0, list(request.tokens))


def test_queue_is_ordered_by_arrival_and_priority() -> None:
    queue = WaitingQueue()
    seqs = [waiting(0, 0.0), waiting(1, 1.0, priority=-1), waiting(2, 2.0), waiting(3, PATIENCE_S + 1, priority=-1)]
    for seq in reversed(seqs):
        queue.add(seq)
    assert [int(seq.id) for seq in queue] == [1, 0, 3, 2]
    assert (len(queue), queue.new, queue.new_tokens) == (4, 4, 12)
    queue.remove(seqs[0])
    assert [int(seq.id) for seq in queue] == [1, 3, 2]
    assert (queue.new, queue.new_tokens) == (3, 9)
    with pytest.raises(ValueError, match="not in the queue"):
        queue.remove(seqs[0])


def test_nobody_is_overtaken_for_good() -> None:
    worst = order(0.0, 10**9)
    assert worst == order(0.0, 100)
    assert order(2 * 100 * PATIENCE_S + 1, -(10**9)) > worst


def test_costs_are_learned() -> None:
    costs = CostModel(doubling=1000.0)
    true = lambda decode, prefill: 5.0 + 0.8 * decode + 0.3 * prefill  # noqa: E731
    for i in range(200):
        decode = 1 + i % 16
        costs.learn(decode, 0.0, true(decode, 0))
        costs.learn(decode, 256.0, true(decode, 256))
    assert costs.predict(1, 0) == pytest.approx(true(1, 0), rel=0.1)
    assert costs.predict(16, 0) == pytest.approx(true(16, 0), rel=0.05)
    assert costs.predict(8, 256) == pytest.approx(true(8, 256), rel=0.05)


def test_one_stolen_core_teaches_little() -> None:
    costs = CostModel()
    for _ in range(50):
        costs.learn(4.0, 0.0, 10.0)
        costs.learn(0.0, 100.0, 40.0)
    before = costs.predict(4, 100)
    costs.learn(4.0, 0.0, 5000.0)
    costs.learn(0.0, 100.0, 5000.0)
    assert costs.predict(4, 100) < 2 * before


def test_weights_grow_with_the_context() -> None:
    costs = CostModel(doubling=1000.0)
    assert costs.weight(0, 1) == pytest.approx(1.0, abs=1e-3)
    assert costs.weight(1000, 1) == pytest.approx(2.0, abs=1e-3)
    assert costs.weight(0, 100) == pytest.approx(sum(costs.weight(i, 1) for i in range(100)), rel=1e-3)


GROUPS = (LayerGroup(1), LayerGroup(4, 512), LayerGroup(3, 40))


@pytest.mark.parametrize("groups", [GROUPS, GROUPS[1:], GROUPS[:1]])
def test_a_row_costs_what_it_looks_back_at(groups: tuple[LayerGroup, ...]) -> None:
    """Its position, and in layers with a window no more than that."""
    costs = CostModel(doubling=1000.0, groups=groups)
    layers = sum(group.layers for group in groups)
    for position in (0, 39, 40, 300, 512, 9000):
        seen = sum(group.layers * min(position, group.window or position) for group in groups) / layers
        assert costs.weight(position) == pytest.approx(1 + seen / 1000, abs=1e-3)
    parts = costs.weight(0, 37) + costs.weight(37, 500) + costs.weight(537, 63)
    assert costs.weight(0, 600) == pytest.approx(parts) == pytest.approx(sum(map(costs.weight, range(600))))
    plain = CostModel(doubling=1000.0)
    assert plain.weight(123, 45) == pytest.approx(45 * (1 + (123 + 22.5) / 1000), rel=1e-12)
    assert (costs.weight(0, 600) < plain.weight(0, 600)) == any(group.window for group in groups)


def test_what_is_predicted_of_a_prompt_counts_windows() -> None:
    plain, windowed = (Outlook(CostModel(doubling=100.0, groups=groups), 4, 8) for groups in (GROUPS[:1], GROUPS))
    assert plain.prefill_s(0, 40) == windowed.prefill_s(0, 40)
    assert windowed.prefill_s(40, 4000) < 0.3 * plain.prefill_s(40, 4000)


@pytest.mark.parametrize(
    ("start", "wanted", "rows_left", "ms_left", "chunk"),
    [
        (0, 100, 64, float("inf"), 64),
        (0, 100, 70, float("inf"), 64),  # ends at a block's end
        (0, 70, 70, float("inf"), 70),  # unless it ends the prompt
        (5, 100, 70, float("inf"), 59),
        (0, 100, 7, float("inf"), 7),  # less than a block: as it comes
        (28, 100, 7, float("inf"), 4),
        (0, 100, 64, 0.0, 32),  # no time left, but a prefill always moves on
        (0, 10, 64, 0.0, 10),
        (0, 100, 64, 50.0, 32),
        (0, 0, 64, 50.0, 0),
    ],
)
def test_chunks(start: int, wanted: int, rows_left: int, ms_left: float, chunk: int) -> None:
    budget = RowBudget(CostModel(prefill=1.0, doubling=1e9), 32, rows_left, ms_left)
    assert budget.chunk(start, wanted) == chunk


def test_budget_is_shared_by_the_prefills_of_a_step() -> None:
    budget = RowBudget(CostModel(prefill=1.0, doubling=1e9), 32, 1000, 100.0)
    assert budget.chunk(0, 64) == 64
    assert budget.open
    assert budget.chunk(0, 500) == 32
    assert budget.chunk(0, 500) == 0
    assert budget.chunk(0, 3) == 3


def test_rows_whose_logits_are_told_are_few_in_each_step() -> None:
    budget = RowBudget(CostModel(), 32, 512, float("inf"))
    assert budget.chunk(0, 500, told=True) == TOLD_ROWS == 64
    assert budget.chunk(0, 500, told=True) == 0
    assert budget.chunk(0, 500) == 512 - TOLD_ROWS
    small = RowBudget(CostModel(), 32, 50, float("inf"))
    assert small.chunk(0, 500, told=True) == 32  # to a block's end, as any other
    assert small.chunk(32, 500, told=True) == 0
