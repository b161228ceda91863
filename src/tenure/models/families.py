"""The family of Llama-like decoders: what a config or GGUF header must say to be served, and what it means.

Families differ by config, not by code. Whatever would silently change the numbers (a window, a mixture of experts, a
rope variant, a quantisation scheme of the file) is refused by name.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tenure.errors import BrokenFile, UnsupportedModel
from tenure.models.fields import Fields
from tenure.spec import ModelShape

HF_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")
GGUF_ARCHITECTURES = ("llama",)
ROPE_TYPES = ("default", "linear", "llama3")
SUPPORTED = (
    f"Hugging Face {', '.join(HF_ARCHITECTURES)} (safetensors F32, F16, BF16; no sliding window) and "
    f"GGUF architecture {', '.join(GGUF_ARCHITECTURES)} (tensor types F32, F16, BF16, Q8_0, Q4_0, Q4_1)"
)

_MANY = 1 << 24
"""No count in a config is larger; keeps hostile products small."""


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding: pairs (i, i + D/2) turn by position * inv_freq[i].

    `factors`, when a GGUF brings them, divide the frequencies one by one.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192
    factors: tuple[float, ...] = ()

    def inv_freq(self, head_dim: int) -> NDArray[np.float32]:
        """f32[head_dim / 2], computed in f64."""
        plain = self.theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
        if self.factors:
            plain = plain / np.array(self.factors)
        if self.kind == "linear":
            plain = plain / self.factor
        elif self.kind == "llama3":
            plain = self._llama3(plain)
        return plain.astype(np.float32)

    def _llama3(self, plain: NDArray[np.float64]) -> NDArray[np.float64]:
        """Slow frequencies are divided by the factor, fast ones kept, those between blended (Llama 3.1)."""
        turns = self.original_context * plain / (2 * math.pi)
        smooth = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        smooth = smooth.clip(0.0, 1.0)
        blended: NDArray[np.float64] = (1 - smooth) * plain / self.factor + smooth * plain
        return blended


@dataclass(frozen=True, slots=True)
class Config:
    """Everything about a decoder but its weights."""

    architecture: str
    shape: ModelShape
    rms_eps: float
    rope: Rope
    tied: bool | None
    """Whether the embedding is also the output matrix; None: whether the file lacks an output matrix decides."""
    attention_bias: bool | None
    mlp_bias: bool | None
    """Whether biases must be there; None: they are used when the file has them."""


def from_hf(fields: Fields) -> Config:
    """The config of a Hugging Face directory's config.json. Raises UnsupportedModel, BrokenFile."""
    names = fields.items("architectures", str) if "architectures" in fields else [fields.text("model_type", "none")]
    architecture = names[0] if names else "none"
    if architecture not in HF_ARCHITECTURES:
        raise UnsupportedModel(f"{fields.where}: architecture {architecture} is not supported; supported: {SUPPORTED}")
    if "quantization_config" in fields:
        raise UnsupportedModel(
            f"{fields.where}: quantization_config is not supported; use the unquantised weights and --weights int8 "
            "or int4, or a GGUF file"
        )
    activation = fields.text("hidden_act", "silu")
    if activation != "silu":
        raise UnsupportedModel(f"{fields.where}: hidden_act {activation} is not supported; supported: silu")
    hidden, heads = fields.integer("hidden_size", 1, _MANY), fields.integer("num_attention_heads", 1, _MANY)
    default_dim = hidden // heads if hidden % heads == 0 else None
    shape = ModelShape(
        layers=fields.integer("num_hidden_layers", 1, 4096),
        hidden=hidden,
        heads=heads,
        kv_heads=fields.integer("num_key_value_heads", 1, _MANY, heads),
        head_dim=fields.integer("head_dim", 1, _MANY) if "head_dim" in fields or not default_dim else default_dim,
        ffn=fields.integer("intermediate_size", 1, _MANY),
        vocab=fields.integer("vocab_size", 1, _MANY),
        context_length=fields.integer("max_position_embeddings", 1, 1 << 31),
    )
    _check_shape(fields.where, shape)
    # Mistral's own default is a window; only a config that says null has none.
    windowed = architecture == "MistralForCausalLM" and not fields.given("sliding_window")
    window = fields.integer("sliding_window", 1, 1 << 31, 4096 if windowed else shape.context_length)
    if window < shape.context_length:
        raise UnsupportedModel(
            f"{fields.where}: sliding_window {window} (context {shape.context_length}) is not supported; "
            "supported: null"
        )
    return Config(
        architecture=architecture,
        shape=shape,
        rms_eps=fields.number("rms_norm_eps", 0.0, 1.0, 1e-6),
        rope=_hf_rope(fields, shape),
        tied=fields.flag("tie_word_embeddings", False),
        attention_bias=fields.flag("attention_bias", False),
        mlp_bias=fields.flag("mlp_bias", False),
    )


