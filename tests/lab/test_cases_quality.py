"""Case Z1: a measured figure for each format, no repetition collapse, top-1 above the stated floor."""

from __future__ import annotations

import pytest

from tenure import models
from tenure.lab.gate import RUN_TOKENS, RUNS, Floor, measure, shipped_text

LIMITS = {"int8": 0.004, "k8v4": 0.010, "int4": 0.022}


@pytest.mark.full
def test_z1_every_format_of_the_real_model() -> None:
    assert (RUNS, RUN_TOKENS) == (20, 300)
    found = measure(models.load(str(models.find_default())), list(LIMITS), shipped_text())
    assert found["bf16"].tokens >= 16_000
    for name, limit in LIMITS.items():
        assert found[name].kl <= limit
        assert Floor().misses(found[name], found["bf16"]) == ""
