"""Transformers models of any family as GGUF files: as llama.cpp's converter writes them, by gguf-py's names."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from tests.models.harness import tiny_tokenizer

F32 = NDArray[np.float32]
INTERLEAVED = {"llama", "granite", "smollm3"}


def write_family(
    path: Path, model: Any, arch: str, *, kind: str = "F32", blocks: Callable[[str, int, int], Any] | None = None
) -> None:
    """`model` as a GGUF of `arch`, its matrices of `kind`: quantised by gguf-py, or made by `blocks(kind, n, k)`."""
    config = model.config
    writer = gguf.GGUFWriter(path, arch)
    _header(writer, config, arch)
    for key, value in tiny_tokenizer(config.vocab_size).items():
        (
            writer.add_string
            if isinstance(value, str)
            else writer.add_uint32
            if isinstance(value, int)
            else writer.add_array
        )(key, value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.float().numpy()
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            values = values + 1
        if arch in INTERLEAVED and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            values = values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
        quant = gguf.GGMLQuantizationType[kind if tensor.ndim > 1 else "F32"]
        if blocks is not None and tensor.ndim > 1:
            data = blocks(kind, *values.shape)
        else:
            data = gguf.quantize(np.ascontiguousarray(values), quant)
        writer.add_tensor(_name(names, name, arch), data, raw_dtype=quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _name(names: Any, name: str, arch: str) -> str:
    if arch in ("gemma2", "gemma3", "olmo2"):
        # Where these have a norm after attention Llama has one before the feed-forward; the map knows only one name.
        name = name.replace("post_attention_layernorm", "post_attention_norm_of_its_own")
        if "post_attention_norm_of_its_own" in name:
            return f"blk.{name.split('.')[2]}.post_attention_norm.weight"
    found: str = names.get_name(name, try_suffixes=(".weight", ".bias"))
    return found


def _header(writer: gguf.GGUFWriter, config: Any, arch: str) -> None:
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    ropes = config.rope_parameters
    main = ropes.get("full_attention", ropes)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_freq_base(main["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * main.get("partial_rotary_factor", 1.0)))
    if main["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(main["factor"])
    if main["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(main["factor"])
        writer.add_rope_scaling_orig_ctx_len(main["original_max_position_embeddings"])
    if arch in ("gemma2", "gemma3", "phi3") and config.sliding_window:
        writer.add_sliding_window(config.sliding_window)
    if getattr(config, "attn_logit_softcapping", None):
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    if getattr(config, "final_logit_softcapping", None):
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if arch == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if main["rope_type"] == "longrope":
        original = main["original_max_position_embeddings"]
        writer.add_rope_scaling_orig_ctx_len(original)
        stretch = config.max_position_embeddings / original
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(stretch) / math.log(original)))
        for name in ("long", "short"):
            writer.add_tensor(f"rope_factors_{name}.weight", np.array(main[f"{name}_factor"], np.float32))
