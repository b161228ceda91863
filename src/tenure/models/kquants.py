"""GGUF's K-quants and their kin: what their bytes mean, and how they are kept here.

A block of 256 (or 32) weights becomes values of ours with a scale per 32. Where the stored integers fit one of our
formats they stay as they are: IQ4_NL and Q5_0 lose nothing, Q4_K and IQ4_XS only what rounding a product of two scales
to f16 costs. The others are rounded to int8.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
Bytes = NDArray[np.uint8]
U16 = NDArray[np.uint16]

GROUP = 32
_IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)
"""The sixteen values of an IQ4 weight."""


@dataclass(frozen=True, slots=True)
class Groups:
    """Weights by groups: scale * q + low, q i8[blocks, groups, size], scale and low f32[blocks, groups]."""

    q: NDArray[np.int8]
    scale: F32
    low: F32 | None = None

    def values(self) -> F32:
        """f32[blocks, weights per block]"""
        found = self.q.astype(np.float32)
        found *= self.scale[:, :, None]
        if self.low is not None:
            found += self.low[:, :, None]
        return found.reshape(len(found), -1)


def _half(blocks: Bytes, at: int) -> F32:
    """The f16 at byte `at` of every block, f32[blocks, 1]."""
    values: F32 = blocks[:, at : at + 2].copy().view("<f2").astype(np.float32)
    return values


def _halves(packed: Bytes) -> Bytes:
    """u8[blocks, n] of two nibbles → u8[blocks, 2 n]: all low ones, then all high ones."""
    return np.concatenate([packed & 15, packed >> 4], axis=1)


def _bits(packed: Bytes, width: int, chunk: int) -> Bytes:
    """Fields of `width` bits: of every `chunk` bytes first the lowest field of each, then the next one, and so on."""
    shifts = np.arange(0, 8, width, dtype=np.uint8)[None, None, :, None]
    found: Bytes = (packed.reshape(len(packed), -1, 1, chunk) >> shifts) & np.uint8((1 << width) - 1)
    return found.reshape(len(packed), -1)


def _q2_k(blocks: Bytes) -> Groups:
    scales, d, low = blocks[:, :16], _half(blocks, 80), _half(blocks, 82)
    q = _bits(blocks[:, 16:80], 2, 32).view(np.int8).reshape(-1, 16, 16)
    return Groups(q, d * (scales & 15), -low * (scales >> 4))


def _q3_k(blocks: Bytes) -> Groups:
    packed = blocks[:, 96:108]
    low = _halves(packed[:, :8])
    high = _bits(packed[:, 8:12], 2, 4)
    scale = (low | high << 4).view(np.int8) - np.int8(32)
    top = _bits(blocks[:, :32], 1, 32)
    q = (_bits(blocks[:, 32:96], 2, 32) | top << 2).view(np.int8) - np.int8(4)
    return Groups(q.reshape(-1, 16, 16), _half(blocks, 108) * scale)


def _six_bits(packed: Bytes) -> tuple[Bytes, Bytes]:
    """The eight scales and eight minima that Q4_K and Q5_K pack into 12 bytes."""
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scale = np.concatenate([first & 63, third & 15 | first >> 6 << 4], axis=1)
    low = np.concatenate([second & 63, third >> 4 | second >> 6 << 4], axis=1)
    return scale, low


def _q4_k(blocks: Bytes) -> Groups:
    scale, low = _six_bits(blocks[:, 4:16])
    q = _bits(blocks[:, 16:144], 4, 32).view(np.int8)
    return Groups(q.reshape(-1, 8, GROUP), _half(blocks, 0) * scale, -_half(blocks, 2) * low)


def _q5_k(blocks: Bytes) -> Groups:
    scale, low = _six_bits(blocks[:, 4:16])
    q = (_bits(blocks[:, 48:176], 4, 32) | _bits(blocks[:, 16:48], 1, 32) << 4).view(np.int8)
    return Groups(q.reshape(-1, 8, GROUP), _half(blocks, 0) * scale, -_half(blocks, 2) * low)


def _q6_k(blocks: Bytes) -> Groups:
    low, high = _bits(blocks[:, :128], 4, 64), _bits(blocks[:, 128:192], 2, 32)
    q = (low | high << 4).view(np.int8) - np.int8(32)
    return Groups(q.reshape(-1, 16, 16), _half(blocks, 208) * blocks[:, 192:208].view(np.int8))


def _q5_0(blocks: Bytes) -> Groups:
    top = _bits(blocks[:, 2:6], 1, 1)
    q = (_halves(blocks[:, 6:22]) | top << 4).view(np.int8) - np.int8(16)
    return Groups(q.reshape(-1, 1, GROUP), _half(blocks, 0))


def _q5_1(blocks: Bytes) -> Groups:
    top = _bits(blocks[:, 4:8], 1, 1)
    q = (_halves(blocks[:, 8:24]) | top << 4).view(np.int8)
    return Groups(q.reshape(-1, 1, GROUP), _half(blocks, 0), _half(blocks, 2))


def _iq4_nl(blocks: Bytes) -> Groups:
    return Groups(_IQ4[_halves(blocks[:, 2:18])].reshape(-1, 1, GROUP), _half(blocks, 0))


def _iq4_xs(blocks: Bytes) -> Groups:
    low, high = _bits(blocks[:, 4:8], 4, 1), _bits(blocks[:, 2:4], 2, 1)
    scale = (low | high << 4).view(np.int8) - np.int8(32)
    return Groups(_IQ4[_bits(blocks[:, 8:136], 4, 16)].reshape(-1, 8, GROUP), _half(blocks, 0) * scale)


_READERS: dict[str, tuple[int, Callable[[Bytes], Groups]]] = {
    "Q2_K": (84, _q2_k), "Q3_K": (110, _q3_k), "Q4_K": (144, _q4_k), "Q5_K": (176, _q5_k), "Q6_K": (210, _q6_k),
    "Q5_0": (22, _q5_0), "Q5_1": (24, _q5_1), "IQ4_NL": (18, _iq4_nl), "IQ4_XS": (136, _iq4_xs),
}  # fmt: skip
KINDS = frozenset(_READERS)
_AS_THEY_ARE: dict[str, Literal["int8", "int4"]] = {
    "Q5_0": "int8", "IQ4_NL": "int8", "IQ4_XS": "int8", "Q4_K": "int4",
}  # fmt: skip
"""Kinds whose integers are kept."""
_BYTES = 1 << 21
"""About so many bytes are unpacked at once: what is made of them on the way is ten times as large."""


def read(raw: Bytes, kind: str) -> Groups:
    """The groups of all blocks in `raw`."""
    size, reader = _READERS[kind]
    return reader(raw.reshape(-1, size))


def dequantise(raw: Bytes, kind: str) -> F32:
    """The exact values of u8[n, bytes per row], f32[n, k]."""
    return read(raw, kind).values().reshape(len(raw), -1)


def kept_as(kind: str) -> Literal["int8", "int4"]:
    """The format of ours that is nearest."""
    return _AS_THEY_ARE.get(kind, "int8")


def keep(raw: Bytes, kind: str) -> tuple[Bytes | NDArray[np.int8], U16, U16 | None]:
    """The rows in `raw` as `kept_as(kind)`: values [n, k], f16 bits of scale and (int4) min [n, k/32]."""
    rows = max(1, _BYTES // raw.shape[1])
    made = [_keep_rows(raw[at : at + rows], kind) for at in range(0, len(raw), rows)]
    values, scale, low = zip(*made, strict=True)
    return np.concatenate(values), np.concatenate(scale), None if low[0] is None else np.concatenate(low)


def _keep_rows(raw: Bytes, kind: str) -> tuple[NDArray[np.int8] | Bytes, U16, U16 | None]:
    n, groups = len(raw), read(raw, kind)
    kept = _AS_THEY_ARE.get(kind)
    if kept is None:
        return round_int8(groups.values().reshape(n, -1, GROUP))
    scale = groups.scale.astype(np.float16).view(np.uint16).reshape(n, -1)
    if kept == "int8":
        return groups.q.reshape(n, -1), scale, None
    assert groups.low is not None
    low = groups.low.astype(np.float16).view(np.uint16).reshape(n, -1)
    return groups.q.view(np.uint8).reshape(n, -1), scale, low


def inverse(scale: NDArray[np.float16]) -> F32:
    """1 / scale, 0 for 0."""
    wide = scale.astype(np.float32)
    return np.divide(1, wide, out=np.zeros_like(wide), where=wide != 0)


def round_int8(groups: F32) -> tuple[NDArray[np.int8], U16, None]:
    """f32[n, groups, 32] → int8[n, k] and the f16 bits of its scales: the largest magnitude of a group is ±127."""
    scale = (np.abs(groups).max(axis=2) / np.float32(127)).astype(np.float16)
    q = np.rint(groups * inverse(scale)[:, :, None]).clip(-127, 127).astype(np.int8)
    return q.reshape(len(groups), -1), scale.view(np.uint16), None
