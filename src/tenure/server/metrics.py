"""`/metrics`: vLLM's names where they are true here, and `tenure:` for what nobody else has.

Counters and histograms come from the facts: the engine's thread only adds to a Summary (under a lock that a scrape
holds for microseconds), and the text is made when it is asked for. Gauges come from `Serves.stats()`.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from tenure.events import Fact
from tenure.server.leash import Cut
from tenure.server.serves import Serves
from tenure.summary import HELD, Histogram, Summary
from tenure.types import Snapshot

CONTENT_TYPE = CONTENT_TYPE_LATEST
FINISHED = {"stop": "stop", "length": "length", "cancelled": "abort", "error": "error"}
"""Our finish to vLLM's finished_reason."""
SOURCES = {"device": "device", "host": "host", "disk": "disk", "remote": "p2p"}
COUNTERS = (
    ("vllm:prefix_cache_queries", "Prompt tokens looked up in the cache.", "prefix_queries"),
    ("vllm:prefix_cache_hits", "Prompt tokens found in the cache.", "prefix_hits"),
    ("vllm:prompt_tokens", "Prompt tokens of ended requests.", "prompt_tokens"),
    ("vllm:prompt_tokens_cached", "Of them, those not computed again.", "cached_tokens"),
    ("vllm:generation_tokens", "Generated tokens of ended requests.", "generation_tokens"),
    ("vllm:num_preemptions", "Running sequences that had to give their blocks back.", "paused"),
    ("tenure:requests_queued", "Requests taken.", "queued"),
    ("tenure:requests_started", "Requests that got into a step.", "started"),
    ("tenure:sequences_resumed", "Paused sequences that went on.", "resumed"),
    ("tenure:sequences_slid", "Times a context slid on without its middle.", "slid"),
    ("tenure:kv_blocks_reused", "Stored blocks leased again.", "reused_blocks"),
    ("tenure:kv_blocks_cleared", "Blocks dropped by /reset_prefix_cache.", "cleared_blocks"),
    ("tenure:facts_missed", "Facts that left the bounded log before a reader came.", "facts_missed"),
    ("tenure:steps", "Steps of the model.", "steps"),
    ("tenure:step_decode_rows", "Decode rows of all steps.", "decode_rows"),
    ("tenure:step_prefill_rows", "Prefill rows of all steps.", "prefill_rows"),
    ("tenure:step_seconds", "Time spent in steps.", "step_seconds"),
)
HISTOGRAMS = (
    ("vllm:time_to_first_token_seconds", "From arrival to the first token.", "ttft"),
    ("vllm:inter_token_latency_seconds", "Between two tokens of a sequence.", "inter_token"),
    ("vllm:request_time_per_output_token_seconds", "Mean time per token of a request.", "per_output_token"),
    ("vllm:e2e_request_latency_seconds", "From arrival to the end.", "e2e"),
    ("vllm:request_queue_time_seconds", "Waiting for the first step.", "queue"),
    ("tenure:queue_prediction_error_seconds", "The wait that was predicted against the real one.", "prediction_error"),
    ("vllm:request_prefill_time_seconds", "From the first step to the first token.", "prefill"),
    ("vllm:request_decode_time_seconds", "From the first token to the last.", "decode"),
    ("vllm:request_inference_time_seconds", "From the first step to the last token.", "inference"),
    ("vllm:request_prompt_tokens", "Prompt tokens per request.", "prompt_sizes"),
    ("vllm:request_generation_tokens", "Generated tokens per request.", "generation_sizes"),
    ("vllm:kv_block_lifetime_seconds", "Age of a block when it left its tier.", "block_lifetime"),
    ("vllm:kv_block_idle_before_evict_seconds", "Time since its last use when it left.", "block_idle"),
    ("vllm:kv_block_reuse_gap_seconds", "Time between two uses of a block.", "block_reuse_gap"),
)


