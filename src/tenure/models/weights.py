"""Weight matrices on their way from a file to the decoder: decode, convert, stack. Vectorised; no row loops.

All quantised values are in groups of 32 along a row: int8 is `scale * q`, int4 is `scale * q + min` with q in 0..15,
scale and min being f16 kept as their bits (u16). GGUF's Q8_0, Q4_0 and Q4_1 become these without losing a bit; see
kquants for its other types.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tenure.models import kquants

Format = Literal["f32", "bf16", "int8", "int4"]
FORMATS: tuple[Format, ...] = ("f32", "bf16", "int8", "int4")
GROUP = 32

F32 = NDArray[np.float32]
U16 = NDArray[np.uint16]
Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Matrix:
    """[n, k] values: f32, bf16 bits (u16), int8 or int4 (u8, one value a byte); scale and min u16[n, k/32] f16 bits.

    `stored` names the type in the file it came from.
    """

    format: Format
    values: NDArray[Any]
    scale: U16 | None = None
    min: U16 | None = None
    stored: str = ""

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]

    def rows(self, index: NDArray[np.int64]) -> Matrix:
        """Some of its rows."""
        scale, low = (None if part is None else part[index] for part in (self.scale, self.min))
        return Matrix(self.format, self.values[index], scale, low, self.stored)

    @property
    def label(self) -> str:
        return f"{self.format} ({self.stored})"


def decode(raw: Bytes, kind: str, target: str = "auto") -> Matrix:
    """The matrix whose rows are stored in `raw` (u8[n, bytes per row]) as `kind` (a GGUF or safetensors type).

    K-quants and their kin become the nearest of our formats, unless `target` names another one: then f32, so that
    they are rounded once.
    """
    n = raw.shape[0]
    if kind in kquants.KINDS:
        if target not in ("auto", kquants.kept_as(kind)):
            return Matrix("f32", kquants.dequantise(raw, kind), stored=kind)
        return Matrix(kquants.kept_as(kind), *kquants.keep(raw, kind), stored=kind)
    if kind == "F32":
        return Matrix("f32", raw.view("<f4"), stored=kind)
    if kind == "F16":
        return Matrix("f32", raw.view("<f2").astype(np.float32), stored=kind)
    if kind == "BF16":
        return Matrix("bf16", raw.view("<u2"), stored=kind)
    if kind == "Q8_0":
        blocks = raw.reshape(n, -1, 34)
        scale = blocks[:, :, :2].copy().view("<u2")[:, :, 0]
        return Matrix("int8", blocks[:, :, 2:].reshape(n, -1).view(np.int8), scale, stored=kind)
    if kind == "Q4_0":
        blocks = raw.reshape(n, -1, 18)
        scale = blocks[:, :, :2].copy().view("<u2")[:, :, 0]
        # -8 * scale is exact in f16: a power of two, unless it overflows, and such a weight is no weight.
        low = (scale.view(np.float16) * np.float16(-8)).view(np.uint16)
        return Matrix("int4", _nibbles(blocks[:, :, 2:]), scale, low, stored=kind)
    if kind == "Q4_1":
        blocks = raw.reshape(n, -1, 20)
        pair = blocks[:, :, :4].copy().view("<u2")
        scale, low = np.ascontiguousarray(pair[:, :, 0]), np.ascontiguousarray(pair[:, :, 1])
        return Matrix("int4", _nibbles(blocks[:, :, 4:]), scale, low, stored=kind)
    raise AssertionError(f"no reader for the type {kind}")


def _nibbles(packed: Bytes) -> Bytes:
    """u8[n, groups, 16] with values 0..15 in the low and 16..31 in the high halves → u8[n, groups * 32]."""
    n, groups, _ = packed.shape
    values = np.empty((n, groups, 2, 16), np.uint8)
    np.bitwise_and(packed, 15, out=values[:, :, 0])
    np.right_shift(packed, 4, out=values[:, :, 1])
    return values.reshape(n, groups * GROUP)


def to_f32(matrix: Matrix) -> F32:
    """The values as f32[n, k]; exact for every format."""
    if matrix.format == "f32":
        return np.ascontiguousarray(matrix.values, np.float32)
    if matrix.format == "bf16":
        return (matrix.values.astype(np.uint32) << 16).view(np.float32)
    n, k = matrix.shape
    assert matrix.scale is not None
    grouped = matrix.values.reshape(n, -1, GROUP).astype(np.float32)
    grouped *= matrix.scale.view(np.float16).astype(np.float32)[:, :, None]
    if matrix.min is not None:
        grouped += matrix.min.view(np.float16).astype(np.float32)[:, :, None]
    return grouped.reshape(n, k)


def convert(matrix: Matrix, target: Format) -> Matrix:
    """The matrix in another format, rounded to nearest. int8 and int4 need k to be a multiple of 32."""
    if matrix.format == target:
        return matrix
    values = to_f32(matrix)
    if target == "f32":
        return Matrix("f32", values, stored=matrix.stored)
    if target == "bf16":
        return Matrix("bf16", round_bf16(values), stored=matrix.stored)
    n, k = matrix.shape
    groups = values.reshape(n, k // GROUP, GROUP)
    if target == "int8":
        return Matrix(target, *kquants.round_int8(groups), stored=matrix.stored)
    q, scale, low = _quantise_int4(groups)
    return Matrix(target, q.reshape(n, k), scale, low, stored=matrix.stored)


def round_bf16(values: F32) -> U16:
    """f32 → bf16 bits, round to nearest even; a NaN stays a NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    nan = np.isnan(values)
    if nan.any():
        rounded[nan] = 0x7FC0
    return rounded


