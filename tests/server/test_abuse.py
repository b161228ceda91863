"""Clients that leave, stall, crawl or send too much: the engine is freed, the server lives."""

from __future__ import annotations

import contextlib
import json
import resource
import socket
import time
from collections.abc import Callable

import pytest
from tests.server.conftest import Running
from tests.server.fake import LONG

Serve = Callable[..., Running]


def request(path: str, body: object, *headers: str) -> bytes:
    """A raw HTTP request with a JSON body."""
    data = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "host: x", "content-type: application/json", f"content-length: {len(data)}"]
    return "\r\n".join([*lines, *headers, "", ""]).encode() + data


def ask(**more: object) -> bytes:
    return request("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], **more})


def read_all(sock: socket.socket) -> bytes:
    """Everything until the server closes."""
    data = b""
    while part := sock.recv(1 << 16):
        data += part
    return data


def read_reply(sock: socket.socket) -> tuple[int, bytes]:
    """One reply with a Content-Length: its status and body."""
    data = b""
    while b"\r\n\r\n" not in data:
        part = sock.recv(4096)
        assert part, f"closed after {data!r}"
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    length = next(
        int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")
    )
    while len(body) < length:
        body += sock.recv(4096)
    return int(head.split()[1]), body[:length]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("phase", ["queued", "prefilling", "decoding"])
def test_leaving_cancels_in_every_phase(server: Running, stream: bool, phase: str) -> None:
    how = {"queued": {"hold": True}, "prefilling": {"prefill_s": 60}, "decoding": {"repeat": 10_000, "step_s": 0.002}}
    server.play(**how[phase])
    with server.connect() as sock:
        sock.sendall(ask(stream=stream))
        server.until(lambda: len(server.fake.live) == 1)
        handle = server.fake.handles[0]
        if phase == "decoding":
            server.until(lambda: handle.produced > 3)
        assert server.http.get("/load").json() == {"server_load": 1}
        assert not handle.cancelled
    server.until(lambda: handle.ended)
    assert handle.cancelled
    server.until(lambda: server.http.get("/load").json() == {"server_load": 0})


def test_two_hundred_clients_leave(server: Running) -> None:
    server.play(repeat=1000, step_s=0.01)
    for _ in range(10):
        socks = [server.connect() for _ in range(20)]
        for sock in socks:
            sock.sendall(ask(stream=True))
        for sock in socks:
            assert sock.recv(100)
            sock.close()
    server.until(lambda: not server.fake.live)
    assert len(server.fake.handles) == 200
    server.play()
    assert server.chat().status_code == 200


def test_a_client_that_stops_reading(serve: Serve) -> None:
    """The buffer stays bounded, the request is cancelled, the client is told once it reads on; others are served."""
    server = serve(stream_buffer_bytes=64 << 10)
    server.play(text=LONG, repeat=50_000)
    with server.connect() as sock:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        sock.sendall(ask(stream=True))
        server.until(lambda: len(server.fake.handles) == 1)
        slow = server.fake.handles[0]
        server.until(lambda: slow.ended, 20)
        assert slow.cancelled
        assert slow.produced < 50_000
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB
        server.play()
        assert server.chat().status_code == 200
        body = read_until(sock, b"[DONE]")
    assert b'"code":"client_too_slow"' in body
    assert (
        'tenure:requests_cut_total{cause="slow_reader",engine="0",model_name="fake"} 1.0'
        in server.http.get("/metrics").text
    )


def read_until(sock: socket.socket, mark: bytes) -> bytes:
    data = b""
    while mark not in data[-4096:]:
        part = sock.recv(1 << 16)
        assert part, "closed before its end"
        data += part
    return data


def test_a_client_that_never_reads_again(serve: Serve) -> None:
    """After the stall limit the connection itself is cut: what the kernel still held may arrive, the end never does."""
    server = serve(stream_buffer_bytes=64 << 10, stall_timeout_s=0.3)
    server.play(text=LONG, repeat=50_000)
    with server.connect() as sock:
        sock.sendall(ask(stream=True))
        server.until(lambda: len(server.fake.handles) == 1)
        server.until(lambda: server.fake.handles[0].ended, 20)
        server.until(lambda: server.http.get("/load").json() == {"server_load": 0})
        seen = b""
        with contextlib.suppress(ConnectionResetError):  # the kernel gave up on it too, and what it held is gone
            seen = read_all(sock)
    assert b"[DONE]" not in seen
    assert not seen.endswith(b"0\r\n\r\n")


def test_time_limit(serve: Serve) -> None:
    server = serve(request_timeout_s=0.2)
    server.play(repeat=10_000, step_s=0.01)
    whole = server.chat()
    assert whole.status_code == 504
    assert whole.json()["error"]["code"] == "request_timeout"
    assert whole.headers["x-should-retry"] == "false"
    stream = server.chat(stream=True)
    assert stream.status_code == 200
    assert stream.text.endswith("data: [DONE]\n\n")
    last = json.loads(stream.text.split("\n\n")[-3].removeprefix("data: "))
    assert last["error"]["code"] == "request_timeout"
    assert last["kv"]["prompt_tokens"] == last["usage"]["prompt_tokens"]
    server.play(hold=True)
    assert server.chat(stream=True).status_code == 504
    assert not server.fake.live


def test_silent_streams_are_kept_open(serve: Serve) -> None:
    server = serve(keep_alive_s=0.05)
    server.play(prefill_s=0.3)
    body = server.chat(stream=True).text
    assert body.startswith(": keep-alive\n\n")
    server.play(prefill_s=0.3)
    chunks = list(
        server.client.chat.completions.create(model="fake", messages=[{"role": "user", "content": "Hi"}], stream=True)
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == server.fake.script.text


def test_a_huge_body_is_refused_at_once(server: Running) -> None:
    """100 MB announced: the refusal comes before the body is sent."""
    with server.connect() as sock:
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        sock.sendall(head + b"content-length: 100000000\r\n\r\n{")
        started = time.monotonic()
        status, body = read_reply(sock)
        assert status == 413
        assert json.loads(body)["error"]["code"] == "payload_too_large"
        assert time.monotonic() - started < 1


def test_a_huge_body_that_is_sent_anyway(server: Running) -> None:
    """A client that sends its 100 MB whole before it reads still gets the refusal."""
    reply = server.http.post(
        "/v1/completions", content=b"x" * 100_000_000, headers={"content-type": "application/json"}
    )
    assert reply.status_code == 413


def test_a_huge_chunked_body(serve: Serve) -> None:
    server = serve(max_body_bytes=1 << 20)
    part = b"%x\r\n" % (1 << 16) + b"x" * (1 << 16) + b"\r\n"
    with server.connect() as sock:
        sock.sendall(b"POST /tokenize HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n" + part * 17)
        assert read_reply(sock)[0] == 413
    exact = b'{"prompt": "%s"}' % (b"x" * ((1 << 20) - 14))
    assert len(exact) == 1 << 20
    kind = {"content-type": "application/json"}
    assert server.http.post("/tokenize", content=iter([exact]), headers=kind).status_code == 200
    assert server.http.post("/tokenize", content=iter([exact + b" "]), headers=kind).status_code == 413


def test_all_bodies_together_are_bounded(serve: Serve) -> None:
    server = serve(max_body_bytes=1 << 20, max_bodies_bytes=1 << 20)
    with server.connect() as sock:
        head = b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n"
        sock.sendall(head + b"x" * 999_000)
        time.sleep(0.1)
        big = server.http.post("/tokenize", json={"prompt": "y" * 200_000})
        assert big.status_code == 503
        assert big.headers["retry-after"] == "1"
    server.until(lambda: server.http.post("/tokenize", json={"prompt": "y" * 200_000}).status_code == 200)


def test_a_body_that_crawls(serve: Serve) -> None:
    server = serve(body_timeout_s=0.2)
    with server.connect() as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{")
        status, body = read_reply(sock)
        assert status == 408
        assert json.loads(body)["error"]["code"] == "client_too_slow"


def test_headers_that_crawl(serve: Serve) -> None:
    server = serve(header_timeout_s=0.2)
    with server.connect() as silent, server.connect() as crawling:
        crawling.sendall(b"GET /health HTTP/1.1\r\nhost")
        for sock in (crawling, silent):
            assert b"408 Request Timeout" in read_all(sock)
    assert server.http.get("/health").status_code == 200


def test_headers_without_end(serve: Serve) -> None:
    server = serve(max_header_bytes=20_000)
    with server.connect() as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\n")
        sock.sendall(b"".join(b"x-%d: %s\r\n" % (i, b"y" * 1000) for i in range(25)))
        assert b"431 Request Header Fields Too Large" in read_all(sock)
    with server.connect() as sock:
        sock.sendall(ask(user="x" * 200, stop="z" * 200) + b"")
        assert read_reply(sock)[0] == 200


@pytest.mark.parametrize(
    "data", [b"\x16\x03\x01\x02\x00\x01\x00", b"GARBAGE\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\0" * 100]
)
def test_what_is_not_http(server: Running, data: bytes) -> None:
    with server.connect() as sock:
        sock.sendall(data)
        reply = read_all(sock)
    assert reply.startswith(b"HTTP/1.1 400 ")
    assert json.loads(reply.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_request"
    assert server.http.get("/health").status_code == 200


def test_a_half_sent_body(server: Running) -> None:
    with server.connect() as sock:
        sock.sendall(ask()[:-5])
    assert server.chat().status_code == 200
    assert len(server.fake.handles) == 1


def test_connections_are_reused(server: Running) -> None:
    """Keep-alive survives whole answers, streams and refusals, and two requests may be sent at once."""
    with server.connect() as sock:
        for _ in range(2):
            sock.sendall(ask(max_tokens=2))
            assert read_reply(sock)[0] == 200
            sock.sendall(ask(n=0))
            assert read_reply(sock)[0] == 400
            sock.sendall(ask(max_tokens=2, stream=True))
            assert read_until(sock, b"[DONE]\n\n\r\n0\r\n\r\n")
        sock.sendall(ask(max_tokens=2) + ask(n=0))
        statuses = [read_reply(sock)[0]]
        assert statuses == [200]


def test_an_engine_that_does_not_answer(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """When even cancelling brings no last word, the server says it."""
    monkeypatch.setattr("tenure.server.leash.HARD_STOP_S", 0.1)
    server = serve(request_timeout_s=0.1)
    server.play(deaf=True)
    assert server.chat().status_code == 504
    assert server.chat(stream=True).status_code == 504
    with server.connect() as sock:
        sock.sendall(ask())
        server.until(lambda: len(server.fake.handles) == 3)
    server.until(lambda: server.http.get("/load").json() == {"server_load": 0})
    assert len(server.fake.live) == 3
    for handle in server.fake.handles:
        handle.script.deaf = False
    server.until(lambda: not server.fake.live)
