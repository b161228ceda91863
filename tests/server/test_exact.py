"""A request that asks for exact blocks says so to the engine."""

from __future__ import annotations

from typing import Any

import pytest
from tests.server.conftest import Running

from tenure.types import Request


@pytest.mark.parametrize(("body", "exact"), [({}, False), ({"codec": "any"}, False), ({"codec": "exact"}, True)])
def test_exact_is_passed_on(
    server: Running, monkeypatch: pytest.MonkeyPatch, body: dict[str, Any], exact: bool
) -> None:
    asked: list[Request] = []
    submit = server.fake.submit
    monkeypatch.setattr(server.fake, "submit", lambda request: asked.append(request) or submit(request))
    assert server.chat(**body).status_code == 200
    assert [request.exact for request in asked] == [exact]


def test_another_word_is_refused(server: Running) -> None:
    answer = server.chat(codec="int4")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "codec"
