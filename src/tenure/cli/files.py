"""Trace files as lines of text: plain, gzip or zstd."""

from __future__ import annotations

import gzip
import importlib
import io
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from tenure.errors import ConfigError

NO_ZSTD = "{path}: reading zstd needs Python 3.14 or zstandard: pip install 'tenure[zstd]', or decompress it first"
CHUNK = 1 << 16
"""Packed bytes read at a time."""


def lines(path: Path) -> Iterator[str]:
    """The lines of a file, whatever it is packed with. ConfigError when it cannot be read."""
    try:
        with path.open("rb") as raw, io.TextIOWrapper(_unpacked(path, raw), encoding="utf-8") as text:
            yield from text
    except UnicodeDecodeError as error:
        raise ConfigError("trace", f"{path}: not UTF-8 text: {error.reason} at byte {error.start}") from None
    except (EOFError, zlib.error) as error:
        raise ConfigError("trace", f"{path}: the compressed file is truncated or broken: {error}") from None
    except OSError as error:
        raise ConfigError("trace", f"{path}: cannot be read: {error.strerror or error}") from None


def _unpacked(path: Path, raw: BinaryIO) -> BinaryIO:
    """Told by the first bytes, not by the name."""
    magic = raw.read(4)
    raw.seek(0)
    if magic[:2] == b"\x1f\x8b":
        return gzip.GzipFile(fileobj=raw)  # type: ignore[return-value]
    if magic == b"\x28\xb5\x2f\xfd":
        return _zstd(path, raw)
    return raw


def _zstd(path: Path, raw: BinaryIO) -> BinaryIO:
    for name in ("compression.zstd", "zstandard"):
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        return io.BufferedReader(_Frames(raw, module), CHUNK)
    raise ConfigError("trace", NO_ZSTD.format(path=path))


class _Frames(io.RawIOBase):
    """What zstd frames hold, one after the other: some tools write many into a file. Raises EOFError when the last one
    is cut off, which the library's own reader takes for the end."""

    def __init__(self, raw: BinaryIO, module: Any) -> None:
        self._raw = raw
        self._module = module
        self._frame: Any = None
        self._packed = self._plain = b""

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        while not self._plain:
            self._packed = self._packed or self._raw.read(CHUNK)
            if not self._packed:
                if self._frame is not None:
                    raise EOFError("a zstd frame has no end")
                return 0
            self._unpack()
        part = self._plain[: len(into)]
        into[: len(part)] = part
        self._plain = self._plain[len(part) :]
        return len(part)

    def _unpack(self) -> None:
        if self._frame is None:
            made = self._module.ZstdDecompressor()
            self._frame = made.decompressobj() if hasattr(made, "decompressobj") else made
        packed, self._packed = self._packed, b""
        try:
            self._plain = self._frame.decompress(packed)
        except self._module.ZstdError as error:
            raise EOFError(error) from None
        if self._frame.eof:
            self._packed, self._frame = self._frame.unused_data, None
