"""A real `tenure serve` process on a free port, and the arithmetic that tests of small pools need."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx

from tenure.models import find_default, inspect
from tenure.spec import BLOCK_TOKENS, KvGeometry

START_S = 90
"""Ample: a loaded machine must not make a test red."""
COMMAND = (sys.executable, "-m", "tenure.cli")
IDS = 4000
"""Prompts are made of ids below this: ordinary tokens of every vocabulary we test with."""


def clean_env() -> dict[str, str]:
    """The environment without settings that would leak into the server under test."""
    return {name: value for name, value in os.environ.items() if not name.startswith("TENURE_")}


def pool_bytes(tokens: int) -> str:
    """--kv-cache-memory-bytes for a pool of exactly so many tokens of the embedded model in bf16."""
    return str(tokens // BLOCK_TOKENS * KvGeometry.of(inspect(str(find_default())).shape).block_bytes("bf16"))


def prompt_ids(count: int, seed: int = 0) -> list[int]:
    """`count` token ids that look like nothing else with another seed."""
    state = seed * 7919 + 12345
    ids = []
    for _ in range(count):
        state = (state * 1103515245 + 12345) % 2**31
        ids.append(100 + state // 65536 % (IDS - 100))
    return ids


@dataclass
class Running:
    """A server process: where it listens, and what it printed before it was ready."""

    process: subprocess.Popen[str]
    url: str
    printed: str
    http: httpx.Client

    def complete(self, prompt: list[int] | str, tokens: int = 16, **fields: Any) -> dict[str, Any]:
        """POST /v1/completions, greedy unless told otherwise; the JSON of a 200."""
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, **fields}
        reply = self.http.post("/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        answer: dict[str, Any] = reply.json()
        return answer

    def chat(self, messages: list[dict[str, str]], tokens: int = 16, **fields: Any) -> dict[str, Any]:
        """POST /v1/chat/completions, greedy unless told otherwise; the JSON of a 200."""
        body = {"messages": messages, "max_tokens": tokens, "temperature": 0, **fields}
        reply = self.http.post("/v1/chat/completions", json=body)
        assert reply.status_code == 200, reply.text
        answer: dict[str, Any] = reply.json()
        return answer

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples whose labels include `labels`."""
        total, seen = 0.0, False
        for line in self.http.get("/metrics").text.splitlines():
            found = re.fullmatch(r"([\w:]+)(?:\{(.*)\})? (\S+)", line)
            if found and found[1] == name:
                here = dict(re.findall(r'(\w+)="([^"]*)"', found[2] or ""))
                if labels.items() <= here.items():
                    total, seen = total + float(found[3]), True
        assert seen, f"no sample of {name} with {labels}"
        return total

    def reset(self) -> None:
        """Drop everything that is cached: what comes next is cold."""
        assert self.http.post("/reset_prefix_cache").status_code == 200

    def terminate(self, timeout: float = 60) -> int:
        """SIGTERM, then wait; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout)


@contextlib.contextmanager
def serving(*flags: str, key: str | None = None) -> Iterator[Running]:
    """Start `tenure serve` with flags, wait until it is ready, and end it however the test ends."""
    process = subprocess.Popen(
        [*COMMAND, "serve", "--port", "0", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=clean_env(),
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        printed = read_banner(process)
        url = re.search(r"http://[\w.\[\]:]+:\d+", printed)
        assert url is not None, printed + process.stderr.read()
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        with httpx.Client(base_url=url[0], timeout=120, headers=headers) as http:
            wait_ready(http)
            yield Running(process, url[0], printed, http)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(30)
        process.stdout.close()
        process.stderr.close()


def read_banner(process: subprocess.Popen[str]) -> str:
    """Standard output up to the end of the curl command, or up to its own end when the process gave up."""
    assert process.stdout is not None
    printed, deadline = "", time.monotonic() + START_S
    # Read below Python's buffer: what lies in it would make select wait for more.
    pipe = process.stdout.fileno()
    while not re.search(r"  -d '.*'\n", printed) and time.monotonic() < deadline:
        if select.select([pipe], [], [], 0.5)[0]:
            data = os.read(pipe, 65536)
            if not data:
                break
            printed += data.decode()
    return printed


def wait_ready(http: httpx.Client) -> None:
    """Poll /ready until it says 200."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.TransportError):
            if http.get("/ready").status_code == 200:
                return
        time.sleep(0.05)
    raise AssertionError("the server did not become ready")


def eventually(true: Any, within: float = 10.0) -> bool:
    """Whether `true()` becomes true within so many seconds."""
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        if true():
            return True
        time.sleep(0.05)
    return bool(true())
