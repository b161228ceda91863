"""Native kernels against the machine: ``python -m bench.kernels [--quick]``.

Linear layers of SmolLM2-135M in every format: few rows are bound by reading weights (GB/s beside a plain read of
memory), many rows by arithmetic (GFLOP/s). Attention over blocks: decode by reading keys and values, prefill by
arithmetic. Weights and blocks are cycled through copies that together exceed the last-level cache.
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

from tenure import _native

SHAPES = {"qkv": (960, 576), "o": (576, 576), "gate_up": (3072, 576), "down": (576, 1536), "lm_head": (49152, 576)}
HEADS, KV_HEADS, DIM, BLOCK = 9, 3, 64, 32
COLD_BYTES = 128 << 20  # of operands, so that none is still in a cache when it is used again
GROUP = 32


def seconds(call: Callable[[int], object], repeat: int) -> float:
    """Median seconds of `call(i)` for i in 0..repeat, after one that does not count."""
    call(0)
    times = []
    for i in range(1, repeat + 1):
        start = time.perf_counter()
        call(i)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def read_bandwidth(repeat: int) -> float:
    """GB/s of the best of several read-only sweeps over half a gibibyte by all cores."""
    cores = _native.cores()
    parts = np.array_split(np.ones(1 << 26, np.int64), cores)
    with ThreadPoolExecutor(cores) as pool:
        took = min(seconds(lambda _: list(pool.map(np.sum, parts)), 1) for _ in range(repeat))
    return sum(part.nbytes for part in parts) / took / 1e9


def make_linear(form: str, n: int, k: int, rng: np.random.Generator) -> tuple[_native.Linear, int]:
    """A packed layer of random weights, and its bytes."""
    if form == "f32":
        return _native.Linear("f32", rng.standard_normal((n, k), np.float32)), 4 * n * k
    if form == "bf16":
        return _native.Linear("bf16", rng.integers(0, 0x3F80, (n, k), np.uint16)), 2 * n * k
    half = np.full((n, k // GROUP), np.float16(0.01)).view(np.uint16)
    if form == "int8":
        return _native.Linear("int8", rng.integers(-127, 128, (n, k), np.int8), half), n * k + 2 * half.size
    return _native.Linear("int4", rng.integers(0, 16, (n, k), np.uint8), half, half), n * k // 2 + 4 * half.size


def forward(copies: list[_native.Linear], x: NDArray[np.float32], i: int) -> object:
    """Call number `i`, on the copy whose turn it is."""
    return copies[i % len(copies)].forward(x, threads=0)


def linears(rows: list[int], repeat: int, bandwidth: float) -> None:
    """Time every format and shape for each number of rows."""
    rng = np.random.default_rng(0)
    print(f"{'linear':<10}{'n×k':>12}{'rows':>6}{'µs':>10}{'GB/s':>8}{'of read':>9}{'GFLOP/s':>9}")
    for form in ("bf16", "int8", "int4"):
        for name, (n, k) in SHAPES.items():
            first, size = make_linear(form, n, k, rng)
            copies = [first, *(make_linear(form, n, k, rng)[0] for _ in range(min(63, COLD_BYTES // size)))]
            for m in rows:
                if m > 64 and name == "lm_head":
                    continue  # only sampled rows reach it
                x = rng.standard_normal((m, k), np.float32)
                took = seconds(partial(forward, copies, x), repeat)
                speed = size / took / 1e9
                share = f"{speed / bandwidth:.0%}" if m <= 16 else ""
                flops = 2e-9 * m * n * k / took
                print(f"{form:<5}{name:<8}{n:>6}×{k:<6}{m:>5}{took * 1e6:>10.0f}{speed:>8.1f}{share:>9}{flops:>9.0f}")


def attend(sequences: int, rows: int, past: int, repeat: int, bandwidth: float) -> None:
    """Time `rows` new rows in each of `sequences` sequences that have `past` tokens, blocks scattered in the arena."""
    tokens = past + rows
    per_sequence = -(-tokens // BLOCK)
    block_bytes = _native.block_bytes("bf16", 1, KV_HEADS, DIM)
    sets = max(1, min(64, COLD_BYTES // (sequences * per_sequence * block_bytes)))
    # Not zeros: pages of zeros that nobody wrote are all the same page, and soon in a cache.
    arena = np.full(sets * sequences * per_sequence * block_bytes, 0x2C, np.uint8)
    order = np.random.default_rng(1).permutation(sets * sequences * per_sequence).astype(np.int64) * block_bytes
    tables = order.reshape(sets, sequences * per_sequence)
    rng = np.random.default_rng(2)
    isa = _native.isa()
    total = sequences * rows
    q = rng.standard_normal((total, HEADS, DIM), np.float32)
    k, v = (rng.standard_normal((total, KV_HEADS, DIM), np.float32) for _ in range(2))
    out = np.empty_like(q)
    seq_rows = np.arange(sequences + 1, dtype=np.int32) * rows
    starts = np.arange(sequences + 1, dtype=np.int32) * per_sequence
    blocks = sequences * per_sequence
    codecs, nowhere = np.zeros(blocks, np.uint8), np.full(blocks, -1, np.int64)
    none_gone = np.zeros(sequences, np.int32)
    first = np.full(sequences, past, np.int32)

    def call(i: int) -> None:
        table = (starts, none_gone, tables[i % sets], codecs, nowhere, codecs)
        _native.attention(arena, "bf16", isa, 0, q, k, v, seq_rows, first, table, out)

    took = seconds(call, repeat)
    read = sequences * tokens * 2 * KV_HEADS * DIM * 2
    flops = 4e-9 * HEADS * DIM * sequences * sum(past + i + 1 for i in range(rows)) / took
    share = f"{read / took / 1e9 / bandwidth:.0%}" if rows == 1 else ""
    print(f"{sequences:>4}{rows:>6}{past:>7}{took * 1e6:>10.0f}{read / took / 1e9:>8.1f}{share:>9}{flops:>9.0f}")


def main() -> None:
    """Print the three tables."""
    parser = argparse.ArgumentParser(prog="python -m bench.kernels", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer shapes of work and repetitions")
    quick = parser.parse_args().quick
    repeat = 5 if quick else 31
    bandwidth = read_bandwidth(repeat)
    print(f"{_native.isa()}, {_native.cores()} threads, read-only sweep of memory {bandwidth:.1f} GB/s\n")
    linears([1, 16, 512] if quick else [1, 4, 8, 16, 64, 256, 512], repeat, bandwidth)
    print(
        f"\nattention, one layer, {HEADS} heads on {KV_HEADS} of {DIM}, bf16\n"
        " seqs  rows   past        µs    GB/s  of read  GFLOP/s"
    )
    cases = [(1, 1, 512), (16, 1, 512), (1, 512, 0)]
    if not quick:
        cases += [(1, 1, 2048), (1, 1, 8000), (16, 1, 2048), (1, 512, 2048), (1, 512, 5488)]
    for sequences, rows, past in sorted(cases, key=lambda case: (case[1], case[0], case[2])):
        attend(sequences, rows, past, repeat, bandwidth)


if __name__ == "__main__":
    main()
