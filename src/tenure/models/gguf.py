"""A GGUF file (llama.cpp's format), mapped and checked. Nothing in the header is trusted before it is measured.

Layout: magic, version, counts, key/values, tensor infos, padding to the alignment, tensor data. All little-endian.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tenure.errors import BrokenFile, ModelNotFound, UnsupportedModel


@dataclass(frozen=True, slots=True)
class TensorType:
    """How a tensor's numbers are stored: `block` of them take `bytes`."""

    name: str
    block: int
    bytes: int


TYPES = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    20: TensorType("IQ4_NL", 32, 18),
    23: TensorType("IQ4_XS", 256, 136),
    30: TensorType("BF16", 1, 2),
}
SUPPORTED_TYPES = ", ".join(t.name for t in TYPES.values())
_OTHER_TYPES = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S",
    24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4
_MIN_KEY_VALUE = 8 + 4 + 1
"""Bytes of the smallest key/value: an empty key, a type, one byte."""
_MIN_TENSOR_INFO = 8 + 4 + 8 + 4 + 8


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor: `shape` row-major (rows first), `offset` from the start of the file, both checked."""

    name: str
    shape: tuple[int, ...]
    type: TensorType
    offset: int
    nbytes: int


class _Reader:
    """A cursor that refuses to leave the file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.at = 0

    def broken(self, why: str) -> BrokenFile:
        return BrokenFile(f"{self.path}: broken GGUF: {why}")

    def need(self, nbytes: int, what: str) -> int:
        """The position before `nbytes` more bytes, which are skipped."""
        start = self.at
        if nbytes > len(self.data) - start:
            left = len(self.data) - start
            raise self.broken(f"{what} at byte {start} needs {nbytes} bytes, the file has {left} left")
        self.at = start + nbytes
        return start

    def scalar(self, code: str, what: str) -> Any:
        layout = struct.Struct("<" + code)
        return layout.unpack_from(self.data, self.need(layout.size, what))[0]

    def count(self, what: str, smallest: int) -> int:
        """A u64 count of things of at least `smallest` bytes each, so that a hostile count allocates nothing."""
        value: int = self.scalar("Q", what)
        left = len(self.data) - self.at
        if value * smallest > left:
            raise self.broken(f"{what} is {value}, more than the {left} bytes left can hold")
        return value

    def string(self, what: str) -> str:
        length = self.count(f"length of {what}", 1)
        start = self.need(length, what)
        try:
            return self.data[start : self.at].decode()
        except UnicodeDecodeError as error:
            raise self.broken(f"{what} at byte {start} is not UTF-8: {error.reason}") from None

    def strings(self, count: int, what: str) -> list[str]:
        """`count` strings; the hot loop of opening a file (100 000 of them), hence written flat."""
        data, at, end = self.data, self.at, len(self.data)
        length_at = struct.Struct("<Q").unpack_from
        found: list[str] = []
        try:
            for _ in range(count):
                (length,) = length_at(data, at)
                start, at = at + 8, at + 8 + length
                if at > end:
                    raise self.broken(f"{what}[{len(found)}] needs {length} bytes, the file has {end - start} left")
                found.append(data[start:at].decode())
        except struct.error:
            raise self.broken(f"{what} ends after {len(found)} of {count} strings") from None
        except UnicodeDecodeError as error:
            raise self.broken(f"{what}[{len(found)}] is not UTF-8: {error.reason}") from None
        self.at = at
        return found

    def value(self, key: str) -> Any:
        kind = self.scalar("I", f"type of {key}")
        if kind == _STRING:
            return self.string(key)
        if kind == _ARRAY:
            return self.array(key)
        if kind not in _SCALARS:
            raise self.broken(f"{key} has unknown type {kind}")
        return self.scalar(_SCALARS[kind], key)

    def array(self, key: str) -> list[Any]:
        kind = self.scalar("I", f"element type of {key}")
        if kind == _STRING:
            return self.strings(self.count(f"length of {key}", 8), key)
        if kind not in _SCALARS:
            raise self.broken(f"{key} is an array of unknown or nested type {kind}")
        dtype = np.dtype(_SCALARS[kind]).newbyteorder("<")
        count = self.count(f"length of {key}", dtype.itemsize)
        start = self.need(count * dtype.itemsize, key)
        values: list[Any] = np.frombuffer(self.data, dtype, count, start).tolist()
        return values


