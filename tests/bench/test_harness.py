"""The harness against a fake server: what it sends, what it reads, and what it concludes."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tenure.cli import bench_client
from tenure.cli.bench_client import HttpEndpoint, Workload, generated, load, measure, read_reply, solo

ROOT = Path(__file__).parents[2]


def neighbour(name: str) -> ModuleType:
    """A module beside this file; the test tree is no package."""
    wanted = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert wanted is not None and wanted.loader is not None
    module = importlib.util.module_from_spec(wanted)
    wanted.loader.exec_module(module)
    return module


FAKE = neighbour("fake")
SMALL = {
    "single": Workload("W1", "", "single", 5, 64, 1, ([5, 6, 7], [8, 9, 10])),
    "burst": Workload("W3", "", "burst", 5, 64, 2, ([[5, 6, 7], [8, 9, 10]],)),
    "turns": Workload("W5", "", "turns", 2, 64, 2, ([[[1, 2], [3, 4]], [[5, 6], [7, 8]]],)),
}


def ask(url: str, workload: Workload, repetition: int = 0) -> dict[str, Any]:
    async def go() -> dict[str, Any]:
        endpoint = HttpEndpoint(url)
        await endpoint.discover()
        return await measure(endpoint, workload, repetition)

    return asyncio.run(go())


@pytest.mark.parametrize("kind", SMALL)
def test_every_kind_of_workload_is_served_and_timed(kind: str) -> None:
    with FAKE.FakeServer().running() as server:
        figures = ask(server.url, SMALL[kind])
    assert figures["finished"] == figures["requests"] == len(server.prompts)
    assert figures["errors"] == []
    assert figures["cached_tokens"] == 3 * figures["requests"]
    times = [value for name, value in figures.items() if name.endswith("_s") and isinstance(value, float)]
    assert times and all(0 < time < 10 for time in times)


def test_a_conversation_goes_on_with_the_answers_own_ids() -> None:
    with FAKE.FakeServer().running() as server:
        ask(server.url, SMALL["turns"])
    first, second = [1, 2], [1, 2, *FAKE.answer([1, 2], 2), 3, 4]
    assert first in server.prompts and second in server.prompts


def test_answers_are_compared_with_solo_runs_by_ids() -> None:
    with FAKE.FakeServer().running() as server:
        together = ask(server.url, SMALL["burst"])["answers"]
        endpoint = HttpEndpoint(server.url, model="fake")
        assert (
            asyncio.run(solo(endpoint, SMALL["burst"], 0))
            == together
            == [FAKE.answer(p, 5) for p in server.prompts[:2]]
        )


def test_a_short_answer_is_not_finished_and_a_refusal_is_quoted() -> None:
    with FAKE.FakeServer(cut=True).running() as server:
        assert ask(server.url, SMALL["burst"])["finished"] == 0
    with FAKE.FakeServer(refuse=True).running() as server:
        figures = ask(server.url, SMALL["burst"])
    assert figures["finished"] == 0
    assert "429" in figures["errors"][0] and "queue_full" in figures["errors"][0]
    assert math.isnan(figures["ttft_mean_s"])


def test_nobody_listening_is_an_error_of_the_reply() -> None:
    reply = asyncio.run(HttpEndpoint("http://127.0.0.1:9").complete([1], 1))
    assert reply.error is not None and "ConnectionRefused" in reply.error
    with pytest.raises(ValueError, match="http://host:port"):
        HttpEndpoint("ftp://x")


def test_events_carry_the_time_at_which_they_were_complete() -> None:
    event = b'data: {"choices": [{"text": "a", "token_ids": [%d]}]}\n\n'
    body = event % 1 + event % 2 + event % 3
    chunk = b"%x\r\n%s\r\n" % (len(body), body)
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    reply = read_reply(0.0, [(1.0, head[:20]), (2.0, head[20:] + chunk[:9]), (3.0, chunk[9:]), (4.0, b"0\r\n\r\n")])
    assert (reply.ids, reply.first, reply.last, reply.error) == ([1, 2, 3], 3.0, 3.0, None)
    unchunked = [(1.0, b"HTTP/1.1 200 OK\r\n\r\n" + event % 1), (2.0, event % 2 + b"data: broken\n\n")]
    reply = read_reply(0.0, unchunked)
    assert (reply.ids, reply.first, reply.last) == ([1, 2], 1.0, 2.0)
    assert reply.error is not None and "broken" in reply.error


def test_llamacpp_events_are_understood() -> None:
    events = [{"content": " a", "tokens": [7]}, {"content": "", "tokens": [], "stop": True, "timings": {"cache_n": 4}}]
    raw = b"HTTP/1.1 200 OK\r\n\r\n" + b"".join(b"data: %s\n\n" % json.dumps(e).encode() for e in events)
    reply = read_reply(0.0, [(1.0, raw)])
    assert (reply.ids, reply.text, reply.tokens, reply.cached, reply.error) == ([7], " a", 1, 4, None)


def test_generated_workloads_have_the_shape_of_the_real_ones(tmp_path: Path) -> None:
    workloads = load()
    assert [len(p) for p in workloads["W2"].rounds] == [6000] * 4
    prompts = workloads["W4"].round(0)
    assert (
        len(prompts) == 32 and len({tuple(p[:1024]) for p in prompts}) == 1 and len({tuple(p) for p in prompts}) == 32
    )
    assert generated(1) == generated(1) != generated(2)
    saved = tmp_path / "workloads.json"
    saved.write_text(json.dumps(generated()))
    assert load(saved) == workloads


@pytest.mark.parametrize("name", [row[0] for row in bench_client.TABLE])
def test_every_repetition_is_cold(name: str) -> None:
    workload = load()[name]
    rounds = [workload.round(i) for i in range(2 * len(workload.rounds))]
    heads = [r[0] if workload.kind == "single" else r[0][0] if workload.kind == "burst" else r[0][0][0] for r in rounds]
    assert len(set(heads)) > 1
    assert len({json.dumps(r) for r in rounds}) == len(rounds)


def test_goals_are_judged_against_the_best_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    from bench.goals import judge
    from bench.report import figures
    from bench.targets import parse

    targets = parse("tenure,llamacpp:q4_0,llamacpp:q4_1,vllm")
    assert [t.name for t in targets if t.ours] == ["tenure:auto", "tenure:bf16"]
    rates = {
        "tenure:auto": 200.0,
        "tenure:bf16": 100.0,
        "llamacpp:q4_0": 120.0,
        "llamacpp:q4_1": 90.0,
        "vllm:bf16": 60.0,
    }
    ok = {"requests": 1, "finished": 1, "errors": []}
    measured = [
        {"target": name, "workload": "W1", "figures": {"decode_tps": rate + noise, **ok}}
        for name, rate in rates.items()
        for noise in (-9.0, 0.0, 9.0)
    ]
    measured.append({"target": "vllm:bf16", "workload": "W2", "figures": {"ttft_s": 1.0, "requests": 1, "finished": 0}})
    found = {verdict.goal.title: verdict for verdict in judge(targets, figures(measured))}
    four_bit, bf16 = found["W1 decode tok/s, 4-bit weights"], found["W1 decode tok/s, bf16 weights"]
    assert four_bit.peer == ("llamacpp:q4_0", 120.0) and four_bit.ratio == pytest.approx(200 / 120)
    assert (four_bit.word, bf16.word, bf16.peer) == ("pass", "pass", ("vllm:bf16", 60.0))
    assert found["W2 time to first token"].peer is None, "an unfinished workload counts for nobody"
    with pytest.raises(ValueError, match="unknown target"):
        parse("sglang")


def test_the_command_measures_a_url_and_saves_the_run(tmp_path: Path) -> None:
    out = tmp_path / "run.json"
    command = [sys.executable, "-m", "bench", "run", "--workloads", "W4", "--reps", "1", "--out", str(out)]
    with FAKE.FakeServer().running() as server:
        done = subprocess.run(
            [*command, "--targets", f"fake={server.url}"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert "W4 wall" in done.stdout and "| fake" in done.stdout
    (measured,) = json.loads(out.read_text())["measurements"]
    assert measured["figures"]["finished"] == 32


def test_the_command_refuses_what_it_does_not_know() -> None:
    for wrong in (["--workloads", "W9"], ["--targets", "sglang"], ["--reps", "0"]):
        command = [sys.executable, "-m", "bench", "run", *wrong]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 2 and done.stderr


def test_a_driver_process_is_driven_by_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    from bench.process import Child, Watch
    from bench.targets import PipeEndpoint

    async def go() -> None:
        line = [sys.executable, str(Path(__file__).with_name("echo_driver.py"))]
        child = Child(line, tmp_path / "log", env={}, piped=True)
        try:
            endpoint = PipeEndpoint(child)
            assert await endpoint.start() == {"ready": True, "version": "1.0"}
            async with Watch(child) as watch:
                replies = await asyncio.gather(*(endpoint.complete([n, 0], 3) for n in range(1, 5)))
            assert [reply.ids for reply in replies] == [[n, n + 1, n + 2] for n in range(1, 5)]
            assert all(reply.error is None and 0 < reply.ttft < 10 for reply in replies)
            assert watch.peak_rss_mib > 1 and watch.foreign >= 0
            assert (await endpoint.complete([], 3)).error == "empty prompt"
            child.pause()
            child.resume()
            last = asyncio.create_task(endpoint.complete([1], 10**9))
            await asyncio.sleep(0.05)
            child.kill()
            assert "the driver ended" in str((await last).error)
            await endpoint.listener
        finally:
            child.kill()

    asyncio.run(go())
    assert "noise of a library" in (tmp_path / "log").read_text()
