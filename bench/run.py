"""One run: every workload on every target, a repetition of each in turn, so that all meet the same machine."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.process import Child, Watch
from bench.targets import Running, Target, command, missing, start
from tenure.cli.bench_client import Workload, load, measure, solo

ROOT = Path(__file__).parent.parent
SHARED = ROOT.parent / "shared/bench/workloads.json"
WARM = 32
SETTLE_S = 30.0
STEP_TIMEOUT_S = 400


class Run:
    """State of a run: what is started, and what was measured so far."""

    def __init__(self, targets: Sequence[Target], results: Path, *, repetitions: int, all_solo: bool) -> None:
        self.repetitions = repetitions
        self.all_solo = all_solo
        self.logs = results.parent / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)
        self.path = results
        self.running: dict[str, Running] = {}
        self.data = SHARED if SHARED.exists() else None
        self.workloads = load(self.data)
        self.results: dict[str, Any] = {
            "started": time.strftime("%Y-%m-%d %H:%M"),
            "machine": _machine(),
            "commit": _commit(),
            "repetitions": repetitions,
            "data": str(SHARED.name) if self.data else "generated prompts",
            "targets": [],
            "versions": {},
            "skipped": {},
            "measurements": [],
        }
        for target in targets:
            why = missing(target)
            if why:
                self.skip(target, why)
            else:
                self.results["targets"].append(asdict(target))
        self.targets = [target for target in targets if target.name not in self.results["skipped"]]

    def skip(self, target: Target, why: str) -> None:
        """Note that a target takes no (further) part, and why."""
        self.results["skipped"][target.name] = why
        _say(f"{target.name} skipped: {why[:300]}")

    def note(self, target: Target, workload: str, figures: dict[str, Any], **more: Any) -> None:
        """Keep one measurement and save the run so far, so that an interrupted one is not lost."""
        self.results["measurements"].append({"target": target.name, "workload": workload, "figures": figures, **more})
        self.path.write_text(json.dumps(self.results, indent=1))
        shown = {k: round(v, 4) if isinstance(v, float) else v for k, v in figures.items() if k != "errors"}
        _say(f"{target.name} {workload}: {shown}")

    async def all(self, names: Sequence[str]) -> None:
        """Measure the named workloads; whatever happens, no child outlives this."""
        try:
            for name in names:
                await self.one(self.workloads[name])
        finally:
            for running in self.running.values():
                running.stop()

    async def one(self, workload: Workload) -> None:
        """Measure one workload on every target that takes part."""
        for target in list(self.targets):
            await self.ensure(target, workload)
        for repetition in range(self.repetitions):
            for target in self.targets:
                running = self.running[target.name]
                running.resume()
                await self.repeat(running, workload, repetition)
                running.pause()

    async def ensure(self, target: Target, workload: Workload) -> None:
        """Have the target running, warm and paused, with what the workload needs."""
        running = self.running.get(target.name)
        wanted = [target.variant] if target.kind == "url" else _without_port(command(target, workload, 0))
        if running and running.command == wanted and not (running.child and running.child.dead):
            return
        if running:
            running.stop()
            del self.running[target.name]
        try:
            running = await start(target, workload, self.logs)
        except (RuntimeError, ValueError, OSError, TimeoutError) as failure:
            self.skip(target, f"{type(failure).__name__}: {failure}")
            self.targets.remove(target)
            return
        self.running[target.name] = running
        self.results["versions"][target.name] = running.version
        if running.start_s is not None:
            self.note(target, "start", {"ready_s": running.start_s})
        await _settle(running.child)
        await running.endpoint.complete(list(range(1000, 1000 + WARM)), 8)
        running.pause()

    async def repeat(self, running: Running, workload: Workload, repetition: int) -> None:
        """One repetition on one target, with its noise and memory, and the solo runs that W6 is compared with."""
        async with Watch(running.child) as watch:
            figures = await measure(running.endpoint, workload, repetition)
        figures["peak_rss_mib"] = watch.peak_rss_mib
        answers = figures.pop("answers", None)
        compared = running.target.ours or self.all_solo
        if workload.kv_tokens and compared and repetition == 0:
            alone = await solo(running.endpoint, workload, repetition)
            figures["equal_to_solo"] = sum(a == b for a, b in zip(alone, answers or [], strict=True))
        overhead = await running.overhead_mib()
        if overhead is not None:
            figures["overhead_mib"] = overhead
        self.note(running.target, workload.name, figures, repetition=repetition, foreign=round(watch.foreign, 3))

    def steps(self) -> None:
        """Python's share of a step of each of our formats (`bench/step.py`), once nothing else runs."""
        for target in self.targets:
            if not target.ours:
                continue
            line = [sys.executable, "-m", "bench.step", "--weights", target.variant, "--json"]
            try:
                asked = subprocess.run(
                    line, cwd=ROOT, capture_output=True, text=True, timeout=STEP_TIMEOUT_S, check=True
                )
            except (subprocess.SubprocessError, OSError) as failure:
                self.results["skipped"]["bench.step"] = f"{failure} {getattr(failure, 'stderr', '')}"[-600:]
                continue
            self.note(target, "step", json.loads(asked.stdout))


async def _settle(child: Child | None) -> None:
    """Wait until the memory of a freshly started target stops growing: some touch theirs in the background."""
    before = -1.0
    deadline = time.perf_counter() + SETTLE_S
    while child and time.perf_counter() < deadline:
        now = child.rss_mib()
        if now - before < 2.0:
            return
        before = now
        await asyncio.sleep(0.5)


def _without_port(line: list[str]) -> list[str]:
    return [part for part in line if part != "0"]


def _machine() -> dict[str, Any]:
    cpu = next((line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), "?")
    memory = next(int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith("MemTotal"))
    return {"cpu": cpu, "cores": os.cpu_count(), "memory_gib": round(memory / 2**20), "kernel": platform.release()}


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()


def _commit() -> str:
    asked = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return asked.stdout.strip() or "unknown"


def _say(line: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {line}", file=sys.stderr, flush=True)


def run(
    targets: Sequence[Target], names: Sequence[str], results: Path, *, repetitions: int, all_solo: bool, steps: bool
) -> dict[str, Any]:
    """Measure, save as `results`, and return what was saved. With `steps`, also what a step's time goes into."""
    results.parent.mkdir(parents=True, exist_ok=True)
    this = Run(targets, results, repetitions=repetitions, all_solo=all_solo)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that what was started is ended, as by Ctrl-C
    asyncio.run(this.all(names))
    if steps:
        this.steps()
    results.write_text(json.dumps(this.results, indent=1))
    return this.results
