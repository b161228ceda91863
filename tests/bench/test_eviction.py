"""The table of bench/eviction, and its verdict; what it says of real traces is counted when somebody runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench.eviction import Row, rows_of, table

from bench import eviction


def test_rows_are_rates_between_nothing_and_the_optimum(tmp_path: Path) -> None:
    small, large = rows_of("conversations", (0.02, 0.5), 80)
    assert 0 <= small.lru <= small.optimum <= large.optimum <= 100
    assert small.blocks < large.blocks
    line = {"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [1, 2]}
    path = tmp_path / "mine_trace.jsonl"
    path.write_text("".join(json.dumps({**line, "timestamp": at}) + "\n" for at in range(4)))
    assert rows_of(str(path), (1.0,), 0) == [Row("mine", 1.0, 2, 75.0, 75.0, 75.0)]


def test_the_table_names_the_worst() -> None:
    rows = [Row("a", 0.1, 5, 10.0, 12.5, 20.0), Row("a", 0.5, 25, 30.0, 29.95, 40.0), Row("b", 0.1, 9, 1.0, 1.0, 2.0)]
    lines = table(rows)
    assert "| a 0.1 / 0.5 | 10.0 / 30.0 | 12.5 / 29.9 | 20.0 / 40.0 | +2.50 / -0.05 |" in lines
    assert lines[-1] == "worst: -0.05 (a @ 0.5)"


@pytest.mark.parametrize(("gittins", "code"), [(9.8, 0), (9.6, 1)])
def test_it_fails_when_the_policy_falls_behind(
    gittins: float, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Here:
        def __init__(self, processes: int) -> None: ...

        def __enter__(self) -> Here:
            return self

        def __exit__(self, *_: object) -> None: ...

        map = staticmethod(map)

    monkeypatch.setattr(eviction, "ProcessPoolExecutor", Here)
    monkeypatch.setattr(eviction, "rows_of", lambda name, shares, count: [Row(name, 0.1, 1, 10.0, gittins, 20.0)])
    assert eviction.main(["/none"]) == code
    told = capsys.readouterr()
    assert "/none: not there, left out" in told.err
    assert "worst" in told.out
