"""Configs: what they mean equals transformers; what is not served is refused by name."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tenure.errors import BrokenFile, ModelError, UnsupportedModel
from tenure.models.families import FAMILIES, GGUF_ARCHITECTURES, Config, Family
from tenure.models.fields import Fields
from tenure.models.gguf_config import from_gguf
from tenure.models.hf_config import from_hf
from tenure.models.rope import Rope

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 256,
    "vocab_size": 300,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 256}
GGUF: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.embedding_length": 128,
    "llama.block_count": 2,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.feed_forward_length": 256,
    "llama.context_length": 2048,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "tokenizer.ggml.tokens": ["a", "b"],
}


def hf(**changes: Any) -> Config:
    return from_hf(Fields("config.json", LLAMA | changes))


def of_gguf(changes: dict[str, Any], factors: tuple[float, ...] = ()) -> Config:
    return from_gguf(Fields("m.gguf", GGUF | changes), {"freqs": factors} if factors else {})


def test_a_plain_config() -> None:
    config = hf()
    s = config.shape
    assert (s.layers, s.hidden, s.heads, s.kv_heads, s.head_dim) == (2, 128, 4, 2, 32)
    assert (s.ffn, s.vocab, s.context_length) == (256, 300, 2048)
    assert config.rms_eps == 1e-5
    assert config.tied is False
    assert hf(num_key_value_heads=None).shape.kv_heads == 4
    assert hf(head_dim=64).shape.head_dim == 64
    assert hf(architectures=["MistralForCausalLM"], sliding_window=None).architecture == "MistralForCausalLM"
    assert hf(sliding_window=2048).shape == s
    # transformers gives a Mistral without the field a window of 4096; one that holds the whole context is none.
    assert hf(architectures=["MistralForCausalLM"]).shape.windows == ()
    assert hf(architectures=["MistralForCausalLM"], max_position_embeddings=8192).shape.windows == (4096, 4096)


SCALINGS = {
    "default": {"rope_theta": 5000.0},
    "old linear": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "new linear": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 300.0}, "rope_theta": None},
    "llama3": {"rope_scaling": LLAMA3_SCALING, "rope_theta": 500000.0},
    "dynamic": {"rope_scaling": {"type": "dynamic", "factor": 4.0}},
    "yarn": {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}},
    "yarn of its own context": {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}, "rope_theta": 1e6},
    "yarn betas": {"rope_scaling": YARN | {"beta_fast": 16.0, "beta_slow": 2, "attention_factor": 1.5}},
    "yarn nulls": {"rope_scaling": YARN | {"beta_fast": None, "attention_factor": None}},
    "yarn mscale": {"rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 1.0}},
    "yarn short ramp": {"rope_scaling": YARN | {"beta_fast": 4.0, "beta_slow": 3.9}},
    "yarn uncut": {"rope_parameters": YARN | {"truncate": False, "rope_theta": 1e6}, "rope_theta": None},
}


@pytest.mark.parametrize("name", SCALINGS)
def test_rope_frequencies_equal_transformers(name: str) -> None:
    changes = {k: v for k, v in SCALINGS[name].items() if v is not None}
    theirs = LlamaConfig(**{k: v for k, v in (LLAMA | changes).items() if k != "architectures"})
    want = LlamaRotaryEmbedding(theirs)
    rope = hf(**SCALINGS[name]).ropes[0]
    got = rope.inv_freq()
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, want.inv_freq.numpy(), rtol=2e-6)
    assert rope.scale == pytest.approx(want.attention_scaling, rel=1e-12)


def test_gguf_rope_factors_are_llama3_scaling() -> None:
    """llama.cpp's converter writes the scaling as one factor per frequency."""
    scaled = hf(rope_scaling=LLAMA3_SCALING, rope_theta=500000.0).ropes[0].inv_freq()
    plain = Rope(500000.0, 32).inv_freq()
    factors = tuple((plain / scaled).tolist())
    got = of_gguf({"llama.rope.freq_base": 500000.0}, factors).ropes[0].inv_freq()
    np.testing.assert_allclose(got, scaled, rtol=1e-6)


def test_gguf_linear_scaling() -> None:
    got = of_gguf({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}).ropes[0]
    assert (got.kind, got.factor) == ("linear", 4.0)
    assert of_gguf({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}).ropes[0].kind == "default"


