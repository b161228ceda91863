"""What the bound port says while the model loads."""

from __future__ import annotations

import json
import socket
import urllib.error
import urllib.request

import pytest

from tenure.cli.lifecycle import bind
from tenure.cli.waiting_room import answer, waiting_room


def _get(port: int, path: str) -> tuple[int, dict[str, object]]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def test_alive_but_not_ready_while_loading_and_the_socket_is_free_afterwards() -> None:
    with bind("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        with waiting_room(sock):
            assert _get(port, "/health") == (200, {"status": "ok"})
            assert _get(port, "/ready") == (503, {"status": "not ready", "cause": "loading the model"})
            status, body = _get(port, "/v1/models")
            assert status == 503
            assert body["error"]["code"] == "overloaded"  # type: ignore[index]
            with socket.create_connection(("127.0.0.1", port)) as mute:  # says nothing: costs the others little
                assert _get(port, "/health")[0] == 200
                mute.close()
        with socket.create_connection(("127.0.0.1", port)) as late:
            sock.settimeout(10)
            client, _ = sock.accept()
            with client:
                late.sendall(b"hello")
                assert client.recv(5) == b"hello"


@pytest.mark.parametrize("request_bytes", [b"", b"\r\n", b"\xff\xfe", b"GET"])
def test_what_is_no_request_is_told_to_wait(request_bytes: bytes) -> None:
    assert answer(request_bytes).startswith(b"HTTP/1.1 503 ")
