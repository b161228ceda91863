"""`tenure replay`, `lint` and `trace` as an operator types them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from tests.sim.worlds import conversations
from typer.testing import CliRunner, Result

from tenure import models
from tenure.cli.calibration import keep
from tenure.cli.costs import of_machine
from tenure.cli.machine import probe
from tenure.cli.main import app
from tenure.engine.settings import EngineSettings, plan_memory
from tenure.models.anatomy import anatomy
from tenure.planner import speed
from tenure.sim.trace import TraceRequest
from tenure.spec import KvGeometry
from tenure.traces import read, write


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("traces") / "talk.jsonl"
    path.write_text("".join(write(request) + "\n" for request in conversations(120, 1)))
    return path


def tenure(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def test_instant_prints_json_and_nothing_else(trace: Path) -> None:
    result = tenure("replay", trace, "--instant", "--cache-share", "0.01,0.10", "--eviction", "lru,gittins,optimum",
                    "--json", "--jobs", 1)  # fmt: skip
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)
    assert [(row["policy"], row["share"]) for row in rows] == [
        (policy, share) for policy in ("lru", "gittins", "optimum") for share in (0.01, 0.1)
    ]
    assert all(set(row) == {"policy", "share", "blocks", "hit_rate"} for row in rows)
    unique = len({block for request in read(trace.read_text().splitlines()) for block in request.blocks})
    assert [row["blocks"] for row in rows[:2]] == [int(0.01 * unique), int(0.1 * unique)]
    assert all(0 <= row["hit_rate"] <= rows[-1]["hit_rate"] for row in rows)


def test_processes_in_parallel_find_the_same(trace: Path) -> None:
    words = ("replay", trace, "--instant", "--cache-share", "0.05,0.2", "--eviction", "lru,gittins", "--json", "--jobs")
    assert tenure(*words, 2).stdout == tenure(*words, 1).stdout


def test_the_whole_core_and_its_table(trace: Path, tmp_path: Path) -> None:
    plot = tmp_path / "hits.svg"
    words = ("replay", trace, "--memory", "512MiB,2GiB", "--speed", 4, "--limit", 60, "--jobs", 1)
    result = tenure(*words, "--plot", plot)
    assert result.exit_code == 0, result.output
    for word in ("lru", "gittins", "first token p50/p99", "60 requests"):
        assert word in result.stdout
    texts = [element.text for element in ElementTree.parse(plot).iter("{http://www.w3.org/2000/svg}text")]
    assert {"lru", "gittins", "optimum", "infinite cache"} <= set(texts)
    rows = json.loads(tenure(*words, "--json").stdout)
    assert len(rows) == 4
    assert rows[0]["requests"] == 60
    assert rows[0]["hit_rate"] <= rows[1]["hit_rate"]
    assert {"recomputed_tokens", "queue_s", "ttft_s", "gap_s", "pauses", "refused", "peak_bytes"} <= set(rows[0])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--eviction", "magic", "--instant"), "known: gittins, lru, optimum (replay only)"),
        (("--eviction", "optimum"), "--instant"),
        (("--pressure", "magic"), "no step 'magic'"),
        (("--cache-share", "2"), "at most 1"),
        (("--cache-share", "x"), "at most 1"),
        (("--memory", "1GiB", "--cache-share", "0.1"), "exclude each other"),
        (("--memory", "lots"), "amount of memory"),
        (("--memory", "80MiB"), "beside 96,"),
        (("--kv-cache-memory-bytes", "1KiB"), "the budget leaves 1,024 bytes"),
        (("--memory", "1GiB", "--kv-cache-memory-bytes", "1GiB"), "exclude each other"),
        (("--memory", "1GiB", "--model", "/none"), "/none: no such file"),
        (("--kv-cache-dtype", "int3"), "int3"),
        (("--weights", "int3"), "known are auto"),
        (("--eviction", ","), "empty"),
        (("--calibration", "/none"), "No such file"),
    ],
)
def test_wrong_options_take_one_line(trace: Path, words: tuple[str, ...], message: str) -> None:
    result = tenure("replay", trace, "--jobs", 1, *words)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
    assert result.stdout == ""


def test_broken_traces_name_the_line(trace: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.jsonl"
    cut.write_text("\n".join(trace.read_text().splitlines()[:5])[:-30])
    for command in (("replay", cut, "--instant"), ("lint", cut), ("trace", "anonymise", cut)):
        result = tenure(*command)
        assert result.exit_code == 2
        assert "line 5: not valid JSON" in result.stderr
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    assert "the trace is empty" in tenure("replay", empty).stderr


def test_lint_says_what_to_change(tmp_path: Path) -> None:
    header = {"tenure_trace": 1, "block_tokens": 64, "pool_blocks": 100, "declared": ["overflow"]}
    path = tmp_path / "small.jsonl"
    lines = [json.dumps(header), *(write(request) for request in conversations(200, 1))]
    path.write_text("\n".join(lines))
    result = tenure("lint", path, "--ms-per-token", 0.5)
    assert result.exit_code == 1
    assert "memory_never_planned" in result.stdout
    assert "seconds by --ms-per-token" in result.stderr
    (finding,) = json.loads(tenure("lint", path, "--json").stdout)
    assert finding["evidence"] == "declared, pool_blocks"
    header["pool_blocks"] = 20_000
    header["declared"] = ["memory"]
    path.write_text("\n".join([json.dumps(header), *lines[1:]]))
    result = tenure("lint", path)
    assert (result.exit_code, "nothing found" in result.stdout) == (0, True)


def test_anonymised_traces_share_what_they_shared_and_tell_nothing(trace: Path, tmp_path: Path) -> None:
    public = tmp_path / "public.jsonl"
    assert tenure("trace", "anonymise", trace, public).exit_code == 0
    before, after = (list(read(path.read_text().splitlines())) for path in (trace, public))
    assert len(after) == len(before)
    names: dict[int, int] = {}
    for old, new in zip(before, after, strict=True):
        assert (new.prompt_tokens, new.output_tokens, new.turn) == (old.prompt_tokens, old.output_tokens, old.turn)
        assert new.session != old.session
        for a, b in zip(old.blocks, new.blocks, strict=True):
            assert names.setdefault(a, b) == b
    assert len(set(names.values())) == len(names)
    assert after[0].at == 0.0
    assert not set(names) & set(names.values())


@pytest.mark.parametrize("words", [(), ("--memory", "1GiB")])
def test_doctor_tells_when_nobody_planned_the_memory(words: tuple[str, ...]) -> None:
    findings = json.loads(tenure("doctor", "--json", *words).stdout)["findings"]
    (memory,) = [finding for finding in findings if finding["check"] == "memory"]
    assert ("nobody planned it" in memory["detail"]) == (not words)


MEASURED = speed.Calibration(f"{probe().cpu}, 2 threads", "small", "auto", 1e11, 2e11, 1e10, 2e10)


def test_a_step_costs_what_was_calibrated(trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    words = ("replay", trace, "--cache-share", "0.5", "--eviction", "lru", "--limit", 20, "--jobs", 1)
    (guess,) = json.loads(tenure(*words, "--json").stdout)
    assert "the default" in guess["cost_model"]["source"]
    assert "tenure doctor --calibrate" in tenure(*words).stdout
    kept = keep(MEASURED)
    (row,) = json.loads(tenure(*words, "--json").stdout)
    assert "calibrated 20" in row["cost_model"]["source"]
    assert str(kept) in row["cost_model"]["source"]
    model = anatomy(str(models.find_default()))
    assert row["cost_model"]["prefill_ms"] == pytest.approx(2e3 * model.active / 1e11)
    assert row["ttft_s"] != guess["ttft_s"]
    (same,) = json.loads(tenure(*words, "--json", "--calibration", kept).stdout)
    assert same["ttft_s"] == row["ttft_s"]
    keep(dataclasses.replace(MEASURED, machine="Another 9000"))
    result = tenure(*words)
    assert "is of Another 9000" in result.stderr
    assert "the default" in result.stdout
    own = tmp_path / "costs.json"
    own.write_text('{"prefill_ms": 7.5}')
    (row,) = json.loads(tenure(*words, "--json", "--calibration", own).stdout)
    assert (row["cost_model"]["prefill_ms"], row["cost_model"]["source"]) == (7.5, str(own))


def test_steps_and_prompts_take_as_long_as_the_plan_predicts() -> None:
    model = anatomy(str(models.find_default()))
    made = of_machine(MEASURED, model, "auto", "bf16")
    costs = made.costs()
    assert made.prefill_ms * costs.weight(0, 2048) == pytest.approx(
        1e3 * speed.prefill_s(model, MEASURED, 0, 2048), rel=0.01
    )
    read = 1e3 * model.read_bytes() / 1e10
    assert costs.predict(1.0, 0.0) == pytest.approx(max(read, made.decode_ms), rel=0.01)
    per_kv = 1e3 * made.kv_bytes_per_token / 2e10
    assert made.decode_ms / made.doubling >= per_kv * 0.999


@pytest.mark.parametrize("codec", ["auto", "int8"])
@pytest.mark.parametrize("flag", ["--memory", "--kv-cache-memory-bytes"])
def test_a_budget_holds_what_serve_makes_of_it(flag: str, codec: str, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(
        "".join(write(TraceRequest(float(n), 320, 4, tuple(range(10 * n, 10 * n + 10)), 32)) + "\n" for n in range(9))
    )
    loaded = models.load(str(models.find_default()))
    name = "bf16" if codec == "auto" else codec
    asked = {"memory_bytes" if flag == "--memory" else "kv_cache_bytes": 256 << 20}
    served = plan_memory(EngineSettings(kv_codec=name, **asked), loaded.shape, loaded.weight_bytes)
    words = ("replay", path, flag, "256MiB", "--kv-cache-dtype", codec, "--eviction", "lru", "--jobs", 1)
    (row,) = json.loads(tenure(*words, "--json").stdout)
    assert row["blocks"] == served.blocks
    block = KvGeometry.of(loaded.shape).block_bytes
    # Of nine prompts ten blocks each, and their answers' open ones, which are staged in bf16.
    assert row["peak_bytes"] == (
        {"bf16": 99 * block("bf16")} if name == "bf16" else {name: 90 * block(name), "bf16": 9 * block("bf16")}
    )
    beside = "beside 92 MiB of weights" if flag == "--memory" else "as given"
    assert f"{beside}, {served.blocks} blocks" in tenure(*words).stdout


def test_ladders_have_semicolons_between(trace: Path) -> None:
    words = (
        "replay",
        trace,
        "--limit",
        30,
        "--jobs",
        1,
        "--eviction",
        "lru",
        "--kv-cache-memory-bytes",
        "200MiB",
        "--speed",
        20,
        "--json",
    )
    rows = json.loads(tenure(*words, "--pressure", "recode:int4@50%,pause@90%; pause@80%").stdout)
    assert [row["pressure"] for row in rows] == ["recode:int4@50%,pause@90%", "pause@80%"]
    assert set(rows[1]["peak_bytes"]) == {"bf16"}
    assert "int4" in rows[0]["peak_bytes"]
