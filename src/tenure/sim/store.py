"""Where blocks lie when nothing is computed: nowhere."""

from __future__ import annotations

from collections.abc import Sequence

from tenure.types import BlockOp


class NullStore:
    """Carries out copies by counting them."""

    def __init__(self) -> None:
        self.copies = 0
        """Blocks copied so far."""

    def execute(self, ops: Sequence[BlockOp]) -> None:
        self.copies += len(ops)
