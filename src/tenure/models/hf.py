"""A Hugging Face model directory: config.json, safetensors (one file or sharded), tokenizer.json, chat template.

Safetensors are mapped and their headers checked here: numpy has no bf16, so the raw bits are what is wanted anyway.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tenure.errors import BrokenFile, ModelNotFound, UnsupportedModel
from tenure.models import tokenizer
from tenure.models.fields import Fields
from tenure.models.template import ChatTemplate
from tenure.models.tokenizer import Tokenizer

_ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
SUPPORTED_TYPES = ", ".join(_ITEM_BYTES)
_MAX_HEADER = 100 << 20
WANTED = ["*.json", "*.safetensors", "*.jinja"]
"""The files of a hub repository that serving needs."""
UNWANTED = ["*/*", "consolidated*"]
"""Of those what is in folders (other formats, adapters), and the second copy of the weights that some have."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor: its file, shape, type and byte range in the file, all checked."""

    name: str
    file: Path
    shape: tuple[int, ...]
    type: str
    offset: int
    nbytes: int


class SafetensorsFile:
    """An open safetensors file: `tensors` by name, the header's bytes, and the bytes of each tensor."""

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise ModelNotFound(f"{path}: no such file")
        self.path = path
        size = path.stat().st_size
        if size < 8:
            raise BrokenFile(f"{path}: broken safetensors: {size} bytes, not even a header")
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        length = int.from_bytes(self._map[:8], "little")
        if length > min(size - 8, _MAX_HEADER):
            raise BrokenFile(f"{path}: broken safetensors: a header of {length} bytes in a file of {size}")
        self.header = bytes(self._map[8 : 8 + length])
        entries = parse_json(path, self.header)
        entries.pop("__metadata__", None)
        self.tensors = {name: self._info(name, entry, 8 + length, size) for name, entry in entries.items()}
        end = max((info.offset + info.nbytes for info in self.tensors.values()), default=8 + length)
        if end != size:  # a header that says another length than it has would shift every tensor
            raise BrokenFile(f"{path}: broken safetensors: its tensors end at byte {end}, the file at {size}")

    def raw(self, info: TensorInfo) -> NDArray[np.uint8]:
        """The stored bytes of a tensor as a view of the file, u8[rows, bytes per row]."""
        rows = info.shape[0] if len(info.shape) > 1 else 1
        return np.frombuffer(self._map, np.uint8, info.nbytes, info.offset).reshape(rows, -1)

    def _info(self, name: str, entry: Any, data: int, size: int) -> TensorInfo:
        if not isinstance(entry, dict):
            raise BrokenFile(f"{self.path}: broken safetensors: the entry of {name} is no object")
        fields = Fields(f"{self.path}: tensor {name}", entry)
        kind = fields.text("dtype")
        if kind not in _ITEM_BYTES:
            raise UnsupportedModel(
                f"{fields.where} has type {kind}, which is not supported; supported: {SUPPORTED_TYPES}"
            )
        shape = tuple(fields.items("shape", int)) if fields.raw("shape") else ()
        start, end = fields.items("data_offsets", int, 2)
        nbytes = _ITEM_BYTES[kind]
        for extent in shape:
            nbytes *= extent
        if not shape or min(shape) <= 0 or start < 0 or end - start != nbytes:
            raise BrokenFile(f"{fields.where}: shape {list(shape)} of {kind} does not fill the bytes {start} to {end}")
        if data + end > size:
            raise BrokenFile(f"{fields.where}: it needs bytes up to {data + end}, the file has {size}")
        return TensorInfo(name, self.path, shape, kind, data + start, nbytes)


