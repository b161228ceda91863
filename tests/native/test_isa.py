"""Instruction sets: what is reported, and what TENURE_ISA does."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tenure import _native


def run_with(forced: str, code: str = "import tenure._native as n; print(n.isa())") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TENURE_ISA": forced},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_portable_path_is_always_there_and_levels_ascend() -> None:
    order = ["portable", "avx2", "avx512"]
    assert _native.isas() == order[: len(_native.isas())]


def test_features_explain_the_levels() -> None:
    features = set(_native.cpu_features())
    assert ("avx2" in _native.isas()) == {"avx2", "fma", "f16c"}.issubset(features)
    if "avx512" in _native.isas():
        assert {"avx512f", "avx512bw", "avx512vnni", "avx512bf16"} <= features


def test_the_best_is_the_default() -> None:
    assert run_with("").stdout.strip() == _native.isas()[-1]


@pytest.mark.parametrize("name", _native.isas())
def test_the_environment_forces_one(name: str) -> None:
    assert run_with(name).stdout.strip() == name


def test_an_unknown_name_is_refused_with_the_choices() -> None:
    result = run_with("neon9")
    assert result.returncode != 0
    assert "TENURE_ISA: unknown instruction set 'neon9' (portable, avx2 or avx512)" in result.stderr
