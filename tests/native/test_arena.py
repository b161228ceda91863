"""The arena and the block store on it."""

from __future__ import annotations

import resource
import time

import numpy as np
import pytest
from numpy.typing import NDArray

from tenure import _native
from tenure.device.arena import Arena, machine_bytes
from tenure.device.ops import DeviceStore
from tenure.errors import BudgetError
from tenure.spec import ArenaLayout, KvGeometry, LayerGroup
from tenure.types import BlockId, CopyOp, RecodeOp

MIB = 1 << 20


def resident_bytes() -> int:
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * resource.getpagesize()


def wait_until_resident(arena: Arena) -> None:
    deadline = time.monotonic() + 20
    while arena.ready_bytes < arena.nbytes:
        assert time.monotonic() < deadline, arena.ready_bytes
        time.sleep(0.005)


def test_prefault_makes_every_byte_resident_and_close_gives_them_back() -> None:
    before = resident_bytes()
    with Arena(96 * MIB + 123, slab_bytes=16 * MIB) as arena:
        assert arena.first_slab_ready.wait(20)
        assert arena.ready
        wait_until_resident(arena)
        full = resident_bytes()
        assert full - before >= 95 * MIB
        arena.bytes[:] = 7
        assert resident_bytes() - full < 4 * MIB
    assert resident_bytes() - before < 16 * MIB


def test_prefault_changes_no_byte() -> None:
    with Arena(MIB, prefault=False) as arena:
        assert not arena.ready
        assert arena.ready_bytes == 0
        arena.bytes[:] = np.arange(MIB) % 251
        arena.prefault()
        arena.prefault()
        wait_until_resident(arena)
        assert np.array_equal(arena.bytes, (np.arange(MIB) % 251).astype(np.uint8))


def test_close_interrupts_prefault_and_is_final() -> None:
    arena = Arena(512 * MIB, slab_bytes=MIB)
    arena.close()
    arena.close()
    with pytest.raises(ValueError, match="closed"):
        _ = arena.bytes


@pytest.mark.parametrize("nbytes", [0, -1])
def test_no_bytes_is_an_error(nbytes: int) -> None:
    with pytest.raises(BudgetError, match="at least one byte"):
        Arena(nbytes)


def test_more_than_the_machine_is_refused_with_numbers() -> None:
    most = machine_bytes()
    with pytest.raises(BudgetError, match=f"{most + 1:,}.*{most:,}"):
        Arena(most + 1)


LAYOUT = ArenaLayout.cut(10 * 1000 + 999, ("bf16",), (1000,), staged=False)


def test_copies_run_in_order() -> None:
    with Arena(10 * 1000 + 999) as arena:
        store = DeviceStore(arena, LAYOUT)
        for i in range(10):
            arena.bytes[i * 1000 : (i + 1) * 1000] = i
        store.execute([CopyOp(BlockId(1), BlockId(2)), CopyOp(BlockId(2), BlockId(9)), CopyOp(BlockId(5), BlockId(5))])
        assert [int(arena.bytes[i * 1000 + 999]) for i in range(10)] == [0, 1, 1, 3, 4, 5, 6, 7, 8, 1]
        store.execute([])


def test_blocks_of_every_group_are_copied_and_those_of_the_first_recoded() -> None:
    geometry = KvGeometry(4, 1, 32, groups=(LayerGroup(1), LayerGroup(3, 64)))
    layout = geometry.layout(1 << 20, "bf16", ("int8",))
    assert layout.kinds == ("bf16", "int8", "bf16")

    def of(kind: int, place: int) -> BlockId:
        """A block in a slab of its own."""
        return BlockId(layout.first[kind] + place * layout.slots[kind])

    with Arena(1 << 20) as arena:
        store = DeviceStore(arena, layout, geometry)
        arena.bytes[:] = np.random.default_rng(0).integers(0, 64, 1 << 20)  # small numbers as bf16

        def held(block: BlockId) -> NDArray[np.uint8]:
            at = layout.offset(block)
            return arena.bytes[at : at + layout.block_bytes[layout.kind(block)]].copy()

        wanted, before = held(of(2, 0)), arena.bytes.copy()
        alone = np.concatenate([held(of(0, 1)), np.zeros(geometry.parts()[0].block_bytes("int8"), np.uint8)])
        _native.recode(
            alone, np.zeros(1, np.int64), "bf16", np.full(1, layout.block_bytes[0], np.int64), "int8", 1, 1, 32
        )
        store.execute([CopyOp(of(2, 0), of(2, 3)), RecodeOp(of(0, 1), of(1, 2))])
        assert np.array_equal(held(of(2, 3)), wanted)
        assert np.array_equal(held(of(1, 2)), alone[layout.block_bytes[0] :])
        for block in (of(2, 3), of(1, 2)):
            at = layout.offset(block)
            before[at : at + layout.block_bytes[layout.kind(block)]] = held(block)
        assert np.array_equal(arena.bytes, before)


@pytest.mark.parametrize("bad", [-1, 10])
def test_blocks_outside_the_arena_are_refused(bad: int) -> None:
    with Arena(10 * 1000, prefault=False) as arena:
        store = DeviceStore(arena, LAYOUT)
        for op in (CopyOp(BlockId(bad), BlockId(0)), CopyOp(BlockId(0), BlockId(bad))):
            with pytest.raises(ValueError, match=r"\[0, 10\)"):
                store.execute([op])


def test_an_arena_smaller_than_a_block_is_refused() -> None:
    with Arena(999, prefault=False) as arena, pytest.raises(ValueError, match="holds no 1 slabs"):
        DeviceStore(arena, LAYOUT)


@pytest.mark.parametrize(
    ("src", "dst", "nbytes", "message"),
    [
        ([0], [0, 1], 10, "dst: must be as long"),
        ([91], [0], 10, "src: an offset"),
        ([0], [-1], 10, "dst: an offset"),
        ([0], [5], 10, "overlaps"),
        ([0], [0], 101, "nbytes"),
    ],
)
def test_copy_blocks_checks_its_arguments(src: list[int], dst: list[int], nbytes: int, message: str) -> None:
    arena = np.zeros(100, np.uint8)
    with pytest.raises(ValueError, match=message):
        _native.copy_blocks(arena, np.array(src, np.int64), np.array(dst, np.int64), nbytes)


def test_prefault_checks_its_range() -> None:
    with pytest.raises(ValueError, match="outside"):
        _native.prefault(np.zeros(10, np.uint8), 0, 11)
