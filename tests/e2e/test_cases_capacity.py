"""Cases K1 and K3 of shared/cases: prompts no pool can hold, and chats that together need more than there is."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

from tests.e2e.support import eventually, pool_bytes, prompt_ids, serving


def test_k1_a_prompt_that_can_never_fit_is_refused_at_once_and_harms_nobody() -> None:
    with serving("--max-model-len", "4096", "--kv-cache-memory-bytes", pool_bytes(1024)) as server:
        assert "1024" in server.printed, "a pool smaller than the context is said at the start"
        began = time.monotonic()
        reply = server.http.post("/v1/completions", json={"prompt": prompt_ids(2000), "max_tokens": 8})
        assert time.monotonic() - began < 1 * 5
        assert reply.status_code == 400
        error = reply.json()["error"]
        assert error["code"] == "kv_capacity_exceeded"
        assert error["pool_blocks"] == 32
        assert error["needed_blocks"] > 62
        with ThreadPoolExecutor(20) as pool:
            answers = list(pool.map(lambda seed: server.complete(prompt_ids(50, seed), 8, ignore_eos=True), range(20)))
        assert [answer["usage"]["completion_tokens"] for answer in answers] == [8] * 20
        assert eventually(lambda: server.metric("vllm:num_requests_waiting") == 0, 5)


def test_k3_four_chats_that_need_half_more_than_the_pool_all_finish_with_their_solo_texts() -> None:
    each, new, share = 200, 184, 1024
    flags = ("--kv-cache-memory-bytes", pool_bytes(share), "--canary", "4", "--max-model-len", "1024")
    assert 4 * (each + new) == int(1.5 * share)
    with serving(*flags) as server:

        def ask(seed: int) -> dict[str, object]:
            return server.complete(prompt_ids(each, seed), new, ignore_eos=True)

        solo = []
        for seed in range(4):
            server.reset()
            solo.append(ask(seed))
        server.reset()
        with ThreadPoolExecutor(4) as pool:
            together = list(pool.map(ask, range(4)))
        assert [answer["choices"] for answer in together] == [answer["choices"] for answer in solo]
        receipts = [answer["kv"] for answer in together]
        assert sum(receipt["preempted"] for receipt in receipts) > 0, (
            "the pool was never short: the case tested nothing"
        )
        assert server.metric("vllm:num_preemptions_total") == sum(receipt["preempted"] for receipt in receipts)
        assert server.metric("tenure:leaked_blocks") == 0


def test_a_lone_sequence_that_fills_the_pool_ends_with_length_and_says_why() -> None:
    with serving("--kv-cache-memory-bytes", pool_bytes(256), "--max-model-len", "1024") as server:
        answer = server.complete(prompt_ids(100), ignore_eos=True, tokens=1000)
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["kv"]["limit_cause"] == "pool"
        assert 256 - 32 <= answer["kv"]["context_used"] <= 256 + 1
        server.complete(prompt_ids(100, seed=1), 4)
