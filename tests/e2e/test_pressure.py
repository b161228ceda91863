"""Case K3 under the pressure ladder: whatever step is due when, every text is the one it would be alone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.e2e.support import Running, pool_bytes, prompt_ids, serving


def squeeze(server: Running, count: int, prompt: int, answer: int) -> list[dict[str, Any]]:
    """`count` requests alone, then all at once; the receipts of the latter, once the texts were found equal."""

    def ask(seed: int) -> dict[str, Any]:
        return server.complete(prompt_ids(prompt, seed), answer, ignore_eos=True)

    solo = []
    for seed in range(count):
        server.reset()
        solo.append(ask(seed)["choices"])
    server.reset()
    with ThreadPoolExecutor(count) as pool:
        together = list(pool.map(ask, range(count)))
    assert [reply["choices"] for reply in together] == solo
    return [reply["kv"] for reply in together]


@pytest.mark.parametrize("ladder", ["pause@95%", "pause@60%", "pause"])
def test_k3_every_chat_ends_with_its_solo_text(ladder: str) -> None:
    flags = ("--kv-cache-memory-bytes", pool_bytes(1024), "--max-model-len", "1024", "--canary", "4")
    with serving(*flags, "--pressure", ladder) as server:
        assert f"pressure {ladder}" in server.printed
        before = server.metric("tenure:kv_recompute_tokens_total")
        receipts = squeeze(server, 4, 200, 184)
        paused = sum(receipt["preempted"] for receipt in receipts)
        assert paused > 0, "the pool was never short: the case tested nothing"
        assert server.metric("vllm:num_preemptions_total") == paused
        again = sum(receipt["recomputed_tokens"] for receipt in receipts)
        assert server.metric("tenure:kv_recompute_tokens_total") - before == again
        assert server.metric("tenure:leaked_blocks") == 0


def test_eight_conversations_at_three_times_the_pool() -> None:
    """8 × 256 tokens in room for 683; each is told what it had to compute again."""
    with serving("--kv-cache-memory-bytes", pool_bytes(672), "--max-model-len", "512", "--canary", "8") as server:
        receipts = squeeze(server, 8, 160, 96)
        assert all(
            receipt["prompt_tokens"] == receipt["cached_tokens"] + receipt["computed_tokens"] for receipt in receipts
        )
        assert server.metric("vllm:num_requests_waiting") == 0


@pytest.mark.parametrize(
    ("flag", "value", "told"),
    [
        ("--pressure", "panic@90%", "pause"),
        ("--pressure", "pause@90%,pause@80%", "rise"),
        ("--pressure", "pause@0%", "above 0%"),
        ("--overflow", "rolling", "refuse, trim, slide"),
        ("--tenants", "/nowhere/tenants.toml", "cannot be read"),
        ("--eviction", "fifo", "lru"),
    ],
)
def test_wrong_policies_are_named_and_the_known_listed(flag: str, value: str, told: str) -> None:
    import subprocess

    from tests.e2e.support import COMMAND, clean_env

    command = [*COMMAND, "serve", "--port", "0", flag, value]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, env=clean_env(), check=False)
    assert result.returncode == 2
    assert told in result.stderr
    assert "Traceback" not in result.stderr
