"""What can be measured, how it is started for a workload, and how it is asked.

A target's name is `KIND[:VARIANT[/KV]]` (``tenure:bf16``, ``llamacpp:q4_0``, ``openvino:bf16/u4``, ``vllm``), KV being
the form of keys and values where it is not the usual one, or `[NAME=]URL` of a completions server. Peers are looked for
under ``$BENCH_PEERS`` (default /work/peers), as ``bench/peers.sh`` leaves them there.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.process import Child, free_port
from tenure.cli.bench_client import REQUEST_TIMEOUT_S, Endpoint, HttpEndpoint, Reply, Workload

PEERS = Path(os.environ.get("BENCH_PEERS", "/work/peers"))
DRIVERS = Path(__file__).parent / "drivers"
START_TIMEOUT_S = 240.0  # vLLM compiles for more than a minute
KV_BYTES_PER_TOKEN = 2 * 2 * 30 * 3 * 64  # K and V, bf16, of SmolLM2-135M: 30 layers, 3 heads of 64
KV_BYTES = 2 << 30
BLOCK_TOKENS = {"openvino": 32, "vllm": 128}

DEFAULTS = {"tenure": ("auto", "bf16"), "llamacpp": ("bf16", "q4_0", "q4_1"), "vllm": ("bf16",), "openvino": ("bf16",)}
KV_FORMS = {"tenure": "auto", "llamacpp": "f16", "openvino": "u8"}  # the usual one of those that have several
PRECISION = {"auto": "4-bit", "int4": "4-bit", "q4_0": "4-bit", "q4_1": "4-bit", "q8_0": "int8"}


@dataclass(frozen=True, slots=True)
class Target:
    """One column of the table. `precision` is that of the weights: ``bf16``, ``int8``, ``4-bit`` or ``unknown``."""

    name: str
    kind: str
    variant: str
    precision: str
    kv: str = ""

    @property
    def ours(self) -> bool:
        """Whether this is Tenure, and not a peer."""
        return self.kind == "tenure"


def parse(names: str) -> list[Target]:
    """The targets of a comma-separated list; a kind without variant means its usual ones. ValueError on others."""
    targets = []
    for name in filter(None, names.split(",")):
        label, _, url = name.rpartition("=")
        if url.startswith("http://"):
            targets.append(Target(label or url, "url", url, "unknown"))
            continue
        kind, _, variant = name.partition(":")
        if kind not in DEFAULTS:
            raise ValueError(f"unknown target {name!r}: use {', '.join(DEFAULTS)} or [NAME=]http://host:port")
        variant, slash, kv = variant.partition("/")
        if slash and kind not in KV_FORMS:
            raise ValueError(f"{name!r}: the KV of {kind} cannot be chosen here")
        for chosen in (variant,) if variant else DEFAULTS[kind]:
            targets.append(Target(f"{kind}:{chosen}{slash}{kv}", kind, chosen, PRECISION.get(chosen, chosen), kv))
    return targets


def missing(target: Target) -> str | None:
    """What a target lacks on this machine; None when it can start."""
    needs: dict[str, tuple[Path, ...]] = {
        "llamacpp": (_llama_server(), _gguf(target.variant)),
        "vllm": (_python("vllm"), PEERS / "models/hf-bf16"),
        "openvino": (_python("openvino"), _ir(target.variant)),
    }
    lacking = [str(path) for path in needs.get(target.kind, ()) if not path.exists()]
    return f"not found: {', '.join(lacking)} (see bench/peers.sh)" if lacking else None


def _llama_server() -> Path:
    return PEERS / "llama-build/bin/llama-server"


def _gguf(variant: str) -> Path:
    return PEERS / f"models/{variant}.gguf"


def _ir(variant: str) -> Path:
    return PEERS / f"models/openvino-{'fp16' if variant == 'bf16' else variant}"


def _python(peer: str) -> Path:
    return PEERS / peer / "bin/python"


def command(target: Target, workload: Workload, port: int) -> list[str]:
    """The command line that serves `workload`. Equal commands, but for the port, need no restart between workloads."""
    room = workload.kv_tokens
    kv = target.kv or KV_FORMS.get(target.kind, "")
    if target.kind == "tenure":
        return [
            *(sys.executable, "-c", "from tenure.cli.main import main; main()", "serve"),
            *("--port", str(port), "--weights", target.variant, "--max-model-len", "8192", "--max-num-seqs", "64"),
            *("--kv-cache-memory-bytes", str(room * KV_BYTES_PER_TOKEN if room else KV_BYTES)),
            *("--kv-cache-dtype", kv, *(["--no-quality-gate"] if target.kv else [])),
        ]
    if target.kind == "llamacpp":
        # Slots split the context. Sixteen slots of 500 tokens cannot hold one request of W6; four of 1984 can.
        slots = 4 if room else workload.sequences
        cells = room // 256 * 256 if room else workload.context * slots
        cores = str(os.cpu_count())
        return [
            *(str(_llama_server()), "-m", str(_gguf(target.variant)), "--host", "127.0.0.1", "--port", str(port)),
            *("-t", cores, "-tb", cores, "-c", str(cells), "-np", str(slots), "--no-kv-unified", "-fa", "on"),
            *(
                "-ctk",
                kv,
                "-ctv",
                kv,
                *(["--slot-save-path", tempfile.gettempdir()] if target.kv else []),
                "-b",
                "2048",
                "-ub",
                "512",
            ),
        ]
    if target.kind == "vllm":
        blocks = [str(room // BLOCK_TOKENS["vllm"])] if room else []
        context = str(room // 2 if room else 8192)
        return [str(_python("vllm")), str(DRIVERS / "vllm_driver.py"), str(PEERS / "models/hf-bf16"), context, *blocks]
    bound = str(room // BLOCK_TOKENS["openvino"]) if room else "0"
    return [str(_python("openvino")), str(DRIVERS / "openvino_driver.py"), str(_ir(target.variant)), bound, kv]


class PipeEndpoint:
    """An engine in a driver process (`drivers/lines.py`)."""

    def __init__(self, child: Child) -> None:
        assert child.process.stdin is not None and child.process.stdout is not None
        self.child = child
        self.stdin, self.stdout = child.process.stdin, child.process.stdout
        self.waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.next_id = 0

    async def start(self) -> dict[str, Any]:
        """Wait for the driver's first line and listen from then on."""
        reader = asyncio.StreamReader(limit=1 << 24)
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), self.stdout)
        first = await reader.readline()
        self.listener = asyncio.create_task(self._listen(reader))
        return json.loads(first) if first else {}

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        while line := await reader.readline():
            reply = json.loads(line)
            self.waiting.pop(reply["id"]).set_result(reply)
        for future in self.waiting.values():
            future.set_result({"error": f"the driver ended: {self.child.dead}", "ids": []})

    async def complete(self, prompt: Sequence[int], output: int) -> Reply:
        """One greedy completion; what went wrong is in the reply's `error`."""
        self.next_id += 1
        number = self.next_id
        self.waiting[number] = future = asyncio.get_running_loop().create_future()
        sent = time.perf_counter()
        self.stdin.write(json.dumps({"id": number, "prompt": list(prompt), "output": output}).encode() + b"\n")
        self.stdin.flush()
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                got = await future
        except TimeoutError:
            return Reply(sent, error=f"no answer within {REQUEST_TIMEOUT_S:g} s")
        error = got["error"] or (None if got["ids"] else "no token came")
        return Reply(
            sent, got.get("first"), got.get("last"), got["ids"], tokens=len(got["ids"]), cached=got.get("cached"),
            finish=got.get("finish"), error=error,
        )  # fmt: skip