def test_gguf_yarn() -> None:
    """As transformers, and its cosines times `attn_factor` as llama.cpp does; a factor of 1 is no scaling."""
    prefix = "llama.rope.scaling"
    header: dict[str, Any] = {
        f"{prefix}.type": "yarn",
        f"{prefix}.factor": 8.0,
        f"{prefix}.original_context_length": 256,
    }
    want = hf(rope_scaling=YARN).ropes[0]
    assert of_gguf(header).ropes[0] == want
    factored = of_gguf(header | {f"{prefix}.attn_factor": 0.5}).ropes[0]
    assert factored == dataclasses.replace(want, scale=0.5 * want.scale)
    betas = of_gguf(header | {f"{prefix}.yarn_beta_fast": 16.0, f"{prefix}.yarn_beta_slow": 2.0}).ropes[0]
    assert betas == hf(rope_scaling=YARN | {"beta_fast": 16.0, "beta_slow": 2.0}).ropes[0] != want
    assert of_gguf(header | {f"{prefix}.factor": 1.0}).ropes[0] == Rope(10000.0, 32)


MISTRAL, QWEN = {"architectures": ["MistralForCausalLM"]}, {"architectures": ["Qwen2ForCausalLM"]}
GEMMA, PHI = {"architectures": ["Gemma2ForCausalLM"]}, {"architectures": ["Phi3ForCausalLM"]}
SMOL = {"architectures": ["SmolLM3ForCausalLM"]}
REFUSED_HF: dict[str, tuple[dict[str, Any], type[ModelError], str]] = {
    "family": ({"architectures": ["GPT2LMHeadModel"]}, UnsupportedModel, "GPT2LMHeadModel.*LlamaForCausalLM"),
    "no family": ({"architectures": None}, UnsupportedModel, "architecture none"),
    "empty family": ({"architectures": []}, UnsupportedModel, "architecture none"),
    "quantised": ({"quantization_config": {"bits": 4}}, UnsupportedModel, "quantization_config"),
    "activation": ({"hidden_act": "gelu"}, UnsupportedModel, "hidden_act gelu.*silu"),
    "experts": ({"num_local_experts": 8}, UnsupportedModel, "num_local_experts 8"),
    "window": ({"sliding_window": 512}, UnsupportedModel, "sliding_window 512.*not supported for Llama"),
    "rope type": (
        {"rope_scaling": {"type": "ntk", "factor": 2}},
        UnsupportedModel,
        "ntk.*default, linear.*yarn, llama3",
    ),
    "yarn": ({"rope_scaling": {"type": "yarn", "factor": 0.5}}, BrokenFile, "factor is 0.5, expected 1"),
    "yarn betas": ({"rope_scaling": YARN | {"beta_fast": 1}}, BrokenFile, "beta_fast 1 must be above beta_slow 1"),
    "yarn scale": ({"rope_scaling": YARN | {"attention_factor": 0}}, BrokenFile, "attention_factor is 0"),
    "yarn beside": (
        {
            "architectures": ["Gemma3ForCausalLM"],
            "hidden_activation": "gelu_pytorch_tanh",
            "rope_parameters": {"full_attention": YARN, "sliding_attention": {"rope_type": "default"}},
        },
        UnsupportedModel,
        "turn different parts",
    ),
    "partial": ({"partial_rotary_factor": 0.1}, UnsupportedModel, "0.1 of a head of 32 is no even number"),
    "no window": (MISTRAL | {"sliding_window": 0}, BrokenFile, "sliding_window is 0, expected 1"),
    "odd window": (MISTRAL | {"sliding_window": 1.5}, BrokenFile, "sliding_window must be an integer"),
    "layer types": (QWEN | {"layer_types": ["sliding_attention"]}, BrokenFile, "layer_types has 1 entries, expected 2"),
    "unknown layer": (QWEN | {"layer_types": ["full_attention", "linear"]}, UnsupportedModel, "layer_types linear"),
    "window of nothing": (
        QWEN | {"layer_types": ["sliding_attention", "full_attention"]},
        BrokenFile,
        "gives no sliding_window",
    ),
    "bidirectional": (GEMMA | {"use_bidirectional_attention": True}, UnsupportedModel, "use_bidirectional_attention"),
    "gemma activation": (GEMMA | {"hidden_activation": "gelu"}, UnsupportedModel, "hidden_activation gelu.*pytorch"),
    "scalar": (GEMMA | {"query_pre_attn_scalar": 0}, BrokenFile, "query_pre_attn_scalar is 0"),
    "cap": (GEMMA | {"final_logit_softcapping": -1}, BrokenFile, "final_logit_softcapping is -1"),
    "two ropes": (
        {"architectures": ["Gemma3ForCausalLM"], "rope_parameters": {"full_attention": {"partial_rotary_factor": 0.5}}},
        UnsupportedModel,
        "turn different parts",
    ),
    "long rope": (PHI | {"rope_scaling": {"type": "su"}}, BrokenFile, "short_factor must be 16 positive factors"),
    "long factors": (
        PHI | {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 16, "long_factor": [0.0] * 16}},
        BrokenFile,
        "long_factor must be 16 positive",
    ),
    "no rope layers": (SMOL | {"no_rope_layers": [1]}, BrokenFile, "no_rope_layers has 1 entries for 2 layers"),
    "multiplier": (
        {"architectures": ["GraniteForCausalLM"], "logits_scaling": 0.0},
        BrokenFile,
        "logits_scaling is 0.0",
    ),
    "head size": ({"head_dim": 40}, UnsupportedModel, "head size 40"),
    "big heads": ({"head_dim": 512}, UnsupportedModel, "head size 512"),
    "missing": ({"hidden_size": None}, BrokenFile, "config.json: the field hidden_size is missing"),
    "text": ({"hidden_size": "128"}, BrokenFile, "hidden_size must be an integer, found '128'"),
    "bool": ({"vocab_size": True}, BrokenFile, "vocab_size must be an integer, found True"),
    "negative": ({"num_hidden_layers": -1}, BrokenFile, "num_hidden_layers is -1, expected 1 to 4096"),
    "huge": ({"vocab_size": 1 << 40}, BrokenFile, "vocab_size is 1099511627776"),
    "heads": ({"num_key_value_heads": 3}, BrokenFile, "4 attention heads are not a multiple of 3"),
    "eps": ({"rms_norm_eps": "small"}, BrokenFile, "rms_norm_eps must be a number"),
    "nan": ({"rms_norm_eps": float("nan")}, BrokenFile, "rms_norm_eps is nan"),
    "scaling": ({"rope_scaling": [1]}, BrokenFile, "rope_scaling must be an object"),
    "no factor": ({"rope_scaling": {"type": "linear"}}, BrokenFile, "factor is missing"),
    "factors": (
        {"rope_scaling": LLAMA3_SCALING | {"low_freq_factor": 4.0}},
        BrokenFile,
        "low_freq_factor 4.0 must be below",
    ),
    "tied": ({"tie_word_embeddings": "yes"}, BrokenFile, "tie_word_embeddings must be true or false"),
}


