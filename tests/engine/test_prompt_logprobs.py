"""Logprobs of prompts: the same to the last bit, cached or cold, however they are cut; and what they cost."""

from __future__ import annotations

import numpy as np
import pytest

from engine.harness import Watched, english, model, watched
from tenure.engine.shape import logprob
from tenure.events import RequestDone, RequestStarted, TokenFirst
from tenure.sched.step import TOLD_ROWS
from tenure.types import Finish, Logprob, Piece, Request, Sampling

PROMPT = english(130)
TOP = 3


def told(seen: Watched, request: Request) -> tuple[Logprob, ...]:
    pieces, done = seen.engine.submit(request).result()
    assert done.error is None
    return of(pieces)


def of(pieces: list[Piece]) -> tuple[Logprob, ...]:
    """One piece has them all, the first."""
    assert all(not piece.prompt_logprobs for piece in pieces[1:])
    return pieces[0].prompt_logprobs


def cold() -> tuple[Logprob, ...]:
    with watched(model()) as seen:
        return told(seen, seen.ask(PROMPT, 2, prompt_logprobs=TOP))


def test_they_are_those_of_the_logits_that_each_token_would_have_been_chosen_from() -> None:
    given = cold()
    assert [one.token for one in given] == PROMPT[1:]
    assert all(len(one.top) == TOP and one.logits is None for one in given)
    with watched(model()) as seen:
        for at in (1, 2, 31, 32, 33, 64, 65, 129):
            pieces, _ = seen.engine.submit(seen.ask(PROMPT[:at], 1, logits=True)).result()
            (first,) = pieces[0].logprobs
            assert first.logits is not None
            assert given[at - 1] == logprob(np.frombuffer(first.logits, np.float32), PROMPT[at], TOP)


def test_a_prompt_that_is_held_is_computed_anew_and_still_shared() -> None:
    expected = cold()
    with watched(model(), canary_steps=1) as seen:
        seen.run(seen.ask(PROMPT, 40))
        blocks = seen.engine.stats().pool.cached
        pieces, done = seen.engine.submit(seen.ask(PROMPT, 2, prompt_logprobs=TOP)).result()
        assert of(pieces) == expected
        assert done.receipt.cached_tokens == 0
        assert done.receipt.miss is not None
        assert (done.receipt.miss.reason, done.receipt.miss.at_token) == ("prompt_logprobs", 0)
        assert done.receipt.recomputed_tokens == len(PROMPT) - 1
        (*_, started) = [fact for fact in seen.engine.facts.since(0)[0] if isinstance(fact, RequestStarted)]
        assert started.recomputed_tokens == len(PROMPT) - 1  # facts and receipts tell the same
        assert seen.engine.stats().pool.cached == blocks  # what was computed twice is held once
        (after,) = seen.run(seen.ask(PROMPT, 2))
        assert after.receipt.cached_tokens == len(PROMPT) - 1


def test_what_it_computed_is_reused_by_others_and_a_cold_prompt_is_just_cold() -> None:
    with watched(model()) as seen:
        _, done = seen.engine.submit(seen.ask(PROMPT, 1, prompt_logprobs=0)).result()
        assert done.receipt.miss is not None
        assert (done.receipt.miss.reason, done.receipt.recomputed_tokens) == ("cold", 0)
        (after,) = seen.run(seen.ask([*PROMPT, 5], 1))
        assert after.receipt.cached_tokens == len(PROMPT)


@pytest.mark.parametrize("chunk", [1, 7, 512])
def test_in_chunks_beside_strangers_and_for_several_answers(chunk: int) -> None:
    expected = cold()
    with watched(model(), max_num_batched_tokens=chunk) as seen:
        strangers = [seen.engine.submit(seen.ask(english(40, 300 * i), 30)) for i in range(3)]
        twins = [seen.engine.submit(seen.ask(PROMPT, 3, n=2, prompt_logprobs=TOP)) for _ in range(2)]
        for handle in twins:
            pieces, done = handle.result()
            assert of(pieces) == expected
            assert {piece.index for piece in pieces} == {0, 1}
            assert done.error is None
        for handle in strangers:
            handle.result()
        assert len(seen.engine._runner._logits) <= max(16, TOLD_ROWS + 8)  # whatever the prompts


def test_preempted() -> None:
    """Whoever is paused amid its prompt begins it anew; the answer and what is told of the prompt stay the same."""
    expected = cold()
    with watched(model(), blocks=9, max_step_ms=1e9, canary_steps=1) as seen:
        others = [seen.engine.submit(seen.ask(english(30, 50 * i), 90)) for i in range(3)]
        asked = [seen.engine.submit(seen.ask(PROMPT, 60, prompt_logprobs=TOP)) for _ in range(2)]
        ends = [handle.result() for handle in asked]
        done = [end for _, end in ends] + [handle.result()[1] for handle in others]
        assert [of(pieces) for pieces, _ in ends] == [expected, expected]
        assert sum(end.receipt.preempted for end in done) > 0


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_quantised_blocks_are_seen_as_they_are_stored(codec: str) -> None:
    with watched(model(), kv_codec=codec) as seen:
        first = told(seen, seen.ask(PROMPT, 2, prompt_logprobs=TOP))
        seen.run(seen.ask(PROMPT, 2))
        assert told(seen, seen.ask(PROMPT, 2, prompt_logprobs=TOP)) == first
        assert first != cold()