class GgufFile:
    """An open GGUF file: `metadata` by key, `tensors` by name, and the bytes of each. Use as a context manager.

    Raises ModelNotFound, BrokenFile (truncated or contradictory), UnsupportedModel (version, byte order, tensor type).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map = _map(path)
        reader = _Reader(path, self._map)
        tensors = _preamble(reader)
        keys = reader.count("number of key/values", _MIN_KEY_VALUE)
        self.metadata: dict[str, Any] = {}
        for _ in range(keys):
            key = reader.string("a key")
            if key in self.metadata:
                raise reader.broken(f"the key {key} occurs twice")
            self.metadata[key] = reader.value(key)
        infos = [_tensor_info(reader) for _ in range(tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
            raise reader.broken(f"general.alignment is {alignment!r}, expected a power of two up to {1 << 20}")
        self.header_bytes = reader.at
        start = -(-reader.at // alignment) * alignment
        self.tensors = _place(reader, infos, start, alignment)

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Drop the mapping; it is unmapped as soon as the last view of it is gone."""
        del self._map

    def header(self) -> NDArray[np.uint8]:
        """The bytes before the tensor data, u8[header_bytes]."""
        return np.frombuffer(self._map, np.uint8, self.header_bytes)

    def raw(self, info: TensorInfo) -> NDArray[np.uint8]:
        """The stored bytes of a tensor as a view of the file, u8[rows, bytes per row]."""
        rows = info.shape[0] if len(info.shape) > 1 else 1
        return np.frombuffer(self._map, np.uint8, info.nbytes, info.offset).reshape(rows, -1)


def _map(path: Path) -> mmap.mmap:
    if not path.is_file():
        raise ModelNotFound(f"{path}: no such file")
    if path.stat().st_size == 0:
        raise BrokenFile(f"{path}: broken GGUF: the file is empty")
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _preamble(reader: _Reader) -> int:
    """Check magic and version; the number of tensors."""
    start = reader.need(4, "the magic")
    magic = reader.data[start : start + 4]
    if magic != b"GGUF":
        raise reader.broken(f"it starts with {magic!r}, not with b'GGUF'")
    version = reader.scalar("I", "the version")
    if version & 0xFFFF == 0 and version:
        raise UnsupportedModel(f"{reader.path}: big-endian GGUF files are not supported")
    if version not in (2, 3):
        raise UnsupportedModel(f"{reader.path}: GGUF version {version} is not supported; supported: 2, 3")
    return reader.count("number of tensors", _MIN_TENSOR_INFO)


def _tensor_info(reader: _Reader) -> tuple[str, tuple[int, ...], TensorType, int]:
    """Name, shape (row-major), type and offset into the data section of the next tensor."""
    name = reader.string("a tensor name")
    dims = reader.scalar("I", f"number of dimensions of {name}")
    if not 1 <= dims <= _MAX_DIMS:
        raise reader.broken(f"tensor {name} has {dims} dimensions, expected 1 to {_MAX_DIMS}")
    shape = tuple(reader.scalar("Q", f"shape of {name}") for _ in range(dims))[::-1]
    kind = reader.scalar("I", f"type of {name}")
    offset = reader.scalar("Q", f"offset of {name}")
    if kind not in TYPES:
        known = _OTHER_TYPES.get(kind, f"number {kind}")
        raise UnsupportedModel(
            f"{reader.path}: tensor {name} has type {known}, which is not supported; supported: {SUPPORTED_TYPES}"
        )
    if min(shape) == 0 or shape[-1] % TYPES[kind].block:
        raise reader.broken(f"tensor {name} of type {TYPES[kind].name} has the impossible shape {list(shape)}")
    return name, shape, TYPES[kind], offset


def _place(
    reader: _Reader, infos: list[tuple[str, tuple[int, ...], TensorType, int]], start: int, alignment: int
) -> dict[str, TensorInfo]:
    """The tensors by name, each checked to lie inside the file."""
    size = len(reader.data)
    placed: dict[str, TensorInfo] = {}
    for name, shape, kind, offset in infos:
        count = 1
        for extent in shape:
            count *= extent
        nbytes = count // kind.block * kind.bytes
        if name in placed:
            raise reader.broken(f"the tensor {name} occurs twice")
        if offset % alignment:
            raise reader.broken(f"tensor {name} starts at {offset}, not a multiple of the alignment {alignment}")
        if start + offset + nbytes > size:
            raise reader.broken(
                f"tensor {name} needs bytes {start + offset} to {start + offset + nbytes}, the file has {size}"
            )
        placed[name] = TensorInfo(name, shape, kind, start + offset, nbytes)
    return placed
