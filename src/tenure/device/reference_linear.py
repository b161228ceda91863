"""The readable oracle of the native linear layers: what every kernel must compute, in numpy.

Rounding and quantising are reproduced bit for bit; sums are taken in float64, so a kernel is right when it differs from
them by no more than float32 summation can (`linear` gives that bound beside the result).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tenure.device.reference import from_bf16, to_bf16

Format = Literal["f32", "bf16", "int8", "int4"]
Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Bits = NDArray[np.uint16]

GROUP = 32
"""Values along K that share a scale, in weights and in activations."""

TINY = np.float32(1e-30)
"""A group of activations whose largest magnitude is below this counts as zero."""

EPSILON = 2.0**-24
"""Half a unit in the last place of float32, relative."""


class Weights(NamedTuple):
    """A layer before packing: w [n, k] (float32, bf16 bits, int8 or a 4-bit value per byte), f16 bits per group."""

    format: Format
    w: NDArray[np.generic]
    scale: Bits | None = None
    min: Bits | None = None


class Product(NamedTuple):
    """`y` [m, n] in float64, and `bound` [m, n]: how far float32 arithmetic may be from it."""

    y: Doubles
    bound: Doubles


def from_half(bits: Bits) -> Floats:
    """f16 bits to float32, exact."""
    return bits.view(np.float16).astype(np.float32)


def quantise_rows(x: Floats, fine: bool = False) -> tuple[NDArray[np.int16], Floats]:
    """Activations [m, k] to signed 8 bits (`fine`: 15) [m, k] with one scale per 32 values [m, k / 32]."""
    largest = np.float32(127 * 128 if fine else 127)
    groups = x.reshape(x.shape[0], -1, GROUP)
    most = np.abs(groups).max(axis=-1)
    zero = most < TINY
    inverse = np.where(zero, np.float32(0), largest / np.where(zero, np.float32(1), most))
    q = np.rint(groups * inverse[..., None]).astype(np.int16)
    scale = np.where(zero, np.float32(0), most / largest).astype(np.float32)
    return q.reshape(x.shape), scale


def dequantise(weights: Weights) -> Floats:
    """The weights [n, k] as float32: bit for bit what `Linear.dequantise` gives."""
    if weights.format == "f32":
        return weights.w.astype(np.float32)
    if weights.format == "bf16":
        return from_bf16(weights.w.astype(np.uint16))
    q = weights.w.astype(np.float32)
    assert weights.scale is not None
    values = q.reshape(q.shape[0], -1, GROUP) * from_half(weights.scale)[..., None]
    if weights.format == "int4":
        assert weights.min is not None
        values = values + from_half(weights.min)[..., None]
    return values.reshape(q.shape).astype(np.float32)


def linear(weights: Weights, x: Floats, fine: bool = False) -> Product:
    """y = x Wᵀ for x [m, k], with the activations rounded or quantised as the format asks."""
    if weights.format in ("f32", "bf16"):
        w = dequantise(weights).astype(np.float64)
        rounded = x if weights.format == "f32" else from_bf16(to_bf16(x))
        wide = rounded.astype(np.float64)
        return Product(wide @ w.T, (x.shape[1] + 1) * EPSILON * (np.abs(wide) @ np.abs(w).T))
    return _linear_grouped(weights, x, fine)


def _linear_grouped(weights: Weights, x: Floats, fine: bool) -> Product:
    """int8 and int4: exact dot products inside a group, one or two float32 fma per group."""
    assert weights.scale is not None
    q, scale_x = quantise_rows(x, fine)
    m, groups = scale_x.shape
    n = weights.w.shape[0]
    dots = np.einsum(
        "mgi,ngi->mng",
        q.reshape(m, groups, GROUP).astype(np.float64),
        weights.w.reshape(n, groups, GROUP).astype(np.float64),
    )
    terms = dots * from_half(weights.scale).astype(np.float64) * scale_x.astype(np.float64)[:, None]
    y, size = terms.sum(-1), np.abs(terms).sum(-1)
    if weights.format == "int4":
        assert weights.min is not None
        sums = q.reshape(m, groups, GROUP).astype(np.int64).sum(-1) * scale_x.astype(np.float64)
        extra = sums[:, None] * from_half(weights.min).astype(np.float64)
        y, size = y + extra.sum(-1), size + np.abs(extra).sum(-1)
    return Product(y, (2 * groups + 4) * EPSILON * size)
