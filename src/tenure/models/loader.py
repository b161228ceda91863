"""From a source to a decoder that runs: check, convert, feed. One way for every kind of source."""

from __future__ import annotations

import hashlib
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from tenure import _native
from tenure.errors import UnsupportedModel
from tenure.models import weights
from tenure.models.families import Config, norm_sizes
from tenure.models.kquants import KINDS
from tenure.models.sources import FUSED, Source, check_tensors, open_source
from tenure.models.template import ChatTemplate
from tenure.models.tokenizer import Tokenizer
from tenure.models.weights import FORMATS, GROUP, Format, Matrix
from tenure.spec import ModelShape

Weights = Literal["auto", "f32", "bf16", "int8", "int4"]
Progress = Callable[[str, float], None]
log = logging.getLogger("tenure.models")


@dataclass(frozen=True, slots=True)
class Model:
    """A model that is ready to run."""

    name: str
    source: Path
    fingerprint: str
    """Names config and weights as they are computed with; what was computed under another one can't be reused."""
    shape: ModelShape
    tokenizer: Tokenizer
    template: ChatTemplate
    decoder: _native.Decoder
    weights: str
    """The formats chosen, e.g. `int4 (Q4_1), int8 (Q8_0)`."""
    weight_bytes: int
    eos_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class Kept:
    """What became of a matrix: format and stored type, and, when rounded, the squares of what it lost and of it all."""

    label: str
    lost: float = 0.0
    whole: float = 0.0


def load(
    source: str,
    *,
    weights: Weights = "auto",
    kv_codec: str = "bf16",
    threads: int = 0,
    context: int | None = None,
    progress: Progress | None = None,
) -> Model:
    """A model ready to run. `source`: a .gguf file, a Hugging Face directory or a hub id. Raises ModelError.

    `weights`: `auto` keeps the 4 and 8 bit blocks of a GGUF bit for bit, its K-quants as what is nearest of ours (the
    log says how near), and rounds floats to bf16. `threads` 0: all
    cores. `context`: no sequence will be longer (None: than the model allows); it chooses between rope
    factors for short and for long contexts. `progress` is told a stage and the fraction of the whole that is done.
    """
    told = progress or (lambda stage, fraction: None)
    told("open", 0.0)
    opened = open_source(source, context)
    config = opened.info.config
    check_tensors(opened)
    told("tokenizer", 0.05)
    text, chat = opened.texts()
    decoder = _new_decoder(config, kv_codec, threads)
    kept = list(_feed(opened, decoder, weights, threads, told))
    chosen = [label for label, _ in Counter(one.label for one in kept).most_common()]
    _tell_losses(opened, kept)
    told("ready", 1.0)
    return Model(
        name=opened.info.name,
        source=opened.info.source,
        fingerprint=_fingerprint(opened, chosen),
        shape=config.shape,
        tokenizer=text,
        template=chat,
        decoder=decoder,
        weights=", ".join(chosen),
        weight_bytes=decoder.weight_bytes,
        eos_ids=text.eos_ids,
    )


def _new_decoder(config: Config, kv_codec: str, threads: int) -> _native.Decoder:
    s = config.shape
    return _native.Decoder(
        layers=s.layers,
        hidden=s.hidden,
        heads=s.heads,
        kv_heads=s.kv_heads,
        head_dim=s.head_dim,
        ffn=s.ffn,
        vocab=s.vocab,
        rms_eps=config.rms_eps,
        inv_freq=np.stack([rope.inv_freq() for rope in config.ropes]),
        rope_of_layer=np.array(config.rope_of_layer, np.int32),
        rope_scale=config.ropes[0].scale,
        windows=np.array([window or 0 for window in s.windows] or [0] * s.layers, np.int32),
        norms=config.family.norms,
        qk_norm=config.family.qk_norm,
        activation=config.family.activation,
        attention_scale=config.scales.attention,
        attention_cap=config.scales.attention_cap,
        logit_cap=config.scales.logit_cap,
        embedding_scale=config.scales.embedding,
        residual_scale=config.scales.residual,
        logit_scale=config.scales.logit,
        kv_codec=kv_codec,
        threads=threads,
    )


def _tell_losses(source: Source, kept: Sequence[Kept]) -> None:
    """Say in the log what a type of the file lost on its way into one of our formats."""
    for label in dict.fromkeys(one.label for one in kept if one.whole):
        lost = sum(one.lost for one in kept if one.label == label)
        whole = sum(one.whole for one in kept if one.label == label)
        log.info("%s: kept as %s, relative error %.2g", source.info.source, label, (lost / whole) ** 0.5)


