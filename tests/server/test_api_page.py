"""docs/api.md names what the server has: routes, fields, receipt, codes and metrics."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.routing import Route
from tests.server.conftest import Running
from tests.server.fake import FakeServes

from tenure import errors
from tenure.server.app import UNBUILT, ServerSettings, create_app
from tenure.server.asks import ChatBody, CompletionBody

PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text(encoding="utf-8")


def test_routes() -> None:
    routes = [route.path for route in create_app(FakeServes(), ServerSettings()).routes if isinstance(route, Route)]
    built = [path.replace(":path", "") for path in routes if path not in UNBUILT]
    assert len(built) >= 14
    assert [path for path in built if f"{path}`" not in PAGE] == []


@pytest.mark.parametrize("body", [ChatBody, CompletionBody])
def test_fields(body: type[ChatBody] | type[CompletionBody]) -> None:
    silent = {"user"}  # changes nothing
    assert [name for name in body.model_fields if name not in silent and f"`{name}`" not in PAGE] == []


def test_receipt_and_timings(server: Running) -> None:
    reply = server.chat(max_tokens=1).json()
    assert [key for part in ("kv", "timings") for key in reply[part] if f"`{key}`" not in PAGE] == []


def test_codes() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.RequestError)]
    assert len(kinds) > 10
    assert [kind.code for kind in kinds if f"`{kind.code}`" not in PAGE] == []


def test_metrics(server: Running) -> None:
    families = list(text_string_to_metric_families(server.http.get("/metrics").text))
    names = [family.name + "_total" * (family.type == "counter") for family in families]
    assert len(names) > 40
    assert [name for name in names if f"| `{name}` |" not in PAGE] == []
