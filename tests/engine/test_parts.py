"""Batches, sessions, handles and the memory plan, each alone."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from tests.engine.harness import MIB, model

from tenure.device.ops import Places
from tenure.engine.batch import Batcher
from tenure.engine.handle import Handle, Outbox
from tenure.engine.sessions import Sessions
from tenure.engine.settings import EngineSettings, context_limit, plan_memory
from tenure.errors import BudgetError, ConfigError
from tenure.spec import ArenaLayout, ModelShape
from tenure.types import BlockId, Done, Piece, Request, Rows, Sampling, Scope, SeqId, StepPlan

SCOPE = Scope("f")
SHAPE = ModelShape(layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=128, vocab=100, context_length=512)


def rows(seq: int, start: int, tokens: list[int], blocks: tuple[int, ...], sample: bool) -> Rows:
    return Rows(SeqId(seq), f"r{seq}", 0, start, tokens, (tuple(map(BlockId, blocks)),), sample, 0, Sampling())


def places(block_bytes: int, codec: str) -> Places:
    return Places(ArenaLayout.cut(4000 * block_bytes, (codec,), (block_bytes,), staged=False))


def test_a_batch_is_the_plan_laid_flat() -> None:
    batcher = Batcher(places(1000, "f32"))
    first = rows(1, 33, [7], (4, 2), True)
    plan = StepPlan(0, (), (first, rows(2, 0, [5, 6, 7], (9,), False), rows(3, 64, [1, 2], (3, 4, 5), True)))
    batch = batcher.build(plan)
    assert batch.tokens.tolist() == [7, 5, 6, 7, 1, 2]
    assert batch.seq_rows.tolist() == [0, 1, 4, 6]
    assert batch.first_pos.tolist() == [33, 0, 64]
    ((starts, first_block, offsets, codecs, encode_to, _),) = batch.tables
    assert starts.tolist() == [0, 2, 3, 6] and first_block.tolist() == [0, 0, 0]
    assert offsets.tolist() == [4000, 2000, 9000, 3000, 4000, 5000]
    assert codecs.tolist() == [1] * 6 and encode_to.tolist() == [-1] * 6
    assert batch.logit_rows.tolist() == [0, 5]
    assert [row.seq for row in batch.sampled] == [1, 3]
    assert batch.tokens.dtype == np.int32 and offsets.dtype == np.int64
    # The next step: a table that changed is built anew, one that did not is kept.
    again = batcher.build(StepPlan(1, (), (rows(3, 66, [8], (3, 4, 6), True), first)))
    assert again.tables[0][2].tolist() == [3000, 4000, 6000, 4000, 2000]


def staged(start: int, count: int, blocks: tuple[int, ...]) -> tuple[list[int], ...]:
    """Table columns of one sequence staged in block 40: int8 blocks of 10 bytes, staged ones of 20, slabs of 40."""
    layout = ArenaLayout(("int8", "bf16"), (10, 20), 10, 40, staged=True, slots=(4, 2), first=(0, 40))
    row = replace(rows(1, start, [1] * count, blocks, True), open=BlockId(40))
    ((_, _, *columns),) = Batcher(Places(layout)).build(StepPlan(0, (), (row,))).tables
    return tuple(column.tolist() for column in columns)


def test_blocks_that_become_full_are_encoded() -> None:
    # Three whole blocks and one begun: the whole ones need no place to be staged.
    assert staged(0, 100, (1, 2, 5)) == ([-1, -1, -1, 0], [0] * 4, [10, 20, 50, -1], [2, 2, 2, 0])
    assert staged(100, 1, (1, 2, 5)) == ([10, 20, 50, 0], [2, 2, 2, 0], [-1] * 4, [2, 2, 2, 0])
    # Begun before, full now.
    assert staged(127, 1, (1, 2, 5, 6)) == ([10, 20, 50, 0], [2, 2, 2, 0], [-1, -1, -1, 60], [2] * 4)
    # Block 41 lies behind block 40 in the first slab.
    assert Places(ArenaLayout(("int8", "bf16"), (10, 20), 10, 40, True, (4, 2), (0, 40))).offsets(
        [BlockId(41), BlockId(42), BlockId(4)]
    ).tolist() == [20, 40, 40]


def test_many_blocks() -> None:
    batch = Batcher(places(10, "bf16")).build(StepPlan(0, (), (rows(1, 0, [1], tuple(range(3000)), True),)))
    assert all(len(batch.tables[0][column]) == 3000 for column in (2, 3, 4, 5))


def test_sessions_splice_what_was_said() -> None:
    tokenizer = model().tokenizer
    sessions = Sessions(tokenizer)
    hello, again = tokenizer.encode("Hello there"), tokenizer.encode("Hello again")
    eos = next(iter(tokenizer.eos_ids))
    sessions.remember("s", SCOPE, "Hello there", [*hello, eos])
    sessions.remember("s", SCOPE, "Hello ag", again)  # cut by a stop string inside a token
    sessions.remember("s", SCOPE, "Hello there", hello)
    chat = [
        {"role": "user", "content": "Hello there"},
        {"role": "assistant", "content": "Hello there"},
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "Hello again"},
        {"role": "assistant", "content": "Hello there"},
    ]
    assert sessions.turns("s", SCOPE, chat) == {1: (*hello, eos), 4: tuple(hello)}
    assert sessions.turns("other", SCOPE, chat) == {}
    assert sessions.turns("s", Scope("other"), chat) == {}


def test_sessions_drop_what_a_stop_string_cut_off() -> None:
    tokenizer = model().tokenizer
    sessions = Sessions(tokenizer)
    ids = tokenizer.encode("One two three")
    sessions.remember("s", SCOPE, "One two", ids)
    assert sessions.turns("s", SCOPE, [{"role": "assistant", "content": "One two"}]) == {0: tuple(ids[:-1])}


def test_sessions_are_bounded() -> None:
    tokenizer = model().tokenizer
    sessions = Sessions(tokenizer, max_tokens=50)
    ids = tokenizer.encode("one two three four five six seven eight nine ten")
    text = tokenizer.decode(ids)
    for i in range(20):
        sessions.remember(f"s{i}", SCOPE, text, ids)
    chat = [{"role": "assistant", "content": text}]
    known = [i for i in range(20) if sessions.turns(f"s{i}", SCOPE, chat)]
    assert known == list(range(20 - 50 // len(ids), 20))


def test_news_reach_their_loop_once_a_step() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        cancelled: list[str] = []
        handles = [Handle(Request(name, (1,), SCOPE), 0.0, cancelled.append, loop) for name in "ab"]
        outbox = Outbox(lambda handle: None)
        outbox.start()
        for handle in handles:
            outbox.add(handle, Piece(0, handle.request.id, ()))
        wakeups: list[object] = []
        outbox.add(handles[0], done("a"))
        original = loop.call_soon_threadsafe
        loop.call_soon_threadsafe = lambda *args: wakeups.append(args) or original(*args)  # type: ignore
        outbox.flush()
        items = [item async for item in handles[0]]
        assert [type(item) for item in items] == [Piece, Done]
        assert len(wakeups) == 1
        reader = aiter(handles[1])
        assert (await anext(reader)) == Piece(0, "b", ())
        await reader.aclose()  # type: ignore[attr-defined]
        assert cancelled == ["b"]
        with pytest.raises(RuntimeError, match="async for"):
            next(iter(handles[1]))
        outbox.stop()

    asyncio.run(main())


def test_a_closed_loop_is_told() -> None:
    loop = asyncio.new_event_loop()
    loop.close()
    lost: list[Handle] = []
    outbox = Outbox(lost.append)
    outbox.start()
    handle = Handle(Request("a", (1,), SCOPE), 0.0, lambda name: None, loop)
    outbox.add(handle, Piece(0, "x", ()))
    outbox.add(handle, Piece(0, "y", ()))
    outbox.stop()
    assert lost == [handle]


def done(name: str) -> Done:
    from tenure.sched.sequence import stillborn

    return stillborn(Request(name, (1, 2), SCOPE), "gone", 0.0, 8)


def test_the_memory_plan_adds_up() -> None:
    block = 2 * 2 * 16 * 32 * 4
    budget = plan_memory(EngineSettings(memory_bytes=10 * MIB), SHAPE, MIB)
    assert budget.block_bytes == block
    assert budget.blocks == 9 * MIB // block
    assert budget.total_bytes == MIB + budget.arena_bytes <= 10 * MIB
    assert plan_memory(EngineSettings(kv_cache_bytes=5 * block + 1), SHAPE, MIB).blocks == 5
    assert plan_memory(EngineSettings(kv_cache_bytes=8 * block, kv_codec="f32"), SHAPE, MIB).blocks == 4
    assert plan_memory(EngineSettings(), SHAPE, MIB).total_bytes <= 2 << 30


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"memory_bytes": MIB}, "2 blocks"),
        ({"kv_cache_bytes": 100}, "2 blocks"),
        ({"memory_bytes": 1 << 50}, "this machine has"),
        ({"kv_cache_bytes": 1 << 50}, "this machine has"),
    ],
)
def test_impossible_budgets(fields: dict[str, int], message: str) -> None:
    with pytest.raises(BudgetError, match=message):
        plan_memory(EngineSettings(**fields), SHAPE, MIB)  # type: ignore[arg-type]


def test_impossible_settings() -> None:
    with pytest.raises(ConfigError, match="not both"):
        plan_memory(EngineSettings(memory_bytes=1, kv_cache_bytes=1), SHAPE, MIB)
    with pytest.raises(ConfigError, match=r"2\.\.512"):
        context_limit(EngineSettings(max_model_len=513), SHAPE)
    assert context_limit(EngineSettings(max_model_len=64), SHAPE) == 64
    assert context_limit(EngineSettings(), SHAPE) == 512
