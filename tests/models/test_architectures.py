"""Every family against transformers on tiny random weights: logits, chunks, windows, cache reuse, greedy text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.models.harness import Runs, greedy, logits_of
from tests.models.test_loader import save

from tenure import models

TINY: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "vocab_size": 320, "max_position_embeddings": 512, "initializer_range": 0.2,
    "pad_token_id": 0,
}  # fmt: skip
WINDOW = 40
PARTIAL = {
    "rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.05, 1.1, 1.2, 1.3, 1.4], "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 8.0],
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("Mistral", {"sliding_window": WINDOW}),
    "llama yarn": (
        "Llama",
        {"max_position_embeddings": 256, "rope_parameters": YARN | {"mscale": 0.5, "mscale_all_dim": 1.0}},
    ),
    "qwen2": ("Qwen2", {}),
    "qwen2 yarn": ("Qwen2", {"rope_parameters": YARN}),
    "qwen2 window": ("Qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3 window": (
        "Qwen3",
        {"head_dim": 32, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2,
         "attention_bias": True},
    ),
    "gemma2": ("Gemma2", {"head_dim": 32, "sliding_window": WINDOW, "query_pre_attn_scalar": 24}),
    "gemma2 untied": ("Gemma2", {"head_dim": 16, "sliding_window": WINDOW, "tie_word_embeddings": False,
                                 "attn_logit_softcapping": 5.0, "final_logit_softcapping": None}),
    "gemma3": ("Gemma3", {"head_dim": 32, "sliding_window": WINDOW, "num_hidden_layers": 7}),
    "gemma3 scaled": (
        "Gemma3",
        {"head_dim": 32, "sliding_window": WINDOW, "num_hidden_layers": 4, "final_logit_softcapping": 20.0,
         "layer_types": ["sliding_attention", "full_attention"] * 2,
         "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
                             "sliding_attention": {"rope_type": "default", "rope_theta": 2e4}}},
    ),
    "phi3": ("Phi3", {}),
    "phi3 window": ("Phi3", {"sliding_window": WINDOW, "num_key_value_heads": 4}),
    "phi3 long": ("Phi3", {"original_max_position_embeddings": 64, "rope_parameters": PARTIAL}),
    "phi3 short": (
        "Phi3",
        {"original_max_position_embeddings": 512, "rope_parameters": PARTIAL},
    ),
    "olmo2": ("Olmo2", {}),
    "granite": ("Granite", {"embedding_multiplier": 12.0, "attention_multiplier": 0.1, "residual_multiplier": 0.22,
                            "logits_scaling": 8.0}),
    "granite biases": ("Granite", {"attention_multiplier": 0.0625, "residual_multiplier": 0.5, "attention_bias": True,
                                   "mlp_bias": True, "tie_word_embeddings": True}),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 5}),
    "smollm3 window": (
        "SmolLM3",
        {"use_sliding_window": True, "sliding_window": WINDOW, "no_rope_layers": [1, 0, 0], "attention_bias": True},
    ),
}  # fmt: skip
FAMILIES = [name for name in CASES if " " not in name]
TOKENS = np.random.default_rng(5).integers(2, 300, 150).tolist()


def build(case: str, seed: int = 0) -> Any:
    """A transformers model of random weights whose norms and biases are not their neutral first values."""
    family, changes = CASES[case]
    config = getattr(transformers, f"{family}TextConfig" if family == "Gemma3" else f"{family}Config")
    torch.manual_seed(seed)
    model = getattr(transformers, f"{family}ForCausalLM")(
        config(**(TINY | changes)),
    ).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.copy_(parameter + 0.5 * torch.rand_like(parameter) - 0.25)
    return model


def wanted(model: Any, tokens: list[int]) -> np.ndarray[Any, np.dtype[np.float32]]:
    with torch.no_grad():
        logits: np.ndarray[Any, np.dtype[np.float32]] = model(torch.tensor([tokens])).logits[0].float().numpy()
    return logits


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, tmp_path: Path) -> None:
    """In one piece, in chunks, token by token past the window, and again over what is cached; f32 to the last bit."""
    model = build(case)
    made = models.load(str(save(tmp_path, model)), weights="f32", kv_codec="f32")
    want = wanted(model, TOKENS)
    got = logits_of(made.decoder, made.shape, "f32", TOKENS)
    assert np.abs(got - want).max() <= 1e-3 * np.ptp(want)
    assert np.array_equal(logits_of(made.decoder, made.shape, "f32", TOKENS, chunk=37), got)
    runs = Runs(made.decoder, made.shape, "f32", 2, len(TOKENS))
    runs.feed([TOKENS[:90], TOKENS[:1]], last_only=True)
    steps = [runs.feed([[token], [token]], last_only=True)[0] for token in TOKENS[90:]]
    assert np.array_equal(np.stack(steps), got[90:])


@pytest.mark.parametrize("case", FAMILIES)
def test_greedy_text_equals_transformers(case: str, tmp_path: Path) -> None:
    """Ten prompts, 64 tokens after each, all in one batch here and one by one there."""
    model = build(case, seed=1)
    made = models.load(str(save(tmp_path, model)), weights="f32", kv_codec="f32")
    rng = np.random.default_rng(3)
    prompts = [rng.integers(2, 300, 5 + 7 * i).tolist() for i in range(10)]
    got = greedy(made.decoder, made.shape, "f32", prompts, 64)
    for prompt, text in zip(prompts, got, strict=True):
        # One forward pass over prompt and answer: every token of it must be the likeliest after those before it.
        logits = wanted(model, prompt + text[:-1])[len(prompt) - 1 :]
        assert logits.argmax(1).tolist() == text


@pytest.mark.parametrize("case", FAMILIES)
def test_bf16_differs_by_its_rounding(case: str, tmp_path: Path) -> None:
    """bf16 weights and cache lie no farther from f32 than transformers' own bf16 does, twice over."""
    model = build(case)
    made = models.load(str(save(tmp_path, model)), weights="bf16", kv_codec="bf16")
    want = wanted(model, TOKENS)
    ours = np.abs(logits_of(made.decoder, made.shape, "bf16", TOKENS) - want).mean()
    theirs = np.abs(wanted(model.to(torch.bfloat16), TOKENS) - want).mean()
    assert ours <= 2 * theirs
    assert theirs <= 0.05 * np.ptp(want)


