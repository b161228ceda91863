"""Configs: what they mean equals transformers; what is not served is refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tenure.errors import BrokenFile, ModelError, UnsupportedModel
from tenure.models import families
from tenure.models.families import Rope
from tenure.models.fields import Fields

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


def hf(**changes: Any) -> families.Config:
    return families.from_hf(Fields("config.json", LLAMA | changes))


def of_gguf(changes: dict[str, Any], factors: tuple[float, ...] = ()) -> families.Config:
    return families.from_gguf(Fields("m.gguf", GGUF | changes), factors)


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
    # transformers gives a Mistral without the field a window of 4096.
    assert hf(architectures=["MistralForCausalLM"]).shape.context_length == 2048
    with pytest.raises(UnsupportedModel, match="sliding_window 4096"):
        hf(architectures=["MistralForCausalLM"], max_position_embeddings=8192)


SCALINGS = {
    "default": {"rope_theta": 5000.0},
    "old linear": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "new linear": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 300.0}, "rope_theta": None},
    "llama3": {"rope_scaling": LLAMA3_SCALING, "rope_theta": 500000.0},
}


@pytest.mark.parametrize("name", SCALINGS)
def test_rope_frequencies_equal_transformers(name: str) -> None:
    changes = {k: v for k, v in SCALINGS[name].items() if v is not None}
    theirs = LlamaConfig(**{k: v for k, v in (LLAMA | changes).items() if k != "architectures"})
    want = LlamaRotaryEmbedding(theirs).inv_freq.numpy()
    got = hf(**SCALINGS[name]).rope.inv_freq(32)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, want, rtol=2e-6)


def test_gguf_rope_factors_are_llama3_scaling() -> None:
    """llama.cpp's converter writes the scaling as one factor per frequency."""
    scaled = hf(rope_scaling=LLAMA3_SCALING, rope_theta=500000.0).rope.inv_freq(32)
    plain = Rope(500000.0).inv_freq(32)
    factors = tuple((plain / scaled).tolist())
    got = of_gguf({"llama.rope.freq_base": 500000.0}, factors).rope.inv_freq(32)
    np.testing.assert_allclose(got, scaled, rtol=1e-6)


def test_gguf_linear_scaling() -> None:
    got = of_gguf({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}).rope
    assert (got.kind, got.factor) == ("linear", 4.0)
    assert of_gguf({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}).rope.kind == "default"


REFUSED_HF: dict[str, tuple[dict[str, Any], type[ModelError], str]] = {
    "family": ({"architectures": ["Qwen2ForCausalLM"]}, UnsupportedModel, "Qwen2ForCausalLM.*LlamaForCausalLM"),
    "no family": ({"architectures": None}, UnsupportedModel, "architecture none"),
    "empty family": ({"architectures": []}, UnsupportedModel, "architecture none"),
    "quantised": ({"quantization_config": {"bits": 4}}, UnsupportedModel, "quantization_config"),
    "activation": ({"hidden_act": "gelu"}, UnsupportedModel, "hidden_act gelu.*silu"),
    "window": ({"sliding_window": 512}, UnsupportedModel, "sliding_window 512"),
    "yarn": ({"rope_scaling": {"type": "yarn", "factor": 2}}, UnsupportedModel, "yarn.*default, linear, llama3"),
    "partial": ({"partial_rotary_factor": 0.5}, UnsupportedModel, "partial_rotary_factor 0.5"),
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


REFUSED_GGUF: dict[str, tuple[dict[str, Any], type[ModelError], str]] = {
    "family": ({"general.architecture": "gemma"}, UnsupportedModel, "architecture gemma.*llama"),
    "no family": ({"general.architecture": None}, BrokenFile, "general.architecture is missing"),
    "experts": ({"llama.expert_count": 8}, UnsupportedModel, "expert_count 8"),
    "rope": ({"llama.rope.scaling.type": "yarn"}, UnsupportedModel, "yarn"),
    "partial": ({"llama.rope.dimension_count": 16}, UnsupportedModel, "dimension_count 16.*supported: 32"),
    "values": ({"llama.attention.value_length": 64}, UnsupportedModel, "value_length 64"),
    "window": ({"llama.attention.sliding_window": 64}, UnsupportedModel, "sliding_window 64"),
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
    with pytest.raises(BrokenFile, match=r"rope_freqs\.weight must be 16 positive factors"):
        of_gguf({}, (1.0, 2.0))
    with pytest.raises(BrokenFile, match="rope_freqs"):
        of_gguf({}, (0.0,) * 16)
