"""`/metrics` speaks vLLM's names, and its numbers are those of the facts and the receipts."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client.parser import text_string_to_metric_families
from tests.server.conftest import Running

from tenure.errors import QueueFull
from tenure.events import (
    BlockGone,
    BlockReused,
    BlockStored,
    ConversationChanged,
    PinEnded,
    PinGranted,
    PinRefused,
    RequestStarted,
    SequencePaused,
    SequenceResumed,
    SequenceSlid,
    SiblingStarted,
)
from tenure.summary import FIRST_TOKEN, INTER_TOKEN, LATENCY
from tenure.tenants import Tenant, Tenants
from tenure.types import BlockId, Fate, Key, SeqId
from tenure.views import TenantView

Serve = Callable[..., Running]
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]

VLLM = {
    "gauge": {"num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "cache_config_info"},
    "counter": {
        "prefix_cache_queries", "prefix_cache_hits", "prompt_tokens", "prompt_tokens_cached",
        "prompt_tokens_cached_by_source", "generation_tokens", "num_preemptions", "request_success",
        "admission_rejections",
    },
    "histogram": {
        "time_to_first_token_seconds", "inter_token_latency_seconds", "request_time_per_output_token_seconds",
        "e2e_request_latency_seconds", "request_queue_time_seconds", "request_prefill_time_seconds",
        "request_decode_time_seconds", "request_inference_time_seconds", "request_prompt_tokens",
        "request_generation_tokens", "kv_block_lifetime_seconds", "kv_block_idle_before_evict_seconds",
        "kv_block_reuse_gap_seconds",
    },
}  # fmt: skip


def scrape(server: Running) -> Samples:
    """All samples by name and labels, without the two that all have."""
    reply = server.http.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain")
    samples: Samples = {}
    for family in text_string_to_metric_families(reply.text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == "fake"
            assert labels.pop("engine") == "0"
            samples[sample.name, tuple(sorted(labels.items()))] = sample.value
    return samples


def test_names_and_kinds(serve: Serve) -> None:
    text = serve().http.get("/metrics").text
    kinds = {family.name: family.type for family in text_string_to_metric_families(text)}
    for kind, names in VLLM.items():
        assert {name for name in names if kinds.get(f"vllm:{name}") != kind} == set()
    for name in ("kv_blocks", "kv_bytes", "leaked_blocks", "queue_predicted_start_seconds"):
        assert kinds[f"tenure:{name}"] == "gauge"
    for name in ("kv_gone", "kv_recompute_tokens", "prefix_miss", "forgotten_tokens"):
        assert kinds[f"tenure:{name}"] == "counter"


def test_gauges(serve: Serve) -> None:
    samples = scrape(serve())
    labels = (("codec", "bf16"), ("tier", "device"))
    states = [samples["tenure:kv_blocks", (labels[0], ("state", s), labels[1])] for s in ("leased", "cached", "free")]
    assert sum(states) == 256
    assert samples["tenure:kv_bytes", labels] == 65536
    assert samples["vllm:num_requests_waiting", ()] == 2
    assert samples["tenure:queue_predicted_start_seconds", ()] == 0.25
    assert samples["tenure:leaked_blocks", ()] == 0
    info = next(dict(key[1]) for key in samples if key[0] == "vllm:cache_config_info")
    assert (info["block_size"], info["num_gpu_blocks"]) == ("32", "256")


def test_running_is_live(serve: Serve) -> None:
    server = serve()
    server.play(hold=True)
    with server.connect() as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n")
        sock.sendall(b'content-length: 15\r\n\r\n{"prompt": "x"}')
        server.until(lambda: scrape(server)["vllm:num_requests_running", ()] == 1)
        assert scrape(server)["vllm:kv_cache_usage_perc", ()] == 1 / 256
    server.until(lambda: scrape(server)["vllm:num_requests_running", ()] == 0)
    samples = scrape(server)
    assert samples["vllm:request_success_total", (("finished_reason", "abort"),)] == 1
    assert samples["tenure:requests_cut_total", (("cause", "disconnect"),)] == 1


def test_counters_reconcile_with_replies(serve: Serve) -> None:
    server = serve()
    server.play(cached=2)
    replies = [server.chat().json(), server.chat(max_tokens=3, n=2).json(), server.complete(max_tokens=1).json()]
    server.chat(stream=True, max_tokens=4)
    usages = [reply["usage"] for reply in replies]
    samples = scrape(server)
    made = sum(u["completion_tokens"] for u in usages) + 4
    prompts = sum(u["prompt_tokens"] for u in usages) + usages[0]["prompt_tokens"]
    assert samples["vllm:generation_tokens_total", ()] == made
    assert samples["vllm:prompt_tokens_total", ()] == samples["vllm:prefix_cache_queries_total", ()] == prompts
    assert samples["vllm:prompt_tokens_cached_total", ()] == samples["vllm:prefix_cache_hits_total", ()] == 8
    assert samples["vllm:prompt_tokens_cached_by_source_total", (("source", "device"),)] == 8
    assert samples["vllm:request_success_total", (("finished_reason", "stop"),)] == 1
    assert samples["vllm:request_success_total", (("finished_reason", "length"),)] == 4
    assert samples["tenure:limit_cause_total", (("cause", "max_tokens"),)] == 3
    assert samples["tenure:prefix_miss_total", (("reason", "cold"),)] == 4
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"):
        assert samples[f"vllm:{name}_count", ()] == 4
    assert samples["vllm:request_generation_tokens_sum", ()] == made
    assert samples["vllm:request_queue_time_seconds_sum", ()] == 4 * 0.004
    steps = sum(handle.produced * handle.request.n for handle in server.fake.handles)
    assert samples["tenure:step_decode_rows_total", ()] == steps == made
    gaps = samples["vllm:inter_token_latency_seconds_count", ()]
    assert gaps == made - server.fake.handles[0].request.n


def test_refusals_are_counted(serve: Serve) -> None:
    server = serve()
    server.play(refuse=QueueFull("full", limit=1, retry_after_s=0.1))
    for _ in range(3):
        assert server.chat().headers["retry-after-ms"] == "100"
    assert scrape(server)["vllm:admission_rejections_total", (("reason", "queue_full"),)] == 3


def test_block_facts_are_counted(serve: Serve) -> None:
    server = serve()
    emit, key = server.fake.facts.emit, Key(b"k" * 16)
    emit(BlockStored(1.0, key, None, BlockId(1), "device", "bf16", 32, (1, 2)))
    emit(BlockReused(2.0, key, "device", 32, 1.5))
    emit(BlockGone(3.0, key, BlockId(1), "device", Fate.DROPPED, "lru", "room", 32, 0.3, 7.0))
    emit(SequencePaused(4.0, "r", SeqId(1), "pause", "pool", 3, 96))
    emit(SequenceResumed(5.0, "r", SeqId(1), 64))
    emit(SiblingStarted(6.0, "r", SeqId(2), 7))
    samples = scrape(server)
    gone = (("by", "lru"), ("fate", "dropped"), ("reason", "room"), ("tier", "device"))
    assert samples["tenure:kv_gone_total", gone] == 1
    assert samples["vllm:kv_block_lifetime_seconds_sum", ()] == 7.0
    assert samples["vllm:kv_block_idle_before_evict_seconds_bucket", (("le", "0.5"),)] == 1
    assert samples["vllm:kv_block_idle_before_evict_seconds_bucket", (("le", "0.2"),)] == 0
    assert samples["vllm:kv_block_reuse_gap_seconds_sum", ()] == 1.5
    assert samples["vllm:num_preemptions_total", ()] == 1
    assert samples["tenure:kv_recompute_tokens_total", (("reason", "preempted"),)] == 64
    assert samples["tenure:kv_recompute_tokens_total", (("reason", "sibling"),)] == 7
    assert server.http.get("/v1/kv").json()["since_start"]["recomputed_tokens"] == 64 + 7


def test_what_memory_pressure_does_is_counted(serve: Serve) -> None:
    server = serve()
    emit, key = server.fake.facts.emit, Key(b"k" * 16)
    emit(RequestStarted(1.0, "r", 2.5, 100, 0, "evicted", 2.0, 64, tenant="red"))
    emit(SequenceSlid(2.0, "r", SeqId(1), 4, 500, 504, tenant="red"))
    emit(PinGranted(3.0, "r", key, 64, 2, 303.0, tenant="red"))
    emit(PinRefused(3.0, "r", 64, 2, "too large", tenant="red"))
    emit(PinEnded(4.0, key, 2, "expired", tenant="red"))
    emit(ConversationChanged(5.0, "c", "deleted", 3, tenant="red"))
    server.fake.tenants = (TenantView("red", 3.0, 1, 2, 50, 4096, 1024, 77.0, 0.75),)
    samples = scrape(server)
    assert samples["tenure:queue_prediction_error_seconds_sum", ()] == 0.5
    assert samples["tenure:kv_recompute_tokens_total", (("reason", "evicted"),)] == 64
    assert samples["tenure:sequences_slid_total", ()] == 1
    assert [samples["tenure:pins_total", (("outcome", o),)] for o in ("granted", "refused", "expired")] == [1, 1, 1]
    assert samples["tenure:conversations_changed_total", (("change", "deleted"),)] == 1
    red = (("tenant", "red"),)
    assert samples["tenure:tenant_held_bytes", red] == 4096
    assert samples["tenure:tenant_waiting", red] == 2
    assert samples["tenure:tenant_service", red] == 77.0


def test_tokens_of_a_tenant_add_up(serve: Serve) -> None:
    server = serve(tenants=Tenants((Tenant("red", ("sk-red",)),)))
    server.play(cached=2)
    body, headers = {"prompt": "Hi", "max_tokens": 3}, {"x-api-key": "sk-red"}
    replies = [server.http.post("/v1/completions", json=body, headers=headers).json() for _ in range(3)]
    tokens = sum(reply["kv"]["computed_tokens"] + reply["usage"]["completion_tokens"] for reply in replies)
    assert scrape(server)["tenure:tenant_tokens_total", (("tenant", "red"),)] == tokens


def test_buckets_are_vllms(serve: Serve) -> None:
    samples = scrape(serve())

    def bounds(name: str) -> tuple[float, ...]:
        return tuple(float(dict(labels)["le"]) for full, labels in samples if full == f"vllm:{name}_bucket")[:-1]

    assert bounds("time_to_first_token_seconds") == FIRST_TOKEN
    assert bounds("inter_token_latency_seconds") == bounds("request_time_per_output_token_seconds") == INTER_TOKEN
    assert bounds("e2e_request_latency_seconds") == bounds("request_decode_time_seconds") == LATENCY
