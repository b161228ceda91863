"""Recoding under pressure by the scheduler: for who grows and for who comes, and what is told of it."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
from tests.sched.fake import SCOPE, Setup, World, answer

from tenure.events import BlockGone, RequestStarted, SequencePaused, SiblingStarted
from tenure.sched.desk import Desk
from tenure.spec import ArenaLayout
from tenure.summary import Summary
from tenure.types import Done, Fate, RecodeOp

SIZE = 4
LAYOUT = replace(ArenaLayout.cut(8, ("bf16", "int8"), (2, 1), staged=False), slabs=12, first=(0, 48))
"""Twelve slabs of four blocks, or of twice as many recoded ones."""


def world(pressure: str, **fields: Any) -> World:
    return World(0, SIZE, seqs=32, batch=10_000, context=400, setup=Setup(pressure, layout=LAYOUT), **fields)


def alone(tokens: list[int], count: int) -> list[int]:
    context = list(tokens)
    for _ in range(count):
        context.append(answer(context, 0))
    return context[len(tokens) :]


def prompt(number: int, tokens: int = 32) -> list[int]:
    return list(range(1000 * number, 1000 * number + tokens))


def arrive(pressure: str) -> tuple[World, int]:
    """Eight conversations of about nine blocks each come one after the other; how many run together at most."""
    made = world(pressure)
    most = 0
    for number in range(8):
        made.ask(f"r{number}", prompt(number), 40)
        for _ in range(2):
            made.step()
            most = max(most, made.scheduler.running)
    while made.step():
        most = max(most, made.scheduler.running)
    for number in range(8):
        assert made.text(f"r{number}") == alone(prompt(number), 40)
    return made, most


def test_a_newcomer_is_let_in_by_recoding_others() -> None:
    """The same arrivals: queued without a step that recodes, let in with one; every row reads what it should."""
    plain, few = arrive("pause@97%")
    recoded, many = arrive("recode:int8@80%, pause@97%")
    assert few == 4 and many >= 6
    queued = [sum(f.queue_s > 0 for f in made.of(RequestStarted)) for made in (plain, recoded)]  # type: ignore[attr-defined]
    assert queued[1] < queued[0] == 3
    assert any(isinstance(op, RecodeOp) for made in recoded.plans for op in made.copies)
    gone = [fact for fact in recoded.of(BlockGone) if fact.fate is Fate.RECODED]  # type: ignore[attr-defined]
    assert gone and all(fact.by == "recode:int8@80%, pause@97%" for fact in gone)  # type: ignore[attr-defined]
    assert len(recoded.of(SequencePaused)) < len(plain.of(SequencePaused))


def test_nobody_is_recoded_for_who_fits_anyway() -> None:
    made = world("recode:int8@80%, pause@97%")
    for number in range(4):  # 36 of 48 blocks
        made.ask(f"r{number}", prompt(number), 2)
    made.run()
    assert not made.of(BlockGone)


def recode_one() -> World:
    """A conversation whose first blocks were recoded, for who came after it; all have ended."""
    made = world("recode:int8@40%, pause@97%")
    made.ask("old", prompt(0), 20)
    for _ in range(4):
        made.step()
    made.ask("new", prompt(1, 60), 8)
    made.run()
    assert "int8" in made.receipt("old").codec
    return made


def test_a_conversation_shows_its_bytes_by_codec() -> None:
    made = recode_one()
    old = Desk(made.scheduler, made.history, made.log).inspect(None, "old", 9.0).bytes
    assert old["int8"] == 8 and old["bf16"] == 2 * 5, "eight of thirteen blocks, at one byte each, and the rest at two"


@pytest.mark.parametrize("conversations", [8, 32])
@pytest.mark.parametrize("squeeze", [1.5, 3, 10])
def test_squeezed_by_the_whole_ladder(conversations: int, squeeze: float) -> None:
    """As under pauses alone: all answers are those of solo runs, as far as a model knows that looks at tokens only."""
    slabs = max(8, int(conversations * 18 / 4 / squeeze))
    layout = replace(LAYOUT, slabs=slabs, first=(0, 4 * slabs))
    setup = Setup("recode:int8@60%, pause@90%", layout=layout)
    made = World(0, SIZE, seqs=32, batch=256, context=400, queue=64, setup=setup)
    for number in range(conversations):
        made.ask(f"r{number}", prompt(number), 40)
    made.run(20_000)
    for number in range(conversations):
        assert made.text(f"r{number}") == alone(prompt(number), 40)
    receipts = [made.receipt(f"r{number}") for number in range(conversations)]
    assert sum(receipt.preempted for receipt in receipts) == len(made.of(SequencePaused))
    assert any("int8" in receipt.codec for receipt in receipts)


def test_what_is_recoded_is_a_miss_of_its_own_for_who_wants_it_exact() -> None:
    made = recode_one()
    sums = Summary()
    made.log.listen(sums.absorb)
    tokens = [*prompt(0), *made.text("old"), 7]
    made.ask("exact", tokens, 2, exact=True)
    made.run()
    receipt = made.receipt("exact")
    assert receipt.miss is not None and receipt.miss.reason == "recoded"
    assert receipt.miss.at_token == receipt.cached_tokens < 32
    assert receipt.recomputed_tokens == len(tokens) - 2 - receipt.cached_tokens
    assert sums.recomputed == {"recoded": receipt.recomputed_tokens}
    assert made.text("exact") == alone(tokens, 2)
    made.ask("any", tokens, 2)
    made.run()
    assert made.receipt("any").miss is None


def test_the_head_of_a_recoded_block_does_not_serve_either() -> None:
    made = recode_one()
    made.ask("head", [*prompt(0, 6), 7], 2)
    made.run()
    receipt = made.receipt("head")
    assert receipt.miss is not None and receipt.cached_tokens == 4
    assert (receipt.miss.reason, receipt.recomputed_tokens) == ("recoded", 2)


def test_what_was_recoded_and_then_evicted_is_counted_whole() -> None:
    made = recode_one()
    tokens = [*prompt(0), *made.text("old"), 7]
    held = made.cache.match(SCOPE, tokens).tokens
    made.cache.drop_unleased(made.clock.now())
    made.ask("again", tokens, 2)
    made.run()
    receipt = made.receipt("again")
    assert receipt.miss is not None and (receipt.miss.reason, receipt.miss.by) == ("evicted", "operator")
    assert (receipt.cached_tokens, receipt.recomputed_tokens) == (0, held)


@pytest.mark.parametrize("seed", range(4))
def test_facts_receipts_and_sums_agree_under_recoding(seed: int) -> None:
    chance, made, sums = Random(seed), world("recode:int8@50%, pause@90%"), Summary()
    made.log.listen(sums.absorb)
    for number in range(40):
        talk = chance.randrange(6)
        tokens = [*prompt(talk, 4 * chance.randrange(5, 15)), 10**6 + number]
        exact, n = chance.random() < 0.2, chance.choice((1, 1, 2))
        made.ask(f"r{number}", tokens, chance.randrange(1, 30), exact=exact, n=n)
        for _ in range(chance.randrange(6)):
            made.step()
    made.run()
    receipts = [item.receipt for item in made.news if isinstance(item, Done)]
    twice = sum(times - 1 for times in made.device.computed.values()) - len(made.of(SiblingStarted))
    assert sum(receipt.recomputed_tokens for receipt in receipts) == sums.recomputed.total() == twice > 0
    assert sums.misses["recoded"] > 0 and sums.misses["unknown"] == 0
