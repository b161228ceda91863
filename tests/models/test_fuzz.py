"""Model files that nobody wrote on purpose: each loads and runs, or is refused by one of our errors; never a crash."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.models.harness import logits_of, tiny_tokenizer, write_gguf
from tests.models.test_loader import random_model, save
from tests.mutate import ODD, mutated, spoiled

from tenure import models
from tenure.errors import ModelError
from tenure.models.gguf import GgufFile

SEEDS = 120
NARROW = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}


def outcome(source: Path) -> bool:
    """Whether it loads; then it computes too, and its tokenizer and template do not break on a chat."""
    try:
        made = models.load(str(source), kv_codec="f32", threads=1)
    except ModelError as error:
        assert str(error)
        return False
    logits = logits_of(made.decoder, made.shape, "f32", [1, 2, 3])
    assert logits.shape == (3, made.shape.vocab)
    assert isinstance(made.tokenizer.decode(made.tokenizer.encode("Hé 🙂")), str)
    return True


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fuzz") / "tiny.gguf"
    write_gguf(path, random_model(**NARROW), "F32", tiny_tokenizer())
    return path


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("fuzz"), random_model(**NARROW))


def try_all(path: Path, source: Path, texts: Callable[[random.Random], bytes]) -> tuple[int, int]:
    """How many of `SEEDS` versions of a file load, and how many are refused; the file is as it was afterwards."""
    whole, loaded = path.read_bytes(), 0
    try:
        for seed in range(SEEDS):
            path.write_bytes(texts(random.Random(seed)))
            loaded += outcome(source)
    finally:
        path.write_bytes(whole)
    return loaded, SEEDS - loaded


def test_what_is_mutated_is_whole(gguf_file: Path, directory: Path) -> None:
    assert outcome(gguf_file) and outcome(directory)


def test_gguf_headers(gguf_file: Path) -> None:
    whole = gguf_file.read_bytes()
    with GgufFile(gguf_file) as opened:
        header = opened.header_bytes
    _, refused = try_all(gguf_file, gguf_file, lambda chance: spoiled(whole, chance, header))
    assert refused > SEEDS // 2


def test_gguf_numbers(gguf_file: Path) -> None:
    """Every number of the header's sizes, too large by far."""
    whole = gguf_file.read_bytes()
    for at in (8, 16):
        for count in (0, 1, 1 << 20, 1 << 31, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 1):
            gguf_file.write_bytes(whole[:at] + struct.pack("<Q", count) + whole[at + 8 :])
            assert not outcome(gguf_file)
    gguf_file.write_bytes(whole)


def test_gguf_data(gguf_file: Path) -> None:
    """Whatever the weights are (infinities and NaNs among them), they load."""
    whole = bytearray(gguf_file.read_bytes())
    with GgufFile(gguf_file) as opened:
        start = opened.header_bytes + 64
    whole[start:] = np.random.default_rng(0).integers(0, 256, len(whole) - start, np.uint8).tobytes()
    original = gguf_file.read_bytes()
    gguf_file.write_bytes(bytes(whole))
    assert outcome(gguf_file)
    gguf_file.write_bytes(original)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_json_files(directory: Path, name: str) -> None:
    path = directory / name
    value = json.loads(path.read_text())
    loaded, refused = try_all(path, directory, lambda chance: json.dumps(mutated(value, chance)).encode())
    assert loaded and refused
    text = path.read_bytes()
    try_all(path, directory, lambda chance: spoiled(text, chance))


def test_every_config_field_with_every_odd_value(directory: Path) -> None:
    path = directory / "config.json"
    text = path.read_text()
    config: dict[str, Any] = json.loads(text)
    loaded = 0
    for field in config:
        for value in ODD:
            path.write_text(json.dumps(config | {field: value}))
            loaded += outcome(directory)
    path.write_text(text)
    assert loaded > len(ODD)


def test_safetensors_headers(directory: Path) -> None:
    path = directory / "model.safetensors"
    whole = path.read_bytes()
    length = struct.unpack_from("<Q", whole)[0]
    header = json.loads(whole[8 : 8 + length])

    def with_header(chance: random.Random) -> bytes:
        text = json.dumps(mutated(header, chance)).encode()
        return struct.pack("<Q", len(text)) + text + whole[8 + length :]

    _, refused = try_all(path, directory, with_header)
    assert refused > SEEDS // 2
    _, refused = try_all(path, directory, lambda chance: spoiled(whole, chance, 8 + length))
    assert refused > SEEDS // 2
    for size in (0, 1, length - 1, length + 1, len(whole), 1 << 40, (1 << 64) - 1):
        path.write_bytes(struct.pack("<Q", size) + whole[8:])
        assert not outcome(directory)
    path.write_bytes(whole)
