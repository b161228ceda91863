"""The quality gate: what a KV codec costs this model, measured against bf16 on a text of many kinds."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from typing import Any

import numpy as np

from tenure.errors import ConfigError
from tenure.lab.probe import F32, Probe
from tenure.models.loader import Model
from tenure.spec import BLOCK_TOKENS, KvGeometry

EXACT = "bf16"
"""What the others are compared with."""
TEXTS = ("prose", "dialogue", "code", "tables", "notes")
WINDOW, CHUNK = 1024, 128
FULL_TOKENS, FIRST_TOKENS = 16_384, 2048
"""Measured by `tenure quality`, and by the first start of `tenure serve`."""
LEAST_TOKENS = 256
DEPTHS = (0.05, 0.25, 0.5, 0.75, 0.95)
RECALL_TOKENS = 1024
RUNS, RUN_TOKENS, RUN_TEMPERATURE = 48, 300, 0.85
"""Free runs. At a temperature of 0.7 one in seven of a small model ends in repetition whatever the codec, and two
codecs differ by chance; at 0.85 it is one in a hundred, so that a difference is the codec's."""
Progress = Callable[[str, float], None]
MakeProbe = Callable[[Model, str, int, int], Probe]


@dataclass(frozen=True, slots=True)
class Quality:
    """Of one codec. `retrieval` and `collapse` are None where only a short text was measured."""

    bits: float
    bytes_per_token: int
    ppl: float
    kl: float
    """Mean over tokens of KL(bf16 ‖ codec), in nats."""
    top1: float
    """Share of tokens for which the likeliest next one is bf16's."""
    retrieval: float | None = None
    """Share of planted facts' tokens that are the likeliest when asked for."""
    retrieval_by_depth: tuple[float, ...] = ()
    collapse: float | None = None
    """Share of free runs that end in repetition."""
    tokens: int = 0
    """Of text measured."""
    kl_of_one_bit: float | None = None
    """Of bf16, when all is measured: KL to itself with the least bit of one stored value changed. Weights that round
    activations to 8 bits amplify any difference to this; codecs below it cannot be told apart."""


@dataclass(frozen=True, slots=True)
class Floor:
    """What a codec must reach to serve."""

    kl: float = 0.025
    top1: float = 0.90
    collapse: float = 0.15
    """More repetition than bf16 has of itself."""

    def misses(self, found: Quality, exact: Quality | None = None) -> str:
        """Why `found` does not pass, empty when it does."""
        wrong = []
        if not found.kl <= self.kl:
            wrong.append(f"KL {found.kl:.4f} above {self.kl:g}")
        if not found.top1 >= self.top1:
            wrong.append(f"top-1 {found.top1:.3f} below {self.top1:g}")
        if exact and found.collapse is not None and exact.collapse is not None:
            more = found.collapse - exact.collapse
            if more > self.collapse + 1e-9:  # shares are not exact in binary: 0.2 - 0.05 > 0.15
                wrong.append(f"{more:.0%} more of its runs end in repetition, {self.collapse:.0%} are allowed")
        return ", ".join(wrong)


def floor(text: str) -> Floor:
    """Read `KL,TOP1`, as in 0.025,0.90. ValueError shows the form."""
    parts = text.split(",")
    try:
        kl, top1 = map(float, parts)
    except ValueError:
        raise ValueError("must be KL and top-1 agreement with a comma between, such as 0.025,0.90") from None
    if not (0 <= kl < math.inf and 0 <= top1 <= 1):
        raise ValueError("KL must be at least 0 and top-1 agreement from 0 to 1, such as 0.025,0.90")
    return Floor(kl, top1)


def shipped_text() -> str:
    """Prose, dialogue, code, tables and notes, written and generated for this project."""
    folder = resources.files("tenure.lab") / "text"
    return "\n\n".join((folder / f"{name}.txt").read_text(encoding="utf-8") for name in TEXTS)


