"""Decode attention by codec, against bf16 and against a plain read: ``python -m bench.attention [--past N]``.

One layer of SmolLM2's shape, 16 sequences of 2048 tokens, one new row each; blocks scattered over an arena larger than
any cache. Calls of all codecs, and a read-only sweep of the arena by as many threads, take turns, so that all meet
the same machine; medians. The arena holds a constant, not zeros: untouched pages of zeros are one page.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
from numpy.typing import NDArray

from bench.kernels import BLOCK, COLD_BYTES, DIM, HEADS, KV_HEADS
from tenure import _native
from tenure.spec import CODECS

MEASURED = ("bf16", "int8", "k8v4", "int4")
FILL = 0x2C  # an f16 or bf16 of such bytes is small and finite
NUMBERS = {name: number for number, name in enumerate(CODECS)}


def attention(codec: str, arena: NDArray[np.uint8], sequences: int, past: int) -> Callable[[int], None]:
    """A call that attends to `past` tokens in `codec`, in blocks whose turn it is; the open block is staged."""
    size, staged = (_native.block_bytes(form, 1, KV_HEADS, DIM) for form in (codec, "bf16"))
    full = past // BLOCK
    places = (arena.nbytes - sequences * staged) // size
    sets = places // (sequences * full)
    order = np.random.default_rng(1).permutation(sets * sequences * full).astype(np.int64) * size
    order = order.reshape(sets, sequences, full)
    open_blocks = arena.nbytes - (1 + np.arange(sequences, dtype=np.int64)[:, None]) * staged
    tables = [np.concatenate([one, open_blocks], axis=1).ravel() for one in order]
    codecs = np.full((sequences, full + 1), NUMBERS[codec], np.uint8)
    encode = codecs.ravel().copy()
    codecs[:, -1] = NUMBERS["bf16"]
    rng = np.random.default_rng(2)
    q = rng.standard_normal((sequences, HEADS, DIM), np.float32)
    k, v = (rng.standard_normal((sequences, KV_HEADS, DIM), np.float32) for _ in range(2))
    out = np.empty_like(q)
    starts = np.arange(sequences + 1, dtype=np.int32)
    first = np.full(sequences, past, np.int32)
    nowhere, none_gone = np.full(codecs.size, -1, np.int64), np.zeros(sequences, np.int32)

    def call(i: int) -> None:
        table = (starts * (full + 1), none_gone, tables[i % sets], codecs.ravel(), nowhere, encode)
        _native.attention(arena, "bf16", _native.isa(), 0, q, k, v, starts, first, table, out)

    return call


def sweep(arena: NDArray[np.uint8], pool: ThreadPoolExecutor, _: int) -> None:
    """Read all of it, a part by each thread."""
    list(pool.map(np.sum, np.array_split(arena.view(np.int64), _native.cores())))


def main() -> None:
    """Print a line for each codec, and the sweep."""
    parser = argparse.ArgumentParser(prog="python -m bench.attention", description=__doc__)
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--past", type=int, default=2048, help="tokens before the new one, a multiple of 32")
    parser.add_argument("--repeat", type=int, default=101)
    asked = parser.parse_args()
    arena = np.full(COLD_BYTES + asked.sequences * (1 << 16), FILL, np.uint8)
    with ThreadPoolExecutor(_native.cores()) as pool:
        calls: dict[str, Callable[[int], None]] = {
            codec: attention(codec, arena, asked.sequences, asked.past) for codec in MEASURED
        }
        calls["sweep"] = partial(sweep, arena, pool)
        took: dict[str, list[float]] = {name: [] for name in calls}
        for i in range(asked.repeat + 1):
            for name, call in calls.items():
                start = time.perf_counter()
                call(i)
                took[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(times[1:]) for name, times in took.items()}
    speed = arena.nbytes / medians["sweep"] / 1e9
    print(f"{_native.isa()}, {_native.cores()} threads, {asked.sequences} × {asked.past}; sweep {speed:.1f} GB/s")
    print(f"{'codec':<8}{'µs':>8}{'of bf16':>9}{'GB/s':>8}{'of sweep':>10}")
    for codec in MEASURED:
        read = asked.sequences * asked.past // BLOCK * _native.block_bytes(codec, 1, KV_HEADS, DIM)
        rate = read / medians[codec] / 1e9
        ratio = medians[codec] / medians["bf16"]
        print(f"{codec:<8}{1e6 * medians[codec]:>8.0f}{ratio:>9.2f}{rate:>8.1f}{rate / speed:>10.2f}")


if __name__ == "__main__":
    main()
