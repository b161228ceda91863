"""GGUF files of every family: the same logits as the transformers model they were written from."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tests.models.gguf_files import write_family
from tests.models.harness import logits_of
from tests.models.test_architectures import CASES, TINY, TOKENS, build, wanted
from tests.models.test_weights import random_blocks
from transformers import LlamaConfig, LlamaForCausalLM

from tenure import models
from tenure.errors import BrokenFile
from tenure.models.anatomy import anatomy
from tenure.models.families import GGUF_ARCHITECTURES
from tenure.models.fields import Fields
from tenure.models.gguf import GgufFile
from tenure.models.gguf_config import from_gguf

FILES = {
    "qwen2": "qwen2", "qwen2 yarn": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3", "phi3": "phi3",
    "phi3 window": "phi3", "phi3 long": "phi3",
    "olmo2": "olmo2", "granite": "granite", "granite biases": "granite", "smollm3": "smollm3",
}  # fmt: skip
"""Cases of test_architectures, and the architecture a GGUF of them has."""


def gemma(name: str, **changes: Any) -> Any:
    """A Gemma whose scores are scaled as its header implies: by the size of a head, or as the 27B models are."""
    CASES["for gguf"] = (name, {"head_dim": 32, "sliding_window": 40} | changes)
    return build("for gguf")


def check(path: Path, model: Any, limit: float = 1e-3) -> models.Model:
    made = models.load(str(path), weights="f32", kv_codec="f32")
    want = wanted(model, TOKENS)
    got = logits_of(made.decoder, made.shape, "f32", TOKENS, chunk=61)
    assert np.abs(got - want).max() <= limit * np.ptp(want)
    return made


@pytest.mark.parametrize("case", FILES)
def test_logits_equal_transformers(case: str, tmp_path: Path) -> None:
    model = build(case)
    if FILES[case] == "gemma3":
        model = gemma("Gemma3", num_hidden_layers=7, query_pre_attn_scalar=32)
    path = tmp_path / "tiny.gguf"
    write_family(path, model, FILES[case])
    made = check(path, model)
    assert models.inspect(str(path)).architecture in GGUF_ARCHITECTURES
    assert (made.shape.windows != ()) == bool(FILES[case] == "gemma3" or "window" in case)


def test_gemma2(tmp_path: Path) -> None:
    model = gemma("Gemma2", query_pre_attn_scalar=32)
    write_family(tmp_path / "tiny.gguf", model, "gemma2")
    assert check(tmp_path / "tiny.gguf", model).shape.windows == (40, None, 40)


def test_gemma3_scaled_rope(tmp_path: Path) -> None:
    """Only the layers that see everything have their rope stretched."""
    ropes = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    model = gemma("Gemma3", num_hidden_layers=7, query_pre_attn_scalar=32, rope_parameters=ropes)
    write_family(tmp_path / "tiny.gguf", model, "gemma3")
    check(tmp_path / "tiny.gguf", model)


@pytest.mark.parametrize(("name", "arch", "layers"), [("Gemma2", "gemma2", 46), ("Gemma3", "gemma3", 62)])
def test_the_27b_gemmas_are_known_by_their_layers(name: str, arch: str, layers: int, tmp_path: Path) -> None:
    model = gemma(name, num_hidden_layers=layers, query_pre_attn_scalar=16)  # hidden / heads
    write_family(tmp_path / "tiny.gguf", model, arch)
    config = models.inspect(str(tmp_path / "tiny.gguf")).config
    assert config.scales.attention == 0.25


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "IQ4_NL"])
def test_k_quants(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """f32 is exact; what `auto` keeps is close, and the log says how close."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 320}
    model = LlamaForCausalLM(LlamaConfig(**TINY | sizes)).eval()
    given: dict[tuple[int, int], list[Any]] = {}

    def blocks(kind: str, n: int, k: int) -> Any:
        made = random_blocks(kind, n, k, seed=len(given) + 1)
        given.setdefault((n, k), []).append(made)
        return made

    path = tmp_path / "tiny.gguf"
    write_family(path, model, "llama", kind=kind, blocks=blocks)
    quant = gguf.GGMLQuantizationType[kind]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                values = gguf.dequantize(given[tuple(parameter.shape)].pop(0), quant)
                if "q_proj" in name or "k_proj" in name:
                    heads = model.config.num_attention_heads if "q_proj" in name else model.config.num_key_value_heads
                    values = values.reshape(heads, -1, 2, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
                parameter.copy_(torch.from_numpy(np.array(values)))
    check(path, model)
    with caplog.at_level(logging.INFO, "tenure.models"):
        auto = models.load(str(path), kv_codec="f32")
    assert auto.weights == f"{'int4' if kind == 'Q4_K' else 'int8'} ({kind})"
    assert anatomy(str(path)).weight_bytes() == auto.weight_bytes
    [message] = [record.message for record in caplog.records]
    error = float(message.rpartition(" ")[2])
    assert message.startswith(f"{path}: kept as {auto.weights}, relative error ")
    assert error == 0 if kind == "IQ4_NL" else 0 < error < 0.01
    want, got = wanted(model, TOKENS), logits_of(auto.decoder, auto.shape, "f32", TOKENS)
    assert np.linalg.norm(got - want) <= 0.05 * np.linalg.norm(want)


def test_rope_factors_come_in_pairs(tmp_path: Path) -> None:
    """Long factors alone would leave the short contexts to a guess."""
    path = tmp_path / "tiny.gguf"
    write_family(path, build("phi3"), "phi3")
    fields = Fields("m.gguf", GgufFile(path).metadata)
    with pytest.raises(BrokenFile, match="not both"):
        from_gguf(fields, {"long": (1.0,) * 8})
