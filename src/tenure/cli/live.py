"""An engine to be measured: loaded quietly, with a bar that shows how far the measurement is."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from tenure.cli.compose import choose_isa, codec_name, model_source, progress
from tenure.cli.machine import budget, probe
from tenure.config import Settings

if TYPE_CHECKING:
    from tenure.engine import Engine
    from tenure.planner.speed import Calibration


@contextlib.contextmanager
def live(settings: Settings) -> Iterator[tuple[Engine, Callable[[str, float], None]]]:
    """An engine with the settings' model and budget, and whom to tell a stage and the share done."""
    choose_isa(settings)
    from tenure.engine import Engine, EngineSettings
    from tenure.models import load
    from tenure.spec import staging_codec

    granted, codec = budget(settings, probe()), codec_name(settings)
    with progress() as told:
        model = load(
            model_source(settings), weights=settings.weights, kv_codec=staging_codec(codec), threads=settings.threads,
            progress=told,
        )  # fmt: skip
        made = EngineSettings(
            memory_bytes=granted.memory_bytes, kv_cache_bytes=granted.kv_cache_bytes, kv_codec=codec,
            threads=settings.threads,
        )  # fmt: skip
        with Engine(model, made) as engine:
            yield engine, told


def machine_name(settings: Settings) -> str:
    """Processor, threads and instruction set: what a calibration is of."""
    from tenure import _native

    machine = probe()
    return f"{machine.cpu}, {settings.threads or machine.cores} threads, {_native.isa()}"


def calibrate(settings: Settings) -> Calibration:
    """Measure this machine with the settings' model, in seconds, and keep it for `tenure plan`."""
    from tenure.cli.calibration import keep
    from tenure.lab import speed
    from tenure.models.anatomy import anatomy

    with live(settings) as (engine, told):
        found = speed.calibrate(engine, anatomy(model_source(settings)), machine_name(settings), told)
    keep(found)
    return found
