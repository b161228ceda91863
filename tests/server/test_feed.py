"""`/v1/kv/events`: what happens is told as it happens, to whom it concerns, and what was missed is counted."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tests.server.conftest import Running

from tenure.events import BlockStored, FactLog, RequestQueued, StepDone
from tenure.server import feed
from tenure.tenants import Tenant, Tenants
from tenure.types import BlockId, Key


@contextmanager
def reading(server: Running, path: str = "/v1/kv/events", **headers: str) -> Iterator[Iterator[dict[str, Any]]]:
    """An open feed; events as dicts with id, event and data."""
    with server.http.stream("GET", path, headers=headers) as reply:
        assert reply.status_code == 200, reply.read()
        assert reply.headers["content-type"].startswith("text/event-stream")
        lines = reply.iter_lines()
        assert next(lines).startswith(":")
        yield events(lines)


def events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    event: dict[str, Any] = {}
    for line in lines:
        if line:
            name, _, value = line.partition(": ")
            event[name] = json.loads(value) if name == "data" else value
        elif "data" in event:
            yield event
            event = {}


def step(server: Running, number: int, tenant: str = "") -> None:
    server.fake.facts.emit(StepDone(1.0, number, 1, 0, 2.0, tenant=tenant))


def test_a_request_is_followed_from_its_queue_to_its_end(server: Running) -> None:
    with reading(server) as told:
        reply = server.chat(max_tokens=2)
        names, done = [], {}
        for event in told:
            names.append(event["event"])
            if event["event"] == "RequestDone":
                done = event["data"]
                break
    assert names[:2] == ["RequestQueued", "RequestStarted"]
    assert done["type"] == "RequestDone"
    assert done["request"] == reply.json()["id"]
    assert done["receipt"] == reply.json()["kv"]
    assert done["usage"] == reply.json()["usage"]
    assert done["finishes"] == ["length"]


def test_it_goes_on_where_it_broke(server: Running) -> None:
    with reading(server, "/v1/kv/events?types=StepDone") as told:
        for number in range(4):
            step(server, number)
        second = [next(told) for _ in range(2)][-1]
    step(server, 4)
    with reading(server, "/v1/kv/events?types=StepDone", **{"last-event-id": second["id"]}) as told:
        assert [next(told)["data"]["number"] for _ in range(3)] == [2, 3, 4]


def test_what_is_gone_is_counted(serve: Callable[..., Running], monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.server import fake

    monkeypatch.setattr(fake, "FactLog", lambda: FactLog(capacity=10))
    server = serve()
    with reading(server) as told:
        step(server, 0)
        first = next(told)
    for number in range(1, 31):
        step(server, number)
    with reading(server, **{"last-event-id": first["id"]}) as told:
        missed = next(told)
        rest = [next(told) for _ in range(10)]
    assert missed["event"] == "FactsMissed"
    assert missed["data"]["count"] == 20
    assert [event["data"]["number"] for event in rest] == list(range(21, 31))


def test_ids_of_another_life_get_all_that_is_held(serve: Callable[..., Running]) -> None:
    server = serve()
    step(server, 7)
    with reading(server, **{"last-event-id": "deadbeef-123456"}) as told:
        assert next(told)["data"]["number"] == 7


def test_large_backlogs_come_in_batches_and_whole(server: Running) -> None:
    with reading(server, "/v1/kv/events?types=StepDone") as told:
        step(server, -1)
        start = next(told)["id"]
    for number in range(3 * feed.BATCH + 7):
        step(server, number)
    with reading(server, "/v1/kv/events?types=StepDone", **{"last-event-id": start}) as told:
        assert [next(told)["data"]["number"] for _ in range(3 * feed.BATCH + 7)] == list(range(3 * feed.BATCH + 7))


def test_bytes_and_tuples_become_json() -> None:
    fact = BlockStored(1.0, Key(b"\x01" * 16), None, BlockId(3), "device", "bf16", 2, (5, 6))
    told = feed.fact_object(fact)
    assert told["key"] == "01" * 16
    assert told["ids"] == [5, 6]
    assert json.loads(json.dumps(told)) == told


TENANTS = Tenants((Tenant("red", ("sk-red",)), Tenant("blue", ("sk-blue",))))


def test_a_tenant_sees_its_own_and_the_operator_everything(serve: Callable[..., Running]) -> None:
    server = serve(api_key="boss", tenants=TENANTS)
    for number, tenant in enumerate(["red", "blue", "", "red"]):
        server.fake.facts.emit(RequestQueued(1.0, f"r{number}", 5, 1, tenant=tenant))
    seen = {}
    for key, count in (("boss", 4), ("sk-red", 2), ("sk-blue", 1)):
        headers = {"last-event-id": "x-0", "authorization": f"Bearer {key}"}
        with reading(server, **headers) as told:
            seen[key] = [next(told)["data"]["request"] for _ in range(count)]
    with reading(server, authorization="Bearer sk-red") as told:
        for number, tenant in enumerate(["blue", "", "blue", "red"], 4):
            server.fake.facts.emit(RequestQueued(1.0, f"r{number}", 5, 1, tenant=tenant))
        assert next(told)["data"]["request"] == "r7", "nothing of anybody else in between"
    assert seen == {"sk-red": ["r0", "r3"], "sk-blue": ["r1"], "boss": ["r0", "r1", "r2", "r3"]}


@pytest.mark.parametrize("bad", ["", "Nonsense", "StepDone,Nonsense"])
def test_unknown_types_are_named_and_the_known_listed(server: Running, bad: str) -> None:
    error = server.http.get(f"/v1/kv/events?types={bad}")
    assert error.status_code == 400
    message = error.json()["error"]["message"]
    assert error.json()["error"]["param"] == "types"
    assert "names, separated by commas; known: BlockGone, BlockMerged, " in message and "StepDone" in message
    assert ", Fact," not in message, "their base is none of them"
    assert server.http.get("/v1/kv/events?types=Fact").status_code == 400


def test_a_bad_event_id_is_refused(server: Running) -> None:
    for bad in ("", "abc", "a-b", "a--1", "a-" + "9" * 30):
        assert server.http.get("/v1/kv/events", headers={"last-event-id": bad}).status_code == 400


def test_readers_are_bounded_and_leave_no_trace(serve: Callable[..., Running], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "MAX_READERS", 2)
    server = serve()
    with reading(server), reading(server):
        refused = server.http.get("/v1/kv/events")
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "5"
    server.until(lambda: has_room(server))


def has_room(server: Running) -> bool:
    with server.http.stream("GET", "/v1/kv/events") as reply:
        return reply.status_code == 200


def test_a_reader_that_stops_reading_is_cut(serve: Callable[..., Running], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "MAX_READERS", 1)
    server = serve(stall_timeout_s=0.3)
    with server.connect() as sock:
        sock.sendall(b"GET /v1/kv/events HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b"200" in sock.recv(100)
        fact = BlockStored(1.0, Key(b"\x01" * 16), None, BlockId(3), "device", "bf16", 2, tuple(range(20_000)))
        for _ in range(feed.BATCH):
            server.fake.facts.emit(fact)
        assert server.chat(max_tokens=1).status_code == 200, "nobody else is held up"
        server.until(lambda: has_room(server), 20)


def test_it_ends_when_the_server_leaves(serve: Callable[..., Running]) -> None:
    server = serve()
    server.fake.waiting = 0
    with reading(server) as told:
        step(server, 1)
        assert next(told)["data"]["number"] == 1
        server.fake.draining()
        assert next(told, None) is None
