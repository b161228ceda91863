"""Cases Q1 and Q3 of shared/cases: a long prompt beside a stream, and more requests than the queue takes."""

from __future__ import annotations

import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
from tests.e2e.support import Running, prompt_ids, serving

LONG = 3000


def token_times(server: Running, begun: threading.Event, enough: threading.Event) -> list[float]:
    """Arrival times of one stream's tokens, until `enough` is set."""
    body = {"prompt": prompt_ids(30, 5), "max_tokens": 4000, "ignore_eos": True, "stream": True, "temperature": 0}
    times = []
    with httpx.Client(timeout=120) as http, http.stream("POST", f"{server.url}/v1/completions", json=body) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: "):
                times.append(time.monotonic())
                if len(times) == 20:
                    begun.set()
                if enough.is_set():
                    break
    return times


def test_q1_a_long_prompt_does_not_hold_up_a_stream(server: Running) -> None:
    server.reset()
    begun, enough = threading.Event(), threading.Event()
    with ThreadPoolExecutor(1) as pool:
        stream = pool.submit(token_times, server, begun, enough)
        assert begun.wait(60)
        start = time.monotonic()
        answer = server.complete(prompt_ids(LONG, seed=6), 1)
        end = time.monotonic()
        enough.set()
        times = stream.result(60)
    assert answer["kv"]["computed_tokens"] == LONG
    gaps = [b - a for a, b in itertools.pairwise(times) if start <= b <= end]
    # How many tokens that is depends on how fast the prompt is done; a stream that stood still would show one gap.
    assert len(gaps) >= 5, "the stream stood still beside the long prompt"
    # The declared bound is --max-step-ms, 120 by default; other tests share the machine, so five times that.
    assert max(gaps) <= max(0.6, (end - start) / 5)


def test_q3_what_the_queue_cannot_take_is_refused_at_once() -> None:
    with serving("--max-num-queued-reqs", "4", "--max-num-seqs", "3") as server:

        def ask(number: int) -> tuple[int, int, float, Any, Any]:
            n = 3 if number % 10 == 9 else 1
            body = {"prompt": prompt_ids(20, number), "max_tokens": 40, "ignore_eos": True, "n": n}
            began = time.monotonic()
            with httpx.Client(timeout=120) as http:
                reply = http.post(f"{server.url}/v1/completions", json=body)
            return reply.status_code, n, time.monotonic() - began, reply.headers, reply.json()

        with ThreadPoolExecutor(50) as pool:
            replies = list(pool.map(ask, range(50)))
        accepted = [reply for reply in replies if reply[0] == 200]
        refused = [reply for reply in replies if reply[0] == 429]
        assert len(accepted) + len(refused) == 50
        assert accepted
        assert len(refused) >= 20
        for _, n, _, _, body in accepted:
            assert len(body["choices"]) == n
            assert body["usage"]["completion_tokens"] == 40 * n
        for _, _, _, headers, body in refused:
            assert body["error"]["code"] == "queue_full"
            assert body["error"]["message"]
            assert int(headers["retry-after"]) >= 1
            assert int(headers["retry-after-ms"]) >= 1
        # "At once": far quicker than waiting for a place would be; 50 clients share this machine with the server.
        assert sorted(reply[2] for reply in refused)[len(refused) // 2] < 2
        assert server.metric("vllm:num_requests_waiting") == 0
