"""Traces written while serving, and the promise that what serves is what is simulated."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from tests.engine import harness

from tenure.cli.recording import TraceWriter
from tenure.engine import Engine, EngineSettings
from tenure.errors import ConfigError
from tenure.events import BlockGone, BlockStored, RequestDone, RequestQueued, RequestStarted, SequenceEnded
from tenure.sim.replay import Calibration, Replay, Setup
from tenure.sim.trace import TraceRequest
from tenure.traces import header, read
from tenure.types import BlockId, Fate, Key, Receipt, Request, SeqId, Timings, Usage

RECEIPT = Receipt(70, 0, 70, {}, None, (), {"bf16": 72}, 0, 0, 0.0, 100, 72)


def key(number: int) -> Key:
    return Key(number.to_bytes(8, "big") + bytes(8))


class Server:
    """Emits what a server would."""

    def __init__(self, path: Path, **more: Any) -> None:
        self.writer = TraceWriter(path, {"declared": []}, 32, **more)

    def begin(self, name: str, at: float, session: str | None = None, tenant: str = "") -> None:
        self.writer.learn(RequestQueued(at, name, 70, 1, session, tenant=tenant))

    def end(self, name: str, at: float, *keys: int) -> None:
        parent = None
        for number in keys:
            self.writer.learn(BlockStored(at, key(number), parent, BlockId(0), "device", "bf16", 32, ()))
            parent = key(number)
        self.writer.learn(SequenceEnded(at, name, SeqId(0), parent, 70, 2))
        usage, timings = Usage(70, 2, 0), Timings(70, 5.0, 2, 1.0, 0, 0.0)
        self.writer.learn(RequestDone(at, name, (), None, usage, RECEIPT, timings, 1.0, 1.0, None))


def written(path: Path) -> list[TraceRequest]:
    return list(read(path.read_text().splitlines()))


def test_lines_come_in_order_of_arrival(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    server = Server(path)
    server.begin("a", 1.0, "s", tenant="acme")
    server.begin("b", 2.0)
    server.end("b", 3.0, 1, 2)
    assert len(path.read_text().splitlines()) == 1  # the header: b waits for a, which came first
    server.end("a", 4.0, 3)
    server.begin("c", 5.0, "s")
    server.end("c", 6.0)
    server.writer.close()
    server.writer.close()
    first, second, third = written(path)
    assert (first.at, first.session, first.turn, first.tenant, first.blocks) == (1.0, "s", 1, "acme", (3,))
    assert (second.at, second.blocks, second.session) == (2.0, (1, 2), None)
    assert (third.turn, third.blocks, third.prompt_tokens, third.output_tokens) == (2, (), 70, 2)
    assert first.extra["kv"]["cached_tokens"] == 0
    assert first.extra["prompt_ms"] == 5.0
    assert header(path.read_text().splitlines())["declared"] == []


def test_it_forgets_blocks_that_are_gone(tmp_path: Path) -> None:
    server = Server(tmp_path / "t.jsonl")
    server.begin("a", 1.0)
    server.end("a", 2.0, 1, 2, 3)
    for number in (3, 2, 1):
        gone = BlockGone(3.0, key(number), BlockId(0), "device", Fate.DROPPED, "lru", "room", 32, 1.0, 1.0)
        server.writer.learn(gone)
    assert not server.writer._parents
    assert not server.writer._alive
    server.writer.close()


def test_the_file_rotates_and_stays_bounded(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    server = Server(path, max_bytes=6000)
    for number in range(100):
        server.begin(f"r{number}", float(number))
        server.end(f"r{number}", number + 0.5, number)
    server.writer.close()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["t.jsonl", "t.jsonl.1"]
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 6000
    assert written(path)[-1].at == 99.0
    assert written(path.with_name("t.jsonl.1"))[-1].at + 1 == written(path)[0].at


def test_a_trace_that_is_there_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("precious\n")
    TraceWriter(path, {}, 32).close()
    assert (tmp_path / "t.jsonl.1").read_text() == "precious\n"


def test_no_place_to_write_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--trace"):
        TraceWriter(tmp_path / "none" / "t.jsonl", {}, 32)


def test_a_full_disk_ends_the_trace_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    server = Server(tmp_path / "t.jsonl")

    class Full:
        def write(self, line: str) -> int:
            raise OSError(28, "No space left on device")

    assert server.writer._file
    server.writer._file.close()
    server.writer._file = Full()  # type: ignore[assignment]
    with caplog.at_level(logging.ERROR):
        for number in range(3):
            server.begin(f"r{number}", float(number))
            server.end(f"r{number}", number + 0.5)
    assert [record.message for record in caplog.records] == [
        f"--trace {tmp_path / 't.jsonl'}: No space left on device; the trace ends here"
    ]


@pytest.mark.parametrize("eviction", ["lru", "gittins"])
def test_replay_is_what_was_served(tmp_path: Path, eviction: str) -> None:
    """Conversations one after the other on the real model, in a pool too small for all of them: replaying the trace
    reuses the same blocks and evicts as many."""
    model = harness.model()
    blocks = 28
    block_bytes = 32 * 23_040
    path = tmp_path / "t.jsonl"
    served: list[int] = []
    gone = 0

    def count(fact: object) -> None:
        nonlocal gone
        gone += isinstance(fact, BlockGone) and fact.reason == "room" and fact.recompute_tokens == 32

    with Engine(model, EngineSettings(kv_cache_bytes=blocks * block_bytes, eviction=eviction)) as engine:
        blocks = engine.stats().pool.total
        writer = TraceWriter(path, {}, 32)
        engine.facts.listen(writer.learn)
        engine.facts.listen(count)
        watched = harness.Watched(engine)
        english = engine.encode(harness.ENGLISH.read_text(encoding="utf-8"))
        histories = {f"s{n}": english[400 * n : 400 * n + 130] for n in range(4)}
        for turn in range(3):
            for number, session in enumerate(histories):
                base = watched.ask(histories[session], 20)
                request = Request(base.id, base.tokens, base.scope, base.sampling, session_id=session)
                handle = engine.submit(request)
                pieces, done = handle.result()
                answer = [token for piece in pieces for token in piece.tokens]
                served.append(done.usage.cached_tokens // 32)
                more = english[2000 + 100 * turn + 25 * number :][:27]
                histories[session] = [*histories[session], *answer, *more]
        writer.close()
    requests = written(path)
    assert [json.dumps(r.session) for r in requests[:4]] == ['"s0"', '"s1"', '"s2"', '"s3"']
    quick = Calibration(base_ms=1e-3, decode_ms=1e-3, prefill_ms=1e-3)  # each ends before the next comes, as it did
    replay = Replay(Setup(blocks, 32, eviction=eviction), quick)
    reused: list[int] = []
    evicted = 0

    def watch(fact: Any) -> None:
        nonlocal evicted
        if isinstance(fact, RequestStarted):
            reused.append(fact.cached_tokens // 32)
        evicted += isinstance(fact, BlockGone) and fact.reason == "room" and fact.recompute_tokens == 32

    replay.scheduler._facts.listen(watch)
    replay.run(requests)
    assert sum(served) > 0
    assert gone > 0
    assert reused == served
    assert evicted == gone
