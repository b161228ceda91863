"""From a machine's calibration to predictions: time to first token, and tokens a second."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from tenure.errors import ConfigError
from tenure.planner.anatomy import Anatomy
from tenure.planner.memory import Room
from tenure.spec import seen


@dataclass(frozen=True, slots=True)
class Calibration:
    """What `tenure doctor --calibrate` measured on a machine, with one model and one format of weights."""

    machine: str
    """Processor, threads and instruction set: another machine has another calibration."""
    model: str
    weights: str
    flops: float
    """Of matrices in a long prompt, per second."""
    attention_flops: float
    """Of attention in a long prompt, per second."""
    weight_bytes_per_s: float
    """Read by steps of one row."""
    kv_bytes_per_s: float
    """Read by steps of one row over a long context."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def of_json(found: Mapping[str, Any], where: str) -> Calibration:
        """ConfigError when a field is missing or no positive number."""
        values: dict[str, Any] = {}
        for field in fields(Calibration):
            value = found.get(field.name)
            if field.type == "str" and isinstance(value, str):
                values[field.name] = value
            elif field.type == "float" and isinstance(value, int | float) and math.isfinite(value) and value > 0:
                values[field.name] = float(value)
            else:
                raise ConfigError("calibration", f"{where}: {field.name} is {value!r}; run `tenure doctor --calibrate`")
        return Calibration(**values)


@dataclass(frozen=True, slots=True)
class Speed:
    """Predicted for one conversation at the context planned, nothing else running. Seconds, tokens per second."""

    ttft_s: float
    """A prompt as long as the context, nothing reused."""
    ttft_shared_s: float
    """The same when the shared prefix is."""
    tokens_per_s: float
    tokens_per_s_all: float
    """Of all conversations that fit together, stepping side by side."""


def predict(anatomy: Anatomy, calibration: Calibration, room: Room, context: int, shared: int, weights: str) -> Speed:
    """What a conversation of `context` tokens would see in the room's codec."""
    count = max(1, min(64, room.conversations(context, shared)))
    read = anatomy.read_bytes(weights) / calibration.weight_bytes_per_s
    per_sequence = room.bytes_of(context) / calibration.kv_bytes_per_s
    compute = 2 * anatomy.active / calibration.flops
    # Side by side, a step reads the weights once and multiplies each row: whichever takes longer.
    return Speed(
        ttft_s=prefill_s(anatomy, calibration, 0, context),
        ttft_shared_s=prefill_s(anatomy, calibration, shared, context),
        tokens_per_s=1 / (read + per_sequence),
        tokens_per_s_all=count / (max(read, count * compute) + count * per_sequence),
    )


def prefill_s(anatomy: Anatomy, calibration: Calibration, begin: int, end: int) -> float:
    """Seconds to compute positions [begin, end), those before being held."""
    matrices = 2 * anatomy.active * (end - begin) / calibration.flops
    return matrices + attention_flops(anatomy, begin, end) / calibration.attention_flops


def attention_flops(anatomy: Anatomy, begin: int, end: int) -> float:
    """Multiplications and additions of scores and sums for positions [begin, end): a row sees itself too, and in layers
    with a window no more tokens than that."""
    return 4.0 * anatomy.attention * seen(anatomy.groups, begin + 0.5, end + 0.5)
