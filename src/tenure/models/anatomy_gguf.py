"""The anatomy of a GGUF header that Tenure does not serve."""

from __future__ import annotations

from tenure.errors import BrokenFile
from tenure.models.families import MANY
from tenure.models.fields import Fields
from tenure.models.gguf import GgufFile
from tenure.planner.anatomy import Anatomy, Kind, Matrix, merged
from tenure.spec import KvGeometry


def of_header(name: str, fields: Fields, file: GgufFile, why_not: str) -> Anatomy:
    """What the header says of layers; the weights are as large as the file holds them."""
    arch = fields.text("general.architecture")
    layers = fields.integer(f"{arch}.block_count", 1, 4096)
    experts = fields.integer(f"{arch}.expert_count", 0, MANY, 0)
    used = fields.integer(f"{arch}.expert_used_count", 0, MANY, 0)
    if used > experts:
        raise BrokenFile(f"{fields.where}: {used} experts a token of {experts}")
    matrices = []
    for tensor, info in file.tensors.items():
        if len(info.shape) > 1:
            count = info.shape[0] if len(info.shape) == 3 else 1
            share = used / experts if experts and count == experts else 1.0
            at_edge = tensor.startswith(("token_embd", "output."))
            read = 0.0 if tensor.startswith("token_embd") and "output.weight" in file.tensors else share * count
            matrices.append(Matrix(info.shape[-2], info.shape[-1], count, read, edge=at_edge))
    heads = _per_layer(fields, f"{arch}.attention.head_count", layers)
    kinds = [kind for layer in range(layers) for kind in _layer(fields, arch, layer, layers)]
    size = fields.integer(f"{arch}.attention.key_length", 1, MANY, _hidden(fields, arch) // max(1, max(heads)))
    return Anatomy(
        name, arch, fields.integer(f"{arch}.context_length", 1, 1 << 31), merged(kinds), tuple(matrices),
        attention=sum(heads) * size, unserved=why_not, file_bytes=sum(info.nbytes for info in file.tensors.values()),
    )  # fmt: skip


def _hidden(fields: Fields, arch: str) -> int:
    return fields.integer(f"{arch}.embedding_length", 1, MANY)


def _per_layer(fields: Fields, name: str, layers: int, default: int | None = None) -> list[int]:
    """A number for every layer: one for all, or a list."""
    if isinstance(fields.raw(name), list):
        found: list[int] = fields.items(name, int, layers)
        return found
    missing = () if default is None else (default,)
    return [fields.integer(name, 0, MANY, *missing)] * layers


def _layer(fields: Fields, arch: str, layer: int, layers: int) -> list[Kind]:
    """What one layer keeps."""
    heads = _per_layer(fields, f"{arch}.attention.head_count", layers)[layer]
    kv_heads = _per_layer(fields, f"{arch}.attention.head_count_kv", layers, heads)[layer]
    found = []
    if f"{arch}.ssm.state_size" in fields and not _attends(fields, arch, layer, layers, kv_heads):
        inner, state = (fields.integer(f"{arch}.ssm.{name}", 1, MANY) for name in ("inner_size", "state_size"))
        kernel = fields.integer(f"{arch}.ssm.conv_kernel", 1, MANY, 4)
        groups = fields.integer(f"{arch}.ssm.group_count", 0, MANY, 0)
        return [Kind("state", 1, state_bytes=4 * inner * state + 4 * (kernel - 1) * (inner + 2 * groups * state))]
    shared = fields.integer(f"{arch}.attention.shared_kv_layers", 0, layers, 0)
    if not kv_heads or layer >= layers - shared:
        return []
    rank = fields.integer(f"{arch}.attention.kv_lora_rank", 0, MANY, 0)
    if rank:
        turned = fields.integer(f"{arch}.rope.dimension_count", 1, MANY)
        return [Kind("latent", 1, KvGeometry(1, 1, rank + turned, v_dim=0))]
    usual = _hidden(fields, arch) // max(1, heads)
    key = fields.integer(f"{arch}.attention.key_length", 1, MANY, usual)
    value = fields.integer(f"{arch}.attention.value_length", 1, MANY, key)
    window = _window(fields, arch, layer, layers)
    geometry = KvGeometry(1, kv_heads, key, v_dim=None if key == value else value)
    found.append(Kind(f"window {window}" if window else "full", 1, geometry, window or None))
    return found


def _attends(fields: Fields, arch: str, layer: int, layers: int, kv_heads: int) -> bool:
    every = fields.integer(f"{arch}.full_attention_interval", 1, MANY, 1)
    if every > 1:
        return (layer + 1) % every == 0
    return kv_heads > 0 and isinstance(fields.raw(f"{arch}.attention.head_count_kv"), list)


def _window(fields: Fields, arch: str, layer: int, layers: int) -> int:
    window = fields.integer(f"{arch}.attention.sliding_window", 0, 1 << 31, 0)
    name = f"{arch}.attention.sliding_window_pattern"
    if not window:
        return 0
    if isinstance(fields.raw(name), list):
        return window if fields.raw(name)[layer] else 0
    # llama.cpp knows these families' patterns by name.
    known = {"gpt-oss": 2, "cohere2": 4, "gemma3n": 5, "olmo3": 4, "llama4": 4}
    pattern = fields.integer(name, 1, MANY, known.get(arch, MANY))
    return 0 if (layer + 1) % pattern == 0 else window