def text_id(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def measure(
    model: Model,
    codecs: Sequence[str],
    text: str,
    *,
    quick: bool = False,
    progress: Progress = lambda stage, share: None,
    make: MakeProbe = Probe,
) -> dict[str, Quality]:
    """Every codec (bf16 always among them) on the text. `quick`: its kinds in short, perplexity, KL and top-1 only.

    ConfigError when the text is too short.
    """
    names = tuple(dict.fromkeys((EXACT, *codecs)))
    windows = _windows(model, text, FIRST_TOKENS if quick else FULL_TOKENS)
    share = 1.0 if quick else 0.7
    sums = {name: _Sums() for name in names}
    for n, window in enumerate(windows):
        progress("text", share * n / len(windows))
        _compare(model, window, sums, make)
    geometry = KvGeometry.of(model.shape)
    found = {}
    for n, name in enumerate(names):
        more: dict[str, Any] = {}
        if not quick:
            progress(f"retrieval and free runs, {name}", share + 0.3 * n / len(names))
            depths = retrieval(model, name, text, make)
            more = {
                "retrieval": sum(depths) / len(depths), "retrieval_by_depth": depths,
                "collapse": collapse(model, name, text, make),
            }  # fmt: skip
        if name == EXACT and not quick:
            more["kl_of_one_bit"] = one_bit(model, windows[::4], make)
        size = geometry.token_bytes(name)
        bits = 8 * geometry.block_bytes(name) / (2 * 32 * geometry.layers * geometry.kv_heads * geometry.head_dim)
        found[name] = sums[name].quality(bits, size, more)
    progress("done", 1.0)
    return found


def _windows(model: Model, text: str, limit: int) -> list[list[int]]:
    """Pieces of the text, spread over it so that every kind is among them."""
    tokens = model.tokenizer.encode(text, special=False, add_bos=False)
    if len(tokens) < LEAST_TOKENS:
        raise ConfigError("text", f"the text has {len(tokens)} tokens; at least {LEAST_TOKENS} are needed to measure")
    size = min(WINDOW if limit > FIRST_TOKENS else WINDOW // 2, model.shape.context_length, len(tokens))
    count = max(1, min(limit, len(tokens)) // size)
    step = (len(tokens) - size) // max(1, count - 1)
    return [tokens[n * step : n * step + size] for n in range(count)]


class _Sums:
    """What is added up over the tokens of the text."""

    def __init__(self) -> None:
        self.rows = self.same = 0
        self.loss = self.kl = 0.0

    def quality(self, bits: float, size: int, more: dict[str, Any]) -> Quality:
        rows = max(1, self.rows)
        ppl = math.exp(min(700.0, self.loss / rows))
        return Quality(bits, size, ppl, self.kl / rows, self.same / rows, tokens=self.rows, **more)


def _compare(model: Model, window: Sequence[int], sums: dict[str, _Sums], make: MakeProbe) -> None:
    """One window through every codec, chunk by chunk side by side, so that few logits are held at a time."""
    probes = {name: make(model, name, 1, len(window)) for name in sums}
    for at in range(0, len(window), CHUNK):
        piece, following = window[at : at + CHUNK], np.array(window[at + 1 : at + CHUNK + 1])
        likeliest = chance = None
        entropy = 0.0
        for name, probe in probes.items():
            logs = log_softmax(probe.feed([piece]))[: len(following)]
            if likeliest is None or chance is None:
                likeliest, chance = logs.argmax(1), np.exp(logs)
                entropy = _sum_of_products(chance, logs)
            held = sums[name]
            held.rows += len(following)
            held.loss -= float(logs[np.arange(len(following)), following].sum(dtype=np.float64))
            held.same += int((logs.argmax(1) == likeliest).sum())
            held.kl += 0.0 if name == EXACT else entropy - _sum_of_products(chance, logs)


class _Nudged(Probe):
    """bf16, but the least bit of the first stored value changes once its block is full."""

    def feed(self, tokens: Sequence[Sequence[int]], *, last_only: bool = False) -> F32:
        if self._lengths[0]:
            return super().feed(tokens, last_only=last_only)
        begun = super().feed([tokens[0][:BLOCK_TOKENS]])
        self.arena[0] ^= 1
        return np.concatenate([begun, super().feed([tokens[0][BLOCK_TOKENS:]])])


def one_bit(model: Model, windows: Sequence[Sequence[int]], make: MakeProbe) -> float:
    """KL that one changed bit makes: the floor under every codec's."""
    sums = {EXACT: _Sums(), "nudged": _Sums()}

    def choose(model: Model, name: str, count: int, capacity: int) -> Probe:
        return make(model, name, count, capacity) if name == EXACT else _Nudged(model, EXACT, count, capacity)

    for window in windows:
        _compare(model, window, sums, choose)
    return sums["nudged"].kl / max(1, sums["nudged"].rows)


def _sum_of_products(a: F32, b: F32) -> float:
    """Row by row in single precision, rows together in double."""
    return float(np.einsum("ij,ij->i", a, b).sum(dtype=np.float64))


def log_softmax(logits: F32) -> F32:
    """In place, f32[rows, vocab]."""
    logits -= logits.max(1, keepdims=True)
    logits -= np.log(np.exp(logits).sum(1, keepdims=True))
    return logits


_FACTS = (
    ("The code of the pump house is", " 4 7 1 9"), ("The captain of the Marigold is called", " Edmund Frost"),
    ("The spare key hangs behind the", " green barometer"), ("The ferry to Gull Rock leaves from pier", " seventeen"),
)  # fmt: skip


def retrieval(model: Model, name: str, text: str, make: MakeProbe) -> tuple[float, ...]:
    """Share of a planted fact's tokens that the model names when asked at the end, for each depth it was planted at."""

    def encode(words: str) -> list[int]:
        tokens: list[int] = model.tokenizer.encode(words, special=False, add_bos=False)
        return tokens

    hay = encode(text)
    length = min(RECALL_TOKENS, model.shape.context_length - 64, len(hay))
    found = []
    for depth in DEPTHS:
        right = count = 0
        for fact, answer in _FACTS:
            at, target = int(depth * length), encode(answer)
            prompt = [*hay[:at], *encode(f"\n{fact}{answer}.\n"), *hay[at:length], *encode(f"\n{fact}")]
            probe = make(model, name, 1, len(prompt) + len(target))
            logits = [probe.feed([prompt], last_only=True)]
            logits += [probe.feed([[token]], last_only=True) for token in target[:-1]]
            right += int((np.concatenate(logits).argmax(1) == np.array(target)).sum())
            count += len(target)
        found.append(right / count)
    return tuple(found)


def collapse(model: Model, name: str, text: str, make: MakeProbe) -> float:
    """Share of free runs whose end is the same few tokens again and again. Each run has luck of its own, the same for
    every codec."""
    tokens = model.tokenizer.encode(text, special=False, add_bos=False)
    step = max(1, len(tokens) // RUNS)
    prompts = [tokens[n * step : n * step + 64] for n in range(min(RUNS, len(tokens) // 64))]
    probe = make(model, name, len(prompts), 64 + RUN_TOKENS)
    luck = np.random.default_rng(7)
    logits = probe.feed(prompts, last_only=True)
    runs: list[list[int]] = [[] for _ in prompts]
    for _ in range(RUN_TOKENS):
        waits = luck.standard_exponential(logits.shape, np.float32)
        noise = np.log(np.maximum(waits, np.finfo(np.float32).tiny))
        chosen = (logits / np.float32(RUN_TEMPERATURE) - noise).argmax(1).tolist()
        for run, token in zip(runs, chosen, strict=True):
            run.append(token)
        logits = probe.feed([[token] for token in chosen], last_only=True)
    return sum(map(repeats, runs)) / len(runs)


def repeats(run: Sequence[int], tail: int = 96) -> bool:
    """Whether its last `tail` tokens are nearly all as they were one period of at most 32 tokens before."""
    end = run[-tail:]
    return any(
        sum(a == b for a, b in zip(end[period:], end, strict=False)) >= 0.9 * (len(end) - period)
        for period in range(1, min(33, len(end)))
    )


def to_json(found: dict[str, Quality]) -> dict[str, dict[str, Any]]:
    return {name: asdict(quality) for name, quality in found.items()}


def of_json(found: Any, where: str) -> Iterator[tuple[str, Quality]]:
    """What `to_json` gave. ConfigError when it is something else."""
    try:
        for name, values in found.items():
            by_depth = tuple(values.get("retrieval_by_depth", ()))
            yield name, Quality(**{**values, "retrieval_by_depth": by_depth})
    except (AttributeError, TypeError) as error:
        raise ConfigError("quality", f"{where}: no figures of a quality gate: {error}") from None