class Metrics(Collector):
    """Listens to the facts of a `Serves` and writes them out for Prometheus."""

    def __init__(self, serves: Serves) -> None:
        self._serves = serves
        self._lock = threading.Lock()
        self._summary = Summary()
        self._cuts: Counter[str] = Counter()
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        serves.facts.listen(self.absorb)

    def absorb(self, fact: Fact) -> None:
        """Called on the engine's thread for every fact."""
        with self._lock:
            self._summary.absorb(fact)

    def cut(self, why: Cut) -> None:
        """Count a request that the server ended."""
        self._cuts[why.value] += 1

    def summary(self) -> Summary:
        """A copy of the sums at one moment."""
        with self._lock:
            return self._summary.copy()

    def text(self) -> bytes:
        """The exposition, in Prometheus' text format."""
        return generate_latest(self._registry)

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        labels = _Labels(self._serves.card.id)
        summary, stats = self.summary(), self._serves.stats()
        return itertools.chain(
            _gauges(labels, stats), _counters(labels, summary, self._cuts), _histograms(labels, summary)
        )


class _Labels:
    """Makes families that all carry vLLM's two labels. `values` map tuples of the `extra` labels to numbers."""

    def __init__(self, model: str) -> None:
        self._names = ["model_name", "engine"]
        self._values = [model, "0"]

    def gauge(self, name: str, doc: str, values: Mapping[Any, float], extra: tuple[str, ...] = ()) -> Metric:
        family = GaugeMetricFamily(name, doc, labels=[*self._names, *extra])
        for key, value in values.items():
            family.add_metric([*self._values, *key], value)
        return family

    def counter(self, name: str, doc: str, values: Mapping[Any, float], extra: tuple[str, ...] = ()) -> Metric:
        family = CounterMetricFamily(name, doc, labels=[*self._names, *extra])
        for key, value in values.items():
            family.add_metric([*self._values, *key], value)
        return family

    def histogram(self, name: str, doc: str, value: Histogram) -> Metric:
        family = HistogramMetricFamily(name, doc, labels=self._names)
        bounds = [*(str(float(bound)) for bound in value.bounds), "+Inf"]
        buckets = list(zip(bounds, itertools.accumulate(value.counts), strict=True))
        family.add_metric(self._values, buckets=buckets, sum_value=value.total)
        return family


def _gauges(labels: _Labels, stats: Snapshot) -> Iterator[Metric]:
    pool = stats.pool
    one: tuple[str, ...] = ()
    yield labels.gauge("vllm:num_requests_running", "Requests in steps.", {one: stats.running})
    yield labels.gauge("vllm:num_requests_waiting", "Requests in the queue.", {one: stats.waiting})
    used = pool.leased / pool.total if pool.total else 0.0
    yield labels.gauge("vllm:kv_cache_usage_perc", "Share of the blocks that sequences hold, 0 to 1.", {one: used})
    config = (str(stats.block_tokens), str(pool.total), stats.codec, "True")
    names = ("block_size", "num_gpu_blocks", "cache_dtype", "enable_prefix_caching")
    yield labels.gauge("vllm:cache_config_info", "How the cache is laid out.", {config: 1}, names)
    blocks = {
        ("device", stats.codec, "leased"): pool.leased,
        ("device", stats.codec, "cached"): pool.cached,
        ("device", stats.codec, "free"): pool.free,
    }
    yield labels.gauge(
        "tenure:kv_blocks", "Blocks; the states add up to the total.", blocks, ("tier", "codec", "state")
    )
    in_use = {
        ("device", kind.codec, state): n
        for kind in stats.by_codec
        for state, n in (("leased", kind.leased), ("cached", kind.cached))
        if kind.window is None
    }
    seen = {
        ("device", str(kind.window), state): n
        for kind in stats.by_codec
        for state, n in (("leased", kind.leased), ("cached", kind.cached))
        if kind.window is not None
    }
    yield labels.gauge(
        "tenure:kv_held_blocks", "Blocks in use, by how they are stored.", in_use, ("tier", "codec", "state")
    )
    yield labels.gauge(
        "tenure:kv_window_blocks", "Blocks in use of layers with windows, beside those of the other layers.",
        seen, ("tier", "window", "state"),
    )  # fmt: skip
    arena = {("device", stats.codec): stats.arena_bytes}
    yield labels.gauge("tenure:kv_bytes", "Bytes reserved for blocks.", arena, ("tier", "codec"))
    yield labels.gauge("tenure:weight_bytes", "Bytes of the weights.", {one: stats.weight_bytes})
    yield labels.gauge("tenure:budget_bytes", "The memory budget.", {one: stats.budget_bytes})
    yield labels.gauge("tenure:leaked_blocks", "Blocks that nobody accounts for; always 0.", {one: stats.leaked_blocks})
    yield labels.gauge("tenure:queued_tokens", "Prompt tokens in the queue.", {one: stats.queued_tokens})
    yield labels.gauge("tenure:pinned_blocks", "Blocks that pins hold.", {one: stats.pinned_blocks})
    tenants = {(tenant.name,): tenant for tenant in stats.tenants}
    held = {name: float(tenant.held_bytes) for name, tenant in tenants.items()}
    yield labels.gauge("tenure:tenant_held_bytes", "What a tenant's running sequences hold.", held, ("tenant",))
    waiting = {name: float(tenant.waiting) for name, tenant in tenants.items()}
    yield labels.gauge("tenure:tenant_waiting", "A tenant's sequences in the queue.", waiting, ("tenant",))
    service = {name: tenant.service for name, tenant in tenants.items()}
    yield labels.gauge("tenure:tenant_service", "What a tenant was served, in prompt tokens.", service, ("tenant",))
    start = stats.predicted_start_s
    yield labels.gauge("tenure:queue_predicted_start_seconds", "When a request sent now would start.", {one: start})


