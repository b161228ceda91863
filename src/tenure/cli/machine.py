"""What the machine has: memory, cores, huge pages. Reads /proc and /sys, nothing else."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from tenure.config import Settings
from tenure.errors import BudgetError

GIB = 2**30
DEFAULT_BUDGET = 2 * GIB
CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
CGROUP_USAGES = ("/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory/memory.usage_in_bytes")
HUGE_PAGES = "/sys/kernel/mm/transparent_hugepage/enabled"


@dataclass(frozen=True, slots=True)
class Machine:
    """Bytes of memory and number of cores this process may use."""

    total_bytes: int
    available_bytes: int
    cores: int
    cpu: str
    huge_pages: str
    """The kernel's mode for transparent huge pages: always, madvise, never or unknown."""


def probe() -> Machine:
    """Look at the machine as this process may use it: a container's memory limit counts, not its host's memory."""
    facts = _meminfo(_read("/proc/meminfo"))
    total = facts.get("MemTotal", 0) or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    available = facts.get("MemAvailable", total)
    limit = _first_number(CGROUP_LIMITS)
    if limit is not None and limit < total:
        total = limit
        available = min(available, max(0, limit - (_first_number(CGROUP_USAGES) or 0)))
    model = re.search(r"^model name\s*:\s*(.+)$", _read("/proc/cpuinfo"), re.MULTILINE)
    mode = re.search(r"\[(\w+)\]", _read(HUGE_PAGES))
    return Machine(
        total, available, len(os.sched_getaffinity(0)), model[1] if model else "unknown", mode[1] if mode else "unknown"
    )


@dataclass(frozen=True, slots=True)
class Budget:
    """What the process may hold, in bytes: either everything together, or the KV cache alone."""

    memory_bytes: int | None
    kv_cache_bytes: int | None
    note: str
    """Where the number comes from, for a person."""


def budget(settings: Settings, machine: Machine) -> Budget:
    """The budget the settings ask for on this machine. BudgetError when it is larger than the machine."""
    granted = budget_unchecked(settings, machine)
    if settings.kv_cache_memory_bytes is not None:
        _fits("kv_cache_memory_bytes", granted.kv_cache_bytes or 0, machine)
    elif settings.memory is not None:
        _fits("memory", granted.memory_bytes or 0, machine)
    return granted


def budget_unchecked(settings: Settings, machine: Machine) -> Budget:
    """The same, though this machine may be too small: to plan for another one."""
    if settings.kv_cache_memory_bytes is not None:
        size = settings.kv_cache_memory_bytes.resolve(machine.total_bytes)
        return Budget(None, size, f"--kv-cache-memory-bytes {settings.kv_cache_memory_bytes}, weights beside it")
    if settings.memory is not None:
        return Budget(settings.memory.resolve(machine.total_bytes), None, f"--memory {settings.memory}")
    quarter = machine.available_bytes // 4
    if quarter < DEFAULT_BUDGET:
        return Budget(quarter, None, "a quarter of the available memory; --memory changes it")
    return Budget(DEFAULT_BUDGET, None, "the default; --memory changes it")


def human(size: int) -> str:
    """Bytes for people: 1.50 GiB, 97 MiB."""
    if size >= GIB:
        return f"{size / GIB:.2f} GiB"
    if size >= 2**20:
        return f"{size / 2**20:.0f} MiB"
    return f"{size / 2**10:.0f} KiB" if size >= 2**10 else f"{size} B"


def _fits(param: str, size: int, machine: Machine) -> None:
    if size > machine.total_bytes:
        raise BudgetError(
            param,
            f"--{param.replace('_', '-')} asks for {human(size)} ({size} bytes), but this machine has "
            f"{human(machine.total_bytes)}, of which {human(machine.available_bytes)} are available",
        )


def _read(path: str) -> str:
    """A file's text, or nothing where the kernel has no such file."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _meminfo(text: str) -> dict[str, int]:
    return {name: int(kib) * 1024 for name, kib in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}


def _first_number(paths: tuple[str, ...]) -> int | None:
    for path in paths:
        words = _read(path).strip()
        if words.isdigit():
            return int(words)
    return None
