"""`tenure replay`, `lint` and `trace` as an operator types them."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from tests.sim.worlds import conversations
from typer.testing import CliRunner, Result

from tenure.cli.main import app
from tenure.sim.trace import read, write


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
        (("--memory", "1KiB"), "at least one block"),
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
    result = tenure("lint", path)
    assert result.exit_code == 1
    assert "memory_never_planned" in result.stdout
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
