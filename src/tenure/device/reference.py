"""The readable numpy oracle of every kernel: what the native half must compute, in float64 and without a trick.

Shapes are row-major. A kernel is right when it agrees with its namesake here up to the rounding its format admits
(`round_bf16` says what bf16 does to a value).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
AnyFloats = npt.NDArray[np.floating]


def to_bf16(x: AnyFloats) -> npt.NDArray[np.uint16]:
    """The bits of `x` as bf16, rounded to nearest, ties to even; NaN stays NaN."""
    single = np.ascontiguousarray(x, dtype=np.float32)
    bits = single.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(single), 0x7FC0, rounded).astype(np.uint16)


def from_bf16(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """The values of bf16 bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def round_bf16(x: AnyFloats) -> Floats:
    """`x` as bf16 can hold it."""
    return from_bf16(to_bf16(x)).astype(np.float64)


def dequantise(
    fmt: str,
    w: npt.NDArray[np.generic],
    scale: npt.NDArray[np.uint16] | None = None,
    minimum: npt.NDArray[np.uint16] | None = None,
) -> Floats:
    """Weights [n, k] in format f32|bf16|int8|int4 as values; scale and minimum are f16 bits [n, k / 32]."""
    if fmt == "bf16":
        return from_bf16(w.astype(np.uint16)).astype(np.float64)
    values = w.astype(np.float64)
    if fmt == "f32":
        return values
    assert scale is not None
    values = values * np.repeat(scale.view(np.float16).astype(np.float64), 32, axis=1)
    if fmt == "int4":
        assert minimum is not None
        values = values + np.repeat(minimum.view(np.float16).astype(np.float64), 32, axis=1)
    return values


BLOCK_TOKENS = 32
LEVELS = np.array([0.12890625, 0.388671875, 0.65625, 0.94140625, 1.2578125, 1.6171875, 2.0625, 2.734375])
"""The upper half of the 16 levels that 4-bit V has (Lloyd and Max for a Gaussian, in bf16)."""


def _half(x: AnyFloats) -> Floats:
    return np.clip(x, -65504.0, 65504.0).astype(np.float16).astype(np.float64)


def _scale(x: AnyFloats) -> Floats:
    return _half(np.maximum(x, 1e-7))


def int4_channels(k: AnyFloats) -> Floats:
    """k [32, kv_heads, dim], one block, as 4 bits with a scale and a least value per channel hold it."""
    least = _half(k.min(0, keepdims=True))
    step = np.clip((k.max(0, keepdims=True) - least) / 15.0, 2.0**-20, 1.875 * 2.0**11)
    exponent = np.floor(np.log2(step))  # scales have three bits of mantissa, rounded up
    scale = np.minimum(np.ceil(step / 2.0 ** (exponent - 3)) * 2.0 ** (exponent - 3), 1.875 * 2.0**11)
    return round_bf16(np.clip(np.rint((k - least) / scale), 0, 15) * scale + least)


def turn(x: AnyFloats) -> Floats:
    """x [..., dim] with each run, as long as the largest power of two that divides dim, Walsh-Hadamard transformed."""
    dim = x.shape[-1]
    run = dim & -dim
    basis = np.ones((1, 1))
    while len(basis) < run:
        basis = np.block([[basis, basis], [basis, -basis]])
    return np.asarray((x.reshape(-1, run) @ basis / np.sqrt(run)).reshape(x.shape))


def turned_int8(x: AnyFloats) -> Floats:
    """x [..., dim] turned, as int8 with one f16 scale per vector, turned back."""
    turned = turn(x.astype(np.float64))
    scale = _scale(np.abs(turned).max(-1, keepdims=True) / 127.0)
    return turn(np.clip(np.rint(turned / scale), -127, 127) * scale)


def int4_levels(v: AnyFloats) -> Floats:
    """v [..., dim] turned, as the nearest of 16 levels with one f16 scale per vector, turned back."""
    turned = turn(v.astype(np.float64))
    unit = turned / np.maximum(np.sqrt(np.mean(turned**2, axis=-1, keepdims=True)), 1e-7)
    level = LEVELS[np.searchsorted((LEVELS[1:] + LEVELS[:-1]) / 2, np.abs(unit))] * np.where(unit < 0, -1, 1)
    fit = (turned * level).sum(-1, keepdims=True) / (level**2).sum(-1, keepdims=True)
    return turn(level * _scale(fit))