def test_shapes_say_their_windows(tmp_path: Path) -> None:
    def windows(case: str) -> tuple[int | None, ...]:
        return models.inspect(str(save(tmp_path / case, build(case)))).shape.windows

    assert windows("mistral") == (WINDOW,) * 3
    assert windows("qwen2") == ()
    assert windows("qwen2 window") == (None, WINDOW, WINDOW)
    assert windows("gemma2") == (WINDOW, None, WINDOW)
    assert windows("gemma3") == (*[WINDOW] * 5, None, WINDOW)
    assert windows("smollm3 window") == (None, WINDOW, WINDOW)


def test_the_served_context_chooses_the_rope_factors(tmp_path: Path) -> None:
    """Below the context it was first trained with, Phi-3 has transformers' short factors."""
    model = build("phi3 long")
    source = str(save(tmp_path, model))
    short = models.load(source, weights="f32", kv_codec="f32", context=64)
    want = wanted(model, TOKENS[:60])
    assert np.abs(logits_of(short.decoder, short.shape, "f32", TOKENS[:60]) - want).max() <= 1e-3 * np.ptp(want)
    assert short.fingerprint != models.load(source, weights="f32", kv_codec="f32").fingerprint


@pytest.mark.parametrize("published", [False, True])
def test_the_text_part_of_a_model_that_sees(published: bool, tmp_path: Path) -> None:
    """Gemma 3's larger models come with a vision tower; the text part is served. `published`: with the hub's names."""
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
              "image_size": 28, "patch_size": 14}  # fmt: skip
    text = transformers.Gemma3TextConfig(**TINY | {"head_dim": 32, "sliding_window": WINDOW})
    torch.manual_seed(0)
    model = transformers.Gemma3ForConditionalGeneration(
        transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_id=300)
    ).eval()
    save(tmp_path, model)
    if published:
        path = tmp_path / "model.safetensors"
        tensors = {
            name.replace("model.language_model.", "language_model.model."): values
            for name, values in load_file(path).items()
        }
        save_file(tensors, path)
    made = models.load(str(tmp_path), weights="f32", kv_codec="f32")
    want = wanted(model, TOKENS)
    assert np.abs(logits_of(made.decoder, made.shape, "f32", TOKENS) - want).max() <= 1e-3 * np.ptp(want)
