"""Starting, refusing to start, draining and being killed."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

import httpx
import pytest
from tests.e2e.support import COMMAND, Running, clean_env, eventually, serving


def run(*arguments: str, timeout: float = 90, text: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        input=text,
        env=clean_env(),
        check=False,
    )


def one_line_error(result: subprocess.CompletedProcess[str], *words: str) -> None:
    """Exit code 2 and one line on standard error that has all the words; no traceback."""
    assert result.returncode == 2, result.stdout + result.stderr
    assert len(result.stderr.strip().splitlines()) == 1, result.stderr
    for word in words:
        assert word in result.stderr


def test_a_port_in_use_is_told_before_anything_is_loaded() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        began = time.monotonic()
        one_line_error(run("serve", "--port", str(port)), f"port {port}", "in use", "--port")
        assert time.monotonic() - began < 20


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("/nowhere/model.gguf",), ("/nowhere/model.gguf",)),
        (("--memory", "24G"), ("--memory", "24GiB", "80%")),
        (("--memory", "900TiB"), ("--memory", "this machine has")),
        (("--kv-cache-memory-bytes", "1000"), ("block", "1,000")),
        (("--host", "0.0.0.0"), ("--api-key", "--insecure")),
        (("--eviction", "magic"), ("magic", "lru")),
        (("--max-model-len", "100000000"), ("100000000",)),
        (("--isa", "avx3"), ("--isa", "avx2")),
    ],
)
def test_what_is_wrong_takes_one_line(flags: tuple[str, ...], words: tuple[str, ...]) -> None:
    one_line_error(run("serve", "--port", "0", *flags), *words)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF\x03\x00\x00\x00" + b"\xff" * 64, b"not a model at all"])
def test_a_broken_model_takes_one_line(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "broken.gguf"
    file.write_bytes(content)
    one_line_error(run("serve", "--port", "0", str(file)), "broken.gguf")


def test_an_api_key_guards_all_but_the_probes() -> None:
    with serving("--api-key", "s3cret", key="s3cret") as server:
        assert "s3cret" not in server.printed
        with httpx.Client(base_url=server.url, timeout=30) as stranger:
            assert stranger.get("/health").status_code == 200
            assert stranger.get("/ready").status_code == 200
            refused = stranger.post("/v1/completions", json={"prompt": "hi", "max_tokens": 1})
            assert refused.status_code == 401
            assert refused.json()["error"]["code"] == "unauthorized"
        assert server.complete("hi", 1)["choices"][0]["finish_reason"] == "length"


class Stream(threading.Thread):
    """Reads one long stream in the background: its text, its finish reason and whether it ended properly."""

    def __init__(self, server: Running, tokens: int) -> None:
        super().__init__()
        self.url, self.tokens = server.url, tokens
        self.first = threading.Event()
        self.events: list[str] = []
        self.broken: str | None = None
        self.start()

    def run(self) -> None:
        body = {"prompt": "Once upon a time", "max_tokens": self.tokens, "ignore_eos": True, "stream": True}
        try:
            with (
                httpx.Client(timeout=120) as http,
                http.stream("POST", f"{self.url}/v1/completions", json=body) as reply,
            ):
                for line in reply.iter_lines():
                    if line.startswith("data: "):
                        self.events.append(line[6:])
                        self.first.set()
        except httpx.HTTPError as error:
            self.broken = repr(error)

    @property
    def finish(self) -> str | None:
        """The finish reason, or the error code, that the stream ended with."""
        for event in map(json.loads, (event for event in self.events if event != "[DONE]")):
            if "error" in event:
                return str(event["error"]["code"])
            for choice in event["choices"]:
                if choice["finish_reason"]:
                    return str(choice["finish_reason"])
        return None


def test_sigterm_refuses_new_work_lets_streams_finish_and_exits_with_0() -> None:
    with serving("--grace", "60") as server:
        stream = Stream(server, 400)
        assert stream.first.wait(60)
        server.process.send_signal(signal.SIGTERM)
        assert eventually(lambda: server.http.get("/ready").status_code == 503, 5)
        assert "drain" in server.http.get("/ready").text
        refused = server.http.post("/v1/completions", json={"prompt": "late", "max_tokens": 1})
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "draining"
        assert server.process.wait(90) == 0
        stream.join(30)
        assert stream.broken is None
        assert stream.finish == "length"
        assert stream.events[-1] == "[DONE]"
        assert len(stream.events) > 50


def test_after_the_grace_streams_end_with_an_explicit_event() -> None:
    with serving("--grace", "0.2") as server:
        stream = Stream(server, 8000)
        assert stream.first.wait(60)
        assert server.terminate() == 0
        stream.join(30)
        assert stream.broken is None
        assert stream.finish is not None


def test_a_second_signal_hurries() -> None:
    with serving("--grace", "600") as server:
        stream = Stream(server, 8000)
        assert stream.first.wait(60)
        server.process.send_signal(signal.SIGINT)
        assert eventually(lambda: server.http.get("/ready").status_code == 503, 5)
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(60) == 0
        stream.join(30)
        assert stream.broken is None
        assert stream.finish is not None


def test_an_idle_server_leaves_quickly_and_in_silence() -> None:
    with serving() as server:
        began = time.monotonic()
        assert server.terminate() == 0
        assert time.monotonic() - began < 10
        assert server.process.stderr is not None
        assert "leaked" not in server.process.stderr.read()


def test_a_killed_server_can_be_started_again_on_its_port() -> None:
    with serving() as server:
        port = server.url.rsplit(":", 1)[1]
        server.complete("hello", 2)
        server.process.kill()
        server.process.wait(30)
    with serving("--port", port) as again:
        assert again.url.endswith(f":{port}")
        again.complete("hello", 2)


def test_chat_by_pipe_reuses_the_conversation() -> None:
    result = run(
        "chat", "--max-tokens", "12", text="Hello there!\nAnd now?\n/kv\n/new\n/nonsense\n/help\n/quit\nnever\n"
    )
    assert result.returncode == 0, result.stderr
    turns = [line for line in result.stdout.splitlines() if line.startswith("[") and "tokens reused" in line]
    assert len(turns) == 2
    reused = [int(line.split()[0].strip("[")) for line in turns]
    assert reused[0] == 0
    assert reused[1] > 20
    assert "unknown command /nonsense" in result.stdout
    assert "never" not in result.stdout
    assert "\033" not in result.stdout


def test_chat_with_no_server_there() -> None:
    one_line_error(run("chat", "--url", "http://127.0.0.1:9"), "no server answers", "127.0.0.1:9")


def test_doctor_finds_this_machine_fit() -> None:
    result = run("doctor", "--json")
    report = json.loads(result.stdout)
    assert result.returncode == 0, report
    assert report["ok"] is True
    checks = {finding["check"] for finding in report["findings"]}
    assert {"processor", "kernel path", "memory", "model", "linear", "attention", "KV cache"} <= checks


def test_doctor_fails_when_something_is_broken() -> None:
    result = run("doctor", "/nowhere/model.gguf")
    assert result.returncode == 1
    assert "broken: model" in result.stdout


def test_bench_measures_a_server(server: Running) -> None:
    result = run("bench", "--url", server.url, "--workloads", "W1", "--repeat", "1", "--json")
    assert result.returncode == 0, result.stderr
    figures = json.loads(result.stdout)["W1"]
    assert figures["finished"] == figures["requests"] == 1
    assert figures["decode_tps"] > 0