def _feed(source: Source, decoder: _native.Decoder, wanted: Weights, threads: int, told: Progress) -> Iterator[Kept]:
    """Give the decoder every tensor, a layer per thread; yields what became of each matrix."""
    layers = source.info.shape.layers
    with ThreadPoolExecutor(threads or len(os.sched_getaffinity(0))) as pool:
        edges = pool.submit(_feed_edges, source, decoder, wanted)
        for i, kept in enumerate(pool.map(lambda i: _feed_layer(source, decoder, wanted, i), range(layers))):
            told("weights", 0.1 + 0.9 * i / layers)
            yield from kept
        yield from edges.result()


def _feed_edges(source: Source, decoder: _native.Decoder, wanted: Weights) -> list[Kept]:
    """The matrices before the first and after the last layer."""
    # Four bits cost these more quality than they save bytes, so they keep eight; GGUF files do the same.
    target: Weights = "int8" if wanted == "int4" else wanted
    table, kept_table = _matrix(source, ["embedding"], target)
    decoder.set_embedding(table.format, table.values, table.scale, table.min)
    decoder.set_norm("norm", _norm(source, "norm"))
    if "lm_head" not in source.tensors:
        return [kept_table]
    head, kept_head = _matrix(source, ["lm_head"], target)
    decoder.set_linear("lm_head", head.format, head.values, head.scale, head.min)
    return [kept_table, kept_head]


def _feed_layer(source: Source, decoder: _native.Decoder, wanted: Weights, layer: int) -> list[Kept]:
    every = []
    for name in norm_sizes(source.info.config):
        decoder.set_norm(f"layers.{layer}.{name}", _norm(source, f"layers.{layer}.{name}"))
    for name, parts in FUSED.items():
        names = [f"layers.{layer}.{part}" for part in parts]
        made, kept = _matrix(source, names, wanted)
        bias = _bias(source, names)
        decoder.set_linear(f"layers.{layer}.{name}", made.format, made.values, made.scale, made.min, bias)
        every.append(kept)
    return every


def _matrix(source: Source, names: Sequence[str], target: Weights) -> tuple[Matrix, Kept]:
    """The tensors `names` stacked, in the format wanted; and what they lost when the file's type is none of ours."""
    stored = [(source.tensors[name].bytes(), source.tensors[name].type) for name in names]
    made = _convert(source, names, [weights.decode(raw, kind, target) for raw, kind in stored], target)
    if not any(kind in KINDS for _, kind in stored):
        return made, Kept(made.label)
    return made, Kept(made.label, *weights.sampled_error(made, stored))


def _convert(source: Source, names: Sequence[str], parts: Sequence[Matrix], target: Weights) -> Matrix:
    """Under `auto` plain floats become bf16, blocks stay."""
    if target == "auto":
        floats = all(part.format in ("f32", "bf16") for part in parts)
        return weights.stack([weights.convert(part, "bf16") for part in parts] if floats else parts)
    assert target in FORMATS
    if target in ("int8", "int4") and parts[0].shape[1] % GROUP:
        raise UnsupportedModel(
            f"{source.info.source}: {names[0]} has {parts[0].shape[1]} columns, {target} needs a multiple of {GROUP}"
        )
    chosen: Format = target
    return weights.stack([weights.convert(part, chosen) for part in parts])


def _vector(source: Source, name: str) -> weights.F32:
    """A norm or bias, f32[n]."""
    tensor = source.tensors[name]
    values: weights.F32 = weights.to_f32(weights.decode(tensor.bytes(), tensor.type))[0]
    return values


def _norm(source: Source, name: str) -> weights.F32:
    return _vector(source, name) + np.float32(source.norm_offset)


def _bias(source: Source, names: Sequence[str]) -> weights.F32 | None:
    """The biases of the parts of a matrix, f32[rows]; zeros for a part without; None when no part has one."""
    found = [f"{name}.bias" in source.tensors for name in names]
    if not any(found):
        return None
    return np.concatenate(
        [
            _vector(source, f"{name}.bias") if has else np.zeros(source.tensors[name].shape[0], np.float32)
            for name, has in zip(names, found, strict=True)
        ]
    )


def _fingerprint(source: Source, chosen: Sequence[str]) -> str:
    """32 hex digits over headers, sizes, formats and a sample of every tensor's bytes.

    Cheap by design: reading all bytes of a large model would double its start. Another training run changes all
    weights and so the sample; a single flipped bit may pass.
    """
    digest = hashlib.blake2b(digest_size=16)
    digest.update(repr((source.info.config, source.info.file_bytes, list(chosen))).encode())
    digest.update(source.identity)
    for name, tensor in sorted(source.tensors.items()):
        raw = tensor.raw().reshape(-1)
        digest.update(f"{name} {tensor.shape} {tensor.type}".encode())
        digest.update(raw[:: max(1, raw.size // 1024)].tobytes())
    return digest.hexdigest()
