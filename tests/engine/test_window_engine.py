"""Models with windows behind the whole engine: every bit as with all blocks kept, in less memory."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.engine.harness import Trace, Watched
from tests.models.test_architectures import WINDOW, build
from tests.models.test_loader import save

from tenure import models
from tenure.cli.costs import of_machine
from tenure.engine import Engine, EngineSettings
from tenure.engine.sampler import Masks
from tenure.lab.probe import Probe
from tenure.models.anatomy import anatomy
from tenure.planner.speed import Calibration, prefill_s
from tenure.spec import BLOCK_TOKENS, KvGeometry, staging_codec
from tenure.types import Request, Rows, Token

TOKENS: list[Token] = np.random.default_rng(21).integers(2, 300, 512).tolist()
CASES = [("gemma2", "bf16"), ("gemma2", "int8"), ("gemma3", "int4"), ("mistral", "bf16"), ("mistral", "k8v4")]


@functools.cache
def model(case: str, staged: str) -> models.Model:
    with tempfile.TemporaryDirectory() as folder:
        return models.load(str(save(Path(folder), build(case))), weights="bf16", kv_codec=staged)  # type: ignore[arg-type]


class Spy(Watched):
    """Sees how many blocks of windows sequences hold whenever tokens are chosen, and how many run."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.held: list[int] = []
        self.running = 0

    def sample(self, logits: NDArray[np.float32], rows: Sequence[Rows], masks: Masks | None = None) -> list[Token]:
        leases = [seq.lease for seq in self.engine._scheduler.sequences() if seq.lease is not None]
        for lease in leases:
            windowed = zip(lease.tables, self.engine.layout.groups, strict=True)
            self.held += [sum(block >= 0 for block in table) for table, group in windowed if group.window]
        self.running = max(self.running, len(leases))
        return super().sample(logits, rows, masks)


def engine(case: str, codec: str, arena: int, **settings: object) -> Engine:
    loaded = model(case, staging_codec(codec))
    fields = {"canary_steps": 1, "max_num_batched_tokens": 96, "pressure": "pause", **settings}
    return Engine(loaded, EngineSettings(kv_cache_bytes=arena, kv_codec=codec, **fields))  # type: ignore[arg-type]


def arena_of(case: str, codec: str, conversations: int, tokens: int) -> int:
    """The least arena, to a block, that holds so many conversations."""
    geometry = KvGeometry.of(model(case, staging_codec(codec)).shape)
    size = geometry.least_arena(codec)
    while geometry.layout(size, codec).conversations(tokens) < conversations:
        size += geometry.parts()[0].block_bytes(codec)
    return size


def expected(case: str, codec: str, request: Request, trace: Trace) -> Trace:
    """What was chosen, from the logits of one step that keeps all blocks."""
    tokens = [*request.tokens, *(token for token, _ in trace)]
    rows = Probe(model(case, staging_codec(codec)), codec, 1, len(tokens)).feed([tokens])[len(request.tokens) - 1 : -1]
    return [(int(row.argmax()), hashlib.blake2b(row.tobytes(), digest_size=12).hexdigest()) for row in rows]


def cached(engine: Engine, request: Request) -> tuple[int, str | None]:
    """Tokens that were reused, and why not more."""
    receipt = engine.submit(request).result()[1].receipt
    return receipt.cached_tokens, receipt.miss and receipt.miss.reason


