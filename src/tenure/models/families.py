"""The families of decoders that are served. A family is a row of a table, not code: see `Family`.

Whatever would silently change the numbers (a mixture of experts, an unknown rope, a quantisation scheme of the file, a
window where the family has none) is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tenure.errors import BrokenFile, UnsupportedModel
from tenure.models.fields import Fields
from tenure.models.rope import Rope
from tenure.spec import ModelShape

MANY = 1 << 24
"""No count in a config is larger; keeps hostile products small."""

Norms = Literal["before", "after", "both"]
QkNorm = Literal["none", "head", "whole"]


@dataclass(frozen=True, slots=True)
class Family:
    """How one architecture differs from Llama."""

    hf: str
    """Its name in config.json."""
    gguf: str
    """Its name in a GGUF header."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Fields that config.json may leave out, as transformers fills them in; those with `windows` in mind:
    use_sliding_window, sliding_window, max_window_layers (the first layer with one), sliding_window_pattern (every
    n-th layer sees everything). A multiplier or cap is read only when it is named here."""
    windows: bool = False
    windows_without_rope: bool = False
    """Only layers that do not rotate have the window."""
    norms: Norms = "before"
    """Where a layer has RMS norms: before attention and feed-forward, after them, or both."""
    norm_offset: float = 0.0
    """What Hugging Face files leave out of the norms' weights; GGUF files hold them whole."""
    qk_norm: QkNorm = "none"
    """RMS norm of queries and keys: each head by itself, or all heads as one vector."""
    activation: Literal["silu", "gelu_tanh"] = "silu"
    activation_field: str = "hidden_act"
    scaled_embedding: bool = False
    """Embeddings are multiplied by the root of their size."""
    qkv_bias: bool = False
    """q, k and v always have a bias."""
    fused: bool = False
    """q, k and v are one tensor, and gate and up another."""
    local_theta: bool = False
    """Layers with a window turn by a rope of their own."""
    interleaved: bool = False
    """llama.cpp's converter interleaves the halves of every head of q and k."""
    text_part: str = ""
    """Where config.json describes the text part of a model that has others; those are not loaded."""
    wide_layers: int = 0
    """A GGUF of so many layers scales scores by hidden / heads rather than by the size of a head: the header does not
    say so, llama.cpp knows the model by its layers."""


_GEMMA: dict[str, Any] = {
    "norms": "both", "norm_offset": 1.0, "activation": "gelu_tanh", "activation_field": "hidden_activation",
    "scaled_embedding": True, "windows": True,
}  # fmt: skip
_GEMMA_FIELDS = {
    "head_dim": 256, "tie_word_embeddings": True, "query_pre_attn_scalar": 256, "sliding_window": 4096,
    "use_sliding_window": True, "hidden_activation": "gelu_pytorch_tanh",
}  # fmt: skip
_GEMMA3_FIELDS = _GEMMA_FIELDS | {
    "sliding_window_pattern": 6, "attn_logit_softcapping": None, "final_logit_softcapping": None, "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
}  # fmt: skip
_GEMMA3_SIZES = {
    "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262208, "max_position_embeddings": 131072,
    "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
}  # fmt: skip
"""The published files leave out what transformers has as defaults."""
_QWEN_FIELDS = {"sliding_window": 4096, "max_window_layers": 28, "use_sliding_window": False}

