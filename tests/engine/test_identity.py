"""Same answer, always: the logits of a token sequence are the same to the last bit, whatever happens around it.

{cold, cached, partly cached, beside strangers, chunks of 1/7/64/all, preempted, n = 4, 1 and 2 threads} × prompts ×
tokens, for bf16 and 4-bit weights, and for each codec of the KV cache. The default run takes a few prompts and int4;
`-m full` takes 16 × 64 and all.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import pytest
from tests.engine.harness import Trace, Watched, Weights, english, model, watched

from tenure.types import Request, Token

KINDS = [
    pytest.param("auto", "bf16"),
    pytest.param("bf16", "bf16"),
    pytest.param("auto", "int4"),
    *(
        pytest.param(weights, codec, marks=pytest.mark.full)
        for weights, codec in (("auto", "int8"), ("auto", "k8v4"), ("bf16", "int8"), ("bf16", "int4"))
    ),
]
"""Weights and KV codec."""


@dataclass(frozen=True)
class Size:
    """How much of the matrix: prompt lengths and tokens of each answer."""

    lengths: tuple[int, ...]
    tokens: int

    def prompts(self) -> list[list[Token]]:
        """Distinct prompts; the odd ones share a head with the one before."""
        made: list[list[Token]] = []
        for number, length in enumerate(self.lengths):
            shared = made[-1][: length // 2] if number % 2 and made else []
            made.append(shared + english(length - len(shared), start=171 * number + len(shared)))
        return made


QUICK = Size((5, 33, 96, 130), 12)
FULL = Size((1, 2, 31, 32, 33, 40, 63, 64, 65, 96, 127, 128, 200, 300, 520, 700), 64)
SIZES = [pytest.param(QUICK, id="quick"), pytest.param(FULL, id="all", marks=pytest.mark.full)]


@functools.cache
def cold(weights: Weights, size: Size, codec: str) -> list[Trace]:
    """The reference: each prompt alone, at once, in an engine that has seen nothing."""
    traces = []
    with watched(model(weights), kv_codec=codec) as seen:
        for prompt in size.prompts():
            request = seen.ask(prompt, size.tokens)
            seen.engine.reset_prefix_cache()
            (done,) = seen.run(request)
            assert done.usage.cached_tokens == 0
            traces.append(seen.trace(request))
    return traces


def agree(seen: Watched, requests: list[Request], expected: list[Trace], index: int = 0) -> None:
    for request, trace in zip(requests, expected, strict=True):
        got = seen.trace(request, index)
        first = next((i for i, (a, b) in enumerate(zip(got, trace, strict=False)) if a != b), None)
        assert first is None, f"prompt of {len(request.tokens)} tokens: token {first} has other logits"
        assert len(got) == len(trace)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("weights", "codec"), KINDS)
def test_cached(weights: Weights, size: Size, codec: str) -> None:
    with watched(model(weights), kv_codec=codec) as seen:
        for _ in range(2):
            requests = [seen.ask(prompt, size.tokens) for prompt in size.prompts()]
            done = [seen.run(request)[0] for request in requests]
            agree(seen, requests, cold(weights, size, codec))
        if codec == "bf16":
            assert [end.usage.cached_tokens for end in done] == [len(prompt) - 1 for prompt in size.prompts()]
        else:  # whole blocks, and of what was staged as much as is still
            for end, prompt in zip(done, size.prompts(), strict=True):
                assert end.usage.cached_tokens >= (len(prompt) - 1) // 32 * 32


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("weights", "codec"), KINDS)
@pytest.mark.parametrize("keep", [0.3, 0.7])
def test_partly_cached(weights: Weights, size: Size, codec: str, keep: float) -> None:
    with watched(model(weights), kv_codec=codec) as seen:
        for prompt, expected in zip(size.prompts(), cold(weights, size, codec), strict=True):
            held = int(keep * len(prompt))
            seen.engine.reset_prefix_cache()
            if held:
                seen.run(seen.ask([*prompt[:held], 9, 9, 9], 2))
            request = seen.ask(prompt, size.tokens)
            (done,) = seen.run(request)
            assert done.usage.cached_tokens >= (held if codec == "bf16" else held // 32 * 32)
            agree(seen, [request], [expected])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("weights", "codec"), KINDS)
def test_beside_fifteen_strangers(weights: Weights, size: Size, codec: str) -> None:
    with watched(model(weights), kv_codec=codec, blocks=600) as seen:
        requests = [seen.ask(prompt, size.tokens) for prompt in size.prompts()]
        strangers = [seen.ask(english(20 + 13 * i, 100 * i), size.tokens) for i in range(max(0, 16 - len(requests)))]
        seen.run(*[request for pair in zip(strangers, requests, strict=False) for request in pair],
                 *strangers[len(requests) :], *requests[len(strangers) :])  # fmt: skip
        agree(seen, requests, cold(weights, size, codec))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("weights", "codec"), KINDS)
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_in_chunks(weights: Weights, size: Size, codec: str, chunk: int) -> None:
    with watched(model(weights), kv_codec=codec, max_num_batched_tokens=chunk) as seen:
        requests = [seen.ask(prompt, size.tokens) for prompt in size.prompts()]
        for request in requests:
            seen.run(request)
            seen.engine.reset_prefix_cache()
        agree(seen, requests, cold(weights, size, codec))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("weights", "codec"), KINDS)
def test_preempted(weights: Weights, size: Size, codec: str) -> None:
    longest = max(size.lengths) + size.tokens
    with watched(model(weights), kv_codec=codec, blocks=longest // 32 + 3, max_step_ms=1e9) as seen:
        requests = [seen.ask(prompt, size.tokens) for prompt in size.prompts()]
        # Answers that grow for long, so that the pool runs short whatever the prompts need.
        others = [seen.ask(english(30, 50 * i), 40 if codec == "bf16" else 200) for i in range(4)]
        done = seen.run(*requests, *others)
        agree(seen, requests, cold(weights, size, codec))
        assert sum(end.receipt.preempted for end in done) > 0


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("weights", "codec"), KINDS)
def test_four_answers(weights: Weights, size: Size, codec: str) -> None:
    with watched(model(weights), kv_codec=codec, blocks=600) as seen:
        requests = [seen.ask(prompt, size.tokens, n=4) for prompt in size.prompts()]
        done = seen.run(*requests)
        for index in range(4):
            agree(seen, requests, cold(weights, size, codec), index)
        # The head of a quantised block is of no use: who ends in one, or leaves another conversation there, computes it
        # again, each of the four answers once.
        most = 0 if codec == "bf16" else 4 * 31
        assert all(end.receipt.recomputed_tokens <= most for end in done)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("weights", "codec"), KINDS)
def test_on_one_thread(weights: Weights, size: Size, codec: str) -> None:
    with watched(model(weights, threads=1), kv_codec=codec, threads=1) as seen:
        requests = [seen.ask(prompt, size.tokens) for prompt in size.prompts()]
        seen.run(*requests)
        agree(seen, requests, cold(weights, size, codec))