@pytest.mark.parametrize(("case", "codec"), CASES)
def test_a_long_conversation_in_little_room(case: str, codec: str) -> None:
    """It holds what its windows see, and its next turn is reused to the last token.

    The arena is two blocks larger than what it needs: what waits for the next turn is not what it takes."""
    more = 2 * KvGeometry.of(model(case, staging_codec(codec)).shape).block_bytes(codec)
    with engine(case, codec, arena_of(case, codec, 1, 480) + more) as alone:
        spy = Spy(alone)
        first = spy.ask(TOKENS[:100], 300)
        assert cached(alone, first) == (0, "cold")
        answer = [token for token, _ in spy.trace(first)]
        assert 0 < max(spy.held) <= 1 + -(-(WINDOW - 1) // BLOCK_TOKENS) + 96 // BLOCK_TOKENS
        assert max(spy.held[-200:]) <= 1 + -(-(WINDOW - 1) // BLOCK_TOKENS)
        second = spy.ask([*first.tokens, *answer, *TOKENS[:20]], 20)
        assert cached(alone, second) == (399, None)
        for request in (first, second):
            assert spy.trace(request) == expected(case, codec, request, spy.trace(request))
        alone.check()
        assert alone.stats().pool.leased == 0


@pytest.mark.parametrize(("case", "codec"), CASES)
def test_what_windows_have_left_is_read_again_and_the_receipt_says_so(case: str, codec: str) -> None:
    """A conversation as long as there is room takes what its own windows have left; from its middle that is read again,
    whoever asks."""
    with engine(case, codec, arena_of(case, codec, 1, 480)) as small:
        spy = Spy(small)
        first = spy.ask(TOKENS[:90], 380)
        assert cached(small, first)[0] == 0
        middle = spy.ask([*first.tokens, *(token for token, _ in spy.trace(first))][:200], 4)
        tokens, reason = cached(small, middle)
        assert tokens < 192
        assert reason == "window"
        assert spy.trace(middle) == expected(case, codec, middle, spy.trace(middle))
        small.check()


@pytest.mark.parametrize(("case", "codec"), CASES)
def test_as_many_conversations_run_as_the_layout_says(case: str, codec: str) -> None:
    """More than with all blocks kept, side by side. The arena is full to the last slab: what one kind of block leaves
    of its slabs another can't have, so one may have to wait for a moment."""
    arena = arena_of(case, codec, 6, 320)
    geometry = KvGeometry.of(model(case, staging_codec(codec)).shape)
    assert geometry.with_layers(geometry.layers).layout(arena, codec).conversations(320) < 6
    with engine(case, codec, arena) as full:
        spy = Spy(full)
        asked = [spy.ask(TOKENS[20 * n : 20 * n + 60], 260) for n in range(6)]
        done = spy.run(*asked)
        assert spy.running == 6
        assert sum(one.receipt.preempted for one in done) <= 1
        for request in asked:
            assert spy.trace(request) == expected(case, codec, request, spy.trace(request))
        full.check()


@pytest.mark.parametrize(("case", "codec"), CASES)
def test_under_pressure_nothing_changes(case: str, codec: str) -> None:
    """Twelve conversations where four fit, half of them siblings: paused, resumed and the same to the last bit."""
    with engine(case, codec, arena_of(case, codec, 4, 320)) as tight:
        spy = Spy(tight)
        asked = [spy.ask(TOKENS[20 * n : 20 * n + 130], 150, n=1 + n % 2) for n in range(8)]
        done = spy.run(*asked)
        assert all(one.receipt.limit_cause == "max_tokens" for one in done)
        for request in asked:
            for index in range(request.n):
                trace = spy.trace(request, index)
                assert trace == expected(case, codec, request, trace)
        tight.check()
        stats = tight.stats()
        assert (stats.pool.leased, stats.leaked_blocks) == (0, 0)


def test_recoding_takes_the_layers_that_see_everything() -> None:
    """What recoding changes is told; requests that want nothing recoded get the same bits as ever."""
    arena = arena_of("gemma2", "bf16", 3, 320)
    with engine("gemma2", "bf16", arena, pressure="recode:int4@50%,pause") as tight:
        spy = Spy(tight)
        asked = [spy.ask(TOKENS[30 * n : 30 * n + 100], 200) for n in range(6)]
        exact = Request("exact", tuple(TOKENS[:100]), spy.scope, asked[0].sampling, exact=True)
        done = spy.run(*asked, exact)
        assert all(one.receipt.limit_cause == "max_tokens" for one in done)
        assert spy.trace(exact) == expected("gemma2", "bf16", exact, spy.trace(exact))
        assert any(one.receipt.codec.get("int4") for one in done)
        tight.check()


@pytest.mark.parametrize("case", ["gemma2", "gemma3", "mistral"])
def test_what_is_predicted_of_a_prompt_counts_windows(case: str, tmp_path: Path) -> None:
    """By the server of a model, by the plan of its config, and by the replay."""
    shape = model(case, "bf16").shape
    pairs = sum(min(row + 1, window or 400) for window in shape.windows for row in range(400)) / shape.layers
    with engine(case, "bf16", arena_of(case, "bf16", 1, 480)) as small:
        costs = small._scheduler.costs
        costs.base, costs.prefill = 0.0, 1.0
        request = Request("?", tuple(TOKENS[:400]), small.scope(tenant="", salt=""))
        found = asyncio.run(small.forecast(request)).predicted_ttft_s
        assert found == pytest.approx(1e-3 * (400 + pairs / costs.doubling), rel=1e-2)
        assert found < 0.9e-3 * 400 * (1 + 200 / costs.doubling)
    read = anatomy(str(save(tmp_path, build(case))))
    measured = Calibration("cpu", case, "auto", 1e9, 1e9, 1e9, 1e9)
    attention = prefill_s(read, measured, 0, 400) - 400 * prefill_s(read, measured, 0, 1)
    assert attention == pytest.approx(4e-9 * read.attention * (pairs - 400), rel=1e-3)
    replayed = of_machine(measured, read, "auto", "bf16").costs()
    assert replayed.prefill * replayed.weight(0, 400) == pytest.approx(
        1e3 * prefill_s(read, measured, 0, 400), rel=1e-2
    )