@pytest.mark.parametrize("name", REFUSED_HF)
def test_refused_configs(name: str) -> None:
    changes, error, says = REFUSED_HF[name]
    with pytest.raises(error, match=says):
        hf(**changes)


GGUF_YARN: dict[str, Any] = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}
REFUSED_GGUF: dict[str, tuple[dict[str, Any], type[ModelError], str]] = {
    "family": ({"general.architecture": "gemma"}, UnsupportedModel, "architecture gemma.*llama"),
    "no family": ({"general.architecture": None}, BrokenFile, "general.architecture is missing"),
    "experts": ({"llama.expert_count": 8}, UnsupportedModel, "expert_count 8"),
    "rope": (
        {"llama.rope.scaling.type": "ntk", "llama.rope.scaling.factor": 2.0},
        UnsupportedModel,
        "ntk.*none, linear",
    ),
    "yarn": (GGUF_YARN | {"llama.rope.scaling.factor": 0.5}, BrokenFile, "factor is 0.5, expected 1 or more"),
    "yarn extras": (
        GGUF_YARN | {"llama.rope.scaling.yarn_log_multiplier": 0.1},
        UnsupportedModel,
        "log_multiplier 0.1",
    ),
    "yarn betas": (GGUF_YARN | {"llama.rope.scaling.yarn_beta_slow": 32.0}, BrokenFile, "yarn_beta_fast 32 must be ab"),
    "partial": ({"llama.rope.dimension_count": 15}, UnsupportedModel, "dimension_count 15 is not even"),
    "too much": ({"llama.rope.dimension_count": 64}, BrokenFile, "dimension_count is 64, expected 2 to 32"),
    "values": ({"llama.attention.value_length": 64}, UnsupportedModel, "value_length 64"),
    "window": ({"llama.attention.sliding_window": -1}, BrokenFile, "sliding_window is -1"),
    "pattern": (
        {"llama.attention.sliding_window": 64, "llama.attention.sliding_window_pattern": [True]},
        BrokenFile,
        "sliding_window_pattern has 1 entries, expected 2",
    ),
    "missing": ({"llama.context_length": None}, BrokenFile, "llama.context_length is missing"),
    "per layer": ({"llama.attention.head_count_kv": [2, 2]}, BrokenFile, "head_count_kv must be an integer"),
    "tokens": ({"tokenizer.ggml.tokens": [1, 2]}, BrokenFile, "must hold only str, found int"),
}


@pytest.mark.parametrize("name", REFUSED_GGUF)
def test_refused_headers(name: str) -> None:
    changes, error, says = REFUSED_GGUF[name]
    with pytest.raises(error, match=says):
        of_gguf(changes)


