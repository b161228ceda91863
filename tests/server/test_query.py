"""Query parameters: known ones are read, others are refused by name, on every route that reads no body."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from starlette.routing import Route
from tests.server.conftest import Running
from tests.server.fake import FakeServes

from tenure.server.app import UNBUILT, ServerSettings, create_app
from tenure.views import ConversationView

PROBES = {"/health", "/ping", "/ready"}
BODIES = {"/v1/chat/completions", "/v1/completions", "/v1/kv/plan", "/tokenize", "/detokenize"}


def asked() -> list[tuple[str, str]]:
    """Every route that is asked by its path and query: method and path."""
    routes = [route for route in create_app(FakeServes(), ServerSettings()).routes if isinstance(route, Route)]
    found = [
        (method, route.path.replace("{id:path}", "fake"))
        for route in routes
        if route.path not in {*PROBES, *BODIES, *UNBUILT}
        for method in sorted((route.methods or set()) - {"HEAD"})
    ]
    assert len(found) >= 14
    return found


@pytest.fixture(autouse=True)
def _talk(server: Running) -> Iterator[None]:
    """There is a conversation called as the model is."""
    server.fake.talks = [ConversationView("fake", "", 9, 9, {"bf16": 1}, 1.0, "idle", ())]
    yield
    server.fake.talks, server.fake.changes = [], []


@pytest.mark.parametrize("method,path", asked())
def test_unknown_parameters_are_refused_by_name_and_nothing_is_done(server: Running, method: str, path: str) -> None:
    for query, name in (("limit=5", "limit"), ("reset_running_requests", "reset_running_requests"), ("=", "")):
        reply = server.http.request(method, f"{path}?{query}")
        assert reply.status_code == 400, reply.text
        error = reply.json()["error"]
        assert (error["param"], error["code"], error["type"]) == (name, "invalid_request", "invalid_request_error")
        assert error["message"].startswith(f"{name}: unknown query parameter; ")
        takes = "known: types" if path == "/v1/kv/events" else "this route takes none"
        assert error["message"].endswith(takes)
    assert server.fake.talks
    assert server.fake.changes == []


@pytest.mark.parametrize("method,path", [pair for pair in asked() if pair[1] != "/v1/kv/events"])
def test_a_bare_question_mark_is_no_parameter(server: Running, method: str, path: str) -> None:
    assert server.http.request(method, f"{path}?").status_code == 200


def test_a_parameter_given_twice_is_refused(server: Running) -> None:
    error = server.http.get("/v1/kv/events?types=StepDone&types=BlockGone").json()["error"]
    assert (error["param"], error["message"]) == ("types", "types: the query parameter occurs twice")


def test_names_of_any_kind_and_length(server: Running) -> None:
    for query, shown in (("x" * 5000, "x" * 64), ("%ff%00", "\ufffd\x00"), ("%F0%9F%92%A9=1", "\U0001f4a9")):
        error = server.http.get(f"/v1/kv/misses?{query}").json()["error"]
        assert error["param"] == shown


@pytest.mark.parametrize("path", sorted(PROBES))
def test_probes_take_any(server: Running, path: str) -> None:
    assert server.http.get(f"{path}?at=17").status_code == 200


def test_what_reads_a_body_takes_any(server: Running) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    assert server.http.post("/v1/chat/completions?api-version=2026-01-01", json=body).status_code == 200


def test_what_azure_clients_add_to_every_request_is_no_question(server: Running) -> None:
    assert server.http.get("/v1/models?api-version=2026-01-01").status_code == 200


def test_a_head_is_a_get_without_a_body(server: Running) -> None:
    assert server.http.head("/v1/kv").status_code == 200
    assert server.http.head("/v1/kv?limit=5").status_code == 400