def _hf_rope(fields: Fields, shape: ModelShape) -> Rope:
    """`rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling` (before)."""
    section = fields.section("rope_parameters") or fields.section("rope_scaling") or Fields(fields.where, {})
    theta = section.number("rope_theta", 1.0, 1e12, fields.number("rope_theta", 1.0, 1e12, 10000.0))
    kind = section.text("rope_type", section.text("type", "default"))
    if kind not in ROPE_TYPES:
        raise UnsupportedModel(
            f"{section.where}: rope_type {kind} is not supported; supported: {', '.join(ROPE_TYPES)}"
        )
    partial = section.number("partial_rotary_factor", 0.0, 1.0, fields.number("partial_rotary_factor", 0.0, 1.0, 1.0))
    if partial != 1.0:
        raise UnsupportedModel(f"{section.where}: partial_rotary_factor {partial} is not supported; supported: 1.0")
    if kind == "default":
        return Rope(theta)
    factor = section.number("factor", 1.0, 1e6)
    if kind == "linear":
        return Rope(theta, kind, factor)
    low, high = section.number("low_freq_factor", 1e-6, 1e6), section.number("high_freq_factor", 1e-6, 1e6)
    if low >= high:
        raise BrokenFile(f"{section.where}: low_freq_factor {low} must be below high_freq_factor {high}")
    original = section.integer("original_max_position_embeddings", 1, 1 << 31, shape.context_length)
    return Rope(theta, kind, factor, low, high, original)


def from_gguf(fields: Fields, rope_factors: tuple[float, ...] = ()) -> Config:
    """The config of a GGUF header; `rope_factors` are its tensor rope_freqs.weight when it has one."""
    architecture = fields.text("general.architecture")
    if architecture not in GGUF_ARCHITECTURES:
        raise UnsupportedModel(f"{fields.where}: architecture {architecture} is not supported; supported: {SUPPORTED}")
    if fields.integer("llama.expert_count", 0, _MANY, 0) > 0:
        experts = fields.raw("llama.expert_count")
        raise UnsupportedModel(
            f"{fields.where}: llama.expert_count {experts} (a mixture of experts) is not supported; "
            f"supported: {SUPPORTED}"
        )
    hidden, heads = (
        fields.integer("llama.embedding_length", 1, _MANY),
        fields.integer("llama.attention.head_count", 1, _MANY),
    )
    vocab = len(fields.items("tokenizer.ggml.tokens", str))
    shape = ModelShape(
        layers=fields.integer("llama.block_count", 1, 4096),
        hidden=hidden,
        heads=heads,
        kv_heads=fields.integer("llama.attention.head_count_kv", 1, _MANY, heads),
        head_dim=fields.integer("llama.attention.key_length", 1, _MANY, max(hidden // heads, 1)),
        ffn=fields.integer("llama.feed_forward_length", 1, _MANY),
        vocab=fields.integer("llama.vocab_size", 1, _MANY, vocab),
        context_length=fields.integer("llama.context_length", 1, 1 << 31),
    )
    _check_shape(fields.where, shape)
    for name in ("llama.attention.value_length", "llama.rope.dimension_count"):
        found = fields.integer(name, 1, _MANY, shape.head_dim)
        if found != shape.head_dim:
            raise UnsupportedModel(f"{fields.where}: {name} {found} is not supported; supported: {shape.head_dim}")
    window = fields.integer("llama.attention.sliding_window", 0, 1 << 31, 0)
    if 0 < window < shape.context_length:
        raise UnsupportedModel(f"{fields.where}: llama.attention.sliding_window {window} is not supported")
    return Config(
        architecture=architecture,
        shape=shape,
        rms_eps=fields.number("llama.attention.layer_norm_rms_epsilon", 0.0, 1.0),
        rope=_gguf_rope(fields, shape, rope_factors),
        tied=None,
        attention_bias=None,
        mlp_bias=None,
    )


def _gguf_rope(fields: Fields, shape: ModelShape, factors: tuple[float, ...]) -> Rope:
    theta = fields.number("llama.rope.freq_base", 1.0, 1e12, 10000.0)
    if factors and (len(factors) != shape.head_dim // 2 or not all(0 < f < 1e6 for f in factors)):
        raise BrokenFile(f"{fields.where}: rope_freqs.weight must be {shape.head_dim // 2} positive factors")
    linear = fields.number("llama.rope.scale_linear", 1e-6, 1e6, 1.0)
    factor = fields.number("llama.rope.scaling.factor", 0.0, 1e6, linear) or 1.0
    kind = fields.text("llama.rope.scaling.type", "none" if factor == 1.0 else "linear")
    if kind not in ("none", "linear"):
        raise UnsupportedModel(
            f"{fields.where}: llama.rope.scaling.type {kind} is not supported; supported: none, linear, and the "
            "factors in rope_freqs.weight"
        )
    if kind == "none" or factor == 1.0:
        return Rope(theta, factors=factors)
    return Rope(theta, "linear", factor, factors=factors)


def _check_shape(where: str, shape: ModelShape) -> None:
    if shape.heads % shape.kv_heads:
        raise BrokenFile(f"{where}: {shape.heads} attention heads are not a multiple of {shape.kv_heads} KV heads")
    if shape.head_dim % 16 or shape.head_dim > 256:
        raise UnsupportedModel(
            f"{where}: head size {shape.head_dim} is not supported; supported: multiples of 16 up to 256"
        )
