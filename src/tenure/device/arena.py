"""The arena: one anonymous mapping that holds every block, made resident in the background."""

from __future__ import annotations

import mmap
import os
import threading
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tenure import _native
from tenure.errors import BudgetError

SLAB_BYTES = 64 << 20
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def machine_bytes() -> int:
    """Memory this process could ever have: the machine's, or its control group's limit when that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in _CGROUP_LIMITS:
        limit = Path(path)
        if limit.is_file():
            text = limit.read_text().strip()
            if text.isdigit():
                total = min(total, int(text))
    return total


class Arena:
    """`nbytes` of memory in one mapping, advised to use huge pages.

    It is usable at once; a background thread touches it slab by slab, so that no step pays for a page fault later and
    the resident size stays flat once `ready_bytes` reaches `nbytes`. `close` (or the end of a `with`) stops it and
    gives the memory back.
    """

    def __init__(self, nbytes: int, *, slab_bytes: int = SLAB_BYTES, prefault: bool = True) -> None:
        """BudgetError, before anything is reserved, when `nbytes` is not positive or more than the machine has."""
        if nbytes <= 0:
            raise BudgetError("memory", f"the arena needs at least one byte, not {nbytes:,}")
        if slab_bytes <= 0:
            raise ValueError("slab_bytes must be positive")
        if nbytes > (most := machine_bytes()):
            raise BudgetError("memory", f"an arena of {nbytes:,} bytes does not fit: the machine has {most:,} bytes")
        self.nbytes = nbytes
        self.first_slab_ready = threading.Event()
        """Set once the first slab is resident: from then on serving does not wait for memory."""
        self._slab_bytes = slab_bytes
        self._ready_bytes = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._bytes: npt.NDArray[np.uint8] | None = np.frombuffer(self._map, dtype=np.uint8)
        self.huge_pages = self._advise_huge_pages()
        """Whether the kernel took the advice; without transparent huge pages the arena works, a little slower."""
        if prefault:
            self.prefault()

    @property
    def bytes(self) -> npt.NDArray[np.uint8]:
        """All of it, writable, uint8 [nbytes]. ValueError after `close`."""
        if self._bytes is None:
            raise ValueError("the arena is closed")
        return self._bytes

    @property
    def ready_bytes(self) -> int:
        """How much is resident so far, from the start."""
        return self._ready_bytes

    @property
    def ready(self) -> bool:
        """True once the first slab is resident."""
        return self.first_slab_ready.is_set()

    def prefault(self) -> None:
        """Start making the arena resident in the background; a second call changes nothing."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._touch, args=(self.bytes,), name="arena-prefault", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop the background thread and give the memory back; what still views the arena reads zeros from then on."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        if self._bytes is not None:
            self._bytes = None
            self._map.madvise(mmap.MADV_DONTNEED)  # the mapping itself lasts as long as its last view

    def __enter__(self) -> Arena:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _advise_huge_pages(self) -> bool:
        try:
            self._map.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            return False
        return True

    def _touch(self, view: npt.NDArray[np.uint8]) -> None:
        for begin in range(0, self.nbytes, self._slab_bytes):
            if self._stop.is_set():
                return
            end = min(begin + self._slab_bytes, self.nbytes)
            _native.prefault(view, begin, end)
            self._ready_bytes = end
            self.first_slab_ready.set()
