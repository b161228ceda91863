"""Conversions between weight formats: lossless where they say so, bounded where they round."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from tenure.models import kquants, weights
from tenure.models.weights import Matrix


@pytest.fixture
def values() -> weights.F32:
    return np.random.default_rng(3).standard_normal((24, 96)).astype(np.float32)


def test_bf16_rounds_as_torch_does(values: weights.F32) -> None:
    odd = np.array([[0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, 3.3895314e38, 1.00390625]], np.float32)
    for each in (values, odd):
        want = torch.from_numpy(each).to(torch.bfloat16).view(torch.uint16).numpy()
        got = weights.round_bf16(each)
        assert np.array_equal(np.isnan(each), (got & 0x7FFF) > 0x7F80)
        assert np.array_equal(got[~np.isnan(each)], want[~np.isnan(each)])


@pytest.mark.parametrize(("target", "levels"), [("int8", 254), ("int4", 15)])
def test_rounding_stays_within_half_a_step(values: weights.F32, target: weights.Format, levels: int) -> None:
    made = weights.convert(Matrix("f32", values), target)
    groups = values.reshape(24, 3, 32)
    span = 2 * np.abs(groups).max(2) if target == "int8" else groups.max(2) - groups.min(2)
    error = np.abs(weights.to_f32(made).reshape(24, 3, 32) - groups).max(2)
    # Half a step, and what rounding scale and min to f16 adds.
    assert (error <= span / levels * 0.5 + np.abs(groups).max(2) * 2e-3).all()


@pytest.mark.parametrize("target", ["int8", "int4"])
def test_constant_and_zero_groups(target: weights.Format) -> None:
    flat = np.repeat(np.array([[0.0], [0.5], [-0.25]], np.float32), 32, 1)
    back = weights.to_f32(weights.convert(Matrix("f32", flat), target))
    assert np.allclose(back, flat, atol=1e-3)


def test_converting_to_its_own_format_changes_nothing(values: weights.F32) -> None:
    made = weights.convert(Matrix("f32", values), "int4")
    assert weights.convert(made, "int4") is made


def blocks(kind: str, seed: int) -> Matrix:
    quant = gguf.GGMLQuantizationType[kind]
    data = np.random.default_rng(seed).standard_normal((4, 64)).astype(np.float32)
    return weights.decode(np.ascontiguousarray(gguf.quantize(data, quant)).view(np.uint8), kind)


HALVES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q5_0": (0,),
          "Q5_1": (0, 2), "IQ4_NL": (0,), "IQ4_XS": (0,)}  # fmt: skip


def random_blocks(kind: str, rows: int, columns: int, seed: int = 0) -> weights.Bytes:
    """Rows of a K-quant of random bits, but scales that are numbers; gguf-py can read these types, not write them."""
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (rows * columns // block, size), np.uint8)
    for at in HALVES[kind]:
        least = 1e-5 if kind == "Q6_K" else 1e-4  # its own scales are larger
        raw[:, at : at + 2] = rng.uniform(least, 10 * least, (len(raw), 1)).astype(np.float16).view(np.uint8)
    return raw.reshape(rows, -1)


@pytest.mark.parametrize("kind", sorted(kquants.KINDS))
def test_k_quants_mean_what_gguf_py_says(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exact values bit for bit; what is kept within the rounding of its format, whatever the chunks."""
    raw = random_blocks(kind, 12, 512)
    want = gguf.dequantize(raw, gguf.GGMLQuantizationType[kind])
    assert np.array_equal(kquants.dequantise(raw, kind), want)
    assert np.array_equal(weights.to_f32(weights.decode(raw, kind, "f32")), want)
    kept = weights.decode(raw, kind)
    monkeypatch.setattr(kquants, "_BYTES", 1000)
    again = weights.decode(raw, kind)
    assert np.array_equal(kept.values, again.values)
    error = np.linalg.norm(weights.to_f32(kept) - want) / np.linalg.norm(want)
    assert error <= {"IQ4_NL": 0, "Q5_0": 0, "Q4_K": 5e-4, "IQ4_XS": 5e-4}.get(kind, 6e-3)
    assert kept.label == f"{'int4' if kind == 'Q4_K' else 'int8'} ({kind})"


def test_k_quants_of_two_kinds_in_one_matrix() -> None:
    stored = [(random_blocks("Q4_K", 20, 256), "Q4_K"), (random_blocks("Q6_K", 8, 256), "Q6_K")]
    made = weights.stack([weights.decode(*part) for part in stored])
    assert made.label == "int8 (Q4_K+Q6_K)"
    lost, whole = weights.sampled_error(made, stored)
    want = np.concatenate([kquants.dequantise(*part) for part in stored])
    measured = np.linalg.norm(weights.to_f32(made) - want) / np.linalg.norm(want)
    assert measured / 2 < (lost / whole) ** 0.5 < 2 * measured < 0.02


@pytest.mark.parametrize(
    ("kinds", "target"),
    [
        (["Q4_1", "Q4_1", "Q4_0"], "int4"),
        (["Q4_0", "Q8_0"], "int8"),
        (["Q4_1", "Q8_0"], "f32"),
        (["F16", "Q4_0"], "f32"),
        (["BF16", "BF16"], "bf16"),
        (["BF16", "F32"], "f32"),
    ],
)
def test_stacking_mixed_parts_loses_nothing(kinds: list[str], target: str) -> None:
    parts = [blocks(kind, seed) for seed, kind in enumerate(kinds)]
    made = weights.stack(parts)
    assert made.format == target
    assert np.array_equal(weights.to_f32(made), np.concatenate([weights.to_f32(p) for p in parts]))
    assert set(made.stored.split("+")) == set(kinds)