@dataclass(slots=True)
class Running:
    """A started target. `start_s`: from the start of the process until it took requests."""

    target: Target
    endpoint: Endpoint
    command: list[str]
    child: Child | None = None
    start_s: float | None = None
    version: str = ""

    async def overhead_mib(self) -> float | None:
        """Resident memory that is neither weights nor arena, MiB; None where the server does not tell those."""
        if not (self.child and self.target.ours and isinstance(self.endpoint, HttpEndpoint)):
            return None
        budget = json.loads((await self.endpoint.get("/v1/kv"))[1])["budget"]
        arena_mib = self.child.mapping_rss_mib(budget["arena_bytes"])
        weights_mib: float = budget["weight_bytes"] / 2**20
        return self.child.rss_mib() - weights_mib - arena_mib

    def pause(self) -> None:
        """Stop its clock while others are measured."""
        if self.child:
            self.child.pause()

    def resume(self) -> None:
        """Let it run on."""
        if self.child:
            self.child.resume()

    def stop(self) -> None:
        """End it."""
        if self.child:
            self.child.kill()


async def start(target: Target, workload: Workload, logs: Path) -> Running:
    """Start a target for a workload and wait until it takes requests. RuntimeError tells why it does not."""
    if target.kind == "url":
        served = HttpEndpoint(target.variant)
        await served.discover()
        return Running(target, served, [target.variant], version="as served")
    port = free_port()
    line = command(target, workload, port)
    piped = target.kind in ("vllm", "openvino")
    log = logs / f"{re.sub('[:/]', '-', target.name)}-{workload.name}.log"
    began = time.perf_counter()
    child = Child(line, log, env={}, piped=piped)
    comparable = [part for part in line if part != str(port)]
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            if piped:
                pipe = PipeEndpoint(child)
                version = (await pipe.start()).get("version", "")
                if not version:
                    raise RuntimeError(f"{target.name} did not start: {child.process.wait()} {child.dead}")
                return Running(target, pipe, comparable, child, time.perf_counter() - began, version)
            dialect = "llamacpp" if target.kind == "llamacpp" else "openai"
            http = HttpEndpoint(f"http://127.0.0.1:{port}", dialect=dialect)
            await _ready(http, "/ready" if target.ours else "/health", child)
            ready_s = time.perf_counter() - began
            await http.discover()
            return Running(target, http, comparable, child, ready_s, _version(target))
    except BaseException:
        child.kill()
        raise


async def _ready(endpoint: HttpEndpoint, path: str, child: Child) -> None:
    while (await endpoint.get(path))[0] != 200:
        if child.dead:
            raise RuntimeError(f"{' '.join(child.command[:6])}… did not start: {child.dead}")
        await asyncio.sleep(0.01)


def _version(target: Target) -> str:
    if target.ours:
        return importlib.metadata.version("tenure") if _installed("tenure") else "source tree"
    asked = subprocess.run([str(_llama_server()), "--version"], capture_output=True, text=True, timeout=20, check=False)
    return (asked.stdout + asked.stderr).splitlines()[0].removeprefix("version: ")


def _installed(package: str) -> bool:
    return any(True for _ in importlib.metadata.distributions(name=package))
