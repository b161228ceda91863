"""vLLM in process. usage: vllm_driver.py MODEL_DIR CONTEXT [BLOCKS]

Blocks of keys and values, when given, bound the room; else VLLM_CPU_KVCACHE_SPACE (GiB) does.
"""

from __future__ import annotations

import os
import sys

from lines import Live, claim_stdout, serve

REPLIES = claim_stdout()
os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{(os.cpu_count() or 1) - 1}")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

import vllm  # noqa: E402
from vllm.sampling_params import RequestOutputKind, SamplingParams  # noqa: E402


class Vllm:
    """The engine behind `vllm.LLM`, stepped by hand."""

    def __init__(self, model: str, context: int, blocks: int | None) -> None:
        room = {"num_gpu_blocks_override": blocks} if blocks else {}
        llm = vllm.LLM(
            model, dtype="bfloat16", max_model_len=context, max_num_seqs=64, enable_prefix_caching=True, **room
        )
        self.engine = llm.llm_engine
        self.live: dict[str, Live] = {}

    def add(self, live: Live, prompt: list[int], output: int) -> None:
        """Hand a request over; vLLM's refusals are ValueErrors."""
        params = SamplingParams(
            temperature=0, max_tokens=output, ignore_eos=True, output_kind=RequestOutputKind.DELTA, detokenize=False
        )
        self.engine.add_request(str(live.id), {"prompt_token_ids": prompt}, params)
        self.live[str(live.id)] = live

    def busy(self) -> bool:
        """Whether a request is under way."""
        return bool(self.live)

    def step(self) -> list[Live]:
        """One engine step; the requests that are over."""
        over = []
        for out in self.engine.step():
            live = self.live[out.request_id]
            live.take(list(out.outputs[0].token_ids))
            live.cached = out.num_cached_tokens if out.num_cached_tokens is not None else live.cached
            if out.finished:
                live.finish = out.outputs[0].finish_reason
                over.append(self.live.pop(out.request_id))
        return over


if __name__ == "__main__":
    blocks = int(sys.argv[3]) if len(sys.argv) > 3 else None
    serve(Vllm(sys.argv[1], int(sys.argv[2]), blocks), vllm.__version__, REPLIES)
