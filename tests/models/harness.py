"""Runs a Decoder by hand (arena, block tables) and builds the models it is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from transformers import LlamaConfig, LlamaForCausalLM

from tenure import _native
from tenure.spec import BLOCK_TOKENS, KvGeometry, ModelShape

F32 = NDArray[np.float32]
CODEC_NUMBERS = {"bf16": 0, "f32": 1}


def plain_table(counts: Sequence[int], offsets: NDArray[np.int64], codec: int) -> _native.Table:
    """A table for `Decoder.step`: so many blocks per sequence, all of one codec that is not encoded."""
    starts, codecs = np.cumsum([0, *counts]).astype(np.int32), np.full(len(offsets), codec, np.uint8)
    return starts, np.zeros(len(counts), np.int32), offsets, codecs, np.full(len(offsets), -1, np.int64), codecs


class Runs:
    """Several sequences side by side on one arena; `feed` appends tokens to each, in one ragged step."""

    def __init__(self, decoder: _native.Decoder, shape: ModelShape, codec: str, count: int, capacity: int) -> None:
        geometry = KvGeometry.of(shape)
        block_bytes = geometry.block_bytes(codec)
        assert decoder.block_bytes == block_bytes
        each = geometry.blocks(capacity)
        # The order of the blocks must not matter: the tables run backwards, and old bytes are NaNs.
        self._offsets = (np.arange(count * each, dtype=np.int64)[::-1] * block_bytes).reshape(count, each)
        raw = np.full(count * each * block_bytes + 64, 0xFF, np.uint8)
        start = -raw.ctypes.data % 64
        self._arena = raw[start : start + count * each * block_bytes]
        self._parts = geometry.part_offsets(codec)
        self._codec = CODEC_NUMBERS[codec]
        self._decoder = decoder
        self._vocab = shape.vocab
        self._lengths = [0] * count

    def feed(self, tokens: Sequence[Sequence[int]], *, last_only: bool) -> F32:
        """Logits of every row (or of each sequence's last), f32[rows, vocab]."""
        rows = np.cumsum([0, *map(len, tokens)]).astype(np.int32)
        after = [length + len(new) for length, new in zip(self._lengths, tokens, strict=True)]
        used = [-(-length // BLOCK_TOKENS) for length in after]
        offsets = np.concatenate([table[:n] for table, n in zip(self._offsets, used, strict=True)])
        wanted = rows[1:] - 1 if last_only else np.arange(rows[-1], dtype=np.int32)
        logits = np.empty((len(wanted), self._vocab), np.float32)
        self._decoder.step(
            self._arena,
            np.concatenate([np.array(new, np.int32) for new in tokens]),
            rows,
            np.array(self._lengths, np.int32),
            [plain_table(used, offsets + part, self._codec) for part in self._parts],
            wanted,
            logits,
        )
        self._lengths = after
        return logits


def logits_of(decoder: _native.Decoder, shape: ModelShape, codec: str, tokens: Sequence[int], chunk: int = 512) -> F32:
    """Logits of every position, f32[len(tokens), vocab], prefilled in chunks."""
    run = Runs(decoder, shape, codec, 1, len(tokens))
    return np.concatenate([run.feed([tokens[at : at + chunk]], last_only=False) for at in range(0, len(tokens), chunk)])


def greedy(
    decoder: _native.Decoder, shape: ModelShape, codec: str, prompts: Sequence[Sequence[int]], count: int
) -> list[list[int]]:
    """`count` tokens after each prompt, always the likeliest."""
    runs = Runs(decoder, shape, codec, len(prompts), max(map(len, prompts)) + count)
    steps = [runs.feed(prompts, last_only=True).argmax(1)]
    while len(steps) < count:
        steps.append(runs.feed([[token] for token in steps[-1]], last_only=True).argmax(1))
    tokens: list[list[int]] = np.stack(steps, 1).tolist()
    return tokens


def mean_kl(oracle: F32, other: F32) -> float:
    """Mean over rows of KL(oracle ‖ other), in nats."""
    total = 0.0
    for at in range(0, len(oracle), 256):
        p = torch.log_softmax(torch.from_numpy(oracle[at : at + 256]), -1)
        q = torch.log_softmax(torch.from_numpy(other[at : at + 256]), -1)
        total += float((p.exp() * (p - q)).sum(-1).double().sum())
    return total / len(oracle)


def oracle_of_gguf(path: Path) -> LlamaForCausalLM:
    """A transformers model with the weights gguf-py dequantises from the file; independent of our own reader."""
    reader = gguf.GGUFReader(path)

    def meta(name: str) -> Any:
        return reader.fields[f"llama.{name}"].contents()

    heads, kv_heads = meta("attention.head_count"), meta("attention.head_count_kv")
    tensors = {t.name: gguf.dequantize(t.data, t.tensor_type).reshape(t.shape[::-1]) for t in reader.tensors}
    config = LlamaConfig(
        hidden_size=meta("embedding_length"),
        num_hidden_layers=meta("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=meta("feed_forward_length"),
        vocab_size=tensors["token_embd.weight"].shape[0],
        max_position_embeddings=meta("context_length"),
        rms_norm_eps=meta("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": meta("rope.freq_base")},
        tie_word_embeddings="output.weight" not in tensors,
    )
    names = {
        "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    }  # fmt: skip
    state = {
        "model.embed_tokens.weight": tensors["token_embd.weight"],
        "model.norm.weight": tensors["output_norm.weight"],
        "lm_head.weight": tensors.get("output.weight", tensors["token_embd.weight"]),
    }
    for i in range(config.num_hidden_layers):
        for theirs, ours in names.items():
            values = tensors[f"blk.{i}.{theirs}.weight"]
            if theirs in ("attn_q", "attn_k"):
                count = heads if theirs == "attn_q" else kv_heads
                values = values.reshape(count, -1, 2, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
            state[f"model.layers.{i}.{ours}.weight"] = values
    model = LlamaForCausalLM(config).eval()
    model.load_state_dict({k: torch.from_numpy(np.array(v)) for k, v in state.items()})
    return model


def write_gguf(
    path: Path,
    model: LlamaForCausalLM,
    kind: str,
    keys: dict[str, Any],
    *,
    kinds: dict[str, str] | None = None,
    rope_factors: Sequence[float] = (),
) -> None:
    """A transformers model as a GGUF whose matrices are of `kind`, q and k rows interleaved as llama.cpp's are.

    `keys` are added to the header and win over the config; `kinds` gives matrices whose name holds a key another type.
    """
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    header = {
        "llama.block_count": config.num_hidden_layers,
        "llama.context_length": config.max_position_embeddings,
        "llama.embedding_length": config.hidden_size,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_attention_heads,
        "llama.attention.head_count_kv": config.num_key_value_heads,
        "llama.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "llama.rope.freq_base": config.rope_parameters["rope_theta"],
        "llama.attention.key_length": config.head_dim,
        "llama.attention.value_length": config.head_dim,
    }
    add = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
    for key, value in (header | keys).items():
        add.get(type(value), writer.add_array)(key, value)
    if rope_factors:
        writer.add_tensor("rope_freqs.weight", np.array(rope_factors, np.float32))
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        chosen = next((k for part, k in (kinds or {}).items() if part in name), kind)
        quant = gguf.GGMLQuantizationType[chosen if tensor.ndim > 1 else "F32"]
        values = gguf.quantize(_interleave(name, tensor.float().numpy(), config), quant)
        writer.add_tensor(table.get_name(name, try_suffixes=(".weight", ".bias")), values, raw_dtype=quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _interleave(name: str, values: F32, config: LlamaConfig) -> F32:
    """llama.cpp's order of the rows of q and k: the two halves of a head take turns."""
    if "q_proj" not in name and "k_proj" not in name:
        return values
    heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
    return np.ascontiguousarray(values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape))


def tiny_tokenizer(size: int = 320) -> dict[str, Any]:
    """A byte-level vocabulary of `size` tokens with two control tokens and a template, as GGUF keys."""
    alphabet = [chr(c) for c in [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]]
    alphabet += [chr(0x100 + n) for n in range(256 - len(alphabet))]
    tokens = ["<|bos|>", "<|end|>", *alphabet]
    pairs = [(a, b) for a in "Ġthe" for b in "aeiourstn" if a != b]
    merges = [f"{a} {b}" for a, b in pairs][: size - len(tokens)]
    tokens += [m.replace(" ", "") for m in merges]
    tokens += [f"<|pad{i}|>" for i in range(size - len(tokens))]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if t.startswith("<|") else 1 for t in tokens],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.chat_template": "{% for m in messages %}{{ m.role + ':' + m.content + '<|end|>' }}{% endfor %}",
    }
