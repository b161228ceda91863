"""Answers on the bound port while the model loads, so that probes learn "alive, not ready" instead of hanging.

Only enough HTTP for that: one request a connection, then it closes. When loading is over the same socket goes to
uvicorn, with whoever is in its backlog.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator

ALIVE = frozenset({"/health", "/ping"})
POLL_S = 0.05
PATIENCE_S = 0.25
"""How long one client may take to send its request line."""
MOST_BYTES = 8192


@contextlib.contextmanager
def waiting_room(sock: socket.socket) -> Iterator[None]:
    """Serve `/health` (200) and everything else (503, cause `loading`) on a bound socket while the block runs."""
    sock.listen(128)
    sock.settimeout(POLL_S)
    over = threading.Event()
    thread = threading.Thread(target=_serve, args=(sock, over), name="tenure-loading", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        sock.settimeout(None)


def _serve(sock: socket.socket, over: threading.Event) -> None:
    while not over.is_set():
        with contextlib.suppress(OSError):  # nobody came, or somebody left half way: the next one
            client, _ = sock.accept()
            with client:
                client.settimeout(PATIENCE_S)
                client.sendall(answer(client.recv(MOST_BYTES)))


def answer(request: bytes) -> bytes:
    """The whole reply to a request of which at least the first line is there."""
    words = request.split(b"\r\n", 1)[0].split()
    path = words[1].split(b"?", 1)[0].decode("latin-1") if len(words) > 1 else ""
    body: dict[str, object]
    if path in ALIVE:
        status, body = "200 OK", {"status": "ok"}
    elif path == "/ready":
        status, body = "503 Service Unavailable", {"status": "not ready", "cause": "loading the model"}
    else:
        error = {
            "message": "the model is still loading; /ready tells when it is done",
            "type": "overloaded_error",
            "param": None,
            "code": "overloaded",
        }
        status, body = "503 Service Unavailable", {"error": error}
    payload = json.dumps(body).encode()
    retry = "" if path in ALIVE else "retry-after: 1\r\nretry-after-ms: 1000\r\n"
    head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(payload)}\r\n"
    return f"{head}{retry}connection: close\r\n\r\n".encode() + payload
