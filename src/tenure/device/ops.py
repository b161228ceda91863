"""What happens to blocks on the device besides being computed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np
import numpy.typing as npt

from tenure import _native
from tenure.device.arena import Arena
from tenure.spec import CODECS, ArenaLayout, KvGeometry
from tenure.types import BlockId, BlockOp

CODEC_NUMBERS = {name: number for number, name in enumerate(CODECS)}
"""As `enum class Codec` in native/codecs.h; a test compares."""


Ids = Sequence[BlockId] | npt.NDArray[np.int64]


class Places:
    """Where the blocks of a layout lie, by id."""

    def __init__(self, layout: ArenaLayout, geometry: KvGeometry | None = None) -> None:
        """`geometry`: what a block is made of; it may be left out when all layers are of one group."""
        slabs = np.arange(layout.slabs, dtype=np.int64)[:, None] * layout.slab_bytes
        kinds = list(zip(layout.kinds, layout.slots, layout.block_bytes, strict=True))
        places = [(slabs + np.arange(slots, dtype=np.int64) * size).ravel() for _, slots, size in kinds]
        self._offsets = np.concatenate(places)
        self._kinds = np.repeat(np.arange(len(kinds)), [len(place) for place in places])
        self._numbers = np.array([CODEC_NUMBERS[name] for name in layout.kinds], np.uint8)
        self.staging = CODEC_NUMBERS[layout.kinds[layout.staging]]
        """Number of the codec that open blocks are written in."""
        self.parts = geometry.part_offsets(layout.kinds[layout.staging]) if geometry else (0,)
        """Where the layers of each group begin in a block in which those of all are staged, in bytes."""

    def offsets(self, ids: Ids) -> npt.NDArray[np.int64]:
        """Byte offsets of blocks, int64 [len(ids)]. ValueError when one is not in the arena."""
        return self._offsets[self._checked(ids)]

    def kinds(self, ids: Ids) -> npt.NDArray[np.int64]:
        """The kind of each block, int64 [len(ids)]."""
        return self._kinds[self._checked(ids)]

    def codecs(self, ids: Ids) -> npt.NDArray[np.uint8]:
        """The number of each block's codec, uint8 [len(ids)]."""
        return self._numbers[self.kinds(ids)]

    def _checked(self, ids: Ids) -> npt.NDArray[np.int64]:
        out = np.asarray(ids, dtype=np.int64)
        if out.size and not (out.min() >= 0 and out.max() < len(self._offsets)):
            raise ValueError(f"block ids must lie in [0, {len(self._offsets)}), not {list(ids)}")
        return out


class DeviceStore:
    """The blocks of an arena, by id. It is a `tenure.tiers.base.BlockStore`."""

    def __init__(self, arena: Arena, layout: ArenaLayout, geometry: KvGeometry | None = None) -> None:
        """`geometry`: what a block is made of, to recode some. ValueError when the arena does not hold what the layout
        says, or the layout no block."""
        if layout.ids < 1 or layout.slabs * layout.slab_bytes > arena.nbytes:
            raise ValueError(
                f"an arena of {arena.nbytes:,} bytes holds no {layout.slabs} slabs of {layout.slab_bytes:,} bytes"
            )
        self._arena = arena
        self._layout = layout
        self._geometry = geometry
        self.places = Places(layout, geometry)

    def execute(self, ops: Sequence[BlockOp]) -> None:
        """Copy whole blocks to others of their kind, or recode them; in order, complete on return. The interpreter's
        lock is free meanwhile."""
        src, dst = [op.src for op in ops], [op.dst for op in ops]
        kinds = zip(self.places.kinds(src).tolist(), self.places.kinds(dst).tolist(), strict=True)
        offsets = self.places.offsets(src), self.places.offsets(dst)
        at = 0
        for (kind, other), run in groupby(kinds):
            these = slice(at, at := at + len(list(run)))
            if kind == other:
                size = self._layout.block_bytes[kind]
                _native.copy_blocks(self._arena.bytes, offsets[0][these], offsets[1][these], size)
            else:
                self._recode(offsets[0][these], self._layout.kinds[kind], offsets[1][these], self._layout.kinds[other])

    def _recode(self, src: npt.NDArray[np.int64], was: str, dst: npt.NDArray[np.int64], name: str) -> None:
        """Blocks of the first group of layers: those of the others are all stored in one codec."""
        if self._geometry is None:
            raise ValueError("blocks are recoded by those who know what they are made of")
        how = self._geometry.parts()[0]
        _native.recode(self._arena.bytes, src, was, dst, name, how.layers, how.kv_heads, how.head_dim)
