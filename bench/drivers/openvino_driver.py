"""OpenVINO GenAI's continuous batching in process. usage: openvino_driver.py IR_DIR [BLOCKS [KV]]

Blocks (of 32 tokens), unless 0, bound the room for keys and values; else two GiB do. KV is their form: u8 unless given.
"""

from __future__ import annotations

import os
import sys

from lines import Live, claim_stdout, serve

REPLIES = claim_stdout()

import numpy as np  # noqa: E402
import openvino  # noqa: E402
import openvino_genai as genai  # noqa: E402


class OpenVino:
    """A ContinuousBatchingPipeline with prefix caching, stepped by hand."""

    def __init__(self, model: str, blocks: int, kv: str) -> None:
        settings = genai.SchedulerConfig()
        settings.enable_prefix_caching = True
        settings.dynamic_split_fuse = True
        settings.max_num_seqs = 64
        settings.max_num_batched_tokens = 2048
        settings.cache_size = 0 if blocks else 2
        if blocks:
            settings.num_kv_blocks = blocks
        properties = {
            "INFERENCE_NUM_THREADS": os.cpu_count(),
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_PRECISION_HINT": "bf16",
            "KV_CACHE_PRECISION": kv,
        }
        self.pipe = genai.ContinuousBatchingPipeline(model, settings, "CPU", properties)
        self.live: dict[int, tuple[Live, genai.GenerationHandle]] = {}

    def add(self, live: Live, prompt: list[int], output: int) -> None:
        """Hand a request over."""
        generation = genai.GenerationConfig()
        generation.max_new_tokens = generation.min_new_tokens = output
        generation.ignore_eos = True
        generation.do_sample = False
        ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
        self.live[live.id] = live, self.pipe.add_request(live.id, ids, generation)

    def busy(self) -> bool:
        """Whether a request is under way."""
        return bool(self.live)

    def step(self) -> list[Live]:
        """One step of the pipeline; the requests that are over."""
        if self.pipe.has_non_finished_requests():
            self.pipe.step()
        over = []
        for live, handle in list(self.live.values()):
            while handle.can_read():
                live.take([token for out in handle.read().values() for token in out.generated_ids])
            status = handle.get_status()
            if status != genai.GenerationStatus.RUNNING and not handle.can_read():
                live.finish = str(status)
                over.append(live)
                del self.live[live.id]
        return over


if __name__ == "__main__":
    blocks = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    kv = sys.argv[3] if len(sys.argv) > 3 else "u8"
    serve(OpenVino(sys.argv[1], blocks, kv), genai.__version__, REPLIES)