def parse_json(path: Path, text: bytes | str) -> dict[str, Any]:
    """The object in `text`; BrokenFile when it is none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BrokenFile(f"{path}: broken JSON: {error}") from None
    if not isinstance(value, dict):
        raise BrokenFile(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def read_json(path: Path, *, needed: bool = True) -> Fields:
    """The fields of a JSON file; no fields when it is absent and not `needed`."""
    if not path.is_file():
        if needed:
            raise ModelNotFound(f"{path}: no such file; a Hugging Face model directory needs it")
        return Fields(str(path), {})
    return Fields(str(path), parse_json(path, path.read_bytes()))


def open_weights(directory: Path) -> list[SafetensorsFile]:
    """The safetensors files of a directory, checked against the index when there is one."""
    index = directory / "model.safetensors.index.json"
    if not index.is_file():
        single = directory / "model.safetensors"
        if not single.is_file():
            raise ModelNotFound(f"{directory}: neither model.safetensors nor {index.name} is there")
        return [SafetensorsFile(single)]
    section = read_json(index).section("weight_map")
    if section is None:
        raise BrokenFile(f"{index}: the field weight_map is missing")
    placed = dict(_weight_map(index))
    files = {name: SafetensorsFile(directory / name) for name in sorted(set(placed.values()))}
    for tensor, name in placed.items():
        if tensor not in files[name].tensors:
            raise BrokenFile(f"{index}: it places {tensor} in {name}, which has no such tensor")
    return list(files.values())


def _weight_map(index: Path) -> Iterator[tuple[str, str]]:
    for tensor, name in read_json(index).raw("weight_map").items():
        # A name with a path in it would let an index read files elsewhere.
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise BrokenFile(f"{index}: weight_map places {tensor} in {name!r}, which is no safetensors file beside it")
        yield tensor, name


def load_tokenizer(directory: Path, config: Fields, size: int) -> tuple[Tokenizer, ChatTemplate]:
    """Tokenizer and chat template of a directory whose config.json is `config`; the model has `size` ids."""
    backend = tokenizer.from_file(directory / "tokenizer.json", size)
    settings = read_json(directory / "tokenizer_config.json", needed=False)
    generation = read_json(directory / "generation_config.json", needed=False)
    special = {
        name: _token_text(settings.raw(name))
        for name in ("bos_token", "eos_token", "unk_token", "pad_token")
        if settings.raw(name) is not None
    }
    eos = {*_ids(config, "eos_token_id", size), *_ids(generation, "eos_token_id", size)}
    named = backend.token_to_id(special.get("eos_token", ""))
    if named is not None:
        eos.add(named)
    bos = backend.token_to_id(special.get("bos_token", ""))
    if bos is None:
        bos = next(iter(_ids(config, "bos_token_id", size)), None)
    unknown = backend.token_to_id(special.get("unk_token", ""))
    adds = bos is not None and backend.encode("", add_special_tokens=True).ids[:1] == [bos]
    made = Tokenizer(
        backend,
        size=size,
        bos_id=bos,
        eos_ids=eos,
        add_bos=bos is not None and settings.flag("add_bos_token", adds),
        unknown_id=unknown,
    )
    return made, ChatTemplate(_template(directory, settings), special, str(directory))


def _template(directory: Path, settings: Fields) -> str | None:
    """The chat template: its own file, or in the tokenizer's config (one, or several of which `default` counts)."""
    own = directory / "chat_template.jinja"
    if own.is_file():
        try:
            return own.read_text("utf-8")
        except UnicodeDecodeError as error:
            raise BrokenFile(f"{own}: not UTF-8: {error.reason}") from None
    value = settings.raw("chat_template")
    if isinstance(value, list):
        value = {t.get("name"): t.get("template") for t in value if isinstance(t, dict)}.get("default")
    if value is not None and not isinstance(value, str):
        raise BrokenFile(f"{settings.where}: chat_template must be a string or a list with one named default")
    return value


def _token_text(value: Any) -> str:
    """A special token is written as its text, or as an object that holds it."""
    return str(value.get("content", "")) if isinstance(value, dict) else str(value)


def _ids(fields: Fields, name: str, size: int) -> list[int]:
    """One id or a list of ids, none when absent."""
    if name not in fields:
        return []
    if isinstance(fields.raw(name), list):
        ids: list[int] = fields.items(name, int)
    else:
        ids = [fields.integer(name, -(1 << 31), 1 << 31)]
    return [i for i in ids if 0 <= i < size]
