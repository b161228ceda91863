"""Commands that load the model and measure: quality, explain, doctor --calibrate."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tenure.cli.calibration import stored
from tenure.cli.main import app


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_quality_prints_json_only_and_remembers(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The lamp is lit at dusk, whoever keeps it, and the weather goes into the book. " * 40)
    words = ["quality", "--kv", "int8", "--quick", "--text", str(text)]
    result = CliRunner().invoke(app, [*words, "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert {"bits", "bytes_per_token", "ppl", "kl", "top1", "retrieval", "collapse"} <= set(found["int8"])
    assert found["int8"]["bytes_per_token"] == 11_880
    assert 0 <= found["int8"]["kl"] <= 0.025
    again = CliRunner().invoke(app, words)
    assert "measured" not in again.stderr
    assert "same first choice" in again.stdout


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--kv", "int3"], "known: bf16"),
        (["--kv", "f32"], "compares with bf16"),
        (["--text", "/nowhere.txt"], "cannot be read"),
        (["--quality-floor", "good"], "0.025,0.90"),
    ],
)
def test_bad_input_takes_one_line(words: list[str], told: str) -> None:
    result = CliRunner().invoke(app, ["quality", *words])
    assert result.exit_code == 2
    assert told in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_text_too_short_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("short")
    result = CliRunner().invoke(app, ["quality", "--text", str(tmp_path / "t")])
    assert result.exit_code == 2
    assert "at least 256" in result.stderr


@pytest.mark.full
def test_calibrate_and_explain(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["doctor", "--calibrate", "--memory", "1GiB"])
    assert "GFLOP/s" in result.output
    found = stored()
    assert found is not None
    assert found.flops > 1e9
    page = tmp_path / "e.html"
    result = CliRunner().invoke(app, ["explain", "--memory", "1GiB", "--html", str(page)])
    assert result.exit_code == 0, result.output
    html = page.read_text()
    assert html.count("<svg") == 5
    for words in ("Why there is a cache", "What is kept", "Two phases", "What reuse saves", "at the limit", "int4"):
        assert words in html
        assert words in result.output
