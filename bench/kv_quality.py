"""What each KV codec costs in quality: ``python -m bench.kv_quality [--model PATH] [--windows N] [--codecs int8]``.

Windows of 1024 tokens of English and code that every Python has (its manual, its sources) are prefilled in one step
each, with K and V in bf16 and then encoded; KL is the mean over rows of KL(bf16 ‖ codec) in nats, after every eighth
token from the 65th on. Weights are bf16, so that nothing but the codec differs.
"""

from __future__ import annotations

import argparse
import inspect
import pydoc_data.topics
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from tenure import _native, models
from tenure.spec import BLOCK_TOKENS, CODECS, KvGeometry

WINDOW, FIRST, EVERY = 1024, 64, 8
NUMBERS = {name: number for number, name in enumerate(CODECS)}
F32 = NDArray[np.float32]


def windows(model: models.Model, count: int) -> Iterator[NDArray[np.int32]]:
    """`count` windows of tokens, by turns of prose and of code."""
    topics = pydoc_data.topics.topics
    prose = model.tokenizer.encode("\n\n".join(topics[key] for key in sorted(topics)))
    code = model.tokenizer.encode(inspect.getsource(argparse) + inspect.getsource(inspect))
    for i in range(count):
        start = 200 + i // 2 * 3500
        yield np.array((code if i % 2 else prose)[start : start + WINDOW], np.int32)


def log_probabilities(model: models.Model, tokens: NDArray[np.int32], codec: str) -> F32:
    """Of the tokens after every eighth row, f32[rows, vocab]."""
    geometry = KvGeometry.of(model.shape)
    blocks, size = WINDOW // BLOCK_TOKENS, geometry.block_bytes(codec)
    encodes = geometry.staging_codec(codec) != codec
    arena = np.empty(blocks * size, np.uint8)
    places, nowhere = np.arange(blocks, dtype=np.int64) * size, np.full(blocks, -1, np.int64)
    wanted = np.arange(FIRST, WINDOW, EVERY, dtype=np.int32)
    logits = np.empty((len(wanted), model.shape.vocab), np.float32)
    tables = [
        (np.array([0, blocks], np.int32), np.zeros(1, np.int32), nowhere if encodes else places + part,
         np.zeros(blocks, np.uint8), places + part if encodes else nowhere, np.full(blocks, NUMBERS[codec], np.uint8))
        for part in geometry.part_offsets(codec)
    ]  # fmt: skip
    rows = np.array([0, WINDOW], np.int32)
    model.decoder.step(arena, tokens, rows, np.zeros(1, np.int32), tables, wanted, logits)
    logits -= logits.max(1, keepdims=True)
    logits -= np.log(np.exp(logits).sum(1, keepdims=True))
    return logits


def main() -> None:
    """Print a line per codec."""
    parser = argparse.ArgumentParser(prog="python -m bench.kv_quality", description=__doc__)
    parser.add_argument("--model", default="", help="a path or hub id; the embedded model unless given")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--codecs", default="int8,k8v4,int4")
    asked = parser.parse_args()
    model = models.load(asked.model or str(models.find_default()), weights="bf16")
    geometry, codecs = KvGeometry.of(model.shape), asked.codecs.split(",")
    found: dict[str, list[tuple[float, float]]] = {codec: [] for codec in codecs}
    for tokens in windows(model, asked.windows):
        exact = log_probabilities(model, tokens, "bf16")
        likely = np.exp(exact)
        for codec in codecs:
            other = log_probabilities(model, tokens, codec)
            kl = float((likely * (exact - other)).sum(1).mean())
            found[codec].append((kl, float((exact.argmax(1) == other.argmax(1)).mean())))
    print(f"{_native.isa()}, {asked.windows * WINDOW} tokens")
    print(f"{'codec':<8}{'bits':>6}{'of bf16':>9}{'KL':>9}{'top-1':>8}")
    for codec, values in found.items():
        share = geometry.block_bytes(codec) / geometry.block_bytes("bf16")
        kl, top = np.mean(values, axis=0)
        print(f"{codec:<8}{16 * share:>6.2f}{share:>9.3f}{kl:>9.5f}{top:>8.4f}")


if __name__ == "__main__":
    main()
