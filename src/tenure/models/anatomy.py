"""From a source to its anatomy, for `tenure plan`: config.json or a GGUF header is read, weights never.

What Tenure serves is described by the very config it is served with. Of everything else the config's fields are read
under the names that the families gave them.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

from tenure.errors import BrokenFile, ModelNotFound, UnsupportedModel
from tenure.models import kquants
from tenure.models.anatomy_gguf import of_header
from tenure.models.anatomy_hf import of_fields
from tenure.models.families import Config, norm_sizes
from tenure.models.fields import Fields
from tenure.models.gguf import GgufFile
from tenure.models.gguf_config import from_gguf
from tenure.models.hf_config import from_hf
from tenure.planner.anatomy import Anatomy, Kind, Matrix, merged
from tenure.spec import KvGeometry


def anatomy(source: str) -> Anatomy:
    """Of the model at a path (a .gguf, a directory, a config.json) or hub id. Raises ModelError."""
    path = Path(source).expanduser()
    if path.is_dir():
        return of_config(path.resolve().name, _fields(path / "config.json"))
    if path.is_file():
        if path.suffix == ".json":
            return of_config(path.resolve().parent.name, _fields(path))
        with GgufFile(path) as file:
            return of_gguf(path.stem, file)
    if path.suffix in (".gguf", ".json") or source.startswith((".", "/", "~")) or source.count("/") != 1:
        raise ModelNotFound(
            f"{source}: no such file or directory; give a .gguf file, a Hugging Face directory, its config.json or a "
            "hub id (owner/name)"
        )
    return of_config(source, _fields(_from_hub(source)))


def of_config(name: str, fields: Fields) -> Anatomy:
    """Of a config.json, served or not."""
    try:
        config = from_hf(fields)
    except UnsupportedModel as error:
        return of_fields(name, fields, str(error))
    return _served(name, config, "bf16", {})


def of_gguf(name: str, file: GgufFile) -> Anatomy:
    """Of an open GGUF file, served or not."""
    fields = Fields(str(file.path), file.metadata)
    types = {tensor: info.type.name for tensor, info in file.tensors.items()}
    try:
        config = from_gguf(fields)
    except UnsupportedModel as error:
        return of_header(name, fields, file, str(error))
    return _served(name, config, "", types)


_FORMATS = {"F32": "bf16", "F16": "bf16", "BF16": "bf16", "Q4_0": "int4", "Q4_1": "int4"}
_PARTS = {
    "qkv": ("attn_q", "attn_k", "attn_v"), "o": ("attn_output",), "gate_up": ("ffn_gate", "ffn_up"),
    "down": ("ffn_down",),
}  # fmt: skip


def _served(name: str, config: Config, format: str, types: dict[str, str]) -> Anatomy:
    """Matrices as the loader stacks them, all kept in `format`, or as the `types` of a GGUF's tensors tell."""
    s, fused = config.shape, config.family.fused
    q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
    sizes = {
        "qkv": (q + 2 * kv, s.hidden),
        "o": (s.hidden, q),
        "gate_up": (2 * s.ffn, s.hidden),
        "down": (s.hidden, s.ffn),
    }

    def kept(*tensors: str) -> str:
        found = [_kept_as(types[f"{tensor}.weight"]) for tensor in tensors if f"{tensor}.weight" in types]
        return format or max(found, key=("int4", "int8", "bf16").index, default="bf16")

    def parts(layer: int, part: str) -> tuple[str, ...]:
        stored = {"qkv": ("attn_qkv",), "gate_up": ("ffn_up",)}.get(part, _PARTS[part]) if fused else _PARTS[part]
        return tuple(f"blk.{layer}.{tensor}" for tensor in stored)

    tied = "output.weight" not in types if config.tied is None else config.tied
    counted: dict[tuple[int, int, str], int] = {}
    for layer in range(s.layers):
        for part, (rows, columns) in sizes.items():
            key = rows, columns, kept(*parts(layer, part))
            counted[key] = counted.get(key, 0) + 1
    matrices = [Matrix(s.vocab, s.hidden, 1, float(tied), kept("token_embd"), edge=True)]
    if not tied:
        matrices.append(Matrix(s.vocab, s.hidden, 1, 1, kept("output"), edge=True))
    matrices += [Matrix(rows, columns, n, n, how) for (rows, columns, how), n in counted.items()]
    biases = sum(_bias_rows(config, part, parts(0, part), types, rows) for part, (rows, _) in sizes.items())
    norms = sum(norm_sizes(config).values())
    windows = s.windows or (None,) * s.layers
    kinds = [
        Kind("full" if window is None else f"window {window}", 1, KvGeometry(1, s.kv_heads, s.head_dim), window)
        for window in windows
    ]
    return Anatomy(
        name, config.architecture, s.context_length, merged(kinds), tuple(matrices),
        vector_bytes=4 * (s.hidden + s.layers * (norms + biases)),
        attention=s.layers * s.heads * s.head_dim,
        served=KvGeometry.of(s),
    )  # fmt: skip


def _bias_rows(config: Config, part: str, tensors: tuple[str, ...], types: dict[str, str], rows: int) -> int:
    """A matrix has a bias when one of its parts has; the others' is zero then."""
    ours = {"qkv": {"q", "k", "v"}, "o": {"o"}, "gate_up": {"gate", "up"}, "down": {"down"}}[part]
    named = config.biases is not None and bool(config.biases & ours)
    return rows if named or any(f"{tensor}.bias" in types for tensor in tensors) else 0


def _kept_as(type: str) -> str:
    return kquants.kept_as(type) if type in kquants.KINDS else _FORMATS.get(type, "int8")


def _fields(path: Path) -> Fields:
    """The fields of a config.json."""
    if not path.is_file():
        raise ModelNotFound(f"{path}: no such file; a Hugging Face model directory needs it")
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise BrokenFile(f"{path}: broken JSON: {error}") from None
    if not isinstance(found, dict):
        raise BrokenFile(f"{path}: expected a JSON object, found {type(found).__name__}")
    return Fields(str(path), found)


def _from_hub(repository: str) -> Path:
    """config.json of a hub repository: from the hub's own cache, else fetched; nothing else is."""
    try:
        hub: Any = importlib.import_module("huggingface_hub")
    except ModuleNotFoundError:
        raise ModelNotFound(
            f"{repository}: no such path, and hub ids need the package huggingface_hub; pip install 'tenure[hub]', "
            "or give a directory, a config.json or a .gguf file"
        ) from None
    try:
        return Path(hub.hf_hub_download(repository, "config.json"))
    except Exception as error:
        # The hub's client raises its own, httpx's and the system's errors; all mean that the config is not here.
        raise ModelNotFound(
            f"{repository}: no such path, and its config.json could not be fetched from the hub: "
            f"{str(error).splitlines()[0] if str(error) else type(error).__name__}; check the name and the network, or "
            "give a directory, a config.json or a .gguf file"
        ) from error
