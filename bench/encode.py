"""What encoding on write takes of a prefill: ``python -m bench.encode [--tokens N]``.

The embedded model (or --model) prefills N tokens whose blocks are encoded as they fill, by all threads; then as many
blocks are encoded once more, alone, by the same kernel on one thread. That time is divided by the number of threads,
over which a prefill spreads it. Codecs take turns; medians.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

from tenure import _native, models
from tenure.lab.probe import Probe
from tenure.spec import BLOCK_TOKENS, KvGeometry

MEASURED = ("bf16", "int8", "k8v4", "int4")


def prefill(model: models.Model, codec: str, tokens: list[int]) -> float:
    """Seconds."""
    probe = Probe(model, codec, 1, len(tokens))
    start = time.perf_counter()
    probe.feed([tokens], last_only=True)
    return time.perf_counter() - start


def encoding(model: models.Model, codec: str, blocks: int) -> float:
    """Seconds that `blocks` whole blocks take, divided by the number of threads."""
    geometry = KvGeometry.of(model.shape)
    staged, stored = geometry.block_bytes("bf16"), geometry.block_bytes(codec)
    arena = np.full(blocks * (staged + stored), 0x2C, np.uint8)  # an f16 or bf16 of such bytes is small and finite
    src = np.arange(blocks, dtype=np.int64) * staged
    dst = blocks * staged + np.arange(blocks, dtype=np.int64) * stored
    shape = (geometry.layers, geometry.kv_heads, geometry.head_dim)
    start = time.perf_counter()
    _native.recode(arena, src, "bf16", dst, codec, *shape)
    return (time.perf_counter() - start) / _native.cores()


def main() -> None:
    """Print a line for each codec."""
    parser = argparse.ArgumentParser(prog="python -m bench.encode", description=__doc__)
    parser.add_argument("--model", default="", help="a path or hub id; the embedded model unless given")
    parser.add_argument("--tokens", type=int, default=512, help="a multiple of 32 (default 512)")
    parser.add_argument("--repeat", type=int, default=15)
    asked = parser.parse_args()
    model = models.load(asked.model or str(models.find_default()))
    tokens = np.random.default_rng(3).integers(100, model.shape.vocab, asked.tokens).tolist()
    whole: dict[str, list[float]] = {codec: [] for codec in MEASURED}
    writing: dict[str, list[float]] = {codec: [] for codec in MEASURED[1:]}
    for _ in range(asked.repeat + 1):
        for codec, times in whole.items():
            times.append(prefill(model, codec, tokens))
        for codec, times in writing.items():
            times.append(encoding(model, codec, asked.tokens // BLOCK_TOKENS))
    print(f"{_native.isa()}, {_native.cores()} threads, {model.weights}, {asked.tokens} tokens")
    print(f"{'codec':<8}{'prefill, ms':>12}{'of bf16':>9}{'encoding, ms':>14}{'share':>8}")
    exact = statistics.median(whole["bf16"][1:])
    for codec, times in whole.items():
        took = statistics.median(times[1:])
        part = statistics.median(writing[codec][1:]) if codec in writing else 0.0
        print(f"{codec:<8}{1e3 * took:>12.1f}{took / exact:>9.2f}{1e3 * part:>14.2f}{part / took:>8.1%}")


if __name__ == "__main__":
    main()