def _counters(labels: _Labels, summary: Summary, cuts: Counter[str]) -> Iterator[Metric]:
    for name, doc, attribute in COUNTERS:
        yield labels.counter(name, doc, {(): getattr(summary, attribute)})
    finished = {(theirs,): summary.finished[ours] for ours, theirs in FINISHED.items()}
    yield labels.counter("vllm:request_success", "Sequences by how they ended.", finished, ("finished_reason",))
    refused = {(code,): count for code, count in summary.refused.items()}
    yield labels.counter("vllm:admission_rejections", "Requests refused.", refused, ("reason",))
    sources = {(theirs,): summary.cached_by_tier[ours] for ours, theirs in SOURCES.items()}
    yield labels.counter(
        "vllm:prompt_tokens_cached_by_source", "Cached prompt tokens by where they lay.", sources, ("source",)
    )
    yield labels.counter(
        "tenure:kv_gone", "Blocks that left a tier.", dict(summary.gone), ("tier", "fate", "by", "reason")
    )
    yield labels.counter(
        "tenure:kv_window_gone", "Blocks that layers with windows no longer keep, while the other layers do.",
        dict(summary.windows_gone), ("window", "by", "reason"),
    )  # fmt: skip
    yield labels.counter("tenure:kv_stored", "Blocks that became shareable.", _keyed(summary.stored), ("tier",))
    again = {(why,): summary.recomputed[why] for why in ("preempted", "evicted", "sibling", *HELD)}
    yield labels.counter("tenure:kv_recompute_tokens", "Tokens computed again.", again, ("reason",))
    yield labels.counter("tenure:prefix_miss", "Why reuse ended.", _keyed(summary.misses), ("reason",))
    forgotten = _keyed(summary.forgotten)
    yield labels.counter("tenure:forgotten_tokens", "Tokens the model could not see.", forgotten, ("policy",))
    pins = _keyed(summary.pins)
    yield labels.counter("tenure:pins", "Pins granted and refused, and how they ended.", pins, ("outcome",))
    changes = _keyed(summary.conversations)
    yield labels.counter("tenure:conversations_changed", "What was done to conversations.", changes, ("change",))
    tokens = _keyed(summary.tenant_tokens)
    yield labels.counter("tenure:tenant_tokens", "Tokens computed and generated for a tenant.", tokens, ("tenant",))
    causes = _keyed(summary.limit_causes)
    yield labels.counter("tenure:limit_cause", "What ended answers of finish `length`.", causes, ("cause",))
    cut = {(why.value,): cuts[why.value] for why in Cut}
    yield labels.counter("tenure:requests_cut", "Requests the server ended, by why.", cut, ("cause",))


def _histograms(labels: _Labels, summary: Summary) -> Iterator[Metric]:
    for name, doc, attribute in HISTOGRAMS:
        yield labels.histogram(name, doc, getattr(summary, attribute))


def _keyed(counter: Counter[str]) -> dict[tuple[str, ...], float]:
    return {(key,): count for key, count in counter.items()}
