"""The default budget, and budgets no machine can give."""

from __future__ import annotations

import pytest

from tenure.cli.machine import GIB, Machine, budget, human, probe
from tenure.config import resolve
from tenure.errors import BudgetError


def machine(total: int, available: int) -> Machine:
    return Machine(total, available, 2, "cpu", "madvise")


def test_the_default_is_two_gibibytes_or_a_quarter_of_what_is_available() -> None:
    settings = resolve({}, {}).settings
    assert budget(settings, machine(64 * GIB, 60 * GIB)).memory_bytes == 2 * GIB
    small = budget(settings, machine(8 * GIB, 4 * GIB))
    assert small.memory_bytes == GIB
    assert "quarter" in small.note


def test_what_was_asked_is_granted_or_refused_with_the_numbers() -> None:
    settings = resolve({"memory": "50%"}, {}).settings
    assert budget(settings, machine(8 * GIB, GIB)).memory_bytes == 4 * GIB
    settings = resolve({"kv_cache_memory_bytes": "1GiB"}, {}).settings
    granted = budget(settings, machine(8 * GIB, 4 * GIB))
    assert (granted.memory_bytes, granted.kv_cache_bytes) == (None, GIB)
    with pytest.raises(BudgetError, match=r"has 8\.00 GiB") as caught:
        budget(resolve({"memory": "9GiB"}, {}).settings, machine(8 * GIB, 4 * GIB))
    assert caught.value.param == "memory"


def test_this_machine_can_be_probed() -> None:
    here = probe()
    assert 0 < here.available_bytes <= here.total_bytes
    assert here.cores >= 1


@pytest.mark.parametrize(
    ("size", "words"), [(12, "12 B"), (2048, "2 KiB"), (3 * 2**20, "3 MiB"), (3 * 2**29, "1.50 GiB")]
)
def test_bytes_for_people(size: int, words: str) -> None:
    assert human(size) == words
