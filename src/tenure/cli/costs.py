"""What a step costs and what memory holds, for `tenure replay` and `lint`: from this machine's calibration and a
model's config, the budget divided as `tenure serve` divides it."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from tenure.cli import calibration
from tenure.config import amount
from tenure.errors import ConfigError, ModelNotFound
from tenure.sim.replay import Calibration as Costs

if TYPE_CHECKING:
    from tenure.planner.anatomy import Anatomy
    from tenure.planner.speed import Calibration
    from tenure.spec import ArenaLayout

ANY_MACHINE = 1 << 62
"""Bytes: replay may plan for a machine that is larger than this one."""
LEAST_MS = 1e-4
"""No cost is below this: the cost model divides by them."""


@dataclass(frozen=True, slots=True)
class Known:
    """A cost model, and where it comes from, in words."""

    costs: Costs
    source: str

    def __str__(self) -> str:
        costs = self.costs
        return (
            f"{self.source}; {costs.base_ms:.3g} ms a step, {costs.prefill_ms:.3g} ms a token of a prompt, "
            f"{costs.decode_ms:.3g} ms one of an answer, twice that with {costs.doubling:.0f} tokens to look back at"
        )

    def told(self) -> dict[str, object]:
        """For `--json`."""
        costs = self.costs
        return {
            "source": self.source, "base_ms": costs.base_ms, "decode_ms": costs.decode_ms,
            "prefill_ms": costs.prefill_ms, "doubling": costs.doubling,
        }  # fmt: skip


def read(file: Path) -> Costs:
    """Read a JSON object with any of the costs. ConfigError names what is wrong."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError("calibration", f"{file}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError("calibration", f"{file}: not valid JSON: {error}") from None
    names = [item.name for item in fields(Costs) if item.type == "float"]
    if not isinstance(found, dict) or not set(found) <= set(names):
        raise ConfigError("calibration", f"{file}: expected an object with some of {', '.join(names)}")
    for name, value in found.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ConfigError("calibration", f"{file}: {name} must be a number above 0, not {value!r}")
    return Costs(**found)


def known(model: Anatomy | None, weights: str, codec: str, file: Path | None = None) -> Known:
    """The cost model of `file`, else of this machine's calibration, else the default. ConfigError when `file` is
    neither what `tenure doctor --calibrate` writes nor an object with costs."""
    from tenure.planner.speed import Calibration

    def of_model(costs: Costs) -> Costs:
        if model is None:
            return costs
        return replace(costs, kv_bytes_per_token=_token_bytes(model, codec), codec=codec, groups=model.groups)

    if file is not None and not _of_doctor(file):
        return Known(of_model(read(file)), str(file))
    default = of_model(Costs())
    measured = calibration.here() if file is None else Calibration.of_json(json.loads(file.read_bytes()), str(file))
    if measured is None:
        why = "no calibration of this machine; `tenure doctor --calibrate` measures it in seconds"
        return Known(default, f"the default, SmolLM2-135M on two cores: {why}")
    if model is None:
        return Known(default, "the default, SmolLM2-135M on two cores: no model to apply the calibration to")
    place = file or calibration.file()
    day = datetime.fromtimestamp(place.stat().st_mtime).strftime("%Y-%m-%d %H:%M")
    return Known(
        of_machine(measured, model, weights, codec),
        f"{model.name} on {measured.machine}, calibrated {day} with {measured.model} ({place})",
    )


