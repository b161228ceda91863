"""The GGUF reader: equal to gguf-py on good files, a clear ModelError on every bad one."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from tenure.errors import BrokenFile, ModelError, ModelNotFound, UnsupportedModel
from tenure.models import weights
from tenure.models.gguf import TYPES, GgufFile

KINDS = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"]


def write(path: Path, kinds: list[str], **extra: Any) -> None:
    rng = np.random.default_rng(1)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("an.int", 7)
    writer.add_float32("a.float", 0.5)
    writer.add_array("an.array", ["α", "", "c" * 300])
    writer.add_array("ints", [1, -2, 3])
    for key, value in extra.items():
        writer.add_uint32(key, value)
    for kind in kinds:
        quant = gguf.GGMLQuantizationType[kind]
        values = rng.standard_normal((6, 64)).astype(np.float32)
        writer.add_tensor(f"t.{kind}", gguf.quantize(values, quant), raw_dtype=quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "good.gguf"
    write(path, KINDS)
    return path


def test_metadata_is_read(good: Path) -> None:
    with GgufFile(good) as file:
        assert file.metadata["general.architecture"] == "llama"
        assert file.metadata["an.int"] == 7
        assert file.metadata["a.float"] == 0.5
        assert file.metadata["an.array"] == ["α", "", "c" * 300]
        assert file.metadata["ints"] == [1, -2, 3]


@pytest.mark.parametrize("kind", KINDS)
def test_values_equal_gguf_py_exactly(good: Path, kind: str) -> None:
    theirs = next(t for t in gguf.GGUFReader(good).tensors if t.name == f"t.{kind}")
    want = gguf.dequantize(theirs.data, theirs.tensor_type)
    with GgufFile(good) as file:
        info = file.tensors[f"t.{kind}"]
        assert info.shape == (6, 64)
        got = weights.to_f32(weights.decode(file.raw(info), info.type.name))
    # Of a zero only the value counts: Q4_0 with a negative scale has -0 where scale * q + min has +0.
    assert np.array_equal(got, want)


def test_every_truncation_is_told(good: Path, tmp_path: Path) -> None:
    whole = good.read_bytes()
    cut = tmp_path / "cut.gguf"
    # The last tensor is padded, so cut well into it; every length of the header, then a few of the data.
    with GgufFile(good) as file:
        header = file.header_bytes
        needed = max(t.offset + t.nbytes for t in file.tensors.values())
    for length in [*range(header), *range(header, needed, 97), needed - 1]:
        cut.write_bytes(whole[:length])
        with pytest.raises(BrokenFile, match=r"cut\.gguf"):
            GgufFile(cut)


def test_every_flipped_byte_is_survived(good: Path, tmp_path: Path) -> None:
    whole = bytearray(good.read_bytes())
    with GgufFile(good) as file:
        header = file.header_bytes
    path = tmp_path / "flipped.gguf"
    refused = 0
    for at in range(header):
        for flip in (0xFF, 0x01):
            whole[at] ^= flip
            path.write_bytes(whole)
            try:
                with GgufFile(path) as file:
                    for info in file.tensors.values():
                        assert file.raw(info).nbytes == info.nbytes
            except ModelError as error:
                assert "flipped.gguf" in str(error)
                refused += 1
            whole[at] ^= flip
    assert refused > header // 3


def header(*parts: bytes, tensors: int = 0, keys: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + b"".join(parts)


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


HOSTILE = {
    "no magic": (b"GGML" + bytes(60), BrokenFile, "GGML"),
    "version 1": (header(version=1), UnsupportedModel, "version 1"),
    "big endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), UnsupportedModel, "big-endian"),
    "many keys": (header(keys=1 << 60), BrokenFile, "number of key/values is 1152921504606846976"),
    "many tensors": (header(tensors=1 << 62), BrokenFile, "number of tensors is"),
    "long key": (header(struct.pack("<Q", 1 << 63), bytes(9), keys=1), BrokenFile, "length of a key"),
    "long string": (header(text(b"k"), struct.pack("<IQ", 8, 1 << 40), keys=1), BrokenFile, "length of k"),
    "long array": (header(text(b"k"), struct.pack("<IIQ", 9, 4, 1 << 61), keys=1), BrokenFile, "length of k"),
    "long list": (header(text(b"k"), struct.pack("<IIQ", 9, 8, 1 << 61), keys=1), BrokenFile, "length of k"),
    "short list": (
        header(text(b"k"), struct.pack("<IIQQ", 9, 8, 1, 99), keys=1),
        BrokenFile,
        r"k\[0\] needs 99 bytes",
    ),
    "nested array": (header(text(b"k"), struct.pack("<IIQ", 9, 9, 0), keys=1), BrokenFile, "nested type 9"),
    "unknown type": (header(text(b"k"), struct.pack("<I", 77), keys=1), BrokenFile, "unknown type 77"),
    "not utf-8": (header(text(b"\xff\xfe"), bytes(16), keys=1), BrokenFile, "not UTF-8"),
    "twice": (header(*[text(b"k"), struct.pack("<IB", 0, 1)] * 2, keys=2), BrokenFile, "k occurs twice"),
    "alignment": (
        header(text(b"general.alignment"), struct.pack("<II", 4, 3), keys=1),
        BrokenFile,
        "general.alignment is 3",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_headers(name: str, tmp_path: Path) -> None:
    data, error, says = HOSTILE[name]
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    with pytest.raises(error, match=says):
        GgufFile(path)


def tensor(name: bytes, shape: list[int], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


TENSORS = {
    "past the end": ([tensor(b"t", [64, 2], 0, 0)], BrokenFile, "needs bytes"),
    "overflowing": ([tensor(b"t", [1 << 62, 1 << 62], 0, 0)], BrokenFile, "needs bytes"),
    "far offset": ([tensor(b"t", [1], 0, 1 << 63)], BrokenFile, "needs bytes"),
    "crooked offset": ([tensor(b"t", [1], 0, 7)], BrokenFile, "not a multiple of the alignment 32"),
    "empty": ([tensor(b"t", [0], 0, 0)], BrokenFile, "impossible shape"),
    "half a block": ([tensor(b"t", [33], 8, 0)], BrokenFile, "impossible shape"),
    "five dimensions": ([text(b"t") + struct.pack("<I5QIQ", 5, 1, 1, 1, 1, 1, 0, 0)], BrokenFile, "5 dimensions"),
    "twice": ([tensor(b"t", [1], 0, 0)] * 2, BrokenFile, "t occurs twice"),
    "Q8_K": ([tensor(b"t", [256], 15, 0)], UnsupportedModel, "type Q8_K.*supported: F32, F16, Q4_0"),
    "type 99": ([tensor(b"t", [256], 99, 0)], UnsupportedModel, "type number 99"),
}


@pytest.mark.parametrize("name", TENSORS)
def test_hostile_tensors(name: str, tmp_path: Path) -> None:
    parts, error, says = TENSORS[name]
    path = tmp_path / "bad.gguf"
    path.write_bytes(header(*parts, bytes(64), tensors=len(parts)))
    with pytest.raises(error, match=says):
        GgufFile(path)


def test_absent_and_empty_files(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="no such file"):
        GgufFile(tmp_path / "none.gguf")
    (tmp_path / "empty.gguf").touch()
    with pytest.raises(BrokenFile, match="empty"):
        GgufFile(tmp_path / "empty.gguf")


def test_types_agree_with_gguf_py() -> None:
    for number, kind in TYPES.items():
        quant = gguf.GGMLQuantizationType(number)
        assert quant.name == kind.name
        assert gguf.GGML_QUANT_SIZES[quant] == (kind.block, kind.bytes)
