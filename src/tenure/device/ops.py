"""What happens to blocks on the device besides being computed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tenure import _native
from tenure.device.arena import Arena
from tenure.types import BlockId, CopyOp


class DeviceStore:
    """The blocks of an arena, by id: block i lies at byte i · block_bytes. It is a `tenure.tiers.base.BlockStore`."""

    def __init__(self, arena: Arena, block_bytes: int) -> None:
        """ValueError when the arena does not hold one block."""
        if not 0 < block_bytes <= arena.nbytes:
            raise ValueError(f"an arena of {arena.nbytes:,} bytes holds no block of {block_bytes:,} bytes")
        self._arena = arena
        self.block_bytes = block_bytes
        self.blocks = arena.nbytes // block_bytes

    def offsets(self, ids: Sequence[BlockId]) -> npt.NDArray[np.int64]:
        """Byte offsets of blocks, int64 [len(ids)]. ValueError when one is not in the arena."""
        out = np.array(ids, dtype=np.int64)
        if out.size and not (out.min() >= 0 and out.max() < self.blocks):
            raise ValueError(f"block ids must lie in [0, {self.blocks}), not {list(ids)}")
        return out * self.block_bytes

    def execute(self, ops: Sequence[CopyOp]) -> None:
        """Copy whole blocks, in order; complete on return. The interpreter's lock is free meanwhile."""
        src = self.offsets([op.src for op in ops])
        dst = self.offsets([op.dst for op in ops])
        _native.copy_blocks(self._arena.bytes, src, dst, self.block_bytes)