def of_machine(measured: Calibration, model: Anatomy, weights: str, codec: str) -> Costs:
    """Steps of `model` on the machine that was measured.

    A step of one row takes as long as reading the weights does; each further row what multiplying it costs, and what
    reading its K and V does. The replay's cost model has one slope for prompts and answers: that of prompts, whose
    attention weighs more; an answer's row is taken to cost as much as its slope then says, if that is more.
    """
    per_row = 2e3 * model.active / measured.flops
    per_pair = 4e3 * model.attention / measured.attention_flops
    per_kv = 1e3 * _token_bytes(model, codec) / measured.kv_bytes_per_s
    doubling = per_row / per_pair if per_pair else float(1 << 40)
    decode = max(LEAST_MS, per_row, per_kv * doubling)
    read = 1e3 * model.read_bytes(weights) / measured.weight_bytes_per_s
    return Costs(
        base_ms=max(LEAST_MS, read - decode),
        decode_ms=decode,
        prefill_ms=max(LEAST_MS, per_row),
        doubling=doubling,
        kv_bytes_per_token=_token_bytes(model, codec),
        codec=codec,
        groups=model.groups,
    )


def weights_format(name: str) -> str:
    """One that `--weights` knows. ConfigError lists them."""
    from tenure.planner.anatomy import WEIGHT_FORMATS

    if name not in WEIGHT_FORMATS:
        raise ConfigError("weights", f"--weights {name!r}: known are {', '.join(WEIGHT_FORMATS)}")
    return name


def anatomy_of(source: str | None) -> Anatomy | None:
    """Of the model asked for, else of the embedded one; None when there is none. Its weights are not read. ModelError
    when the one asked for can't be read."""
    from tenure.models import find_default
    from tenure.models.anatomy import anatomy

    found = source or find_default()
    return None if found is None else anatomy(str(found))


@dataclass(frozen=True, slots=True)
class Room:
    """A size to replay against: blocks, and how the arena is cut when they are of several kinds."""

    blocks: int
    layout: ArenaLayout | None = None
    note: str = ""
    """Of a budget, in words: what of it is left for the KV cache."""
    share: float | None = None
    """Of the trace's unique blocks, when that was asked for."""


@dataclass(frozen=True, slots=True)
class Budgeting:
    """What a budget is divided by: the model, its weights' format, the codec, the ladder, and the trace's blocks."""

    model: Anatomy | None
    weights: str
    codec: str
    pressure: str
    block_tokens: int

    def room(self, words: str, param: str) -> Room:
        """Of `words`, such as 2GiB or 80 %, for weights and cache together (`param` memory) or the cache alone
        (kv_cache_memory_bytes). ConfigError says what is wrong; BudgetError, that it holds nothing."""
        from tenure.cli.compose import NO_MODEL
        from tenure.cli.machine import human, probe
        from tenure.engine.settings import EngineSettings, budget_of

        flag = f"--{param.replace('_', '-')} {words!r}"
        if self.model is None:
            raise ModelNotFound(f"{flag}: what the weights leave depends on the model. {NO_MODEL}")
        if self.model.served is None:
            raise ConfigError("model", f"{flag}: Tenure can't serve {self.model.name}: {self.model.unserved}")
        try:
            size = amount(words).resolve(probe().total_bytes)
        except ValueError as error:
            raise ConfigError(param, f"{flag}: {error}") from None
        total, alone = (size, None) if param == "memory" else (None, size)
        settings = EngineSettings(memory_bytes=total, kv_cache_bytes=alone, kv_codec=self.codec, pressure=self.pressure)
        geometry = replace(self.model.served, block_tokens=self.block_tokens)
        budget = budget_of(settings, geometry, self.model.weight_bytes(self.weights), ANY_MACHINE)
        weights = f"beside {human(budget.weight_bytes)} of weights" if param == "memory" else "as given"
        note = f"{words}: {human(budget.arena_bytes)} of KV cache {weights}, {budget.blocks} blocks"
        return Room(budget.blocks, budget.layout if len(budget.layout.kinds) > 1 else None, note)


def _token_bytes(model: Anatomy, codec: str) -> int:
    return max(1, sum(kind.geometry.token_bytes(codec) for kind in model.kinds if kind.geometry is not None))


def _of_doctor(file: Path) -> bool:
    """Whether a file is what `tenure doctor --calibrate` wrote. What can't be read is told by who reads it."""
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and "flops" in found
