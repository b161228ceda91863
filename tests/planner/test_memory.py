"""The planner's answer is the allocator's: to the byte, for every codec, with and without a shared prefix."""

from __future__ import annotations

from dataclasses import replace
from operator import mul
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.models.test_architectures import CASES, build
from tests.models.test_loader import save

from tenure import models
from tenure.engine.settings import EngineSettings, plan_memory
from tenure.errors import BudgetError, ConfigError
from tenure.models.anatomy import anatomy
from tenure.planner.anatomy import Anatomy, Kind, Matrix
from tenure.planner.memory import CODEC_NAMES, Room, Wish, most, plan
from tenure.spec import CODECS, KvGeometry, ModelShape

SHAPE = ModelShape(30, 576, 9, 3, 64, 1536, 49152, 8192)
GEOMETRY = KvGeometry.of(SHAPE)
SMALL = Anatomy("small", "x", 8192, (Kind("full", 30, GEOMETRY),), (Matrix(1024, 1024),), served=GEOMETRY)


@given(st.integers(1, 400), st.sampled_from(sorted(CODECS)), st.integers(0, 300), st.integers(1, 300))
@settings(deadline=None, max_examples=150)
def test_the_pool_is_the_allocators(mib: int, name: str, shared: int, more: int) -> None:
    room = Room(SMALL, name, mib << 20)
    try:
        budget = plan_memory(EngineSettings(kv_cache_bytes=mib << 20, kv_codec=name), SHAPE, 0)
    except BudgetError:
        assert room.conversations(shared + more) == 0
        return
    layout = budget.layout
    assert room.tokens() == budget.blocks * 32
    count = room.conversations(shared + more, shared)

    def slabs(conversations: int) -> int:
        """As the allocator fills them: a slab is of one kind, its last one part full."""
        length, common = shared + more, shared // 32
        if not layout.staged:
            return common + conversations * max(1, -(-length // 32) - common)
        stored = common + conversations * (length // 32 - common)
        return -(-stored // layout.slots[0]) + -(-conversations // layout.slots[1])

    most_slabs = layout.slabs if layout.staged else layout.blocks
    assert count == 0 or slabs(count) <= most_slabs
    assert slabs(count + 1) > most_slabs
    assert room.conversations(shared + more) == layout.conversations(shared + more)


WINDOWS: dict[str, tuple[int | None, ...]] = {
    "all": (512,) * 6, "turns": (512, None) * 3, "most": (*[96] * 5, None), "two": (33, 512, None, 33, 512, 33),
    "one token": (1, None, None, None, None, None),
}  # fmt: skip


def seen_blocks(window: int | None, count: int) -> int:
    """The most of a sequence's first `count` blocks that a row of the last of them sees, counted one by one."""
    rows = range(32 * (count - 1), 32 * count)
    return max((count - (max(0, row + 1 - window) if window else 0) // 32 for row in rows), default=0)


@given(st.integers(1, 64), st.sampled_from(sorted(CODECS)), st.sampled_from(sorted(WINDOWS)), st.integers(1, 2000),
       st.integers(0, 2000))  # fmt: skip
@settings(deadline=None, max_examples=100)
def test_windows_hold_what_is_seen(mib: int, name: str, windows: str, tokens: int, shared: int) -> None:
    """The plan of a model with windows is the allocator's too: a count of blocks by kind, slab by slab."""
    shape = ModelShape(6, 256, 4, 2, 64, 512, 1000, 8192, WINDOWS[windows])
    layer = KvGeometry(1, 2, 64)
    small = Anatomy("small", "x", 8192, (), (), served=KvGeometry.of(shape))
    room = Room(small, name, mib << 20)
    try:
        layout = plan_memory(EngineSettings(kv_cache_bytes=mib << 20, kv_codec=name), shape, 0).layout
    except BudgetError:
        assert room.layout is None
        assert room.conversations(tokens, shared) == 0
        return
    assert room.layout == layout
    staged = name not in ("bf16", "f32")
    blocks = tokens // 32 if staged else -(-tokens // 32)
    sizes = dict.fromkeys(sorted(WINDOWS[windows], key=lambda w: -(w or 1 << 30)))  # the widest view first
    needs = [seen_blocks(window, blocks) for window in sizes]
    each = [WINDOWS[windows].count(window) * layer.block_bytes(name) for window in sizes]
    assert room.bytes_of(tokens) == sum(map(mul, needs, each)) + staged * 6 * layer.block_bytes("bf16")
    common = [min(shared, tokens - 1) // 32 if need == blocks else 0 for need in needs]
    count = room.conversations(tokens, shared)

    def fits(conversations: int) -> bool:
        wanted = [once + conversations * (need - once) for need, once in zip(needs, common, strict=True)]
        wanted[1:1] = [conversations] if staged else []
        slabs = zip(wanted, layout.slots, layout.kept, strict=True)
        return sum(max(kept, -(-n // slots)) for n, slots, kept in slabs) <= layout.slabs

    assert layout.block_bytes == (each[0], *([6 * layer.block_bytes("bf16")] if staged else []), *each[1:])
    assert count == 0 or fits(count)
    assert not fits(count + 1)
    if tokens > 600 and windows != "one token":
        alone = KvGeometry.of(replace(shape, windows=())).layout(mib << 20, name)
        assert count >= alone.conversations(tokens)


@given(st.sampled_from(sorted(CODECS)), st.sampled_from(sorted(WINDOWS)), st.integers(0, 1 << 16))
@settings(deadline=None, max_examples=100)
def test_the_least_arena_serves(name: str, windows: str, more: int) -> None:
    geometry = KvGeometry.of(ModelShape(6, 256, 4, 2, 64, 512, 1000, 8192, WINDOWS[windows]))
    assert geometry.layout(geometry.least_arena(name) + more, name).blocks >= 2


@pytest.mark.parametrize("family", [name for name in CASES if " " not in name])
@pytest.mark.parametrize("weights", ["auto", "f32", "int8", "int4"])
def test_weights_and_blocks_of_every_family(family: str, weights: str, tmp_path: Path) -> None:
    directory = save(tmp_path, build(family))
    planned = anatomy(str(directory))
    loaded = models.load(str(directory), weights=weights)  # type: ignore[arg-type]  # one of Weights
    assert planned.weight_bytes(weights) == loaded.weight_bytes
    assert planned.context_length == loaded.shape.context_length
    assert planned.served == KvGeometry.of(loaded.shape)
    for name in CODECS:
        assert planned.served is not None
        budget = plan_memory(EngineSettings(kv_cache_bytes=1 << 20, kv_codec=name), loaded.shape, loaded.weight_bytes)
        kinds = [kind.geometry.block_bytes(name) for kind in planned.kinds if kind.geometry is not None]
        stored = [budget.layout.block_bytes[kind] for kind in budget.layout.stored]
        assert sorted(stored) == sorted(kinds)
        assert budget.block_bytes == stored[0]
        assert Room(planned, name, 1 << 20).tokens() == (1 << 40 if family == "mistral" else budget.blocks * 32)


def test_the_real_model() -> None:
    source = str(models.find_default())
    planned, loaded = anatomy(source), models.load(source)
    assert planned.weight_bytes() == loaded.weight_bytes
    made = plan(planned, Wish(context=2048, memory_bytes=1 << 30))
    assert made.weights_bytes == loaded.weight_bytes
    for name in CODEC_NAMES:
        budget = plan_memory(EngineSettings(memory_bytes=1 << 30, kv_codec=name), loaded.shape, loaded.weight_bytes)
        assert made.codecs[name].tokens == budget.blocks * 32
        assert made.codecs[name].conversations == budget.layout.conversations(2048)
    assert made.codecs["bf16"].bytes_per_token == 23_040
    gain = made.codecs["int4"].conversations / made.codecs["bf16"].conversations
    assert gain >= 3.3


def test_limits_that_bind() -> None:
    weights = SMALL.weight_bytes()
    assert plan(SMALL, Wish(context=512, memory_bytes=weights)).binding_limit == "weights"
    assert plan(SMALL, Wish(context=8192, memory_bytes=weights + (4 << 20))).binding_limit == "kv_memory"
    assert plan(SMALL, Wish(context=9000, memory_bytes=1 << 30)).binding_limit == "context"
    assert plan(SMALL, Wish(context=9000, memory_bytes=1 << 30)).context == 8192
    assert plan(SMALL, Wish(context=128, memory_bytes=1 << 30, max_num_seqs=4)).binding_limit == "max_num_seqs"
    made = plan(SMALL, Wish(context=512, memory_bytes=weights - 5))
    assert "5 more than the budget" in made.binding
    assert made.codecs["int8"].conversations == 0
    assert made.codecs["int8"].tokens == 0


def test_contradictions_are_refused() -> None:
    for wish, words in (
        (Wish(context=512), "either"),
        (Wish(context=512, memory_bytes=1, kv_bytes=1), "either"),
        (Wish(context=0, kv_bytes=1), "at least 1"),
        (Wish(context=64, shared_prefix=65, kv_bytes=1), "longer than the context"),
        (Wish(context=64, kv_bytes=1, codecs=("int3",)), "int3"),
    ):
        with pytest.raises(ConfigError, match=words):
            plan(SMALL, wish)


@given(st.integers(0, 1000), st.integers(0, 1000))
def test_most(high: int, limit: int) -> None:
    assert most(high, lambda n: n <= limit) == min(high, limit)
