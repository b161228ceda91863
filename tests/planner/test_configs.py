"""Public models: parameters, KV bytes and states as published, whether Tenure serves them or not."""

from __future__ import annotations

from typing import Any

import pytest
from tests.planner.configs import CONFIGS, JAMBA, dense

from tenure.errors import BrokenFile
from tenure.models.anatomy import of_config
from tenure.models.fields import Fields
from tenure.planner.anatomy import Anatomy
from tenure.planner.memory import Room, Wish, plan


def read(config: dict[str, Any]) -> Anatomy:
    return of_config("m", Fields("config.json", config))


def test_the_table_is_long_enough() -> None:
    assert len(CONFIGS) >= 30


@pytest.mark.parametrize("name", CONFIGS)
def test_public_models(name: str) -> None:
    public = CONFIGS[name]
    model = read(public.config)
    geometries = [kind.geometry for kind in model.kinds if kind.geometry is not None]
    assert sum(geometry.token_bytes("bf16") for geometry in geometries) == public.kv
    grows = sum(k.geometry.token_bytes("bf16") for k in model.kinds if k.geometry is not None and k.window is None)
    assert grows == (public.kv if public.beyond is None else public.beyond)
    assert sum(kind.state_bytes for kind in model.kinds) == public.state
    assert model.parameters == pytest.approx(public.parameters * 1e9, rel=0.02)
    assert model.active == pytest.approx((public.active or model.active / 1e9) * 1e9, rel=0.02)
    assert model.active <= model.parameters
    assert (model.served is not None) == public.served
    assert public.served != bool(model.unserved)


@pytest.mark.parametrize("name", CONFIGS)
def test_any_shape_can_be_planned(name: str) -> None:
    model = read(CONFIGS[name].config)
    budget = model.weight_bytes() + (64 << 30)
    made = plan(model, Wish(context=4096, memory_bytes=budget, shared_prefix=512, target=7))
    counts = [codec.conversations for codec in made.codecs.values()]
    assert counts == sorted(counts)
    assert counts[0] > 0
    for name, codec in made.codecs.items():
        assert codec.conversations >= codec.conversations_unshared >= 1
        assert codec.memory_for_target is not None
        assert Room(model, name, codec.memory_for_target - made.weights_bytes).conversations(made.context, 512) >= 7
        assert list(made.curves[name]) == sorted(made.curves[name], reverse=True)


def test_a_latent_row_serves_as_key_and_value_in_every_codec() -> None:
    model = read(CONFIGS["DeepSeek-V3"].config)
    (latent,) = [kind for kind in model.kinds if kind.geometry is not None]
    assert latent.name == "latent"
    assert latent.geometry is not None
    assert latent.geometry.token_bytes("int8") == 61 * (576 + 2)
    assert latent.geometry.token_bytes("int4") <= 0.65 * 61 * 576


@pytest.mark.parametrize(
    ("tokens", "blocks"), [(1, 1), (32, 1), (33, 2), (96, 3), (128, 4), (160, 5), (161, 5), (9999, 5)]
)
def test_a_window_holds_what_it_can_touch(tokens: int, blocks: int) -> None:
    """128 tokens ending inside a block touch 5 blocks of 32: contexts below, at and far above the window."""
    model = read(CONFIGS["gpt-oss-20b"].config)
    (kind,) = [kind for kind in model.kinds if kind.window is not None]
    assert kind.layers == 12
    assert kind.geometry is not None
    assert kind.bytes_of(tokens, "bf16") == blocks * kind.geometry.block_bytes("bf16")


def test_a_state_is_no_larger_for_longer_conversations() -> None:
    room = Room(read(CONFIGS["Mamba-2.8B"].config), "bf16", 1 << 30)
    assert room.bytes_of(1) == room.bytes_of(100_000) == CONFIGS["Mamba-2.8B"].state
    assert room.conversations(8192) == (1 << 30) // CONFIGS["Mamba-2.8B"].state
    made = plan(room.anatomy, Wish(context=8192, kv_bytes=1 << 30))
    assert made.codecs["bf16"].tokens is None


def test_shared_layers_store_nothing_of_their_own() -> None:
    model = read(CONFIGS["Gemma-3n-E4B"].config)
    assert sum(kind.layers for kind in model.kinds) == 35 - 15


HALF = dense("MixtralForCausalLM", 2, 64, 4, 2, 96, 320, 512, model_type="mixtral", num_local_experts=4)
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no layers": ({"architectures": ["X"], "hidden_size": 64}, "num_hidden_layers is missing"),
    "no hidden": ({"architectures": ["X"], "num_hidden_layers": 2}, "hidden_size is missing"),
    "no heads": ({"architectures": ["X"], "num_hidden_layers": 2, "hidden_size": 64}, "num_attention_heads is missing"),
    "no vocabulary": ({k: v for k, v in HALF.items() if k != "vocab_size"}, "vocab_size is missing"),
    "layers of no type": (HALF | {"layer_types": ["full_attention", "magic"]}, "'magic'"),
    "layers miscounted": (HALF | {"layer_types": ["full_attention"]}, "lists 1 layers"),
    "windows of no size": (HALF | {"layer_types": ["sliding_attention"] * 2}, "no sliding_window"),
    "heads that do not divide": (HALF | {"num_key_value_heads": 3}, "not a multiple of 3"),
    "a head of no size": (HALF | {"hidden_size": 66}, "no head_dim"),
    "text for a number": (HALF | {"num_hidden_layers": "two"}, "must be an integer"),
    "less than nothing": (HALF | {"num_hidden_layers": -2}, "is -2"),
    "more experts than there are": (HALF | {"num_experts_per_tok": 5}, "5 experts a token of 4"),
    "heads for other layers": (HALF | {"num_key_value_heads": [2, 2, 2]}, "3 entries for 2 layers"),
    "latent without its parts": (HALF | {"kv_lora_rank": 16}, "qk_rope_head_dim"),
    "a state without a size": (HALF | {"layer_types": ["mamba", "attention"]}, "mamba_n_heads"),
    "a pattern of no letters": (HALF | {"hybrid_override_pattern": "M?"}, "hybrid_override_pattern"),
    "more sharing than layers": (HALF | {"num_kv_shared_layers": 3}, "num_kv_shared_layers 3"),
    "architectures as text": (HALF | {"architectures": "MixtralForCausalLM"}, "must be a list"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_named(case: str) -> None:
    config, words = WRONG[case]
    with pytest.raises(BrokenFile, match=r"config\.json") as caught:
        read(config)
    assert words in str(caught.value)


def test_every_field_may_be_anything_without_a_crash() -> None:
    """Whatever a file holds: a plan or a BrokenFile, never another error."""
    odd: list[Any] = [None, 0, -1, 1.5, "x", [], [1], {}, True, 1 << 40]
    for base in (HALF, dense("JambaForCausalLM", 16, 64, 4, 2, 96, 320, 512, **JAMBA), CONFIGS["DeepSeek-V3"].config,
                 CONFIGS["OpenELM-1.1B"].config, CONFIGS["Qwen3-Next-80B-A3B"].config):  # fmt: skip
        for name in base:
            for value in odd:
                try:
                    made = read(base | {name: value})
                    plan(made, Wish(context=512, kv_bytes=1 << 30))
                except BrokenFile as error:
                    assert "config.json" in str(error)
