"""Trace files as lines of text: plain, gzip or zstd."""

from __future__ import annotations

import gzip
import importlib
import io
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from tenure.errors import ConfigError

NO_ZSTD = (
    "{path}: reading zstd needs Python 3.14 or the zstandard package: pip install zstandard, or decompress it first"
)


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
        opened: BinaryIO = module.ZstdFile(raw) if hasattr(module, "ZstdFile") else module.open(raw, "rb")
        return opened
    raise ConfigError("trace", NO_ZSTD.format(path=path))
