"""Nothing in silence: under random pressure every token computed twice, every pause and every token let go is told
once, and facts, receipts and metrics tell the same."""

from __future__ import annotations

import random

import pytest
from tests.sched.fake import Setup, World

from tenure.events import RequestStarted, SequencePaused, SequenceResumed, SequenceSlid, SiblingStarted
from tenure.spec import ArenaLayout
from tenure.summary import Summary
from tenure.types import Done, Miss, Receipt

SIZE = 4
SYSTEM = list(range(1, 13))


class Talk:
    """A client that takes up its conversation again and again, at times from an earlier point."""

    def __init__(self, number: int, chance: random.Random) -> None:
        self.number = number
        self.chance = chance
        self.turn = 0
        self.tokens = [*SYSTEM, 100 + number]
        self.asked = ""

    def ask(self, world: World, *, slide: bool) -> None:
        chance = self.chance
        if self.turn and chance.random() < 0.2:
            self.tokens = self.tokens[: chance.randrange(len(SYSTEM) + 1, len(self.tokens) + 1)]
        if len(self.tokens) > (34 if slide else 60):
            self.tokens = [*SYSTEM, 100 + self.number]
        self.tokens += [
            1000 + 100 * self.number + self.turn,
            *(chance.randrange(5) for _ in range(chance.randrange(6))),
        ]
        self.asked = f"c{self.number}t{self.turn}"
        self.turn += 1
        overflow = "slide" if slide else "refuse"
        world.ask(
            self.asked, self.tokens, chance.randrange(1, 24), overflow=overflow, session_id=f"c{self.number}",
            n=chance.choice((1, 1, 1, 2, 3)),
        )  # fmt: skip

    def goes_on(self, world: World) -> bool:
        """Whether its last request has ended; then it takes in the answer."""
        if not self.asked:
            return True
        if not any(isinstance(item, Done) and item.request == self.asked for item in world.news):
            return False
        if not world.receipt(self.asked).forgotten:
            self.tokens += world.text(self.asked)
        return True


def staged(blocks: int) -> ArenaLayout:
    """An arena for so many blocks that are stored in 8 bits; the open ones are staged in twice the room."""
    return ArenaLayout.cut(blocks, ("int8", "bf16"), (1, 2), staged=True, size=SIZE, slab=2)


def play(seed: int, pressure: str, *, wild: bool, codec: str = "bf16") -> tuple[World, list[Receipt], Summary]:
    """Eight clients against a pool for a few of them. `wild`: some requests are cancelled, some slide."""
    chance = random.Random(seed)
    layout = None if codec == "bf16" else staged(chance.randrange(24, 44))
    setup = Setup(pressure, chance.choice(("lru", "gittins")), codec=codec, layout=layout)
    world = World(chance.randrange(20, 40), SIZE, seqs=6, batch=40, context=48 if wild else 72, setup=setup)
    sums = Summary()
    world.log.listen(sums.absorb)
    talks = [Talk(number, chance) for number in range(8)]
    for _ in range(400):
        talk = chance.choice(talks)
        if talk.goes_on(world):
            talk.ask(world, slide=wild)
        elif wild and chance.random() < 0.05:
            world.news += world.scheduler.cancel(talk.asked, world.clock.now())
        world.step()
    world.run()
    return world, [item.receipt for item in world.news if isinstance(item, Done)], sums


FEW = [pytest.param(seed, marks=pytest.mark.full if seed > 1 else ()) for seed in range(16)]


@pytest.mark.parametrize("seed", FEW)
@pytest.mark.parametrize("pressure", ["pause@90%", "pause"])
@pytest.mark.parametrize("codec", ["bf16", "int8"])
def test_every_token_computed_twice_is_in_one_receipt(seed: int, pressure: str, codec: str) -> None:
    world, receipts, sums = play(seed, pressure, wild=False, codec=codec)
    twice = sum(times - 1 for times in world.device.computed.values())
    twice -= len(world.of(SiblingStarted))  # each computes the prompt's last token, for its own logits
    assert sum(receipt.recomputed_tokens for receipt in receipts) == twice > 50
    reconcile(world, receipts, sums)
    assert sums.paused > 3


@pytest.mark.parametrize("seed", FEW)
def test_facts_receipts_and_sums_agree(seed: int) -> None:
    world, receipts, sums = play(100 + seed, "pause@90%", wild=True)
    reconcile(world, receipts, sums)
    assert sums.finished["cancelled"] > 0 and sums.forgotten["slide"] > 0


def test_what_siblings_compute_again_is_told_and_counted() -> None:
    """Heads of quantised blocks are not reused: each of the n computes those tokens of the prompt for itself."""
    world = World(64, SIZE, setup=Setup(codec="int8"))
    sums = Summary()
    world.log.listen(sums.absorb)
    world.ask("a", range(11), 5, n=3)
    world.run()
    assert [fact.recomputed_tokens for fact in world.of(SiblingStarted)] == [2, 2]  # type: ignore[attr-defined]
    assert world.receipt("a").recomputed_tokens == sums.recomputed["sibling"] == sums.recomputed.total() == 4
    assert sum(times - 1 for times in world.device.computed.values()) == 4 + 2


def test_a_prompt_that_ends_inside_a_block_of_8_bits_is_told_why_it_is_computed_again() -> None:
    """While the block is staged its head is reused; once it is full it serves whole or not at all."""
    world = World(64, SIZE, setup=Setup(codec="int8", layout=staged(60)))
    sums = Summary()
    world.log.listen(sums.absorb)
    for name in ("first", "full"):
        world.ask(name, range(11), 12)
        world.run()
    receipt = world.receipt("full")
    assert receipt.miss == Miss("below_minimum", 8)
    assert (receipt.cached_tokens, receipt.computed_tokens, receipt.recomputed_tokens) == (8, 3, 2)
    world.ask("shorter", range(7), 1)
    world.ask("edited", [*range(7), 99, 98], 1, session_id="s")
    world.ask("elsewhere", [0, 1, 77, 78, 79, 80], 1)
    world.run()
    assert world.receipt("shorter").miss == Miss("below_minimum", 4)
    assert world.receipt("edited").miss == Miss("cold", 7), "where it differs says more"
    assert world.receipt("elsewhere").miss == Miss("cold", 2)
    assert +sums.recomputed == {"below_minimum": 2 + 2 + 3 + 2}
    assert sums.misses == {"cold": 3, "below_minimum": 2}


def reconcile(world: World, receipts: list[Receipt], sums: Summary) -> None:
    """Facts, receipts and sums tell the same."""
    recomputed = sum(receipt.recomputed_tokens for receipt in receipts)
    facts = [*world.of(RequestStarted), *world.of(SequenceResumed), *world.of(SiblingStarted)]
    assert recomputed == sum(fact.recomputed_tokens for fact in facts)  # type: ignore[attr-defined]
    assert recomputed == sums.recomputed.total()
    assert sum(receipt.preempted for receipt in receipts) == len(world.of(SequencePaused)) == sums.paused
    gone = sum(item.end - item.start for receipt in receipts for item in receipt.forgotten)
    assert gone == sum(fact.end - fact.start for fact in world.of(SequenceSlid))  # type: ignore[attr-defined]
    assert gone == sums.forgotten.total()
    assert sum(receipt.cached_tokens for receipt in receipts) == sums.cached_tokens == sums.prefix_hits
    assert all(receipt.prompt_tokens == receipt.cached_tokens + receipt.computed_tokens for receipt in receipts)
    misses = [receipt.miss.reason for receipt in receipts if receipt.miss is not None]
    assert len(misses) == sums.misses.total()
    assert "unknown" not in misses
