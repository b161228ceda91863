"""What a Hugging Face config.json says about a decoder."""

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

_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_EXPERTS = ("num_local_experts", "num_experts")
_SLIDING, _FULL = "sliding_attention", "full_attention"


def from_hf(fields: Fields, served: int | None = None) -> Config:
    """The config of a Hugging Face directory. `served`: the longest context that will be asked for, None: the model's.

    Raises UnsupportedModel, BrokenFile.
    """
    family = _family(fields)
    if family.text_part:
        found = fields.section(family.text_part)
        if found is None:
            raise BrokenFile(f"{fields.where}: the field {family.text_part} is missing")
        fields = found
    fields = fields.with_defaults(family.defaults)
    if "quantization_config" in fields:
        raise UnsupportedModel(
            f"{fields.where}: quantization_config is not supported; use the unquantised weights and --weights int8 "
            "or int4, or a GGUF file"
        )
    refuse_experts(fields, _EXPERTS)
    _check_activation(fields, family)
    if "use_bidirectional_attention" in fields and fields.flag("use_bidirectional_attention"):
        raise UnsupportedModel(f"{fields.where}: use_bidirectional_attention true is not supported")
    layers = fields.integer("num_hidden_layers", 1, 4096)
    rotates = _rotates(fields, family, layers)
    sliding = _sliding(fields, family, rotates)
    window = _window(fields, family, sliding)
    shape = _shape(fields, layers, sliding, window)
    check_shape(fields.where, shape)
    ropes = _ropes(fields, family, shape, served)
    return Config(
        architecture=family.hf,
        family=family,
        shape=shape,
        rms_eps=fields.number("rms_norm_eps", 0.0, 1.0, 1e-6),
        ropes=ropes,
        rope_of_layer=tuple(
            (int(slides) if len(ropes) > 1 else 0) if turns else -1
            for turns, slides in zip(rotates, sliding, strict=True)
        ),
        scales=_scales(fields, family, shape),
        tied=fields.flag("tie_word_embeddings", False),
        biases=_biases(fields, family),
    )


def _family(fields: Fields) -> Family:
    names = fields.items("architectures", str) if "architectures" in fields else [fields.text("model_type", "none")]
    architecture = names[0] if names else "none"
    for family in FAMILIES:
        if family.hf == architecture:
            return family
    raise unsupported(fields.where, architecture)


def _check_activation(fields: Fields, family: Family) -> None:
    found = fields.text(family.activation_field, "silu")
    if _ACTIVATIONS.get(found) != family.activation:
        wanted = next(name for name, ours in _ACTIVATIONS.items() if ours == family.activation)
        raise UnsupportedModel(
            f"{fields.where}: {family.activation_field} {found} is not supported; supported: {wanted}"
        )


def _shape(fields: Fields, layers: int, sliding: tuple[bool, ...], window: int) -> ModelShape:
    hidden, heads = fields.integer("hidden_size", 1, MANY), fields.integer("num_attention_heads", 1, MANY)
    default_dim = hidden // heads if hidden % heads == 0 else None
    context = fields.integer("max_position_embeddings", 1, 1 << 31)
    return ModelShape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=fields.integer("num_key_value_heads", 1, MANY, heads),
        head_dim=fields.integer("head_dim", 1, MANY) if "head_dim" in fields or not default_dim else default_dim,
        ffn=fields.integer("intermediate_size", 1, MANY),
        vocab=fields.integer("vocab_size", 1, MANY),
        context_length=context,
        windows=windows_of(sliding, window, context),
    )


def _rotates(fields: Fields, family: Family, layers: int) -> tuple[bool, ...]:
    """Which layers rotate queries and keys: all, or those that `no_rope_layers` (its 1 means rope) says."""
    if "no_rope_layer_interval" not in family.defaults:
        return (True,) * layers
    if "no_rope_layers" in fields:
        listed: list[int] = fields.items("no_rope_layers", int)
        if len(listed) < layers:
            raise BrokenFile(f"{fields.where}: no_rope_layers has {len(listed)} entries for {layers} layers")
        return tuple(bool(turns) for turns in listed[:layers])
    interval = fields.integer("no_rope_layer_interval", 1, MANY)
    return tuple((i + 1) % interval != 0 for i in range(layers))


