"""GGUF headers of models that Tenure does not serve: experts, latent attention, windows, states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from tenure.errors import BrokenFile
from tenure.models.anatomy import anatomy
from tenure.planner.anatomy import Anatomy
from tenure.planner.memory import Wish, plan

BASE = {"block_count": 4, "context_length": 4096, "embedding_length": 64, "attention.head_count": 4}


def header(path: Path, arch: str, keys: dict[str, Any]) -> Anatomy:
    writer = gguf.GGUFWriter(path, arch)
    add = {int: writer.add_uint32, list: writer.add_array}
    for key, value in (BASE | keys).items():
        add[type(value)](f"{arch}.{key}", value)
    writer.add_tensor("token_embd.weight", np.zeros((320, 64), np.float32))
    writer.add_tensor("blk.0.ffn_up_exps.weight", np.zeros((8, 96, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return anatomy(str(path))


CASES: dict[str, tuple[str, dict[str, Any], int, int]] = {
    "mha": ("falcon", {}, 4 * 4 * 16 * 4, 0),
    "mqa": ("falcon", {"attention.head_count_kv": 1}, 4 * 1 * 16 * 4, 0),
    "heads by layer": ("openelm", {"attention.head_count_kv": [1, 2, 2, 4]}, 9 * 16 * 4, 0),
    "latent": ("deepseek2", {"attention.kv_lora_rank": 32, "rope.dimension_count": 16}, 4 * 48 * 2, 0),
    "k and v of two sizes": ("x", {"attention.key_length": 24, "attention.value_length": 16}, 4 * 4 * 40 * 2, 0),
    "shared": ("gemma3n", {"attention.shared_kv_layers": 3}, 1 * 4 * 16 * 4, 0),
    "hybrid": (
        "jamba",
        {"attention.head_count_kv": [0, 2, 0, 0], "ssm.state_size": 16, "ssm.inner_size": 128, "ssm.conv_kernel": 4},
        2 * 16 * 4, 3 * (4 * 128 * 16 + 4 * 3 * 128),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_kinds_of_layers(case: str, tmp_path: Path) -> None:
    arch, keys, kv, state = CASES[case]
    model = header(tmp_path / "m.gguf", arch, keys)
    assert sum(kind.geometry.token_bytes("bf16") for kind in model.kinds if kind.geometry is not None) == kv
    assert sum(kind.state_bytes for kind in model.kinds) == state
    assert model.served is None
    assert arch in model.unserved
    assert model.weight_bytes() == 4 * (320 * 64 + 8 * 96 * 64)
    made = plan(model, Wish(context=1024, memory_bytes=1 << 30))
    assert made.codecs["bf16"].conversations > 0


def test_windows_and_experts(tmp_path: Path) -> None:
    keys = {"attention.sliding_window": 128, "expert_count": 8, "expert_used_count": 2}
    model = header(tmp_path / "m.gguf", "gpt-oss", keys)
    assert [(kind.name, kind.layers) for kind in model.kinds] == [("window 128", 2), ("full", 2)]
    assert model.active == 320 * 64 + 2 * 96 * 64
    with pytest.raises(BrokenFile, match="9 experts a token of 8"):
        header(tmp_path / "n.gguf", "gpt-oss", keys | {"expert_used_count": 9})
