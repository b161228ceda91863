"""What a GGUF header says about a decoder. Its keys begin with the name of the architecture."""

from __future__ import annotations

from tenure.errors import BrokenFile, UnsupportedModel
from tenure.models import rope
from tenure.models.families import (
    FAMILIES,
    MANY,
    Config,
    Family,
    Scales,
    check_shape,
    refuse_experts,
    unsupported,
    windows_of,
)
from tenure.models.fields import Fields
from tenure.models.rope import Rope, RopeShape
from tenure.spec import ModelShape

ROPE_TENSORS = {
    "rope_freqs.weight": "freqs",
    "rope_factors_short.weight": "short",
    "rope_factors_long.weight": "long",
}


def from_gguf(
    fields: Fields, rope_tables: dict[str, tuple[float, ...]] | None = None, served: int | None = None
) -> Config:
    """The config of a GGUF header. Raises UnsupportedModel, BrokenFile.

    `rope_tables`: the values of the ROPE_TENSORS it has, by our names. `served`: the longest context that will be
    asked for, None: the model's.
    """
    arch = fields.text("general.architecture")
    family = next((family for family in FAMILIES if family.gguf == arch), None)
    if family is None:
        raise unsupported(fields.where, arch)
    refuse_experts(fields, (f"{arch}.expert_count",))
    layers = fields.integer(f"{arch}.block_count", 1, 4096)
    sliding = _sliding(fields, family, layers)
    shape = _shape(fields, family, layers, sliding)
    check_shape(fields.where, shape)
    found = fields.integer(f"{arch}.attention.value_length", 1, MANY, shape.head_dim)
    if found != shape.head_dim:
        raise UnsupportedModel(
            f"{fields.where}: {arch}.attention.value_length {found} is not supported; supported: {shape.head_dim}"
        )
    ropes = _ropes(fields, family, shape, rope_tables or {}, served)
    interval = family.defaults.get("no_rope_layer_interval", MANY)
    return Config(
        architecture=arch,
        family=family,
        shape=shape,
        rms_eps=fields.number(f"{arch}.attention.layer_norm_rms_epsilon", 0.0, 1.0),
        ropes=ropes,
        rope_of_layer=tuple(
            -1 if (i + 1) % interval == 0 else int(slides) if len(ropes) > 1 else 0 for i, slides in enumerate(sliding)
        ),
        scales=_scales(fields, family, shape),
        tied=None,
        biases=None,
    )


def _shape(fields: Fields, family: Family, layers: int, sliding: tuple[bool, ...]) -> ModelShape:
    arch = family.gguf
    hidden = fields.integer(f"{arch}.embedding_length", 1, MANY)
    heads = fields.integer(f"{arch}.attention.head_count", 1, MANY)
    vocab = len(fields.items("tokenizer.ggml.tokens", str))
    context = fields.integer(f"{arch}.context_length", 1, 1 << 31)
    return ModelShape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=fields.integer(f"{arch}.attention.head_count_kv", 1, MANY, heads),
        head_dim=fields.integer(f"{arch}.attention.key_length", 1, MANY, max(hidden // heads, 1)),
        ffn=fields.integer(f"{arch}.feed_forward_length", 1, MANY),
        vocab=fields.integer(f"{arch}.vocab_size", 1, MANY, vocab),
        context_length=context,
        windows=windows_of(sliding, _window(fields, family), context),
    )


def _window(fields: Fields, family: Family) -> int:
    """Tokens of the window; 0: none."""
    always = family.defaults.get("sliding_window_pattern") and family.defaults["sliding_window"]
    return fields.integer(f"{family.gguf}.attention.sliding_window", 0, 1 << 31, always or 0)


def _sliding(fields: Fields, family: Family, layers: int) -> tuple[bool, ...]:
    """Which layers see only a window: all but every n-th, or as listed."""
    key = f"{family.gguf}.attention.sliding_window_pattern"
    if not _window(fields, family):
        return (False,) * layers
    if isinstance(fields.raw(key), list):
        return tuple(map(bool, fields.items(key, bool, layers)))
    pattern = fields.integer(key, 1, MANY, family.defaults.get("sliding_window_pattern", MANY))
    return tuple((i + 1) % pattern != 0 for i in range(layers))


def _ropes(
    fields: Fields, family: Family, shape: ModelShape, tables: dict[str, tuple[float, ...]], served: int | None
) -> tuple[Rope, ...]:
    arch = family.gguf
    if ("long" in tables) != ("short" in tables):
        raise BrokenFile(f"{fields.where}: it has long or short rope factors, but not both")
    fit = RopeShape(shape.head_dim, shape.context_length, min(served or shape.context_length, shape.context_length))
    theta = fields.number(f"{arch}.rope.freq_base", 1.0, 1e12, family.defaults.get("rope_theta", 10000.0))
    first = rope.from_gguf(fields, arch, theta, fit, tables)
    if not family.local_theta:
        return (first,)
    local = fields.number(f"{arch}.rope.freq_base_swa", 1.0, 1e12, family.defaults["rope_local_base_freq"])
    return first, Rope(local, first.rotary)


def _scales(fields: Fields, family: Family, shape: ModelShape) -> Scales:
    arch = family.gguf
    scalar = shape.hidden / shape.heads if shape.layers == family.wide_layers else shape.head_dim
    cap, end = (family.defaults.get(f"{name}_logit_softcapping") or 0.0 for name in ("attn", "final"))
    return Scales(
        attention=fields.number(f"{arch}.attention.scale", 0.0, 1e6, 0.0) or scalar**-0.5,
        attention_cap=fields.number(f"{arch}.attn_logit_softcapping", 0.0, 1e9, cap),
        logit_cap=fields.number(f"{arch}.final_logit_softcapping", 0.0, 1e9, end),
        embedding=shape.hidden**0.5
        if family.scaled_embedding
        else fields.number(f"{arch}.embedding_scale", -1e6, 1e6, 0.0) or 1.0,
        residual=fields.number(f"{arch}.residual_scale", -1e6, 1e6, 0.0) or 1.0,
        logit=1.0 / (fields.number(f"{arch}.logit_scale", 0.0, 1e6, 0.0) or 1.0),
    )