def test_bad_rope_factors() -> None:
    with pytest.raises(BrokenFile, match="rope freqs factors must be 16 positive factors"):
        of_gguf({}, (1.0, 2.0))
    with pytest.raises(BrokenFile, match="rope freqs"):
        of_gguf({}, (0.0,) * 16)


ODD: list[Any] = [
    None,
    True,
    0,
    -1,
    1,
    3,
    7,
    0.5,
    1e30,
    float("nan"),
    float("inf"),
    1 << 70,
    "",
    "x",
    [],
    [0],
    [1, "a"],
    {},
]
FIELDS = [
    *LLAMA, "head_dim", "sliding_window", "use_sliding_window", "max_window_layers", "layer_types", "rope_scaling",
    "rope_parameters", "partial_rotary_factor", "original_max_position_embeddings", "query_pre_attn_scalar",
    "attn_logit_softcapping", "final_logit_softcapping", "hidden_act", "hidden_activation", "tie_word_embeddings",
    "attention_bias", "mlp_bias", "no_rope_layers", "no_rope_layer_interval", "rope_local_base_freq", "text_config",
    "embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling", "quantization_config",
    "sliding_window_pattern", "num_experts",
]  # fmt: skip
ROPE_FIELDS = [
    "rope_type", "rope_theta", "factor", "short_factor", "long_factor", "low_freq_factor", "high_freq_factor",
    "original_max_position_embeddings", "attention_factor", "partial_rotary_factor", "beta_fast", "beta_slow", "mscale",
    "truncate",
]  # fmt: skip


def served(config: Config) -> None:
    """What came through can be computed: finite frequencies and scales, one rope and one window per layer."""
    s = config.shape
    assert all(np.isfinite(rope.inv_freq()).all() and len(rope.inv_freq()) <= s.head_dim // 2 for rope in config.ropes)
    assert np.isfinite(dataclasses.astuple(config.scales)).all()
    assert len(config.rope_of_layer) == s.layers
    assert len(s.windows) in (0, s.layers)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.hf)
def test_odd_configs_are_served_or_refused(family: Family) -> None:
    """Every field of every family with every odd value: a config that holds, or one of our errors."""
    act = {"gelu_tanh": "gelu_pytorch_tanh", "silu": "silu"}[family.activation]
    base = LLAMA | {"architectures": [family.hf], family.activation_field: act}
    long = {"rope_type": "longrope", "short_factor": [1.0] * 16, "long_factor": [2.0] * 16, "factor": 4.0}
    changes = [{name: value} for name in FIELDS for value in ODD]
    for kind in ("linear", "llama3", "longrope", "yarn"):
        ropes = [LLAMA3_SCALING | long | {"rope_type": kind, name: value} for name in ROPE_FIELDS for value in ODD]
        changes += [{"rope_scaling": rope} for rope in ropes] + [{"rope_parameters": rope} for rope in ropes]
    held = 0
    for change in changes:
        whole = base | change
        try:
            config = from_hf(Fields("config.json", {**whole, family.text_part: whole} if family.text_part else whole))
        except ModelError:
            continue
        served(config)
        held += 1
    assert held > 100


def test_odd_headers_are_served_or_refused() -> None:
    keys = [
        "embedding_length", "block_count", "attention.head_count", "attention.head_count_kv", "feed_forward_length",
        "context_length", "attention.layer_norm_rms_epsilon", "attention.key_length", "attention.value_length",
        "attention.sliding_window", "attention.sliding_window_pattern", "attention.scale", "rope.dimension_count",
        "rope.freq_base", "rope.freq_base_swa", "rope.scaling.type", "rope.scaling.factor", "rope.scale_linear",
        "rope.scaling.attn_factor", "rope.scaling.original_context_length", "rope.scaling.yarn_beta_fast",
        "logit_scale", "embedding_scale", "residual_scale", "attn_logit_softcapping", "final_logit_softcapping",
        "expert_count", "vocab_size",
    ]  # fmt: skip
    for arch in GGUF_ARCHITECTURES:
        base = {name.replace("llama.", f"{arch}."): value for name, value in GGUF.items()} | {
            "general.architecture": arch
        }
        odd = [{f"{arch}.{name}": value} for name in keys for value in ODD]
        yarn = {f"{arch}.rope.scaling.type": "yarn", f"{arch}.rope.scaling.factor": 4.0}
        for tables in ({}, {"freqs": (2.0,) * 16}, {"short": (1.0,) * 16, "long": (2.0,) * 16}):
            for change in [*odd, *(yarn | one for one in odd)]:
                try:
                    config = from_gguf(Fields("m.gguf", base | change), tables)
                except ModelError:
                    continue
                served(config)
