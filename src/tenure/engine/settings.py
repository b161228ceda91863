"""What the engine is started with, and how its memory budget becomes blocks."""

from __future__ import annotations

from dataclasses import dataclass, field

from tenure.device.arena import machine_bytes
from tenure.errors import BudgetError, ConfigError
from tenure.policy.registry import pressure
from tenure.spec import MIN_BLOCKS, ArenaLayout, KvGeometry, ModelShape
from tenure.tenants import Tenants
from tenure.types import Overflow

DEFAULT_BUDGET = 2 << 30


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The operator's choices that the engine carries out. Bytes, milliseconds, counts.

    At most one of `memory_bytes` (weights + arena) and `kv_cache_bytes` (arena alone) is given; neither: the smaller
    of 2 GiB and a quarter of the available memory for both together.
    """

    memory_bytes: int | None = None
    kv_cache_bytes: int | None = None
    kv_codec: str = "bf16"
    served_name: str | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_step_ms: float = 120.0
    max_queued_requests: int = 256
    max_queued_tokens: int = 1_000_000
    eviction: str = "gittins"
    pressure: str = "pause@95%"
    overflow: Overflow = "refuse"
    trim_steps: int = 4
    ghosts: int = 16_384
    tenants: Tenants = field(default_factory=Tenants)
    canary_steps: int = 0
    threads: int = 0


@dataclass(frozen=True, slots=True)
class Budget:
    """The memory plan, in bytes. The arena holds what is staged too."""

    total_bytes: int
    weight_bytes: int
    arena_bytes: int
    block_bytes: int
    """Of a stored block of the first group of layers: the pool counts in those."""
    layout: ArenaLayout

    @property
    def blocks(self) -> int:
        """Stored blocks that one sequence can have."""
        return self.layout.blocks


def plan_memory(settings: EngineSettings, shape: ModelShape, weight_bytes: int) -> Budget:
    """How many blocks the budget holds. BudgetError when fewer than two, or more memory than the machine has."""
    return budget_of(settings, KvGeometry.of(shape), weight_bytes, machine_bytes())


def budget_of(settings: EngineSettings, geometry: KvGeometry, weight_bytes: int, machine: int) -> Budget:
    """The same for what `geometry` makes of a block, on a machine of so many bytes."""
    if settings.memory_bytes is not None and settings.kv_cache_bytes is not None:
        raise ConfigError("memory", "give either a total budget or one for the KV cache, not both")
    param = "memory"
    if settings.kv_cache_bytes is not None:
        param = "kv_cache_memory_bytes"
        arena = settings.kv_cache_bytes
    else:
        total = settings.memory_bytes
        if total is None:
            total = min(DEFAULT_BUDGET, available_memory() // 4)
        arena = total - weight_bytes
    least = geometry.least_arena(settings.kv_codec)
    if arena < least:
        raise BudgetError(
            param,
            f"the budget leaves {max(0, arena):,} bytes for the KV cache beside {weight_bytes:,} bytes of weights; "
            f"{MIN_BLOCKS} blocks{' and what windows see' if len(geometry.parts()) > 1 else ''} need {least:,} bytes: "
            f"{least - arena:,} bytes more",
        )
    layout = geometry.layout(arena, settings.kv_codec, _recoded(settings, geometry))
    arena = layout.slabs * layout.slab_bytes
    if weight_bytes + arena > machine:
        raise BudgetError(
            param,
            f"the budget asks for {weight_bytes + arena:,} bytes, but this machine has {machine:,}",
        )
    return Budget(weight_bytes + arena, weight_bytes, arena, layout.block_bytes[0], layout)


def _recoded(settings: EngineSettings, geometry: KvGeometry) -> tuple[str, ...]:
    """The codecs that the pressure ladder recodes to. ConfigError when one would save nothing."""
    codecs = pressure(settings.pressure).codecs
    for name in codecs:
        if geometry.block_bytes(name) >= geometry.block_bytes(settings.kv_codec):
            raise ConfigError(
                "pressure",
                f"--pressure: step 'recode:{name}' saves nothing: blocks are stored as {settings.kv_codec} already; "
                f"recode to a codec of fewer bits than --kv-cache-dtype has, or leave the step out",
            )
    return codecs


def context_limit(settings: EngineSettings, shape: ModelShape) -> int:
    """Tokens of prompt and answer together. ConfigError when more are asked for than the model was made for."""
    asked = settings.max_model_len
    if asked is None:
        return shape.context_length
    if not 2 <= asked <= shape.context_length:
        raise ConfigError("max_model_len", f"max_model_len {asked} is not in 2..{shape.context_length} of this model")
    return asked


def available_memory() -> int:
    """Bytes that can be taken without pushing others out, as far as the kernel knows."""
    with open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return min(int(line.split()[1]) * 1024, machine_bytes())
    return machine_bytes()
