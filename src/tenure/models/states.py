"""Layers that keep a state of one size instead of K and V: what it holds, and the matrices beside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tenure.errors import BrokenFile
from tenure.models.families import MANY
from tenure.models.fields import Fields


@dataclass(frozen=True, slots=True)
class Cell:
    """One recurrent layer: bytes of its state (sums in f32, the convolution's window in bf16) and its matrices."""

    state_bytes: int
    matrices: tuple[tuple[int, int], ...]


Mixers = list[tuple[Cell | None, ...]]
"""Per layer what it mixes tokens with; None: attention."""


def cells(fields: Fields, kind: str, layers: int, hidden: int, heads: int) -> Mixers:
    """For a model of type `kind`; BrokenFile for layers of a type that is not known."""
    names = _names(fields, kind, layers)
    made: dict[str, tuple[Cell | None, ...]] = {"attention": (None,), "none": ()}
    mixers = []
    for name in names:
        if name not in made:
            made[name] = (_cell(name.removesuffix(" and attention"), fields, hidden, heads),)
            made[name] += (None,) if name.endswith(" and attention") else ()
        mixers.append(made[name])
    return mixers


def _names(fields: Fields, kind: str, layers: int) -> list[str]:
    """Per layer: attention, none, mamba, mamba2, delta, gated or conv; and both at once in Falcon-H1."""
    if kind in ("mamba", "falcon_mamba"):
        return ["mamba"] * layers
    if kind == "mamba2":
        return ["mamba2"] * layers
    if kind == "falcon_h1":
        return ["mamba2 and attention"] * layers
    if "hybrid_override_pattern" in fields:
        pattern = fields.text("hybrid_override_pattern")
        known = {"M": "mamba2", "*": "attention", "-": "none", "E": "none"}
        if odd := set(pattern) - set(known):
            raise BrokenFile(f"{fields.where}: hybrid_override_pattern has {', '.join(sorted(odd))}; known: M, *, -, E")
        return [known[letter] for letter in pattern]
    if "attn_layer_period" in fields and kind in ("jamba", "bamba"):
        period = fields.integer("attn_layer_period", 1, MANY)
        offset = fields.integer("attn_layer_offset", 0, MANY, 0)
        cell = "mamba" if kind == "jamba" else "mamba2"
        return ["attention" if i % period == offset else cell for i in range(layers)]
    listed: Any = fields.raw("layer_types") or fields.raw("layers_block_type") or fields.raw("block_types")
    if kind == "bamba" and isinstance(fields.raw("attn_layer_indices"), list):
        return ["attention" if i in fields.raw("attn_layer_indices") else "mamba2" for i in range(layers)]
    if not isinstance(listed, list):
        if "linear_num_value_heads" in fields:
            every = fields.integer("full_attention_interval", 1, MANY, 4)
            return ["attention" if (i + 1) % every == 0 else "delta" for i in range(layers)]
        return ["attention"] * layers
    if "block_types" in fields:
        listed = [listed[i % len(listed)] for i in range(layers)]
    return [_named(fields, str(name)) for name in listed]


def _named(fields: Fields, name: str) -> str:
    if name in ("attention", "hybrid") or (name.endswith("_attention") and name != "linear_attention"):
        return "attention"
    found = {"mamba": "mamba2", "recurrent": "gated", "conv": "conv", "linear_attention": "delta"}.get(name)
    if found is None:
        raise BrokenFile(
            f"{fields.where}: layers of type {name!r} are unknown; known: attention (full, sliding, chunked, linear), "
            "mamba, recurrent, conv"
        )
    return found


def _cell(name: str, fields: Fields, hidden: int, heads: int) -> Cell:
    make = {"mamba": _mamba, "mamba2": _mamba2, "delta": _delta, "gated": _gated, "conv": _conv}[name]
    return make(fields, hidden, heads)


def _first(fields: Fields, *names: str, default: int | None = None) -> int:
    for name in names:
        if name in fields:
            return fields.integer(name, 0, MANY)
    if default is None:
        raise BrokenFile(f"{fields.where}: the field {' or '.join(names)} is missing")
    return default


def _mamba(fields: Fields, hidden: int, heads: int) -> Cell:
    inner = _first(fields, "intermediate_size", default=0) if "state_size" in fields else 0
    expand = _first(fields, "mamba_expand", "expand", default=2)
    inner = inner or expand * hidden
    state = _first(fields, "mamba_d_state", "state_size", default=16)
    kernel = _first(fields, "mamba_d_conv", "conv_kernel", default=4)
    named: Any = fields.raw("mamba_dt_rank") or fields.raw("time_step_rank")
    rank = named if isinstance(named, int) else -(-hidden // 16)
    matrices = ((2 * inner, hidden), (rank + 2 * state, inner), (inner, rank), (inner, state), (hidden, inner))
    return Cell(4 * inner * state + 2 * inner * kernel, matrices)


def _mamba2(fields: Fields, hidden: int, heads: int) -> Cell:
    count = _first(fields, "mamba_n_heads", "mamba_num_heads", "num_heads")
    size = _first(fields, "mamba_d_head", "mamba_head_dim", "head_dim")
    state = _first(fields, "mamba_d_state", "ssm_state_size", "state_size", default=128)
    groups = _first(fields, "mamba_n_groups", "n_groups", default=1)
    kernel = _first(fields, "mamba_d_conv", "conv_kernel", default=4)
    inner = count * size
    mixed = inner + 2 * groups * state
    return Cell(4 * inner * state + 2 * mixed * kernel, ((inner + mixed + count, hidden), (hidden, inner)))


def _delta(fields: Fields, hidden: int, heads: int) -> Cell:
    """Gated delta rule (Qwen3-Next): one matrix of key size × value size for each value head."""
    k_heads, v_heads = _first(fields, "linear_num_key_heads"), _first(fields, "linear_num_value_heads")
    k_size, v_size = _first(fields, "linear_key_head_dim"), _first(fields, "linear_value_head_dim")
    kernel = _first(fields, "linear_conv_kernel_dim", default=4)
    keys, values = k_heads * k_size, v_heads * v_size
    matrices = ((2 * keys + 2 * values, hidden), (2 * v_heads, hidden), (hidden, values))
    return Cell(4 * v_heads * k_size * v_size + 2 * (2 * keys + values) * kernel, matrices)


def _gated(fields: Fields, hidden: int, heads: int) -> Cell:
    """RG-LRU (Griffin, RecurrentGemma)."""
    width = _first(fields, "lru_width", default=hidden)
    kernel = _first(fields, "conv1d_width", default=4)
    gates = (2 * width, width // max(1, heads))
    return Cell(4 * width + 2 * width * (kernel - 1), ((width, hidden), (width, hidden), (hidden, width), gates))


def _conv(fields: Fields, hidden: int, heads: int) -> Cell:
    """A short convolution between two gates (LFM2)."""
    return Cell(2 * hidden * _first(fields, "conv_L_cache", default=3), ((3 * hidden, hidden), (hidden, hidden)))