@pytest.mark.parametrize("n", [1, 2])
def test_a_prompt_alone(n: int) -> None:
    """No token is chosen, counted or timed; what was computed is held for who comes next."""
    expected = cold()
    with watched(model(), canary_steps=1) as seen:
        request = seen.ask(PROMPT, 0, n=n, prompt_logprobs=TOP, logprobs=TOP)
        pieces, done = seen.engine.submit(request).result()
        assert of(pieces) == expected
        assert [(p.text, p.tokens, p.logprobs, p.finish, p.limit_cause) for p in pieces] == [
            ("", (), (), Finish.LENGTH, "max_tokens")
        ] * n
        assert seen.traces == {}
        assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (len(PROMPT), 0)
        assert (done.receipt.computed_tokens, done.receipt.context_used) == (len(PROMPT), len(PROMPT))
        assert (done.receipt.limit_cause, done.receipt.recomputed_tokens) == ("max_tokens", 0)
        assert done.timings.predicted_n == 0
        assert done.timings.prompt_ms > 0
        told_of = [fact for fact in seen.engine.facts.since(0)[0] if isinstance(fact, RequestDone | TokenFirst)]
        assert [getattr(fact, "ttft_s", 0) for fact in told_of] == [None]
        answer = seen.ask(PROMPT, 8)
        (after,) = seen.run(answer)
        assert after.receipt.cached_tokens == len(PROMPT) - 1
        assert after.receipt.miss is None
        fresh = seen.trace(answer)
    with watched(model()) as seen:
        seen.run(again := seen.ask(PROMPT, 8))
        assert seen.trace(again) == fresh


def test_a_prompt_alone_without_logprobs_reuses_what_is_held() -> None:
    with watched(model(), canary_steps=1) as seen:
        seen.run(seen.ask(PROMPT, 4))
        _, done = seen.engine.submit(seen.ask(PROMPT, 0)).result()
        assert (done.receipt.cached_tokens, done.usage.completion_tokens) == (len(PROMPT) - 1, 0)
        alone = Request("s1", tuple(PROMPT[:40]), seen.scope, Sampling(max_tokens=0), session_id="s", overflow="slide")
        _, done = seen.engine.submit(alone).result()
        assert (done.usage.completion_tokens, done.receipt.forgotten) == (0, ())
        assert seen.engine.stats().predicted_start_s < 60.0


def test_prompts_alone_in_chunks_beside_strangers_and_paused() -> None:
    expected = cold()
    with watched(model(), blocks=9, max_num_batched_tokens=40, max_step_ms=1e9, canary_steps=1) as seen:
        strangers = [seen.engine.submit(seen.ask(english(30, 50 * i), 90)) for i in range(3)]
        alone = [seen.engine.submit(seen.ask(PROMPT, 0, prompt_logprobs=TOP)) for _ in range(3)]
        for handle in alone:
            pieces, done = handle.result()
            assert of(pieces) == expected
            assert (done.error, done.usage.completion_tokens) == (None, 0)
        for handle in strangers:
            assert handle.result()[1].usage.completion_tokens == 90


def test_in_python() -> None:
    with watched(model()) as seen:
        engine = seen.engine
        result = engine.generate("One two three", max_tokens=2, prompt_logprobs=1)
        ids = engine.encode("One two three")
        assert [one.token for one in result.prompt_logprobs] == ids[1:]
        assert all(one.top[0][1] >= one.logprob for one in result.prompt_logprobs)
        assert engine.generate("One two three", max_tokens=2).prompt_logprobs == ()
        assert engine.generate([5], max_tokens=1, prompt_logprobs=1).prompt_logprobs == ()  # nothing to tell of one


def test_logits_that_are_not_finite_end_the_request() -> None:
    with watched(model()) as seen:
        real = seen.engine._runner._decoder

        class Broken:
            block_bytes = real.block_bytes

            def step(self, *arguments: object) -> None:
                real.step(*arguments)  # type: ignore[arg-type]
                if len(arguments[-1]) > 1:  # type: ignore[arg-type]
                    arguments[-1][1, 7] = np.nan  # type: ignore[index]

        seen.engine._runner._decoder = Broken()
        _, done = seen.engine.submit(seen.ask(PROMPT[:20], 2, prompt_logprobs=0)).result()
        assert done.error is not None
        assert "finite" in done.error


def test_sampling_says_what_it_asks() -> None:
    assert Sampling().prompt_logprobs is None
    assert not Sampling(prompt_logprobs=1).tells  # of the answer nothing is told
