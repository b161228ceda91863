"""KV in fewer bits, ours and theirs: ``python -m bench.kv_peers [--only speed|quality] [--weights bf16|4-bit]``.

Speed: 16 conversations of 2048 tokens each. Their prompts are sent once, so that every target holds them, and again in
each measured round, so that nearly all that is timed is decoding: tokens after the first, of all streams, from the
first token of any to the last of all. Over HTTP for Tenure and llama.cpp, in process for OpenVINO; targets in turn, the
others stopped; the best round of each counts.
``--ask`` waits for a line on stdin before the first round, so that the machine can be made quiet.

Quality: KL(16 bits ‖ KV form), each engine against its own 16-bit KV with the same weights, on windows of 1024 tokens
of the gate's text, over the rows after tokens 512…1022 of each. llama.cpp: llama-perplexity, from whose file the
windows are read. OpenVINO: `drivers/openvino_kl.py`. Tenure: the gate's own probe. With ``--weights 4-bit`` activations
are in 8 bits, in llama.cpp as here, and amplify any difference (docs/codecs.md has the floor); OpenVINO has no such
model here.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bench.process import Watch
from bench.targets import DRIVERS, KV_BYTES_PER_TOKEN, PEERS, Running, Target, missing, parse, start
from tenure import models
from tenure.cli.bench_client import REQUEST_TIMEOUT_S, VOCABULARY, HttpEndpoint, Workload
from tenure.lab import gate
from tenure.lab.probe import Probe
from tenure.models.loader import Model
from tenure.spec import KvGeometry

SEQUENCES, CONTEXT, OUTPUT = 16, 2048, 17
WINDOW, FIRST, PIECE = 1024, 512, 128  # llama-perplexity judges the second half of each window
LEAD_S = 900  # for one program that measures quality
FORMS = {
    "tenure": ("bf16", "int8", "k8v4", "int4"),
    "llamacpp": ("f16", "q8_0", "q4_0"),
    "openvino": ("bf16", "u8", "u4"),
}
WEIGHTS = {
    "bf16": {"tenure": "bf16", "llamacpp": "bf16", "openvino": "bf16"},
    "4-bit": {"tenure": "auto", "llamacpp": "q4_0"},
}
Prompts = Sequence[Sequence[int]]
LLAMA_BITS = {"f16": 16.0, "q8_0": 8.5, "q4_0": 4.5}


@dataclass(slots=True)
class Row:
    """What was measured of one target."""

    target: Target
    bytes_per_token: float = float("nan")
    kl: float = float("nan")
    top1: float = float("nan")
    rates: list[float] = field(default_factory=list)
    foreign: float = 0.0
    """The largest share of the processors that others took in a measured round."""


# --------------------------------------------------------------------------------------------------------------- speed


async def speed(rows: Sequence[Row], rounds: int, logs: Path, *, ask: bool) -> None:
    """Fill in `rates`. RuntimeError when a target does not serve all prompts."""
    rng = random.Random(5)
    prompts = [[rng.randrange(100, VOCABULARY) for _ in range(CONTEXT)] for _ in range(SEQUENCES)]
    workload = Workload("KV", "16 × 2048", "burst", OUTPUT, CONTEXT + 256, SEQUENCES, (prompts,))
    running: list[tuple[Row, Running]] = []
    try:
        for row in rows:
            one = await start(row.target, workload, logs)
            running.append((row, one))
            await _hold(one, prompts)
            one.pause()
            _say(f"{row.target.name} holds {SEQUENCES} × {CONTEXT} tokens")
        if ask:
            _say("ready")
            await asyncio.to_thread(sys.stdin.readline)
        for _ in range(rounds):
            for row, one in running:
                one.resume()
                async with Watch(one.child) as watch:
                    row.rates.append(await _rate(one, _asked(one, prompts)))
                one.pause()
                row.foreign = max(row.foreign, watch.foreign)
                _say(f"{row.target.name}: {row.rates[-1]:.1f} tokens/s, others took {watch.foreign:.0%}")
    finally:
        for _, one in running:
            one.stop()


def _asked(running: Running, prompts: Prompts) -> Prompts:
    """llama.cpp shares nothing between its slots: the same prompt in each is as good as different ones, and quicker to
    have there."""
    return [prompts[0]] * len(prompts) if running.target.kind == "llamacpp" else prompts


async def _hold(running: Running, prompts: Prompts) -> None:
    """Have all prompts computed and kept."""
    if running.target.kind != "llamacpp":
        await _rate(running, prompts)
        return
    assert isinstance(running.endpoint, HttpEndpoint)
    await running.endpoint.complete(prompts[0], 1)
    url, name = f"{running.endpoint.url}/slots", f"tenure-bench-{os.getpid()}"
    slots: list[dict[str, Any]] = await asyncio.to_thread(_json, url)
    told = {slot["id"]: await asyncio.to_thread(_json, f"{url}/{slot['id']}?action=save", name) for slot in slots}
    most = max(told, key=lambda slot: told[slot]["n_saved"])
    await asyncio.to_thread(_json, f"{url}/{most}?action=save", name)
    for slot in told:
        await asyncio.to_thread(_json, f"{url}/{slot}?action=restore", name)
    (Path(tempfile.gettempdir()) / name).unlink()


def _json(url: str, file: str | None = None) -> Any:
    """What a server answers to a GET, or to a POST that names a file."""
    body = None if file is None else json.dumps({"filename": file}).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S) as reply:
        return json.load(reply)


async def _rate(running: Running, prompts: Prompts) -> float:
    """Tokens a second of all streams together, from the first token of any to the last of all."""
    replies = await asyncio.gather(*(running.endpoint.complete(prompt, OUTPUT) for prompt in prompts))
    failed = [reply.error or f"{reply.tokens} tokens" for reply in replies if reply.error or reply.tokens != OUTPUT]
    if failed:
        raise RuntimeError(f"{running.target.name}: {len(failed)} of {len(replies)} failed: {failed[0]}")
    first, last = min(reply.first or 0.0 for reply in replies), max(reply.last or 0.0 for reply in replies)
    return len(replies) * (OUTPUT - 1) / (last - first)


# ------------------------------------------------------------------------------------------------------------- quality


def quality(rows: Sequence[Row], chunks: int) -> None:
    """Fill in KL, top-1 and bytes. Windows come from llama.cpp where it takes part, else from our own tokenizer."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.target.kind, []).append(row)
    with tempfile.TemporaryDirectory() as folder:
        windows = None
        if "llamacpp" in groups:
            windows = _llamacpp(groups["llamacpp"], chunks, Path(folder))
        model = models.load(str(models.find_default()), weights=_weights(groups))
        own = model.tokenizer.encode(gate.shipped_text(), special=False, add_bos=False)
        mine = [own[n * WINDOW : (n + 1) * WINDOW] for n in range(min(chunks, len(own) // WINDOW))]
        if windows is not None and windows != mine:
            raise SystemExit("llama.cpp and Tenure tokenise the text differently; their figures would not compare")
        if "openvino" in groups:
            _openvino(groups["openvino"], mine)
        if "tenure" in groups:
            _tenure(groups["tenure"], model, mine)


def _weights(groups: dict[str, list[Row]]) -> Any:
    return groups["tenure"][0].target.variant if "tenure" in groups else "bf16"


def _llamacpp(rows: Sequence[Row], chunks: int, folder: Path) -> list[list[int]]:
    """llama-perplexity on each form, the first being what the others are compared with. The windows it judged."""
    text, base = folder / "text", folder / "base"
    text.write_text(gate.shipped_text(), encoding="utf-8")
    cores = str(os.cpu_count())
    for n, row in enumerate(rows):
        kv = row.target.kv
        line = [
            *(str(PEERS / "llama-build/bin/llama-perplexity"), "-m", str(PEERS / f"models/{row.target.variant}.gguf")),
            *("-c", str(WINDOW), "-b", str(WINDOW), "-ub", str(WINDOW // 2), "-t", cores, "-fa", "on"),
            *("-ctk", kv, "-ctv", kv, "--kl-divergence-base", str(base)),
            *(["--kl-divergence"] if n else ["-f", str(text), "--chunks", str(chunks)]),
        ]
        told = subprocess.run(line, capture_output=True, text=True, timeout=LEAD_S, check=True)
        row.bytes_per_token = KV_BYTES_PER_TOKEN * LLAMA_BITS[kv] / 16
        row.kl, row.top1 = _told_by_llamacpp(told.stdout + told.stderr) if n else (0.0, 1.0)
        _say(f"{row.target.name}: KL {row.kl:.5f}")
    with base.open("rb") as saved:
        size, _, count = np.frombuffer(saved.read(20), np.uint32, 3, 8).tolist()
        tokens = np.frombuffer(saved.read(4 * size * count), np.int32)
    windows: list[list[int]] = tokens.reshape(count, size).tolist()
    return windows


def _told_by_llamacpp(output: str) -> tuple[float, float]:
    """Mean KL and the share of equal first choices. ValueError when it did not say."""
    kl, same = re.search(r"Mean +KLD: +(\S+)", output), re.search(r"Same top p: +(\S+)", output)
    if not (kl and same):
        raise ValueError(f"llama-perplexity told no KL: …{output[-600:]}")
    return float(kl[1]), float(same[1]) / 100


def _openvino(rows: Sequence[Row], windows: list[list[int]]) -> None:
    variant = "fp16" if rows[0].target.variant == "bf16" else rows[0].target.variant
    line = [
        *(
            str(PEERS / "openvino/bin/python"),
            str(DRIVERS / "openvino_kl.py"),
            str(PEERS / f"models/openvino-{variant}"),
        ),
        ",".join(row.target.kv for row in rows),
    ]
    asked = json.dumps({"windows": windows, "first": FIRST})
    told = subprocess.run(line, input=asked, capture_output=True, text=True, timeout=LEAD_S, check=True)
    found = json.loads(told.stdout)
    for row in rows:
        row.bytes_per_token, row.kl, row.top1 = (found[row.target.kv][key] for key in ("bytes_per_token", "kl", "top1"))
        _say(f"{row.target.name}: KL {row.kl:.5f}")


def _tenure(rows: Sequence[Row], model: Model, windows: list[list[int]]) -> None:
    """As the gate does it: piece by piece side by side."""
    geometry = KvGeometry.of(model.shape)
    kl, same, count = [0.0] * len(rows), [0] * len(rows), 0
    for window in windows:
        probes = [Probe(model, row.target.kv, 1, len(window)) for row in rows]
        for at in range(0, len(window), PIECE):
            after = slice(max(0, FIRST - at), len(window) - 1 - at)
            logs = [gate.log_softmax(probe.feed([window[at : at + PIECE]]))[after] for probe in probes]
            chance, likeliest = np.exp(logs[0]), logs[0].argmax(1)
            count += len(logs[0])
            for n, one in enumerate(logs):
                kl[n] += float((chance * (logs[0] - one)).sum(dtype=np.float64))
                same[n] += int((one.argmax(1) == likeliest).sum())
    for n, row in enumerate(rows):
        row.bytes_per_token = geometry.token_bytes(row.target.kv)
        row.kl, row.top1 = kl[n] / count, same[n] / count
        _say(f"{row.target.name}: KL {row.kl:.5f}")


# -------------------------------------------------------------------------------------------------------------- output


def show(rows: Sequence[Row]) -> None:
    """A line for each target, and what each rate is of the engine's own with 16 bits."""
    print(
        f"{'engine:weights/KV':<22}{'bytes/token':>12}{'KL':>10}{'top-1':>8}{'tok/s':>8}{'of 16 bits':>12}{'others':>8}"
    )
    exact: dict[str, float] = {}
    for row in rows:
        rate = max(row.rates) if row.rates else float("nan")
        own = exact.setdefault(row.target.kind, rate)
        size = f"{row.bytes_per_token:,.0f}" if row.bytes_per_token == row.bytes_per_token else "–"
        print(
            f"{row.target.name:<22}{size:>12}{row.kl:>10.5f}{row.top1:>8.4f}{rate:>8.1f}{rate / own:>12.2f}"
            f"{row.foreign:>8.0%}"
        )


def _say(line: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {line}", file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> int:
    """Measure and print; 2 for a wrong command line or when a target cannot start."""
    parser = argparse.ArgumentParser(prog="python -m bench.kv_peers", description=__doc__)
    parser.add_argument("--only", choices=("speed", "quality"))
    parser.add_argument("--weights", default="bf16", choices=tuple(WEIGHTS))
    parser.add_argument("--targets", help="KIND:VARIANT/KV, comma-separated; the first of a kind has its 16 bits")
    parser.add_argument("--rounds", type=int, default=3, help="of decoding, the best of which is shown (default 3)")
    parser.add_argument("--chunks", type=int, default=16, help="windows of text for quality (default 16)")
    parser.add_argument("--ask", action="store_true", help="wait for a line on stdin before the first measured round")
    asked = parser.parse_args(argv)
    usual = ",".join(f"{kind}:{form}/{kv}" for kind, form in WEIGHTS[asked.weights].items() for kv in FORMS[kind])
    try:
        targets = parse(asked.targets or usual)
        if odd := [target.name for target in targets if not target.kv]:
            raise ValueError(f"{', '.join(odd)}: name the form of KV, as in tenure:bf16/int8")
    except ValueError as wrong:
        print(wrong, file=sys.stderr)
        return 2
    lacking = {target.name: why for target in targets if (why := missing(target))}
    for name, why in lacking.items():
        _say(f"{name} skipped: {why}")
    rows = [Row(target) for target in targets if target.name not in lacking]
    if asked.only != "speed":
        quality(rows, asked.chunks)
    if asked.only != "quality":
        logs = Path(__file__).parent / "results/logs"
        logs.mkdir(parents=True, exist_ok=True)
        asyncio.run(speed(rows, asked.rounds, logs, ask=asked.ask))
    show(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
