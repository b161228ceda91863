"""What OpenVINO's KV forms cost in quality. usage: openvino_kl.py IR_DIR FORM,FORM,…

stdin: JSON {"windows": [[ids]], "first": n}. stdout: one JSON object {FORM: {"kl", "top1", "bytes_per_token"}}, the
first form being what the others are compared with, over the rows after tokens first…end-1 of each window.

The pipeline that serves tells no distributions, so its own model is fed by hand: the transformation to paged attention
that GenAI makes, with caches of the very shapes and types it compiles to.
"""

from __future__ import annotations

import json
import math
import os
import sys
from typing import Any

from lines import claim_stdout

REPLIES = claim_stdout()

import numpy as np  # noqa: E402
import openvino  # noqa: E402
from openvino._offline_transformations import paged_attention_transformation  # noqa: E402

BLOCK, PIECE = 32, 128  # tokens


class Paged:
    """One compiled model and room for a sequence of `capacity` tokens."""

    def __init__(self, core: Any, model: Any, form: str, capacity: int) -> None:
        properties = {
            "INFERENCE_NUM_THREADS": os.cpu_count(),
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_PRECISION_HINT": "bf16",
            "KV_CACHE_PRECISION": form,
        }
        compiled = core.compile_model(model, "CPU", properties)
        self.request = compiled.create_infer_request()
        self.bytes_per_token, self.seen = 0.0, 0
        for source in compiled.inputs:
            name = source.get_any_name()
            if not name.startswith(("key_cache.", "value_cache.")):
                continue
            block = [side.get_length() for side in list(source.get_partial_shape())[1:]]
            kind = source.get_element_type()
            self.request.set_tensor(name, openvino.Tensor(kind, openvino.Shape([-(-capacity // BLOCK), *block])))
            self.bytes_per_token += math.prod(block) * kind.bitwidth / 8 / BLOCK

    def restart(self) -> None:
        """Begin another sequence."""
        self.seen = 0

    def feed(self, tokens: list[int]) -> Any:
        """Append tokens; log probabilities after each, f32[tokens, vocab]."""
        end = self.seen + len(tokens)
        blocks = -(-end // BLOCK)
        facts = {
            "input_ids": np.array(tokens, np.int64),
            "position_ids": np.arange(self.seen, end, dtype=np.int64),
            "max_context_len": np.array(end, np.int32),
            "past_lens": np.array([self.seen], np.int32),
            "subsequence_begins": np.array([0, len(tokens)], np.int32),
            "block_indices_begins": np.array([0, blocks], np.int32),
            "block_indices": np.arange(blocks, dtype=np.int32),
        }
        for name, value in facts.items():
            self.request.set_tensor(name, openvino.Tensor(value))
        self.request.infer()
        self.seen = end
        logits = self.request.get_tensor("logits").data.reshape(len(tokens), -1).astype(np.float32)
        logits -= logits.max(1, keepdims=True)
        logits -= np.log(np.exp(logits).sum(1, keepdims=True))
        return logits


def compare(directory: str, forms: list[str], asked: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Every form on the same windows, piece by piece side by side, so that few logits are held at a time."""
    windows: list[list[int]] = asked["windows"]
    core = openvino.Core()
    model = core.read_model(f"{directory}/openvino_model.xml")
    paged_attention_transformation(model)
    models = {form: Paged(core, model, form, max(map(len, windows))) for form in forms}
    kl, same, rows = dict.fromkeys(forms, 0.0), dict.fromkeys(forms, 0), 0
    for window in windows:
        for one in models.values():
            one.restart()
        for at in range(0, len(window), PIECE):
            found = {form: one.feed(window[at : at + PIECE]) for form, one in models.items()}
            after = slice(max(0, asked["first"] - at), len(window) - 1 - at)
            exact = found[forms[0]][after]
            chance, likeliest = np.exp(exact), exact.argmax(1)
            rows += len(exact)
            for form, logs in found.items():
                kl[form] += float((chance * (exact - logs[after])).sum(dtype=np.float64))
                same[form] += int((logs[after].argmax(1) == likeliest).sum())
    return {
        form: {"kl": kl[form] / rows, "top1": same[form] / rows, "bytes_per_token": models[form].bytes_per_token}
        for form in forms
    }


if __name__ == "__main__":
    REPLIES.write(json.dumps(compare(sys.argv[1], sys.argv[2].split(","), json.load(sys.stdin))) + "\n")