def stored(codec: str, k: AnyFloats, v: AnyFloats) -> tuple[Floats, Floats]:
    """What rows of later blocks see of k and v [tokens, kv_heads, dim]: full blocks as `codec` stores them."""
    k, v = (x.astype(np.float64) if codec == "f32" else round_bf16(x) for x in (k, v))
    for start in range(0, len(k) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        block = slice(start, start + BLOCK_TOKENS)
        if codec in ("int8", "k8v4"):
            k[block] = turned_int8(k[block])
        elif codec == "int4":
            k[block] = int4_channels(k[block])
        if codec == "int8":
            v[block] = turned_int8(v[block])
        elif codec in ("k8v4", "int4"):
            v[block] = int4_levels(v[block])
    return k, v


def rms_norm(x: AnyFloats, weight: AnyFloats, eps: float) -> Floats:
    """x [rows, n] scaled to root mean square 1, times weight [n]."""
    x = x.astype(np.float64)
    return np.asarray(x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight)


def silu(x: AnyFloats) -> Floats:
    """x · sigmoid(x)."""
    x = x.astype(np.float64)
    return np.asarray(x * 0.5 * (1.0 + np.tanh(0.5 * x)))


def gelu_tanh(x: AnyFloats) -> Floats:
    """The tanh approximation of x · Φ(x)."""
    x = x.astype(np.float64)
    return np.asarray(0.5 * x * (1.0 + np.tanh(np.sqrt(2.0 / np.pi) * (x + 0.044715 * x**3))))


def rope(
    x: AnyFloats, positions: npt.NDArray[np.integer], inv_freq: npt.NDArray[np.float32], scale: float = 1.0
) -> Floats:
    """Rotates x [rows, heads, dim] by its position, pairing (i, i + n) as Hugging Face's rotate_half does.

    n = len(inv_freq); what a head has beyond its first 2n values stays as it is.
    """
    angle = (positions.astype(np.float32)[:, None] * inv_freq[None, :]).astype(np.float64)[:, None, :]
    cos, sin = np.cos(angle) * scale, np.sin(angle) * scale
    half = len(inv_freq)
    low, high, rest = np.split(x.astype(np.float64), [half, 2 * half], axis=-1)
    return np.concatenate([low * cos - high * sin, high * cos + low * sin, rest], axis=-1)


def squash(x: AnyFloats, most: float) -> Floats:
    """x, squashed smoothly to ±most; 0: x as it is."""
    wide = x.astype(np.float64)
    return np.asarray(most * np.tanh(wide / most), np.float64) if most else wide


def attention(
    q: AnyFloats,
    k: AnyFloats,
    v: AnyFloats,
    first: int,
    *,
    window: int | None = None,
    scale: float | None = None,
    soft_cap: float = 0.0,
    later: tuple[AnyFloats, AnyFloats] | None = None,
) -> Floats:
    """Causal attention: row i of q [rows, heads, dim] stands at position first + i and sees keys [0, first + i].

    k and v are [tokens, kv_heads, dim]; each kv head serves heads / kv_heads consecutive query heads. `window`: of
    those keys the last so many. `scale` of the scores: 1 / sqrt(dim) unless given. `later`: k and v as rows of later
    blocks see them (`stored`); a row sees its own block as k and v have it.
    """
    later = later or (k, v)
    rows, heads, dim = q.shape
    group = heads // k.shape[1]
    out = np.empty((rows, heads, dim))
    for head in range(heads):
        own = [x[:, head // group].astype(np.float64) for x in (k, v)]
        earlier = [x[:, head // group].astype(np.float64) for x in later]
        for row in range(rows):
            end = first + row + 1
            at = (end - 1) // BLOCK_TOKENS * BLOCK_TOKENS
            keys, values = (np.concatenate([x[:at], y[at:end]]) for x, y in zip(earlier, own, strict=True))
            seen = slice(max(0, end - window) if window else 0, end)
            score = keys[seen] @ q[row, head].astype(np.float64) * (dim**-0.5 if scale is None else scale)
            score = squash(score, soft_cap)
            weight = np.exp(score - score.max())
            out[row, head] = weight @ values[seen] / weight.sum()
    return out


@dataclass
class Layer:
    """Weights of one layer as values: qkv rows are query heads, then keys, then values; gate_up is gate, then up.

    `norms` by name: attn_norm, ffn_norm, attn_post_norm, ffn_post_norm, q_norm, k_norm; those that are missing are not
    done. `inv_freq` None: queries and keys are not rotated.
    """

    qkv: AnyFloats
    o: AnyFloats
    gate_up: AnyFloats
    down: AnyFloats
    norms: dict[str, AnyFloats]
    inv_freq: npt.NDArray[np.float32] | None
    window: int | None = None
    bias: dict[str, AnyFloats] = field(default_factory=dict)

    def linear(self, name: str, x: Floats) -> Floats:
        """x Wᵀ + bias for the matrix called `name`."""
        return np.asarray(x @ getattr(self, name).astype(np.float64).T + self.bias.get(name, 0.0))


@dataclass
class Decoder:
    """A whole decoder, for one sequence from its first token; keys and values are rounded as the codec does.

    The scales and caps are those of `_native.Decoder`.
    """

    heads: int
    kv_heads: int
    head_dim: int
    rms_eps: float
    embedding: AnyFloats
    layers: Sequence[Layer]
    norm: AnyFloats
    lm_head: AnyFloats | None = None
    rope_scale: float = 1.0
    activation: str = "silu"
    attention_scale: float | None = None
    attention_cap: float = 0.0
    logit_cap: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    kv_codec: str = "f32"

    def logits(self, tokens: Sequence[int]) -> Floats:
        """Logits [len(tokens), vocab] of every position."""
        x = self.embedding[np.asarray(tokens)].astype(np.float64) * self.embedding_scale
        activate = {"silu": silu, "gelu_tanh": gelu_tanh}[self.activation]
        for layer in self.layers:
            added = self._attend(layer, self._norm(layer, "attn_norm", x))
            x = x + self.residual_scale * self._norm(layer, "attn_post_norm", added)
            gate, up = np.split(layer.linear("gate_up", self._norm(layer, "ffn_norm", x)), 2, axis=-1)
            added = layer.linear("down", activate(gate) * up)
            x = x + self.residual_scale * self._norm(layer, "ffn_post_norm", added)
        head = self.embedding if self.lm_head is None else self.lm_head
        logits = rms_norm(x, self.norm, self.rms_eps) @ head.astype(np.float64).T
        return squash(self.logit_scale * logits, self.logit_cap)

    def _norm(self, layer: Layer, name: str, x: Floats) -> Floats:
        return rms_norm(x, layer.norms[name], self.rms_eps) if name in layer.norms else x

    def _norm_heads(self, layer: Layer, name: str, x: Floats) -> Floats:
        """x [rows, heads, dim], each head normed by itself or, when there is a weight for each value, all as one."""
        if name in layer.norms and len(layer.norms[name]) > self.head_dim:
            return self._norm(layer, name, x.reshape(len(x), -1)).reshape(x.shape)
        return self._norm(layer, name, x)

    def _attend(self, layer: Layer, x: Floats) -> Floats:
        rows, dim = len(x), self.head_dim
        split = [self.heads * dim, (self.heads + self.kv_heads) * dim]
        q, k, v = (part.reshape(rows, -1, dim) for part in np.split(layer.linear("qkv", x), split, axis=-1))
        q, k = self._norm_heads(layer, "q_norm", q), self._norm_heads(layer, "k_norm", k)
        if layer.inv_freq is not None:
            positions = np.arange(rows)
            q = rope(q, positions, layer.inv_freq, self.rope_scale)
            k = rope(k, positions, layer.inv_freq, self.rope_scale)
        if self.kv_codec == "bf16":
            k, v = round_bf16(k), round_bf16(v)
        found = attention(q, k, v, 0, window=layer.window, scale=self.attention_scale, soft_cap=self.attention_cap)
        return layer.linear("o", found.reshape(rows, -1))
