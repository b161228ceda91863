"""Linear layers: against the oracle, and bit for bit against themselves in every company."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from tenure import _native
from tenure.device import reference_linear as oracle
from tenure.device.reference import to_bf16

FORMATS: tuple[oracle.Format, ...] = ("f32", "bf16", "int8", "int4")
ISAS: list[str] = _native.isas()
ROWS = (1, 2, 3, 5, 7, 8, 12, 13, 16, 17, 31, 32, 33, 64, 65, 513)
SHAPES = ((1, 32), (31, 64), (32, 32), (33, 96), (100, 576), (70, 1536))
ODD_SHAPES = ((1, 1), (5, 3), (40, 37), (65, 50))  # f32 and bf16 take any k


def make_weights(fmt: oracle.Format, n: int, k: int, seed: int = 0) -> oracle.Weights:
    rng = np.random.default_rng(seed)
    if fmt == "f32":
        return oracle.Weights(fmt, rng.standard_normal((n, k)).astype(np.float32))
    if fmt == "bf16":
        return oracle.Weights(fmt, to_bf16(rng.standard_normal((n, k)).astype(np.float32)))
    scale = rng.uniform(1e-3, 1e-2, (n, k // 32)).astype(np.float16).view(np.uint16)
    if fmt == "int8":
        return oracle.Weights(fmt, rng.integers(-128, 128, (n, k)).astype(np.int8), scale)
    low = rng.normal(0, 0.05, (n, k // 32)).astype(np.float16).view(np.uint16)
    return oracle.Weights(fmt, rng.integers(0, 16, (n, k)).astype(np.uint8), scale, low)


def pack(weights: oracle.Weights) -> _native.Linear:
    return _native.Linear(weights.format, weights.w, weights.scale, weights.min)


def make_rows(m: int, k: int, seed: int = 1) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((m, k)).astype(np.float32)


def shapes(fmt: str) -> tuple[tuple[int, int], ...]:
    return SHAPES + ODD_SHAPES if fmt in ("f32", "bf16") else SHAPES


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("fine", [False, True])
@pytest.mark.parametrize("fmt", FORMATS)
def test_equals_the_oracle_within_float32_summation(fmt: oracle.Format, fine: bool, isa: str) -> None:
    for n, k in shapes(fmt):
        weights, x = make_weights(fmt, n, k), make_rows(19, k)
        want = oracle.linear(weights, x, fine)
        got = pack(weights).forward(x, threads=1, isa=isa, fine=fine)
        assert got.shape == (19, n)
        assert (np.abs(got - want.y) <= want.bound).all(), (n, k)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("fmt", "fine"), [*((fmt, False) for fmt in FORMATS), ("int8", True), ("int4", True)])
def test_a_row_does_not_depend_on_its_company(fmt: oracle.Format, fine: bool, isa: str) -> None:
    """Bit for bit, for every number of rows, every position and one or two threads."""
    k = 192
    layer = pack(make_weights(fmt, 97, k))
    x = make_rows(max(ROWS), k)
    alone = np.concatenate([layer.forward(x[r : r + 1], threads=1, isa=isa, fine=fine) for r in range(len(x))])
    for m in ROWS:
        for first in {0, 1, len(x) - m} if m < len(x) else {0}:
            for threads in (1, 2):
                got = layer.forward(x[first : first + m], threads=threads, isa=isa, fine=fine)
                assert np.array_equal(got, alone[first : first + m]), (m, first, threads)


@pytest.mark.parametrize("fmt", FORMATS)
def test_wide_layers_split_over_items_are_invariant(fmt: oracle.Format) -> None:
    """Wide enough for several panels per work item, deep enough for several row chunks."""
    layer = pack(make_weights(fmt, 2080, 64))
    x = make_rows(300, 64)
    whole = layer.forward(x, threads=2)
    for first, m in ((0, 1), (239, 2), (240, 60), (7, 16), (100, 17)):
        assert np.array_equal(layer.forward(x[first : first + m], threads=3), whole[first : first + m])


@pytest.mark.parametrize("fmt", FORMATS)
def test_deep_layers_in_small_row_chunks_are_invariant(fmt: oracle.Format) -> None:
    """Deep enough that few rows fill the L2 cache, so that 101 rows are several chunks of whole tiles and a rest."""
    layer = pack(make_weights(fmt, 40, 16384))
    x = make_rows(101, 16384)
    whole = layer.forward(x, threads=2)
    for first, m in ((0, 1), (23, 2), (24, 1), (36, 36), (60, 41), (100, 1)):
        assert np.array_equal(layer.forward(x[first : first + m]), whole[first : first + m])


@pytest.mark.skipif("avx2" not in ISAS, reason="needs AVX2")
@pytest.mark.parametrize("fmt", ["f32", "int8", "int4"])
def test_instruction_sets_with_fma_agree_to_the_bit(fmt: oracle.Format) -> None:
    layer, x = pack(make_weights(fmt, 100, 576)), make_rows(17, 576)
    for fine in (False, True):
        results = [layer.forward(x, isa=isa, fine=fine) for isa in ISAS if isa != "portable"]
        assert all(np.array_equal(results[0], other) for other in results)


@pytest.mark.parametrize("fmt", ["int8", "int4"])
def test_fifteen_bits_are_a_hundred_times_nearer_than_eight(fmt: oracle.Format) -> None:
    weights, x = make_weights(fmt, 100, 576), make_rows(17, 576)
    exact = x.astype(np.float64) @ oracle.dequantise(weights).astype(np.float64).T
    off = {fine: np.abs(pack(weights).forward(x, fine=fine) - exact).mean() for fine in (False, True)}
    assert off[True] < off[False] / 100


@pytest.mark.parametrize("fmt", FORMATS)
def test_packing_is_lossless(fmt: oracle.Format) -> None:
    for n, k in shapes(fmt):
        weights = make_weights(fmt, n, k)
        assert np.array_equal(pack(weights).dequantise(), oracle.dequantise(weights)), (n, k)


def test_every_value_and_every_scale_survives_packing() -> None:
    n = 64
    w = np.tile(np.arange(-128, 128, dtype=np.int8), (n, 1))
    scale = np.arange(n * 8, dtype=np.uint16).reshape(n, 8) * np.uint16(60)  # every exponent below infinity
    scale[:, 1::2] |= 0x8000
    scale[0, :4] = (0, 1, 0x03FF, 0x8001)
    weights = oracle.Weights("int8", w, scale)
    assert np.array_equal(pack(weights).dequantise(), oracle.dequantise(weights))
    nibbles = oracle.Weights("int4", np.tile(np.arange(32, dtype=np.uint8) % 16, (n, 8)), scale, scale[::-1].copy())
    assert np.array_equal(pack(nibbles).dequantise(), oracle.dequantise(nibbles))
    # and in the product: a one-hot row reads one column of W back
    x = np.zeros((32, 256), np.float32)
    x[np.arange(32), np.arange(32) * 8] = 127.0
    for isa in ISAS:
        got = pack(weights).forward(x, isa=isa)
        assert np.array_equal(got, (oracle.dequantise(weights)[:, ::8] * np.float32(127)).T)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("fmt", FORMATS)
def test_bias_and_accumulate(fmt: oracle.Format, isa: str) -> None:
    layer, x = pack(make_weights(fmt, 45, 96)), make_rows(14, 96)
    bias = make_rows(1, 45, seed=2)[0]
    plain = layer.forward(x, isa=isa)
    assert np.array_equal(layer.forward(x, isa=isa, bias=bias), plain + bias)
    y = make_rows(14, 45, seed=3)
    want = y + (plain + bias)
    layer.forward_into(x, y, isa=isa, bias=bias, accumulate=True, threads=2)
    assert np.array_equal(y, want)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("fmt", FORMATS)
def test_nothing_is_written_beside_the_outputs(fmt: oracle.Format, isa: str) -> None:
    """n = 33 ends one output into a panel: its 31 neighbours belong to the next row."""
    layer, x = pack(make_weights(fmt, 33, 64)), make_rows(13, 64)
    y = np.full((14, 33), 7.0, np.float32)
    layer.forward_into(x, y[:13], isa=isa)
    assert (y[13] == 7.0).all()
    assert np.array_equal(y[:13], layer.forward(x, isa=isa))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("fine", [False, True])
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_a_poisoned_row_shows_it_and_spares_the_others(fmt: oracle.Format, isa: str, fine: bool, poison: float) -> None:
    layer, x = pack(make_weights(fmt, 40, 96)), make_rows(9, 96)
    clean = layer.forward(x, isa=isa, fine=fine)
    x[4, 70] = poison
    got = layer.forward(x, isa=isa, fine=fine)
    assert not np.isfinite(got[4]).any()
    assert np.array_equal(np.delete(got, 4, 0), np.delete(clean, 4, 0))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("fine", [False, True])
@pytest.mark.parametrize("fmt", ["int8", "int4"])
def test_zero_and_vanishing_groups(fmt: oracle.Format, isa: str, fine: bool) -> None:
    layer, x = pack(make_weights(fmt, 40, 96)), make_rows(3, 96)
    x[0] = 0
    x[1, 32:64] = 1e-38
    got = layer.forward(x, isa=isa, fine=fine)
    assert (got[0] == 0).all()
    x[1, 32:64] = 0
    assert np.array_equal(got, layer.forward(x, isa=isa, fine=fine))


def test_no_rows_is_an_empty_result() -> None:
    assert pack(make_weights("int4", 40, 64)).forward(np.zeros((0, 64), np.float32)).shape == (0, 40)


def test_packed_bytes_are_those_of_the_formats() -> None:
    """int4 is Q4_1's 20 bytes and int8 is Q8_0's 34 bytes per 32 weights: no padding for n a multiple of 32."""
    per_weight = {"f32": 4.0, "bf16": 2.0, "int8": 34 / 32, "int4": 20 / 32}
    for fmt in FORMATS:
        assert pack(make_weights(fmt, 64, 96)).nbytes == 64 * 96 * per_weight[fmt]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("int9", np.zeros((2, 32), np.int8)), "unknown weight format 'int9'"),
        (("f32", np.zeros((2, 32), np.float64)), "w must be float32"),
        (("bf16", np.zeros((2, 32), np.float32)), "w must be uint16"),
        (("f32", np.zeros((0, 32), np.float32)), "n and k must be positive"),
        (("int8", np.zeros((2, 40), np.int8), np.zeros((2, 1), np.uint16)), r"scale must have shape \[n, k / 32\]"),
        (("int8", np.zeros((2, 33), np.int8)), "needs scales"),
        (("int4", np.zeros((2, 32), np.uint8), np.zeros((2, 1), np.uint16)), "int4 needs mins"),
        (
            ("int4", np.zeros((2, 32), np.uint8), np.zeros((2, 1), np.uint16), np.zeros((1, 1), np.uint16)),
            "min must have",
        ),
    ],
)
def test_wrong_weights_are_refused_by_name(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _native.Linear(*arguments)


def test_wrong_calls_are_refused_by_name() -> None:
    layer, x = pack(make_weights("f32", 8, 32)), make_rows(2, 32)
    with pytest.raises(ValueError, match=r"x must have shape \[m, k\]"):
        layer.forward(x[:, :16].copy())
    with pytest.raises(ValueError, match=r"bias must have shape \[n\]"):
        layer.forward(x, bias=np.zeros(7, np.float32))
    with pytest.raises(ValueError, match=r"y must have shape \[m, n\]"):
        layer.forward_into(x, np.zeros((3, 8), np.float32))
    with pytest.raises(ValueError, match="unknown instruction set 'sse9'"):
        layer.forward(x, isa="sse9")
    with pytest.raises(ValueError, match="threads must be between"):
        layer.forward(x, threads=-1)
