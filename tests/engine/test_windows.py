"""Layers with a window keep what they still see, bit for bit the same as if they kept all: the step alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.models.test_architectures import build
from tests.models.test_loader import save
from tests.native.support import NAN_BYTE, make_decoder

from tenure import models
from tenure.device.ops import Places
from tenure.engine.batch import Batcher
from tenure.lab.probe import Probe
from tenure.spec import BLOCK_TOKENS, STAGING, KvGeometry, ModelShape, staging_codec
from tenure.types import BlockId, Rows, Sampling, SeqId, StepPlan

TOKENS = np.random.default_rng(11).integers(2, 300, 300).tolist()
SIZES = [96, 32, 5, 27, *[1] * 40, 24, 76]
CODECS = ["bf16", "f32", "int8", "k8v4", "int4"]
FAMILIES = ["gemma2", "gemma3", "mistral", "phi3 window", "qwen3 window"]


class Pool:
    """An arena whose blocks are given as scheduler and cache give them; those that a window has left are NaN at once,
    and another's next."""

    def __init__(self, model: Any, codec: str, blocks: int = 60) -> None:
        geometry = KvGeometry.of(model.shape)
        self.layout = geometry.layout(blocks * geometry.block_bytes("bf16"), codec)
        self.arena = np.full(self.layout.slabs * self.layout.slab_bytes + 64, NAN_BYTE, np.uint8)
        self.arena = self.arena[-self.arena.ctypes.data % 64 :]
        self._model, self._codec = model, codec
        self._batcher = Batcher(Places(self.layout, geometry))
        kinds = len(self.layout.kinds)
        luck = np.random.default_rng(blocks)
        self._free = [
            [
                BlockId(self.layout.first[kind] + int(slab) * slots + place)
                for slab in luck.permutation(np.arange(kind, self.layout.slabs, kinds))
                for place in range(slots)
            ]
            for kind, slots in enumerate(self.layout.slots)
        ]
        self.tables: dict[int, list[list[BlockId]]] = {}
        self._open: dict[int, BlockId | None] = {}
        self._lengths: dict[int, int] = {}

    def feed(self, news: dict[int, Sequence[int]]) -> dict[int, NDArray[np.float32]]:
        """Append tokens to each sequence in one step; logits of all of them."""
        plan = StepPlan(0, (), tuple(self._rows(seq, new) for seq, new in news.items()))
        batch = self._batcher.build(plan)
        logits = np.empty((len(batch.tokens), self._model.shape.vocab), np.float32)
        self._model.decoder.step(
            self.arena, batch.tokens, batch.seq_rows, batch.first_pos, batch.tables,
            np.arange(len(batch.tokens), dtype=np.int32), logits,
        )  # fmt: skip
        return dict(zip(news, np.split(logits, batch.seq_rows[1:-1]), strict=True))

    def _rows(self, seq: int, new: Sequence[int]) -> Rows:
        start = self._lengths.setdefault(seq, 0)
        end = self._lengths[seq] = start + len(new)
        staged = self._codec not in STAGING
        if seq not in self.tables:
            self.tables[seq] = [[] for _ in self.layout.groups]
            self._open[seq] = self._free[self.layout.staging].pop() if staged else None
        for table, kind, group in zip(self.tables[seq], self.layout.stored, self.layout.groups, strict=True):
            for number in range(min(len(table), group.first(start, BLOCK_TOKENS))):
                if table[number] >= 0:
                    self._let_go(table[number])
                    table[number] = BlockId(-1)
            blocks = end // BLOCK_TOKENS if staged else -(-end // BLOCK_TOKENS)
            table += [self._free[kind].pop() for _ in range(blocks - len(table))]
        tables = tuple(map(tuple, self.tables[seq]))
        return Rows(SeqId(seq), f"r{seq}", 0, start, list(new), tables, True, 0, Sampling(), self._open[seq])

    def _let_go(self, block: BlockId) -> None:
        kind, at = self.layout.kind(block), self.layout.offset(block)
        self.arena[at : at + self.layout.block_bytes[kind]] = NAN_BYTE
        self._free[kind].append(block)

    def check_held(self, seq: int) -> None:
        """Of each group no more than what its newest rows see."""
        for table, group in zip(self.tables[seq], self.layout.groups, strict=True):
            held = [block for block in table if block >= 0]
            assert table[len(table) - len(held) :] == held
            assert len(held) <= group.held(len(table), BLOCK_TOKENS)


def check(model: Any, codec: str) -> None:
    """Chunks beside a stranger, every block that is let go used again, against one step with all blocks kept."""
    want = Probe(model, codec, 1, len(TOKENS)).feed([TOKENS])
    assert np.isfinite(want).all()
    pool, at = Pool(model, codec), 0
    pool.feed({2: TOKENS[50:114]})
    for number, size in enumerate(SIZES):
        got = pool.feed({1: TOKENS[at : at + size], 2: [TOKENS[number]]})
        assert np.array_equal(got[1], want[at : at + size]), (at, size)
        assert np.isfinite(got[2]).all()
        at += size
    assert at == len(TOKENS)
    pool.feed({1: [3], 2: [4]})
    for seq in (1, 2):
        pool.check_held(seq)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("case", FAMILIES)
def test_what_a_window_has_left_may_be_gone(case: str, codec: str, tmp_path: Path) -> None:
    model = models.load(str(save(tmp_path, build(case))), weights="bf16", kv_codec=staging_codec(codec))  # type: ignore[arg-type]
    assert any(group.window for group in model.shape.groups)
    check(model, codec)


@pytest.mark.parametrize("codec", CODECS)
def test_windows_of_three_sizes(codec: str) -> None:
    windows = (33, None, 70, 33, 1)
    tiny = make_decoder(
        weights="bf16", codec=staging_codec(codec), threads=2, layers=5, vocab=300, windows=[w or 0 for w in windows]
    )
    shape = ModelShape(5, 96, 6, 2, 32, 160, 300, 512, windows)
    assert [(group.layers, group.window) for group in shape.groups] == [(1, None), (1, 70), (2, 33), (1, 1)]
    assert KvGeometry.of(shape) == tiny.geometry
    assert tiny.native.block_bytes == tiny.geometry.block_bytes(staging_codec(codec))
    check(SimpleNamespace(decoder=tiny.native, shape=shape), codec)