def _sliding(fields: Fields, family: Family, rotates: tuple[bool, ...]) -> tuple[bool, ...]:
    """Which layers see only a window."""
    layers = len(rotates)
    if not family.windows:
        context = fields.integer("max_position_embeddings", 1, 1 << 31)
        if (window := fields.integer("sliding_window", 1, 1 << 31, context)) < context:
            raise UnsupportedModel(
                f"{fields.where}: sliding_window {window} (context {context}) is not supported for {family.hf}; "
                "supported: null"
            )
        return (False,) * layers
    if "layer_types" in fields and family.hf != "MistralForCausalLM":
        kinds: list[str] = fields.items("layer_types", str, layers)
        if other := set(kinds) - {_SLIDING, _FULL}:
            raise UnsupportedModel(
                f"{fields.where}: layer_types {', '.join(sorted(other))} are not supported; supported: "
                f"{_SLIDING}, {_FULL}"
            )
        return tuple(kind == _SLIDING for kind in kinds)
    if not fields.flag("use_sliding_window") or "sliding_window" not in fields:
        return (False,) * layers
    first = fields.integer("max_window_layers", 0, MANY, 0)
    pattern = fields.integer("sliding_window_pattern", 1, MANY, MANY)
    return tuple(
        i >= first and (i + 1) % pattern != 0 and not (family.windows_without_rope and turns)
        for i, turns in enumerate(rotates)
    )


def _window(fields: Fields, family: Family, sliding: tuple[bool, ...]) -> int:
    if not any(sliding):
        return 1 << 31
    if not fields.flag("use_sliding_window") or "sliding_window" not in fields:
        raise BrokenFile(f"{fields.where}: layer_types has {_SLIDING}, but the config gives no sliding_window")
    return fields.integer("sliding_window", 1, 1 << 31)


def _ropes(fields: Fields, family: Family, shape: ModelShape, served: int | None) -> tuple[Rope, ...]:
    """`rope_parameters` (transformers 5, maybe one per kind of layer) or `rope_theta` and `rope_scaling` (before)."""
    fit = RopeShape(shape.head_dim, shape.context_length, min(served or shape.context_length, shape.context_length))
    section = fields.section("rope_parameters") or Fields(fields.where, {})
    by_layer = [section.section(kind) for kind in (_FULL, _SLIDING)]
    theta = fields.number("rope_theta", 1.0, 1e12, 10000.0)
    if not any(by_layer):
        given = section if section.raw("rope_type") is not None else fields.section("rope_scaling") or section
        first = rope.from_hf(fields, given, theta, fit)
    else:
        first = rope.from_hf(fields, by_layer[0] or Fields(fields.where, {}), theta, fit)
    if not family.local_theta:
        return (first,)
    local = fields.number("rope_local_base_freq", 1.0, 1e12)
    second = rope.from_hf(fields, by_layer[1] or Fields(fields.where, {}), local, fit)
    if (second.rotary, second.scale) != (first.rotary, first.scale):
        raise UnsupportedModel(f"{fields.where}: ropes that turn different parts of a head are not supported")
    return first, second


def _scales(fields: Fields, family: Family, shape: ModelShape) -> Scales:
    """A number the family does not have is not read: transformers would not use it either."""

    def own(name: str, low: float, high: float, otherwise: float) -> float:
        has_it = name in family.defaults and name in fields
        return fields.number(name, low, high) if has_it else otherwise

    scalar = own("query_pre_attn_scalar", 1e-6, 1e9, shape.head_dim)
    embedding = shape.hidden**0.5 if family.scaled_embedding else own("embedding_multiplier", -1e6, 1e6, 1.0)
    return Scales(
        attention=own("attention_multiplier", 1e-9, 1e6, scalar**-0.5),
        attention_cap=own("attn_logit_softcapping", 1e-3, 1e9, 0.0),
        logit_cap=own("final_logit_softcapping", 1e-3, 1e9, 0.0),
        embedding=embedding,
        residual=own("residual_multiplier", -1e6, 1e6, 1.0),
        logit=1.0 / own("logits_scaling", 1e-6, 1e6, 1.0),
    )


def _biases(fields: Fields, family: Family) -> frozenset[str]:
    attention = fields.flag("attention_bias", False)
    named: set[str] = set()
    if attention or family.qkv_bias:
        named |= {"q", "k", "v"}
    if attention:
        named.add("o")
    if fields.flag("mlp_bias", False):
        named |= {"gate", "up", "down"}
    return frozenset(named)
