"""Write the Hugging Face directory that the peers load: the embedded model's 4-bit weights, dequantised to bf16.

usage: python bench/peer_models.py SOURCE.gguf HF_DIR       (needs gguf, torch, safetensors, tokenizers)

Every peer gets the very values that Tenure serves, so that a run compares runtimes and not checkpoints.
Run by ``bench/peers.sh`` in the OpenVINO environment; nothing of Tenure is imported here.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
CONTROL = 3  # GGUF token type of control tokens


def hf_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor, e.g. ``blk.3.ffn_up.weight`` -> ``model.layers.3.mlp.up_proj.weight``."""
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    _, layer, part, _ = name.split(".")
    return f"model.layers.{layer}.{LAYER_NAMES[part]}.weight"


def unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's interleaving of the rotary halves in the rows of ``weight`` (rows, in)."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def read_weights(reader: gguf.GGUFReader, meta: dict[str, Any]) -> dict[str, torch.Tensor]:
    """All tensors, dequantised in f32, in Hugging Face layout and rounded to bf16."""
    heads = {"attn_q": meta["llama.attention.head_count"], "attn_k": meta["llama.attention.head_count_kv"]}
    weights = {}
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        part = tensor.name.split(".")[2] if tensor.name.startswith("blk.") else ""
        if part in heads:
            values = unpermute(values, heads[part])
        weights[hf_name(tensor.name)] = torch.from_numpy(np.ascontiguousarray(values)).to(torch.bfloat16)
    return weights


def config(meta: dict[str, Any]) -> dict[str, Any]:
    """``config.json`` of a Llama with tied embeddings."""
    hidden, heads = meta["llama.embedding_length"], meta["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "head_dim": hidden // heads,
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_hidden_layers": meta["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "max_position_embeddings": meta["llama.context_length"],
        "rms_norm_eps": round(float(meta["llama.attention.layer_norm_rms_epsilon"]), 8),
        "rope_theta": float(meta["llama.rope.freq_base"]),
        "vocab_size": meta["llama.vocab_size"],
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "pad_token_id": meta["tokenizer.ggml.padding_token_id"],
    }


def write_tokenizer(meta: dict[str, Any], folder: Path) -> None:
    """``tokenizer.json`` and its config, from the vocabulary and merges in the GGUF's metadata."""
    tokens = meta["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = meta["tokenizer.ggml.token_type"]
    control = [t for t, kind in zip(tokens, types, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {
        name: tokens[meta[f"tokenizer.ggml.{key}_token_id"]]
        for name, key in (
            ("bos_token", "bos"),
            ("eos_token", "eos"),
            ("pad_token", "padding"),
            ("unk_token", "unknown"),
        )
    }
    settings = {
        "tokenizer_class": "GPT2TokenizerFast",
        "model_max_length": meta["llama.context_length"],
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": meta["tokenizer.chat_template"],
        **named,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


def main(source: str, target: str) -> None:
    """Read the GGUF at ``source`` and write the directory ``target``."""
    reader = gguf.GGUFReader(source)
    meta = {name: field.contents() for name, field in reader.fields.items()}
    folder = Path(target)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(meta), indent=1))
    write_tokenizer(meta, folder)
    save_file(read_weights(reader, meta), str(folder / "model.safetensors"), metadata={"format": "pt"})


if __name__ == "__main__":
    main(*sys.argv[1:])
