"""Case Z1: a measured figure for each format, no repetition collapse, top-1 above the stated floor."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tenure import models
from tenure.lab.gate import RUN_TOKENS, RUNS, Floor, measure, shipped_text
from tenure.lab.probe import F32, Probe

LIMITS = {"int8": 0.003, "k8v4": 0.010, "int4": 0.022}


@pytest.mark.full
def test_z1_every_format_of_the_real_model() -> None:
    assert RUNS >= 20 and RUN_TOKENS == 300
    found = measure(models.load(str(models.find_default())), list(LIMITS), shipped_text())
    assert found["bf16"].tokens >= 16_000
    for name, limit in LIMITS.items():
        assert found[name].kl <= limit
        assert Floor().misses(found[name], found["bf16"]) == ""


@pytest.mark.full
def test_z1_codecs_alone_beside_weights_that_round_little() -> None:
    found = measure(models.load(str(models.find_default()), weights="bf16"), list(LIMITS), shipped_text(), quick=True)
    for name, limit in LIMITS.items():
        assert found[name].kl <= limit / 1.5


class Forgetful(Probe):
    """A codec that stores nothing: what is read of a full block is zeros."""

    def feed(self, tokens: Sequence[Sequence[int]], *, last_only: bool = False) -> F32:
        logits = super().feed(tokens, last_only=last_only)
        if self._quantised:
            self.arena[:] = 0
        return logits


@pytest.mark.full
def test_a_broken_codec_misses_the_floor_that_every_server_has() -> None:
    found = measure(models.load(str(models.find_default())), ["int8"], shipped_text(), quick=True, make=Forgetful)
    assert "KL" in Floor().misses(found["int8"])
