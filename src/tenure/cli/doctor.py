"""`tenure doctor`: is this machine, this install and this model fit to serve? Exit code 0 when yes, 1 when not."""

from __future__ import annotations

import dataclasses
import json
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

import typer

import tenure
from tenure.cli.machine import Machine, budget, human, probe
from tenure.cli.options import takes
from tenure.config import Resolved, Settings
from tenure.errors import TenureError

State = Literal["ok", "note", "fail"]
MARKS = {"ok": "✓", "note": "·", "fail": "✗"}
COLOURS = {"ok": "32", "note": "33", "fail": "31"}

Json = Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")]
Calibrate = Annotated[
    bool, typer.Option("--calibrate", help="Measure this machine's speed too, for the predictions of tenure plan.")
]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at: what, how it is, and the detail a person needs."""

    check: str
    state: State
    detail: str


@takes(
    "model", "memory", "kv_cache_memory_bytes", "kv_cache_dtype", "kv_cache_dtype_k", "kv_cache_dtype_v", "threads",
    "isa",
)  # fmt: skip
def doctor(resolved: Resolved, as_json: Json = False, calibrate: Calibrate = False) -> int:
    """Look at processor, memory, model, kernels and cache; exit 1 when something is broken."""
    findings = []
    for finding in examine(resolved.settings, speed=calibrate):
        findings.append(finding)
        if not as_json:
            print(line(finding), flush=True)
    broken = [finding.check for finding in findings if finding.state == "fail"]
    if as_json:
        report = {"version": tenure.__version__, "ok": not broken, "findings": list(map(dataclasses.asdict, findings))}
        print(json.dumps(report, indent=2))
    elif broken:
        print(f"\nbroken: {', '.join(broken)}")
    else:
        print("\nfit to serve")
    return 1 if broken else 0


def line(finding: Finding) -> str:
    """A finding on one line, coloured on a terminal."""
    mark = MARKS[finding.state]
    if sys.stdout.isatty():
        mark = f"\033[{COLOURS[finding.state]}m{mark}\033[0m"
    return f"{mark} {finding.check:<14} {finding.detail}"


def examine(settings: Settings, *, speed: bool = False) -> Iterator[Finding]:
    """All checks, in order. A check that raises is a finding, not the end."""
    from tenure.cli.compose import choose_isa
    from tenure.cli.selftest import attention_kernels, cache_exercise, linear_kernels

    choose_isa(settings)
    machine = probe()
    yield Finding("tenure", "ok", f"{tenure.__version__} on Python {platform.python_version()}, {platform.machine()}")
    yield attempt("processor", lambda: processor(machine))
    yield attempt("kernel path", kernel_path)
    yield attempt("threads", lambda: threads(settings, machine))
    yield attempt("memory", lambda: memory(settings, machine))
    yield huge_pages(machine)
    yield attempt("model", lambda: model(settings))
    yield attempt("linear", lambda: ("ok", linear_kernels()))
    yield attempt("attention", lambda: ("ok", attention_kernels()))
    yield attempt("KV cache", lambda: ("ok", cache_exercise()))
    if speed:
        yield attempt("speed", lambda: calibration(settings))


def attempt(check: str, look: Callable[[], tuple[State, str]]) -> Finding:
    """Run one check; what it raises is told as a failure."""
    try:
        return Finding(check, *look())
    except TenureError as error:
        return Finding(check, "fail", str(error))
    except Exception as error:  # noqa: BLE001 — the doctor tells what is broken and goes on looking
        return Finding(check, "fail", f"{type(error).__name__}: {error}")


def processor(machine: Machine) -> tuple[State, str]:
    """Model name and the features that matter to the kernels."""
    from tenure import _native

    return "ok", f"{machine.cpu}: {' '.join(_native.cpu_features()) or 'no vector extensions known'}"


def kernel_path() -> tuple[State, str]:
    """The instruction set the kernels use, and which others this machine could."""
    from tenure import _native

    chosen, possible = _native.isa(), _native.isas()
    best = chosen == possible[-1]
    return "ok" if best else "note", f"{chosen}{'' if best else ' (forced)'}; supported here: {', '.join(possible)}"


def threads(settings: Settings, machine: Machine) -> tuple[State, str]:
    """Threads the engine would use."""
    wanted = settings.threads or machine.cores
    if wanted > machine.cores:
        return "note", f"{wanted} threads on {machine.cores} cores: they will wait for each other"
    return "ok", f"{wanted} of {machine.cores} cores"


def memory(settings: Settings, machine: Machine) -> tuple[State, str]:
    """The budget against what is available."""
    granted = budget(settings, machine)
    wanted = granted.memory_bytes or granted.kv_cache_bytes or 0
    planned = settings.memory is not None or settings.kv_cache_memory_bytes is not None
    state: State = "ok" if planned and wanted <= machine.available_bytes else "note"
    advice = "" if planned else "; nobody planned it: see `tenure plan`, `tenure replay --memory`, then give --memory"
    return state, (
        f"{human(machine.available_bytes)} of {human(machine.total_bytes)} available; "
        f"budget {human(wanted)} ({granted.note}){advice}"
    )


def calibration(settings: Settings) -> tuple[State, str]:
    """Measure this machine, and keep it."""
    from tenure.cli.calibration import file
    from tenure.cli.live import calibrate

    found = calibrate(settings)
    return "ok", (
        f"{found.flops / 1e9:.0f} GFLOP/s in prompts, weights read at {found.weight_bytes_per_s / 1e9:.1f} GB/s and "
        f"KV at {found.kv_bytes_per_s / 1e9:.1f} GB/s; kept in {file()}"
    )


def huge_pages(machine: Machine) -> Finding:
    """Transparent huge pages make reading weights and blocks cheaper; Tenure works without them."""
    good = machine.huge_pages in ("always", "madvise")
    return Finding("huge pages", "ok" if good else "note", f"transparent huge pages: {machine.huge_pages}")


def model(settings: Settings) -> tuple[State, str]:
    """The model that would be served, by its header; weights stay unread."""
    from tenure.cli.compose import model_source
    from tenure.models import inspect
    from tenure.spec import KvGeometry

    info = inspect(model_source(settings))
    per_token = KvGeometry.of(info.shape).token_bytes("bf16")
    return "ok", (
        f"{info.name} ({info.kind}, {info.architecture}), {human(info.file_bytes)}, context "
        f"{info.shape.context_length} tokens, {per_token} bytes of KV per token in bf16"
    )
