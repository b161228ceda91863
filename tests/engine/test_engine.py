"""The engine with the real model: what it promises a client, in every phase and at every end."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from tests.engine.harness import english, model, text_of, watched

from tenure.engine import Engine, EngineSettings, Handle
from tenure.errors import (
    ContextLengthExceeded,
    Draining,
    EngineDead,
    InvalidRequest,
    KvCapacityExceeded,
    QueueFull,
)
from tenure.events import RequestDone, RequestRefused, StepDone
from tenure.types import Done, Finish, Miss, Piece, Request, Sampling

CHAT = [{"role": "user", "content": "What is the capital of France?"}]


def wait_for(condition: object, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.005)


def test_a_chat_and_its_next_turn() -> None:
    with watched(model("bf16")) as seen:
        engine, scope = seen.engine, seen.scope
        prompt = engine.render(CHAT, session_id="s", scope=scope)
        assert [span.message for span in prompt.spans] == [0]
        pieces, first = engine.submit(
            Request("a", prompt.tokens, scope, Sampling(max_tokens=64), session_id="s", spans=prompt.spans)
        ).result()
        text = text_of(pieces)
        assert "Paris" in text
        assert pieces[-1].finish is Finish.STOP and pieces[-1].stopped_by is None
        assert first.usage.completion_tokens == sum(len(piece.tokens) for piece in pieces)
        chat = [*CHAT, {"role": "assistant", "content": text}, {"role": "user", "content": "And of Spain?"}]
        turn = engine.render(chat, session_id="s", scope=scope)
        answer = [token for piece in pieces for token in piece.tokens]
        assert turn.tokens[: len(prompt.tokens) + len(answer)] == (*prompt.tokens, *answer)
        _, second = engine.submit(
            Request("b", turn.tokens, scope, Sampling(max_tokens=8), session_id="s", spans=turn.spans)
        ).result()
        # All but the answer's last token was held: that one had been chosen, never computed.
        assert second.receipt.cached_tokens == len(prompt.tokens) + len(answer) - 1
        assert second.receipt.miss is None


def test_retokenised_history_is_told_and_a_session_defeats_it() -> None:
    """Case R5: the same text has other tokens than those that were generated."""
    with watched(model()) as seen:
        engine, scope = seen.engine, seen.scope
        prompt = engine.render(CHAT, session_id=None, scope=scope)
        for seed in range(40):
            wild = Sampling(max_tokens=24, temperature=2.0, seed=seed)
            pieces, _ = engine.submit(
                Request(f"a{seed}", prompt.tokens, scope, wild, session_id=f"s{seed}", spans=prompt.spans)
            ).result()
            said = [token for piece in pieces for token in piece.tokens]
            chat = [*CHAT, {"role": "assistant", "content": text_of(pieces)}, {"role": "user", "content": "Why?"}]
            turn = engine.render(chat, session_id=None, scope=scope)
            again = turn.tokens[len(prompt.tokens) :]
            same = next((i for i, (a, b) in enumerate(zip(said, again, strict=False)) if a != b), 0)
            if 0 < same < 23:
                break
        (done,) = seen.run(Request("b", turn.tokens, scope, Sampling(max_tokens=1), spans=turn.spans))
        assert done.receipt.cached_tokens == len(prompt.tokens) + same
        assert done.receipt.miss == Miss("retokenised", len(prompt.tokens) + same, 1)
        faithful = engine.render(chat, session_id=f"s{seed}", scope=scope)
        assert faithful.tokens[: len(prompt.tokens) + len(said)] == (*prompt.tokens, *said)
        request = Request(
            "c", faithful.tokens, scope, Sampling(max_tokens=1), session_id=f"s{seed}", spans=faithful.spans
        )
        (done,) = seen.run(request)
        assert done.receipt.cached_tokens == len(prompt.tokens) + len(said) - 1
        assert done.receipt.miss is None


@pytest.mark.parametrize("where", [(0, 3), (4, 11), (9, 10), (6, 25)])
def test_stop_strings_leak_nothing(where: tuple[int, int]) -> None:
    with watched(model()) as seen:
        prompt = seen.engine.render(CHAT, session_id=None, scope=seen.scope)
        free, _ = seen.engine.submit(Request("free", prompt.tokens, seen.scope, Sampling(max_tokens=30))).result()
        full = text_of(free)
        text = full[slice(*where)]  # begins and ends inside of tokens, spans several of them
        assert len(text) == where[1] - where[0]
        pieces, done = seen.engine.submit(
            Request("cut", prompt.tokens, seen.scope, Sampling(max_tokens=30, stop=(text, "never")))
        ).result()
        assert text_of(pieces) == full.split(text)[0]
        assert (pieces[-1].finish, pieces[-1].stopped_by) == (Finish.STOP, text)
        assert done.usage.completion_tokens < sum(len(piece.tokens) for piece in free)


def test_stop_ids_and_length() -> None:
    with watched(model()) as seen:
        request = seen.ask(english(40), 12)
        seen.run(request)
        tokens = [token for token, _ in seen.trace(request)]
        stop = tokens[5]
        pieces, done = seen.engine.submit(seen.ask(english(40), 12, stop_token_ids=(stop,))).result()
        assert (pieces[-1].finish, pieces[-1].stopped_by) == (Finish.STOP, stop)
        assert done.usage.completion_tokens == tokens.index(stop) + 1
        pieces, done = seen.engine.submit(seen.ask(english(40), 4)).result()
        assert (pieces[-1].finish, pieces[-1].limit_cause) == (Finish.LENGTH, "max_tokens")


def test_sampling_is_a_matter_of_the_request_alone() -> None:
    with watched(model()) as seen:
        how = {"temperature": 0.9, "top_p": 0.95, "top_k": 50}
        lone = seen.ask(english(50), 12, n=3, seed=7, **how)
        seen.run(lone)
        crowd = [seen.ask(english(50), 12, n=3, seed=seed, **how) for seed in (7, 8)]
        seen.run(*crowd, *[seen.ask(english(30, 60 * i), 12) for i in range(5)])
        for index in range(3):
            assert seen.trace(lone, index) == seen.trace(crowd[0], index)
        drawn = [[token for token, _ in seen.trace(request, i)] for request in (lone, crowd[1]) for i in range(3)]
        assert len({tuple(tokens) for tokens in drawn}) > 3


def test_a_prefix_asked_for_at_once_is_computed_once() -> None:
    with watched(model(), blocks=400) as seen:
        rows: list[int] = []
        seen.engine.facts.listen(lambda fact: rows.append(fact.prefill_rows) if isinstance(fact, StepDone) else None)
        prefix = english(320)
        requests = [seen.ask([*prefix, *english(8, 400 + 50 * i)], 4) for i in range(8)]
        done = seen.run(*requests)
        assert sorted(end.usage.cached_tokens for end in done) == [0] + [320] * 7
        assert sum(rows) == 320 + 8 * 8


def test_cancel_in_every_phase() -> None:
    with watched(model(), max_num_seqs=2, max_num_batched_tokens=32) as seen:
        engine = seen.engine
        waiting: Handle | None = None
        decoding = engine.submit(seen.ask(english(20), 400))
        reader = iter(decoding)
        next(reader)
        prefilling = engine.submit(seen.ask(english(2000, 100), 4))
        wait_for(lambda: engine.stats().running == 2)
        waiting = engine.submit(seen.ask(english(20, 50), 4))
        wait_for(lambda: engine.stats().waiting == 1)
        for handle in (waiting, prefilling, decoding):
            handle.cancel()
            handle.cancel()
        ends = [next(item for item in handle if isinstance(item, Done)) for handle in (waiting, prefilling)]
        ends.append(next(item for item in reader if isinstance(item, Done)))
        assert [end.usage.completion_tokens for end in ends[:2]] == [0, 0]
        assert 0 < ends[2].usage.completion_tokens < 400
        wait_for(lambda: engine.stats().pool.leased == 0 and engine.stats().running == 0)
        (after,) = seen.run(seen.ask(english(20), 2))
        assert after.usage.completion_tokens == 2


def test_leaving_an_async_iteration_cancels() -> None:
    async def main() -> None:
        with watched(model()) as seen:
            handle = seen.engine.submit(seen.ask(english(20), 5000))
            got = 0
            reader = aiter(handle)
            async for item in reader:
                assert isinstance(item, Piece)
                got += 1
                if got == 3:
                    break
            await reader.aclose()  # type: ignore[attr-defined]
            for _ in range(1000):
                if seen.engine.stats().running == 0:
                    break
                await asyncio.sleep(0.01)
            assert seen.engine.stats().pool.leased == 0
            other = [item async for item in seen.engine.submit(seen.ask(english(20), 3))]
            assert isinstance(other[-1], Done)

    asyncio.run(main())


def test_a_prompt_longer_than_the_context_is_refused_with_its_numbers() -> None:
    with watched(model(), blocks=40, max_model_len=1024) as seen:
        with pytest.raises(ContextLengthExceeded) as long:
            seen.engine.submit(seen.ask(english(1024), 1))
        assert long.value.numbers == {"prompt_tokens": 1024, "requested_tokens": 1025, "limit": 1024}


def test_refusals_come_at_once_with_their_numbers() -> None:
    with watched(model(), blocks=16, max_model_len=1024, max_num_seqs=1, max_queued_requests=2) as seen:
        engine = seen.engine
        with pytest.raises(KvCapacityExceeded) as wide:
            engine.submit(seen.ask(english(600), 1))
        assert wide.value.numbers == {
            "needed_blocks": 19, "pool_blocks": 16, "prompt_tokens": 600, "requested_tokens": 601, "limit": 512
        }  # fmt: skip
        running = engine.submit(seen.ask(english(20), 300))
        wait_for(lambda: engine.stats().running == 1)
        queued = [engine.submit(seen.ask(english(20), 1)) for _ in range(2)]
        with pytest.raises(QueueFull) as full:
            engine.submit(seen.ask(english(20), 1))
        assert full.value.retry_after_s is not None and full.value.retry_after_s > 0
        running.cancel()
        for handle in queued:
            handle.result()
        with pytest.raises(InvalidRequest, match="token id"):
            engine.submit(seen.ask([49152], 1))
        with pytest.raises(InvalidRequest, match="empty"):
            engine.submit(seen.ask([], 1))
        with pytest.raises(InvalidRequest, match="max_tokens"):
            engine.submit(seen.ask([1], -1))
        refused = [fact.code for fact in engine.facts.since(0)[0] if isinstance(fact, RequestRefused)]
        assert refused == ["kv_capacity_exceeded", "queue_full"]


def test_a_lone_sequence_fills_the_pool_and_says_so() -> None:
    with watched(model(), blocks=4) as seen:
        pieces, done = seen.engine.submit(seen.ask(english(100), None)).result()  # type: ignore[arg-type]
        assert (pieces[-1].finish, pieces[-1].limit_cause) == (Finish.LENGTH, "pool")
        assert done.receipt.limit_cause == "pool"
        assert done.receipt.context_used == 129  # 128 computed; the last one was chosen, but there is no room for it


def test_drain_ends_what_the_grace_does_not_cover() -> None:
    async def main() -> None:
        with watched(model()) as seen:
            engine = seen.engine
            short, long = engine.submit(seen.ask(english(10), 3)), engine.submit(seen.ask(english(10), 8000))
            drained = asyncio.create_task(engine.drain(2.0))
            await asyncio.sleep(0.05)
            assert engine.health().cause == "draining"
            with pytest.raises(Draining):
                engine.submit(seen.ask(english(10), 3))
            assert [item async for item in short][-1].receipt.limit_cause == "max_tokens"  # type: ignore[union-attr]
            items = [item async for item in long]
            await drained
            assert isinstance(items[-2], Piece) and items[-2].limit_cause == "shutdown"
            assert isinstance(items[-1], Done) and items[-1].receipt.limit_cause == "shutdown"

    asyncio.run(main())


def test_death_is_told_to_everyone(caplog: pytest.LogCaptureFixture) -> None:
    with Engine(model(), EngineSettings(kv_cache_bytes=64 << 20)) as engine:
        scope = engine.scope(tenant="", salt="")
        gate = threading.Event()

        def broken(plan: object) -> object:
            gate.wait(10)
            raise ZeroDivisionError("for this test")

        handle = engine.submit(Request("first", (5, 6), scope, Sampling(max_tokens=500)))
        next(iter_pieces := iter(handle))
        engine._runner.compute = broken  # type: ignore[method-assign, assignment]
        late = engine.submit(Request("late", (5, 6, 7), scope, Sampling(max_tokens=5)))
        gate.set()
        ends = [[item for item in items if isinstance(item, Done)][-1] for items in (iter_pieces, iter(late))]
        assert [end.error for end in ends] == ["ZeroDivisionError: for this test"] * 2
        assert not engine.health().alive
        with pytest.raises(EngineDead, match="ZeroDivisionError"):
            engine.submit(Request("later", (5,), scope))
        assert "unexpected error" in caplog.text
        done = [fact.request for fact in engine.facts.since(0)[0] if isinstance(fact, RequestDone)]
        assert "first" in done


def test_close_ends_what_runs_and_can_be_repeated() -> None:
    engine = Engine(model(), EngineSettings(kv_cache_bytes=64 << 20))
    handle = engine.submit(Request("a", (5, 6), engine.scope(tenant="", salt=""), Sampling(ignore_eos=True)))
    next(iter(handle))
    engine.close()
    engine.close()
    with pytest.raises(Draining):
        engine.submit(Request("b", (5, 6), engine.scope(tenant="", salt="")))


def test_an_idle_engine_burns_nothing_and_checks_itself() -> None:
    with watched(model()) as seen:
        seen.run(seen.ask(english(40), 2))
        time.sleep(1.3)  # past the idle check
        before = time.process_time()
        time.sleep(0.5)
        assert time.process_time() - before < 0.1
        assert seen.engine._loop._checked
        assert seen.engine.reset_prefix_cache() > 0
        assert seen.engine.stats().pool.cached == 0


def test_a_bad_row_ends_one_request_only() -> None:
    with watched(model()) as seen:
        sampler = seen._sampler

        class Poisoned:
            def sample(self, logits, rows, masks):  # type: ignore[no-untyped-def]
                return [-1 if row.request == "bad" else token for row, token in
                        zip(rows, sampler.sample(logits, rows, masks), strict=True)]  # fmt: skip

        seen._sampler = Poisoned()  # type: ignore[assignment]
        good = seen.ask(english(30), 5)
        bad = Request("bad", tuple(english(30, 90)), seen.scope, Sampling(max_tokens=5))
        ends = seen.run(good, bad)
        assert ends[0].error is None and ends[0].usage.completion_tokens == 5
        assert ends[1].error is not None and "not finite" in ends[1].error
