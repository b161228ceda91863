"""Child processes of a run: each a group of its own, measured through /proc, stopped while others are timed, killed."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

PR_SET_PDEATHSIG = 1
TICKS = os.sysconf("SC_CLK_TCK")
SAMPLE_S = 0.5


def free_port() -> int:
    """A TCP port of the loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class Child:
    """A started process and what it started. Its output goes to `log`; with `piped`, stdin and stdout are ours."""

    def __init__(self, command: Sequence[str], log: Path, *, env: Mapping[str, str], piped: bool = False) -> None:
        self.command = list(command)
        self.log = log
        pipe = subprocess.PIPE if piped else None
        with log.open("wb") as sink:
            self.process = subprocess.Popen(
                self.command,
                stdin=pipe or subprocess.DEVNULL,
                stdout=pipe or sink,
                stderr=sink,
                env={**os.environ, **env},
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        self.pid = self.process.pid

    @property
    def dead(self) -> str | None:
        """Why it no longer runs, with the end of its log; None while it does."""
        code = self.process.poll()
        if code is None:
            return None
        return f"exit status {code}: …{self.log.read_text(errors='replace')[-1500:]}"

    def pause(self) -> None:
        """Stop its clock, so that it costs the measured ones nothing."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it run on."""
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it and all it started."""
        self._signal(signal.SIGKILL)
        self.process.wait()
        if self.process.stdin is not None:  # stdout belongs to whoever reads it, who has to see its end
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def rss_mib(self) -> float:
        """Resident memory of it and its descendants, MiB."""
        return sum(_rss_kib(pid) for pid in _tree(self.pid)) / 1024

    def mapping_rss_mib(self, at_least: int) -> float:
        """What is resident of its mappings of `at_least` bytes or more (an arena that is touched only in part), MiB."""
        total, size = 0, 0
        for line in Path(f"/proc/{self.pid}/smaps").read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "Size":
                size = int(value.split()[0]) * 1024
            elif name == "Rss" and size >= at_least:
                total += int(value.split()[0])
        return total / 1024

    def cpu_s(self) -> float:
        """Processor seconds that it and its living descendants have used."""
        return sum(_cpu_ticks(pid) for pid in _tree(self.pid)) / TICKS


def _tree(pid: int) -> list[int]:
    pids = [pid]
    for parent in pids:
        for children in Path(f"/proc/{parent}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                pids += [int(child) for child in children.read_text().split()]
    return pids


def _rss_kib(pid: int) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1])
    return 0


def _cpu_ticks(pid: int) -> int:
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        return int(fields[11]) + int(fields[12])
    return 0


def _busy_s() -> float:
    """Processor seconds that the whole machine has spent on anything but idling, stolen time included."""
    user, nice, system, _idle, _wait, irq, soft, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + soft + steal) / TICKS


class Watch:
    """Around a measurement: peak memory of a child (None: of nobody), and the share of the machine others took.

    `foreign` is processor time of anything but the child and ourselves over cores × wall time: above a tenth, the
    figures of that repetition are not to be trusted.
    """

    def __init__(self, child: Child | None) -> None:
        self.child = child
        self.peak_rss_mib = 0.0
        self.foreign = 0.0

    async def __aenter__(self) -> Watch:
        self._sampler = asyncio.create_task(self._sample())
        self._before = self._others_s()
        self._start = time.perf_counter()
        return self

    async def __aexit__(self, *_: object) -> None:
        wall = time.perf_counter() - self._start
        self.foreign = max(0.0, self._others_s() - self._before) / wall / (os.cpu_count() or 1)
        self._sampler.cancel()
        self._note()

    def _others_s(self) -> float:
        own = sum(os.times()[:2]) + (self.child.cpu_s() if self.child else 0.0)
        return _busy_s() - own

    def _note(self) -> None:
        if self.child:
            self.peak_rss_mib = max(self.peak_rss_mib, self.child.rss_mib())

    async def _sample(self) -> None:
        while True:
            self._note()
            await asyncio.sleep(SAMPLE_S)
