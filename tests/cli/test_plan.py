"""`tenure plan` as people and scripts use it."""

from __future__ import annotations

import dataclasses
import json
import struct
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from tests.planner.configs import CONFIGS
from typer.testing import CliRunner, Result

from tenure.cli.calibration import file, keep, stored
from tenure.cli.machine import probe
from tenure.cli.main import app
from tenure.planner.speed import Calibration

MEASURED = Calibration(f"{probe().cpu}, 2 threads", "small", "auto", 1e11, 1e11, 1e10, 1e10)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "80")


def run(*words: str) -> Result:
    return CliRunner().invoke(app, ["plan", *words])


def as_json(*words: str) -> dict[str, Any]:
    result = run(*words, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def config_of(tmp_path: Path, name: str) -> str:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name].config))
    return str(tmp_path)


def test_json_has_what_scripts_need(tmp_path: Path) -> None:
    found = as_json(config_of(tmp_path, "DeepSeek-V3"), "--memory", "1.4TB", "--context", "8k", "--kv", "bf16,int8")
    assert found["weights_bytes"] == pytest.approx(2 * 671e9, rel=0.01)
    assert found["binding_limit"] in ("kv_memory", "max_num_seqs")
    assert list(found["codecs"]) == ["bf16", "int8"]
    assert found["codecs"]["bf16"]["bytes_per_token"] == 70_272
    assert found["codecs"]["bf16"]["conversations"] * 70_272 * 8192 <= found["kv_bytes"]
    assert found["served"] is False
    assert "DeepseekV3ForCausalLM" in found["unserved_because"]
    assert found["kinds"][0]["kind"] == "latent"


def test_the_embedded_model_in_under_a_second() -> None:
    as_json("--memory", "1GiB")
    began = time.process_time()
    found = as_json("--memory", "1GiB", "--context", "2048", "--target-conversations", "40")
    assert time.process_time() - began < 1.0
    assert found["codecs"]["int4"]["conversations"] >= 3.3 * found["codecs"]["bf16"]["conversations"]
    assert found["codecs"]["int4"]["memory_for_target"] < found["codecs"]["bf16"]["memory_for_target"]


def test_people_get_a_table_and_a_plot(tmp_path: Path) -> None:
    picture = tmp_path / "plot.svg"
    result = run(config_of(tmp_path, "Gemma-2-9B"), "--memory", "48GiB", "--shared-prefix", "1k", "--svg", str(picture))
    assert result.exit_code == 0, result.output
    for words in ("bf16", "int4", "window 4096", "what binds", "when nothing is shared", "conversations", "● bf16"):
        assert words in result.output
    assert max(map(len, result.output.splitlines())) < 170
    root = ElementTree.parse(picture).getroot()
    assert len(root.findall("{http://www.w3.org/2000/svg}polyline")) == 4


def test_what_no_codec_holds_is_told_by_the_exit_code(tmp_path: Path) -> None:
    result = run(config_of(tmp_path, "Llama-3.1-8B"), "--memory", "17GiB", "--target-conversations", "100000", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["codecs"]["bf16"]["memory_for_target"] > 17 << 30
    result = run(config_of(tmp_path, "Llama-3.1-8B"), "--memory", "8GiB", "--json")
    assert json.loads(result.stdout)["binding_limit"] == "weights"


def test_predictions_come_from_the_calibration(tmp_path: Path) -> None:
    assert "doctor --calibrate" in run("--memory", "1GiB").output
    keep(MEASURED)
    assert stored() == MEASURED
    speeds = as_json("--memory", "1GiB", "--shared-prefix", "1024")["codecs"]["bf16"]["speed"]
    assert 0 < speeds["ttft_shared_s"] < speeds["ttft_s"]
    assert "first token, predicted" in run("--memory", "1GiB").output
    keep(dataclasses.replace(MEASURED, machine="another processor"))
    other = run("--memory", "1GiB")
    assert "is of another processor" in other.output
    assert "first token, predicted" not in other.output
    file().write_text("{")
    result = run("--memory", "1GiB")
    assert result.exit_code == 0
    assert "not a calibration" in result.output


def header(*, cut: int = 0) -> bytes:
    key = b"general.architecture"
    whole = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", len(key)) + key
    whole += struct.pack("<IQ", 8, 5) + b"llama"
    return whole[: len(whole) - cut]


WRONG: dict[str, tuple[list[str], str]] = {
    "memory": (["--memory", "lots"], "24GiB"),
    "memory unit": (["--memory", "24Gib0"], "24GiB"),
    "share": (["--memory", "120%"], "at most 100%"),
    "context": (["--context", "long"], "8k"),
    "no context": (["--context", "0"], "at least 1"),
    "half a token": (["--context", "1.5"], "8k"),
    "codec": (["--kv", "int3"], "known: bf16"),
    "no codec": (["--kv", ","], "commas"),
    "prefix": (["--context", "64", "--shared-prefix", "65"], "longer than the context"),
    "both budgets": (["--memory", "1GiB", "--kv-cache-memory-bytes", "1GiB"], "exclude each other"),
    "weights": (["--weights", "int3"], "must be one of"),
    "picture": (["--svg", "/nowhere/plot.svg"], "/nowhere/plot.svg"),
    "no model": (["./nothing.gguf"], "no such file"),
    "no hub": (["nobody/nothing"], "nobody/nothing"),
}


@pytest.mark.parametrize("case", WRONG)
def test_bad_input_takes_one_line(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    words, told = WRONG[case]
    result = run(*words)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert told in result.stderr


@pytest.mark.parametrize("cut", [1, 4, 10, 20, 30, 50])
def test_a_header_cut_short_is_named(cut: int, tmp_path: Path) -> None:
    broken = tmp_path / "cut.gguf"
    broken.write_bytes(header(cut=cut))
    result = run(str(broken))
    assert result.exit_code == 2
    assert "broken GGUF" in result.stderr
    broken.write_bytes(header())
    assert "block_count is missing" in run(str(broken)).stderr


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "nonsense", '{"architectures": ["LlamaForCausalLM"]}', '{"model_type": 3}']
)
def test_a_broken_config_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    result = run(str(tmp_path))
    assert result.exit_code == 2
    assert "config.json" in result.stderr