def _quantise_int4(groups: F32) -> tuple[Bytes, U16, U16]:
    """The smallest value of a group becomes 0, the largest 15; rounded against the f16 scale that is stored."""
    low = groups.min(axis=2).astype(np.float16)
    span = groups.max(axis=2) - low.astype(np.float32)
    scale = (span / np.float32(15)).astype(np.float16)
    q = np.rint((groups - low.astype(np.float32)[:, :, None]) * kquants.inverse(scale)[:, :, None])
    return q.clip(0, 15).astype(np.uint8), scale.view(np.uint16), low.view(np.uint16)


def common_format(parts: Sequence[Matrix]) -> Format:
    """The narrowest format that holds all parts without loss; a fused matrix has one format.

    Beside a part that lost something on its way here, four bits may become eight with as little loss.
    """
    formats = {part.format for part in parts}
    if len(formats) == 1:
        return parts[0].format
    lossy = any(part.stored in kquants.KINDS for part in parts)
    if formats == {"int8", "int4"} and (lossy or all(p.format == "int8" or p.stored == "Q4_0" for p in parts)):
        return "int8"
    return "f32"


def sampled_error(kept: Matrix, parts: Sequence[tuple[Bytes, str]]) -> tuple[float, float]:
    """Squares of what `kept` lost of its parts (rows as stored, their type), and of their values, over some rows."""
    lost = whole = 0.0
    start = 0
    for raw, kind in parts:
        rows = np.unique(np.linspace(0, len(raw) - 1, 16).astype(np.int64))
        exact = kquants.dequantise(raw[rows], kind) if kind in kquants.KINDS else to_f32(decode(raw[rows], kind))
        ours = to_f32(kept.rows(start + rows))
        lost += float(np.square(ours - exact, dtype=np.float64).sum())
        whole += float(np.square(exact, dtype=np.float64).sum())
        start += len(raw)
    return lost, whole


def stack(parts: Sequence[Matrix]) -> Matrix:
    """The parts one above the other, in their common format."""
    target = common_format(parts)
    same = [_shift_int4(p) if target == "int8" and p.stored == "Q4_0" else convert(p, target) for p in parts]
    stored = "+".join(dict.fromkeys(p.stored for p in parts))
    if len(same) == 1:
        return Matrix(target, same[0].values, same[0].scale, same[0].min, stored)
    scales, lows = [p.scale for p in same if p.scale is not None], [p.min for p in same if p.min is not None]
    return Matrix(
        target,
        np.concatenate([p.values for p in same]),
        np.concatenate(scales) if scales else None,
        np.concatenate(lows) if lows else None,
        stored,
    )


def _shift_int4(matrix: Matrix) -> Matrix:
    """Q4_0's scale * q - 8 * scale as int8: scale * (q - 8), the same values."""
    return Matrix("int8", matrix.values.view(np.int8) - np.int8(8), matrix.scale, stored=matrix.stored)
