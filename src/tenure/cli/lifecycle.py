"""From a bound port to a clean exit: signals, draining, and a server in a thread for the commands that talk to one."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import signal
import socket
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

import uvicorn

from tenure.errors import ConfigError
from tenure.server.protocol import uvicorn_config

if TYPE_CHECKING:
    from tenure.cli.compose import Composed
    from tenure.server.serves import Serves

log = logging.getLogger("tenure")
SLOW_READERS_S = 5
"""How long, after the last terminal event, a client may take to read what it was sent."""


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to host and port, before anything expensive is loaded. ConfigError when the port is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except (OSError, OverflowError) as error:
        sock.close()
        code = getattr(error, "errno", None)
        if code == errno.EADDRINUSE:
            why = (
                f"port {port} on {host} is in use: stop what listens there, or give another --port (0 takes a free one)"
            )
            raise ConfigError("port", why) from None
        if code == errno.EACCES:
            raise ConfigError("port", f"port {port} needs privileges this process does not have") from None
        raise ConfigError("host", f"cannot listen on {host}:{port}: {error}") from None
    return sock


class Server(uvicorn.Server):
    """Uvicorn that drains before it stops.

    First SIGTERM or SIGINT: not ready at once, running streams get the grace, then every request its terminal event,
    then exit 0. A second signal ends the grace. A third one leaves without waiting for anybody.
    """

    def __init__(self, config: uvicorn.Config, serves: Serves, grace_s: float) -> None:
        super().__init__(config)
        self._serves = serves
        self._grace_s = grace_s
        self._signals = 0
        self._drains: set[asyncio.Task[None]] = set()
        self.listening = threading.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Ours instead of uvicorn's, which stops listening first and dies by the signal at the end."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.leave)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    def leave(self) -> None:
        """Begin to leave, or hurry when already leaving. Call it on the server's loop."""
        self._signals += 1
        if self._signals > 2:
            self.force_exit = self.should_exit = True
            return
        grace = self._grace_s if self._signals == 1 else 0.0
        log.info("draining: no new requests, running ones get %g s", grace)
        task = asyncio.get_running_loop().create_task(self._drain(grace))
        self._drains.add(task)

    async def _drain(self, grace_s: float) -> None:
        try:
            await self._serves.drain(grace_s)
        finally:
            self.should_exit = True


def server(composed: Composed, grace_s: float) -> Server:
    """A server for what was composed, with Tenure's way to leave."""
    options = {"loop": "asyncio", "log_config": None, "timeout_graceful_shutdown": SLOW_READERS_S}
    # Host and port are the bound socket's, given to `run`.
    config = uvicorn_config(composed.app, "", 0, composed.http, **options)
    return Server(config, composed.engine, grace_s)


@contextlib.contextmanager
def in_thread(composed: Composed) -> Iterator[str]:
    """Serve on a free loopback port from a thread; gives the URL. Leaves when the block does."""
    sock = bind("127.0.0.1", 0)
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    running = server(composed, grace_s=0.0)
    thread = threading.Thread(target=running.run, args=([sock],), name="tenure-http", daemon=True)
    thread.start()
    if not running.listening.wait(30):
        raise ConfigError("port", "the local server did not start within 30 s")
    try:
        yield url
    finally:
        running.should_exit = True
        thread.join(SLOW_READERS_S + 5)
