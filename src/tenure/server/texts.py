"""Where long texts are parsed and tokenised: on a worker thread, so that they delay nobody's stream."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
LARGE = 16 << 10
"""Bytes of a body from which on the way to the thread and back costs less than the stall it saves."""


_COMPILED = (b'"response_format"', b'"guided_', b'"structured_outputs"', b'"tools"')
"""Fields that may have a grammar compiled."""


def weight(body: bytes) -> int:
    """How large a body counts: one that may have a grammar compiled is never small."""
    return max(len(body), LARGE) if any(field in body for field in _COMPILED) else len(body)


class Texts:
    """One worker: long texts wait for each other, never for or before the short ones."""

    def __init__(self) -> None:
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tenure-text")

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """The result of `work` on a body of `size` bytes."""
        if size < LARGE:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._worker, work)
