"""Predictions follow from a calibration, and a broken one is refused."""

from __future__ import annotations

import dataclasses

import pytest
from tests.planner.test_memory import GEOMETRY, SMALL

from tenure.errors import ConfigError
from tenure.planner.anatomy import Kind
from tenure.planner.memory import Room
from tenure.planner.speed import Calibration, predict, prefill_s

MEASURED = Calibration("cpu", "small", "auto", 1e9, 1e9, 1e9, 1e9)
BUSY = dataclasses.replace(SMALL, attention=30 * 9 * 64)


def test_what_is_shared_is_not_computed_again() -> None:
    speed = predict(BUSY, MEASURED, Room(BUSY, "bf16", 1 << 28), 2048, 1024, "auto")
    assert 0 < speed.ttft_shared_s < speed.ttft_s
    split = prefill_s(BUSY, MEASURED, 0, 1024) + prefill_s(BUSY, MEASURED, 1024, 2048)
    assert split == pytest.approx(speed.ttft_s)
    # Two numbers by hand: 2 · 2²⁰ · 2048 of matrices, 4 · 17280 · 2048 · 2049 / 2 of attention.
    assert speed.ttft_s == pytest.approx((2 * 2**20 * 2048 + 4 * 17280 * 2048 * 2049 / 2) / 1e9)


def test_layers_with_windows_look_back_no_further() -> None:
    kinds = (Kind("full", 6, GEOMETRY.with_layers(6)), Kind("window 512", 24, GEOMETRY.with_layers(24), 512))
    windowed = dataclasses.replace(BUSY, kinds=kinds, served=None)
    assert prefill_s(windowed, MEASURED, 0, 512) == pytest.approx(prefill_s(BUSY, MEASURED, 0, 512), rel=1e-3)
    pairs = [sum(min(row + 1, most) for row in range(2048)) for most in (512, 2048)]
    seen = (24 * pairs[0] + 6 * pairs[1]) / 30
    found = prefill_s(windowed, MEASURED, 0, 2048)
    assert found == pytest.approx((2 * 2**20 * 2048 + 4 * 17280 * seen) / 1e9, rel=1e-4)
    split = prefill_s(windowed, MEASURED, 0, 100) + prefill_s(windowed, MEASURED, 100, 2048)
    assert split == pytest.approx(found) and found < 0.7 * prefill_s(BUSY, MEASURED, 0, 2048)
    states = dataclasses.replace(BUSY, kinds=(Kind("state", 30, state_bytes=64),), attention=0, served=None)
    assert prefill_s(states, MEASURED, 0, 2048) == pytest.approx(2 * 2**20 * 2048 / 1e9)


def test_fewer_bytes_are_read_faster() -> None:
    alone = [
        predict(BUSY, MEASURED, Room(BUSY, name, 1 << 28), 2048, 0, "auto").tokens_per_s for name in ("bf16", "int4")
    ]
    assert alone[0] == pytest.approx(1e9 / (2 * 2**20 + Room(BUSY, "bf16", 0).bytes_of(2048)))
    assert alone[1] > 2 * alone[0]


def test_together_is_more_than_alone() -> None:
    quick = dataclasses.replace(MEASURED, flops=1e11)
    speed = predict(BUSY, quick, Room(BUSY, "bf16", 1 << 30), 64, 0, "auto")
    assert speed.tokens_per_s_all > 1.2 * speed.tokens_per_s


def test_a_calibration_survives_json_and_a_broken_one_is_refused() -> None:
    found = MEASURED.to_json()
    assert Calibration.of_json(found, "file") == MEASURED
    for name, value in (("flops", 0), ("flops", "fast"), ("kv_bytes_per_s", float("nan")), ("machine", 3)):
        with pytest.raises(ConfigError, match=name):
            Calibration.of_json(found | {name: value}, "file")
    with pytest.raises(ConfigError, match="doctor --calibrate"):
        Calibration.of_json({}, "file")
