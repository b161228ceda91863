"""Real uvicorn on loopback around a fake engine."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import httpx
import openai
import pytest
import uvicorn
from tests.server.fake import FakeServes, Script

from tenure.server.app import ServerSettings, create_app
from tenure.server.protocol import uvicorn_config


@dataclass
class Running:
    """A server under test: its fake engine, its address, and clients for it."""

    fake: FakeServes
    host: str
    port: int
    http: httpx.Client
    client: openai.OpenAI

    def play(self, **script: Any) -> None:
        """What the next requests get."""
        self.fake.script = Script(**script)

    def chat(self, **body: Any) -> httpx.Response:
        return self.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "Hi"}], **body})

    def complete(self, **body: Any) -> httpx.Response:
        return self.http.post("/v1/completions", json={"prompt": "Hi", **body})

    def connect(self) -> socket.socket:
        sock = socket.create_connection((self.host, self.port), timeout=10)
        return sock

    def until(self, what: Callable[[], bool], seconds: float = 5.0) -> None:
        """Wait for something to become true."""
        limit = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < limit, "it did not happen in time"
            time.sleep(0.005)


def _serve(settings: ServerSettings) -> Iterator[Running]:
    fake = FakeServes()
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    host, port = sock.getsockname()
    config = uvicorn_config(create_app(fake, settings), host, port, settings, timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.002)
    url = f"http://{host}:{port}"
    headers = {} if settings.api_key is None else {"authorization": f"Bearer {settings.api_key}"}
    with (
        httpx.Client(base_url=url, headers=headers, timeout=20) as http,
        openai.OpenAI(base_url=f"{url}/v1", api_key=settings.api_key or "none", max_retries=0) as client,
    ):
        yield Running(fake, host, port, http, client)
    server.should_exit = True
    thread.join(10)
    sock.close()
    assert not thread.is_alive()


@pytest.fixture(scope="package")
def _shared() -> Iterator[Running]:
    yield from _serve(ServerSettings())


@pytest.fixture
def server(_shared: Running) -> Running:
    """A server with the defaults, shared by all tests; the script starts anew with each."""
    _shared.fake.script = Script()
    _shared.fake.handles.clear()
    _shared.fake.reader = None
    _shared.fake.card = replace(_shared.fake.card, calls=False)
    return _shared


@pytest.fixture
def serve() -> Iterator[Callable[..., Running]]:
    """Starts a server with settings of one's own."""
    running: list[Iterator[Running]] = []

    def start(**settings: Any) -> Running:
        running.append(_serve(ServerSettings(**settings)))
        return next(running[-1])

    yield start
    for one in running:
        assert next(one, None) is None
