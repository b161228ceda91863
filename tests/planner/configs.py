"""Public models as their config.json describes them, and what is published or follows from it by hand.

Each row: the fields that matter, parameters in billions (and those used per token), bytes of KV a token in bf16, and
bytes of state a conversation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Public:
    config: dict[str, Any]
    parameters: float
    kv: int
    active: float | None = None
    beyond: int | None = None
    """Bytes a token once all windows are full; None: no windows."""
    state: int = 0
    served: bool = False


def dense(
    kind: str, layers: int, hidden: int, heads: int, kv: int, ffn: int, vocab: int, context: int, **more: Any
) -> dict[str, Any]:
    return {
        "architectures": [kind], "num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads,
        "num_key_value_heads": kv, "intermediate_size": ffn, "vocab_size": vocab, "max_position_embeddings": context,
        "hidden_act": "silu", "rms_norm_eps": 1e-5, **more,
    }  # fmt: skip


_GEMMA = {"hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True}
_QWEN_MOE = {
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "head_dim": 128,
}
_MLA = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
JAMBA = {
    "model_type": "jamba", "attn_layer_period": 8, "attn_layer_offset": 4, "expert_layer_period": 2,
    "expert_layer_offset": 1, "num_experts": 16, "num_experts_per_tok": 2, "mamba_d_state": 16, "mamba_d_conv": 4,
    "mamba_expand": 2, "mamba_dt_rank": 256,
}  # fmt: skip
_KINDS = ["linear_attention"] * 3 + ["full_attention"]
_OPENELM_KV = [4] * 3 + [5] * 7 + [6] * 8 + [7] * 6 + [8] * 4

CONFIGS: dict[str, Public] = {
    "Llama-2-7B": Public(dense("LlamaForCausalLM", 32, 4096, 32, 32, 11008, 32000, 4096), 6.74, 512 << 10, served=True),
    "Llama-3.1-8B": Public(
        dense("LlamaForCausalLM", 32, 4096, 32, 8, 14336, 128256, 131072), 8.03, 128 << 10, served=True,
    ),
    "Llama-3.1-70B": Public(
        dense("LlamaForCausalLM", 80, 8192, 64, 8, 28672, 128256, 131072), 70.55, 320 << 10, served=True
    ),
    # 126 layers × 8 heads × 128 × 2 × 2 bytes: 516,096 bytes, the published 516 KB.
    "Llama-3.1-405B": Public(
        dense("LlamaForCausalLM", 126, 16384, 128, 8, 53248, 128256, 131072), 405.85, 516_096, served=True
    ),
    "Mistral-7B-v0.3": Public(
        dense("MistralForCausalLM", 32, 4096, 32, 8, 14336, 32768, 32768, sliding_window=None), 7.25,
        128 << 10, served=True
    ),
    "Mistral-7B-v0.1": Public(
        dense("MistralForCausalLM", 32, 4096, 32, 8, 14336, 32000, 32768, sliding_window=4096), 7.24,
        128 << 10, beyond=0, served=True
    ),
    "Qwen2.5-7B": Public(
        dense("Qwen2ForCausalLM", 28, 3584, 28, 4, 18944, 152064, 32768, use_sliding_window=False,
        sliding_window=131072),
        7.62, 56 << 10, served=True,
    ),
    "Qwen3-4B": Public(
        dense("Qwen3ForCausalLM", 36, 2560, 32, 8, 9728, 151936, 40960, head_dim=128, tie_word_embeddings=True),
        4.02, 144 << 10, served=True,
    ),
    "Gemma-2-9B": Public(
        dense("Gemma2ForCausalLM", 42, 3584, 16, 8, 14336, 256000, 8192, head_dim=256, sliding_window=4096, **_GEMMA),
        9.24, 42 * 8 << 10, beyond=21 * 8 << 10, served=True,
    ),
    "Gemma-3-27B": Public(
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "text_config": dense(
                "", 62, 5376, 32, 16, 21504, 262208, 131072, model_type="gemma3_text", head_dim=128,
                sliding_window=1024, **_GEMMA,
            ) | {"architectures": None},
        },
        27.0, 62 * 8 << 10, beyond=10 * 8 << 10, served=True,
    ),
    "Gemma-3n-E4B": Public(
        {
            "architectures": ["Gemma3nForConditionalGeneration"],
            "text_config": dense(
                "", 35, 2048, 8, 2, [16384] * 35, 262400, 32768, model_type="gemma3n_text", head_dim=256,
                sliding_window=512, num_kv_shared_layers=15, vocab_size_per_layer_input=262144,
                hidden_size_per_layer_input=256, **_GEMMA,
            ) | {"architectures": None},
        },
        6.87, 20 * 2 << 10, beyond=4 * 2 << 10,
    ),
    "Phi-3-mini-4k": Public(
        dense("Phi3ForCausalLM", 32, 3072, 32, 32, 8192, 32064, 4096, sliding_window=2047), 3.82, 384 << 10,
        beyond=0, served=True
    ),
    "Phi-4": Public(
        dense("Phi3ForCausalLM", 40, 5120, 40, 10, 17920, 100352, 16384, sliding_window=None), 14.66,
        200 << 10, served=True,
    ),
    "SmolLM2-1.7B": Public(
        dense("LlamaForCausalLM", 24, 2048, 32, 32, 8192, 49152, 8192, tie_word_embeddings=True), 1.71,
        192 << 10, served=True
    ),
    "SmolLM2-135M": Public(
        dense("LlamaForCausalLM", 30, 576, 9, 3, 1536, 49152, 8192, tie_word_embeddings=True), 0.1345, 23_040,
        served=True
    ),
    "Mixtral-8x7B": Public(
        dense("MixtralForCausalLM", 32, 4096, 32, 8, 14336, 32000, 32768, model_type="mixtral", num_local_experts=8,
              num_experts_per_tok=2),
        46.7, 128 << 10, active=12.75,
    ),
    "Qwen3-30B-A3B": Public(
        dense("Qwen3MoeForCausalLM", 48, 2048, 32, 4, 6144, 151936, 40960, model_type="qwen3_moe", num_experts=128,
              moe_intermediate_size=768, **_QWEN_MOE),
        30.5, 96 << 10, active=3.03,
    ),
    "Qwen3-235B-A22B": Public(
        dense("Qwen3MoeForCausalLM", 94, 4096, 64, 4, 12288, 151936, 40960, model_type="qwen3_moe", num_experts=128,
              moe_intermediate_size=1536, **_QWEN_MOE),
        235.1, 188 << 10, active=21.5,
    ),
    # 61 layers × (512 + 64) × 2 bytes: 70,272 bytes, the published 70 KB.
    "DeepSeek-V3": Public(
        dense("DeepseekV3ForCausalLM", 61, 7168, 128, 128, 18432, 129280, 163840, model_type="deepseek_v3",
              n_routed_experts=256, n_shared_experts=1, num_experts_per_tok=8, moe_intermediate_size=2048,
              moe_layer_freq=1, first_k_dense_replace=3, q_lora_rank=1536, **_MLA),
        671.0, 70_272, active=36.6,
    ),
    "DeepSeek-V2-Lite": Public(
        dense("DeepseekV2ForCausalLM", 27, 2048, 16, 16, 10944, 102400, 163840, model_type="deepseek_v2",
              n_routed_experts=64, n_shared_experts=2, num_experts_per_tok=6, moe_intermediate_size=1408,
              moe_layer_freq=1, first_k_dense_replace=1, q_lora_rank=None, **_MLA),
        15.7, 31_104, active=2.45,
    ),
    "Llama-4-Scout": Public(
        {
            "architectures": ["Llama4ForConditionalGeneration"],
            "text_config": dense(
                "", 48, 5120, 40, 8, 8192, 202048, 10485760, model_type="llama4_text", head_dim=128,
                num_local_experts=16, num_experts_per_tok=1, interleave_moe_layer_step=1, intermediate_size_mlp=16384,
                attention_chunk_size=8192,
            ) | {"architectures": None},
        },
        107.8, 192 << 10, active=16.1, beyond=48 << 10,
    ),
    "gpt-oss-20b": Public(
        dense("GptOssForCausalLM", 24, 2880, 64, 8, 2880, 201088, 131072, model_type="gpt_oss", head_dim=64,
              num_local_experts=32, num_experts_per_tok=4, sliding_window=128,
              layer_types=["sliding_attention", "full_attention"] * 12),
        20.9, 48 << 10, active=3.6, beyond=24 << 10,
    ),
    "Command-R7B": Public(
        dense("Cohere2ForCausalLM", 32, 4096, 32, 8, 14336, 256000, 132096, model_type="cohere2", head_dim=128,
              sliding_window=4096, sliding_window_pattern=4, tie_word_embeddings=True),
        8.03, 128 << 10, beyond=32 << 10,
    ),
    # AI21: 4 GB of KV at 256k tokens, where Mixtral needs 32 GB.
    "Jamba-v0.1": Public(
        dense("JambaForCausalLM", 32, 4096, 32, 8, 14336, 65536, 262144, **JAMBA),
        51.6, 16 << 10, active=11.8, state=28 * (4 * 8192 * 16 + 2 * 8192 * 4),
    ),
    "Qwen3-Next-80B-A3B": Public(
        dense("Qwen3NextForCausalLM", 48, 2048, 16, 2, 5120, 151936, 262144, model_type="qwen3_next",
              num_experts=512, moe_intermediate_size=512, shared_expert_intermediate_size=512,
              layer_types=_KINDS * 12, linear_num_key_heads=16, linear_num_value_heads=32, linear_key_head_dim=128,
              linear_value_head_dim=128, linear_conv_kernel_dim=4,
              **(_QWEN_MOE | {"num_experts_per_tok": 10, "head_dim": 256})),
        79.6, 24 << 10, state=36 * (4 * 32 * 128 * 128 + 2 * 8192 * 4),
    ),
    "Falcon-7B": Public(
        {"architectures": ["FalconForCausalLM"], "model_type": "falcon", "num_hidden_layers": 32, "hidden_size": 4544,
         "num_attention_heads": 71, "multi_query": True, "new_decoder_architecture": False, "vocab_size": 65024,
         "max_position_embeddings": 2048, "tie_word_embeddings": True},
        6.92, 8 << 10,
    ),
    "Falcon-40B": Public(
        {"architectures": ["FalconForCausalLM"], "model_type": "falcon", "num_hidden_layers": 60, "hidden_size": 8192,
         "num_attention_heads": 128, "num_kv_heads": 8, "multi_query": True, "new_decoder_architecture": True,
         "vocab_size": 65024, "max_position_embeddings": 2048, "tie_word_embeddings": True},
        41.3, 120 << 10,
    ),
    "GPT-2": Public(
        {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12,
         "n_positions": 1024, "vocab_size": 50257},
        0.1237, 36 << 10,
    ),
    "OpenELM-1.1B": Public(
        {"architectures": ["OpenELMForCausalLM"], "model_type": "openelm", "num_transformer_layers": 28,
         "model_dim": 2048, "head_dim": 64, "num_kv_heads": _OPENELM_KV,
         "num_query_heads": [4 * n for n in _OPENELM_KV],
         "ffn_multipliers": [0.5 + 3.5 * i / 27 for i in range(28)], "ffn_dim_divisor": 256, "vocab_size": 32000,
         "max_context_length": 2048, "tie_word_embeddings": True},
        1.08, sum(_OPENELM_KV) * 64 * 4,
    ),
    "RecurrentGemma-2B": Public(
        {"architectures": ["RecurrentGemmaForCausalLM"], "model_type": "recurrent_gemma", "num_hidden_layers": 26,
         "hidden_size": 2560, "num_attention_heads": 10, "num_key_value_heads": 1, "intermediate_size": 7680,
         "vocab_size": 256000, "max_position_embeddings": 8192, "attention_window_size": 2048, "lru_width": 2560,
         "block_types": ["recurrent", "recurrent", "attention"], "tie_word_embeddings": True},
        2.68, 8 << 10, beyond=0, state=18 * (4 * 2560 + 2 * 2560 * 3),
    ),
    "Mamba-2.8B": Public(
        {"architectures": ["MambaForCausalLM"], "model_type": "mamba", "num_hidden_layers": 64, "hidden_size": 2560,
         "intermediate_size": 5120, "state_size": 16, "conv_kernel": 4, "time_step_rank": 160, "vocab_size": 50280,
         "tie_word_embeddings": True},
        2.77, 0, state=64 * (4 * 5120 * 16 + 2 * 5120 * 4),
    ),
    "Hunyuan-Large": Public(
        dense("HunYuanForCausalLM", 64, 6400, 80, 8, 18304, 128512, 131072, model_type="hunyuan", use_cla=True,
              cla_share_factor=2, attention_head_dim=128, num_experts=16, moe_topk=1, num_shared_expert=1,
              shared_expert_intermediate_size=18304),
        389.0, 128 << 10,
    ),
}  # fmt: skip
