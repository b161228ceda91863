"""The anatomy of a config.json that Tenure does not serve: every family's names for layers, heads and experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tenure.errors import BrokenFile
from tenure.models.families import MANY
from tenure.models.fields import Fields
from tenure.models.states import Cell, cells
from tenure.planner.anatomy import Anatomy, Kind, Matrix, merged
from tenure.spec import KvGeometry

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_transformer_layers")
_HIDDEN = ("hidden_size", "n_embd", "d_model", "model_dim")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_query_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
_HEAD_DIM = ("head_dim", "kv_channels", "attention_head_dim")
_CONTEXT = (
    "max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length", "max_context_length",
    "model_max_length",
)  # fmt: skip
_FFN = ("intermediate_size", "ffn_hidden_size", "n_inner", "ffn_dim", "d_ff")
_VOCAB = ("vocab_size", "padded_vocab_size")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "num_selected_experts")
_PLAIN = (
    "gpt2",
    "gpt_neo",
    "gpt_neox",
    "gptj",
    "gpt_bigcode",
    "falcon",
    "opt",
    "bloom",
    "mpt",
    "phi",
    "starcoder2",
    "nemotron",
    "nemotron_h",
)
"""Types whose feed-forward is two matrices, not three."""
_ALTERNATING = {"gemma2": 2, "cohere2": 4, "gemma3_text": 6, "gemma3n_text": 5}
"""Every n-th layer sees everything, when the config does not say which."""


def of_fields(name: str, fields: Fields, why_not: str) -> Anatomy:
    """What the config says, served or not. BrokenFile names fields that are missing or contradict each other."""
    try:
        return _Reader(name, fields.section("text_config") or fields, fields).anatomy(why_not)
    except (ArithmeticError, AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        # Lists and objects inside a config have no schema: whatever does not fit is the file's fault, not a bug.
        raise BrokenFile(
            f"{fields.where}: its fields contradict each other: {type(error).__name__}: {error}"
        ) from error


def first(fields: Fields, names: tuple[str, ...], low: int = 1, default: int | None = None) -> int:
    """The first of the names that is there and is a number."""
    for name in names:
        if name in fields and not isinstance(fields.raw(name), list):
            return fields.integer(name, low, MANY * 128)
    if default is None:
        raise BrokenFile(f"{fields.where}: the field {names[0]} is missing (nor is there {', '.join(names[1:])})")
    return default


class _Reader:
    """One config on its way to an anatomy."""

    def __init__(self, name: str, fields: Fields, outer: Fields) -> None:
        self.name, self.fields = name, fields
        names = outer.items("architectures", str) if "architectures" in outer else []
        self.type = fields.text("model_type", outer.text("model_type", ""))
        self.architecture = names[0] if names else self.type or "unknown"
        self.layers = first(fields, _LAYERS)
        self.hidden = first(fields, _HIDDEN)
        self.experts = first(fields, _EXPERTS, 0, 0)
        listed = [n for n in (*_HEADS, *_KV_HEADS) if isinstance(fields.raw(n), list)]
        # A model of recurrent layers only has no heads to speak of.
        self.heads = first(fields, _HEADS, 1, 1 if listed or not self._attends() else None)
        tied = fields.flag(
            "tie_word_embeddings", outer.flag("tie_word_embeddings", self.type in ("gemma3_text", "gpt2"))
        )
        self.matrices = [Matrix(first(fields, _VOCAB), self.hidden, 1, float(tied), edge=True)]
        if not tied:
            self.matrices.append(Matrix(first(fields, _VOCAB), self.hidden, edge=True))
        if "hidden_size_per_layer_input" in fields:
            rows = first(fields, ("vocab_size_per_layer_input",))
            self.matrices.append(Matrix(rows, self.layers * first(fields, ("hidden_size_per_layer_input",)), 1, 0.0))
        self.attention = 0

    def anatomy(self, why_not: str) -> Anatomy:
        where, kinds = self.fields.where, []
        mixers = self._mixers()
        if len(mixers) != self.layers:
            raise BrokenFile(f"{where}: it lists {len(mixers)} layers, {_LAYERS[0]} is {self.layers}")
        stored = self._stored()
        for layer, mixer in enumerate(mixers):
            for part in mixer:
                kinds += self._attend(layer, part, stored) if isinstance(part, int) else self._recur(part)
            self._feed(layer, mixer)
        return Anatomy(
            self.name, self.architecture, first(self.fields, _CONTEXT, 1, 1 << 20), merged(kinds),
            _together(self.matrices),
            vector_bytes=4 * self.hidden * (2 * self.layers + 1), attention=self.attention, unserved=why_not,
        )  # fmt: skip

    def _attends(self) -> bool:
        return any(name in self.fields for name in _HEADS) or self.type not in ("mamba", "mamba2", "falcon_mamba")

    # --- what each layer is -------------------------------------------------------------------------------------------

    def _mixers(self) -> list[tuple[int | Cell, ...]]:
        """Per layer what mixes its tokens: attention (its window, 0: all tokens), a recurrent cell, both or neither."""
        found = cells(self.fields, self.type, self.layers, self.hidden, self.heads)
        windows = self._windows(len(found))
        return [tuple(windows[i] if part is None else part for part in parts) for i, parts in enumerate(found)]

    def _windows(self, count: int) -> list[int]:
        fields = self.fields
        window = first(fields, ("sliding_window", "sliding_window_size", "attention_window_size", "window_size"), 0, 0)
        chunk = first(fields, ("attention_chunk_size",), 0, 0)
        if isinstance(fields.raw("sliding_window"), list):
            return [int(w or 0) for w in self._listed("sliding_window")]
        kinds: Any = fields.raw("layer_types")
        if isinstance(kinds, list) and any(str(kind).startswith(("sliding", "chunked")) for kind in kinds):
            if not window and not chunk:
                raise BrokenFile(f"{fields.where}: layer_types has windows, but the config gives no sliding_window")
            return [window or chunk if str(kind).startswith(("sliding", "chunked")) else 0 for kind in kinds]
        if chunk:
            interval = first(fields, ("no_rope_layer_interval",), 1, 4)
            turning: Any = fields.raw("no_rope_layers") or [int((i + 1) % interval != 0) for i in range(count)]
            return [chunk if turns else 0 for turns in turning]
        if not window or not fields.flag("use_sliding_window", True):
            return [0] * count
        return [window if slides else 0 for slides in self._sliding(count)]

    def _sliding(self, count: int) -> list[bool]:
        pattern: Any = self.fields.raw("sliding_window_pattern")
        if isinstance(pattern, str):
            return [pattern[i % len(pattern)] == "L" and i != count - 1 for i in range(count)]
        if isinstance(self.fields.raw("attention_types"), list):
            flat = [kind for kinds, n in self.fields.raw("attention_types") for _ in range(n) for kind in kinds]
            return [kind == "local" for kind in flat]
        every = pattern or _ALTERNATING.get(self.type, 0)
        begin = first(self.fields, ("max_window_layers",), 0, 0)
        return [i >= begin and (not every or (i + 1) % every != 0) for i in range(count)]

    def _stored(self) -> Callable[[int], bool]:
        """Whether a layer keeps K and V of its own, rather than use an earlier layer's."""
        shared = first(self.fields, ("num_kv_shared_layers",), 0, 0)
        if shared > self.layers:
            raise BrokenFile(f"{self.fields.where}: num_kv_shared_layers {shared} of {self.layers} layers")
        factor = first(self.fields, ("cla_share_factor",), 1, 1) if self.fields.flag("use_cla", False) else 1
        return lambda layer: layer < self.layers - shared and layer % factor == 0

    # --- what it holds ------------------------------------------------------------------------------------------------

    def _attend(self, layer: int, window: int, stored: Callable[[int], bool]) -> list[Kind]:
        heads, kv_heads = self._heads(layer)
        if not kv_heads:
            return []
        if "kv_lora_rank" in self.fields:
            return self._latent(heads)
        size = first(self.fields, _HEAD_DIM, 1, 0)
        if not size:
            if self.hidden % heads:
                raise BrokenFile(
                    f"{self.fields.where}: hidden_size {self.hidden} is no multiple of {heads} heads, and there is no "
                    "head_dim"
                )
            size = self.hidden // heads
        v_size = first(self.fields, ("v_head_dim",), 1, size)
        self._add((heads * size, self.hidden), (self.hidden, heads * v_size))
        self.attention += heads * size
        if not stored(layer):
            return []
        self._add((kv_heads * size, self.hidden), (kv_heads * v_size, self.hidden))
        named = f"window {window}" if window else "full"
        geometry = KvGeometry(1, kv_heads, size, v_dim=None if v_size == size else v_size)
        return [Kind(named, 1, geometry, window or None)]

    def _latent(self, heads: int) -> list[Kind]:
        """Multi-head latent attention keeps one compressed row and the rotated part of the keys, for all heads."""
        rank, turned = first(self.fields, ("kv_lora_rank",)), first(self.fields, ("qk_rope_head_dim",))
        plain, value = first(self.fields, ("qk_nope_head_dim",)), first(self.fields, ("v_head_dim",))
        size, q_rank = plain + turned, first(self.fields, ("q_lora_rank",), 0, 0)
        if q_rank:
            self._add((q_rank, self.hidden), (heads * size, q_rank))
        else:
            self._add((heads * size, self.hidden))
        self._add((rank + turned, self.hidden), (heads * (plain + value), rank), (self.hidden, heads * value))
        self.attention += heads * (rank + turned)
        return [Kind("latent", 1, KvGeometry(1, 1, rank + turned, v_dim=0))]

    def _heads(self, layer: int) -> tuple[int, int]:
        """Query and KV heads of a layer; 0 KV heads: it has no attention."""
        fields, heads, kv = self.fields, self.heads, self.heads
        blocks = fields.raw("block_configs")
        if isinstance(blocks, list):
            block = self._listed("block_configs")[layer].get("attention", {})
            group = block.get("n_heads_in_group")
            return (heads, heads // group) if group else (heads, 0)
        for name in (*_HEADS, *_KV_HEADS):
            if isinstance(fields.raw(name), list):
                own = self._listed(name)[layer]
                heads, kv = (own, kv) if name in _HEADS else (heads, own)
        if not any(isinstance(fields.raw(name), list) for name in _KV_HEADS):
            one = fields.flag("multi_query", False) and not fields.flag("new_decoder_architecture", False)
            kv = 1 if one and "multi_query_group_num" not in fields else first(fields, _KV_HEADS, 1, heads)
        if kv and heads % kv:
            raise BrokenFile(f"{fields.where}: {heads} attention heads are not a multiple of {kv} KV heads")
        return heads, kv

    def _listed(self, name: str) -> list[Any]:
        """What a field lists for every layer."""
        found: list[Any] = self.fields.raw(name)
        if len(found) != self.layers:
            raise BrokenFile(f"{self.fields.where}: {name} has {len(found)} entries for {self.layers} layers")
        return found

    def _recur(self, cell: Cell) -> list[Kind]:
        self._add(*cell.matrices)
        return [Kind("state", 1, state_bytes=cell.state_bytes)]

    # --- feed-forward -------------------------------------------------------------------------------------------------

    def _feed(self, layer: int, mixer: tuple[int | Cell, ...]) -> None:
        ffn, fields = self._ffn(layer, mixer), self.fields
        wide = 2 if self.type in _PLAIN else 3
        if not ffn:
            return
        if not self._is_mixture(layer):
            self._experts(ffn, wide, 1, 1.0)
            return
        size = first(fields, ("moe_intermediate_size",), 1, ffn)
        used = first(fields, _PER_TOKEN, 1, 1)
        if used > self.experts:
            raise BrokenFile(f"{fields.where}: {used} experts a token of {self.experts}")
        self._experts(size, wide, self.experts, used)
        self._add((self.experts, self.hidden))
        shared = first(fields, ("n_shared_experts", "num_shared_experts"), 0, 0) * size
        shared = first(fields, ("shared_expert_intermediate_size", "shared_intermediate_size"), 0, shared)
        if shared or self.type == "llama4_text":
            self._experts(shared or size, wide, 1, 1.0)

    def _ffn(self, layer: int, mixer: tuple[int | Cell, ...]) -> int:
        """Width of a layer's feed-forward, 0: it has none."""
        fields = self.fields
        if "hybrid_override_pattern" in fields:
            return first(fields, _FFN) if fields.text("hybrid_override_pattern")[layer] == "-" else 0
        if self.type in ("mamba", "mamba2", "falcon_mamba"):
            return 0
        blocks = fields.raw("block_configs")
        if isinstance(blocks, list):
            block = self._listed("block_configs")[layer].get("ffn", {})
            wide = int(2 * block.get("ffn_mult", 0) * self.hidden / 3)
            return -(-wide // 256) * 256
        if isinstance(fields.raw("ffn_multipliers"), list):
            divisor = first(fields, ("ffn_dim_divisor",), 1, 256)
            return -(-int(self._listed("ffn_multipliers")[layer] * self.hidden) // divisor) * divisor
        if isinstance(fields.raw("intermediate_size"), list):
            return int(self._listed("intermediate_size")[layer])
        if self.type == "llama4_text" and not self._is_mixture(layer):
            return first(fields, ("intermediate_size_mlp",))
        return first(fields, _FFN, 0, 4 * self.hidden)

    def _is_mixture(self, layer: int) -> bool:
        fields = self.fields
        if not self.experts:
            return False
        if "interleave_moe_layer_step" in fields:
            step = first(fields, ("interleave_moe_layer_step",))
            return (layer + 1) % step == 0
        if "expert_layer_period" in fields:
            offset = first(fields, ("expert_layer_offset",), 0, 0)
            return layer % first(fields, ("expert_layer_period",)) == offset
        dense = fields.raw("mlp_only_layers") or ()
        step = first(fields, ("decoder_sparse_step", "moe_layer_freq"), 1, 1)
        begin = first(fields, ("first_k_dense_replace",), 0, 0)
        by_step = (layer + 1) % step == 0 if "decoder_sparse_step" in fields else layer % step == 0
        return layer not in dense and layer >= begin and by_step

    def _experts(self, ffn: int, wide: int, count: int, used: float) -> None:
        self.matrices.append(Matrix(ffn, self.hidden, (wide - 1) * count, (wide - 1) * used))
        self.matrices.append(Matrix(self.hidden, ffn, count, used))

    def _add(self, *sizes: tuple[int, int]) -> None:
        self.matrices += [Matrix(rows, columns) for rows, columns in sizes]


def _together(matrices: list[Matrix]) -> tuple[Matrix, ...]:
    counted: dict[tuple[int, int, bool], tuple[int, float]] = {}
    for m in matrices:
        count, used = counted.get((m.rows, m.columns, m.edge), (0, 0.0))
        counted[m.rows, m.columns, m.edge] = count + m.count, used + m.used
    return tuple(Matrix(rows, columns, n, used, edge=edge) for (rows, columns, edge), (n, used) in counted.items())