FAMILIES = (
    Family("LlamaForCausalLM", "llama", interleaved=True),
    Family(
        "MistralForCausalLM", "llama", {"sliding_window": 4096, "use_sliding_window": True},
        windows=True, interleaved=True,
    ),
    Family("Qwen2ForCausalLM", "qwen2", _QWEN_FIELDS, windows=True, qkv_bias=True),
    Family("Qwen3ForCausalLM", "qwen3", _QWEN_FIELDS | {"head_dim": 128}, windows=True, qk_norm="head"),
    Family(
        "Gemma2ForCausalLM", "gemma2",
        _GEMMA_FIELDS
        | {"sliding_window_pattern": 2, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        wide_layers=46, **_GEMMA,
    ),
    Family(
        "Gemma3ForCausalLM", "gemma3", _GEMMA3_FIELDS,
        qk_norm="head", local_theta=True, wide_layers=62, **_GEMMA,
    ),
    Family(
        "Gemma3ForConditionalGeneration", "gemma3", _GEMMA3_FIELDS | _GEMMA3_SIZES,
        qk_norm="head", local_theta=True, wide_layers=62, text_part="text_config", **_GEMMA,
    ),
    Family(
        "Phi3ForCausalLM", "phi3",
        {"sliding_window": None, "use_sliding_window": True, "rms_norm_eps": 1e-5,
         "original_max_position_embeddings": 4096},
        windows=True, fused=True,
    ),
    Family("Olmo2ForCausalLM", "olmo2", {"rms_norm_eps": 1e-5}, norms="after", qk_norm="whole"),
    Family(
        "GraniteForCausalLM", "granite",
        {"embedding_multiplier": 1.0, "attention_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0},
        interleaved=True,
    ),
    Family(
        "SmolLM3ForCausalLM", "smollm3",
        {"tie_word_embeddings": True, "rope_theta": 2e6, "no_rope_layer_interval": 4, "use_sliding_window": False},
        windows=True, windows_without_rope=True, interleaved=True,
    ),
)  # fmt: skip

HF_ARCHITECTURES = tuple(family.hf for family in FAMILIES)
GGUF_ARCHITECTURES = tuple(dict.fromkeys(family.gguf for family in FAMILIES))
SUPPORTED = (
    f"Hugging Face {', '.join(HF_ARCHITECTURES)} (safetensors F32, F16, BF16) and GGUF architecture "
    f"{', '.join(GGUF_ARCHITECTURES)}"
)


@dataclass(frozen=True, slots=True)
class Scales:
    """Numbers some families multiply by or squash to; a cap of 0 is none."""

    attention: float
    """Of the scores, before the softmax."""
    attention_cap: float = 0.0
    logit_cap: float = 0.0
    embedding: float = 1.0
    residual: float = 1.0
    logit: float = 1.0


@dataclass(frozen=True, slots=True)
class Config:
    """Everything about a decoder but its weights."""

    architecture: str
    family: Family
    shape: ModelShape
    rms_eps: float
    ropes: tuple[Rope, ...]
    """The ways to rotate; all turn the same part of a head and have the same scale."""
    rope_of_layer: tuple[int, ...]
    """Which of them a layer uses; -1: none."""
    scales: Scales
    tied: bool | None
    """Whether the embedding is also the output matrix; None: whether the file lacks an output matrix decides."""
    biases: frozenset[str] | None
    """The matrices (q, k, v, o, gate, up, down) that have a bias; None: those that have one in the file."""


_NORMS = {
    "before": ("attn_norm", "ffn_norm"),
    "after": ("attn_post_norm", "ffn_post_norm"),
    "both": ("attn_norm", "attn_post_norm", "ffn_norm", "ffn_post_norm"),
}


def norm_sizes(config: Config) -> dict[str, int]:
    """The norms of a layer and how many weights each has."""
    s, family = config.shape, config.family
    sizes = dict.fromkeys(_NORMS[family.norms], s.hidden)
    if family.qk_norm != "none":
        heads, kv_heads = (s.heads, s.kv_heads) if family.qk_norm == "whole" else (1, 1)
        sizes |= {"q_norm": heads * s.head_dim, "k_norm": kv_heads * s.head_dim}
    return sizes


def unsupported(where: str, architecture: str) -> UnsupportedModel:
    return UnsupportedModel(f"{where}: architecture {architecture} is not supported; supported: {SUPPORTED}")


def refuse_experts(fields: Fields, names: tuple[str, ...]) -> None:
    """A mixture of experts is no dense decoder."""
    for name in names:
        if fields.integer(name, 0, MANY, 0) > 0:
            raise UnsupportedModel(
                f"{fields.where}: {name} {fields.raw(name)} (a mixture of experts) is not supported; "
                f"supported: {SUPPORTED}"
            )


def check_shape(where: str, shape: ModelShape) -> None:
    """Raises unless the kernels can serve the shape."""
    if shape.heads % shape.kv_heads:
        raise BrokenFile(f"{where}: {shape.heads} attention heads are not a multiple of {shape.kv_heads} KV heads")
    if shape.head_dim % 16 or shape.head_dim > 256:
        raise UnsupportedModel(
            f"{where}: head size {shape.head_dim} is not supported; supported: multiples of 16 up to 256"
        )


def windows_of(sliding: tuple[bool, ...], window: int, context: int) -> tuple[int | None, ...]:
    """`ModelShape.windows`: empty when no layer has a window below the context."""
    if window >= context or not any(sliding):
        return ()
    return tuple(window if slides else None for slides in sliding)
