"""Rotary embeddings: how a config or a GGUF header says that queries and keys turn with their position."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tenure.errors import BrokenFile, UnsupportedModel
from tenure.models.fields import Fields

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")
_OTHER_NAMES = {"su": "longrope", "none": "default"}
GGUF_KINDS = ("none", "linear", "yarn")


@dataclass(frozen=True, slots=True)
class Rope:
    """Pairs (i, i + rotary/2) of the first `rotary` values of a head turn by position * inv_freq[i].

    `factors`, when there are any, divide the frequencies one by one. `scale` multiplies cosine and sine.
    """

    theta: float
    rotary: int
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192
    factors: tuple[float, ...] = ()
    scale: float = 1.0
    ramp: tuple[float, float] = (0.0, 0.0)
    """Of `yarn`: the pair up to which frequencies are kept, and the one from which on they are divided."""

    def inv_freq(self) -> NDArray[np.float32]:
        """f32[rotary / 2], computed in f64."""
        plain = self.theta ** (-np.arange(0, self.rotary, 2, dtype=np.float64) / self.rotary)
        if self.factors:
            plain = plain / np.array(self.factors)
        if self.kind == "linear":
            plain = plain / self.factor
        elif self.kind == "llama3":
            plain = self._llama3(plain)
        elif self.kind == "yarn":
            low, high = self.ramp
            divided = ((np.arange(len(plain)) - low) / (high - low)).clip(0.0, 1.0)
            plain = plain * (1 - divided) + plain / self.factor * divided
        return plain.astype(np.float32)

    def _llama3(self, plain: NDArray[np.float64]) -> NDArray[np.float64]:
        """Slow frequencies are divided by the factor, fast ones kept, those between blended (Llama 3.1)."""
        turns = self.original_context * plain / (2 * math.pi)
        smooth = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        smooth = smooth.clip(0.0, 1.0)
        blended: NDArray[np.float64] = (1 - smooth) * plain / self.factor + smooth * plain
        return blended


@dataclass(frozen=True, slots=True)
class RopeShape:
    """What a rope has to fit: the size of a head, the context the model claims, and the one it is served with."""

    head_dim: int
    context: int
    served: int

    def rotary(self, where: str, part: float) -> int:
        """How many values of a head turn when `part` of it does."""
        rotary = int(self.head_dim * part)
        if rotary < 2 or rotary % 2:
            raise UnsupportedModel(
                f"{where}: {part} of a head of {self.head_dim} is no even number of values to rotate"
            )
        return rotary


def from_hf(top: Fields, section: Fields, theta: float, shape: RopeShape) -> Rope:
    """The rope in `section` (rope_parameters or rope_scaling), whose missing fields are looked for in the config."""
    theta = section.number("rope_theta", 1.0, 1e12, theta)
    kind = section.text("rope_type", section.text("type", "default"))
    kind = _OTHER_NAMES.get(kind, kind)
    if kind not in ROPE_TYPES:
        raise UnsupportedModel(
            f"{section.where}: rope_type {kind} is not supported; supported: {', '.join(ROPE_TYPES)}"
        )
    part = section.number("partial_rotary_factor", 0.0, 1.0, top.number("partial_rotary_factor", 0.0, 1.0, 1.0))
    rotary = shape.rotary(section.where, part)
    # `dynamic` stretches only beyond max_position_embeddings, which is never served: up to there it is the default.
    if kind in ("default", "dynamic"):
        return Rope(theta, rotary)
    if kind == "linear":
        return Rope(theta, rotary, kind, section.number("factor", 1.0, 1e6))
    default = section.integer("original_max_position_embeddings", 1, 1 << 31, shape.context)
    original = top.integer("original_max_position_embeddings", 1, 1 << 31, default)
    if kind == "longrope":
        return _hf_longrope(section, theta, rotary, original, shape)
    if kind == "yarn":
        return _hf_yarn(section, theta, rotary, original, shape)
    factor = section.number("factor", 1.0, 1e6)
    low, high = section.number("low_freq_factor", 1e-6, 1e6), section.number("high_freq_factor", 1e-6, 1e6)
    if low >= high:
        raise BrokenFile(f"{section.where}: low_freq_factor {low} must be below high_freq_factor {high}")
    return Rope(theta, rotary, kind, factor, low, high, original)


def _hf_longrope(section: Fields, theta: float, rotary: int, original: int, shape: RopeShape) -> Rope:
    stretch = section.number("factor", 0.0, 1e6, shape.context / original)
    default = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 and original > 1 else 1.0
    scale = section.number("attention_factor", 1e-6, 1e6, default)
    short, long = (_factors(section, f"{name}_factor", rotary) for name in ("short", "long"))
    return longrope(theta, rotary, scale, original, short, long, shape)


def _hf_yarn(section: Fields, theta: float, rotary: int, original: int, shape: RopeShape) -> Rope:
    factor = section.number("factor", 1.0, 1e6, max(1.0, shape.context / original))
    some, all_dims = section.number("mscale", 0.0, 1e6, 0.0), section.number("mscale_all_dim", 0.0, 1e6, 0.0)
    default = _mscale(factor, some) / _mscale(factor, all_dims) if some and all_dims else _mscale(factor)
    fast, slow = section.number("beta_fast", 0.0, 1e6, 0.0) or 32.0, section.number("beta_slow", 0.0, 1e6, 0.0) or 1.0
    if fast <= slow:
        raise BrokenFile(f"{section.where}: beta_fast {fast:g} must be above beta_slow {slow:g}")
    scale, whole = section.number("attention_factor", 1e-6, 1e6, default), section.flag("truncate", True)
    return yarn(Rope(theta, rotary, "yarn", factor, original_context=original), scale, fast, slow, whole=whole)


def _mscale(factor: float, much: float = 1.0) -> float:
    return 0.1 * much * math.log(factor) + 1.0


def yarn(rope: Rope, scale: float, beta_fast: float, beta_slow: float, *, whole: bool = True) -> Rope:
    """`rope` with the ramp of YaRN (Peng et al. 2023): pairs that turn more than `beta_fast` times within the first
    context keep their frequency, those that turn less than `beta_slow` times have it divided by the factor. `whole`:
    the ends of the ramp are whole pairs."""

    def pair(turns: float) -> float:
        if rope.theta <= 1.0:
            return 0.0  # all pairs turn alike
        return rope.rotary * math.log(rope.original_context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair(beta_fast), pair(beta_slow)
    if whole:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary - 1)
    return replace(rope, scale=scale, ramp=(low, high if high != low else low + 0.001))


def _factors(section: Fields, name: str, rotary: int) -> tuple[float, ...]:
    found = section.raw(name)
    values = [float(f) for f in found if isinstance(f, int | float)] if isinstance(found, list) else []
    if len(values) != rotary // 2 or not all(0 < f < 1e6 for f in values):
        raise BrokenFile(f"{section.where}: {name} must be {rotary // 2} positive factors")
    return tuple(values)


def longrope(
    theta: float,
    rotary: int,
    scale: float,
    original: int,
    short: tuple[float, ...],
    long: tuple[float, ...],
    shape: RopeShape,
) -> Rope:
    """The long factors when more is served than the model was first trained with, else the short ones.

    Choosing by the length of each prompt, as transformers does, would turn the same keys in two ways: what is cached
    below the limit would be wrong above it.
    """
    chosen = long if shape.served > original else short
    return Rope(theta, rotary, "longrope", original_context=original, factors=chosen, scale=scale)


def from_gguf(fields: Fields, arch: str, theta: float, shape: RopeShape, tables: dict[str, tuple[float, ...]]) -> Rope:
    """The rope of a GGUF header; `tables` are its tensors of factors (`freqs`, `short`, `long`), those it has."""
    rotary = fields.integer(f"{arch}.rope.dimension_count", 2, shape.head_dim, shape.head_dim)
    if rotary % 2:
        raise UnsupportedModel(f"{fields.where}: {arch}.rope.dimension_count {rotary} is not even")
    for name, factors in tables.items():
        if len(factors) != rotary // 2 or not all(0 < f < 1e6 for f in factors):
            raise BrokenFile(f"{fields.where}: the rope {name} factors must be {rotary // 2} positive factors")
    if "long" in tables and "short" in tables:
        original = fields.integer(f"{arch}.rope.scaling.original_context_length", 1, 1 << 31, shape.context)
        scale = fields.number(f"{arch}.rope.scaling.attn_factor", 1e-6, 1e6, 1.0)
        return longrope(theta, rotary, scale, original, tables["short"], tables["long"], shape)
    linear = fields.number(f"{arch}.rope.scale_linear", 1e-6, 1e6, 1.0)
    factor = fields.number(f"{arch}.rope.scaling.factor", 0.0, 1e6, linear) or 1.0
    kind = fields.text(f"{arch}.rope.scaling.type", "none" if factor == 1.0 else "linear")
    if kind not in GGUF_KINDS:
        raise UnsupportedModel(
            f"{fields.where}: {arch}.rope.scaling.type {kind} is not supported; supported: {', '.join(GGUF_KINDS)}, "
            "and tensors of factors"
        )
    factors = tables.get("freqs", ())
    if kind == "yarn" and factor != 1.0:
        return _gguf_yarn(fields, f"{arch}.rope.scaling", Rope(theta, rotary, "yarn", factor, factors=factors), shape)
    if kind == "none" or factor == 1.0:
        return Rope(theta, rotary, factors=factors)
    return Rope(theta, rotary, "linear", factor, factors=factors)


def _gguf_yarn(fields: Fields, prefix: str, rope: Rope, shape: RopeShape) -> Rope:
    """llama.cpp multiplies what YaRN says by `attn_factor`; its other extras are of families not served here."""
    for name, neutral in (("yarn_log_multiplier", 0.0), ("yarn_ext_factor", 1.0), ("yarn_attn_factor", 1.0)):
        found = fields.number(f"{prefix}.{name}", -1e6, 1e6, neutral)
        if found != neutral:
            raise UnsupportedModel(
                f"{fields.where}: {prefix}.{name} {found:g} is not supported; supported: {neutral:g}"
            )
    if rope.factor < 1.0:
        raise BrokenFile(f"{fields.where}: {prefix}.factor is {rope.factor}, expected 1 or more for yarn")
    fast, slow = (fields.number(f"{prefix}.yarn_beta_{n}", 1e-6, 1e6, b) for n, b in (("fast", 32.0), ("slow", 1.0)))
    if fast <= slow:
        raise BrokenFile(f"{fields.where}: {prefix}.yarn_beta_fast {fast:g} must be above yarn_beta_slow {slow:g}")
    original = fields.integer(f"{prefix}.original_context_length", 1, 1 << 31, shape.context)
    scale = _mscale(rope.factor) * fields.number(f"{prefix}.attn_factor", 1e-6, 1e6, 1.0)
    return yarn(replace(rope, original_context=original), scale, fast, slow)
